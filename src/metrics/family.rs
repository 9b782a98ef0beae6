//! Families of series by label values, and all families of one definition of the metrics.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::cache::SampleError;
use super::catalog::{Catalog, MetricSpec, Views};
use super::cell::{Cell, Reading};
use super::summary::CoarseClock;

/// One series: a metric with label values, and its value. Keep the handle for many samples.
#[derive(Debug)]
pub struct Series {
    spec: Arc<MetricSpec>,
    labels: Box<[String]>,
    pub(super) cell: Arc<Cell>,
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
        self.cell.add_or_update(value)
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
            Reading::Number(value) => value,
            Reading::Histogram(_, buckets) => buckets.iter().map(|(_, count)| *count).sum::<u64>() as f64,
            Reading::Summary(_, count, _) => count as f64,
        }
    }
}

/// Series by label values, in the order in which they are shown.
type Members = BTreeMap<Box<[String]>, Arc<Series>>;

/// One metric's series.
#[derive(Debug)]
pub(super) struct Family {
    pub(super) spec: Arc<MetricSpec>,
    pub(super) views: Views,
    /// Written when a series is first seen or removed.
    members: RwLock<Members>,
}

impl Family {
    fn new(catalog: &Catalog, spec: &MetricSpec) -> Self {
        Self { spec: Arc::new(spec.clone()), views: catalog.views(spec), members: RwLock::default() }
    }

    /// Of the same metric under a new definition: its series go on if they mean the same.
    fn renewed(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec);
        let old = &self.spec;
        let same = (old.kind, &old.dimensions, &old.buckets, &old.quantiles, old.builtin, old.section)
            == (spec.kind, &spec.dimensions, &spec.buckets, &spec.quantiles, spec.builtin, spec.section);
        if same {
            let members = self.read();
            let members = members.iter().map(|(labels, series)| {
                let (spec, cell) = (Arc::clone(&new.spec), Arc::clone(&series.cell));
                (labels.clone(), Arc::new(Series { spec, labels: labels.clone(), cell }))
            });
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
        let series = members.entry(labels.into()).or_insert_with(|| {
            let cell = Arc::new(Cell::new(&self.spec, clock));
            Arc::new(Series { spec: Arc::clone(&self.spec), labels: labels.into(), cell })
        });
        Some(Arc::clone(series))
    }

    /// Removes the series that `gone` names.
    pub(super) fn remove(&self, mut gone: impl FnMut(&Series) -> bool) {
        self.write().retain(|_, series| !gone(series));
    }

    /// Removes the series of these label values if it has this cell.
    pub(super) fn remove_one(&self, labels: &[String], cell: &Arc<Cell>) {
        let mut members = self.write();
        if members.get(labels).is_some_and(|series| Arc::ptr_eq(&series.cell, cell)) {
            members.remove(labels);
        }
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
}

impl Registry {
    pub(super) fn new(catalog: Catalog) -> Self {
        let families = catalog.iter().map(|(_, spec)| Arc::new(Family::new(&catalog, spec))).collect();
        Self { catalog, families }
    }

    /// The families of a new definition; what it has in common with this one goes on.
    pub(super) fn renewed(&self, catalog: Catalog) -> Self {
        let family = |spec: &MetricSpec| match self.family(&spec.name) {
            Some(old) => old.renewed(&catalog, spec),
            None => Family::new(&catalog, spec),
        };
        let families = catalog.iter().map(|(_, spec)| Arc::new(family(spec))).collect();
        Self { catalog, families }
    }

    /// The same families and a new one, of a metric that is not there yet.
    pub(super) fn with_detected(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_detected(spec.clone());
        let new = Arc::new(Family::new(&catalog, &spec));
        let families = self.families.iter().cloned().chain([new]).collect();
        Self { catalog, families }
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
