//! The metrics that this process may record, and their labels.

use std::collections::HashMap;
use std::sync::Arc;

use pharos::metrics::cache::SampleError;
use pharos::metrics::catalog::{Kind, WorkerLabel};
use pharos::metrics::channel::{Definition, Described};
use pharos::metrics::emitter::prometheus_name;
use pharos::metrics::worker_lines;
use pharos::metrics::worker_metrics::{WorkerMetric, WorkerMetrics};

use super::handles::Named;
use super::{MetricError, UndeclaredSample};

/// The definitions of `metrics.yaml`, and the metrics that the model has added.
pub(super) struct Definitions {
    defined: Vec<WorkerMetric>,
    /// The positions in `defined`, by name.
    by_name: HashMap<String, usize>,
    auto_detect: bool,
    defaults: Defaults,
    /// By name and type, with the dimensions in the order of the model's values.
    added: HashMap<(String, Kind), Arc<Named>>,
    /// Metrics that the model itself has described, by name, one for each list of labels. They need no definition.
    own: HashMap<String, Vec<Arc<Named>>>,
}

/// Dimensions that handlers append to each sample, whether or not the metric has them.
const APPENDED: [&str; 2] = ["ModelName", "Level"];

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
        }
    }

    /// Replaces the definition. Metrics that it omits or disables are no longer recorded. Metrics that it defines differently
    /// must be added again; until then the frontend refuses their samples and logs why.
    pub(super) fn redefine(&mut self, WorkerMetrics(defined): WorkerMetrics) {
        self.by_name = defined.iter().map(|metric| metric.name.clone()).zip(0..).collect();
        self.defined = defined;
        let mut added = std::mem::take(&mut self.added);
        added.retain(|(name, kind), named| match self.spec(name) {
            Some((spec, on)) => {
                named.switch(on);
                let same = |dimension: &String| named.names().contains(dimension);
                spec.kind == *kind && spec.dimensions.len() == named.names().len() && spec.dimensions.iter().all(same)
            }
            None => {
                named.switch(self.auto_detect || self.own.contains_key(name));
                true
            }
        });
        self.added = added;
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
        let given: Vec<String> = dimensions.iter().map(|dimension| (*dimension).to_owned()).collect();
        let named = match self.spec(name) {
            Some((spec, on)) => {
                check_kind(spec, kind)?;
                self.named(spec, given, on)?
            }
            None if self.auto_detect => {
                let defaults = given.iter().map(|name| self.defaults.of(name).map(str::to_owned)).collect();
                let definition = (name.to_owned(), unit.to_owned(), kind);
                Named::new(definition, given, defaults)
            }
            None => {
                let labels = given.into_iter().map(|dimension| (dimension, String::new())).collect();
                let definition = Definition { name: name.to_owned(), kind: Some(kind), unit: unit.to_owned(), labels };
                return Err(SampleError::Undeclared(Box::new(definition)).into());
            }
        };
        let key = (name.to_owned(), kind);
        if let Some(known) = self.added.get(&key).filter(|known| known.names() == named.names()) {
            return Ok(Arc::clone(known));
        }
        let named = Arc::new(named);
        self.added.insert(key, Arc::clone(&named));
        Ok(named)
    }

    /// Implements [`super::Metrics::own_series`]; also returns whether the metric is new.
    pub(super) fn describe(&mut self, metric: &Described) -> Result<(Arc<Named>, bool), MetricError> {
        let Described { name, kind, dimensions, .. } = metric;
        if self.spec(name).is_some() {
            let dimensions: Vec<&str> = dimensions.iter().map(String::as_str).collect();
            return Ok((self.add(name, "", &dimensions, *kind)?, false));
        }
        if let Some(known) = self.added.keys().find(|(known, of)| known == name && of != kind) {
            let (expected, given) = (known.1, *kind);
            return Err(SampleError::WrongKind { metric: name.clone(), expected, given }.into());
        }
        let key = (name.clone(), *kind);
        let known = self.own.get(name).into_iter().flatten().chain(self.added.get(&key));
        if let Some(known) = known.into_iter().find(|known| known.names() == dimensions.as_slice()) {
            return Ok((Arc::clone(known), false));
        }
        if let Some(detected) = self.added.get(&key).filter(|_| !self.own.contains_key(name)) {
            let (metric, expected) = (name.clone(), detected.names().to_vec());
            return Err(SampleError::WrongLabels { metric, expected, given: dimensions.clone() }.into());
        }
        let none = vec![None; dimensions.len()];
        let own = Named::new((name.clone(), String::new(), *kind), dimensions.clone(), none);
        let own = Arc::new(own);
        self.added.entry(key).or_insert_with(|| Arc::clone(&own));
        self.own.entry(name.clone()).or_default().push(Arc::clone(&own));
        Ok((own, true))
    }

    /// Implements [`super::Metrics::record_undeclared`]; also returns the values of its dimensions in the order of
    /// [`Named::names`].
    pub(super) fn undeclared(
        &mut self,
        sample: &UndeclaredSample<'_>,
    ) -> Result<(Arc<Named>, Vec<String>), MetricError> {
        let name = prometheus_name(sample.name);
        let (named, declared) = match self.spec(&name).map(|(spec, _)| (spec.kind, spec.dimensions.clone())) {
            Some((kind, declared)) => (self.get(&name, kind)?, declared),
            None => {
                let named = match self.added.iter().find(|((known, _), _)| *known == *name) {
                    Some((_, known)) => Arc::clone(known),
                    None => self.detect(&name, sample)?,
                };
                let declared = named.names().to_vec();
                (named, declared)
            }
        };
        let Some(values) = self.by_name(sample, &declared).or_else(|| self.by_position(sample, &declared)) else {
            let given = sample.dimensions.iter().map(|(name, _)| (*name).to_owned()).collect();
            return Err(SampleError::WrongLabels { metric: name.into_owned(), expected: declared, given }.into());
        };
        let of = |name: &String| declared.iter().position(|other| other == name).and_then(|at| values.get(at));
        let values = named.names().iter().map(|name| of(name).map_or_else(String::new, |value| (*value).to_owned()));
        let values = values.collect();
        Ok((named, values))
    }

    /// Returns the values of the declared dimensions if the sample has each one that the worker cannot fill in, and no others
    /// except those that handlers append to all samples.
    fn by_name<'a>(&'a self, sample: &UndeclaredSample<'a>, declared: &[String]) -> Option<Vec<&'a str>> {
        let given = |name: &str| sample.dimensions.iter().find(|(other, _)| *other == name).map(|(_, value)| *value);
        let known = |name: &str| declared.iter().any(|other| other == name) || APPENDED.contains(&name);
        if !sample.dimensions.iter().all(|(name, _)| known(name)) {
            return None;
        }
        declared.iter().map(|name| given(name).or_else(|| self.defaults.of(name))).collect()
    }

    /// Matches dimensions by position, as in the metric lines of handlers; see [`legacy`].
    fn by_position<'a>(&'a self, sample: &UndeclaredSample<'a>, declared: &[String]) -> Option<Vec<&'a str>> {
        let (name, unit, request_ids) = (sample.name, sample.unit, "");
        let (dimensions, hostname) = (sample.dimensions.to_vec(), Some(self.defaults.hostname.as_str()));
        let line = worker_lines::Line { name, unit, value: 0.0, dimensions, kind: None, hostname, request_ids };
        worker_lines::align(&line, declared, &self.defaults.hostname)
    }

    /// Adds a metric without a definition, with the dimensions of its first sample followed by `Hostname`.
    fn detect(&mut self, name: &str, sample: &UndeclaredSample<'_>) -> Result<Arc<Named>, MetricError> {
        let mut names: Vec<String> =
            sample.dimensions.iter().map(|(name, _)| prometheus_name(name).into_owned()).collect();
        if !names.iter().any(|name| name == "Hostname") {
            names.push("Hostname".to_owned());
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.add(name, worker_lines::unit_name(sample.unit), &names, sample.kind)
    }

    /// Returns the model metrics of the definition.
    pub(super) fn of_models(&self) -> Vec<WorkerMetric> {
        let may_record = |spec: &&WorkerMetric| spec.of_models && !spec.is_reserved && !spec.is_disabled;
        self.defined.iter().filter(may_record).cloned().collect()
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
        let named = Arc::new(self.named(spec, spec.dimensions.clone(), on)?);
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

    /// Returns a defined metric whose first dimensions the model provides as `given`; the others have defaults.
    fn named(&self, spec: &WorkerMetric, mut given: Vec<String>, on: bool) -> Result<Named, SampleError> {
        if spec.is_reserved {
            return Err(SampleError::Reserved(spec.name.clone()));
        }
        let missing = spec.dimensions.iter().filter(|dimension| !given.contains(dimension));
        let missing: Vec<String> = missing.cloned().collect();
        let twice = (1..given.len()).any(|at| given[..at].contains(&given[at]));
        if twice
            || given.iter().any(|dimension| !spec.dimensions.contains(dimension))
            || missing.iter().any(|dimension| self.defaults.of(dimension).is_none())
        {
            let (metric, expected) = (spec.name.clone(), spec.dimensions.clone());
            return Err(SampleError::WrongLabels { metric, expected, given });
        }
        given.extend(missing);
        let defaults = given.iter().map(|name| self.defaults.of(name).map(str::to_owned)).collect();
        let definition = (spec.name.clone(), spec.unit.clone(), spec.kind);
        let named = Named::new(definition, given, defaults);
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
