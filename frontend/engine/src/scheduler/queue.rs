//! Requests before an instance executes them: the response cache, the queue, and the sequences of
//! the scheduler.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use pharos::cache::Entry;
use pharos::error::{InferError, Reason};
use pharos::id::{CorrelationId, InstanceId, RequestId};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record::{self, Failed, MissTimes};
use pharos::metrics::series::ModelSeries;
use pharos::metrics::text_lines::shortened;
use pharos::model::{Checked, ModelConfig, Scheduling, SequenceBatching};
use pharos::scheduler::{self, RejectReason, SequenceCounts};
use pharos::timeline::{CacheLookup, ComputeStamps, Instant};
use tokio::sync::oneshot;

use super::stream::{AnswerSender, BatchPosition, OneAnswer};
use super::{Driver, InferResult, Request, State, request_trace, ticket, without_answer};
use crate::cache::{Found, LookUpTimes, ModelResponseCache};
use crate::wire::BatchedRequest;
use pharos_os::clock;

/// The maximum number of priority levels with series from the start; a model may have any number of
/// levels.
const MAX_LEVELS: u64 = 16;

/// Builds and records the response to a request from a cache entry.
pub(crate) fn answer_found(
    config: &ModelConfig,
    series: &ModelSeries,
    request: &InferRequest,
    entry: &Entry,
    times: LookUpTimes,
) -> InferResponse {
    let LookUpTimes { started, ended } = times;
    let mut response = entry.to_response(config, series.model().version, request);
    let timeline = &mut response.timeline;
    timeline.compute =
        ComputeStamps { start: started, input_end: started, output_start: started, end: started };
    timeline.request_end = clock::now();
    timeline.cache = Some(CacheLookup::Hit);
    {
        let _transaction = series.begin();
        record::cache_hit(series, timeline, ended.ns_since(started));
        record::tenant_served(series, request.tenant, timeline);
        if let Some(trace) = request.trace {
            record::inference_traced(series, timeline, trace, clock::wall_ms());
        }
    }
    request_trace::found(request, &response.outputs, timeline.request_end);
    response
}

/// Records the look-up and the insertion of a response that the cache did not have.
pub(crate) fn record_miss(series: &ModelSeries, times: MissTimes, response: &mut InferResponse) {
    response.timeline.insertion_ns = times.insertion_ns;
    response.timeline.cache = Some(CacheLookup::Miss);
    record::cache_miss(series, times);
}

impl Driver {
    /// Answers a checked request from the response cache or the queue. Dropping the future cancels
    /// the request.
    ///
    /// # Errors
    /// The request is invalid, the queue refuses it, or the backend fails.
    pub(crate) async fn infer(
        &self,
        mut request: Box<InferRequest>,
        checked: Checked,
    ) -> InferResult {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let mut now = clock::now();
        request.timeline.queue_start = now;
        request_trace::queued(&self.model, &request);
        if self.generates_text {
            request_trace::generates(&request);
        }
        let mut miss = None;
        if let Some(cache) =
            self.response_cache.as_ref().filter(|_| request.is_cacheable() && self.may_cache())
        {
            // Boxed: requests without the cache should not move the large futures.
            match Box::pin(self.look_up(cache, id, &request, &checked)).await {
                Found::Hit(entry, times) => {
                    let batched = BatchedRequest { request: *request, checked, padding: false };
                    return Box::pin(self.answer_hit(id, batched, entry, times)).await;
                }
                Found::Miss(not_found) => miss = Some(not_found),
            }
            now = clock::now();
            request.timeline.queue_start = now;
        }
        let ticket = ticket(id, &request, &checked);
        let (sender, answer) = oneshot::channel();
        let sender = AnswerSender::One(OneAnswer::new(sender, self.ordered));
        let batched = Arc::new(BatchedRequest { request: *request, checked, padding: false });
        let cancel = CancelOnDrop::new(self, id);
        self.turn(now, |state| {
            state.queued.insert(id, Request { batched, sender, retried: false, miss });
            if let Some(order) = &mut state.order {
                order.expect(id);
            }
            record::request_pending(&self.series, 1);
            state.scheduler.enqueue(ticket, now);
        });
        let answer = answer.await;
        cancel.disarm();
        answer.unwrap_or_else(|_| without_answer())
    }

    /// Looks up a request. Dropping the future cancels the request.
    pub(super) async fn look_up(
        &self,
        cache: &ModelResponseCache,
        id: RequestId,
        request: &InferRequest,
        checked: &Checked,
    ) -> Found {
        if self.ordered {
            self.turn(request.timeline.queue_start, |state| {
                if let Some(order) = &mut state.order {
                    order.expect(id);
                }
            });
        }
        let mut guard = LookUpGuard { driver: self, id: Some(id), request };
        let found = cache.look_up(&self.config, request, checked.batch_size).await;
        guard.id = None;
        found
    }

    /// Answers a request with a cache entry.
    pub(super) async fn answer_hit(
        &self,
        id: RequestId,
        batched: BatchedRequest,
        entry: Arc<Entry>,
        times: LookUpTimes,
    ) -> InferResult {
        let response = answer_found(&self.config, &self.series, &batched.request, &entry, times);
        if !self.ordered {
            return Ok(response);
        }
        let (sender, answer) = oneshot::channel();
        let sender = AnswerSender::One(OneAnswer::new(sender, true));
        let request = Request { batched: Arc::new(batched), sender, retried: false, miss: None };
        self.turn(clock::now(), |state| self.finish(state, id, request, Ok(response)));
        answer.await.unwrap_or_else(|_| without_answer())
    }

    pub(super) fn cancel(&self, id: RequestId) {
        let now = clock::now();
        let mut executing = None;
        let mut deferred = None;
        self.turn(now, |state| {
            if state.queued.contains_key(&id) {
                state.scheduler.cancel(id, now);
            } else {
                executing = flag_cancelled(state, id);
                deferred = state.cancellation_frame(id);
            }
        });
        if let Some((link, frame)) = deferred {
            link.send(&frame);
        }
        if let Some(position) = executing.filter(|_| self.config.decoupled) {
            // The worker may be waiting for this request's reader.
            position.report(0);
        }
    }

    /// Answers a request that the scheduler has rejected.
    pub(super) fn reject(&self, state: &mut State, id: RequestId, reason: RejectReason) {
        let Some(request) = state.queued.remove(&id) else { return };
        record::request_pending(&self.series, -1);
        let mut error = self.error(reason, &request);
        if !reason.refused_on_arrival() {
            let ns = clock::now().ns_since(request.batched.request.timeline.request_start);
            self.record_failed(&request.batched, &error, ns);
            request.sender.record_end(&self.series);
        } else {
            record::inference_refused(&self.series, error.reason);
        }
        // Triton includes the request's id only in errors on arrival.
        let is_named = matches!(
            reason,
            RejectReason::QueueFull
                | RejectReason::Stopping
                | RejectReason::NoInstance
                | RejectReason::NotRestarted
                | RejectReason::Exiting
        );
        if is_named {
            error = error.with_request_id(&request.batched.request.id);
        }
        request_trace::failed(request.batched.request.traced.as_ref(), &error, clock::now());
        if let Some(order) = &mut state.order {
            // Answered out of order, as in Triton: requests that were not executed wait for no
            // other.
            order.remove(id);
        }
        self.finish(state, id, request, Err(error));
    }

    pub(super) fn error(&self, reason: RejectReason, request: &Request) -> InferError {
        reason.error(&self.model.name, &request.batched.request.correlation_id)
    }

    /// Rejects all waiting requests because the server's shutdown limit is over; lost requests are
    /// no longer retried.
    pub(crate) fn reject_all_at_exit(&self) {
        let now = clock::now();
        self.turn(now, |state| {
            state.closed = true;
            state.scheduler.reject_all(RejectReason::Exiting, now);
        });
    }

    /// Rejects waiting requests after an instance has broken, if there is no other instance.
    pub(crate) fn reject_if_alone(&self) {
        let now = clock::now();
        self.turn(now, |state| {
            if !state.has_open_member() {
                state.scheduler.reject_all(RejectReason::NoInstance, now);
            }
        });
    }

    /// Rejects requests that have waited longer than `longest`, if no instance is ready and none
    /// has answered anything for that time. The first of their consecutive losses was at `lost`.
    pub(crate) fn reject_waiting(&self, longest: Duration, lost: Instant) {
        let now = clock::now();
        let ns = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX);
        self.turn(now, |state| {
            // Between losses, instances may have served.
            if !state.has_open_member() && now - lost.max(state.last_answered) >= longest {
                let queued = Instant(now.0.saturating_sub(ns));
                state.scheduler.reject_queued_before(queued, RejectReason::NotRestarted, now);
            }
        });
    }

    /// Refuses new requests and finishes the waiting ones.
    pub(crate) fn stop(&self) {
        let now = clock::now();
        self.turn(now, |state| state.scheduler.stop(now));
    }

    /// Returns the waiting requests of the queue.
    pub(crate) fn waiting(&self) -> scheduler::Waiting {
        self.lock().scheduler.waiting()
    }

    /// Returns the priority levels that have series from the start; others have series while
    /// requests wait there.
    pub(crate) fn levels(&self) -> std::ops::RangeInclusive<u64> {
        match self.priority_levels {
            0 => 0..=0,
            levels => 1..=levels.min(MAX_LEVELS),
        }
    }

    /// Resumes a held request whose reader has caught up.
    pub(super) fn resume(&self, id: RequestId) {
        self.turn(clock::now(), |state| state.scheduler.resume(id));
    }

    /// Returns whether the model's requests belong to sequences, so that none is sent twice.
    pub(super) fn has_sequences(&self) -> bool {
        matches!(self.config.scheduling, Scheduling::Sequence(_))
    }

    /// Returns whether each request is a separate sequence.
    pub(super) fn is_iterative(&self) -> bool {
        matches!(
            self.config.scheduling,
            Scheduling::Sequence(SequenceBatching { iterative: true, .. })
        )
    }

    /// Returns the sequence counts of a model with sequences, and since the last call the numbers
    /// of sequences evicted for idleness, of requests refused for their START flag, and of
    /// sequences restarted by it.
    pub(crate) fn sequences(&self) -> Option<(SequenceCounts, [u64; 3])> {
        let now = self.lock().scheduler.sequences()?;
        let [evicted, refused, restarted] = &self.sequences_recorded;
        let new = [
            take_new(evicted, now.idle_evicted),
            take_new(refused, now.start_errors),
            take_new(restarted, now.restarts),
        ];
        Some((now, new))
    }

    /// Returns the number of open sequences that shutdown waits for. Sequences with implicit start
    /// end only by idleness, so they are not waited for.
    pub(crate) fn sequences_to_end(&self) -> usize {
        if matches!(&self.config.scheduling, Scheduling::Sequence(batching) if batching.implicit_start)
        {
            return 0;
        }
        self.open_sequences()
    }

    /// Returns the number of sequences that have begun and not ended.
    pub(crate) fn open_sequences(&self) -> usize {
        self.lock().scheduler.sequences().map_or(0, |counts| counts.active + counts.backlogged)
    }

    /// Returns whether a sequence with this id is running.
    pub(crate) fn has_sequence(&self, id: &CorrelationId) -> bool {
        self.lock().scheduler.has_sequence(id)
    }

    /// Returns whether an instance has open sequences.
    pub(crate) fn has_sequences_on(&self, instance: InstanceId) -> bool {
        self.lock().scheduler.has_sequences_on(instance)
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

    /// Logs that an active sequence was restarted; at most once a second, since any client can
    /// cause it.
    pub(super) fn notify_restarted(&self, sequence: &CorrelationId) {
        let held = self.restarts_logged.lock().admit(clock::now());
        let Some(held) = held else { return };
        let id = shortened(sequence.to_string().as_bytes());
        let more = if held > 0 {
            format!(" (and {held} more since the last message)")
        } else {
            String::new()
        };
        tracing::warn!(
            model = %self.model,
            "the START flag restarted the active sequence {id}; waiting requests of the old sequence are executed \
             first{more}"
        );
    }
}

/// Cancels a request whose client disconnects during the lookup.
struct LookUpGuard<'a> {
    driver: &'a Driver,
    id: Option<RequestId>,
    request: &'a InferRequest,
}

impl Drop for LookUpGuard<'_> {
    fn drop(&mut self) {
        let Some(id) = self.id.take() else { return };
        let now = clock::now();
        let ns = now.ns_since(self.request.timeline.request_start);
        {
            let _transaction = self.driver.series.begin();
            record::inference_failed(
                &self.driver.series,
                Failed::abandoned(self.request.leaves_at, now),
                ns,
            );
            record::tenant_failed(&self.driver.series, self.request.tenant, Reason::Cancelled);
        }
        request_trace::failed(self.request.traced.as_ref(), &InferError::cancelled(), now);
        if self.driver.ordered {
            self.driver.turn(now, |state| {
                if let Some(order) = &mut state.order {
                    order.remove(id);
                }
            });
        }
    }
}

/// Cancels a request if its client's future is dropped before the answer arrives.
pub(super) struct CancelOnDrop<'a> {
    driver: &'a Driver,
    id: Option<RequestId>,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.driver.cancel(id);
        }
    }
}

impl<'a> CancelOnDrop<'a> {
    pub(super) fn new(driver: &'a Driver, id: RequestId) -> Self {
        Self { driver, id: Some(id) }
    }

    /// Disarms the guard after the answer.
    pub(super) fn disarm(mut self) {
        self.id = None;
    }
}

/// Signals the instance that executes a request, or soon will, that it was cancelled. Returns the
/// batch and the position in it.
fn flag_cancelled(state: &mut State, id: RequestId) -> Option<BatchPosition> {
    for member in state.members.values_mut() {
        for batch in &mut member.in_flight {
            if let Some(position) = batch.requests.iter().position(|(request, _)| *request == id) {
                member.link.arenas.inputs.set_cancelled(batch.flags, position);
                batch.has_cancelled = true;
                let request = u32::try_from(position).unwrap_or(u32::MAX);
                return Some(BatchPosition {
                    link: member.link.clone(),
                    batch: batch.batch,
                    request,
                });
            }
        }
    }
    None
}

/// Returns by how much a count has grown beyond what the metrics include, and marks it as included.
fn take_new(recorded: &AtomicU64, count: u64) -> u64 {
    count.saturating_sub(recorded.fetch_max(count, Ordering::Relaxed))
}
