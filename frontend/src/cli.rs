//! The command line: Triton's flag names, each with an environment variable `PHAROS_<FLAG>` of the
//! same meaning (the command line takes precedence). Parsing yields plain [`Options`] and checks
//! all values that do not depend on the machine.
//!
//! Intended differences from Triton: `--metrics-port` defaults to 8082, TorchServe's metrics port,
//! so that scrapers of the `ts_*` families need no change; `--metrics-config` also accepts the YAML
//! file that defines the metrics, besides Triton's `key=value` settings.

mod accepted;
mod backend_setting;
mod cache;
mod clients;
pub mod cloud;
mod definition;
mod environment;
mod gpus;
mod logging;
mod models;
mod openai;
mod otlp;
mod rate_limit;
mod refusal;
mod tls;
mod trace;
mod values;
mod workers;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Parser};
use pharos::metrics::catalog::{Mode, Overrides};

use pharos_telemetry::metrics::push;
use pharos_telemetry::statsd::StatsdAddress;
use pharos_telemetry::trace::Tracing;

use environment::Start;
use values::{
    address, boolean, fractional_milliseconds, input_size, milliseconds, port, positive_seconds,
    seconds, statsd_address, whole,
};

pub use backend_setting::BackendSetting;
pub use cache::CacheConfig;
pub use clients::{ClientTimeouts, GrpcClients, HttpClients, ResponseTimes, SharedMemory, Tokens};
pub use definition::{Certificates, Command, MetricsCommand, MetricsConfig, SloCommand, Top};
pub use gpus::{GpuLimit, Gpus};
pub use logging::Log;
pub use models::{ControlMode, MemoryLimit, Models};
pub use openai::OpenAi;
pub use rate_limit::{RateLimit, RateLimiter};
pub use tls::{GrpcTls, HttpTls, MetricsTls, TlsOptions};
pub use trace::{TraceCommand, TraceConfig, TraceOptions};
pub use workers::{HostPolicies, Workers};

const GENERAL: &str = "Server";
const MODELS: &str = "Model repository";
const WORKERS: &str = "Workers";
const CACHE: &str = "Response cache";
const HTTP: &str = "HTTP";
const GRPC: &str = "gRPC";
const METRICS: &str = "Metrics";
const TSLOG: &str = "Metric logs";
const LOG: &str = "Logging";
const TRACE: &str = "Tracing";

/// The options of the server.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "pharos",
    version,
    about = "Pharos: a metrics-centric inference server (KServe v2 over HTTP and gRPC)",
    long_about = None,
    max_term_width = 120,
    args_override_self = true,
    subcommand_negates_reqs = true,
    disable_help_subcommand = true,
    after_help = "BOOL is true, false, on, off, yes, no, 1 or 0. Each flag can also be set by its environment variable.\n\
                  `pharos tritonserver [OPTIONS]`, or a link to it named tritonserver, has Triton's defaults (metrics port 8002)."
)]
pub struct Options {
    /// General options of the server.
    #[command(flatten)]
    pub general: General,
    /// Shared memory of clients.
    #[command(flatten)]
    pub shared_memory: SharedMemory,
    /// The model repository.
    #[command(flatten)]
    pub models: Models,
    /// The processes that run models.
    #[command(flatten)]
    pub workers: Workers,
    /// Limits on the use of GPUs.
    #[command(flatten)]
    pub gpus: Gpus,
    /// The rate limiter.
    #[command(flatten)]
    pub rate_limiter: RateLimiter,
    /// The CPU affinity of instances.
    #[command(flatten)]
    pub host_policies: HostPolicies,
    /// Flags of Triton without effect.
    #[command(flatten)]
    accepted: accepted::Accepted,
    /// The response cache.
    #[command(flatten)]
    pub response_cache: ResponseCache,
    /// The HTTP listener.
    #[command(flatten)]
    pub http: Http,
    /// TLS of the HTTP listener.
    #[command(flatten)]
    pub http_tls: HttpTls,
    /// Limits and settings of HTTP connections.
    #[command(flatten)]
    pub http_clients: HttpClients,
    /// The gRPC listener.
    #[command(flatten)]
    pub grpc: Grpc,
    /// TLS of the gRPC listener.
    #[command(flatten)]
    pub grpc_tls: GrpcTls,
    /// Limits and settings of gRPC connections.
    #[command(flatten)]
    pub grpc_clients: GrpcClients,
    /// Access control.
    #[command(flatten)]
    pub tokens: Tokens,
    /// Client timeouts.
    #[command(flatten)]
    pub client_timeouts: ClientTimeouts,
    /// The times of requests in their answers.
    #[command(flatten)]
    pub response_times: ResponseTimes,
    /// The metrics and their listener.
    #[command(flatten)]
    pub metrics: Metrics,
    /// TLS of the metrics listener.
    #[command(flatten)]
    pub metrics_tls: MetricsTls,
    /// Metric logs.
    #[command(flatten)]
    pub tslog: Tslog,
    /// Logging.
    #[command(flatten)]
    pub log: Log,
    /// Tracing.
    #[command(flatten)]
    pub trace: TraceOptions,
    /// OpenAI's API.
    #[command(flatten)]
    pub openai: OpenAi,
    /// The endpoints of Amazon SageMaker.
    #[command(flatten)]
    pub sagemaker: cloud::SageMaker,
    /// The endpoints of Google Vertex AI.
    #[command(flatten)]
    pub vertex_ai: cloud::VertexAi,
    /// A message for each environment variable and flag that is ignored.
    #[arg(skip)]
    ignored: Vec<String>,
    /// The flags that were set by environment variables.
    #[arg(skip)]
    origins: refusal::Origins,
    /// The command to run instead of the server.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// General options of the server.
#[derive(Clone, Debug, Args)]
pub struct General {
    /// Name of the server in its metadata; clients of Triton expect "triton"
    #[arg(
        long, value_name = "NAME", default_value = "triton", env = "PHAROS_ID",
        help_heading = GENERAL
    )]
    pub id: String,
    /// Seconds to wait at exit for requests in flight and running sequences
    #[arg(
        long, value_name = "SECONDS", default_value = "30", env = "PHAROS_EXIT_TIMEOUT_SECS",
        value_parser = seconds, help_heading = GENERAL
    )]
    pub exit_timeout_secs: Duration,
    /// Seconds to continue serving at exit while readiness checks already fail, so that load
    /// balancers remove the server
    #[arg(
        long, value_name = "SECONDS", default_value = "0", env = "PHAROS_EXIT_DELAY_SECS",
        value_parser = seconds, help_heading = GENERAL
    )]
    pub exit_delay_secs: Duration,
    /// Exit if a model cannot be loaded at start
    #[arg(
        long, value_name = "BOOL", default_value = "true", default_missing_value = "true",
        num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_EXIT_ON_ERROR",
        value_parser = boolean, help_heading = GENERAL
    )]
    pub exit_on_error: bool,
    /// Report the server as ready only while all models are ready; if false, once the load at the
    /// start has ended
    #[arg(
        long, value_name = "BOOL", default_value = "true", default_missing_value = "true",
        num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_STRICT_READINESS",
        value_parser = boolean, help_heading = GENERAL
    )]
    pub strict_readiness: bool,
}

/// The response cache.
#[derive(Clone, Debug, Args)]
pub struct ResponseCache {
    /// Cache for responses of models with response_cache { enable: true }: in this process
    /// (local,size=BYTES) or in a Redis shared by several servers
    /// (redis,host=HOST,port=PORT[,user=,password=,db=,ttl=SECONDS,timeout_ms=]). With
    /// single_flight=true, concurrent identical requests are executed once. May be repeated to add
    /// settings, or given as a list separated by ';'
    #[arg(
        id = "cache-config", long = "cache-config", value_name = "NAME,KEY=VALUE",
        env = "PHAROS_CACHE_CONFIG", value_parser = cache::config, value_delimiter = ';',
        help_heading = CACHE
    )]
    configs: Vec<CacheConfig>,
    /// Deprecated: use --cache-config local,size=BYTES. 0 disables the cache
    #[arg(
        id = "response-cache-byte-size", long = "response-cache-byte-size", value_name = "BYTES",
        env = "PHAROS_RESPONSE_CACHE_BYTE_SIZE", value_parser = whole(0..=u64::MAX),
        help_heading = CACHE
    )]
    byte_size: Option<u64>,
}

/// The HTTP listener.
#[derive(Clone, Debug, Args)]
pub struct Http {
    /// Enable the HTTP listener
    #[arg(
        id = "allow-http", long = "allow-http", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_ALLOW_HTTP", value_parser = boolean, help_heading = HTTP
    )]
    pub allow: bool,
    /// Address to listen on
    #[arg(
        id = "http-address", long = "http-address", value_name = "ADDRESS",
        default_value = "0.0.0.0", env = "PHAROS_HTTP_ADDRESS", value_parser = address,
        help_heading = HTTP
    )]
    pub address: IpAddr,
    /// Port to listen on; 0 lets the system choose
    #[arg(
        id = "http-port", long = "http-port", value_name = "PORT", default_value_t = 8000,
        env = "PHAROS_HTTP_PORT", value_parser = port, help_heading = HTTP
    )]
    pub port: u16,
    /// Maximum size in bytes of a request's JSON and of its binary data, each
    #[arg(
        id = "http-max-input-size", long = "http-max-input-size", value_name = "BYTES",
        default_value_t = 64 << 20, env = "PHAROS_HTTP_MAX_INPUT_SIZE", value_parser = input_size,
        help_heading = HTTP
    )]
    pub max_input_size: u64,
    /// Restrict APIs to requests that have the header KEY with VALUE: API[,API...]:KEY=VALUE; may
    /// be repeated
    #[arg(
        id = "http-restricted-api", long = "http-restricted-api", value_name = "RULE",
        env = "PHAROS_HTTP_RESTRICTED_API", help_heading = HTTP
    )]
    pub restricted: Vec<String>,
}

/// The gRPC listener.
#[derive(Clone, Debug, Args)]
pub struct Grpc {
    /// Enable the gRPC listener
    #[arg(
        id = "allow-grpc", long = "allow-grpc", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_ALLOW_GRPC", value_parser = boolean, help_heading = GRPC
    )]
    pub allow: bool,
    /// Address to listen on
    #[arg(
        id = "grpc-address", long = "grpc-address", value_name = "ADDRESS",
        default_value = "0.0.0.0", env = "PHAROS_GRPC_ADDRESS", value_parser = address,
        help_heading = GRPC
    )]
    pub address: IpAddr,
    /// Port to listen on; 0 lets the system choose
    #[arg(
        id = "grpc-port", long = "grpc-port", value_name = "PORT", default_value_t = 8001,
        env = "PHAROS_GRPC_PORT", value_parser = port, help_heading = GRPC
    )]
    pub port: u16,
    /// Maximum size in bytes of a message [default: 2147483647 as received, 67108864 after
    /// decompression]
    #[arg(
        id = "grpc-max-input-size", long = "grpc-max-input-size", value_name = "BYTES",
        env = "PHAROS_GRPC_MAX_INPUT_SIZE",
        value_parser = clap::value_parser!(u64).range(1..=0x7fff_ffff), help_heading = GRPC
    )]
    pub max_input_size: Option<u64>,
    /// Restrict protocols to calls that have the header triton-grpc-protocol-KEY with VALUE:
    /// PROTOCOL[,PROTOCOL...]:KEY=VALUE; may be repeated
    #[arg(
        id = "grpc-restricted-protocol", long = "grpc-restricted-protocol", value_name = "RULE",
        env = "PHAROS_GRPC_RESTRICTED_PROTOCOL", help_heading = GRPC
    )]
    pub restricted: Vec<String>,
}

/// The metrics and their listener.
#[derive(Clone, Debug, Args)]
pub struct Metrics {
    /// Enable the metrics listener
    #[arg(
        id = "allow-metrics", long = "allow-metrics", value_name = "BOOL", default_value = "true",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_ALLOW_METRICS", value_parser = boolean, help_heading = METRICS
    )]
    pub allow: bool,
    /// Address to listen on [default: the address of --http-address]
    #[arg(
        id = "metrics-address", long = "metrics-address", value_name = "ADDRESS",
        env = "PHAROS_METRICS_ADDRESS", value_parser = address, help_heading = METRICS
    )]
    pub address: Option<IpAddr>,
    /// Port to listen on; 0 lets the system choose
    #[arg(
        id = "metrics-port", long = "metrics-port", value_name = "PORT", default_value_t = 8082,
        env = "PHAROS_METRICS_PORT", value_parser = port, help_heading = METRICS
    )]
    pub port: u16,
    /// File that defines the metrics [default: the built-in metrics.yaml], or a setting that
    /// overrides it: KEY=VALUE. May be repeated, or given as a list separated by ';'. Settings:
    /// counter_latencies, histogram_latencies, summary_latencies (BOOL), summary_quantiles (for
    /// example 0.5:0.05,0.9:0.01), also_as (vllm: vLLM's names for the metrics of language
    /// models). SIGHUP reloads the file
    #[arg(
        id = "metrics-config", long = "metrics-config", value_name = "FILE|SETTING",
        env = "PHAROS_METRICS_CONFIG",
        value_parser = OsStringValueParser::new().try_map(MetricsConfig::parse),
        value_delimiter = ';', help_heading = METRICS
    )]
    pub config: Vec<MetricsConfig>,
    /// How metrics are exported: tslog, prometheus, both, log (the same as tslog) or legacy;
    /// overrides the definition file [default: both if a log directory or --tslog-stdout is given,
    /// else prometheus]
    #[arg(
        id = "metrics-mode", long = "metrics-mode", value_name = "MODE",
        env = "PHAROS_METRICS_MODE", value_parser = definition::mode, help_heading = METRICS
    )]
    pub mode: Option<Mode>,
    /// Register metrics that models report and the definition file lacks
    #[arg(
        id = "model-metrics-auto-detect", long = "model-metrics-auto-detect", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_MODEL_METRICS_AUTO_DETECT", value_parser = boolean,
        help_heading = METRICS
    )]
    pub auto_detect: bool,
    /// Leave counters at 0, and histograms and summaries without observations, out of scrapes
    #[arg(
        id = "metrics-omit-idle", long = "metrics-omit-idle", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_METRICS_OMIT_IDLE", value_parser = boolean,
        help_heading = METRICS
    )]
    pub omit_idle: bool,
    /// Maximum number of label sets of a metric; further ones share one series whose labels are
    /// all "other"
    #[arg(
        id = "metrics-max-series", long = "metrics-max-series", value_name = "N",
        default_value_t = 10_000, env = "PHAROS_METRICS_MAX_SERIES",
        value_parser = whole(1..=u32::MAX), help_heading = METRICS
    )]
    pub max_series: u32,
    /// Receive StatsD datagrams at HOST:PORT (UDP) or unix:PATH (Unix datagram socket); senders
    /// are not authenticated
    #[arg(
        id = "statsd-address", long = "statsd-address", value_name = "ADDRESS",
        env = "PHAROS_STATSD_ADDRESS", value_parser = statsd_address, help_heading = METRICS
    )]
    pub statsd: Option<StatsdAddress>,
    /// URL of an OpenTelemetry collector that all metrics are pushed to, for example
    /// http://localhost:4318/v1/metrics. The variables OTEL_EXPORTER_OTLP_* set protocol, headers,
    /// compression and certificates
    #[arg(
        id = "otlp-metrics-endpoint", long = "otlp-metrics-endpoint", value_name = "URL",
        env = "PHAROS_OTLP_METRICS_ENDPOINT", help_heading = METRICS
    )]
    pub otlp_endpoint: Option<String>,
    /// Measure the host, the server's processes and the workers. TorchServe's
    /// disable_system_metrics sets this flag and --allow-gpu-metrics to false
    #[arg(
        id = "allow-cpu-metrics", long = "allow-cpu-metrics", value_name = "BOOL",
        default_value = "true", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_ALLOW_CPU_METRICS", value_parser = boolean,
        help_heading = METRICS
    )]
    pub allow_cpu: bool,
    /// Measure NVIDIA GPUs, if present
    #[arg(
        id = "allow-gpu-metrics", long = "allow-gpu-metrics", value_name = "BOOL",
        default_value = "true", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_ALLOW_GPU_METRICS", value_parser = boolean,
        help_heading = METRICS
    )]
    pub allow_gpu: bool,
    /// Milliseconds between measurements of the host, processes and GPUs
    #[arg(
        id = "metrics-interval-ms", long = "metrics-interval-ms", value_name = "MILLISECONDS",
        default_value = "2000", env = "PHAROS_METRICS_INTERVAL_MS",
        value_parser = fractional_milliseconds, help_heading = METRICS
    )]
    pub interval: Duration,
    /// Seconds between log lines of each of TorchServe's system metrics
    #[arg(
        id = "system-metrics-log-interval-secs", long = "system-metrics-log-interval-secs",
        value_name = "SECONDS", default_value = "60",
        env = "PHAROS_SYSTEM_METRICS_LOG_INTERVAL_SECS", value_parser = positive_seconds,
        help_heading = METRICS
    )]
    pub system_log_interval: Duration,
    /// NVIDIA Management Library (NVML) [default: libnvidia-ml.so.1, if installed]
    #[arg(
        id = "nvml-library", long = "nvml-library", value_name = "FILE",
        env = "PHAROS_NVML_LIBRARY", help_heading = METRICS
    )]
    pub nvml_library: Option<PathBuf>,
    /// Mount point of control groups (version 2), read for the limits of the container
    #[arg(
        id = "cgroup-root", long = "cgroup-root", value_name = "DIR",
        default_value = "/sys/fs/cgroup", env = "PHAROS_CGROUP_ROOT", help_heading = METRICS
    )]
    pub cgroup_root: PathBuf,
}

/// Metric logs.
#[derive(Clone, Debug, Args)]
pub struct Tslog {
    /// Directory of ts_metrics.log and model_metrics.log [default: METRICS_LOCATION, else the
    /// directory of --log-location]. Setting a directory changes the default of --metrics-mode to
    /// both
    #[arg(
        id = "metrics-location", long = "metrics-location", value_name = "DIR",
        env = "PHAROS_METRICS_LOCATION", help_heading = TSLOG
    )]
    pub metrics_location: Option<PathBuf>,
    /// Directory of all log files [default: LOG_LOCATION, else logs]
    #[arg(
        id = "log-location", long = "log-location", value_name = "DIR", env = "PHAROS_LOG_LOCATION",
        help_heading = TSLOG
    )]
    pub log_location: Option<PathBuf>,
    /// Size in bytes at which a metric log is rotated and compressed; 0 disables rotation
    #[arg(
        id = "tslog-max-bytes", long = "tslog-max-bytes", value_name = "BYTES",
        default_value_t = 100_000_000, env = "PHAROS_TSLOG_MAX_BYTES",
        value_parser = whole(0..=u64::MAX), help_heading = TSLOG
    )]
    pub max_bytes: u64,
    /// Number of rotated metric logs to keep of each kind
    #[arg(
        id = "tslog-keep", long = "tslog-keep", value_name = "N", default_value_t = 5,
        env = "PHAROS_TSLOG_KEEP", value_parser = whole(0..=u32::MAX), help_heading = TSLOG
    )]
    pub keep: u32,
    /// Maximum number of metric lines per second; above it, counters are summed and other samples
    /// dropped. 0 for no limit
    #[arg(
        id = "tslog-lines-per-second", long = "tslog-lines-per-second", value_name = "N",
        default_value_t = 10_000, env = "PHAROS_TSLOG_LINES_PER_SECOND",
        value_parser = whole(0..=u32::MAX), help_heading = TSLOG
    )]
    pub lines_per_second: u32,
    /// Also write the lines to standard output, with the logger's name
    #[arg(
        id = "tslog-stdout", long = "tslog-stdout", value_name = "BOOL", default_value = "false",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_TSLOG_STDOUT", value_parser = boolean, help_heading = TSLOG
    )]
    pub stdout: bool,
    /// Format of the lines: text (TorchServe's) or json
    #[arg(
        id = "tslog-format", long = "tslog-format", value_name = "FORMAT", default_value = "text",
        env = "PHAROS_TSLOG_FORMAT", value_parser = ["text", "json"], help_heading = TSLOG
    )]
    pub format: String,
}

impl Tslog {
    /// Returns the directory of the metric logs that a flag or one of TorchServe's environment
    /// variables sets. `variable` looks up an environment variable.
    pub fn named_location(&self, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let given =
            |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let metrics = self.metrics_location.clone().or_else(|| given("METRICS_LOCATION"));
        metrics.or_else(|| self.log_location.clone()).or_else(|| given("LOG_LOCATION"))
    }

    /// Returns the directory of the metric logs.
    pub fn location(&self, variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
        self.named_location(variable).unwrap_or_else(|| PathBuf::from("logs"))
    }
}

impl Options {
    /// Parses a command line (with the program's name first) and the environment.
    ///
    /// # Errors
    /// An invalid flag or value, with the allowed values; also `--help` and `--version`. The caller
    /// prints the error and exits with its code (`clap::Error::exit`).
    pub fn from_args(
        args: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let given = args.into_iter().map(Into::into).collect();
        let Start { command, args, ignored } =
            Start::new(Self::command(), given, |name| std::env::var_os(name));
        let mut matches = command
            .clone()
            .try_get_matches_from(&args)
            .map_err(|error| refusal::explained(error, &command, &args))?;
        let origins = refusal::Origins::new(&command, &matches);
        let unknown = environment::unknown(&command, std::env::vars_os());
        let of_other_modes =
            models::without_mode(&matches).iter().map(|text| origins.explain(text)).collect();
        let ignored = [ignored, unknown, of_other_modes].concat();
        let options =
            Self::from_arg_matches_mut(&mut matches).map_err(|error| error.with_cmd(&command))?;
        let options = Self { ignored, origins, ..options };
        match options.check() {
            Ok(()) => Ok(options),
            Err(text) => {
                let text = options.origins.explain(&text);
                Err(command.clone().error(clap::error::ErrorKind::ValueValidation, text))
            }
        }
    }

    /// Checks options that depend on each other.
    fn check(&self) -> Result<(), String> {
        match &self.command {
            Some(Command::Serve { .. }) => {
                return Err(
                    "serve must be the first argument: pharos serve PLACE... [OPTIONS]".to_owned()
                );
            }
            Some(Command::TritonServer) => {
                return Err("tritonserver must be the first argument: pharos tritonserver \
                            [OPTIONS]"
                    .to_owned());
            }
            _ => {}
        }
        self.cache()?;
        self.models.check()?;
        self.tracing()?;
        self.push()?;
        self.openai.origins()?;
        cloud::check(self)
    }

    /// Adds to a message the environment variables that set the flags it names.
    pub fn with_origins(&self, text: &str) -> String {
        self.origins.explain(text)
    }

    /// Returns warnings about deprecated flags and flags without effect; for the log.
    pub fn warnings(&self) -> Vec<String> {
        let mut all = self.ignored.clone();
        all.extend(self.models.warnings());
        all.extend(self.push().map(|push| push.warnings).unwrap_or_default());
        if self.response_cache.byte_size.is_some() {
            all.push(
                "--response-cache-byte-size is deprecated: use --cache-config=local,size=BYTES"
                    .to_owned(),
            );
        }
        if self.rate_limiter.limits().is_none() && !self.rate_limiter.resources.is_empty() {
            all.push(
                "--rate-limit-resource has no effect without --rate-limit=execution_count"
                    .to_owned(),
            );
        }
        all
    }

    /// Returns the given flags of Triton that have no effect, each with the reason; for the log.
    pub fn without_effect(&self) -> Vec<String> {
        [
            self.accepted.without_effect(),
            self.grpc_clients.without_effect(),
            cloud::without_effect(self),
        ]
        .concat()
    }

    /// Returns the settings of the response cache; `None` without one.
    ///
    /// # Errors
    /// The settings are incomplete or contradict each other; [`Options::from_args`] has checked
    /// that.
    pub fn cache(&self) -> Result<Option<pharos_engine::cache::Settings>, String> {
        let ResponseCache { configs, byte_size } = &self.response_cache;
        cache::cache(configs, *byte_size, |name| std::env::var(name).ok())
            .map_err(|text| format!("--cache-config: {text}"))
    }

    /// Returns the initial trace settings and the destination of traces.
    ///
    /// # Errors
    /// A value is not allowed; [`Options::from_args`] has checked that.
    pub fn tracing(&self) -> Result<Tracing, String> {
        trace::tracing(&self.trace, |name| std::env::var(name).ok())
            .map_err(|text| format!("--trace-config: {text}"))
    }

    /// Returns the settings of the push of metrics; `None` without a collector.
    ///
    /// # Errors
    /// A value is not allowed; [`Options::from_args`] has checked that.
    pub fn metrics_push(&self) -> Result<Option<push::Settings>, String> {
        self.push().map(|push| push.settings)
    }

    fn push(&self) -> Result<otlp::Push, String> {
        otlp::push(self.metrics.otlp_endpoint.as_deref(), |name| std::env::var(name).ok())
            .map_err(|text| format!("--otlp-metrics-endpoint: {text}"))
    }

    /// Returns the file that defines the metrics, if one is given, and the settings that override
    /// it.
    pub fn metrics_definition(&self) -> (Option<PathBuf>, Overrides) {
        definition::definition(&self.metrics.config, self.metrics.mode)
    }

    /// Returns the address of the metrics listener.
    pub fn metrics_address(&self) -> IpAddr {
        self.metrics.address.unwrap_or(self.http.address)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod triton_tests;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use std::ffi::OsStr;

    use super::*;
    use pharos::metrics::catalog::Setting;
    use pharos::metrics::catalog::listing::Form;
    use pharos::scheduler::rate_limiter::Limit;
    use pharos_engine::store::Location;

    fn parse(args: &[&str]) -> Result<Options, String> {
        let args = ["pharos", "--model-repository", "models"].iter().chain(args);
        Options::from_args(args).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_equal_tritons_except_the_metrics_port() {
        let options = parse(&[]).unwrap();
        assert_eq!(
            (options.http.port, options.grpc.port, options.metrics.port),
            (8000, 8001, 8082)
        );
        assert_eq!(options.general.exit_timeout_secs, Duration::from_secs(30));
        assert!(
            options.general.exit_on_error && options.general.strict_readiness && options.http.allow
        );
        assert!(options.models.auto_complete());
        assert_eq!(options.models.default_max_batch_size("onnxruntime"), 4);
        assert_eq!(options.metrics_address(), options.http.address);
        assert_eq!(options.http.max_input_size, 67_108_864);
        assert!(options.metrics.allow_cpu && options.metrics.allow_gpu);
        assert_eq!(options.metrics.interval, Duration::from_secs(2));
    }

    #[test]
    fn accepts_tritons_forms() {
        let options = parse(&[
            "--model-store=more",
            "--allow-grpc=0",
            "--exit-on-error",
            "off",
            "--disable-auto-complete-config",
            "--backend-config=default-max-batch-size=8",
            "--backend-config",
            "onnxruntime,default-max-batch-size=16",
            "--http-address=localhost",
            "--worker-threads=2",
        ]);
        let options = options.unwrap();
        assert_eq!(
            options.models.locations(),
            ["models", "more"].map(|path| Location::Directory(path.into()))
        );
        assert!(!options.grpc.allow && !options.general.exit_on_error);
        assert!(!options.models.auto_complete());
        assert_eq!(options.models.default_max_batch_size("onnxruntime"), 16);
        assert_eq!(options.models.default_max_batch_size("tract"), 8);
        assert!(options.http.address.is_loopback());
        assert_eq!(options.workers.worker_threads, Some(2));
    }

    #[test]
    fn warns_about_flags_of_another_control_mode() {
        let check = |args: &[&str], expected: &[&str]| {
            let warnings = parse(args).unwrap().warnings();
            assert_eq!(
                warnings.iter().filter(|text| text.contains("has no effect")).collect::<Vec<_>>(),
                expected
            );
        };
        let poll = "--repository-poll-secs has no effect without --model-control-mode=poll";
        // A model can be loaded on demand in all modes.
        let all =
            ["--model-idle-unload-secs=5", "--on-demand-max-waiting=5", "--repository-poll-secs=5"];
        check(&all, &[poll]);
        check(&[&all[..], &["--model-control-mode=explicit"]].concat(), &[poll]);
        check(&[&all[..], &["--model-control-mode=poll"]].concat(), &[]);
        check(&[], &[]);
    }

    #[test]
    fn statsd_address_is_udp_or_a_unix_socket_and_has_no_default() {
        let at = |text: &str| {
            parse(&[&format!("--statsd-address={text}")]).unwrap().metrics.statsd.unwrap()
        };
        let udp = |host: &str| StatsdAddress::Udp(host.to_owned(), 8125);
        assert_eq!(
            (at("127.0.0.1:8125"), at("udp://metrics.example:8125")),
            (udp("127.0.0.1"), udp("metrics.example"))
        );
        assert_eq!((at("[::1]:8125"), at("udp:[::]:8125")), (udp("::1"), udp("::")));
        let unix = StatsdAddress::Unix("/run/s.sock".into());
        for form in [
            "unix:/run/s.sock",
            "unix:///run/s.sock",
            "unixgram:/run/s.sock",
            "unixgram:///run/s.sock",
        ] {
            assert_eq!(at(form), unix);
        }
        assert_eq!(parse(&[]).unwrap().metrics.statsd, None);
    }

    #[test]
    fn resources_are_limited_when_the_rate_limiter_is_on() {
        let limit = |name: &str, count, device| Limit { name: name.to_owned(), count, device };
        let resources = ["--rate-limit-resource=R:4", "--rate-limit-resource=s:0:1;R:2:0"];
        let on = parse(&[&resources[..], &["--rate-limit=Execution_Count"]].concat())
            .unwrap()
            .rate_limiter;
        assert_eq!(
            on.limits(),
            Some(vec![limit("R", 4, None), limit("s", 0, Some(1)), limit("R", 2, Some(0))])
        );
        assert_eq!(
            parse(&["--rate-limit=execution_count"]).unwrap().rate_limiter.limits(),
            Some(Vec::new())
        );
        assert_eq!(parse(&resources).unwrap().rate_limiter.limits(), None);
    }

    #[test]
    fn parses_gpu_limits_and_the_pinned_pool() {
        let limit = |device, fraction| GpuLimit { device, fraction };
        let plain = parse(&[]).unwrap().gpus;
        assert_eq!(
            (plain.model_load_gpu_limit, plain.pinned_memory_pool_byte_size),
            (vec![], 268_435_456)
        );
        let given = [
            "--model-load-gpu-limit=0:0.6",
            "--model-load-gpu-limit",
            "1:1;3:0",
            "--pinned-memory-pool-byte-size=0",
        ];
        let given = parse(&given).unwrap().gpus;
        assert_eq!(given.model_load_gpu_limit, [limit(0, 0.6), limit(1, 1.0), limit(3, 0.0)]);
        assert_eq!(given.pinned_memory_pool_byte_size, 0);
        let range = "expects limit fraction to be in range [0.0, 1.0], got ";
        for (arg, expected) in [
            ("--model-load-gpu-limit=0", "DEVICE:FRACTION"),
            ("--model-load-gpu-limit=-1:0.6", "expects device ID >= 0, got -1"),
            ("--model-load-gpu-limit=0:-0.4", &format!("{range}-0.4")),
            ("--model-load-gpu-limit=0:NaN", &format!("{range}NaN")),
            ("--pinned-memory-pool-byte-size=-1", "\"-1\""),
        ] {
            let message = parse(&[arg]).unwrap_err();
            assert!(message.contains(expected), "{arg}: {message}");
        }
    }

    #[test]
    fn the_memory_limit_is_bytes_or_a_share() {
        let limit = |text: &str| {
            let options = parse(&[&format!("--model-memory-limit={text}")]).map_err(|_| ())?;
            Ok::<_, ()>(options.models.memory_limit.map(|limit| limit.bytes(1000)))
        };
        assert_eq!(
            [limit("5"), limit("60%"), limit("2.5%"), limit("100%")],
            [5, 600, 25, 1000].map(|bytes| Ok(Some(bytes)))
        );
        assert!(
            ["", "0", "-1", "0%", "101%", "NaN%", "5G", "%"]
                .iter()
                .all(|text| limit(text).is_err())
        );
        assert_eq!(parse(&[]).unwrap().models.memory_limit, None);
    }

    #[test]
    fn the_limit_of_gpu_memory_is_general_or_of_one_gpu() {
        let gpus = |args: &[&str]| parse(args).unwrap().gpus;
        assert_eq!(gpus(&[]).memory_limit(0), None);
        let flags = ["--model-gpu-memory-limit=1:5", "--model-gpu-memory-limit", "60%;3:2.5%;3:7"];
        let of = |gpu| gpus(&flags).memory_limit(gpu).map(|limit| limit.bytes(1000));
        assert_eq!([of(0), of(1), of(3)], [600, 5, 7].map(Some));
        assert_eq!(gpus(&flags[..1]).memory_limit(0), None);
        for (value, expected) in [
            ("0:0", "expected a number of bytes, or a share of the memory from 1% to 100%"),
            ("a:80%", "expected the number of a GPU before ':', for example 0:80%"),
            ("-1:80%", "expected the number of a GPU before ':', for example 0:80%"),
            ("80G", "expected a number of bytes, or a share of the memory from 1% to 100%"),
        ] {
            let message = parse(&[&format!("--model-gpu-memory-limit={value}")]).unwrap_err();
            assert!(message.contains(expected), "{value}: {message}");
        }
    }

    #[test]
    fn flags_override_torchserves_log_variables() {
        let none = |_: &str| None;
        let variable = |name: &str| match name {
            "METRICS_LOCATION" => Some(OsString::from("m")),
            _ => None,
        };
        let logs = |name: &str| (name == "LOG_LOCATION").then(|| OsString::from("l"));
        let plain = parse(&[]).unwrap().tslog;
        assert_eq!(
            (plain.location(none), plain.location(variable)),
            (PathBuf::from("logs"), PathBuf::from("m"))
        );
        assert_eq!(plain.location(logs), PathBuf::from("l"));
        assert_eq!(parse(&["--log-location=a"]).unwrap().tslog.location(none), PathBuf::from("a"));
        let given = parse(&["--metrics-location=b", "--log-location=a"]).unwrap().tslog;
        assert_eq!(given.location(variable), PathBuf::from("b"));
    }

    /// Checks that each command line is refused with a message that contains all of these parts.
    fn check_refused(cases: &[(&[&str], &[&str])]) {
        for (args, expected) in cases {
            let message = parse(args).unwrap_err();
            for part in *expected {
                assert!(message.contains(part), "{args:?}: no {part:?} in: {message}");
            }
        }
    }

    #[test]
    fn error_of_a_bad_value_names_flag_value_and_allowed_values() {
        check_refused(&[
            (
                &["--http-port=x"][..],
                &["invalid --http-port \"x\": expected a number from 0 to 65535"][..],
            ),
            (
                &["--http-port=70000"],
                &["invalid --http-port \"70000\": expected a number from 0 to 65535"],
            ),
            (&["--allow-http=maybe"], &["--allow-http", "maybe", "allowed are true"]),
            (
                &["--model-control-mode=often"],
                &["--model-control-mode", "often", "expected none, poll, explicit or on-demand"],
            ),
            (
                &["--load-model=m"],
                &["Use of '--load-model' requires setting '--model-control-mode=explicit' as \
                   well."],
            ),
            (
                &["--model-control-mode=explicit", "--load-model=m", "--load-model=*"],
                &["Wildcard model name '*' must be the ONLY startup model if specified at all."],
            ),
            (&["--model-control-mode=explicit", "--load-model=a/b"], &["invalid model name 'a/b'"]),
            (&["--model-config-name=../x"], &["--model-config-name", "../x", "without '/'"]),
            (&["--repository-poll-secs=0"], &["--repository-poll-secs", "whole seconds from 1"]),
            (&["--http-max-input-size=0"], &["--http-max-input-size must be greater than 0."]),
            (&["--backend-config=x"], &["--backend-config", "KEY=VALUE"]),
            (&["--worker-start-timeout-secs=0"], &["--worker-start-timeout-secs", "from 1 to"]),
            (&["--metrics-interval-ms=0"], &["--metrics-interval-ms", "\"0\"", "greater than 0"]),
            (&["--http-address=nowhere"], &["--http-address", "nowhere", "IPv4"]),
            (
                &["--statsd-address=8125"],
                &["--statsd-address", "\"8125\"", "HOST:PORT", "unix:PATH"],
            ),
            (
                &["--statsd-address=localhost:x"],
                &["--statsd-address", "'x' is not a port", "unix:PATH"],
            ),
            (&["--statsd-address=::1:8125"], &["--statsd-address", "[::1]:8125"]),
            (&["--statsd-address=/run/statsd.sock"], &["--statsd-address", "unix:PATH"]),
            (&["--statsd-address=unix:"], &["--statsd-address", "unix:PATH"]),
        ]);
        assert!(
            Options::from_args(["pharos"]).unwrap_err().to_string().contains("--model-repository")
        );
    }

    #[test]
    fn error_of_a_bad_value_names_the_expected_form() {
        check_refused(&[
            (
                &["--rate-limit=on"],
                &["--rate-limit", "\"on\"", "invalid argument for --rate-limit", "execution_count"],
            ),
            (
                &["--rate-limit-resource=R"],
                &["'<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got R"],
            ),
            (&["--rate-limit-resource=R:1:2:3"], &["'<resource_name>:<count>'. Got R:1:2:3"]),
            (&["--rate-limit-resource=R:x"], &["Got R:x", "whole numbers from 0 to 4294967295"]),
            (&["--rate-limit-resource=R:1:-2"], &["Got R:1:-2", "whole numbers"]),
            (&["--rate-limit-resource=:1"], &["option format is", "Got :1"]),
            (&["--example=cats"], &["--example \"cats\": allowed are digits, simple"]),
            (&["--tslog-format=xml"], &["--tslog-format \"xml\": allowed are text, json"]),
            (&["--cache-config=disk"], &["--cache-config", "\"disk\"", "local,size=BYTES"]),
            (&["--cache-config=local"], &["--cache-config", "requires a size"]),
            (
                &["--response-cache-byte-size=x"],
                &["--response-cache-byte-size", "\"x\": expected a whole number from 0 to"],
            ),
            (&["--htp-port=1"], &["unknown flag --htp-port; did you mean --http-port?\n"]),
            (
                &["--model-repo=m"],
                &["unknown flag --model-repo; did you mean --model-repository?\n"],
            ),
            (&["--allow=1"], &["unknown flag --allow; flags with this prefix: --", "--allow-http"]),
            (
                &["--tf-gpu-memory-fraction=1"],
                &["unknown flag --tf-gpu-memory-fraction; --help lists all flags\n"],
            ),
            (&["--http-port"], &["--http-port needs a value: --http-port=PORT\n"]),
            (
                &["--cuda-memory-pool-byte-size=x"],
                &["--cuda-memory-pool-byte-size \"x\": expected DEVICE:BYTES"],
            ),
            (
                &["--host-policy=cpu,speed=1"],
                &["--host-policy \"cpu,speed=1\": unknown setting 'speed'", "numa-node=N"],
            ),
            (&["--host-policy=cpu,cpu-cores=3-1"], &["expected NAME,cpu-cores=LIST"]),
            (&["--sagemaker-safe-port-range=9"], &["expected FIRST-LAST"]),
            (
                &["--allow-sagemaker", "--sagemaker-safe-port-range=8000-8001"],
                &["The server cannot listen to metrics requests at port 8082, allowed port range \
                   is [8000, 8001]"],
            ),
            (
                &["--metrics-mode=all"],
                &["--metrics-mode", "\"all\"", "tslog, prometheus, both, log, legacy"],
            ),
            (
                &["--metrics-config=latencies=1"],
                &["--metrics-config", "'latencies'", "counter_latencies", "or a file"],
            ),
            (
                &["--metrics-config=summary_latencies=x"],
                &["--metrics-config", "summary_latencies is 'x'", "true"],
            ),
            (
                &["--metrics-config=summary_quantiles=2"],
                &["--metrics-config", "'2'", "between 0 and 1"],
            ),
        ]);
    }

    #[test]
    fn errors_of_commands_have_the_flags_and_the_usage_of_the_command() {
        check_refused(&[
            (&["-p", "8000"], &["unknown flag -p; flags have the form --flag=VALUE"]),
            (&["help"], &["unknown command 'help'; --help lists the commands\n"]),
            (&["metrcs"], &["unknown command 'metrcs'; did you mean 'metrics'?\n"]),
            (&["serv", "m"], &["unknown command 'serv'; did you mean 'serve'?\n"]),
            (&["m.onnx"], &["'m.onnx' is not a command; `pharos serve m.onnx` serves it\n"]),
            (
                &["metrics", "list", "a", "b"],
                &["unexpected argument 'b'", "Usage: pharos metrics list "],
            ),
            (
                &["slo", "rules", "--metrics-confg=a"],
                &["'--metrics-config'", "Usage: pharos slo rules "],
            ),
            (
                &["torchserve", "--http-port=1"],
                &["unexpected argument '--http-port'", "-- --http-port"],
            ),
            (&["torchserve", "--model-stor=m"], &["'--model-store'", "Usage: pharos torchserve "]),
            (
                &["top", "--interval=x"],
                &["'x' for '--interval <SECONDS>': allowed are 0.1 to 3600 seconds"],
            ),
        ]);
        let text = parse(&["torchserve", "--http-port=1"]).unwrap_err();
        assert!(!text.contains("did you mean --http-port"), "{text}");
    }

    #[test]
    fn error_names_the_variable_that_set_the_flag() {
        let mut origins = refusal::Origins::default();
        assert_eq!(origins.explain("--http-port is bad"), "--http-port is bad");
        let command = Options::command()
            .mut_arg("http-port", |arg| arg.env("PATH").value_parser(OsStringValueParser::new()));
        let matches =
            command.clone().try_get_matches_from(["pharos", "--model-repository=m"]).unwrap();
        origins = refusal::Origins::new(&command, &matches);
        assert_eq!(
            origins.explain("--http-port is bad\nand more"),
            "--http-port is bad (from PATH)\nand more"
        );
        assert_eq!(
            origins.explain("--http-ports is bad\n--http-port"),
            "--http-ports is bad\n--http-port"
        );
        let command = Options::command().mut_arg("http-port", |arg| arg.env("PATH"));
        let bad = |args: &[&'static str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            // As with the program name `tritonserver`, which accepts prefixes.
            let error =
                command.clone().infer_long_args(true).try_get_matches_from(&args).unwrap_err();
            refusal::explained(error, &command, &args).to_string()
        };
        let path = std::env::var("PATH").unwrap();
        let text = bad(&["pharos", "--model-repository=m"]);
        let expected = format!(
            "invalid --http-port \"{path}\": expected a number from 0 to 65535 (from PATH)\n"
        );
        assert!(text.contains(&expected), "{text}");
        let own = "invalid --http-port \"80a\": expected a number from 0 to 65535\n";
        for given in [
            &["--http-port", "80a"][..],
            &["--http-port=80a"],
            &["--http-po", "80a"],
            &["--http-po=80a"],
        ] {
            let text = bad(&[&["pharos", "--model-repository=m"], given].concat());
            assert!(text.contains(own), "{given:?}: {text}");
        }
        let text = bad(&["pharos", "--model-repository=m", "--http-address=::"]);
        assert!(text.contains(&expected), "{text}");
    }

    #[test]
    fn accepts_fractions_of_milliseconds() {
        let interval = |text: &str| {
            parse(&[&format!("--metrics-interval-ms={text}")]).map(|all| all.metrics.interval)
        };
        assert_eq!(interval("1500.5"), Ok(Duration::from_micros(1_500_500)));
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(1)));
        for wrong in ["-1", "NaN", "inf", "86400001"] {
            assert!(
                interval(wrong).unwrap_err().contains("milliseconds greater than 0"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn metrics_config_accepts_a_file_and_settings() {
        let options = parse(&[
            "--metrics-config=a.yaml",
            "--metrics-config",
            "summary_quantiles=0.5:0.05,0.9:0.01",
            "--metrics-config=./b=c.yaml;summary_latencies=true",
            "--metrics-mode=LOG",
        ]);
        let (file, overrides) = options.unwrap().metrics_definition();
        assert_eq!(file, Some(PathBuf::from("./b=c.yaml")));
        let settings = [Setting::SummaryQuantiles(vec![0.5, 0.9]), Setting::SummaryLatencies(true)];
        assert_eq!(overrides, Overrides { settings: settings.into(), mode: Some(Mode::Tslog) });
        assert_eq!(parse(&[]).unwrap().metrics_definition(), (None, Overrides::default()));
    }

    #[test]
    fn torchserves_variables_apply_unless_ours_are_set() {
        let variables = |set: &[&str]| {
            let set: Vec<OsString> = set.iter().map(OsString::from).collect();
            let is_set = |name: &OsStr| set.iter().any(|set| set == name);
            let command = definition::with_torchserves_variables(Options::command(), is_set);
            let arg = command
                .get_arguments()
                .find(|arg| arg.get_id() == "metrics-mode")
                .unwrap()
                .get_env()
                .unwrap();
            arg.to_str().unwrap().to_owned()
        };
        assert_eq!(variables(&["TS_METRICS_MODE"]), "TS_METRICS_MODE");
        assert_eq!(variables(&["TS_METRICS_MODE", "PHAROS_METRICS_MODE"]), "PHAROS_METRICS_MODE");
        assert_eq!(variables(&[]), "PHAROS_METRICS_MODE");
    }

    #[test]
    fn commands_need_no_repository() {
        let command = |args: &[&str]| {
            Options::from_args(["pharos"].iter().chain(args)).map(|o| o.command.unwrap())
        };
        let Ok(Command::Metrics(MetricsCommand::Check { file })) =
            command(&["metrics", "check", "m.yaml"])
        else {
            panic!("no check");
        };
        assert_eq!(file, PathBuf::from("m.yaml"));
        assert!(matches!(
            command(&["metrics", "default"]),
            Ok(Command::Metrics(MetricsCommand::Default))
        ));
        let list = command(&["metrics", "list", "--format=json"]).unwrap();
        let Command::Metrics(MetricsCommand::List { file: None, format: Form::Json }) = list else {
            panic!("{list:?}")
        };
        for (args, expected) in [
            (&["metrics", "list", "--format=xml"][..], "allowed are table, json, markdown"),
            (&["metrics", "check"], "<FILE>"),
            (&["slo", "rules"], "--metrics-config <FILE>"),
            (&["metrics", "chck"], "check"),
            (&["serve"], "serve <PLACE>..."),
            (
                &["--id=a", "serve", "b"],
                "serve must be the first argument: pharos serve PLACE... [OPTIONS]",
            ),
            (
                &["--id=a", "tritonserver"],
                "tritonserver must be the first argument: pharos tritonserver [OPTIONS]",
            ),
        ] {
            let message = command(args).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn every_flag_has_help_a_group_and_a_variable_of_its_name() {
        let command = Options::command();
        for arg in command
            .get_arguments()
            .filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"))
        {
            let flag = arg.get_long().unwrap();
            let variable = format!("PHAROS_{}", flag.to_uppercase().replace('-', "_"));
            assert_eq!(
                arg.get_env().and_then(|env| env.to_str()),
                Some(variable.as_str()),
                "--{flag}"
            );
            assert!(arg.get_help().is_some() && arg.get_help_heading().is_some(), "--{flag}");
        }
    }
}
