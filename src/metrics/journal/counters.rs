//! The server's own counters as log lines: by how much they have grown since they were last written. Those that count
//! requests grow by 1 each time, so that they can be told request by request.

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
    /// Those of TorchServe that count requests are told in lines of 1, as far as `singles` such lines reach.
    pub fn collect(&mut self, cache: &Cache, singles: u64, mut write: impl FnMut(&Text, f64) -> bool) {
        let skip_past = self.renew(cache);
        for series in cache.models().into_iter().chain(cache.journal().take_departed()) {
            self.models.entry(Arc::as_ptr(&series).addr()).or_insert_with(|| (series, Rows::new()));
        }
        // What nobody else holds does not grow any more: it is read for the last time.
        let alone = self.models.iter().filter(|(_, (series, _))| Arc::strong_count(series) == 1);
        let last: Vec<usize> = alone.map(|(at, _)| *at).collect();
        // What those who held it have written is seen from here on.
        fence(Ordering::Acquire);
        let mut lines = Lines { write: &mut write, singles, all: true };
        let by_name = cache.all_named().is_some();
        for (builtin, spec) in &self.wanted {
            let mut told = |rows: &mut Rows, labels: &[(&str, &str)], sum| {
                tell(rows, cache, (*builtin, spec, labels), (sum, skip_past.contains(builtin)), &mut lines);
            };
            of_server(cache, *builtin, &mut |labels, sum| told(&mut self.server, labels, sum));
            for (series, rows) in self.models.values_mut() {
                if *builtin != Builtin::TsRequests || !by_name {
                    of_model(series, cache.hostname(), *builtin, &mut |labels, sum| told(rows, labels, sum));
                }
            }
        }
        let all_told = lines.all;
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

/// Where counters are told.
struct Lines<'a> {
    write: &'a mut dyn FnMut(&Text, f64) -> bool,
    /// How many more lines may tell a single request.
    singles: u64,
    /// Whether nothing was refused.
    all: bool,
}

impl Lines<'_> {
    /// Tells that a counter has grown, in one line or one by one. Returns how much of it was told.
    fn tell(&mut self, text: &Text, grown: u64, one_by_one: bool) -> u64 {
        let told = if one_by_one && grown <= self.singles {
            self.singles -= grown;
            (0..grown).take_while(|_| (self.write)(text, 1.0)).count() as u64
        } else if (self.write)(text, grown as f64) {
            grown
        } else {
            0
        };
        self.all &= told == grown;
        told
    }
}

/// Writes a counter if it has grown; `from_now` says where a counter that is seen for the first time begins.
fn tell(
    rows: &mut Rows,
    cache: &Cache,
    (builtin, spec, labels): (Builtin, &MetricSpec, &[(&str, &str)]),
    (sum, from_now): (u64, bool),
    lines: &mut Lines<'_>,
) {
    let key = labels.iter().map(|(_, value)| *value).collect::<Vec<_>>().join("\0");
    let written = if from_now { sum } else { 0 };
    let row = rows.entry((builtin, key)).or_insert(Row { written, text: None });
    let grown = sum.saturating_sub(row.written);
    if grown == 0 {
        return;
    }
    let text = row.text.get_or_insert_with(|| Text::of_server(spec, labels, cache.hostname()));
    row.written += lines.tell(text, grown, builtin.counts_requests());
}

/// The counters of the server's requests.
fn of_server(cache: &Cache, builtin: Builtin, each: &mut impl FnMut(&[(&str, &str)], u64)) {
    let requests = cache.requests();
    match builtin {
        Builtin::Requests2xx | Builtin::Requests4xx | Builtin::Requests5xx => {
            let [fine, refused, failed] = requests.http_classes();
            let count = match builtin {
                Builtin::Requests2xx => fine,
                Builtin::Requests4xx => refused,
                _ => failed,
            };
            each(&[("Level", "Host"), ("Hostname", cache.hostname())], count);
        }
        Builtin::TsRequests => {
            for named in cache.all_named().unwrap_or_default() {
                let labels = [("model_name", &*named.name), ("model_version", &*named.version)];
                let [name, version] = labels;
                each(&[name, version, ("hostname", cache.hostname())], named.requests.get());
            }
        }
        Builtin::Requests => requests.for_each_answer(|protocol, route, code, count| {
            each(&[("protocol", protocol.as_str()), ("route", route.as_str()), ("code", code)], count);
        }),
        Builtin::RequestFailures => requests.for_each_failure(|protocol, route, reason, count| {
            let labels = [("protocol", protocol.as_str()), ("route", route.as_str()), ("reason", reason.as_str())];
            each(&labels, count);
        }),
        _ => {}
    }
}

/// The counters of one model, but for `TsLatency` and `TsQueueLatency`: the latencies of single requests are in no cell, so
/// they are pushed (`record::batch_times`).
fn of_model(model: &ModelSeries, hostname: &str, builtin: Builtin, each: &mut impl FnMut(&[(&str, &str)], u64)) {
    let labels = model.labels(builtin, hostname);
    let whole = |cell: &Count| cell.get();
    let micros = |cell: &Count| cell.get() / 1000;
    let with_reason = |reason: &'static str| labels.iter().copied().chain([("reason", reason)]).collect::<Vec<_>>();
    match builtin {
        Builtin::TsRequests => each(&labels, whole(&model.requests)),
        Builtin::RequestSuccess => each(&labels, whole(&model.success_count)),
        Builtin::RequestFailure => {
            for (failure, cell) in Failure::ALL.iter().zip(&model.failures) {
                each(&with_reason(failure.as_str()), whole(cell));
            }
        }
        Builtin::Batches => {
            for (reason, cell) in SendReason::ALL.iter().zip(&model.sent) {
                each(&with_reason(reason.as_str()), whole(cell));
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
        Builtin::InstanceRestarts => each(&labels, whole(&model.restarts)),
        Builtin::SamplesDropped => each(&labels, whole(&model.samples_dropped)),
        Builtin::OutputMismatches => each(&labels, whole(&model.output_mismatches)),
        _ => {}
    }
}
