//! How often models are used, and which have no use at present.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::timeline::Instant;

/// The time spans over which uses are averaged, in seconds.
const SPANS: [f64; 6] = [1.0, 8.0, 64.0, 512.0, 4096.0, 32768.0];

/// The uses of a model.
#[derive(Debug, Default)]
struct ModelUses {
    /// The number of the last look at which it was loaded.
    look: u64,
    /// The number of requests then.
    requests: u64,
    /// Whether it was executing requests then.
    executing: bool,
    /// When a look has last found a use.
    last: Instant,
    /// The uses until then. With the age of a use, its weight falls exponentially, by each of the
    /// [`SPANS`].
    counts: [f64; SPANS.len()],
}

impl ModelUses {
    fn add(&mut self, now: Instant, uses: f64) {
        self.counts = self.decayed(now).map(|count| count + uses);
        self.last = now;
    }

    fn decayed(&self, now: Instant) -> [f64; SPANS.len()] {
        let age = (now - self.last).as_secs_f64();
        std::array::from_fn(|span| self.counts[span] * (-age / SPANS[span]).exp())
    }

    /// Returns the mean of the uses a second within each of the [`SPANS`].
    fn per_second(&self, now: Instant) -> f64 {
        let rates = self.decayed(now).into_iter().zip(SPANS).map(|(count, span)| count / span);
        rates.sum::<f64>() / SPANS.len() as f64
    }
}

/// How often models are used, from repeated looks at how many requests each has had.
///
/// The uses that are expected are the mean of the averages over several time spans, so a model that
/// was used often or recently is expected to be used again, and none of the two needs a setting.
/// With a single span, this is the policy LRFU (Lee et al., "LRFU: A Spectrum of Policies that
/// Subsumes the Least Recently Used and Least Frequently Used Policies", IEEE Transactions on
/// Computers, 2001).
#[derive(Debug, Default)]
pub struct Uses {
    models: BTreeMap<String, ModelUses>,
    looks: u64,
}

impl Uses {
    /// Takes the number of requests to each loaded model until now, `None` if the model executes
    /// requests, and returns the models that have been without use for at least `idle`. A load is a
    /// use. Requests since the last look are one use, and an execution is one use for each second.
    pub fn look<'m>(
        &mut self,
        now: Instant,
        idle: Duration,
        models: impl IntoIterator<Item = (&'m str, Option<u64>)>,
    ) -> Vec<String> {
        let last_look = self.looks;
        self.looks += 1;
        let mut unused = Vec::new();
        for (name, requests) in models {
            if !self.models.contains_key(name) {
                self.models
                    .insert(name.to_owned(), ModelUses { last: now, ..ModelUses::default() });
            }
            let Some(model) = self.models.get_mut(name) else { continue };
            let stayed = model.look == last_look && last_look > 0;
            if !stayed || requests != Some(model.requests) {
                let continues = stayed && model.executing;
                let uses = if continues { (now - model.last).as_secs_f64().min(1.0) } else { 1.0 };
                model.add(now, uses);
            } else if now - model.last >= idle {
                unused.push(name.to_owned());
            }
            model.look = self.looks;
            model.requests = requests.unwrap_or(model.requests);
            model.executing = requests.is_none();
        }
        unused
    }

    /// Returns how many uses of a model a second are expected; 0 if no look has found it.
    pub fn per_second(&self, now: Instant, model: &str) -> f64 {
        self.models.get(model).map_or(0.0, |model| model.per_second(now))
    }

    /// Forgets the models for which `keep` returns false.
    pub fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.models.retain(|name, _| keep(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    /// The idle time of models that are never unused.
    const NEVER: Duration = Duration::MAX;

    #[test]
    fn only_models_without_requests_for_the_whole_time_are_unused() {
        let mut uses = Uses::default();
        let idle = Duration::from_secs(10);
        let none: Vec<String> = Vec::new();
        assert_eq!(uses.look(at(0), idle, [("a", Some(1)), ("b", Some(1)), ("c", None)]), none);
        // One model gets a request, and one executes a request at each look.
        assert_eq!(uses.look(at(5), idle, [("a", Some(1)), ("b", Some(2)), ("c", None)]), none);
        assert_eq!(uses.look(at(10), idle, [("a", Some(1)), ("b", Some(2)), ("c", None)]), ["a"]);
        // The execution has ended; its time counts from this look.
        assert_eq!(uses.look(at(15), idle, [("b", Some(2)), ("c", Some(7))]), ["b"]);
        assert_eq!(uses.look(at(25), idle, [("b", Some(3)), ("c", Some(7))]), ["c"]);
        // The time of a model that was unloaded and loaded again starts at the load.
        assert_eq!(uses.look(at(26), idle, [("a", Some(1))]), none);
        assert_eq!(uses.look(at(35), idle, [("a", Some(1))]), none);
        assert_eq!(uses.look(at(36), idle, [("a", Some(1))]), ["a"]);
    }

    #[test]
    fn models_that_are_used_often_or_recently_are_expected_to_be_used_again() {
        let mut uses = Uses::default();
        for second in 0..100 {
            // One model is used each second, one each ten seconds, one has just been loaded.
            let new = (second == 99).then_some(("new", Some(1)));
            uses.look(
                at(second),
                NEVER,
                [("often", Some(second)), ("seldom", Some(second / 10))].into_iter().chain(new),
            );
        }
        let expected = |seconds: u64| {
            ["often", "seldom", "new"].map(|model| uses.per_second(at(seconds), model))
        };
        let [often, seldom, new] = expected(99);
        assert!(often > new && new > seldom, "{often}, {new}, {seldom}");
        // Without further requests, one load counts less than several uses.
        let [often, seldom, new] = expected(130);
        assert!(often > seldom && seldom > new, "{often}, {seldom}, {new}");
        assert!(
            expected(131).iter().zip([often, seldom, new]).all(|(later, earlier)| *later < earlier)
        );
        assert_eq!(uses.per_second(at(99), "unknown"), 0.0);
    }

    #[test]
    fn an_average_over_a_long_time_is_the_number_of_uses_a_second() {
        let mut uses = Uses::default();
        (0..400_000)
            .for_each(|second| drop(uses.look(at(second), NEVER, [("m", Some(second / 4))])));
        let rate = uses.per_second(at(400_000), "m");
        assert!((rate - 0.25).abs() < 0.05, "{rate}");
    }

    #[test]
    fn an_execution_is_about_a_use_each_second_however_often_one_looks() {
        let expected = |looks_a_second: u64| {
            let mut uses = Uses::default();
            for look in 0..=10 * looks_a_second {
                uses.look(Instant(look * 1_000_000_000 / looks_a_second), NEVER, [("m", None)]);
            }
            uses.per_second(at(10), "m")
        };
        let seldom = expected(1);
        let often = expected(100);
        assert!(often < seldom && seldom < 1.5 * often, "{seldom}, {often}");
    }

    #[test]
    fn uses_are_remembered_after_an_unload_until_the_model_is_removed() {
        let mut uses = Uses::default();
        uses.look(at(0), NEVER, [("m", Some(1))]);
        uses.look(at(1), NEVER, []);
        let once = uses.per_second(at(2), "m");
        assert!(once > 0.0);
        uses.look(at(2), NEVER, [("m", Some(1))]);
        assert!(uses.per_second(at(2), "m") > once, "a load is a use");
        uses.retain(|name| name != "m");
        assert_eq!(uses.per_second(at(2), "m"), 0.0);
    }
}
