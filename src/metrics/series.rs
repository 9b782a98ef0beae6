//! The cells of one loaded model version, and the cells of the server's requests.
//!
//! Each number is stored once, in nanoseconds or as an exact count; all metrics and the statistics
//! extension are rendered from it. Only `metrics::record` writes here, within a
//! [transaction](super::transaction). Recording takes no lock except for batch sizes and exemplars.
//! Views read copies of the cells that a snapshot has made.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use pharos_base::error::Reason;
use pharos_base::id::ModelVersion;
use pharos_base::timeline::SendReason;

use super::atomic::{Count, Level};
use super::catalog::{
    ADAPTER_LABEL, ADAPTER_STATE_LABEL, ENGINE_ADAPTER_REQUESTS, ENGINE_ADAPTER_SLOTS,
    ENGINE_CACHE_TOKENS, ENGINE_CACHE_USAGE, ENGINE_WAITING,
};
use super::counts::ModelCounts;
use super::durations::Durations;
use super::family::{Registry, Series};
use super::journal::{Journal, Line};
use super::labels::{Failure, GRPC_CODES, InstanceState, Outcome, Protocol, Route};
use super::objectives::{Fault, Objectives};
use super::reading::Details;
use super::responses::ResponseCells;
use super::source::{HttpClass, LabelSet};
use super::streams::StreamCells;
use super::succession::{Current, Succession};
use super::summary::CoarseClock;
use super::tenants::{ByTenant, Tenants};
use super::tokens::TokenCells;
use super::transaction::{Transaction, Transactions};

/// The costs of the executions of one batch size, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BatchCell {
    pub(super) count: u64,
    pub(super) compute_input_ns: u64,
    pub(super) compute_infer_ns: u64,
    pub(super) compute_output_ns: u64,
}

/// The cells of one loaded model version, all at 0 at first.
#[derive(Debug, Default)]
pub(super) struct ModelCells {
    pub(super) counts: ModelCounts,
    pub(super) failures: [Count; Failure::ALL.len()],
    pub(super) failure_ns: Count,
    pub(super) last_inference_ms: Count,
    pub(super) responses: ResponseCells,
    pub(super) streams: StreamCells,
    pub(super) tokens: TokenCells,
    pub(super) pending: Level,
    pub(super) instances: [Level; InstanceState::ALL.len()],
    /// Bytes by which loading increased the resident memory of all instances' processes.
    pub(super) memory: Count,
    /// Bytes that the instances have registered with GPU drivers (pinned memory).
    pub(super) pinned: Count,
    /// Bytes that the instances held on GPUs after loading, by the GPU's number.
    gpu_memory: Mutex<Vec<(u32, u64)>>,
    /// By total batch size. The lock is held once for each execution, for a few additions.
    batches: Mutex<BTreeMap<u64, BatchCell>>,
    pub(super) durations: Durations,
    /// The service level objectives that cover the model.
    pub(super) objectives: Objectives,
    pub(super) tenants: ByTenant,
    pub(super) sent: [Count; SendReason::ALL.len()],
}

impl ModelCells {
    /// Returns the values of this moment. `distributions` are the requested details of
    /// distributions; `None` leaves these out.
    fn copy(&self, distributions: Option<Details>) -> Self {
        let (streams, durations) = distributions
            .map(|details| (self.streams.copy(details), self.durations.copy(details)))
            .unwrap_or_else(|| (self.streams.copy_counts(), Durations::default()));
        Self {
            counts: self.counts.clone(),
            failures: self.failures.clone(),
            failure_ns: self.failure_ns.clone(),
            last_inference_ms: self.last_inference_ms.clone(),
            responses: self.responses.clone(),
            streams,
            tokens: self.tokens.copy(distributions),
            pending: self.pending.clone(),
            instances: self.instances.clone(),
            memory: self.memory.clone(),
            pinned: self.pinned.clone(),
            gpu_memory: Mutex::new(self.gpu_memory().clone()),
            batches: Mutex::new(self.batches().clone()),
            durations,
            objectives: self.objectives.clone(),
            tenants: self.tenants.clone(),
            sent: self.sent.clone(),
        }
    }

    /// Adds the levels of an earlier load, which still has requests or instances.
    fn add_levels(&self, earlier: &ModelCells) {
        self.pending.add(earlier.pending.get());
        for (level, more) in self.instances.iter().zip(&earlier.instances) {
            level.add(more.get());
        }
    }

    pub(super) fn gpu_memory(&self) -> MutexGuard<'_, Vec<(u32, u64)>> {
        self.gpu_memory.lock()
    }

    pub(super) fn batches(&self) -> MutexGuard<'_, BTreeMap<u64, BatchCell>> {
        self.batches.lock()
    }
}

/// A model version and the values of its cells at one moment. Levels include the remains of earlier
/// loads.
#[derive(Debug)]
pub(super) struct ModelReading {
    pub(super) series: Arc<ModelSeries>,
    pub(super) cells: ModelCells,
    /// Of the engines of a model that generates text.
    engines: EngineLevels,
}

impl ModelReading {
    /// Copies the cells, as [`ModelCells::copy`]. Call it within a
    /// [snapshot](Transactions::snapshot).
    pub(super) fn copy(series: Arc<ModelSeries>, distributions: Option<Details>) -> Self {
        let cells = series.cells.copy(distributions);
        for earlier in series.succession.predecessors() {
            cells.add_levels(&earlier.cells);
        }
        let engines =
            if cells.tokens.is_on() { series.engine_levels() } else { EngineLevels::default() };
        Self { series, cells, engines }
    }

    /// Returns the number of requests that wait in the queue of the server or in an engine.
    pub(super) fn queued(&self) -> f64 {
        self.cells.pending.get() as f64 + self.engines.waiting().unwrap_or(0.0)
    }
}

/// All series of one loaded model version. They start at 0 with the load and end with the unload.
#[derive(Debug)]
pub struct ModelSeries {
    model: ModelVersion,
    version: String,
    tags: Vec<(String, String)>,
    pub(super) cells: ModelCells,
    /// Whether the model uses the response cache; other models have no such series.
    cached: AtomicBool,
    /// The series of earlier loads that still have requests or instances, and the series of the
    /// load that has replaced this one.
    succession: Succession<ModelSeries>,
    /// The number of requests that [`ModelSeries::take_requested`] has returned.
    taken: AtomicU64,
    /// The model's own buckets, by metric name.
    pub(super) own_buckets: Vec<(String, Vec<f64>)>,
    owned: Mutex<Owned>,
    /// These series, for events that are postponed.
    this: Weak<ModelSeries>,
    transactions: Arc<Transactions>,
    /// Replaced when the definition of the metrics changes; read once for each batch.
    times: RwLock<Times>,
    journal: Arc<Journal>,
    /// The name and version that clients use for it.
    alias: OnceLock<(String, String)>,
}

/// The series that a model's workers write.
#[derive(Debug, Default)]
struct Owned {
    /// By the address of their cells.
    series: HashMap<usize, Arc<Series>>,
    /// Whether the model was unloaded: it owns no series from then on.
    has_ended: bool,
}

/// The destinations of the times of executed batches besides the cells; `None` where the definition
/// omits them.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// The gauges of the host, which have no label for the model.
    pub(super) queue: Option<Arc<Series>>,
    pub(super) worker_thread: Option<Arc<Series>>,
    /// The line for each request's duration; see `success_ns`.
    pub(super) latency: Option<Arc<Line>>,
    /// The line for each request's time in the queue; see `queue_ns`.
    pub(super) queue_latency: Option<Arc<Line>>,
}

/// The gauges of the engines that run a language model, of all of its instances.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineLevels {
    waiting: f64,
    waiting_engines: u32,
    cache_usage: f64,
    cache_engines: u32,
    cache_tokens: Option<f64>,
}

impl EngineLevels {
    /// Adds the requests that wait in an engine.
    pub fn add_waiting(&mut self, requests: f64) {
        self.waiting += requests;
        self.waiting_engines += 1;
    }

    /// Adds the used share of the KV cache of an engine.
    pub fn add_cache_usage(&mut self, share: f64) {
        self.cache_usage += share;
        self.cache_engines += 1;
    }

    /// Adds the tokens for which the KV cache of an engine has room.
    pub fn add_cache_tokens(&mut self, tokens: f64) {
        *self.cache_tokens.get_or_insert_default() += tokens;
    }

    /// Adds the engines of another version.
    pub fn add(&mut self, other: Self) {
        self.waiting += other.waiting;
        self.waiting_engines += other.waiting_engines;
        self.cache_usage += other.cache_usage;
        self.cache_engines += other.cache_engines;
        other.cache_tokens.into_iter().for_each(|tokens| self.add_cache_tokens(tokens));
    }

    /// Returns the requests that wait in all engines; `None` if no engine reports them.
    pub fn waiting(&self) -> Option<f64> {
        (self.waiting_engines > 0).then_some(self.waiting)
    }

    /// Returns the mean of the used shares of the KV caches; `None` if no engine reports one.
    pub fn cache_usage(&self) -> Option<f64> {
        (self.cache_engines > 0).then(|| self.cache_usage / f64::from(self.cache_engines))
    }

    /// Returns the tokens for which the KV caches have room; `None` if no engine reports them.
    pub fn cache_tokens(&self) -> Option<f64> {
        self.cache_tokens
    }
}

/// The adapters (LoRA) of the requests in the engines of a model, of all of its instances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdaptersInUse {
    /// The names of those whose requests run.
    pub running: BTreeSet<String>,
    /// The names of those whose requests wait in an engine. An adapter may be in both.
    pub waiting: BTreeSet<String>,
    /// The adapters whose requests the engines compute in one step, together.
    pub slots: u64,
}

impl ModelSeries {
    /// Creates the series with all cells at 0. `tags` are the `metric_tags` of the configuration.
    /// Each becomes a label `_KEY`, with invalid characters replaced by `_`; of equal names the
    /// first is kept. Prometheus reserves names that begin with `__`.
    pub(super) fn new(
        model: &ModelVersion,
        tags: &[(String, String)],
        own_buckets: Vec<(String, Vec<f64>)>,
        journal: Arc<Journal>,
        tenants: Option<&Tenants>,
        transactions: Arc<Transactions>,
    ) -> Arc<Self> {
        let mut labels: Vec<(String, String)> = Vec::with_capacity(tags.len());
        for (key, value) in tags {
            let name: String =
                key.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
            let name = format!("_{}", name.trim_start_matches('_'));
            if !labels.iter().any(|(other, _)| *other == name) {
                labels.push((name, value.clone()));
            }
        }
        let cells = ModelCells { tenants: ByTenant::new(tenants), ..ModelCells::default() };
        Arc::new_cyclic(|this| Self {
            model: model.clone(),
            version: model.version.to_string(),
            tags: labels,
            cells,
            cached: AtomicBool::default(),
            succession: Succession::default(),
            taken: AtomicU64::default(),
            own_buckets,
            owned: Mutex::default(),
            this: Weak::clone(this),
            transactions,
            times: RwLock::default(),
            journal,
            alias: OnceLock::new(),
        })
    }

    /// Begins a transaction that further events of this thread are part of: readings see all of
    /// them or none.
    ///
    /// As [`Transactions::begin`], it must end before the thread waits for another one.
    pub fn begin(&self) -> Transaction<'_> {
        self.transactions.begin()
    }

    /// Applies an event to the series that views show: the series of the latest load that has
    /// replaced this one, or these.
    pub(super) fn record(&self, event: impl FnOnce(&ModelSeries) + Send + 'static) {
        self.record_here(move |series| event(&series.current()));
    }

    /// Applies an event to these series.
    pub(super) fn record_here(&self, event: impl FnOnce(&ModelSeries) + Send + 'static) {
        let transaction = self.transactions.begin();
        if !transaction.is_postponed() {
            event(self);
        } else if let Some(this) = self.this.upgrade() {
            transaction.postpone(move || event(&this));
        }
    }

    /// Calls `copy` while no event changes a cell, and returns its result.
    pub(super) fn snapshot<T>(&self, copy: impl FnOnce() -> T) -> T {
        self.transactions.snapshot(copy)
    }

    /// Creates the distributions and objectives that the definition contains.
    pub(super) fn define(&self, registry: &Registry, clock: &Arc<CoarseClock>) {
        let cells = &self.cells;
        let slos = registry.catalog().slos();
        cells.objectives.define(&self.model.name, slos, cells.tokens.is_on());
        cells.durations.define(registry, clock, &self.own_buckets);
        if self.cached() {
            cells.durations.define_cache(registry, clock);
        }
        if cells.responses.is_on() {
            cells.durations.define_first_response(registry, &self.own_buckets);
            cells.streams.define(registry, &self.own_buckets);
        }
        if cells.tokens.is_on() {
            cells.tokens.define(registry, &self.own_buckets);
        }
    }

    /// Makes these series the successors of others, which may still have requests and instances:
    /// their later events count here.
    pub(super) fn replace(self: &Arc<Self>, before: &Arc<ModelSeries>) {
        Succession::replace(self, before, |series| &series.succession);
    }

    /// Returns the series that views show for this load: the series of the latest load that has
    /// replaced it, or these.
    pub(super) fn current(&self) -> Current<'_, ModelSeries> {
        self.succession.current(self)
    }

    /// Returns whether the model uses the response cache.
    pub(super) fn cached(&self) -> bool {
        self.cached.load(Ordering::Relaxed)
    }

    pub(super) fn set_cached(&self) {
        self.cached.store(true, Ordering::Relaxed);
    }

    /// Returns the destinations of the times of its batches.
    pub(super) fn times(&self) -> RwLockReadGuard<'_, Times> {
        self.times.read()
    }

    pub(super) fn set_times(&self, times: Times) {
        *self.times.write() = times;
    }

    /// Returns the journal of its samples.
    pub(super) fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Registers that this model's workers write `series`. The series is removed with the last such
    /// model. Returns false if the model was unloaded.
    pub(super) fn add_owned(&self, series: &Arc<Series>) -> bool {
        let mut owned = self.owned();
        if owned.has_ended {
            return false;
        }
        owned.series.entry(Arc::as_ptr(&series.cell).addr()).or_insert_with(|| {
            series.cell.owners.fetch_add(1, Ordering::Relaxed);
            Arc::clone(series)
        });
        true
    }

    /// Returns the gauges that the engines of its instances have written.
    pub fn engine_levels(&self) -> EngineLevels {
        let mut levels = EngineLevels::default();
        for series in self.owned().series.values() {
            match series.spec().name.as_str() {
                ENGINE_WAITING => levels.add_waiting(series.value()),
                ENGINE_CACHE_USAGE => levels.add_cache_usage(series.value()),
                ENGINE_CACHE_TOKENS => levels.add_cache_tokens(series.value()),
                _ => {}
            }
        }
        levels
    }

    /// Returns the adapters that the engines of its instances have reported; `None` if no engine has
    /// adapters.
    pub fn adapters_in_use(&self) -> Option<AdaptersInUse> {
        let mut adapters = AdaptersInUse::default();
        for series in self.owned().series.values() {
            let label = |name: &str| {
                let at = series.spec().dimensions.iter().position(|label| label == name)?;
                series.labels().get(at)
            };
            match series.spec().name.as_str() {
                ENGINE_ADAPTER_SLOTS => adapters.slots += series.value() as u64,
                ENGINE_ADAPTER_REQUESTS if series.value() > 0.0 => {
                    let adapter = label(ADAPTER_LABEL);
                    let state = label(ADAPTER_STATE_LABEL);
                    let names = match state.map(String::as_str) {
                        Some("waiting") => &mut adapters.waiting,
                        _ => &mut adapters.running,
                    };
                    names.extend(adapter.cloned());
                }
                _ => {}
            }
        }
        (adapters.slots > 0).then_some(adapters)
    }

    /// Returns whether the model was unloaded. Its workers may still print lines.
    pub(super) fn has_ended(&self) -> bool {
        self.owned().has_ended
    }

    /// Releases those series that its workers wrote for which `gone` returns true. Returns those
    /// that no other model's workers write.
    pub(super) fn release(&self, gone: impl Fn(&Series) -> bool) -> Vec<Arc<Series>> {
        let mut released = Vec::new();
        self.owned().series.retain(|_, series| {
            let is_gone = gone(series);
            if is_gone {
                released.push(Arc::clone(series));
            }
            !is_gone
        });
        released.retain(Self::is_last_owner);
        released
    }

    /// Returns the series that its workers have written.
    pub(super) fn all_owned(&self) -> Vec<Arc<Series>> {
        self.owned().series.values().cloned().collect()
    }

    fn is_last_owner(series: &Arc<Series>) -> bool {
        series.cell.owners.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Releases the series that its workers wrote, because the model is unloaded. Returns those
    /// that no other model's workers write.
    pub(super) fn release_owned(&self) -> Vec<Arc<Series>> {
        let owned =
            std::mem::replace(&mut *self.owned(), Owned { has_ended: true, ..Owned::default() });
        owned.series.into_values().filter(Self::is_last_owner).collect()
    }

    fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock()
    }

    /// Returns the number of waiting requests of this load and the earlier ones.
    pub fn waiting(&self) -> i64 {
        let before: i64 =
            self.succession.predecessors().iter().map(|other| other.cells.pending.get()).sum();
        self.cells.pending.get() + before
    }

    /// Returns the number of requests so far.
    pub fn requested(&self) -> u64 {
        self.cells.counts.requests.get()
    }

    /// Returns the number of requests since the last call.
    pub fn take_requested(&self) -> u64 {
        let requested = self.requested();
        // Not a swap: a concurrent call may have returned more of them.
        requested.saturating_sub(self.taken.fetch_max(requested, Ordering::Relaxed))
    }

    /// Returns the number of successful requests, and the nanoseconds that they waited in the
    /// queue.
    pub fn queued(&self) -> (u64, u64) {
        (self.cells.counts.success_count.get(), self.cells.counts.queue_ns.get())
    }

    /// Returns the model version.
    pub fn model(&self) -> &ModelVersion {
        &self.model
    }

    /// Sets the name and version that clients use, if they differ from the repository's.
    pub fn set_alias(&self, name: &str, version: &str) {
        let _ = self.alias.set((name.to_owned(), version.to_owned()));
    }

    pub(super) fn alias(&self) -> (&str, &str) {
        self.alias
            .get()
            .map_or((self.model.name.full(), &*self.version), |(name, version)| (name, version))
    }

    /// Returns the version as text.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the labels of this model's series, the same in every view; see [`LabelSet`].
    pub(super) fn labels<'a>(
        &'a self,
        set: LabelSet,
        hostname: &'a str,
    ) -> Vec<(&'a str, &'a str)> {
        let version = self.version();
        let namespace = self.model.name.namespace().map(|namespace| ("namespace", namespace));
        let tags = self.tags.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        match set {
            LabelSet::Triton => {
                let labels = [("model", self.model.name.bare()), ("version", version)].into_iter();
                labels.chain(namespace).chain(tags).collect()
            }
            LabelSet::Tagged => [("model", self.model.name.full()), ("version", version)]
                .into_iter()
                .chain(tags)
                .collect(),
            LabelSet::Full => vec![("model", self.model.name.full()), ("version", version)],
            LabelSet::Alias => {
                let labels = [
                    ("model_name", self.model.name.bare()),
                    ("model_version", version),
                    ("hostname", hostname),
                ];
                labels.into_iter().chain(namespace).collect()
            }
        }
    }
}

/// The HTTP statuses, 100 to 599.
const LOWEST_STATUS: usize = 100;
const STATUSES: usize = 500;

/// Answers by protocol, route and status, and failures by protocol, route and reason. Every cell
/// exists from the start, so counting takes no lock.
#[derive(Debug)]
pub(super) struct RequestSeries {
    http: Vec<Count>,
    /// The sums over `http` by class. Log lines need them at each visit of the writer.
    classes: [Count; 3],
    grpc: Vec<Count>,
    failures: Vec<Count>,
    streams: [Level; Protocol::ALL.len()],
    journal: Arc<Journal>,
}

impl RequestSeries {
    pub(super) fn new(journal: Arc<Journal>) -> Self {
        let cells = |count: usize| std::iter::repeat_with(Count::default).take(count).collect();
        let routes = Route::ALL.len();
        Self {
            http: cells(routes * STATUSES),
            classes: Default::default(),
            grpc: cells(routes * GRPC_CODES.len()),
            failures: cells(Protocol::ALL.len() * routes * Reason::ALL.len()),
            streams: Default::default(),
            journal,
        }
    }

    /// Counts one answer. A status above the protocol's range counts as the highest one.
    pub(super) fn add(&self, protocol: Protocol, route: Route, outcome: Outcome) {
        let (cells, codes, code) = match protocol {
            Protocol::Http => {
                (&self.http, STATUSES, usize::from(outcome.code).saturating_sub(LOWEST_STATUS))
            }
            Protocol::Grpc => (&self.grpc, GRPC_CODES.len(), usize::from(outcome.code)),
        };
        if let Some(cell) = cells.get(route.index() * codes + code.min(codes - 1)) {
            cell.add(1);
        }
        if protocol == Protocol::Http {
            let class = match outcome.code {
                200..=299 => HttpClass::Success,
                400..=499 => HttpClass::ClientError,
                _ => HttpClass::Other,
            };
            self.classes[class as usize].add(1);
        }
        if let Some(cell) = outcome
            .reason
            .and_then(|reason| self.failures.get(failure_index(protocol, route, reason)))
        {
            cell.add(1);
        }
        self.journal.notify();
    }

    /// Returns the number of open streams of a protocol.
    pub(super) fn streams(&self, protocol: Protocol) -> &Level {
        let [http, grpc] = &self.streams;
        match protocol {
            Protocol::Http => http,
            Protocol::Grpc => grpc,
        }
    }

    /// Returns the values of this moment. Call it within a [snapshot](Transactions::snapshot).
    pub(super) fn copy(&self) -> RequestReading {
        let mut reading = RequestReading {
            answers: Vec::new(),
            failures: Vec::new(),
            classes: std::array::from_fn(|class| self.classes[class].get()),
            streams: std::array::from_fn(|protocol| self.streams[protocol].get()),
        };
        for (route, cells) in Route::ALL.into_iter().zip(self.http.chunks(STATUSES)) {
            for (code, cell) in cells.iter().enumerate() {
                reading.add_answers(Answers {
                    protocol: Protocol::Http,
                    route,
                    code,
                    count: cell.get(),
                });
            }
        }
        for (route, cells) in Route::ALL.into_iter().zip(self.grpc.chunks(GRPC_CODES.len())) {
            for (code, cell) in cells.iter().enumerate() {
                reading.add_answers(Answers {
                    protocol: Protocol::Grpc,
                    route,
                    code,
                    count: cell.get(),
                });
            }
        }
        for protocol in Protocol::ALL {
            for route in Route::ALL {
                for reason in Reason::ALL {
                    let count = self
                        .failures
                        .get(failure_index(protocol, route, reason))
                        .map_or(0, Count::get);
                    if count > 0 || route == Route::Infer {
                        reading.failures.push(Failures { protocol, route, reason, count });
                    }
                }
            }
        }
        reading
    }

    /// Returns the number of answered inference requests, except those without access, and of those
    /// that failed through the server's fault.
    pub(super) fn inferences(&self) -> (u64, u64) {
        let routes = || Route::ALL.into_iter().filter(|route| route.is_inference());
        let of_route = |cells: &[Count], codes: usize| -> u64 {
            let rows = routes()
                .filter_map(|route| cells.get(route.index() * codes..(route.index() + 1) * codes));
            rows.flatten().map(Count::get).sum()
        };
        let failed = |counts: fn(Reason) -> bool| -> u64 {
            let places = Protocol::ALL
                .into_iter()
                .flat_map(|protocol| routes().map(move |route| (protocol, route)));
            let cells = places.flat_map(|(protocol, route)| {
                let reasons = Reason::ALL.into_iter().filter(move |reason| counts(*reason));
                reasons.filter_map(move |reason| {
                    self.failures.get(failure_index(protocol, route, reason))
                })
            });
            cells.map(Count::get).sum()
        };
        let answered = of_route(&self.http, STATUSES) + of_route(&self.grpc, GRPC_CODES.len());
        let without_access =
            failed(|reason| matches!(reason, Reason::Restricted | Reason::Unauthenticated));
        (
            answered.saturating_sub(without_access),
            failed(|reason| Fault::from(reason) == Fault::Server),
        )
    }
}

/// The answers with one status.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answers {
    pub(super) protocol: Protocol,
    pub(super) route: Route,
    /// The position of the status among the statuses of its protocol.
    code: usize,
    pub(super) count: u64,
}

impl Answers {
    /// Returns the status.
    pub(super) fn code(self) -> Cow<'static, str> {
        match self.protocol {
            Protocol::Http => Cow::Owned((self.code + LOWEST_STATUS).to_string()),
            Protocol::Grpc => Cow::Borrowed(GRPC_CODES[self.code]),
        }
    }
}

/// The failures with one reason.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failures {
    pub(super) protocol: Protocol,
    pub(super) route: Route,
    pub(super) reason: Reason,
    pub(super) count: u64,
}

/// The values of [`RequestSeries`] at one moment.
#[derive(Debug)]
pub(super) struct RequestReading {
    /// Every status that was counted. Includes successful `infer` even at 0, so that a rate
    /// includes the first requests.
    pub(super) answers: Vec<Answers>,
    /// Every reason that was counted, and all reasons of `infer`.
    pub(super) failures: Vec<Failures>,
    classes: [u64; 3],
    streams: [i64; Protocol::ALL.len()],
}

impl RequestReading {
    fn add_answers(&mut self, answers: Answers) {
        let code = match answers.protocol {
            Protocol::Http => 200 - LOWEST_STATUS,
            // OK.
            Protocol::Grpc => 0,
        };
        if answers.count > 0 || (answers.route == Route::Infer && answers.code == code) {
            self.answers.push(answers);
        }
    }

    /// Returns the number of HTTP answers of a class.
    pub(super) fn http_class(&self, class: HttpClass) -> u64 {
        self.classes[class as usize]
    }

    /// Returns the number of open streams of a protocol.
    pub(super) fn streams(&self, protocol: Protocol) -> i64 {
        self.streams[protocol.index()]
    }
}

fn failure_index(protocol: Protocol, route: Route, reason: Reason) -> usize {
    (protocol.index() * Route::ALL.len() + route.index()) * Reason::ALL.len() + reason as usize
}
