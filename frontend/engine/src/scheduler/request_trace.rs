//! Trace reports of the driver and of ensembles. For requests without a trace, each function is a
//! single branch.

use pharos::error::InferError;
use pharos::id::{InstanceId, ModelVersion};
use pharos::infer::{InferOutput, InferRequest};
use pharos::metrics::record::TokenCounts;
use pharos::model::generation;
use pharos::request_trace::{TensorActivity, Traced};
use pharos::timeline::{ComputeStamps, Instant, Timeline};

use super::InferResult;
use crate::wire::BatchedRequest;

/// Records that a request has entered its model's queue.
pub(crate) fn queued(model: &ModelVersion, request: &InferRequest) {
    if let Some(traced) = &request.traced {
        traced.model_started(model, &request.id, &request.timeline);
        let inputs = request.inputs.iter().map(|input| (input.name.as_str(), &input.tensor));
        traced.tensors(TensorActivity::QueueInput, inputs);
    }
}

/// Records that a model that generates text has received a request.
pub(super) fn generates(request: &InferRequest) {
    if let Some(traced) = &request.traced {
        traced.generation_started(generation::sampling_limits(&request.inputs));
    }
}

/// Records a response of a model that generates text.
pub(super) fn generated(request: &InferRequest, counts: &TokenCounts, at: Instant) {
    if let Some(traced) = &request.traced {
        traced.generated(counts, at);
    }
}

/// Records which instance executed a request.
pub(super) fn executed_by(batched: &BatchedRequest, instance: InstanceId) {
    if let Some(traced) = &batched.request.traced {
        traced.executed_by(instance);
    }
}

/// Records the answer of an executed request; `timeline` is given with the only or last answer.
pub(super) fn answered(request: &InferRequest, answer: &InferResult, timeline: Option<&Timeline>) {
    let Some(traced) = &request.traced else { return };
    match answer {
        Ok(response) => traced.outputs(response.outputs.iter().map(InferOutput::named)),
        Err(error) => traced.failed(reason(error)),
    }
    if let Some(timeline) = timeline {
        traced.executed(timeline);
    }
}

/// Records that the backend of an executed request rescheduled it.
pub(super) fn rescheduled(request: &InferRequest, compute: &ComputeStamps, queue_start: Instant) {
    if let Some(traced) = &request.traced {
        traced.rescheduled(compute, queue_start);
    }
}

/// Records an answer from the response cache.
pub(super) fn found(request: &InferRequest, found: &[InferOutput], at: Instant) {
    outputs(request, found);
    ended(request, at);
}

/// Records the outputs of a request that was answered by steps.
pub(crate) fn outputs(request: &InferRequest, outputs: &[InferOutput]) {
    if let Some(traced) = &request.traced {
        traced.outputs(outputs.iter().map(InferOutput::named));
    }
}

/// Records the end of a request that was answered by steps.
pub(crate) fn ended(request: &InferRequest, at: Instant) {
    if let Some(traced) = &request.traced {
        traced.ended(at);
    }
}

/// Records a request that failed without an answer from an instance.
pub(crate) fn failed(traced: Option<&Traced>, error: &InferError, at: Instant) {
    if let Some(traced) = traced {
        traced.failed(reason(error));
        traced.ended(at);
    }
}

/// Returns the failure text of a trace. The error of a cancelled request is never sent, so its text
/// is empty.
fn reason(error: &InferError) -> &str {
    if error.message.is_empty() { "cancelled" } else { &error.message }
}
