//! Where every series lives.
//!
//! Models' own series are structures of cells ([`ModelSeries`]); the metrics that users define in `model_metrics` are
//! families of [`Cell`]s by label values. Locks guard only which series exist; a value is changed through the handle that
//! the cache gave out, without them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::catalog::{Catalog, Kind, MetricId, MetricSpec, Section};
use super::series::{ModelSeries, RequestSeries};
use crate::id::ModelVersion;

/// How many series one metric of `model_metrics` may have: what a worker sends must not fill the frontend's memory.
pub const MAX_SERIES_PER_METRIC: usize = 10_000;
/// How long one of its label values may be, in bytes, for the same reason.
pub const MAX_LABEL_BYTES: usize = 256;

/// Why a sample was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleError {
    /// No metric has this id, or it is not one of `model_metrics`.
    UnknownMetric(MetricId),
    /// The number of label values is not the number of the metric's dimensions.
    WrongLabels {
        /// The metric's name.
        metric: String,
        /// Its number of dimensions.
        expected: usize,
        /// The number of values given.
        given: usize,
    },
    /// A label value has more than [`MAX_LABEL_BYTES`] bytes.
    LabelTooLong {
        /// The metric's name.
        metric: String,
        /// The value's length in bytes.
        length: usize,
    },
    /// The metric has [`MAX_SERIES_PER_METRIC`] series already.
    TooManySeries(String),
    /// A counter's increment that is negative, or a value that is no number where one is needed.
    BadValue(String),
}

impl fmt::Display for SampleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownMetric(id) => write!(f, "metric number {} is not defined in model_metrics", id.0),
            Self::WrongLabels { metric, expected, given } => {
                write!(f, "metric `{metric}` has {expected} dimensions, {given} values were given")
            }
            Self::LabelTooLong { metric, length } => {
                write!(f, "a label value of metric `{metric}` has {length} bytes, allowed are {MAX_LABEL_BYTES}")
            }
            Self::TooManySeries(metric) => {
                write!(f, "metric `{metric}` has {MAX_SERIES_PER_METRIC} series already, the most allowed")
            }
            Self::BadValue(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for SampleError {}

/// The value of one series of a user's metric.
#[derive(Debug)]
pub struct Cell(CellValue);

#[derive(Debug)]
enum CellValue {
    /// The bits of an f64.
    Counter(AtomicU64),
    /// The bits of an f64.
    Gauge(AtomicU64),
    Histogram(Histogram),
}

/// A distribution: not cumulated, one bucket more than bounds.
#[derive(Debug)]
struct Histogram {
    bounds: Vec<f64>,
    buckets: Vec<AtomicU64>,
    sum: AtomicU64,
}

/// What a [`Cell`] holds at one moment.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Reading {
    Number(f64),
    /// Sum, and each bucket's upper bound and own count; the last bound is infinite.
    Histogram(f64, Vec<(f64, u64)>),
}

impl Cell {
    fn new(spec: &MetricSpec) -> Self {
        Self(match spec.kind {
            Kind::Counter => CellValue::Counter(AtomicU64::new(0)),
            Kind::Gauge => CellValue::Gauge(AtomicU64::new(0)),
            Kind::Histogram => CellValue::Histogram(Histogram {
                bounds: spec.buckets.clone(),
                buckets: std::iter::repeat_with(AtomicU64::default).take(spec.buckets.len() + 1).collect(),
                sum: AtomicU64::new(0),
            }),
        })
    }

    /// Takes one sample: a counter's increment, a gauge's new value, a histogram's observation.
    ///
    /// # Errors
    /// [`SampleError::BadValue`] for a counter's increment that is negative or not finite, and for an observation of NaN.
    pub fn add_or_update(&self, value: f64) -> Result<(), SampleError> {
        match &self.0 {
            CellValue::Counter(_) if !(value.is_finite() && value >= 0.0) => {
                return Err(SampleError::BadValue(format!(
                    "a counter grows by finite numbers of 0 or more, not by {value}"
                )));
            }
            CellValue::Counter(bits) => add(bits, value),
            CellValue::Gauge(bits) => bits.store(value.to_bits(), Ordering::Relaxed),
            CellValue::Histogram(_) if value.is_nan() => {
                return Err(SampleError::BadValue("a histogram cannot observe NaN".to_owned()));
            }
            CellValue::Histogram(histogram) => {
                let at = histogram.bounds.partition_point(|&bound| bound < value);
                if let Some(bucket) = histogram.buckets.get(at) {
                    bucket.fetch_add(1, Ordering::Relaxed);
                    add(&histogram.sum, value);
                }
            }
        }
        Ok(())
    }

    pub(super) fn read(&self) -> Reading {
        match &self.0 {
            CellValue::Counter(bits) | CellValue::Gauge(bits) => {
                Reading::Number(f64::from_bits(bits.load(Ordering::Relaxed)))
            }
            CellValue::Histogram(histogram) => {
                let bounds = histogram.bounds.iter().copied().chain([f64::INFINITY]);
                let counts = histogram.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed));
                let sum = f64::from_bits(histogram.sum.load(Ordering::Relaxed));
                Reading::Histogram(sum, bounds.zip(counts).collect())
            }
        }
    }
}

fn add(bits: &AtomicU64, amount: f64) {
    let sum = |old: u64| Some((f64::from_bits(old) + amount).to_bits());
    // The closure never gives `None`, so this cannot fail.
    let _ = bits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
}

/// Series of one metric by label values, in the order in which they are shown.
pub(super) type Family = BTreeMap<Box<[String]>, Arc<Cell>>;

/// All series of the server.
#[derive(Debug)]
pub struct Cache {
    catalog: Catalog,
    hostname: String,
    /// Written by loads and unloads only.
    models: RwLock<BTreeMap<ModelVersion, Arc<ModelSeries>>>,
    requests: RequestSeries,
    /// By metric id; written when a series is first seen.
    families: Vec<RwLock<Family>>,
}

impl Cache {
    /// An empty cache for the metrics of `catalog`; `hostname` is the value of the labels of that name.
    pub fn new(catalog: Catalog, hostname: &str) -> Self {
        let families = catalog.iter().map(|_| RwLock::default()).collect();
        Self {
            catalog,
            hostname: hostname.to_owned(),
            models: RwLock::default(),
            requests: RequestSeries::new(),
            families,
        }
    }

    /// The metrics that are defined.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// The value of labels for the host.
    pub fn hostname(&self) -> &str {
        &self.hostname
    }

    /// Creates every series of a model version at 0, in place of those of an earlier load. `tags` are its `metric_tags`.
    pub fn model_loaded(&self, model: &ModelVersion, tags: &[(String, String)]) -> Arc<ModelSeries> {
        let series = Arc::new(ModelSeries::new(model, tags));
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        models.insert(model.clone(), Arc::clone(&series));
        series
    }

    /// Removes a model version's series from all views. If the version was loaded again meanwhile, the new series stay.
    pub fn model_unloaded(&self, series: &Arc<ModelSeries>) {
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        if models.get(series.model()).is_some_and(|current| Arc::ptr_eq(current, series)) {
            models.remove(series.model());
        }
    }

    /// The series of a loaded model version.
    pub fn model(&self, model: &ModelVersion) -> Option<Arc<ModelSeries>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    /// The series of all loaded model versions, by name and version.
    pub fn models(&self) -> Vec<Arc<ModelSeries>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The series of a metric of `model_metrics` with these label values, created at 0 if it is new.
    ///
    /// # Errors
    /// When the metric, the number of label values or the number of series is not allowed.
    pub fn series(&self, metric: MetricId, labels: &[String]) -> Result<Arc<Cell>, SampleError> {
        let spec = self.catalog.get(metric).filter(|spec| spec.section == Section::Model);
        let (Some(spec), Some(family)) = (spec, self.family(metric)) else {
            return Err(SampleError::UnknownMetric(metric));
        };
        if labels.len() != spec.dimensions.len() {
            let (expected, given) = (spec.dimensions.len(), labels.len());
            return Err(SampleError::WrongLabels { metric: spec.name.clone(), expected, given });
        }
        if let Some(long) = labels.iter().find(|label| label.len() > MAX_LABEL_BYTES) {
            return Err(SampleError::LabelTooLong { metric: spec.name.clone(), length: long.len() });
        }
        if let Some(cell) = family.read().unwrap_or_else(PoisonError::into_inner).get(labels) {
            return Ok(Arc::clone(cell));
        }
        let mut family = family.write().unwrap_or_else(PoisonError::into_inner);
        if family.len() >= MAX_SERIES_PER_METRIC && !family.contains_key(labels) {
            return Err(SampleError::TooManySeries(spec.name.clone()));
        }
        Ok(Arc::clone(family.entry(labels.into()).or_insert_with(|| Arc::new(Cell::new(spec)))))
    }

    /// Takes one sample of a metric of `model_metrics`; for many samples of one series, keep [`Cache::series`]' handle.
    ///
    /// # Errors
    /// As [`Cache::series`] and [`Cell::add_or_update`].
    pub fn sample(&self, metric: MetricId, labels: &[String], value: f64) -> Result<(), SampleError> {
        self.series(metric, labels)?.add_or_update(value)
    }

    pub(super) fn requests(&self) -> &RequestSeries {
        &self.requests
    }

    pub(super) fn family(&self, metric: MetricId) -> Option<&RwLock<Family>> {
        self.families.get(usize::try_from(metric.0).ok()?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const CUSTOM: &str = "
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop]}
  gauge:
    - {name: Level, unit: m}
  histogram:
    - {name: Size, unit: B, buckets: [1, 10]}
";

    fn cache() -> Cache {
        Cache::new(Catalog::parse(CUSTOM, "m.yaml").unwrap(), "host")
    }

    fn id(cache: &Cache, name: &str) -> MetricId {
        cache.catalog().find(name).unwrap().0
    }

    #[test]
    fn samples_add_set_and_observe() {
        let cache = cache();
        let (orders, level, size) = (id(&cache, "Orders"), id(&cache, "Level"), id(&cache, "Size"));
        let shop = ["a".to_owned()];
        cache.sample(orders, &shop, 1.5).unwrap();
        cache.sample(orders, &shop, 2.0).unwrap();
        assert_eq!(cache.series(orders, &shop).unwrap().read(), Reading::Number(3.5));
        cache.sample(level, &[], 7.0).unwrap();
        cache.sample(level, &[], -2.0).unwrap();
        assert_eq!(cache.series(level, &[]).unwrap().read(), Reading::Number(-2.0));
        for value in [0.5, 1.0, 1.1, 11.0] {
            cache.sample(size, &[], value).unwrap();
        }
        let buckets = vec![(1.0, 2), (10.0, 1), (f64::INFINITY, 1)];
        assert_eq!(cache.series(size, &[]).unwrap().read(), Reading::Histogram(13.6, buckets));
    }

    #[test]
    fn bad_samples_are_refused() {
        let cache = cache();
        let (orders, size) = (id(&cache, "Orders"), id(&cache, "Size"));
        let shop = ["a".to_owned()];
        assert_eq!(cache.sample(MetricId(9), &[], 1.0), Err(SampleError::UnknownMetric(MetricId(9))));
        assert!(matches!(cache.sample(orders, &[], 1.0), Err(SampleError::WrongLabels { expected: 1, given: 0, .. })));
        let long = ["x".repeat(MAX_LABEL_BYTES + 1)];
        assert!(matches!(cache.sample(orders, &long, 1.0), Err(SampleError::LabelTooLong { length: 257, .. })));
        cache.sample(orders, &["x".repeat(MAX_LABEL_BYTES)], 1.0).unwrap();
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(cache.sample(orders, &shop, bad), Err(SampleError::BadValue(_))));
        }
        assert!(matches!(cache.sample(size, &[], f64::NAN), Err(SampleError::BadValue(_))));
        assert_eq!(cache.series(orders, &shop).unwrap().read(), Reading::Number(0.0));
        let shipped = Cache::new(Catalog::shipped(), "host");
        let (builtin, _) = shipped.catalog().find("nv_inference_count").unwrap();
        assert!(matches!(shipped.sample(builtin, &[], 1.0), Err(SampleError::UnknownMetric(_))));
    }

    #[test]
    fn label_sets_are_bounded() {
        let cache = cache();
        let orders = id(&cache, "Orders");
        for at in 0..MAX_SERIES_PER_METRIC {
            cache.sample(orders, &[at.to_string()], 1.0).unwrap();
        }
        assert!(matches!(cache.sample(orders, &["new".to_owned()], 1.0), Err(SampleError::TooManySeries(_))));
        cache.sample(orders, &["0".to_owned()], 1.0).unwrap();
    }

    #[test]
    fn an_unload_leaves_a_newer_load_alone() {
        let cache = cache();
        let model = ModelVersion::new("m", 1);
        let old = cache.model_loaded(&model, &[]);
        let new = cache.model_loaded(&model, &[]);
        cache.model_unloaded(&old);
        assert!(Arc::ptr_eq(&cache.model(&model).unwrap(), &new));
        cache.model_unloaded(&new);
        assert!(cache.model(&model).is_none());
        assert!(cache.models().is_empty());
    }
}
