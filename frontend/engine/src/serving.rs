//! The table of served model versions, and the inference verb. Never reads model repositories or
//! loads models: the loader does, and changes this table.

mod drain;
mod gauges;
mod inference;
mod namespaces;
mod on_demand;
mod readiness;
mod responses;
mod retire;
mod version;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use parking_lot::{Mutex, RwLock};
use pharos::ensemble::Dependencies;
use pharos::error::InferError;
use pharos::id::ModelVersion;
use pharos::infer::InferRequest;
use pharos::metrics::cache::Cache;
use pharos::repository::States;
use tokio::sync::watch;

use crate::cache::ResponseCache;
use crate::load_progress::Loads;
use crate::memory::PinnedPool;
use crate::model_memory::MemoryUse;
use crate::scheduler::Limits;
use crate::store::Overrides;
pub use drain::Unfinished;
pub(crate) use namespaces::ambiguous;
pub(crate) use on_demand::{Awaited, OnDemand, Outcome, UnloadedVersion};
use pharos_telemetry::system::Worker;
pub(crate) use responses::ServedResponses;
pub(crate) use retire::RetireReason;
use retire::Retired;
pub(crate) use version::{Executor, Refusal, Serving};

/// A snapshot of the model table. It is replaced as a whole, so that requests read it without
/// waiting for changes.
#[derive(Default, Clone)]
pub(crate) struct Snapshot {
    /// Whether models of the same name in different repositories are distinct.
    pub(crate) namespaces: bool,
    pub(crate) states: States,
    /// Ensembles with their members, including ensembles that could not be loaded.
    pub(crate) dependencies: Dependencies,
    pub(crate) serving: BTreeMap<String, BTreeMap<u64, Arc<Serving>>>,
    /// Models that should be loaded: those requested by name, their members, or all.
    pub(crate) wanted: BTreeSet<String>,
    /// Models that a client has loaded by name.
    pub(crate) named: BTreeSet<String>,
    /// Models that are loaded with their first request.
    pub(crate) on_demand: BTreeMap<String, Arc<OnDemand>>,
    /// On-demand models that a request loaded.
    pub(crate) demanded: BTreeSet<String>,
    /// Overrides that clients have sent instead of the repositories' files.
    pub(crate) overrides: BTreeMap<String, Arc<Overrides>>,
    /// Models that workers have loaded, each with the model of the worker.
    pub(crate) owners: BTreeMap<String, String>,
    /// Replaced versions that still finish their sequences, oldest first.
    ending: BTreeMap<String, Vec<Arc<Serving>>>,
    /// Versions that are being unloaded, with the number of the unload.
    unloading: BTreeMap<ModelVersion, u64>,
    /// The number of unloads so far.
    unloads: u64,
    /// Models that are being unloaded and are in no repository.
    pub(crate) removed_from_repository: BTreeSet<String>,
    /// Unloaded models that were in no repository at that time, oldest first. The index omits
    /// them, and a request to one reports that no version is available.
    pub(crate) unloaded_without_files: VecDeque<String>,
}

impl Snapshot {
    fn serving(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        let name = self.resolve(name)?;
        let number = self.states.lookup(name, version)?;
        let found = self.serving.get(name).and_then(|versions| versions.get(&number));
        found.cloned().ok_or_else(|| {
            InferError::internal(format!(
                "model '{name}' version {number} is ready but does not serve"
            ))
        })
    }
}

/// State that the versions of all models share.
pub(crate) struct SharedResources {
    /// The metrics cache of all series.
    pub(crate) metrics: Arc<Cache>,
    /// The shared resources of the rate limiter, if it is on.
    pub(crate) limits: Option<Arc<Limits>>,
    pub(crate) response_cache: Option<Arc<ResponseCache>>,
    pub(crate) pinned: Arc<PinnedPool>,
    /// The memory that the models use, and its limits.
    pub(crate) memory: Arc<MemoryUse>,
    /// The UUIDs of the GPUs by number.
    pub(crate) gpu_uuids: BTreeMap<u32, String>,
}

/// The models of this server.
pub(crate) struct ModelTable {
    pub(crate) shared: SharedResources,
    /// The loads in progress.
    pub(crate) loads: Loads,
    /// Versions that have left the table and have not ended. Locked only to add or remove one.
    retired: Mutex<Vec<Retired>>,
    /// Set to end the drain immediately.
    abort_drain: watch::Sender<bool>,
    /// The number of requests that wait for models to load on demand.
    pub(crate) load_waits: AtomicUsize,
    /// Held during a change, so that changes wait for each other.
    changing: Mutex<()>,
    /// Held while the gauges are set: an older reading must not replace a newer one.
    observing: Mutex<()>,
    // Held only to copy or replace the pointer, or to change a table that no request reads.
    snapshot: RwLock<Arc<Snapshot>>,
}

/// The model table at one time. The versions in it do not end while it is kept, so it must not be
/// kept during a wait, which may be for the end of one of them: it is not `Send`, and a task that
/// keeps it across an `await` does not compile.
pub(crate) struct SnapshotGuard(Arc<Snapshot>, PhantomData<*const ()>);

impl Deref for SnapshotGuard {
    type Target = Snapshot;

    fn deref(&self) -> &Snapshot {
        &self.0
    }
}

impl ModelTable {
    /// Creates a table without models.
    pub(crate) fn new(shared: SharedResources, namespaces: bool) -> Self {
        let snapshot = RwLock::new(Arc::new(Snapshot { namespaces, ..Snapshot::default() }));
        Self {
            shared,
            loads: Loads::default(),
            retired: Mutex::default(),
            abort_drain: watch::Sender::new(false),
            load_waits: AtomicUsize::new(0),
            changing: Mutex::default(),
            observing: Mutex::default(),
            snapshot,
        }
    }

    pub(crate) fn snapshot(&self) -> SnapshotGuard {
        SnapshotGuard(self.snapshot.read().clone(), PhantomData)
    }

    /// Changes the table. If a request reads it, a copy is changed and replaces it: requests wait
    /// neither for the copy nor for the end of the old table.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Snapshot)) {
        let _turn = self.changing.lock();
        let read = {
            let mut snapshot = self.snapshot.write();
            match Arc::get_mut(&mut snapshot) {
                Some(unread) => return change(unread),
                None => snapshot.clone(),
            }
        };
        let mut changed = Snapshot::clone(&read);
        change(&mut changed);
        let new = Arc::new(changed);
        let replaced = std::mem::replace(&mut *self.snapshot.write(), new);
        // After the lock: this may be the last reference.
        drop((replaced, read));
    }

    /// Returns the version of a model that answers a request for `version` (empty: the latest ready
    /// one).
    ///
    /// # Errors
    /// The model or version is unknown or not ready.
    pub(crate) fn serving(&self, name: &str, version: &str) -> Result<Arc<Serving>, InferError> {
        self.snapshot().serving(name, version)
    }

    /// Like [`ModelTable::serving`] for the model that a request names. A request that continues a
    /// sequence gets the version that began it, even if it was replaced.
    ///
    /// # Errors
    /// As [`ModelTable::serving`].
    pub(crate) fn serving_for(&self, request: &InferRequest) -> Result<Arc<Serving>, InferError> {
        let snapshot = self.snapshot();
        let name = request.model_name.as_str();
        let version = request.model_version.as_str();
        let id = &request.correlation_id;
        if request.sequence_start {
            snapshot.begin_sequence(name, version, id);
        } else if let Some(serving) = snapshot.with_sequence(name, version, id) {
            return Ok(serving);
        }
        snapshot.serving(name, version)
    }

    /// Returns every serving version of every model, by name and version.
    pub(crate) fn all(&self) -> Vec<Arc<Serving>> {
        self.snapshot().serving.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Returns the instances of all serving versions, each with the process id if it has a process.
    pub(crate) fn workers(&self) -> Vec<(Worker, Option<u32>)> {
        let mut workers = Vec::new();
        for serving in self.all() {
            let Some(instances) = serving.instances() else { continue };
            for (instance, pid) in instances.processes() {
                workers.push((Worker { model: serving.model.clone(), instance }, pid));
            }
        }
        workers
    }

    /// Returns the ready versions of a model in ascending order.
    pub(crate) fn ready_versions(&self, name: &str) -> Vec<u64> {
        let snapshot = self.snapshot();
        snapshot
            .resolve(name)
            .map_or_else(|_| Vec::new(), |name| snapshot.states.ready_versions(name).collect())
    }

    /// Returns the full name of the model that a request names.
    ///
    /// # Errors
    /// The name is ambiguous.
    pub(crate) fn full_name(&self, name: &str) -> Result<String, InferError> {
        self.snapshot().resolve(name).map(str::to_owned)
    }
}
