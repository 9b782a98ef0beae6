//! Requests of one sequence that overlap: one that is executed again leaves its place in the sequence to the next.

use super::table::Number;
use super::{Action, InSequence, SequenceBatcher, SequenceStrategy};
use crate::timeline::Instant;

impl SequenceBatcher {
    /// Whether requests of one sequence may overlap.
    pub(super) fn overlaps(&self) -> bool {
        let settings = &self.sequences;
        settings.overlapping && settings.iterative && matches!(settings.strategy, SequenceStrategy::Oldest { .. })
    }

    /// Whether a request makes a sequence that no other request belongs to.
    pub(super) fn is_alone(&self, wanted: &InSequence) -> bool {
        self.sequences.iterative && (wanted.id.is_none() || !self.overlaps())
    }

    /// Makes a sequence for the request that this one executes, unless it was made for it already.
    pub(super) fn split(&mut self, number: Number) -> Option<Number> {
        self.table.get(number).filter(|sequence| sequence.origin.is_none())?;
        self.table.split(number)
    }

    /// Ends, for the backend, the request that a sequence has executed and that is not executed again.
    pub(super) fn end_request(&mut self, number: Number) {
        if !self.overlaps() {
            return;
        }
        let Some(sequence) = self.table.get_mut(number).filter(|sequence| sequence.origin.is_none()) else { return };
        if let (Some(instance), Some(key)) = (sequence.instance(), sequence.running.take()) {
            self.decided.push_back(Action::SequencesEnded { instance, keys: vec![key] });
        }
    }

    /// A request that was executed again is done: its sequence may be idle now.
    pub(super) fn settle_origin(&mut self, origin: Option<Number>, now: Instant) {
        let Some(origin) = origin else { return };
        if let Some(sequence) = self.table.get_mut(origin) {
            sequence.continued = sequence.continued.saturating_sub(1);
        }
        self.settle(origin, now);
    }
}
