//! The metrics that the server's own code records. Code names a metric by this enum; what it is called in the views is
//! written in `metrics.yaml` and here, and a test holds the two together.

use super::catalog::Kind;

/// A metric that code of the server records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Builtin {
    /// `nv_inference_request_success`
    RequestSuccess,
    /// `nv_inference_request_failure`
    RequestFailure,
    /// `nv_inference_count`
    InferenceCount,
    /// `nv_inference_exec_count`
    ExecutionCount,
    /// `nv_inference_request_duration_us`
    RequestDuration,
    /// `nv_inference_queue_duration_us`
    QueueDuration,
    /// `nv_inference_compute_input_duration_us`
    ComputeInputDuration,
    /// `nv_inference_compute_infer_duration_us`
    ComputeInferDuration,
    /// `nv_inference_compute_output_duration_us`
    ComputeOutputDuration,
    /// `nv_inference_pending_request_count`
    PendingRequests,
    /// `nv_model_load_duration_secs`
    ModelLoadDuration,
    /// `ts_inference_requests_total`
    TsRequests,
    /// `ts_inference_latency_microseconds`
    TsLatency,
    /// `ts_queue_latency_microseconds`
    TsQueueLatency,
    /// `pharos_requests_total`
    Requests,
    /// `pharos_request_failures_total`
    RequestFailures,
    /// `pharos_instances`
    Instances,
    /// `pharos_instance_restarts_total`
    InstanceRestarts,
    /// `pharos_metric_samples_dropped_total`
    SamplesDropped,
}

const MODEL: &[&str] = &["model", "version"];
const TORCHSERVE: &[&str] = &["model_name", "model_version", "hostname"];

impl Builtin {
    /// Every built-in metric.
    pub const ALL: [Builtin; 19] = [
        Self::RequestSuccess,
        Self::RequestFailure,
        Self::InferenceCount,
        Self::ExecutionCount,
        Self::RequestDuration,
        Self::QueueDuration,
        Self::ComputeInputDuration,
        Self::ComputeInferDuration,
        Self::ComputeOutputDuration,
        Self::PendingRequests,
        Self::ModelLoadDuration,
        Self::TsRequests,
        Self::TsLatency,
        Self::TsQueueLatency,
        Self::Requests,
        Self::RequestFailures,
        Self::Instances,
        Self::InstanceRestarts,
        Self::SamplesDropped,
    ];

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

    /// The built-in metric of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|builtin| builtin.name() == name)
    }

    fn row(self) -> (&'static str, Kind, &'static [&'static str]) {
        use Kind::{Counter, Gauge};
        match self {
            Self::RequestSuccess => ("nv_inference_request_success", Counter, MODEL),
            Self::RequestFailure => ("nv_inference_request_failure", Counter, &["model", "version", "reason"]),
            Self::InferenceCount => ("nv_inference_count", Counter, MODEL),
            Self::ExecutionCount => ("nv_inference_exec_count", Counter, MODEL),
            Self::RequestDuration => ("nv_inference_request_duration_us", Counter, MODEL),
            Self::QueueDuration => ("nv_inference_queue_duration_us", Counter, MODEL),
            Self::ComputeInputDuration => ("nv_inference_compute_input_duration_us", Counter, MODEL),
            Self::ComputeInferDuration => ("nv_inference_compute_infer_duration_us", Counter, MODEL),
            Self::ComputeOutputDuration => ("nv_inference_compute_output_duration_us", Counter, MODEL),
            Self::PendingRequests => ("nv_inference_pending_request_count", Gauge, MODEL),
            Self::ModelLoadDuration => ("nv_model_load_duration_secs", Gauge, MODEL),
            Self::TsRequests => ("ts_inference_requests_total", Counter, TORCHSERVE),
            Self::TsLatency => ("ts_inference_latency_microseconds", Counter, TORCHSERVE),
            Self::TsQueueLatency => ("ts_queue_latency_microseconds", Counter, TORCHSERVE),
            Self::Requests => ("pharos_requests_total", Counter, &["protocol", "route", "code"]),
            Self::RequestFailures => ("pharos_request_failures_total", Counter, &["protocol", "route", "reason"]),
            Self::Instances => ("pharos_instances", Gauge, &["model", "version", "state"]),
            Self::InstanceRestarts => ("pharos_instance_restarts_total", Counter, MODEL),
            Self::SamplesDropped => ("pharos_metric_samples_dropped_total", Counter, MODEL),
        }
    }
}
