//! Batches at the instances: the ready instances, what each executes, and the requests of batches
//! that were not sent, were lost with an instance, or are executed again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use pharos::data::Data;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::{InstanceId, ModelVersion, RequestId};
use pharos::infer::{InferInput, InferRequest, RequestedOutput};
use pharos::metrics::cache::Cache;
use pharos::metrics::record;
use pharos::model::envelope;
use pharos::scheduler::{RejectReason, SlotStep, Ticket};
use pharos::tensor::{Tensor, element_count};
use pharos::timeline::{Instant, Timeline};
use pharos::wire::{Done, SequenceStep, ToWorker};
use tokio::sync::oneshot;

use super::stream::{AnswerSender, OneAnswer};
use super::{Driver, Effects, Request, State, request_trace, ticket};
use crate::wire::{BatchedRequest, SharedLink};
use pharos_os::clock;

/// The id of padding.
const PADDING: RequestId = RequestId(u64::MAX);

/// The length in bytes of an empty element of a BYTES tensor.
const EMPTY_ELEMENT: u64 = 4;

/// Triton's text.
const NOT_ITERATIVE: &str = "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, \
                             while the model is not configured to handle such a flag.";

/// A batch that was sent to an instance and is not done.
pub(super) struct InFlight {
    pub(super) batch: u64,
    /// The row of its flags in the instance's arena.
    pub(super) flags: u8,
    /// Whether one of its flags is set.
    pub(super) has_cancelled: bool,
    /// In batch order, padding included.
    pub(super) requests: Vec<(RequestId, Request)>,
}

impl InFlight {
    /// Returns the number of requests without padding.
    pub(super) fn count(&self) -> i64 {
        self.requests.iter().filter(|(_, request)| !request.batched.padding).count() as i64
    }

    /// Moves the requests that are answered later out of the batch, which has executed `since` then,
    /// and replaces them by padding.
    pub(super) fn keep_deferred(
        &mut self,
        done: &mut Done,
        deferred: &mut Deferred,
        since: Instant,
    ) {
        for position in std::mem::take(&mut done.open) {
            let place = self.requests.get_mut(position as usize);
            let Some(place) = place
                .filter(|(_, request)| !request.batched.padding && !request.sender.has_ended())
            else {
                continue;
            };
            let stand_in = Request::padding(stand_in(&place.1.batched));
            let (id, request) = std::mem::replace(place, stand_in);
            deferred.insert((done.batch, position), DeferredRequest { id, request, since });
        }
    }
}

/// A request that its backend answers after its batch.
pub(super) struct DeferredRequest {
    pub(super) id: RequestId,
    pub(super) request: Request,
    /// When its batch began to execute.
    pub(super) since: Instant,
}

/// The deferred requests of one instance, by batch and position in it: their backend answers them
/// after their batch is over, while the instance executes other batches.
pub(super) type Deferred = HashMap<(u64, u32), DeferredRequest>;

/// A ready instance.
pub(super) struct Member {
    pub(super) link: SharedLink,
    /// In the order of sending; the first one executes.
    pub(super) in_flight: Vec<InFlight>,
    /// Unanswered requests of finished batches.
    pub(super) deferred: Deferred,
    /// Whether it has as many deferred requests as its model allows. The scheduler does not know
    /// yet that its batch is done.
    pub(super) is_full: bool,
    /// When the first batch began to execute, by the frontend's clock.
    pub(super) executing_since: Instant,
    /// The time in which it was not idle.
    busy: BusyTime,
}

impl Member {
    /// Returns whether it has no batches and no deferred requests.
    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.deferred.is_empty()
    }

    /// Returns whether it was full, and a deferred request has ended since. `limit` is the number of
    /// deferred requests that its model allows.
    pub(super) fn has_room_again(&self, limit: usize) -> bool {
        self.is_full && self.deferred.len() < limit
    }

    /// Removes a batch that is no longer in flight.
    fn take(&mut self, position: usize) -> InFlight {
        let batch = self.in_flight.remove(position);
        if batch.has_cancelled {
            self.link.arenas.inputs.clear_flags(batch.flags);
        }
        batch
    }

    /// Begins or ends the busy time after batches or deferred requests were added or removed.
    pub(super) fn update_busy_time(&mut self, now: Instant) {
        let busy = !self.is_idle();
        self.busy.set(now, busy);
    }
}

/// The time in which an instance has a batch or a deferred request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BusyTime {
    /// The nanoseconds of the periods that have ended.
    ended_ns: u64,
    /// When the current period began.
    since: Option<Instant>,
    /// The nanoseconds that the metrics already include.
    recorded_ns: u64,
}

impl BusyTime {
    /// Begins or ends a period, if the instance was not in that state before.
    fn set(&mut self, now: Instant, busy: bool) {
        match (self.since, busy) {
            (None, true) => self.since = Some(now),
            (Some(since), false) => {
                self.ended_ns += now.ns_since(since);
                self.since = None;
            }
            _ => {}
        }
    }

    /// Returns the nanoseconds of all periods until now.
    fn total_ns(&self, now: Instant) -> u64 {
        self.ended_ns + self.since.map_or(0, |since| now.ns_since(since))
    }

    /// Returns the nanoseconds since the last call.
    fn take_ns(&mut self, now: Instant) -> u64 {
        let total = self.total_ns(now);
        let new = total.saturating_sub(self.recorded_ns);
        self.recorded_ns = self.recorded_ns.max(total);
        new
    }
}

/// The load of a driver at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Requests that instances execute, deferred requests included.
    pub(crate) executing: usize,
    /// Requests in the queue, and requests of batches that wait behind another batch at an
    /// instance.
    pub(crate) waiting: usize,
    /// Ready instances.
    pub(crate) instances: usize,
    /// Requests that these can execute at once.
    pub(crate) slots: u64,
    /// The nanoseconds in which instances were busy since the load of the model, added over all
    /// instances.
    pub(crate) busy_ns: u64,
}

impl State {
    /// Removes an instance, and keeps its busy time.
    fn remove_member(&mut self, instance: InstanceId, now: Instant) -> Option<Member> {
        let mut member = self.members.remove(&instance)?;
        self.busy_of_removed_ns += member.busy.total_ns(now);
        *self.unrecorded_busy_ns.entry(instance).or_default() += member.busy.take_ns(now);
        Some(member)
    }

    /// Returns whether an instance is ready and gets new batches.
    pub(super) fn has_open_member(&self) -> bool {
        self.members.keys().any(|instance| !self.retired.contains(instance))
    }

    /// Returns the frame that cancels a deferred request, with the link of its instance.
    pub(super) fn cancellation_frame(&self, id: RequestId) -> Option<(SharedLink, ToWorker)> {
        self.members.values().find_map(|member| {
            let (&(batch, position), _) =
                member.deferred.iter().find(|(_, deferred)| deferred.id == id)?;
            Some((member.link.clone(), ToWorker::CancelRequest(batch, position)))
        })
    }
}

/// A batch that could not be sent to its instance.
pub(super) struct Unsent {
    pub(super) instance: InstanceId,
    pub(super) batch: u64,
    pub(super) error: InferError,
}

impl Driver {
    /// Adds an instance that is ready for batches. A retired instance is not added again.
    pub(crate) fn instance_ready(&self, instance: InstanceId, link: SharedLink) {
        let now = clock::now();
        self.turn(now, |state| {
            if state.retired.contains(&instance) {
                return;
            }
            let member = Member {
                link,
                in_flight: Vec::new(),
                deferred: Deferred::new(),
                is_full: false,
                executing_since: now,
                busy: BusyTime::default(),
            };
            state.members.insert(instance, member);
            state.scheduler.instance_ready(instance, now);
        });
    }

    /// Books a batch of steps for an instance.
    pub(super) fn start_steps(
        &self,
        state: &mut State,
        effects: &mut Effects,
        instance: InstanceId,
        slots: &[Option<SlotStep>],
        now: Instant,
    ) {
        let mut taken = Vec::with_capacity(slots.len());
        for slot in slots {
            taken.push(slot.and_then(|step| Some((step, state.queued.remove(&step.request)?))));
        }
        let Some((_, first)) = taken.iter().flatten().next() else { return };
        let padding = taken.iter().any(Option::is_none).then(|| zeros(&first.batched));
        let mut steps = Vec::with_capacity(taken.len());
        let mut requests = Vec::with_capacity(taken.len());
        for place in taken {
            match (place, &padding) {
                (Some((step, request)), _) => {
                    steps.push(Some(SequenceStep {
                        key: step.key,
                        start: step.start,
                        end: step.end,
                    }));
                    requests.push((step.request, request));
                }
                (None, Some(padding)) => {
                    steps.push(None);
                    requests.push(Request::padding(padding.clone()));
                }
                (None, None) => {}
            }
        }
        self.book(state, effects, instance, requests, steps, now);
    }

    /// Handles a worker's reply to a batch.
    pub(crate) fn batch_done(&self, instance: InstanceId, link: &SharedLink, mut done: Done) {
        let now = clock::now();
        let mut finished = None;
        let mut executing_since = now;
        link.inputs_read(&done);
        self.turn(now, |state| {
            let Some(member) = state.members.get_mut(&instance) else { return };
            let Some(position) =
                member.in_flight.iter().position(|batch| batch.batch == done.batch)
            else {
                return;
            };
            let mut batch = member.take(position);
            state.last_answered = now;
            executing_since = std::mem::replace(&mut member.executing_since, now);
            // A batch that was sent second and finished first (two threads sent concurrently) was
            // never counted as executing.
            let executing = if position > 0 { Some(&batch) } else { member.in_flight.first() };
            if let Some(executing) = executing {
                record::request_pending(&self.series, -executing.count());
            }
            batch.keep_deferred(&mut done, &mut member.deferred, executing_since);
            member.update_busy_time(now);
            member.is_full = member.deferred.len() >= self.config.max_open_requests;
            let has_room = !member.is_full;
            if !done.rescheduled.is_empty() {
                self.reschedule(state, &mut batch, &mut done, now);
            }
            finished = Some(batch);
            if has_room {
                state.scheduler.batch_done(instance, now);
            }
        });
        if let Some(batch) = finished {
            batch
                .requests
                .iter()
                .for_each(|(_, request)| request_trace::executed_by(&request.batched, instance));
            self.answer_batch(batch.requests, link, &done, executing_since, now);
        }
        link.inputs_lent(&done);
    }

    /// Gives a full instance batches again after a deferred request has ended.
    pub(super) fn deferred_ended(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| {
            let Some(member) = state.members.get_mut(&instance) else { return };
            if member.has_room_again(self.config.max_open_requests) {
                member.is_full = false;
                state.scheduler.batch_done(instance, now);
            }
        });
    }

    /// Queues the rescheduled requests of a batch before the scheduler is notified that the batch
    /// is done, and replaces them by padding. Requests that cannot be rescheduled are added to the
    /// batch's failed requests.
    fn reschedule(&self, state: &mut State, batch: &mut InFlight, done: &mut Done, now: Instant) {
        for position in std::mem::take(&mut done.rescheduled) {
            let has_failed =
                done.error.is_some() || done.failed.iter().any(|(failed, _)| *failed == position);
            let Some(place) = batch.requests.get_mut(position as usize).filter(|_| !has_failed)
            else {
                continue;
            };
            let (id, request) = &*place;
            let id = *id;
            if request.batched.padding || request.sender.has_ended() {
                continue;
            }
            if request.sender.is_closed() {
                done.failed.push((position, InferError::cancelled().into()));
            } else if !state.scheduler.reschedule(id, request.sender.is_behind()) {
                done.failed.push((position, InferError::internal(NOT_ITERATIVE).into()));
            } else {
                let (_, request) =
                    std::mem::replace(place, Request::padding(stand_in(&place.1.batched)));
                let executed = &request.batched;
                let timeline = Timeline { compute: done.stamps, ..executed.request.timeline };
                {
                    let _transaction = self.series.begin();
                    record::inference_rescheduled(&self.series, &timeline);
                    record::tenant_rescheduled(&self.series, executed.request.tenant, &timeline);
                    record::request_pending(&self.series, 1);
                }
                request_trace::rescheduled(&executed.request, &done.stamps, now);
                let mut again = executed.request.clone();
                again.timeline.queue_start = now;
                let batched = Arc::new(BatchedRequest {
                    request: again,
                    checked: executed.checked,
                    padding: false,
                });
                state.queued.insert(id, Request { batched, ..request });
            }
        }
    }

    /// Handles batches that could not be sent, and removes them from their instances. Of several
    /// requests, each is sent alone: one that is too large, or too large together with others, must
    /// not fail the others.
    pub(super) fn unsent(&self, state: &mut State, batches: Vec<Unsent>, now: Instant) {
        for Unsent { instance, batch, error } in batches {
            let Some(member) = state.members.get_mut(&instance) else { continue };
            let Some(position) = member.in_flight.iter().position(|flying| flying.batch == batch)
            else {
                continue;
            };
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
            for (id, request) in
                unsent.requests.into_iter().filter(|(_, request)| !request.batched.padding)
            {
                match divides && !request.sender.is_closed() {
                    true => self.send_alone(state, id, request, now),
                    false => self.fail_unsent(state, id, request, &error, now),
                }
            }
        }
    }

    /// Queues a request of a batch that could not be sent; no other request has its key.
    fn send_alone(&self, state: &mut State, id: RequestId, request: Request, now: Instant) {
        let batched = request.batched.clone();
        let ticket =
            Ticket { shape_key: u64::MAX - id.0, ..ticket(id, &batched.request, &batched.checked) };
        record::request_pending(&self.series, 1);
        state.queued.insert(id, request);
        state.scheduler.requeue(ticket, batched.request.timeline.queue_start, now);
    }

    fn fail_unsent(
        &self,
        state: &mut State,
        id: RequestId,
        request: Request,
        error: &InferError,
        now: Instant,
    ) {
        let ns = now.ns_since(request.batched.request.timeline.request_start);
        self.record_failed(&request.batched, error, ns);
        request.sender.record_end(&self.series);
        let error = error.clone().with_request_id(&request.batched.request.id);
        request_trace::failed(request.batched.request.traced.as_ref(), &error, now);
        self.finish(state, id, request, Err(error));
    }

    /// Removes a lost instance. The requests that it executed are retried once on another instance,
    /// or fail.
    pub(crate) fn instance_lost(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| {
            let Some(member) = state.remove_member(instance, now) else { return };
            state.scheduler.instance_lost(instance, now);
            // Deferred requests were executing, as the first batch was.
            for DeferredRequest { id, request, .. } in member.deferred.into_values() {
                self.request_lost(state, id, request, true, now);
            }
            for (position, batch) in member.in_flight.into_iter().enumerate() {
                for (id, request) in batch.requests {
                    if !request.batched.padding {
                        self.request_lost(state, id, request, position == 0, now);
                    }
                }
            }
        });
    }

    /// Queues a request of a lost instance again, or fails it. Only a request that was executing
    /// can have crashed the instance; the others have had no try.
    fn request_lost(
        &self,
        state: &mut State,
        id: RequestId,
        mut request: Request,
        was_executing: bool,
        now: Instant,
    ) {
        if was_executing {
            // The request counts as pending again.
            record::request_pending(&self.series, 1);
        }
        if request.sender.has_ended() {
            // The last response has been sent.
            record::request_pending(&self.series, -1);
            return;
        }
        let has_begun = request.sender.has_begun();
        let has_left = request.sender.is_closed();
        let may_run_again =
            !was_executing || (!request.retried && self.config.backend != envelope::BACKEND);
        if may_run_again && !has_begun && !has_left && !state.closed && !self.has_sequences() {
            request.retried |= was_executing;
            let ticket = ticket(id, &request.batched.request, &request.batched.checked);
            let queued_at = request.batched.request.timeline.queue_start;
            state.queued.insert(id, request);
            state.scheduler.requeue(ticket, queued_at, now);
            return;
        }
        record::request_pending(&self.series, -1);
        let error = if has_left {
            InferError::cancelled()
        } else if state.closed {
            self.error(RejectReason::Exiting, &request)
        } else if self.is_iterative() {
            self.error(RejectReason::RequestLost, &request)
        } else if self.has_sequences() {
            self.error(RejectReason::SequenceLost, &request)
        } else if has_begun {
            lost(&self.model, "in the middle of the responses to this request")
        } else if request.retried {
            lost(&self.model, "twice while it executed this request")
        } else {
            lost(&self.model, "while it executed this request")
        };
        let ns = now.ns_since(request.batched.request.timeline.request_start);
        let had_token = request.sender.has_token();
        self.record_failed_after(&request.batched, &error, ns, had_token);
        request.sender.record_end(&self.series);
        request_trace::failed(request.batched.request.traced.as_ref(), &error, now);
        self.finish(state, id, request, Err(error));
    }

    /// Records that the system has killed a process of the model.
    pub(crate) fn mark_killed(&self) {
        self.killed.store(clock::now().0, Ordering::Relaxed);
    }

    /// Returns whether the system has killed a process of the model after `since`.
    pub(crate) fn killed_since(&self, since: Instant) -> bool {
        self.killed.load(Ordering::Relaxed) > since.0
    }

    /// Stops sending new batches or sequences to an instance; its current ones continue to their
    /// ends. Until [`Driver::dismiss`], it is not added again, even if its process restarts.
    pub(crate) fn retire(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| {
            state.retired.insert(instance);
            state.scheduler.instance_closing(instance, now);
        });
    }

    /// Returns whether a retired instance has finished its work; if so, removes it from the driver.
    pub(crate) fn is_retired(&self, instance: InstanceId) -> bool {
        let now = clock::now();
        let mut retired = false;
        self.turn(now, |state| {
            let idle = state.members.get(&instance).is_none_or(Member::is_idle);
            retired = idle && !state.scheduler.has_sequences_on(instance);
            if retired {
                state.scheduler.instance_lost(instance, now);
                state.remove_member(instance, now);
            }
        });
        retired
    }

    /// Forgets a retired instance whose process has ended, and removes it from the rate limiter.
    /// Its number can be used again.
    pub(crate) fn dismiss(&self, instance: InstanceId) {
        self.lock().retired.remove(&instance);
        if let Some(registration) = &self.limits {
            registration.remove(&[instance]);
        }
    }

    /// Returns whether an instance has unanswered batches.
    #[cfg(test)]
    pub(crate) fn is_executing(&self, instance: InstanceId) -> bool {
        self.lock().members.get(&instance).is_some_and(|member| !member.is_idle())
    }

    /// Returns when an instance began to execute its current batch, or the oldest batch with a
    /// request that it has not answered since; `None` if it executes nothing.
    pub(crate) fn executing_since(&self, instance: InstanceId) -> Option<Instant> {
        let state = self.lock();
        let member = state.members.get(&instance)?;
        let of_batch = member.in_flight.first().and_then(|first| {
            let mut moved = first.requests.iter().map(|(_, request)| request.sender.moved_at());
            // An instance that waits for a slow reader does not execute.
            moved.try_fold(member.executing_since, |latest, moved| Some(latest.max(moved?)))
        });
        // Responses of decoupled models have timeouts that the model sets.
        let deferred = member.deferred.values().filter(|_| !self.config.decoupled);
        of_batch.into_iter().chain(deferred.map(|deferred| deferred.since)).min()
    }

    /// Returns the number of accepted requests without an answer.
    pub(crate) fn unanswered(&self) -> usize {
        let state = self.lock();
        let mut unanswered = state.queued.len();
        for member in state.members.values() {
            unanswered += member.deferred.len();
            unanswered +=
                member.in_flight.iter().map(|batch| batch.count() as usize).sum::<usize>();
        }
        unanswered
    }

    /// Returns a request that an instance of this model executes, by its batch and position.
    pub(crate) fn request_at(&self, batch: u64, position: u32) -> Option<Arc<BatchedRequest>> {
        let state = self.lock();
        for member in state.members.values() {
            if let Some(deferred) = member.deferred.get(&(batch, position)) {
                return Some(deferred.request.batched.clone());
            }
            if let Some(flying) = member.in_flight.iter().find(|flying| flying.batch == batch) {
                return flying
                    .requests
                    .get(position as usize)
                    .map(|(_, request)| request.batched.clone());
            }
        }
        None
    }

    /// Returns the current load.
    pub(crate) fn load(&self, now: Instant) -> Load {
        let state = self.lock();
        let mut load = Load {
            waiting: state.queued.len(),
            busy_ns: state.busy_of_removed_ns,
            ..Load::default()
        };
        for member in state.members.values() {
            let mut batches = member.in_flight.iter().map(|batch| batch.count() as usize);
            load.executing += batches.next().unwrap_or_default() + member.deferred.len();
            load.waiting += batches.sum::<usize>();
            load.busy_ns += member.busy.total_ns(now);
        }
        load.instances = state.members.len();
        load.slots = self.batch_slots() * load.instances as u64;
        load
    }

    /// Returns the requests of batch size 1 that one batch can have.
    pub(crate) fn batch_slots(&self) -> u64 {
        u64::from(self.config.max_batch_size).max(1)
    }

    /// Returns the requests of batch size 1 that the next batch can take besides the requests in
    /// the queue.
    pub(crate) fn free_batch_slots(&self) -> u64 {
        let most = self.batch_slots();
        let state = self.lock();
        let mut free = most;
        // A long queue is not read to its end.
        for request in state.queued.values().take(usize::try_from(most).unwrap_or(usize::MAX)) {
            free = free.saturating_sub(request.batched.checked.batch_size.max(1));
        }
        free
    }

    /// Returns the nanoseconds since the last call in which each instance was busy, also of
    /// instances that were lost.
    pub(crate) fn take_busy_ns(&self, now: Instant) -> HashMap<InstanceId, u64> {
        let mut state = self.lock();
        let mut all = std::mem::take(&mut state.unrecorded_busy_ns);
        for (id, member) in &mut state.members {
            *all.entry(*id).or_default() += member.busy.take_ns(now);
        }
        all
    }

    /// Moves the metrics that workers have sent into the cache.
    pub(crate) fn drain_metrics(&self, cache: &Cache) {
        let links: Vec<SharedLink> =
            self.lock().members.values().map(|member| member.link.clone()).collect();
        for link in links {
            link.ring.scrape(cache, &self.series);
        }
    }

    /// Returns the bytes of inputs and outputs in each ready instance's arenas.
    pub(crate) fn arenas_used(&self) -> Vec<(InstanceId, u64, u64)> {
        let state = self.lock();
        let members = state.members.iter();
        let used = members.map(|(id, member)| {
            let arenas = &member.link.arenas;
            (*id, arenas.inputs.used(), arenas.outputs.used())
        });
        used.collect()
    }
}

impl Request {
    /// Creates padding with the given part.
    fn padding(batched: Arc<BatchedRequest>) -> (RequestId, Self) {
        let (no_reader, _) = oneshot::channel();
        let sender = AnswerSender::One(OneAnswer::new(no_reader, true));
        (PADDING, Self { batched, sender, retried: false, miss: None })
    }
}

/// Creates a request of zeros with the shapes of another.
fn zeros(like: &BatchedRequest) -> Arc<BatchedRequest> {
    let mut request = InferRequest::default();
    for InferInput { name, tensor: Tensor { datatype, shape, data } } in &like.request.inputs {
        let len = match datatype.size() {
            Some(_) => data.len(),
            None => usize::try_from(element_count(shape).unwrap_or(0) * EMPTY_ELEMENT).unwrap_or(0),
        };
        let tensor =
            Tensor { datatype: *datatype, shape: shape.clone(), data: Data::from(vec![0; len]) };
        request.inputs.push(InferInput { name: name.clone(), tensor });
    }
    for output in &like.request.outputs {
        // Padding is never written into client memory.
        request.outputs.push(RequestedOutput { region: None, ..output.clone() });
    }
    Arc::new(BatchedRequest { request, checked: like.checked, padding: true })
}

/// Returns a placeholder for splitting the batch's outputs: the request's shapes without its data.
fn stand_in(batched: &BatchedRequest) -> Arc<BatchedRequest> {
    let mut request =
        InferRequest { outputs: batched.request.outputs.clone(), ..InferRequest::default() };
    for InferInput { name, tensor: Tensor { datatype, shape, .. } } in &batched.request.inputs {
        let tensor = Tensor { datatype: *datatype, shape: shape.clone(), data: Data::default() };
        request.inputs.push(InferInput { name: name.clone(), tensor });
    }
    Arc::new(BatchedRequest { request, checked: batched.checked, padding: true })
}

/// Returns the error of a request whose worker died and that is not retried: it was before, some of
/// its responses were sent, or the clients of its backend expect the error.
fn lost(model: &ModelVersion, how: &str) -> InferError {
    let text = format!("the worker of model '{}' version {} died {how}", model.name, model.version);
    InferError::new(ErrorCode::Unavailable, Reason::InstanceLost, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_the_sum_of_periods() {
        let mut busy = BusyTime::default();
        assert_eq!(busy.total_ns(Instant(5)), 0);
        busy.set(Instant(10), true);
        busy.set(Instant(12), true);
        assert_eq!((busy.total_ns(Instant(15)), busy.take_ns(Instant(15))), (5, 5));
        busy.set(Instant(20), false);
        busy.set(Instant(25), false);
        assert_eq!((busy.total_ns(Instant(30)), busy.take_ns(Instant(30))), (10, 5));
        assert_eq!(busy.take_ns(Instant(30)), 0);
        busy.set(Instant(40), true);
        assert_eq!(busy.take_ns(Instant(41)), 1);
    }
}
