//! When a thread that has nothing to do yields its processor to other threads (`sched_yield`)
//! before it sleeps.
//!
//! Threads that are about to give it work then run first, and the thread goes on without a sleep
//! and a wake-up. But a thread that computes keeps the processor for a slice of the scheduler
//! (milliseconds), while a sleeping thread would soon be woken. A thread may lose some time in this
//! way for each yield. When it has lost more, it does not yield until a multiple of the last
//! loss has passed.

use std::time::Duration;

use crate::timeline::Instant;

/// The shortest absence that counts as a loss. Slices of Linux are longer; threads that only pass
/// work on need less.
const LOSS_NS: u64 = 1_000_000;
/// The loss that each yield allows.
const ALLOWANCE_NS: u64 = 10_000;
/// The most that earlier yields allow together: more than one slice, less than two.
const MOST_ALLOWED_NS: u64 = 4_000_000;
/// The pause after too much loss, as a multiple of the last absence: at most 1 % of the time is
/// lost.
const PAUSE: u64 = 100;
/// The longest pause, when each one has doubled the last.
const LONGEST_PAUSE_NS: u64 = 10_000_000_000;
/// The number of yields after a pause with which the next pause is the first one again.
const FORGETS: u32 = 1_000;

/// The yields of one thread and their losses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Yielding {
    paused_until: Instant,
    pause_ns: u64,
    allowed_ns: u64,
    /// The number of yields since the last pause.
    yields: u32,
}

impl Yielding {
    /// Returns whether the thread may yield.
    pub fn is_allowed(&self, now: Instant) -> bool {
        now >= self.paused_until
    }

    /// Records a yield, and when the thread had the processor again.
    pub fn yielded(&mut self, at: Instant, back: Instant) {
        let absence_ns = back.ns_since(at);
        let loss_ns = if absence_ns < LOSS_NS { 0 } else { absence_ns };
        self.yields = self.yields.saturating_add(1);
        match (self.allowed_ns + ALLOWANCE_NS).checked_sub(loss_ns) {
            Some(rest_ns) => self.allowed_ns = rest_ns.min(MOST_ALLOWED_NS),
            None => self.pause(absence_ns, back),
        }
    }

    fn pause(&mut self, absence_ns: u64, now: Instant) {
        let last_ns = if self.yields < FORGETS { self.pause_ns } else { 0 };
        self.pause_ns = absence_ns.saturating_mul(PAUSE).max(last_ns * 2).min(LONGEST_PAUSE_NS);
        self.paused_until = now + Duration::from_nanos(self.pause_ns);
        self.allowed_ns = 0;
        self.yields = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Returns the pause after a yield that takes this long.
    fn pause(yielding: &mut Yielding, at: &mut Instant, absence_ns: u64) -> u64 {
        let back = Instant(at.0 + absence_ns);
        yielding.yielded(*at, back);
        let end =
            (0..).map(|step| Instant(back.0 + step * MS)).find(|now| yielding.is_allowed(*now));
        *at = end.unwrap_or(back);
        at.ns_since(back)
    }

    #[test]
    fn a_loss_pauses_yields_for_a_hundred_times_as_long() {
        let mut yielding = Yielding::default();
        let mut at = Instant(5 * MS);
        assert!(yielding.is_allowed(Instant(0)));
        assert_eq!(pause(&mut yielding, &mut at, MS - 1), 0, "other threads passed work on");
        assert_eq!(pause(&mut yielding, &mut at, 3 * MS), 300 * MS);
    }

    #[test]
    fn many_yields_allow_a_rare_loss() {
        let mut yielding = Yielding::default();
        let mut at = Instant(0);
        (0..10_000).for_each(|_| yielding.yielded(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 3 * MS), 0);
        assert_eq!(
            pause(&mut yielding, &mut at, 3 * MS),
            300 * MS,
            "the yields before allow only one"
        );
        (0..200).for_each(|_| yielding.yielded(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 2 * MS), 0, "200 yields allow 2 ms");
    }

    #[test]
    fn pauses_in_a_row_double_up_to_a_limit() {
        let mut yielding = Yielding::default();
        let mut at = Instant(0);
        let pauses: Vec<_> = (0..8).map(|_| pause(&mut yielding, &mut at, 5 * MS) / MS).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
        (0..FORGETS - 2).for_each(|_| yielding.yielded(at, at));
        assert_eq!(
            pause(&mut yielding, &mut at, 5 * MS),
            10_000 * MS,
            "too few yields since the last pause"
        );
        (0..FORGETS).for_each(|_| yielding.yielded(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 5 * MS), 500 * MS);
        assert_eq!(pause(&mut yielding, &mut at, u64::MAX / 1000), 10_000 * MS);
    }
}
