//! Points in time, and the stamps that are collected for one request.
//!
//! All times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share: stamps of
//! a worker and of the frontend can be compared. The core never reads the clock; callers do.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point in time: nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// Returns the nanoseconds from `earlier` to `self`; 0 if `earlier` is later.
    #[inline]
    pub fn ns_since(self, earlier: Instant) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, duration: Duration) -> Instant {
        Instant(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.ns_since(earlier))
    }
}

named_enum! {
    /// Why a batch was sent (label `reason` of `pharos_batches_total`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum SendReason {
        /// The batch had a preferred size.
        Preferred => "preferred",
        /// The next request did not fit, or the maximum was reached.
        Full => "full",
        /// The queue delay had passed.
        Delay => "delay",
        /// The next request has another shape.
        Shape => "shape",
        /// An instance was idle and no delay is configured.
        Idle => "idle",
        /// The model accepts no new requests, so there was nothing to wait for.
        Drain => "drain",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl SendReason {
    /// Returns the position in `ALL`.
    #[inline]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The stamps of one batch execution, taken by the worker (Triton's names; spec 4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeStamps {
    /// The worker starts the batch.
    pub start: Instant,
    /// The inputs are ready for the model.
    pub input_end: Instant,
    /// The model has completed.
    pub output_start: Instant,
    /// The outputs are in place.
    pub end: Instant,
}

impl ComputeStamps {
    /// Clamps the stamps to `from` and `to`: a worker can send any numbers, and their differences
    /// are added to counters.
    #[must_use]
    #[inline]
    pub fn within(self, from: Instant, to: Instant) -> Self {
        let inside = |at: Instant| at.max(from).min(to);
        Self {
            start: inside(self.start),
            input_end: inside(self.input_end),
            output_start: inside(self.output_start),
            end: inside(self.end),
        }
    }

    /// Returns the nanoseconds spent on inputs, the model and outputs. Never negative.
    #[inline]
    pub fn durations_ns(&self) -> (u64, u64, u64) {
        (
            self.input_end.ns_since(self.start),
            self.output_start.ns_since(self.input_end),
            self.end.ns_since(self.output_start),
        )
    }
}

/// Returns whether the deadline of a request, if it has one, has passed.
pub fn is_late(deadline: Option<Instant>, now: Instant) -> bool {
    deadline.is_some_and(|deadline| now >= deadline)
}

/// The result of looking a request up in the response cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheLookup {
    /// The cache had the response.
    Hit,
    /// The request was executed.
    Miss,
}

/// The stamps of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// The frontend received the first byte of the request (the headers, for HTTP).
    pub received: Instant,
    /// The request was parsed, checked and handed to the engine: the start of Triton's request
    /// duration.
    pub request_start: Instant,
    /// The request entered its scheduler's queue, after a look-up in the response cache.
    pub queue_start: Instant,
    /// The worker's stamps.
    pub compute: ComputeStamps,
    /// The frontend received the outputs: the end of Triton's request duration.
    pub request_end: Instant,
    /// Nanoseconds of the insertion into the response cache, which follows `request_end`; 0 if
    /// there was none.
    pub insertion_ns: u64,
    /// The result of the look-up in the response cache; `None` if there was none.
    pub cache: Option<CacheLookup>,
    /// The sum of the batch sizes of all requests that were executed together; 0 if it is not
    /// known when the request is answered, or if the request was not executed.
    pub batch_size: u64,
}

impl Timeline {
    /// Returns the nanoseconds from `request_start` to `request_end`.
    #[inline]
    pub fn request_ns(&self) -> u64 {
        self.request_end.ns_since(self.request_start)
    }

    /// Returns the nanoseconds until the response can be sent: the sum of `request_ns` and
    /// `insertion_ns`.
    #[inline]
    pub fn charged_ns(&self) -> u64 {
        self.request_ns().saturating_add(self.insertion_ns)
    }

    /// Returns the nanoseconds in the queue: from `queue_start` to the worker's start of the batch.
    #[inline]
    pub fn queue_ns(&self) -> u64 {
        self.compute.start.ns_since(self.queue_start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clamps_impossible_stamps() {
        let stamps = ComputeStamps {
            start: Instant(0),
            input_end: Instant(30),
            output_start: Instant(u64::MAX),
            end: Instant(50),
        };
        let inside = stamps.within(Instant(20), Instant(100));
        assert_eq!(inside.durations_ns(), (10, 70, 0));
        assert_eq!(inside.within(Instant(20), Instant(100)), inside);
    }
}
