//! The metrics that this process may record, and their labels.

use std::collections::HashMap;
use std::sync::Arc;

use pharos::metrics::cache::SampleError;
use pharos::metrics::catalog::{Kind, RECORDED_BY_WORKER, WorkerLabel};
use pharos::metrics::channel::{Definition, Described};
use pharos::metrics::label_schema::LabelSchema;
use pharos::metrics::text_lines::prometheus_name;
use pharos::metrics::unit::Conversion;
use pharos::metrics::worker_lines;
use pharos::metrics::worker_metrics::{WorkerMetric, WorkerMetrics};

use super::handles::Named;
use super::{MetricError, UndeclaredSample};

/// A metric, and the values of its dimensions in the order of [`Named::names`].
type Labelled = (Arc<Named>, Vec<String>);

/// The definitions of `metrics.yaml`, and the metrics that the model has added.
pub(super) struct Definitions {
    defined: Vec<WorkerMetric>,
    /// The positions in `defined`, by name.
    by_name: HashMap<String, usize>,
    auto_detect: bool,
    defaults: Defaults,
    /// By name and type, with the dimensions in the order of the model's values.
    added: HashMap<(String, Kind), Arc<Named>>,
    /// Metrics that the model itself has described, by name, one for each list of labels. They
    /// need no definition.
    own: HashMap<String, Vec<Arc<Named>>>,
    /// Metrics without a definition that samples have added, by name, one for each list of labels.
    detected: HashMap<String, Vec<Arc<Named>>>,
}

/// Values of dimensions that a model may omit.
struct Defaults {
    model: String,
    version: String,
    hostname: String,
}

impl Defaults {
    fn of(&self, dimension: &str) -> Option<&str> {
        Some(match WorkerLabel::of(dimension)? {
            WorkerLabel::Model => &self.model,
            WorkerLabel::Version => &self.version,
            WorkerLabel::Level => "Model",
            WorkerLabel::Host => &self.hostname,
        })
    }
}

impl Definitions {
    /// Creates definitions without metrics.
    pub(super) fn new(model: &str, version: u64, auto_detect: bool) -> Self {
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let defaults = Defaults { model: model.to_owned(), version: version.to_string(), hostname };
        Self {
            defined: Vec::new(),
            by_name: HashMap::new(),
            auto_detect,
            defaults,
            added: HashMap::new(),
            own: HashMap::new(),
            detected: HashMap::new(),
        }
    }

    /// Replaces the definition. Metrics that it omits or disables are no longer recorded. Metrics
    /// that it defines differently must be added again; until then the frontend refuses their
    /// samples and logs why.
    pub(super) fn redefine(&mut self, WorkerMetrics(defined): WorkerMetrics) {
        self.by_name = defined.iter().map(|metric| metric.name.clone()).zip(0..).collect();
        self.defined = defined;
        let mut added = std::mem::take(&mut self.added);
        added.retain(|(name, kind), named| match self.spec(name) {
            Some((spec, on)) => {
                named.switch(on);
                spec.kind == *kind
                    && spec.dimensions.len() == named.names().len()
                    && spec.dimensions.iter().all(|dimension| named.names().contains(dimension))
            }
            None => {
                named.switch(self.auto_detect || self.own.contains_key(name));
                true
            }
        });
        self.added = added;
        let mut detected = std::mem::take(&mut self.detected);
        detected.retain(|name, _| self.spec(name).is_none());
        self.detected = detected;
        for (name, all) in &self.own {
            let on = self.spec(name).is_none_or(|(_, on)| on);
            all.iter().for_each(|named| named.switch(on));
        }
    }

    /// Implements [`super::Metrics::add_metric`].
    pub(super) fn add(
        &mut self,
        name: &str,
        unit: &str,
        dimensions: &[&str],
        kind: Kind,
    ) -> Result<Arc<Named>, MetricError> {
        let given: Vec<String> =
            dimensions.iter().map(|dimension| (*dimension).to_owned()).collect();
        let named = match self.spec(name) {
            Some((spec, on)) => {
                check_kind(spec, kind)?;
                // The server converts samples to the unit of the definition.
                let is_same = Conversion::between(unit, &spec.unit) == Conversion::None;
                let unit = if is_same { spec.unit.as_str() } else { unit };
                self.named(spec, unit, given, on)?
            }
            None if self.auto_detect => self.undefined(name, unit, given, kind),
            None => {
                let labels =
                    given.into_iter().map(|dimension| (dimension, String::new())).collect();
                let definition = Definition {
                    name: name.to_owned(),
                    kind: Some(kind),
                    unit: unit.to_owned(),
                    labels,
                };
                return Err(SampleError::Undeclared(Box::new(definition)).into());
            }
        };
        let key = (name.to_owned(), kind);
        if let Some(known) = self
            .added
            .get(&key)
            .filter(|known| known.names() == named.names() && known.unit() == named.unit())
        {
            return Ok(Arc::clone(known));
        }
        let named = Arc::new(named);
        self.added.insert(key, Arc::clone(&named));
        Ok(named)
    }

    /// Implements [`super::Metrics::own_series`]; also returns whether the metric is new.
    pub(super) fn describe(
        &mut self,
        metric: &Described,
    ) -> Result<(Arc<Named>, bool), MetricError> {
        let Described { name, kind, dimensions, .. } = metric;
        if self.spec(name).is_some() {
            let dimensions: Vec<&str> = dimensions.iter().map(String::as_str).collect();
            return Ok((self.add(name, "", &dimensions, *kind)?, false));
        }
        if let Some(known) = self.added.keys().find(|(known, of)| known == name && of != kind) {
            let expected = known.1;
            let given = *kind;
            return Err(SampleError::WrongKind { metric: name.clone(), expected, given }.into());
        }
        let key = (name.clone(), *kind);
        let known = self.own.get(name).into_iter().flatten().chain(self.added.get(&key));
        if let Some(known) = known.into_iter().find(|known| known.names() == dimensions.as_slice())
        {
            return Ok((Arc::clone(known), false));
        }
        if let Some(detected) = self.added.get(&key).filter(|_| !self.own.contains_key(name)) {
            let expected = detected.names().to_vec();
            return Err(SampleError::WrongLabels {
                metric: name.clone(),
                expected,
                given: dimensions.clone(),
            }
            .into());
        }
        let none = vec![None; dimensions.len()];
        let count = dimensions.len();
        let own = Named::new(name.clone(), String::new(), *kind, dimensions.clone(), none, count);
        let own = Arc::new(own);
        self.added.entry(key).or_insert_with(|| Arc::clone(&own));
        self.own.entry(name.clone()).or_default().push(Arc::clone(&own));
        Ok((own, true))
    }

    /// Implements [`super::Metrics::record_undeclared`]; also returns the values of its dimensions
    /// in the order of [`Named::names`]. `None` if the definition disables the metric, or leaves
    /// out one that the server's own code in workers records.
    pub(super) fn undeclared(
        &mut self,
        sample: &UndeclaredSample<'_>,
    ) -> Result<Option<Labelled>, MetricError> {
        let name = prometheus_name(sample.name);
        let named = match self.spec(&name) {
            Some((_, false)) => return Ok(None),
            Some((spec, _)) => {
                let kind = spec.kind;
                self.get(&name, kind)?
            }
            None if RECORDED_BY_WORKER.contains(&&*name) => return Ok(None),
            None => self.detect(&name, sample)?,
        };
        let schema = LabelSchema::new(&name, named.names()).accepting_appended();
        let values = schema
            .align(sample.dimensions, |label| Some(self.defaults.of(label).unwrap_or_default()))?;
        let values = values.into_iter().map(str::to_owned).collect();
        Ok(Some((named, values)))
    }

    /// Returns the metric without a definition that has the labels of this sample, followed by
    /// `Hostname`. The first sample of a name determines its type.
    fn detect(
        &mut self,
        name: &str,
        sample: &UndeclaredSample<'_>,
    ) -> Result<Arc<Named>, MetricError> {
        let mut labels: Vec<String> = Vec::new();
        for (label, _) in sample.dimensions {
            let label = prometheus_name(label);
            if !labels.iter().any(|other| *other == label) {
                labels.push(label.into_owned());
            }
        }
        let added =
            self.added.iter().filter(|((known, _), _)| known == name).map(|(_, named)| named);
        let own = self.own.get(name).into_iter().flatten();
        let mut known =
            self.detected.get(name).into_iter().flatten().chain(added).chain(own).peekable();
        let kind = known.peek().map_or(sample.kind, |first| first.kind());
        if let Some(named) = known.find(|named| {
            let names = named.names();
            labels.iter().all(|label| names.contains(label))
                && names.iter().all(|name| {
                    labels.contains(name) || WorkerLabel::of(name) == Some(WorkerLabel::Host)
                })
        }) {
            return Ok(Arc::clone(named));
        }
        if !self.auto_detect {
            let labels = labels.into_iter().map(|label| (label, String::new())).collect();
            let name = name.to_owned();
            let unit = sample.unit.to_owned();
            return Err(SampleError::Undeclared(Box::new(Definition {
                name,
                kind: Some(kind),
                unit,
                labels,
            }))
            .into());
        }
        if !labels.iter().any(|label| label == "Hostname") {
            labels.push("Hostname".to_owned());
        }
        let named =
            Arc::new(self.undefined(name, worker_lines::unit_name(sample.unit), labels, kind));
        self.detected.entry(name.to_owned()).or_default().push(Arc::clone(&named));
        Ok(named)
    }

    /// Returns the model metrics of the definition.
    pub(super) fn of_models(&self) -> Vec<WorkerMetric> {
        self.defined
            .iter()
            .filter(|spec| spec.of_models && !spec.is_reserved && !spec.is_disabled)
            .cloned()
            .collect()
    }

    /// Implements [`super::Metrics::get_metric`].
    pub(super) fn get(&mut self, name: &str, kind: Kind) -> Result<Arc<Named>, MetricError> {
        if let Some(named) = self.added.get(&(name.to_owned(), kind)) {
            return Ok(Arc::clone(named));
        }
        let Some((spec, on)) = self.spec(name) else {
            return Err(MetricError::Unknown { name: name.to_owned(), kind });
        };
        check_kind(spec, kind)?;
        let mut given = spec.dimensions.clone();
        given.truncate(given.len().saturating_sub(usize::from(spec.host_is_added)));
        let named = Arc::new(self.named(spec, &spec.unit, given, on)?);
        self.added.insert((name.to_owned(), kind), Arc::clone(&named));
        Ok(named)
    }

    /// Returns the defined metric of this name, whatever its type.
    pub(super) fn find(&mut self, name: &str) -> Option<Arc<Named>> {
        let (spec, on) = self.spec(name)?;
        let kind = spec.kind;
        if on { self.get(name, kind).ok() } else { None }
    }

    /// Returns the metric's definition, and whether it is enabled.
    fn spec(&self, name: &str) -> Option<(&WorkerMetric, bool)> {
        let spec = self.defined.get(*self.by_name.get(name)?)?;
        Some((spec, !spec.is_disabled))
    }

    /// Returns a metric without a definition that has these dimensions.
    fn undefined(&self, name: &str, unit: &str, dimensions: Vec<String>, kind: Kind) -> Named {
        let defaults =
            dimensions.iter().map(|name| self.defaults.of(name).map(str::to_owned)).collect();
        let count = dimensions.len();
        Named::new(name.to_owned(), unit.to_owned(), kind, dimensions, defaults, count)
    }

    /// Returns a defined metric whose first dimensions the model provides as `given`; the others
    /// have defaults. `unit` is the unit of the model's values.
    fn named(
        &self,
        spec: &WorkerMetric,
        unit: &str,
        mut given: Vec<String>,
        on: bool,
    ) -> Result<Named, SampleError> {
        if spec.is_reserved {
            return Err(SampleError::Reserved(spec.name.clone()));
        }
        let missing: Vec<String> = spec
            .dimensions
            .iter()
            .filter(|dimension| !given.contains(dimension))
            .cloned()
            .collect();
        let twice = (1..given.len()).any(|at| given[..at].contains(&given[at]));
        if twice
            || given.iter().any(|dimension| !spec.dimensions.contains(dimension))
            || missing.iter().any(|dimension| self.defaults.of(dimension).is_none())
        {
            return Err(SampleError::WrongLabels {
                metric: spec.name.clone(),
                expected: spec.dimensions.clone(),
                given,
            });
        }
        let count = given.len();
        given.extend(missing);
        let defaults = given.iter().map(|name| self.defaults.of(name).map(str::to_owned)).collect();
        let named =
            Named::new(spec.name.clone(), unit.to_owned(), spec.kind, given, defaults, count);
        named.switch(on);
        Ok(named)
    }
}

fn check_kind(spec: &WorkerMetric, given: Kind) -> Result<(), SampleError> {
    if spec.kind == given {
        return Ok(());
    }
    Err(SampleError::WrongKind { metric: spec.name.clone(), expected: spec.kind, given })
}
