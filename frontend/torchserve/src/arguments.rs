//! The arguments of TorchServe's launcher, with its names; whatever stands after `--` is this server's own.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args};

/// What `torchserve` is told.
#[derive(Clone, Debug, Default, Args)]
#[command(disable_version_flag = true)]
pub struct Arguments {
    /// Print the version
    #[arg(short = 'v', long = "version", action = ArgAction::SetTrue)]
    pub version: bool,
    /// Start the server; this is what happens anyway
    #[arg(long, conflicts_with = "stop")]
    pub start: bool,
    /// Stop the server that was started last
    #[arg(long)]
    pub stop: bool,
    /// Do not go to the background
    #[arg(long)]
    pub foreground: bool,
    /// The configuration [default: TS_CONFIG_FILE, else the newest snapshot, else config.properties]
    #[arg(long = "ts-config", value_name = "FILE")]
    pub ts_config: Option<PathBuf>,
    /// Where archives are looked for by name
    #[arg(long = "model-store", value_name = "DIR")]
    pub model_store: Option<PathBuf>,
    /// Without effect: workflows are not served
    #[arg(long = "workflow-store", value_name = "DIR")]
    pub workflow_store: Option<PathBuf>,
    /// What is registered at the start: archives by name or URL, or all
    #[arg(long, value_name = "[NAME=]URL", num_args = 1..)]
    pub models: Vec<String>,
    /// Without effect: layouts of log4j are not read
    #[arg(long = "log-config", value_name = "FILE")]
    pub log_config: Option<PathBuf>,
    /// Without effect: handlers in C++ are not run
    #[arg(long = "cpp-log-config", value_name = "FILE")]
    pub cpp_log_config: Option<PathBuf>,
    /// Neither write snapshots of the configuration nor start from one
    #[arg(long = "no-config-snapshots", visible_alias = "ncs")]
    pub no_config_snapshots: bool,
    /// Without effect: plugins in Java are not run
    #[arg(long = "plugins-path", visible_alias = "ppath", value_name = "DIR")]
    pub plugins_path: Option<PathBuf>,
    /// Ask for no tokens
    #[arg(long = "disable-token-auth")]
    pub disable_token_auth: bool,
    /// Let models be registered and unregistered
    #[arg(long = "enable-model-api")]
    pub enable_model_api: bool,
    /// Options of pharos itself, as `pharos --help` lists them
    #[arg(value_name = "OPTIONS", last = true)]
    pub options: Vec<OsString>,
}
