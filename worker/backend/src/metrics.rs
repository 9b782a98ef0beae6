//! Metrics that a model records, of `metrics.yaml` and others, and the transport of their samples
//! to the frontend.
//!
//! ```text
//! let orders = context.metrics.add_metric("Orders", "Count", &["shop"], Kind::Counter)?;   // in the load
//! orders.add_or_update(1.0, &["north"]);                                                   // anywhere, from any thread
//! let north = orders.series(&["north"])?;                                                  // keep it: cheaper
//! north.add_or_update(1.0);
//! ```
//!
//! Every sample is written to the ring immediately: when `add_or_update` returns it is committed,
//! and the frontend receives it even if this process is killed directly afterwards. So
//! [`Metrics::flush`] only sends the values of [`Coalesced`] handles, which accumulate updates in
//! this process because their metric changes far more often than it is read. The runtime flushes
//! after the load and after each inference.
//!
//! No error here fails an inference: a sample that cannot be recorded is counted as dropped, and
//! the reason is printed at most once per second. When the ring is full, the caller waits for the
//! frontend for at most one second.
//!
//! The functions `add_metric`, `get_metric` and `add_or_update` have the names and the default
//! dimensions of `ts.metrics`.

mod definitions;
mod handles;
mod sink;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::cache::SampleError;
use pharos::metrics::catalog::{Kind, RECORDED_BY_WORKER, STATE_BYTES};
pub use pharos::metrics::channel::Described;
use pharos::metrics::channel::PushError;
use pharos::metrics::unit::Conversion;
use pharos::metrics::worker_metrics::{WorkerMetric, WorkerMetrics};
use pharos::timeline::Instant;
use pharos::wire::{BatchRequest, Done, Load};

use definitions::Definitions;
use handles::Held;
pub use handles::{Coalesced, Metric, Series};
pub use sink::Requests;
use sink::Sink;

/// Why a metric or a series is unavailable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetricError {
    /// The definition does not allow it. For an undeclared metric, the text contains the line to
    /// add to `metrics.yaml`.
    #[error(transparent)]
    Refused(#[from] SampleError),
    /// [`Metrics::get_metric`] found no such metric.
    #[error("there is no {} `{name}`: neither metrics.yaml nor add_metric has defined it", kind.as_str())]
    Unknown {
        /// The requested name.
        name: String,
        /// The requested type.
        kind: Kind,
    },
    /// The ring cannot take the series.
    #[error(transparent)]
    NoRoom(#[from] PushError),
}

/// Converts to a load error, for backends that return it while they are created.
impl From<MetricError> for InferError {
    fn from(error: MetricError) -> Self {
        InferError::new(ErrorCode::Unavailable, Reason::Backend, error.to_string())
    }
}

/// A sample of a metric that need not have been added. If a metric of this name is defined, its
/// definition applies, whatever its type. A value in another unit of time or size is converted.
#[derive(Clone, Copy, Debug)]
pub struct UndeclaredSample<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its unit, used if the metric is not defined.
    pub unit: &'a str,
    /// Its type, used if the metric is not defined.
    pub kind: Kind,
    /// Names and values of its dimensions, in any order. They are matched with the defined ones by
    /// name. The host may be omitted.
    pub dimensions: &'a [(&'a str, &'a str)],
}

/// The metrics of this process. Cheap to clone; usable from any thread.
#[derive(Clone)]
pub struct Metrics(Arc<MetricsState>);

struct MetricsState {
    // Held while a metric is looked up or added.
    definitions: Mutex<Definitions>,
    // Held for one sample, and while the ring is full: the ring supports only one producer.
    sink: Mutex<Sink>,
    /// Values sent by the next flush.
    held: Mutex<Vec<Arc<Held>>>,
    /// Metrics that the runtime itself records, if they are defined.
    times: Mutex<Times>,
}

/// The series of [`RECORDED_BY_WORKER`].
#[derive(Default)]
struct Times {
    handler: Option<Series>,
    prediction: Option<Series>,
}

impl Metrics {
    /// Opens the ring.
    ///
    /// # Errors
    /// The descriptor is not a ring, or the definitions of metrics are invalid.
    #[doc(hidden)]
    pub fn open(ring: &OwnedFd, wakeup: OwnedFd, load: &Load) -> io::Result<Self> {
        let metrics = Self(Arc::new(MetricsState {
            definitions: Mutex::new(Definitions::new(&load.model, load.version, load.auto_detect)),
            sink: Mutex::new(Sink::open(ring, wakeup, format!("{}/{}", load.model, load.version))?),
            held: Mutex::default(),
            times: Mutex::default(),
        }));
        metrics.redefine(&load.metrics)?;
        Ok(metrics)
    }

    /// Replaces the definitions of metrics ([`WorkerMetrics::encode`]). Handles that the model
    /// holds stay valid; samples of a metric that is no longer defined, or is disabled, are
    /// discarded.
    ///
    /// # Errors
    /// The text is not of this form; nothing changes then.
    #[doc(hidden)]
    pub fn redefine(&self, text: &str) -> io::Result<()> {
        self.0.definitions.lock().redefine(WorkerMetrics::decode(text)?);
        let [handler, prediction] = RECORDED_BY_WORKER.map(|name| self.time(name));
        *self.0.times.lock() = Times { handler, prediction };
        Ok(())
    }

    /// Adds the metric of this name and type with these dimensions; `metrics.yaml` determines its
    /// unit and labels. Values in another unit of time or size are converted. Dimensions of
    /// the definition that are omitted must be in
    /// [`WorkerLabel`](pharos::metrics::catalog::WorkerLabel), which are filled in. The same metric
    /// may be added any number of times.
    ///
    /// # Errors
    /// `metrics.yaml` does not define it (the text names the line to add) and auto-detection of
    /// metrics is off, or it defines another type or other dimensions, or the server records the
    /// metric itself.
    pub fn add_metric(
        &self,
        name: &str,
        unit: &str,
        dimension_names: &[&str],
        kind: Kind,
    ) -> Result<Metric, MetricError> {
        let named = self.0.definitions.lock().add(name, unit, dimension_names, kind)?;
        Ok(Metric::new(self.clone(), named))
    }

    /// Returns a metric that was added, or that `metrics.yaml` defines, by name and type.
    ///
    /// # Errors
    /// There is no metric of this name, or it has another type, or the server records it itself.
    pub fn get_metric(&self, name: &str, kind: Kind) -> Result<Metric, MetricError> {
        let named = self.0.definitions.lock().get(name, kind)?;
        Ok(Metric::new(self.clone(), named))
    }

    /// Returns the series with these label values, in order, of a metric that the model itself
    /// describes. The first series sends the description to the server, so no definition is needed.
    /// A definition in `metrics.yaml` takes precedence.
    ///
    /// # Errors
    /// The metric has another type or other labels, here or in `metrics.yaml`; its name, labels or
    /// buckets are not allowed; or the ring has no room for the series.
    pub fn own_series(&self, metric: &Described, values: &[&str]) -> Result<Series, MetricError> {
        metric.check()?;
        let (named, is_new) = self.0.definitions.lock().describe(metric)?;
        if is_new {
            self.sink().describe(metric)?;
        }
        Metric::new(self.clone(), named).series(values)
    }

    /// Records a sample of a metric that need not have been added. If the metric is not defined and
    /// auto-detection is on, it is added with the dimensions of its first sample; if auto-detection
    /// is off, the sample is dropped and counted.
    pub fn record_undeclared(
        &self,
        sample: &UndeclaredSample<'_>,
        value: f64,
        requests: Requests<'_>,
    ) {
        let found = match self.0.definitions.lock().undeclared(sample) {
            Ok(Some(found)) => Ok(found),
            Ok(None) => return,
            Err(error) => Err(error),
        };
        let series = found.and_then(|(named, values)| {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            Metric::new(self.clone(), named).series_of_all(&values)
        });
        match series {
            Ok(series) => {
                let value = Conversion::between(sample.unit, series.unit()).apply(value);
                series.add_or_update_for(value, requests);
            }
            Err(error) => self.sink().drop_sample(&error),
        }
    }

    /// Returns the model metrics that `metrics.yaml` defines.
    pub fn of_models(&self) -> Vec<WorkerMetric> {
        self.0.definitions.lock().of_models()
    }

    /// Sends the values that [`Coalesced`] handles have accumulated. When it returns, everything
    /// that this thread recorded before is committed: the frontend reads it even if this process
    /// dies.
    pub fn flush(&self) {
        for held in self.0.held.lock().iter() {
            held.flush(self);
        }
    }

    /// Begins a batch on this thread: samples it records from now on belong to these requests by
    /// default.
    #[doc(hidden)]
    pub fn batch_begins(&self, requests: &[BatchRequest]) {
        self.0.sink.lock().batch_begins(requests);
    }

    /// Ends a batch that arrived at `arrived`: records `HandlerTime` (in the backend) and
    /// `PredictionTime` (including the work around it), in the unit of its definition, for
    /// successes only. With `None`, the backend records them itself.
    #[doc(hidden)]
    pub fn batch_executed(&self, done: &Done, arrived: Option<Instant>) {
        if let Some(arrived) = arrived.filter(|_| done.error.is_none()) {
            let times = self.0.times.lock();
            let end = done.stamps.end;
            for (series, start) in
                [(&times.handler, done.stamps.start), (&times.prediction, arrived)]
            {
                if let Some(series) = series {
                    let milliseconds = end.ns_since(start) as f64 / 1e6;
                    let value = Conversion::between("ms", series.unit()).apply(milliseconds);
                    series.record(value, end, Requests::Batch);
                }
            }
        }
        self.flush();
        self.0.sink.lock().batch_ended();
    }

    /// Returns the series of a metric that every backend records, if it is defined. Its labels are
    /// known here: the catalog would have refused others. Can only fail if the ring has no room.
    fn time(&self, name: &str) -> Option<Series> {
        let named = self.0.definitions.lock().find(name)?;
        Metric::new(self.clone(), named).series(&[]).ok()
    }

    /// Returns the gauge of the bytes that an instance keeps for sequences, if it is defined.
    #[doc(hidden)]
    pub fn state_bytes(&self, instance: &str) -> Option<Series> {
        let named = self.0.definitions.lock().find(STATE_BYTES)?;
        Metric::new(self.clone(), named).series(&[instance]).ok()
    }

    fn sink(&self) -> MutexGuard<'_, Sink> {
        self.0.sink.lock()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
