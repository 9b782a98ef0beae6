//! What the command line says about the definition of the metrics, and the commands that need no server.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use clap::{Command as Parser, Subcommand};
use pharos::metrics::catalog::listing::Form;
use pharos::metrics::catalog::{Mode, Overrides, Setting};

use super::TraceCommand;
use pharos_torchserve::Arguments;

/// One `--metrics-config`.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricsConfig {
    /// The file that defines the metrics.
    File(PathBuf),
    /// Triton's form, a change of what the file says.
    Setting(Setting),
}

impl MetricsConfig {
    /// `KEY=VALUE` if what is before the first `=` could be a key; else a file. `./a=b.yaml` is a file in any case.
    pub(super) fn parse(text: OsString) -> Result<Self, String> {
        let setting = text.to_str().and_then(|text| text.split_once('='));
        match setting.filter(|(key, _)| key.chars().all(|c| c.is_ascii_lowercase() || c == '_')) {
            Some((key, value)) => Setting::parse(key, value).map(Self::Setting),
            None if text.is_empty() => Err("allowed are a file, or KEY=VALUE".to_owned()),
            None => Ok(Self::File(text.into())),
        }
    }
}

/// The last file that is named, and everything else that is said over it.
pub(super) fn definition(configs: &[MetricsConfig], mode: Option<Mode>) -> (Option<PathBuf>, Overrides) {
    let (mut file, mut overrides) = (None, Overrides { settings: Vec::new(), mode });
    for config in configs {
        match config {
            MetricsConfig::File(path) => file = Some(path.clone()),
            MetricsConfig::Setting(setting) => overrides.settings.push(setting.clone()),
        }
    }
    (file, overrides)
}

pub(super) fn mode(text: &str) -> Result<Mode, String> {
    Mode::from_name(text).ok_or_else(|| format!("allowed are {}", Mode::NAMES.join(", ")))
}

/// TorchServe's variables that mean the same as a flag, with the flag's identifier.
const TORCHSERVE: [(&str, &str); 4] = [
    ("TS_METRICS_CONFIG", "metrics-config"),
    ("TS_METRICS_MODE", "metrics-mode"),
    ("TS_MODEL_METRICS_AUTO_DETECT", "model-metrics-auto-detect"),
    ("TS_ENABLE_METRICS_API", "allow-metrics"),
];

/// Lets a flag be given by TorchServe's variable where its own one is not set. `is_set` says which variables are.
pub(super) fn with_torchserves_variables(parser: Parser, is_set: impl Fn(&OsStr) -> bool) -> Parser {
    TORCHSERVE.iter().fold(parser, |parser, (variable, flag)| {
        parser.mut_arg(flag, |arg| {
            let own = arg.get_env().is_some_and(&is_set);
            if !own && is_set(OsStr::new(variable)) { arg.env(variable) } else { arg }
        })
    })
}

/// A command in place of serving.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Look at definitions of metrics; no server is needed
    #[command(subcommand)]
    Metrics(MetricsCommand),
    /// Look at trace files; no server is needed
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Serve as TorchServe does: its arguments, its config.properties, its archives, its endpoints
    #[command(name = "torchserve")]
    TorchServe(Box<Arguments>),
}

/// What to do with a definition of metrics.
#[derive(Clone, Debug, Subcommand)]
pub enum MetricsCommand {
    /// Say whether a metrics.yaml is right; if not, where and why, and exit with 1
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// List the metrics that a metrics.yaml defines
    List {
        /// The file [default: the metrics.yaml built in]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// table, json or markdown
        #[arg(long, value_name = "FORMAT", default_value = "table", value_parser = form)]
        format: Form,
    },
}

fn form(text: &str) -> Result<Form, String> {
    Form::from_name(text).ok_or_else(|| format!("allowed are {}", Form::NAMES.join(", ")))
}
