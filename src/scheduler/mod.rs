//! Schedulers decide which requests run together, where and when. The driver reports events to a
//! scheduler, polls it for actions, and performs them.
//!
//! A scheduler handles [`Ticket`]s, never tensors. It has no clock, thread or socket, so that every
//! decision can be simulated in virtual time. It must answer each request exactly once: each
//! enqueued request leaves in exactly one [`Action`], and comes back only through
//! [`Scheduler::requeue`] or [`Scheduler::reschedule`].
//!
//! The driver's loop: report events, call [`Scheduler::poll_action`] until it returns `None`, then
//! sleep until the next event or [`Scheduler::poll_timeout`], whichever is first; in the latter
//! case call [`Scheduler::handle_timeout`].
//!
//! With `preserve_ordering` the driver passes responses through [`ordering::Reorder`].

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

/// The properties of a request that a scheduler needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ticket {
    /// The request's id, unique while it is queued.
    pub request: RequestId,
    /// The number of items along the batch dimension; 0 (a model without one) counts as 1.
    pub batch_size: u32,
    /// A digest of everything that must match within a batch (shapes of inputs with variable
    /// dimensions, the set of optional inputs): requests may share a batch only if their keys are
    /// equal.
    pub shape_key: u64,
    /// 1 is the highest priority; 0 and values above [`Settings::priority_levels`] mean the
    /// default level.
    pub priority: u64,
    /// The request's own queue timeout in microseconds; 0 for none. See [`QueuePolicy::timeout`]
    /// for when it applies.
    pub timeout_us: u64,
    /// How much of its queue timeout had passed when it was enqueued: the time since the server
    /// received it.
    pub waited: Duration,
    /// Its position in a sequence, for a model with sequences.
    pub sequence: Option<InSequence>,
}

/// An action that the driver must perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send these requests, in this order, to the instance as one batch.
    Execute {
        /// A ready instance.
        instance: InstanceId,
        /// The requests; not empty.
        requests: Vec<RequestId>,
        /// Why the batch is sent now.
        reason: SendReason,
    },
    /// Send a batch of a model with sequences. An empty slot (`None`) is padding.
    ExecuteSteps {
        /// A ready instance.
        instance: InstanceId,
        /// The slots; at least one is not empty.
        slots: Vec<Option<SlotStep>>,
        /// Why the batch is sent now.
        reason: SendReason,
    },
    /// Report to the instance that these sequences have ended without an END step.
    SequencesEnded {
        /// The instance that executed them.
        instance: InstanceId,
        /// Their keys, as in [`SlotStep::key`].
        keys: Vec<u64>,
    },
    /// Log that a request with START has restarted an active sequence, which may be a mistake of
    /// its client, or of another client with the same id. The request is queued as usual.
    SequenceRestarted {
        /// The request with START.
        request: RequestId,
    },
    /// Answer the request with [`RejectReason::error`].
    Reject {
        /// The request, which is no longer in the scheduler.
        request: RequestId,
        /// Why.
        reason: RejectReason,
    },
    /// With [`Settings::rate_limited`]: stage the idle instance at the rate limiter, and call
    /// [`Scheduler::resources_granted`] once it has its resources.
    Acquire {
        /// A ready instance that holds no batch.
        instance: InstanceId,
    },
    /// The instance no longer needs resources: cancel its request for them, or release them unused.
    Withdraw {
        /// The instance, which may no longer be in the scheduler.
        instance: InstanceId,
    },
    /// Release the instance's resources: its batch has ended, or the instance is lost.
    Release {
        /// The instance, which may no longer be in the scheduler.
        instance: InstanceId,
    },
}

/// Why a scheduler rejected a request without executing it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RejectReason {
    /// The queue of the request's priority level was full on arrival.
    QueueFull,
    /// The request waited longer than its queue timeout.
    Timeout,
    /// The client cancelled the request.
    Cancelled,
    /// The scheduler no longer accepts requests.
    Stopping,
    /// The model has no instances left, and none will be restarted.
    NoInstance,
    /// No instance of the model was restarted within the maximum waiting time.
    NotRestarted,
    /// The server exits, and its drain timeout has passed.
    Exiting,
    /// The sequence is unknown and the request does not start it.
    SequenceNotStarted,
    /// The instance that held the sequence's state was lost.
    SequenceLost,
    /// The instance that executed an iterative request was lost.
    RequestLost,
    /// A request of the sequence that waited before this one was cancelled.
    SequenceCancelled,
    /// The sequence waited for a slot longer than the timeout of one of its requests.
    SequenceTimeout,
}

impl RejectReason {
    /// Returns the client's error: Triton's codes and texts (core `dynamic_batch_scheduler.cc`,
    /// `scheduler_utils.cc`, `sequence_batch_scheduler.cc`), except for `NoInstance`,
    /// `NotRestarted`, `Exiting`, `SequenceLost` and `RequestLost`, which Triton does not have. The
    /// caller adds the prefix with the request's id.
    pub fn error(self, model: &str, sequence: &CorrelationId) -> InferError {
        let unavailable =
            |reason, text: &str| InferError::new(ErrorCode::Unavailable, reason, text);
        match self {
            Self::SequenceNotStarted => InferError::invalid(format!(
                "inference request for sequence {sequence} to model '{model}' must specify the \
                 START flag on the first request of the sequence"
            )),
            Self::SequenceLost => {
                let text = format!(
                    "sequence {sequence} of model '{model}' was ended: the instance that held its \
                     state was lost; start it again with the START flag"
                );
                unavailable(Reason::InstanceLost, &text)
            }
            Self::SequenceCancelled => {
                // Triton's code; its text is empty.
                let text = format!(
                    "sequence {sequence} of model '{model}' was ended: one of its waiting \
                     requests was cancelled; start it again with the START flag"
                );
                InferError::cancelled().with_message(text)
            }
            Self::RequestLost => {
                let text = format!(
                    "the instance of model '{model}' that executed this request was lost; the \
                     request can be sent again"
                );
                unavailable(Reason::InstanceLost, &text)
            }
            Self::SequenceTimeout => unavailable(
                Reason::Timeout,
                "timeout of the corresponding sequence has been expired",
            ),
            Self::QueueFull => unavailable(Reason::QueueFull, "Exceeds maximum queue size"),
            Self::Timeout => unavailable(Reason::Timeout, "Request timeout expired"),
            Self::Cancelled => InferError::cancelled(),
            Self::Stopping => unavailable(
                Reason::NotReady,
                "Server is stopping, scheduler for model has stopped accepting new inference \
                 requests",
            ),
            Self::NoInstance => unavailable(
                Reason::NotReady,
                "the model has no instance left to execute the request",
            ),
            Self::NotRestarted => {
                let text = format!(
                    "no instance of model '{model}' was restarted within the time that a request \
                     waits (--worker-max-wait-secs)"
                );
                unavailable(Reason::NotReady, &text)
            }
            Self::Exiting => unavailable(
                Reason::NotReady,
                "Server exiting: the request was not finished within the time that the server \
                 waits for requests in flight (--exit-timeout-secs, or until a second signal)",
            ),
        }
    }

    /// Returns whether the request was rejected on arrival and never queued. Triton counts such
    /// requests in no statistic.
    pub fn refused_on_arrival(self) -> bool {
        matches!(self, Self::QueueFull | Self::Stopping | Self::SequenceNotStarted)
    }
}

/// What happens to a request whose queue timeout has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TimeoutAction {
    /// It is rejected with [`RejectReason::Timeout`].
    #[default]
    Reject,
    /// It is served after all other requests of its priority level, without a further timeout. The
    /// queue delay is still measured from its arrival.
    Delay,
}

/// Limits of one priority level's queue (`ModelQueuePolicy` of the model configuration).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePolicy {
    /// The maximum number of requests (not items) that may wait at this level; 0 for no limit.
    pub max_queue_size: u32,
    /// The maximum time that a request may wait, in microseconds; 0 for no limit.
    pub default_timeout_us: u64,
    /// Whether a request may shorten its timeout.
    pub allow_timeout_override: bool,
    /// What happens after the timeout.
    pub timeout_action: TimeoutAction,
}

impl QueuePolicy {
    /// Returns the time that a request with the timeout `requested_us` may wait. A request can only
    /// shorten the default, so with a default of 0 its own timeout never applies (Triton's rule).
    pub fn timeout(&self, requested_us: u64) -> Option<Duration> {
        let shorter = self.allow_timeout_override
            && requested_us != 0
            && requested_us < self.default_timeout_us;
        let chosen = if shorter { requested_us } else { self.default_timeout_us };
        (chosen != 0).then(|| Duration::from_micros(chosen))
    }

    /// Returns whether batches may be sent to an instance that is still busy. A batch in flight can
    /// neither time out nor count against the queue's limit, so a policy with either forbids
    /// prefetching (as in Triton).
    pub fn allows_prefetch(&self) -> bool {
        self.max_queue_size == 0 && self.default_timeout_us == 0 && !self.allow_timeout_override
    }
}

/// How a model's requests are scheduled: `dynamic_batching` of its configuration. The default is
/// Triton's default scheduler: every request is executed alone, in arrival order.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The maximum number of items in one batch; 0 counts as 1. A single larger request is
    /// executed alone; the model's checks refuse it if necessary. For a model without
    /// `dynamic_batching` this is 1, regardless of the model's maximum batch size.
    pub max_batch_size: u32,
    /// Batch sizes in items that are sent without waiting; if empty, only `max_batch_size`. Larger
    /// sizes are ignored.
    pub preferred_batch_sizes: Vec<u32>,
    /// How long a batch may wait for more requests while an instance is idle, in microseconds.
    pub max_queue_delay_us: u64,
    /// Whether responses must be sent in arrival order. The scheduler does not use this setting;
    /// the driver then uses [`Reorder`].
    pub preserve_ordering: bool,
    /// The number of priority levels; 0 for a single queue.
    pub priority_levels: u64,
    /// The level of requests without a priority or with an unknown one.
    pub default_priority_level: u64,
    /// The policy of levels that are not in `priority_queue_policies`.
    pub queue_policy: QueuePolicy,
    /// The policies of individual levels.
    pub priority_queue_policies: BTreeMap<u64, QueuePolicy>,
    /// Whether an instance may receive its next batch while it is busy (two batches in flight),
    /// unless a queue policy or priority levels forbid it.
    pub prefetch: bool,
    /// Whether an instance executes only while it holds its resources ([`Action::Acquire`]); then
    /// it receives one batch at a time.
    pub rate_limited: bool,
    /// The number of requests that must be queued before the first execution
    /// (`TRITONSERVER_DELAY_SCHEDULER`, for tests).
    pub delay_scheduler: Option<usize>,
    /// For a model with sequences, which also uses the batch sizes, the queue delay, the rate
    /// limiter and `delay_scheduler`.
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
    /// Returns the level of a request with this priority.
    pub fn level(&self, priority: u64) -> u64 {
        if priority == 0 || priority > self.priority_levels {
            self.default_priority_level
        } else {
            priority
        }
    }

    /// Returns the policy of a level.
    pub fn policy(&self, level: u64) -> &QueuePolicy {
        self.priority_queue_policies.get(&level).unwrap_or(&self.queue_policy)
    }

    /// Returns the maximum number of batches in flight on an instance: 1 or 2. With priority levels
    /// it is 1, because a request cannot overtake a batch in flight (as in Triton).
    pub fn max_in_flight(&self) -> u32 {
        let mut policies =
            std::iter::once(&self.queue_policy).chain(self.priority_queue_policies.values());
        let forbidden = self.rate_limited || self.priority_levels > 0;
        let allowed = self.prefetch && !forbidden && policies.all(QueuePolicy::allows_prefetch);
        if allowed { 2 } else { 1 }
    }
}

/// The requests that wait in a queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Priority levels with waiting requests, ascending, and the number of requests at each.
    pub levels: Vec<(u64, usize)>,
    /// When the oldest waiting request was enqueued.
    pub oldest: Option<Instant>,
}

/// A state machine that groups tickets into batches. Times never decrease from call to call.
///
/// No call fails: invalid calls (an unknown instance, a request that is not queued or is queued
/// already) are ignored, because races between clients, workers and the driver can cause them.
pub trait Scheduler: Send {
    /// Adds a request.
    fn enqueue(&mut self, ticket: Ticket, now: Instant);
    /// Cancels a request. If it is queued, it is rejected at once; if it is in flight, nothing
    /// happens.
    fn cancel(&mut self, request: RequestId, now: Instant);
    /// Reports that the oldest batch in flight on the instance has been answered.
    fn batch_done(&mut self, instance: InstanceId, now: Instant);
    /// Reports that the rate limiter has granted the instance its resources. If the instance still
    /// needs them, it receives the batch that can be sent now; if no batch can, they are released.
    fn resources_granted(&mut self, _instance: InstanceId, _now: Instant) {}
    /// Adds an instance that has started or restarted, with nothing in flight.
    fn instance_ready(&mut self, instance: InstanceId, now: Instant);
    /// Removes an instance. The driver handles the requests in flight there, and may
    /// [`Scheduler::requeue`] them.
    fn instance_lost(&mut self, instance: InstanceId, now: Instant);
    /// Starts closing an instance. It receives no new batches or sequences; its batches and active
    /// sequences continue and keep their resources. [`Scheduler::instance_lost`] follows when they
    /// have ended.
    fn instance_closing(&mut self, instance: InstanceId, now: Instant) {
        self.instance_lost(instance, now);
    }
    /// Returns whether sequences have slots on the instance.
    fn has_sequences_on(&self, _instance: InstanceId) -> bool {
        false
    }
    /// Adds a request that was sent and must be sent again. It is placed before younger requests of
    /// its level, even if the queue is full or the scheduler is stopping. `queued` is when it was
    /// first enqueued; its timeout starts then.
    fn requeue(&mut self, ticket: Ticket, queued: Instant, now: Instant);
    /// Stops accepting requests, and executes the queued ones without waiting for batches to fill.
    fn stop(&mut self, now: Instant);
    /// Rejects all queued requests: the model has permanently lost its last instance, or the drain
    /// timeout has passed.
    fn reject_all(&mut self, reason: RejectReason, now: Instant);
    /// Rejects all requests queued before `queued`: no instance was ready for too long.
    fn reject_queued_before(&mut self, queued: Instant, reason: RejectReason, now: Instant);
    /// Reports that the time of [`Scheduler::poll_timeout`] has come.
    fn handle_timeout(&mut self, now: Instant);
    /// Returns when to call [`Scheduler::handle_timeout`]. Valid once `poll_action` has returned
    /// `None`; then it is in the future.
    fn poll_timeout(&self) -> Option<Instant>;
    /// Returns the next action; `None` if there is nothing to do until the next event.
    fn poll_action(&mut self, now: Instant) -> Option<Action>;
    /// Returns the requests that wait in the queue.
    fn waiting(&self) -> Waiting;
    /// Reports that the oldest batch in flight never reached the instance. Like
    /// [`Scheduler::batch_done`], but no request of the batch was executed.
    fn batch_unsent(&mut self, instance: InstanceId, now: Instant) {
        self.batch_done(instance, now);
    }
    /// Reschedules a request in flight (iterative sequences). Must be called before
    /// [`Scheduler::batch_done`] of its batch. With `hold` it waits for [`Scheduler::resume`]
    /// without losing its position. Returns `false` if the scheduler or model does not
    /// support this; then the request must be answered.
    fn reschedule(&mut self, _request: RequestId, _hold: bool) -> bool {
        false
    }
    /// Releases a held request. Does nothing for a request that is not held or not known.
    fn resume(&mut self, _request: RequestId) {}
    /// Returns the counts of sequences; `None` for a model without them.
    fn sequences(&self) -> Option<SequenceCounts> {
        None
    }
    /// Closes the sequence of this id: it ends when its present requests are done, and a later
    /// request of the id starts another sequence.
    fn end_sequence(&mut self, _id: &CorrelationId, _now: Instant) {}
    /// Closes all sequences, since no request can find this scheduler any more: the idle ones free
    /// their slots for those that wait.
    fn close_sequences(&mut self, _now: Instant) {}
    /// Returns whether a sequence of this id is active.
    fn has_sequence(&self, _id: &CorrelationId) -> bool {
        false
    }
    /// Returns the number of requests in the queue. It excludes batches in flight, even if they are
    /// not executing yet.
    fn queued(&self) -> usize;
}

/// Creates the scheduler for these settings.
pub fn create(settings: Settings) -> Box<dyn Scheduler> {
    match settings.sequence.clone() {
        Some(sequences) => Box::new(sequence::SequenceBatcher::new(settings, sequences)),
        None => Box::new(dynamic::DynamicBatcher::new(settings)),
    }
}
