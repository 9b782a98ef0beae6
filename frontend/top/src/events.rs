//! Events: changes between two scrapes that an operator wants to know.

use std::collections::{BTreeMap, VecDeque};

use pharos::metrics::builtin::Builtin;
use pharos::timeline::Instant;

use crate::exposition::{Key, ModelKey, model_key};
use crate::format::seconds;
use crate::scrape::{Interval, Scrape, rise};

/// The reasons for which the server, not the model or the client, turns requests away.
const REFUSALS: [&str; 8] = [
    "QUEUE_FULL",
    "RATE_LIMITED",
    "TIMEOUT",
    "NOT_READY",
    "TOO_LARGE",
    "RESTRICTED",
    "UNAUTHENTICATED",
    "INSTANCE_LOST",
];

/// What an event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Server,
    Models,
    Instances,
    Refusals,
}

/// One event.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Event {
    pub(crate) lane: Lane,
    pub(crate) text: String,
    /// The number of refusals, if they continue.
    count: f64,
    /// The times of the first and the last scrape that show the event.
    pub(crate) from: Instant,
    to: Instant,
}

impl Event {
    /// Returns the text, with the number of refusals.
    pub(crate) fn shown(&self) -> String {
        match self.lane {
            Lane::Refusals => format!("{} {}", self.count, self.text),
            _ => self.text.clone(),
        }
    }
}

/// Adds the events of an interval. Refusals that continue are one event.
pub(crate) fn between(interval: Interval<'_>, events: &mut VecDeque<Event>) {
    let before = interval.before.at;
    let now = interval.now.at;
    for (lane, text, count) in found(interval) {
        let mut refusals = events.iter_mut().rev().filter(|event| event.lane == Lane::Refusals);
        match refusals.find(|event| event.text == text && event.to >= before) {
            Some(event) => {
                event.count += count;
                event.to = now;
            }
            None => events.push_back(Event { lane, text, count, from: now, to: now }),
        }
    }
}

fn found(interval: Interval<'_>) -> Vec<(Lane, String, f64)> {
    let Interval { before, now } = interval;
    let mut found = Vec::new();
    if let (Some(old), Some(new)) =
        (before.one(Builtin::ProcessStart), now.one(Builtin::ProcessStart))
        && old != new
    {
        return vec![(Lane::Server, "the server was restarted".to_owned(), 1.0)];
    }
    models(before, now, &mut found);
    let counted = Counted::new(interval);
    let failed_changes = counted.gains(Builtin::ModelChanges, |key| {
        (key.label("result") == "failure").then(|| key.label("change").to_owned())
    });
    for (change, count) in failed_changes {
        found.push((Lane::Models, format!("{count} × {change} of a model failed"), count));
    }
    for ((model, version), count) in
        counted.gains(Builtin::InstanceRestarts, |key| Some(model_key(key)))
    {
        found.push((
            Lane::Instances,
            format!("{count} × instance of {model}, version {version} restarted"),
            count,
        ));
    }
    for (result, count) in
        counted.gains(Builtin::Reloads, |key| Some(key.label("result").to_owned()))
    {
        let text = if result == "success" {
            "metrics.yaml was read again"
        } else {
            "a changed metrics.yaml was rejected"
        };
        found.push((Lane::Server, text.to_owned(), count));
    }
    let reloads = counted.gains(Builtin::CredentialReloads, |key| {
        Some((key.label("file").to_owned(), key.label("result").to_owned()))
    });
    for ((file, result), count) in reloads {
        let happened = if result == "success" { "were read again" } else { "were rejected" };
        found.push((Lane::Server, format!("the credentials {file} {happened}"), count));
    }
    for (reason, count) in
        counted.gains(Builtin::RequestFailures, |key| Some(key.label("reason").to_owned()))
    {
        if REFUSALS.contains(&reason.as_str()) {
            found.push((Lane::Refusals, format!("requests failed with {reason}"), count));
        }
    }
    for (reason, count) in
        counted.gains(Builtin::ConnectionsRefused, |key| Some(key.label("reason").to_owned()))
    {
        found.push((Lane::Refusals, format!("connections were refused: {reason}"), count));
    }
    found
}

/// Adds loads and unloads.
fn models(before: &Scrape, now: &Scrape, found: &mut Vec<(Lane, String, f64)>) {
    let old = ready(before);
    let new = ready(now);
    for (key @ (model, version), load) in &new {
        let took = load.map_or_else(String::new, |load| format!(" in {}", seconds(Some(load))));
        let text = match old.get(key) {
            None => format!("{model}, version {version} was loaded{took}"),
            Some(before) if load.is_some() && before != load => {
                format!("{model}, version {version} was loaded again{took}")
            }
            Some(_) => continue,
        };
        found.push((Lane::Models, text, 1.0));
    }
    for (model, version) in old.keys().filter(|key| !new.contains_key(key)) {
        found.push((
            Lane::Models,
            format!("{model}, version {version} is not ready any more"),
            1.0,
        ));
    }
}

/// Returns the ready models, with the time that their load took, which differs for each load.
fn ready(scrape: &Scrape) -> BTreeMap<ModelKey, Option<f64>> {
    let loads = scrape.sums(Builtin::ModelLoadDuration, model_key);
    let states = scrape.list(Builtin::ModelState).iter();
    let keys: Vec<ModelKey> = match scrape.has(Builtin::ModelState) {
        true => states
            .filter(|(key, value)| key.label("state") == "READY" && *value == 1.0)
            .map(|(key, _)| model_key(key))
            .collect(),
        false => scrape.sums(Builtin::RequestSuccess, model_key).into_keys().collect(),
    };
    keys.into_iter().map(|key| (key.clone(), loads.get(&key).copied())).collect()
}

/// Increases of counters, also of counters that appear together with their first event.
struct Counted<'a> {
    interval: Interval<'a>,
    /// Whether a new definition may have made series appear.
    redefined: bool,
}

impl<'a> Counted<'a> {
    fn new(interval: Interval<'a>) -> Self {
        let redefined = interval.before.sum(Builtin::Reloads) != interval.now.sum(Builtin::Reloads);
        Self { interval, redefined }
    }

    /// Returns the increases above 0 by `of`.
    fn gains<K: Ord>(&self, metric: Builtin, of: impl Fn(&Key) -> Option<K>) -> BTreeMap<K, f64> {
        let mut gains = BTreeMap::new();
        for (key, value) in self.interval.now.list(metric) {
            let unknown = if self.redefined { *value } else { 0.0 };
            let gain = rise(self.interval.before.value(key).unwrap_or(unknown), *value);
            if let Some(by) = of(key).filter(|_| gain > 0.0) {
                *gains.entry(by).or_default() += gain;
            }
        }
        gains
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events of scrapes that are a second apart: text and seconds.
    fn events(scrapes: &[&str]) -> Vec<(String, u64, u64)> {
        let scrapes: Vec<Scrape> = (0..)
            .zip(scrapes)
            .map(|(second, text)| Scrape::new(text, Instant(second * 1_000_000_000), None))
            .collect();
        let mut events = VecDeque::new();
        for pair in scrapes.windows(2) {
            if let [before, now] = pair {
                between(Interval { before, now }, &mut events);
            }
        }
        let second = |at: Instant| at.0 / 1_000_000_000;
        events.iter().map(|event| (event.shown(), second(event.from), second(event.to))).collect()
    }

    #[test]
    fn loads_and_unloads_come_from_the_states() {
        let state = |ready: u32, load: f64| {
            format!(
                "pharos_model_state{{model=\"m\",version=\"1\",state=\"READY\"}} \
                 {ready}\nnv_model_load_duration_secs{{model=\"m\",version=\"1\"}} {load}\n"
            )
        };
        let scrapes = [state(0, 0.0), state(1, 0.5), state(1, 0.5), state(1, 0.25), state(0, 0.25)];
        let scrapes: Vec<&str> = scrapes.iter().map(String::as_str).collect();
        let expected = [
            ("m, version 1 was loaded in 500 ms".to_owned(), 1, 1),
            ("m, version 1 was loaded again in 250 ms".to_owned(), 3, 3),
            ("m, version 1 is not ready any more".to_owned(), 4, 4),
        ];
        assert_eq!(events(&scrapes), expected);
        // Triton has no states.
        let one = "nv_inference_request_success{model=\"m\",version=\"1\"} 0\n";
        assert_eq!(events(&["", one])[0].0, "m, version 1 was loaded");
    }

    #[test]
    fn refusals_that_continue_are_one_event() {
        let refused = |count: u32| {
            format!("pharos_request_failures_total{{reason=\"QUEUE_FULL\"}} {count}\n")
        };
        let scrapes = ["".to_owned(), refused(2), refused(5), refused(5), refused(6)];
        let scrapes: Vec<&str> = scrapes.iter().map(String::as_str).collect();
        let text = |count: u32| format!("{count} requests failed with QUEUE_FULL");
        assert_eq!(events(&scrapes), [(text(5), 1, 2), (text(1), 4, 4)]);
    }

    #[test]
    fn a_new_definition_and_a_restart_make_no_other_events() {
        let lines = |start: u32, reloads: u32, more: &str| {
            format!(
                "process_start_time_seconds \
                 {start}\npharos_metrics_reloads_total{{result=\"success\"}} {reloads}\n{more}"
            )
        };
        let restarts = "pharos_instance_restarts_total{model=\"m\",version=\"1\"} 3\n";
        let scrapes = [lines(1, 0, ""), lines(1, 1, restarts), lines(2, 0, "")];
        let scrapes: Vec<&str> = scrapes.iter().map(String::as_str).collect();
        let expected = [
            ("metrics.yaml was read again".to_owned(), 1, 1),
            ("the server was restarted".to_owned(), 2, 2),
        ];
        assert_eq!(events(&scrapes), expected);
    }
}
