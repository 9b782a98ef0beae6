//! Families of series by label values, and the registry of all families of one definition.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use super::builtin::Builtin;
use super::catalog::{Catalog, Kind, MetricSpec, Views};
use super::cell::Cell;
use super::journal::{Journal, Line};
use super::label_schema::LabelSchema;
use super::reading::{Details, Reading};
use super::sample_error::SampleError;
use super::summary::CoarseClock;
use super::transaction::Transactions;

/// One series: a metric with label values, and its value. Keep the handle if you record many
/// samples.
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

    /// Records one sample that was caused by a request or a batch. Metric logs show the request
    /// ids, joined with [`push_request_id`](super::tslog::push_request_id).
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

    /// Records one sample like [`Series::add_or_update`], without a log line. For values that are
    /// measured more often than they are logged.
    ///
    /// # Errors
    /// Returns the errors of [`Cell::add_or_update`].
    pub fn add_or_update_unlogged(&self, value: f64) -> Result<(), SampleError> {
        self.cell.add_or_update(value)
    }

    /// Returns the current value of a counter or gauge, or the number of observations of the other
    /// types.
    pub fn value(&self) -> f64 {
        match self.cell.read(Details::default()) {
            Reading::Number(value) => value.as_f64(),
            Reading::Histogram(histogram) => histogram.count() as f64,
            Reading::Summary(summary) => summary.count as f64,
        }
    }
}

/// The series of a family.
#[derive(Debug, Default)]
struct Members {
    /// By label values, in the order in which views show them.
    by_labels: BTreeMap<Box<[String]>, Arc<Series>>,
    /// Whether another family has taken over the series, or the metric is removed. No series is
    /// created any more.
    has_ended: bool,
}

/// The result of a look-up that may create a series.
pub(super) enum Found {
    /// The series.
    Series(Arc<Series>),
    /// The series would exceed the limit.
    Full,
    /// The family has ended: it must be looked up again.
    Ended,
}

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

    fn new(
        catalog: &Catalog,
        spec: &MetricSpec,
        journal: &Arc<Journal>,
        transactions: &Arc<Transactions>,
    ) -> Self {
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
        let log = logged.then(|| {
            (
                Arc::clone(&self.journal),
                Arc::new(Line::new(&self.spec, labels, self.journal.hostname())),
            )
        });
        Arc::new(Series { spec: Arc::clone(&self.spec), labels: labels.into(), cell, log })
    }

    /// Creates the family of the same metric under a new definition. Keeps the series if the
    /// definitions are compatible.
    fn renewed(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec, &self.journal, &self.transactions);
        let old = &self.spec;
        let same =
            (old.kind, &old.dimensions, &old.buckets, &old.quantiles, old.builtin, old.section)
                == (
                    spec.kind,
                    &spec.dimensions,
                    &spec.buckets,
                    &spec.quantiles,
                    spec.builtin,
                    spec.section,
                );
        // Sums of values in two units of time would be of no unit. Another name of other units
        // changes no value.
        let times = old.time_unit().zip(spec.time_unit());
        if same && old.native == spec.native && times.is_none_or(|(old, new)| old == new) {
            new.take_over(self);
        }
        self.end();
        new
    }

    /// Shares the cells of an earlier family of the metric, which ends.
    fn take_over(&self, earlier: &Self) {
        let mut members = earlier.members.write();
        members.has_ended = true;
        let renewed = members.by_labels.iter().map(|(labels, old)| {
            let labels = self.labels_of(&earlier.spec, labels);
            let series = self.member(&labels, old.cell.clone());
            (labels, series)
        });
        self.members.write().by_labels = renewed.collect();
    }

    fn end(&self) {
        self.members.write().has_ended = true;
    }

    /// Ends the family if it has no series. Returns whether it has ended.
    fn end_if_empty(&self) -> bool {
        let mut members = self.members.write();
        members.has_ended |= members.by_labels.is_empty();
        members.has_ended
    }

    /// Returns whether it has no series.
    pub(super) fn is_empty(&self) -> bool {
        self.members.read().by_labels.is_empty()
    }

    /// Returns all series.
    pub(super) fn all(&self) -> Vec<Arc<Series>> {
        self.members.read().by_labels.values().cloned().collect()
    }

    /// Returns the series of these label values, if it exists.
    pub(super) fn get(&self, labels: &[String]) -> Option<Arc<Series>> {
        self.members.read().by_labels.get(labels).cloned()
    }

    /// Returns the series of these label values and creates it if it is new, unless that would
    /// exceed `most` series.
    pub(super) fn series(&self, labels: &[String], most: usize, clock: &Arc<CoarseClock>) -> Found {
        if let Some(series) = self.get(labels) {
            return Found::Series(series);
        }
        let mut members = self.members.write();
        if members.has_ended {
            return Found::Ended;
        }
        if members.by_labels.len() >= most && !members.by_labels.contains_key(labels) {
            return Found::Full;
        }
        Found::Series(Arc::clone(members.by_labels.entry(labels.into()).or_insert_with(|| {
            self.member(
                labels,
                Arc::new(Cell::new(&self.spec, clock, Arc::clone(&self.transactions))),
            )
        })))
    }

    /// Removes the series for which `gone` returns true.
    pub(super) fn remove(&self, mut gone: impl FnMut(&Series) -> bool) {
        self.members.write().by_labels.retain(|_, series| !gone(series));
    }

    /// Removes a series, which may be a handle from before labels were added. Returns `false` if
    /// the family has ended: it must be looked up again.
    pub(super) fn remove_one(&self, series: &Series) -> bool {
        let labels = self.labels_of(&series.spec, &series.labels);
        let mut members = self.members.write();
        if members.has_ended {
            return false;
        }
        if members
            .by_labels
            .get(&labels)
            .is_some_and(|member| Arc::ptr_eq(&member.cell, &series.cell))
        {
            members.by_labels.remove(&labels);
        }
        true
    }

    /// Returns the values of a series from before labels were added: empty for the new labels.
    fn labels_of(&self, earlier: &MetricSpec, values: &[String]) -> Box<[String]> {
        let schema = LabelSchema::new(&self.spec.name, &self.spec.dimensions);
        schema
            .reorder(&earlier.dimensions, values)
            .map(|value| value.unwrap_or_default().to_owned())
            .collect()
    }

    /// Creates the family of the same metric with further labels. The existing series have no
    /// values for them.
    fn widened(&self, catalog: &Catalog, spec: &MetricSpec) -> Self {
        let new = Self::new(catalog, spec, &self.journal, &self.transactions);
        new.take_over(self);
        new
    }
}

/// All families of one definition of the metrics.
#[derive(Debug)]
pub struct Registry {
    catalog: Catalog,
    /// Indexed by metric id.
    families: Vec<Arc<Family>>,
    /// Detected metrics with the name of another detected metric and a different type. Only metric
    /// logs show them: a scrape has one type for each name, and lines have none.
    namesakes: Vec<Arc<Family>>,
    journal: Arc<Journal>,
    transactions: Arc<Transactions>,
}

impl Registry {
    pub(super) fn new(
        catalog: Catalog,
        journal: Arc<Journal>,
        transactions: Arc<Transactions>,
    ) -> Self {
        let families = catalog
            .iter()
            .map(|(_, spec)| Arc::new(Family::new(&catalog, spec, &journal, &transactions)))
            .collect();
        Self { catalog, families, namesakes: Vec::new(), journal, transactions }
    }

    /// Creates a registry with other families.
    fn changed(
        &self,
        catalog: Catalog,
        families: Vec<Arc<Family>>,
        namesakes: Vec<Arc<Family>>,
    ) -> Self {
        Self {
            catalog,
            families,
            namesakes,
            journal: Arc::clone(&self.journal),
            transactions: Arc::clone(&self.transactions),
        }
    }

    /// Creates the families of a new definition. Keeps the series of metrics that are compatible in
    /// both. Namesakes end: their next samples create them again.
    pub(super) fn renewed(&self, catalog: Catalog) -> Self {
        let families: Vec<_> = catalog
            .iter()
            .map(|(_, spec)| {
                Arc::new(match self.family(&spec.name) {
                    Some(old) => old.renewed(&catalog, spec),
                    None => Family::new(&catalog, spec, &self.journal, &self.transactions),
                })
            })
            .collect();
        // The families of removed metrics end as well.
        self.families.iter().chain(&self.namesakes).for_each(|old| old.end());
        self.changed(catalog, families, Vec::new())
    }

    /// Creates a registry with an additional family, of a metric whose name is not in this one.
    pub(super) fn with_detected(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_metric(spec.clone());
        let new = Arc::new(Family::new(&catalog, &spec, &self.journal, &self.transactions));
        let families = self.families.iter().cloned().chain([new]).collect();
        self.changed(catalog, families, self.namesakes.clone())
    }

    /// Creates a registry with an additional family, of a metric whose name is in this one with
    /// another type.
    pub(super) fn with_namesake(&self, spec: &MetricSpec) -> Self {
        let new = Arc::new(Family::new(&self.catalog, spec, &self.journal, &self.transactions));
        let namesakes = self.namesakes.iter().cloned().chain([new]).collect();
        self.changed(self.catalog.clone(), self.families.clone(), namesakes)
    }

    /// Creates a registry without this detected metric; `None` if it has series. A metric of the
    /// same name and a different type takes its place.
    pub(super) fn without_detected(&self, name: &str, kind: Kind) -> Option<Self> {
        let is_it = |family: &Arc<Family>| family.spec.name == name && family.spec.kind == kind;
        let mut namesakes = self.namesakes.clone();
        if let Some(at) = namesakes.iter().position(is_it) {
            let ended = namesakes.remove(at).end_if_empty();
            return ended
                .then(|| self.changed(self.catalog.clone(), self.families.clone(), namesakes));
        }
        let found = self.families.iter().find(|family| is_it(family) && family.spec.detected)?;
        if !found.end_if_empty() {
            return None;
        }
        let mut catalog = self.catalog.clone().without(name);
        let mut families: Vec<_> =
            self.families.iter().filter(|family| !is_it(family)).cloned().collect();
        if let Some(at) = namesakes.iter().position(|family| family.spec.name == name) {
            let successor = namesakes.remove(at);
            catalog = catalog.with_metric(MetricSpec::clone(&successor.spec));
            families.push(successor);
        }
        Some(self.changed(catalog, families, namesakes))
    }

    /// Creates a registry in which the family of this metric has the labels of `spec`, which has
    /// further ones.
    pub(super) fn with_labels(&self, spec: MetricSpec) -> Self {
        let catalog = self.catalog.clone().with_changed(spec.clone());
        let family =
            |old: &Arc<Family>| match old.spec.name == spec.name && old.spec.kind == spec.kind {
                true => Arc::new(old.widened(&catalog, &spec)),
                false => Arc::clone(old),
            };
        let families = self.families.iter().map(family).collect();
        let namesakes = self.namesakes.iter().map(family).collect();
        self.changed(catalog, families, namesakes)
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

    /// Returns the family of this name and type, or else the one of this name.
    pub(super) fn family_of(&self, name: &str, kind: Option<Kind>) -> Option<&Arc<Family>> {
        let of_name = self.family(name);
        match kind {
            Some(kind) if of_name.is_some_and(|family| family.spec.kind != kind) => self
                .namesakes
                .iter()
                .find(|family| family.spec.name == name && family.spec.kind == kind)
                .or(of_name),
            _ => of_name,
        }
    }

    /// Returns the number of metrics that no file defines.
    pub(super) fn detected(&self) -> usize {
        self.catalog.iter().filter(|(_, spec)| spec.detected).count() + self.namesakes.len()
    }
}
