//! The statistics extension's view of a model's cells.
//!
//! Serialized with serde, [`ModelStatistics`] is an element of `model_stats` as Triton writes it in JSON: every key always
//! present and in this order, counts and nanoseconds as plain numbers.

use std::collections::BTreeMap;

use serde::Serialize;

use super::atomic::Count;
use super::responses::{ResponseCell, Timed};
use super::series::ModelSeries;

/// How often something happened, and how long it took in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StatisticDuration {
    /// How often.
    pub count: u64,
    /// Nanoseconds in all.
    pub ns: u64,
}

/// Where the time of inference requests went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct InferStatistics {
    /// Successful requests, from start to end.
    pub success: StatisticDuration,
    /// Failed requests, from start to end.
    pub fail: StatisticDuration,
    /// Successful requests, in the queue.
    pub queue: StatisticDuration,
    /// Successful requests, bringing inputs to the model.
    pub compute_input: StatisticDuration,
    /// Successful requests, executing the model.
    pub compute_infer: StatisticDuration,
    /// Successful requests, taking outputs from the model.
    pub compute_output: StatisticDuration,
    /// Requests answered by the response cache.
    pub cache_hit: StatisticDuration,
    /// Requests looked up in the response cache in vain.
    pub cache_miss: StatisticDuration,
}

/// Statistics of the n-th response of a decoupled model's requests.
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
    /// Responses cut off by the client.
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

/// The statistics of one loaded model version since it was loaded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModelStatistics {
    /// The model's name.
    pub name: String,
    /// Its version, as text.
    pub version: String,
    /// When it last executed, in milliseconds since 1970; 0 for never.
    pub last_inference: u64,
    /// Inferences: the sum of the batch sizes of successful requests.
    pub inference_count: u64,
    /// Executions of batches.
    pub execution_count: u64,
    /// Where the time of its requests went.
    pub inference_stats: InferStatistics,
    /// By number of the response, `"0"` first; empty unless the model answers more than once.
    pub response_stats: BTreeMap<String, InferResponseStatistics>,
    /// Executions by batch size, ascending.
    pub batch_stats: Vec<InferBatchStatistics>,
    /// Memory by device; empty while it is not measured.
    pub memory_usage: Vec<MemoryUsage>,
}

/// The statistics of one model version, as its cells are now.
pub fn of(series: &ModelSeries) -> ModelStatistics {
    let cells = &series.counts;
    let count = cells.success_count.get();
    let with = |cell: &Count| StatisticDuration { count, ns: cell.get() };
    let hits = cells.cache_hits.get();
    let computed = |cell: &Count| StatisticDuration { count: count.saturating_sub(hits), ns: cell.get() };
    let inference_stats = InferStatistics {
        success: with(&cells.success_ns),
        fail: StatisticDuration { count: series.failures.iter().map(Count::get).sum(), ns: series.failure_ns.get() },
        queue: with(&cells.queue_ns),
        compute_input: computed(&cells.compute_input_ns),
        compute_infer: computed(&cells.compute_infer_ns),
        compute_output: computed(&cells.compute_output_ns),
        cache_hit: StatisticDuration { count: hits, ns: cells.cache_hit_ns.get() },
        cache_miss: StatisticDuration { count: cells.cache_misses.get(), ns: cells.cache_miss_ns.get() },
    };
    let batch_stats = series
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
        last_inference: series.last_inference_ms.get(),
        inference_count: cells.inference_count.get(),
        execution_count: cells.execution_count.get(),
        inference_stats,
        response_stats: series
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

/// The memory that loading took, the processors' first, then what of it is pinned, then each GPU's; nothing while it is not
/// known.
fn memory_usage(series: &ModelSeries) -> Vec<MemoryUsage> {
    let usage = |kind: &str, id, byte_size| MemoryUsage { kind: kind.to_owned(), id, byte_size };
    let known = |kind: &str, bytes: &Count| (bytes.get() > 0).then(|| usage(kind, 0, bytes.get()));
    let own = [known("CPU", &series.memory), known("CPU_PINNED", &series.pinned)];
    let gpus = series.gpu_memory();
    own.into_iter().flatten().chain(gpus.iter().map(|(index, bytes)| usage("GPU", i64::from(*index), *bytes))).collect()
}
