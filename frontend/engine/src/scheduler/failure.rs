//! Ends requests whose batch is not answered: rejected by the scheduler, not sent, or lost with an instance.

use std::sync::atomic::Ordering;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::{InstanceId, ModelVersion, RequestId};
use pharos::metrics::record;
use pharos::model::envelope;
use pharos::scheduler::{RejectReason, Ticket};
use pharos::timeline::Instant;

use super::{Driver, Request, State, request_trace, ticket};
use pharos_os::clock;

impl Driver {
    /// Records that the system has killed a process of the model.
    pub(crate) fn mark_killed(&self) {
        self.killed.store(clock::now().0, Ordering::Relaxed);
    }

    /// Returns whether the system has killed a process of the model after `since`.
    pub(crate) fn killed_since(&self, since: Instant) -> bool {
        self.killed.load(Ordering::Relaxed) > since.0
    }

    /// Removes a lost instance. The requests that it executed are retried once on another instance, or fail.
    pub(crate) fn instance_lost(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| {
            let Some(member) = state.remove_member(instance, now) else { return };
            state.scheduler.instance_lost(instance, now);
            let deferred: Vec<_> = member.deferred.into_values().collect();
            let batches = member.in_flight.into_iter().map(|batch| batch.requests);
            // Deferred requests were executing, as the first batch was.
            let tries_again = self.config.backend != envelope::BACKEND;
            let batches = std::iter::once((0, deferred)).chain((0..).zip(batches));
            for (position, requests) in batches {
                for (id, mut request) in requests.into_iter().filter(|(_, request)| !request.part.padding) {
                    if position == 0 {
                        // It was executing, so it counts as pending again.
                        record::request_pending(&self.series, 1);
                    }
                    if request.reply.has_ended() {
                        // Its last response has been sent.
                        record::request_pending(&self.series, -1);
                        continue;
                    }
                    let begun = request.reply.has_begun();
                    // Only executing requests can have crashed the instance; the others have had no try.
                    let again = !begun && !self.has_sequences() && (position > 0 || (tries_again && !request.retried));
                    let given_up = request.reply.is_closed();
                    if !state.closed && again && !given_up {
                        request.retried |= position == 0;
                        let ticket = ticket(id, &request.part.request, &request.part.checked);
                        let queued = request.part.request.timeline.queue_start;
                        state.queued.insert(id, request);
                        state.scheduler.requeue(ticket, queued, now);
                    } else {
                        record::request_pending(&self.series, -1);
                        let ns = now.ns_since(request.part.request.timeline.request_start);
                        let error = match () {
                            () if given_up => InferError::cancelled(),
                            () if state.closed => self.error(RejectReason::Exiting, &request),
                            () if self.is_iterative() => self.error(RejectReason::RequestLost, &request),
                            () if self.has_sequences() => self.error(RejectReason::SequenceLost, &request),
                            () if begun => lost(&self.model, "in the middle of the responses to this request"),
                            () if !request.retried => lost(&self.model, "while it executed this request"),
                            () => lost(&self.model, "twice while it executed this request"),
                        };
                        self.record_failed(&request.part, &error, ns);
                        request.reply.record_end(&self.series);
                        request_trace::failed(request.part.request.traced.as_ref(), &error, now);
                        self.finish(state, id, request, Err(error));
                    }
                }
            }
        });
    }

    /// Answers a request that the scheduler has rejected.
    pub(super) fn reject(&self, state: &mut State, id: RequestId, reason: RejectReason) {
        let Some(request) = state.queued.remove(&id) else { return };
        record::request_pending(&self.series, -1);
        let error = self.error(reason, &request);
        if !reason.refused_on_arrival() {
            let ns = clock::now().ns_since(request.part.request.timeline.request_start);
            self.record_failed(&request.part, &error, ns);
            request.reply.record_end(&self.series);
        } else {
            record::inference_refused(&self.series, error.reason);
        }
        // Triton includes the request's id only in errors on arrival.
        let named = [
            RejectReason::QueueFull,
            RejectReason::Stopping,
            RejectReason::NoInstance,
            RejectReason::NotRestarted,
            RejectReason::Exiting,
        ];
        let nameless = !named.contains(&reason);
        let error = if nameless { error } else { error.with_request_id(&request.part.request.id) };
        request_trace::failed(request.part.request.traced.as_ref(), &error, clock::now());
        if let Some(order) = &mut state.order {
            // Answered out of order, as in Triton: requests that were not executed wait for no other.
            order.remove(id);
        }
        self.finish(state, id, request, Err(error));
    }

    fn error(&self, reason: RejectReason, request: &Request) -> InferError {
        reason.error(&self.model.name, &request.part.request.correlation_id)
    }

    /// Handles batches that could not be sent, and removes them from their instances. Of several requests, each is sent alone: one
    /// that is too large, or too large together with others, must not fail the others.
    pub(super) fn unsent(&self, state: &mut State, batches: Vec<Unsent>, now: Instant) {
        for Unsent { instance, batch, error } in batches {
            let Some(member) = state.members.get_mut(&instance) else { continue };
            let Some(position) = member.in_flight.iter().position(|flying| flying.batch == batch) else { continue };
            let unsent = member.take(position);
            member.update_busy_time(now);
            if position > 0 {
                record::request_pending(&self.series, -unsent.count());
            } else if let Some(next) = member.in_flight.first() {
                record::request_pending(&self.series, -next.count());
            }
            state.scheduler.batch_unsent(instance, now);
            // A sequence would continue without the step.
            let divides = unsent.requests.len() > 1 && !self.has_sequences() && !state.closed;
            for (id, request) in unsent.requests.into_iter().filter(|(_, request)| !request.part.padding) {
                match divides && !request.reply.is_closed() {
                    true => self.send_alone(state, (id, request), now),
                    false => self.fail_unsent(state, (id, request), &error, now),
                }
            }
        }
    }

    /// Queues a request of a batch that could not be sent; no other request has its key.
    fn send_alone(&self, state: &mut State, (id, request): (RequestId, Request), now: Instant) {
        let part = request.part.clone();
        let ticket = Ticket { shape_key: u64::MAX - id.0, ..ticket(id, &part.request, &part.checked) };
        record::request_pending(&self.series, 1);
        state.queued.insert(id, request);
        state.scheduler.requeue(ticket, part.request.timeline.queue_start, now);
    }

    fn fail_unsent(&self, state: &mut State, (id, request): (RequestId, Request), error: &InferError, now: Instant) {
        let ns = now.ns_since(request.part.request.timeline.request_start);
        self.record_failed(&request.part, error, ns);
        request.reply.record_end(&self.series);
        let error = error.clone().with_request_id(&request.part.request.id);
        request_trace::failed(request.part.request.traced.as_ref(), &error, now);
        self.finish(state, id, request, Err(error));
    }
}

/// A batch that could not be sent to its instance.
pub(super) struct Unsent {
    pub(super) instance: InstanceId,
    pub(super) batch: u64,
    pub(super) error: InferError,
}

/// Returns the error of a request whose worker died and that is not retried: it was before, some of its responses were sent, or
/// the clients of its backend expect the error.
fn lost(model: &ModelVersion, how: &str) -> InferError {
    let text = format!("the worker of model '{}' version {} died {how}", model.name, model.version);
    InferError::new(ErrorCode::Unavailable, Reason::InstanceLost, text)
}
