//! The operations of an edge that manages models and their workers itself.

use std::sync::Arc;

use super::{Naming, Service};
use crate::id::CorrelationId;
use crate::metrics::cache::Cache;
use crate::metrics::labels::InstanceState;
use crate::timeline::Instant;

/// A worker process of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerStatus {
    /// The number of the worker, from 0; a restarted worker keeps it.
    pub number: u32,
    /// The state; `None` after its end.
    pub state: Option<InstanceState>,
    /// The process id, if a process runs.
    pub pid: Option<u32>,
    /// The resident memory of the process in bytes.
    pub resident_bytes: u64,
    /// The start time of the process in seconds since 1970, if known.
    pub started: Option<f64>,
    /// The number of its GPU, if it uses one.
    pub gpu: Option<u32>,
}

/// The state of a worker, and the time since which it has been lost: the first of several
/// consecutive losses.
pub type WorkerHealth = (Option<InstanceState>, Option<Instant>);

/// The last measurement of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuUsage {
    /// The share of the time in which a kernel ran, 0 to 1.
    pub utilization: Option<f64>,
    /// The share of the time in which memory was read or written, 0 to 1.
    pub bandwidth: Option<f64>,
    /// Bytes of memory in use.
    pub memory_used: Option<u64>,
}

/// A server, as an edge that manages models holds it.
pub type SharedManagement = Arc<dyn Management>;

/// The operations of management, in addition to the operations of [`Service`]. Names of models are
/// the repository's.
pub trait Management: Service {
    /// Returns the same server for clients that use the names of this policy.
    #[must_use]
    fn with_naming(&self, naming: Arc<dyn Naming>) -> SharedManagement;

    /// Returns the workers of a model; empty if it is not loaded.
    fn workers(&self, model: &str) -> Vec<WorkerStatus>;

    /// Returns the health of the workers of a model; empty if it is not loaded.
    fn worker_health(&self, model: &str) -> Vec<WorkerHealth>;

    /// Returns the last measurement of a GPU by its number; `None` if it is not measured.
    fn gpu_usage(&self, number: u32) -> Option<GpuUsage>;

    /// Returns the number of requests that wait for a model.
    fn waiting(&self, model: &str) -> u64;

    /// Returns whether the system, and not this server, killed a worker of a model since then.
    fn killed_since(&self, model: &str, since: Instant) -> bool;

    /// Ends the sequence with this id of a model after the requests that it already has.
    fn end_sequence(&self, model: &str, id: &CorrelationId);

    /// Counts a request to `model` and `version`, as the client names them, that no worker of the
    /// model `serving` can take now.
    fn record_refused(&self, model: &str, version: &str, serving: &str);

    /// Returns the metrics, after the gauges that are computed on demand are updated. Reads the
    /// state of all models, so it should not run on an event loop.
    fn current_metrics(&self) -> Arc<Cache>;
}
