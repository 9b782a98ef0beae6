//! The destinations of the times of executed batches: gauges of the host, and the latencies of a model as log lines.

use std::sync::Arc;

use super::super::alias::Lines;
use super::super::builtin::Builtin;
use super::super::journal::Line;
use super::super::series::{ModelSeries, Times};
use super::super::source::LabelSet;
use super::{Cache, Series};

/// Nanoseconds in a microsecond: metrics named `ts_*_latency_microseconds` show cells in nanoseconds.
const NS_OF_MICROSECOND: f64 = 1000.0;

impl Cache {
    /// Returns the gauges that every executed batch sets, `QueueTime` and `WorkerThreadTime`, if they are defined.
    pub(super) fn host_times(&self) -> [Option<Arc<Series>>; 2] {
        [Builtin::QueueTime, Builtin::WorkerThreadTime]
            .map(|builtin| self.gauge(builtin.name(), &["Host", self.hostname()]).ok())
    }

    /// Returns the destinations of the times of this model's batches under the current definition.
    pub(super) fn times(&self, model: &ModelSeries) -> Times {
        let [queue, worker_thread] = self.host_times();
        let Lines { latency, queue_latency } = match self.naming() {
            Some(_) => Lines::default(),
            None => self.latency_lines(&model.labels(LabelSet::Alias, self.hostname())),
        };
        Times { queue, worker_thread, latency, queue_latency }
    }

    /// Returns the log lines of the latencies of requests by this name and version.
    pub(super) fn alias_lines(&self, name: &str, version: &str) -> Lines {
        self.latency_lines(&[("model_name", name), ("model_version", version), ("hostname", self.hostname())])
    }

    fn latency_lines(&self, labels: &[(&str, &str)]) -> Lines {
        let registry = self.registry();
        let line = |builtin: Builtin| {
            let family = registry.family(builtin.name()).filter(|family| family.views.tslog)?;
            Some(Arc::new(Line::of_server(&family.spec, labels, self.hostname(), NS_OF_MICROSECOND)))
        };
        Lines { latency: line(Builtin::TsLatency), queue_latency: line(Builtin::TsQueueLatency) }
    }
}
