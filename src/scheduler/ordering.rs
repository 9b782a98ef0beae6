//! `preserve_ordering`: responses leave in the order in which their requests came, across batches and instances.
//!
//! Schedulers stay free of it: they decide where requests run, and that is not changed by the order of the answers. The
//! driver keeps one [`Reorder`] per model that asks for it, and passes every answer of an accepted request through.

use std::collections::VecDeque;

use crate::id::{RequestId, RequestMap};

#[derive(Debug)]
enum Slot<T> {
    Waiting,
    Finished(RequestId, T),
    /// Forgotten, and now to be passed over.
    Gone,
}

/// Holds answers back until all that were expected before them have left. `T` is the answer.
///
/// A request that is retried keeps its place. What it holds is bounded by the requests that came since the oldest one
/// that is still unanswered.
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
    /// One that expects nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// A request came (with the call of `enqueue`). A request that is expected already keeps its place.
    pub fn expect(&mut self, request: RequestId) {
        let number = self.first + self.slots.len() as u64;
        if let std::collections::hash_map::Entry::Vacant(vacant) = self.numbers.entry(request) {
            vacant.insert(number);
            self.slots.push_back(Slot::Waiting);
        }
    }

    /// The request's answer is there: a response, or the error of its execution. [`Reorder::pop`] gives it back
    /// when it may leave. An answer that nobody expects is handed back at once: it may leave.
    pub fn finish(&mut self, request: RequestId, answer: T) -> Option<T> {
        match self.slot(request) {
            Some(slot) => {
                *slot = Slot::Finished(request, answer);
                None
            }
            None => Some(answer),
        }
    }

    /// The request is answered out of turn and nobody waits for it: it was not executed (refused, expired, cancelled).
    pub fn forget(&mut self, request: RequestId) {
        if let Some(slot) = self.slot(request) {
            *slot = Slot::Gone;
        }
    }

    /// The next answer that may leave now; call it until it returns `None`.
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

    /// Takes the request's number away: each is answered once.
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
    fn a_forgotten_request_holds_nothing_back() {
        let mut reorder = expecting(3);
        reorder.finish(RequestId(2), "b");
        reorder.forget(RequestId(1));
        assert_eq!(leaving(&mut reorder), [2]);
        reorder.forget(RequestId(3));
        assert_eq!(leaving(&mut reorder), [0; 0]);
        assert!(reorder.slots.is_empty() && reorder.numbers.is_empty(), "nothing is kept");
    }

    #[test]
    fn an_unexpected_answer_comes_straight_back() {
        let mut reorder = expecting(2);
        assert_eq!(reorder.finish(RequestId(9), "x"), Some("x"));
        assert_eq!(reorder.finish(RequestId(1), "a"), None);
        assert_eq!(reorder.finish(RequestId(1), "again"), Some("again"), "one answer per place");
        assert_eq!(leaving(&mut reorder), [1]);
    }

    #[test]
    fn an_expected_request_keeps_its_place() {
        let mut reorder = expecting(2);
        reorder.expect(RequestId(1));
        reorder.finish(RequestId(2), "b");
        reorder.finish(RequestId(1), "a");
        assert_eq!(leaving(&mut reorder), [1, 2]);
    }
}
