//! Metrics that no file defines: detected by their first sample, or described by the model that records them.

use std::sync::{Arc, PoisonError};

use super::{Cache, MAX_DETECTED, SampleError};
use crate::metrics::builtin::Builtin;
use crate::metrics::catalog::{Kind, MetricSpec, check_reserved, is_label_name, is_metric_name};
use crate::metrics::channel::Described;
use crate::metrics::family::Registry;

/// The most buckets of a histogram that a model describes.
const MAX_BUCKETS: usize = 1_000;

impl Described {
    /// Whether it could be a metric, whatever others there are.
    ///
    /// # Errors
    /// A name or the buckets are not allowed.
    pub fn check(&self) -> Result<(), SampleError> {
        check_names(&self.name, self.kind, &self.dimensions)?;
        let ascending = self.buckets.windows(2).all(|pair| pair[0] < pair[1]);
        let finite = self.buckets.iter().all(|bound| bound.is_finite());
        if ascending && finite && self.buckets.len() <= MAX_BUCKETS {
            return Ok(());
        }
        let (name, count) = (&self.name, self.buckets.len());
        Err(SampleError::BadValue(format!(
            "the {count} buckets of metric `{name}` must be ascending finite numbers, {MAX_BUCKETS} at most"
        )))
    }
}

impl Cache {
    /// Registers a metric that a model describes. One that there is already stays as it is.
    ///
    /// # Errors
    /// It is not allowed, collides with another, or is one too many.
    pub fn describe(&self, metric: &Described) -> Result<(), SampleError> {
        if self.registry().catalog().find(&metric.name).is_some() {
            return Ok(());
        }
        if self.registry().catalog().is_disabled(&metric.name) {
            return Err(SampleError::Disabled(metric.name.clone()));
        }
        metric.check()?;
        let mut spec = MetricSpec::detected(&metric.name, metric.kind, "", metric.dimensions.clone());
        spec.help.clone_from(&metric.description);
        if metric.kind == Kind::Histogram {
            spec.buckets.clone_from(&metric.buckets);
        }
        self.register(spec).map(drop)
    }

    /// Adds a metric that no file defines.
    pub(super) fn register(&self, spec: MetricSpec) -> Result<Arc<Registry>, SampleError> {
        check_names(&spec.name, spec.kind, &spec.dimensions)?;
        check_reserved(&spec.name).map_err(SampleError::Collision)?;
        let mut registry = self.registry.write().unwrap_or_else(PoisonError::into_inner);
        if registry.catalog().find(&spec.name).is_some() {
            return Ok(Arc::clone(&registry));
        }
        registry.catalog().check_collisions(&spec.name, spec.kind).map_err(SampleError::Collision)?;
        let detected = registry.catalog().iter().filter(|(_, spec)| spec.detected).count();
        if detected >= MAX_DETECTED {
            return Err(SampleError::TooManyMetrics(spec.name));
        }
        *registry = Arc::new(registry.with_detected(spec));
        Ok(Arc::clone(&registry))
    }
}

/// Whether a metric and its labels may have these names.
fn check_names(name: &str, kind: Kind, labels: &[String]) -> Result<(), SampleError> {
    if !is_metric_name(name) || Builtin::from_name(name).is_some() {
        return Err(SampleError::BadName(name.to_owned()));
    }
    if let Some(label) = labels.iter().find(|label| !is_label_name(label)) {
        return Err(SampleError::BadName(label.clone()));
    }
    let reserved = match kind {
        Kind::Histogram => "le",
        Kind::Summary => "quantile",
        _ => "",
    };
    let twice = |at: usize, label: &String| labels.iter().skip(at + 1).any(|other| other == label);
    match labels.iter().enumerate().find(|(at, label)| *label == reserved || twice(*at, label)) {
        None => Ok(()),
        Some((_, label)) => Err(SampleError::BadValue(format!(
            "the label `{label}` of metric `{name}` is given twice, or reserved for its type"
        ))),
    }
}
