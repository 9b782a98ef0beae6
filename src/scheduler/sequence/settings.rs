//! The public types of sequences: settings, positions in tickets and batches, and counts.

use crate::id::{CorrelationId, RequestId};

/// A request's position in a sequence, as its client declares it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InSequence {
    /// The sequence's id, not empty.
    pub id: CorrelationId,
    /// Whether it begins the sequence.
    pub start: bool,
    /// Whether it is the last request of the sequence.
    pub end: bool,
}

/// A request in a batch of a model with sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotStep {
    /// The request.
    pub request: RequestId,
    /// The key of its sequence; a new one each time an id starts.
    pub key: u64,
    /// Whether no request of the sequence was sent before.
    pub start: bool,
    /// Whether it is the last request of the sequence.
    pub end: bool,
}

/// How sequences share an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SequenceStrategy {
    /// One slot for each position of the maximum batch.
    /// [`Settings::max_queue_delay_us`](crate::scheduler::Settings::max_queue_delay_us) applies
    /// only if it and this utilization are not 0: a batch is sent when this share of the slots is
    /// ready or the delay has passed.
    Direct {
        /// The share of ready slots, from 0 to 1.
        minimum_slot_utilization: f32,
    },
    /// A number of slots (at least one) that is independent of the batch.
    Oldest {
        /// The number of slots of each instance.
        max_candidate_sequences: u32,
    },
}

/// The settings of a model with sequences (`sequence_batching`).
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceSettings {
    /// How sequences share an instance.
    pub strategy: SequenceStrategy,
    /// How long a sequence may be idle, in microseconds.
    pub max_idle_us: u64,
    /// Whether each request is a sequence, which ends when the request is done and was not
    /// rescheduled.
    pub iterative: bool,
    /// Whether iterative requests of one id share an instance and begin in the order of arrival,
    /// even while earlier ones may still be rescheduled. Has an effect only with `iterative` and
    /// the strategy `Oldest`.
    pub overlapping: bool,
    /// The maximum number of sequences that may wait for a slot; `None` for no limit.
    pub max_backlog: Option<usize>,
    /// The maximum number of requests that may wait in one sequence, besides the executing one; 0
    /// for no limit.
    pub max_queue: usize,
    /// Whether the first request of an id starts a sequence, with or without START.
    pub implicit_start: bool,
    /// The number of requests in the backlog that
    /// [`Settings::delay_scheduler`](crate::scheduler::Settings::delay_scheduler) also
    /// waits for (`TRITONSERVER_BACKLOG_DELAY_SCHEDULER`, for tests).
    pub backlog_hold: usize,
}

/// The current and total counts of sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceCounts {
    /// Sequences that have a slot, or whose last request is executing.
    pub active: usize,
    /// Sequences that wait for a slot.
    pub backlogged: usize,
    /// Occupied slots.
    pub slots_used: usize,
    /// Slots of all ready instances.
    pub slots: u64,
    /// The total of sequences that were ended because they were idle.
    pub idle_evicted: u64,
    /// The total of requests that were rejected because their sequence had not been started.
    pub start_errors: u64,
    /// The total of active sequences that START restarted.
    pub restarts: u64,
}
