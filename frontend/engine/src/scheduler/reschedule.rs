//! Requests that their backend reschedules, that is, steps of iterative sequences. A request whose reader is behind is held until
//! the reader has caught up, so that the batch of the others does not wait for it.

use std::sync::Arc;

use pharos::data::Data;
use pharos::error::InferError;
use pharos::id::RequestId;
use pharos::infer::{InferInput, InferRequest};
use pharos::metrics::record;
use pharos::tensor::Tensor;
use pharos::timeline::{Instant, Timeline};
use pharos::wire::Done;

use super::{Driver, InFlight, Request, State, request_trace};
use crate::wire::Part;
use pharos_os::clock;

/// Triton's text.
const NOT_ITERATIVE: &str = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not \
                             configured to handle such a flag.";

impl Driver {
    /// Queues the rescheduled requests of a batch before the scheduler is notified that the batch is done, and replaces them by
    /// padding. Requests that cannot be rescheduled are added to the batch's failed requests.
    pub(super) fn reschedule(&self, state: &mut State, batch: &mut InFlight, done: &mut Done, now: Instant) {
        for position in std::mem::take(&mut done.rescheduled) {
            let has_failed = done.error.is_some() || done.failed.iter().any(|(failed, _)| *failed == position);
            let Some(place) = batch.requests.get_mut(position as usize).filter(|_| !has_failed) else { continue };
            let (id, request) = (place.0, &place.1);
            if request.part.padding || request.reply.has_ended() {
                continue;
            }
            if request.reply.is_closed() {
                done.failed.push((position, InferError::cancelled().into()));
            } else if !state.scheduler.reschedule(id, request.reply.is_behind()) {
                done.failed.push((position, InferError::internal(NOT_ITERATIVE).into()));
            } else {
                let (_, request) = std::mem::replace(place, Request::padding(stand_in(&place.1.part)));
                let part = &request.part;
                let timeline = Timeline { compute: done.stamps, ..part.request.timeline };
                {
                    let _transaction = self.series.begin();
                    record::inference_rescheduled(&self.series, &timeline);
                    record::tenant_rescheduled(&self.series, part.request.tenant, &timeline);
                    record::request_pending(&self.series, 1);
                }
                request_trace::rescheduled(&part.request, &done.stamps, now);
                let again = InferRequest {
                    timeline: Timeline { queue_start: now, ..part.request.timeline },
                    ..part.request.clone()
                };
                let part = Arc::new(Part { request: again, checked: part.checked, padding: false });
                state.queued.insert(id, Request { part, ..request });
            }
        }
    }
}

impl Driver {
    /// Resumes a held request whose reader has caught up.
    pub(super) fn resume(&self, id: RequestId) {
        self.turn(clock::now(), |state| state.scheduler.resume(id));
    }
}

/// Returns a placeholder for splitting the batch's outputs: the request's shapes without its data.
pub(super) fn stand_in(part: &Part) -> Arc<Part> {
    let input = |input: &InferInput| {
        let Tensor { datatype, shape, .. } = &input.tensor;
        let tensor = Tensor { datatype: *datatype, shape: shape.clone(), data: Data::default() };
        InferInput { name: input.name.clone(), tensor }
    };
    let inputs = part.request.inputs.iter().map(input).collect();
    let request = InferRequest { inputs, outputs: part.request.outputs.clone(), ..InferRequest::default() };
    Arc::new(Part { request, checked: part.checked, padding: true })
}
