//! Families of series by label values, and all families of one definition of the metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::builtin::Builtin;
use super::catalog::{Catalog, MetricSpec, Views};
use super::cell::Cell;
use super::journal::{Journal, Line};
use super::reading::Reading;
use super::sample_error::SampleError;
use super::summary::CoarseClock;

/// One series: a metric with label values, and its value. Keep the handle for many samples.
#[derive(Debug)]
pub struct Series {
    spec: Arc<MetricSpec>,
    labels: Box<[String]>,
    pub(super) cell: Arc<Cell>,
    /// Where its samples are logged, if they are.
    log: Option<(Arc<Journal>, Arc<Line>)>,
}

impl Series {
    /// The metric.
    pub fn spec(&self) -> &MetricSpec {
        &self.spec
    }

    /// The label values, in the order of the metric's dimensions.
    pub fn labels(&self) -> &[String] {
        &self.labels
    }

    /// Takes one sample: a counter's increment, a gauge's new value, an observation.
    ///
    /// # Errors
    /// As [`Cell::add_or_update`].
    pub fn add_or_update(&self, value: f64) -> Result<(), SampleError> {
        self.add_or_update_for(value, "")
    }

    /// Takes one sample that a request caused, or a batch of them: in the metric logs it carries their ids, joined with
    /// [`push_request_id`](super::tslog::push_request_id).
    ///
    /// # Errors
    /// As [`Cell::add_or_update`].
    pub fn add_or_update_for(&self, value: f64, request_ids: &str) -> Result<(), SampleError> {
        self.cell.add_or_update(value)?;
        if let Some((journal, line)) = &self.log {
            journal.push(line, value, request_ids);
        }
        Ok(())
    }

    /// Where its samples are logged, if they are.
    pub(super) fn line(&self) -> Option<&Arc<Line>> {
        self.log.as_ref().map(|(_, line)| line)
    }

    /// Takes an observation that was made `times` times, 1 or more.
    ///
    /// # Errors
    /// As [`Cell::observe`].
    pub fn observe(&self, value: f64, times: u32) -> Result<(), SampleError> {
        self.cell.observe(value, times)?;
        if let Some((journal, line)) = &self.log {
            journal.push_all(std::iter::repeat_n((line, value), times as usize), "");
        }
        Ok(())
    }

    /// Takes one sample as [`Series::add_or_update`] does, without a line in the log: for what is measured more often than
    /// it is to be logged.
    ///
    /// # Errors
    /// As [`Cell::add_or_update`].
    pub fn add_or_update_unlogged(&self, value: f64) -> Result<(), SampleError> {
        self.cell.add_or_update(value)
    }

    /// The value now: a counter's or gauge's own, the number of observations of the others.
    pub fn value(&self) -> f64 {
        match self.cell.read() {
            Reading::Number(value) => value.as_f64(),
            Reading::Histogram(histogram) => histogram.count() as f64,
            Reading::Summary(summary) => summary.count as f64,
        }
    }
}

/// Series by label values, in the order in which they are shown.
type Members = BTreeMap<Box<[String]>, Arc<Series>>;

/// One metric's series.
#[derive(Debug)]
pub struct Family {
    pub(super) spec: Arc<MetricSpec>,
    pub(super) views: Views,
    journal: Arc<Journal>,
    /// Written when a series is first seen or removed.
    members: RwLock<Members>,
}

impl Family {
    /// The metric.
    pub fn spec(&self) -> &MetricSpec {
        &self.spec
    }

    /// The views that show it.
    pub fn views(&self) -> Views {
        self.views
    }

    fn new(catalog: &Catalog, spec: &MetricSpec, journal: &Arc<Journal>) -> Self {
        let (spec, views, journal) = (Arc::new(spec.clone()), catalog.views(spec), Arc::clone(journal));
        Self { spec, views, journal, members: RwLock::default() }
    }

    fn member(&self, labels: &[String], cell: Arc<Cell>) -> Arc<Series> {
        let logged = self.views.tslog && !self.spec.builtin.is_some_and(Builtin::is_unlogged);
        let line = || Arc::new(Line::new(&self.spec, labels, self.journal.hostname()));
        let log = logged.then(|| (Arc::clone(&self.journal), line()));
        Arc::new(Series { spec: Arc::clone(&self.spec), labels: labels.into(), cell, log })
    }

    /// Of the same metric under a new definition: its series go on if they mean the same.
    fn renewed(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec, &self.journal);
        let old = &self.spec;
        let same = (old.kind, &old.dimensions, &old.buckets, &old.quantiles, old.builtin, old.section)
            == (spec.kind, &spec.dimensions, &spec.buckets, &spec.quantiles, spec.builtin, spec.section);
        if same {
            let members = self.read();
            let members = members.iter().map(|(labels, old)| (labels.clone(), new.member(labels, old.cell.clone())));
            *new.write() = members.collect();
        }
        new
    }

    /// All series with their label values.
    pub(super) fn all(&self) -> Vec<Arc<Series>> {
        self.read().values().cloned().collect()
    }

    /// The series of these label values, made if there is room for it: `None` when the family has `most` already.
    pub(super) fn series(&self, labels: &[String], most: usize, clock: &Arc<CoarseClock>) -> Option<Arc<Series>> {
        if let Some(series) = self.read().get(labels) {
            return Some(Arc::clone(series));
        }
        let mut members = self.write();
        if members.len() >= most && !members.contains_key(labels) {
            return None;
        }
        let series =
            members.entry(labels.into()).or_insert_with(|| self.member(labels, Arc::new(Cell::new(&self.spec, clock))));
        Some(Arc::clone(series))
    }

    /// Removes the series that `gone` names.
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

    /// Label values from before labels were added.
    fn filled(&self, labels: &[String]) -> Box<[String]> {
        let missing = self.spec.dimensions.len().saturating_sub(labels.len());
        labels.iter().cloned().chain(std::iter::repeat_n(String::new(), missing)).collect()
    }

    /// The same metric with labels added at the end, which the series of now do not have.
    fn widened(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec, &self.journal);
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

/// All families of one definition.
#[derive(Debug)]
pub struct Registry {
    catalog: Catalog,
    /// By metric id.
    families: Vec<Arc<Family>>,
    journal: Arc<Journal>,
}

impl Registry {
    pub(super) fn new(catalog: Catalog, journal: Arc<Journal>) -> Self {
        let families = catalog.iter().map(|(_, spec)| Arc::new(Family::new(&catalog, spec, &journal))).collect();
        Self { catalog, families, journal }
    }

    /// The families of a new definition; what it has in common with this one goes on.
    pub(super) fn renewed(&self, catalog: Catalog) -> Self {
        let family = |spec: &MetricSpec| match self.family(&spec.name) {
            Some(old) => old.renewed(&catalog, spec),
            None => Family::new(&catalog, spec, &self.journal),
        };
        let families = catalog.iter().map(|(_, spec)| Arc::new(family(spec))).collect();
        Self { catalog, families, journal: Arc::clone(&self.journal) }
    }

    /// The same families and a new one, of a metric that is not there yet.
    pub(super) fn with_detected(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_metric(spec.clone());
        let new = Arc::new(Family::new(&catalog, &spec, &self.journal));
        let families = self.families.iter().cloned().chain([new]).collect();
        Self { catalog, families, journal: Arc::clone(&self.journal) }
    }

    /// The same families, one of them with labels added at the end: that of this definition.
    pub(super) fn with_labels(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_changed(spec.clone());
        let family = |old: &Arc<Family>| match old.spec.name == spec.name {
            true => Arc::new(old.widened(&catalog, &spec)),
            false => Arc::clone(old),
        };
        let families = self.families.iter().map(family).collect();
        Self { catalog, families, journal: Arc::clone(&self.journal) }
    }

    /// The metrics that are defined.
    pub fn catalog(&self) -> &Catalog {
        &self.catalog
    }

    /// Every family, in the catalog's order.
    pub(super) fn families(&self) -> &[Arc<Family>] {
        &self.families
    }

    pub(super) fn family(&self, name: &str) -> Option<&Arc<Family>> {
        let (id, _) = self.catalog.find(name)?;
        self.families.get(usize::try_from(id.0).ok()?)
    }
}
