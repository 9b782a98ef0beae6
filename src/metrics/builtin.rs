//! The metrics that the server's own code records. Code names a metric by this enum; what it is called in the views is
//! written in `metrics.yaml` and here, and a test holds the two together.

use super::catalog::Kind;

/// Where the values of a built-in metric live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    /// In the cells of a model or of the server's requests, which several views share; written by `metrics::record`.
    Cells,
    /// In series of its own, reached through the cache by name and label values.
    Family,
}
use Storage::{Cells, Family};

/// The rows: variant, name, type, labels in the order in which code gives their values, storage.
macro_rules! builtins {
    ($($variant:ident = $name:literal $kind:ident [$($label:literal),*] $storage:ident;)*) => {
        /// A metric that code of the server records.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Builtin {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Builtin {
            /// Every built-in metric.
            pub const ALL: &[Builtin] = &[$(Self::$variant),*];

            fn row(self) -> (&'static str, Kind, &'static [&'static str], Storage) {
                match self {
                    $(Self::$variant => ($name, Kind::$kind, &[$($label),*], $storage),)*
                }
            }
        }
    };
}

builtins! {
    RequestSuccess = "nv_inference_request_success" Counter ["model", "version"] Cells;
    RequestFailure = "nv_inference_request_failure" Counter ["model", "version", "reason"] Cells;
    InferenceCount = "nv_inference_count" Counter ["model", "version"] Cells;
    ExecutionCount = "nv_inference_exec_count" Counter ["model", "version"] Cells;
    RequestDuration = "nv_inference_request_duration_us" Counter ["model", "version"] Cells;
    QueueDuration = "nv_inference_queue_duration_us" Counter ["model", "version"] Cells;
    ComputeInputDuration = "nv_inference_compute_input_duration_us" Counter ["model", "version"] Cells;
    ComputeInferDuration = "nv_inference_compute_infer_duration_us" Counter ["model", "version"] Cells;
    ComputeOutputDuration = "nv_inference_compute_output_duration_us" Counter ["model", "version"] Cells;
    CacheHits = "nv_cache_num_hits_per_model" Counter ["model", "version"] Cells;
    CacheMisses = "nv_cache_num_misses_per_model" Counter ["model", "version"] Cells;
    CacheHitDuration = "nv_cache_hit_duration_per_model" Counter ["model", "version"] Cells;
    CacheMissDuration = "nv_cache_miss_duration_per_model" Counter ["model", "version"] Cells;
    PendingRequests = "nv_inference_pending_request_count" Gauge ["model", "version"] Cells;
    ModelLoadDuration = "nv_model_load_duration_secs" Gauge ["model", "version"] Cells;
    RequestHistogram = "nv_inference_request_duration_histogram_us" Histogram ["model", "version"] Cells;
    QueueHistogram = "nv_inference_queue_duration_histogram_us" Histogram ["model", "version"] Cells;
    ComputeInputHistogram = "nv_inference_compute_input_duration_histogram_us" Histogram ["model", "version"] Cells;
    ComputeInferHistogram = "nv_inference_compute_infer_duration_histogram_us" Histogram ["model", "version"] Cells;
    ComputeOutputHistogram = "nv_inference_compute_output_duration_histogram_us" Histogram ["model", "version"] Cells;
    FirstResponseHistogram = "nv_inference_first_response_histogram_ms" Histogram ["model", "version"] Cells;
    BatchSize = "pharos_batch_size" Histogram ["model", "version"] Cells;
    RequestSummary = "nv_inference_request_summary_us" Summary ["model", "version"] Cells;
    QueueSummary = "nv_inference_queue_summary_us" Summary ["model", "version"] Cells;
    ComputeInputSummary = "nv_inference_compute_input_summary_us" Summary ["model", "version"] Cells;
    ComputeInferSummary = "nv_inference_compute_infer_summary_us" Summary ["model", "version"] Cells;
    ComputeOutputSummary = "nv_inference_compute_output_summary_us" Summary ["model", "version"] Cells;
    CacheHitSummary = "nv_cache_hit_summary_per_model" Summary ["model", "version"] Cells;
    CacheMissSummary = "nv_cache_miss_summary_per_model" Summary ["model", "version"] Cells;
    TsRequests = "ts_inference_requests_total" Counter ["model_name", "model_version", "hostname"] Cells;
    TsLatency = "ts_inference_latency_microseconds" Counter ["model_name", "model_version", "hostname"] Cells;
    TsQueueLatency = "ts_queue_latency_microseconds" Counter ["model_name", "model_version", "hostname"] Cells;
    Requests2xx = "Requests2XX" Counter ["Level", "Hostname"] Cells;
    Requests4xx = "Requests4XX" Counter ["Level", "Hostname"] Cells;
    Requests5xx = "Requests5XX" Counter ["Level", "Hostname"] Cells;
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
    Requests = "pharos_requests_total" Counter ["protocol", "route", "code"] Cells;
    RequestFailures = "pharos_request_failures_total" Counter ["protocol", "route", "reason"] Cells;
    Batches = "pharos_batches_total" Counter ["model", "version", "reason"] Cells;
    PendingByPriority = "pharos_pending_requests" Gauge ["model", "version", "priority"] Family;
    OldestPending = "pharos_oldest_pending_seconds" Gauge ["model", "version"] Family;
    OpenStreams = "pharos_open_streams" Gauge ["protocol"] Cells;
    ModelState = "pharos_model_state" Gauge ["model", "version", "state"] Family;
    ModelChanges = "pharos_model_changes_total" Counter ["change", "result"] Family;
    Connections = "pharos_connections_total" Counter ["listener"] Family;
    ConnectionsOpen = "pharos_connections_open" Gauge ["listener"] Family;
    ConnectionsRefused = "pharos_connections_refused_total" Counter ["listener", "reason"] Family;
    CredentialReloads = "pharos_credential_reloads_total" Counter ["file", "result"] Family;
    RepositoryFetches = "pharos_repository_fetches_total" Counter ["repository", "result"] Family;
    RepositoryBytes = "pharos_repository_fetched_bytes_total" Counter ["repository"] Family;
    RepositorySeconds = "pharos_repository_fetch_seconds_total" Counter ["repository"] Family;
    RepositoryReachable = "pharos_repository_reachable" Gauge ["repository"] Family;
    Instances = "pharos_instances" Gauge ["model", "version", "state"] Cells;
    InstanceState = "pharos_instance_state" Gauge ["model", "version", "instance", "state"] Family;
    InstanceRestarts = "pharos_instance_restarts_total" Counter ["model", "version"] Cells;
    OutputMismatches = "pharos_output_mismatches_total" Counter ["model", "version"] Cells;
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
    EnsembleStep = "pharos_ensemble_step_duration_us" Histogram ["model", "version", "step", "member"] Family;
    EnsembleOverhead = "pharos_ensemble_overhead_duration_us" Histogram ["model", "version"] Family;
    EnsembleInflight = "pharos_ensemble_inflight_requests" Gauge ["model", "version", "step", "member"] Family;
    ArenaUsed = "pharos_arena_used_bytes" Gauge ["model", "version", "instance", "direction"] Family;
    CacheEntries = "pharos_cache_entries" Gauge [] Family;
    CacheBytes = "pharos_cache_bytes" Gauge [] Family;
    CacheEvictions = "pharos_cache_evictions_total" Counter [] Family;
    CacheErrors = "pharos_cache_errors_total" Counter ["reason"] Family;
    Traces = "pharos_traces_total" Counter ["result"] Family;
    TraceSpans = "pharos_trace_spans_total" Counter ["result"] Family;
    SharedMemoryRegions = "pharos_shared_memory_regions" Gauge ["kind"] Family;
    SharedMemoryBytes = "pharos_shared_memory_region_bytes" Gauge ["kind"] Family;
    SharedMemoryInUse = "pharos_shared_memory_in_use" Gauge ["kind"] Family;
    SharedMemoryTensors = "pharos_shared_memory_tensors_total" Counter ["kind", "direction"] Family;
    SharedMemoryTensorBytes = "pharos_shared_memory_tensor_bytes_total" Counter ["kind", "direction"] Family;
    Samples = "pharos_metric_samples_total" Counter ["source"] Family;
    SamplesDropped = "pharos_metric_samples_dropped_total" Counter ["model", "version"] Cells;
    LinesMalformed = "pharos_metric_lines_malformed_total" Counter ["source"] Family;
    SeriesOverflowed = "pharos_metric_series_overflowed_total" Counter ["metric"] Family;
    ChannelBytes = "pharos_metric_channel_bytes" Gauge ["model", "version", "instance"] Family;
    TslogLines = "pharos_tslog_lines_total" Counter ["file"] Family;
    TslogSkipped = "pharos_tslog_lines_skipped_total" Counter ["file"] Family;
    TslogErrors = "pharos_tslog_write_errors_total" Counter ["file"] Family;
    LogLinesLost = "pharos_log_lines_lost_total" Counter ["file"] Family;
    Reloads = "pharos_metrics_reloads_total" Counter ["result"] Family;
}

/// Upper bounds of durations in microseconds: 50 us to 10 s.
pub(super) const MICROSECONDS: &[f64] =
    &[50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7];
/// Upper bounds of the time to the first response in milliseconds: those of Triton.
const FIRST_RESPONSE: &[f64] = &[100.0, 500.0, 2000.0, 5000.0];
/// Upper bounds of batch sizes.
const BATCH_SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

impl Builtin {
    /// The metric's name in `metrics.yaml` and in the views.
    pub fn name(self) -> &'static str {
        self.row().0
    }

    /// Its type.
    pub fn kind(self) -> Kind {
        self.row().1
    }

    /// The labels its series carry, in any order (models' `metric_tags` come on top for Triton's names).
    pub fn dimensions(self) -> &'static [&'static str] {
        self.row().2
    }

    /// Whether its series are reached through the cache by label values, rather than written by `metrics::record`.
    pub fn is_family(self) -> bool {
        self.row().3 == Family
    }

    /// Upper bounds of a histogram whose definition names none.
    pub fn buckets(self) -> &'static [f64] {
        match self {
            Self::FirstResponseHistogram => FIRST_RESPONSE,
            Self::BatchSize => BATCH_SIZES,
            _ => MICROSECONDS,
        }
    }

    /// Whether Triton's settings for latencies switch it: durations of requests and of their parts, of every type.
    pub fn is_latency(self) -> bool {
        let durations = [
            Self::RequestDuration,
            Self::QueueDuration,
            Self::ComputeInputDuration,
            Self::ComputeInferDuration,
            Self::ComputeOutputDuration,
            Self::CacheHitDuration,
            Self::CacheMissDuration,
        ];
        match self.kind() {
            Kind::Counter => durations.contains(&self),
            Kind::Gauge => false,
            Kind::Histogram => !matches!(self, Self::BatchSize | Self::EnsembleStep | Self::EnsembleOverhead),
            Kind::Summary => true,
        }
    }

    /// Whether TorchServe's legacy mode shows it in a scrape.
    pub fn is_legacy_scrape(self) -> bool {
        matches!(self, Self::TsRequests | Self::TsLatency | Self::TsQueueLatency)
    }

    /// Whether TorchServe logs a line for each request that it counts.
    pub(super) fn counts_requests(self) -> bool {
        matches!(self, Self::TsRequests | Self::Requests2xx | Self::Requests4xx | Self::Requests5xx)
    }

    /// Whether it tells how the metric logs are written.
    pub(super) fn is_about_logs(self) -> bool {
        matches!(self, Self::TslogLines | Self::TslogSkipped | Self::TslogErrors)
    }

    /// The built-in metric of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|builtin| builtin.name() == name)
    }
}
