//! Models that are loaded with their first request, and what is known about them while they are not
//! loaded.

use std::collections::BTreeMap;
use std::iter;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::repository::{Attempts, parse_version};
use tokio::sync::watch;

use super::{Serving, Snapshot};

/// The result of a load that requests wait for; `None` while it runs.
pub(crate) type Outcome = watch::Receiver<Option<Result<(), InferError>>>;

/// The number, the directory and, if it is known, the configuration of a version.
pub(crate) type UnloadedVersion = (u64, PathBuf, Option<Arc<ModelConfig>>);

/// The directory of a version, and its configuration; `None` if only a load completes the
/// configuration.
type Version = (PathBuf, Option<Arc<ModelConfig>>);

/// A model that is loaded on demand.
pub(crate) struct OnDemand {
    versions: RwLock<BTreeMap<u64, Version>>,
    /// The failed loads. Locked only to read or change them.
    attempts: Mutex<Attempts>,
    /// The load that runs. Locked only to begin a load, to find it and to forget it.
    load: Mutex<Option<Outcome>>,
    /// The number of loads that have ended and whose requests have not all found the model yet.
    awaited: AtomicUsize,
    /// The number of requests that found the model loaded before they were passed to it.
    found: AtomicU64,
    /// The number of requests that waited for a load and are not yet subtracted from all requests.
    waited: AtomicU64,
}

impl OnDemand {
    /// Creates it from the directory and the configuration of each version; `None` if only a load
    /// completes the configuration.
    pub(crate) fn new(versions: impl Iterator<Item = (u64, PathBuf, Option<ModelConfig>)>) -> Self {
        let versions =
            versions.map(|(number, directory, config)| (number, (directory, config.map(Arc::new))));
        Self {
            versions: RwLock::new(versions.collect()),
            attempts: Mutex::default(),
            load: Mutex::default(),
            awaited: AtomicUsize::new(0),
            found: AtomicU64::new(0),
            waited: AtomicU64::new(0),
        }
    }

    /// The failed loads.
    pub(crate) fn attempts(&self) -> MutexGuard<'_, Attempts> {
        self.attempts.lock()
    }

    /// Returns the load that runs; if no load runs, starts one, which sends its result with the
    /// given sender.
    pub(crate) fn join(
        &self,
        start: impl FnOnce(watch::Sender<Option<Result<(), InferError>>>),
    ) -> Outcome {
        let mut load = self.load.lock();
        // The sender of a load that ended without a result has been dropped.
        let running =
            load.as_ref().filter(|load| load.borrow().is_none() && load.has_changed().is_ok());
        if let Some(running) = running {
            return running.clone();
        }
        let (sender, outcome) = watch::channel(None);
        *load = Some(outcome.clone());
        start(sender);
        outcome
    }

    /// Forgets the load, which has ended, so that only the requests that waited for it have its
    /// result.
    pub(crate) fn forget_load(&self) {
        let mut load = self.load.lock();
        drop(load.take_if(|load| load.borrow().is_some()));
    }

    /// Keeps the model from being unloaded for want of use until the returned value is dropped.
    pub(crate) fn await_requests(self: &Arc<Self>) -> Awaited {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        Awaited(self.clone())
    }

    /// Returns whether the requests that waited for the model have not all found it yet.
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) > 0
    }

    /// Remembers the loaded versions, with their directories and configurations.
    pub(crate) fn loaded(&self, versions: &BTreeMap<u64, Arc<Serving>>) {
        let versions = versions.iter().map(|(number, serving)| {
            (*number, (serving.directory.clone(), Some(serving.config.clone())))
        });
        self.replace(versions.collect());
    }

    /// Takes over the versions of the model whose files have changed. The next request may load it,
    /// also after failures.
    pub(crate) fn update(&self, read: Self) {
        self.replace(read.versions.into_inner());
        self.attempts().succeeded();
    }

    fn replace(&self, versions: BTreeMap<u64, Version>) {
        *self.versions.write() = versions;
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u64, Version>> {
        self.versions.read()
    }

    /// Returns the number, the directory and, if it is known, the configuration of each version.
    pub(crate) fn to_load(&self) -> Vec<UnloadedVersion> {
        let versions = self.read();
        versions
            .iter()
            .map(|(number, (directory, config))| (*number, directory.clone(), config.clone()))
            .collect()
    }

    /// Returns the versions in ascending order.
    pub(crate) fn versions(&self) -> Vec<u64> {
        self.read().keys().copied().collect()
    }

    /// Returns a version's configuration (empty: the latest version's); `None` if the version does
    /// not exist or the configuration is not known before a load.
    fn config(&self, version: &str) -> Option<(u64, Arc<ModelConfig>)> {
        let versions = self.read();
        let (number, (_, config)) = match version {
            "" => versions.last_key_value()?,
            _ => versions.get_key_value(&parse_version(version).ok()?)?,
        };
        Some((*number, config.clone()?))
    }

    /// Returns whether a request for this version (empty: any) can be for this model.
    pub(crate) fn has_version(&self, version: &str) -> bool {
        version.is_empty()
            || parse_version(version).is_ok_and(|number| self.read().contains_key(&number))
    }

    /// Counts a request that found the model loaded.
    pub(crate) fn record_found(&self) {
        self.found.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that waited until the model was loaded, and is then passed to it.
    pub(crate) fn record_waited(&self) {
        self.waited.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns how many of these further requests found the model loaded, because they did not
    /// wait. Computed from counts that exist anyway, so that a request to a loaded model costs no
    /// further count.
    pub(crate) fn hits(&self, requests: u64) -> u64 {
        let waited = self.waited.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |waited| {
            Some(waited.saturating_sub(requests))
        });
        requests.saturating_sub(waited.unwrap_or_default())
    }

    /// Returns a number that grows with each request to the loaded versions; `None` while they
    /// execute requests or sequences.
    pub(crate) fn uses(&self, versions: &BTreeMap<u64, Arc<Serving>>) -> Option<u64> {
        if !versions.values().all(|serving| serving.executor.is_idle()) {
            return None;
        }
        let requests = versions.values().map(|serving| serving.series.requested());
        Some(requests.sum::<u64>() + self.found.load(Ordering::Relaxed))
    }
}

/// A load that has ended and whose requests have not all found the model yet.
pub(crate) struct Awaited(Arc<OnDemand>);

impl Drop for Awaited {
    fn drop(&mut self) {
        self.0.awaited.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Snapshot {
    /// Remembers the serving versions of a model that requests load, for the time when it is not
    /// loaded.
    pub(crate) fn remember_on_demand(&mut self, name: &str) {
        if let Some(versions) = self.serving.get(name) {
            let model = self
                .on_demand
                .entry(name.to_owned())
                .or_insert_with(|| Arc::new(OnDemand::new(iter::empty())));
            model.loaded(versions);
        }
    }

    /// Forgets that requests load a model, after a load whose configuration no longer says so.
    pub(crate) fn forget_on_demand(&mut self, name: &str) {
        self.on_demand.remove(name);
        self.demanded.remove(name);
    }

    /// Counts a request that waited until its model was loaded on demand.
    pub(crate) fn record_waited(&self, name: &str) {
        self.on_demand(name).iter().for_each(|(_, model)| model.record_waited());
    }

    /// Returns a model that is loaded on demand, by the name that a client uses, with its full
    /// name.
    pub(crate) fn on_demand<'n>(&'n self, name: &'n str) -> Option<(&'n str, &'n Arc<OnDemand>)> {
        // Most servers have none.
        if self.on_demand.is_empty() {
            return None;
        }
        let name = self.resolve(name).ok()?;
        Some((name, self.on_demand.get(name)?))
    }

    /// Returns the configuration and the number of a version of a model that is not loaded, with
    /// the numbers of all versions.
    pub(crate) fn unloaded_config(
        &self,
        name: &str,
        version: &str,
    ) -> Option<(Arc<ModelConfig>, u64, Vec<u64>)> {
        let (name, model) = self.on_demand(name)?;
        let (number, config) =
            model.config(version).filter(|_| !self.serving.contains_key(name))?;
        Some((config, number, model.versions()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_waited_are_no_hits() {
        let model = OnDemand::new(iter::empty());
        assert_eq!(model.hits(3), 3);
        model.record_waited();
        model.record_waited();
        // One of the two is not counted as a request yet.
        assert_eq!([model.hits(1), model.hits(0), model.hits(4), model.hits(2)], [0, 0, 3, 2]);
    }
}
