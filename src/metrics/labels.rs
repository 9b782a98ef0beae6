//! Closed lists of label values, so that clients cannot create an unbounded number of series.

mod connections;

use crate::error::Reason;

pub use connections::{Credentials, Listener, Refused};

/// The protocol of a request (label `protocol`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
}

impl Protocol {
    /// All values, in order.
    pub const ALL: [Protocol; 2] = [Self::Http, Self::Grpc];

    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }

    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// The endpoint of a request (label `route`), of either protocol.
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
    /// The list of registered system regions.
    SystemSharedMemoryStatus,
    /// Registering a system region.
    SystemSharedMemoryRegister,
    /// Unregistering system regions.
    SystemSharedMemoryUnregister,
    /// The list of registered CUDA regions.
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
    /// Making a version the default.
    ModelSetDefault,
    /// Unregistering a model.
    ModelUnregister,
    /// Creating a token.
    Token,
    /// The description of the API.
    ApiDescription,
    /// Anything else: an unknown path or method, or bytes that do not form a request.
    Unknown,
}

impl Route {
    /// All values, in order.
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

    /// Returns the label's value.
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

    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// The state of an instance of a model (label `state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InstanceState {
    /// Its process is starting or its model is loading.
    Starting,
    /// It can execute requests.
    Ready,
    /// Its process has ended or violated the protocol; the supervisor is cleaning up.
    Lost,
    /// It waits for its next start.
    Backoff,
    /// It will not be started again.
    Failed,
}

impl InstanceState {
    /// All values, in order.
    pub const ALL: [InstanceState; 5] = [Self::Starting, Self::Ready, Self::Lost, Self::Backoff, Self::Failed];

    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Lost => "lost",
            Self::Backoff => "backoff",
            Self::Failed => "failed",
        }
    }

    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// Why an accepted request failed, in Triton's terms (label `reason` of `nv_inference_request_failure`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Failure {
    /// It was removed from the queue.
    Rejected,
    /// The client cancelled it or disconnected.
    Canceled,
    /// The backend, or the instance that ran it, failed.
    Backend,
    /// Anything else.
    Other,
}

impl Failure {
    /// All values, in order.
    pub const ALL: [Failure; 4] = [Self::Rejected, Self::Canceled, Self::Backend, Self::Other];

    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rejected => "REJECTED",
            Self::Canceled => "CANCELED",
            Self::Backend => "BACKEND",
            Self::Other => "OTHER",
        }
    }

    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

impl Failure {
    /// Returns Triton's category of a reason. Returns `None` for a reason that only occurs before a request enters a
    /// queue: Triton's statistics extension does not count validation errors and full queues as failures of the model.
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

/// The outcome of a request: its status and, for a failure, the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The HTTP status (100 to 599) or the gRPC status code (0 to 16).
    pub code: u16,
    /// The reason for a refusal or failure; `None` for a success.
    pub reason: Option<Reason>,
}

/// The source of metric samples (label `source`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A worker's shared-memory ring.
    Ring,
    /// Lines on a worker's standard output.
    Stdout,
    /// StatsD datagrams.
    Statsd,
}

impl Source {
    /// All values, in order.
    pub const ALL: [Source; 3] = [Self::Ring, Self::Stdout, Self::Statsd];

    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Stdout => "stdout",
            Self::Statsd => "statsd",
        }
    }

    /// Returns whether samples are lines of text, which may be malformed.
    pub(super) fn has_lines(self) -> bool {
        self != Self::Ring
    }
}

/// A change of a model version (label `change`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelChange {
    /// The version is loaded or reloaded.
    Load,
    /// Its number of instances changes.
    Resize,
    /// The version is unloaded.
    Unload,
}

impl ModelChange {
    /// All values, in order.
    pub const ALL: [ModelChange; 3] = [Self::Load, Self::Resize, Self::Unload];

    /// Returns the label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Load => "load",
            Self::Resize => "resize",
            Self::Unload => "unload",
        }
    }
}

/// The results of changing a model or rereading a file such as the definition of the metrics or credentials (label `result`).
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
    fn indexes_match_the_lists() {
        assert!(Route::ALL.into_iter().enumerate().all(|(at, route)| route.index() == at));
        assert!(Protocol::ALL.into_iter().enumerate().all(|(at, protocol)| protocol.index() == at));
        assert!(InstanceState::ALL.into_iter().enumerate().all(|(at, state)| state.index() == at));
        assert!(Failure::ALL.into_iter().enumerate().all(|(at, failure)| failure.index() == at));
    }
}
