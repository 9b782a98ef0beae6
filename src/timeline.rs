//! Points in time and the stamps that one request collects.
//!
//! All times are nanoseconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine: a stamp from a
//! worker compares with one from the frontend. The core never reads the clock; callers do.

use std::ops::{Add, Sub};
use std::time::Duration;

/// A point in time: nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(pub u64);

impl Instant {
    /// Nanoseconds from `earlier` to `self`; 0 if `earlier` is later.
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

/// What decided that it was time to send a batch (label `reason` of `pharos_batches_total`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SendReason {
    /// It had reached a preferred size.
    Preferred,
    /// The next request did not fit, or the maximum was reached.
    Full,
    /// The queue delay was over.
    Delay,
    /// The next request has another shape.
    Shape,
    /// An instance was idle and no delay is configured.
    Idle,
    /// The model takes no new requests, so that there was nothing to wait for.
    Drain,
}

impl SendReason {
    /// Every value, in order.
    pub const ALL: [SendReason; 6] = [Self::Preferred, Self::Full, Self::Delay, Self::Shape, Self::Idle, Self::Drain];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preferred => "preferred",
            Self::Full => "full",
            Self::Delay => "delay",
            Self::Shape => "shape",
            Self::Idle => "idle",
            Self::Drain => "drain",
        }
    }

    /// Its place in `ALL`.
    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

/// The stamps of one batch execution, taken by the worker (Triton's names; spec 4.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeStamps {
    /// The worker starts on the batch.
    pub start: Instant,
    /// The inputs are where the model wants them.
    pub input_end: Instant,
    /// The model has computed.
    pub output_start: Instant,
    /// The outputs are in place.
    pub end: Instant,
}

impl ComputeStamps {
    /// The same stamps between `from` and `to`: a worker can send any numbers, and their differences go into counters.
    #[must_use]
    pub fn within(self, from: Instant, to: Instant) -> Self {
        let inside = |at: Instant| at.max(from).min(to);
        Self {
            start: inside(self.start),
            input_end: inside(self.input_end),
            output_start: inside(self.output_start),
            end: inside(self.end),
        }
    }

    /// Nanoseconds spent on inputs, on the model, on outputs. Never negative, whatever a worker stamped.
    pub fn durations_ns(&self) -> (u64, u64, u64) {
        (
            self.input_end.ns_since(self.start),
            self.output_start.ns_since(self.input_end),
            self.end.ns_since(self.output_start),
        )
    }
}

/// The stamps that one request collects on its way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeline {
    /// First byte of the request seen by the frontend (the headers, for HTTP).
    pub received: Instant,
    /// The request is parsed, checked and handed to the engine: the start of Triton's request duration.
    pub request_start: Instant,
    /// The request entered its scheduler's queue.
    pub queue_start: Instant,
    /// The worker's stamps.
    pub compute: ComputeStamps,
    /// The outputs are known to the frontend: the end of Triton's request duration.
    pub request_end: Instant,
    /// Nanoseconds of the look-up and the insertion if the response cache did not have the response, otherwise 0. Triton
    /// adds them to the request duration.
    pub cache_miss_ns: u64,
}

impl Timeline {
    /// Nanoseconds from `request_start` to `request_end`.
    pub fn request_ns(&self) -> u64 {
        self.request_end.ns_since(self.request_start)
    }

    /// The request's share of the sums of durations: `request_ns` and `cache_miss_ns`.
    pub fn charged_ns(&self) -> u64 {
        self.request_ns().saturating_add(self.cache_miss_ns)
    }

    /// Nanoseconds in the queue: from `queue_start` to the worker's start on the batch.
    pub fn queue_ns(&self) -> u64 {
        self.compute.start.ns_since(self.queue_start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_that_cannot_be_are_brought_inside() {
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
