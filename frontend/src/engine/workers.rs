//! What can be asked about the workers of a model.

use std::path::Path;

use pharos::id::CorrelationId;
use pharos::metrics::labels::InstanceState;
use pharos::metrics::record;
use pharos::timeline::Instant;

use super::Engine;
use crate::clock;
use crate::supervisor::Doing;
use crate::system::{GpuReading, process_of};

/// One worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerShown {
    /// Its number, from 0 on; it keeps it when its process is started again.
    pub number: u32,
    /// What it is doing; `None` when it has ended.
    pub state: Option<InstanceState>,
    /// Its process, if it has one.
    pub pid: Option<u32>,
    /// Bytes that the process has in memory.
    pub resident_bytes: u64,
    /// When the process started, in seconds since 1970, if that is known.
    pub started: Option<f64>,
    /// The number of the GPU that it is on, if on one.
    pub gpu: Option<u32>,
}

impl Engine {
    /// The workers of a model (a name of the repository's) that serves; none if it does not.
    pub fn workers(&self, name: &str) -> Vec<WorkerShown> {
        let Ok(serving) = self.0.repository.serving(name, "") else { return Vec::new() };
        let Some(instances) = serving.instances() else { return Vec::new() };
        let shown = instances.states().into_iter().map(|Doing { id, state, pid, gpu, .. }| {
            let process = pid.and_then(|pid| process_of(Path::new("/proc"), pid));
            let (resident_bytes, started) = process.unwrap_or_default();
            WorkerShown { number: id.0, state, pid, resident_bytes, started, gpu }
        });
        shown.collect()
    }

    /// What a GPU told when the system was measured last; `None` if it is not measured.
    pub(crate) fn gpu(&self, number: u32) -> Option<GpuReading> {
        self.0.gpus.of(self.0.repository.devices().on_the_bus(number)?, clock::now())
    }

    /// What each is doing, and since when it has been lost: from the first of a row of losses on.
    pub fn worker_states(&self, name: &str) -> Vec<(Option<InstanceState>, Option<Instant>)> {
        let Ok(serving) = self.0.repository.serving(name, "") else { return Vec::new() };
        serving.instances().map(|instances| instances.seen()).unwrap_or_default()
    }

    /// Requests that wait for a model (a name of the repository's).
    pub fn waiting(&self, name: &str) -> u64 {
        let serving = self.0.repository.serving(name, "");
        serving.map_or(0, |serving| u64::try_from(serving.series.waiting()).unwrap_or(0))
    }

    /// Whether a process of a model (a name of the repository's) was killed by the system, and not by this server, since
    /// then.
    pub fn killed_since(&self, name: &str, since: Instant) -> bool {
        let serving = self.0.repository.serving(name, "");
        serving.is_ok_and(|serving| serving.driver().is_some_and(|driver| driver.killed_since(since)))
    }

    /// Ends the sequence with this id of a model (a name of the repository's) when the requests that it has are done.
    pub fn end_sequence(&self, name: &str, id: &CorrelationId) {
        let Ok(serving) = self.0.repository.serving(name, "") else { return };
        if let Some(driver) = serving.driver() {
            driver.end_sequence(id);
        }
    }

    /// A request by this name and version has come that no model can take now, although there is one of this name: it is
    /// counted where requests are counted by name.
    pub fn refused_by_name(&self, name: &str, version: &str) {
        if let Some(named) = self.0.cache.named(name, version) {
            record::named_requested(&self.0.cache, &named);
        }
    }
}
