//! The store of all series.
//!
//! The series of a model are a structure of cells ([`ModelSeries`]); all others are families of
//! series by label values ([`Series`]). Locks only guard which series exist. Values are changed
//! through handles, without locks.
//!
//! The definition of the metrics may change while the server runs ([`Cache::reload`]). Series of
//! metrics that both definitions contain keep their values. A reload changes [`Cache::generation`]:
//! callers should then look up their handles again, because a handle of a removed metric counts
//! where no view reads.

mod detected;
mod initial_series;

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use pharos_base::id::{ModelVersion, TenantId};
use pharos_base::timeline::Instant;

use super::alias::{AliasCounts, ByAlias, Lines, Naming};
use super::builtin::Builtin;
use super::catalog::{
    Catalog, Difference, Kind, MAX_UNIT, MetricSpec, Mode, RECORDED_BY_WORKER, TenantSource, Views,
    WorkerLabel,
};
use super::channel::Definition;
use super::family::{Family, Found, Registry};
use super::journal::{Journal, Line};
use super::label_schema::LabelSchema;
use super::series::{ModelSeries, RequestSeries, Times};
use super::source::LabelSet;
use super::summary::CoarseClock;
use super::tenants::Tenants;
use super::tokens::Counted;
use super::transaction::Transactions;

pub use super::cell::Cell;
pub use super::family::Series;
pub use super::sample_error::{MAX_LABEL_BYTES, SampleError};
pub use super::token_budget::TokenBudget;

/// The default limit of series for one metric (see [`Settings`]). Limits the frontend's memory,
/// since workers choose the label values.
pub const MAX_SERIES_PER_METRIC: usize = 10_000;
/// The limit for a summary and for a histogram with native buckets, whose series need more memory.
const MAX_LARGE_SERIES_PER_METRIC: usize = 1_000;
/// The label value of the series that collects the samples beyond a metric's limit of series.
pub const OTHER: &str = "other";

/// The cache's settings, fixed at the start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The value of host labels.
    pub hostname: String,
    /// Whether the first sample of an undefined metric defines it.
    pub auto_detect: bool,
    /// The limit of series for each metric that is not built in. Samples beyond it go to one
    /// series whose label values are all [`OTHER`].
    pub max_series: usize,
    /// Whether StatsD datagrams are received.
    pub statsd: bool,
    /// Whether metric logs are also written to standard output.
    pub tslog_stdout: bool,
    /// Whether scrapes omit series without events: counters at 0, and distributions without
    /// observations.
    pub omit_idle: bool,
}

impl Settings {
    /// Returns the default settings for a host.
    pub fn new(hostname: &str) -> Self {
        Self {
            hostname: hostname.to_owned(),
            auto_detect: false,
            max_series: MAX_SERIES_PER_METRIC,
            statsd: false,
            tslog_stdout: false,
            omit_idle: false,
        }
    }
}

/// All series of the server.
#[derive(Debug)]
pub struct Cache {
    settings: Settings,
    /// Replaced when the definition is reloaded, and when a metric is detected.
    registry: RwLock<Arc<Registry>>,
    generation: AtomicU64,
    /// Changed by loads and unloads only.
    models: RwLock<BTreeMap<ModelVersion, Arc<ModelSeries>>>,
    /// Counts by alias.
    by_alias: ByAlias,
    requests: Arc<RequestSeries>,
    transactions: Arc<Transactions>,
    clock: Arc<CoarseClock>,
    journal: Arc<Journal>,
    /// `None` if tenants are not distinguished. Fixed at the start, since requests refer to it
    /// without a lock.
    tenants: Option<Tenants>,
    /// Models that were unloaded since the last visit of the writer of the metric logs. It reads
    /// their counters once more.
    unloaded: Mutex<Vec<Arc<ModelSeries>>>,
}

impl Cache {
    /// Creates an empty cache for the metrics of `catalog`.
    pub fn new(catalog: Catalog, settings: Settings) -> Self {
        let journal = Arc::new(Journal::new(&settings.hostname));
        journal.set_enabled(catalog.mode() != Mode::Prometheus);
        let tenants = catalog.tenants().cloned().map(Tenants::new);
        let transactions = Arc::<Transactions>::default();
        let registry = Registry::new(catalog, Arc::clone(&journal), Arc::clone(&transactions));
        let cache = Self {
            settings,
            tenants,
            registry: RwLock::new(Arc::new(registry)),
            generation: AtomicU64::new(0),
            models: RwLock::default(),
            requests: Arc::new(RequestSeries::new(Arc::clone(&journal))),
            by_alias: ByAlias::default(),
            transactions,
            journal,
            clock: Arc::default(),
            unloaded: Mutex::default(),
        };
        // Their labels are known, so views show them from the start.
        let _ = cache.host_times();
        cache.create_initial_series();
        cache
    }

    /// Returns the current definition with its families.
    pub fn registry(&self) -> Arc<Registry> {
        Arc::clone(&self.registry.read())
    }

    /// Replaces the definition and returns what changes. Keeps the values of metrics that are
    /// compatible in both definitions, and detected metrics that do not collide with the new
    /// definition.
    pub fn reload(&self, catalog: Catalog) -> Difference {
        let wanted = catalog.mode() != Mode::Prometheus;
        if let (Some(tenants), Some(rule)) = (self.tenants(), catalog.tenants()) {
            tenants.set_budgets(&rule.budgets);
        }
        let difference = self.replace(catalog);
        self.create_initial_series();
        self.models().iter().for_each(|series| series.set_times(self.times(series)));
        self.by_alias.redefine(|name, version| self.alias_lines(name, version));
        self.journal.set_enabled(wanted);
        difference
    }

    fn replace(&self, catalog: Catalog) -> Difference {
        let mut registry = self.registry.write();
        let detected = registry.catalog().iter().map(|(_, spec)| spec).filter(|spec| spec.detected);
        let catalog = detected.fold(catalog, |catalog, spec| {
            match catalog.check_collisions(&spec.name, spec.kind) {
                Ok(()) => catalog.with_metric(spec.clone()),
                Err(_) => catalog,
            }
        });
        let difference = Difference::between(registry.catalog(), &catalog);
        *registry = Arc::new(registry.renewed(catalog));
        for model in self.models() {
            model.define(&registry, &self.clock);
        }
        self.generation.fetch_add(1, Ordering::Release);
        difference
    }

    pub(super) fn tenants(&self) -> Option<&Tenants> {
        self.tenants.as_ref()
    }

    /// Returns the queue of the metric logs.
    pub fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    /// Returns a number that changes with every [`Cache::reload`].
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the value of host labels.
    pub fn hostname(&self) -> &str {
        &self.settings.hostname
    }

    /// Returns whether the first sample of an undefined metric defines it.
    pub fn auto_detect(&self) -> bool {
        self.settings.auto_detect
    }

    /// Returns whether scrapes omit series without events.
    pub fn omits_idle(&self) -> bool {
        self.settings.omit_idle
    }

    /// Returns the clock of the summaries, which callers must set.
    pub fn clock(&self) -> &CoarseClock {
        &self.clock
    }

    /// Creates all series of a model version at 0. They replace the series of an earlier load.
    /// `tags` are its `metric_tags`.
    pub fn model_loaded(
        &self,
        model: &ModelVersion,
        tags: &[(String, String)],
    ) -> Arc<ModelSeries> {
        self.model_loaded_with(model, tags, Vec::new())
    }

    /// Like [`Cache::model_loaded`], for a model with its own `buckets` for some histograms, by
    /// metric name.
    pub fn model_loaded_with(
        &self,
        model: &ModelVersion,
        tags: &[(String, String)],
        buckets: Vec<(String, Vec<f64>)>,
    ) -> Arc<ModelSeries> {
        let series = self.model_series(model, tags, buckets);
        self.show_model(&series);
        series
    }

    /// Creates the series of a model version that does not serve yet. No view shows them before
    /// [`Cache::show_model`]; until then the series of an earlier load remain.
    pub fn model_series(
        &self,
        model: &ModelVersion,
        tags: &[(String, String)],
        buckets: Vec<(String, Vec<f64>)>,
    ) -> Arc<ModelSeries> {
        let journal = Arc::clone(&self.journal);
        let series = ModelSeries::new(
            model,
            tags,
            buckets,
            journal,
            self.tenants(),
            Arc::clone(&self.transactions),
        );
        series.define(&self.registry(), &self.clock);
        series.set_times(self.times(&series));
        series
    }

    /// Shows the series of a model version in all views. They replace the series of an earlier
    /// load, whose later events count in them.
    pub fn show_model(&self, series: &Arc<ModelSeries>) {
        let replaced = {
            let mut models = self.models.write();
            let replaced = models.insert(series.model().clone(), Arc::clone(series));
            // Locked, so that no view shows the new series while events still count in the old
            // ones.
            let replaced = replaced.filter(|replaced| !Arc::ptr_eq(replaced, series));
            replaced.inspect(|replaced| series.replace(replaced))
        };
        if let Some(replaced) = replaced {
            self.continue_owned(series, &replaced);
            self.depart(&replaced);
        }
        // The definition may have changed since the series were created. Locked, so that it does
        // not change meanwhile.
        series.define(&self.registry.read(), &self.clock);
        series.set_times(self.times(series));
    }

    /// Adds the series of the response cache to a model that uses it.
    pub fn model_cached(&self, series: &ModelSeries) {
        series.set_cached();
        series.define(&self.registry(), &self.clock);
    }

    /// Adds the series of responses to a decoupled model.
    pub fn model_decoupled(&self, series: &ModelSeries) {
        series.cells.responses.switch_on();
        series.define(&self.registry(), &self.clock);
    }

    /// Adds the series of tokens to a model that generates text.
    pub fn model_generates(&self, series: &ModelSeries) {
        series.cells.tokens.count(Counted::All);
        series.define(&self.registry(), &self.clock);
    }

    /// Adds the series of tokens of prompts to a model that makes vectors or scores of texts.
    pub fn model_reads_texts(&self, series: &ModelSeries) {
        series.cells.tokens.count(Counted::Prompts);
        series.define(&self.registry(), &self.clock);
    }

    /// Keeps a removed model's series until the metric logs contain the growth of its counters.
    fn depart(&self, series: &Arc<ModelSeries>) {
        if self.journal.is_enabled() {
            self.unloaded.lock().push(Arc::clone(series));
            self.journal.notify();
        }
    }

    pub(super) fn take_unloaded(&self) -> Vec<Arc<ModelSeries>> {
        std::mem::take(&mut *self.unloaded.lock())
    }

    /// Starts counting requests by alias. Call it before models are loaded.
    pub fn count_by_alias(&self, naming: Naming) {
        self.by_alias.switch_on(naming);
    }

    pub(super) fn naming(&self) -> Option<&Naming> {
        self.by_alias.naming()
    }

    /// Returns the counts of the requests by this name and version (empty: none given), created on
    /// first use; `None` unless requests are counted by alias. Call it only for models that exist,
    /// so that clients cannot create series.
    pub fn alias(&self, name: &str, version: &str) -> Option<Arc<AliasCounts>> {
        self.by_alias.of(name, version, |name, version| self.alias_lines(name, version))
    }

    /// Returns all counts by alias; `None` unless requests are counted by alias.
    pub(super) fn aliases(&self) -> Option<Vec<Arc<AliasCounts>>> {
        self.naming().map(|_| self.by_alias.all())
    }

    /// Returns the series of a loaded model version.
    pub fn model(&self, model: &ModelVersion) -> Option<Arc<ModelSeries>> {
        self.models.read().get(model).cloned()
    }

    /// Returns the series of all loaded model versions, by name and version.
    pub fn models(&self) -> Vec<Arc<ModelSeries>> {
        self.models.read().values().cloned().collect()
    }

    /// Returns a counter by name and label values, created at 0 on first use. The values are in the
    /// order of the metric's dimensions, or of [`Builtin::dimensions`] for a built-in metric.
    ///
    /// # Errors
    /// No such metric exists, it has another type, or the labels are not allowed.
    pub fn counter(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Counter, name, labels)
    }

    /// Returns a gauge, like [`Cache::counter`].
    ///
    /// # Errors
    /// The errors of [`Cache::counter`].
    pub fn gauge(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Gauge, name, labels)
    }

    /// Returns a histogram, like [`Cache::counter`].
    ///
    /// # Errors
    /// The errors of [`Cache::counter`].
    pub fn histogram(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Histogram, name, labels)
    }

    /// Returns a summary, like [`Cache::counter`].
    ///
    /// # Errors
    /// The errors of [`Cache::counter`].
    pub fn summary(&self, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        self.handle(Kind::Summary, name, labels)
    }

    fn handle(&self, kind: Kind, name: &str, labels: &[&str]) -> Result<Arc<Series>, SampleError> {
        loop {
            if let Some(series) = self.current_handle(kind, name, labels)? {
                return Ok(series);
            }
        }
    }

    /// Returns the series of a metric; `None` if the definition changed meanwhile.
    fn current_handle(
        &self,
        kind: Kind,
        name: &str,
        labels: &[&str],
    ) -> Result<Option<Arc<Series>>, SampleError> {
        let registry = self.registry();
        let Some(family) = registry.family(name) else {
            if registry.catalog().is_disabled(name) {
                return Err(SampleError::Disabled(name.to_owned()));
            }
            let labels = labels.iter().map(|value| ("_".to_owned(), (*value).to_owned())).collect();
            let definition =
                Definition { name: name.to_owned(), kind: Some(kind), unit: String::new(), labels };
            return Err(SampleError::Undeclared(Box::new(definition)));
        };
        let spec = &family.spec;
        if spec.builtin.is_some_and(|builtin| !builtin.is_family()) {
            return Err(SampleError::Reserved(name.to_owned()));
        }
        if spec.kind != kind {
            return Err(SampleError::WrongKind {
                metric: name.to_owned(),
                expected: spec.kind,
                given: kind,
            });
        }
        let schema = LabelSchema::new(&spec.name, &spec.dimensions);
        let values: Option<Vec<String>> = match spec.builtin {
            Some(builtin) => schema
                .reorder(builtin.dimensions(), labels)
                .map(|value| value.map(str::to_owned))
                .collect(),
            None => Some(labels.iter().map(|value| (*value).to_owned()).collect()),
        };
        match values.filter(|_| labels.len() == spec.dimensions.len()) {
            Some(values) => self.bounded(family, &values),
            None => Err(schema.wrong_labels(labels.iter().map(|_| "_"))),
        }
    }

    /// Returns the series for a sample of a worker or another program, created at 0 on first use.
    /// Fills in a missing host label. Defines an unknown metric if detection is on, and adds new
    /// labels to a detected one.
    ///
    /// # Errors
    /// The metric, its type, or its labels are not allowed.
    pub fn resolve(&self, definition: &Definition) -> Result<Arc<Series>, SampleError> {
        loop {
            if let Some(series) = self.current_series(definition)? {
                return Ok(series);
            }
        }
    }

    /// Returns the series for a sample; `None` if the definition changed meanwhile or has been
    /// completed for this sample.
    fn current_series(&self, definition: &Definition) -> Result<Option<Arc<Series>>, SampleError> {
        let registry = self.registry();
        let Some(family) = registry.family_of(&definition.name, definition.kind) else {
            self.detect(definition)?;
            return Ok(None);
        };
        let spec = &family.spec;
        if spec.builtin.is_some() {
            return Err(SampleError::Reserved(definition.name.clone()));
        }
        if let Some(given) = definition.kind.filter(|kind| *kind != spec.kind) {
            if spec.detected && !spec.described && !family.views.prometheus {
                self.detect(definition)?;
                return Ok(None);
            }
            return Err(SampleError::WrongKind {
                metric: spec.name.clone(),
                expected: spec.kind,
                given,
            });
        }
        if spec.detected
            && !spec.described
            && definition.labels.iter().any(|(label, _)| !spec.dimensions.contains(label))
        {
            let labels: Vec<String> =
                definition.labels.iter().map(|(label, _)| label.clone()).collect();
            self.widen(&spec.name, spec.kind, &labels)?;
            return Ok(None);
        }
        self.bounded(family, &self.values(spec, definition)?)
    }

    /// Returns the label values in the order of the metric's dimensions.
    fn values(
        &self,
        spec: &MetricSpec,
        definition: &Definition,
    ) -> Result<Vec<String>, SampleError> {
        let default = |label: &str| match label {
            _ if spec.described => Some(""),
            label if WorkerLabel::is_host(label) => Some(self.settings.hostname.as_str()),
            _ => spec.detected.then_some(""),
        };
        let values =
            LabelSchema::new(&spec.name, &spec.dimensions).align(&definition.labels, default)?;
        Ok(values.into_iter().map(str::to_owned).collect())
    }

    /// Returns the series of these label values, or the series `other` beyond the limit; `None` if
    /// the family has ended. Built-in metrics have no limit: their label values are closed lists,
    /// models, instances, devices and metrics, and no request can add to these.
    fn bounded(
        &self,
        family: &Family,
        labels: &[String],
    ) -> Result<Option<Arc<Series>>, SampleError> {
        let unlimited = |labels: &[String]| match family.series(labels, usize::MAX, &self.clock) {
            Found::Series(series) => Some(series),
            Found::Full | Found::Ended => None,
        };
        // Also ends the recursion through `count` below.
        if family.spec.builtin.is_some() {
            return Ok(unlimited(labels));
        }
        check_lengths(&family.spec.name, labels)?;
        let most = match family.spec.kind {
            Kind::Summary => self.settings.max_series.min(MAX_LARGE_SERIES_PER_METRIC),
            _ if family.spec.native.is_some() => {
                self.settings.max_series.min(MAX_LARGE_SERIES_PER_METRIC)
            }
            _ => self.settings.max_series,
        };
        match family.series(labels, most, &self.clock) {
            Found::Series(series) => Ok(Some(series)),
            Found::Ended => Ok(None),
            Found::Full => {
                self.count(Builtin::SeriesOverflowed, &[&family.spec.name], 1.0);
                let other = vec![OTHER.to_owned(); labels.len()];
                Ok(unlimited(&other))
            }
        }
    }

    /// Defines a metric by its first sample: type, unit and labels.
    fn detect(&self, definition: &Definition) -> Result<(), SampleError> {
        let Definition { name, kind, unit, labels } = definition;
        // What the server's own code in workers records is off if the file leaves it out, as
        // metrics of the frontend are.
        if self.registry().catalog().is_disabled(name)
            || RECORDED_BY_WORKER.contains(&name.as_str())
        {
            return Err(SampleError::Disabled(name.clone()));
        }
        if unit.len() > MAX_UNIT {
            return Err(SampleError::UnitTooLong { metric: name.clone(), length: unit.len() });
        }
        if !self.settings.auto_detect {
            return Err(SampleError::Undeclared(Box::new(definition.clone())));
        }
        check_lengths(name, labels.iter().map(|(_, value)| value))?;
        let dimensions: Vec<String> = labels.iter().map(|(label, _)| label.clone()).collect();
        self.register(MetricSpec::detected(name, kind.unwrap_or(Kind::Gauge), unit, dimensions))
    }

    /// Removes the series of a metric for which `gone` returns true.
    pub fn remove_series(&self, name: &str, gone: impl FnMut(&Series) -> bool) {
        if let Some(family) = self.registry().family(name) {
            family.remove(gone);
        }
    }

    /// Returns the definition of a metric and the views that show it.
    pub fn find(&self, name: &str) -> Option<(Arc<MetricSpec>, Views)> {
        let registry = self.registry();
        let family = registry.family(name)?;
        Some((Arc::clone(&family.spec), family.views))
    }

    /// Returns the number of answered inference requests, except those without access, and of those
    /// that failed through the server's fault.
    pub fn inferences(&self) -> (u64, u64) {
        self.requests.inferences()
    }

    pub(super) fn requests(&self) -> &Arc<RequestSeries> {
        &self.requests
    }

    /// Returns the transactions of its cells.
    pub fn transactions(&self) -> &Transactions {
        &self.transactions
    }
}

/// Checks the label values of a metric.
fn check_lengths<'a>(
    metric: &str,
    values: impl IntoIterator<Item = &'a String>,
) -> Result<(), SampleError> {
    match values.into_iter().find(|value| value.len() > MAX_LABEL_BYTES) {
        Some(long) => {
            Err(SampleError::LabelTooLong { metric: metric.to_owned(), length: long.len() })
        }
        None => Ok(()),
    }
}

/// Returns the series of a metric's name and label values.
type Find = fn(&Cache, &str, &[&str]) -> Result<Arc<Series>, SampleError>;

impl Cache {
    /// Adds to a built-in counter, with label values in the order of [`Builtin::dimensions`]. `by`
    /// is not negative; 0 creates the series. Does nothing if the counter is not defined.
    pub fn count(&self, builtin: Builtin, labels: &[&str], by: f64) {
        if let Ok(series) = self.counter(builtin.name(), labels) {
            let _ = series.add_or_update(by);
        }
    }

    /// Sets a series of a built-in gauge, with label values in the order of
    /// [`Builtin::dimensions`]. Does nothing if the gauge is not defined.
    pub fn set_gauge(&self, builtin: Builtin, labels: &[&str], value: f64) {
        if let Ok(series) = self.gauge(builtin.name(), labels) {
            let _ = series.add_or_update(value);
        }
    }

    /// Sets all series of a built-in gauge, with label values in the order of
    /// [`Builtin::dimensions`], and removes all others. Does nothing if the gauge is not defined.
    pub fn set_gauges(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)]) {
        self.update_all(builtin, rows, Self::gauge);
    }

    /// Adds to all series of a built-in counter, with label values in the order of
    /// [`Builtin::dimensions`], and removes all others. Rows of equal labels add up. Does nothing
    /// if the counter is not defined.
    pub fn count_all(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)]) {
        self.update_all(builtin, rows, Self::counter);
    }

    fn update_all(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)], find: Find) {
        let mut now = HashSet::with_capacity(rows.len());
        for (labels, value) in rows {
            let Ok(series) = find(self, builtin.name(), labels) else { return };
            // A gauge accepts every value, and a counter every value that is not negative.
            let _ = series.add_or_update(*value);
            now.insert(Arc::as_ptr(&series.cell));
        }
        self.remove_series(builtin.name(), |series| !now.contains(&Arc::as_ptr(&series.cell)));
    }
}

/// Nanoseconds in a microsecond: metrics named `ts_*_latency_microseconds` show cells in
/// nanoseconds.
const NS_OF_MICROSECOND: f64 = 1000.0;

impl Cache {
    /// Returns the gauges that every executed batch sets, `QueueTime` and `WorkerThreadTime`, if
    /// they are defined.
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
        self.latency_lines(&[
            ("model_name", name),
            ("model_version", version),
            ("hostname", self.hostname()),
        ])
    }

    fn latency_lines(&self, labels: &[(&str, &str)]) -> Lines {
        let registry = self.registry();
        let line = |builtin: Builtin| {
            let family = registry.family(builtin.name()).filter(|family| family.views.tslog)?;
            Some(Arc::new(Line::of_server(
                &family.spec,
                labels,
                self.hostname(),
                NS_OF_MICROSECOND,
            )))
        };
        Lines { latency: line(Builtin::TsLatency), queue_latency: line(Builtin::TsQueueLatency) }
    }
}

impl Cache {
    /// Removes the series of a model version from all views, including those that only its workers
    /// wrote. If the version has been loaded again, the new series remain.
    pub fn model_unloaded(&self, series: &Arc<ModelSeries>) {
        {
            let mut models = self.models.write();
            if models.get(series.model()).is_some_and(|current| Arc::ptr_eq(current, series)) {
                models.remove(series.model());
                self.depart(series);
            }
        }
        self.release(series.release_owned());
    }

    /// Returns the series for a sample of a worker of this model, as [`Cache::resolve`]. It is
    /// removed with the last model whose workers write it; the late sample of an unloaded model
    /// creates none.
    ///
    /// # Errors
    /// The errors of [`Cache::resolve`], and [`SampleError::Unloaded`].
    pub(crate) fn resolve_for(
        &self,
        model: &ModelSeries,
        definition: &Definition,
    ) -> Result<Arc<Series>, SampleError> {
        if model.has_ended() {
            return self
                .existing(definition)
                .ok_or_else(|| SampleError::Unloaded(definition.name.clone()));
        }
        let series = self.resolve(definition)?;
        self.own(model, &series);
        Ok(series)
    }

    /// Registers that this model writes a series. Removes the series if the model was unloaded
    /// meanwhile and no other writes it.
    pub(crate) fn own(&self, model: &ModelSeries, series: &Arc<Series>) {
        if !model.add_owned(series) && series.cell.owners.load(Ordering::Relaxed) == 0 {
            self.release([Arc::clone(series)]);
        }
    }

    /// Makes the successor an owner of the counters and distributions that the workers of a
    /// replaced load wrote, so that they continue whether or not its workers have written them
    /// already. A gauge ends with the workers that set it.
    pub(super) fn continue_owned(&self, series: &ModelSeries, replaced: &ModelSeries) {
        let continuing =
            replaced.all_owned().into_iter().filter(|owned| owned.spec().kind != Kind::Gauge);
        continuing.for_each(|owned| self.own(series, &owned));
    }

    /// Removes series that no loaded model's workers write any more.
    pub(crate) fn release(&self, released: impl IntoIterator<Item = Arc<Series>>) {
        for series in released {
            let spec = series.spec();
            while let Some(family) = self.registry().family_of(&spec.name, Some(spec.kind)) {
                if family.remove_one(&series) {
                    break;
                }
            }
            if spec.detected {
                self.end_detected(&spec.name, spec.kind);
            }
        }
    }

    /// Returns the series for a sample, if there is one.
    fn existing(&self, definition: &Definition) -> Option<Arc<Series>> {
        let registry = self.registry();
        let family = registry.family_of(&definition.name, definition.kind)?;
        let spec = &family.spec;
        let is_allowed =
            spec.builtin.is_none() && definition.kind.is_none_or(|kind| kind == spec.kind);
        if is_allowed { family.get(&self.values(spec, definition).ok()?) } else { None }
    }
}

impl Cache {
    /// Checks that a new definition can replace the current one while the server runs.
    ///
    /// # Errors
    /// It assigns requests to tenants by another rule.
    pub fn check_reload(&self, catalog: &Catalog) -> Result<(), String> {
        match (self.tenants(), catalog.tenants()) {
            (None, None) => Ok(()),
            (Some(tenants), Some(rule)) => tenants.check_reload(rule),
            _ => Err("`tenants` has changed, which needs a restart of the server".to_owned()),
        }
    }

    /// Returns where the names of tenants come from; `None` if tenants are not distinguished.
    pub fn tenant_source(&self) -> Option<&TenantSource> {
        self.tenants().map(|tenants| &tenants.rule().source)
    }

    /// Returns the state of a tenant's budget of tokens; `None` if the tenant has none.
    pub fn token_budget(&self, tenant: TenantId, now: Instant) -> Option<TokenBudget> {
        self.tenants()?.budgets().state(tenant, now)
    }

    /// Returns the tenant of this name. An empty name means no tenant.
    pub fn tenant(&self, name: &[u8]) -> TenantId {
        self.tenants().map_or_else(TenantId::default, |tenants| tenants.of(name))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::exposition::{Format, render};
    use crate::reading::{Details, Histogram, Reading};
    use crate::sample_error::MAX_DETECTED;

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
        let labels =
            labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Definition { name: name.to_owned(), kind: Some(kind), unit: "ms".to_owned(), labels }
    }

    #[test]
    fn a_gauge_that_is_created_before_its_first_value_is_not_shown_with_0() {
        let cache = Arc::new(cache());
        let waited = cache.gauge("QueueTime", &["Host", "h"]).unwrap();
        let level = cache.gauge("Level", &["h"]).unwrap();
        let shown = |name: &str| {
            let text = render(&cache, Format::Text);
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.split_once("} "))
                .map(|(_, value)| value.to_owned())
        };
        assert_eq!((shown("QueueTime{"), shown("Level{").as_deref()), (None, Some("0")));
        for value in [f64::NAN, 0.0] {
            waited.add_or_update(value).unwrap();
            level.add_or_update(f64::from_bits(f64::NAN.to_bits() | 1)).unwrap();
            assert_eq!(
                (shown("QueueTime{"), shown("Level{").as_deref()),
                (Some(value.to_string()), Some("NaN"))
            );
        }
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
        assert_eq!(size.cell.read(Details::default()), Reading::Histogram(expected));
    }

    #[test]
    fn labels_of_builtins_are_given_in_the_order_of_the_code() {
        let cache = cache();
        let queue_time = cache.gauge("QueueTime", &["Host", "h"]).unwrap();
        assert_eq!(queue_time.labels(), ["h", "Host"]);
        assert!(matches!(
            cache.counter("nv_inference_count", &["m", "1"]),
            Err(SampleError::Reserved(_))
        ));
        assert!(matches!(cache.gauge("None", &[]), Err(SampleError::Undeclared(_))));
        assert!(matches!(cache.gauge("Orders", &["a"]), Err(SampleError::WrongKind { .. })));
        for wrong in [&["Host"][..], &["Host", "h", "x"]] {
            assert!(matches!(
                cache.gauge("QueueTime", wrong),
                Err(SampleError::WrongLabels { .. })
            ));
        }
    }

    /// A file may list the labels of a built-in metric in any order.
    #[test]
    fn all_series_of_a_counter_are_updated_at_once() {
        let yaml = "ts_metrics:\n  counter:\n    - {name: pharos_instance_busy_seconds_total, \
                    unit: s, dimensions: [instance, model, version]}\n";
        let cache =
            Arc::new(Cache::new(Catalog::parse(yaml, "m.yaml").unwrap(), Settings::new("h")));
        let count = |names: &[&'static str]| {
            let rows: Vec<(Vec<&str>, f64)> =
                names.iter().map(|name| (vec!["m", "1", *name], 0.5)).collect();
            cache.count_all(Builtin::InstanceBusy, &rows);
            render(&cache, Format::Text)
        };
        let line = |name: &str, value: f64| {
            format!(
                "pharos_instance_busy_seconds_total{{instance=\"{name}\",model=\"m\",version=\"1\"\
                 }} {value}\n"
            )
        };
        assert!(count(&["a", "b", "a"]).ends_with(&(line("a", 1.0) + &line("b", 0.5))));
        let text = count(&["b"]);
        assert!(text.ends_with(&line("b", 1.0)) && !text.contains("\"a\""), "{text}");
    }

    #[test]
    fn definitions_are_matched_by_label_names() {
        let cache = cache();
        let level = cache.resolve(&definition("Level", Kind::Gauge, &[])).unwrap();
        assert_eq!(level.labels(), ["host"]);
        let kind = cache.resolve(&definition("Level", Kind::Counter, &[])).unwrap_err();
        assert_eq!(kind.to_string(), "metric `Level` is a gauge, not a counter");
        let labels = cache
            .resolve(&definition("Orders", Kind::Counter, &[("shop", "a"), ("x", "b")]))
            .unwrap_err();
        let expected = "metric `Orders` has no dimension `x`, only [shop]; add it to the metric's \
                        `dimensions` in metrics.yaml";
        assert_eq!(labels.to_string(), expected);
        let labels = cache.resolve(&definition("Orders", Kind::Counter, &[])).unwrap_err();
        assert_eq!(
            labels.to_string(),
            "metric `Orders` has the dimensions [shop], but [] were given"
        );
        let long =
            definition("Orders", Kind::Counter, &[("shop", &"x".repeat(MAX_LABEL_BYTES + 1))]);
        assert!(matches!(cache.resolve(&long), Err(SampleError::LabelTooLong { length: 257, .. })));
        let builtin =
            cache.resolve(&definition("QueueTime", Kind::Gauge, &[("Level", "a")])).unwrap_err();
        assert_eq!(builtin.to_string(), "metric `QueueTime` is recorded by the server itself");
        let unknown = cache
            .resolve(&definition("New", Kind::Histogram, &[("a", "1"), ("b", "2")]))
            .unwrap_err();
        let expected =
            "under model_metrics.histogram: `- {name: New, unit: ms, dimensions: [a, b]}`";
        assert!(unknown.to_string().contains(expected), "{unknown}");
    }

    #[test]
    fn refuses_bad_values() {
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
    fn a_first_sample_defines_its_metric_if_detection_is_on() {
        let cache = cache_with(|settings| settings.auto_detect = true);
        let first = cache.resolve(&definition("New", Kind::Counter, &[("a", "1")])).unwrap();
        first.add_or_update(2.0).unwrap();
        let again = cache.resolve(&definition("New", Kind::Counter, &[("a", "1")])).unwrap();
        assert_eq!(again.value(), 2.0);
        assert!(matches!(
            cache.resolve(&definition("Orders", Kind::Counter, &[("shop", "a"), ("b", "1")])),
            Err(SampleError::UnknownLabel { .. })
        ));
        for (name, label) in [("two words", "a"), ("CPUUtilization", "a"), ("fine", "dash-label")] {
            let refused = cache.resolve(&definition(name, Kind::Gauge, &[(label, "1")]));
            assert!(matches!(refused, Err(SampleError::BadName(_))), "{name}");
        }
        for at in 0..MAX_DETECTED {
            let _ = cache.resolve(&definition(&format!("n{at}"), Kind::Gauge, &[]));
        }
        assert!(matches!(
            cache.resolve(&definition("more", Kind::Gauge, &[])),
            Err(SampleError::TooManyMetrics(_))
        ));
    }

    #[test]
    fn a_first_sample_does_not_define_a_colliding_metric() {
        let catalog = Catalog::parse(
            &format!("{CUSTOM}    - {{name: Off, unit: B, enabled: false}}\n"),
            "m.yaml",
        )
        .unwrap();
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
        for (name, kind) in
            [("Kept", Kind::Counter), ("Size2_sum", Kind::Gauge), ("Named", Kind::Counter)]
        {
            cache
                .resolve(&definition(name, kind, &[("a", "1")]))
                .unwrap()
                .add_or_update(2.0)
                .unwrap();
        }
        let file = "model_metrics:\n  counter:\n    - {name: Named, unit: c, dimensions: [a]}\n  \
                    histogram:\n    - {name: Size2, unit: B}\n";
        let difference = cache.reload(Catalog::parse(file, "m.yaml").unwrap());
        assert_eq!(
            (difference.added.join(","), difference.changed.join(",")),
            ("Size2".to_owned(), "Named".to_owned())
        );
        assert!(
            difference.removed.contains(&"Size2_sum".to_owned())
                && difference.removed.contains(&"Orders".to_owned())
        );
        let value = |name| {
            cache
                .resolve(&definition(name, Kind::Counter, &[("a", "1")]))
                .map(|series| series.value())
        };
        assert_eq!((value("Kept"), value("Named")), (Ok(2.0), Ok(2.0)));
        assert!(matches!(value("Size2_sum"), Err(SampleError::Collision(_))));
        assert!(!cache.registry().catalog().find("Named").unwrap().1.detected);
    }

    #[test]
    fn samples_beyond_the_limit_go_to_one_series() {
        let cache = cache_with(|settings| settings.max_series = 3);
        for at in 0..6 {
            cache.counter("Orders", &[&at.to_string()]).unwrap().add_or_update(1.0).unwrap();
        }
        assert_eq!(cache.counter("Orders", &["0"]).unwrap().value(), 1.0);
        assert_eq!(cache.counter("Orders", &[OTHER]).unwrap().value(), 3.0);
        assert_eq!(
            cache.counter("pharos_metric_series_overflowed_total", &["Orders"]).unwrap().value(),
            3.0
        );
    }

    #[test]
    fn builtin_metrics_have_no_limit_of_series() {
        let cache = cache_with(|settings| (settings.max_series, settings.auto_detect) = (1, true));
        let names = ["Orders", "First", "Second", "Third"];
        for (name, at) in names.iter().flat_map(|name| (0..4).map(move |at| (*name, at))) {
            let label = if name == "Orders" { "shop" } else { "a" };
            let series = cache
                .resolve(&definition(name, Kind::Counter, &[(label, &at.to_string())]))
                .unwrap();
            series.add_or_update(1.0).unwrap();
        }
        for name in names {
            assert_eq!(cache.counter(name, &[OTHER]).unwrap().value(), 3.0, "{name}");
            let overflowed = cache.counter(Builtin::SeriesOverflowed.name(), &[name]).unwrap();
            assert_eq!(overflowed.value(), 3.0, "{name}");
        }
        let worker = |at: u32| {
            cache.gauge("QueueTime", &["Host", &at.to_string()]).unwrap().labels().join(",")
        };
        assert_eq!((worker(0), worker(1)), ("0,Host".to_owned(), "1,Host".to_owned()));
    }

    #[test]
    fn series_with_known_labels_exist_from_the_start() {
        let log = "pharos_tslog_lines_skipped_total";
        let counters = "pharos_metric_samples_total pharos_metrics_reloads_total";
        let builtin = |name: &str, label: &str| {
            format!("    - {{name: {name}, unit: c, dimensions: [{label}]}}\n")
        };
        let mut text = format!("mode: both\nts_metrics:\n  counter:\n{}", builtin(log, "file"));
        for (name, label) in counters.split(' ').zip(["source", "result"]) {
            text += &builtin(name, label);
        }
        text += "model_metrics:\n  counter:\n    - {name: Plain, unit: c}\n    - {name: OfHost, \
                 unit: c, dimensions: [HostName]}\n    - {name: OfShop, unit: c, dimensions: \
                 [shop]}\n  gauge:\n    - {name: Depth, unit: m}\n  histogram:\n    - {name: \
                 Size, unit: B}\n";
        let shown = |cache: &Cache| {
            let all = cache
                .registry()
                .families()
                .iter()
                .flat_map(|family| family.all())
                .collect::<Vec<_>>();
            all.iter()
                .map(|series| format!("{} {}", series.spec().name, series.labels().join(",")))
                .collect::<Vec<_>>()
        };
        let settings = Settings { statsd: true, tslog_stdout: true, ..Settings::new("host") };
        let cache = Cache::new(Catalog::parse(&text, "m.yaml").unwrap(), settings);
        let logs = ["model_metrics", "stdout", "ts_metrics"].map(|file| format!("{log} {file}"));
        let sources = ["ring", "statsd", "stdout"]
            .map(|source| format!("pharos_metric_samples_total {source}"));
        let reloads =
            ["failure", "success"].map(|result| format!("pharos_metrics_reloads_total {result}"));
        let models = ["Plain ", "OfHost host", "Size "].map(str::to_owned);
        assert_eq!(shown(&cache), [&logs[..], &sources, &reloads, &models].concat());
        // They remain when a model that wrote them is unloaded, and appear with a definition that
        // contains them.
        let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let plain = cache.counter("Plain", &[]).unwrap();
        model.add_owned(&plain);
        plain.add_or_update(2.0).unwrap();
        cache.model_unloaded(&model);
        assert_eq!(cache.counter("Plain", &[]).unwrap().value(), 2.0);
        cache.reload(Catalog::parse(&text.replace("Plain", "Other"), "m.yaml").unwrap());
        assert!(
            shown(&cache).contains(&"Other ".to_owned())
                && !shown(&cache).contains(&"Plain ".to_owned())
        );

        // Features that are not in use have no series.
        let quiet = Cache::new(
            Catalog::parse(&text.replace("both", "prometheus"), "m.yaml").unwrap(),
            Settings::new("host"),
        );
        let sources = [&sources[0], &sources[2]].map(Clone::clone);
        assert_eq!(shown(&quiet), [&sources[..], &reloads, &models].concat());
        quiet.reload(Catalog::parse(&text, "m.yaml").unwrap());
        assert_eq!(shown(&quiet)[..2], [&logs[0], &logs[2]].map(Clone::clone));
    }

    #[test]
    fn a_reload_keeps_compatible_series() {
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
        assert_eq!(
            cache.histogram("Size", &[]).unwrap().value(),
            0.0,
            "other buckets, another metric"
        );
        assert!(cache.gauge("Level", &["h"]).is_err() && cache.gauge("Depth", &["h"]).is_ok());
    }

    #[test]
    fn a_reload_with_another_unit_of_time_starts_again() {
        let text =
            |unit: &str| format!("model_metrics:\n  counter: [{{name: Waited, unit: {unit}}}]\n");
        let catalog = |unit: &str| Catalog::parse(&text(unit), "m.yaml").unwrap();
        let cache = Cache::new(catalog("Seconds"), Settings::new("h"));
        cache.counter("Waited", &[]).unwrap().add_or_update(3.0).unwrap();
        for (unit, value) in [("s", 3.0), ("ms", 0.0), ("Milliseconds", 0.0)] {
            cache.reload(catalog(unit));
            assert_eq!(cache.counter("Waited", &[]).unwrap().value(), value, "{unit}");
        }
    }

    #[test]
    fn gauges_include_the_remains_of_earlier_loads() {
        let cache = cache();
        let model = ModelVersion::new("m", 1);
        let loads = [1, 2, 4].map(|pending| {
            let series = cache.model_loaded(&model, &[]);
            series.cells.pending.add(pending);
            series
        });
        let [first, second, third] = loads;
        let pending = |series: &ModelSeries| series.waiting();
        assert_eq!((pending(&first), pending(&second), pending(&third)), (1, 3, 7));
        second.cells.pending.add(-2);
        cache.model_unloaded(&first);
        drop(first);
        assert_eq!(pending(&third), 4, "ended loads do not count");
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
