//! Loads and unloads models: at the start, by request, and when the repositories change. Reads
//! model files through the store, starts instances, and changes the model table.
//!
//! A model that fails to load does not affect others; it is listed with its reason.

mod change;
mod control;
mod ensembles;
mod locks;
mod memory_budget;
mod on_demand;
mod poll;
mod prepare;
mod version;
mod worker_calls;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pharos::error::InferError;
use pharos::id::bare_name;
use pharos::metrics::cache::Cache;
use pharos::model::LoadLimits;
use pharos::repository::memory_budget::{Memory, MemoryBytes};
use pharos::repository::{IndexEntry, State, StateReason};
use pharos::scheduler::rate_limiter::Limit;
use pharos::service::ModelPolicy;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};

use crate::cache;
use crate::cache::ResponseCache;
use crate::launch::Program;
use crate::memory::PinnedPool;
use crate::model_memory::MemoryUse;
use crate::process::{ForkServers, StartWorkers};
use crate::scheduler::{Limits, Timer};
use crate::serving::{ModelTable, SharedResources, Unfinished};
use crate::store;
use crate::store::{Overrides, Stores, TemporaryDirectories};
use change::OnLoadFailure;
use locks::Locks;
use memory_budget::MemoryBudget;
pub(crate) use on_demand::wait_limit;
use pharos_os::descriptors::Descriptors;
use pharos_os::event_loops::EventLoops;
use pharos_os::{blocking, clock};
use pharos_telemetry::system::{Devices, HostPolicies};
use poll::{Fingerprints, Poll};
pub(crate) use prepare::brings_code;
pub(crate) use version::inner_file;

/// How long an accepted request may take until it is queued, when the server exits.
const QUEUED: Duration = Duration::from_secs(1);

/// How long the workers of cancelled loads may take to end, when the server exits.
const ENDED: Duration = Duration::from_secs(1);

/// When models are loaded and unloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Load all models at the start, and no models later.
    None,
    /// Load all models at the start, and poll the repositories for changes at this interval.
    Poll(Duration),
    /// Load models by request.
    Explicit,
    /// Load models with their first request, or by request.
    OnDemand,
}

impl Mode {
    /// Returns whether clients may load and unload models.
    pub(crate) fn by_request(&self) -> bool {
        matches!(self, Self::Explicit | Self::OnDemand)
    }
}

/// The settings of models that are loaded on demand, and of the memory that models may use.
#[derive(Clone, Debug)]
pub struct OnDemandSettings {
    /// The maximum number of requests that wait for models to load.
    pub max_waiting: usize,
    /// The time without requests after which a model is unloaded; `None` for never.
    pub idle: Option<Duration>,
    /// The most bytes that all models may use, with an entry for each limited memory.
    pub memory_limits: MemoryBytes,
    /// The kernel's file that says how long processes wait for memory.
    pub memory_pressure: PathBuf,
}

/// The models to load at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AtStart {
    /// All models.
    All,
    /// The models of these names, with their members.
    Named(Vec<String>),
}

/// The settings of backends (`--backend-config`), in the order given.
#[derive(Clone, Debug, Default)]
pub struct BackendSettings(pub Vec<BackendSetting>);

/// A setting of one backend, or of all backends.
#[derive(Clone, Debug)]
pub struct BackendSetting {
    /// The backend; `None` for all.
    pub backend: Option<String>,
    /// The setting's name.
    pub name: String,
    /// The setting's value.
    pub value: String,
}

impl BackendSettings {
    /// Returns the names and values of the settings of a backend. Settings of all backends come
    /// first, so that the backend's settings replace them.
    fn of(&self, backend: &str) -> Vec<(String, String)> {
        let of = |wanted: Option<&str>| {
            let settings = self.0.iter().filter(move |one| one.backend.as_deref() == wanted);
            settings.map(|one| (one.name.clone(), one.value.clone())).collect::<Vec<_>>()
        };
        [of(None), of(Some(backend))].concat()
    }
}

/// The sources of models and the settings of loading.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model repositories.
    pub stores: store::Settings,
    /// How workers are started.
    pub program: Program,
    /// Whether workers may load models with files, and with configurations that run code.
    pub worker_uploads: bool,
    /// Whether configurations are completed from the models' files.
    pub auto_complete: bool,
    /// The batch size that auto-complete gives models that can batch; 0 leaves them unbatched.
    pub default_max_batch_size: u32,
    /// The settings of backends that libraries of Triton's backends read.
    pub backend_settings: BackendSettings,
    /// When models are loaded and unloaded.
    pub mode: Mode,
    /// The settings of models that are loaded on demand.
    pub on_demand: OnDemandSettings,
    /// The rules of the protocols that deploy models.
    pub model_policy: Arc<dyn ModelPolicy>,
    /// The models to load at the start.
    pub at_start: AtStart,
    /// The name NAME of `configs/NAME.pbtxt`, which replaces a model's configuration if it exists.
    pub config_name: Option<String>,
    /// What configurations that clients send with a load may ask for.
    pub load_limits: LoadLimits,
    /// The number of models that are loaded at the same time.
    pub load_threads: usize,
    /// The number of retries of loading a version.
    pub load_retries: u32,
    /// The time limit of a worker for loading its model.
    pub start_timeout: Duration,
    /// The time limit for Python workers, if it differs.
    pub python_start_timeout: Option<Duration>,
    /// The longest pause before restarting a worker.
    pub max_backoff: Duration,
    /// How long a request may wait for restarting instances.
    pub max_wait: Duration,
    /// How long a batch may execute before its worker is replaced; `None` for no limit.
    pub execution_timeout: Option<Duration>,
    /// Threads that one execution may use; 0 divides the cores among the model's instances.
    pub worker_threads: u32,
    /// How long workers look for their next frame before they sleep.
    pub worker_spin: WorkerSpin,
    /// The explicit limits of the rate limiter; `None` if it is off.
    pub rate_limits: Option<Vec<Limit>>,
    /// The GPUs that instances may run on.
    pub devices: Arc<Devices>,
    /// The total bytes that instances on GPUs may register with the driver.
    pub pinned_pool: u64,
    /// The processors of host policies.
    pub policies: HostPolicies,
    /// The file descriptors of instances.
    pub descriptors: Arc<Descriptors>,
    /// The threads of instances and of the loader.
    pub threads: Threads,
    /// The response cache, for models that enable it.
    pub response_cache: Option<cache::Settings>,
}

/// The longest times in microseconds that workers look for their next frame before they sleep; 0 to
/// sleep at once.
#[derive(Clone, Copy, Debug)]
pub struct WorkerSpin {
    /// The spin limit without a CPU quota.
    pub usual_us: u32,
    /// The spin limit under a CPU quota.
    pub limited_us: u32,
}

/// Threads that the caller has started.
#[derive(Clone, Debug, Default)]
pub struct Threads {
    /// The event loops that read the replies of workers.
    pub event_loops: EventLoops,
    /// Runs the loads and unloads that requests ask for; the runtime in which the loader is
    /// created if `None`.
    pub loading: Option<Handle>,
}

/// The result of a load; the error is for the client.
type Loaded = Result<(), InferError>;

/// A model to load or to check again.
#[derive(Clone, Default)]
struct LoadRequest {
    name: String,
    overrides: Option<Arc<Overrides>>,
    /// Whether the server loads it by itself, neither for a client nor as a member of an ensemble.
    by_itself: bool,
    /// Whether a client has sent the overrides; otherwise they come from an earlier load.
    overriding: bool,
    /// Whether it is loaded by itself only because a request is loading it already: it may be
    /// unloaded when it has no use.
    after_request: bool,
    /// Whether to reload it even if it has not changed.
    reload: bool,
    /// The model of the worker that loads it with a configuration or files.
    owner: Option<String>,
    failing: OnLoadFailure,
}

impl LoadRequest {
    fn new(name: &str, overrides: Option<Arc<Overrides>>) -> Self {
        Self { name: name.to_owned(), overrides, ..Self::default() }
    }
}

/// Loads and unloads the models of this server.
pub(crate) struct Loader {
    settings: Settings,
    /// Runs the loads and unloads that requests ask for, and the supervision of what they have
    /// loaded: the event loop of a request would answer no other requests meanwhile.
    runtime: Handle,
    models: Arc<ModelTable>,
    /// What workers know of `metrics.yaml`, watched by every instance.
    metrics: watch::Sender<Arc<str>>,
    timer: Arc<Timer>,
    stores: Stores,
    /// One permit for each model that may load at the same time. Acquired after the model's lock.
    permits: Semaphore,
    locks: Locks,
    memory: MemoryBudget,
    /// The processes that start Python workers.
    fork_servers: Arc<ForkServers>,
    /// Starts workers.
    workers: Arc<dyn StartWorkers>,
    /// The directories of files that clients send.
    override_directories: TemporaryDirectories,
    /// Set when the server exits; cancels the loads, and the requests to remote stores.
    exiting: watch::Sender<bool>,
}

impl Loader {
    /// Creates a loader without loaded models.
    ///
    /// # Errors
    /// A store cannot be used as configured.
    pub(crate) fn new(
        settings: Settings,
        cache: Arc<Cache>,
        metrics: Arc<str>,
        timer: Arc<Timer>,
    ) -> Result<Self, String> {
        let exiting = watch::Sender::new(false);
        let stores = Stores::new(&settings.stores, &cache, &exiting.subscribe())?;
        for (memory, limit) in settings.on_demand.memory_limits.iter() {
            let limit = limit >> 20;
            match memory {
                Memory::Main => {
                    tracing::info!("memory of models: at most {limit} MiB (--model-memory-limit)")
                }
                Memory::Gpu(number) => {
                    tracing::info!(
                        "memory of models on GPU {number}: at most {limit} MiB \
                         (--model-gpu-memory-limit)"
                    );
                }
            }
        }
        let response_cache = settings.response_cache.as_ref();
        let shared = SharedResources {
            limits: settings.rate_limits.clone().map(Limits::new),
            response_cache: response_cache
                .map(|settings| Arc::new(ResponseCache::new(settings, cache.clone()))),
            pinned: PinnedPool::new(settings.pinned_pool),
            memory: MemoryUse::new(settings.on_demand.memory_limits.clone()),
            gpu_uuids: settings.devices.uuids(),
            metrics: cache,
        };
        let fork_servers: Arc<ForkServers> = Arc::default();
        Ok(Self {
            runtime: settings.threads.loading.clone().unwrap_or_else(Handle::current),
            models: Arc::new(ModelTable::new(shared, settings.stores.namespaces)),
            metrics: watch::Sender::new(metrics),
            timer,
            stores,
            permits: Semaphore::new(settings.load_threads.max(1)),
            locks: Locks::default(),
            memory: MemoryBudget::default(),
            workers: Arc::new(fork_servers.clone()),
            fork_servers,
            override_directories: TemporaryDirectories::default(),
            exiting,
            settings,
        })
    }

    /// Replaces the process launcher in tests.
    #[cfg(test)]
    pub(crate) fn with_workers(self, workers: Arc<dyn StartWorkers>) -> Self {
        Self { workers, ..self }
    }

    /// The table of the loaded models.
    pub(crate) fn models(&self) -> &Arc<ModelTable> {
        &self.models
    }

    /// The GPUs that instances may run on.
    pub(crate) fn devices(&self) -> &Devices {
        &self.settings.devices
    }

    /// Loads the initial models, returns when each is ready or has failed, and starts polling in
    /// poll mode. Returns every model that should be ready and is not, and every store that cannot
    /// be reached, with the reason.
    ///
    /// # Errors
    /// A directory cannot be read. Failed models are not errors.
    pub(crate) async fn load_at_start(self: &Arc<Self>) -> io::Result<Vec<(String, String)>> {
        // Before anything is loaded, so that changes during the load are detected.
        let polled = match self.settings.mode {
            Mode::Poll(_) => self.poll_blocking().await?,
            Mode::None | Mode::Explicit | Mode::OnDemand => Fingerprints::new(),
        };
        let all = self.list_blocking().await?;
        // Without a model to load at the start, models may be added later.
        let by_request = self.settings.mode == Mode::Explicit
            && self.settings.at_start == AtStart::Named(Vec::new());
        let stores = self.stores.clone();
        let warns = all.is_empty() && !by_request;
        blocking::run(move || stores.announce(warns)).await.map_err(io::Error::other)?;
        let mut others = Vec::new();
        let names = match &self.settings.at_start {
            AtStart::All => all.into_keys().collect(),
            AtStart::Named(names) => {
                let names = self.of_names(names).await?;
                if self.settings.mode == Mode::OnDemand {
                    others = all.into_keys().filter(|name| !names.contains(name)).collect();
                }
                names
            }
        };
        self.models.change(|table| {
            names.iter().chain(&others).for_each(|name| table.states.add(name));
            if self.settings.mode.by_request() {
                table.named.extend(names.iter().cloned());
            }
        });
        // A model that is named in the command line is loaded, whatever its configuration says.
        let named = matches!(self.settings.at_start, AtStart::Named(_))
            || self.settings.mode == Mode::OnDemand;
        let loads = names
            .iter()
            .map(|name| LoadRequest { by_itself: !named, ..LoadRequest::new(name, None) });
        let found = others
            .iter()
            .map(|name| LoadRequest { by_itself: true, ..LoadRequest::new(name, None) });
        let loaded = self.load_all_of(loads.chain(found).collect()).await;
        let mut poll = Poll::new(polled);
        poll.record(clock::now(), &loaded);
        self.start_polling(poll);
        self.start_watching_models();
        let mut failures: Vec<(String, String)> = self.failures();
        failures.extend(self.stores.failure_reasons());
        for (name, result) in loaded {
            if let Err(error) = result
                && !failures.iter().any(|(known, _)| *known == name)
            {
                failures.push((name, error.message));
            }
        }
        Ok(failures)
    }

    /// Sends new definitions of metrics to running and future workers.
    pub(crate) fn redefine_metrics(&self, metrics: Arc<str>) {
        self.metrics.send_replace(metrics);
    }

    /// Stops polling, cancels loads and requests to remote stores, drains all models with
    /// [`ModelTable::drain`], and removes temporary files. New requests are refused already.
    pub(crate) async fn shut_down(&self, limit: Duration) -> Unfinished {
        self.exiting.send_replace(true);
        // A request that was accepted before that is queued, or answered, when its event loop goes
        // on.
        let _ = clock::timeout(QUEUED, self.settings.threads.event_loops.go_on()).await;
        let unfinished = self.models.drain(limit).await;
        // The workers of cancelled loads would report that their files are missing.
        let _ = clock::timeout(ENDED, self.override_directories.unused()).await;
        self.stores.close();
        self.override_directories.close();
        unfinished
    }

    fn is_exiting(&self) -> bool {
        *self.exiting.borrow()
    }

    /// The metrics cache of all series.
    fn cache(&self) -> &Arc<Cache> {
        &self.models.shared.metrics
    }

    /// Returns the repository index: every model that is known or in a repository now. Reads
    /// directories.
    pub(crate) fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let snapshot = self.models.snapshot();
        let mut states = snapshot.states.clone();
        match self.stores.list() {
            Ok(found) => {
                snapshot
                    .unloaded_without_files
                    .iter()
                    .filter(|name| !found.contains_key(*name))
                    .for_each(|name| states.remove(name));
                found.keys().for_each(|name| states.add(name));
                found
                    .iter()
                    .filter(|(_, times)| **times > 1)
                    .for_each(|(name, _)| states.mark_duplicate(name));
            }
            Err(error) => tracing::error!(
                "cannot list the repositories; the index shows only known models: {error}"
            ),
        }
        let mut index = states.index(ready_only);
        for (model, percent) in self.models.loads.percentages() {
            let of_load = index.iter_mut().filter(|entry| {
                entry.state == Some(State::Loading)
                    && entry.name == *model.name
                    && entry.version == Some(model.version)
            });
            of_load.for_each(|entry| {
                entry.reason = StateReason::Other(format!("{percent} % loaded"));
            });
        }
        for entry in index.iter_mut().filter(|entry| entry.state == Some(State::Ready)) {
            let versions = snapshot.serving.get(&entry.name);
            let serving =
                versions.zip(entry.version).and_then(|(versions, version)| versions.get(&version));
            // A ready version keeps its state while its instances are restarted.
            if let Some(outage) = serving.and_then(|serving| self.models.outage(serving)) {
                entry.reason = StateReason::Other(outage);
            }
        }
        if self.stores.namespaces() {
            for entry in &mut index {
                entry.name = bare_name(&entry.name).to_owned();
            }
        }
        index
    }

    /// Returns every known model that is not ready, with the reason.
    fn failures(&self) -> Vec<(String, String)> {
        let mut failures = Vec::new();
        for entry in self.models.snapshot().states.index(false) {
            match (entry.state, &entry.reason) {
                // Other models may have loaded and unloaded it.
                (Some(State::Ready | State::Unloading), _)
                | (_, StateReason::Unloaded | StateReason::OnDemand) => {}
                _ => failures.push((entry.name, entry.reason.to_string())),
            }
        }
        failures
    }
}
