//! `preserve_ordering`: sends responses in the order in which their requests arrived, across
//! batches and instances.
//!
//! Schedulers do not handle this: the order of the answers does not affect where requests run. The
//! driver has one [`Reorder`] for each model with this setting, and passes every answer of an
//! accepted request through it.

use std::collections::VecDeque;

use crate::id::{RequestId, RequestMap};

#[derive(Debug)]
enum Slot<T> {
    Waiting,
    Finished(RequestId, T),
    /// Removed; its slot is skipped.
    Gone,
}

/// Holds answers back until all earlier expected answers have been sent. `T` is the answer.
///
/// A request that is retried keeps its position. The size is bounded by the number of requests that
/// were expected at one time, and of those that were answered since the oldest unanswered one.
#[derive(Debug)]
pub struct Reorder<T> {
    slots: VecDeque<Slot<T>>,
    /// The number of the first slot; slots are numbered in order of arrival.
    first: u64,
    numbers: RequestMap<u64>,
}

impl<T> Default for Reorder<T> {
    fn default() -> Self {
        Self { slots: VecDeque::new(), first: 0, numbers: RequestMap::default() }
    }
}

impl<T> Reorder<T> {
    /// Creates one that expects no answers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request. Call this when it is enqueued. A request that is already expected keeps its
    /// position.
    pub fn expect(&mut self, request: RequestId) {
        let number = self.first + self.slots.len() as u64;
        if let std::collections::hash_map::Entry::Vacant(vacant) = self.numbers.entry(request) {
            vacant.insert(number);
            self.slots.push_back(Slot::Waiting);
        }
    }

    /// Stores a request's answer: a response, or the error of its execution. [`Reorder::pop`]
    /// returns it when it may be sent. An answer of a request that is not expected is returned at
    /// once.
    pub fn finish(&mut self, request: RequestId, answer: T) -> Option<T> {
        match self.slot(request) {
            Some(slot) => {
                *slot = Slot::Finished(request, answer);
                None
            }
            None => Some(answer),
        }
    }

    /// Removes a request that was answered out of order because it was not executed (rejected,
    /// expired, cancelled).
    pub fn remove(&mut self, request: RequestId) {
        if let Some(slot) = self.slot(request) {
            *slot = Slot::Gone;
        }
        // Requests that a full queue refuses must not take memory while an earlier one executes.
        while matches!(self.slots.back(), Some(Slot::Gone)) {
            self.slots.pop_back();
        }
    }

    /// Returns the next answer that may be sent now; call it until it returns `None`.
    pub fn pop(&mut self) -> Option<(RequestId, T)> {
        loop {
            if matches!(self.slots.front()?, Slot::Waiting) {
                return None;
            }
            self.first += 1;
            if let Slot::Finished(request, answer) = self.slots.pop_front()? {
                return Some((request, answer));
            }
        }
    }

    /// Removes the request's number, since each request is answered once, and returns its slot.
    fn slot(&mut self, request: RequestId) -> Option<&mut Slot<T>> {
        let number = self.numbers.remove(&request)?;
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.slots.get_mut(index)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn leaving(reorder: &mut Reorder<&'static str>) -> Vec<u64> {
        std::iter::from_fn(|| reorder.pop()).map(|(request, _)| request.0).collect()
    }

    fn expecting(count: u64) -> Reorder<&'static str> {
        let mut reorder = Reorder::new();
        (1..=count).for_each(|id| reorder.expect(RequestId(id)));
        reorder
    }

    #[test]
    fn answers_leave_in_order_of_arrival() {
        let mut reorder = expecting(3);
        reorder.finish(RequestId(3), "c");
        reorder.finish(RequestId(2), "b");
        assert_eq!(leaving(&mut reorder), [0; 0]);
        reorder.finish(RequestId(1), "a");
        assert_eq!(leaving(&mut reorder), [1, 2, 3]);
    }

    #[test]
    fn a_forgotten_request_does_not_delay_others() {
        let mut reorder = expecting(3);
        reorder.finish(RequestId(2), "b");
        reorder.remove(RequestId(1));
        assert_eq!(leaving(&mut reorder), [2]);
        reorder.remove(RequestId(3));
        assert_eq!(leaving(&mut reorder), [0; 0]);
        assert!(reorder.slots.is_empty() && reorder.numbers.is_empty(), "nothing is kept");
    }

    #[test]
    fn refused_requests_take_no_memory_behind_a_waiting_one() {
        let mut reorder = expecting(1);
        for id in 2..100 {
            reorder.expect(RequestId(id));
            reorder.remove(RequestId(id));
        }
        assert_eq!((reorder.slots.len(), reorder.numbers.len()), (1, 1));
        (100..=103).for_each(|id| reorder.expect(RequestId(id)));
        reorder.finish(RequestId(103), "d");
        reorder.finish(RequestId(101), "b");
        reorder.remove(RequestId(102));
        reorder.remove(RequestId(100));
        assert_eq!(leaving(&mut reorder), [0; 0]);
        reorder.finish(RequestId(1), "a");
        assert_eq!(leaving(&mut reorder), [1, 101, 103]);
        assert!(reorder.slots.is_empty() && reorder.numbers.is_empty(), "nothing is kept");
    }

    #[test]
    fn an_unexpected_answer_is_returned_at_once() {
        let mut reorder = expecting(2);
        assert_eq!(reorder.finish(RequestId(9), "x"), Some("x"));
        assert_eq!(reorder.finish(RequestId(1), "a"), None);
        assert_eq!(
            reorder.finish(RequestId(1), "again"),
            Some("again"),
            "one answer for each request"
        );
        assert_eq!(leaving(&mut reorder), [1]);
    }

    #[test]
    fn an_expected_request_keeps_its_position() {
        let mut reorder = expecting(2);
        reorder.expect(RequestId(1));
        reorder.finish(RequestId(2), "b");
        reorder.finish(RequestId(1), "a");
        assert_eq!(leaving(&mut reorder), [1, 2]);
    }
}
