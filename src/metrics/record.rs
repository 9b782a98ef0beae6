//! One function for each event of the server, the only way to write its own metrics: an event and its effect on every
//! view (the metrics of all names, the statistics extension) are decided together, here.
//!
//! What counts where follows Triton's statistics: every request of a batch is charged the whole batch's compute durations,
//! an execution is counted once, and a request refused before the queue touches no model's numbers, only
//! [`request_answered`].

mod connections;
mod stores;

use std::sync::Arc;

use super::alias::{AliasCounts, Lines};
use super::builtin::Builtin;
use super::cache::Cache;
use super::family::Series;
use super::journal::Line;
use super::labels::{Failure, InstanceState, ModelChange, Outcome, Protocol, RELOAD_RESULTS, Route};
use super::series::{ModelSeries, Times};

pub use super::responses::ResponseKind;
use crate::error::Reason;
use crate::id::TraceId;
use crate::timeline::{ComputeStamps, SendReason, Timeline};
pub use connections::{
    connection_accepted, connection_refused, connections_open, credentials_read, credentials_watched, listener_opened,
};
pub use stores::{object_fetched, object_not_fetched, store_asked, store_opened};

/// A predict request was parsed and its model found; it may still be refused by the model's checks or the queue.
pub fn inference_requested(series: &ModelSeries) {
    series.counts.requests.add(1);
    series.journal().touch();
}

/// The same for a request by this alias, where requests are counted so.
pub fn alias_requested(cache: &Cache, alias: &AliasCounts) {
    alias.counts.requests.add(1);
    cache.journal().touch();
}

/// A request by this alias succeeded.
///
/// To be called once for each request, before its response (the last of them) leaves.
pub fn alias_done(cache: &Cache, alias: &AliasCounts, timeline: &Timeline) {
    alias.counts.success_ns.add(timeline.charged_ns());
    alias.counts.queue_ns.add(timeline.queue_ns());
    let Lines { latency, queue_latency } = alias.lines();
    let lines = [(latency, timeline.charged_ns()), (queue_latency, timeline.queue_ns())];
    let lines = lines.iter().filter_map(|(line, ns)| line.as_ref().map(|line| (line, *ns as f64)));
    cache.journal().push_all(lines, "");
}

/// A request entered the queue (+1), or left it to be executed, rejected or cancelled (-1).
pub fn request_pending(series: &ModelSeries, delta: i64) {
    series.pending.add(delta);
}

/// A request succeeded. `batch_size` is the request's own: 0 (the model does not batch) counts as 1.
///
/// To be called once for each request, before its response leaves.
pub fn inference_done(series: &ModelSeries, timeline: &Timeline, batch_size: u64) {
    let (input, infer, output) = timeline.compute.durations_ns();
    series.counts.success_count.add(1);
    series.counts.success_ns.add(timeline.request_ns());
    series.counts.queue_ns.add(timeline.queue_ns());
    series.counts.compute_input_ns.add(input);
    series.counts.compute_infer_ns.add(infer);
    series.counts.compute_output_ns.add(output);
    series.counts.inference_count.add(batch_size.max(1));
    series.durations.observe(timeline);
    series.journal().touch();
}

/// A request of an iterative sequence was executed, and waits to be executed once more: what it took so far of queue and
/// instance, so that the sums over all its executions are right. It counts when it is done.
pub fn inference_rescheduled(series: &ModelSeries, timeline: &Timeline) {
    let (input, infer, output) = timeline.compute.durations_ns();
    series.counts.queue_ns.add(timeline.queue_ns());
    series.counts.compute_input_ns.add(input);
    series.counts.compute_infer_ns.add(infer);
    series.counts.compute_output_ns.add(output);
    let line = series.times().queue_latency.clone();
    series.journal().push_all(line.iter().map(|line| (line, timeline.queue_ns() as f64)), "");
    series.journal().touch();
}

/// A request was answered by the response cache, which was asked for `lookup_ns`. Its compute stamps all tell when the
/// lookup began; it counts as no inference.
///
/// To be called once for each request, before its response leaves.
pub fn cache_hit(series: &ModelSeries, timeline: &Timeline, lookup_ns: u64) {
    series.counts.success_count.add(1);
    series.counts.success_ns.add(timeline.request_ns());
    series.counts.queue_ns.add(timeline.queue_ns());
    series.counts.cache_hits.add(1);
    series.counts.cache_hit_ns.add(lookup_ns);
    series.durations.observe_hit(timeline, lookup_ns);
    series.journal().push_all(latency_lines(&series.times(), timeline), "");
    series.journal().touch();
}

/// A request that succeeded was looked up in the response cache in vain, and its response inserted, if it could be, in
/// `cache_ns` together. They come on top of the request's own time, as Triton counts.
///
/// To be called before its response leaves. The request's timeline holds `cache_ns` too, for the log lines of
/// [`batch_times`], [`request_times`] and [`ensemble_done`].
pub fn cache_miss(series: &ModelSeries, cache_ns: u64) {
    series.counts.success_ns.add(cache_ns);
    series.counts.cache_misses.add(1);
    series.counts.cache_miss_ns.add(cache_ns);
    series.durations.observe_miss(cache_ns);
    series.journal().touch();
}

/// A request that succeeded belongs to a trace; its latencies point to it. `now_ms` is the wall clock.
pub fn inference_traced(series: &ModelSeries, timeline: &Timeline, trace: TraceId, now_ms: u64) {
    series.durations.exemplify(timeline, trace, now_ms);
}

/// A decoupled model has answered a request for the `number`th time, from 0 on. `times` are the nanoseconds of execution (for
/// the first one since the worker's start on the batch, else since the response before it) and of its outputs.
///
/// To be called before the response leaves.
pub fn response_done(series: &ModelSeries, number: u64, kind: ResponseKind, times: (u64, u64)) {
    series.responses.add(number, kind, times);
}

/// The first response to a request came `ns` after its start.
pub fn first_response(series: &ModelSeries, ns: u64) {
    series.responses.first_ns.add(ns);
    series.durations.observe_first_response(ns);
}

/// A batch was sent to an instance.
pub fn batch_sent(series: &ModelSeries, reason: SendReason) {
    if let Some(cell) = series.sent.get(reason.index()) {
        cell.add(1);
    }
}

/// A stream of requests or responses was opened (+1) or closed (-1).
pub fn stream_open(cache: &Cache, protocol: Protocol, delta: i64) {
    cache.requests().streams(protocol).add(delta);
}

/// A batch went through a worker: the gauge `QueueTime`, in whole milliseconds, for each of its requests that succeeded,
/// and `WorkerThreadTime`, in milliseconds to three digits, for the `dispatch_ns` that it was on its way to the worker and
/// back beside its execution. The latencies of the same requests become log lines.
///
/// To be called once for each batch, before its responses leave, with the timelines that [`inference_done`] was given and
/// what [`cache_miss`] has added: the sums over the lines are then those of the cells.
pub fn batch_times<'a>(series: &ModelSeries, timelines: impl Iterator<Item = &'a Timeline> + Clone, dispatch_ns: u64) {
    times_of(series, timelines, Some(dispatch_ns));
}

/// The same for one request of a decoupled model, whose responses end before its batch does: its timeline comes here once,
/// and [`batch_times`] is given those of the others.
pub fn request_times(series: &ModelSeries, timeline: &Timeline) {
    times_of(series, std::iter::once(timeline), None);
}

fn times_of<'a>(series: &ModelSeries, timelines: impl Iterator<Item = &'a Timeline> + Clone, dispatch_ns: Option<u64>) {
    let times = series.times();
    let queue_ms = |timeline: &Timeline| (timeline.queue_ns() / 1_000_000) as f64;
    let dispatch_ms = dispatch_ns.map(|ns| (ns / 1000) as f64 / 1000.0);
    // A gauge takes every value.
    if let (Some(gauge), Some(last)) = (&times.queue, timelines.clone().last()) {
        let _ = gauge.add_or_update_unlogged(queue_ms(last));
    }
    if let (Some(gauge), Some(dispatch_ms)) = (&times.worker_thread, dispatch_ms) {
        let _ = gauge.add_or_update_unlogged(dispatch_ms);
    }
    let queue = times.queue.as_ref().and_then(|gauge| gauge.line());
    let of_request = |timeline: &'a Timeline| {
        queue.map(|line| (line, queue_ms(timeline))).into_iter().chain(latency_lines(&times, timeline))
    };
    let of_batch = times.worker_thread.as_ref().and_then(|gauge| gauge.line()).zip(dispatch_ms);
    series.journal().push_all(timelines.flat_map(of_request).chain(of_batch), "");
}

/// The log lines of one request's part in the sums of durations.
fn latency_lines<'a>(times: &'a Times, timeline: &Timeline) -> impl Iterator<Item = (&'a Arc<Line>, f64)> + use<'a> {
    let lines = [
        times.latency.as_ref().map(|line| (line, timeline.charged_ns() as f64)),
        times.queue_latency.as_ref().map(|line| (line, timeline.queue_ns() as f64)),
    ];
    lines.into_iter().flatten()
}

/// What clients call the worker of this number; `None` where requests are not counted by alias.
pub fn worker_name(cache: &Cache, series: &ModelSeries, instance: u32) -> Option<String> {
    let (name, version) = series.alias();
    cache.naming().map(|naming| (naming.worker)(instance, name, version))
}

/// An instance has loaded its model in `ms`: the gauge `WorkerLoadTime` of the worker of this number. Its series goes
/// with the model.
pub fn worker_loaded(cache: &Cache, series: &ModelSeries, instance: u32, ms: u64) {
    let worker = worker_name(cache, series, instance).unwrap_or_else(|| {
        let (name, version) = series.alias();
        format!("W-{instance}-{name}_{version}")
    });
    let labels = [worker.as_str(), "Host", cache.hostname()];
    if let Ok(gauge) = cache.gauge(Builtin::WorkerLoadTime.name(), &labels) {
        series.own(&gauge);
        // A gauge takes every value.
        let _ = gauge.add_or_update(ms as f64);
    }
}

/// A batch was executed, whether or not its requests succeeded. `total_batch` is the sum of the requests' batch sizes (0
/// counts as 1), `now_ms` the wall clock in milliseconds since 1970.
pub fn batch_executed(series: &ModelSeries, total_batch: u64, compute: &ComputeStamps, now_ms: u64) {
    let (input, infer, output) = compute.durations_ns();
    {
        let mut batches = series.batches();
        let cell = batches.entry(total_batch.max(1)).or_default();
        cell.count += 1;
        cell.compute_input_ns = cell.compute_input_ns.wrapping_add(input);
        cell.compute_infer_ns = cell.compute_infer_ns.wrapping_add(infer);
        cell.compute_output_ns = cell.compute_output_ns.wrapping_add(output);
    }
    series.counts.execution_count.add(1);
    series.last_inference_ms.raise_to(now_ms);
    series.journal().touch();
}

/// A request that had entered the queue failed; `request_ns` is the time from its start to now.
///
/// A reason that only exists before the queue ([`Failure::of`] gives `None`) changes nothing here, so that callers may pass
/// every error of an inference.
pub fn inference_failed(series: &ModelSeries, reason: Reason, request_ns: u64) {
    let Some(failure) = Failure::of(reason) else { return };
    if let Some(cell) = series.failures.get(failure.index()) {
        cell.add(1);
        series.failure_ns.add(request_ns);
        series.journal().touch();
    }
}

/// An ensemble with steps of these models was loaded: its series of them begin.
pub fn ensemble_loaded<'a>(cache: &Cache, series: &ModelSeries, steps: impl Iterator<Item = &'a str>) {
    for (number, member) in steps.enumerate() {
        let _ = step_series(cache, series, (number, member));
    }
    let _ = overhead_series(cache, series);
}

/// A step of an ensemble, the one of this number with this model, was answered after `ns`.
pub fn ensemble_step(cache: &Cache, series: &ModelSeries, step: (usize, &str), ns: u64) {
    if let Some(histogram) = step_series(cache, series, step) {
        // A histogram takes every time.
        let _ = histogram.add_or_update(ns as f64 / 1000.0);
    }
}

/// An ensemble's request succeeded. Its compute stamps lie apart by what all steps together took; `batch_size` is the
/// request's own, `overhead_ns` the time in which no step was running, `now_ms` the wall clock.
///
/// To be called once for each request, before its response leaves.
pub fn ensemble_done(cache: &Cache, series: &ModelSeries, timeline: &Timeline, done: EnsembleDone) {
    let EnsembleDone { batch_size, overhead_ns, now_ms } = done;
    batch_executed(series, batch_size, &timeline.compute, now_ms);
    inference_done(series, timeline, batch_size);
    series.journal().push_all(latency_lines(&series.times(), timeline), "");
    if let Some(histogram) = overhead_series(cache, series) {
        // A histogram takes every time.
        let _ = histogram.add_or_update(overhead_ns as f64 / 1000.0);
    }
}

/// What [`ensemble_done`] is told beside the times.
#[derive(Clone, Copy, Debug)]
pub struct EnsembleDone {
    /// The request's batch size.
    pub batch_size: u64,
    /// Nanoseconds in which no step was running.
    pub overhead_ns: u64,
    /// The wall clock in milliseconds since 1970.
    pub now_ms: u64,
}

/// An ensemble's request failed, `request_ns` after its start. Whatever a step says, Triton calls it OTHER: the step's own
/// model has counted why.
pub fn ensemble_failed(series: &ModelSeries, reason: Reason, request_ns: u64) {
    let reason = if reason == Reason::Cancelled { reason } else { Reason::Internal };
    inference_failed(series, reason, request_ns);
}

fn step_series(cache: &Cache, series: &ModelSeries, (number, member): (usize, &str)) -> Option<Arc<Series>> {
    let labels = [&*series.model().name, series.version(), &number.to_string(), member];
    let histogram = cache.histogram(Builtin::EnsembleStep.name(), &labels).ok()?;
    series.own(&histogram);
    Some(histogram)
}

fn overhead_series(cache: &Cache, series: &ModelSeries) -> Option<Arc<Series>> {
    let labels = [&*series.model().name, series.version()];
    let histogram = cache.histogram(Builtin::EnsembleOverhead.name(), &labels).ok()?;
    series.own(&histogram);
    Some(histogram)
}

/// The model's load took `seconds`, from the decision to load it to its first ready instance.
pub fn model_load_duration(series: &ModelSeries, seconds: f64) {
    series.counts.load_ns.set((seconds * 1e9).round() as u64);
}

/// A version of a model has been changed, or could not be.
pub fn model_changed(cache: &Cache, change: ModelChange, succeeded: bool) {
    let [success, failure] = RELOAD_RESULTS;
    let labels = [change.as_str(), if succeeded { success } else { failure }];
    if let Ok(changes) = cache.counter(Builtin::ModelChanges.name(), &labels) {
        // A counter takes every whole number.
        let _ = changes.add_or_update(1.0);
    }
}

/// Loading the model has made the processes of all instances together grow by `bytes`; they have registered `pinned` bytes
/// with the drivers of their devices, and hold `gpus` on the devices of these numbers.
pub fn memory_usage(series: &ModelSeries, (bytes, pinned): (u64, u64), gpus: Vec<(u32, u64)>) {
    series.memory.set(bytes);
    series.pinned.set(pinned);
    *series.gpu_memory() = gpus;
}

/// A request of any kind was answered, malformed and unknown ones included. To be called exactly once for each.
pub fn request_answered(cache: &Cache, protocol: Protocol, route: Route, outcome: Outcome) {
    cache.requests().add(protocol, route, outcome);
    cache.journal().touch();
}

/// An instance went from one state to another: `from` is `None` for a new instance, `to` for one that is removed.
pub fn instance_state(series: &ModelSeries, from: Option<InstanceState>, to: Option<InstanceState>) {
    for (state, delta) in [(from, -1), (to, 1)] {
        if let Some(cell) = state.and_then(|state| series.instances.get(state.index())) {
            cell.add(delta);
        }
    }
}

/// A lost instance is being started again.
pub fn instance_restarted(series: &ModelSeries) {
    series.counts.restarts.add(1);
    series.journal().touch();
}

/// A model gave an output of another datatype or batch dimension than its configuration says, which was passed on.
pub fn output_mismatched(series: &ModelSeries) {
    series.counts.output_mismatches.add(1);
    series.journal().touch();
}

/// Metric samples of the model's workers were lost or refused.
pub fn samples_dropped(series: &ModelSeries, count: u64) {
    series.counts.samples_dropped.add(count);
    series.journal().touch();
}

/// Lines of the server's log were lost at a destination; also called with 0, so that its series exists.
pub fn log_lines_lost(cache: &Cache, file: &str, count: u64) {
    if let Ok(lost) = cache.counter(Builtin::LogLinesLost.name(), &[file]) {
        // A counter takes every whole number.
        let _ = lost.add_or_update(count as f64);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
