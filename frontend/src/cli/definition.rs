//! The flags of the metrics definition, and the commands that need no server.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Command as Parser, Subcommand};
use pharos::metrics::catalog::listing::Form;
use pharos::metrics::catalog::{Mode, Overrides, Setting};

use super::TraceCommand;
use pharos_os::client::ClientTls;
use pharos_torchserve::Arguments;

/// One `--metrics-config`.
#[derive(Clone, Debug, PartialEq)]
pub enum MetricsConfig {
    /// The file that defines the metrics.
    File(PathBuf),
    /// A setting in Triton's form, which overrides the file.
    Setting(Setting),
}

impl MetricsConfig {
    /// Parses `KEY=VALUE` if the text before the first `=` is a possible key, else a file.
    /// `./a=b.yaml` is always a file.
    pub(super) fn parse(text: OsString) -> Result<Self, String> {
        let setting = text.to_str().and_then(|text| text.split_once('='));
        match setting.filter(|(key, _)| key.chars().all(|c| c.is_ascii_lowercase() || c == '_')) {
            Some((key, value)) => Setting::parse(key, value).map(Self::Setting),
            None if text.is_empty() => Err("allowed are a file, or KEY=VALUE".to_owned()),
            None => Ok(Self::File(text.into())),
        }
    }
}

/// Returns the last file that is given, and the settings that override it.
pub(super) fn definition(
    configs: &[MetricsConfig],
    mode: Option<Mode>,
) -> (Option<PathBuf>, Overrides) {
    let mut file = None;
    let mut overrides = Overrides { settings: Vec::new(), mode };
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

/// TorchServe's environment variables, each with its equivalent flag.
const TORCHSERVE: [(&str, &str); 4] = [
    ("TS_METRICS_CONFIG", "metrics-config"),
    ("TS_METRICS_MODE", "metrics-mode"),
    ("TS_MODEL_METRICS_AUTO_DETECT", "model-metrics-auto-detect"),
    ("TS_ENABLE_METRICS_API", "allow-metrics"),
];

/// Reads a flag from TorchServe's environment variable if its own variable is not set.
pub(super) fn with_torchserves_variables(
    parser: Parser,
    is_set: impl Fn(&OsStr) -> bool,
) -> Parser {
    TORCHSERVE.iter().fold(parser, |parser, (variable, flag)| {
        parser.mut_arg(flag, |arg| {
            let own = arg.get_env().is_some_and(&is_set);
            if !own && is_set(OsStr::new(variable)) { arg.env(variable) } else { arg }
        })
    })
}

/// A command to run instead of the server.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Serve model files, models or repositories, with all options below
    Serve {
        /// Model file, model or repository, as for --model-repository
        #[arg(value_name = "PLACE")]
        places: Vec<PathBuf>,
    },
    /// Serve with Triton's defaults (metrics on port 8002) and short forms of flags, with all
    /// options below
    #[command(name = "tritonserver")]
    TritonServer,
    /// Exit with 0 if the server at an address is ready, for health checks of containers
    Health {
        /// Address of the HTTP listener; https:// before it for TLS [default: the server's
        /// variables PHAROS_HTTP_ADDRESS and PHAROS_HTTP_PORT, else 127.0.0.1:8000]
        #[arg(value_name = "HOST:PORT")]
        address: Option<String>,
        /// Name that the server's certificate must have [default: HOST]
        #[arg(long, value_name = "NAME")]
        server_name: Option<String>,
        /// The files for TLS.
        #[command(flatten)]
        certificates: Certificates,
    },
    /// Check, list and print metrics definitions, without a server
    #[command(subcommand)]
    Metrics(MetricsCommand),
    /// Print Prometheus rules for the service level objectives of a metrics definition, without a
    /// server
    #[command(subcommand)]
    Slo(SloCommand),
    /// Summarize and convert trace files, without a server
    #[command(subcommand)]
    Trace(TraceCommand),
    /// Show a server's metrics in the terminal, from /metrics alone; works with Triton too
    Top(Top),
    /// Serve TorchServe's endpoints, with its arguments, config.properties and model archives
    #[command(name = "torchserve")]
    TorchServe(Box<Arguments>),
}

/// `pharos top`.
#[derive(Clone, Debug, Args)]
pub struct Top {
    /// URL of the metrics
    #[arg(value_name = "URL", default_value = "http://localhost:8082/metrics")]
    url: String,
    /// Seconds between two scrapes
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    interval: Duration,
    /// Print one page as text after two scrapes, and end
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    certificates: Certificates,
}

/// The certificates of a command that is a client.
#[derive(Clone, Debug, Default, Args)]
pub struct Certificates {
    /// PEM file of the authorities that verify the server [default: those of the system]
    #[arg(long, value_name = "FILE")]
    root_cert: Option<PathBuf>,
    /// PEM file of this client's certificate
    #[arg(long, value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file of the certificate's private key
    #[arg(long, value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
}

impl Certificates {
    /// Returns the files.
    pub(crate) fn files(self) -> ClientTls {
        ClientTls { authorities: self.root_cert, identity: self.cert.zip(self.key) }
    }
}

impl Top {
    /// Returns the options of the program.
    pub fn options(&self) -> pharos_top::Options {
        let Self { url, interval, once, certificates } = self.clone();
        pharos_top::Options { url, interval, once, tls: certificates.files() }
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "allowed are 0.1 to 3600 seconds".to_owned())
}

/// Commands for metrics definitions.
#[derive(Clone, Debug, Subcommand)]
pub enum MetricsCommand {
    /// Check a metrics.yaml; print the position and reason of an error and exit with 1
    Check {
        /// File to check
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print the built-in metrics.yaml, to edit a copy and set it with --metrics-config
    Default,
    /// List the metrics that a metrics.yaml defines
    List {
        /// File to list [default: the built-in metrics.yaml]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Output format: table, json or markdown
        #[arg(long, value_name = "FORMAT", default_value = "table", value_parser = form)]
        format: Form,
    },
}

/// Commands for service level objectives.
#[derive(Clone, Debug, Subcommand)]
pub enum SloCommand {
    /// Print recording rules and multi-window burn-rate alerts for Prometheus
    Rules {
        /// File that defines the objectives in `slos`
        #[arg(long = "metrics-config", value_name = "FILE")]
        file: PathBuf,
    },
}

fn form(text: &str) -> Result<Form, String> {
    Form::from_name(text).ok_or_else(|| format!("allowed are {}", Form::NAMES.join(", ")))
}
