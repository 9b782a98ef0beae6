//! The only place in the frontend that reads a clock.

use pharos::timeline::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Now, on CLOCK_MONOTONIC.
#[allow(clippy::disallowed_methods)]
pub fn now() -> Instant {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Wall-clock time, nanoseconds since 1970; for what other machines compare with theirs.
#[allow(clippy::disallowed_methods)]
pub fn wall_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Wall-clock time, milliseconds since 1970; for what people read, never for durations.
#[allow(clippy::disallowed_methods)]
pub fn wall_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
