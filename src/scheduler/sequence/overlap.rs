//! Overlapping requests of one sequence: a rescheduled request leaves its position in the sequence
//! to the next one.

use super::table::Number;
use super::{Action, InSequence, SequenceBatcher, SequenceStrategy};
use crate::timeline::Instant;

impl SequenceBatcher {
    /// Returns whether requests of one sequence may overlap.
    pub(super) fn overlaps(&self) -> bool {
        let settings = &self.sequences;
        settings.overlapping
            && settings.iterative
            && matches!(settings.strategy, SequenceStrategy::Oldest { .. })
    }

    /// Returns whether a request forms a sequence by itself.
    pub(super) fn is_alone(&self, wanted: &InSequence) -> bool {
        self.sequences.iterative && (wanted.id.is_none() || !self.overlaps())
    }

    /// Moves the request that the sequence executes to a separate sequence, unless it already has
    /// one.
    pub(super) fn split(&mut self, number: Number) -> Option<Number> {
        self.table.get(number).filter(|sequence| sequence.origin.is_none())?;
        self.table.split(number)
    }

    /// Reports the end of the executed request to the backend, if it is not rescheduled.
    pub(super) fn end_request(&mut self, number: Number) {
        if !self.overlaps() {
            return;
        }
        let Some(sequence) =
            self.table.get_mut(number).filter(|sequence| sequence.origin.is_none())
        else {
            return;
        };
        if let (Some(instance), Some(key)) = (sequence.instance(), sequence.running.take()) {
            self.decided.push_back(Action::SequencesEnded { instance, keys: vec![key] });
        }
    }

    /// Updates the original sequence when a rescheduled request is done: it may be idle now.
    pub(super) fn advance_origin(&mut self, origin: Option<Number>, now: Instant) {
        let Some(origin) = origin else { return };
        if let Some(sequence) = self.table.get_mut(origin) {
            sequence.continued = sequence.continued.saturating_sub(1);
        }
        self.advance(origin, now);
    }
}
