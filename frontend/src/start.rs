//! The start and the end of the server, in order.

mod clouds;
mod executable;
mod listen;
mod open_loading;
mod torchserve;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pharos::metrics::cache;
use pharos::metrics::catalog::{Mode, listing};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::cli::{self, Command, ControlMode, Options, Tslog};
use crate::commands;
use clouds::Clouds;
use executable::Executable;
use listen::Listeners;
use pharos_engine::launch::Program;
use pharos_engine::loader;
use pharos_engine::onnxruntime;
use pharos_engine::shared_memory;
use pharos_engine::store;
use pharos_engine::store::Registered;
use pharos_engine::{self as engine, Engine, Unfinished};
use pharos_listener::Phase;
use pharos_listener::receiving::Budget;
use pharos_listener::request_log;
use pharos_os::descriptors::{self, Descriptors};
use pharos_os::directories;
use pharos_telemetry::log;
use pharos_telemetry::metrics::{Definition, Source};
use pharos_telemetry::system::{self, Devices, Gpus, HostPolicies, Roots, find_gpus};
use pharos_telemetry::tslog;
use pharos_torchserve::{Plan, Step};
use torchserve::Endpoints;

/// How long connections may take to carry away the last answers after everything else has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// How long traces that wait may take to be written or sent after that.
const LAST_TRACES: Duration = Duration::from_secs(5);
/// How long an exporter that has exceeded its limit may take to log that.
const LOGGED: Duration = Duration::from_secs(1);

/// How long the last lines of the metric logs may take to be written: a file system that hangs does not keep the server.
const LAST_LINES: Duration = Duration::from_secs(5);

/// How long each of these may take after a second signal.
const HURRIED: Duration = Duration::from_millis(200);

/// Runs the server until a signal ends it.
pub fn main() -> ExitCode {
    let options = match Options::from_args(std::env::args_os()) {
        Ok(options) => options,
        Err(error) => error.exit(),
    };
    match &options.command {
        Some(Command::Metrics(command)) => return commands::metrics(command),
        Some(Command::Trace(command)) => return commands::trace(command),
        Some(Command::TorchServe(arguments)) => {
            return match pharos_torchserve::run(arguments, &Executable) {
                Ok(Step::Done) => ExitCode::SUCCESS,
                Ok(Step::Serve(plan)) => run(&plan.options, Some(&plan)),
                Err(reason) => failed(&reason),
            };
        }
        None => {}
    }
    run(&options, None)
}

/// Serves as the options say, and TorchServe's endpoints as well if there is a plan for those.
fn run(options: &Options, plan: Option<&Plan<Options>>) -> ExitCode {
    request_log::enable(options.log.access);
    let log = match plan {
        Some(plan) => log::start_torchserve(&options.log.options(), &plan.logs),
        None => log::start(&options.log.options()),
    };
    let log = match log {
        Ok(log) => log,
        Err(reason) => return failed(&reason),
    };
    options.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    options.without_effect().iter().for_each(|flag| tracing::info!("{flag}"));
    let descriptors = Descriptors::new(descriptors::raise());
    tracing::info!("{}", descriptors.describe());
    directories::remove_left(&[pharos_torchserve::DIRECTORY]);
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if let Some(threads) = options.http_clients.threads {
        runtime.worker_threads(threads as usize);
    }
    let runtime = match runtime.enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&format!("the runtime cannot be started: {error}")),
    };
    let result = runtime.block_on(serve(options, plan, descriptors));
    runtime.shutdown_background();
    drop(log);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => failed(&options.with_origins(&reason)),
    }
}

/// The last words, on standard error even when logging is off.
fn failed(reason: &str) -> ExitCode {
    log::last_words(&format!("pharos: {reason}"));
    ExitCode::FAILURE
}

/// Binds first, so that a port in use is known before minutes go into loading; then loads, serves, and ends in order.
async fn serve(options: &Options, plan: Option<&Plan<Options>>, descriptors: Arc<Descriptors>) -> Result<(), String> {
    let mut ends = Ends::new().map_err(|error| format!("signals cannot be received: {error}"))?;
    let hangup = signal(SignalKind::hangup()).map_err(|error| format!("signals cannot be received: {error}"))?;
    let (file, overrides) = options.metrics_definition();
    let source = Source { file, overrides, usual_mode: Some(usual_mode(options)) };
    let metrics = source.read()?;
    tracing::info!("metrics from {source}: {}", listing::summary(&metrics.catalog));
    let logs = metric_logs(options, metrics.names_mode);
    let clouds = Clouds::new(options, plan.is_some())?;
    let (engine, system) = engine(options, metrics, (descriptors, clouds.registered())).await?;
    let tslog = tslog::Writer::start(engine.cache().clone(), logs).map_err(|error| error.to_string())?;
    let _polling = engine.watch_system(system).map_err(|error| error.to_string())?;
    let hung_up = Arc::new(Notify::new());
    tokio::spawn(reload(hangup, hung_up.clone(), engine.clone(), source));
    let (phase, life) = watch::channel(Phase::Serving);
    let budget = receive_budget(options);
    let listeners = Listeners { options, engine: &engine, life: life.clone(), hangup: hung_up, budget: budget.clone() };
    let guards = listeners.guards()?;
    open_loading::warn(options, plan, &guards);
    let mut listeners = listeners.open(&guards, clouds.platforms()).await?;
    let mut endpoints = plan.map(|plan| Endpoints::new(plan, &engine, (life, guards, budget))).transpose()?;
    let loaded = tokio::select! {
        loaded = load(&engine, options, (endpoints.as_mut(), &clouds)) => loaded.map(|tasks| listeners.extend(tasks)),
        () = ends.next() => Ok(()),
    };
    if loaded.is_ok() && ends.seen == 0 {
        tracing::info!("ready");
        ends.next().await;
    }
    if let Some(endpoints) = endpoints {
        endpoints.stopping();
    }
    let unfinished = match &loaded {
        Ok(()) => end(options, &engine, &mut ends, &phase).await,
        Err(_) => {
            tracing::info!("exiting: not all models were loaded");
            finish(options.general.exit_timeout_secs, &engine, &mut ends, &phase).await
        }
    };
    phase.send_replace(Phase::Stopping);
    for listener in listeners {
        ends.wait(LAST_ANSWERS, async { drop(listener.await) }).await;
    }
    // Longer than the exporter's own limit, so that it can log what it could not send.
    ends.wait(LAST_TRACES + LOGGED, engine.stop_tracing(LAST_TRACES)).await;
    tslog.stop(if ends.seen < 2 { LAST_LINES } else { HURRIED });
    loaded.and_then(|()| check_finished(unfinished))
}

/// An error if the exit timeout expired before all was answered.
fn check_finished(unfinished: Unfinished) -> Result<(), String> {
    match unfinished {
        Unfinished { requests: 0, sequences: 0 } => Ok(()),
        Unfinished { requests, sequences } => Err(format!(
            "Exit timeout expired. Exiting immediately. {requests} requests were not answered, {sequences} sequences not \
             finished"
        )),
    }
}

/// Loads the models, and those that the endpoints of a plan register at the start. Gives the tasks of the ports that this
/// opens.
async fn load(
    engine: &Engine,
    options: &Options,
    (endpoints, clouds): (Option<&mut Endpoints>, &Clouds),
) -> Result<Vec<JoinHandle<()>>, String> {
    report(engine.load().await.map_err(|error| error.to_string())?, options)?;
    clouds.models_are_loaded(engine).await?;
    match endpoints {
        Some(endpoints) => endpoints.start().await,
        None => Ok(Vec::new()),
    }
}

/// Reads the definition of the metrics, certificates and tokens again at every SIGHUP. A bad one changes nothing.
async fn reload(mut hangup: Signal, hung_up: Arc<Notify>, engine: Engine, source: Source) {
    while hangup.recv().await.is_some() {
        log::reopen();
        hung_up.notify_waiters();
        let (engine, read) = (engine.clone(), source.clone());
        let result = tokio::task::spawn_blocking(move || engine.reload_metrics(&read)).await;
        match result.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(difference) => tracing::info!("metrics read again from {source}: {difference}"),
            Err(reason) => tracing::error!("the metrics stay as they were: {reason}"),
        }
    }
}

/// The memory of requests that are being received: as configured, or a quarter of what this process may use, since the
/// library that decodes a message has a copy of it for a moment.
fn receive_budget(options: &Options) -> Budget {
    let usual = || system::memory_limit(&Roots::new(&options.metrics.cgroup_root)) / 4;
    Budget::new(options.http_clients.receive_memory.unwrap_or_else(usual))
}

/// The mode of metrics if none is named: logs are written only if something says where.
fn usual_mode(options: &Options) -> Mode {
    let named = options.tslog.named_location(|name| std::env::var_os(name)).is_some();
    if named || options.tslog.stdout { Mode::Both } else { Mode::Prometheus }
}

/// Without a directory and a mode that are named, lines go to standard output alone, if that is wanted.
fn metric_logs(options: &Options, names_mode: bool) -> tslog::Settings {
    let Tslog { max_bytes, keep, lines_per_second, stdout, format, .. } = &options.tslog;
    let variable = |name: &str| std::env::var_os(name);
    let named = options.tslog.named_location(variable);
    tslog::Settings {
        location: named.or_else(|| (names_mode || !stdout).then(|| options.tslog.location(variable))),
        max_bytes: *max_bytes,
        keep: *keep as usize,
        stdout: *stdout,
        json: format == "json",
        lines_per_second: *lines_per_second,
    }
}

/// Is no longer ready for a while, then refuses new requests and finishes those in flight. A second signal ends the waiting.
async fn end(options: &Options, engine: &Engine, ends: &mut Ends, phase: &watch::Sender<Phase>) -> Unfinished {
    let (delay, patience) = (options.general.exit_delay_secs, options.general.exit_timeout_secs);
    if !delay.is_zero() {
        tracing::info!("exiting: no longer ready, serving for {} s more", delay.as_secs());
        engine.leave();
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = ends.next() => engine.hurry(),
        }
    }
    tracing::info!("exiting: waiting up to {} s for requests in flight", patience.as_secs());
    finish(patience, engine, ends, phase).await
}

/// Refuses new requests and finishes those in flight, for as long as `patience` lasts. A signal aborts that.
async fn finish(patience: Duration, engine: &Engine, ends: &mut Ends, phase: &watch::Sender<Phase>) -> Unfinished {
    engine.refuse();
    phase.send_replace(Phase::Draining);
    let shutting_down = engine.shut_down(patience);
    tokio::pin!(shutting_down);
    tokio::select! {
        unfinished = &mut shutting_down => return unfinished,
        () = ends.next() => engine.hurry(),
    }
    shutting_down.await
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

/// The engine, and what of the system is to be measured for it.
async fn engine(
    options: &Options,
    metrics: Definition,
    (descriptors, registered): (Arc<Descriptors>, Option<Registered>),
) -> Result<(Engine, system::Settings), String> {
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
    let gpus = find_gpus(options.metrics.nvml_library.clone(), options.gpus.min_capability).await;
    let system = system_settings(&options.metrics, seen, gpus.clone());
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let limits = options.gpus.model_load_gpu_limit.iter().map(|limit| (limit.device, limit.fraction));
    let devices = Devices::new(gpus, visible.as_deref(), limits, &system.roots);
    let mut settings = settings(options, library, devices, descriptors)?;
    settings.loader.stores.registered = registered;
    let engine = Engine::new(settings, metrics, labels).map_err(|error| error.to_string())?;
    Ok((engine, system))
}

/// What of the system is measured, if it is `seen` at all.
fn system_settings(options: &cli::Metrics, seen: bool, gpus: Option<Arc<Gpus>>) -> system::Settings {
    system::Settings {
        interval: options.interval,
        log_interval: options.system_log_interval,
        cpu: seen && options.allow_cpu,
        gpus: gpus.filter(|_| seen && options.allow_gpu),
        roots: Roots::new(&options.cgroup_root),
    }
}

fn control_mode(options: &Options) -> loader::Mode {
    match options.models.control_mode {
        ControlMode::None => loader::Mode::None,
        ControlMode::Poll => loader::Mode::Poll(options.models.poll),
        ControlMode::Explicit => loader::Mode::Explicit,
    }
}

/// The program that runs models: `--worker-binary`, or the one beside this executable.
fn worker_binary(options: &Options) -> Result<PathBuf, String> {
    let beside = || std::env::current_exe().map(|path| path.with_file_name("pharos-worker"));
    let worker = options.workers.worker_binary.clone().map_or_else(beside, Ok).map_err(|error| error.to_string())?;
    if worker.is_file() {
        return Ok(worker);
    }
    Err(format!(
        "the worker '{}', which runs the models, does not exist: it belongs beside pharos and comes with it, so reinstall \
         the package that pharos came with, or copy pharos-worker from there (from source: `cargo build --release` \
         makes both); --worker-binary names another",
        worker.display()
    ))
}

fn settings(
    options: &Options,
    onnxruntime: Option<PathBuf>,
    devices: Arc<Devices>,
    descriptors: Arc<Descriptors>,
) -> Result<engine::Settings, String> {
    let worker = worker_binary(options)?;
    match &onnxruntime {
        Some(library) => tracing::info!("ONNX models run on ONNX Runtime, {}", library.display()),
        None => tracing::info!("ONNX models run on the embedded tract; `pip install onnxruntime` makes them faster"),
    }
    let execution_timeout = options.workers.worker_execution_timeout_secs;
    let (policies, doubts) = HostPolicies::new(&options.host_policies.policies, Path::new("/sys/devices/system/node"));
    doubts.iter().for_each(|doubt| tracing::warn!("{doubt}"));
    let shared_memory = shared_memory::Settings { allowed: options.shared_memory.allowed, worker: worker.clone() };
    Ok(engine::Settings {
        name: options.general.id.clone(),
        strict_readiness: options.general.strict_readiness,
        trace: options.tracing()?,
        shared_memory,
        loader: loader::Settings {
            stores: store::Settings {
                locations: options.models.locations(),
                registered: None,
                namespaces: options.models.namespacing,
                model_name: options.models.model_name.clone(),
                cache_directory: options.models.cache_directory.clone(),
            },
            program: program(options, worker, onnxruntime)?,
            auto_complete: options.models.auto_complete(),
            default_max_batch_size: options.models.default_max_batch_size("onnxruntime"),
            mode: control_mode(options),
            model_policy: Arc::new(pharos_torchserve::Policy),
            at_start: match options.models.loads_all() {
                true => loader::AtStart::All,
                false => loader::AtStart::Named(options.models.load_model.clone()),
            },
            config_name: options.models.config_name.clone(),
            load_threads: options.models.load_thread_count as usize,
            load_retries: options.models.load_retry_count,
            start_timeout: options.workers.worker_start_timeout_secs,
            python_start_timeout: options.models.python_start_timeout(),
            max_backoff: options.workers.worker_max_backoff_secs,
            max_wait: options.workers.worker_max_wait_secs,
            execution_timeout: (!execution_timeout.is_zero()).then_some(execution_timeout),
            worker_threads: options.workers.worker_threads.unwrap_or(0),
            devices,
            pinned_pool: options.gpus.pinned_memory_pool_byte_size,
            rate_limits: options.rate_limiter.limits(),
            policies,
            descriptors,
            response_cache: options.cache()?,
        },
    })
}

/// The programs that run models.
fn program(options: &Options, worker: PathBuf, onnxruntime: Option<PathBuf>) -> Result<Program, String> {
    let workers = &options.workers;
    if let Some(directory) = workers.backend_directory.as_ref().filter(|directory| !directory.is_dir()) {
        return Err(format!("--backend-directory names '{}', which is no directory", directory.display()));
    }
    let beside =
        || std::env::current_exe().ok().map(|path| path.with_file_name("backends")).filter(|path| path.is_dir());
    Ok(Program {
        worker,
        onnxruntime,
        python: workers.python.clone(),
        backends: workers.backend_directory.clone().or_else(beside),
        hidden: hidden_variables(workers),
        deployment_backends: vec![pharos_torchserve::BACKEND],
        environments: workers.environment_cache_directory.clone().unwrap_or_else(Program::default_environments),
    })
}

/// The variables that workers do not get.
fn hidden_variables(workers: &cli::Workers) -> Vec<OsString> {
    let Some(pattern) = &workers.worker_hidden_variables else { return Vec::new() };
    let names = std::env::vars_os().map(|(name, _)| name);
    names.filter(|name| name.to_str().is_some_and(|name| pattern.is_match(name))).collect()
}

/// This machine's name, for labels.
fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// The signals that end the server.
struct Ends {
    terminate: Signal,
    interrupt: Signal,
    /// How many have come.
    seen: u32,
}

impl Ends {
    fn new() -> io::Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())?, seen: 0 })
    }

    /// Waits for the next signal.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
        self.seen += 1;
    }

    /// Waits for `work`, and after a second signal only for a moment more.
    async fn wait(&mut self, patience: Duration, work: impl Future<Output = ()>) {
        tokio::pin!(work);
        if self.seen < 2 {
            tokio::select! {
                _ = tokio::time::timeout(patience, &mut work) => return,
                () = self.next() => {}
            }
        }
        let _ = tokio::time::timeout(HURRIED, work).await;
    }
}
