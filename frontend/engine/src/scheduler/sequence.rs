//! Batches of models with sequences. Slots without a request are filled with padding, which the worker executes and no client
//! reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use pharos::data::Data;
use pharos::id::{CorrelationId, InstanceId, RequestId};
use pharos::infer::{InferInput, InferRequest, RequestedOutput};
use pharos::metrics::text_lines::shortened;
use pharos::model::{Scheduling, SequenceBatching};
use pharos::scheduler::{SequenceCounts, SlotStep};
use pharos::tensor::{Tensor, element_count};
use pharos::timeline::Instant;
use pharos::wire::SequenceStep;
use tokio::sync::oneshot;

use super::decide::NewBatch;
use super::stream::Reply;
use super::{Driver, Effects, InFlight, OneReply, Request, State};
use crate::wire::Part;
use pharos_os::clock;

/// The id of padding.
const PADDING: RequestId = RequestId(u64::MAX);

/// The length in bytes of an empty element of a BYTES tensor.
const EMPTY_ELEMENT: u64 = 4;

impl InFlight {
    /// Returns the number of requests without padding.
    pub(super) fn count(&self) -> i64 {
        self.requests.iter().filter(|(_, request)| !request.part.padding).count() as i64
    }
}

impl Request {
    /// Creates padding with the given part.
    pub(super) fn padding(part: Arc<Part>) -> (RequestId, Self) {
        (
            PADDING,
            Self { part, reply: Reply::One(OneReply::new(oneshot::channel().0, true)), retried: false, miss: None },
        )
    }
}

/// Creates a request of zeros with the shapes of another.
fn zeros(like: &Part) -> Arc<Part> {
    let input = |input: &InferInput| {
        let Tensor { datatype, shape, data } = &input.tensor;
        let len = match datatype.size() {
            Some(_) => data.len(),
            None => usize::try_from(element_count(shape).unwrap_or(0) * EMPTY_ELEMENT).unwrap_or(0),
        };
        let tensor = Tensor { datatype: *datatype, shape: shape.clone(), data: Data::from(vec![0; len]) };
        InferInput { name: input.name.clone(), tensor }
    };
    let inputs = like.request.inputs.iter().map(input).collect();
    // Padding is never written into client memory.
    let output = |output: &RequestedOutput| RequestedOutput { region: None, ..output.clone() };
    let outputs = like.request.outputs.iter().map(output).collect();
    let request = InferRequest { inputs, outputs, ..InferRequest::default() };
    Arc::new(Part { request, checked: like.checked, padding: true })
}

impl Driver {
    /// Books a batch of steps for an instance.
    pub(super) fn start_steps(
        &self,
        state: &mut State,
        effects: &mut Effects,
        (instance, now): (InstanceId, Instant),
        slots: &[Option<SlotStep>],
    ) {
        let take = |slot: &Option<SlotStep>| {
            let step = (*slot)?;
            let request = state.queued.remove(&step.request)?;
            Some((step, request))
        };
        let taken: Vec<_> = slots.iter().map(take).collect();
        let Some(padding) = taken.iter().flatten().next().map(|(_, like)| like.part.clone()) else { return };
        let padding = if taken.iter().any(Option::is_none) { zeros(&padding) } else { padding };
        let mut steps = Vec::with_capacity(taken.len());
        let mut requests = Vec::with_capacity(taken.len());
        for place in taken {
            steps.push(place.as_ref().map(|(SlotStep { key, start, end, .. }, _)| SequenceStep {
                key: *key,
                start: *start,
                end: *end,
            }));
            let request = place.map(|(step, request)| (step.request, request));
            requests.push(request.unwrap_or_else(|| Request::padding(padding.clone())));
        }
        self.book(state, effects, (instance, now), NewBatch { requests, steps });
    }

    /// Returns whether the model's requests belong to sequences, so that none is sent twice.
    pub(super) fn has_sequences(&self) -> bool {
        matches!(self.config.scheduling, Scheduling::Sequence(_))
    }

    /// Returns whether each request is a separate sequence.
    pub(super) fn is_iterative(&self) -> bool {
        matches!(self.config.scheduling, Scheduling::Sequence(SequenceBatching { iterative: true, .. }))
    }

    /// Returns the sequence counts of a model with sequences, and since the last call the numbers of sequences evicted for
    /// idleness, of requests refused for their START flag, and of sequences restarted by it.
    pub(crate) fn sequences(&self) -> Option<(SequenceCounts, [u64; 3])> {
        let now = self.lock().scheduler.sequences()?;
        let new = |known: &AtomicU64, count: u64| count.saturating_sub(known.fetch_max(count, Ordering::Relaxed));
        let [evicted, refused, restarted] = &self.sequences_recorded;
        let counts = [new(evicted, now.idle_evicted), new(refused, now.start_errors), new(restarted, now.restarts)];
        Some((now, counts))
    }

    /// Ends the sequence with this id after its current requests.
    pub(crate) fn end_sequence(&self, id: &CorrelationId) {
        let now = clock::now();
        self.turn(now, |state| state.scheduler.end_sequence(id, now));
    }

    /// Ends all sequences after their current requests, since no further request can find them.
    pub(crate) fn close_sequences(&self) {
        let now = clock::now();
        self.turn(now, |state| state.scheduler.close_sequences(now));
    }

    /// Logs that an active sequence was restarted; at most once a second, since any client can cause it.
    pub(super) fn notify_restarted(&self, sequence: &CorrelationId) {
        let held = self.restarts_logged.lock().unwrap_or_else(PoisonError::into_inner).admit(clock::now());
        let Some(held) = held else { return };
        let id = shortened(sequence.to_string().as_bytes());
        let more = if held > 0 { format!(" (and {held} more since the last message)") } else { String::new() };
        tracing::warn!(
            model = %self.model,
            "the START flag restarted the active sequence {id}; waiting requests of the old sequence are executed \
             first{more}"
        );
    }
}
