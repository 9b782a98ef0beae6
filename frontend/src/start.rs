//! Start and exit of the server, in order.

mod addresses;
mod chat_templates;
mod clouds;
mod ends;
mod executable;
mod listen;
mod metrics;
mod on_demand;
mod open_loading;
mod protection;
mod runtimes;
mod torchserve;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use pharos::metrics::cache;
use pharos::metrics::catalog::{Mode, listing};
use pharos::service::Service as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::cli::{Command, ControlMode, Options};
use crate::commands::{self, chat_template};
use crate::examples::Examples;
use chat_templates::OwnExecutable;
use clouds::Clouds;
use ends::{Ends, HURRIED};
use executable::Executable;
use listen::Listeners;
use pharos_edge::request_log;
use pharos_engine::launch::{NO_ONNX_RUNTIME, Program, has_tract};
use pharos_engine::loader;
use pharos_engine::onnxruntime;
use pharos_engine::shared_memory;
use pharos_engine::store::{self, Location};
use pharos_engine::{self as engine, Engine, Unfinished};
use pharos_listener::Phase;
use pharos_listener::receiving::Budget;
use pharos_openai::Models;
use pharos_os::descriptors::{self, Descriptors};
use pharos_os::service_manager::ServiceManager;
use pharos_os::{blocking, directories, threads};
use pharos_telemetry::log;
use pharos_telemetry::metrics::push::Push;
use pharos_telemetry::metrics::{Definition, Source};
use pharos_telemetry::system::{self, Devices, HostPolicies, Roots, find_gpus};
use pharos_telemetry::tslog;
use pharos_torchserve::{Plan, Step};
use runtimes::Runtimes;
use torchserve::Endpoints;

/// Maximum time, after the listeners are closed, to write or send pending traces and metrics.
const LAST_EXPORTS: Duration = Duration::from_secs(5);
/// Additional time for an exporter that exceeds this limit to log that.
const LOGGED: Duration = Duration::from_secs(1);

/// Maximum time to write the last lines of the metric logs, so that a file system that hangs does
/// not block the exit.
const LAST_LINES: Duration = Duration::from_secs(5);

/// Threads of the server beside its event loops: for logs, timers and measurements, and some that
/// load models.
const OTHER_THREADS: usize = 13;

/// How long workers look for their next frame before they sleep, in microseconds, where processors
/// are to spare.
const SPIN_US: u32 = 200;

/// Runs a command, or the server until a signal ends it.
pub fn main() -> ExitCode {
    // Nothing else may have started: the process sets limits for itself first.
    if chat_template::is_meant(std::env::args_os()) {
        return chat_template::run();
    }
    let options = match Options::from_args(std::env::args_os()) {
        Ok(options) => options,
        Err(error) => error.exit(),
    };
    match &options.command {
        Some(Command::Health { address, server_name, certificates }) => {
            return commands::health(
                address.as_deref(),
                &options.http,
                server_name.as_deref(),
                certificates,
            );
        }
        Some(Command::Metrics(command)) => return commands::metrics(command),
        Some(Command::Slo(command)) => return commands::slo(command),
        Some(Command::Top(command)) => return commands::top(command),
        Some(Command::Trace(command)) => return commands::trace(command),
        Some(Command::TorchServe(arguments)) => {
            return match pharos_torchserve::run(arguments, &Executable) {
                Ok(Step::Done) => ExitCode::SUCCESS,
                Ok(Step::Serve(plan)) => run(&plan.options, Some(&plan)),
                Err(reason) => failed(&reason),
            };
        }
        // As the first argument, these are replaced by flags and defaults; elsewhere they are
        // refused.
        Some(Command::Serve { .. } | Command::TritonServer) | None => {}
    }
    run(&options, None)
}

/// Runs the server with these options, and TorchServe's endpoints if there is a plan.
fn run(options: &Options, plan: Option<&Plan<Options>>) -> ExitCode {
    protection::apply();
    let loops =
        options.http_clients.threads.map_or_else(threads::processors, |count| count as usize);
    if let Err(error) = threads::check(loops + OTHER_THREADS) {
        return failed(&format!(
            "cannot start {} threads: {error}. Raise the limit of processes and threads of this \
             user (ulimit -u), service (TasksMax) or container (pids)",
            loops + OTHER_THREADS
        ));
    }
    request_log::enable(options.log.access);
    let started = match plan {
        Some(plan) => log::start_torchserve(&options.log.options(), &plan.logs),
        None => log::start(&options.log.options()),
    };
    let log = match started {
        Ok(log) => log,
        Err(reason) => return failed(&reason),
    };
    options.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    options.without_effect().iter().for_each(|flag| tracing::info!("{flag}"));
    let descriptors = Descriptors::new(descriptors::raise());
    tracing::info!("{}", descriptors.describe());
    directories::remove_abandoned(&[pharos_torchserve::DIRECTORY]);
    let runtimes = match Runtimes::start(loops) {
        Ok(runtimes) => runtimes,
        Err(error) => return failed(&format!("cannot start the async runtimes: {error}")),
    };
    let result = runtimes.main.block_on(serve(options, plan, descriptors, runtimes.threads()));
    runtimes.stop();
    drop(log);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => failed(&options.with_origins(&reason)),
    }
}

/// Returns the time that workers look for their next frame before they sleep. Without the flag, it
/// is 0 on a single processor, where the frontend could not run meanwhile, and under a quota, which
/// the time would use up.
fn spin(options: &Options) -> loader::WorkerSpin {
    if let Some(us) = options.workers.worker_spin_us {
        return loader::WorkerSpin { usual_us: us, limited_us: us };
    }
    // The standard library's number also respects quotas of cgroup v1, which are not read here.
    let allowed =
        rustix::thread::sched_getaffinity(None).map_or(0, |processors| processors.count() as usize);
    let roots = Roots::new(&options.metrics.cgroup_root);
    let has_quota = threads::processors() < allowed || system::has_cpu_quota(&roots);
    let usual_us = if threads::processors() < 2 || has_quota { 0 } else { SPIN_US };
    loader::WorkerSpin { usual_us, limited_us: 0 }
}

/// Prints the reason to standard error, even if logging is off.
fn failed(reason: &str) -> ExitCode {
    log::write_final_line(&format!("pharos: {reason}"));
    ExitCode::FAILURE
}

/// Binds the ports, loads the models, serves, and exits in order. Binding first reports a port in
/// use before models load.
async fn serve(
    options: &Options,
    plan: Option<&Plan<Options>>,
    descriptors: Arc<Descriptors>,
    threads: loader::Threads,
) -> Result<(), String> {
    let mut ends = Ends::new().map_err(|error| format!("cannot handle signals: {error}"))?;
    let manager = ServiceManager::start();
    let hangup =
        signal(SignalKind::hangup()).map_err(|error| format!("cannot handle signals: {error}"))?;
    let (file, overrides) = options.metrics_definition();
    let source =
        Source { file, overrides, usual_mode: Some(metrics::usual_mode(options, plan.is_some())) };
    let definition = source.read()?;
    tracing::info!("metrics from {source}: {}", listing::summary(&definition.catalog));
    let logs = metrics::logs(options, definition.names_mode);
    let clouds = Clouds::new(options, plan.is_some())?;
    // Its files are in use until the workers have ended.
    let examples =
        Examples::write(&options.models.examples).map_err(|error| format!("--example: {error}"))?;
    let event_loops = threads.event_loops.clone();
    let (engine, system) =
        engine(options, definition, descriptors, threads, &clouds, examples.as_ref()).await?;
    let tslog =
        tslog::Writer::start(engine.cache().clone(), logs).map_err(|error| error.to_string())?;
    let push = options.metrics_push()?.map(|settings| engine.push_metrics(settings)).transpose()?;
    let _polling = engine.watch_system(system).map_err(|error| error.to_string())?;
    tokio::spawn(engine.clone().keep_load_reports());
    let hung_up = Arc::new(Notify::new());
    tokio::spawn(reload(hangup, hung_up.clone(), engine.clone(), source));
    let (phase, phases) = watch::channel(Phase::Serving);
    let budget = receive_budget(options);
    let timing = options.response_times.setting();
    let listeners = Listeners {
        options,
        engine: &engine,
        phases,
        hangup: hung_up,
        budget,
        event_loops,
        timing,
        models: Arc::new(Models::new(Arc::new(OwnExecutable))),
    };
    let guards = listeners.guards()?;
    open_loading::warn(options, plan, &guards);
    let mut open = listeners.open(&guards, clouds.platforms()).await?;
    let mut endpoints =
        plan.map(|plan| Endpoints::new(plan, &engine, listeners.ports(guards))).transpose()?;
    let loaded = tokio::select! {
        loaded = load(&engine, options, endpoints.as_mut(), &clouds) => loaded.map(|tasks| open.extend(tasks)),
        () = ends.next() => Ok(()),
    };
    if loaded.is_ok() && ends.seen == 0 {
        match engine.ready() {
            true => tracing::info!("ready"),
            false => tracing::info!("serving, not ready: not all models are ready"),
        }
        manager.ready().await;
        ends.next().await;
    }
    manager.stopping().await;
    if let Some(endpoints) = endpoints {
        endpoints.stopping();
    }
    let finished = if loaded.is_ok() {
        end(options, &engine, &mut ends, &phase).await
    } else {
        tracing::info!("exiting: not all models were loaded");
        finish(options.general.exit_timeout_secs, &engine, &mut ends, &phase).await
    };
    phase.send_replace(Phase::Stopping);
    close(open, &engine, push, &mut ends).await;
    tslog.stop(if ends.seen < 2 { LAST_LINES } else { HURRIED });
    loaded.and(finished)
}

/// Waits until the listeners have sent the last responses and the exporters the last traces and
/// metrics, each within its limit.
async fn close(
    listeners: Vec<JoinHandle<()>>,
    engine: &Engine,
    push: Option<Push>,
    ends: &mut Ends,
) {
    ends.close(listeners).await;
    let last_metrics = async {
        if let Some(push) = push {
            push.stop(LAST_EXPORTS).await;
        }
    };
    let last_exports = async {
        tokio::join!(engine.stop_tracing(LAST_EXPORTS), last_metrics);
    };
    // Longer than the exporters' own limit, so that they can log unsent data.
    ends.wait(LAST_EXPORTS + LOGGED, last_exports).await;
}

/// Returns an error if requests or sequences were unfinished when the exit timeout expired or a
/// second signal came.
fn check_finished(unfinished: Unfinished, ends: &Ends) -> Result<(), String> {
    let why =
        if ends.seen < 2 { "Exit timeout expired" } else { "A second signal has ended the wait" };
    match unfinished {
        Unfinished { requests: 0, sequences: 0 } => Ok(()),
        Unfinished { requests, sequences } => Err(format!(
            "{why}. Exiting immediately. {requests} requests were not answered, {sequences} \
             sequences not finished"
        )),
    }
}

/// Loads the models, including the models of a plan, and opens the ports of the plan's endpoints.
/// Returns the tasks of these ports.
async fn load(
    engine: &Engine,
    options: &Options,
    endpoints: Option<&mut Endpoints>,
    clouds: &Clouds,
) -> Result<Vec<JoinHandle<()>>, String> {
    report(engine.load().await.map_err(|error| error.to_string())?, options)?;
    clouds.models_are_loaded(engine).await?;
    let Some(endpoints) = endpoints else {
        engine.all_is_loaded();
        return Ok(Vec::new());
    };
    let ports = endpoints.start().await?;
    // Not before these ports are open and their models are registered.
    engine.all_is_loaded();
    endpoints.announce();
    Ok(ports)
}

/// On each SIGHUP, reopens the log and reloads the metrics definition, certificates and tokens.
/// Invalid files change nothing.
async fn reload(mut hangup: Signal, hung_up: Arc<Notify>, engine: Engine, source: Source) {
    while hangup.recv().await.is_some() {
        log::reopen();
        hung_up.notify_waiters();
        let engine = engine.clone();
        let read = source.clone();
        let result = blocking::run(move || engine.reload_metrics(&read)).await;
        match result.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(difference) => tracing::info!("metrics reloaded from {source}: {difference}"),
            Err(reason) => tracing::error!(
                "metrics reload failed; the previous definition stays in use: {reason}"
            ),
        }
    }
}

/// Returns the memory limit of requests being received: the configured one, else a quarter of the
/// memory of this process, because decoding a message temporarily doubles its memory.
fn receive_budget(options: &Options) -> Budget {
    let configured = options.http_clients.receive_memory;
    Budget::new(
        configured
            .unwrap_or_else(|| system::memory_limit(&Roots::new(&options.metrics.cgroup_root)) / 4),
    )
}

/// Reports the server as not ready for the exit delay, then drains it. A second signal ends the
/// waiting.
///
/// # Errors
/// Requests or sequences were left.
async fn end(
    options: &Options,
    engine: &Engine,
    ends: &mut Ends,
    phase: &watch::Sender<Phase>,
) -> Result<(), String> {
    let delay = options.general.exit_delay_secs;
    let timeout = options.general.exit_timeout_secs;
    if !delay.is_zero() {
        tracing::info!("exiting: no longer ready, serving for {} s more", delay.as_secs());
        engine.leave();
        phase.send_replace(Phase::Leaving);
        tokio::select! {
            () = tokio::time::sleep(delay) => {}
            () = ends.next() => engine.abort_drain(),
        }
    }
    tracing::info!("exiting: waiting up to {} s for requests in flight", timeout.as_secs());
    finish(timeout, engine, ends, phase).await
}

/// Refuses new requests and finishes requests in flight within `timeout`. A signal aborts the wait.
///
/// # Errors
/// As [`end`].
async fn finish(
    timeout: Duration,
    engine: &Engine,
    ends: &mut Ends,
    phase: &watch::Sender<Phase>,
) -> Result<(), String> {
    engine.refuse();
    phase.send_replace(Phase::Draining);
    let shutting_down = engine.shut_down(timeout);
    tokio::pin!(shutting_down);
    tokio::select! {
        unfinished = &mut shutting_down => return check_finished(unfinished, ends),
        () = ends.next() => engine.abort_drain(),
    }
    check_finished(shutting_down.await, ends)
}

/// Reports models that failed to load, as an error with `--exit-on-error`.
fn report(failures: Vec<(String, String)>, options: &Options) -> Result<(), String> {
    if failures.is_empty() {
        return Ok(());
    }
    if options.general.exit_on_error {
        let lines: Vec<String> =
            failures.iter().map(|(model, reason)| format!("\n  {model}: {reason}")).collect();
        let text = format!(
            "{} could not be loaded:{}",
            if lines.len() == 1 { "a model" } else { "models" },
            lines.concat()
        );
        return Err(format!("{text}\n(with --exit-on-error=false the server starts without them)"));
    }
    let names: Vec<&str> = failures.iter().map(|(model, _)| model.as_str()).collect();
    let readiness = match options.general.strict_readiness {
        true => {
            "; until they are loaded, the server is not ready (set --strict-readiness=false to \
             report it as ready)"
        }
        false => "",
    };
    tracing::warn!(
        "serving without the models that failed to load: {}{readiness}",
        names.join(", ")
    );
    Ok(())
}

/// Creates the engine and the settings of system metrics.
async fn engine(
    options: &Options,
    definition: Definition,
    descriptors: Arc<Descriptors>,
    threads: loader::Threads,
    clouds: &Clouds,
    examples: Option<&Examples>,
) -> Result<(Engine, system::Settings), String> {
    let library = onnxruntime::find(options.workers.onnxruntime_library.as_deref())?;
    let labels = cache::Settings {
        auto_detect: options.metrics.auto_detect,
        max_series: options.metrics.max_series as usize,
        statsd: options.metrics.statsd.is_some(),
        tslog_stdout: options.tslog.stdout,
        omit_idle: options.metrics.omit_idle,
        ..cache::Settings::new(&hostname())
    };
    // The system is only measured if a scrape, a metric log or a push can show it. TorchServe's
    // port is scraped too.
    let scraped = options.metrics.allow || clouds.are_replaced();
    let seen = scraped
        || definition.catalog.mode() != Mode::Prometheus
        || options.metrics_push()?.is_some();
    let gpus = find_gpus(options.metrics.nvml_library.clone(), options.gpus.min_capability).await;
    let system = metrics::of_system(&options.metrics, seen, gpus.clone());
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let limits =
        options.gpus.model_load_gpu_limit.iter().map(|limit| (limit.device, limit.fraction));
    let devices = Devices::new(gpus, visible.as_deref(), limits, &system.roots);
    let mut settings = settings(options, library, devices, descriptors)?;
    settings.loader.stores.registered = clouds.registered();
    let examples = examples.map(|examples| Location::Directory(examples.repository()));
    settings.loader.stores.locations.extend(examples);
    settings.loader.threads = threads;
    let engine = Engine::new(settings, definition, labels).map_err(|error| error.to_string())?;
    Ok((engine, system))
}

fn control_mode(options: &Options) -> loader::Mode {
    match options.models.control_mode {
        ControlMode::None => loader::Mode::None,
        ControlMode::Poll => loader::Mode::Poll(options.models.poll),
        ControlMode::Explicit => loader::Mode::Explicit,
        ControlMode::OnDemand => loader::Mode::OnDemand,
    }
}

/// Returns the program that runs models: `--worker-binary`, else the one next to this executable.
fn worker_binary(options: &Options) -> Result<PathBuf, String> {
    let worker = match &options.workers.worker_binary {
        Some(worker) => worker.clone(),
        None => std::env::current_exe()
            .map_err(|error| error.to_string())?
            .with_file_name("pharos-worker"),
    };
    if worker.is_file() {
        return Ok(worker);
    }
    Err(format!(
        "the worker '{}', which runs the models, does not exist: reinstall pharos, whose packages \
         contain both programs, or copy pharos-worker next to it (from source, `cargo build \
         --release` builds both), or set --worker-binary",
        worker.display()
    ))
}

/// Logs what runs ONNX models.
fn report_onnx(program: &Program) {
    match &program.onnxruntime {
        Some(library) => tracing::info!("ONNX models run on ONNX Runtime, {}", library.display()),
        None if has_tract(program) => tracing::info!(
            "ONNX models run on tract; `pip install onnxruntime` has more operators and is faster"
        ),
        None => tracing::info!("{NO_ONNX_RUNTIME}"),
    }
}

fn settings(
    options: &Options,
    onnxruntime: Option<PathBuf>,
    devices: Arc<Devices>,
    descriptors: Arc<Descriptors>,
) -> Result<engine::Settings, String> {
    let worker = worker_binary(options)?;
    let program = program(options, worker.clone(), onnxruntime)?;
    report_onnx(&program);
    let execution_timeout = options.workers.worker_execution_timeout_secs;
    let (policies, issues) =
        HostPolicies::new(&options.host_policies.policies, Path::new("/sys/devices/system/node"));
    issues.iter().for_each(|issue| tracing::warn!("{issue}"));
    Ok(engine::Settings {
        name: options.general.id.clone(),
        strict_readiness: options.general.strict_readiness,
        trace: options.tracing()?,
        shared_memory: shared_memory::Settings {
            allowed: options.shared_memory.allowed,
            worker: worker.clone(),
        },
        loader: loader::Settings {
            stores: store::Settings {
                locations: options.models.locations(),
                registered: None,
                namespaces: options.models.namespacing,
                model_name: options.models.model_name.clone(),
                cache_directory: options.models.cache_directory.clone(),
            },
            program,
            // A worker has no token.
            worker_uploads: options.models.allow_upload == Some(true),
            auto_complete: options.models.auto_complete(),
            default_max_batch_size: options.models.default_max_batch_size("onnxruntime"),
            backend_settings: options.models.backend_settings(),
            mode: control_mode(options),
            on_demand: on_demand::settings(options, &devices),
            model_policy: Arc::new(pharos_torchserve::HandlerPolicy),
            at_start: match options.models.loads_all() {
                true => loader::AtStart::All,
                false => loader::AtStart::Named(options.models.load_model.clone()),
            },
            config_name: options.models.config_name.clone(),
            load_limits: options.models.load_limits(),
            load_threads: options.models.load_thread_count as usize,
            load_retries: options.models.load_retry_count,
            start_timeout: options.workers.worker_start_timeout_secs,
            python_start_timeout: options.models.python_start_timeout(),
            max_backoff: options.workers.worker_max_backoff_secs,
            max_wait: options.workers.worker_max_wait_secs,
            execution_timeout: (!execution_timeout.is_zero()).then_some(execution_timeout),
            worker_threads: options.workers.worker_threads.unwrap_or(0),
            worker_spin: spin(options),
            devices,
            pinned_pool: options.gpus.pinned_memory_pool_byte_size,
            rate_limits: options.rate_limiter.limits(),
            policies,
            descriptors,
            threads: loader::Threads::default(),
            response_cache: options.cache()?,
        },
    })
}

/// Returns the directory of further backends. Ignores the directory of Triton's own backends with a
/// warning if a command line for Triton names it and it does not exist here.
///
/// # Errors
/// Another directory does not exist.
fn backend_directory(directory: &Path) -> Result<Option<PathBuf>, String> {
    let shown = directory.display();
    if !directory.is_dir() {
        if !directory.components().any(|part| part.as_os_str() == TRITON_DIRECTORY) {
            return Err(format!("--backend-directory is '{shown}', which is not a directory"));
        }
        tracing::warn!(
            "--backend-directory is ignored: '{shown}' does not exist. It is the directory of \
             Triton's compiled backends: this server does not need those of onnxruntime, python \
             and pytorch, and loads others from a copy of that directory"
        );
        return Ok(None);
    }
    Ok(Some(directory.to_owned()))
}

/// The directory in which Triton is installed, within `/opt`.
const TRITON_DIRECTORY: &str = "tritonserver";

/// Returns the directory of the backends that come with the server: beside its executable, or in
/// `lib/pharos` of the prefix in which it is installed.
fn own_backends(executable: &Path) -> Option<PathBuf> {
    let directory = executable.parent()?;
    let installed = directory.parent().map(|prefix| prefix.join("lib/pharos/backends"));
    let mut places = [Some(directory.join("backends")), installed].into_iter().flatten();
    places.find(|path| path.is_dir())
}

/// Returns the programs that run models, and their settings.
fn program(
    options: &Options,
    worker: PathBuf,
    onnxruntime: Option<PathBuf>,
) -> Result<Program, String> {
    let workers = &options.workers;
    let backends =
        workers.backend_directory.as_deref().map(backend_directory).transpose()?.flatten();
    let own = std::env::current_exe().ok().and_then(|path| own_backends(&path));
    let environments = match &workers.environment_cache_directory {
        Some(directory) => directory.clone(),
        None => Program::default_environments(workers.worker_user.as_deref()),
    };
    protection::report_sandbox(&worker, options)?;
    protection::check_user(options, &worker, onnxruntime.as_deref(), &environments)?;
    Ok(Program {
        worker,
        onnxruntime,
        python: workers.python.clone(),
        forks: workers.worker_fork,
        python_preload: workers.python_preload.0.clone(),
        backends: backends.into_iter().chain(own).collect(),
        hidden: protection::hidden_variables(workers),
        user: workers.worker_user.clone(),
        sandboxes: workers.sandboxes(),
        limits: protection::limits(options)?,
        deployment_backends: vec![pharos_torchserve::BACKEND],
        environments,
    })
}

fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
