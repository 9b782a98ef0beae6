//! The figures of each model.

use std::collections::{BTreeMap, BTreeSet};

use pharos::metrics::builtin::Builtin;

use crate::exposition::{ModelKey, model_key};
use crate::history::History;
use crate::scrape::{Distribution, Interval, Scrape};

const SUCCESS: Builtin = Builtin::RequestSuccess;
const PENDING: Builtin = Builtin::PendingRequests;
const INSTANCES: Builtin = Builtin::Instances;

/// The figures of one model over the last seconds. `None` where the server does not have the
/// metric.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Whether the latest load of the model failed. Earlier versions may serve.
    pub(crate) load_failed: bool,
    /// Whether the version is in the state LOADING, and the share of it that is loaded.
    pub(crate) is_loading: bool,
    pub(crate) loaded_share: Option<f64>,
    /// Ready instances, and all. Ensembles have none.
    pub(crate) ready: Option<f64>,
    pub(crate) instances: Option<f64>,
    /// Successful and failed requests per second.
    pub(crate) requests: Option<f64>,
    pub(crate) failures: Option<f64>,
    /// Mean and percentiles of the time of a request in seconds.
    pub(crate) mean: Option<f64>,
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
    /// The share of this time in the queue.
    pub(crate) queue: Option<f64>,
    pub(crate) waiting: Option<f64>,
    /// Items per execution.
    pub(crate) batch: Option<f64>,
    /// The busy share of the instances.
    pub(crate) busy: Option<f64>,
    /// The resident memory of the instances in bytes.
    pub(crate) memory: Option<f64>,
}

impl Model {
    /// Returns whether the latest load failed, an instance is not ready, or more than 1 % of the
    /// requests fail.
    pub(crate) fn is_troubled(&self) -> bool {
        let failures = self.failures.unwrap_or_default();
        self.load_failed
            || self.ready < self.instances
            || failures > 0.01 * (failures + self.requests.unwrap_or_default())
    }
}

/// Returns the figures of all models, by name and version.
pub(crate) fn models(history: &History) -> Vec<Model> {
    let Some(now) = history.latest() else { return Vec::new() };
    let recent = history.recent().map(Recent::new);
    let levels = Levels::new(now);
    known(now, &levels).into_iter().map(|key| model(key, &levels, recent.as_ref())).collect()
}

/// Returns the models of a scrape: the loaded and loading versions, and, without a version, models
/// whose load failed.
fn known(scrape: &Scrape, levels: &Levels) -> BTreeSet<ModelKey> {
    let families = [SUCCESS, INSTANCES, PENDING];
    let keys =
        families.iter().flat_map(|family| scrape.list(*family)).map(|(key, _)| model_key(key));
    let mut known: BTreeSet<ModelKey> = keys.filter(|(name, _)| !name.is_empty()).collect();
    known.extend(levels.loading.iter().cloned());
    let loaded: BTreeSet<String> = known.iter().map(|(name, _)| name.clone()).collect();
    let failed = levels.load_failed.difference(&loaded);
    known.extend(failed.map(|name| (name.clone(), String::new())));
    known
}

/// Values by model.
type ByModel = BTreeMap<ModelKey, f64>;

/// Levels of all models.
struct Levels {
    ready: ByModel,
    instances: ByModel,
    waiting: ByModel,
    memory: ByModel,
    /// The versions in the state LOADING.
    loading: BTreeSet<ModelKey>,
    loaded_shares: ByModel,
    /// The models whose latest load failed.
    load_failed: BTreeSet<String>,
}

impl Levels {
    fn new(now: &Scrape) -> Self {
        let failed =
            now.list(Builtin::ModelLastLoad).iter().filter(|(_, succeeded)| *succeeded == 0.0);
        let loading = now
            .list(Builtin::ModelState)
            .iter()
            .filter(|(key, value)| key.label("state") == "LOADING" && *value == 1.0);
        let mut ready = ByModel::new();
        for (key, value) in now.list(INSTANCES) {
            *ready.entry(model_key(key)).or_default() +=
                if key.label("state") == "ready" { *value } else { 0.0 };
        }
        Self {
            ready,
            instances: now.sums(INSTANCES, model_key),
            waiting: now.sums(PENDING, model_key),
            memory: now.sums(Builtin::WorkerMemory, model_key),
            loading: loading.map(|(key, _)| model_key(key)).collect(),
            loaded_shares: now.sums(Builtin::ModelLoadProgress, model_key),
            load_failed: failed.map(|(key, _)| key.label("model").to_owned()).collect(),
        }
    }
}

/// Increases of all models.
struct Recent {
    seconds: f64,
    success: ByModel,
    failure: ByModel,
    request_us: ByModel,
    queue_us: ByModel,
    items: ByModel,
    executions: ByModel,
    busy: ByModel,
    durations: BTreeMap<ModelKey, Distribution>,
}

impl Recent {
    fn new(interval: Interval<'_>) -> Self {
        let gains = |metric: Builtin| interval.gains(metric, model_key);
        Self {
            seconds: interval.seconds(),
            success: gains(SUCCESS),
            failure: gains(Builtin::RequestFailure),
            request_us: gains(Builtin::RequestDuration),
            queue_us: gains(Builtin::QueueDuration),
            items: gains(Builtin::InferenceCount),
            executions: gains(Builtin::ExecutionCount),
            busy: gains(Builtin::InstanceBusy),
            durations: interval.distributions(Builtin::RequestHistogram, model_key),
        }
    }
}

/// Returns a quotient; `None` if a part is missing or the divisor is 0.
pub(crate) fn quotient(dividend: Option<f64>, divisor: Option<f64>) -> Option<f64> {
    Some(dividend? / divisor.filter(|divisor| *divisor > 0.0)?)
}

fn model(key: ModelKey, levels: &Levels, recent: Option<&Recent>) -> Model {
    let level = |of: &ByModel| of.get(&key).copied();
    let instances = level(&levels.instances).filter(|count| *count > 0.0);
    let mut model = Model {
        load_failed: levels.load_failed.contains(&key.0),
        is_loading: levels.loading.contains(&key),
        loaded_share: level(&levels.loaded_shares),
        ready: instances.and(level(&levels.ready)),
        instances,
        waiting: level(&levels.waiting),
        memory: level(&levels.memory).filter(|bytes| *bytes > 0.0),
        ..Model::default()
    };
    if let Some(recent) = recent {
        let success = level(&recent.success);
        let request_us = level(&recent.request_us);
        let durations = recent.durations.get(&key);
        model.requests = success.map(|count| count / recent.seconds);
        model.failures = level(&recent.failure).map(|count| count / recent.seconds);
        model.mean = quotient(request_us, success).map(|us| us / 1e6);
        model.p50 = durations.and_then(|durations| durations.quantile(0.5));
        model.p99 = durations.and_then(|durations| durations.quantile(0.99));
        model.queue = quotient(level(&recent.queue_us), request_us).map(|share| share.min(1.0));
        model.batch = quotient(level(&recent.items), level(&recent.executions));
        model.busy = quotient(level(&recent.busy), instances.map(|count| count * recent.seconds));
    }
    (model.name, model.version) = key;
    model
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::timeline::Instant;

    use super::*;

    fn history(scrapes: &[&str]) -> History {
        let mut history = History::default();
        for (second, text) in (0..).zip(scrapes) {
            history.add(text, Instant(second * 2_000_000_000));
        }
        history
    }

    #[test]
    fn figures_come_from_two_scrapes() {
        let labels = "model=\"m\",version=\"1\"";
        let text = |n: f64| {
            format!(
                "nv_inference_request_success{{{labels}}} \
                 {}\nnv_inference_request_failure{{{labels},reason=\"OTHER\"}} \
                 {}\nnv_inference_request_duration_us{{{labels}}} \
                 {}\nnv_inference_queue_duration_us{{{labels}}} \
                 {}\nnv_inference_count{{{labels}}} {}\nnv_inference_exec_count{{{labels}}} \
                 {}\npharos_instance_busy_seconds_total{{{labels},instance=\"m_0\"}} \
                 {}\npharos_request_duration_seconds_bucket{{{labels},le=\"0.01\"}} \
                 {}\npharos_request_duration_seconds_bucket{{{labels},le=\"+Inf\"}} \
                 {}\nnv_inference_pending_request_count{{{labels}}} \
                 3\npharos_worker_resident_bytes{{{labels},instance=\"m_0\"}} \
                 5\npharos_instances{{{labels},state=\"ready\"}} \
                 1\npharos_instances{{{labels},state=\"lost\"}} 1\n",
                100.0 * n,
                10.0 * n,
                200_000.0 * n,
                50_000.0 * n,
                400.0 * n,
                50.0 * n,
                n,
                100.0 * n,
                100.0 * n
            )
        };
        let found = models(&history(&[&text(1.0), &text(2.0)]));
        let [model] = &found[..] else { panic!("{found:?}") };
        assert_eq!(
            (model.requests, model.failures, model.waiting),
            (Some(50.0), Some(5.0), Some(3.0))
        );
        assert_eq!((model.mean, model.queue, model.batch), (Some(0.002), Some(0.25), Some(8.0)));
        assert_eq!((model.p50, model.busy, model.memory), (Some(0.005), Some(0.25), Some(5.0)));
        assert_eq!(
            (model.ready, model.instances, model.is_troubled()),
            (Some(1.0), Some(2.0), true)
        );
    }

    #[test]
    fn models_of_the_same_name_in_two_namespaces_are_separate() {
        let text = |n: f64| {
            let of = |namespace: &str, factor: f64| {
                let bare = format!("model=\"m\",version=\"1\",namespace=\"{namespace}\"");
                let full = format!("{namespace}/m");
                let full = format!("model=\"{full}\",version=\"1\"");
                format!(
                    "nv_inference_request_success{{{bare}}} \
                     {}\nnv_inference_pending_request_count{{{bare}}} \
                     {factor}\npharos_request_duration_seconds_bucket{{{full},le=\"0.01\"}} \
                     {}\npharos_request_duration_seconds_bucket{{{full},le=\"+Inf\"}} \
                     {}\npharos_instances{{{full},state=\"ready\"}} {factor}\n",
                    factor * n,
                    factor * n,
                    factor * n
                )
            };
            of("/a", 2.0) + &of("/b", 4.0)
        };
        let found = models(&history(&[&text(1.0), &text(2.0)]));
        let shown: Vec<_> = found
            .iter()
            .map(|model| {
                (
                    model.name.as_str(),
                    model.requests,
                    model.waiting,
                    model.ready,
                    model.p50.is_some(),
                )
            })
            .collect();
        let row = |name, factor| (name, Some(factor / 2.0), Some(factor), Some(factor), true);
        assert_eq!(shown, [row("/a/m", 2.0), row("/b/m", 4.0)]);
    }

    #[test]
    fn models_whose_load_failed_have_problems() {
        let of = |model: &str, succeeded: u8| {
            format!("pharos_model_last_load_successful{{model=\"{model}\"}} {succeeded}\n")
        };
        let serves = |model: &str| {
            format!("pharos_instances{{model=\"{model}\",version=\"1\",state=\"ready\"}} 1\n")
        };
        let text = of("broken", 0)
            + &of("good", 1)
            + &of("old", 0)
            + &of("unloaded", 1)
            + &serves("good")
            + &serves("old");
        let found = models(&history(&[&text]));
        let shown: Vec<_> = found
            .iter()
            .map(|model| {
                (model.name.as_str(), model.version.as_str(), model.ready, model.is_troubled())
            })
            .collect();
        assert_eq!(
            shown,
            [
                ("broken", "", None, true),
                ("good", "1", Some(1.0), false),
                ("old", "1", Some(1.0), true)
            ]
        );
    }

    #[test]
    fn versions_that_load_are_listed_with_their_progress() {
        let state = |model: &str, state: &str, value: u8| {
            format!(
                "pharos_model_state{{model=\"{model}\",version=\"1\",state=\"{state}\"}} {value}\n"
            )
        };
        let text = state("known", "LOADING", 1)
            + "pharos_model_load_progress_ratio{model=\"known\",version=\"1\"} 0.43\n"
            + &state("unknown", "LOADING", 1)
            + &state("unloaded", "LOADING", 0)
            + &state("unloaded", "UNAVAILABLE", 1);
        let found = models(&history(&[&text]));
        let shown: Vec<_> = found
            .iter()
            .map(|model| (model.name.as_str(), model.is_loading, model.loaded_share))
            .collect();
        assert_eq!(shown, [("known", true, Some(0.43)), ("unknown", true, None)]);
        assert!(!found.iter().any(Model::is_troubled));
    }

    #[test]
    fn metrics_that_a_server_lacks_are_missing() {
        let text = "nv_inference_request_success{model=\"m\",version=\"1\"} 5\nup 1\n";
        assert_eq!(models(&history(&[text]))[0].requests, None);
        let found = models(&history(&[text, text]));
        assert_eq!((found[0].requests, found[0].p99, found[0].ready), (Some(0.0), None, None));
        assert!(!found[0].is_troubled() && found.len() == 1);
        assert!(models(&History::default()).is_empty());
    }
}
