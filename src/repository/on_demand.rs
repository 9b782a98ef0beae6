//! Models that are loaded on demand: how they are configured, and when a failed load is repeated.

use std::time::Duration;

use crate::timeline::Instant;

/// The reason of a version that is loaded with the first request to its model.
pub const ON_DEMAND: &str = "loaded on demand";

/// The name of the model parameter that chooses when a model is loaded.
pub const LOAD_PARAMETER: &str = "load";

/// The name of the model parameter that keeps a loaded model if its value is a number greater than 0.
pub const MIN_LOADED_PARAMETER: &str = "min_loaded";

/// The value of [`LOAD_PARAMETER`] for models that are loaded with their first request.
pub const ON_DEMAND_VALUE: &str = "on_demand";

/// The pause after the first failed load of a model; it doubles with each further failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause between loads of a model that fail.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The failed loads of one model since the last one that succeeded.
#[derive(Clone, Debug, Default)]
pub struct Attempts {
    failures: u32,
    reason: String,
    /// When the next load may begin.
    next: Option<Instant>,
}

impl Attempts {
    /// Returns the time until the next load may begin and the reason of the last failure; `None` if a load may begin now.
    pub fn pause(&self, now: Instant) -> Option<(Duration, &str)> {
        let next = self.next?;
        (now < next).then(|| (next - now, self.reason.as_str()))
    }

    /// Records a load that failed.
    pub fn failed(&mut self, now: Instant, reason: &str) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failures.min(16)).min(LONGEST_PAUSE);
        self.failures = self.failures.saturating_add(1);
        self.reason = reason.to_owned();
        self.next = Some(now + pause);
    }

    /// Records a load that succeeded.
    pub fn succeeded(&mut self) {
        *self = Self::default();
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
