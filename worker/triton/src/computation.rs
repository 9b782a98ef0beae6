//! The times of a batch that a backend reports: where the inputs end and the outputs begin inside the
//! time that the server measures.

use parking_lot::Mutex;

/// The times of a computation, in nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Computation {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Computation {
    /// Returns the computation with these times; `None` if their order is wrong.
    pub(crate) fn new(times: [u64; 4]) -> Option<Self> {
        let [_, start, end, _] = times;
        times.is_sorted().then_some(Self { start, end })
    }

    fn with(self, other: Self) -> Self {
        Self { start: self.start.min(other.start), end: self.end.max(other.end) }
    }
}

/// What a backend reports about the batch that it executes. Locked to read or write it only.
#[derive(Default)]
pub(crate) struct Reports(Mutex<Reported>);

#[derive(Clone, Copy, Default)]
struct Reported {
    batch: Option<Computation>,
    /// Over all requests that were reported as successful.
    requests: Option<Computation>,
}

impl Reports {
    /// Forgets earlier reports, also of requests that were answered after their batch.
    pub(crate) fn clear(&self) {
        *self.0.lock() = Reported::default();
    }

    /// Stores the times of the batch.
    pub(crate) fn batch(&self, computation: Computation) {
        self.0.lock().batch = Some(computation);
    }

    /// Stores the times of a request.
    pub(crate) fn request(&self, computation: Computation) {
        let mut reported = self.0.lock();
        reported.requests =
            Some(reported.requests.map_or(computation, |other| other.with(computation)));
    }

    /// Returns the times of the batch, if the backend has reported any.
    pub(crate) fn computation(&self) -> Option<Computation> {
        let reported = *self.0.lock();
        reported.batch.or(reported.requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_in_the_wrong_order_are_ignored() {
        assert_eq!(Computation::new([1, 2, 3, 4]), Some(Computation { start: 2, end: 3 }));
        assert_eq!(Computation::new([1, 3, 2, 4]), None);
        assert_eq!(Computation::new([0, 0, 0, 0]), Some(Computation { start: 0, end: 0 }));
        let both = Computation { start: 5, end: 9 }.with(Computation { start: 2, end: 7 });
        assert_eq!(both, Computation { start: 2, end: 9 });
    }
}
