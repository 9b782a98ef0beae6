//! The driver: performs what a model's scheduler decides. Each model version has one; it is the only place where requests,
//! instances and time meet.
//!
//! There is no driver task. The caller that brings an event (a request, a reply, a timer) takes the lock, passes the event to the
//! scheduler, collects its decisions, releases the lock and performs them. This saves two task switches per request. Tensors are
//! never copied and clients never answered under the lock.

mod answer;
mod cached;
mod cancel;
mod decide;
mod deferred;
mod effects;
mod failure;
mod limits;
mod load;
pub(crate) mod placement;
pub(crate) mod request_trace;
mod reschedule;
mod retire;
mod sequence;
pub(crate) mod settings;
mod stream;
#[cfg(test)]
pub(crate) mod test_driver;
mod timer;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use pharos::error::InferError;
use pharos::id::{InstanceId, ModelVersion, RequestId, RequestMap};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::cache::Cache;
use pharos::metrics::log_throttle::Throttle;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::{Checked, ModelConfig, Scheduling};
use pharos::scheduler::{self, InSequence, RejectReason, Reorder, Scheduler, Ticket};
use pharos::timeline::{Instant, Timeline};
use pharos::wire::Done;
use tokio::sync::oneshot;

use crate::cache::{Found, Miss, ModelCache};
use crate::wire::{Part, SharedLink};
use pharos_os::clock;

pub(crate) use cached::{answer_found, record_miss};
use cancel::CancelOnDrop;
use deferred::Deferred;
use effects::Effects;
use limits::Grant;
pub(crate) use limits::{Limits, Registration};
use load::BusyTime;
pub(crate) use pharos::service::Streamed;
pub(crate) use stream::Responses;
use stream::{OneReply, Reply};
pub(crate) use timer::Timer;

/// The maximum number of priority levels with series from the start; a model may have any number of levels.
const MAX_LEVELS: u64 = 16;

/// The answer to a request.
pub(crate) type Answer = Result<InferResponse, InferError>;

/// A request with the receiver of its answer.
struct Request {
    part: Arc<Part>,
    reply: Reply,
    /// Whether it was sent once and its instance was lost.
    retried: bool,
    /// Present if the response cache had no entry: the response is stored there.
    miss: Option<Miss>,
}

/// A batch that was sent to an instance.
struct InFlight {
    batch: u64,
    /// The row of its flags in the instance's arena.
    flags: u8,
    /// Whether one of its flags is set.
    given_up: bool,
    /// In batch order, padding included.
    requests: Vec<(RequestId, Request)>,
}

/// A ready instance.
struct Member {
    link: SharedLink,
    /// In the order of sending; the first one executes.
    in_flight: Vec<InFlight>,
    /// Unanswered requests of finished batches.
    deferred: Deferred,
    /// When the first batch began to execute, by the frontend's clock.
    executing_since: Instant,
    /// The time in which it was not idle.
    busy: BusyTime,
}

impl Member {
    /// Returns whether it has no batches and no deferred requests.
    fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.deferred.is_empty()
    }

    /// Removes a batch that is no longer in flight.
    fn take(&mut self, position: usize) -> InFlight {
        let batch = self.in_flight.remove(position);
        if batch.given_up {
            self.link.arenas.inputs.clear_flags(batch.flags);
        }
        batch
    }
}

struct State {
    scheduler: Box<dyn Scheduler>,
    queued: RequestMap<Request>,
    members: HashMap<InstanceId, Member>,
    order: Option<Reorder<(Request, Answer)>>,
    next_batch: u64,
    /// The busy time of instances that were removed.
    busy_of_removed_ns: u64,
    /// The part of it that the metrics do not include yet, by instance.
    unrecorded_busy_ns: HashMap<InstanceId, u64>,
    /// Instances that were retired and whose processes may still run. They get no new batches, also after a restart.
    retired: HashSet<InstanceId>,
    /// When an instance last answered a batch or sent a response.
    last_answered: Instant,
    /// Whether no instance will return, so that lost requests are not retried.
    closed: bool,
    /// The time of the pending alarm of the timer.
    armed: Option<Instant>,
}

/// The parts of a new driver.
pub(crate) struct DriverSettings {
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) series: Arc<ModelSeries>,
    pub(crate) scheduling: scheduler::Settings,
    /// Present if the rate limiter is on.
    pub(crate) limits: Option<Registration>,
    /// Present if the model uses the response cache.
    pub(crate) cache: Option<ModelCache>,
}

/// The driver of one model version.
pub(crate) struct Driver {
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) model: ModelVersion,
    pub(crate) series: Arc<ModelSeries>,
    // Held for the scheduler's decisions, never while data is copied or a client is answered.
    state: Mutex<State>,
    timer: Arc<Timer>,
    next_request: AtomicU64,
    /// Whether answers are sent in the order of their requests.
    ordered: bool,
    priority_levels: u64,
    /// Present if the rate limiter is on.
    limits: Option<Registration>,
    /// Present if the model uses the response cache.
    cache: Option<ModelCache>,
    /// Whether an instance executes other files than those that were loaded, so that no response may be stored or found.
    caching_stopped: AtomicBool,
    /// The counts of [`Driver::sequences`] that the metrics already include.
    sequences_recorded: [AtomicU64; 3],
    restarts_logged: Mutex<Throttle>,
    /// Outputs whose mismatch with the configuration was logged. Locked only on a mismatch.
    mismatches_warned: Mutex<HashSet<String>>,
    /// When the system last killed a process of the model, in nanoseconds of the stamps' clock; 0 for never.
    killed: AtomicU64,
    this: Weak<Driver>,
}

impl Driver {
    /// Creates a driver without instances. With a registration, they execute only when the rate limiter permits it.
    pub(crate) fn new(settings: DriverSettings, timer: Arc<Timer>) -> Arc<Self> {
        let DriverSettings { config, series, scheduling, limits, cache } = settings;
        let settings = scheduler::Settings { rate_limited: limits.is_some(), ..scheduling };
        // Responses of decoupled models leave immediately, and their batches may last long, so no batch waits behind another.
        let settings = scheduler::Settings { prefetch: settings.prefetch && !config.decoupled, ..settings };
        let ordered = settings.preserve_ordering && !config.decoupled;
        let priority_levels = settings.priority_levels;
        let order = ordered.then(Reorder::new);
        let state = State {
            scheduler: scheduler::create(settings),
            queued: RequestMap::default(),
            members: HashMap::new(),
            order,
            next_batch: 0,
            busy_of_removed_ns: 0,
            unrecorded_busy_ns: HashMap::new(),
            retired: HashSet::new(),
            last_answered: Instant(0),
            closed: false,
            armed: None,
        };
        let next_request = AtomicU64::new(1);
        Arc::new_cyclic(|this| {
            if let Some(registration) = &limits {
                registration.bind(this);
            }
            Self {
                config,
                model: series.model().clone(),
                series,
                state: Mutex::new(state),
                timer,
                next_request,
                ordered,
                priority_levels,
                limits,
                cache,
                caching_stopped: AtomicBool::new(false),
                sequences_recorded: Default::default(),
                restarts_logged: Mutex::default(),
                mismatches_warned: Mutex::default(),
                killed: AtomicU64::new(0),
                this: this.clone(),
            }
        })
    }

    /// Answers a checked request from the response cache or the queue. Dropping the future cancels the request.
    ///
    /// # Errors
    /// The request is invalid, the queue refuses it, or the backend fails.
    pub(crate) async fn infer(&self, mut request: Box<InferRequest>, checked: Checked) -> Answer {
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let mut now = clock::now();
        request.timeline.queue_start = now;
        request_trace::queued(&self.model, &request);
        let mut miss = None;
        if let Some(cache) = self.cache.as_ref().filter(|_| request.is_cacheable() && self.may_cache()) {
            // Boxed: requests without the cache should not move the large futures.
            match Box::pin(self.look_up(cache, id, &request, &checked)).await {
                Found::Hit(entry, times) => {
                    let part = Part { request: *request, checked, padding: false };
                    return Box::pin(self.answer_hit(id, part, entry, times)).await;
                }
                Found::Miss(not_found) => miss = Some(not_found),
            }
            now = clock::now();
            request.timeline.queue_start = now;
        }
        let ticket = ticket(id, &request, &checked);
        let (reply, answer) = oneshot::channel();
        let reply = Reply::One(OneReply::new(reply, self.ordered));
        let part = Arc::new(Part { request: *request, checked, padding: false });
        let cancel = CancelOnDrop::new(self, id);
        self.turn(now, |state| {
            state.queued.insert(id, Request { part, reply, retried: false, miss });
            if let Some(order) = &mut state.order {
                order.expect(id);
            }
            record::request_pending(&self.series, 1);
            state.scheduler.enqueue(ticket, now);
        });
        let answer = answer.await;
        cancel.disarm();
        answer.unwrap_or_else(|_| lost())
    }

    /// Adds an instance that is ready for batches. A retired instance is not added again.
    pub(crate) fn instance_ready(&self, instance: InstanceId, link: SharedLink) {
        let now = clock::now();
        self.turn(now, |state| {
            if state.retired.contains(&instance) {
                return;
            }
            let busy = BusyTime::default();
            let (in_flight, deferred) = (Vec::new(), Deferred::new());
            state.members.insert(instance, Member { link, in_flight, deferred, executing_since: now, busy });
            state.scheduler.instance_ready(instance, now);
        });
    }

    /// Rejects all waiting requests because the server's shutdown limit is over; lost requests are no longer retried.
    pub(crate) fn give_up(&self) {
        let now = clock::now();
        self.turn(now, |state| {
            state.closed = true;
            state.scheduler.reject_all(RejectReason::Exiting, now);
        });
    }

    /// Returns the number of open sequences that shutdown waits for. Sequences with implicit start end only by idleness, so they are
    /// not waited for.
    pub(crate) fn sequences_to_end(&self) -> usize {
        if matches!(&self.config.scheduling, Scheduling::Sequence(batching) if batching.implicit_start) {
            return 0;
        }
        self.open_sequences()
    }

    /// Returns the number of sequences that have begun and not ended.
    pub(crate) fn open_sequences(&self) -> usize {
        self.lock().scheduler.sequences().map_or(0, |counts| counts.active + counts.backlogged)
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

    /// Rejects requests that have waited longer than `longest`, if no instance is ready and none has answered anything for that
    /// time. The first of their consecutive losses was at `lost`.
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

    /// Returns the number of accepted requests without an answer.
    pub(crate) fn unanswered(&self) -> usize {
        let state = self.lock();
        let flying: usize =
            state.members.values().flat_map(|member| &member.in_flight).map(|b| b.count() as usize).sum();
        let deferred: usize = state.members.values().map(|member| member.deferred.len()).sum();
        state.queued.len() + flying + deferred
    }

    /// Returns when the currently executing batch of an instance was sent, if there is one.
    pub(crate) fn executing_since(&self, instance: InstanceId) -> Option<Instant> {
        let state = self.lock();
        let member = state.members.get(&instance)?;
        let first = member.in_flight.first()?;
        let mut moved = first.requests.iter().map(|(_, request)| request.reply.moved_at());
        // An instance that waits for a slow reader does not execute.
        moved.try_fold(member.executing_since, |latest, moved| Some(latest.max(moved?)))
    }

    /// Handles a worker's reply to a batch.
    pub(crate) fn batch_done(&self, instance: InstanceId, link: &SharedLink, mut done: Done) {
        let now = clock::now();
        let (mut finished, mut executing_since) = (None, now);
        link.inputs_read(&done);
        self.turn(now, |state| {
            let Some(member) = state.members.get_mut(&instance) else { return };
            let Some(position) = member.in_flight.iter().position(|batch| batch.batch == done.batch) else { return };
            let mut batch = member.take(position);
            state.last_answered = now;
            executing_since = std::mem::replace(&mut member.executing_since, now);
            // A batch that was sent second and finished first (two threads sent concurrently) was never counted as executing.
            let executing = if position > 0 { Some(&batch) } else { member.in_flight.first() };
            if let Some(executing) = executing {
                record::request_pending(&self.series, -executing.count());
            }
            batch.keep_deferred(&mut done, &mut member.deferred);
            member.update_busy_time(now);
            if !done.rescheduled.is_empty() {
                self.reschedule(state, &mut batch, &mut done, now);
            }
            finished = Some(batch);
            state.scheduler.batch_done(instance, now);
        });
        if let Some(batch) = finished {
            batch.requests.iter().for_each(|(_, request)| request_trace::executed_by(&request.part, instance));
            self.answer_batch(batch.requests, link, &done, (executing_since, now));
        }
        link.inputs_lent(&done);
    }

    /// Moves the metrics that workers have sent into the cache.
    pub(crate) fn drain_metrics(&self, cache: &Cache) {
        let links: Vec<SharedLink> = self.lock().members.values().map(|member| member.link.clone()).collect();
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

    /// Returns the priority levels that have series from the start; others have series while requests wait there.
    pub(crate) fn levels(&self) -> std::ops::RangeInclusive<u64> {
        match self.priority_levels {
            0 => 0..=0,
            levels => 1..=levels.min(MAX_LEVELS),
        }
    }

    /// Returns the waiting requests of the queue.
    pub(crate) fn waiting(&self) -> scheduler::Waiting {
        self.lock().scheduler.waiting()
    }

    /// Handles one event: passes it to the scheduler under the lock, then performs the decisions, and delivers freed resources to
    /// the drivers that get them.
    fn turn(&self, now: Instant, event: impl FnOnce(&mut State)) {
        let grant = self.turn_alone(now, |state, _| event(state));
        if grant.is_some() {
            self.deliver(grant);
        }
    }

    /// Handles one event of this driver only. Returns a grant of freed resources to an instance of another driver.
    fn turn_alone(&self, now: Instant, event: impl FnOnce(&mut State, &mut Effects)) -> Option<Grant> {
        self.perform(self.effects(now, event))
    }

    /// Collects the scheduler's decisions for one event.
    fn effects(&self, now: Instant, event: impl FnOnce(&mut State, &mut Effects)) -> Effects {
        let mut state = self.lock();
        let mut effects = Effects::default();
        event(&mut state, &mut effects);
        self.decide(&mut state, &mut effects, now);
        while let Some((_, answered)) = state.order.as_mut().and_then(Reorder::pop) {
            effects.answers.push(answered);
        }
        let wake = state.scheduler.poll_timeout().filter(|at| state.armed.is_none_or(|armed| *at < armed));
        if let Some(at) = wake {
            let overtaken = state.armed.replace(at);
            self.timer.arm(at, overtaken, self.this.clone());
        }
        effects
    }

    /// Sends an answer that was made under the lock, through the order if the model keeps one. Sending on a oneshot channel only
    /// stores the answer and wakes a task.
    fn finish(&self, state: &mut State, id: RequestId, mut request: Request, answer: Answer) {
        // Requests that wait for the same response must not also wait for this answer's turn.
        request.miss = None;
        let leaving = match &mut state.order {
            Some(order) => order.finish(id, (request, answer)),
            None => Some((request, answer)),
        };
        if let Some((request, answer)) = leaving {
            request.reply.send(answer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the time between the request's arrival and its queueing; zero if unknown.
fn waited(timeline: &Timeline) -> Duration {
    match timeline.request_start {
        Instant(0) => Duration::ZERO,
        start => Duration::from_nanos(timeline.queue_start.ns_since(start)),
    }
}

fn ticket(id: RequestId, request: &InferRequest, checked: &Checked) -> Ticket {
    Ticket {
        request: id,
        batch_size: u32::try_from(checked.batch_size).unwrap_or(u32::MAX),
        shape_key: checked.shape_key,
        priority: request.priority,
        timeout_us: request.timeout_us,
        waited: waited(&request.timeline),
        sequence: (!request.correlation_id.is_none()).then(|| InSequence {
            id: request.correlation_id.clone(),
            start: request.sequence_start,
            end: request.sequence_end,
        }),
    }
}

/// The error of a request whose sender was dropped.
fn lost() -> Answer {
    Err(InferError::internal("the request was lost; this is a bug in the server"))
}
