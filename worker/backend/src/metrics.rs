//! What a model records: the metrics of `metrics.yaml`, and the way of their samples to the frontend.
//!
//! ```text
//! let orders = context.metrics.add_metric("Orders", "Count", &["shop"], Kind::Counter)?;   // in the load
//! orders.add_or_update(1.0, &["north"]);                                                   // anywhere, from any thread
//! let north = orders.series(&["north"])?;                                                  // keep it: cheaper
//! north.add_or_update(1.0);
//! ```
//!
//! Every sample goes into the ring at once: when `add_or_update` returns it is committed, and the frontend has it even if
//! this process is killed in the next moment. So there is nothing for [`Metrics::flush`] to send, but for the values of
//! [`Coalesced`] handles, which gather updates in this process because their metric changes far more often than anybody
//! looks at it. The runtime flushes after the load and after each inference.
//!
//! Nothing here fails an inference: a sample that cannot be recorded is counted as dropped, and the reason is printed, once
//! a second at most. When the ring is full the caller waits for the frontend, a second at most.
//!
//! The functions `add_metric`, `get_metric` and `add_or_update` have the names and the default dimensions of `ts.metrics`.

mod definitions;
mod handles;
mod sink;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::cache::SampleError;
use pharos::metrics::catalog::{Catalog, Kind, MetricSpec, RECORDED_BY_WORKER, STATE_BYTES};
pub use pharos::metrics::channel::Described;
use pharos::metrics::channel::PushError;
use pharos::timeline::Instant;
use pharos::wire::{BatchRequest, Done, Load};

use definitions::Definitions;
use handles::Held;
pub use handles::{Coalesced, Metric, Series};
pub use sink::Requests;
use sink::Sink;

/// Why a metric or a series cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetricError {
    /// The definition does not allow it; an undeclared metric's text says what to write into `metrics.yaml`.
    #[error(transparent)]
    Refused(#[from] SampleError),
    /// [`Metrics::get_metric`] found none.
    #[error("there is no {} `{name}`: neither metrics.yaml nor add_metric has defined it", kind.as_str())]
    Unknown {
        /// The name asked for.
        name: String,
        /// The type asked for.
        kind: Kind,
    },
    /// The ring cannot take the series.
    #[error(transparent)]
    NoRoom(#[from] PushError),
}

/// An error of the load, if the backend passes it on.
impl From<MetricError> for InferError {
    fn from(error: MetricError) -> Self {
        InferError::new(ErrorCode::Unavailable, Reason::Backend, error.to_string())
    }
}

/// A metric that need not have been added, as each sample names it: the definition of a metric of this name holds, whatever
/// its type.
#[derive(Clone, Copy, Debug)]
pub struct UndeclaredSample<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its unit, if it is not defined.
    pub unit: &'a str,
    /// Its type, if it is not defined.
    pub kind: Kind,
    /// Names and values of its dimensions. They belong to the defined ones by name if all of these names are defined, else
    /// by position; the host may be left out.
    pub dimensions: &'a [(&'a str, &'a str)],
}

/// The metrics of this process. Cheap to clone; for any thread.
#[derive(Clone)]
pub struct Metrics(Arc<MetricsState>);

struct MetricsState {
    // Held while a metric is looked up or added.
    definitions: Mutex<Definitions>,
    // Held for one sample, and while the ring is full: it has one producer.
    sink: Mutex<Sink>,
    /// What is flushed.
    held: Mutex<Vec<Arc<Held>>>,
    /// What the runtime itself records, as far as the definition has it.
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
    /// It is no ring, or the definition of the metrics is wrong.
    #[doc(hidden)]
    pub fn open(ring: &OwnedFd, bell: OwnedFd, load: &Load) -> io::Result<Self> {
        let metrics = Self(Arc::new(MetricsState {
            definitions: Mutex::new(Definitions::new(&load.model, load.version, load.auto_detect)),
            sink: Mutex::new(Sink::open(ring, bell)?),
            held: Mutex::default(),
            times: Mutex::default(),
        }));
        metrics.redefine(&load.metrics)?;
        Ok(metrics)
    }

    /// Takes another text of `metrics.yaml`. Handles that the model holds stay good: of a metric that is not defined any
    /// more, or is switched off, samples are no longer taken.
    ///
    /// # Errors
    /// The text is no definition of metrics; then nothing has changed.
    #[doc(hidden)]
    pub fn redefine(&self, text: &str) -> io::Result<()> {
        let catalog = Catalog::parse(text, "metrics.yaml").map_err(io::Error::other)?;
        lock(&self.0.definitions).redefine(catalog);
        let [handler, prediction] = RECORDED_BY_WORKER.map(|name| self.time(name));
        *lock(&self.0.times) = Times { handler, prediction };
        Ok(())
    }

    /// The metric of this name and type, with these dimensions; what `metrics.yaml` says about its unit and labels holds.
    /// Dimensions of the definition that are left out must be among those of
    /// [`WorkerLabel`](pharos::metrics::catalog::WorkerLabel), which are filled in. The same metric may be added any number
    /// of times.
    ///
    /// # Errors
    /// `metrics.yaml` does not define it (the text names the line to add) and metrics are not detected, or it defines
    /// another type or other dimensions, or the server records it itself.
    pub fn add_metric(
        &self,
        name: &str,
        unit: &str,
        dimension_names: &[&str],
        kind: Kind,
    ) -> Result<Metric, MetricError> {
        let named = lock(&self.0.definitions).add(name, unit, dimension_names, kind)?;
        Ok(Metric::new(self.clone(), named))
    }

    /// A metric that was added, or that `metrics.yaml` defines, by name and type.
    ///
    /// # Errors
    /// There is none of this name, or it is of another type, or the server records it itself.
    pub fn get_metric(&self, name: &str, kind: Kind) -> Result<Metric, MetricError> {
        let named = lock(&self.0.definitions).get(name, kind)?;
        Ok(Metric::new(self.clone(), named))
    }

    /// The series of these labels, in their order, of a metric that the model itself describes: with the first of its series
    /// the metric is told to the server, which needs no definition of it. One that `metrics.yaml` defines is taken as it is.
    ///
    /// # Errors
    /// The metric is of another type or has other labels, here or in `metrics.yaml`; its name, labels or buckets are not
    /// allowed; the ring cannot take the series.
    pub fn own_series(&self, metric: &Described, values: &[&str]) -> Result<Series, MetricError> {
        metric.check()?;
        let (named, is_new) = lock(&self.0.definitions).describe(metric)?;
        if is_new {
            self.sink().describe(metric)?;
        }
        Metric::new(self.clone(), named).series(values)
    }

    /// Records a sample of a metric that need not have been added. One that is not defined is detected with the dimensions
    /// of its first sample if metrics are detected; else the sample is dropped and counted.
    pub fn record_undeclared(&self, sample: &UndeclaredSample<'_>, value: f64, requests: Requests<'_>) {
        let found = lock(&self.0.definitions).undeclared(sample);
        let series = found.and_then(|(named, values)| {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            Metric::new(self.clone(), named).series(&values)
        });
        match series {
            Ok(series) => series.add_or_update_for(value, requests),
            Err(error) => self.sink().drop_sample(&error),
        }
    }

    /// The metrics of models that `metrics.yaml` defines.
    pub fn of_models(&self) -> Vec<MetricSpec> {
        lock(&self.0.definitions).of_models()
    }

    /// Sends what [`Coalesced`] handles have gathered. When it returns, everything that this thread recorded before is
    /// committed: the frontend takes it into its cache whatever happens to this process.
    pub fn flush(&self) {
        for held in lock(&self.0.held).iter() {
            held.flush(self);
        }
    }

    /// A batch begins on this thread: what it records from now on is for these requests, unless it says otherwise.
    #[doc(hidden)]
    pub fn batch_begins(&self, requests: &[BatchRequest]) {
        lock(&self.0.sink).batch_begins(requests);
    }

    /// One batch that had come at `arrived` is done: `HandlerTime` (in the backend) and `PredictionTime` (with
    /// the work around it), in milliseconds, for successes only. `None`: the backend records them itself.
    #[doc(hidden)]
    pub fn batch_executed(&self, done: &Done, arrived: Option<Instant>) {
        if let Some(arrived) = arrived.filter(|_| done.error.is_none()) {
            let times = lock(&self.0.times);
            let end = done.stamps.end;
            for (series, start) in [(&times.handler, done.stamps.start), (&times.prediction, arrived)] {
                if let Some(series) = series {
                    series.record(end.ns_since(start) as f64 / 1e6, end, Requests::Batch);
                }
            }
        }
        self.flush();
        lock(&self.0.sink).batch_ended();
    }

    /// The series of a metric that every backend records, if the definition has it: its labels are known here, or the
    /// catalog would not have taken them. What can still go wrong is a ring without room.
    fn time(&self, name: &str) -> Option<Series> {
        let named = lock(&self.0.definitions).find(name)?;
        Metric::new(self.clone(), named).series(&[]).ok()
    }

    /// The gauge of the bytes that an instance keeps for sequences, if the definition has it.
    #[doc(hidden)]
    pub fn state_bytes(&self, instance: &str) -> Option<Series> {
        let named = lock(&self.0.definitions).find(STATE_BYTES)?;
        Metric::new(self.clone(), named).series(&[instance]).ok()
    }

    fn sink(&self) -> MutexGuard<'_, Sink> {
        lock(&self.0.sink)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
