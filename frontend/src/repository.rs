//! The model repository: reads model directories, loads what the version policies ask for, and knows what serves.
//!
//! A model that cannot be loaded never hides the others: it is listed with its reason.

mod calls;
mod change;
mod checksums;
mod configure;
mod control;
mod drain;
mod ensemble;
mod gauges;
mod given;
mod load;
mod namespaces;
mod objects;
mod poll;
mod prepare;
mod responses;
mod retire;
mod scan;
mod serving;
mod source;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use pharos::ensemble::Dependencies;
use pharos::error::InferError;
use pharos::id::{ModelVersion, bare_name};
use pharos::infer::InferRequest;
use pharos::metrics::cache::Cache;
use pharos::repository::{IndexEntry, State, States, UNLOADED};
use pharos::scheduler::rate_limiter::Limit;
use tokio::sync::{Semaphore, watch};

use crate::cache::ResponseCache;
use crate::cli;
use crate::descriptors::Descriptors;
use crate::launch::Program;
use crate::memory::PinnedPool;
use crate::process::HostPolicies;
use crate::scheduler::{Limits, Timer};
use crate::system::{Devices, Worker};
use control::{Locks, Wanted};
pub use drain::Unfinished;
use given::{Given, Places};
use poll::{Look, Poll};
pub(crate) use responses::Responses;
use retire::Retired;
pub(crate) use serving::Serving;
pub(crate) use source::Registered;
use source::Sources;

/// When models are loaded and unloaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// All at start, none later.
    None,
    /// All at start, and as the repositories change, which are looked at so often.
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
    /// Where models come from.
    pub repositories: Vec<cli::Place>,
    /// Directories that are registered as models while the server runs, if any can be.
    pub registered: Option<Registered>,
    /// Models of the same name may be in several of them, and are told apart by those.
    pub namespaces: bool,
    /// The name of the model where a repository is one itself.
    pub model_name: Option<String>,
    /// Where copies of what stores have are kept; in temporary directories if nowhere.
    pub cache_directory: Option<PathBuf>,
    /// How workers are started.
    pub program: Program,
    /// Whether configurations are completed from the models' files.
    pub auto_complete: bool,
    /// The batch size that auto-complete gives models that can batch; 0 leaves them unbatched.
    pub default_max_batch_size: u32,
    /// When models are loaded and unloaded.
    pub mode: Mode,
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
    pub(crate) policies: HostPolicies,
    /// The file descriptors of instances.
    pub(crate) descriptors: Arc<Descriptors>,
    /// The response cache, for models that ask for it.
    pub response_cache: Option<cli::Cache>,
}

/// What is there, replaced as a whole when it changes: requests take a snapshot without waiting.
#[derive(Default, Clone)]
pub(crate) struct Table {
    /// Models are told apart by their repositories.
    namespaces: bool,
    states: States,
    /// Ensembles with their members, those included that could not be loaded.
    dependencies: Dependencies,
    serving: BTreeMap<String, BTreeMap<u64, Arc<Serving>>>,
    /// Models that should be loaded, whether or not they can be: asked for, or members of those, or all.
    wanted: BTreeSet<String>,
    /// Those that a client has asked for by name.
    named: BTreeSet<String>,
    /// What clients have given in place of the repositories' files, while it is loaded.
    given: BTreeMap<String, Arc<Given>>,
    /// Versions with sequences that were replaced and finish what they have begun, in the order in which they went.
    ending: BTreeMap<String, Vec<Arc<Serving>>>,
    /// Versions that finish what they have, with the number of the unload.
    unloading: BTreeMap<ModelVersion, u64>,
    /// Unloads so far.
    unloads: u64,
    /// Models that are being unloaded and that no repository has.
    nowhere: BTreeSet<String>,
    /// Models that were unloaded and that no repository had then, the oldest first. The index leaves them out; requests to
    /// them have no available versions.
    gone: VecDeque<String>,
}

impl Table {
    fn serving(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        let name = self.called(name)?;
        let number = self.states.lookup(name, version)?;
        let found = self.serving.get(name).and_then(|versions| versions.get(&number));
        found
            .cloned()
            .ok_or_else(|| InferError::internal(format!("model '{name}' version {number} is ready but does not serve")))
    }
}

/// The models of this server.
pub(crate) struct Repository {
    settings: Settings,
    cache: Arc<Cache>,
    /// The text of `metrics.yaml`, watched by every instance.
    metrics: watch::Sender<Arc<str>>,
    timer: Arc<Timer>,
    /// The resources that instances share, with the rate limiter on.
    limits: Option<Arc<Limits>>,
    responses: Option<Arc<ResponseCache>>,
    pinned: Arc<PinnedPool>,
    sources: Sources,
    /// One for each model that may be loaded at the same time, whoever asks. Taken last.
    permits: Semaphore,
    locks: Locks,
    /// What has been taken out of the table and has not ended. Held to add or remove one.
    retired: Mutex<Vec<Retired>>,
    /// Numbers the directories of what clients give.
    given_files: Places,
    exiting: AtomicBool,
    /// The drain waits for nothing any more.
    hurry: watch::Sender<bool>,
    // Held to copy or replace the pointer.
    table: RwLock<Arc<Table>>,
}

impl Repository {
    /// A repository that has loaded nothing yet. Needs the runtime.
    ///
    /// # Errors
    /// A store cannot be used as it is configured.
    pub(crate) fn new(
        settings: Settings,
        cache: Arc<Cache>,
        metrics: Arc<str>,
        timer: Arc<Timer>,
    ) -> Result<Self, String> {
        let sources = Sources::new(&settings, &cache)?;
        let sources = sources.with_namespaces(settings.namespaces);
        let limits = settings.rate_limits.clone().map(Limits::new);
        let responses = settings.response_cache.as_ref();
        let responses = responses.map(|settings| Arc::new(ResponseCache::new(settings, cache.clone())));
        let table = Table { namespaces: settings.namespaces, ..Table::default() };
        let (metrics, table) = (watch::Sender::new(metrics), RwLock::new(Arc::new(table)));
        Ok(Self {
            sources,
            permits: Semaphore::new(settings.load_threads.max(1)),
            locks: Locks::default(),
            retired: Mutex::default(),
            given_files: Places::default(),
            exiting: AtomicBool::new(false),
            hurry: watch::Sender::new(false),
            pinned: PinnedPool::new(settings.pinned_pool),
            settings,
            cache,
            metrics,
            timer,
            limits,
            responses,
            table,
        })
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
            Mode::None | Mode::Explicit => Look::new(),
        };
        let all = self.list_aside().await?;
        let (sources, found) = (self.sources.clone(), all.len());
        tokio::task::spawn_blocking(move || sources.announce(found)).await.map_err(io::Error::other)?;
        let names = match &self.settings.at_start {
            AtStart::All => all.into_keys().collect(),
            AtStart::Named(names) => self.of_names(names).await?,
        };
        self.change(|table| {
            names.iter().for_each(|name| table.states.add(name));
            if self.settings.mode == Mode::Explicit {
                table.named.extend(names.iter().cloned());
            }
        });
        let loaded = self.load_all_of(names.iter().map(|name| Wanted::new(name, None)).collect()).await;
        self.start_polling(Poll::new(look));
        let mut failures: Vec<(String, String)> = self.failures();
        failures.extend(self.sources.troubles());
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

    fn table(&self) -> Arc<Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Changes the table. Changes are rare; each copies it.
    fn change(&self, change: impl FnOnce(&mut Table)) {
        let mut table = self.table.write().unwrap_or_else(PoisonError::into_inner);
        change(Arc::make_mut(&mut table));
    }

    /// The version of a model that answers a request for `version` (empty: the latest ready one).
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    pub(crate) fn serving(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        self.table().serving(name, version)
    }

    /// As [`Repository::serving`] for the model that a request names; one that continues a sequence finds the version that
    /// has begun it, even if that has been replaced.
    ///
    /// # Errors
    /// As [`Repository::serving`].
    pub(crate) fn serving_for(&self, request: &InferRequest) -> Result<Arc<Serving>, InferError> {
        let table = self.table();
        let going_on = (!request.sequence_start).then_some(&request.correlation_id);
        let named = (request.model_name.as_str(), request.model_version.as_str());
        match going_on.and_then(|id| Self::with_sequence(&table, named, id)) {
            Some(serving) => Ok(serving),
            None => table.serving(&request.model_name, &request.model_version),
        }
    }

    /// Every serving version of every model, by name and version.
    pub(crate) fn all(&self) -> Vec<Arc<Serving>> {
        self.table().serving.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// The instances of all that serves, each with its process if it has one.
    pub(crate) fn workers(&self) -> Vec<(Worker, Option<u32>)> {
        let mut workers = Vec::new();
        for serving in self.all() {
            let worker = |name: &str| Worker { model: serving.model.clone(), instance: name.to_owned() };
            let Some(instances) = serving.instances() else { continue };
            workers.extend(instances.processes().into_iter().map(|(name, pid)| (worker(&name), pid)));
        }
        workers
    }

    /// The versions of a model that are ready, ascending.
    pub(crate) fn ready_versions(&self, name: &str) -> Vec<u64> {
        let table = self.table();
        table.called(name).map_or_else(|_| Vec::new(), |name| table.states.ready_versions(name).collect())
    }

    /// Where every series lives.
    fn metrics(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// Whether every model that should serve does, with at least one living instance.
    pub(crate) fn all_ready(&self) -> bool {
        let table = self.table();
        table.states.all_ready() && table.serving.values().flat_map(BTreeMap::values).all(|s| self.is_ready(s))
    }

    /// What the repository index shows: every model that is known, or that is in a repository now. Reads directories.
    pub(crate) fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        let table = self.table();
        let mut states = table.states.clone();
        match self.sources.list() {
            Ok(found) => {
                table.gone.iter().filter(|name| !found.contains_key(*name)).for_each(|name| states.remove(name));
                found.keys().for_each(|name| states.add(name));
                found.iter().filter(|(_, times)| **times > 1).for_each(|(name, _)| states.mark_duplicate(name));
            }
            Err(error) => tracing::error!("the index has only models that are known: {error}"),
        }
        let bare = |entry: IndexEntry| IndexEntry { name: bare_name(&entry.name).to_owned(), ..entry };
        let mut index = states.index(ready_only);
        if self.sources.namespaces() {
            index = index.into_iter().map(bare).collect();
        }
        index
    }

    /// Every model that is known and not ready, with the reason.
    fn failures(&self) -> Vec<(String, String)> {
        // A model of this repository may have loaded another one and unloaded it again.
        let unloaded = |state, reason: &str| state == Some(State::Unloading) || reason == UNLOADED;
        let unready = self.table().states.index(false).into_iter();
        let unready =
            unready.filter(|entry| entry.state != Some(State::Ready) && !unloaded(entry.state, &entry.reason));
        unready.map(|entry| (entry.name, entry.reason)).collect()
    }
}
