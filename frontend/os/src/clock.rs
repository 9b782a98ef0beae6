//! The only place in the frontend that reads a clock.

use pharos::timeline::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Returns the time of CLOCK_MONOTONIC.
#[allow(clippy::disallowed_methods)]
pub fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the wall-clock time in nanoseconds since 1970, for comparison with the clocks of other machines.
#[allow(clippy::disallowed_methods)]
pub fn wall_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the wall-clock time in milliseconds since 1970, for display, never for durations.
#[allow(clippy::disallowed_methods)]
pub fn wall_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
