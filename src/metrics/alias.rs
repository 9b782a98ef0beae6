//! Requests counted by alias: by the name and the version that clients use, where those are not the repository's. One model
//! then has a series for each of them, and no version of a model is counted by its number.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::counts::ModelCounts;
use super::journal::Line;

/// Names a worker by its number (from 0) of a model's version, given the name and the version that clients use.
pub type WorkerName = dyn Fn(u32, &str, &str) -> String + Send + Sync;

/// The names of a server that counts by alias.
pub struct Naming {
    /// The version of a request that names none.
    pub default_version: &'static str,
    /// The names of workers.
    pub worker: Box<WorkerName>,
}

impl fmt::Debug for Naming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Naming").field("default_version", &self.default_version).finish_non_exhaustive()
    }
}

/// What requests by one name and version have cost.
#[derive(Debug)]
pub struct AliasCounts {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) counts: ModelCounts,
    /// Written when the definition of the metrics changes.
    lines: RwLock<Lines>,
}

/// The log lines of single requests, as far as the definition wants them.
#[derive(Clone, Debug, Default)]
pub(super) struct Lines {
    pub(super) latency: Option<Arc<Line>>,
    pub(super) queue_latency: Option<Arc<Line>>,
}

impl AliasCounts {
    fn new(name: &str, version: &str, lines: Lines) -> Self {
        let (name, version) = (name.to_owned(), version.to_owned());
        Self { name, version, counts: ModelCounts::default(), lines: RwLock::new(lines) }
    }

    pub(super) fn lines(&self) -> Lines {
        self.lines.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// All names and versions that requests had.
#[derive(Debug, Default)]
pub(super) struct ByAlias {
    naming: OnceLock<Naming>,
    all: RwLock<BTreeMap<String, BTreeMap<String, Arc<AliasCounts>>>>,
}

impl ByAlias {
    /// Counts by alias from now on. Only the first naming is taken.
    pub(super) fn switch_on(&self, naming: Naming) {
        let _ = self.naming.set(naming);
    }

    /// What things are called, if requests are counted this way.
    pub(super) fn naming(&self) -> Option<&Naming> {
        self.naming.get()
    }

    /// The counts of this name and version; `None` unless requests are counted this way.
    pub(super) fn of(
        &self,
        name: &str,
        version: &str,
        lines: impl FnOnce(&str, &str) -> Lines,
    ) -> Option<Arc<AliasCounts>> {
        let naming = self.naming()?;
        let version = if version.is_empty() { naming.default_version } else { version };
        let found = |all: &BTreeMap<String, BTreeMap<String, Arc<AliasCounts>>>| all.get(name)?.get(version).cloned();
        if let Some(known) = found(&self.all.read().unwrap_or_else(PoisonError::into_inner)) {
            return Some(known);
        }
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(AliasCounts::new(name, version, lines(name, version)));
        Some(all.entry(name.to_owned()).or_default().entry(version.to_owned()).or_insert_with(new).clone())
    }

    pub(super) fn all(&self) -> Vec<Arc<AliasCounts>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// The definition has changed.
    pub(super) fn redefine(&self, lines: impl Fn(&str, &str) -> Lines) {
        for alias in self.all() {
            *alias.lines.write().unwrap_or_else(PoisonError::into_inner) = lines(&alias.name, &alias.version);
        }
    }
}
