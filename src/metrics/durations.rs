//! Where the time of a model's requests goes, as distributions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::builtin::Builtin;
use super::family::Registry;
use super::series::{Count, ModelSeries};
use super::summary::{CoarseClock, Summary};
use crate::id::TraceId;
use crate::timeline::Timeline;

/// A part of a request's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Request,
    Queue,
    ComputeInput,
    ComputeInfer,
    ComputeOutput,
}

impl Stage {
    pub(super) const ALL: [Stage; 5] =
        [Self::Request, Self::Queue, Self::ComputeInput, Self::ComputeInfer, Self::ComputeOutput];

    /// Those of a request that is answered without being executed.
    const OF_HITS: [Stage; 2] = [Self::Request, Self::Queue];

    pub(super) fn histogram(self) -> Builtin {
        match self {
            Self::Request => Builtin::RequestHistogram,
            Self::Queue => Builtin::QueueHistogram,
            Self::ComputeInput => Builtin::ComputeInputHistogram,
            Self::ComputeInfer => Builtin::ComputeInferHistogram,
            Self::ComputeOutput => Builtin::ComputeOutputHistogram,
        }
    }

    pub(super) fn summary(self) -> Builtin {
        match self {
            Self::Request => Builtin::RequestSummary,
            Self::Queue => Builtin::QueueSummary,
            Self::ComputeInput => Builtin::ComputeInputSummary,
            Self::ComputeInfer => Builtin::ComputeInferSummary,
            Self::ComputeOutput => Builtin::ComputeOutputSummary,
        }
    }

    /// The nanoseconds of all successful requests in this part.
    pub(super) fn sum_ns(self, series: &ModelSeries) -> u64 {
        match self {
            Self::Request => series.success_ns.get(),
            Self::Queue => series.queue_ns.get(),
            Self::ComputeInput => series.compute_input_ns.get(),
            Self::ComputeInfer => series.compute_infer_ns.get(),
            Self::ComputeOutput => series.compute_output_ns.get(),
        }
    }

    /// The part's nanoseconds of one request.
    fn of(self, timeline: &Timeline) -> u64 {
        let (input, infer, output) = timeline.compute.durations_ns();
        match self {
            Self::Request => timeline.request_ns(),
            Self::Queue => timeline.queue_ns(),
            Self::ComputeInput => input,
            Self::ComputeInfer => infer,
            Self::ComputeOutput => output,
        }
    }
}

/// An observation that can be found again.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Exemplar {
    pub(super) trace: TraceId,
    /// Microseconds.
    pub(super) value: f64,
    /// Milliseconds since 1970.
    pub(super) at_ms: u64,
}

/// A histogram of durations, without a sum: that is kept with the model's other cells.
#[derive(Debug)]
pub(super) struct Buckets {
    /// Upper bounds as the definition has them.
    bounds: Vec<f64>,
    /// The same in nanoseconds.
    bounds_ns: Vec<u64>,
    /// One more than bounds.
    counts: Vec<Count>,
    /// The latest of each bucket. Written for requests that are traced only.
    exemplars: Mutex<BTreeMap<usize, Exemplar>>,
}

impl Buckets {
    /// Buckets with these upper bounds, in a unit of so many nanoseconds.
    fn new(bounds: &[f64], unit_ns: f64) -> Self {
        Self {
            bounds: bounds.to_vec(),
            bounds_ns: bounds.iter().map(|bound| (bound * unit_ns).max(0.0) as u64).collect(),
            counts: std::iter::repeat_with(Count::default).take(bounds.len() + 1).collect(),
            exemplars: Mutex::default(),
        }
    }

    fn at(&self, ns: u64) -> usize {
        self.bounds_ns.partition_point(|&bound| bound < ns)
    }

    fn observe(&self, ns: u64) {
        if let Some(count) = self.counts.get(self.at(ns)) {
            count.add(1);
        }
    }

    /// Each bucket's upper bound and own count; the last bound is infinite.
    pub(super) fn read(&self) -> Vec<(f64, u64)> {
        let bounds = self.bounds.iter().copied().chain([f64::INFINITY]);
        bounds.zip(self.counts.iter().map(Count::get)).collect()
    }

    pub(super) fn has_exemplars(&self) -> bool {
        !self.exemplars.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// By position of the bucket.
    pub(super) fn exemplars(&self) -> BTreeMap<usize, Exemplar> {
        self.exemplars.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The distributions of one model, those that the definition asks for. What a new definition switches on begins at 0;
/// buckets and quantiles are those of the definition that switched them on first.
#[derive(Debug, Default)]
pub(super) struct Durations {
    histograms: [OnceLock<Buckets>; Stage::ALL.len()],
    summaries: [OnceLock<Summary>; Stage::ALL.len()],
    /// Of the response cache, for a model that uses it.
    cache_hits: OnceLock<Summary>,
    cache_misses: OnceLock<Summary>,
    /// Times to the first response, of a decoupled model.
    first_response: OnceLock<Buckets>,
}

impl Durations {
    /// Makes what is defined and not there yet. `buckets` are the model's own, by the metric's name.
    pub(super) fn define(&self, registry: &Registry, clock: &Arc<CoarseClock>, buckets: &[(String, Vec<f64>)]) {
        let spec = |builtin: Builtin| registry.family(builtin.name()).map(|family| family.spec.clone());
        for (stage, slot) in Stage::ALL.into_iter().zip(&self.histograms) {
            if let Some(spec) = spec(stage.histogram()) {
                let own = buckets.iter().find(|(name, _)| *name == spec.name).map(|(_, bounds)| bounds);
                slot.get_or_init(|| Buckets::new(own.unwrap_or(&spec.buckets), 1e3));
            }
        }
        for (stage, slot) in Stage::ALL.into_iter().zip(&self.summaries) {
            if let Some(spec) = spec(stage.summary()) {
                slot.get_or_init(|| Summary::new(&spec.quantiles, clock));
            }
        }
    }

    /// The same for those of the response cache.
    pub(super) fn define_cache(&self, registry: &Registry, clock: &Arc<CoarseClock>) {
        let slots = [(Builtin::CacheHitSummary, &self.cache_hits), (Builtin::CacheMissSummary, &self.cache_misses)];
        for (builtin, slot) in slots {
            if let Some(family) = registry.family(builtin.name()) {
                slot.get_or_init(|| Summary::new(&family.spec.quantiles, clock));
            }
        }
    }

    /// The same for the time to the first response.
    pub(super) fn define_first_response(&self, registry: &Registry, buckets: &[(String, Vec<f64>)]) {
        if let Some(family) = registry.family(Builtin::FirstResponseHistogram.name()) {
            let own = buckets.iter().find(|(name, _)| *name == family.spec.name).map(|(_, bounds)| bounds);
            self.first_response.get_or_init(|| Buckets::new(own.unwrap_or(&family.spec.buckets), 1e6));
        }
    }

    /// Takes the time to the first response of a request.
    pub(super) fn observe_first_response(&self, ns: u64) {
        if let Some(histogram) = self.first_response.get() {
            histogram.observe(ns);
        }
    }

    pub(super) fn first_response(&self) -> Option<&Buckets> {
        self.first_response.get()
    }

    /// Takes one successful request.
    pub(super) fn observe(&self, timeline: &Timeline) {
        self.observe_stages(&Stage::ALL, timeline);
    }

    /// Takes a request that the response cache has answered, in `lookup_ns`.
    pub(super) fn observe_hit(&self, timeline: &Timeline, lookup_ns: u64) {
        self.observe_stages(&Stage::OF_HITS, timeline);
        if let Some(summary) = self.cache_hits.get() {
            summary.observe(lookup_ns as f64 / 1000.0);
        }
    }

    /// Takes what a miss has cost, in addition to the request.
    pub(super) fn observe_miss(&self, cache_ns: u64) {
        if let Some(summary) = self.cache_misses.get() {
            summary.observe(cache_ns as f64 / 1000.0);
        }
    }

    fn observe_stages(&self, stages: &[Stage], timeline: &Timeline) {
        for stage in stages {
            if let Some(histogram) = self.histogram(*stage) {
                histogram.observe(stage.of(timeline));
            }
            if let Some(summary) = self.summary(*stage) {
                summary.clock().tell(timeline.request_end);
                summary.observe(stage.of(timeline) as f64 / 1000.0);
            }
        }
    }

    /// Notes where a traced request can be found.
    pub(super) fn exemplify(&self, timeline: &Timeline, trace: TraceId, at_ms: u64) {
        let executed = timeline.compute.start < timeline.compute.end;
        for stage in if executed { &Stage::ALL[..] } else { &Stage::OF_HITS } {
            let Some(histogram) = self.histogram(*stage) else { continue };
            let ns = stage.of(timeline);
            let exemplar = Exemplar { trace, value: ns as f64 / 1000.0, at_ms };
            histogram.exemplars.lock().unwrap_or_else(PoisonError::into_inner).insert(histogram.at(ns), exemplar);
        }
    }

    pub(super) fn histogram(&self, stage: Stage) -> Option<&Buckets> {
        self.histograms.get(stage as usize)?.get()
    }

    /// The summary of this name, if it is one of the response cache's.
    pub(super) fn cache_summary(&self, builtin: Builtin) -> Option<&Summary> {
        match builtin {
            Builtin::CacheHitSummary => self.cache_hits.get(),
            Builtin::CacheMissSummary => self.cache_misses.get(),
            _ => None,
        }
    }

    pub(super) fn summary(&self, stage: Stage) -> Option<&Summary> {
        self.summaries.get(stage as usize)?.get()
    }
}
