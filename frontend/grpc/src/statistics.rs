//! Converts the statistics of a model version to a message.

use pharos::metrics::statistics::{
    InferBatchStatistics, InferResponseStatistics, InferStatistics, ModelStatistics,
    StatisticDuration,
};

use super::proto;

/// Returns the message of one model version.
pub(super) fn message(model: ModelStatistics) -> proto::ModelStatistics {
    let responses = model.response_stats.into_iter();
    let memory = model.memory_usage.into_iter();
    proto::ModelStatistics {
        name: model.name,
        version: model.version,
        last_inference: model.last_inference,
        inference_count: model.inference_count,
        execution_count: model.execution_count,
        inference_stats: Some(inference(model.inference_stats)),
        batch_stats: model.batch_stats.into_iter().map(batch).collect(),
        memory_usage: memory
            .map(|usage| proto::MemoryUsage {
                r#type: usage.kind,
                id: usage.id,
                byte_size: usage.byte_size,
            })
            .collect(),
        response_stats: responses.map(|(key, one)| (key, response(one))).collect(),
    }
}

fn duration(duration: StatisticDuration) -> Option<proto::StatisticDuration> {
    Some(proto::StatisticDuration { count: duration.count, ns: duration.ns })
}

fn inference(statistics: InferStatistics) -> proto::InferStatistics {
    proto::InferStatistics {
        success: duration(statistics.success),
        fail: duration(statistics.fail),
        queue: duration(statistics.queue),
        compute_input: duration(statistics.compute_input),
        compute_infer: duration(statistics.compute_infer),
        compute_output: duration(statistics.compute_output),
        cache_hit: duration(statistics.cache_hit),
        cache_miss: duration(statistics.cache_miss),
    }
}

fn response(statistics: InferResponseStatistics) -> proto::InferResponseStatistics {
    proto::InferResponseStatistics {
        compute_infer: duration(statistics.compute_infer),
        compute_output: duration(statistics.compute_output),
        success: duration(statistics.success),
        fail: duration(statistics.fail),
        empty_response: duration(statistics.empty_response),
        cancel: duration(statistics.cancel),
    }
}

fn batch(statistics: InferBatchStatistics) -> proto::InferBatchStatistics {
    proto::InferBatchStatistics {
        batch_size: statistics.batch_size,
        compute_input: duration(statistics.compute_input),
        compute_infer: duration(statistics.compute_infer),
        compute_output: duration(statistics.compute_output),
    }
}
