//! Rates and utilization from periodic samples of counters. Time is an argument, so that tests are
//! exact.

use std::collections::BTreeMap;
use std::f64::consts::LN_2;
use std::sync::Arc;

use super::{LoadReport, Reports, Values};
use crate::metrics::series::EngineLevels;
use crate::timeline::Instant;

/// The seconds after which a sample has half of its weight: long enough to smooth single batches,
/// short enough for a router that updates its weights each second.
const HALF_LIFE: f64 = 2.0;

/// With less weight than this a mean is of requests that ended long ago.
const LEAST_WEIGHT: f64 = 0.01;

/// Counters and levels of the server at one time. Counters never decrease while the server runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// The busy fraction of the processors; `None` if it is not measured.
    pub cpu: Option<f64>,
    /// The used fraction of the memory; `None` if it is not measured.
    pub memory: Option<f64>,
    /// Answered inference requests.
    pub requests: u64,
    /// Inference requests that failed through the server's fault.
    pub errors: u64,
    /// Each loaded version with instances. Versions of one model are added up.
    pub models: Vec<ModelSample>,
}

/// Counters and levels of one loaded version.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSample {
    /// The name of the model.
    pub name: Arc<str>,
    /// Distinguishes what is loaded at the same time, also under one version.
    pub id: usize,
    /// Requests that instances execute.
    pub executing: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Requests that the ready instances could execute at once.
    pub slots: u64,
    /// Ready instances.
    pub instances: u64,
    /// Counter: the nanoseconds in which instances had a request, added over all instances.
    pub busy_ns: u64,
    /// Counter: successful requests.
    pub succeeded: u64,
    /// Counter: the nanoseconds that these requests waited.
    pub queue_ns: u64,
    /// What the engines of a language model report, in each instance that does.
    pub engines: EngineLevels,
}

/// The time between two samples.
#[derive(Clone, Copy, Debug)]
struct Interval {
    seconds: f64,
    /// The part of the weight of earlier samples that remains at its end.
    keep: f64,
    /// The mean weight of its moments at its end.
    share: f64,
}

impl Interval {
    fn new(seconds: f64) -> Self {
        let keep = (-seconds / HALF_LIFE).exp2();
        let share = if seconds > 0.0 { (1.0 - keep) * HALF_LIFE / (seconds * LN_2) } else { 0.0 };
        Self { seconds, keep, share }
    }
}

/// A mean over time in which older samples weigh less.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    sum: f64,
    weight: f64,
}

impl Mean {
    /// Adds a sample of an interval.
    fn add(&mut self, amount: f64, weight: f64, interval: Interval) {
        self.sum = self.sum * interval.keep + amount * interval.share;
        self.weight = self.weight * interval.keep + weight * interval.share;
    }

    /// Returns the mean; 0 without recent samples.
    fn value(self) -> f64 {
        if self.weight < LEAST_WEIGHT { 0.0 } else { self.sum / self.weight }
    }
}

/// The counters of one loaded version.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    busy_ns: u64,
    succeeded: u64,
    queue_ns: u64,
}

impl From<&ModelSample> for Counters {
    fn from(sample: &ModelSample) -> Self {
        Self { busy_ns: sample.busy_ns, succeeded: sample.succeeded, queue_ns: sample.queue_ns }
    }
}

/// The levels of all versions of a model.
#[derive(Clone, Copy, Debug, Default)]
struct Levels {
    executing: u64,
    waiting: u64,
    slots: u64,
    instances: u64,
    engines: EngineLevels,
}

/// What is remembered of a model.
#[derive(Debug, Default)]
struct Model {
    levels: Levels,
    /// The counters of each version, by its id. Each version is compared with itself: one that
    /// ends takes nothing away from others.
    versions: BTreeMap<usize, Counters>,
    /// The busy fraction of its instances.
    busy: Mean,
    /// Waiting requests for each slot.
    backlog: Mean,
    /// The seconds that a request waits.
    queue: Mean,
}

impl Model {
    /// Adds the samples of its versions at the end of an interval. The counters of a version count
    /// from its first sample on.
    fn add(&mut self, now: &[ModelSample], interval: Interval) {
        let mut levels = Levels::default();
        let mut grown = Counters::default();
        for sample in now {
            levels.executing += sample.executing;
            levels.waiting += sample.waiting;
            levels.slots += sample.slots;
            levels.instances += sample.instances;
            levels.engines.add(sample.engines);
            let counters = Counters::from(sample);
            let before = self.versions.get(&sample.id).copied().unwrap_or(counters);
            grown.busy_ns += counters.busy_ns.saturating_sub(before.busy_ns);
            grown.succeeded += counters.succeeded.saturating_sub(before.succeeded);
            grown.queue_ns += counters.queue_ns.saturating_sub(before.queue_ns);
        }
        let seconds = interval.seconds;
        let available = seconds * levels.instances as f64;
        self.busy.add(seconds_of(grown.busy_ns).min(available), available, interval);
        self.backlog.add(
            levels.waiting as f64 / levels.slots.max(1) as f64 * seconds,
            seconds,
            interval,
        );
        self.queue.add(seconds_of(grown.queue_ns), grown.succeeded as f64, interval);
        self.versions = now.iter().map(|sample| (sample.id, Counters::from(sample))).collect();
        self.levels = levels;
    }

    /// Returns the busy fraction of the instances, plus the waiting requests for each slot.
    fn utilization(&self) -> f64 {
        self.busy.value() + self.backlog.value()
    }

    /// Returns its numbers; only levels before the end of the first interval.
    fn named(&self, has_rates: bool) -> Vec<(&'static str, f64)> {
        let mut named = vec![
            ("executing_requests", self.levels.executing as f64),
            ("waiting_requests", self.levels.waiting as f64),
            ("execution_slots", self.levels.slots as f64),
        ];
        if has_rates {
            named.insert(0, ("utilization", self.utilization()));
            named.push(("queue_duration_seconds", self.queue.value()));
        }
        if let Some(waiting) = self.levels.engines.waiting() {
            named.push(("num_requests_waiting", self.levels.waiting as f64 + waiting));
        }
        if let Some(usage) = self.levels.engines.cache_usage() {
            named.push(("kv_cache_usage_perc", usage));
            named.push(("kv_cache_utilization", usage));
        }
        if let Some(tokens) = self.levels.engines.cache_tokens() {
            named.push(("max_token_capacity", tokens));
        }
        named
    }
}

/// Turns samples into reports.
#[derive(Debug, Default)]
pub struct Tracker {
    last: Option<(Instant, Sample)>,
    requests: Mean,
    errors: Mean,
    models: BTreeMap<Arc<str>, Model>,
}

impl Tracker {
    /// Adds the sample of a time and returns the reports. The first report only has levels: rates
    /// are not known yet.
    pub fn add(&mut self, now: Instant, mut sample: Sample) -> Reports {
        let models = std::mem::take(&mut sample.models);
        let interval = Interval::new(
            self.last.as_ref().map_or(0.0, |(last, _)| seconds_of(now.ns_since(*last))),
        );
        if let Some((_, last)) = &self.last {
            let new = |now: u64, last: u64| now.saturating_sub(last) as f64;
            self.requests.add(new(sample.requests, last.requests), interval.seconds, interval);
            self.errors.add(new(sample.errors, last.errors), interval.seconds, interval);
        }
        self.add_models(models, interval);
        let has_rates = self.last.is_some();
        let values = self.server(&sample, has_rates);
        self.last = Some((now, sample));
        let report =
            |named_metrics| Arc::new(LoadReport::new(Values { named_metrics, ..values.clone() }));
        let models = self
            .models
            .iter()
            .map(|(name, model)| (name.clone(), report(model.named(has_rates))))
            .collect();
        Reports { server: report(self.sums()), models }
    }

    fn add_models(&mut self, samples: Vec<ModelSample>, interval: Interval) {
        let mut all: BTreeMap<Arc<str>, Vec<ModelSample>> = BTreeMap::new();
        for sample in samples {
            all.entry(sample.name.clone()).or_default().push(sample);
        }
        self.models.retain(|name, _| all.contains_key(name));
        for (name, samples) in all {
            self.models.entry(name).or_default().add(&samples, interval);
        }
    }

    /// Returns the fields of the server.
    fn server(&self, sample: &Sample, has_rates: bool) -> Values {
        let known = |value: f64| has_rates.then_some(value);
        Values {
            cpu_utilization: sample.cpu,
            mem_utilization: sample.memory,
            application_utilization: known(
                self.models.values().map(Model::utilization).fold(0.0, f64::max),
            ),
            rps_fractional: known(self.requests.value()),
            eps: known(self.errors.value()),
            named_metrics: Vec::new(),
        }
    }

    /// Returns the levels of all models together.
    fn sums(&self) -> Vec<(&'static str, f64)> {
        let sum = |of: fn(&Levels) -> u64| {
            self.models.values().map(|model| of(&model.levels)).sum::<u64>() as f64
        };
        vec![
            ("executing_requests", sum(|levels| levels.executing)),
            ("waiting_requests", sum(|levels| levels.waiting)),
            ("execution_slots", sum(|levels| levels.slots)),
        ]
    }
}

fn seconds_of(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::Format;
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn model(waiting: u64, busy_ns: u64, succeeded: u64, queue_ns: u64) -> ModelSample {
        let name = Arc::from("m");
        ModelSample {
            name,
            id: 1,
            executing: 1,
            waiting,
            slots: 4,
            instances: 2,
            busy_ns,
            succeeded,
            queue_ns,
            engines: EngineLevels::default(),
        }
    }

    fn sample(requests: u64, errors: u64, models: Vec<ModelSample>) -> Sample {
        Sample { cpu: Some(0.5), memory: None, requests, errors, models }
    }

    fn named(report: &LoadReport, name: &str) -> f64 {
        report
            .values()
            .named_metrics
            .iter()
            .find(|(other, _)| *other == name)
            .map_or(f64::NAN, |(_, value)| *value)
    }

    fn of(reports: &Reports, model: &str) -> Arc<LoadReport> {
        reports.of(model).expect("the model has instances")
    }

    #[test]
    fn the_first_sample_has_levels_but_no_rates() {
        let reports =
            Tracker::default().add(Instant(5), sample(100, 10, vec![model(3, SECOND, 7, SECOND)]));
        let report = of(&reports, "m");
        assert_eq!(
            (report.values().cpu_utilization, report.values().mem_utilization),
            (Some(0.5), None)
        );
        assert_eq!((report.values().rps_fractional, report.values().eps), (None, None));
        assert_eq!(report.values().application_utilization, None);
        assert_eq!(
            (named(&report, "waiting_requests"), named(&report, "execution_slots")),
            (3.0, 4.0)
        );
        assert!(
            named(&report, "queue_duration_seconds").is_nan()
                && named(&report, "utilization").is_nan()
        );
        let rates = ["rps_fractional", "eps", "application_utilization", "queue_duration_seconds"];
        assert!(
            rates
                .iter()
                .all(|name| !String::from_utf8_lossy(&report.header(Format::Json)).contains(name))
        );
    }

    #[test]
    fn a_steady_load_is_exact_from_the_second_sample_on() {
        let mut tracker = Tracker::default();
        for second in 0..20 {
            // Each second 50 requests and 5 errors; one of two instances is busy; requests wait for
            // 20 ms.
            let models = vec![model(0, second * SECOND, 50 * second, second * SECOND)];
            let reports =
                tracker.add(Instant(second * SECOND), sample(50 * second, 5 * second, models));
            if second > 0 {
                let report = of(&reports, "m");
                let close = |value: f64, expected: f64| {
                    assert!((value - expected).abs() < 1e-9, "{value} {expected}")
                };
                close(report.values().rps_fractional.unwrap(), 50.0);
                close(report.values().eps.unwrap(), 5.0);
                close(report.values().application_utilization.unwrap(), 0.5);
                close(named(&report, "queue_duration_seconds"), 0.02);
            }
        }
    }

    #[test]
    fn engines_of_language_models_have_their_numbers() {
        let mut engines = EngineLevels::default();
        engines.add_waiting(3.0);
        engines.add_waiting(1.0);
        engines.add_cache_usage(0.25);
        engines.add_cache_usage(0.75);
        engines.add_cache_tokens(2048.0);
        engines.add_cache_tokens(1024.0);
        let mut tracker = Tracker::default();
        let version = ModelSample { engines, ..model(2, 0, 0, 0) };
        let older = ModelSample { id: 2, ..model(0, 0, 0, 0) };
        let report = of(&tracker.add(Instant(1), sample(0, 0, vec![version, older])), "m");
        assert_eq!(named(&report, "num_requests_waiting"), 6.0);
        assert_eq!(named(&report, "kv_cache_usage_perc"), 0.5);
        assert_eq!(named(&report, "kv_cache_utilization"), 0.5);
        assert_eq!(named(&report, "max_token_capacity"), 3072.0);
        let report = of(&tracker.add(Instant(2), sample(0, 0, vec![model(2, 0, 0, 0)])), "m");
        assert!(named(&report, "num_requests_waiting").is_nan());
        assert!(named(&report, "max_token_capacity").is_nan());
    }

    #[test]
    fn rates_halve_after_the_load_has_ended() {
        let mut tracker = Tracker::default();
        tracker.add(Instant(0), sample(0, 0, vec![]));
        let steady = tracker
            .add(Instant(100 * SECOND), sample(1000, 0, vec![]))
            .of_server()
            .values()
            .rps_fractional
            .unwrap();
        let later = tracker
            .add(Instant(102 * SECOND), sample(1000, 0, vec![]))
            .of_server()
            .values()
            .rps_fractional
            .unwrap();
        assert!((steady - 10.0).abs() < 1e-9 && (later - 5.0).abs() < 0.2, "{steady} {later}");
    }

    #[test]
    fn waiting_requests_raise_the_utilization_above_one() {
        let mut tracker = Tracker::default();
        tracker.add(Instant(0), sample(0, 0, vec![model(0, 0, 0, 0)]));
        let reports = tracker.add(Instant(SECOND), sample(0, 0, vec![model(8, 2 * SECOND, 0, 0)]));
        assert_eq!(of(&reports, "m").values().application_utilization, Some(3.0));
        assert_eq!(named(&of(&reports, "m"), "utilization"), 3.0);
        assert_eq!(named(&reports.of_server(), "waiting_requests"), 8.0);
    }

    #[test]
    fn versions_are_added_up_and_counters_that_fall_add_nothing() {
        let mut tracker = Tracker::default();
        let other = ModelSample { id: 2, ..model(2, SECOND, 1, SECOND) };
        let both = vec![model(1, 9 * SECOND, 9, SECOND), other];
        tracker.add(Instant(0), sample(0, 0, both));
        let reports = tracker.add(Instant(SECOND), sample(0, 0, vec![model(0, 0, 0, 0)]));
        assert_eq!(of(&reports, "m").values().application_utilization, Some(0.0));
        let reports = tracker.add(Instant(SECOND), sample(0, 0, vec![]));
        assert!(reports.of("m").is_none(), "the model was unloaded");
        assert_eq!(reports.of_server().values().application_utilization, Some(0.0));
    }

    /// An old version that ends during a reload takes nothing away from the new one, which is busy
    /// all the time.
    #[test]
    fn a_version_that_ends_does_not_lower_the_utilization() {
        let busy = |id, second: u64| ModelSample {
            id,
            ..model(0, 2 * second * SECOND, second, second * SECOND)
        };
        let mut tracker = Tracker::default();
        for second in 0..10 {
            tracker.add(
                Instant(second * SECOND),
                sample(0, 0, vec![busy(1, 50 + second), busy(2, second)]),
            );
        }
        for second in 10..13 {
            let reports =
                tracker.add(Instant(second * SECOND), sample(0, 0, vec![busy(2, second)]));
            assert!(
                (of(&reports, "m").values().application_utilization.unwrap() - 1.0).abs() < 1e-9,
                "{second}"
            );
            assert!(
                (named(&of(&reports, "m"), "queue_duration_seconds") - 1.0).abs() < 1e-9,
                "{second}"
            );
        }
    }

    #[test]
    fn an_old_queue_time_is_forgotten() {
        let mut tracker = Tracker::default();
        tracker.add(Instant(0), sample(0, 0, vec![model(0, 0, 0, 0)]));
        let reports = tracker.add(Instant(SECOND), sample(0, 0, vec![model(0, 0, 4, SECOND)]));
        assert_eq!(named(&of(&reports, "m"), "queue_duration_seconds"), 0.25);
        let reports = tracker.add(Instant(60 * SECOND), sample(0, 0, vec![model(0, 0, 4, SECOND)]));
        assert_eq!(named(&of(&reports, "m"), "queue_duration_seconds"), 0.0);
    }
}
