//! The driver: performs what a model's scheduler (`pharos::scheduler`) decides. Each model version
//! has one; it is the only place where requests, instances and time meet.
//!
//! There is no driver task. The caller that brings an event (a request, a reply, a timer) takes the
//! lock, passes the event to the scheduler, collects its decisions, releases the lock and performs
//! them: a *turn*. This saves two task switches per request. Tensors are never copied under the
//! lock. An answer that is made under the lock is only put into its channel, which never waits.
//!
//! A request is an [`InferRequest`] of an edge, a [`BatchedRequest`] once it is checked against the
//! configuration, a [`Request`] while it waits for its answer (the scheduler knows it by its
//! [`Ticket`]), a member of an [`InFlight`] batch at an instance, and a `BatchRequest` on the wire.
//! A worker *replies* to a batch (`Done`); the engine *answers* a request ([`InferResult`]); an
//! edge sends a *response*.
//!
//! Here is the turn. [`queue`] has the requests that no instance executes yet, [`in_flight`] the
//! batches at the instances, [`answers`] the way of the answers, and [`stream`] the requests of
//! decoupled models.

mod answers;
mod in_flight;
mod limits;
pub(crate) mod placement;
mod queue;
pub(crate) mod request_trace;
pub(crate) mod settings;
mod stream;
#[cfg(test)]
pub(crate) mod test_driver;
mod timer;

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::error::InferError;
use pharos::id::{CorrelationId, InstanceId, ModelVersion, RequestId, RequestMap};
use pharos::infer::{InferRequest, InferResponse};
use pharos::metrics::log_throttle::Throttle;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::generation;
use pharos::model::{Checked, ModelConfig};
use pharos::scheduler::rate_limiter::{self, RateLimiter};
use pharos::scheduler::{self, Action, InSequence, Reorder, Scheduler, Ticket};
use pharos::timeline::{Instant, Timeline};
use pharos::wire::{Resumed, SequenceStep, ToWorker, flags};

use crate::cache::{Miss, ModelResponseCache};
use crate::wire::{BatchedRequest, SharedLink, ToSend};
use in_flight::{InFlight, Member, Unsent};
use limits::Grant;
pub(crate) use limits::{Limits, Registration};
pub(crate) use pharos::service::Streamed;
use pharos_os::{blocking, clock};
use placement::Placement;
pub(crate) use queue::{answer_found, record_miss};
pub(crate) use stream::InstanceResponses;
use stream::{AnswerSender, Flow};
pub(crate) use timer::Timer;

/// Batches with more bytes are not copied on the timer's thread, which other models need.
const LONG: usize = 64 << 10;

/// The answer to a request.
pub(crate) type InferResult = Result<InferResponse, InferError>;

/// A request that waits for its answer, or for the end of its responses.
struct Request {
    batched: Arc<BatchedRequest>,
    sender: AnswerSender,
    /// Whether it was sent once and its instance was lost.
    retried: bool,
    /// Present if the response cache had no entry: the response is stored there.
    miss: Option<Miss>,
}

struct State {
    scheduler: Box<dyn Scheduler>,
    queued: RequestMap<Request>,
    members: HashMap<InstanceId, Member>,
    order: Option<Reorder<(Request, InferResult)>>,
    next_batch: u64,
    /// The busy time of instances that were removed.
    busy_of_removed_ns: u64,
    /// The part of it that the metrics do not include yet, by instance.
    unrecorded_busy_ns: HashMap<InstanceId, u64>,
    /// Instances that were retired and whose processes may still run. They get no new batches,
    /// also after a restart.
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
    pub(crate) response_cache: Option<ModelResponseCache>,
}

/// The driver of one model version.
pub(crate) struct Driver {
    pub(crate) config: Arc<ModelConfig>,
    pub(crate) model: ModelVersion,
    pub(crate) series: Arc<ModelSeries>,
    // Held for the scheduler's decisions, never while data is copied.
    state: Mutex<State>,
    timer: Arc<Timer>,
    next_request: AtomicU64,
    /// Whether answers are sent in the order of their requests.
    ordered: bool,
    priority_levels: u64,
    /// Present if the rate limiter is on.
    limits: Option<Registration>,
    /// Present if the model uses the response cache.
    response_cache: Option<ModelResponseCache>,
    /// Whether the model generates text.
    generates_text: bool,
    /// Whether the tokens of the model are counted: of prompts and of generated text.
    counts_tokens: bool,
    /// Whether an instance executes other files than the model was loaded with, so that no
    /// response may be stored or found.
    caching_stopped: AtomicBool,
    /// The counts of [`Driver::sequences`] that the metrics already include.
    sequences_recorded: [AtomicU64; 3],
    restarts_logged: Mutex<Throttle>,
    /// Outputs whose mismatch with the configuration was logged. Locked only on a mismatch.
    mismatches_warned: Mutex<HashSet<String>>,
    /// When the system last killed a process of the model, in nanoseconds of the stamps' clock; 0
    /// for never.
    killed: AtomicU64,
    this: Weak<Driver>,
}

/// A batch to gather and send.
struct BatchToSend {
    instance: InstanceId,
    link: SharedLink,
    batch: u64,
    flags: u8,
    batched_requests: Vec<Arc<BatchedRequest>>,
    /// One step for each part of a model with sequences.
    steps: Vec<Option<SequenceStep>>,
    /// For a decoupled model, the requests that had responses in an earlier batch, by position.
    flows: Vec<(u32, Arc<Flow>)>,
}

/// The effects of a turn that are performed after the lock is released.
#[derive(Default)]
struct Effects {
    /// Sequences whose ends are announced to instances, before the batches.
    ended: Vec<(SharedLink, Vec<u64>)>,
    sends: Vec<BatchToSend>,
    /// Sequences that were restarted while they were active.
    restarted: Vec<CorrelationId>,
    /// Answers to send, in order.
    answers: Vec<(Request, InferResult)>,
    /// Whether the rate limiter was called, so that resources may be free.
    limiter_called: bool,
    /// A grant of resources to an instance of another driver.
    grant: Option<Grant>,
}

impl Effects {
    /// Returns whether copying the inputs of the batches takes long.
    fn is_long(&self) -> bool {
        let inputs = self
            .sends
            .iter()
            .flat_map(|send| &send.batched_requests)
            .flat_map(|batched| &batched.request.inputs);
        inputs.map(|input| input.tensor.data.bytes_here()).sum::<usize>() > LONG
    }
}

impl Driver {
    /// Creates a driver without instances. With a registration, they execute only when the rate
    /// limiter permits it.
    pub(crate) fn new(settings: DriverSettings, timer: Arc<Timer>) -> Arc<Self> {
        let DriverSettings { config, series, mut scheduling, limits, response_cache } = settings;
        scheduling.rate_limited = limits.is_some();
        // Responses of decoupled models leave immediately, and their batches may last long, so no
        // batch waits behind another.
        scheduling.prefetch &= !config.decoupled;
        let ordered = scheduling.preserve_ordering && !config.decoupled;
        let priority_levels = scheduling.priority_levels;
        let state = State {
            scheduler: scheduler::create(scheduling),
            queued: RequestMap::default(),
            members: HashMap::new(),
            order: ordered.then(Reorder::new),
            next_batch: 0,
            busy_of_removed_ns: 0,
            unrecorded_busy_ns: HashMap::new(),
            retired: HashSet::new(),
            last_answered: Instant(0),
            closed: false,
            armed: None,
        };
        Arc::new_cyclic(|this| {
            if let Some(registration) = &limits {
                registration.bind(this);
            }
            Self {
                generates_text: generation::generates_text(&config),
                counts_tokens: generation::counts_tokens(&config),
                config,
                model: series.model().clone(),
                series,
                state: Mutex::new(state),
                timer,
                next_request: AtomicU64::new(1),
                ordered,
                priority_levels,
                limits,
                response_cache,
                caching_stopped: AtomicBool::new(false),
                sequences_recorded: Default::default(),
                restarts_logged: Mutex::default(),
                mismatches_warned: Mutex::default(),
                killed: AtomicU64::new(0),
                this: this.clone(),
            }
        })
    }

    /// Handles one event: passes it to the scheduler under the lock, then performs the decisions,
    /// and delivers freed resources to the drivers that get them.
    fn turn(&self, now: Instant, event: impl FnOnce(&mut State)) {
        let grant = self.turn_alone(now, |state, _| event(state));
        if grant.is_some() {
            self.deliver(grant);
        }
    }

    /// Handles one event of this driver only. Returns a grant of freed resources to an instance of
    /// another driver.
    fn turn_alone(
        &self,
        now: Instant,
        event: impl FnOnce(&mut State, &mut Effects),
    ) -> Option<Grant> {
        self.perform(self.run_event(now, event))
    }

    /// Collects the scheduler's decisions for one event.
    fn run_event(&self, now: Instant, event: impl FnOnce(&mut State, &mut Effects)) -> Effects {
        let mut state = self.lock();
        let mut effects = Effects::default();
        event(&mut state, &mut effects);
        self.apply_actions(&mut state, &mut effects, now);
        while let Some((_, answered)) = state.order.as_mut().and_then(Reorder::pop) {
            effects.answers.push(answered);
        }
        let wake =
            state.scheduler.poll_timeout().filter(|at| state.armed.is_none_or(|armed| *at < armed));
        if let Some(at) = wake {
            let overtaken = state.armed.replace(at);
            self.timer.arm(at, overtaken, self.this.clone());
        }
        effects
    }

    /// Performs the part of the scheduler's decisions that runs under the lock.
    fn apply_actions(&self, state: &mut State, effects: &mut Effects, now: Instant) {
        loop {
            while let Some(action) = state.scheduler.poll_action(now) {
                match action {
                    Action::Execute { instance, requests, reason } => {
                        record::batch_sent(&self.series, reason);
                        self.book_requests(state, effects, instance, &requests, now);
                    }
                    Action::ExecuteSteps { instance, slots, reason } => {
                        record::batch_sent(&self.series, reason);
                        self.start_steps(state, effects, instance, &slots, now);
                    }
                    Action::SequencesEnded { instance, keys } => {
                        let link = state.members.get(&instance).map(|member| member.link.clone());
                        effects.ended.extend(link.map(|link| (link, keys)));
                    }
                    Action::SequenceRestarted { request } => {
                        let known = state.queued.get(&request);
                        effects.restarted.extend(
                            known.map(|known| known.batched.request.correlation_id.clone()),
                        );
                    }
                    Action::Reject { request, reason } => self.reject(state, request, reason),
                    Action::Acquire { instance } => {
                        self.request_limiter(effects, instance, |limiter, member| {
                            limiter.stage(member, now)
                        });
                    }
                    Action::Withdraw { instance } => {
                        self.request_limiter(effects, instance, RateLimiter::withdraw)
                    }
                    Action::Release { instance } => {
                        self.request_limiter(effects, instance, RateLimiter::release)
                    }
                }
            }
            if !self.take_grant(state, effects, now) {
                return;
            }
        }
    }

    /// Books a batch for an instance; it is sent after the lock is released.
    fn book_requests(
        &self,
        state: &mut State,
        effects: &mut Effects,
        instance: InstanceId,
        requests: &[RequestId],
        now: Instant,
    ) {
        let requests =
            requests.iter().filter_map(|id| Some((*id, state.queued.remove(id)?))).collect();
        self.book(state, effects, instance, requests, Vec::new(), now);
    }

    /// Books a batch of these requests, padding included, for an instance. A model with sequences
    /// has one step for each request.
    fn book(
        &self,
        state: &mut State,
        effects: &mut Effects,
        instance: InstanceId,
        requests: Vec<(RequestId, Request)>,
        steps: Vec<Option<SequenceStep>>,
        now: Instant,
    ) {
        let Some(member) = state.members.get_mut(&instance) else { return };
        let batch = state.next_batch;
        state.next_batch += 1;
        if member.in_flight.is_empty() {
            member.executing_since = now;
        }
        let free_row =
            (0..flags::ROWS).find(|row| member.in_flight.iter().all(|flying| flying.flags != *row));
        let flags = free_row.unwrap_or(flags::ROWS);
        let mut batched_requests = Vec::with_capacity(requests.len());
        let mut flows = Vec::new();
        for (place, (_, request)) in (0..).zip(&requests) {
            batched_requests.push(request.batched.clone());
            if let Some(flow) = request.sender.placed(&member.link, batch, place) {
                flows.push((place, flow));
            }
        }
        let flying = InFlight { batch, flags, has_cancelled: false, requests };
        if member.in_flight.is_empty() {
            record::request_pending(&self.series, -flying.count());
        }
        member.in_flight.push(flying);
        member.update_busy_time(now);
        effects.sends.push(BatchToSend {
            instance,
            link: member.link.clone(),
            batch,
            flags,
            batched_requests,
            steps,
            flows,
        });
    }

    /// Sends batches and answers. Runs without the lock, because copying takes time.
    fn perform(&self, effects: Effects) -> Option<Grant> {
        let (mut grant, mut unsent) = self.perform_once(effects);
        // A loop: any number of requests may fail one after the other.
        while !unsent.is_empty() {
            self.deliver(grant);
            let now = clock::now();
            let effects = self.run_event(now, |state, _| self.unsent(state, unsent, now));
            (grant, unsent) = self.perform_once(effects);
        }
        grant
    }

    /// Sends batches and answers. Returns the batches that could not be sent.
    fn perform_once(&self, effects: Effects) -> (Option<Grant>, Vec<Unsent>) {
        let mut unsent = Vec::new();
        for (link, keys) in effects.ended {
            link.send(&ToWorker::SequenceEnded(keys));
        }
        for sequence in effects.restarted {
            self.notify_restarted(&sequence);
        }
        for BatchToSend { instance, link, batch, flags, batched_requests, steps, flows } in
            effects.sends
        {
            let resumed: Vec<Resumed> =
                flows.iter().map(|(request, flow)| flow.resumed(*request)).collect();
            let resumed_now = resumed.clone();
            let to_send = ToSend {
                batch,
                flags,
                batched_requests: &batched_requests,
                steps: &steps,
                controls: &[],
                resumed: resumed_now,
            };
            if let Err(error) = link.execute(&self.config, &to_send) {
                unsent.push(Unsent { instance, batch, error });
            }
            for ((_, flow), sent) in flows.iter().zip(&resumed) {
                flow.tell_since(sent);
            }
        }
        for (request, answer) in effects.answers {
            request.sender.send(answer);
        }
        (effects.grant, unsent)
    }

    /// Handles the alarm for `at` on the timer's thread. An alarm that was replaced by an earlier
    /// one does nothing.
    fn handle_timeout(&self, at: Instant) {
        let now = clock::now();
        let effects = self.run_event(now, |state, _| {
            if state.armed == Some(at) {
                state.armed = None;
                state.scheduler.handle_timeout(now);
            }
        });
        match (effects.is_long(), self.this.upgrade(), self.timer.runtime()) {
            (true, Some(driver), Some(runtime)) => {
                blocking::run_on(runtime, move || {
                    let grant = driver.perform(effects);
                    driver.deliver(grant);
                });
            }
            _ => {
                let grant = self.perform(effects);
                self.deliver(grant);
            }
        }
    }

    /// Calls the rate limiter for the scheduler.
    fn request_limiter(
        &self,
        effects: &mut Effects,
        instance: InstanceId,
        call: impl FnOnce(&mut RateLimiter, rate_limiter::Member),
    ) {
        if let Some(limits) = &self.limits {
            limits.update(instance, call);
            effects.limiter_called = true;
        }
    }

    /// Returns whether the scheduler must decide again, because the limiter granted resources to an
    /// instance of this driver. A grant to an instance of another driver is left in the effects.
    fn take_grant(&self, state: &mut State, effects: &mut Effects, now: Instant) -> bool {
        let Some(registration) = self.limits.as_ref().filter(|_| effects.limiter_called) else {
            return false;
        };
        match registration.poll(now) {
            Some(grant) if registration.is_own(&grant) => {
                state.scheduler.resources_granted(grant.instance, now);
                true
            }
            foreign => {
                effects.grant = foreign;
                false
            }
        }
    }

    /// Delivers the remaining grant of a turn.
    fn deliver(&self, grant: Option<Grant>) {
        if let Some(registration) = &self.limits {
            registration.deliver(grant);
        }
    }

    /// Runs a turn for a grant that another driver's turn caused. Returns the next grant.
    fn granted(&self, instance: InstanceId, now: Instant) -> Option<Grant> {
        self.turn_alone(now, |state, effects| {
            let Some(registration) = &self.limits else { return };
            effects.limiter_called = true;
            if registration.holds(instance) {
                state.scheduler.resources_granted(instance, now);
            }
        })
    }

    /// Registers instances with the rate limiter, if it is on.
    ///
    /// # Errors
    /// An instance could never execute.
    pub(crate) fn admit(&self, instances: &[(InstanceId, &Placement)]) -> Result<(), String> {
        self.limits.as_ref().map_or(Ok(()), |registration| registration.add(instances))
    }

    /// Returns the number of instances that wait for resources, and the total waiting time since
    /// the last call; `None` without a rate limiter.
    pub(crate) fn resource_waits(&self) -> Option<(usize, Duration)> {
        self.limits.as_ref().map(|registration| registration.waiting(clock::now()))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
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
fn without_answer() -> InferResult {
    Err(InferError::internal("the request was lost; this is a bug in the server"))
}
