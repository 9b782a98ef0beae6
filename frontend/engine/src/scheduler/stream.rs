//! Requests of decoupled models: each is answered through a bounded channel, any number of times, while its batch is
//! executed. A worker may have [`CREDITS`] responses of a request under way; they come back to it as the reader takes the
//! responses, so that a reader who does not read costs that much memory and no more.
//!
//! A request is complete when its last response is there, with the statistics of a request that succeeded or failed; its
//! place in the instance is free when the whole batch is done.

use std::collections::hash_map::Entry;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use pharos::error::{ErrorCode, InferError};
use pharos::id::{InstanceId, RequestId};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::record::{self, ResponseKind};
use pharos::model::Checked;
use pharos::service::Streamed;
use pharos::timeline::{ComputeStamps, Instant};
use pharos::wire::{self, CREDITS, Credits, Done, Resumed, ToWorker};
use tokio::sync::{mpsc, oneshot};

use super::{Answer, Driver, Request, State, lost, request_trace, ticket};
use crate::wire::{Part, SharedLink};
use pharos_os::clock;

/// How far the responses of a request and their reader are, over all the batches that it is in, one after the other.
#[derive(Default)]
pub(super) struct Flow {
    /// Responses that have come and cost credit.
    sent: AtomicU64,
    /// How many of them the worker knows, or will be told, to have been taken.
    taken: AtomicU64,
    /// When that changed last, nanoseconds of the clock of all stamps.
    paid_at: AtomicU64,
    /// The request is held until its reader has caught up.
    held: AtomicBool,
    /// Who has to be told: the instance that executes the request or did so last. Held to look at it only.
    position: Mutex<Option<BatchPosition>>,
}

/// The position of a request in a batch of an instance.
#[derive(Clone)]
pub(super) struct BatchPosition {
    pub(super) link: SharedLink,
    pub(super) batch: u64,
    pub(super) request: u32,
}

impl Flow {
    fn unpaid(&self) -> u64 {
        self.sent.load(Ordering::Relaxed).saturating_sub(self.taken.load(Ordering::SeqCst))
    }

    /// Counts responses as taken, and tells the worker. The position is read after the sum has changed, so a batch that was
    /// made with the old sum is always seen: see [`Flow::tell_since`].
    fn pay(&self, responses: u64) {
        let taken = self.taken.fetch_add(responses, Ordering::SeqCst) + responses;
        self.paid_at.store(clock::now().0, Ordering::Relaxed);
        if let Some(position) = &*self.position() {
            position.tell(taken);
        }
    }

    /// How far it is, for the batch that is about to be sent.
    pub(super) fn resumed(&self, request: u32) -> Resumed {
        Resumed { request, sent: self.sent.load(Ordering::Relaxed), taken: self.taken.load(Ordering::SeqCst) }
    }

    /// Tells the batch that has been sent what was taken since [`Flow::resumed`]: if the worker was told before it had the
    /// batch, it has not listened. Sums may be told twice.
    pub(super) fn tell_since(&self, told: &Resumed) {
        let taken = self.taken.load(Ordering::SeqCst);
        if let Some(position) = self.position().as_ref().filter(|_| taken != told.taken) {
            position.tell(taken);
        }
    }

    fn position(&self) -> MutexGuard<'_, Option<BatchPosition>> {
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BatchPosition {
    /// Tells the worker how many responses have been taken; 0 only wakes it up.
    pub(super) fn tell(&self, taken: u64) {
        let &Self { ref link, batch, request } = self;
        let released = link.arenas.outputs.take_released();
        link.send(&ToWorker::Credits(Credits { batch, request, taken, released }));
    }
}

/// A response on its way to the reader.
struct Item {
    streamed: Streamed,
    costs_credit: bool,
}

/// Who waits for the answers of a request.
pub(super) enum Reply {
    /// An ordinary model's request: one answer.
    One(oneshot::Sender<Answer>),
    /// A decoupled model's.
    Many(Box<Sink>),
}

/// The driver's end of a request's responses.
pub(super) struct Sink {
    /// Gone with the last response.
    sender: Option<mpsc::Sender<Item>>,
    flow: Arc<Flow>,
    /// How many there were.
    count: u64,
    /// When the worker ended the latest.
    latest_end: Instant,
}

impl Reply {
    /// The only or the last answer. A client that has gone away does not take it.
    pub(super) fn send(self, answer: Answer) {
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Many(sink) => {
                let item = Item { streamed: Streamed { answer, last: true, empty: false }, costs_credit: false };
                if let Some(sender) = sink.sender {
                    // There is always room for what ends a request.
                    let _ = sender.try_send(item);
                }
            }
        }
    }

    /// Whether nobody waits any more.
    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::One(reply) => reply.is_closed(),
            Self::Many(sink) => sink.sender.as_ref().is_none_or(mpsc::Sender::is_closed),
        }
    }

    /// Whether a response has left: then the request cannot be executed again.
    pub(super) fn has_begun(&self) -> bool {
        matches!(self, Self::Many(sink) if sink.count > 0)
    }

    /// Whether the last response has left.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, Self::Many(sink) if sink.sender.is_none())
    }

    /// Whether its reader has so much to take that another response would have to wait. If so, the request is to be held,
    /// and [`Responses::poll_next`] resumes it.
    pub(super) fn is_behind(&self) -> bool {
        let Self::Many(sink) = self else { return false };
        sink.flow.held.store(true, Ordering::SeqCst);
        // Asked for after it was marked: a reader who pays in between either sees the mark or is seen here.
        let behind = sink.flow.unpaid() >= CREDITS.into();
        behind || !sink.flow.held.swap(false, Ordering::SeqCst)
    }

    /// It is in a batch of this instance now. Gives its flow if it has had responses that cost credit.
    pub(super) fn placed(&self, link: &SharedLink, batch: u64, request: u32) -> Option<Arc<Flow>> {
        let Self::Many(sink) = self else { return None };
        *sink.flow.position() = Some(BatchPosition { link: link.clone(), batch, request });
        (sink.flow.sent.load(Ordering::Relaxed) > 0).then(|| sink.flow.clone())
    }

    /// When its worker or its reader moved on last; `None` while the worker has to wait for the reader.
    pub(super) fn moved_at(&self) -> Option<Instant> {
        let Self::Many(sink) = self else { return Some(Instant(0)) };
        let waits = sink.sender.is_some() && sink.flow.unpaid() >= CREDITS.into();
        (!waits).then(|| Instant(sink.flow.paid_at.load(Ordering::Relaxed)).max(sink.latest_end))
    }
}

/// The responses to one request of a decoupled model. Dropped before the last of them, it cancels the request.
pub(crate) struct Responses {
    driver: Arc<Driver>,
    id: RequestId,
    receiver: mpsc::Receiver<Item>,
    flow: Arc<Flow>,
    /// The response that was given out last cost credit: who asks for the next has taken it.
    given: bool,
    /// Taken since credit was given.
    taken: u64,
    ended: bool,
}

impl Responses {
    /// The next response; `None` after the last.
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Streamed>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if std::mem::take(&mut self.given) {
            self.taken += 1;
            if self.taken >= u64::from(CREDITS / 2) {
                self.flow.pay(std::mem::take(&mut self.taken));
                if self.flow.held.swap(false, Ordering::SeqCst) {
                    self.driver.resume(self.id);
                }
            }
        }
        let lost = || Item { streamed: Streamed { answer: lost(), last: true, empty: false }, costs_credit: false };
        let Item { streamed, costs_credit } = ready!(self.receiver.poll_recv(cx)).unwrap_or_else(lost);
        self.ended = streamed.last;
        self.given = costs_credit;
        Poll::Ready(Some(streamed))
    }
}

impl Drop for Responses {
    fn drop(&mut self) {
        if !self.ended {
            self.receiver.close();
            self.driver.cancel(self.id);
        }
    }
}

/// A response that has come, and to whom it goes.
struct Arrival {
    part: Arc<Part>,
    sender: mpsc::Sender<Item>,
    /// The responses before it.
    number: u64,
    /// When the worker began with it.
    since: Instant,
}

/// What kind of response it is.
struct Kind {
    stamps: ComputeStamps,
    last: bool,
    empty: bool,
}

impl State {
    /// Finds the request that a response is for, and books it. `Err` for a response that cannot be, `Ok(None)` for one
    /// of a batch that is not known any more.
    fn book(&mut self, instance: InstanceId, frame: &wire::Response) -> Result<Option<ReceivedResponse>, &'static str> {
        let Some(member) = self.members.get_mut(&instance) else { return Ok(None) };
        let place = (frame.batch, frame.request);
        if let Entry::Occupied(mut entry) = member.deferred.entry(place) {
            let booked = match &mut entry.get_mut().1 {
                Request { reply: Reply::Many(sink), part, .. } => {
                    sink.take(part.clone(), frame).map(ReceivedResponse::Streamed)?
                }
                _ => return Ok(Some(ReceivedResponse::Single(entry.remove()))),
            };
            if frame.last {
                entry.remove();
            }
            return Ok(Some(booked));
        }
        let batch = member.in_flight.iter_mut().find(|batch| batch.batch == frame.batch);
        let Some(batch) = batch else { return Ok(None) };
        let request = batch.requests.get_mut(frame.request as usize);
        let (_, request) = request.ok_or("a response to a request that is not in its batch")?;
        match &mut request.reply {
            Reply::Many(sink) => sink.take(request.part.clone(), frame).map(ReceivedResponse::Streamed).map(Some),
            Reply::One(_) => Err("more than one response to a request of a model that is not decoupled"),
        }
    }
}

/// A response, and to whom it goes.
enum ReceivedResponse {
    /// One of any number.
    Streamed(Arrival),
    /// The only one.
    Single((RequestId, Request)),
}

impl Sink {
    /// Books a response that a worker has sent.
    fn take(&mut self, part: Arc<Part>, frame: &wire::Response) -> Result<Arrival, &'static str> {
        if costs_credit(frame) && self.flow.unpaid() >= CREDITS.into() {
            return Err("more responses than their readers have asked for");
        }
        self.flow.sent.fetch_add(u64::from(costs_credit(frame)), Ordering::Relaxed);
        self.book(part, frame.stamps, frame.last).ok_or("a response after the last one")
    }

    fn book(&mut self, part: Arc<Part>, stamps: ComputeStamps, last: bool) -> Option<Arrival> {
        let sender = if last { self.sender.take()? } else { self.sender.clone()? };
        let since = if self.count == 0 { stamps.start } else { self.latest_end };
        self.latest_end = stamps.end;
        self.count += 1;
        Some(Arrival { part, sender, number: self.count - 1, since })
    }
}

/// What only ends a request needs no room of its own.
fn costs_credit(frame: &wire::Response) -> bool {
    !(frame.last && (frame.empty || frame.error.is_some()))
}

impl Driver {
    /// Schedules a checked request of a decoupled model.
    pub(crate) fn stream(self: &Arc<Self>, mut request: InferRequest, checked: Checked) -> Responses {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let now = clock::now();
        request.timeline.queue_start = now;
        request_trace::queued(&self.model, &request);
        let ticket = ticket(id, &request, &checked);
        let (sender, receiver) = mpsc::channel(CREDITS as usize + 1);
        let flow = Arc::new(Flow::default());
        let sink = Sink { sender: Some(sender), flow: flow.clone(), count: 0, latest_end: Instant(0) };
        let reply = Reply::Many(Box::new(sink));
        let part = Arc::new(Part { request, checked, padding: false });
        self.turn(now, |state| {
            state.queued.insert(id, Request { part, reply, retried: false, miss: None });
            record::request_pending(&self.series, 1);
            state.scheduler.enqueue(ticket, now);
        });
        Responses { driver: self.clone(), id, receiver, flow, given: false, taken: 0, ended: false }
    }

    /// A worker has sent a response of a batch that goes on.
    ///
    /// # Errors
    /// It breaks the protocol: the worker is not to be trusted any more.
    pub(crate) fn response(&self, instance: InstanceId, link: &SharedLink, frame: wire::Response) -> io::Result<()> {
        let booked = self.lock().book(instance, &frame);
        let arrival = match booked.map_err(io::Error::other)? {
            Some(ReceivedResponse::Streamed(arrival)) => arrival,
            Some(ReceivedResponse::Single(request)) => {
                self.answer_deferred(request, link, frame);
                return Ok(());
            }
            None => {
                self.discard(link, &frame);
                return Ok(());
            }
        };
        let answer = self.answer_of(&arrival.part, link, &frame.outputs);
        let costs_credit = costs_credit(&frame);
        let answer = frame.error.map_or(answer, |error| Err(error.into()));
        let answer = answer.map(|response| InferResponse { parameters: frame.parameters, ..response });
        let kind = Kind { stamps: frame.stamps, last: frame.last, empty: frame.empty };
        self.pass_on(arrival, answer, &kind, costs_credit);
        link.send_released_if_many();
        Ok(())
    }

    /// Gives back what a response holds that nobody reads.
    pub(crate) fn discard(&self, link: &SharedLink, frame: &wire::Response) {
        for block in frame.outputs.iter().filter(|block| !block.placed && block.lent.is_none()) {
            drop(link.arenas.outputs.take(block.offset, block.len));
        }
        // Whatever else it sends of this request will be taken as well.
        BatchPosition { link: link.clone(), batch: frame.batch, request: frame.request }.tell(u64::MAX);
    }

    /// Records a response, and sends it to its reader.
    fn pass_on(&self, arrival: Arrival, mut answer: Answer, kind: &Kind, costs_credit: bool) {
        let Arrival { part, sender, number, since } = arrival;
        let &Kind { stamps, last, empty } = kind;
        let mut timeline = part.request.timeline;
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
        let times = (stamps.output_start.ns_since(since), stamps.end.ns_since(stamps.output_start.max(since)));
        record::response_done(&self.series, number, what, times);
        if number == 0 && !empty {
            record::first_response(&self.series, timeline.request_ns());
        }
        request_trace::answered(&part.request, &answer, last.then_some(&timeline));
        if last {
            self.record_one(&part, &answer, &timeline);
        }
        let item = Item { streamed: Streamed { answer, last, empty }, costs_credit };
        // Room is what credit stands for; a client that has gone away does not take its response.
        let _ = sender.try_send(item);
    }

    /// A batch of streams is done: those that have had no last response are ended by what the batch as a whole has given.
    pub(super) fn finish_streams(
        &self,
        requests: Vec<(RequestId, Request)>,
        link: &SharedLink,
        done: &Done,
        elapsed_ns: u64,
    ) {
        let parts: Vec<Arc<Part>> = requests.iter().map(|(_, request)| request.part.clone()).collect();
        self.record_batch(&parts, done);
        let answers = self.answers(&parts, link, done);
        for ((_, request), answer) in requests.into_iter().zip(answers) {
            let Reply::Many(mut sink) = request.reply else { continue };
            let empty = answer.is_ok() && (sink.count > 0 || done.outputs.is_empty());
            // What a client that has gone away would have had is not known.
            let given_up = empty && sink.sender.as_ref().is_some_and(mpsc::Sender::is_closed);
            let answer = if given_up { Err(InferError::cancelled()) } else { answer };
            if let Some(arrival) = sink.book(request.part, done.stamps, true) {
                let kind = Kind { stamps: done.stamps, last: true, empty };
                self.pass_on(
                    arrival,
                    answer.map(|response| if empty { bare(response) } else { response }),
                    &kind,
                    false,
                );
            }
        }
        let executed_ns = done.stamps.end.ns_since(done.stamps.start);
        record::batch_times(&self.series, std::iter::empty(), elapsed_ns.saturating_sub(executed_ns));
        link.send_released_if_many();
    }
}

/// A response without outputs.
fn bare(response: InferResponse) -> InferResponse {
    InferResponse { outputs: Vec::new(), parameters: Vec::new(), ..response }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
