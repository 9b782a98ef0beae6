//! Errors of requests: one closed list of codes. One table, [`ErrorCode::http_status`] and
//! [`ErrorCode::grpc_code`], maps a code to HTTP and gRPC, so that the protocols cannot diverge.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The text of [`Cause::Exiting`].
pub const EXITING_TEXT: &str = "Server exiting";

/// The closed list of error codes: the eight of Triton's core, one for deadlines and one for limits
/// of tenants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// An error without a more specific code.
    Unknown = 0,
    /// A fault of the server.
    Internal = 1,
    /// The requested entity does not exist.
    NotFound = 2,
    /// The request is invalid; a retry will not help.
    InvalidArg = 3,
    /// The server cannot serve the request now; a retry may help.
    Unavailable = 4,
    /// The server does not implement the operation.
    Unsupported = 5,
    /// The entity that the request would create exists already.
    AlreadyExists = 6,
    /// The client cancelled the request.
    Cancelled = 7,
    /// The deadline of the request passed.
    DeadlineExceeded = 8,
    /// The tenant of the request has used what it is allowed to; a retry later will help.
    ResourceExhausted = 9,
}

impl ErrorCode {
    /// Returns the HTTP status: 400, 404, 429, 500, 501, 503 or 504.
    pub fn http_status(self) -> u16 {
        self.row().0
    }

    /// Returns the number of the gRPC status code (`google.rpc.Code`).
    pub fn grpc_code(self) -> i32 {
        self.row().1
    }

    fn row(self) -> (u16, i32) {
        match self {
            Self::Unknown => (400, 2),
            Self::Internal => (500, 13),
            Self::NotFound => (404, 5),
            Self::InvalidArg => (400, 3),
            Self::Unavailable => (503, 14),
            Self::Unsupported => (501, 12),
            Self::AlreadyExists => (400, 6),
            Self::Cancelled => (400, 1),
            Self::DeadlineExceeded => (504, 4),
            Self::ResourceExhausted => (429, 8),
        }
    }

    /// Returns the number of the code in frames between frontend and worker.
    pub fn to_wire(self) -> u8 {
        self as u8
    }

    /// Inverts [`ErrorCode::to_wire`]; `None` for an unknown number.
    pub fn from_wire(number: u8) -> Option<Self> {
        Some(match number {
            0 => Self::Unknown,
            1 => Self::Internal,
            2 => Self::NotFound,
            3 => Self::InvalidArg,
            4 => Self::Unavailable,
            5 => Self::Unsupported,
            6 => Self::AlreadyExists,
            7 => Self::Cancelled,
            8 => Self::DeadlineExceeded,
            9 => Self::ResourceExhausted,
            _ => return None,
        })
    }
}

named_enum! {
    /// Why a request was refused or failed, for the metrics (label `reason`). Closed, so that
    /// series exist from the start.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Reason {
        /// The bytes cannot be parsed: bad JSON, framing, compression, headers.
        Malformed => "MALFORMED",
        /// Parsed, but the model does not accept it: names, shapes, datatypes, sizes, parameters.
        Invalid => "INVALID",
        /// The model or version does not exist.
        UnknownModel => "UNKNOWN_MODEL",
        /// The model, version or server is not ready, or is stopping.
        NotReady => "NOT_READY",
        /// A size limit was exceeded.
        TooLarge => "TOO_LARGE",
        /// The model's queue was full.
        QueueFull => "QUEUE_FULL",
        /// The tenant of the request had used its budget of tokens.
        RateLimited => "RATE_LIMITED",
        /// The request waited longer than its timeout.
        Timeout => "TIMEOUT",
        /// The client cancelled the request or disconnected.
        Cancelled => "CANCELLED",
        /// The backend failed while executing.
        Backend => "BACKEND",
        /// The instance was lost while executing.
        InstanceLost => "INSTANCE_LOST",
        /// Shared-memory regions: unknown, too small, removed.
        SharedMemory => "SHARED_MEMORY",
        /// The server does not offer it: unknown path, wrong method, unsupported feature.
        Unsupported => "UNSUPPORTED",
        /// The part of the protocol is restricted, and the request lacks the key.
        Restricted => "RESTRICTED",
        /// The request has no valid token.
        Unauthenticated => "UNAUTHENTICATED",
        /// A fault of the server itself.
        Internal => "INTERNAL",
    }
    /// Returns the label's value, for example `QUEUE_FULL`.
    pub fn as_str;
}

/// The cause of an error, where edges answer errors of the same code and reason differently.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cause {
    /// The code and the reason are all that an edge needs.
    #[default]
    Other,
    /// The server exits.
    Exiting,
    /// Versions of a model could not be loaded, each for its reason.
    FailedVersions(Arc<BTreeMap<u64, String>>),
    /// The tenant of the request had used its budget.
    RateLimited {
        /// When a retry will be accepted, if the tenant sends nothing else, in whole seconds.
        retry_after_s: u64,
    },
    /// A client set a log format that does not exist.
    UnknownLogFormat,
}

/// An error of one request. The code decides the status, the reason labels the metric, and the
/// client receives the message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InferError {
    /// The kind of error for the client.
    pub code: ErrorCode,
    /// The kind of error for the operator.
    pub reason: Reason,
    /// The text for the client: what was wrong, with which value, and what is allowed.
    pub message: String,
    /// The cause, for edges that distinguish more than codes and reasons.
    pub cause: Cause,
    /// The length of the prefix of the message that [`InferError::with_request_id`] has added.
    prefix: usize,
}

impl InferError {
    /// Creates an error with a code and a reason.
    pub fn new(code: ErrorCode, reason: Reason, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into(), cause: Cause::Other, prefix: 0 }
    }

    /// Creates an error for a request that can be parsed but is not valid (`InvalidArg`,
    /// `INVALID`).
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArg, Reason::Invalid, message)
    }

    /// Creates an error for bytes that cannot be parsed (`InvalidArg`, `MALFORMED`).
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArg, Reason::Malformed, message)
    }

    /// Creates an error for a server or model that is not ready (`Unavailable`, `NOT_READY`).
    pub fn not_ready(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unavailable, Reason::NotReady, message)
    }

    /// Creates the error of requests, loads and unloads that the exit of the server refuses or ends
    /// (`Unavailable`, `NOT_READY`).
    pub fn exiting() -> Self {
        Self::not_ready(EXITING_TEXT).with_cause(Cause::Exiting)
    }

    /// Creates an error for an operation that the server does not offer (`Unsupported`,
    /// `UNSUPPORTED`).
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unsupported, Reason::Unsupported, message)
    }

    /// Creates an error for a fault of the server (`Internal`, `INTERNAL`).
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, Reason::Internal, message)
    }

    /// Creates an error for a request that the client cancelled or abandoned; the text is empty, as
    /// Triton's is.
    pub fn cancelled() -> Self {
        Self::new(ErrorCode::Cancelled, Reason::Cancelled, "")
    }

    /// Sets the cause.
    #[must_use]
    pub fn with_cause(self, cause: Cause) -> Self {
        Self { cause, ..self }
    }

    /// Replaces the message.
    #[must_use]
    pub fn with_message(self, message: String) -> Self {
        Self { message, prefix: 0, ..self }
    }

    /// Adds Triton's prefix for errors of a parsed request: `[request id: ID] `.
    pub fn with_request_id(self, id: &str) -> Self {
        let id = if id.is_empty() { "<id_unknown>" } else { id };
        let mut message = format!("[request id: {id}] ");
        let prefix = message.len();
        message.push_str(&self.message);
        Self { message, prefix, ..self }
    }

    /// Returns the message without the prefix that [`InferError::with_request_id`] has added last.
    pub fn message_without_id(&self) -> &str {
        self.message.get(self.prefix..).unwrap_or(&self.message)
    }
}
