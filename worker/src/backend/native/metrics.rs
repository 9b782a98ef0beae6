//! The metrics that a library records.
//!
//! Contract for `unsafe`: the handles are boxed and live as long as the instance; pointers that are
//! passed in follow the rules of the header.

use std::collections::HashMap;
use std::ffi::c_char;
use std::ptr;

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos::metrics::catalog::Kind;
use pharos_backend::{Metric, MetricError, Metrics, Requests, Series};

use super::abi::{Code, MetricSpec};
use super::foreign::{
    misuse, needed_text, outcome, outcome_of, put, reference, sized, text, texts,
};

/// `PHAROS_WHOLE_BATCH`.
const WHOLE_BATCH: i64 = -1;
/// `PHAROS_NO_REQUEST`.
const NO_REQUEST: i64 = -2;

/// `pharos_metrics`.
pub(super) struct MetricsHandle {
    metrics: Metrics,
    // By kind, name and dimensions; locked while one is looked up. The library may call from any
    // thread.
    known: Mutex<HashMap<String, Box<MetricHandle>>>,
}

/// `pharos_metric`.
pub(super) struct MetricHandle {
    metric: Metric,
    // By label values; locked while one is looked up.
    series: Mutex<HashMap<Vec<String>, Box<SeriesHandle>>>,
}

/// `pharos_series`.
pub(super) struct SeriesHandle(Series);

impl MetricsHandle {
    pub(super) fn new(metrics: &Metrics) -> Self {
        Self { metrics: metrics.clone(), known: Mutex::default() }
    }

    /// Returns the handle of a metric; `make` returns the metric.
    fn metric(
        &self,
        key: String,
        make: impl FnOnce(&Metrics) -> Result<Metric, MetricError>,
    ) -> Result<*const MetricHandle, InferError> {
        let mut known = self.known.lock();
        // Called even for a known metric, because the definition may have changed.
        let metric = make(&self.metrics)?;
        let handle = known
            .entry(key)
            .or_insert_with(|| Box::new(MetricHandle { metric, series: Mutex::default() }));
        Ok(ptr::from_ref(&**handle))
    }
}

fn kind_of(number: i32) -> Result<Kind, InferError> {
    Ok(match number {
        1 => Kind::Counter,
        2 => Kind::Gauge,
        3 => Kind::Histogram,
        4 => Kind::Summary,
        other => return Err(misuse(format!("{other} is not a metric kind; allowed are 1 to 4"))),
    })
}

/// # Safety
/// This module's contract, as for all functions below.
pub(super) unsafe extern "C" fn metric_add(
    metrics: *const MetricsHandle,
    spec: *const MetricSpec,
    metric: *mut *const MetricHandle,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        put(metric, ptr::null())?;
        let metrics = reference(metrics, "metrics")?;
        let spec = sized(spec, "spec")?;
        let name = needed_text(spec.name, "spec.name")?;
        let unit = text(spec.unit).unwrap_or_else(|| "Count".to_owned());
        let dimensions = texts(spec.dimensions, spec.dimension_count, "spec.dimensions")?;
        let kind = kind_of(spec.kind)?;
        let dimensions: Vec<&str> = dimensions.iter().map(String::as_str).collect();
        let key = format!("{} {name} {dimensions:?}", kind.as_str());
        put(
            metric,
            metrics.metric(key, |metrics| metrics.add_metric(&name, &unit, &dimensions, kind))?,
        )
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn metric_get(
    metrics: *const MetricsHandle,
    kind: i32,
    name: *const c_char,
    metric: *mut *const MetricHandle,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        put(metric, ptr::null())?;
        let metrics = reference(metrics, "metrics")?;
        let name = needed_text(name, "name")?;
        let kind = kind_of(kind)?;
        let key = format!("{} {name}", kind.as_str());
        put(metric, metrics.metric(key, |metrics| metrics.get_metric(&name, kind))?)
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn metric_series(
    metric: *const MetricHandle,
    values: *const *const c_char,
    count: usize,
    series: *mut *const SeriesHandle,
) -> Code {
    // SAFETY: the caller guarantees it for each of the pointers.
    outcome_of(|| unsafe {
        put(series, ptr::null())?;
        let metric = reference(metric, "metric")?;
        let values = texts(values, count, "values")?;
        let mut known = metric.series.lock();
        if !known.contains_key(&values) {
            let labels: Vec<&str> = values.iter().map(String::as_str).collect();
            let made = Box::new(SeriesHandle(metric.metric.series(&labels)?));
            known.insert(values.clone(), made);
        }
        put(series, known.get(&values).map_or(ptr::null(), |handle| ptr::from_ref(&**handle)))
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn add_or_update(
    series: *const SeriesHandle,
    value: f64,
    request: i64,
) -> Code {
    outcome_of(|| {
        let requests = match request {
            WHOLE_BATCH => Requests::Batch,
            NO_REQUEST => Requests::None,
            position => {
                let wrong = |_| {
                    misuse(format!(
                        "{position} is not a request position; allowed are -2 and above"
                    ))
                };
                Requests::One(usize::try_from(position).map_err(wrong)?)
            }
        };
        // SAFETY: the caller guarantees it.
        unsafe { reference(series, "series") }?.0.add_or_update_for(value, requests);
        Ok(())
    })
}

/// # Safety
/// As above.
pub(super) unsafe extern "C" fn metrics_flush(metrics: *const MetricsHandle) -> Code {
    // SAFETY: the caller guarantees it.
    outcome(unsafe { reference(metrics, "metrics") }.map(|metrics| metrics.metrics.flush()))
}
