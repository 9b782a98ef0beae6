//! TorchServe's counters of requests, by the name and the version that stand in the URL: `default` where it has none, so
//! that one model has two series. A server that counts this way counts no version of a model by its number.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::journal::Line;
use super::series::Count;

/// The version of a request whose URL names none.
pub const DEFAULT: &str = "default";

/// What requests by one name and version have cost.
#[derive(Debug)]
pub struct Named {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) requests: Count,
    pub(super) latency_ns: Count,
    pub(super) queue_ns: Count,
    /// Written when the definition of the metrics changes.
    lines: RwLock<Lines>,
}

/// The log lines of single requests, as far as the definition wants them.
#[derive(Clone, Debug, Default)]
pub(super) struct Lines {
    pub(super) latency: Option<Arc<Line>>,
    pub(super) queue_latency: Option<Arc<Line>>,
}

impl Named {
    fn new(name: &str, version: &str, lines: Lines) -> Self {
        let (name, version) = (name.to_owned(), version.to_owned());
        let count = Count::default;
        Self { name, version, requests: count(), latency_ns: count(), queue_ns: count(), lines: RwLock::new(lines) }
    }

    pub(super) fn lines(&self) -> Lines {
        self.lines.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// All names and versions that were asked for.
#[derive(Debug, Default)]
pub(super) struct ByName {
    on: AtomicBool,
    first_worker: AtomicU32,
    all: RwLock<BTreeMap<String, BTreeMap<String, Arc<Named>>>>,
}

impl ByName {
    pub(super) fn switch_on(&self, first_worker: u32) {
        self.first_worker.store(first_worker, Ordering::Relaxed);
        self.on.store(true, Ordering::Relaxed);
    }

    /// The number of a model's first worker.
    pub(super) fn first_worker(&self) -> u32 {
        self.first_worker.load(Ordering::Relaxed)
    }

    /// Whether requests are counted this way.
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(super) fn of(&self, name: &str, version: &str, lines: impl FnOnce(&str, &str) -> Lines) -> Arc<Named> {
        let version = if version.is_empty() { DEFAULT } else { version };
        let found = |all: &BTreeMap<String, BTreeMap<String, Arc<Named>>>| all.get(name)?.get(version).cloned();
        if let Some(known) = found(&self.all.read().unwrap_or_else(PoisonError::into_inner)) {
            return known;
        }
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Named::new(name, version, lines(name, version)));
        all.entry(name.to_owned()).or_default().entry(version.to_owned()).or_insert_with(new).clone()
    }

    pub(super) fn all(&self) -> Vec<Arc<Named>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// The definition has changed.
    pub(super) fn redefine(&self, lines: impl Fn(&str, &str) -> Lines) {
        for named in self.all() {
            *named.lines.write().unwrap_or_else(PoisonError::into_inner) = lines(&named.name, &named.version);
        }
    }
}
