//! Metrics that no file defines: detected by their first sample, or described by the model that
//! records them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Cache, SampleError};
use crate::builtin::Builtin;
use crate::catalog::{
    Kind, MetricSpec, WorkerLabel, check_reserved, is_label_name, is_metric_name,
};
use crate::channel::Described;
use crate::sample_error::MAX_DETECTED;

/// The number of buckets of a described histogram, at most.
const MAX_BUCKETS: usize = 1_000;
/// The number of labels that the series of a described metric have together, at most.
const MAX_LABELS: usize = 64;

impl Described {
    /// Checks names and buckets, without regard to other metrics.
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
        let name = &self.name;
        let count = self.buckets.len();
        Err(SampleError::BadValue(format!(
            "the {count} buckets of metric `{name}` must be ascending finite numbers, \
             {MAX_BUCKETS} at most"
        )))
    }
}

impl Cache {
    /// Adds a metric that a model describes. Does not change an existing metric, except that a
    /// described one may get more labels.
    ///
    /// # Errors
    /// The metric is not allowed, collides with another, or exceeds the limit.
    pub fn describe(&self, metric: &Described) -> Result<(), SampleError> {
        if self.registry().catalog().find(&metric.name).is_none() {
            self.register_described(metric)?;
        }
        // Needed for a new metric too: another model may have described it with other labels in
        // between.
        self.widen(&metric.name, metric.kind, &metric.dimensions)
    }

    fn register_described(&self, metric: &Described) -> Result<(), SampleError> {
        if self.registry().catalog().is_disabled(&metric.name) {
            return Err(SampleError::Disabled(metric.name.clone()));
        }
        metric.check()?;
        let mut spec =
            MetricSpec::detected(&metric.name, metric.kind, "", metric.dimensions.clone());
        spec.help.clone_from(&metric.description);
        spec.described = true;
        if metric.kind == Kind::Histogram {
            spec.buckets.clone_from(&metric.buckets);
        }
        self.register(spec)
    }

    /// Adds missing labels to a detected metric: its series may have different labels. One model
    /// may record such series, as in Triton, or several models a metric of one name.
    pub(super) fn widen(
        &self,
        name: &str,
        kind: Kind,
        labels: &[String],
    ) -> Result<(), SampleError> {
        let mut registry = self.registry.write();
        let known = registry.family_of(name, Some(kind)).map(|family| family.spec());
        let Some(mut spec) = known.filter(|spec| spec.detected && spec.kind == kind).cloned()
        else {
            return Ok(());
        };
        check_names(name, kind, labels)?;
        let new = labels.iter().filter(|label| !spec.dimensions.contains(label));
        let new: Vec<String> = new.cloned().collect();
        if new.is_empty() {
            return Ok(());
        }
        // Models append labels such as `ModelName` after their own, and lines show labels in this
        // order.
        let at = spec
            .dimensions
            .iter()
            .take_while(|label| spec.described || !WorkerLabel::is_appended(label))
            .count();
        spec.dimensions.splice(at..at, new);
        if spec.dimensions.len() > MAX_LABELS {
            let name = &spec.name;
            let count = spec.dimensions.len();
            let text = format!(
                "the series of metric `{name}` have {count} different labels together, \
                 {MAX_LABELS} at most"
            );
            return Err(SampleError::BadValue(text));
        }
        *registry = Arc::new(registry.with_labels(spec));
        // Feeds look up their series again and then use the series with all labels.
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Adds a metric that no file defines. If another detected metric has its name and a different
    /// type, only metric logs can have both.
    pub(super) fn register(&self, spec: MetricSpec) -> Result<(), SampleError> {
        check_names(&spec.name, spec.kind, &spec.dimensions)?;
        check_reserved(&spec.name).map_err(SampleError::Collision)?;
        let mut registry = self.registry.write();
        let known = registry.family_of(&spec.name, Some(spec.kind));
        let namesake = known.filter(|known| known.spec.detected && known.spec.kind != spec.kind);
        if known.is_some() && namesake.is_none_or(|known| known.views.prometheus) {
            return Ok(());
        }
        if registry.detected() >= MAX_DETECTED {
            return Err(SampleError::TooManyMetrics(spec.name));
        }
        if namesake.is_some() {
            *registry = Arc::new(registry.with_namesake(&spec));
            return Ok(());
        }
        registry
            .catalog()
            .check_collisions(&spec.name, spec.kind)
            .map_err(SampleError::Collision)?;
        *registry = Arc::new(registry.with_detected(spec));
        Ok(())
    }

    /// Removes a detected metric if it has no series any more, so that its name is free for samples
    /// of another type.
    pub(super) fn end_detected(&self, name: &str, kind: Kind) {
        if !self.registry().family_of(name, Some(kind)).is_some_and(|family| {
            family.spec.detected && family.spec.kind == kind && family.is_empty()
        }) {
            return;
        }
        let mut registry = self.registry.write();
        if let Some(without) = registry.without_detected(name, kind) {
            *registry = Arc::new(without);
            // Feeds try refused series again.
            self.generation.fetch_add(1, Ordering::Release);
        }
    }
}

/// Checks the names of a metric and its labels.
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
    match labels.iter().enumerate().find(|(at, label)| {
        *label == reserved || (labels.iter().skip(*at + 1).any(|other| other == *label))
    }) {
        None => Ok(()),
        Some((_, label)) => Err(SampleError::BadValue(format!(
            "the label `{label}` of metric `{name}` is given twice, or reserved for its type"
        ))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos_base::id::ModelVersion;

    use super::*;
    use crate::cache::Settings;
    use crate::catalog::Catalog;
    use crate::channel::Definition;
    use crate::exposition;

    fn cache() -> Cache {
        let text = "model_metrics:\n  counter:\n    - {name: Orders, unit: Count, dimensions: \
                    [shop]}\n    - {name: Off, unit: Count, enabled: false}\n";
        Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("host"))
    }

    fn described(name: &str, kind: Kind, buckets: &[f64]) -> Described {
        Described {
            name: name.to_owned(),
            kind,
            description: "how long".to_owned(),
            buckets: buckets.to_vec(),
            dimensions: vec!["shop".to_owned()],
        }
    }

    #[test]
    fn a_described_metric_needs_no_definition_in_the_file() {
        let cache = cache();
        let series = |kind| {
            cache.resolve(&Definition {
                name: "waited".to_owned(),
                kind: Some(kind),
                unit: String::new(),
                labels: vec![("shop".to_owned(), "a".to_owned())],
            })
        };
        assert!(matches!(series(Kind::Histogram), Err(SampleError::Undeclared(_))));
        cache.describe(&described("waited", Kind::Histogram, &[0.5, 2.0])).unwrap();
        series(Kind::Histogram).unwrap().add_or_update(1.0).unwrap();
        // A second description, by another instance or with other properties, changes nothing.
        cache.describe(&described("waited", Kind::Gauge, &[])).unwrap();
        assert!(matches!(series(Kind::Gauge), Err(SampleError::WrongKind { .. })));
        let (spec, _) = cache.find("waited").unwrap();
        assert_eq!((spec.help.as_str(), spec.buckets.as_slice()), ("how long", &[0.5, 2.0][..]));
        cache.reload(Catalog::parse("mode: prometheus", "m.yaml").unwrap());
        assert_eq!(cache.find("waited").unwrap().0.buckets, [0.5, 2.0]);
    }

    #[test]
    fn series_of_a_described_metric_may_have_different_labels() {
        let cache = Arc::new(cache());
        let describe = |labels: &[&str]| {
            let dimensions = labels.iter().map(|label| (*label).to_owned()).collect();
            cache.describe(&Described { dimensions, ..described("held", Kind::Counter, &[]) })
        };
        let series = |labels: &[(&str, &str)]| {
            let labels = labels
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect();
            cache.resolve(&Definition {
                name: "held".to_owned(),
                kind: Some(Kind::Counter),
                unit: String::new(),
                labels,
            })
        };
        let shown = || {
            let text = exposition::render(&cache, exposition::Format::Text);
            text.lines().filter(|line| line.contains("held")).map(str::to_owned).collect::<Vec<_>>()
        };
        describe(&["shop"]).unwrap();
        let first = series(&[("shop", "a")]).unwrap();
        first.add_or_update(1.0).unwrap();
        let generation = cache.generation();
        describe(&["shop", "till"]).unwrap();
        describe(&["Hostname"]).unwrap();
        assert_eq!(cache.generation(), generation + 2, "feeds look their series up again");
        describe(&["till"]).unwrap();
        describe(&[]).unwrap();
        assert_eq!(cache.generation(), generation + 2, "nothing new");
        series(&[("till", "2"), ("shop", "a")]).unwrap().add_or_update(2.0).unwrap();
        series(&[]).unwrap().add_or_update(3.0).unwrap();
        // A handle from before the labels were added and a new one share one cell.
        first.add_or_update(4.0).unwrap();
        series(&[("shop", "a")]).unwrap().add_or_update(5.0).unwrap();
        let expected = ["held 3", "held{shop=\"a\"} 10", "held{shop=\"a\",till=\"2\"} 2"];
        assert_eq!(shown()[2..], expected, "{:?}", shown());
        assert!(
            matches!(series(&[("other", "x")]), Err(SampleError::UnknownLabel { .. })),
            "never described"
        );
        // The series is removed with its model, even if the model holds the earlier handle.
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        model.add_owned(&first);
        cache.model_unloaded(&model);
        assert_eq!(shown()[2..], [expected[0], expected[2]]);
        let many: Vec<String> = (0..64).map(|at| format!("l{at}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(matches!(describe(&many), Err(SampleError::BadValue(_))));
    }

    #[test]
    fn refuses_invalid_descriptions() {
        let cache = cache();
        cache.describe(&described("waited", Kind::Histogram, &[1.0])).unwrap();
        for (metric, expected) in [
            (described("a b", Kind::Gauge, &[]), "BadName"),
            (described("a", Kind::Histogram, &[2.0, 2.0]), "BadValue"),
            (described("a", Kind::Histogram, &[f64::NAN]), "BadValue"),
            (described("a", Kind::Histogram, &[1.0, f64::INFINITY]), "BadValue"),
            (
                Described {
                    dimensions: vec!["le".to_owned()],
                    ..described("a", Kind::Histogram, &[1.0])
                },
                "BadValue",
            ),
            (
                Described {
                    dimensions: vec!["b".to_owned(); 2],
                    ..described("a", Kind::Gauge, &[])
                },
                "BadValue",
            ),
            (
                Described { dimensions: vec!["9".to_owned()], ..described("a", Kind::Gauge, &[]) },
                "BadName",
            ),
            (described("Off", Kind::Counter, &[]), "Disabled"),
            (described("waited_sum", Kind::Gauge, &[]), "Collision"),
        ] {
            let refused = format!("{:?}", cache.describe(&metric).unwrap_err());
            assert!(refused.starts_with(expected), "{metric:?}: {refused}");
        }
        assert_eq!(
            cache.describe(&described("Orders", Kind::Gauge, &[])),
            Ok(()),
            "its series are refused"
        );
    }
}
