//! The metrics that the server's own code records. Code refers to a metric by this enum. The
//! shipped `metrics.yaml` defines its type, labels, unit and help; the table here says where its
//! values come from.
//!
//! Views read every series through its row, and none refers to a metric by name. Several rows may
//! show one cell: `nv_*` in whole microseconds, `ts_*` in microseconds with fractions.

use super::counts::ModelCount::{
    CacheHitNs, CacheHits, CacheMissNs, CacheMisses, ClientNs, ClientQueueNs, ComputeInferNs,
    ComputeInputNs, ComputeOutputNs, ExecutionCount, InferenceCount, LoadNs, OutputMismatches,
    QueueNs, QueueRefusals, Requests, Restarts, SamplesDropped, SuccessCount, SuccessNs,
};
use super::kind::Kind;
use super::source::LabelSet::{Alias, Full, Tagged, Triton};
use super::source::ModelValue::{
    self, BatchSizes, Batches, CacheCount, CacheQuantiles, Count, Durations, Failures, Finished,
    FirstResponse, Instances, Objective, Pending, Quantiles, Stream, Tenant, Tokens,
};
use super::source::ObjectiveValue::{All, Budget, Good, Share, Threshold};
use super::source::Scale::{FractionalMicros, Micros, One, Seconds};
use super::source::Source::{
    self, Answers, Family, Model, OpenStreams, RequestFailures, UnloggedFamily,
};
use super::source::{
    HttpClass, Lookup, Stage, StreamValue, TenantValue, TokenDistribution, TokenValue,
};
use super::unit::TimeUnit;

/// The type, labels, unit and buckets of a metric in the shipped `metrics.yaml`.
#[derive(Clone, Copy, Debug)]
struct Definition {
    name: &'static str,
    kind: Kind,
    /// The labels, in the order in which code gives their values.
    labels: &'static [&'static str],
    /// The unit of a distribution of durations.
    unit: Option<TimeUnit>,
    /// The upper bounds of a histogram.
    buckets: &'static [f64],
}

// `build.rs` makes the constant `SHIPPED`, the metrics of the shipped file, so that a definition is
// written once.
include!(concat!(env!("OUT_DIR"), "/shipped.rs"));

/// Returns the definition of a metric. Evaluated by the compiler, so that a name which the file
/// does not have is a compile error.
const fn shipped(name: &str) -> &'static Definition {
    let mut at = 0;
    while !is_same(SHIPPED[at].name.as_bytes(), name.as_bytes()) {
        at += 1;
        assert!(at < SHIPPED.len(), "metrics.yaml does not define this metric");
    }
    &SHIPPED[at]
}

const fn is_same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}

const fn triton(value: ModelValue) -> Source {
    Model(Triton, value)
}

const fn tagged(value: ModelValue) -> Source {
    Model(Tagged, value)
}

const fn full(value: ModelValue) -> Source {
    Model(Full, value)
}

const fn of_tokens(distribution: TokenDistribution) -> Source {
    tagged(Tokens(TokenValue::Distribution(distribution)))
}

const fn by_alias(value: ModelValue) -> Source {
    Model(Alias, value)
}

/// The rows: variant, name in `metrics.yaml`, and the source of the values.
macro_rules! builtins {
    ($($variant:ident = $name:literal $source:expr;)*) => {
        /// A metric that code of the server records.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Builtin {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Builtin {
            /// Every built-in metric.
            pub const ALL: &[Builtin] = &[$(Self::$variant),*];

            const fn definition(self) -> &'static Definition {
                match self {
                    $(Self::$variant => const { shipped($name) },)*
                }
            }

            /// Returns where its values come from.
            pub(super) const fn source(self) -> Source {
                match self {
                    $(Self::$variant => const { $source },)*
                }
            }
        }
    };
}

builtins! {
    RequestSuccess = "nv_inference_request_success" triton(Count(SuccessCount, One));
    RequestFailure = "nv_inference_request_failure" triton(Failures);
    InferenceCount = "nv_inference_count" triton(Count(InferenceCount, One));
    ExecutionCount = "nv_inference_exec_count" triton(Count(ExecutionCount, One));
    RequestDuration = "nv_inference_request_duration_us" triton(Count(SuccessNs, Micros));
    QueueDuration = "nv_inference_queue_duration_us" triton(Count(QueueNs, Micros));
    ComputeInputDuration = "nv_inference_compute_input_duration_us" triton(Count(ComputeInputNs, Micros));
    ComputeInferDuration = "nv_inference_compute_infer_duration_us" triton(Count(ComputeInferNs, Micros));
    ComputeOutputDuration = "nv_inference_compute_output_duration_us" triton(Count(ComputeOutputNs, Micros));
    CacheHits = "nv_cache_num_hits_per_model" triton(CacheCount(CacheHits, One));
    CacheMisses = "nv_cache_num_misses_per_model" triton(CacheCount(CacheMisses, One));
    CacheHitDuration = "nv_cache_hit_duration_per_model" triton(CacheCount(CacheHitNs, Micros));
    CacheMissDuration = "nv_cache_miss_duration_per_model" triton(CacheCount(CacheMissNs, Micros));
    PendingRequests = "nv_inference_pending_request_count" triton(Pending);
    ModelLoadDuration = "nv_model_load_duration_secs" triton(Count(LoadNs, Seconds));
    RequestHistogram = "pharos_request_duration_seconds" tagged(Durations(Stage::Request));
    QueueHistogram = "pharos_queue_duration_seconds" tagged(Durations(Stage::Queue));
    ComputeInputHistogram = "pharos_compute_input_duration_seconds" tagged(Durations(Stage::ComputeInput));
    ComputeInferHistogram = "pharos_compute_infer_duration_seconds" tagged(Durations(Stage::ComputeInfer));
    ComputeOutputHistogram = "pharos_compute_output_duration_seconds" tagged(Durations(Stage::ComputeOutput));
    FirstResponseHistogram = "nv_inference_first_response_histogram_ms" triton(FirstResponse);
    StreamFirstResponse = "pharos_stream_first_response_seconds" tagged(Stream(StreamValue::FirstResponse));
    StreamInterval = "pharos_stream_response_interval_seconds" tagged(Stream(StreamValue::Interval));
    StreamLength = "pharos_stream_responses_per_request" tagged(Stream(StreamValue::Length));
    StreamResponses = "pharos_stream_responses_total" tagged(Stream(StreamValue::Responses));
    StreamResponseBytes = "pharos_stream_response_bytes_total" tagged(Stream(StreamValue::Bytes));
    LlmPromptTokens = "pharos_llm_prompt_tokens_total" tagged(Tokens(TokenValue::Prompt));
    LlmCachedTokens = "pharos_llm_cached_prompt_tokens_total" tagged(Tokens(TokenValue::Cached));
    LlmGenerationTokens = "pharos_llm_generation_tokens_total" tagged(Tokens(TokenValue::Generated));
    LlmFinished = "pharos_llm_finished_total" tagged(Finished);
    LlmQueued = "pharos_llm_queued_requests" tagged(Tokens(TokenValue::Queued));
    LlmFirstToken = "pharos_llm_time_to_first_token_seconds" of_tokens(TokenDistribution::First);
    LlmInterval = "pharos_llm_inter_token_latency_seconds" of_tokens(TokenDistribution::Interval);
    LlmPerToken = "pharos_llm_time_per_output_token_seconds" of_tokens(TokenDistribution::PerToken);
    LlmQueueDuration = "pharos_llm_queue_duration_seconds" of_tokens(TokenDistribution::Queue);
    LlmRequestDuration = "pharos_llm_request_duration_seconds" of_tokens(TokenDistribution::Request);
    LlmRequestPromptTokens = "pharos_llm_request_prompt_tokens" of_tokens(TokenDistribution::PromptLength);
    LlmRequestGenerationTokens = "pharos_llm_request_generation_tokens" of_tokens(TokenDistribution::GenerationLength);
    LlmAdapters = "pharos_llm_adapters_info" Family;
    BatchSize = "pharos_batch_size" tagged(BatchSizes);
    RequestSummary = "nv_inference_request_summary_us" triton(Quantiles(Stage::Request));
    QueueSummary = "nv_inference_queue_summary_us" triton(Quantiles(Stage::Queue));
    ComputeInputSummary = "nv_inference_compute_input_summary_us" triton(Quantiles(Stage::ComputeInput));
    ComputeInferSummary = "nv_inference_compute_infer_summary_us" triton(Quantiles(Stage::ComputeInfer));
    ComputeOutputSummary = "nv_inference_compute_output_summary_us" triton(Quantiles(Stage::ComputeOutput));
    CacheHitSummary = "nv_cache_hit_summary_per_model" triton(CacheQuantiles(Lookup::Hit));
    CacheMissSummary = "nv_cache_miss_summary_per_model" triton(CacheQuantiles(Lookup::Miss));
    TsRequests = "ts_inference_requests_total" by_alias(Count(Requests, One));
    TsLatency = "ts_inference_latency_microseconds" by_alias(Count(ClientNs, FractionalMicros));
    TsQueueLatency = "ts_queue_latency_microseconds" by_alias(Count(ClientQueueNs, FractionalMicros));
    Requests2xx = "Requests2XX" Source::HttpClass(HttpClass::Success);
    Requests4xx = "Requests4XX" Source::HttpClass(HttpClass::ClientError);
    Requests5xx = "Requests5XX" Source::HttpClass(HttpClass::Other);
    QueueTime = "QueueTime" Family;
    WorkerThreadTime = "WorkerThreadTime" Family;
    WorkerLoadTime = "WorkerLoadTime" Family;
    TsCpuUtilization = "CPUUtilization" Family;
    TsMemoryUsed = "MemoryUsed" Family;
    TsMemoryAvailable = "MemoryAvailable" Family;
    TsMemoryUtilization = "MemoryUtilization" Family;
    TsDiskUsage = "DiskUsage" Family;
    TsDiskAvailable = "DiskAvailable" Family;
    TsDiskUtilization = "DiskUtilization" Family;
    TsGpuMemoryUtilization = "GPUMemoryUtilization" Family;
    TsGpuMemoryUsed = "GPUMemoryUsed" Family;
    TsGpuUtilization = "GPUUtilization" Family;
    CpuUtilization = "nv_cpu_utilization" Family;
    CpuMemoryTotal = "nv_cpu_memory_total_bytes" Family;
    CpuMemoryUsed = "nv_cpu_memory_used_bytes" Family;
    GpuUtilization = "nv_gpu_utilization" Family;
    GpuMemoryTotal = "nv_gpu_memory_total_bytes" Family;
    GpuMemoryUsed = "nv_gpu_memory_used_bytes" Family;
    GpuPowerUsage = "nv_gpu_power_usage" Family;
    GpuPowerLimit = "nv_gpu_power_limit" Family;
    GpuEnergy = "nv_energy_consumption" Family;
    PinnedMemoryTotal = "nv_pinned_memory_pool_total_bytes" Family;
    PinnedMemoryUsed = "nv_pinned_memory_pool_used_bytes" Family;
    GpuTemperature = "pharos_gpu_temperature_celsius" Family;
    GpuMemoryBandwidth = "pharos_gpu_memory_bandwidth_utilization" Family;
    WorkerCpu = "pharos_worker_cpu_seconds_total" Family;
    WorkerMemory = "pharos_worker_resident_bytes" Family;
    WorkerGpuMemory = "pharos_worker_gpu_memory_bytes" Family;
    WorkerGpuUtilization = "pharos_worker_gpu_utilization" Family;
    ProcessCpu = "process_cpu_seconds_total" Family;
    ProcessMemory = "process_resident_memory_bytes" Family;
    ProcessFds = "process_open_fds" Family;
    ProcessStart = "process_start_time_seconds" Family;
    BuildInfo = "pharos_build_info" Family;
    Requests = "pharos_requests_total" Answers;
    RequestFailures = "pharos_request_failures_total" RequestFailures;
    Batches = "pharos_batches_total" full(Batches);
    PendingByPriority = "pharos_pending_requests" Family;
    OldestPending = "pharos_oldest_pending_seconds" Family;
    ExecutingRequests = "pharos_executing_requests" Family;
    WaitingRequests = "pharos_waiting_requests" Family;
    ExecutionSlots = "pharos_execution_slots" Family;
    ModelExecuting = "pharos_model_executing_requests" Family;
    ModelWaiting = "pharos_model_waiting_requests" Family;
    ModelSlots = "pharos_model_execution_slots" Family;
    ModelBatchSlots = "pharos_model_batch_free_slots" Family;
    OpenStreams = "pharos_open_streams" OpenStreams;
    ModelLastLoad = "pharos_model_last_load_successful" Family;
    ModelState = "pharos_model_state" Family;
    ModelLoadProgress = "pharos_model_load_progress_ratio" Family;
    ModelChanges = "pharos_model_changes_total" Family;
    OnDemandLoads = "pharos_on_demand_loads_total" Family;
    OnDemandUnloads = "pharos_on_demand_unloads_total" Family;
    OnDemandHits = "pharos_on_demand_hits_total" Family;
    ModelMemory = "pharos_model_memory_bytes" Family;
    ModelMemoryLimit = "pharos_model_memory_limit_bytes" Family;
    ModelMemoryUsed = "pharos_model_memory_used_bytes" Family;
    ModelGpuMemory = "pharos_model_gpu_memory_bytes" Family;
    ModelGpuMemoryLimit = "pharos_model_gpu_memory_limit_bytes" Family;
    ModelGpuMemoryUsed = "pharos_model_gpu_memory_used_bytes" Family;
    OnDemandWait = "pharos_on_demand_wait_seconds" Family;
    OnDemandWaiting = "pharos_on_demand_waiting_requests" Family;
    Connections = "pharos_connections_total" Family;
    ConnectionsOpen = "pharos_connections_open" Family;
    ConnectionsRefused = "pharos_connections_refused_total" Family;
    CredentialReloads = "pharos_credential_reloads_total" Family;
    RepositoryFetches = "pharos_repository_fetches_total" Family;
    RepositoryBytes = "pharos_repository_fetched_bytes_total" Family;
    RepositorySeconds = "pharos_repository_fetch_seconds_total" Family;
    RepositoryReachable = "pharos_repository_reachable" Family;
    TenantRequests = "pharos_tenant_requests_total" full(Tenant(TenantValue::Requests));
    TenantFailures = "pharos_tenant_failures_total" full(Tenant(TenantValue::Failures));
    TenantQueue = "pharos_tenant_queue_seconds_total" full(Tenant(TenantValue::QueueNs));
    TenantCompute = "pharos_tenant_compute_seconds_total" full(Tenant(TenantValue::ComputeNs));
    TenantPromptTokens = "pharos_tenant_prompt_tokens_total" full(Tenant(TenantValue::PromptTokens));
    TenantGeneratedTokens = "pharos_tenant_generation_tokens_total" full(Tenant(TenantValue::GeneratedTokens));
    TenantRateLimited = "pharos_tenant_rate_limited_requests_total" full(Tenant(TenantValue::RateLimited));
    SloGoodRequests = "pharos_slo_good_requests_total" full(Objective(Good));
    SloRequests = "pharos_slo_requests_total" full(Objective(All));
    SloObjective = "pharos_slo_objective_ratio" full(Objective(Share));
    SloThreshold = "pharos_slo_latency_threshold_seconds" full(Objective(Threshold));
    SloBudget = "pharos_slo_error_budget_remaining_ratio" full(Objective(Budget));
    Instances = "pharos_instances" full(Instances);
    InstanceState = "pharos_instance_state" Family;
    InstanceBusy = "pharos_instance_busy_seconds_total" Family;
    InstanceRestarts = "pharos_instance_restarts_total" full(Count(Restarts, One));
    QueueRefusals = "pharos_queue_refusals_total" full(Count(QueueRefusals, One));
    OutputMismatches = "pharos_output_mismatches_total" full(Count(OutputMismatches, One));
    Sequences = "pharos_sequences" Family;
    SequenceSlots = "pharos_sequence_slots" Family;
    SequenceSlotsUsed = "pharos_sequence_slots_used" Family;
    SequencesIdleEvicted = "pharos_sequences_idle_evicted_total" Family;
    SequenceStartErrors = "pharos_sequence_start_errors_total" Family;
    SequenceRestarts = "pharos_sequence_restarts_total" Family;
    RateLimiterWait = "pharos_rate_limiter_wait_seconds_total" Family;
    RateLimiterWaiting = "pharos_rate_limiter_waiting_instances" Family;
    RateLimiterLimit = "pharos_rate_limiter_resource_limit" Family;
    RateLimiterUsed = "pharos_rate_limiter_resource_used" Family;
    EnsembleStep = "pharos_ensemble_step_duration_seconds" Family;
    EnsembleOverhead = "pharos_ensemble_overhead_duration_seconds" Family;
    EnsembleInflight = "pharos_ensemble_inflight_requests" Family;
    ArenaUsed = "pharos_arena_used_bytes" Family;
    CacheEntries = "pharos_cache_entries" Family;
    CacheBytes = "pharos_cache_bytes" Family;
    CacheEvictions = "pharos_cache_evictions_total" Family;
    CacheErrors = "pharos_cache_errors_total" Family;
    Traces = "pharos_traces_total" Family;
    TraceSpans = "pharos_trace_spans_total" Family;
    OtlpExports = "pharos_otlp_exports_total" Family;
    OtlpPoints = "pharos_otlp_data_points_total" Family;
    SharedMemoryRegions = "pharos_shared_memory_regions" Family;
    SharedMemoryBytes = "pharos_shared_memory_region_bytes" Family;
    SharedMemoryInUse = "pharos_shared_memory_in_use" Family;
    SharedMemoryTensors = "pharos_shared_memory_tensors_total" Family;
    SharedMemoryTensorBytes = "pharos_shared_memory_tensor_bytes_total" Family;
    Samples = "pharos_metric_samples_total" Family;
    SamplesDropped = "pharos_metric_samples_dropped_total" full(Count(SamplesDropped, One));
    LinesMalformed = "pharos_metric_lines_malformed_total" Family;
    SeriesOverflowed = "pharos_metric_series_overflowed_total" Family;
    ChannelBytes = "pharos_metric_channel_bytes" Family;
    TslogLines = "pharos_tslog_lines_total" UnloggedFamily;
    TslogSkipped = "pharos_tslog_lines_skipped_total" UnloggedFamily;
    TslogErrors = "pharos_tslog_write_errors_total" UnloggedFamily;
    LogLinesLost = "pharos_log_lines_lost_total" Family;
    Reloads = "pharos_metrics_reloads_total" Family;
}

/// The former names of renamed metrics. A definition that uses one is refused with the present
/// name.
const FORMER_NAMES: &[(&str, Builtin)] = &[
    ("nv_inference_request_duration_histogram_us", Builtin::RequestHistogram),
    ("nv_inference_queue_duration_histogram_us", Builtin::QueueHistogram),
    ("nv_inference_compute_input_duration_histogram_us", Builtin::ComputeInputHistogram),
    ("nv_inference_compute_infer_duration_histogram_us", Builtin::ComputeInferHistogram),
    ("nv_inference_compute_output_duration_histogram_us", Builtin::ComputeOutputHistogram),
    ("pharos_ensemble_step_duration_us", Builtin::EnsembleStep),
    ("pharos_ensemble_overhead_duration_us", Builtin::EnsembleOverhead),
];

impl Builtin {
    /// Returns the metric's name in `metrics.yaml` and in the views.
    pub fn name(self) -> &'static str {
        self.definition().name
    }

    /// Returns the metric's type.
    pub fn kind(self) -> Kind {
        self.definition().kind
    }

    /// Returns the names of its labels, in the order in which code gives their values. Series of
    /// models also carry `metric_tags`.
    pub fn dimensions(self) -> &'static [&'static str] {
        self.definition().labels
    }

    /// Returns the unit in which views show it, if it is a distribution of durations.
    pub(super) fn unit(self) -> Option<TimeUnit> {
        self.definition().unit
    }

    /// Returns the unit of its values if the server measures them as times.
    pub(super) fn time_unit(self) -> Option<TimeUnit> {
        let counted = match self.source() {
            Model(_, Count(_, scale) | CacheCount(_, scale)) => scale.unit(),
            Model(_, Tenant(value)) => value.scale().unit(),
            _ => None,
        };
        self.unit().or(counted)
    }

    /// Returns the metric that shows these values of models.
    pub(super) fn showing(value: ModelValue) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|builtin| matches!(builtin.source(), Model(_, shown) if shown == value))
    }

    /// Returns whether code writes its series through the cache by label values, rather than
    /// through `metrics::record`.
    pub fn is_family(self) -> bool {
        matches!(self.source(), Family | UnloggedFamily)
    }

    /// Returns the upper bounds of a histogram whose definition has none.
    pub fn buckets(self) -> &'static [f64] {
        self.definition().buckets
    }

    /// Returns whether a model's configuration can set its buckets.
    pub fn has_buckets_of_models(self) -> bool {
        self.kind() == Kind::Histogram && matches!(self.source(), Model(..))
    }

    /// Returns whether its series have the labels that they have in Triton, where scrapes show
    /// labels in alphabetical order.
    pub(super) fn has_labels_of_triton(self) -> bool {
        matches!(self.source(), Model(Triton, _))
    }

    /// Returns whether it shows service level objectives.
    pub(super) fn is_of_slos(self) -> bool {
        matches!(self.source(), Model(_, Objective(_)))
    }

    /// Returns whether it shows what tenants have used.
    pub(super) fn is_of_tenants(self) -> bool {
        matches!(self.source(), Model(_, Tenant(_)))
    }

    /// Returns whether Triton's settings for latencies switch it: durations of requests and of
    /// their parts, of every type.
    pub fn is_latency(self) -> bool {
        match self.source() {
            Model(_, Count(_, scale) | CacheCount(_, scale)) => scale == Micros,
            Model(_, Durations(_) | FirstResponse | Quantiles(_) | CacheQuantiles(_)) => true,
            _ => false,
        }
    }

    /// Returns whether it counts requests by alias. Mode `legacy` shows only these metrics in a
    /// scrape.
    pub(super) fn is_by_alias(self) -> bool {
        matches!(self.source(), Model(Alias, _))
    }

    /// Returns whether each request that it counts gets a log line, as long as there is room for
    /// them.
    pub(super) fn logs_each_request(self) -> bool {
        matches!(self.source(), Model(Alias, Count(Requests, _)) | Source::HttpClass(_))
    }

    /// Returns whether each sample of this counter is pushed to the log, because its value has
    /// fractions.
    pub(super) fn logs_each_sample(self) -> bool {
        matches!(self.source(), Model(_, Count(_, FractionalMicros)))
    }

    /// Returns whether its samples are never logged.
    pub(super) fn is_unlogged(self) -> bool {
        self.source() == UnloggedFamily
    }

    /// Returns the metric that had this name in an earlier version.
    pub fn formerly(name: &str) -> Option<Self> {
        FORMER_NAMES.iter().find(|(former, _)| *former == name).map(|(_, builtin)| *builtin)
    }

    /// Returns the built-in metric of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|builtin| builtin.name() == name)
    }
}
