//! When a thread that has nothing to do offers its processor to others (`sched_yield`) before it sleeps.
//!
//! The offer lets threads that are about to give it work run first, so that the thread goes on without a sleep and a wake-up. If
//! a thread that computes takes the offer, it keeps the processor for a slice of the scheduler (milliseconds), while a sleeping
//! thread would soon be woken. A thread may lose some time in this way for each offer that it makes. When it has lost more, it
//! makes no offers until a multiple of the last loss has passed.

use std::time::Duration;

use crate::timeline::Instant;

/// The shortest absence that counts as a loss. Slices of Linux are longer; threads that only pass work on need less.
const LOSS_NS: u64 = 1_000_000;
/// The loss that each offer allows.
const ALLOWANCE_NS: u64 = 10_000;
/// The most that earlier offers allow together: more than one slice, less than two.
const MOST_ALLOWED_NS: u64 = 4_000_000;
/// The pause after too much loss, as a multiple of the last absence: at most 1 % of the time is lost.
const PAUSE: u64 = 100;
/// The longest pause, when each one has doubled the last.
const LONGEST_PAUSE_NS: u64 = 10_000_000_000;
/// The number of offers after a pause with which the next pause is the first one again.
const FORGETS: u32 = 1_000;

/// The offers of one thread and their losses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Yielding {
    paused_until: Instant,
    pause_ns: u64,
    allowed_ns: u64,
    /// The number of offers since the last pause.
    offers: u32,
}

impl Yielding {
    /// Returns whether the thread may offer its processor.
    pub fn is_allowed(&self, now: Instant) -> bool {
        now >= self.paused_until
    }

    /// Records an offer, and when the thread had the processor again.
    pub fn offered(&mut self, at: Instant, back: Instant) {
        let absence_ns = back.ns_since(at);
        let loss_ns = if absence_ns < LOSS_NS { 0 } else { absence_ns };
        self.offers = self.offers.saturating_add(1);
        match (self.allowed_ns + ALLOWANCE_NS).checked_sub(loss_ns) {
            Some(rest_ns) => self.allowed_ns = rest_ns.min(MOST_ALLOWED_NS),
            None => self.pause(absence_ns, back),
        }
    }

    fn pause(&mut self, absence_ns: u64, now: Instant) {
        let last_ns = if self.offers < FORGETS { self.pause_ns } else { 0 };
        self.pause_ns = absence_ns.saturating_mul(PAUSE).max(last_ns * 2).min(LONGEST_PAUSE_NS);
        self.paused_until = now + Duration::from_nanos(self.pause_ns);
        (self.allowed_ns, self.offers) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Returns the pause after an offer that takes this long.
    fn pause(yielding: &mut Yielding, at: &mut Instant, absence_ns: u64) -> u64 {
        let back = Instant(at.0 + absence_ns);
        yielding.offered(*at, back);
        let end = (0..).map(|step| Instant(back.0 + step * MS)).find(|now| yielding.is_allowed(*now));
        *at = end.unwrap_or(back);
        at.ns_since(back)
    }

    #[test]
    fn a_loss_pauses_offers_for_a_hundred_times_as_long() {
        let (mut yielding, mut at) = (Yielding::default(), Instant(5 * MS));
        assert!(yielding.is_allowed(Instant(0)));
        assert_eq!(pause(&mut yielding, &mut at, MS - 1), 0, "other threads passed work on");
        assert_eq!(pause(&mut yielding, &mut at, 3 * MS), 300 * MS);
    }

    #[test]
    fn many_offers_allow_a_rare_loss() {
        let (mut yielding, mut at) = (Yielding::default(), Instant(0));
        (0..10_000).for_each(|_| yielding.offered(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 3 * MS), 0);
        assert_eq!(pause(&mut yielding, &mut at, 3 * MS), 300 * MS, "the offers before allow only one");
        (0..200).for_each(|_| yielding.offered(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 2 * MS), 0, "200 offers allow 2 ms");
    }

    #[test]
    fn pauses_in_a_row_double_up_to_a_limit() {
        let (mut yielding, mut at) = (Yielding::default(), Instant(0));
        let pauses: Vec<_> = (0..8).map(|_| pause(&mut yielding, &mut at, 5 * MS) / MS).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
        (0..FORGETS - 2).for_each(|_| yielding.offered(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 5 * MS), 10_000 * MS, "too few offers since the last pause");
        (0..FORGETS).for_each(|_| yielding.offered(at, at));
        assert_eq!(pause(&mut yielding, &mut at, 5 * MS), 500 * MS);
        assert_eq!(pause(&mut yielding, &mut at, u64::MAX / 1000), 10_000 * MS);
    }
}
