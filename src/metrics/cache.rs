//! Where every series lives.
//!
//! Models' own series are structures of cells ([`ModelSeries`]); all others are families of series by label values
//! ([`Series`]). Locks guard only which series exist; a value is changed through the handle that the cache gave out,
//! without them.
//!
//! The definition of the metrics may change while the server runs ([`Cache::reload`]). Series of metrics that stay go on;
//! [`Cache::generation`] then changes, and handles should be asked for anew: an old one of a metric that is gone counts
//! where nobody looks.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::alias::{AliasCounts, ByAlias, Naming};
use super::builtin::Builtin;
use super::catalog::{Catalog, Difference, Kind, MetricSpec, Mode, Views};
use super::channel::Definition;
use super::family::{Family, Registry};
use super::journal::Journal;
use super::series::{ModelSeries, RequestSeries};
use super::summary::CoarseClock;
use crate::id::ModelVersion;

mod batch_times;
mod detected;
mod initial_series;

pub use super::cell::Cell;
pub use super::family::Series;
pub use super::sample_error::{MAX_LABEL_BYTES, SampleError};

/// How many series one metric may have unless [`Settings`] say otherwise: what a worker sends must not fill the
/// frontend's memory.
pub const MAX_SERIES_PER_METRIC: usize = 10_000;
/// How many for a summary, which needs more memory for each.
const MAX_SERIES_PER_SUMMARY: usize = 1_000;
/// The label value of the series that takes what is beyond a metric's bound.
pub const OTHER: &str = "other";

/// What the cache is told at start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The value of labels for the host.
    pub hostname: String,
    /// Whether a metric that is not defined is registered by its first sample.
    pub auto_detect: bool,
    /// How many series a metric may have that is not the server's own; what is beyond goes to one series whose label values
    /// are all [`OTHER`].
    pub max_series: usize,
    /// Whether StatsD datagrams are received.
    pub statsd: bool,
    /// Whether metric logs go to standard output too.
    pub tslog_stdout: bool,
}

impl Settings {
    /// The usual ones on the host of this name.
    pub fn new(hostname: &str) -> Self {
        let (auto_detect, statsd, tslog_stdout) = (false, false, false);
        Self { hostname: hostname.to_owned(), auto_detect, max_series: MAX_SERIES_PER_METRIC, statsd, tslog_stdout }
    }
}

/// All series of the server.
#[derive(Debug)]
pub struct Cache {
    settings: Settings,
    /// Replaced when the definition is read again, and when a metric is detected.
    registry: RwLock<Arc<Registry>>,
    generation: AtomicU64,
    /// Written by loads and unloads only.
    models: RwLock<BTreeMap<ModelVersion, Arc<ModelSeries>>>,
    /// Counts by the names that clients use.
    by_alias: ByAlias,
    requests: RequestSeries,
    clock: Arc<CoarseClock>,
    journal: Arc<Journal>,
    /// Models that were unloaded since the writer of the metric logs came: their counters are read once more.
    departed: Mutex<Vec<Arc<ModelSeries>>>,
}

impl Cache {
    /// An empty cache for the metrics of `catalog`.
    pub fn new(catalog: Catalog, settings: Settings) -> Self {
        let journal = Arc::new(Journal::new(&settings.hostname));
        journal.want(catalog.mode() != Mode::Prometheus);
        let cache = Self {
            settings,
            registry: RwLock::new(Arc::new(Registry::new(catalog, Arc::clone(&journal)))),
            journal,
            generation: AtomicU64::new(0),
            models: RwLock::default(),
            requests: RequestSeries::new(),
            by_alias: ByAlias::default(),
            clock: Arc::default(),
            departed: Mutex::default(),
        };
        // Their labels are known, so they are shown from the start.
        let _ = cache.host_times();
        cache.create_initial_series();
        cache
    }

    /// The definition of now, and its families.
    pub fn registry(&self) -> Arc<Registry> {
        Arc::clone(&self.registry.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes another definition and says what it changes. Series of metrics that mean the same in both go on with their
    /// values; so do metrics that were detected and that the new definition leaves room for.
    pub fn reload(&self, catalog: Catalog) -> Difference {
        let wanted = catalog.mode() != Mode::Prometheus;
        let difference = self.replace(catalog);
        self.create_initial_series();
        self.models().iter().for_each(|series| series.set_times(self.times(series)));
        self.by_alias.redefine(|name, version| self.alias_lines(name, version));
        self.journal.want(wanted);
        difference
    }

    fn replace(&self, catalog: Catalog) -> Difference {
        let mut registry = self.registry.write().unwrap_or_else(PoisonError::into_inner);
        let detected = registry.catalog().iter().map(|(_, spec)| spec).filter(|spec| spec.detected);
        let catalog = detected.fold(catalog, |catalog, spec| match catalog.check_collisions(&spec.name, spec.kind) {
            Ok(()) => catalog.with_metric(spec.clone()),
            Err(_) => catalog,
        });
        let difference = Difference::between(registry.catalog(), &catalog);
        *registry = Arc::new(registry.renewed(catalog));
        for model in self.models() {
            model.define(&registry, &self.clock);
        }
        self.generation.fetch_add(1, Ordering::Release);
        difference
    }

    /// What waits for the metric logs.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Changes with every [`Cache::reload`].
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The value of labels for the host.
    pub fn hostname(&self) -> &str {
        &self.settings.hostname
    }

    /// Whether a metric that is not defined is registered by its first sample.
    pub fn auto_detect(&self) -> bool {
        self.settings.auto_detect
    }

    /// The time of day of summaries, which somebody must tell.
    pub fn clock(&self) -> &CoarseClock {
        &self.clock
    }

    /// Creates every series of a model version at 0, in place of those of an earlier load. `tags` are its `metric_tags`.
    pub fn model_loaded(&self, model: &ModelVersion, tags: &[(String, String)]) -> Arc<ModelSeries> {
        self.model_loaded_with(model, tags, Vec::new())
    }

    /// The same for a model that has buckets of its own for some histograms, by the metric's name.
    pub fn model_loaded_with(
        &self,
        model: &ModelVersion,
        tags: &[(String, String)],
        buckets: Vec<(String, Vec<f64>)>,
    ) -> Arc<ModelSeries> {
        let series = self.model_series(model, tags, buckets);
        self.model_serves(&series);
        series
    }

    /// The series of a model version that does not serve yet: in no view before [`Cache::model_serves`], so that those of an
    /// earlier load stay until then.
    pub fn model_series(
        &self,
        model: &ModelVersion,
        tags: &[(String, String)],
        buckets: Vec<(String, Vec<f64>)>,
    ) -> Arc<ModelSeries> {
        let series = Arc::new(ModelSeries::new(model, tags, buckets, Arc::clone(&self.journal)));
        series.define(&self.registry(), &self.clock);
        series.set_times(self.times(&series));
        series
    }

    /// Shows the series of a model version, in place of those of an earlier load.
    pub fn model_serves(&self, series: &Arc<ModelSeries>) {
        let (model, shown) = (series.model().clone(), Arc::clone(series));
        let replaced = self.models.write().unwrap_or_else(PoisonError::into_inner).insert(model, shown);
        if let Some(replaced) = replaced.filter(|replaced| !Arc::ptr_eq(replaced, series)) {
            series.follow(&replaced);
            self.depart(&replaced);
        }
        // The definition may have been read again since they were made.
        series.define(&self.registry(), &self.clock);
        series.set_times(self.times(series));
    }

    /// The model uses the response cache: it has series of it from now on.
    pub fn model_cached(&self, series: &ModelSeries) {
        series.set_cached();
        series.define(&self.registry(), &self.clock);
    }

    /// The model may answer each request any number of times: it has series of its responses from now on.
    pub fn model_decoupled(&self, series: &ModelSeries) {
        series.responses.switch_on();
        series.define(&self.registry(), &self.clock);
    }

    /// Removes a model version's series from all views, those that only its workers wrote included. If the version was
    /// loaded again meanwhile, the new series stay.
    pub fn model_unloaded(&self, series: &Arc<ModelSeries>) {
        {
            let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
            if models.get(series.model()).is_some_and(|current| Arc::ptr_eq(current, series)) {
                models.remove(series.model());
                self.depart(series);
            }
        }
        let registry = self.registry();
        for owned in series.disown() {
            if let Some(family) = registry.family(&owned.spec().name) {
                family.remove_one(owned.labels(), &owned.cell);
            }
        }
    }

    /// A model's series are not shown any more; what its counters have grown by is written all the same.
    fn depart(&self, series: &Arc<ModelSeries>) {
        if self.journal.wanted() {
            self.departed.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(series));
            self.journal.touch();
        }
    }

    pub(super) fn take_departed(&self) -> Vec<Arc<ModelSeries>> {
        std::mem::take(&mut *self.departed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Counts requests by the names and versions that clients use from now on. To be called before models are loaded.
    pub fn count_by_alias(&self, naming: Naming) {
        self.by_alias.switch_on(naming);
    }

    pub(super) fn naming(&self) -> Option<&Naming> {
        self.by_alias.naming()
    }

    /// The counts of requests by this name and version (empty: none), made if they are new; `None` unless requests are
    /// counted this way. The caller has found the model: what clients make up must not become a series.
    pub fn alias(&self, name: &str, version: &str) -> Option<Arc<AliasCounts>> {
        self.by_alias.of(name, version, |name, version| self.alias_lines(name, version))
    }

    /// Those that there are; `None` unless requests are counted this way.
    pub(super) fn aliases(&self) -> Option<Vec<Arc<AliasCounts>>> {
        self.naming().map(|_| self.by_alias.all())
    }

    /// The series of a loaded model version.
    pub fn model(&self, model: &ModelVersion) -> Option<Arc<ModelSeries>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).get(model).cloned()
    }

    /// The series of all loaded model versions, by name and version.
    pub fn models(&self) -> Vec<Arc<ModelSeries>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// A counter by name and label values, in the order of the metric's dimensions (of a built-in one: in the order of
    /// [`Builtin::dimensions`]). Made at 0 if it is new.
    ///
    /// # Errors
    /// When there is no such metric, it is of another type, or the labels are not allowed.
    pub fn counter(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Counter, name, labels)
    }

    /// A gauge, as [`Cache::counter`].
    ///
    /// # Errors
    /// As [`Cache::counter`].
    pub fn gauge(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Gauge, name, labels)
    }

    /// A histogram, as [`Cache::counter`].
    ///
    /// # Errors
    /// As [`Cache::counter`].
    pub fn histogram(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Histogram, name, labels)
    }

    /// A summary, as [`Cache::counter`].
    ///
    /// # Errors
    /// As [`Cache::counter`].
    pub fn summary(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Summary, name, labels)
    }

    fn handle(&self, kind: Kind, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        let registry = self.registry();
        let Some(family) = registry.family(name) else {
            if registry.catalog().is_disabled(name) {
                return Err(SampleError::Disabled(name.to_owned()));
            }
            let labels = labels.iter().map(|value| ("_".to_owned(), (*value).to_owned())).collect();
            let definition = Definition { name: name.to_owned(), kind: Some(kind), unit: String::new(), labels };
            return Err(SampleError::Undeclared(Box::new(definition)));
        };
        let spec = &family.spec;
        if spec.builtin.is_some_and(|builtin| !builtin.is_family()) {
            return Err(SampleError::Reserved(name.to_owned()));
        }
        if spec.kind != kind {
            return Err(SampleError::WrongKind { metric: name.to_owned(), expected: spec.kind, given: kind });
        }
        let values = batch_times::in_order(spec, labels);
        if values.len() != labels.len() || values.len() != spec.dimensions.len() {
            let given = labels.iter().map(|_| "_".to_owned()).collect();
            return Err(SampleError::WrongLabels { metric: name.to_owned(), expected: spec.dimensions.clone(), given });
        }
        self.bounded(family, &values)
    }

    /// The series that a worker or another program means, made at 0 if it is new. A label for the host that it leaves
    /// out is filled in. An unknown metric is registered if metrics are detected.
    ///
    /// # Errors
    /// When the metric, its type, or its labels are not allowed.
    pub fn resolve(&self, definition: &Definition) -> Result<Arc<Series>, SampleError> {
        let registry = self.registry();
        let Some(family) = registry.family(&definition.name) else {
            let registry = self.detect(definition)?;
            let family = registry.family(&definition.name);
            let family = family.ok_or_else(|| SampleError::Undeclared(Box::new(definition.clone())))?;
            return self.bounded(family, &self.values(&family.spec, definition)?);
        };
        let spec = &family.spec;
        if spec.builtin.is_some() {
            return Err(SampleError::Reserved(definition.name.clone()));
        }
        if let Some(given) = definition.kind.filter(|kind| *kind != spec.kind) {
            return Err(SampleError::WrongKind { metric: spec.name.clone(), expected: spec.kind, given });
        }
        self.bounded(family, &self.values(spec, definition)?)
    }

    /// The label values in the order of the metric's dimensions.
    fn values(&self, spec: &MetricSpec, definition: &Definition) -> Result<Vec<String>, SampleError> {
        let mut used = 0;
        let mut values = Vec::with_capacity(spec.dimensions.len());
        for dimension in &spec.dimensions {
            if let Some((_, value)) = definition.labels.iter().find(|(name, _)| name == dimension) {
                values.push(value.clone());
                used += 1;
            } else if spec.open {
                values.push(String::new());
            } else if is_host_label(dimension) {
                values.push(self.settings.hostname.clone());
            }
        }
        if values.len() != spec.dimensions.len() || used != definition.labels.len() {
            let (metric, expected) = (spec.name.clone(), spec.dimensions.clone());
            let given = definition.labels.iter().map(|(name, _)| name.clone()).collect();
            return Err(SampleError::WrongLabels { metric, expected, given });
        }
        Ok(values)
    }

    /// The series of these label values, or the one for all that is beyond the bound. What the server itself records has
    /// no bound: its label values are closed lists, models, instances, devices and metrics, none of which a request names.
    fn bounded(&self, family: &Family, labels: &[String]) -> Result<Arc<Series>, SampleError> {
        let missing = || SampleError::BadValue(format!("metric `{}` has no series left", family.spec.name));
        // Also what ends the way below, which counts in such a family.
        if family.spec.builtin.is_some() {
            return family.series(labels, usize::MAX, &self.clock).ok_or_else(missing);
        }
        if let Some(long) = labels.iter().find(|label| label.len() > MAX_LABEL_BYTES) {
            return Err(SampleError::LabelTooLong { metric: family.spec.name.clone(), length: long.len() });
        }
        let most = match family.spec.kind {
            Kind::Summary => self.settings.max_series.min(MAX_SERIES_PER_SUMMARY),
            _ => self.settings.max_series,
        };
        if let Some(series) = family.series(labels, most, &self.clock) {
            return Ok(series);
        }
        if let Ok(overflowed) = self.counter(Builtin::SeriesOverflowed.name(), &[&family.spec.name]) {
            let _ = overflowed.add_or_update(1.0);
        }
        let other = vec![OTHER.to_owned(); labels.len()];
        // Without a bound of its own it cannot be refused.
        family.series(&other, usize::MAX, &self.clock).ok_or_else(missing)
    }

    /// Registers the metric of a first sample: with its type, unit and labels.
    fn detect(&self, definition: &Definition) -> Result<Arc<Registry>, SampleError> {
        let Definition { name, kind, unit, labels } = definition;
        if self.registry().catalog().is_disabled(name) {
            return Err(SampleError::Disabled(name.clone()));
        }
        if !self.settings.auto_detect {
            return Err(SampleError::Undeclared(Box::new(definition.clone())));
        }
        let dimensions: Vec<String> = labels.iter().map(|(label, _)| label.clone()).collect();
        self.register(MetricSpec::detected(name, kind.unwrap_or(Kind::Gauge), unit, dimensions))
    }

    /// Sets all series of a built-in gauge at once, by label values in the order of [`Builtin::dimensions`]: others than
    /// these are removed. A gauge that is not defined stays so.
    pub fn set_gauges(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)]) {
        let mut now = HashSet::with_capacity(rows.len());
        for (labels, value) in rows {
            let Ok(series) = self.gauge(builtin.name(), labels) else { return };
            // A gauge takes every value.
            let _ = series.add_or_update(*value);
            now.insert(Arc::as_ptr(&series.cell));
        }
        self.remove_series(builtin.name(), |series| !now.contains(&Arc::as_ptr(&series.cell)));
    }

    /// Removes series of a metric from all views.
    pub fn remove_series(&self, name: &str, gone: impl FnMut(&Series) -> bool) {
        if let Some(family) = self.registry().family(name) {
            family.remove(gone);
        }
    }

    /// The definition of a metric and the ways out that it takes.
    pub fn find(&self, name: &str) -> Option<(Arc<MetricSpec>, Views)> {
        let registry = self.registry();
        let family = registry.family(name)?;
        Some((Arc::clone(&family.spec), family.views))
    }

    pub(super) fn requests(&self) -> &RequestSeries {
        &self.requests
    }
}

/// Whether a label of this name is filled in with the host's.
fn is_host_label(name: &str) -> bool {
    name.eq_ignore_ascii_case("hostname")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::metrics::reading::{Histogram, Reading};
    use crate::metrics::sample_error::MAX_DETECTED;

    const CUSTOM: &str = "
ts_metrics:
  gauge:
    - {name: QueueTime, unit: ms, dimensions: [Hostname, Level]}
  counter:
    - {name: pharos_metric_series_overflowed_total, unit: c, dimensions: [metric]}
    - {name: nv_inference_count, unit: c, dimensions: [model, version]}
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop]}
  gauge:
    - {name: Level, unit: m, dimensions: [Hostname]}
  histogram:
    - {name: Size, unit: B, buckets: [1, 10]}
";

    fn cache_with(change: impl FnOnce(&mut Settings)) -> Cache {
        let mut settings = Settings::new("host");
        change(&mut settings);
        Cache::new(Catalog::parse(CUSTOM, "m.yaml").unwrap(), settings)
    }

    fn cache() -> Cache {
        cache_with(|_| ())
    }

    fn definition(name: &str, kind: Kind, labels: &[(&str, &str)]) -> Definition {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Definition { name: name.to_owned(), kind: Some(kind), unit: "ms".to_owned(), labels }
    }

    #[test]
    fn samples_add_set_and_observe() {
        let cache = cache();
        let orders = cache.counter("Orders", &["a"]).unwrap();
        orders.add_or_update(1.5).unwrap();
        cache.counter("Orders", &["a"]).unwrap().add_or_update(2.0).unwrap();
        assert_eq!(orders.value(), 3.5);
        let level = cache.gauge("Level", &["h"]).unwrap();
        [7.0, -2.0].into_iter().for_each(|value| level.add_or_update(value).unwrap());
        assert_eq!(level.value(), -2.0);
        let size = cache.histogram("Size", &[]).unwrap();
        [0.5, 1.0, 1.1, 11.0].into_iter().for_each(|value| size.add_or_update(value).unwrap());
        let buckets = vec![(1.0, 2), (10.0, 1), (f64::INFINITY, 1)];
        let expected = Histogram { sum: 13.6, buckets, ..Histogram::default() };
        assert_eq!(size.cell.read(), Reading::Histogram(expected));
    }

    #[test]
    fn a_handle_takes_a_builtins_labels_in_the_codes_order() {
        let cache = cache();
        let queue_time = cache.gauge("QueueTime", &["Host", "h"]).unwrap();
        assert_eq!(queue_time.labels(), ["h", "Host"]);
        assert!(matches!(cache.counter("nv_inference_count", &["m", "1"]), Err(SampleError::Reserved(_))));
        assert!(matches!(cache.gauge("None", &[]), Err(SampleError::Undeclared(_))));
        assert!(matches!(cache.gauge("Orders", &["a"]), Err(SampleError::WrongKind { .. })));
        for wrong in [&["Host"][..], &["Host", "h", "x"]] {
            assert!(matches!(cache.gauge("QueueTime", wrong), Err(SampleError::WrongLabels { .. })));
        }
    }

    #[test]
    fn a_definition_is_matched_by_names() {
        let cache = cache();
        let level = cache.resolve(&definition("Level", Kind::Gauge, &[])).unwrap();
        assert_eq!(level.labels(), ["host"]);
        let kind = cache.resolve(&definition("Level", Kind::Counter, &[])).unwrap_err();
        assert_eq!(kind.to_string(), "metric `Level` is a gauge, not a counter");
        let labels = cache.resolve(&definition("Orders", Kind::Counter, &[("shop", "a"), ("x", "b")])).unwrap_err();
        assert_eq!(labels.to_string(), "metric `Orders` has the dimensions [shop], [shop, x] were given");
        let long = definition("Orders", Kind::Counter, &[("shop", &"x".repeat(MAX_LABEL_BYTES + 1))]);
        assert!(matches!(cache.resolve(&long), Err(SampleError::LabelTooLong { length: 257, .. })));
        let builtin = cache.resolve(&definition("QueueTime", Kind::Gauge, &[("Level", "a")])).unwrap_err();
        assert_eq!(builtin.to_string(), "metric `QueueTime` is recorded by the server itself");
        let unknown = cache.resolve(&definition("New", Kind::Histogram, &[("a", "1"), ("b", "2")])).unwrap_err();
        let expected = "under model_metrics.histogram: `- {name: New, unit: ms, dimensions: [a, b]}`";
        assert!(unknown.to_string().contains(expected), "{unknown}");
    }

    #[test]
    fn bad_values_are_refused() {
        let cache = cache();
        let orders = cache.counter("Orders", &["a"]).unwrap();
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(matches!(orders.add_or_update(bad), Err(SampleError::BadValue(_))));
        }
        let size = cache.histogram("Size", &[]).unwrap();
        assert!(matches!(size.add_or_update(f64::NAN), Err(SampleError::BadValue(_))));
        assert_eq!(orders.value(), 0.0);
    }

    #[test]
    fn a_first_sample_registers_its_metric_if_wanted() {
        let cache = cache_with(|settings| settings.auto_detect = true);
        let first = cache.resolve(&definition("New", Kind::Counter, &[("a", "1")])).unwrap();
        first.add_or_update(2.0).unwrap();
        let again = cache.resolve(&definition("New", Kind::Counter, &[("a", "1")])).unwrap();
        assert_eq!(again.value(), 2.0);
        assert!(matches!(
            cache.resolve(&definition("New", Kind::Counter, &[("b", "1")])),
            Err(SampleError::WrongLabels { .. })
        ));
        for (name, label) in [("two words", "a"), ("CPUUtilization", "a"), ("fine", "dash-label")] {
            let refused = cache.resolve(&definition(name, Kind::Gauge, &[(label, "1")]));
            assert!(matches!(refused, Err(SampleError::BadName(_))), "{name}");
        }
        for at in 0..MAX_DETECTED {
            let _ = cache.resolve(&definition(&format!("n{at}"), Kind::Gauge, &[]));
        }
        assert!(matches!(cache.resolve(&definition("more", Kind::Gauge, &[])), Err(SampleError::TooManyMetrics(_))));
    }

    #[test]
    fn a_first_sample_does_not_register_what_the_definition_has_no_room_for() {
        let catalog =
            Catalog::parse(&format!("{CUSTOM}    - {{name: Off, unit: B, enabled: false}}\n"), "m.yaml").unwrap();
        let cache = Cache::new(catalog, Settings { auto_detect: true, ..Settings::new("host") });
        let refused = |name| cache.resolve(&definition(name, Kind::Gauge, &[])).unwrap_err();
        assert_eq!(refused("Off"), SampleError::Disabled("Off".to_owned()));
        assert!(matches!(cache.histogram("Off", &[]), Err(SampleError::Disabled(_))));
        for name in ["Size_sum", "pharos_mine", "__mine", "cpuutilization"] {
            assert!(matches!(refused(name), SampleError::Collision(_)), "{name}");
        }
    }

    #[test]
    fn detected_metrics_survive_a_reload_unless_it_defines_them() {
        let cache = cache_with(|settings| settings.auto_detect = true);
        for (name, kind) in [("Kept", Kind::Counter), ("Size2_sum", Kind::Gauge), ("Named", Kind::Counter)] {
            cache.resolve(&definition(name, kind, &[("a", "1")])).unwrap().add_or_update(2.0).unwrap();
        }
        let file = "model_metrics:\n  counter:\n    - {name: Named, unit: c, dimensions: [a]}\n  histogram:\n    - {name: Size2, unit: B}\n";
        let difference = cache.reload(Catalog::parse(file, "m.yaml").unwrap());
        assert_eq!(
            (difference.added.join(","), difference.changed.join(",")),
            ("Size2".to_owned(), "Named".to_owned())
        );
        assert!(
            difference.removed.contains(&"Size2_sum".to_owned()) && difference.removed.contains(&"Orders".to_owned())
        );
        let value = |name| cache.resolve(&definition(name, Kind::Counter, &[("a", "1")])).map(|series| series.value());
        assert_eq!((value("Kept"), value("Named")), (Ok(2.0), Ok(2.0)));
        assert!(matches!(value("Size2_sum"), Err(SampleError::Collision(_))));
        assert!(!cache.registry().catalog().find("Named").unwrap().1.detected);
    }

    #[test]
    fn what_is_beyond_the_bound_goes_to_one_series() {
        let cache = cache_with(|settings| settings.max_series = 3);
        for at in 0..6 {
            cache.counter("Orders", &[&at.to_string()]).unwrap().add_or_update(1.0).unwrap();
        }
        assert_eq!(cache.counter("Orders", &["0"]).unwrap().value(), 1.0);
        assert_eq!(cache.counter("Orders", &[OTHER]).unwrap().value(), 3.0);
        assert_eq!(cache.counter("pharos_metric_series_overflowed_total", &["Orders"]).unwrap().value(), 3.0);
    }

    #[test]
    fn the_servers_own_series_have_no_bound() {
        let cache = cache_with(|settings| (settings.max_series, settings.auto_detect) = (1, true));
        let names = ["Orders", "First", "Second", "Third"];
        for (name, at) in names.iter().flat_map(|name| (0..4).map(move |at| (*name, at))) {
            let label = if name == "Orders" { "shop" } else { "a" };
            let series = cache.resolve(&definition(name, Kind::Counter, &[(label, &at.to_string())])).unwrap();
            series.add_or_update(1.0).unwrap();
        }
        for name in names {
            assert_eq!(cache.counter(name, &[OTHER]).unwrap().value(), 3.0, "{name}");
            let overflowed = cache.counter(Builtin::SeriesOverflowed.name(), &[name]).unwrap();
            assert_eq!(overflowed.value(), 3.0, "{name}");
        }
        let worker = |at: u32| cache.gauge("QueueTime", &["Host", &at.to_string()]).unwrap().labels().join(",");
        assert_eq!((worker(0), worker(1)), ("0,Host".to_owned(), "1,Host".to_owned()));
    }

    #[test]
    fn series_with_known_labels_are_there_from_the_start() {
        let (log, counters) =
            ("pharos_tslog_lines_skipped_total", "pharos_metric_samples_total pharos_metrics_reloads_total");
        let builtin = |name: &str, label: &str| format!("    - {{name: {name}, unit: c, dimensions: [{label}]}}\n");
        let mut text = format!("mode: both\nts_metrics:\n  counter:\n{}", builtin(log, "file"));
        for (name, label) in counters.split(' ').zip(["source", "result"]) {
            text += &builtin(name, label);
        }
        text += "model_metrics:\n  counter:\n    - {name: Plain, unit: c}\n    - {name: OfHost, unit: c, dimensions: [HostName]}\n    \
                 - {name: OfShop, unit: c, dimensions: [shop]}\n  gauge:\n    - {name: Depth, unit: m}\n  histogram:\n    \
                 - {name: Size, unit: B}\n";
        let shown = |cache: &Cache| {
            let all = cache.registry().families().iter().flat_map(|family| family.all()).collect::<Vec<_>>();
            all.iter().map(|series| format!("{} {}", series.spec().name, series.labels().join(","))).collect::<Vec<_>>()
        };
        let settings = Settings { statsd: true, tslog_stdout: true, ..Settings::new("host") };
        let cache = Cache::new(Catalog::parse(&text, "m.yaml").unwrap(), settings);
        let logs = ["model_metrics", "stdout", "ts_metrics"].map(|file| format!("{log} {file}"));
        let sources = ["ring", "statsd", "stdout"].map(|source| format!("pharos_metric_samples_total {source}"));
        let reloads = ["failure", "success"].map(|result| format!("pharos_metrics_reloads_total {result}"));
        let models = ["Plain ", "OfHost host", "Size "].map(str::to_owned);
        assert_eq!(shown(&cache), [&logs[..], &sources, &reloads, &models].concat());
        // They stay when a model goes that wrote them, and come with a definition that has them.
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let plain = cache.counter("Plain", &[]).unwrap();
        model.own(&plain);
        plain.add_or_update(2.0).unwrap();
        cache.model_unloaded(&model);
        assert_eq!(cache.counter("Plain", &[]).unwrap().value(), 2.0);
        cache.reload(Catalog::parse(&text.replace("Plain", "Other"), "m.yaml").unwrap());
        assert!(shown(&cache).contains(&"Other ".to_owned()) && !shown(&cache).contains(&"Plain ".to_owned()));

        // What is not in use is not there.
        let quiet =
            Cache::new(Catalog::parse(&text.replace("both", "prometheus"), "m.yaml").unwrap(), Settings::new("host"));
        let sources = [&sources[0], &sources[2]].map(Clone::clone);
        assert_eq!(shown(&quiet), [&sources[..], &reloads, &models].concat());
        quiet.reload(Catalog::parse(&text, "m.yaml").unwrap());
        assert_eq!(shown(&quiet)[..2], [&logs[0], &logs[2]].map(Clone::clone));
    }

    #[test]
    fn a_reload_keeps_what_means_the_same() {
        let cache = cache();
        let orders = cache.counter("Orders", &["a"]).unwrap();
        orders.add_or_update(1.0).unwrap();
        cache.histogram("Size", &[]).unwrap().add_or_update(1.0).unwrap();
        let changed = CUSTOM
            .replace("unit: Count", "unit: Pieces")
            .replace("[1, 10]", "[1, 2]")
            .replace("Level, unit: m", "Depth, unit: m");
        cache.reload(Catalog::parse(&changed, "m.yaml").unwrap());
        assert_eq!(cache.generation(), 1);
        orders.add_or_update(1.0).unwrap();
        let new = cache.counter("Orders", &["a"]).unwrap();
        assert_eq!((new.value(), new.spec().unit.as_str()), (2.0, "Pieces"));
        assert_eq!(cache.histogram("Size", &[]).unwrap().value(), 0.0, "other buckets, another metric");
        assert!(cache.gauge("Level", &["h"]).is_err() && cache.gauge("Depth", &["h"]).is_ok());
    }

    #[test]
    fn gauges_count_what_is_left_of_earlier_loads() {
        let cache = cache();
        let model = ModelVersion::new("m", 1);
        let loads = [1, 2, 4].map(|pending| {
            let series = cache.model_loaded(&model, &[]);
            series.pending.add(pending);
            series
        });
        let [first, second, third] = loads;
        let pending = |series: &ModelSeries| series.level(|series| &series.pending);
        assert_eq!((pending(&first), pending(&second), pending(&third)), (1, 3, 7));
        second.pending.add(-2);
        cache.model_unloaded(&first);
        drop(first);
        assert_eq!(pending(&third), 4, "what has ended counts no more");
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
