//! The cells of one loaded model version and of the server's requests.
//!
//! Each number is kept once, in nanoseconds or as an exact count; Triton's and TorchServe's metrics and the statistics
//! extension are renderings of it. Only `metrics::record` writes here. Recording takes no lock but for batch sizes; readers
//! may see an event half recorded, and see it whole once nothing is in flight.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};

use super::builtin::Builtin;
use super::durations::Durations;
use super::family::{Registry, Series};
use super::journal::{Journal, Line};
use super::labels::{Failure, GRPC_CODES, InstanceState, Outcome, Protocol, Route};
use super::responses::ResponseCells;
use super::summary::CoarseClock;
use crate::error::Reason;
use crate::id::ModelVersion;
use crate::timeline::SendReason;

/// A count or a sum of nanoseconds. Relaxed: cells order nothing, they only have to lose nothing.
#[derive(Debug, Default)]
pub(super) struct Count(AtomicU64);

impl Count {
    pub(super) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    pub(super) fn raise_to(&self, value: u64) {
        self.0.fetch_max(value, Ordering::Relaxed);
    }

    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub(super) struct Level(AtomicI64);

impl Level {
    pub(super) fn add(&self, delta: i64) {
        self.0.fetch_add(delta, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What executions of one batch size have cost, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BatchCell {
    pub(super) count: u64,
    pub(super) compute_input_ns: u64,
    pub(super) compute_infer_ns: u64,
    pub(super) compute_output_ns: u64,
}

/// What the response cache did for one model.
#[derive(Debug, Default)]
pub(super) struct CacheCells {
    /// Whether the model uses it at all; without, it has no series of it.
    on: AtomicBool,
    pub(super) hits: Count,
    pub(super) hit_ns: Count,
    pub(super) misses: Count,
    pub(super) miss_ns: Count,
}

/// All series of one loaded model version. They begin at 0 with the load and end with the unload.
#[derive(Debug)]
pub struct ModelSeries {
    model: ModelVersion,
    version: String,
    tags: Vec<(String, String)>,
    pub(super) success_count: Count,
    pub(super) success_ns: Count,
    pub(super) queue_ns: Count,
    pub(super) compute_input_ns: Count,
    pub(super) compute_infer_ns: Count,
    pub(super) compute_output_ns: Count,
    pub(super) failures: [Count; Failure::ALL.len()],
    pub(super) failure_ns: Count,
    pub(super) inference_count: Count,
    pub(super) execution_count: Count,
    pub(super) last_inference_ms: Count,
    pub(super) cache: CacheCells,
    pub(super) responses: ResponseCells,
    pub(super) requests: Count,
    pub(super) pending: Level,
    /// Seconds, as the bits of an f64.
    pub(super) load_duration: Count,
    pub(super) instances: [Level; InstanceState::ALL.len()],
    pub(super) restarts: Count,
    pub(super) output_mismatches: Count,
    /// Those of the loads before, while something of them is left.
    before: Mutex<Vec<Weak<ModelSeries>>>,
    pub(super) samples_dropped: Count,
    /// What loading has added to the resident bytes of all instances' processes.
    pub(super) memory: Count,
    /// What they have registered with the drivers of GPUs.
    pub(super) pinned: Count,
    /// What they held on the GPUs after loading, by the number of the device.
    gpu_memory: Mutex<Vec<(u32, u64)>>,
    /// By total batch size. Locked once for each execution, for a few additions.
    batches: Mutex<BTreeMap<u64, BatchCell>>,
    pub(super) durations: Durations,
    /// The model's own buckets, by the metric's name.
    pub(super) own_buckets: Vec<(String, Vec<f64>)>,
    pub(super) sent: [Count; SendReason::ALL.len()],
    /// Series that this model's workers write, by the address of their cells.
    owned: Mutex<HashMap<usize, Arc<Series>>>,
    /// Written when the definition of the metrics changes; read once for each batch.
    times: RwLock<Times>,
    journal: Arc<Journal>,
    /// The name and version that TorchServe knows it by.
    called: OnceLock<(String, String)>,
}

/// Where the times of executed batches go beside the cells, as far as the definition wants it.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// TorchServe's gauges of the host.
    pub(super) queue: Option<Arc<Series>>,
    pub(super) worker_thread: Option<Arc<Series>>,
    /// The log lines of `success_ns`: each request's own.
    pub(super) latency: Option<Arc<Line>>,
    /// The log lines of `queue_ns`.
    pub(super) queue_latency: Option<Arc<Line>>,
}

impl ModelSeries {
    /// All cells at 0. `tags` are the configuration's `metric_tags`; each becomes a label `_KEY`, with what a label name
    /// may not contain turned into `_`, and the first of equal names kept. The label `namespace`, where there is one, is
    /// among them.
    pub(super) fn new(
        model: &ModelVersion,
        tags: &[(String, String)],
        own_buckets: Vec<(String, Vec<f64>)>,
        journal: Arc<Journal>,
    ) -> Self {
        let mut labels: Vec<(String, String)> = Vec::with_capacity(tags.len() + 1);
        labels.extend(model.namespace().map(|namespace| ("namespace".to_owned(), namespace.to_owned())));
        for (key, value) in tags {
            let name: String = key.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
            let name = format!("_{name}");
            if !labels.iter().any(|(other, _)| *other == name) {
                labels.push((name, value.clone()));
            }
        }
        Self {
            model: model.clone(),
            version: model.version.to_string(),
            tags: labels,
            success_count: Count::default(),
            success_ns: Count::default(),
            queue_ns: Count::default(),
            compute_input_ns: Count::default(),
            compute_infer_ns: Count::default(),
            compute_output_ns: Count::default(),
            failures: Default::default(),
            failure_ns: Count::default(),
            inference_count: Count::default(),
            execution_count: Count::default(),
            last_inference_ms: Count::default(),
            cache: CacheCells::default(),
            responses: ResponseCells::default(),
            requests: Count::default(),
            pending: Level::default(),
            load_duration: Count::default(),
            instances: Default::default(),
            restarts: Count::default(),
            output_mismatches: Count::default(),
            before: Mutex::default(),
            samples_dropped: Count::default(),
            memory: Count::default(),
            pinned: Count::default(),
            gpu_memory: Mutex::default(),
            batches: Mutex::default(),
            durations: Durations::default(),
            own_buckets,
            sent: Default::default(),
            owned: Mutex::default(),
            times: RwLock::default(),
            journal,
            called: OnceLock::new(),
        }
    }

    /// Makes the distributions that the definition asks for.
    pub(super) fn define(&self, registry: &Registry, clock: &Arc<CoarseClock>) {
        self.durations.define(registry, clock, &self.own_buckets);
        if self.cached() {
            self.durations.define_cache(registry, clock);
        }
        if self.responses.is_on() {
            self.durations.define_first_response(registry, &self.own_buckets);
        }
    }

    /// They take the place of others, which may still have requests and instances.
    pub(super) fn follow(&self, before: &Arc<ModelSeries>) {
        let mut all = before.before().clone();
        all.push(Arc::downgrade(before));
        all.retain(|other| other.strong_count() > 0);
        *self.before() = all;
    }

    fn before(&self) -> MutexGuard<'_, Vec<Weak<ModelSeries>>> {
        self.before.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is now of something, with what is left of loads before.
    pub(super) fn level(&self, of: impl Fn(&ModelSeries) -> &Level) -> i64 {
        let before: i64 = self.before().iter().filter_map(Weak::upgrade).map(|other| of(&other).get()).sum();
        of(self).get() + before
    }

    /// Whether it uses the response cache.
    pub(super) fn cached(&self) -> bool {
        self.cache.on.load(Ordering::Relaxed)
    }

    pub(super) fn set_cached(&self) {
        self.cache.on.store(true, Ordering::Relaxed);
    }

    /// Where the times of its batches go.
    pub(super) fn times(&self) -> RwLockReadGuard<'_, Times> {
        self.times.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set_times(&self, times: Times) {
        *self.times.write().unwrap_or_else(PoisonError::into_inner) = times;
    }

    /// Where its samples are logged.
    pub(super) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// This model's workers write `series`: it goes when the last such model does.
    pub(super) fn own(&self, series: &Arc<Series>) {
        let mut owned = self.owned.lock().unwrap_or_else(PoisonError::into_inner);
        owned.entry(Arc::as_ptr(&series.cell).addr()).or_insert_with(|| {
            series.cell.owners.fetch_add(1, Ordering::Relaxed);
            Arc::clone(series)
        });
    }

    /// The series that nobody owns any more when this model does not.
    pub(super) fn disown(&self) -> Vec<Arc<Series>> {
        let owned = std::mem::take(&mut *self.owned.lock().unwrap_or_else(PoisonError::into_inner));
        let last = |series: &Arc<Series>| series.cell.owners.fetch_sub(1, Ordering::Relaxed) == 1;
        owned.into_values().filter(last).collect()
    }

    /// Requests that wait now.
    pub fn waiting(&self) -> i64 {
        self.level(|series| &series.pending)
    }

    /// Whose series these are.
    pub fn model(&self) -> &ModelVersion {
        &self.model
    }

    /// Whose workers these are in TorchServe's words: a name and a version, which is a text there.
    pub fn call(&self, name: &str, version: &str) {
        let _ = self.called.set((name.to_owned(), version.to_owned()));
    }

    pub(super) fn called(&self) -> (&str, &str) {
        self.called.get().map_or((&self.model.name, &self.version), |(name, version)| (name, version))
    }

    /// The version as text.
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// The labels of this model's series of a built-in metric, the same in every view. Triton's names have the namespace and
    /// the `metric_tags`, TorchServe's the namespace and the host; the others have the full name, with its namespace.
    pub(super) fn labels<'a>(&'a self, builtin: Builtin, hostname: &'a str) -> Vec<(&'a str, &'a str)> {
        let (name, version) = (self.model.bare_name(), self.version());
        let tags = self.tags.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        match builtin {
            Builtin::TsRequests | Builtin::TsLatency | Builtin::TsQueueLatency => {
                let labels = [("model_name", name), ("model_version", version), ("hostname", hostname)];
                let namespace = self.model.namespace().map(|namespace| ("namespace", namespace));
                labels.into_iter().chain(namespace).collect()
            }
            Builtin::Batches
            | Builtin::Instances
            | Builtin::InstanceRestarts
            | Builtin::OutputMismatches
            | Builtin::SamplesDropped => {
                vec![("model", &*self.model.name), ("version", version)]
            }
            _ => [("model", name), ("version", version)].into_iter().chain(tags).collect(),
        }
    }

    pub(super) fn gpu_memory(&self) -> MutexGuard<'_, Vec<(u32, u64)>> {
        self.gpu_memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn batches(&self) -> MutexGuard<'_, BTreeMap<u64, BatchCell>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// HTTP statuses 100 to 599.
const STATUSES: usize = 500;

/// Answers by protocol, route and status, and refusals and failures by protocol, route and reason. Every cell exists from
/// the start, so that counting takes no lock.
#[derive(Debug)]
pub(super) struct RequestSeries {
    http: Vec<Count>,
    /// The sums over `http` by TorchServe's classes, which log lines need at each visit of their writer.
    classes: [Count; 3],
    grpc: Vec<Count>,
    failures: Vec<Count>,
    streams: [Level; Protocol::ALL.len()],
}

impl RequestSeries {
    pub(super) fn new() -> Self {
        let cells = |count: usize| std::iter::repeat_with(Count::default).take(count).collect();
        let routes = Route::ALL.len();
        Self {
            http: cells(routes * STATUSES),
            classes: Default::default(),
            grpc: cells(routes * GRPC_CODES.len()),
            failures: cells(Protocol::ALL.len() * routes * Reason::ALL.len()),
            streams: Default::default(),
        }
    }

    /// Counts one answer. A status that no protocol has counts as the last one that it has.
    pub(super) fn add(&self, protocol: Protocol, route: Route, outcome: Outcome) {
        let (cells, codes, code) = match protocol {
            Protocol::Http => (&self.http, STATUSES, usize::from(outcome.code.saturating_sub(100))),
            Protocol::Grpc => (&self.grpc, GRPC_CODES.len(), usize::from(outcome.code)),
        };
        if let Some(cell) = cells.get(route.index() * codes + code.min(codes - 1)) {
            cell.add(1);
        }
        if protocol == Protocol::Http {
            let [fine, refused, failed] = &self.classes;
            let class = match outcome.code {
                200..=299 => fine,
                400..=499 => refused,
                _ => failed,
            };
            class.add(1);
        }
        if let Some(cell) = outcome.reason.and_then(|reason| self.failures.get(failure_index(protocol, route, reason)))
        {
            cell.add(1);
        }
    }

    /// The streams of a protocol that are open.
    pub(super) fn streams(&self, protocol: Protocol) -> &Level {
        let [http, grpc] = &self.streams;
        match protocol {
            Protocol::Http => http,
            Protocol::Grpc => grpc,
        }
    }

    /// HTTP answers by TorchServe's classes: 200 to 299, 400 to 499, all others.
    pub(super) fn http_classes(&self) -> [u64; 3] {
        self.classes.each_ref().map(Count::get)
    }

    /// Calls `each` with protocol, route, status and count of every series: those counted, and success of `infer`, which
    /// begins at 0 so that a rate over its first requests is right.
    pub(super) fn for_each_answer(&self, mut each: impl FnMut(Protocol, Route, &str, u64)) {
        for (route, cells) in Route::ALL.into_iter().zip(self.http.chunks(STATUSES)) {
            for (status, cell) in (100u16..).zip(cells) {
                let count = cell.get();
                if count > 0 || (route == Route::Infer && status == 200) {
                    each(Protocol::Http, route, &status.to_string(), count);
                }
            }
        }
        for (route, cells) in Route::ALL.into_iter().zip(self.grpc.chunks(GRPC_CODES.len())) {
            for (code, cell) in GRPC_CODES.into_iter().zip(cells) {
                let count = cell.get();
                if count > 0 || (route == Route::Infer && code == "OK") {
                    each(Protocol::Grpc, route, code, count);
                }
            }
        }
    }

    /// Calls `each` with every series of refusals and failures: those counted, and all reasons of `infer`.
    pub(super) fn for_each_failure(&self, mut each: impl FnMut(Protocol, Route, Reason, u64)) {
        for protocol in Protocol::ALL {
            for route in Route::ALL {
                for reason in Reason::ALL {
                    let cell = self.failures.get(failure_index(protocol, route, reason));
                    let count = cell.map_or(0, Count::get);
                    if count > 0 || route == Route::Infer {
                        each(protocol, route, reason, count);
                    }
                }
            }
        }
    }
}

fn failure_index(protocol: Protocol, route: Route, reason: Reason) -> usize {
    (protocol.index() * Route::ALL.len() + route.index()) * Reason::ALL.len() + reason as usize
}
