//! The model repository: reads model directories, loads what the version policies ask for, and knows what serves.
//!
//! A model that cannot be loaded never hides the others: it is listed with its reason.

mod drain;
mod ensemble;
mod gauges;
mod load;
mod responses;
mod scan;
mod serving;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use pharos::ensemble::Dependencies;
use pharos::error::InferError;
use pharos::metrics::cache::Cache;
use pharos::repository::{IndexEntry, State, States};
use pharos::scheduler::rate_limiter::Limit;
use tokio::sync::watch;

use crate::cache::ResponseCache;
use crate::cli;
use crate::process::Program;
use crate::scheduler::{Limits, Timer};
use crate::system::{Gpus, Worker};
pub use drain::Unfinished;
pub(crate) use responses::Responses;
pub(crate) use serving::Serving;

/// Where models come from and how they are loaded.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Directories of models.
    pub repositories: Vec<PathBuf>,
    /// How workers are started.
    pub program: Program,
    /// Whether configurations are completed from the models' files.
    pub auto_complete: bool,
    /// The batch size that auto-complete gives models that can batch; 0 leaves them unbatched.
    pub default_max_batch_size: u32,
    /// Models that are loaded at the same time.
    pub load_threads: usize,
    /// How long a worker may take to load its model.
    pub start_timeout: Duration,
    /// The longest pause before a worker is started again.
    pub max_backoff: Duration,
    /// How long a batch may execute before its worker is replaced; `None` for any time.
    pub execution_timeout: Option<Duration>,
    /// Threads that one execution may use; 0 for the cores divided among the model's instances.
    pub worker_threads: u32,
    /// The explicit limits of the rate limiter; `None` when it is off.
    pub rate_limits: Option<Vec<Limit>>,
    /// The GPUs, to ask how much of their memory a model takes.
    pub gpus: Option<Arc<Gpus>>,
    /// The response cache, for models that ask for it.
    pub response_cache: Option<cli::Cache>,
}

/// What is there, replaced as a whole when it changes: requests take a snapshot without waiting.
#[derive(Default, Clone)]
pub(crate) struct Table {
    states: States,
    /// Ensembles with their members, those included that could not be loaded.
    dependencies: Dependencies,
    serving: BTreeMap<String, BTreeMap<u64, Arc<Serving>>>,
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
    // Held to copy or replace the pointer.
    table: RwLock<Arc<Table>>,
}

impl Repository {
    /// A repository that has loaded nothing yet. Needs the runtime.
    pub(crate) fn new(settings: Settings, cache: Arc<Cache>, metrics: Arc<str>, timer: Arc<Timer>) -> Self {
        let limits = settings.rate_limits.clone().map(Limits::new);
        let responses = settings.response_cache.as_ref();
        let responses = responses.map(|settings| Arc::new(ResponseCache::new(settings, cache.clone())));
        let (metrics, table) = (watch::Sender::new(metrics), RwLock::default());
        Self { settings, cache, metrics, timer, limits, responses, table }
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
        let table = self.table();
        let number = table.states.lookup(name, version)?;
        let found = table.serving.get(name).and_then(|versions| versions.get(&number));
        found
            .cloned()
            .ok_or_else(|| InferError::internal(format!("model '{name}' version {number} is ready but does not serve")))
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
            workers.extend(instances.processes().map(|(name, pid)| (worker(name), pid)));
        }
        workers
    }

    /// The versions of a model that are ready, ascending.
    pub(crate) fn ready_versions(&self, name: &str) -> Vec<u64> {
        self.table().states.ready_versions(name).collect()
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

    /// What the repository index shows.
    pub(crate) fn index(&self, ready_only: bool) -> Vec<IndexEntry> {
        self.table().states.index(ready_only)
    }

    /// Every model that is not ready, with the reason.
    pub(crate) fn failures(&self) -> Vec<(String, String)> {
        let unready = self.index(false).into_iter().filter(|entry| entry.state != Some(State::Ready));
        unready.map(|entry| (entry.name, entry.reason)).collect()
    }
}
