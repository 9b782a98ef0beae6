//! The only place in the frontend that reads a clock.

use pharos::timeline::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Returns the time of CLOCK_MONOTONIC.
#[allow(clippy::disallowed_methods)]
pub fn now() -> Instant {
    if let Some(now) = virtual_time::now() {
        return now;
    }
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Instant(seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the wall-clock time in nanoseconds since 1970, for comparison with the clocks of other machines.
#[allow(clippy::disallowed_methods)]
pub fn wall_ns() -> u64 {
    if let Some(now) = virtual_time::now() {
        return now.0;
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns the wall-clock time in milliseconds since 1970, for display, never for durations.
pub fn wall_ms() -> u64 {
    wall_ns() / 1_000_000
}

/// A time that simulations set, which replaces both clocks for the calling thread.
pub mod virtual_time {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering};

    use pharos::timeline::Instant;

    /// Whether any thread has a virtual time: servers pay one load for this module.
    static USED: AtomicBool = AtomicBool::new(false);

    thread_local! {
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    /// Sets the time of the calling thread.
    pub fn set(now: Instant) {
        USED.store(true, Ordering::Relaxed);
        NOW.set(Some(now));
    }

    pub(super) fn now() -> Option<Instant> {
        if USED.load(Ordering::Relaxed) { NOW.get() } else { None }
    }
}
