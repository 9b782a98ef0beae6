//! Counts of requests by alias: the name and version that clients use, where these differ from the
//! repository's. A model then has one series for each alias, and none for its version number.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;

use super::counts::ModelCounts;
use super::journal::Line;

/// Names a worker, given its number (from 0) and the name and version that clients use.
pub type WorkerName = dyn Fn(u32, &str, &str) -> String + Send + Sync;

/// The naming policy of a server that counts by alias.
pub struct Naming {
    /// The version shown for requests without one.
    pub default_version: &'static str,
    /// Names the workers.
    pub worker: Box<WorkerName>,
}

impl fmt::Debug for Naming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Naming")
            .field("default_version", &self.default_version)
            .finish_non_exhaustive()
    }
}

/// The counts of the requests by one name and version.
#[derive(Debug)]
pub struct AliasCounts {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) counts: ModelCounts,
    /// Replaced when the definition of the metrics changes.
    lines: RwLock<Lines>,
}

/// The log lines of single requests; `None` where the definition does not log them.
#[derive(Clone, Debug, Default)]
pub(super) struct Lines {
    pub(super) latency: Option<Arc<Line>>,
    pub(super) queue_latency: Option<Arc<Line>>,
}

impl AliasCounts {
    fn new(name: &str, version: &str, lines: Lines) -> Self {
        let name = name.to_owned();
        Self {
            name,
            version: version.to_owned(),
            counts: ModelCounts::default(),
            lines: RwLock::new(lines),
        }
    }

    pub(super) fn lines(&self) -> Lines {
        self.lines.read().clone()
    }
}

/// The counts of all names and versions that requests have used.
#[derive(Debug, Default)]
pub(super) struct ByAlias {
    naming: OnceLock<Naming>,
    all: RwLock<BTreeMap<String, BTreeMap<String, Arc<AliasCounts>>>>,
}

impl ByAlias {
    /// Starts counting by alias. Only the first call has an effect.
    pub(super) fn switch_on(&self, naming: Naming) {
        let _ = self.naming.set(naming);
    }

    /// Returns the naming policy if requests are counted by alias.
    pub(super) fn naming(&self) -> Option<&Naming> {
        self.naming.get()
    }

    /// Returns the counts of this name and version; `None` unless requests are counted by alias.
    pub(super) fn of(
        &self,
        name: &str,
        version: &str,
        lines: impl FnOnce(&str, &str) -> Lines,
    ) -> Option<Arc<AliasCounts>> {
        let naming = self.naming()?;
        let version = if version.is_empty() { naming.default_version } else { version };
        if let Some(known) = self.all.read().get(name).and_then(|versions| versions.get(version)) {
            return Some(Arc::clone(known));
        }
        let mut all = self.all.write();
        Some(
            all.entry(name.to_owned())
                .or_default()
                .entry(version.to_owned())
                .or_insert_with(|| Arc::new(AliasCounts::new(name, version, lines(name, version))))
                .clone(),
        )
    }

    pub(super) fn all(&self) -> Vec<Arc<AliasCounts>> {
        let all = self.all.read();
        all.values().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Replaces the log lines after the definition has changed.
    pub(super) fn redefine(&self, lines: impl Fn(&str, &str) -> Lines) {
        for alias in self.all() {
            *alias.lines.write() = lines(&alias.name, &alias.version);
        }
    }
}
