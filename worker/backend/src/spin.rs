//! Looks for an event in memory for a bounded time before a thread sleeps.
//!
//! A thread that sleeps is woken by a system call and starts late, in particular if its processor
//! has become idle. While events follow each other closely, looking for the next one costs less
//! than a sleep. Each look is followed by `sched_yield`, so that other threads that can run have
//! precedence; while threads that compute take the processor ([`Yielding`]), it does not look.

use std::thread;
use std::time::Duration;

use pharos::timeline::Instant;
use pharos::yielding::Yielding;

use crate::clock;

/// The longest wait that counts, in limits, so that a single long wait does not end the looking for
/// many short ones.
const LONGEST: u64 = 4;
/// The share of the last wait in the expected one is 1 of this number.
const WEIGHT: u64 = 4;
/// The number of waits after which a thread that does not look tries it again: asleep, it cannot
/// know how soon an event would have come if it, and the threads that wait for it, had been awake.
const RETRY: u32 = 64;

/// How long a thread looks for an event, as long as events are expected within the limit.
#[derive(Debug, Default)]
pub(crate) struct Spin {
    limit_ns: u64,
    /// The expected time until the next event: the moving average of the last waits in which the
    /// thread looked. At first, no event is expected.
    expected_ns: u64,
    /// The number of waits without a look.
    skipped: u32,
    yielding: Yielding,
}

impl Spin {
    /// Looks for events for at most `limit`; zero to never look.
    pub(crate) fn new(limit: Duration) -> Self {
        let most = u64::MAX / LONGEST / WEIGHT;
        let limit_ns = u64::try_from(limit.as_nanos()).map_or(most, |limit| limit.min(most));
        // Many models wait long for their first requests.
        Self { limit_ns, expected_ns: u64::MAX, skipped: 0, yielding: Yielding::default() }
    }

    pub(crate) fn is_enabled(&self) -> bool {
        self.limit_ns > 0
    }

    /// Looks for an event since `since`, if one is expected within the limit or it is time to try.
    /// Returns whether it found one within the limit.
    pub(crate) fn look(&mut self, since: Instant, found: impl FnMut() -> bool) -> bool {
        self.look_between(since, found, yield_processor)
    }

    /// As [`Spin::look`]. Calls `yields` between looks, as [`yield_processor`].
    fn look_between(
        &mut self,
        since: Instant,
        mut found: impl FnMut() -> bool,
        mut yields: impl FnMut(&mut Yielding, Instant) -> Instant,
    ) -> bool {
        if !self.yielding.is_allowed(since) {
            return false;
        }
        if self.expected_ns > self.limit_ns {
            self.skipped += 1;
            if self.skipped < RETRY {
                return false;
            }
        }
        self.skipped = 0;
        let mut now = since;
        let (is_found, waited_ns) = loop {
            let is_found = found();
            let waited_ns = now.ns_since(since);
            if is_found || waited_ns >= self.limit_ns || !self.yielding.is_allowed(now) {
                break (is_found, waited_ns);
            }
            now = yields(&mut self.yielding, now);
        };
        // The wait goes on asleep: it counts as the longest.
        let wait_ns = if is_found { waited_ns.min(self.limit_ns) } else { self.limit_ns * LONGEST };
        self.expected_ns = (self.expected_ns.min(self.limit_ns) * (WEIGHT - 1) + wait_ns) / WEIGHT;
        is_found
    }
}

/// Lets other threads run on this processor, and returns the time after it.
pub(crate) fn yield_processor(yielding: &mut Yielding, now: Instant) -> Instant {
    thread::yield_now();
    let back = clock::now();
    yielding.yielded(now, back);
    back
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 100_000;

    /// Returns whether it looks at all; an event is there, if `found`. Each yield takes this long.
    fn looks_with(spin: &mut Spin, found: bool, yield_ns: u64) -> bool {
        let mut looked = false;
        let is_found = spin.look_between(
            Instant(1 << 40),
            || {
                looked = true;
                found
            },
            |yielding, now| {
                let back = now + Duration::from_nanos(yield_ns);
                yielding.yielded(now, back);
                back
            },
        );
        assert_eq!(is_found, looked && found);
        looked
    }

    fn looks(spin: &mut Spin, found: bool) -> bool {
        looks_with(spin, found, 1_000)
    }

    /// Returns one that looks already.
    fn looking() -> Spin {
        let mut spin = Spin::new(Duration::from_nanos(LIMIT));
        while !looks(&mut spin, true) {}
        spin
    }

    #[test]
    fn looks_only_while_events_come_within_the_limit() {
        let mut spin = looking();
        assert!(spin.is_enabled());
        for _ in 0..10 {
            assert!(looks(&mut spin, true));
        }
        assert!(looks(&mut spin, false), "one long wait after short ones does not end it");
        while looks(&mut spin, false) {}
        // This was the first wait without a look.
        for waits in [RETRY - 1, RETRY, RETRY] {
            let skipped = (1..).take_while(|_| !looks(&mut spin, false)).count();
            assert_eq!(skipped + 1, waits as usize, "it tries again from time to time, once");
        }
        (0..RETRY - 1).for_each(|_| assert!(!looks(&mut spin, true)));
        assert!(looks(&mut spin, true) && looks(&mut spin, true), "a success is enough to go on");
    }

    #[test]
    fn it_first_looks_after_some_waits() {
        let mut spin = Spin::new(Duration::from_nanos(LIMIT));
        let skipped = (0..).take_while(|_| !looks(&mut spin, true)).count();
        assert_eq!(skipped + 1, RETRY as usize);
    }

    #[test]
    fn the_limit_ends_a_look_without_events() {
        let mut spin = looking();
        let began = clock::now();
        let mut looks = 0;
        let found = spin.look(began, || {
            looks += 1;
            false
        });
        assert!(!found && looks > 0 && clock::now().ns_since(began) >= LIMIT);
    }

    #[test]
    fn a_thread_that_keeps_the_processor_ends_the_looking() {
        let mut spin = looking();
        assert!(looks_with(&mut spin, false, 3_000_000));
        (0..2 * RETRY).for_each(|_| assert!(!looks(&mut spin, true)));
    }

    #[test]
    fn without_a_limit_it_is_off() {
        assert!(!Spin::default().is_enabled() && !Spin::new(Duration::ZERO).is_enabled());
        assert!(Spin::new(Duration::MAX).is_enabled());
    }
}
