//! Schedulers decide which requests run together, where and when. They are told what happened and when, and are then
//! asked what to do and when to be woken; one driver loop performs what they decide.
//!
//! A scheduler sees [`Ticket`]s, never tensors; it has no clock, no thread and no socket, so that every decision can be
//! simulated in virtual time. It must never answer a request twice or forget one: each enqueued request leaves in
//! exactly one [`Action`] (and may come back only through [`Scheduler::requeue`]).
//!
//! The driver's loop: tell what happened, call [`Scheduler::poll_action`] until it returns `None`, then sleep until the
//! next event or [`Scheduler::poll_timeout`], whichever is first, and on the latter call [`Scheduler::handle_timeout`].
//!
//! With `preserve_ordering` the driver passes finished responses through [`ordering::Reorder`].

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{ErrorCode, InferError, Reason};
use crate::id::{CorrelationId, InstanceId, RequestId};
use crate::timeline::{Instant, SendReason};

mod dynamic;
mod instances;
pub mod ordering;
mod queue;
pub mod rate_limiter;
pub mod sequence;
#[cfg(test)]
pub mod sim;
#[cfg(test)]
mod tests;

pub use ordering::Reorder;
pub use rate_limiter::RateLimiter;
pub use sequence::{InSequence, SequenceCounts, SequenceSettings, SequenceStrategy, SlotStep};

/// What a scheduler knows of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// The request, unique while it is queued.
    pub request: RequestId,
    /// Items along the batch dimension; 0 (a model without one) counts as 1.
    pub batch_size: u32,
    /// Requests may share a batch only if their keys are equal: a digest of everything that must match (shapes of the
    /// inputs with variable dimensions, the set of optional inputs).
    pub shape_key: u64,
    /// 1 is served first; 0 and what is above [`Settings::priority_levels`] mean the default level.
    pub priority: u64,
    /// The request's own queue timeout in microseconds; 0: none. See [`QueuePolicy::timeout`] for when it applies.
    pub timeout_us: u64,
    /// How much of its queue timeout had passed when it was enqueued: the time since the server got it.
    pub waited: Duration,
    /// Its place in a sequence, for a model with sequences.
    pub sequence: Option<InSequence>,
}

/// What the driver must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send these requests, in this order, to the instance as one batch.
    Execute {
        /// A ready instance.
        instance: InstanceId,
        /// At least one request.
        requests: Vec<RequestId>,
        /// What decided that it was time.
        reason: SendReason,
    },
    /// Send a batch of a model with sequences, one place after the other; an empty one (`None`) is padding.
    ExecuteSteps {
        /// A ready instance.
        instance: InstanceId,
        /// At least one is not empty.
        slots: Vec<Option<SlotStep>>,
        /// What decided that it was time.
        reason: SendReason,
    },
    /// Tell the instance that these sequences have ended without an END step, by their keys.
    SequencesEnded {
        /// The instance that has executed them.
        instance: InstanceId,
        /// Their keys, as in [`SlotStep::key`].
        keys: Vec<u64>,
    },
    /// Say that a request has begun a sequence anew that was active: its client, or another one with the same id, may not
    /// have meant that. The request goes on.
    SequenceRestarted {
        /// The request with START, which is queued.
        request: RequestId,
    },
    /// Answer the request with [`RejectReason::error`].
    Reject {
        /// The request, which the scheduler has forgotten.
        request: RequestId,
        /// Why.
        reason: RejectReason,
    },
    /// With [`Settings::rate_limited`]: stage the idle instance at the rate limiter, and tell the scheduler by
    /// [`Scheduler::resources_granted`] when it has its resources.
    Acquire {
        /// A ready instance that holds no batch.
        instance: InstanceId,
    },
    /// The instance waits for its resources no longer, or gives back unused what it was granted.
    Withdraw {
        /// The instance, which the scheduler may have forgotten.
        instance: InstanceId,
    },
    /// The batch that the instance had its resources for has ended, or the instance is lost.
    Release {
        /// The instance, which the scheduler may have forgotten.
        instance: InstanceId,
    },
}

/// Why a scheduler gave a request back without executing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RejectReason {
    /// The queue of the request's priority level was at its limit when the request came.
    QueueFull,
    /// The request waited longer than its queue timeout.
    Timeout,
    /// The client cancelled.
    Cancelled,
    /// The scheduler takes no new requests any more.
    Stopping,
    /// No instance of the model is left, and none will come back.
    NoInstance,
    /// No instance of the model came back within the time that requests wait.
    NotBack,
    /// The server exits, and has waited for as long as it may.
    Exiting,
    /// The sequence is not known and the request does not start it.
    SequenceNotStarted,
    /// The instance that had the sequence was lost with its state.
    SequenceLost,
    /// The instance that had an iterative request was lost with what it had made of it.
    RequestLost,
    /// The sequence waited for a slot longer than one of its requests allows.
    SequenceTimeout,
}

impl RejectReason {
    /// The error that the client gets: Triton's codes and texts (core `dynamic_batch_scheduler.cc`, `scheduler_utils.cc`,
    /// `sequence_batch_scheduler.cc`), except for `NoInstance`, `NotBack`, `Exiting`, `SequenceLost` and `RequestLost`, which are ours. The
    /// caller adds the prefix with the request's id.
    pub fn error(self, model: &str, sequence: &CorrelationId) -> InferError {
        let unavailable = |reason, text: &str| InferError::new(ErrorCode::Unavailable, reason, text);
        match self {
            Self::SequenceNotStarted => InferError::invalid(format!(
                "inference request for sequence {sequence} to model '{model}' must specify the START flag on the first \
                 request of the sequence"
            )),
            Self::SequenceLost => {
                let text = format!(
                    "sequence {sequence} of model '{model}' was ended: the instance that had its state was lost; it can \
                     begin anew with the START flag"
                );
                unavailable(Reason::InstanceLost, &text)
            }
            Self::RequestLost => {
                let text = format!(
                    "the instance of model '{model}' that executed this request was lost; the request can be sent again"
                );
                unavailable(Reason::InstanceLost, &text)
            }
            Self::SequenceTimeout => {
                unavailable(Reason::Timeout, "timeout of the corresponding sequence has been expired")
            }
            Self::QueueFull => unavailable(Reason::QueueFull, "Exceeds maximum queue size"),
            Self::Timeout => unavailable(Reason::Timeout, "Request timeout expired"),
            Self::Cancelled => InferError::cancelled(),
            Self::Stopping => unavailable(
                Reason::NotReady,
                "Server is stopping, scheduler for model has stopped accepting new inference requests",
            ),
            Self::NoInstance => {
                unavailable(Reason::NotReady, "no instance of the model is left to execute the request")
            }
            Self::NotBack => {
                let text = format!(
                    "no instance of model '{model}' was restarted within the time that a request waits \
                     (--worker-max-wait-secs)"
                );
                unavailable(Reason::NotReady, &text)
            }
            Self::Exiting => unavailable(
                Reason::NotReady,
                "Server exiting: the request was not finished within the time that the server waits for requests in \
                 flight (--exit-timeout-secs)",
            ),
        }
    }

    /// Whether the request was refused on arrival and never queued. Triton counts such requests in no statistic.
    pub fn refused_on_arrival(self) -> bool {
        matches!(self, Self::QueueFull | Self::Stopping | Self::SequenceNotStarted)
    }
}

/// What happens to a request whose queue timeout has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeoutAction {
    /// It is answered with [`RejectReason::Timeout`].
    #[default]
    Reject,
    /// It is served after all other requests of its priority level, without a further timeout. The queue delay still
    /// counts from its arrival.
    Delay,
}

/// Limits of one priority level's queue (`ModelQueuePolicy` of the model configuration).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePolicy {
    /// Requests (not items) that may wait at this level; 0: any number.
    pub max_queue_size: u32,
    /// Microseconds a request may wait; 0: for ever.
    pub default_timeout_us: u64,
    /// Whether a request may shorten its timeout.
    pub allow_timeout_override: bool,
    /// What happens after the timeout.
    pub timeout_action: TimeoutAction,
}

impl QueuePolicy {
    /// The time that a request may wait when it asks for `requested_us`. A request can only shorten the default, so with
    /// a default of 0 its own timeout never applies (Triton's rule).
    pub fn timeout(&self, requested_us: u64) -> Option<Duration> {
        let shorter = self.allow_timeout_override && requested_us != 0 && requested_us < self.default_timeout_us;
        let chosen = if shorter { requested_us } else { self.default_timeout_us };
        (chosen != 0).then(|| Duration::from_micros(chosen))
    }

    /// Whether batches may be sent to an instance that is still busy. A batch that has been sent can neither time out
    /// nor count against the queue's limit, so a policy with either forbids it (as in Triton).
    pub fn allows_prefetch(&self) -> bool {
        self.max_queue_size == 0 && self.default_timeout_us == 0 && !self.allow_timeout_override
    }
}

/// How a model's requests are scheduled: `dynamic_batching` of its configuration. The default is Triton's default
/// scheduler: every request is executed alone, in arrival order.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Most items in one batch; 0 counts as 1. A single larger request is executed alone: refusing it is the model's
    /// business. For a model without `dynamic_batching` this is 1, whatever batches the model itself takes.
    pub max_batch_size: u32,
    /// Batch sizes in items that are sent without waiting; empty: only `max_batch_size`. Sizes above it are ignored.
    pub preferred_batch_sizes: Vec<u32>,
    /// Microseconds that a batch may wait for more requests while an instance is idle.
    pub max_queue_delay_us: u64,
    /// Whether responses must leave in arrival order. The scheduler itself does not need it; the driver then uses
    /// [`Reorder`].
    pub preserve_ordering: bool,
    /// Number of priority levels; 0: one queue for all.
    pub priority_levels: u64,
    /// The level of requests that name none or one that does not exist.
    pub default_priority_level: u64,
    /// The policy of the levels that have none of their own.
    pub queue_policy: QueuePolicy,
    /// The policies of single levels.
    pub priority_queue_policies: BTreeMap<u64, QueuePolicy>,
    /// Whether an instance may get its next batch while it is busy: two in flight, unless a queue policy or priority
    /// levels forbid it.
    pub prefetch: bool,
    /// Whether an instance executes only while it holds its resources ([`Action::Acquire`]); then it gets one batch at a
    /// time.
    pub rate_limited: bool,
    /// Nothing is executed until this many requests have been queued, once (`TRITONSERVER_DELAY_SCHEDULER`, for tests).
    pub delay_scheduler: Option<usize>,
    /// For a model with sequences. Of the others it uses the batch sizes, the queue delay, the limiter and the hold.
    pub sequence: Option<SequenceSettings>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_batch_size: 1,
            preferred_batch_sizes: Vec::new(),
            max_queue_delay_us: 0,
            preserve_ordering: false,
            priority_levels: 0,
            default_priority_level: 0,
            queue_policy: QueuePolicy::default(),
            priority_queue_policies: BTreeMap::new(),
            prefetch: true,
            rate_limited: false,
            delay_scheduler: None,
            sequence: None,
        }
    }
}

impl Settings {
    /// The level whose queue takes a request of this priority.
    pub fn level(&self, priority: u64) -> u64 {
        if priority == 0 || priority > self.priority_levels { self.default_priority_level } else { priority }
    }

    /// The policy of a level.
    pub fn policy(&self, level: u64) -> &QueuePolicy {
        self.priority_queue_policies.get(&level).unwrap_or(&self.queue_policy)
    }

    /// Batches that an instance may hold at once: 1 or 2. With priority levels 1, since a batch that has been sent cannot
    /// be overtaken by a more important request (as in Triton).
    pub fn max_in_flight(&self) -> u32 {
        let mut policies = std::iter::once(&self.queue_policy).chain(self.priority_queue_policies.values());
        let forbidden = self.rate_limited || self.priority_levels > 0;
        let allowed = self.prefetch && !forbidden && policies.all(QueuePolicy::allows_prefetch);
        if allowed { 2 } else { 1 }
    }
}

/// What waits in a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Priority levels with waiting requests, ascending, and how many wait there.
    pub levels: Vec<(u64, usize)>,
    /// When the one that has waited longest was enqueued.
    pub oldest: Option<Instant>,
}

/// A state machine that turns tickets into batches. Times never go backwards from call to call.
///
/// No call fails: what makes no sense (an unknown instance, a request that is not queued, one that is queued already)
/// is ignored, since it can come from a race between a client, a worker and the driver.
pub trait Scheduler: Send {
    /// A request came.
    fn enqueue(&mut self, ticket: Ticket, now: Instant);
    /// The client gave the request up. If it is queued it is rejected at once; if it has been sent, nothing happens.
    fn cancel(&mut self, request: RequestId, now: Instant);
    /// The oldest batch in flight on the instance has been answered.
    fn batch_done(&mut self, instance: InstanceId, now: Instant);
    /// The rate limiter has given the instance its resources. If it waits for them, it gets the batch that can go now, or
    /// they are given back when nothing can; else nothing happens.
    fn resources_granted(&mut self, _instance: InstanceId, _now: Instant) {}
    /// The instance joined or came back, with nothing in flight.
    fn instance_ready(&mut self, instance: InstanceId, now: Instant);
    /// The instance is gone. What was in flight there belongs to the driver, which may [`Scheduler::requeue`] it.
    fn instance_lost(&mut self, instance: InstanceId, now: Instant);
    /// The instance is to be stopped. It gets no new batches, or no new sequences; batches that it has and sequences that
    /// have begun there go on, and hold their resources. [`Scheduler::instance_lost`] follows when they are over.
    fn instance_closing(&mut self, instance: InstanceId, now: Instant) {
        self.instance_lost(instance, now);
    }
    /// Whether sequences have slots on the instance.
    fn has_sequences_on(&self, _instance: InstanceId) -> bool {
        false
    }
    /// A request that had been sent must be sent again. It goes before the younger ones of its level, whatever the
    /// queue's limit and also while stopping; `queued` is when it was first enqueued, and its timeout counts from there.
    fn requeue(&mut self, ticket: Ticket, queued: Instant, now: Instant);
    /// Refuse new requests and finish the queued ones, without waiting for batches to fill.
    fn stop(&mut self, now: Instant);
    /// Reject everything that is queued: the model has lost its last instance for good, or the time to drain is over.
    fn reject_all(&mut self, reason: RejectReason, now: Instant);
    /// Reject what was queued before `queued`: no instance has been ready for too long.
    fn reject_queued_before(&mut self, queued: Instant, reason: RejectReason, now: Instant);
    /// The time of [`Scheduler::poll_timeout`] has come.
    fn handle_timeout(&mut self, now: Instant);
    /// When to call [`Scheduler::handle_timeout`]; valid once `poll_action` has returned `None`, and then in the future.
    fn poll_timeout(&self) -> Option<Instant>;
    /// The next thing to do; `None` when there is nothing until something happens.
    fn poll_action(&mut self, now: Instant) -> Option<Action>;
    /// What waits in the queue now.
    fn waiting(&self) -> Waiting;
    /// The oldest batch in flight on the instance never reached it: as [`Scheduler::batch_done`], but nothing of it was
    /// executed.
    fn batch_unsent(&mut self, instance: InstanceId, now: Instant) {
        self.batch_done(instance, now);
    }
    /// A request in flight wants to be executed once more (iterative sequences): to be told before
    /// [`Scheduler::batch_done`] of its batch. With `hold` it waits for [`Scheduler::resume`], in its place. `false`: this
    /// scheduler or model does no such thing, and the request must be answered.
    fn reschedule(&mut self, _request: RequestId, _hold: bool) -> bool {
        false
    }
    /// A request that was held may be executed; one that was not, or is not known any more, changes nothing.
    fn resume(&mut self, _request: RequestId) {}
    /// What there is of sequences, for a model with them.
    fn sequences(&self) -> Option<SequenceCounts> {
        None
    }
    /// No more requests come for the sequence of this id: it ends when those that it has are done, and a later request of
    /// the id begins another.
    fn end_sequence(&mut self, _id: &CorrelationId, _now: Instant) {}
    /// Whether a sequence of this id has begun and not ended.
    fn has_sequence(&self, _id: &CorrelationId) -> bool {
        false
    }
    /// Requests that wait in the queue. A batch that has been sent is not in it, even if it does not execute yet.
    fn queued(&self) -> usize;
}

/// The scheduler for these settings.
pub fn create(settings: Settings) -> Box<dyn Scheduler> {
    match settings.sequence.clone() {
        Some(sequences) => Box::new(sequence::SequenceBatcher::new(settings, sequences)),
        None => Box::new(dynamic::DynamicBatcher::new(settings)),
    }
}
