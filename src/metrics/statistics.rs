//! The statistics of a model, as the statistics extension returns them.
//!
//! Serialized with serde, [`ModelStatistics`] is an element of `model_stats` in Triton's JSON:
//! every key is always present and in this order, counts and nanoseconds are plain numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::atomic::Count;
use super::cache::Cache;
use super::responses::{ResponseCell, Timed};
use super::series::ModelSeries;

/// A number of events and their total duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StatisticDuration {
    /// The number of events.
    pub count: u64,
    /// The total duration in nanoseconds.
    pub ns: u64,
}

/// The durations of inference requests by stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InferStatistics {
    /// Successful requests: total duration.
    pub success: StatisticDuration,
    /// Failed requests: total duration.
    pub fail: StatisticDuration,
    /// Successful requests: time in the queue.
    pub queue: StatisticDuration,
    /// Successful requests: bringing inputs to the model.
    pub compute_input: StatisticDuration,
    /// Successful requests: executing the model.
    pub compute_infer: StatisticDuration,
    /// Successful requests: taking outputs from the model.
    pub compute_output: StatisticDuration,
    /// Requests that the response cache answered.
    pub cache_hit: StatisticDuration,
    /// Requests for which the response cache had no response.
    pub cache_miss: StatisticDuration,
}

/// Statistics of the n-th response to the requests of a decoupled model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InferResponseStatistics {
    /// Executing the model.
    pub compute_infer: StatisticDuration,
    /// Taking outputs from the model.
    pub compute_output: StatisticDuration,
    /// Responses with outputs.
    pub success: StatisticDuration,
    /// Responses that are errors.
    pub fail: StatisticDuration,
    /// Responses without outputs.
    pub empty_response: StatisticDuration,
    /// Responses of cancelled requests.
    pub cancel: StatisticDuration,
}

/// Executions of one batch size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InferBatchStatistics {
    /// The total batch size.
    pub batch_size: u64,
    /// Bringing inputs to the model.
    pub compute_input: StatisticDuration,
    /// Executing the model.
    pub compute_infer: StatisticDuration,
    /// Taking outputs from the model.
    pub compute_output: StatisticDuration,
}

/// Memory that a model holds on one device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MemoryUsage {
    /// The kind of memory: `CPU`, `CPU_PINNED` or `GPU`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The device's number.
    pub id: i64,
    /// Bytes.
    pub byte_size: u64,
}

/// The statistics of one loaded model version since its load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelStatistics {
    /// The model's name.
    pub name: String,
    /// Its version, as text.
    pub version: String,
    /// The time of the last execution, in milliseconds since 1970; 0 for never.
    pub last_inference: u64,
    /// Inferences: the sum of the batch sizes of successful requests.
    pub inference_count: u64,
    /// Executions of batches.
    pub execution_count: u64,
    /// Durations of its requests.
    pub inference_stats: InferStatistics,
    /// By number of the response, `"0"` first; empty unless the model is decoupled.
    pub response_stats: BTreeMap<String, InferResponseStatistics>,
    /// Executions by batch size, ascending.
    pub batch_stats: Vec<InferBatchStatistics>,
    /// Memory by device; empty while it is not measured.
    pub memory_usage: Vec<MemoryUsage>,
}

/// Reads the statistics of one model version from its cells, at one moment.
pub fn of(series: &ModelSeries) -> ModelStatistics {
    series.snapshot(|| of_cells(series))
}

/// Reads the statistics of several model versions, all at the same moment.
pub fn of_all<'s>(
    cache: &Cache,
    all: impl Iterator<Item = &'s ModelSeries>,
) -> Vec<ModelStatistics> {
    cache.transactions().snapshot(|| all.map(of_cells).collect())
}

fn of_cells(series: &ModelSeries) -> ModelStatistics {
    let cells = &series.cells.counts;
    let count = cells.success_count.get();
    let with = |cell: &Count| StatisticDuration { count, ns: cell.get() };
    let hits = cells.cache_hits.get();
    let computed =
        |cell: &Count| StatisticDuration { count: count.saturating_sub(hits), ns: cell.get() };
    let inference_stats = InferStatistics {
        success: with(&cells.success_ns),
        fail: StatisticDuration {
            count: series.cells.failures.iter().map(Count::get).sum(),
            ns: series.cells.failure_ns.get(),
        },
        queue: with(&cells.queue_ns),
        compute_input: computed(&cells.compute_input_ns),
        compute_infer: computed(&cells.compute_infer_ns),
        compute_output: computed(&cells.compute_output_ns),
        cache_hit: StatisticDuration { count: hits, ns: cells.cache_hit_ns.get() },
        cache_miss: StatisticDuration {
            count: cells.cache_misses.get(),
            ns: cells.cache_miss_ns.get(),
        },
    };
    let batch_stats = series
        .cells
        .batches()
        .iter()
        .map(|(&batch_size, cell)| {
            let with = |ns| StatisticDuration { count: cell.count, ns };
            InferBatchStatistics {
                batch_size,
                compute_input: with(cell.compute_input_ns),
                compute_infer: with(cell.compute_infer_ns),
                compute_output: with(cell.compute_output_ns),
            }
        })
        .collect();
    ModelStatistics {
        name: series.model().name.bare().to_owned(),
        version: series.version().to_owned(),
        last_inference: series.cells.last_inference_ms.get(),
        inference_count: cells.inference_count.get(),
        execution_count: cells.execution_count.get(),
        inference_stats,
        response_stats: series
            .cells
            .responses
            .read()
            .iter()
            .map(|(number, cell)| (number.to_string(), response(cell)))
            .collect(),
        batch_stats,
        memory_usage: memory_usage(series),
    }
}

fn response(cell: &ResponseCell) -> InferResponseStatistics {
    let duration = |Timed { count, ns }: Timed| StatisticDuration { count, ns };
    InferResponseStatistics {
        compute_infer: duration(cell.compute_infer),
        compute_output: duration(cell.compute_output),
        success: duration(cell.success),
        fail: duration(cell.fail),
        empty_response: duration(cell.empty_response),
        cancel: duration(cell.cancel),
    }
}

/// Returns the memory that loading took: of processes, the pinned part of it, then of each GPU.
/// Empty while it is not known.
fn memory_usage(series: &ModelSeries) -> Vec<MemoryUsage> {
    let usage = |kind: &str, id, byte_size| MemoryUsage { kind: kind.to_owned(), id, byte_size };
    let known = |kind: &str, bytes: &Count| (bytes.get() > 0).then(|| usage(kind, 0, bytes.get()));
    let own = [known("CPU", &series.cells.memory), known("CPU_PINNED", &series.cells.pinned)];
    let gpus = series.cells.gpu_memory();
    own.into_iter()
        .flatten()
        .chain(gpus.iter().map(|(index, bytes)| usage("GPU", i64::from(*index), *bytes)))
        .collect()
}
