//! The data that is collected of a request sampled for tracing. A handle travels with the request,
//! and another with each step of an ensemble. When the last handle is dropped, the collected data
//! is complete.
//!
//! `pharos::trace` decides which requests are sampled; a [`Sink`] receives the collected data.

mod activity;
mod generation;
pub mod text;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

pub use activity::{Activity, TensorActivity};
pub use generation::{Operation, SamplingLimits, TracedGeneration};

use crate::id::{InstanceId, ModelVersion, SpanId, TraceId, Traceparent};
use crate::metrics::record::TokenCounts;
use crate::tensor::Tensor;
use crate::timeline::{ComputeStamps, Instant, Timeline};

/// The number of tensors and of stamps that one request or step collects at most, since a stream of
/// responses may be endless. Stamps of the end are always collected.
const MAX_STAMPS_PER_STEP: usize = 10_000;

/// The number of steps that one request collects at most: a decoupled member of an ensemble may
/// cause any number.
const MAX_STEPS: usize = 10_000;

/// The number of stamps that one request collects at most, with all its steps.
const MAX_STAMPS: usize = 100_000;

/// The number of bytes of tensors that one request collects at most, with all its steps.
const MAX_BYTES: usize = 64 << 20;

/// The kinds of data to collect. Tracing is off if both are false.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    /// Stamps.
    pub timestamps: bool,
    /// Tensors with their contents.
    pub tensors: bool,
}

impl Levels {
    /// Returns whether nothing is collected.
    pub fn is_off(self) -> bool {
        !self.timestamps && !self.tensors
    }
}

/// The position of a trace within a distributed trace (W3C Trace Context).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// The id of the distributed trace: the caller's, or a new one.
    pub trace: TraceId,
    /// The span of the whole request.
    pub span: SpanId,
    /// The caller's span, if it sent one.
    pub parent: Option<SpanId>,
    /// The caller's `tracestate`.
    pub state: String,
}

/// The settings with which a request was sampled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The number of the settings, which changes with every change of them.
    pub generation: u64,
    /// The data to collect.
    pub levels: Levels,
    /// The number of traces in one file; 0 for all in one file.
    pub log_frequency: u32,
    /// Whether the total number of traces is limited.
    pub limited: bool,
}

/// A collected tensor.
#[derive(Clone, Debug)]
pub struct TracedTensor {
    /// The point at which it was collected.
    pub activity: TensorActivity,
    /// The input's or output's name.
    pub name: String,
    /// The tensor.
    pub tensor: Tensor,
}

/// The data collected of the whole request, or of one step of it.
#[derive(Clone, Debug, Default)]
pub struct TracedPart {
    /// The part's number, unique within the process.
    pub id: u64,
    /// The number of the part that it is a step of; 0 for the whole request.
    pub parent: u64,
    /// The model that executes it; `None` before it is known.
    pub model: Option<ModelVersion>,
    /// The request's id, if the client gave one.
    pub request_id: String,
    /// The instance that executed it.
    pub instance: Option<InstanceId>,
    /// The stamps in the order in which they were reported.
    pub stamps: Vec<(Activity, Instant)>,
    /// What the backend has reported: the name and the time of each activity, in the order of the
    /// reports.
    pub reports: Vec<(String, Instant)>,
    /// Tensors.
    pub tensors: Vec<TracedTensor>,
    /// The reason of its failure.
    pub failure: Option<String>,
    /// The kind of a request to a model that generates text, if its protocol says so.
    pub operation: Option<Operation>,
    /// What a model that generates text has reported.
    pub generation: Option<Box<TracedGeneration>>,
}

impl TracedPart {
    fn bytes(&self) -> usize {
        let tensors = self
            .tensors
            .iter()
            .map(|seen| size_of::<TracedTensor>() + seen.tensor.data.bytes_here());
        let texts = self.request_id.len() + self.failure.as_ref().map_or(0, String::len);
        let report = |(name, _): &(String, Instant)| size_of::<(String, Instant)>() + name.len();
        size_of::<Self>()
            + self.stamps.len() * size_of::<(Activity, Instant)>()
            + self.reports.iter().map(report).sum::<usize>()
            + tensors.sum::<usize>()
            + texts
            + self
                .generation
                .as_ref()
                .map_or(0, |generation| size_of::<TracedGeneration>() + generation.reasons.len())
    }
}

/// All data collected of one request.
#[derive(Clone, Debug)]
pub struct Finished {
    /// The settings with which it was sampled.
    pub sample: Sample,
    /// Present if the trace goes to a collector.
    pub context: Option<Context>,
    /// The whole request first, then its steps in the order in which they started.
    pub parts: Vec<TracedPart>,
    /// The latest stamp of all parts; zero without stamps.
    pub ended: Instant,
}

impl Finished {
    /// Returns its approximate size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(TracedPart::bytes).sum()
    }
}

/// Receives complete traces.
pub trait Sink: Send + Sync {
    /// Receives a complete trace. Called on the threads that answer requests, so it must not block.
    fn finished(&self, trace: Finished);

    /// Returns the number of the next part.
    fn next_id(&self) -> u64;
}

/// Generates numbers of parts, starting at 1.
#[derive(Debug, Default)]
pub struct PartIds(AtomicU64);

impl PartIds {
    /// Returns the next number.
    pub fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }
}

struct Collected {
    parts: BTreeMap<u64, TracedPart>,
    /// Bytes of tensors.
    bytes: usize,
    stamps: usize,
    latest: Instant,
}

struct Shared {
    sample: Sample,
    context: Option<Context>,
    sink: Arc<dyn Sink>,
    // Locked to add a few values.
    collected: Mutex<Collected>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Collected> {
        self.collected.lock()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let collected = self.collected.get_mut();
        let parts: Vec<TracedPart> = std::mem::take(&mut collected.parts).into_values().collect();
        let sample = self.sample.clone();
        let context = self.context.take();
        // As in Triton, a request that was refused before it reached a model does not appear in
        // files. It does appear in a collector, where the caller's trace would otherwise lack the
        // failed part.
        if parts.first().is_some_and(|root| {
            root.model.is_some() || (context.is_some() && root.failure.is_some())
        }) {
            self.sink.finished(Finished { sample, context, parts, ended: collected.latest });
        }
    }
}

/// A handle to collect data of a request or a step.
#[derive(Clone)]
pub struct Traced {
    shared: Arc<Shared>,
    id: u64,
}

impl fmt::Debug for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "trace {}", self.id)
    }
}

impl Traced {
    /// Starts collecting data of a sampled request. `sink` receives it when all clones and steps
    /// are dropped.
    pub fn new(sample: Sample, context: Option<Context>, sink: Arc<dyn Sink>) -> Self {
        let id = sink.next_id();
        let parts = BTreeMap::from([(id, TracedPart { id, ..TracedPart::default() })]);
        let collected = Mutex::new(Collected { parts, bytes: 0, stamps: 0, latest: Instant(0) });
        Self { shared: Arc::new(Shared { sample, context, sink, collected }), id }
    }

    /// Creates the handle of a step. Data of steps beyond the limit is discarded.
    #[must_use]
    pub fn step(&self) -> Self {
        let id = self.shared.sink.next_id();
        let part = TracedPart { id, parent: self.id, ..TracedPart::default() };
        let mut collected = self.shared.lock();
        if collected.parts.len() <= MAX_STEPS {
            collected.parts.insert(id, part);
        }
        drop(collected);
        Self { shared: self.shared.clone(), id }
    }

    /// Returns the `traceparent` that identifies the request's span, if the trace goes to a
    /// collector.
    pub fn traceparent(&self) -> Option<Traceparent> {
        self.shared
            .context
            .as_ref()
            .map(|context| Traceparent { trace: context.trace, span: context.span })
    }

    /// Returns the context of the trace for other tracers, in the form in which Triton passes it to
    /// models: a JSON object with the entries of the W3C Trace Context. `None` if the trace does
    /// not go to a collector.
    pub fn context_json(&self) -> Option<String> {
        let context = self.shared.context.as_ref()?;
        let parent = Traceparent { trace: context.trace, span: context.span };
        let state = match context.state.as_str() {
            "" => String::new(),
            state => format!(r#","tracestate":{}"#, serde_json::Value::from(state)),
        };
        Some(format!(r#"{{"traceparent":"{parent}"{state}}}"#))
    }

    /// Adds a stamp.
    pub fn stamp(&self, activity: Activity, at: Instant) {
        self.stamps(&[(activity, at)]);
    }

    /// Records the model that executes the request, its id, and the first stamps of its timeline.
    pub fn model_started(&self, model: &ModelVersion, request_id: &str, timeline: &Timeline) {
        self.add(|part| {
            part.model = Some(model.clone());
            request_id.clone_into(&mut part.request_id);
        });
        self.stamps(&[
            (Activity::RequestStart, timeline.request_start),
            (Activity::QueueStart, timeline.queue_start),
        ]);
    }

    /// Records the kind of the request, which its protocol knows.
    pub fn operation(&self, operation: Operation) {
        self.add(|part| part.operation = Some(operation));
    }

    /// Records that a model that generates text has received the request.
    pub fn generation_started(&self, limits: SamplingLimits) {
        // The request may have several prompts.
        self.add(|part| part.generation.get_or_insert_default().limits = limits);
    }

    /// Records a response of a model that generates text, which arrived at `at`.
    pub fn generated(&self, counts: &TokenCounts, at: Instant) {
        self.add(|part| {
            if let Some(generation) = &mut part.generation {
                generation.add(counts, at);
            }
        });
    }

    /// Records the instance that executed the request.
    pub fn executed_by(&self, instance: InstanceId) {
        self.add(|part| part.instance = Some(instance));
    }

    /// Records the execution and the end of the request.
    pub fn executed(&self, timeline: &Timeline) {
        self.computed(&timeline.compute);
        self.stamp(Activity::RequestEnd, timeline.request_end);
    }

    /// Records an execution after which the request entered the queue again.
    pub fn rescheduled(&self, compute: &ComputeStamps, queue_start: Instant) {
        self.computed(compute);
        self.stamp(Activity::QueueStart, queue_start);
    }

    fn computed(&self, compute: &ComputeStamps) {
        self.stamps(&[
            (Activity::ComputeStart, compute.start),
            (Activity::ComputeInputEnd, compute.input_end),
            (Activity::ComputeOutputStart, compute.output_start),
            (Activity::ComputeEnd, compute.end),
        ]);
    }

    /// Records the end of a request that was not executed itself but answered by the cache or by
    /// steps.
    pub fn ended(&self, at: Instant) {
        self.stamps(&[(Activity::RequestEnd, at)]);
    }

    /// Records an activity that the backend has reported.
    pub fn reported(&self, name: &str, at: Instant) {
        if !self.shared.sample.levels.timestamps {
            return;
        }
        let mut collected = self.shared.lock();
        let Collected { parts, stamps: all, latest, .. } = &mut *collected;
        let Some(part) = parts.get_mut(&self.id) else { return };
        if part.reports.len() < MAX_STAMPS_PER_STEP && *all < MAX_STAMPS {
            *all += 1;
            *latest = (*latest).max(at);
            part.reports.push((name.to_owned(), at));
        }
    }

    /// Records the reason of a failure.
    pub fn failed(&self, reason: &str) {
        self.add(|part| part.failure = Some(reason.to_owned()));
    }

    /// Records the reason of a refusal before the request reached a model. Adds the stamps of
    /// `receiving` unless it has them. Does nothing if a model has received the request.
    pub fn refused(&self, reason: &str, receiving: [(Activity, Instant); 2]) {
        let mut received = true;
        self.add(|part| {
            if part.model.is_none() {
                part.failure = Some(reason.to_owned());
                received = !part.stamps.is_empty();
            }
        });
        if !received {
            self.stamps(&receiving);
        }
    }

    /// Records that the last response of the model has arrived. Does nothing if no model received
    /// the request.
    pub fn last_response(&self, at: Instant) {
        let begun = self.shared.lock().parts.get(&self.id).is_some_and(|part| part.model.is_some());
        if begun {
            self.stamp(Activity::ResponseComplete, at);
        }
    }

    /// Returns whether tensors are collected.
    pub fn wants_tensors(&self) -> bool {
        self.shared.sample.levels.tensors
    }

    /// Collects tensors. Omits those beyond the limits.
    pub fn tensors<'a>(
        &self,
        activity: TensorActivity,
        tensors: impl Iterator<Item = (&'a str, &'a Tensor)>,
    ) {
        if !self.wants_tensors() {
            return;
        }
        let mut collected = self.shared.lock();
        let collected = &mut *collected;
        let Some(part) = collected.parts.get_mut(&self.id) else { return };
        for (name, tensor) in tensors {
            let bytes = tensor.data.bytes_here();
            if part.tensors.len() < MAX_STAMPS_PER_STEP && collected.bytes + bytes <= MAX_BYTES {
                collected.bytes += bytes;
                part.tensors.push(TracedTensor {
                    activity,
                    name: name.to_owned(),
                    tensor: tensor.clone(),
                });
            }
        }
    }

    /// Collects the outputs of a backend. Copies them, because their memory may have to be returned
    /// to the worker.
    pub fn outputs<'a>(&self, outputs: impl IntoIterator<Item = (&'a str, &'a Tensor)>) {
        if self.wants_tensors() {
            let copies: Vec<_> = outputs
                .into_iter()
                .map(|(name, tensor)| {
                    let data = tensor.data.as_slice().into_owned().into();
                    (name, Tensor { data, ..tensor.clone() })
                })
                .collect();
            self.tensors(
                TensorActivity::BackendOutput,
                copies.iter().map(|(name, tensor)| (*name, tensor)),
            );
        }
    }

    fn stamps(&self, stamps: &[(Activity, Instant)]) {
        let mut collected = self.shared.lock();
        let Collected { parts, stamps: all, latest, .. } = &mut *collected;
        for (_, at) in stamps {
            *latest = (*latest).max(*at);
        }
        if !self.shared.sample.levels.timestamps {
            return;
        }
        let Some(part) = parts.get_mut(&self.id) else { return };
        let room = part.stamps.len() < MAX_STAMPS_PER_STEP && *all < MAX_STAMPS;
        let wanted = stamps.iter().filter(|(activity, _)| room || activity.comes_once());
        let before = part.stamps.len();
        part.stamps.extend(wanted);
        *all += part.stamps.len() - before;
    }

    fn add(&self, change: impl FnOnce(&mut TracedPart)) {
        if let Some(part) = self.shared.lock().parts.get_mut(&self.id) {
            change(part);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::tensor::DataType;

    use super::*;

    #[derive(Default)]
    struct Kept {
        ids: PartIds,
        traces: Mutex<Vec<Finished>>,
    }

    impl Sink for Kept {
        fn finished(&self, trace: Finished) {
            self.traces.lock().push(trace);
        }

        fn next_id(&self) -> u64 {
            self.ids.next()
        }
    }

    fn sample(timestamps: bool, tensors: bool) -> Sample {
        Sample {
            generation: 1,
            levels: Levels { timestamps, tensors },
            log_frequency: 0,
            limited: false,
        }
    }

    #[test]
    fn a_trace_is_complete_when_the_last_handle_is_dropped() {
        let kept = Arc::new(Kept::default());
        let root = Traced::new(sample(true, false), None, kept.clone());
        root.stamp(Activity::HttpRecvStart, Instant(1));
        root.model_started(&ModelVersion::new("e", 1), "id", &Timeline::default());
        let step = root.step();
        step.model_started(&ModelVersion::new("m", 2), "id", &Timeline::default());
        step.executed(&Timeline { request_end: Instant(9), ..Timeline::default() });
        drop(root);
        assert!(kept.traces.lock().is_empty());
        drop(step);
        let traces = kept.traces.lock();
        let [Finished { parts, ended: Instant(9), .. }] = &traces[..] else { panic!("{traces:?}") };
        let names: Vec<_> =
            parts.iter().map(|part| (part.id, part.parent, part.stamps.len())).collect();
        assert_eq!(names, [(1, 0, 3), (2, 1, 7)]);
    }

    #[test]
    fn a_request_without_a_model_leaves_no_trace() {
        let kept = Arc::new(Kept::default());
        Traced::new(sample(true, true), None, kept.clone())
            .stamp(Activity::HttpRecvStart, Instant(1));
        assert!(kept.traces.lock().is_empty());
    }

    #[test]
    fn endless_responses_and_steps_are_limited_and_have_an_end() {
        let kept = Arc::new(Kept::default());
        let root = Traced::new(sample(true, false), None, kept.clone());
        root.model_started(&ModelVersion::new("e", 1), "", &Timeline::default());
        for number in 0..2 * MAX_STAMPS_PER_STEP as u64 {
            root.stamp(Activity::GrpcSendStart, Instant(number));
        }
        for _ in 0..2 * MAX_STEPS {
            let step = root.step();
            (0..8).for_each(|_| step.executed(&Timeline::default()));
        }
        root.ended(Instant(MAX_STAMPS_PER_STEP as u64 * 3));
        drop(root);
        let traces = kept.traces.lock();
        let [Finished { parts, ended, .. }] = &traces[..] else { panic!("{traces:?}") };
        assert_eq!((parts.len(), parts[0].stamps.len()), (1 + MAX_STEPS, MAX_STAMPS_PER_STEP + 1));
        assert_eq!(parts[0].stamps.last(), Some(&(Activity::RequestEnd, *ended)));
        let stamps: usize = parts.iter().map(|part| part.stamps.len()).sum();
        // Beyond the limit, the end of each of the eight executions is still recorded.
        assert!((MAX_STAMPS..MAX_STAMPS + 8 * MAX_STEPS).contains(&stamps), "{stamps}");
        assert!(traces[0].bytes() < 8 << 20, "{}", traces[0].bytes());
    }

    #[test]
    fn only_a_collector_receives_refused_requests() {
        let context = Context {
            trace: TraceId::new(1).unwrap(),
            span: SpanId::new(2).unwrap(),
            parent: None,
            state: String::new(),
        };
        for (context, expected) in [(None, 0), (Some(context), 1)] {
            let kept = Arc::new(Kept::default());
            let traced = Traced::new(sample(true, false), context, kept.clone());
            traced.last_response(Instant(3));
            traced.refused(
                "no",
                [(Activity::HttpRecvStart, Instant(1)), (Activity::HttpRecvEnd, Instant(2))],
            );
            drop(traced);
            let traces = kept.traces.lock();
            assert_eq!(traces.len(), expected);
            assert!(
                traces
                    .iter()
                    .all(|trace| trace.parts[0].stamps.len() == 2 && trace.ended == Instant(2))
            );
        }
        let kept = Arc::new(Kept::default());
        let traced = Traced::new(sample(true, false), None, kept.clone());
        traced.model_started(&ModelVersion::new("m", 1), "", &Timeline::default());
        traced.last_response(Instant(3));
        traced.refused(
            "no",
            [(Activity::HttpRecvStart, Instant(1)), (Activity::HttpRecvEnd, Instant(2))],
        );
        drop(traced);
        let traces = kept.traces.lock();
        assert_eq!((traces[0].parts[0].stamps.len(), &traces[0].parts[0].failure), (3, &None));
    }

    #[test]
    fn levels_select_data_and_tensors_are_limited() {
        let kept = Arc::new(Kept::default());
        let tensor = |len: usize| Tensor {
            datatype: DataType::Uint8,
            shape: vec![len as i64],
            data: vec![0; len].into(),
        };
        let small = tensor(3);
        let large = tensor(MAX_BYTES);
        for levels in [(true, false), (false, true)] {
            let traced = Traced::new(sample(levels.0, levels.1), None, kept.clone());
            traced.model_started(&ModelVersion::new("m", 1), "", &Timeline::default());
            let all = [("a", &small), ("b", &large), ("c", &small)];
            traced.tensors(TensorActivity::QueueInput, all.into_iter());
        }
        let traces = kept.traces.lock();
        let counts: Vec<_> =
            traces.iter().map(|t| (t.parts[0].stamps.len(), t.parts[0].tensors.len())).collect();
        assert_eq!(counts, [(2, 0), (0, 2)]);
        let tensors = &traces[1].parts[0].tensors;
        assert_eq!(tensors.iter().map(|seen| seen.tensor.data.len()).sum::<usize>(), 6);
        assert_eq!(traces[1].bytes(), size_of::<TracedPart>() + 2 * size_of::<TracedTensor>() + 6);
    }
}
