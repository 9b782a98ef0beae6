//! The server's own counters as log lines: by how much they have grown since they were last written.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::super::builtin::Builtin;
use super::super::cache::Cache;
use super::super::catalog::{Kind, MetricSpec};
use super::super::labels::Failure;
use super::super::series::{Count, ModelSeries};
use super::super::tslog::Text;
use crate::timeline::SendReason;

/// What was last written of one series.
#[derive(Debug)]
struct Row {
    written: u64,
    /// Made when it is first needed under a definition.
    text: Option<Text>,
}

/// Rows of one owner by metric and label values.
type Rows = HashMap<(Builtin, String), Row>;

/// A counter's cell at one moment: a whole number of which `scale` make one of the metric's unit.
#[derive(Clone, Copy)]
struct Sum {
    value: u64,
    scale: f64,
}

/// What was last written of every counter.
#[derive(Debug, Default)]
pub struct Counters {
    generation: Option<u64>,
    /// The counters that the definition wants in the logs.
    wanted: Vec<(Builtin, Arc<MetricSpec>)>,
    server: Rows,
    /// By the address of the series, which is kept alive here.
    models: HashMap<usize, (Arc<ModelSeries>, Rows)>,
}

impl Counters {
    /// Nothing is written yet: counters are told from 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls `write` with each counter that has grown, and by how much. If it refuses, the counter is told the next time.
    pub fn collect(&mut self, cache: &Cache, mut write: impl FnMut(&Text, f64) -> bool) {
        let skip_past = self.renew(cache);
        for series in cache.models().into_iter().chain(cache.journal().take_departed()) {
            self.models.entry(Arc::as_ptr(&series).addr()).or_insert_with(|| (series, Rows::new()));
        }
        // What nobody else holds does not grow any more: it is read for the last time.
        let alone = self.models.iter().filter(|(_, (series, _))| Arc::strong_count(series) == 1);
        let last: Vec<usize> = alone.map(|(at, _)| *at).collect();
        // What those who held it have written is seen from here on.
        fence(Ordering::Acquire);
        let mut all_told = true;
        let mut write = |text: &Text, value: f64| {
            let written = write(text, value);
            all_told &= written;
            written
        };
        for (builtin, spec) in &self.wanted {
            let mut told = |rows: &mut Rows, labels: &[(&str, &str)], sum| {
                tell(rows, cache, (*builtin, spec, labels), (sum, skip_past.contains(builtin)), &mut write);
            };
            of_server(cache, *builtin, &mut |labels, sum| told(&mut self.server, labels, sum));
            for (series, rows) in self.models.values_mut() {
                of_model(series, cache.hostname(), *builtin, &mut |labels, sum| told(rows, labels, sum));
            }
        }
        self.models.retain(|at, _| !all_told || !last.contains(at));
    }

    /// Follows a new definition. Returns the counters that it brings into the logs: they are told from now on, not from
    /// their beginning.
    fn renew(&mut self, cache: &Cache) -> Vec<Builtin> {
        let generation = cache.generation();
        if self.generation == Some(generation) {
            return Vec::new();
        }
        let first = self.generation.replace(generation).is_none();
        let families = cache.registry();
        let wanted =
            families.families().iter().filter(|family| family.views.tslog && family.spec.kind == Kind::Counter);
        let wanted = wanted.filter_map(|family| Some((family.spec.builtin?, Arc::clone(&family.spec))));
        let wanted: Vec<_> = wanted.filter(|(builtin, _)| !builtin.is_family()).collect();
        let old = std::mem::replace(&mut self.wanted, wanted);
        let kept = |builtin: Builtin| old.iter().any(|(other, _)| *other == builtin);
        for rows in self.models.values_mut().map(|(_, rows)| rows).chain([&mut self.server]) {
            rows.retain(|(builtin, _), _| kept(*builtin));
            rows.values_mut().for_each(|row| row.text = None);
        }
        self.wanted.iter().map(|(builtin, _)| *builtin).filter(|builtin| !first && !kept(*builtin)).collect()
    }
}

/// Writes a counter if it has grown; `from_now` says where a counter that is seen for the first time begins.
fn tell(
    rows: &mut Rows,
    cache: &Cache,
    (builtin, spec, labels): (Builtin, &MetricSpec, &[(&str, &str)]),
    (sum, from_now): (Sum, bool),
    write: &mut impl FnMut(&Text, f64) -> bool,
) {
    let key = labels.iter().map(|(_, value)| *value).collect::<Vec<_>>().join("\0");
    let written = if from_now { sum.value } else { 0 };
    let row = rows.entry((builtin, key)).or_insert(Row { written, text: None });
    let grown = sum.value.saturating_sub(row.written);
    if grown == 0 {
        return;
    }
    let text = row.text.get_or_insert_with(|| {
        let of = |name: &str| labels.iter().find(|(label, _)| *label == name).map_or("", |(_, value)| *value);
        let own = spec.dimensions.iter().map(|name| (name.as_str(), of(name)));
        // `metric_tags` come on top of the dimensions.
        let tags = labels.iter().filter(|(label, _)| !spec.dimensions.iter().any(|name| name == label));
        Text::new(spec, own.chain(tags.copied()), cache.hostname())
    });
    if write(text, grown as f64 / sum.scale) {
        row.written = sum.value;
    }
}

/// The counters of the server's requests.
fn of_server(cache: &Cache, builtin: Builtin, each: &mut impl FnMut(&[(&str, &str)], Sum)) {
    let whole = |value| Sum { value, scale: 1.0 };
    let requests = cache.requests();
    match builtin {
        Builtin::Requests2xx | Builtin::Requests4xx | Builtin::Requests5xx => {
            let [fine, refused, failed] = requests.http_classes();
            let count = match builtin {
                Builtin::Requests2xx => fine,
                Builtin::Requests4xx => refused,
                _ => failed,
            };
            each(&[("Level", "Host"), ("Hostname", cache.hostname())], whole(count));
        }
        Builtin::Requests => requests.for_each_answer(|protocol, route, code, count| {
            each(&[("protocol", protocol.as_str()), ("route", route.as_str()), ("code", code)], whole(count));
        }),
        Builtin::RequestFailures => requests.for_each_failure(|protocol, route, reason, count| {
            let labels = [("protocol", protocol.as_str()), ("route", route.as_str()), ("reason", reason.as_str())];
            each(&labels, whole(count));
        }),
        _ => {}
    }
}

/// The counters of one model.
fn of_model(model: &ModelSeries, hostname: &str, builtin: Builtin, each: &mut impl FnMut(&[(&str, &str)], Sum)) {
    let name = &*model.model().name;
    let mut labels = vec![("model", name), ("version", model.version())];
    labels.extend(model.tags().iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let whole = |cell: &Count| Sum { value: cell.get(), scale: 1.0 };
    let micros = |cell: &Count| Sum { value: cell.get() / 1000, scale: 1.0 };
    // TorchServe shows fractions of a microsecond.
    let exact = |cell: &Count| Sum { value: cell.get(), scale: 1000.0 };
    let torchserve = [("model_name", name), ("model_version", model.version()), ("hostname", hostname)];
    match builtin {
        Builtin::TsRequests => each(&torchserve, whole(&model.requests)),
        Builtin::TsLatency => each(&torchserve, exact(&model.success_ns)),
        Builtin::TsQueueLatency => each(&torchserve, exact(&model.queue_ns)),
        Builtin::RequestSuccess => each(&labels, whole(&model.success_count)),
        Builtin::RequestFailure => {
            for (failure, cell) in Failure::ALL.iter().zip(&model.failures) {
                let mut labels = labels.clone();
                labels.push(("reason", failure.as_str()));
                each(&labels, whole(cell));
            }
        }
        Builtin::Batches => {
            for (reason, cell) in SendReason::ALL.iter().zip(&model.sent) {
                each(&[("model", name), ("version", model.version()), ("reason", reason.as_str())], whole(cell));
            }
        }
        Builtin::InferenceCount => each(&labels, whole(&model.inference_count)),
        Builtin::ExecutionCount => each(&labels, whole(&model.execution_count)),
        Builtin::RequestDuration => each(&labels, micros(&model.success_ns)),
        Builtin::QueueDuration => each(&labels, micros(&model.queue_ns)),
        Builtin::ComputeInputDuration => each(&labels, micros(&model.compute_input_ns)),
        Builtin::ComputeInferDuration => each(&labels, micros(&model.compute_infer_ns)),
        Builtin::ComputeOutputDuration => each(&labels, micros(&model.compute_output_ns)),
        Builtin::CacheHits if model.cached() => each(&labels, whole(&model.cache.hits)),
        Builtin::CacheMisses if model.cached() => each(&labels, whole(&model.cache.misses)),
        Builtin::CacheHitDuration if model.cached() => each(&labels, micros(&model.cache.hit_ns)),
        Builtin::CacheMissDuration if model.cached() => each(&labels, micros(&model.cache.miss_ns)),
        Builtin::InstanceRestarts => each(labels.get(..2).unwrap_or(&labels), whole(&model.restarts)),
        Builtin::SamplesDropped => each(labels.get(..2).unwrap_or(&labels), whole(&model.samples_dropped)),
        _ => {}
    }
}
