//! Loads and unloads models: at the start, by request, and as the repositories change. Reads model files through the store,
//! starts instances, and changes the model table.
//!
//! A model that cannot be loaded does not affect others: it is listed with its reason.

mod change;
mod checksums;
mod configure;
mod control;
mod ensembles;
mod load;
mod namespaces;
mod poll;
mod prepare;
mod worker_calls;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pharos::id::bare_name;
use pharos::metrics::cache::Cache;
use pharos::repository::{IndexEntry, State, UNLOADED};
use pharos::scheduler::rate_limiter::Limit;
use pharos::service::ModelPolicy;
use tokio::sync::{Semaphore, watch};

use crate::cache;
use crate::cache::ResponseCache;
use crate::launch::Program;
use crate::memory::PinnedPool;
use crate::scheduler::{Limits, Timer};
use crate::serving::{ModelTable, Shared, Unfinished};
use crate::store;
use crate::store::{Stores, TemporaryDirectories};
use control::{Locks, Wanted};
use pharos_os::descriptors::Descriptors;
use pharos_telemetry::system::{Devices, HostPolicies};
use poll::{Fingerprints, Poll};

/// When models are loaded and unloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All at start, none later.
    None,
    /// All at start, and as the repositories change, which are polled at this interval.
    Poll(Duration),
    /// By request.
    Explicit,
}

/// What is loaded at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AtStart {
    /// All models.
    All,
    /// Those of these names, with their members.
    Named(Vec<String>),
}

/// Where models come from and how they are loaded.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model repositories.
    pub stores: store::Settings,
    /// How workers are started.
    pub program: Program,
    /// Whether configurations are completed from the models' files.
    pub auto_complete: bool,
    /// The batch size that auto-complete gives models that can batch; 0 leaves them unbatched.
    pub default_max_batch_size: u32,
    /// When models are loaded and unloaded.
    pub mode: Mode,
    /// What the protocols that deploy models determine of them.
    pub model_policy: Arc<dyn ModelPolicy>,
    /// Which are loaded first.
    pub at_start: AtStart,
    /// `configs/NAME.pbtxt` is a model's configuration where it is there.
    pub config_name: Option<String>,
    /// Models that are loaded at the same time.
    pub load_threads: usize,
    /// How often loading a version is tried again.
    pub load_retries: u32,
    /// How long a worker may take to load its model.
    pub start_timeout: Duration,
    /// The same for Python workers, if it is said for them alone.
    pub python_start_timeout: Option<Duration>,
    /// The longest pause before a worker is started again.
    pub max_backoff: Duration,
    /// How long a request may wait for instances that are started again.
    pub max_wait: Duration,
    /// How long a batch may execute before its worker is replaced; `None` for any time.
    pub execution_timeout: Option<Duration>,
    /// Threads that one execution may use; 0 for the cores divided among the model's instances.
    pub worker_threads: u32,
    /// The explicit limits of the rate limiter; `None` when it is off.
    pub rate_limits: Option<Vec<Limit>>,
    /// The GPUs that instances may run on.
    pub devices: Arc<Devices>,
    /// Bytes that instances on GPUs may register with the driver together.
    pub pinned_pool: u64,
    /// The processors of host policies.
    pub policies: HostPolicies,
    /// The file descriptors of instances.
    pub descriptors: Arc<Descriptors>,
    /// The response cache, for models that ask for it.
    pub response_cache: Option<cache::Settings>,
}

/// Loads and unloads the models of this server.
pub(crate) struct Loader {
    settings: Settings,
    models: Arc<ModelTable>,
    /// The text of `metrics.yaml`, watched by every instance.
    metrics: watch::Sender<Arc<str>>,
    timer: Arc<Timer>,
    stores: Stores,
    /// One for each model that may be loaded at the same time. Acquired after the model's lock.
    permits: Semaphore,
    locks: Locks,
    /// For the files that clients send.
    override_directories: TemporaryDirectories,
    exiting: AtomicBool,
}

impl Loader {
    /// A loader that has loaded nothing yet. Needs the runtime.
    ///
    /// # Errors
    /// A store cannot be used as it is configured.
    pub(crate) fn new(
        settings: Settings,
        cache: Arc<Cache>,
        metrics: Arc<str>,
        timer: Arc<Timer>,
    ) -> Result<Self, String> {
        let stores = Stores::new(&settings.stores, &cache)?;
        let response_cache = settings.response_cache.as_ref();
        let shared = Shared {
            limits: settings.rate_limits.clone().map(Limits::new),
            response_cache: response_cache.map(|settings| Arc::new(ResponseCache::new(settings, cache.clone()))),
            pinned: PinnedPool::new(settings.pinned_pool),
            metrics: cache,
        };
        Ok(Self {
            models: Arc::new(ModelTable::new(shared, settings.stores.namespaces)),
            metrics: watch::Sender::new(metrics),
            timer,
            stores,
            permits: Semaphore::new(settings.load_threads.max(1)),
            locks: Locks::default(),
            override_directories: TemporaryDirectories::default(),
            exiting: AtomicBool::new(false),
            settings,
        })
    }

    /// The models that it loads.
    pub(crate) fn models(&self) -> &Arc<ModelTable> {
        &self.models
    }

    /// The GPUs that instances may run on.
    pub(crate) fn devices(&self) -> &Devices {
        &self.settings.devices
    }

    /// Loads what is to be loaded at the start, returns when each model is ready or has failed, and begins to poll if it is
    /// to. Gives every model that should be ready and is not, and every store that cannot be reached, with the reason.
    ///
    /// # Errors
    /// A directory cannot be read. A model that cannot be loaded is no error here.
    pub(crate) async fn load_at_start(self: &Arc<Self>) -> io::Result<Vec<(String, String)>> {
        // Before anything is loaded: what changes meanwhile is seen as changed.
        let look = match self.settings.mode {
            Mode::Poll(_) => self.look_aside().await?,
            Mode::None | Mode::Explicit => Fingerprints::new(),
        };
        let all = self.list_aside().await?;
        let (stores, found) = (self.stores.clone(), all.len());
        tokio::task::spawn_blocking(move || stores.announce(found)).await.map_err(io::Error::other)?;
        let names = match &self.settings.at_start {
            AtStart::All => all.into_keys().collect(),
            AtStart::Named(names) => self.of_names(names).await?,
        };
        self.models.change(|table| {
            names.iter().for_each(|name| table.states.add(name));
            if self.settings.mode == Mode::Explicit {
                table.named.extend(names.iter().cloned());
            }
        });
        let loaded = self.load_all_of(names.iter().map(|name| Wanted::new(name, None)).collect()).await;
        self.start_polling(Poll::new(look));
        let mut failures: Vec<(String, String)> = self.failures();
        failures.extend(self.stores.troubles());
        for (name, result) in loaded {
            if let Err(error) = result
                && !failures.iter().any(|(known, _)| *known == name)
            {
                failures.push((name, error.message));
            }
        }
        Ok(failures)
    }

    /// Another text of `metrics.yaml`, for the workers that run and for those to come.
    pub(crate) fn redefine_metrics(&self, text: Arc<str>) {
        self.metrics.send_replace(text);
    }

    /// Stops polling, drains all models as [`ModelTable::drain`] does, and removes temporary files.
    pub(crate) async fn shut_down(&self, patience: Duration) -> Unfinished {
        self.exiting.store(true, Ordering::Relaxed);
        let unfinished = self.models.drain(patience).await;
        // Loads that are still fetching files fail now.
        self.stores.close();
        self.override_directories.close();
        unfinished
    }

    /// Where every series lives.
    fn cache(&self) -> &Arc<Cache> {
        &self.models.shared.metrics
    }

    /// What the repository index shows: every model that is known, or that is in a repository now. Reads directories.
    pub(crate) fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let snapshot = self.models.snapshot();
        let mut states = snapshot.states.clone();
        match self.stores.list() {
            Ok(found) => {
                snapshot.gone.iter().filter(|name| !found.contains_key(*name)).for_each(|name| states.remove(name));
                found.keys().for_each(|name| states.add(name));
                found.iter().filter(|(_, times)| **times > 1).for_each(|(name, _)| states.mark_duplicate(name));
            }
            Err(error) => tracing::error!("the index has only models that are known: {error}"),
        }
        let bare = |entry: IndexEntry| IndexEntry { name: bare_name(&entry.name).to_owned(), ..entry };
        let mut index = states.index(ready_only);
        if self.stores.namespaces() {
            index = index.into_iter().map(bare).collect();
        }
        index
    }

    /// Every model that is known and not ready, with the reason.
    fn failures(&self) -> Vec<(String, String)> {
        // A model of this repository may have loaded another one and unloaded it again.
        let unloaded = |state, reason: &str| state == Some(State::Unloading) || reason == UNLOADED;
        let unready = self.models.snapshot().states.index(false).into_iter();
        let unready =
            unready.filter(|entry| entry.state != Some(State::Ready) && !unloaded(entry.state, &entry.reason));
        unready.map(|entry| (entry.name, entry.reason)).collect()
    }
}
