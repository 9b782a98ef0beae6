//! Metrics recorded by models: the handles behind `pb_utils.MetricFamily` and
//! `pharos_worker.metrics`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pharos::metrics::catalog::Kind;
use pharos_backend as backend;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::TritonModelException;
use crate::model::model;

/// Whether this process was forked by the model. The ring of samples belongs to the parent.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Adds the functions of this module.
pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(add_metric, module)?)?;
    module.add_function(wrap_pyfunction!(get_metric, module)?)?;
    module.add_function(wrap_pyfunction!(record, module)?)?;
    module.add_function(wrap_pyfunction!(defined, module)?)?;
    module.add_function(wrap_pyfunction!(flush, module)?)?;
    module.add_function(wrap_pyfunction!(forked, module)?)
}

/// Marks this process as a fork.
#[pyfunction]
fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Returns the metrics of this process.
///
/// # Errors
/// The process is a fork, or runs no model.
fn metrics() -> PyResult<&'static backend::Metrics> {
    if is_forked() {
        return Err(TritonModelException::new_err(
            "a process forked by the model cannot record metrics",
        ));
    }
    Ok(model()?.runtime.metrics())
}

fn kind_of(name: &str) -> PyResult<Kind> {
    let kinds = [Kind::Counter, Kind::Gauge, Kind::Histogram, Kind::Summary];
    kinds.into_iter().find(|kind| kind.as_str() == name).ok_or_else(|| {
        PyValueError::new_err(format!(
            "unknown kind of metric '{name}': allowed are counter, gauge, histogram and summary"
        ))
    })
}

fn refused(error: &backend::MetricError) -> PyErr {
    TritonModelException::new_err(error.to_string())
}

/// Returns a metric with these dimensions that is defined in `metrics.yaml` or created by
/// auto-detection.
#[pyfunction]
fn add_metric(name: &str, unit: &str, dimensions: Vec<String>, kind: &str) -> PyResult<Recorder> {
    let dimensions: Vec<&str> = dimensions.iter().map(String::as_str).collect();
    let metric = metrics()?.add_metric(name, unit, &dimensions, kind_of(kind)?);
    metric.map(|metric| Recorder { metric }).map_err(|error| refused(&error))
}

/// Returns a metric that is already defined.
#[pyfunction]
fn get_metric(name: &str, kind: &str) -> PyResult<Recorder> {
    let metric = metrics()?.get_metric(name, kind_of(kind)?);
    metric.map(|metric| Recorder { metric }).map_err(|error| refused(&error))
}

/// The state of a `pb_utils.MetricFamily`. Dropping it invalidates the series of the family.
#[pyclass(frozen, module = "pharos_worker._native")]
pub(crate) struct Family {
    deleted: Arc<AtomicBool>,
}

#[pymethods]
impl Family {
    #[new]
    fn new() -> Self {
        Self { deleted: Arc::default() }
    }

    /// Creates a series of a metric that the model itself declares, with buckets for a histogram.
    /// `described` is the metric's name, description and kind.
    fn series(
        &self,
        described: (String, String, String),
        buckets: Vec<f64>,
        labels: Vec<(String, String)>,
    ) -> PyResult<Series> {
        let (name, description, kind) = described;
        let kind = kind_of(&kind)?;
        let (dimensions, values): (Vec<String>, Vec<String>) = labels.into_iter().unzip();
        let metric = backend::Described { name, kind, description, buckets, dimensions };
        let texts: Vec<&str> = values.iter().map(String::as_str).collect();
        let series = metrics()?.own_series(&metric, &texts).map_err(|error| refused(&error))?;
        let value = model()?.value(metric.name, values);
        Ok(Series { series, kind, value, family_deleted: self.deleted.clone() })
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        self.deleted.store(true, Ordering::Relaxed);
    }
}

/// The name, unit and type of a metric that a TorchServe handler records.
#[derive(FromPyObject)]
struct UndeclaredMetric(String, String, String);

/// Records a sample of a TorchServe handler's metric. `request_ids` are joined by commas; empty for
/// none.
#[pyfunction]
fn record(
    metric: UndeclaredMetric,
    dimensions: Vec<(String, String)>,
    value: f64,
    request_ids: &str,
) -> PyResult<()> {
    if is_forked() {
        return Ok(());
    }
    let UndeclaredMetric(name, unit, kind) = metric;
    let dimensions: Vec<(&str, &str)> =
        dimensions.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let sample = backend::UndeclaredSample {
        name: &name,
        unit: &unit,
        kind: kind_of(&kind)?,
        dimensions: &dimensions,
    };
    let requests = if request_ids.is_empty() {
        backend::Requests::None
    } else {
        backend::Requests::Ids(request_ids)
    };
    metrics()?.record_undeclared(&sample, value, requests);
    Ok(())
}

/// The type, name, unit and dimensions of a metric.
type Defined = (&'static str, String, String, Vec<String>);

/// Returns the metrics that `metrics.yaml` defines for models.
#[pyfunction]
fn defined() -> PyResult<Vec<Defined>> {
    let specs = metrics()?.of_models().into_iter();
    Ok(specs.map(|spec| (spec.kind.as_str(), spec.name, spec.unit, spec.dimensions)).collect())
}

/// Sends the buffered samples.
#[pyfunction]
fn flush(py: Python<'_>) -> PyResult<()> {
    let metrics = metrics()?;
    py.detach(|| metrics.flush());
    Ok(())
}

/// A metric, which is recorded with values for its dimensions.
#[pyclass(frozen, module = "pharos_worker._native")]
pub(crate) struct Recorder {
    metric: backend::Metric,
}

#[pymethods]
impl Recorder {
    /// Records a sample: the increment of a counter, the value of a gauge, or an observation.
    #[pyo3(signature = (value, dimension_values = Vec::new(), request_id = None))]
    fn add_or_update(&self, value: f64, dimension_values: Vec<String>, request_id: Option<&str>) {
        if is_forked() {
            return;
        }
        let values: Vec<&str> = dimension_values.iter().map(String::as_str).collect();
        match request_id {
            Some(id) => self.metric.add_or_update_for(value, &values, backend::Requests::Id(id)),
            None => self.metric.add_or_update(value, &values),
        }
    }

    /// Sets all series of a gauge to 0.
    fn reset(&self) {
        if !is_forked() {
            self.metric.reset();
        }
    }
}

/// A series: `pb_utils.Metric`.
#[pyclass(frozen, subclass, module = "triton_python_backend_utils", name = "Metric")]
pub(crate) struct Series {
    series: backend::Series,
    kind: Kind,
    /// The value that this process has recorded, as the bits of a double: the sum of a counter or
    /// the value of a gauge. Shared by all handles of the series.
    value: Arc<AtomicU64>,
    family_deleted: Arc<AtomicBool>,
}

impl Series {
    fn wrong(&self, verb: &str, why: &str) -> PyErr {
        let kind = self.kind.as_str();
        TritonModelException::new_err(format!("Failed to {verb} metric value: a {kind} {why}"))
    }

    /// Fails if the family of this series has been deleted, as in Triton.
    fn check(&self, verb: &str) -> PyResult<()> {
        if !self.family_deleted.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(TritonModelException::new_err(format!(
            "Failed to {verb} metric value: Invalid metric operation as the corresponding \
             'MetricFamily' has been deleted. The 'MetricFamily' object should be deleted AFTER \
             its corresponding 'Metric' objects have been deleted."
        )))
    }

    fn add(&self, value: f64) -> f64 {
        let before = self.value.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits: u64| {
            Some((f64::from_bits(bits) + value).to_bits())
        });
        f64::from_bits(before.unwrap_or_default()) + value
    }

    fn record(&self, value: f64) {
        if !is_forked() {
            self.series.add_or_update(value);
        }
    }
}

#[pymethods]
impl Series {
    /// Adds to a counter (0 or more) or a gauge (any number).
    fn increment(&self, value: f64) -> PyResult<()> {
        self.check("increment")?;
        match self.kind {
            Kind::Counter if value < 0.0 => Err(self.wrong(
                "increment",
                &format!("cannot be incremented by the negative value {value}"),
            )),
            Kind::Counter => {
                self.add(value);
                self.record(value);
                Ok(())
            }
            Kind::Gauge => {
                let now = self.add(value);
                self.record(now);
                Ok(())
            }
            _ => Err(self.wrong("increment", "cannot be incremented: use observe()")),
        }
    }

    /// Sets a gauge.
    fn set(&self, value: f64) -> PyResult<()> {
        self.check("set")?;
        if self.kind != Kind::Gauge {
            return Err(self.wrong("set", "cannot be set: only gauges have set()"));
        }
        self.value.store(value.to_bits(), Ordering::Relaxed);
        self.record(value);
        Ok(())
    }

    /// Adds an observation to a histogram.
    fn observe(&self, value: f64) -> PyResult<()> {
        self.check("observe")?;
        if self.kind != Kind::Histogram {
            return Err(self.wrong("observe", "cannot be observed: only histograms have observe()"));
        }
        self.record(value);
        Ok(())
    }

    /// Returns the value of a counter or a gauge, as recorded by this process.
    fn value(&self) -> PyResult<f64> {
        self.check("get")?;
        match self.kind {
            Kind::Counter | Kind::Gauge => Ok(f64::from_bits(self.value.load(Ordering::Relaxed))),
            _ => Err(self.wrong("get", "has no single value")),
        }
    }
}
