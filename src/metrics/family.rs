//! Families of series by label values, and the registry of all families of one definition.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::builtin::Builtin;
use super::catalog::{Catalog, MetricSpec, Views};
use super::cell::Cell;
use super::journal::{Journal, Line};
use super::reading::{Details, Reading};
use super::sample_error::SampleError;
use super::summary::CoarseClock;
use super::transaction::Transactions;

/// One series: a metric with label values, and its value. Keep the handle if you record many samples.
#[derive(Debug)]
pub struct Series {
    spec: Arc<MetricSpec>,
    labels: Box<[String]>,
    pub(super) cell: Arc<Cell>,
    /// The journal and the line for its samples, if they are logged.
    log: Option<(Arc<Journal>, Arc<Line>)>,
}

impl Series {
    /// Returns the metric.
    pub fn spec(&self) -> &MetricSpec {
        &self.spec
    }

    /// Returns the label values, in the order of the metric's dimensions.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Records one sample: a counter's increment, a gauge's new value, an observation.
    ///
    /// # Errors
    /// Returns the errors of [`Cell::add_or_update`].
    pub fn add_or_update(&self, value: f64) -> Result<(), SampleError> {
        self.add_or_update_for(value, "")
    }

    /// Records one sample that was caused by a request or a batch. Metric logs show the request ids, joined with
    /// [`push_request_id`](super::tslog::push_request_id).
    ///
    /// # Errors
    /// Returns the errors of [`Cell::add_or_update`].
    pub fn add_or_update_for(&self, value: f64, request_ids: &str) -> Result<(), SampleError> {
        self.cell.add_or_update(value)?;
        if let Some((journal, line)) = &self.log {
            journal.push(line, value, request_ids);
        }
        Ok(())
    }

    /// Returns its line in the journal, if its samples are logged.
    pub(super) fn line(&self) -> Option<&Arc<Line>> {
        self.log.as_ref().map(|(_, line)| line)
    }

    /// Records an observation that was made `times` times (at least 1).
    ///
    /// # Errors
    /// Returns the errors of [`Cell::observe`].
    pub fn observe(&self, value: f64, times: u32) -> Result<(), SampleError> {
        self.cell.observe(value, times)?;
        if let Some((journal, line)) = &self.log {
            journal.push_all(std::iter::repeat_n((line, value), times as usize), "");
        }
        Ok(())
    }

    /// Records one sample like [`Series::add_or_update`], without a log line. For values that are measured more often
    /// than they are logged.
    ///
    /// # Errors
    /// Returns the errors of [`Cell::add_or_update`].
    pub fn add_or_update_unlogged(&self, value: f64) -> Result<(), SampleError> {
        self.cell.add_or_update(value)
    }

    /// Returns the current value of a counter or gauge, or the number of observations of the other types.
    pub fn value(&self) -> f64 {
        match self.cell.read(Details::default()) {
            Reading::Number(value) => value.as_f64(),
            Reading::Histogram(histogram) => histogram.count() as f64,
            Reading::Summary(summary) => summary.count as f64,
        }
    }
}

/// Series by label values, in the order in which views show them.
type Members = BTreeMap<Box<[String]>, Arc<Series>>;

/// All series of one metric.
#[derive(Debug)]
pub struct Family {
    pub(super) spec: Arc<MetricSpec>,
    pub(super) views: Views,
    journal: Arc<Journal>,
    transactions: Arc<Transactions>,
    /// Changes when a series is created or removed.
    members: RwLock<Members>,
}

impl Family {
    /// Returns the metric.
    pub fn spec(&self) -> &MetricSpec {
        &self.spec
    }

    /// Returns the views that show it.
    pub fn views(&self) -> Views {
        self.views
    }

    fn new(catalog: &Catalog, spec: &MetricSpec, journal: &Arc<Journal>, transactions: &Arc<Transactions>) -> Self {
        Self {
            spec: Arc::new(spec.clone()),
            views: catalog.views(spec),
            journal: Arc::clone(journal),
            transactions: Arc::clone(transactions),
            members: RwLock::default(),
        }
    }

    fn member(&self, labels: &[String], cell: Arc<Cell>) -> Arc<Series> {
        let logged = self.views.tslog && !self.spec.builtin.is_some_and(Builtin::is_unlogged);
        let line = || Arc::new(Line::new(&self.spec, labels, self.journal.hostname()));
        let log = logged.then(|| (Arc::clone(&self.journal), line()));
        Arc::new(Series { spec: Arc::clone(&self.spec), labels: labels.into(), cell, log })
    }

    /// Creates the family of the same metric under a new definition. Keeps the series if the definitions are compatible.
    fn renewed(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec, &self.journal, &self.transactions);
        let old = &self.spec;
        let same = (old.kind, &old.dimensions, &old.buckets, &old.quantiles, old.builtin, old.section)
            == (spec.kind, &spec.dimensions, &spec.buckets, &spec.quantiles, spec.builtin, spec.section);
        // Sums of values in two units of time would be of no unit. Another name of other units changes no value.
        let times = old.time_unit().zip(spec.time_unit());
        if same && old.native == spec.native && times.is_none_or(|(old, new)| old == new) {
            let members = self.read();
            let members = members.iter().map(|(labels, old)| (labels.clone(), new.member(labels, old.cell.clone())));
            *new.write() = members.collect();
        }
        new
    }

    /// Returns all series.
    pub(super) fn all(&self) -> Vec<Arc<Series>> {
        self.read().values().cloned().collect()
    }

    /// Returns the series of these label values, if it exists.
    pub(super) fn get(&self, labels: &[String]) -> Option<Arc<Series>> {
        self.read().get(labels).cloned()
    }

    /// Returns the series of these label values and creates it if it is new; `None` if that would exceed `most` series.
    pub(super) fn series(&self, labels: &[String], most: usize, clock: &Arc<CoarseClock>) -> Option<Arc<Series>> {
        if let Some(series) = self.get(labels) {
            return Some(series);
        }
        let mut members = self.write();
        if members.len() >= most && !members.contains_key(labels) {
            return None;
        }
        let series = members.entry(labels.into()).or_insert_with(|| {
            self.member(labels, Arc::new(Cell::new(&self.spec, clock, Arc::clone(&self.transactions))))
        });
        Some(Arc::clone(series))
    }

    /// Removes the series for which `gone` returns true.
    pub(super) fn remove(&self, mut gone: impl FnMut(&Series) -> bool) {
        self.write().retain(|_, series| !gone(series));
    }

    /// Removes the series of these label values if it has this cell.
    pub(super) fn remove_one(&self, labels: &[String], cell: &Arc<Cell>) {
        let labels = self.filled(labels);
        let mut members = self.write();
        if members.get(&labels).is_some_and(|series| Arc::ptr_eq(&series.cell, cell)) {
            members.remove(&labels);
        }
    }

    /// Extends label values from before labels were added with empty ones.
    fn filled(&self, labels: &[String]) -> Box<[String]> {
        let missing = self.spec.dimensions.len().saturating_sub(labels.len());
        labels.iter().cloned().chain(std::iter::repeat_n(String::new(), missing)).collect()
    }

    /// Creates the family of the same metric with labels added at the end. The existing series have no values for them.
    fn widened(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec, &self.journal, &self.transactions);
        let members = self.read();
        let members = members.iter().map(|(labels, old)| (new.filled(labels), old));
        *new.write() = members.map(|(labels, old)| (labels.clone(), new.member(&labels, old.cell.clone()))).collect();
        new
    }

    fn read(&self) -> RwLockReadGuard<'_, Members> {
        self.members.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Members> {
        self.members.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All families of one definition of the metrics.
#[derive(Debug)]
pub struct Registry {
    catalog: Catalog,
    /// Indexed by metric id.
    families: Vec<Arc<Family>>,
    journal: Arc<Journal>,
    transactions: Arc<Transactions>,
}

impl Registry {
    pub(super) fn new(catalog: Catalog, journal: Arc<Journal>, transactions: Arc<Transactions>) -> Self {
        let family = |spec: &MetricSpec| Arc::new(Family::new(&catalog, spec, &journal, &transactions));
        let families = catalog.iter().map(|(_, spec)| family(spec)).collect();
        Self { catalog, families, journal, transactions }
    }

    fn of_families(&self, catalog: Catalog, families: Vec<Arc<Family>>) -> Self {
        Self { catalog, families, journal: Arc::clone(&self.journal), transactions: Arc::clone(&self.transactions) }
    }

    /// Creates the families of a new definition. Keeps the series of metrics that are compatible in both.
    pub(super) fn renewed(&self, catalog: Catalog) -> Self {
        let family = |spec: &MetricSpec| match self.family(&spec.name) {
            Some(old) => old.renewed(&catalog, spec),
            None => Family::new(&catalog, spec, &self.journal, &self.transactions),
        };
        let families = catalog.iter().map(|(_, spec)| Arc::new(family(spec))).collect();
        self.of_families(catalog, families)
    }

    /// Creates a registry with an additional family, of a metric that is not in this one.
    pub(super) fn with_detected(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_metric(spec.clone());
        let new = Arc::new(Family::new(&catalog, &spec, &self.journal, &self.transactions));
        let families = self.families.iter().cloned().chain([new]).collect();
        self.of_families(catalog, families)
    }

    /// Creates a registry in which the family of this metric has the labels of `spec`, added at the end.
    pub(super) fn with_labels(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_changed(spec.clone());
        let family = |old: &Arc<Family>| match old.spec.name == spec.name {
            true => Arc::new(old.widened(&catalog, &spec)),
            false => Arc::clone(old),
        };
        let families = self.families.iter().map(family).collect();
        self.of_families(catalog, families)
    }

    /// Returns the definition of the metrics.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Returns every family, in the catalog's order.
    pub(super) fn families(&self) -> &[Arc<Family>] {
        &self.families
    }

    pub(super) fn family(&self, name: &str) -> Option<&Arc<Family>> {
        let (id, _) = self.catalog.find(name)?;
        self.families.get(usize::try_from(id.0).ok()?)
    }
}
