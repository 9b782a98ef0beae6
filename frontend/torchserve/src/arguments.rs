//! The arguments of TorchServe's launcher, under its names. Arguments after `--` are options of
//! this server.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args};

/// The arguments of `torchserve`.
#[derive(Clone, Debug, Default, Args)]
#[command(disable_version_flag = true)]
pub struct Arguments {
    /// Print the version
    #[arg(short = 'v', long = "version", action = ArgAction::SetTrue)]
    pub version: bool,
    /// Start the server; this is the default
    #[arg(long, conflicts_with = "stop")]
    pub start: bool,
    /// Stop the running server
    #[arg(long)]
    pub stop: bool,
    /// Run in the foreground
    #[arg(long)]
    pub foreground: bool,
    /// The configuration [default: TS_CONFIG_FILE, else the newest snapshot, else
    /// config.properties]
    #[arg(long = "ts-config", value_name = "FILE")]
    pub ts_config: Option<PathBuf>,
    /// The directory of model archives
    #[arg(long = "model-store", value_name = "DIR")]
    pub model_store: Option<PathBuf>,
    /// No effect: workflows are not supported
    #[arg(long = "workflow-store", value_name = "DIR")]
    pub workflow_store: Option<PathBuf>,
    /// The archives to register at startup: names or URLs, or all
    #[arg(long, value_name = "[NAME=]URL", num_args = 1..)]
    pub models: Vec<String>,
    /// No effect: log4j layouts are not read
    #[arg(long = "log-config", value_name = "FILE")]
    pub log_config: Option<PathBuf>,
    /// No effect: C++ handlers are not supported
    #[arg(long = "cpp-log-config", value_name = "FILE")]
    pub cpp_log_config: Option<PathBuf>,
    /// Neither write snapshots of the configuration nor start from one
    #[arg(long = "no-config-snapshots", visible_alias = "ncs")]
    pub no_config_snapshots: bool,
    /// No effect: Java plugins are not supported
    #[arg(long = "plugins-path", visible_alias = "ppath", value_name = "DIR")]
    pub plugins_path: Option<PathBuf>,
    /// Disable token authorization
    #[arg(long = "disable-token-auth")]
    pub disable_token_auth: bool,
    /// Allow registering and unregistering models
    #[arg(long = "enable-model-api")]
    pub enable_model_api: bool,
    /// No effect: the class of TorchServe's process. Programs such as SageMaker's toolkit find the
    /// server in the list of processes by it, so that a server in the background has it among its
    /// arguments
    #[arg(long = "main-class", value_name = "CLASS", hide = true)]
    pub main_class: Option<String>,
    /// Options of pharos, as listed by `pharos --help`
    #[arg(value_name = "OPTIONS", last = true)]
    pub options: Vec<OsString>,
}
