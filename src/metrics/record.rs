//! One function for each event of the server: the only way to write the server's own metrics. Each
//! function updates the values of all views (metrics, statistics extension) for its event.
//!
//! The rules are Triton's for its statistics: each request of a batch is charged the compute
//! durations of the whole batch, an execution is counted once, and a request refused before the
//! queue only counts in [`request_answered`], not in the numbers of its model.
//!
//! The series of a load may have been replaced by the series of a reload while the load still
//! answers requests. Each function finds those that views show (`ModelSeries::record`). Levels
//! (pending requests, instances) and the properties of a load (its duration, memory and worker
//! series) stay with the load.
//!
//! Each function that changes several cells is a [transaction](super::transaction). A caller whose
//! event needs several functions begins one around them (`ModelSeries::begin`).

use std::sync::Arc;

use pharos_base::error::Reason;
use pharos_base::id::{TenantId, TraceId};
use pharos_base::timeline::{ComputeStamps, Instant, SendReason, Timeline};

use super::alias::{AliasCounts, Lines};
use super::builtin::Builtin;
use super::cache::Cache;
use super::catalog::STATE_BYTES;
use super::family::Series;
use super::journal::Line;
use super::labels::{
    Credentials, Failure, InstanceState, Listener, ModelChange, OnDemandUnload, Outcome, Protocol,
    RELOAD_RESULTS, Refused, Route, result,
};
use super::objectives::Fault;
use super::series::{ModelSeries, Times};
use super::tenants::Usage;
use super::token_budget::TokenBudget;

pub use super::labels::FinishReason;
pub use super::objectives::Failed;
pub use super::responses::ResponseKind;
pub use super::streams::StreamProgress;
pub use super::tokens::{EstimatedTokens, TokenCounts, TokenProgress};

/// Counts a predict request that was parsed and whose model was found. The model's checks or the
/// queue may still refuse it.
pub fn inference_requested(series: &ModelSeries) {
    let series = series.current();
    series.cells.counts.requests.add(1);
    series.journal().notify();
}

/// Counts such a request by its alias, if the server counts by alias.
pub fn alias_requested(cache: &Cache, alias: &AliasCounts) {
    alias.counts.requests.add(1);
    cache.journal().notify();
}

/// Counts a successful request by its alias.
///
/// Call once for each request, before its (last) response is sent.
pub fn alias_done(cache: &Cache, alias: &Arc<AliasCounts>, timeline: &Timeline) {
    let charged_ns = timeline.charged_ns();
    let queue_ns = timeline.queue_ns();
    cache.transactions().apply(alias, move |alias| {
        alias.counts.client_ns.add(charged_ns);
        alias.counts.client_queue_ns.add(queue_ns);
    });
    let Lines { latency, queue_latency } = alias.lines();
    let lines = [(latency, charged_ns), (queue_latency, queue_ns)];
    let lines = lines.iter().filter_map(|(line, ns)| line.as_ref().map(|line| (line, *ns as f64)));
    cache.journal().push_all(lines, "");
}

/// Counts a request that entered the queue (+1), or left it to be executed, rejected or cancelled
/// (-1).
pub fn request_pending(series: &ModelSeries, delta: i64) {
    series.cells.pending.add(delta);
}

/// Counts a successful request. `batch_size` is the request's own; 0 (the model does not batch)
/// counts as 1.
///
/// Call once for each request, before its response is sent.
pub fn inference_done(series: &ModelSeries, timeline: &Timeline, batch_size: u64) {
    let timeline = *timeline;
    series.record(move |series| {
        count_client(series, &timeline, batch_size);
        series.cells.objectives.succeeded(timeline.request_ns());
    });
}

/// Counts a request that succeeded after its client had left, like [`inference_done`]. For the
/// objectives of the model it is cancelled, or too late if the client's deadline has passed.
pub fn inference_abandoned(
    series: &ModelSeries,
    timeline: &Timeline,
    batch_size: u64,
    deadline: Option<Instant>,
) {
    let timeline = *timeline;
    let left = Failed::abandoned(deadline, timeline.request_end);
    series.record(move |series| {
        count_client(series, &timeline, batch_size);
        series.cells.objectives.failed(left.fault, timeline.request_ns());
    });
}

fn count_client(series: &ModelSeries, timeline: &Timeline, batch_size: u64) {
    series.cells.counts.client_ns.add(timeline.request_ns());
    series.cells.counts.client_queue_ns.add(timeline.queue_ns());
    count_success(series, timeline, batch_size);
}

/// Counts a successful warm-up request, as Triton does: like a request of a client, but neither for
/// the objectives of the model nor for the metrics by alias (`ts_*`), which do not count it as a
/// request.
pub fn warmup_done(series: &ModelSeries, timeline: &Timeline, batch_size: u64) {
    let timeline = *timeline;
    series.record(move |series| count_success(series, &timeline, batch_size));
}

fn count_success(series: &ModelSeries, timeline: &Timeline, batch_size: u64) {
    let counts = &series.cells.counts;
    counts.success_count.add(1);
    counts.success_ns.add(timeline.request_ns());
    counts.inference_count.add(batch_size.max(1));
    count_execution(series, timeline);
    series.cells.durations.observe(timeline);
    series.journal().notify();
}

/// Counts the queue and compute durations of one execution of a request.
fn count_execution(series: &ModelSeries, timeline: &Timeline) {
    let (input, infer, output) = timeline.compute.durations_ns();
    let counts = &series.cells.counts;
    counts.queue_ns.add(timeline.queue_ns());
    counts.compute_input_ns.add(input);
    counts.compute_infer_ns.add(infer);
    counts.compute_output_ns.add(output);
}

/// Adds the queue and compute durations of one execution of a request of an iterative sequence that
/// will be executed again, to the counters and to the distributions. The request itself is counted
/// when it is done.
pub fn inference_rescheduled(series: &ModelSeries, timeline: &Timeline) {
    let timeline = *timeline;
    series.record(move |series| {
        count_execution(series, &timeline);
        series.cells.counts.client_queue_ns.add(timeline.queue_ns());
        series.cells.durations.observe_execution(&timeline);
        let line = series.times().queue_latency.clone();
        series.journal().push_all(line.iter().map(|line| (line, timeline.queue_ns() as f64)), "");
        series.journal().notify();
    });
}

/// Counts a request that the response cache answered; the look-up took `lookup_ns`. All compute
/// stamps of the timeline are the start of the look-up. The request does not count as an inference.
///
/// Call once for each request, before its response is sent.
pub fn cache_hit(series: &ModelSeries, timeline: &Timeline, lookup_ns: u64) {
    let timeline = *timeline;
    series.record(move |series| {
        let counts = &series.cells.counts;
        counts.success_count.add(1);
        counts.success_ns.add(timeline.request_ns());
        counts.queue_ns.add(timeline.queue_ns());
        counts.client_ns.add(timeline.request_ns());
        counts.client_queue_ns.add(timeline.queue_ns());
        counts.cache_hits.add(1);
        counts.cache_hit_ns.add(lookup_ns);
        series.cells.durations.observe_hit(&timeline, lookup_ns);
        series.cells.objectives.succeeded(timeline.request_ns());
        series.journal().push_all(latency_lines(&series.times(), &timeline), "");
        series.journal().notify();
    });
}

/// Counts a successful request for which the response cache had no response. The insertion is added
/// to the request's own time, which has the look-up already. (Triton adds the look-up once more.)
///
/// Call before the response is sent. The request's timeline also holds the time of the insertion,
/// for the log lines of [`batch_times`], [`request_times`] and [`ensemble_done`].
pub fn cache_miss(series: &ModelSeries, times: MissTimes) {
    series.record(move |series| {
        let both = times.lookup_ns.saturating_add(times.insertion_ns);
        let counts = &series.cells.counts;
        counts.success_ns.add(times.insertion_ns);
        counts.client_ns.add(times.insertion_ns);
        counts.cache_misses.add(1);
        counts.cache_miss_ns.add(both);
        series.cells.durations.observe_miss(both);
        series.journal().notify();
    });
}

/// The nanoseconds that the response cache took for a request whose response it did not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MissTimes {
    /// The look-up.
    pub lookup_ns: u64,
    /// The insertion of the response.
    pub insertion_ns: u64,
}

/// Adds exemplars with the trace of a successful request to its latencies. `now_ms` is the wall
/// clock.
pub fn inference_traced(series: &ModelSeries, timeline: &Timeline, trace: TraceId, now_ms: u64) {
    let timeline = *timeline;
    series.record(move |series| series.cells.durations.exemplify(&timeline, trace, now_ms));
}

/// Counts response `number` (from 0) of a decoupled model to a request. `infer_ns` is the time of
/// execution: since the start of the batch in the worker for the first response, otherwise since
/// the previous response. `output_ns` is the time of its outputs.
///
/// Call before the response is sent.
pub fn response_done(
    series: &ModelSeries,
    number: u64,
    kind: ResponseKind,
    infer_ns: u64,
    output_ns: u64,
) {
    series.record(move |series| series.cells.responses.add(number, kind, infer_ns, output_ns));
}

/// Records the first response to a request, `ns` after the request's start.
pub fn first_response(series: &ModelSeries, ns: u64) {
    series.record(move |series| series.cells.durations.observe_first_response(ns));
}

/// Counts a batch that was sent to an instance.
pub fn batch_sent(series: &ModelSeries, reason: SendReason) {
    if let Some(cell) = series.current().cells.sent.get(reason.index()) {
        cell.add(1);
    }
}

/// Counts a stream of requests or responses that was opened (+1) or closed (-1).
pub fn stream_open(cache: &Cache, protocol: Protocol, delta: i64) {
    cache.requests().streams(protocol).add(delta);
}

/// Records the times of an executed batch: the gauge `QueueTime` for each successful request, in
/// whole milliseconds, and `WorkerThreadTime` for `dispatch_ns`, the time that the batch spent on
/// the way to the worker and back, in milliseconds with three decimals. Logs the latencies of the
/// requests.
///
/// Call once for each batch, before its responses are sent, with the timelines passed to
/// [`inference_done`] plus what [`cache_miss`] added. The sums over the log lines then equal the
/// cells.
pub fn batch_times<'a>(
    series: &ModelSeries,
    timelines: impl Iterator<Item = &'a Timeline> + Clone,
    dispatch_ns: u64,
) {
    times_of(series, timelines, Some(dispatch_ns));
}

/// Records the times of one request of a decoupled model, whose responses end before its batch
/// does. Call it once for such a request, and [`batch_times`] with the others.
pub fn request_times(series: &ModelSeries, timeline: &Timeline) {
    times_of(series, std::iter::once(timeline), None);
}

fn times_of<'a>(
    series: &ModelSeries,
    timelines: impl Iterator<Item = &'a Timeline> + Clone,
    dispatch_ns: Option<u64>,
) {
    let series = series.current();
    let times = series.times();
    let queue_ms = |timeline: &Timeline| (timeline.queue_ns() / 1_000_000) as f64;
    let dispatch_ms = dispatch_ns.map(|ns| (ns / 1000) as f64 / 1000.0);
    // A gauge accepts every value.
    if let (Some(gauge), Some(last)) = (&times.queue, timelines.clone().last()) {
        let _ = gauge.add_or_update_unlogged(queue_ms(last));
    }
    if let (Some(gauge), Some(dispatch_ms)) = (&times.worker_thread, dispatch_ms) {
        let _ = gauge.add_or_update_unlogged(dispatch_ms);
    }
    let queue = times.queue.as_ref().and_then(|gauge| gauge.line());
    let of_batch = times.worker_thread.as_ref().and_then(|gauge| gauge.line()).zip(dispatch_ms);
    series.journal().push_all(
        timelines
            .flat_map(|timeline| {
                queue
                    .map(|line| (line, queue_ms(timeline)))
                    .into_iter()
                    .chain(latency_lines(&times, timeline))
            })
            .chain(of_batch),
        "",
    );
}

/// Returns the log lines for one request's share of the summed durations.
fn latency_lines<'a>(
    times: &'a Times,
    timeline: &Timeline,
) -> impl Iterator<Item = (&'a Arc<Line>, f64)> + use<'a> {
    let lines = [
        times.latency.as_ref().map(|line| (line, timeline.charged_ns() as f64)),
        times.queue_latency.as_ref().map(|line| (line, timeline.queue_ns() as f64)),
    ];
    lines.into_iter().flatten()
}

/// The time by which an event may be recorded after later events: of other threads, or during a
/// snapshot. A wall clock that is set back by more takes effect.
const LATE_MS: u64 = 1000;

/// Counts the execution of a batch, successful or not. `total_batch` is the sum of the requests'
/// batch sizes (0 counts as 1), `now_ms` the wall clock in milliseconds since 1970.
pub fn batch_executed(
    series: &ModelSeries,
    total_batch: u64,
    compute: &ComputeStamps,
    now_ms: u64,
) {
    let (input, infer, output) = compute.durations_ns();
    series.record(move |series| {
        {
            let mut batches = series.cells.batches();
            let cell = batches.entry(total_batch.max(1)).or_default();
            cell.count += 1;
            cell.compute_input_ns = cell.compute_input_ns.wrapping_add(input);
            cell.compute_infer_ns = cell.compute_infer_ns.wrapping_add(infer);
            cell.compute_output_ns = cell.compute_output_ns.wrapping_add(output);
        }
        series.cells.counts.execution_count.add(1);
        series.cells.last_inference_ms.set_unless_late(now_ms, LATE_MS);
        series.journal().notify();
    });
}

/// Counts a request that failed after entering the queue; `request_ns` is the time since its start.
/// `error` is its reason, or the whole error where the model may have refused the request as
/// invalid.
///
/// Ignores reasons that only occur before the queue ([`Failure::of`] returns `None`), so callers
/// may pass every error of an inference. The objectives of the model count these as well.
pub fn inference_failed(series: &ModelSeries, error: impl Into<Failed>, request_ns: u64) {
    let Failed { reason, fault } = error.into();
    series.record(move |series| {
        series.cells.objectives.failed(fault, request_ns);
        count_failure(series, reason, request_ns);
    });
}

/// Counts a failed warm-up request: as [`inference_failed`], but not for the objectives of the
/// model.
pub fn warmup_failed(series: &ModelSeries, reason: Reason, request_ns: u64) {
    series.record(move |series| count_failure(series, reason, request_ns));
}

fn count_failure(series: &ModelSeries, reason: Reason, request_ns: u64) {
    let Some(failure) = Failure::of(reason) else { return };
    if let Some(cell) = series.cells.failures.get(failure.index()) {
        cell.add(1);
        series.cells.failure_ns.add(request_ns);
        series.journal().notify();
    }
}

/// Counts a request that was refused before it entered the queue: it is in no number of the model
/// except the numbers of its objectives and of the refusals of a full queue.
pub fn inference_refused(series: &ModelSeries, reason: Reason) {
    series.record(move |series| {
        if reason == Reason::QueueFull {
            series.cells.counts.queue_refusals.add(1);
        }
        series.cells.objectives.failed(Fault::from(reason), 0);
    });
}

/// Creates the series of an ensemble with steps of these models.
pub fn ensemble_loaded<'a>(
    cache: &Cache,
    series: &ModelSeries,
    steps: impl Iterator<Item = &'a str>,
) {
    for (number, member) in steps.enumerate() {
        let _ = step_series(cache, series, number, member);
    }
    let _ = overhead_series(cache, series);
}

/// Records a completed step of an ensemble: its number, the model `member` that it ran, and its
/// duration `ns`.
pub fn ensemble_step(cache: &Cache, series: &ModelSeries, number: usize, member: &str, ns: u64) {
    if let Some(histogram) = step_series(cache, series, number, member) {
        observe(Builtin::EnsembleStep, &histogram, ns);
    }
}

/// Counts a successful request of an ensemble. The compute stamps of its timeline span the sum of
/// all steps.
///
/// Call once for each request, before its response is sent.
pub fn ensemble_done(cache: &Cache, series: &ModelSeries, timeline: &Timeline, done: EnsembleDone) {
    let _transaction = series.begin();
    batch_executed(series, done.batch_size, &timeline.compute, done.now_ms);
    inference_done(series, timeline, done.batch_size);
    let current = series.current();
    current.journal().push_all(latency_lines(&current.times(), timeline), "");
    if let Some(histogram) = overhead_series(cache, series) {
        observe(Builtin::EnsembleOverhead, &histogram, done.overhead_ns);
    }
}

/// Records a duration in the unit of the metric.
fn observe(metric: Builtin, histogram: &Series, ns: u64) {
    if let Some(unit) = metric.unit() {
        // A histogram accepts every duration.
        let _ = histogram.add_or_update(unit.of_ns(ns));
    }
}

/// Arguments of [`ensemble_done`] besides the timeline.
#[derive(Clone, Copy, Debug)]
pub struct EnsembleDone {
    /// The request's batch size.
    pub batch_size: u64,
    /// Nanoseconds of the request in which no step was running.
    pub overhead_ns: u64,
    /// The wall clock in milliseconds since 1970.
    pub now_ms: u64,
}

/// Counts a failed request of an ensemble, `request_ns` after its start. As in Triton, the reason
/// is OTHER unless it was cancelled; the member model has counted the actual reason.
pub fn ensemble_failed(series: &ModelSeries, error: impl Into<Failed>, request_ns: u64) {
    let Failed { reason, fault } = error.into();
    let reason = if reason == Reason::Cancelled { reason } else { Reason::Internal };
    inference_failed(series, Failed { reason, fault }, request_ns);
}

fn step_series(
    cache: &Cache,
    series: &ModelSeries,
    number: usize,
    member: &str,
) -> Option<Arc<Series>> {
    let labels = [&*series.model().name, series.version(), &number.to_string(), member];
    let histogram = cache.histogram(Builtin::EnsembleStep.name(), &labels).ok()?;
    cache.own(series, &histogram);
    Some(histogram)
}

fn overhead_series(cache: &Cache, series: &ModelSeries) -> Option<Arc<Series>> {
    let labels = [&*series.model().name, series.version()];
    let histogram = cache.histogram(Builtin::EnsembleOverhead.name(), &labels).ok()?;
    cache.own(series, &histogram);
    Some(histogram)
}

/// Records the duration of a model's load in seconds, from the decision to load it to its first
/// ready instance.
pub fn model_load_duration(series: &ModelSeries, seconds: f64) {
    series.cells.counts.load_ns.set((seconds * 1e9).round() as u64);
}

/// Counts a change of a model version, successful or not.
pub fn model_changed(cache: &Cache, change: ModelChange, succeeded: bool) {
    cache.count(Builtin::ModelChanges, &[change.as_str(), result(succeeded)], 1.0);
}

/// Counts a load of a model that a request needed, successful or not.
pub fn on_demand_loaded(cache: &Cache, model: &str, succeeded: bool) {
    cache.count(Builtin::OnDemandLoads, &[model, result(succeeded)], 1.0);
}

/// Counts a load that did not begin because the models would use more memory than allowed.
pub fn on_demand_refused(cache: &Cache, model: &str) {
    cache.count(Builtin::OnDemandLoads, &[model, "no_memory"], 1.0);
}

/// Counts requests that found their model loaded, of a model that is loaded on demand.
pub fn on_demand_hits(cache: &Cache, model: &str, requests: u64) {
    cache.count(Builtin::OnDemandHits, &[model], requests as f64);
}

/// Counts an unload of a model that is loaded on demand.
pub fn on_demand_unloaded(cache: &Cache, model: &str, reason: OnDemandUnload) {
    cache.count(Builtin::OnDemandUnloads, &[model, reason.as_str()], 1.0);
}

/// Records how long a request waited for its model to be loaded, `ns` nanoseconds.
pub fn on_demand_waited(cache: &Cache, model: &str, ns: u64) {
    if let Ok(histogram) = cache.histogram(Builtin::OnDemandWait.name(), &[model]) {
        observe(Builtin::OnDemandWait, &histogram, ns);
    }
}

/// Records the memory that loading a model took: `bytes` of all instances' processes together,
/// `pinned` bytes registered with device drivers, and the bytes on each GPU, by the GPU's number.
pub fn memory_usage(series: &ModelSeries, bytes: u64, pinned: u64, gpus: Vec<(u32, u64)>) {
    series.cells.memory.set(bytes);
    series.cells.pinned.set(pinned);
    *series.cells.gpu_memory() = gpus;
}

/// Counts the answer to a request of any kind, including malformed and unknown ones. Call exactly
/// once for each request.
pub fn request_answered(cache: &Cache, protocol: Protocol, route: Route, outcome: Outcome) {
    cache
        .transactions()
        .apply(cache.requests(), move |requests| requests.add(protocol, route, outcome));
}

/// Records a state change of an instance: `from` is `None` for a new instance, `to` for a removed
/// one.
pub fn instance_state(
    series: &ModelSeries,
    from: Option<InstanceState>,
    to: Option<InstanceState>,
) {
    series.record_here(move |series| {
        for (state, delta) in [(from, -1), (to, 1)] {
            if let Some(cell) = state.and_then(|state| series.cells.instances.get(state.index())) {
                cell.add(delta);
            }
        }
    });
}

/// Counts a restart of a lost instance.
pub fn instance_restarted(series: &ModelSeries) {
    let series = series.current();
    series.cells.counts.restarts.add(1);
    series.journal().notify();
}

/// Counts an output that was passed on although its datatype or batch dimension differs from the
/// model's configuration.
pub fn output_mismatched(series: &ModelSeries) {
    let series = series.current();
    series.cells.counts.output_mismatches.add(1);
    series.journal().notify();
}

/// Counts metric samples of the model's workers that were dropped or refused.
pub fn samples_dropped(series: &ModelSeries, count: u64) {
    let series = series.current();
    series.cells.counts.samples_dropped.add(count);
    series.journal().notify();
}

/// Counts lost lines of the server's log at a destination; `count` 0 creates the series.
pub fn log_lines_lost(cache: &Cache, file: &str, count: u64) {
    cache.count(Builtin::LogLinesLost, &[file], count as f64);
}

#[cfg(test)]
mod iterative_tests;

/// Charges a successful request to its tenant. Call it where the request counts as done or as a hit
/// of the response cache.
pub fn tenant_served(series: &ModelSeries, tenant: TenantId, timeline: &Timeline) {
    let timeline = *timeline;
    charge(series, tenant, move |usage| {
        executed(usage, &timeline);
        usage.succeeded();
    });
}

/// Charges one execution of a request that will be executed again.
pub fn tenant_rescheduled(series: &ModelSeries, tenant: TenantId, timeline: &Timeline) {
    let timeline = *timeline;
    charge(series, tenant, move |usage| executed(usage, &timeline));
}

fn executed(usage: &Usage, timeline: &Timeline) {
    let (input, infer, output) = timeline.compute.durations_ns();
    usage.executed(timeline.queue_ns(), input.saturating_add(infer).saturating_add(output));
}

/// Counts a failed request of a tenant, if the model counts it as failed.
pub fn tenant_failed(series: &ModelSeries, tenant: TenantId, reason: Reason) {
    charge(series, tenant, move |usage| {
        if Failure::of(reason).is_some() {
            usage.failed();
        }
    });
}

/// Changes what a tenant has used of a model; does nothing if tenants are not distinguished.
#[inline]
fn charge(series: &ModelSeries, tenant: TenantId, change: impl FnOnce(&Usage) + Send + 'static) {
    if series.cells.tenants.is_off() {
        return;
    }
    series.record(move |series| {
        if let Some(usage) = series.cells.tenants.of(tenant) {
            change(usage);
        }
    });
}

/// Counts a response with data: `bytes` bytes of tensors, at `now`, to a request that began at
/// `started`.
///
/// Call before the response is sent, and neither for errors nor for an empty response that only
/// marks the end.
pub fn stream_response(
    series: &ModelSeries,
    progress: &StreamProgress,
    started: Instant,
    now: Instant,
    bytes: u64,
) {
    let previous = progress.advance(now);
    series.record(move |series| match previous {
        None => series.cells.streams.first_response(now.ns_since(started), bytes),
        Some(previous) => series.cells.streams.later_response(now.ns_since(previous), bytes),
    });
}

/// Counts the tokens of a response to a request of this tenant, from the request's reception to the
/// end of `timeline`. `is_whole` says that it is the only response.
///
/// Call for each response of a model that generates text, before the response is sent.
pub fn tokens(
    series: &ModelSeries,
    progress: &TokenProgress,
    counts: TokenCounts,
    tenant: TenantId,
    timeline: &Timeline,
    is_whole: bool,
) {
    let added = progress.advance(counts, timeline, is_whole);
    if let Some(budgets) = series.cells.tenants.budgets_of(tenant) {
        budgets.charge(tenant, added.charged, timeline.request_end);
    }
    series.record(move |series| {
        series.cells.tokens.add(added);
        let objectives = &series.cells.objectives;
        objectives.tokens(added.first_ns, added.intervals, added.interval_ns);
    });
    charge(series, tenant, move |usage| usage.tokens(added.prompt, added.generated));
}

/// Counts a stream of a model that generates text that failed `request_ns` after its start, before
/// its first token, for the objectives of the model.
pub fn stream_without_token(series: &ModelSeries, error: impl Into<Failed>, request_ns: u64) {
    let Failed { fault, .. } = error.into();
    series.record(move |series| series.cells.objectives.no_token(fault, request_ns));
}

/// Returns whether a tenant has a budget of tokens, which [`tokens`] charges.
pub fn has_token_budget(series: &ModelSeries, tenant: TenantId) -> bool {
    series.cells.tenants.budgets_of(tenant).is_some()
}

/// Returns the budget of a tenant if it is used up at `now`, and counts the refused request. Call
/// it for requests to models that generate text, before they are accepted.
pub fn used_up_budget(series: &ModelSeries, tenant: TenantId, now: Instant) -> Option<TokenBudget> {
    let budget = series.cells.tenants.budgets_of(tenant)?.state(tenant, now)?;
    if budget.until_accepted.is_zero() {
        return None;
    }
    charge(series, tenant, Usage::rate_limited);
    Some(budget)
}

/// Counts a request to a model that generates text that has ended successfully, from the request's
/// reception to the end of `timeline`.
///
/// Call once for each request, before its last response is sent.
pub fn generation_finished(series: &ModelSeries, progress: &TokenProgress, timeline: &Timeline) {
    let finished = progress.finished(timeline);
    series.record(move |series| series.cells.tokens.add_finished(finished));
}

/// Counts a request to a model that generates text that has failed, or whose client has left.
pub fn generation_failed(series: &ModelSeries, reason: FinishReason) {
    series.record(move |series| series.cells.tokens.failed(reason));
}

/// Counts a request that has ended, also if it failed or was cancelled after it entered the queue.
///
/// Call once for each request, before its last response is sent.
pub fn stream_ended(series: &ModelSeries, progress: &StreamProgress) {
    let responses = progress.responses();
    series.record(move |series| series.cells.streams.ended(responses));
}

/// Returns the name of the worker with this number for clients; `None` unless requests are counted
/// by alias.
pub fn worker_name(cache: &Cache, series: &ModelSeries, instance: u32) -> Option<String> {
    let (name, version) = series.alias();
    cache.naming().map(|naming| (naming.worker)(instance, name, version))
}

/// Sets the gauge `WorkerLoadTime` of a worker: an instance loaded its model in `ms`. The series is
/// removed with the instance or the model.
pub fn worker_loaded(cache: &Cache, series: &ModelSeries, instance: u32, ms: u64) {
    if let Some(gauge) = load_time(cache, series, instance) {
        cache.own(series, &gauge);
        // A gauge accepts every value.
        let _ = gauge.add_or_update(ms as f64);
    }
}

/// Removes the gauge `WorkerLoadTime` of a worker: the instance has ended.
pub fn worker_removed(cache: &Cache, series: &ModelSeries, instance: u32) {
    if let Some(gauge) = load_time(cache, series, instance) {
        // Not owned: the worker never loaded its model, and the look-up has created the series.
        cache.own(series, &gauge);
        cache.release(series.release(|owned| Arc::ptr_eq(&owned.cell, &gauge.cell)));
    }
}

/// Removes the gauge of the states that the process of an instance has kept: the process has ended.
pub fn states_lost(cache: &Cache, series: &ModelSeries, instance: &str) {
    cache.release(series.release(|owned: &Series| {
        owned.spec().name == STATE_BYTES
            && owned.spec().labelled(owned.labels()).any(|label| label == ("instance", instance))
    }));
}

fn load_time(cache: &Cache, series: &ModelSeries, instance: u32) -> Option<Arc<Series>> {
    let worker = worker_name(cache, series, instance).unwrap_or_else(|| {
        let (name, version) = series.alias();
        format!("W-{instance}-{name}_{version}")
    });
    cache.gauge(Builtin::WorkerLoadTime.name(), &[worker.as_str(), "Host", cache.hostname()]).ok()
}

/// Creates the counters of a store at 0, so that a rate includes the first event.
pub fn store_opened(cache: &Cache, repository: &str) {
    for result in RELOAD_RESULTS {
        cache.count(Builtin::RepositoryFetches, &[repository, result], 0.0);
    }
    cache.count(Builtin::RepositoryBytes, &[repository], 0.0);
    cache.count(Builtin::RepositorySeconds, &[repository], 0.0);
}

/// Counts an object of `bytes` bytes that was fetched in `seconds` seconds.
pub fn object_fetched(cache: &Cache, repository: &str, bytes: u64, seconds: f64) {
    cache.count(Builtin::RepositoryFetches, &[repository, result(true)], 1.0);
    cache.count(Builtin::RepositoryBytes, &[repository], bytes as f64);
    cache.count(Builtin::RepositorySeconds, &[repository], seconds);
}

/// Counts an object that could not be fetched.
pub fn object_fetch_failed(cache: &Cache, repository: &str) {
    cache.count(Builtin::RepositoryFetches, &[repository, result(false)], 1.0);
}

/// Records whether the store answered a request for its contents.
pub fn store_polled(cache: &Cache, repository: &str, answered: bool) {
    cache.set_gauge(Builtin::RepositoryReachable, &[repository], f64::from(u8::from(answered)));
}

/// Creates the series of a listener at 0, so that a rate includes the first event.
pub fn listener_opened(cache: &Cache, listener: Listener) {
    cache.count(Builtin::Connections, &[listener.as_str()], 0.0);
    for reason in Refused::ALL {
        cache.count(Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 0.0);
    }
    connections_open(cache, listener, 0);
}

/// Counts an accepted connection.
pub fn connection_accepted(cache: &Cache, listener: Listener) {
    cache.count(Builtin::Connections, &[listener.as_str()], 1.0);
}

/// Sets the number of open connections.
pub fn connections_open(cache: &Cache, listener: Listener, open: usize) {
    cache.set_gauge(Builtin::ConnectionsOpen, &[listener.as_str()], open as f64);
}

/// Counts a connection that the server closed, with the reason.
pub fn connection_refused(cache: &Cache, listener: Listener, reason: Refused) {
    cache.count(Builtin::ConnectionsRefused, &[listener.as_str(), reason.as_str()], 1.0);
}

/// Creates the series of these files at 0.
pub fn credentials_watched(cache: &Cache, file: Credentials) {
    for result in RELOAD_RESULTS {
        cache.count(Builtin::CredentialReloads, &[file.as_str(), result], 0.0);
    }
}

/// Counts a reload of these files, successful or not.
pub fn credentials_reloaded(cache: &Cache, file: Credentials, succeeded: bool) {
    cache.count(Builtin::CredentialReloads, &[file.as_str(), result(succeeded)], 1.0);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod reload_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod snapshot_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
