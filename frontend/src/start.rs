//! The start and the end of the server, in order.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pharos::access::Restrictions;
use pharos::metrics::cache;
use pharos::metrics::catalog::{Mode, listing};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::cli::{self, Command, ControlMode, Options, Tslog};
use crate::engine::{self, Engine};
use crate::metrics::{self, Definition, Source};
use crate::process::Program;
use crate::system::{self, Gpus, Roots, find_gpus};
use crate::{grpc, http, log, onnxruntime, repository, statsd, tslog};

/// How long connections may take to carry away the last answers after everything else has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Runs the server until a signal ends it.
pub fn main() -> ExitCode {
    let options = match Options::from_args(std::env::args_os()) {
        Ok(options) => options,
        Err(error) => error.exit(),
    };
    if let Some(Command::Metrics(command)) = &options.command {
        return metrics::run(command);
    }
    if let Err(reason) = log::start(&options.log) {
        return failed(&reason);
    }
    raise_descriptor_limit();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&format!("the runtime cannot be started: {error}")),
    };
    let result = runtime.block_on(serve(&options));
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => failed(&reason),
    }
}

/// Lets this process open as many files as its user may. Each connection is one, and many systems start processes with
/// room for 1024, after which nobody could connect any more.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files, and so of connections, cannot be raised");
    }
}

/// The last words, on standard error even when logging is off.
fn failed(reason: &str) -> ExitCode {
    eprintln!("pharos: {reason}");
    ExitCode::FAILURE
}

/// Binds first, so that a port in use is known before minutes go into loading; then loads, serves, and ends in order.
async fn serve(options: &Options) -> Result<(), String> {
    let mut ends = Ends::new().map_err(|error| format!("signals cannot be received: {error}"))?;
    let hangup = signal(SignalKind::hangup()).map_err(|error| format!("signals cannot be received: {error}"))?;
    let (file, overrides) = options.metrics_definition();
    let source = Source { file, overrides };
    let metrics = source.read()?;
    tracing::info!("metrics from {source}: {}", listing::summary(&metrics.catalog));
    let (engine, system) = engine(options, metrics).await?;
    let tslog =
        tslog::Writer::start(engine.cache().clone(), metric_logs(options)).map_err(|error| error.to_string())?;
    let _polling = engine.watch_system(system).map_err(|error| error.to_string())?;
    tokio::spawn(reload_metrics(hangup, engine.clone(), source));
    let (stop, stopped) = watch::channel(false);
    let listeners = listen(options, &engine, &stopped).await?;
    let loaded = tokio::select! {
        loaded = engine.load() => report(loaded.map_err(|error| error.to_string())?, options),
        () = ends.next() => Ok(()),
    };
    if loaded.is_ok() && !ends.seen {
        tracing::info!("ready");
        ends.next().await;
    }
    let unanswered = end(options, &engine, &mut ends).await;
    let _ = stop.send(true);
    for listener in listeners {
        let _ = tokio::time::timeout(LAST_ANSWERS, listener).await;
    }
    tslog.stop();
    loaded?;
    match unanswered {
        0 => Ok(()),
        count => Err(format!("Exit timeout expired. Exiting immediately. {count} requests were not answered")),
    }
}

/// Reads the definition of the metrics again at every SIGHUP. A bad one changes nothing.
async fn reload_metrics(mut hangup: Signal, engine: Engine, source: Source) {
    while hangup.recv().await.is_some() {
        log::reopen();
        let (engine, read) = (engine.clone(), source.clone());
        let result = tokio::task::spawn_blocking(move || engine.reload_metrics(&read)).await;
        match result.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(difference) => tracing::info!("metrics read again from {source}: {difference}"),
            Err(reason) => tracing::error!("the metrics stay as they were: {reason}"),
        }
    }
}

fn metric_logs(options: &Options) -> tslog::Settings {
    let Tslog { max_bytes, keep, lines_per_second, stdout, format, .. } = &options.tslog;
    tslog::Settings {
        location: options.tslog.location(|name| std::env::var_os(name)),
        max_bytes: *max_bytes,
        keep: *keep as usize,
        stdout: *stdout,
        json: format == "json",
        lines_per_second: *lines_per_second,
    }
}

/// Refuses new requests and finishes the accepted ones. A second signal ends the patience.
async fn end(options: &Options, engine: &Engine, ends: &mut Ends) -> usize {
    let patience = options.general.exit_timeout_secs;
    tracing::info!("exiting: waiting up to {} s for requests in flight", patience.as_secs());
    let impatient = engine.clone();
    tokio::select! {
        unanswered = engine.shut_down(patience) => unanswered,
        () = ends.next() => impatient.shut_down(Duration::ZERO).await,
    }
}

/// Says which models are not there, and whether the server goes on without them.
fn report(failures: Vec<(String, String)>, options: &Options) -> Result<(), String> {
    if failures.is_empty() {
        return Ok(());
    }
    if options.general.exit_on_error {
        let lines: Vec<String> = failures.iter().map(|(model, reason)| format!("\n  {model}: {reason}")).collect();
        let text =
            format!("{} could not be loaded:{}", if lines.len() == 1 { "a model" } else { "models" }, lines.concat());
        return Err(format!("{text}\n(with --exit-on-error=false the server goes on with the others)"));
    }
    let names: Vec<&str> = failures.iter().map(|(model, _)| model.as_str()).collect();
    tracing::warn!("going on without {}", names.join(", "));
    Ok(())
}

/// Opens the listeners and serves on them.
async fn listen(
    options: &Options,
    engine: &Engine,
    stopped: &watch::Receiver<bool>,
) -> Result<Vec<JoinHandle<()>>, String> {
    let mut tasks = Vec::new();
    let shutdown = || {
        let mut stopped = stopped.clone();
        async move {
            // An error means that the sender is gone: the server ends too.
            let _ = stopped.wait_for(|stopped| *stopped).await;
        }
    };
    if options.http.allow {
        let listener = bind("HTTP", "--http-port", options.http.address, options.http.port).await?;
        let settings = http::Settings {
            max_input_size: options.http.max_input_size,
            restricted: restricted(&options.http.restricted, HTTP_RESTRICTED)?,
        };
        tasks.push(tokio::spawn(http::serve(listener, engine.clone(), settings, shutdown())));
    }
    if options.grpc.allow {
        let listener = bind("gRPC", "--grpc-port", options.grpc.address, options.grpc.port).await?;
        let settings = grpc::Settings { restricted: restricted(&options.grpc.restricted, GRPC_RESTRICTED)? };
        let (engine, shutdown) = (engine.clone(), shutdown());
        tasks.push(tokio::spawn(async move {
            if let Err(error) = grpc::serve(listener, engine, settings, shutdown).await {
                tracing::error!("gRPC does not serve: {error}");
            }
        }));
    }
    if options.metrics.allow {
        let listener = bind("metrics", "--metrics-port", options.metrics_address(), options.metrics.port).await?;
        tasks.push(tokio::spawn(http::metrics::serve(listener, engine.clone(), shutdown())));
    }
    if let Some(address) = &options.metrics.statsd {
        let socket = statsd::bind(address).await?;
        tasks.push(tokio::spawn(statsd::serve(socket, engine.cache().clone(), shutdown())));
    }
    Ok(tasks)
}

const HTTP_RESTRICTED: (&str, &str) = ("--http-restricted-api", "api");
const GRPC_RESTRICTED: (&str, &str) = ("--grpc-restricted-protocol", "protocol");

/// The restrictions of an edge.
fn restricted(groups: &[String], option: (&str, &str)) -> Result<Arc<Restrictions>, String> {
    let mut restrictions = Restrictions::default();
    groups.iter().try_for_each(|group| restrictions.add(group, option))?;
    Ok(Arc::new(restrictions))
}

async fn bind(what: &str, flag: &str, address: IpAddr, port: u16) -> Result<TcpListener, String> {
    let wanted = SocketAddr::new(address, port);
    let unusable = |error: io::Error| format!("{what} cannot listen on {wanted}: {error}; {flag} chooses another port");
    let listener = TcpListener::bind(wanted).await.map_err(unusable)?;
    let bound = listener.local_addr().map_err(unusable)?;
    tracing::info!("{what} on {bound}");
    Ok(listener)
}

/// The engine, and what of the system is to be measured for it.
async fn engine(options: &Options, metrics: Definition) -> Result<(Engine, system::Settings), String> {
    let library = onnxruntime::find(options.workers.onnxruntime_library.as_deref())?;
    let labels = cache::Settings {
        auto_detect: options.metrics.auto_detect,
        max_series: options.metrics.max_series as usize,
        statsd: options.metrics.statsd.is_some(),
        tslog_stdout: options.tslog.stdout,
        ..cache::Settings::new(&hostname())
    };
    // Seen by scrapes or in the metric logs; what nobody sees is not measured.
    let seen = options.metrics.allow || metrics.catalog.mode() != Mode::Prometheus;
    let system = system_settings(&options.metrics, seen).await;
    let settings = settings(options, library, system.gpus.clone())?;
    let engine = Engine::new(settings, metrics, labels).map_err(|error| error.to_string())?;
    Ok((engine, system))
}

/// What of the system is measured, if it is `seen` at all.
async fn system_settings(options: &cli::Metrics, seen: bool) -> system::Settings {
    let gpus = if seen && options.allow_gpu { find_gpus(options.nvml_library.clone()).await } else { None };
    system::Settings {
        interval: options.interval,
        log_interval: options.system_log_interval,
        cpu: seen && options.allow_cpu,
        gpus,
        roots: Roots::new(&options.cgroup_root),
    }
}

fn settings(
    options: &Options,
    onnxruntime: Option<PathBuf>,
    gpus: Option<Arc<Gpus>>,
) -> Result<engine::Settings, String> {
    let beside = || std::env::current_exe().map(|path| path.with_file_name("pharos-worker"));
    let worker = options.workers.worker_binary.clone().map_or_else(beside, Ok).map_err(|error| error.to_string())?;
    if !worker.is_file() {
        return Err(format!("the worker '{}' does not exist; --worker-binary names another", worker.display()));
    }
    match &onnxruntime {
        Some(library) => tracing::info!("ONNX models run on ONNX Runtime, {}", library.display()),
        None => tracing::info!("ONNX models run on the embedded tract; `pip install onnxruntime` makes them faster"),
    }
    if options.deprecated_cache_size() {
        tracing::warn!("--response-cache-byte-size is deprecated: use --cache-config local,size=BYTES");
    }
    let execution_timeout = options.workers.worker_execution_timeout_secs;
    let rate_limits = options.rate_limiter.limits();
    if rate_limits.is_none() && !options.rate_limiter.resources.is_empty() {
        tracing::warn!("--rate-limit-resource means nothing without --rate-limit=execution_count");
    }
    Ok(engine::Settings {
        name: options.general.id.clone(),
        strict_readiness: options.general.strict_readiness,
        repository: repository::Settings {
            repositories: options.models.places(),
            cache_directory: options.models.cache_directory.clone(),
            program: Program { worker, onnxruntime },
            auto_complete: !options.models.disable_auto_complete_config,
            default_max_batch_size: options.models.default_max_batch_size("onnxruntime"),
            mode: match options.models.control_mode {
                ControlMode::None => repository::Mode::None,
                ControlMode::Poll => repository::Mode::Poll(options.models.poll),
                ControlMode::Explicit => repository::Mode::Explicit,
            },
            at_start: match options.models.loads_all() {
                true => repository::AtStart::All,
                false => repository::AtStart::Named(options.models.load_model.clone()),
            },
            config_name: options.models.config_name.clone(),
            load_threads: options.models.load_thread_count as usize,
            load_retries: options.models.load_retry_count,
            start_timeout: options.workers.worker_start_timeout_secs,
            max_backoff: options.workers.worker_max_backoff_secs,
            execution_timeout: (!execution_timeout.is_zero()).then_some(execution_timeout),
            worker_threads: options.workers.worker_threads.unwrap_or(0),
            gpus,
            rate_limits,
            response_cache: options.cache()?,
        },
    })
}

/// This machine's name, for labels.
fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The signals that end the server.
struct Ends {
    terminate: Signal,
    interrupt: Signal,
    seen: bool,
}

impl Ends {
    fn new() -> io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())?, seen: false })
    }

    /// Waits for the next signal.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
        self.seen = true;
    }
}
