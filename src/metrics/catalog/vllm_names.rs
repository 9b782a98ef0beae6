//! The names and labels of vLLM for the metrics of language models, so that endpoint pickers,
//! autoscalers and boards for vLLM read this server unchanged.

use super::also_as::{LabelValue, OtherLabel, OtherName};
use super::{Catalog, ENGINE_CACHE_USAGE, ENGINE_RUNNING, MetricSpec};
use crate::builtin::Builtin;

/// The labels of vLLM with a value from this server's, which they replace.
const LABELS: [(&str, &str); 5] = [
    ("model_name", "model"),
    ("finished_reason", "reason"),
    ("max_lora", "adapter_slots"),
    ("running_lora_adapters", "running_adapters"),
    ("waiting_lora_adapters", "waiting_adapters"),
];

/// The label of vLLM for the rank of an engine. The label `instance` distinguishes engines here.
const ENGINE: (&str, &str) = ("engine", "0");

/// Returns the metrics that vLLM has as well, by name, each with its names there. The
/// histograms of the shipped file have the buckets of vLLM.
pub(super) fn names() -> [(&'static str, &'static [&'static str]); 15] {
    [
        (ENGINE_RUNNING, &["vllm:num_requests_running"]),
        // Most requests wait in the queue of the server, not in the engine.
        (Builtin::LlmQueued.name(), &["vllm:num_requests_waiting"]),
        (ENGINE_CACHE_USAGE, &["vllm:kv_cache_usage_perc"]),
        (
            Builtin::LlmPromptTokens.name(),
            &["vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"],
        ),
        (
            Builtin::LlmCachedTokens.name(),
            &["vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total"],
        ),
        (Builtin::LlmGenerationTokens.name(), &["vllm:generation_tokens_total"]),
        (Builtin::LlmFinished.name(), &["vllm:request_success_total"]),
        (Builtin::LlmAdapters.name(), &["vllm:lora_requests_info"]),
        (Builtin::LlmFirstToken.name(), &["vllm:time_to_first_token_seconds"]),
        (Builtin::LlmInterval.name(), &["vllm:inter_token_latency_seconds"]),
        (Builtin::LlmPerToken.name(), &["vllm:request_time_per_output_token_seconds"]),
        (Builtin::LlmQueueDuration.name(), &["vllm:request_queue_time_seconds"]),
        (Builtin::LlmRequestDuration.name(), &["vllm:e2e_request_latency_seconds"]),
        (Builtin::LlmRequestPromptTokens.name(), &["vllm:request_prompt_tokens"]),
        (Builtin::LlmRequestGenerationTokens.name(), &["vllm:request_generation_tokens"]),
    ]
}

/// Adds names of vLLM to a metric of the catalog, except names that the catalog has already.
pub(super) fn added(catalog: Catalog, metric: &str, names: &[&str]) -> Catalog {
    let Some((_, spec)) = catalog.find(metric) else { return catalog };
    let mut spec = spec.clone();
    let labels = labels(&spec);
    for name in names.iter().filter(|name| catalog.names.check_other(name, spec.kind).is_ok()) {
        spec.also_as.push(OtherName { labels: labels.clone(), ..OtherName::new(name) });
    }
    catalog.with_changed(spec)
}

/// Returns the labels of a metric under its names of vLLM: all labels of the metric, of which some are
/// renamed, so that no two series become one.
fn labels(spec: &MetricSpec) -> Vec<OtherLabel> {
    let has = |label: &str| spec.dimensions.iter().any(|own| own == label);
    let named = LABELS.iter().filter(|(name, own)| has(own) && !has(name)).map(|(name, own)| {
        OtherLabel { name: (*name).to_owned(), value: LabelValue::Of((*own).to_owned()) }
    });
    let engine = (!has(ENGINE.0)).then(|| OtherLabel {
        name: ENGINE.0.to_owned(),
        value: LabelValue::Text(ENGINE.1.to_owned()),
    });
    named.chain(engine).collect()
}
