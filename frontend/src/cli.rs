//! The command line: Triton's flag names, and after each an environment variable `PHAROS_<FLAG>` with the same meaning
//! (the command line wins). Parsing gives plain [`Options`]; whatever can be checked without the machine is checked here.
//!
//! Differences from Triton, on purpose: `--metrics-port` is 8082, the port of the `ts_*` families' former home, so that
//! scrapers of either find their families in one place; `--metrics-config` takes the YAML file that defines the metrics
//! beside Triton's `key=value` settings.

mod accepted;
mod backend_setting;
mod cache;
mod clients;
pub mod cloud;
mod definition;
mod environment;
mod gpus;
mod host_policy;
mod logging;
mod models;
mod rate_limit;
mod refusal;
mod shared_memory;
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

use pharos_telemetry::statsd::StatsdAddress;
use pharos_telemetry::trace::Tracing;

use environment::Start;
use values::{
    address, boolean, fractional_milliseconds, input_size, milliseconds, port, positive_seconds, seconds,
    statsd_address, whole,
};

pub use backend_setting::BackendSetting;
pub use cache::CacheConfig;
pub use clients::{GrpcClients, HttpClients, Patience, Tokens};
pub use definition::{Command, MetricsCommand, MetricsConfig};
pub use gpus::{GpuLimit, Gpus};
pub use host_policy::HostPolicies;
pub use logging::Log;
pub use models::{ControlMode, Models};
pub use rate_limit::{RateLimit, RateLimiter};
pub use shared_memory::SharedMemory;
pub use tls::{GrpcTls, HttpTls, MetricsTls, TlsOptions, TlsPaths};
pub use trace::{TraceCommand, TraceConfig, TraceOptions};
pub use workers::Workers;

const GENERAL: &str = "Server";
const MODELS: &str = "Model repository";
const WORKERS: &str = "Workers";
const CACHE: &str = "Response cache";
const HTTP: &str = "HTTP";
const GRPC: &str = "gRPC";
const METRICS: &str = "Metrics";
const TSLOG: &str = "Metric logs";
const LOG: &str = "Log";
const TRACE: &str = "Traces";

/// Everything that the server is told at start.
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
    after_help = "BOOL is true, false, on, off, yes, no, 1 or 0. Every flag can be given by the environment variable shown with it.\n\
                  `pharos tritonserver [OPTIONS]`, or a link to pharos named tritonserver, has Triton's defaults: metrics on port 8002."
)]
pub struct Options {
    /// Of the server as a whole.
    #[command(flatten)]
    pub general: General,
    /// Memory that clients share.
    #[command(flatten)]
    pub shared_memory: SharedMemory,
    /// Which models.
    #[command(flatten)]
    pub models: Models,
    /// The processes that run models.
    #[command(flatten)]
    pub workers: Workers,
    /// How GPUs are used.
    #[command(flatten)]
    pub gpus: Gpus,
    /// How instances share resources.
    #[command(flatten)]
    pub rate_limiter: RateLimiter,
    /// Which processors instances run on.
    #[command(flatten)]
    pub host_policies: HostPolicies,
    /// Flags of Triton without effect.
    #[command(flatten)]
    accepted: accepted::Accepted,
    /// What is answered without being executed.
    #[command(flatten)]
    pub response_cache: ResponseCache,
    /// The HTTP listener.
    #[command(flatten)]
    pub http: Http,
    /// TLS of HTTP.
    #[command(flatten)]
    pub http_tls: HttpTls,
    /// The clients of HTTP.
    #[command(flatten)]
    pub http_clients: HttpClients,
    /// The gRPC listener.
    #[command(flatten)]
    pub grpc: Grpc,
    /// TLS of gRPC.
    #[command(flatten)]
    pub grpc_tls: GrpcTls,
    /// The clients of gRPC.
    #[command(flatten)]
    pub grpc_clients: GrpcClients,
    /// Who may ask.
    #[command(flatten)]
    pub tokens: Tokens,
    /// How long clients may take.
    #[command(flatten)]
    pub patience: Patience,
    /// The metrics listener and what it shows.
    #[command(flatten)]
    pub metrics: Metrics,
    /// TLS of the metrics listener.
    #[command(flatten)]
    pub metrics_tls: MetricsTls,
    /// Metrics as log lines.
    #[command(flatten)]
    pub tslog: Tslog,
    /// What is logged.
    #[command(flatten)]
    pub log: Log,
    /// What is traced.
    #[command(flatten)]
    pub trace: TraceOptions,
    /// The endpoints of Amazon SageMaker.
    #[command(flatten)]
    pub sagemaker: cloud::SageMaker,
    /// The endpoints of Google Vertex AI.
    #[command(flatten)]
    pub vertex_ai: cloud::VertexAi,
    /// Variables of the environment that are ignored, a sentence each.
    #[arg(skip)]
    ignored: Vec<String>,
    /// The flags that variables gave.
    #[arg(skip)]
    origins: refusal::Origins,
    /// What to do in place of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Of the server as a whole.
#[derive(Clone, Debug, Args)]
pub struct General {
    /// The server's name in its metadata; clients of Triton expect "triton"
    #[arg(long, value_name = "NAME", default_value = "triton", env = "PHAROS_ID", help_heading = GENERAL)]
    pub id: String,
    /// Seconds to wait at exit for requests in flight and for running sequences
    #[arg(long, value_name = "SECONDS", default_value = "30", env = "PHAROS_EXIT_TIMEOUT_SECS", value_parser = seconds, help_heading = GENERAL)]
    pub exit_timeout_secs: Duration,
    /// Seconds at exit for which the server is no longer ready and still serves, so that load balancers notice
    #[arg(long, value_name = "SECONDS", default_value = "0", env = "PHAROS_EXIT_DELAY_SECS", value_parser = seconds, help_heading = GENERAL)]
    pub exit_delay_secs: Duration,
    /// Exit if a model cannot be loaded at start
    #[arg(long, value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_EXIT_ON_ERROR", value_parser = boolean, help_heading = GENERAL)]
    pub exit_on_error: bool,
    /// Be ready only when every model is; otherwise as soon as the server answers
    #[arg(long, value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_STRICT_READINESS", value_parser = boolean, help_heading = GENERAL)]
    pub strict_readiness: bool,
}

/// What is answered without being executed.
#[derive(Clone, Debug, Args)]
pub struct ResponseCache {
    /// Keep responses of models that say response_cache { enable: true }, in this process (local,size=BYTES) or in a Redis
    /// that several servers share (redis,host=HOST,port=PORT[,user=,password=,db=,ttl=SECONDS,timeout_ms=]); with
    /// single_flight=true concurrent equal requests are executed once. May be given several times for one cache, or several
    /// separated by ';'
    #[arg(id = "cache-config", long = "cache-config", value_name = "NAME,KEY=VALUE", env = "PHAROS_CACHE_CONFIG", value_parser = cache::config, value_delimiter = ';', help_heading = CACHE)]
    configs: Vec<CacheConfig>,
    /// Deprecated: as --cache-config local,size=BYTES; 0 for none
    #[arg(id = "response-cache-byte-size", long = "response-cache-byte-size", value_name = "BYTES", env = "PHAROS_RESPONSE_CACHE_BYTE_SIZE", value_parser = whole(0..=u64::MAX), help_heading = CACHE)]
    byte_size: Option<u64>,
}

/// The HTTP listener.
#[derive(Clone, Debug, Args)]
pub struct Http {
    /// Serve HTTP
    #[arg(id = "allow-http", long = "allow-http", value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_HTTP", value_parser = boolean, help_heading = HTTP)]
    pub allow: bool,
    /// The address to listen on
    #[arg(id = "http-address", long = "http-address", value_name = "ADDRESS", default_value = "0.0.0.0", env = "PHAROS_HTTP_ADDRESS", value_parser = address, help_heading = HTTP)]
    pub address: IpAddr,
    /// The port to listen on; 0 lets the system choose
    #[arg(id = "http-port", long = "http-port", value_name = "PORT", default_value_t = 8000, env = "PHAROS_HTTP_PORT", value_parser = port, help_heading = HTTP)]
    pub port: u16,
    /// The most bytes of a request's JSON, and of its binary data
    #[arg(id = "http-max-input-size", long = "http-max-input-size", value_name = "BYTES", default_value_t = 64 << 20, env = "PHAROS_HTTP_MAX_INPUT_SIZE", value_parser = input_size, help_heading = HTTP)]
    pub max_input_size: u64,
    /// Restricts parts of the protocol to who sends a header with a value: API[,API...]:KEY=VALUE; may be repeated
    #[arg(id = "http-restricted-api", long = "http-restricted-api", value_name = "RULE", env = "PHAROS_HTTP_RESTRICTED_API", help_heading = HTTP)]
    pub restricted: Vec<String>,
}

/// The gRPC listener.
#[derive(Clone, Debug, Args)]
pub struct Grpc {
    /// Serve gRPC
    #[arg(id = "allow-grpc", long = "allow-grpc", value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_GRPC", value_parser = boolean, help_heading = GRPC)]
    pub allow: bool,
    /// The address to listen on
    #[arg(id = "grpc-address", long = "grpc-address", value_name = "ADDRESS", default_value = "0.0.0.0", env = "PHAROS_GRPC_ADDRESS", value_parser = address, help_heading = GRPC)]
    pub address: IpAddr,
    /// The port to listen on; 0 lets the system choose
    #[arg(id = "grpc-port", long = "grpc-port", value_name = "PORT", default_value_t = 8001, env = "PHAROS_GRPC_PORT", value_parser = port, help_heading = GRPC)]
    pub port: u16,
    /// The most bytes of a message [default: 2147483647, and 67108864 for a message that is decompressed]
    #[arg(id = "grpc-max-input-size", long = "grpc-max-input-size", value_name = "BYTES", env = "PHAROS_GRPC_MAX_INPUT_SIZE", value_parser = clap::value_parser!(u64).range(1..=0x7fff_ffff), help_heading = GRPC)]
    pub max_input_size: Option<u64>,
    /// Restricts parts of the protocol to who sends triton-grpc-protocol-KEY with a value: PROTOCOL[,PROTOCOL...]:KEY=VALUE; may be repeated
    #[arg(id = "grpc-restricted-protocol", long = "grpc-restricted-protocol", value_name = "RULE", env = "PHAROS_GRPC_RESTRICTED_PROTOCOL", help_heading = GRPC)]
    pub restricted: Vec<String>,
}

/// The metrics listener and what it shows.
#[derive(Clone, Debug, Args)]
pub struct Metrics {
    /// Serve metrics
    #[arg(id = "allow-metrics", long = "allow-metrics", value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_METRICS", value_parser = boolean, help_heading = METRICS)]
    pub allow: bool,
    /// The address to listen on [default: that of --http-address]
    #[arg(id = "metrics-address", long = "metrics-address", value_name = "ADDRESS", env = "PHAROS_METRICS_ADDRESS", value_parser = address, help_heading = METRICS)]
    pub address: Option<IpAddr>,
    /// The port to listen on; 0 lets the system choose
    #[arg(id = "metrics-port", long = "metrics-port", value_name = "PORT", default_value_t = 8082, env = "PHAROS_METRICS_PORT", value_parser = port, help_heading = METRICS)]
    pub port: u16,
    /// The file that defines the metrics [default: the metrics.yaml built in], or a setting over it: KEY=VALUE; may be
    /// given several times, or several separated by ';'. Settings: counter_latencies, histogram_latencies,
    /// summary_latencies (BOOL), summary_quantiles (such as 0.5:0.05,0.9:0.01). SIGHUP reads the file again
    #[arg(id = "metrics-config", long = "metrics-config", value_name = "FILE|SETTING", env = "PHAROS_METRICS_CONFIG", value_parser = OsStringValueParser::new().try_map(MetricsConfig::parse), value_delimiter = ';', help_heading = METRICS)]
    pub config: Vec<MetricsConfig>,
    /// How metrics leave the server, over what the file says: tslog, prometheus, both, log or legacy [default: both if a
    /// directory for logs is named or --tslog-stdout is given, else prometheus]
    #[arg(id = "metrics-mode", long = "metrics-mode", value_name = "MODE", env = "PHAROS_METRICS_MODE", value_parser = definition::mode, help_heading = METRICS)]
    pub mode: Option<Mode>,
    /// Register metrics that a model sends and the file does not define
    #[arg(id = "model-metrics-auto-detect", long = "model-metrics-auto-detect", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_MODEL_METRICS_AUTO_DETECT", value_parser = boolean, help_heading = METRICS)]
    pub auto_detect: bool,
    /// The most label sets of one metric; those beyond it share one series whose labels are all "other"
    #[arg(id = "metrics-max-series", long = "metrics-max-series", value_name = "N", default_value_t = 10_000, env = "PHAROS_METRICS_MAX_SERIES", value_parser = whole(1..=u32::MAX), help_heading = METRICS)]
    pub max_series: u32,
    /// Receive StatsD datagrams at HOST:PORT (UDP) or unix:PATH (a Unix datagram socket); nobody is asked who they are
    #[arg(id = "statsd-address", long = "statsd-address", value_name = "ADDRESS", env = "PHAROS_STATSD_ADDRESS", value_parser = statsd_address, help_heading = METRICS)]
    pub statsd: Option<StatsdAddress>,
    /// Measure the host, the server's processes and the workers; this and --allow-gpu-metrics set to false is what TorchServe
    /// calls disable_system_metrics
    #[arg(id = "allow-cpu-metrics", long = "allow-cpu-metrics", value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_CPU_METRICS", value_parser = boolean, help_heading = METRICS)]
    pub allow_cpu: bool,
    /// Measure NVIDIA's GPUs where there are some
    #[arg(id = "allow-gpu-metrics", long = "allow-gpu-metrics", value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_ALLOW_GPU_METRICS", value_parser = boolean, help_heading = METRICS)]
    pub allow_gpu: bool,
    /// Milliseconds between two measurements of the host, processes and GPUs
    #[arg(id = "metrics-interval-ms", long = "metrics-interval-ms", value_name = "MILLISECONDS", default_value = "2000", env = "PHAROS_METRICS_INTERVAL_MS", value_parser = fractional_milliseconds, help_heading = METRICS)]
    pub interval: Duration,
    /// Seconds between two lines of one of TorchServe's system metrics in its log
    #[arg(id = "system-metrics-log-interval-secs", long = "system-metrics-log-interval-secs", value_name = "SECONDS", default_value = "60", env = "PHAROS_SYSTEM_METRICS_LOG_INTERVAL_SECS", value_parser = positive_seconds, help_heading = METRICS)]
    pub system_log_interval: Duration,
    /// NVIDIA's management library [default: libnvidia-ml.so.1 where the system has it]
    #[arg(id = "nvml-library", long = "nvml-library", value_name = "FILE", env = "PHAROS_NVML_LIBRARY", help_heading = METRICS)]
    pub nvml_library: Option<PathBuf>,
    /// Where control groups (version 2) are mounted, for the limits of the container
    #[arg(id = "cgroup-root", long = "cgroup-root", value_name = "DIR", default_value = "/sys/fs/cgroup", env = "PHAROS_CGROUP_ROOT", help_heading = METRICS)]
    pub cgroup_root: PathBuf,
}

/// Metrics as log lines.
#[derive(Clone, Debug, Args)]
pub struct Tslog {
    /// The directory of ts_metrics.log and model_metrics.log [default: METRICS_LOCATION, else that of --log-location]. If one
    /// is named and no mode, the mode is both, else prometheus
    #[arg(id = "metrics-location", long = "metrics-location", value_name = "DIR", env = "PHAROS_METRICS_LOCATION", help_heading = TSLOG)]
    pub metrics_location: Option<PathBuf>,
    /// The directory of all logs in files [default: LOG_LOCATION, else logs]
    #[arg(id = "log-location", long = "log-location", value_name = "DIR", env = "PHAROS_LOG_LOCATION", help_heading = TSLOG)]
    pub log_location: Option<PathBuf>,
    /// The size at which a metric log is compressed and a new one begun; 0 for never
    #[arg(id = "tslog-max-bytes", long = "tslog-max-bytes", value_name = "BYTES", default_value_t = 100_000_000, env = "PHAROS_TSLOG_MAX_BYTES", value_parser = whole(0..=u64::MAX), help_heading = TSLOG)]
    pub max_bytes: u64,
    /// Compressed metric logs that are kept of each kind
    #[arg(id = "tslog-keep", long = "tslog-keep", value_name = "N", default_value_t = 5, env = "PHAROS_TSLOG_KEEP", value_parser = whole(0..=u32::MAX), help_heading = TSLOG)]
    pub keep: u32,
    /// The most lines of metrics in a second; 0 for no bound. Beyond it counters are summed, other samples skipped
    #[arg(id = "tslog-lines-per-second", long = "tslog-lines-per-second", value_name = "N", default_value_t = 10_000, env = "PHAROS_TSLOG_LINES_PER_SECOND", value_parser = whole(0..=u32::MAX), help_heading = TSLOG)]
    pub lines_per_second: u32,
    /// Write the lines to standard output too, with the logger's name
    #[arg(id = "tslog-stdout", long = "tslog-stdout", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_TSLOG_STDOUT", value_parser = boolean, help_heading = TSLOG)]
    pub stdout: bool,
    /// The form of the lines: text (TorchServe's) or json
    #[arg(id = "tslog-format", long = "tslog-format", value_name = "FORMAT", default_value = "text", env = "PHAROS_TSLOG_FORMAT", value_parser = ["text", "json"], help_heading = TSLOG)]
    pub format: String,
}

impl Tslog {
    /// The directory that is named for the metric logs: by a flag, or by one of TorchServe's variables, which `variable` looks
    /// up.
    pub fn named_location(&self, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let metrics = self.metrics_location.clone().or_else(|| given("METRICS_LOCATION"));
        metrics.or_else(|| self.log_location.clone()).or_else(|| given("LOG_LOCATION"))
    }

    /// The directory of the metric logs.
    pub fn location(&self, variable: impl Fn(&str) -> Option<OsString>) -> PathBuf {
        self.named_location(variable).unwrap_or_else(|| PathBuf::from("logs"))
    }
}

impl Options {
    /// Parses a command line (with the program's name first) and the environment.
    ///
    /// # Errors
    /// What is wrong, with the flag, the value and what is allowed; also `--help` and `--version`. The caller prints it and
    /// exits with its code (`clap::Error::exit`).
    pub fn from_args(args: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Self, clap::Error> {
        let args = args.into_iter().map(Into::into).collect();
        let Start { command, args, ignored } = Start::new(Self::command(), args, |name| std::env::var_os(name));
        let explained = |error| refusal::explained(error, &command, &args);
        let mut matches = command.clone().try_get_matches_from(&args).map_err(explained)?;
        let origins = refusal::Origins::new(&command, &matches);
        let options = Self::from_arg_matches_mut(&mut matches).map_err(|error| error.with_cmd(&command))?;
        let options = Self { ignored, origins, ..options };
        match options.check() {
            Ok(()) => Ok(options),
            Err(text) => {
                let text = options.origins.explain(&text);
                Err(command.clone().error(clap::error::ErrorKind::ValueValidation, text))
            }
        }
    }

    /// # Errors
    /// Options contradict each other.
    fn check(&self) -> Result<(), String> {
        self.cache()?;
        self.models.check()?;
        self.tracing()?;
        cloud::check(self)
    }

    /// Adds to a message about flags the variables from which they came.
    pub fn with_origins(&self, text: &str) -> String {
        self.origins.explain(text)
    }

    /// What was given and is probably not meant so, a sentence each; for the log.
    pub fn warnings(&self) -> Vec<String> {
        let mut all = self.ignored.clone();
        all.extend(self.models.warnings());
        if self.response_cache.byte_size.is_some() {
            all.push("--response-cache-byte-size is deprecated: use --cache-config=local,size=BYTES".to_owned());
        }
        if self.rate_limiter.limits().is_none() && !self.rate_limiter.resources.is_empty() {
            all.push("--rate-limit-resource has no effect without --rate-limit=execution_count".to_owned());
        }
        all
    }

    /// The flags that were given and have no effect, each with the reason; for the log.
    pub fn without_effect(&self) -> Vec<String> {
        [self.accepted.without_effect(), self.grpc_clients.without_effect(), cloud::without_effect(self)].concat()
    }

    /// The response cache, if there is to be one.
    ///
    /// # Errors
    /// What is said about it does not hold together; [`Options::from_args`] refuses that.
    pub fn cache(&self) -> Result<Option<pharos_engine::cache::Settings>, String> {
        let ResponseCache { configs, byte_size } = &self.response_cache;
        cache::cache(configs, *byte_size, |name| std::env::var(name).ok())
            .map_err(|text| format!("--cache-config: {text}"))
    }

    /// What is traced from the start, and where traces go.
    ///
    /// # Errors
    /// A value is not allowed; [`Options::from_args`] refuses that.
    pub fn tracing(&self) -> Result<Tracing, String> {
        trace::tracing(&self.trace, |name| std::env::var(name).ok()).map_err(|text| format!("--trace-config: {text}"))
    }

    /// The file that defines the metrics, if there is one, and what is said over it.
    pub fn metrics_definition(&self) -> (Option<PathBuf>, Overrides) {
        definition::definition(&self.metrics.config, self.metrics.mode)
    }

    /// The address that metrics are served on.
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
    fn defaults_are_tritons_but_for_the_metrics_port() {
        let options = parse(&[]).unwrap();
        assert_eq!((options.http.port, options.grpc.port, options.metrics.port), (8000, 8001, 8082));
        assert_eq!(options.general.exit_timeout_secs, Duration::from_secs(30));
        assert!(options.general.exit_on_error && options.general.strict_readiness && options.http.allow);
        assert!(options.models.auto_complete());
        assert_eq!(options.models.default_max_batch_size("onnxruntime"), 4);
        assert_eq!(options.metrics_address(), options.http.address);
        assert_eq!(options.http.max_input_size, 67_108_864);
        assert!(options.metrics.allow_cpu && options.metrics.allow_gpu);
        assert_eq!(options.metrics.interval, Duration::from_secs(2));
    }

    #[test]
    fn tritons_forms_are_taken() {
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
        assert_eq!(options.models.locations(), ["models", "more"].map(|path| Location::Directory(path.into())));
        assert!(!options.grpc.allow && !options.general.exit_on_error);
        assert!(!options.models.auto_complete());
        assert_eq!(options.models.default_max_batch_size("onnxruntime"), 16);
        assert_eq!(options.models.default_max_batch_size("tract"), 8);
        assert!(options.http.address.is_loopback());
        assert_eq!(options.workers.worker_threads, Some(2));
    }

    #[test]
    fn statsd_is_received_over_udp_or_a_unix_socket_and_not_at_all_unless_asked() {
        let at = |text: &str| parse(&[&format!("--statsd-address={text}")]).unwrap().metrics.statsd.unwrap();
        let udp = |host: &str| StatsdAddress::Udp(host.to_owned(), 8125);
        assert_eq!(
            (at("127.0.0.1:8125"), at("udp://metrics.example:8125")),
            (udp("127.0.0.1"), udp("metrics.example"))
        );
        assert_eq!((at("[::1]:8125"), at("udp:[::]:8125")), (udp("::1"), udp("::")));
        let unix = StatsdAddress::Unix("/run/s.sock".into());
        for form in ["unix:/run/s.sock", "unix:///run/s.sock", "unixgram:/run/s.sock", "unixgram:///run/s.sock"] {
            assert_eq!(at(form), unix);
        }
        assert_eq!(parse(&[]).unwrap().metrics.statsd, None);
    }

    #[test]
    fn resources_are_limited_when_the_rate_limiter_is_on() {
        let limit = |name: &str, count, device| Limit { name: name.to_owned(), count, device };
        let resources = ["--rate-limit-resource=R:4", "--rate-limit-resource=s:0:1;R:2:0"];
        let on = parse(&[&resources[..], &["--rate-limit=Execution_Count"]].concat()).unwrap().rate_limiter;
        assert_eq!(on.limits(), Some(vec![limit("R", 4, None), limit("s", 0, Some(1)), limit("R", 2, Some(0))]));
        assert_eq!(parse(&["--rate-limit=execution_count"]).unwrap().rate_limiter.limits(), Some(Vec::new()));
        assert_eq!(parse(&resources).unwrap().rate_limiter.limits(), None);
    }

    #[test]
    fn gpus_have_limits_and_a_pool() {
        let limit = |device, fraction| GpuLimit { device, fraction };
        let plain = parse(&[]).unwrap().gpus;
        assert_eq!((plain.model_load_gpu_limit, plain.pinned_memory_pool_byte_size), (vec![], 268_435_456));
        let given =
            ["--model-load-gpu-limit=0:0.6", "--model-load-gpu-limit", "1:1;3:0", "--pinned-memory-pool-byte-size=0"];
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
    fn torchserves_variables_stand_behind_the_flags() {
        let none = |_: &str| None;
        let variable = |name: &str| match name {
            "METRICS_LOCATION" => Some(OsString::from("m")),
            _ => None,
        };
        let logs = |name: &str| (name == "LOG_LOCATION").then(|| OsString::from("l"));
        let plain = parse(&[]).unwrap().tslog;
        assert_eq!((plain.location(none), plain.location(variable)), (PathBuf::from("logs"), PathBuf::from("m")));
        assert_eq!(plain.location(logs), PathBuf::from("l"));
        assert_eq!(parse(&["--log-location=a"]).unwrap().tslog.location(none), PathBuf::from("a"));
        let given = parse(&["--metrics-location=b", "--log-location=a"]).unwrap().tslog;
        assert_eq!(given.location(variable), PathBuf::from("b"));
    }

    /// Each command line is refused with a message that has all of these parts.
    fn check_refused(cases: &[(&[&str], &[&str])]) {
        for (args, expected) in cases {
            let message = parse(args).unwrap_err();
            for part in *expected {
                assert!(message.contains(part), "{args:?} should name {part:?}: {message}");
            }
        }
    }

    #[test]
    fn a_bad_value_names_flag_value_and_what_is_allowed() {
        check_refused(&[
            (&["--http-port=x"][..], &["invalid --http-port \"x\": expected a number from 0 to 65535"][..]),
            (&["--http-port=70000"], &["invalid --http-port \"70000\": expected a number from 0 to 65535"]),
            (&["--allow-http=maybe"], &["--allow-http", "maybe", "allowed are true"]),
            (
                &["--model-control-mode=often"],
                &["--model-control-mode", "often", "allowed are none, poll and explicit"],
            ),
            (&["--load-model=m"], &["Use of '--load-model' requires setting '--model-control-mode=explicit' as well."]),
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
            (&["--statsd-address=8125"], &["--statsd-address", "\"8125\"", "HOST:PORT", "unix:PATH"]),
            (&["--statsd-address=localhost:x"], &["--statsd-address", "'x' is no port", "unix:PATH"]),
            (&["--statsd-address=::1:8125"], &["--statsd-address", "[::1]:8125"]),
            (&["--statsd-address=/run/statsd.sock"], &["--statsd-address", "unix:PATH"]),
            (&["--statsd-address=unix:"], &["--statsd-address", "unix:PATH"]),
        ]);
        assert!(Options::from_args(["pharos"]).unwrap_err().to_string().contains("--model-repository"));
    }

    #[test]
    fn a_bad_value_names_its_form() {
        check_refused(&[
            (&["--rate-limit=on"], &["--rate-limit", "\"on\"", "invalid argument for --rate-limit", "execution_count"]),
            (&["--rate-limit-resource=R"], &["'<resource_name>:<count>:<device>' or '<resource_name>:<count>'. Got R"]),
            (&["--rate-limit-resource=R:1:2:3"], &["'<resource_name>:<count>'. Got R:1:2:3"]),
            (&["--rate-limit-resource=R:x"], &["Got R:x", "whole numbers from 0 to 4294967295"]),
            (&["--rate-limit-resource=R:1:-2"], &["Got R:1:-2", "whole numbers"]),
            (&["--rate-limit-resource=:1"], &["option format is", "Got :1"]),
            (&["--tslog-format=xml"], &["--tslog-format \"xml\": allowed are text, json"]),
            (&["--cache-config=disk"], &["--cache-config", "\"disk\"", "local,size=BYTES"]),
            (&["--cache-config=local"], &["--cache-config", "needs its size"]),
            (
                &["--response-cache-byte-size=x"],
                &["--response-cache-byte-size", "\"x\": expected a whole number from 0 to"],
            ),
            (&["--htp-port=1"], &["unknown flag --htp-port; did you mean --http-port?\n"]),
            (&["--model-repo=m"], &["unknown flag --model-repo; did you mean --model-repository?\n"]),
            (&["--allow=1"], &["unknown flag --allow; flags that begin so: --", "--allow-http"]),
            (&["--tf-gpu-memory-fraction=1"], &["unknown flag --tf-gpu-memory-fraction; --help lists all flags\n"]),
            (&["--http-port"], &["--http-port needs a value: --http-port=PORT\n"]),
            (&["--cuda-memory-pool-byte-size=x"], &["--cuda-memory-pool-byte-size \"x\": expected DEVICE:BYTES"]),
            (
                &["--host-policy=cpu,speed=1"],
                &["--host-policy \"cpu,speed=1\": unknown setting 'speed'", "numa-node=N"],
            ),
            (&["--host-policy=cpu,cpu-cores=3-1"], &["expected NAME,cpu-cores=LIST"]),
            (&["--sagemaker-safe-port-range=9"], &["expected FIRST-LAST"]),
            (
                &["--allow-sagemaker", "--sagemaker-safe-port-range=8000-8001"],
                &["The server cannot listen to metrics requests at port 8082, allowed port range is [8000, 8001]"],
            ),
            (&["--metrics-mode=all"], &["--metrics-mode", "\"all\"", "tslog, prometheus, both, log, legacy"]),
            (&["--metrics-config=latencies=1"], &["--metrics-config", "'latencies'", "counter_latencies", "or a file"]),
            (&["--metrics-config=summary_latencies=x"], &["--metrics-config", "summary_latencies is 'x'", "true"]),
            (&["--metrics-config=summary_quantiles=2"], &["--metrics-config", "'2'", "between 0 and 1"]),
        ]);
    }

    #[test]
    fn the_variable_of_a_flag_is_named() {
        let mut origins = refusal::Origins::default();
        assert_eq!(origins.explain("--http-port is bad"), "--http-port is bad");
        let command =
            Options::command().mut_arg("http-port", |arg| arg.env("PATH").value_parser(OsStringValueParser::new()));
        let matches = command.clone().try_get_matches_from(["pharos", "--model-repository=m"]).unwrap();
        origins = refusal::Origins::new(&command, &matches);
        assert_eq!(origins.explain("--http-port is bad\nand more"), "--http-port is bad (from PATH)\nand more");
        assert_eq!(origins.explain("--http-ports is bad\n--http-port"), "--http-ports is bad\n--http-port");
        let command = Options::command().mut_arg("http-port", |arg| arg.env("PATH"));
        let bad = |args: &[&'static str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            let error = command.clone().try_get_matches_from(&args).unwrap_err();
            refusal::explained(error, &command, &args).to_string()
        };
        let path = std::env::var("PATH").unwrap();
        let text = bad(&["pharos", "--model-repository=m"]);
        let expected = format!("invalid --http-port \"{path}\": expected a number from 0 to 65535 (from PATH)\n");
        assert!(text.contains(&expected), "{text}");
        let text = bad(&["pharos", "--model-repository=m", "--http-port", "80a"]);
        assert!(text.contains("invalid --http-port \"80a\": expected a number from 0 to 65535\n"), "{text}");
    }

    #[test]
    fn fractions_of_milliseconds_are_taken() {
        let interval = |text: &str| parse(&[&format!("--metrics-interval-ms={text}")]).map(|all| all.metrics.interval);
        assert_eq!(interval("1500.5"), Ok(Duration::from_micros(1_500_500)));
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(1)));
        for wrong in ["-1", "NaN", "inf", "86400001"] {
            assert!(interval(wrong).unwrap_err().contains("milliseconds greater than 0"), "{wrong}");
        }
    }

    #[test]
    fn metrics_are_configured_by_a_file_and_by_settings() {
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
    fn torchserves_variables_stand_in_for_ours() {
        let variables = |set: &[&str]| {
            let set: Vec<OsString> = set.iter().map(OsString::from).collect();
            let is_set = |name: &OsStr| set.iter().any(|set| set == name);
            let command = definition::with_torchserves_variables(Options::command(), is_set);
            let arg = command.get_arguments().find(|arg| arg.get_id() == "metrics-mode").unwrap().get_env().unwrap();
            arg.to_str().unwrap().to_owned()
        };
        assert_eq!(variables(&["TS_METRICS_MODE"]), "TS_METRICS_MODE");
        assert_eq!(variables(&["TS_METRICS_MODE", "PHAROS_METRICS_MODE"]), "PHAROS_METRICS_MODE");
        assert_eq!(variables(&[]), "PHAROS_METRICS_MODE");
    }

    #[test]
    fn commands_need_no_repository() {
        let command = |args: &[&str]| Options::from_args(["pharos"].iter().chain(args)).map(|o| o.command.unwrap());
        let Ok(Command::Metrics(MetricsCommand::Check { file })) = command(&["metrics", "check", "m.yaml"]) else {
            panic!("no check");
        };
        assert_eq!(file, PathBuf::from("m.yaml"));
        let list = command(&["metrics", "list", "--format=json"]).unwrap();
        let Command::Metrics(MetricsCommand::List { file: None, format: Form::Json }) = list else {
            panic!("{list:?}")
        };
        for (args, expected) in [
            (&["metrics", "list", "--format=xml"][..], "allowed are table, json, markdown"),
            (&["metrics", "check"], "<FILE>"),
            (&["metrics", "chck"], "check"),
            (&["serve"], "serve"),
        ] {
            let message = command(args).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn every_flag_has_help_a_group_and_a_variable_of_its_name() {
        let command = Options::command();
        for arg in command.get_arguments().filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version")) {
            let flag = arg.get_long().unwrap();
            let variable = format!("PHAROS_{}", flag.to_uppercase().replace('-', "_"));
            assert_eq!(arg.get_env().and_then(|env| env.to_str()), Some(variable.as_str()), "--{flag}");
            assert!(arg.get_help().is_some() && arg.get_help_heading().is_some(), "--{flag}");
        }
    }
}
