//! The only place in the worker and in backends that reads a clock.

use pharos::timeline::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Returns the current time of CLOCK_MONOTONIC.
#[allow(clippy::disallowed_methods)]
pub fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}
