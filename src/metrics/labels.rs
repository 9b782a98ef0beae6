//! Closed lists of label values. Closed, so that the number of series is bounded whatever clients send.

mod connections;

use crate::error::Reason;

pub use connections::{Credentials, Listener, Refused};

/// How a request came in (label `protocol`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
}

impl Protocol {
    /// Every value, in order.
    pub const ALL: [Protocol; 2] = [Self::Http, Self::Grpc];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }

    /// Its place in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// What a request asked for (label `route`): every endpoint of either protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Route {
    /// Liveness of the server.
    Live,
    /// Readiness of the server.
    Ready,
    /// Name, version and extensions.
    ServerMetadata,
    /// A model's inputs and outputs.
    ModelMetadata,
    /// Readiness of a model.
    ModelReady,
    /// A model's configuration.
    ModelConfig,
    /// Statistics of one or all models.
    ModelStatistics,
    /// Inference, one response.
    Infer,
    /// Inference over a gRPC stream.
    StreamInfer,
    /// The generate extension.
    Generate,
    /// The generate extension with server-sent events.
    GenerateStream,
    /// The list of models.
    RepositoryIndex,
    /// Loading a model.
    RepositoryLoad,
    /// Unloading a model.
    RepositoryUnload,
    /// Registered system regions.
    SystemSharedMemoryStatus,
    /// Registering a system region.
    SystemSharedMemoryRegister,
    /// Unregistering system regions.
    SystemSharedMemoryUnregister,
    /// Registered CUDA regions.
    CudaSharedMemoryStatus,
    /// Registering a CUDA region.
    CudaSharedMemoryRegister,
    /// Unregistering CUDA regions.
    CudaSharedMemoryUnregister,
    /// Trace settings.
    TraceSetting,
    /// Log settings.
    LogSettings,
    /// `grpc.health.v1.Health`.
    HealthCheck,
    /// gRPC server reflection.
    Reflection,
    /// The metrics endpoint.
    Metrics,
    /// Health, by `GET /ping`.
    Ping,
    /// A prediction by `/predictions/MODEL`, or by the gRPC call of that name.
    Predict,
    /// A prediction whose response has several parts, by gRPC.
    StreamPredict,
    /// An explanation.
    Explain,
    /// The list of models of the management API.
    ModelList,
    /// The description of a model in the management API.
    ModelDescribe,
    /// Registering a model.
    ModelRegister,
    /// Changing the number of a model's workers.
    ModelScale,
    /// Making a version the default one.
    ModelSetDefault,
    /// Unregistering a model.
    ModelUnregister,
    /// A new token.
    Token,
    /// What the API is.
    ApiDescription,
    /// None of the others: an unknown path or method, or bytes before one could be read.
    Unknown,
}

impl Route {
    /// Every value, in order.
    pub const ALL: [Route; 38] = [
        Self::Live,
        Self::Ready,
        Self::ServerMetadata,
        Self::ModelMetadata,
        Self::ModelReady,
        Self::ModelConfig,
        Self::ModelStatistics,
        Self::Infer,
        Self::StreamInfer,
        Self::Generate,
        Self::GenerateStream,
        Self::RepositoryIndex,
        Self::RepositoryLoad,
        Self::RepositoryUnload,
        Self::SystemSharedMemoryStatus,
        Self::SystemSharedMemoryRegister,
        Self::SystemSharedMemoryUnregister,
        Self::CudaSharedMemoryStatus,
        Self::CudaSharedMemoryRegister,
        Self::CudaSharedMemoryUnregister,
        Self::TraceSetting,
        Self::LogSettings,
        Self::HealthCheck,
        Self::Reflection,
        Self::Metrics,
        Self::Ping,
        Self::Predict,
        Self::StreamPredict,
        Self::Explain,
        Self::ModelList,
        Self::ModelDescribe,
        Self::ModelRegister,
        Self::ModelScale,
        Self::ModelSetDefault,
        Self::ModelUnregister,
        Self::Token,
        Self::ApiDescription,
        Self::Unknown,
    ];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Ready => "ready",
            Self::ServerMetadata => "server_metadata",
            Self::ModelMetadata => "model_metadata",
            Self::ModelReady => "model_ready",
            Self::ModelConfig => "model_config",
            Self::ModelStatistics => "model_statistics",
            Self::Infer => "infer",
            Self::StreamInfer => "stream_infer",
            Self::Generate => "generate",
            Self::GenerateStream => "generate_stream",
            Self::RepositoryIndex => "repository_index",
            Self::RepositoryLoad => "repository_load",
            Self::RepositoryUnload => "repository_unload",
            Self::SystemSharedMemoryStatus => "system_shared_memory_status",
            Self::SystemSharedMemoryRegister => "system_shared_memory_register",
            Self::SystemSharedMemoryUnregister => "system_shared_memory_unregister",
            Self::CudaSharedMemoryStatus => "cuda_shared_memory_status",
            Self::CudaSharedMemoryRegister => "cuda_shared_memory_register",
            Self::CudaSharedMemoryUnregister => "cuda_shared_memory_unregister",
            Self::TraceSetting => "trace_setting",
            Self::LogSettings => "log_settings",
            Self::HealthCheck => "health_check",
            Self::Reflection => "reflection",
            Self::Metrics => "metrics",
            Self::Ping => "ping",
            Self::Predict => "predict",
            Self::StreamPredict => "stream_predict",
            Self::Explain => "explain",
            Self::ModelList => "model_list",
            Self::ModelDescribe => "model_describe",
            Self::ModelRegister => "model_register",
            Self::ModelScale => "model_scale",
            Self::ModelSetDefault => "model_set_default",
            Self::ModelUnregister => "model_unregister",
            Self::Token => "token",
            Self::ApiDescription => "api_description",
            Self::Unknown => "unknown",
        }
    }

    /// Its place in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// What an instance of a model is doing (label `state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InstanceState {
    /// Its process starts or its model loads.
    Starting,
    /// It executes requests.
    Ready,
    /// Its process ended or broke the protocol; it is being cleared away.
    Lost,
    /// It waits for its next start.
    Backoff,
    /// It is not started again.
    Failed,
}

impl InstanceState {
    /// Every value, in order.
    pub const ALL: [InstanceState; 5] = [Self::Starting, Self::Ready, Self::Lost, Self::Backoff, Self::Failed];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Lost => "lost",
            Self::Backoff => "backoff",
            Self::Failed => "failed",
        }
    }

    /// Its place in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// Why an accepted request failed, in Triton's words (label `reason` of `nv_inference_request_failure`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Failure {
    /// It was thrown out of the queue.
    Rejected,
    /// The client cancelled it or went away.
    Canceled,
    /// The backend, or the instance that ran it, failed.
    Backend,
    /// Anything else.
    Other,
}

impl Failure {
    /// Every value, in order.
    pub const ALL: [Failure; 4] = [Self::Rejected, Self::Canceled, Self::Backend, Self::Other];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rejected => "REJECTED",
            Self::Canceled => "CANCELED",
            Self::Backend => "BACKEND",
            Self::Other => "OTHER",
        }
    }

    /// Its place in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

impl Failure {
    /// How Triton calls this reason; `None` for one that only exists before a request is accepted into a queue, which a
    /// model's failures and statistics do not count (specification of the statistics extension as Triton implements it:
    /// validation errors and a full queue touch nothing).
    pub fn of(reason: Reason) -> Option<Self> {
        match reason {
            Reason::Malformed
            | Reason::Invalid
            | Reason::UnknownModel
            | Reason::TooLarge
            | Reason::QueueFull
            | Reason::Restricted
            | Reason::Unauthenticated
            | Reason::Unsupported => None,
            Reason::Timeout | Reason::NotReady => Some(Self::Rejected),
            Reason::Cancelled => Some(Self::Canceled),
            Reason::Backend | Reason::InstanceLost => Some(Self::Backend),
            Reason::SharedMemory | Reason::Internal => Some(Self::Other),
        }
    }
}

/// How a request was answered: its status and, if it did not succeed, why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The HTTP status (100 to 599) or the gRPC status code (0 to 16).
    pub code: u16,
    /// Why it was refused or failed; `None` for a success.
    pub reason: Option<Reason>,
}

/// The way that metric samples came in (label `source`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A worker's shared-memory ring.
    Ring,
    /// Lines that a worker prints.
    Stdout,
    /// StatsD datagrams.
    Statsd,
}

impl Source {
    /// Every value, in order.
    pub const ALL: [Source; 3] = [Self::Ring, Self::Stdout, Self::Statsd];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Stdout => "stdout",
            Self::Statsd => "statsd",
        }
    }

    /// Whether samples are lines of text, which may be malformed.
    pub(super) fn has_lines(self) -> bool {
        self != Self::Ring
    }
}

/// What is done with a model version (label `change`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelChange {
    /// It is loaded, for the first time or anew.
    Load,
    /// Instances of it are started and stopped.
    Resize,
    /// It is unloaded.
    Unload,
}

impl ModelChange {
    /// Every value, in order.
    pub const ALL: [ModelChange; 3] = [Self::Load, Self::Resize, Self::Unload];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Resize => "resize",
            Self::Unload => "unload",
        }
    }
}

/// How a change of a model, or reading a file again (the definition of the metrics, credentials), may end (label `result`):
/// well or not.
pub const RELOAD_RESULTS: [&str; 2] = ["success", "failure"];

/// The names of the gRPC status codes, by number (`google.rpc.Code`).
pub(super) const GRPC_CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_follow_the_lists() {
        assert!(Route::ALL.into_iter().enumerate().all(|(at, route)| route.index() == at));
        assert!(Protocol::ALL.into_iter().enumerate().all(|(at, protocol)| protocol.index() == at));
        assert!(InstanceState::ALL.into_iter().enumerate().all(|(at, state)| state.index() == at));
        assert!(Failure::ALL.into_iter().enumerate().all(|(at, failure)| failure.index() == at));
    }
}
