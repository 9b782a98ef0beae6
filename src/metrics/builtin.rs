//! The metrics that the server's own code records. Code refers to a metric by this enum. Its name, type and labels are
//! defined both here and in `metrics.yaml`; a test compares the two.
//!
//! One row describes one metric completely: views read every series through its row, and none refers to a metric by
//! name. Several rows may show one cell: `nv_*` in whole microseconds, `ts_*` in microseconds with fractions.

use super::counts::ModelCount::{
    CacheHitNs, CacheHits, CacheMissNs, CacheMisses, ClientNs, ClientQueueNs, ComputeInferNs, ComputeInputNs,
    ComputeOutputNs, ExecutionCount, InferenceCount, LoadNs, OutputMismatches, QueueNs, QueueRefusals, Requests,
    Restarts, SamplesDropped, SuccessCount, SuccessNs,
};
use super::kind::Kind;
use super::source::LabelSet::{Alias, Full, Tagged, Triton};
use super::source::ModelValue::{
    self, BatchSizes, Batches, CacheCount, CacheQuantiles, Count, Durations, Failures, FirstResponse, Instances,
    Objective, Pending, Quantiles, Stream, Tenant,
};
use super::source::ObjectiveValue::{All, Budget, Good, Share, Threshold};
use super::source::Scale::{FractionalMicros, Micros, One, Seconds};
use super::source::Source::{self, Answers, Family, Model, OpenStreams, RequestFailures, UnloggedFamily};
use super::source::{HttpClass, Lookup, Stage, StreamValue, TenantValue};
use super::unit::TimeUnit;

/// One metric.
#[derive(Clone, Copy, Debug)]
struct Row {
    name: &'static str,
    kind: Kind,
    dimensions: &'static [&'static str],
    source: Source,
    unit: Option<TimeUnit>,
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

const fn by_alias(value: ModelValue) -> Source {
    Model(Alias, value)
}

/// The rows: variant, name, type, labels in the order in which code gives their values, the source of the values, and
/// for distributions of durations the unit that views show.
macro_rules! builtins {
    ($($variant:ident = $name:literal $kind:ident [$($label:literal),*] $source:expr $(, $unit:ident)?;)*) => {
        /// A metric that code of the server records.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Builtin {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Builtin {
            /// Every built-in metric.
            pub const ALL: &[Builtin] = &[$(Self::$variant),*];

            fn row(self) -> Row {
                match self {
                    $(Self::$variant => Row {
                        name: $name,
                        kind: Kind::$kind,
                        dimensions: &[$($label),*],
                        source: $source,
                        unit: { let unit: &[TimeUnit] = &[$(TimeUnit::$unit)?]; unit.first().copied() },
                    },)*
                }
            }
        }
    };
}

builtins! {
    RequestSuccess = "nv_inference_request_success" Counter ["model", "version"] triton(Count(SuccessCount, One));
    RequestFailure = "nv_inference_request_failure" Counter ["model", "version", "reason"] triton(Failures);
    InferenceCount = "nv_inference_count" Counter ["model", "version"] triton(Count(InferenceCount, One));
    ExecutionCount = "nv_inference_exec_count" Counter ["model", "version"] triton(Count(ExecutionCount, One));
    RequestDuration = "nv_inference_request_duration_us" Counter ["model", "version"] triton(Count(SuccessNs, Micros));
    QueueDuration = "nv_inference_queue_duration_us" Counter ["model", "version"] triton(Count(QueueNs, Micros));
    ComputeInputDuration = "nv_inference_compute_input_duration_us" Counter ["model", "version"] triton(Count(ComputeInputNs, Micros));
    ComputeInferDuration = "nv_inference_compute_infer_duration_us" Counter ["model", "version"] triton(Count(ComputeInferNs, Micros));
    ComputeOutputDuration = "nv_inference_compute_output_duration_us" Counter ["model", "version"] triton(Count(ComputeOutputNs, Micros));
    CacheHits = "nv_cache_num_hits_per_model" Counter ["model", "version"] triton(CacheCount(CacheHits, One));
    CacheMisses = "nv_cache_num_misses_per_model" Counter ["model", "version"] triton(CacheCount(CacheMisses, One));
    CacheHitDuration = "nv_cache_hit_duration_per_model" Counter ["model", "version"] triton(CacheCount(CacheHitNs, Micros));
    CacheMissDuration = "nv_cache_miss_duration_per_model" Counter ["model", "version"] triton(CacheCount(CacheMissNs, Micros));
    PendingRequests = "nv_inference_pending_request_count" Gauge ["model", "version"] triton(Pending);
    ModelLoadDuration = "nv_model_load_duration_secs" Gauge ["model", "version"] triton(Count(LoadNs, Seconds));
    RequestHistogram = "pharos_request_duration_seconds" Histogram ["model", "version"] tagged(Durations(Stage::Request)), Seconds;
    QueueHistogram = "pharos_queue_duration_seconds" Histogram ["model", "version"] tagged(Durations(Stage::Queue)), Seconds;
    ComputeInputHistogram = "pharos_compute_input_duration_seconds" Histogram ["model", "version"] tagged(Durations(Stage::ComputeInput)), Seconds;
    ComputeInferHistogram = "pharos_compute_infer_duration_seconds" Histogram ["model", "version"] tagged(Durations(Stage::ComputeInfer)), Seconds;
    ComputeOutputHistogram = "pharos_compute_output_duration_seconds" Histogram ["model", "version"] tagged(Durations(Stage::ComputeOutput)), Seconds;
    FirstResponseHistogram = "nv_inference_first_response_histogram_ms" Histogram ["model", "version"] triton(FirstResponse), Milliseconds;
    StreamFirstResponse = "pharos_stream_first_response_seconds" Histogram ["model", "version"] tagged(Stream(StreamValue::FirstResponse)), Seconds;
    StreamInterval = "pharos_stream_response_interval_seconds" Histogram ["model", "version"] tagged(Stream(StreamValue::Interval)), Seconds;
    StreamLength = "pharos_stream_responses_per_request" Histogram ["model", "version"] tagged(Stream(StreamValue::Length));
    StreamResponses = "pharos_stream_responses_total" Counter ["model", "version"] tagged(Stream(StreamValue::Responses));
    StreamResponseBytes = "pharos_stream_response_bytes_total" Counter ["model", "version"] tagged(Stream(StreamValue::Bytes));
    BatchSize = "pharos_batch_size" Histogram ["model", "version"] tagged(BatchSizes);
    RequestSummary = "nv_inference_request_summary_us" Summary ["model", "version"] triton(Quantiles(Stage::Request)), Microseconds;
    QueueSummary = "nv_inference_queue_summary_us" Summary ["model", "version"] triton(Quantiles(Stage::Queue)), Microseconds;
    ComputeInputSummary = "nv_inference_compute_input_summary_us" Summary ["model", "version"] triton(Quantiles(Stage::ComputeInput)), Microseconds;
    ComputeInferSummary = "nv_inference_compute_infer_summary_us" Summary ["model", "version"] triton(Quantiles(Stage::ComputeInfer)), Microseconds;
    ComputeOutputSummary = "nv_inference_compute_output_summary_us" Summary ["model", "version"] triton(Quantiles(Stage::ComputeOutput)), Microseconds;
    CacheHitSummary = "nv_cache_hit_summary_per_model" Summary ["model", "version"] triton(CacheQuantiles(Lookup::Hit)), Microseconds;
    CacheMissSummary = "nv_cache_miss_summary_per_model" Summary ["model", "version"] triton(CacheQuantiles(Lookup::Miss)), Microseconds;
    TsRequests = "ts_inference_requests_total" Counter ["model_name", "model_version", "hostname"] by_alias(Count(Requests, One));
    TsLatency = "ts_inference_latency_microseconds" Counter ["model_name", "model_version", "hostname"] by_alias(Count(ClientNs, FractionalMicros));
    TsQueueLatency = "ts_queue_latency_microseconds" Counter ["model_name", "model_version", "hostname"] by_alias(Count(ClientQueueNs, FractionalMicros));
    Requests2xx = "Requests2XX" Counter ["Level", "Hostname"] Source::HttpClass(HttpClass::Success);
    Requests4xx = "Requests4XX" Counter ["Level", "Hostname"] Source::HttpClass(HttpClass::ClientError);
    Requests5xx = "Requests5XX" Counter ["Level", "Hostname"] Source::HttpClass(HttpClass::Other);
    QueueTime = "QueueTime" Gauge ["Level", "Hostname"] Family;
    WorkerThreadTime = "WorkerThreadTime" Gauge ["Level", "Hostname"] Family;
    WorkerLoadTime = "WorkerLoadTime" Gauge ["WorkerName", "Level", "Hostname"] Family;
    TsCpuUtilization = "CPUUtilization" Gauge ["Level", "Hostname"] Family;
    TsMemoryUsed = "MemoryUsed" Gauge ["Level", "Hostname"] Family;
    TsMemoryAvailable = "MemoryAvailable" Gauge ["Level", "Hostname"] Family;
    TsMemoryUtilization = "MemoryUtilization" Gauge ["Level", "Hostname"] Family;
    TsDiskUsage = "DiskUsage" Gauge ["Level", "Hostname"] Family;
    TsDiskAvailable = "DiskAvailable" Gauge ["Level", "Hostname"] Family;
    TsDiskUtilization = "DiskUtilization" Gauge ["Level", "Hostname"] Family;
    TsGpuMemoryUtilization = "GPUMemoryUtilization" Gauge ["Level", "DeviceId", "Hostname"] Family;
    TsGpuMemoryUsed = "GPUMemoryUsed" Gauge ["Level", "DeviceId", "Hostname"] Family;
    TsGpuUtilization = "GPUUtilization" Gauge ["Level", "DeviceId", "Hostname"] Family;
    CpuUtilization = "nv_cpu_utilization" Gauge [] Family;
    CpuMemoryTotal = "nv_cpu_memory_total_bytes" Gauge [] Family;
    CpuMemoryUsed = "nv_cpu_memory_used_bytes" Gauge [] Family;
    GpuUtilization = "nv_gpu_utilization" Gauge ["gpu_uuid"] Family;
    GpuMemoryTotal = "nv_gpu_memory_total_bytes" Gauge ["gpu_uuid"] Family;
    GpuMemoryUsed = "nv_gpu_memory_used_bytes" Gauge ["gpu_uuid"] Family;
    GpuPowerUsage = "nv_gpu_power_usage" Gauge ["gpu_uuid"] Family;
    GpuPowerLimit = "nv_gpu_power_limit" Gauge ["gpu_uuid"] Family;
    GpuEnergy = "nv_energy_consumption" Counter ["gpu_uuid"] Family;
    PinnedMemoryTotal = "nv_pinned_memory_pool_total_bytes" Gauge [] Family;
    PinnedMemoryUsed = "nv_pinned_memory_pool_used_bytes" Gauge [] Family;
    GpuTemperature = "pharos_gpu_temperature_celsius" Gauge ["gpu_uuid"] Family;
    GpuMemoryBandwidth = "pharos_gpu_memory_bandwidth_utilization" Gauge ["gpu_uuid"] Family;
    WorkerCpu = "pharos_worker_cpu_seconds_total" Counter ["model", "version", "instance"] Family;
    WorkerMemory = "pharos_worker_resident_bytes" Gauge ["model", "version", "instance"] Family;
    WorkerGpuMemory = "pharos_worker_gpu_memory_bytes" Gauge ["model", "version", "instance", "gpu_uuid"] Family;
    WorkerGpuUtilization = "pharos_worker_gpu_utilization" Gauge ["model", "version", "instance", "gpu_uuid"] Family;
    ProcessCpu = "process_cpu_seconds_total" Counter [] Family;
    ProcessMemory = "process_resident_memory_bytes" Gauge [] Family;
    ProcessFds = "process_open_fds" Gauge [] Family;
    ProcessStart = "process_start_time_seconds" Gauge [] Family;
    BuildInfo = "pharos_build_info" Gauge ["version"] Family;
    Requests = "pharos_requests_total" Counter ["protocol", "route", "code"] Answers;
    RequestFailures = "pharos_request_failures_total" Counter ["protocol", "route", "reason"] RequestFailures;
    Batches = "pharos_batches_total" Counter ["model", "version", "reason"] full(Batches);
    PendingByPriority = "pharos_pending_requests" Gauge ["model", "version", "priority"] Family;
    OldestPending = "pharos_oldest_pending_seconds" Gauge ["model", "version"] Family;
    ExecutingRequests = "pharos_executing_requests" Gauge [] Family;
    WaitingRequests = "pharos_waiting_requests" Gauge [] Family;
    ExecutionSlots = "pharos_execution_slots" Gauge [] Family;
    ModelExecuting = "pharos_model_executing_requests" Gauge ["model", "version"] Family;
    ModelWaiting = "pharos_model_waiting_requests" Gauge ["model", "version"] Family;
    ModelSlots = "pharos_model_execution_slots" Gauge ["model", "version"] Family;
    ModelBatchSlots = "pharos_model_batch_free_slots" Gauge ["model", "version"] Family;
    OpenStreams = "pharos_open_streams" Gauge ["protocol"] OpenStreams;
    ModelLastLoad = "pharos_model_last_load_successful" Gauge ["model"] Family;
    ModelState = "pharos_model_state" Gauge ["model", "version", "state"] Family;
    ModelChanges = "pharos_model_changes_total" Counter ["change", "result"] Family;
    OnDemandLoads = "pharos_on_demand_loads_total" Counter ["model", "result"] Family;
    OnDemandUnloads = "pharos_on_demand_unloads_total" Counter ["model", "reason"] Family;
    OnDemandHits = "pharos_on_demand_hits_total" Counter ["model"] Family;
    ModelMemory = "pharos_model_memory_bytes" Gauge ["model", "version"] Family;
    ModelMemoryLimit = "pharos_model_memory_limit_bytes" Gauge [] Family;
    ModelMemoryUsed = "pharos_model_memory_used_bytes" Gauge [] Family;
    ModelGpuMemory = "pharos_model_gpu_memory_bytes" Gauge ["model", "version", "gpu_uuid"] Family;
    ModelGpuMemoryLimit = "pharos_model_gpu_memory_limit_bytes" Gauge ["gpu_uuid"] Family;
    ModelGpuMemoryUsed = "pharos_model_gpu_memory_used_bytes" Gauge ["gpu_uuid"] Family;
    OnDemandWait = "pharos_on_demand_wait_seconds" Histogram ["model"] Family, Seconds;
    OnDemandWaiting = "pharos_on_demand_waiting_requests" Gauge [] Family;
    Connections = "pharos_connections_total" Counter ["listener"] Family;
    ConnectionsOpen = "pharos_connections_open" Gauge ["listener"] Family;
    ConnectionsRefused = "pharos_connections_refused_total" Counter ["listener", "reason"] Family;
    CredentialReloads = "pharos_credential_reloads_total" Counter ["file", "result"] Family;
    RepositoryFetches = "pharos_repository_fetches_total" Counter ["repository", "result"] Family;
    RepositoryBytes = "pharos_repository_fetched_bytes_total" Counter ["repository"] Family;
    RepositorySeconds = "pharos_repository_fetch_seconds_total" Counter ["repository"] Family;
    RepositoryReachable = "pharos_repository_reachable" Gauge ["repository"] Family;
    TenantRequests = "pharos_tenant_requests_total" Counter ["model", "version", "tenant"] full(Tenant(TenantValue::Requests));
    TenantFailures = "pharos_tenant_failures_total" Counter ["model", "version", "tenant"] full(Tenant(TenantValue::Failures));
    TenantQueue = "pharos_tenant_queue_seconds_total" Counter ["model", "version", "tenant"] full(Tenant(TenantValue::QueueNs));
    TenantCompute = "pharos_tenant_compute_seconds_total" Counter ["model", "version", "tenant"] full(Tenant(TenantValue::ComputeNs));
    SloGoodRequests = "pharos_slo_good_requests_total" Counter ["model", "version", "slo", "sli"] full(Objective(Good));
    SloRequests = "pharos_slo_requests_total" Counter ["model", "version", "slo", "sli"] full(Objective(All));
    SloObjective = "pharos_slo_objective_ratio" Gauge ["model", "version", "slo", "sli"] full(Objective(Share));
    SloThreshold = "pharos_slo_latency_threshold_seconds" Gauge ["model", "version", "slo", "sli"] full(Objective(Threshold));
    SloBudget = "pharos_slo_error_budget_remaining_ratio" Gauge ["model", "version", "slo", "sli"] full(Objective(Budget));
    Instances = "pharos_instances" Gauge ["model", "version", "state"] full(Instances);
    InstanceState = "pharos_instance_state" Gauge ["model", "version", "instance", "state"] Family;
    InstanceBusy = "pharos_instance_busy_seconds_total" Counter ["model", "version", "instance"] Family;
    InstanceRestarts = "pharos_instance_restarts_total" Counter ["model", "version"] full(Count(Restarts, One));
    QueueRefusals = "pharos_queue_refusals_total" Counter ["model", "version"] full(Count(QueueRefusals, One));
    OutputMismatches = "pharos_output_mismatches_total" Counter ["model", "version"] full(Count(OutputMismatches, One));
    Sequences = "pharos_sequences" Gauge ["model", "version", "state"] Family;
    SequenceSlots = "pharos_sequence_slots" Gauge ["model", "version"] Family;
    SequenceSlotsUsed = "pharos_sequence_slots_used" Gauge ["model", "version"] Family;
    SequencesIdleEvicted = "pharos_sequences_idle_evicted_total" Counter ["model", "version"] Family;
    SequenceStartErrors = "pharos_sequence_start_errors_total" Counter ["model", "version"] Family;
    SequenceRestarts = "pharos_sequence_restarts_total" Counter ["model", "version"] Family;
    RateLimiterWait = "pharos_rate_limiter_wait_seconds_total" Counter ["model", "version"] Family;
    RateLimiterWaiting = "pharos_rate_limiter_waiting_instances" Gauge ["model", "version"] Family;
    RateLimiterLimit = "pharos_rate_limiter_resource_limit" Gauge ["resource", "device"] Family;
    RateLimiterUsed = "pharos_rate_limiter_resource_used" Gauge ["resource", "device"] Family;
    EnsembleStep = "pharos_ensemble_step_duration_seconds" Histogram ["model", "version", "step", "member"] Family, Seconds;
    EnsembleOverhead = "pharos_ensemble_overhead_duration_seconds" Histogram ["model", "version"] Family, Seconds;
    EnsembleInflight = "pharos_ensemble_inflight_requests" Gauge ["model", "version", "step", "member"] Family;
    ArenaUsed = "pharos_arena_used_bytes" Gauge ["model", "version", "instance", "direction"] Family;
    CacheEntries = "pharos_cache_entries" Gauge [] Family;
    CacheBytes = "pharos_cache_bytes" Gauge [] Family;
    CacheEvictions = "pharos_cache_evictions_total" Counter [] Family;
    CacheErrors = "pharos_cache_errors_total" Counter ["reason"] Family;
    Traces = "pharos_traces_total" Counter ["result"] Family;
    TraceSpans = "pharos_trace_spans_total" Counter ["result"] Family;
    OtlpExports = "pharos_otlp_exports_total" Counter ["signal", "result"] Family;
    OtlpPoints = "pharos_otlp_data_points_total" Counter ["result"] Family;
    SharedMemoryRegions = "pharos_shared_memory_regions" Gauge ["kind"] Family;
    SharedMemoryBytes = "pharos_shared_memory_region_bytes" Gauge ["kind"] Family;
    SharedMemoryInUse = "pharos_shared_memory_in_use" Gauge ["kind"] Family;
    SharedMemoryTensors = "pharos_shared_memory_tensors_total" Counter ["kind", "direction"] Family;
    SharedMemoryTensorBytes = "pharos_shared_memory_tensor_bytes_total" Counter ["kind", "direction"] Family;
    Samples = "pharos_metric_samples_total" Counter ["source"] Family;
    SamplesDropped = "pharos_metric_samples_dropped_total" Counter ["model", "version"] full(Count(SamplesDropped, One));
    LinesMalformed = "pharos_metric_lines_malformed_total" Counter ["source"] Family;
    SeriesOverflowed = "pharos_metric_series_overflowed_total" Counter ["metric"] Family;
    ChannelBytes = "pharos_metric_channel_bytes" Gauge ["model", "version", "instance"] Family;
    TslogLines = "pharos_tslog_lines_total" Counter ["file"] UnloggedFamily;
    TslogSkipped = "pharos_tslog_lines_skipped_total" Counter ["file"] UnloggedFamily;
    TslogErrors = "pharos_tslog_write_errors_total" Counter ["file"] UnloggedFamily;
    LogLinesLost = "pharos_log_lines_lost_total" Counter ["file"] Family;
    Reloads = "pharos_metrics_reloads_total" Counter ["result"] Family;
}

/// The former names of renamed metrics. A definition that uses one is refused with the present name.
const FORMER_NAMES: &[(&str, Builtin)] = &[
    ("nv_inference_request_duration_histogram_us", Builtin::RequestHistogram),
    ("nv_inference_queue_duration_histogram_us", Builtin::QueueHistogram),
    ("nv_inference_compute_input_duration_histogram_us", Builtin::ComputeInputHistogram),
    ("nv_inference_compute_infer_duration_histogram_us", Builtin::ComputeInferHistogram),
    ("nv_inference_compute_output_duration_histogram_us", Builtin::ComputeOutputHistogram),
    ("pharos_ensemble_step_duration_us", Builtin::EnsembleStep),
    ("pharos_ensemble_overhead_duration_us", Builtin::EnsembleOverhead),
];

/// Upper bounds of durations in seconds: 50 us to 10 s.
pub(super) const DURATIONS: &[f64] =
    &[0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0];
/// Upper bounds of the time to the first response in milliseconds: those of Triton.
const FIRST_RESPONSE: &[f64] = &[100.0, 500.0, 2000.0, 5000.0];
/// Upper bounds of the time to the first response of a stream in seconds: prompts take from milliseconds to a minute.
const STREAM_FIRST_RESPONSE: &[f64] =
    &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0];
/// Upper bounds of the time between responses of a stream in seconds. Tokens are a few to some hundred milliseconds apart, so
/// the buckets are narrower there.
const STREAM_INTERVAL: &[f64] =
    &[0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0];
/// Upper bounds of the number of responses to a request. 0 counts the requests that had none.
const STREAM_LENGTH: &[f64] =
    &[0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0];
/// Upper bounds of batch sizes.
const BATCH_SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

impl Builtin {
    /// Returns the metric's name in `metrics.yaml` and in the views.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns the metric's type.
    pub fn kind(self) -> Kind {
        self.row().kind
    }

    /// Returns the names of its labels, in the order in which code gives their values. Series of models also carry `metric_tags`.
    pub fn dimensions(self) -> &'static [&'static str] {
        self.row().dimensions
    }

    /// Returns the unit in which views show it, if it is a distribution of durations.
    pub(super) fn unit(self) -> Option<TimeUnit> {
        self.row().unit
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

    /// Returns where its values come from.
    pub(super) fn source(self) -> Source {
        self.row().source
    }

    /// Returns the metric that shows these values of models.
    pub(super) fn showing(value: ModelValue) -> Option<Self> {
        Self::ALL.iter().copied().find(|builtin| matches!(builtin.source(), Model(_, shown) if shown == value))
    }

    /// Returns whether code writes its series through the cache by label values, rather than through `metrics::record`.
    pub fn is_family(self) -> bool {
        matches!(self.source(), Family | UnloggedFamily)
    }

    /// Returns the default upper bounds of a histogram.
    pub fn buckets(self) -> &'static [f64] {
        match self.source() {
            Model(_, FirstResponse) => FIRST_RESPONSE,
            Model(_, BatchSizes) => BATCH_SIZES,
            Model(_, Stream(StreamValue::FirstResponse)) => STREAM_FIRST_RESPONSE,
            Model(_, Stream(StreamValue::Interval)) => STREAM_INTERVAL,
            Model(_, Stream(StreamValue::Length)) => STREAM_LENGTH,
            _ => DURATIONS,
        }
    }

    /// Returns whether a model's configuration can set its buckets.
    pub fn has_buckets_of_models(self) -> bool {
        self.kind() == Kind::Histogram && matches!(self.source(), Model(..))
    }

    /// Returns whether its series have the labels that they have in Triton, where scrapes show labels in alphabetical order.
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

    /// Returns whether Triton's settings for latencies switch it: durations of requests and of their parts, of every type.
    pub fn is_latency(self) -> bool {
        match self.source() {
            Model(_, Count(_, scale) | CacheCount(_, scale)) => scale == Micros,
            Model(_, Durations(_) | FirstResponse | Quantiles(_) | CacheQuantiles(_)) => true,
            _ => false,
        }
    }

    /// Returns whether it counts requests by alias. Mode `legacy` shows only these metrics in a scrape.
    pub(super) fn is_by_alias(self) -> bool {
        matches!(self.source(), Model(Alias, _))
    }

    /// Returns whether each request that it counts gets a log line, as long as there is room for them.
    pub(super) fn logs_each_request(self) -> bool {
        matches!(self.source(), Model(Alias, Count(Requests, _)) | Source::HttpClass(_))
    }

    /// Returns whether each sample of this counter is pushed to the log, because its value has fractions.
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
