//! Implements `pharos::service::Management` for the engine: names, workers and gauges of models.

use std::path::Path;
use std::sync::Arc;

use pharos::error::Reason;
use pharos::id::CorrelationId;
use pharos::metrics::cache::Cache;
use pharos::metrics::record;
use pharos::service::{GpuUsage, Management, Naming, SharedManagement, WorkerHealth, WorkerStatus};
use pharos::timeline::Instant;

use super::Engine;
use crate::supervisor::InstanceStatus;
use pharos_os::clock;
use pharos_telemetry::system::process_of;

impl Management for Engine {
    fn with_naming(&self, naming: Arc<dyn Naming>) -> SharedManagement {
        Arc::new(Self { naming: Some(naming), ..self.clone() })
    }

    fn workers(&self, model: &str) -> Vec<WorkerStatus> {
        let Ok(serving) = self.inner.loader.models().serving(model, "") else { return Vec::new() };
        let Some(instances) = serving.instances() else { return Vec::new() };
        let workers = instances.states().into_iter().map(|InstanceStatus { id, state, pid, gpu, .. }| {
            let process = pid.and_then(|pid| process_of(Path::new("/proc"), pid));
            let (resident_bytes, started) = process.unwrap_or_default();
            WorkerStatus { number: id.0, state, pid, resident_bytes, started, gpu }
        });
        workers.collect()
    }

    fn worker_health(&self, model: &str) -> Vec<WorkerHealth> {
        let Ok(serving) = self.inner.loader.models().serving(model, "") else { return Vec::new() };
        serving.instances().map(|instances| instances.health()).unwrap_or_default()
    }

    fn gpu_usage(&self, number: u32) -> Option<GpuUsage> {
        let reading = self.inner.latest.gpus.of(self.inner.loader.devices().bus_number(number)?, clock::now())?;
        Some(GpuUsage {
            utilization: reading.utilization,
            bandwidth: reading.bandwidth,
            memory_used: reading.memory.map(|memory| memory.used),
        })
    }

    fn waiting(&self, model: &str) -> u64 {
        let serving = self.inner.loader.models().serving(model, "");
        serving.map_or(0, |serving| u64::try_from(serving.series.waiting()).unwrap_or(0))
    }

    fn killed_since(&self, model: &str, since: Instant) -> bool {
        let serving = self.inner.loader.models().serving(model, "");
        serving.is_ok_and(|serving| serving.driver().is_some_and(|driver| driver.killed_since(since)))
    }

    fn end_sequence(&self, model: &str, id: &CorrelationId) {
        let Ok(serving) = self.inner.loader.models().serving(model, "") else { return };
        if let Some(driver) = serving.driver() {
            driver.end_sequence(id);
        }
    }

    fn record_refused(&self, (model, version): (&str, &str), serving: &str) {
        if let Ok(serving) = self.inner.loader.models().serving(serving, "") {
            record::inference_refused(&serving.series, Reason::QueueFull);
        }
        if let Some(named) = self.inner.cache.alias(model, version) {
            record::alias_requested(&self.inner.cache, &named);
        }
    }

    fn current_metrics(&self) -> Arc<Cache> {
        self.observe();
        self.inner.cache.clone()
    }
}
