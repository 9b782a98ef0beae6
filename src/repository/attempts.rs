//! When the failed load of a model is repeated.

use std::time::Duration;

use crate::timeline::Instant;

/// How long a failed load of a model is not repeated.
#[derive(Clone, Copy, Debug)]
pub struct Pauses {
    /// The pause after the first failure; it doubles with each further one.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), longest: Duration::from_secs(60) }
    }
}

/// The failed loads of one model since the last one that succeeded.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    pauses: Pauses,
    failures: u32,
    reason: String,
    /// When the next load may begin.
    next: Option<Instant>,
}

impl Attempts {
    /// Creates it without failures.
    pub fn new(pauses: Pauses) -> Self {
        Self { pauses, ..Self::default() }
    }

    /// Returns the time until the next load may begin and the reason of the last failure; `None` if
    /// a load may begin now.
    pub fn pause(&self, now: Instant) -> Option<(Duration, &str)> {
        let next = self.next?;
        (now < next).then(|| (next - now, self.reason.as_str()))
    }

    /// Records a load that failed.
    pub fn failed(&mut self, now: Instant, reason: &str) {
        let pause =
            self.pauses.first.saturating_mul(1 << self.failures.min(16)).min(self.pauses.longest);
        self.failures = self.failures.saturating_add(1);
        self.reason = reason.to_owned();
        self.next = Some(now + pause);
    }

    /// Records a load that succeeded.
    pub fn succeeded(&mut self) {
        *self = Self::new(self.pauses);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    #[test]
    fn pauses_double_up_to_a_minute_and_end_with_a_success() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.pause(at(0)), None);
        let mut now = 100;
        for expected in [1, 2, 4, 8, 16, 32, 60, 60] {
            attempts.failed(at(now), "broken");
            assert_eq!(attempts.pause(at(now)), Some((Duration::from_secs(expected), "broken")));
            now += expected;
            assert_eq!(attempts.pause(at(now)), None);
        }
        attempts.failed(at(now), "broken");
        attempts.succeeded();
        assert_eq!(attempts.pause(at(now)), None);
        attempts.failed(at(now), "again");
        assert_eq!(attempts.pause(at(now)), Some((Duration::from_secs(1), "again")));
    }
}
