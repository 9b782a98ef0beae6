//! Closed lists of label values, so that clients cannot create an unbounded number of series.

mod connections;

use pharos_base::error::Reason;

pub use connections::{Credentials, Listener, Refused};

named_enum! {
    /// The protocol of a request (label `protocol`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Protocol {
        /// HTTP.
        Http => "http",
        /// gRPC.
        Grpc => "grpc",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl Protocol {
    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

named_enum! {
    /// The endpoint of a request (label `route`), of either protocol.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Route {
        /// Liveness of the server.
        Live => "live",
        /// Readiness of the server.
        Ready => "ready",
        /// Name, version and extensions.
        ServerMetadata => "server_metadata",
        /// A model's inputs and outputs.
        ModelMetadata => "model_metadata",
        /// Readiness of a model.
        ModelReady => "model_ready",
        /// A model's configuration.
        ModelConfig => "model_config",
        /// Statistics of one or all models.
        ModelStatistics => "model_statistics",
        /// Inference, one response.
        Infer => "infer",
        /// Inference over a gRPC stream.
        StreamInfer => "stream_infer",
        /// The generate extension.
        Generate => "generate",
        /// The generate extension with server-sent events.
        GenerateStream => "generate_stream",
        /// A chat completion of OpenAI's API.
        ChatCompletion => "chat_completion",
        /// A completion of OpenAI's API.
        Completion => "completion",
        /// Embeddings of OpenAI's API.
        Embeddings => "embeddings",
        /// Documents in the order of their relevance.
        Rerank => "rerank",
        /// Scores of pairs of texts.
        Score => "score",
        /// The classes of texts.
        Classify => "classify",
        /// The tokens of a text.
        Tokenize => "tokenize",
        /// The text of tokens.
        Detokenize => "detokenize",
        /// A response of OpenAI's Responses API.
        Response => "response",
        /// A response of OpenAI's Responses API that a client expects to be stored.
        StoredResponse => "stored_response",
        /// The list of the models that are ready, for clients that send requests to them.
        Models => "models",
        /// The list of models.
        RepositoryIndex => "repository_index",
        /// Loading a model.
        RepositoryLoad => "repository_load",
        /// Unloading a model.
        RepositoryUnload => "repository_unload",
        /// The list of registered system regions.
        SystemSharedMemoryStatus => "system_shared_memory_status",
        /// Registering a system region.
        SystemSharedMemoryRegister => "system_shared_memory_register",
        /// Unregistering system regions.
        SystemSharedMemoryUnregister => "system_shared_memory_unregister",
        /// The list of registered CUDA regions.
        CudaSharedMemoryStatus => "cuda_shared_memory_status",
        /// Registering a CUDA region.
        CudaSharedMemoryRegister => "cuda_shared_memory_register",
        /// Unregistering CUDA regions.
        CudaSharedMemoryUnregister => "cuda_shared_memory_unregister",
        /// Trace settings.
        TraceSetting => "trace_setting",
        /// Log settings.
        LogSettings => "log_settings",
        /// `grpc.health.v1.Health`.
        HealthCheck => "health_check",
        /// gRPC server reflection.
        Reflection => "reflection",
        /// The stream of load reports.
        LoadReport => "load_report",
        /// The metrics endpoint.
        Metrics => "metrics",
        /// Health, by `GET /ping`.
        Ping => "ping",
        /// A prediction by `/predictions/MODEL`, or by the gRPC call of that name.
        Predict => "predict",
        /// A prediction whose response has several parts, by gRPC.
        StreamPredict => "stream_predict",
        /// An explanation.
        Explain => "explain",
        /// The list of models of the management API.
        ModelList => "model_list",
        /// The description of a model in the management API.
        ModelDescribe => "model_describe",
        /// Registering a model.
        ModelRegister => "model_register",
        /// Changing the number of a model's workers.
        ModelScale => "model_scale",
        /// Making a version the default.
        ModelSetDefault => "model_set_default",
        /// Unregistering a model.
        ModelUnregister => "model_unregister",
        /// Creating a token.
        Token => "token",
        /// The description of the API.
        ApiDescription => "api_description",
        /// Anything else: an unknown path or method, or bytes that do not form a request.
        Unknown => "unknown",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl Route {
    /// Returns whether its requests are inferences. These get load reports, and count in their
    /// rates.
    pub fn is_inference(self) -> bool {
        matches!(
            self,
            Self::Infer
                | Self::StreamInfer
                | Self::Generate
                | Self::GenerateStream
                | Self::ChatCompletion
                | Self::Completion
                | Self::Embeddings
                | Self::Rerank
                | Self::Score
                | Self::Classify
                | Self::Tokenize
                | Self::Detokenize
                | Self::Response
                | Self::Predict
                | Self::StreamPredict
                | Self::Explain
        )
    }

    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

named_enum! {
    /// The state of an instance of a model (label `state`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum InstanceState {
        /// Its process is starting or its model is loading.
        Starting => "starting",
        /// It can execute requests.
        Ready => "ready",
        /// Its process has ended or violated the protocol; the supervisor is cleaning up.
        Lost => "lost",
        /// It waits for its next start.
        Backoff => "backoff",
        /// It will not be started again.
        Failed => "failed",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl InstanceState {
    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

named_enum! {
    /// Why a model that is loaded on demand was unloaded (label `reason`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum OnDemandUnload {
        /// It had no requests for the time that the server is configured with.
        Idle => "idle",
        /// Another model needed its memory, or models have grown beyond the limit.
        Memory => "memory",
        /// Processes of the machine wait for memory.
        Pressure => "pressure",
    }
    /// Returns the label's value.
    pub fn as_str;
}

named_enum! {
    /// Why a model that generates text has ended a choice, in vLLM's terms (label `reason` of
    /// `pharos_llm_finished_total`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum FinishReason {
        /// At the end of the text, or at a stop string or token.
        Stop => "stop",
        /// At the limit of tokens.
        Length => "length",
        /// The client cancelled the request or disconnected.
        Abort => "abort",
        /// The request failed.
        Error => "error",
        /// For another reason, which the model has named.
        Other => "other",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl FinishReason {
    /// Returns the reason of this name in an output of a model; `None` while the choice goes on.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "" | "None" => None,
            "stop" => Some(Self::Stop),
            "length" => Some(Self::Length),
            "abort" => Some(Self::Abort),
            "error" => Some(Self::Error),
            _ => Some(Self::Other),
        }
    }

    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

named_enum! {
    /// Why an accepted request failed, in Triton's terms (label `reason` of
    /// `nv_inference_request_failure`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Failure {
        /// It was removed from the queue.
        Rejected => "REJECTED",
        /// The client cancelled it or disconnected.
        Canceled => "CANCELED",
        /// The backend, or the instance that ran it, failed.
        Backend => "BACKEND",
        /// Anything else.
        Other => "OTHER",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl Failure {
    /// Returns its index in `ALL`.
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

impl Failure {
    /// Returns Triton's category of a reason. Returns `None` for a reason that only occurs before a
    /// request enters a queue: Triton's statistics extension does not count validation errors and
    /// full queues as failures of the model.
    pub fn of(reason: Reason) -> Option<Self> {
        match reason {
            Reason::Malformed
            | Reason::Invalid
            | Reason::UnknownModel
            | Reason::TooLarge
            | Reason::QueueFull
            | Reason::RateLimited
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

named_enum! {
    /// The source of metric samples (label `source`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Source {
        /// A worker's shared-memory ring.
        Ring => "ring",
        /// Lines on a worker's standard output.
        Stdout => "stdout",
        /// StatsD datagrams.
        Statsd => "statsd",
    }
    /// Returns the label's value.
    pub fn as_str;
}

impl Source {
    /// Returns whether samples are lines of text, which may be malformed.
    pub(super) fn has_lines(self) -> bool {
        self != Self::Ring
    }
}

named_enum! {
    /// A change of a model version (label `change`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum ModelChange {
        /// The version is loaded or reloaded.
        Load => "load",
        /// Its number of instances changes.
        Resize => "resize",
        /// The version is unloaded.
        Unload => "unload",
    }
    /// Returns the label's value.
    pub fn as_str;
}

/// The results of changing a model or rereading a file such as the definition of the metrics or
/// credentials (label `result`).
pub const RELOAD_RESULTS: [&str; 2] = ["success", "failure"];

/// Returns the result of an attempt as one of [`RELOAD_RESULTS`].
pub fn result(succeeded: bool) -> &'static str {
    let [success, failure] = RELOAD_RESULTS;
    if succeeded { success } else { failure }
}

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
