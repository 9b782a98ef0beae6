//! Distributions of the durations of a model's requests, by stage.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};
use pharos_base::id::TraceId;
use pharos_base::timeline::Timeline;

use super::atomic::Count;
use super::builtin::Builtin;
use super::catalog::MetricSpec;
use super::family::Registry;
use super::native::Native;
use super::reading::{Details, Exemplar, Histogram};
use super::source::{Lookup, ModelValue, Stage};
use super::summary::{CoarseClock, Summary};
use super::unit::TimeUnit;

/// Returns the nanoseconds that a request spent in each stage, in the order of [`Stage::ALL`].
fn stage_durations_ns(timeline: &Timeline) -> [u64; Stage::ALL.len()] {
    let (input, infer, output) = timeline.compute.durations_ns();
    [timeline.request_ns(), timeline.queue_ns(), input, infer, output]
}

/// A histogram of durations, or of numbers.
#[derive(Debug)]
pub(super) struct Buckets {
    /// The unit of the bounds, the sum and the exemplars.
    unit: TimeUnit,
    /// Upper bounds in the metric's unit.
    bounds: Arc<[f64]>,
    /// For each bound, the shortest duration above it in nanoseconds, ascending.
    durations_above: Arc<[u64]>,
    /// One more than bounds, for the observations above the last bound.
    counts: Vec<Count>,
    /// The sum of the observations in nanoseconds.
    sum_ns: Count,
    native: Option<Native>,
    /// The latest exemplar of each bucket. Only traced requests write it.
    exemplars: Mutex<BTreeMap<usize, Exemplar>>,
}

impl Buckets {
    /// Creates the buckets of a metric in this unit; `own` are the model's upper bounds, by metric
    /// name.
    pub(super) fn new(own: &[(String, Vec<f64>)], spec: &MetricSpec, unit: TimeUnit) -> Self {
        let bounds = own_or_defined(own, spec);
        Self {
            unit,
            bounds: bounds.into(),
            durations_above: bounds.iter().map(|&bound| unit.shortest_above(bound)).collect(),
            counts: std::iter::repeat_with(Count::default).take(bounds.len() + 1).collect(),
            sum_ns: Count::default(),
            native: spec.native.map(Native::new),
            exemplars: Mutex::default(),
        }
    }

    /// Returns the values of this moment, with the requested details.
    fn copy(&self, details: Details) -> Self {
        Self {
            unit: self.unit,
            bounds: Arc::clone(&self.bounds),
            durations_above: Arc::clone(&self.durations_above),
            counts: self.counts.clone(),
            sum_ns: self.sum_ns.clone(),
            native: self.native.as_ref().filter(|_| details.native).cloned(),
            exemplars: Mutex::new(if details.exemplars {
                self.exemplars().clone()
            } else {
                BTreeMap::new()
            }),
        }
    }

    /// Returns the position of the bucket of a duration.
    fn at(&self, ns: u64) -> usize {
        self.durations_above.partition_point(|&above| above <= ns)
    }

    pub(super) fn observe(&self, ns: u64) {
        self.observe_times(ns, 1);
    }

    /// Records an observation that was made `times` times.
    pub(super) fn observe_times(&self, ns: u64, times: u64) {
        if times == 0 {
            return;
        }
        if let Some(count) = self.counts.get(self.at(ns)) {
            count.add(times);
        }
        if let Some(native) = &self.native {
            native.observe(self.unit.of_ns(ns), times);
        }
        self.sum_ns.add(ns.saturating_mul(times));
    }

    /// Returns the distribution with the requested details.
    pub(super) fn read(&self, details: Details) -> Histogram {
        let sum = self.unit.of_ns(self.sum_ns.get());
        let native = self.native.as_ref().filter(|_| details.native).map(Native::read);
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets = bounds.zip(self.counts.iter().map(Count::get)).collect();
        let exemplars = if details.exemplars { self.exemplars().clone() } else { BTreeMap::new() };
        Histogram { sum, buckets, negative: false, exemplars, native }
    }

    fn exemplars(&self) -> MutexGuard<'_, BTreeMap<usize, Exemplar>> {
        self.exemplars.lock()
    }
}

/// Returns the values of this moment of a distribution, if its metric is enabled.
pub(super) fn copy_of(distribution: &OnceLock<Buckets>, details: Details) -> OnceLock<Buckets> {
    distribution.get().map_or_else(OnceLock::new, |buckets| OnceLock::from(buckets.copy(details)))
}

/// Quantiles of durations.
#[derive(Clone, Debug)]
struct Quantiles {
    unit: TimeUnit,
    summary: Summary,
}

impl Quantiles {
    fn observe(&self, ns: u64) {
        self.summary.observe(self.unit.of_ns(ns));
    }
}

/// The distributions of one model. Each is created when a definition first enables its metric, with
/// the buckets or quantiles of that definition; later definitions do not change them.
#[derive(Debug, Default)]
pub(super) struct Durations {
    histograms: [OnceLock<Buckets>; Stage::ALL.len()],
    summaries: [OnceLock<Quantiles>; Stage::ALL.len()],
    /// Of models that use the response cache.
    cache_hits: OnceLock<Quantiles>,
    cache_misses: OnceLock<Quantiles>,
    /// Of decoupled models.
    first_response: OnceLock<Buckets>,
}

impl Durations {
    /// Returns the values of this moment, with the requested details.
    pub(super) fn copy(&self, details: Details) -> Self {
        Self {
            histograms: std::array::from_fn(|stage| copy_of(&self.histograms[stage], details)),
            summaries: self.summaries.clone(),
            cache_hits: self.cache_hits.clone(),
            cache_misses: self.cache_misses.clone(),
            first_response: copy_of(&self.first_response, details),
        }
    }

    /// Creates the distributions that are defined and missing. `buckets` are the model's own, by
    /// metric name.
    pub(super) fn define(
        &self,
        registry: &Registry,
        clock: &Arc<CoarseClock>,
        buckets: &[(String, Vec<f64>)],
    ) {
        for (stage, slot) in Stage::ALL.into_iter().zip(&self.histograms) {
            if let Some((spec, unit)) = definition(registry, ModelValue::Durations(stage)) {
                slot.get_or_init(|| Buckets::new(buckets, &spec, unit));
            }
        }
        for (stage, slot) in Stage::ALL.into_iter().zip(&self.summaries) {
            if let Some((spec, unit)) = definition(registry, ModelValue::Quantiles(stage)) {
                slot.get_or_init(|| Quantiles {
                    unit,
                    summary: Summary::new(&spec.quantiles, clock),
                });
            }
        }
    }

    /// Creates the distributions of the response cache.
    pub(super) fn define_cache(&self, registry: &Registry, clock: &Arc<CoarseClock>) {
        for (lookup, slot) in [(Lookup::Hit, &self.cache_hits), (Lookup::Miss, &self.cache_misses)]
        {
            if let Some((spec, unit)) = definition(registry, ModelValue::CacheQuantiles(lookup)) {
                slot.get_or_init(|| Quantiles {
                    unit,
                    summary: Summary::new(&spec.quantiles, clock),
                });
            }
        }
    }

    /// Creates the distribution of the time to the first response.
    pub(super) fn define_first_response(
        &self,
        registry: &Registry,
        buckets: &[(String, Vec<f64>)],
    ) {
        if let Some((spec, unit)) = definition(registry, ModelValue::FirstResponse) {
            self.first_response.get_or_init(|| Buckets::new(buckets, &spec, unit));
        }
    }

    /// Records the time to the first response of a request.
    pub(super) fn observe_first_response(&self, ns: u64) {
        if let Some(histogram) = self.first_response.get() {
            histogram.observe(ns);
        }
    }

    pub(super) fn first_response(&self) -> Option<&Buckets> {
        self.first_response.get()
    }

    /// Records one successful request.
    pub(super) fn observe(&self, timeline: &Timeline) {
        self.observe_stages(&Stage::ALL, timeline);
    }

    /// Records a request that the response cache answered; the look-up took `lookup_ns`.
    pub(super) fn observe_hit(&self, timeline: &Timeline, lookup_ns: u64) {
        self.observe_stages(&Stage::OF_HITS, timeline);
        if let Some(quantiles) = self.cache_hits.get() {
            quantiles.observe(lookup_ns);
        }
    }

    /// Records the cost of a cache miss, in addition to the request.
    pub(super) fn observe_miss(&self, cache_ns: u64) {
        if let Some(quantiles) = self.cache_misses.get() {
            quantiles.observe(cache_ns);
        }
    }

    /// Records one execution of a request that will be executed again.
    pub(super) fn observe_execution(&self, timeline: &Timeline) {
        self.observe_stages(&Stage::OF_EXECUTIONS, timeline);
    }

    fn observe_stages(&self, stages: &[Stage], timeline: &Timeline) {
        let durations_ns = stage_durations_ns(timeline);
        for stage in stages {
            let ns = durations_ns[*stage as usize];
            if let Some(histogram) = self.histogram(*stage) {
                histogram.observe(ns);
            }
            if let Some(quantiles) = self.summaries[*stage as usize].get() {
                quantiles.summary.clock().set(timeline.request_end.max(timeline.compute.end));
                quantiles.observe(ns);
            }
        }
    }

    /// Adds exemplars that refer to the trace of a request.
    pub(super) fn exemplify(&self, timeline: &Timeline, trace: TraceId, at_ms: u64) {
        let executed = timeline.compute.start < timeline.compute.end;
        let durations_ns = stage_durations_ns(timeline);
        for stage in if executed { &Stage::ALL[..] } else { &Stage::OF_HITS } {
            let Some(histogram) = self.histogram(*stage) else { continue };
            let ns = durations_ns[*stage as usize];
            let exemplar = Exemplar { trace, value: histogram.unit.of_ns(ns), at_ms };
            histogram.exemplars().insert(histogram.at(ns), exemplar);
        }
    }

    pub(super) fn histogram(&self, stage: Stage) -> Option<&Buckets> {
        self.histograms.get(stage as usize)?.get()
    }

    pub(super) fn cache_summary(&self, lookup: Lookup) -> Option<&Summary> {
        let quantiles = match lookup {
            Lookup::Hit => &self.cache_hits,
            Lookup::Miss => &self.cache_misses,
        };
        quantiles.get().map(|quantiles| &quantiles.summary)
    }

    pub(super) fn summary(&self, stage: Stage) -> Option<&Summary> {
        self.summaries.get(stage as usize)?.get().map(|quantiles| &quantiles.summary)
    }
}

/// Returns the definition of the metric that shows these durations or numbers of models, and its
/// unit. Numbers without a unit of time keep their value, as nanoseconds do.
pub(super) fn definition(
    registry: &Registry,
    value: ModelValue,
) -> Option<(Arc<MetricSpec>, TimeUnit)> {
    let builtin = Builtin::showing(value)?;
    let family = registry.family(builtin.name())?;
    Some((Arc::clone(&family.spec), builtin.unit().unwrap_or(TimeUnit::Nanoseconds)))
}

/// Returns the buckets of a histogram: the model's own if it has some, else the buckets of the
/// definition.
pub(super) fn own_or_defined<'a>(own: &'a [(String, Vec<f64>)], spec: &'a MetricSpec) -> &'a [f64] {
    own.iter().find(|(name, _)| *name == spec.name).map_or(&spec.buckets, |(_, bounds)| bounds)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::catalog::Catalog;

    #[test]
    fn no_duration_is_below_a_negative_bound() {
        let name = Builtin::showing(ModelValue::Durations(Stage::Request)).unwrap().name();
        let text = format!(
            "ts_metrics:\n  histogram:\n    - {{name: {name}, unit: Seconds, dimensions: [model, \
             version], buckets: [-2, -1, 0, 0.5]}}\n"
        );
        let catalog = Catalog::parse(&text, "m.yaml").unwrap();
        let buckets = Buckets::new(&[], catalog.find(name).unwrap().1, TimeUnit::Seconds);
        [0, 1, 500_000_000, 500_000_001].into_iter().for_each(|ns| buckets.observe(ns));
        let counts: Vec<u64> =
            buckets.read(Details::default()).buckets.iter().map(|(_, count)| *count).collect();
        assert_eq!(counts, [0, 0, 1, 2, 1]);
    }
}
