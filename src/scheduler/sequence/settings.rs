//! The types that others use of sequences: their settings, their places in tickets and batches, and their counts.

use crate::id::{CorrelationId, RequestId};

/// A request's place in a sequence, as its client says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InSequence {
    /// The sequence's id, not none.
    pub id: CorrelationId,
    /// It begins the sequence.
    pub start: bool,
    /// It is the last one.
    pub end: bool,
}

/// A request in a batch of a model with sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotStep {
    /// The request.
    pub request: RequestId,
    /// The number of its sequence: another one each time an id is begun.
    pub key: u64,
    /// Nothing of the sequence was sent before.
    pub start: bool,
    /// Nothing comes after it.
    pub end: bool,
}

/// How sequences share an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SequenceStrategy {
    /// As many slots as the maximum batch has places, each of them one. [`Settings::max_queue_delay_us`](crate::scheduler::Settings::max_queue_delay_us) holds only if
    /// neither it nor this utilization is 0: a batch goes when this part of the slots is ready or the delay is over.
    Direct {
        /// From 0 to 1.
        minimum_slot_utilization: f32,
    },
    /// So many slots (at least one) that have nothing to do with the batch.
    Oldest {
        /// Slots of each instance.
        max_candidate_sequences: u32,
    },
}

/// The settings of a model with sequences (`sequence_batching`).
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceSettings {
    /// How sequences share an instance.
    pub strategy: SequenceStrategy,
    /// Microseconds that a sequence may be idle.
    pub max_idle_us: u64,
    /// One request makes a sequence, which ends when it is done and was not rescheduled.
    pub iterative: bool,
    /// Iterative requests of one id share an instance and begin in the order of arrival, each while those before it may
    /// still be rescheduled. Has an effect only with `iterative` and the strategy `Oldest`.
    pub overlapping: bool,
    /// Sequences that may wait for a slot; `None`: any number.
    pub max_backlog: Option<usize>,
    /// Requests that may wait in one sequence, beside the one that executes; 0: any number.
    pub max_queue: usize,
    /// A sequence begins with the first request of its id, with START or without.
    pub implicit_start: bool,
    /// [`Settings::delay_scheduler`](crate::scheduler::Settings::delay_scheduler) also waits until the backlog holds so many requests
    /// (`TRITONSERVER_BACKLOG_DELAY_SCHEDULER`, for tests).
    pub backlog_hold: usize,
}

/// What there is of sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SequenceCounts {
    /// That have a slot, or whose last request is on its way.
    pub active: usize,
    /// That wait for a slot.
    pub backlogged: usize,
    /// Slots that a sequence has.
    pub slots_used: usize,
    /// Slots of all ready instances.
    pub slots: u64,
    /// That were given up because they were idle, so far.
    pub idle_evicted: u64,
    /// Requests that were refused because their sequence had not been started, so far.
    pub start_errors: u64,
    /// Sequences that START began anew while they were active, so far.
    pub restarts: u64,
}
