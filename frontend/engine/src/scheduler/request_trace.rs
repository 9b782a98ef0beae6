//! What the driver and ensembles report of requests that are traced. For all others each of these is one branch.

use pharos::error::InferError;
use pharos::id::{InstanceId, ModelVersion};
use pharos::infer::{InferOutput, InferRequest};
use pharos::request_trace::{TensorActivity, Traced};
use pharos::timeline::{ComputeStamps, Instant, Timeline};

use super::Answer;
use crate::wire::Part;

/// A request has entered its model's queue.
pub(crate) fn queued(model: &ModelVersion, request: &InferRequest) {
    if let Some(traced) = &request.traced {
        traced.begin(model, &request.id, &request.timeline);
        let inputs = request.inputs.iter().map(|input| (input.name.as_str(), &input.tensor));
        traced.tensors(TensorActivity::QueueInput, inputs);
    }
}

/// An instance has executed a request.
pub(super) fn executed_by(part: &Part, instance: InstanceId) {
    if let Some(traced) = &part.request.traced {
        traced.executed_by(instance);
    }
}

/// A request was executed and this came of it; `timeline` with its last or only answer.
pub(super) fn answered(request: &InferRequest, answer: &Answer, timeline: Option<&Timeline>) {
    let Some(traced) = &request.traced else { return };
    match answer {
        Ok(response) => traced.outputs(response.outputs.iter().map(InferOutput::named)),
        Err(error) => traced.failed(reason(error)),
    }
    if let Some(timeline) = timeline {
        traced.executed(timeline);
    }
}

/// A request was executed, and its backend wants it executed again.
pub(super) fn rescheduled(request: &InferRequest, compute: &ComputeStamps, queue_start: Instant) {
    if let Some(traced) = &request.traced {
        traced.executed_again(compute, queue_start);
    }
}

/// A request was answered by the cache.
pub(super) fn found(request: &InferRequest, found: &[InferOutput], at: Instant) {
    outputs(request, found);
    ended(request, at);
}

/// These came of a request that was answered by steps.
pub(crate) fn outputs(request: &InferRequest, outputs: &[InferOutput]) {
    if let Some(traced) = &request.traced {
        traced.outputs(outputs.iter().map(InferOutput::named));
    }
}

/// A request that was answered by steps is over.
pub(crate) fn ended(request: &InferRequest, at: Instant) {
    if let Some(traced) = &request.traced {
        traced.ended(at);
    }
}

/// A request has failed without an answer from an instance.
pub(crate) fn failed(traced: Option<&Traced>, error: &InferError, at: Instant) {
    if let Some(traced) = traced {
        traced.failed(reason(error));
        traced.ended(at);
    }
}

/// What a trace says of a failure. Nobody is told that a request was cancelled, so that has no words.
fn reason(error: &InferError) -> &str {
    if error.message.is_empty() { "cancelled" } else { &error.message }
}
