//! Handles that a model holds: a metric, a series of it, a coalesced value.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use pharos::metrics::cache::SampleError;
use pharos::metrics::catalog::Kind;
use pharos::metrics::channel::Definition;
use pharos::metrics::label_schema::LabelSchema;
use pharos::timeline::Instant;

use super::sink::Requests;
use super::{MetricError, Metrics};
use crate::clock;

/// A metric as this process records it.
pub(super) struct Named {
    name: String,
    unit: String,
    kind: Kind,
    /// The dimensions; the dimensions that the model named come first.
    names: Vec<String>,
    /// The value of each dimension that has a default.
    defaults: Vec<Option<String>>,
    /// The number of dimensions that the model named: it gives no values for others.
    count: usize,
    /// Whether the metric is enabled in the definition.
    on: AtomicBool,
    /// The numbers of the series in the ring, by their values, in order.
    series: Mutex<Vec<(Box<[String]>, u32)>>,
}

impl Named {
    /// Creates an enabled metric, with the value of each dimension that has a default. The model
    /// named the first `count` dimensions.
    pub(super) fn new(
        name: String,
        unit: String,
        kind: Kind,
        names: Vec<String>,
        defaults: Vec<Option<String>>,
        count: usize,
    ) -> Self {
        Self {
            name,
            unit,
            kind,
            names,
            defaults,
            count,
            on: AtomicBool::new(true),
            series: Mutex::default(),
        }
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the unit of its values.
    pub(super) fn unit(&self) -> &str {
        &self.unit
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Enables or disables the metric.
    pub(super) fn switch(&self, on: bool) {
        self.on.store(on, Ordering::Relaxed);
    }

    fn on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Returns the names and values of all labels: see [`LabelSchema::align_values`].
    fn labels(&self, values: &[&str]) -> Result<Vec<(String, String)>, SampleError> {
        let schema = LabelSchema::new(&self.name, &self.names);
        let values = schema.align_values(values, self.count, &self.defaults)?;
        Ok(self.names.iter().cloned().zip(values.into_iter().map(str::to_owned)).collect())
    }

    fn check(&self, value: f64) -> Result<(), SampleError> {
        let bad = match self.kind {
            Kind::Counter => !(value.is_finite() && value >= 0.0),
            Kind::Gauge => false,
            Kind::Histogram | Kind::Summary => value.is_nan(),
        };
        if !bad {
            return Ok(());
        }
        let kind = self.kind.as_str();
        let name = &self.name;
        Err(SampleError::BadValue(format!("the {kind} `{name}` cannot take the value {value}")))
    }
}

/// A metric that the model may record.
#[derive(Clone)]
pub struct Metric {
    metrics: Metrics,
    named: Arc<Named>,
}

impl Metric {
    pub(super) fn new(metrics: Metrics, named: Arc<Named>) -> Self {
        Self { metrics, named }
    }

    /// Records a sample for the requests of the batch that this thread executes, if any: a
    /// counter's increment, a gauge's value, or an observation. The values belong to the dimensions
    /// in the order given to `add_metric`. Those that the worker can fill
    /// in ([`WorkerLabel`](pharos::metrics::catalog::WorkerLabel)) may be omitted, all of them or
    /// only the appended ones.
    pub fn add_or_update(&self, value: f64, dimension_values: &[&str]) {
        self.add_or_update_for(value, dimension_values, Requests::Batch);
    }

    /// Like [`Metric::add_or_update`], for the given requests.
    pub fn add_or_update_for(&self, value: f64, dimension_values: &[&str], requests: Requests<'_>) {
        match self.series(dimension_values) {
            Ok(series) => series.add_or_update_for(value, requests),
            Err(error) => self.metrics.sink().drop_sample(&error),
        }
    }

    /// Returns the series of these values. Recording many samples through it is cheaper.
    ///
    /// # Errors
    /// The number of values does not match the dimensions, or the ring has no room for the series.
    pub fn series(&self, dimension_values: &[&str]) -> Result<Series, MetricError> {
        self.series_with(dimension_values, |named| named.labels(dimension_values))
    }

    /// Returns the series of these values, one for each dimension.
    pub(super) fn series_of_all(&self, values: &[&str]) -> Result<Series, MetricError> {
        let owned = values.iter().map(|value| (*value).to_owned());
        self.series_with(values, |named| Ok(named.names.iter().cloned().zip(owned).collect()))
    }

    /// Returns the series of these values, which `labels` completes if it is new.
    fn series_with(
        &self,
        dimension_values: &[&str],
        labels: impl FnOnce(&Named) -> Result<Vec<(String, String)>, SampleError>,
    ) -> Result<Series, MetricError> {
        let mut known = self.named.series.lock();
        let number = match known.binary_search_by(|(values, _)| {
            values.iter().map(String::as_str).cmp(dimension_values.iter().copied())
        }) {
            Ok(at) => known.get(at).map_or(0, |(_, number)| *number),
            Err(at) => {
                let labels = labels(&self.named)?;
                let Named { name, unit, kind, .. } = &*self.named;
                let definition = Definition {
                    name: name.clone(),
                    kind: Some(*kind),
                    unit: unit.clone(),
                    labels,
                };
                let number = self.metrics.sink().intern(&definition)?;
                let values = dimension_values.iter().map(|value| (*value).to_owned()).collect();
                known.insert(at, (values, number));
                number
            }
        };
        Ok(Series { metrics: self.metrics.clone(), named: Arc::clone(&self.named), number })
    }

    /// Returns a handle for these values that accumulates updates until the next flush: the sum of
    /// a counter's increments, or a gauge's last value. They belong to no request.
    ///
    /// # Errors
    /// As for [`Metric::series`]; also for a distribution, because every observation counts.
    pub fn coalesced(&self, dimension_values: &[&str]) -> Result<Coalesced, MetricError> {
        if !matches!(self.named.kind, Kind::Counter | Kind::Gauge) {
            return Err(SampleError::WrongKind {
                metric: self.named.name.clone(),
                expected: self.named.kind,
                given: Kind::Counter,
            }
            .into());
        }
        let series = self.series(dimension_values)?;
        let mut all = self.metrics.0.held.lock();
        if let Some(held) = all
            .iter()
            .find(|held| held.number == series.number && Arc::ptr_eq(&held.named, &self.named))
            .map(Arc::clone)
        {
            return Ok(Coalesced { series, held });
        }
        let named = Arc::clone(&self.named);
        let held = Arc::new(Held { named, number: series.number, value: Mutex::new(None) });
        all.push(Arc::clone(&held));
        Ok(Coalesced { series, held })
    }

    /// Sets a gauge to 0 in every series that this process has recorded, and discards accumulated
    /// values that are not sent. Samples of a counter or a distribution that were sent remain:
    /// these metrics only grow.
    pub fn reset(&self) {
        self.metrics
            .0
            .held
            .lock()
            .iter()
            .filter(|held| Arc::ptr_eq(&held.named, &self.named))
            .for_each(|held| {
                held.value.lock().take();
            });
        if self.named.kind != Kind::Gauge {
            return;
        }
        let numbers: Vec<u32> =
            self.named.series.lock().iter().map(|(_, number)| *number).collect();
        for number in numbers {
            let series =
                Series { metrics: self.metrics.clone(), named: Arc::clone(&self.named), number };
            series.add_or_update(0.0);
        }
    }
}

/// One series of a metric, with label values that the frontend has received.
#[derive(Clone)]
pub struct Series {
    metrics: Metrics,
    named: Arc<Named>,
    number: u32,
}

impl Series {
    /// Like [`Metric::add_or_update`].
    pub fn add_or_update(&self, value: f64) {
        self.add_or_update_for(value, Requests::Batch);
    }

    /// Like [`Metric::add_or_update_for`].
    pub fn add_or_update_for(&self, value: f64, requests: Requests<'_>) {
        self.record(value, clock::now(), requests);
    }

    /// Returns the unit of its values.
    pub(super) fn unit(&self) -> &str {
        self.named.unit()
    }

    /// Records a sample with this time.
    pub(super) fn record(&self, value: f64, at: Instant, requests: Requests<'_>) {
        if !self.named.on() {
            return;
        }
        match self.named.check(value) {
            Ok(()) => self.metrics.sink().sample(self.number, value, at, requests),
            Err(error) => self.metrics.sink().drop_sample(&error.into()),
        }
    }
}

/// A counter or gauge whose updates are accumulated in this process until the next flush. Costs a
/// few nanoseconds for each update and one sample for each flush; accumulated values are lost if
/// the process dies.
#[derive(Clone)]
pub struct Coalesced {
    series: Series,
    held: Arc<Held>,
}

impl Coalesced {
    /// Adds to the counter or sets the gauge; takes effect with the next flush.
    pub fn add_or_update(&self, value: f64) {
        let named = &self.held.named;
        if let Err(error) = named.check(value) {
            return self.series.metrics.sink().drop_sample(&error.into());
        }
        let mut held = self.held.value.lock();
        *held = Some(match *held {
            Some(sum) if named.kind == Kind::Counter => sum + value,
            _ => value,
        });
    }
}

/// The value behind a [`Coalesced`].
pub(super) struct Held {
    named: Arc<Named>,
    number: u32,
    value: Mutex<Option<f64>>,
}

impl Held {
    /// Sends the value if there is one.
    pub(super) fn flush(&self, metrics: &Metrics) {
        let Some(value) = self.value.lock().take() else { return };
        let series = Series {
            metrics: metrics.clone(),
            named: Arc::clone(&self.named),
            number: self.number,
        };
        series.add_or_update_for(value, Requests::None);
    }
}
