//! Requests of decoupled models. Each is answered through a bounded channel, any number of times,
//! while its batch is executed. A worker may have [`CREDITS`] unread responses of a request; credit
//! returns to it as the reader takes responses. The memory of a reader that does not read is thus
//! bounded.
//!
//! A request is complete with its last response, and counts then as succeeded or, if any response
//! was an error, as failed. Its place in the instance becomes free when the whole batch is done.

use std::collections::hash_map::Entry;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use parking_lot::{Mutex, MutexGuard};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::id::{InstanceId, RequestId};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record::{self, ResponseKind, StreamProgress, TokenProgress};
use pharos::metrics::series::ModelSeries;
use pharos::model::{Checked, ResponseTimeouts};
use pharos::service::Streamed;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{self, CREDITS, Credits, Done, Resumed, ToWorker};
use tokio::sync::{mpsc, oneshot};

use super::{Driver, InferResult, Request, State, request_trace, ticket, without_answer};
use crate::wire::{BatchedRequest, SharedLink};
use pharos_os::clock;
use pharos_os::event_loops::Mailbox;

/// The progress of a request's responses and of their reader, across all consecutive batches of the
/// request.
#[derive(Default)]
pub(super) struct Flow {
    /// The number of received responses that use credit.
    sent: AtomicU64,
    /// The number of them that were taken, as the worker knows or will be notified.
    taken: AtomicU64,
    /// The last change of `taken`, in nanoseconds of the stamps' clock.
    taken_at: AtomicU64,
    /// Whether the request is held until its reader has caught up.
    held: AtomicBool,
    /// The instance to notify: the one that executes or last executed the request. Locked only to
    /// read or replace it.
    position: Mutex<Option<BatchPosition>>,
    /// The responses with data, for the metrics.
    progress: StreamProgress,
    tokens: TokenProgress,
    /// The first response that was an error.
    failed: OnceLock<InferError>,
}

/// The position of a request in a batch of an instance.
#[derive(Clone)]
pub(super) struct BatchPosition {
    pub(super) link: SharedLink,
    pub(super) batch: u64,
    pub(super) request: u32,
}

impl Flow {
    fn outstanding(&self) -> u64 {
        self.sent.load(Ordering::Relaxed).saturating_sub(self.taken.load(Ordering::SeqCst))
    }

    /// Counts responses as taken and notifies the worker. The position is read after the sum has
    /// changed, so a batch built with the old sum is always notified: see [`Flow::tell_since`].
    fn mark_taken(&self, responses: u64) {
        let taken = self.taken.fetch_add(responses, Ordering::SeqCst) + responses;
        self.taken_at.store(clock::now().0, Ordering::Relaxed);
        if let Some(position) = &*self.position() {
            position.report(taken);
        }
    }

    /// Returns the progress for the batch that is about to be sent.
    pub(super) fn resumed(&self, request: u32) -> Resumed {
        Resumed {
            request,
            sent: self.sent.load(Ordering::Relaxed),
            taken: self.taken.load(Ordering::SeqCst),
        }
    }

    /// Notifies the worker of responses taken after [`Flow::resumed`]: notifications that it got
    /// before the batch were lost. Sums may be sent twice.
    pub(super) fn tell_since(&self, resumed: &Resumed) {
        let taken = self.taken.load(Ordering::SeqCst);
        if let Some(position) = self.position().as_ref().filter(|_| taken != resumed.taken) {
            position.report(taken);
        }
    }

    fn position(&self) -> MutexGuard<'_, Option<BatchPosition>> {
        self.position.lock()
    }
}

impl BatchPosition {
    /// Notifies the worker of the number of taken responses; 0 only wakes it.
    pub(super) fn report(&self, taken: u64) {
        let &Self { ref link, batch, request } = self;
        let released = link.arenas.outputs.take_released();
        link.send(&ToWorker::Credits(Credits { batch, request, taken, released }));
    }
}

/// A response in the channel to the reader.
struct Item {
    streamed: Streamed,
    costs_credit: bool,
}

/// The receiver of a request's answers.
pub(super) enum AnswerSender {
    /// An ordinary model's request, with one answer.
    One(OneAnswer),
    /// A decoupled model's request.
    Many(Box<ResponseSender>),
}

/// The driver's end of a request's only answer.
pub(super) struct OneAnswer {
    sender: oneshot::Sender<InferResult>,
    /// The event loop that waits for the answer, if it may be passed on there later than other
    /// answers are sent.
    mailbox: Option<Mailbox>,
}

impl OneAnswer {
    /// The receiver belongs to the current thread's event loop, if it has one. `in_order`: each
    /// answer must be there before the next one is sent.
    pub(super) fn new(sender: oneshot::Sender<InferResult>, in_order: bool) -> Self {
        Self { sender, mailbox: if in_order { None } else { Mailbox::of_this_thread() } }
    }

    fn send(self, answer: InferResult) {
        let Self { sender, mailbox } = self;
        match mailbox.filter(|mailbox| !mailbox.is_of_this_thread()) {
            None => drop(sender.send(answer)),
            Some(mailbox) => mailbox.give(move || drop(sender.send(answer))),
        }
    }
}

/// The driver's end of a request's responses.
pub(super) struct ResponseSender {
    /// `None` after the last response.
    sender: Option<mpsc::Sender<Item>>,
    flow: Arc<Flow>,
    /// The number of responses so far.
    count: u64,
    /// When the worker ended the latest one.
    latest_end: Instant,
}

impl AnswerSender {
    /// Sends the only or last answer. If the client has disconnected, it is dropped.
    pub(super) fn send(self, answer: InferResult) {
        match self {
            Self::One(answer_sender) => answer_sender.send(answer),
            Self::Many(sink) => {
                let item = Item {
                    streamed: Streamed { answer, last: true, empty: false },
                    costs_credit: false,
                };
                if let Some(sender) = sink.sender {
                    // The channel always has room for the end of a request.
                    let _ = sender.try_send(item);
                }
            }
        }
    }

    /// Counts the end of a request of a decoupled model without a further response of a worker.
    /// Call it before the answer.
    pub(super) fn record_end(&self, series: &ModelSeries) {
        if let Self::Many(sink) = self {
            record::stream_ended(series, &sink.flow.progress);
        }
    }

    /// Returns whether a response had a token.
    pub(super) fn has_token(&self) -> bool {
        matches!(self, Self::Many(sink) if sink.flow.tokens.has_token())
    }

    /// Returns whether the reader is gone.
    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::One(answer_sender) => answer_sender.sender.is_closed(),
            Self::Many(sink) => sink.sender.as_ref().is_none_or(mpsc::Sender::is_closed),
        }
    }

    /// Returns whether a response was sent, so that the request cannot be executed again.
    pub(super) fn has_begun(&self) -> bool {
        matches!(self, Self::Many(sink) if sink.count > 0)
    }

    /// Returns whether the last response was sent.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Many(sink) if sink.sender.is_none())
    }

    /// Returns whether another response would have to wait for the reader. If so, the request is
    /// held until [`InstanceResponses::poll_next`] resumes it.
    pub(super) fn is_behind(&self) -> bool {
        let Self::Many(sink) = self else { return false };
        sink.flow.held.store(true, Ordering::SeqCst);
        // Read after setting the mark: a concurrent reader either finds the mark, or its update is
        // found here.
        let behind = sink.flow.outstanding() >= CREDITS.into();
        behind || !sink.flow.held.swap(false, Ordering::SeqCst)
    }

    /// Records the position in a batch of this instance. Returns the flow if responses have used
    /// credit.
    pub(super) fn placed(&self, link: &SharedLink, batch: u64, request: u32) -> Option<Arc<Flow>> {
        let Self::Many(sink) = self else { return None };
        *sink.flow.position() = Some(BatchPosition { link: link.clone(), batch, request });
        (sink.flow.sent.load(Ordering::Relaxed) > 0).then(|| sink.flow.clone())
    }

    /// Returns when the worker or the reader last made progress; `None` while the worker has to
    /// wait for the reader.
    pub(super) fn moved_at(&self) -> Option<Instant> {
        let Self::Many(sink) = self else { return Some(Instant(0)) };
        let waits = sink.sender.is_some() && sink.flow.outstanding() >= CREDITS.into();
        (!waits).then(|| Instant(sink.flow.taken_at.load(Ordering::Relaxed)).max(sink.latest_end))
    }
}

/// The responses to one request of a decoupled model. Dropping it before the last one cancels the
/// request.
pub(crate) struct InstanceResponses {
    driver: Arc<Driver>,
    id: RequestId,
    receiver: mpsc::Receiver<Item>,
    flow: Arc<Flow>,
    /// Whether the response that was returned last used credit; polling again means that it was
    /// taken.
    given: bool,
    /// The number of responses taken since credit was last returned.
    taken: u64,
    ended: bool,
    timer: ResponseTimer,
}

/// How long the reader of a request still waits for its next response.
struct ResponseTimer {
    timeouts: ResponseTimeouts,
    /// When the wait for the next response ends; `None` if it never does.
    until: Option<Instant>,
    /// Fires at `until` or before it: a later response moves only `until`.
    sleep: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    has_begun: bool,
}

impl ResponseTimer {
    fn new(timeouts: ResponseTimeouts, now: Instant) -> Self {
        Self {
            timeouts,
            until: timeouts.first.map(|limit| now + limit),
            sleep: None,
            has_begun: false,
        }
    }

    /// Takes a response that the reader gets now.
    fn restart(&mut self) {
        self.has_begun = true;
        if self.timeouts != ResponseTimeouts::default() {
            self.until = self.timeouts.interval.map(|limit| clock::now() + limit);
        }
    }

    /// Returns the error of a request whose response does not come in time.
    fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<InferError> {
        while let Some(until) = self.until {
            let sleep = self.sleep.get_or_insert_with(|| Box::pin(clock::sleep_until(until)));
            ready!(sleep.as_mut().poll(cx));
            self.sleep = None;
            if clock::now() >= until {
                let (what, limit) = match self.has_begun {
                    true => ("next", self.timeouts.interval),
                    false => ("first", self.timeouts.first),
                };
                let limit = limit.unwrap_or_default();
                let text = format!("the {what} response did not come within {limit:?}");
                return Poll::Ready(InferError::new(
                    ErrorCode::DeadlineExceeded,
                    Reason::Timeout,
                    text,
                ));
            }
        }
        Poll::Pending
    }
}

impl InstanceResponses {
    /// Returns the next response, or `None` after the last.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if std::mem::take(&mut self.given) {
            self.taken += 1;
            if self.taken >= u64::from(CREDITS / 2) {
                self.flow.mark_taken(std::mem::take(&mut self.taken));
                if self.flow.held.swap(false, Ordering::SeqCst) {
                    self.driver.resume(self.id);
                }
            }
        }
        let only = |answer| Item {
            streamed: Streamed { answer, last: true, empty: false },
            costs_credit: false,
        };
        let item = match self.receiver.poll_recv(cx) {
            Poll::Ready(received) => received.unwrap_or_else(|| only(without_answer())),
            Poll::Pending => {
                let error = ready!(self.timer.poll_end(cx));
                self.receiver.close();
                self.driver.cancel(self.id);
                only(Err(error))
            }
        };
        self.timer.restart();
        let Item { streamed, costs_credit } = item;
        self.ended = streamed.last;
        self.given = costs_credit;
        Poll::Ready(Some(streamed))
    }
}

impl Drop for InstanceResponses {
    fn drop(&mut self) {
        if !self.ended {
            self.receiver.close();
            self.driver.cancel(self.id);
        }
    }
}

/// A received response with its destination.
struct Arrival {
    batched: Arc<BatchedRequest>,
    sender: mpsc::Sender<Item>,
    flow: Arc<Flow>,
    /// The number of earlier responses.
    number: u64,
    /// When the worker started it.
    since: Instant,
}

/// The properties of a response.
struct Kind {
    stamps: ComputeStamps,
    last: bool,
    empty: bool,
}

impl State {
    /// Finds the request of a response and books it. Returns an error for an invalid response, and
    /// `Ok(None)` for a batch that is no longer known.
    fn note_response(
        &mut self,
        instance: InstanceId,
        frame: &wire::Response,
    ) -> Result<Option<ReceivedResponse>, &'static str> {
        let Some(member) = self.members.get_mut(&instance) else { return Ok(None) };
        let place = (frame.batch, frame.request);
        if let Entry::Occupied(mut entry) = member.deferred.entry(place) {
            let booked = match &mut entry.get_mut().request {
                Request { sender: AnswerSender::Many(sink), batched, .. } => {
                    sink.take(batched.clone(), frame).map(ReceivedResponse::Streamed)?
                }
                _ => {
                    let deferred = entry.remove();
                    member.update_busy_time(clock::now());
                    return Ok(Some(ReceivedResponse::Single(deferred.id, deferred.request)));
                }
            };
            if frame.last {
                entry.remove();
                member.update_busy_time(clock::now());
            }
            return Ok(Some(booked));
        }
        let batch = member.in_flight.iter_mut().find(|batch| batch.batch == frame.batch);
        let Some(batch) = batch else { return Ok(None) };
        let request = batch.requests.get_mut(frame.request as usize);
        let (_, request) = request.ok_or("a response to a request that is not in its batch")?;
        match &mut request.sender {
            AnswerSender::Many(sink) => {
                sink.take(request.batched.clone(), frame).map(ReceivedResponse::Streamed).map(Some)
            }
            AnswerSender::One(_) => {
                Err("more than one response to a request of a model that is not decoupled")
            }
        }
    }
}

/// A response with its destination.
enum ReceivedResponse {
    /// One of any number of responses.
    Streamed(Arrival),
    /// The only response.
    Single(RequestId, Request),
}

impl ResponseSender {
    /// Books a response of a worker.
    fn take(
        &mut self,
        batched: Arc<BatchedRequest>,
        frame: &wire::Response,
    ) -> Result<Arrival, &'static str> {
        if costs_credit(frame) && self.flow.outstanding() >= CREDITS.into() {
            return Err("more responses than its credit allows");
        }
        self.flow.sent.fetch_add(u64::from(costs_credit(frame)), Ordering::Relaxed);
        self.note(batched, frame.stamps, frame.last).ok_or("a response after the last one")
    }

    fn note(
        &mut self,
        batched: Arc<BatchedRequest>,
        stamps: ComputeStamps,
        last: bool,
    ) -> Option<Arrival> {
        let sender = if last { self.sender.take()? } else { self.sender.clone()? };
        let since = if self.count == 0 { stamps.start } else { self.latest_end };
        self.latest_end = stamps.end;
        self.count += 1;
        Some(Arrival { batched, sender, flow: self.flow.clone(), number: self.count - 1, since })
    }
}

/// A response that only ends a request uses no credit.
fn costs_credit(frame: &wire::Response) -> bool {
    !(frame.last && (frame.empty || frame.error.is_some()))
}

impl Driver {
    /// Schedules a checked request of a decoupled model.
    pub(crate) fn stream(
        self: &Arc<Self>,
        mut request: InferRequest,
        checked: Checked,
    ) -> InstanceResponses {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let now = clock::now();
        request.timeline.queue_start = now;
        request_trace::queued(&self.model, &request);
        if self.generates_text {
            request_trace::generates(&request);
        }
        let ticket = ticket(id, &request, &checked);
        let (sender, receiver) = mpsc::channel(CREDITS as usize + 1);
        let flow = Arc::new(Flow::default());
        let sink = ResponseSender {
            sender: Some(sender),
            flow: flow.clone(),
            count: 0,
            latest_end: Instant(0),
        };
        let sender = AnswerSender::Many(Box::new(sink));
        let batched = Arc::new(BatchedRequest { request, checked, padding: false });
        self.turn(now, |state| {
            state.queued.insert(id, Request { batched, sender, retried: false, miss: None });
            record::request_pending(&self.series, 1);
            state.scheduler.enqueue(ticket, now);
        });
        InstanceResponses {
            driver: self.clone(),
            id,
            receiver,
            flow,
            given: false,
            taken: 0,
            ended: false,
            timer: ResponseTimer::new(self.config.response_timeouts, now),
        }
    }

    /// Handles a response of a batch that is still running.
    ///
    /// # Errors
    /// The worker violates the protocol and must be replaced.
    pub(crate) fn response(
        &self,
        instance: InstanceId,
        link: &SharedLink,
        frame: wire::Response,
    ) -> io::Result<()> {
        let (booked, has_room) = {
            let mut state = self.lock();
            let booked = state.note_response(instance, &frame);
            if matches!(booked, Ok(Some(_))) {
                state.last_answered = clock::now();
            }
            let limit = self.config.max_open_requests;
            let member = state.members.get(&instance);
            (booked, member.is_some_and(|member| member.has_room_again(limit)))
        };
        if has_room {
            self.deferred_ended(instance);
        }
        let arrival = match booked.map_err(io::Error::other)? {
            Some(ReceivedResponse::Streamed(arrival)) => arrival,
            Some(ReceivedResponse::Single(id, request)) => {
                self.answer_deferred(id, request, link, frame);
                return Ok(());
            }
            None => {
                self.discard(link, &frame);
                return Ok(());
            }
        };
        // Frees the memory of the outputs, also if there is an error.
        let mut answer = self.answer_of(&arrival.batched, link, &frame.outputs);
        let costs_credit = costs_credit(&frame);
        if let Some(error) = frame.error {
            answer = Err(error.into());
        }
        if let Ok(response) = &mut answer {
            response.parameters = frame.parameters;
        }
        let kind = Kind { stamps: frame.stamps, last: frame.last, empty: frame.empty };
        self.pass_on(arrival, answer, &kind, costs_credit);
        link.send_released_if_many();
        Ok(())
    }

    /// Releases the memory of a response that has no reader.
    pub(crate) fn discard(&self, link: &SharedLink, frame: &wire::Response) {
        for block in
            frame.outputs.iter().filter(|block| !block.in_client_memory && block.loan.is_none())
        {
            drop(link.arenas.outputs.take(block.offset, block.len));
        }
        // Grants unlimited credit for further responses to this request, which are discarded too.
        BatchPosition { link: link.clone(), batch: frame.batch, request: frame.request }
            .report(u64::MAX);
    }

    /// Records a response and sends it to its reader.
    fn pass_on(&self, arrival: Arrival, mut answer: InferResult, kind: &Kind, costs_credit: bool) {
        let Arrival { batched, sender, flow, number, since } = arrival;
        let &Kind { stamps, last, empty } = kind;
        let is_abandoned = sender.is_closed();
        let mut timeline = batched.request.timeline;
        timeline.compute = stamps;
        timeline.request_end = clock::now();
        if let Ok(response) = &mut answer {
            response.timeline = timeline;
        }
        let what = match &answer {
            Ok(response) if response.outputs.is_empty() => ResponseKind::Empty,
            Ok(_) => ResponseKind::Success,
            Err(error) if error.code == ErrorCode::Cancelled => ResponseKind::Cancel,
            Err(_) => ResponseKind::Fail,
        };
        request_trace::answered(&batched.request, &answer, last.then_some(&timeline));
        let infer_ns = stamps.output_start.ns_since(since);
        let output_ns = stamps.end.ns_since(stamps.output_start.max(since));
        let transaction = self.series.begin();
        record::response_done(&self.series, number, what, infer_ns, output_ns);
        if number == 0 && !empty {
            record::first_response(&self.series, timeline.request_ns());
        }
        if let (Ok(response), false) = (&answer, empty) {
            self.count_tokens(response, &batched, &flow.tokens, number == 0 && last);
            let bytes = response.byte_size();
            record::stream_response(
                &self.series,
                &flow.progress,
                timeline.request_start,
                timeline.request_end,
                bytes,
            );
        }
        if let Err(error) = &answer {
            flow.failed.get_or_init(|| error.clone());
        }
        if last {
            record::stream_ended(&self.series, &flow.progress);
            match flow.failed.get() {
                Some(error) => {
                    let ns = timeline.request_ns();
                    self.record_failed_after(&batched, error, ns, flow.tokens.has_token());
                }
                None => {
                    self.record_one(&batched, &answer, &timeline, is_abandoned);
                    self.count_finished(&flow.tokens, &timeline);
                }
            }
        }
        drop(transaction);
        let item = Item { streamed: Streamed { answer, last, empty }, costs_credit };
        // Credit guarantees room in the channel; a send fails only if the client has disconnected.
        let _ = sender.try_send(item);
    }

    /// Ends the streams of a finished batch: requests without a last response end with the result
    /// of the batch.
    pub(super) fn finish_streams(
        &self,
        requests: Vec<(RequestId, Request)>,
        link: &SharedLink,
        done: &Done,
        elapsed_ns: u64,
    ) {
        let batched_requests: Vec<Arc<BatchedRequest>> =
            requests.iter().map(|(_, request)| request.batched.clone()).collect();
        self.record_batch(&batched_requests, done);
        let answers = self.answers(&batched_requests, link, done);
        for ((_, request), answer) in requests.into_iter().zip(answers) {
            let AnswerSender::Many(mut sink) = request.sender else { continue };
            let empty = answer.is_ok() && (sink.count > 0 || done.outputs.is_empty());
            let has_left = sink.sender.as_ref().is_some_and(mpsc::Sender::is_closed);
            if let Some(arrival) = sink.note(request.batched, done.stamps, true) {
                let last = match answer {
                    // For a disconnected client it is unknown whether more responses would have
                    // followed.
                    Ok(_) if empty && has_left => Err(InferError::cancelled()),
                    Ok(response) if empty => Ok(bare(response)),
                    answer => answer,
                };
                let kind = Kind { stamps: done.stamps, last: true, empty };
                self.pass_on(arrival, last, &kind, false);
            }
        }
        let executed_ns = done.stamps.end.ns_since(done.stamps.start);
        record::batch_times(
            &self.series,
            std::iter::empty(),
            elapsed_ns.saturating_sub(executed_ns),
        );
        link.send_released_if_many();
    }
}

/// Returns the response without outputs.
fn bare(response: InferResponse) -> InferResponse {
    InferResponse { outputs: Vec::new(), parameters: Vec::new(), ..response }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
