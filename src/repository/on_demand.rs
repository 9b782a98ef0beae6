//! Models that are loaded on demand: when a failed load is repeated, and which models have no use at present.

use std::collections::BTreeMap;
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

/// When models were last used, from repeated looks at how many requests each has had.
#[derive(Debug, Default)]
pub struct LastUses {
    /// The number of requests at the last look that found a use, and its time, by model.
    models: BTreeMap<String, (u64, Instant)>,
}

impl LastUses {
    /// Takes the number of requests to each loaded model until now, `None` if the model is in use, and returns the models that
    /// have been without use for at least `idle`. Models that are not given are forgotten.
    pub fn look<'m>(
        &mut self,
        now: Instant,
        idle: Duration,
        models: impl IntoIterator<Item = (&'m str, Option<u64>)>,
    ) -> Vec<String> {
        let (before, mut unused) = (std::mem::take(&mut self.models), Vec::new());
        for (model, requests) in models {
            let unchanged = before.get(model).filter(|(known, _)| requests == Some(*known));
            let since = unchanged.map_or(now, |(_, since)| *since);
            let known = requests.or_else(|| before.get(model).map(|(known, _)| *known)).unwrap_or_default();
            self.models.insert(model.to_owned(), (known, since));
            if unchanged.is_some() && now - since >= idle {
                unused.push(model.to_owned());
            }
        }
        unused
    }

    /// Returns the time since the last look that found a use of a model; zero if none has seen it.
    pub fn unused(&self, now: Instant, model: &str) -> Duration {
        self.models.get(model).map_or(Duration::ZERO, |(_, since)| now - *since)
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

    #[test]
    fn only_models_without_requests_for_the_whole_time_are_unused() {
        let (mut uses, idle) = (LastUses::default(), Duration::from_secs(10));
        let none: Vec<String> = Vec::new();
        assert_eq!(uses.look(at(0), idle, [("a", Some(1)), ("b", Some(1)), ("c", None)]), none);
        // One model gets a request, and one executes a request at each look.
        assert_eq!(uses.look(at(5), idle, [("a", Some(1)), ("b", Some(2)), ("c", None)]), none);
        assert_eq!(uses.look(at(10), idle, [("a", Some(1)), ("b", Some(2)), ("c", None)]), ["a"]);
        // The execution has ended; its time counts from this look.
        assert_eq!(uses.look(at(15), idle, [("b", Some(2)), ("c", Some(7))]), ["b"]);
        assert_eq!(uses.look(at(25), idle, [("b", Some(3)), ("c", Some(7))]), ["c"]);
        // The time of a model that was unloaded and loaded again starts at the load.
        assert_eq!(uses.look(at(26), idle, [("a", Some(0))]), none);
        assert_eq!(uses.look(at(35), idle, [("a", Some(0))]), none);
        assert_eq!(uses.look(at(36), idle, [("a", Some(0))]), ["a"]);
        assert_eq!([uses.unused(at(40), "a"), uses.unused(at(40), "b")], [Duration::from_secs(14), Duration::ZERO]);
    }
}
