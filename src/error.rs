//! What went wrong with a request, as one closed list of codes. How a code looks over HTTP and gRPC is decided in one
//! table, [`ErrorCode::http_status`] and [`ErrorCode::grpc_code`], so that the protocols cannot drift apart.

use std::fmt;

/// The closed list of error codes (the same eight as Triton's core).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// None of the others.
    Unknown,
    /// A fault of the server.
    Internal,
    /// The thing asked for does not exist.
    NotFound,
    /// The request is wrong; repeating it will not help.
    InvalidArg,
    /// The server cannot do this now; repeating it may help.
    Unavailable,
    /// The server never does this.
    Unsupported,
    /// The thing to be made exists already.
    AlreadyExists,
    /// The client gave up.
    Cancelled,
    /// The time that the client would wait is over.
    DeadlineExceeded,
}

impl ErrorCode {
    /// The HTTP status: 400, 404, 500, 501, 503 or 504.
    pub fn http_status(self) -> u16 {
        self.row().0
    }

    /// The gRPC status code's number (`google.rpc.Code`).
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
        }
    }

    /// A stable small number for the worker wire.
    pub fn to_wire(self) -> u8 {
        match self {
            Self::Unknown => 0,
            Self::Internal => 1,
            Self::NotFound => 2,
            Self::InvalidArg => 3,
            Self::Unavailable => 4,
            Self::Unsupported => 5,
            Self::AlreadyExists => 6,
            Self::Cancelled => 7,
            Self::DeadlineExceeded => 8,
        }
    }

    /// The inverse of [`ErrorCode::to_wire`]; `None` for a number that is no code.
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
            _ => return None,
        })
    }
}

/// Why a request was refused or failed, for the metrics (label `reason`). Closed, so that series exist from the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The bytes could not be understood: bad JSON, framing, compression, headers.
    Malformed,
    /// Understood, but not what the model takes: names, shapes, datatypes, sizes, parameters.
    Invalid,
    /// The model or version does not exist.
    UnknownModel,
    /// The model, version or server is not ready, or is stopping.
    NotReady,
    /// A limit on sizes was passed.
    TooLarge,
    /// The model's queue was full.
    QueueFull,
    /// The request waited longer than its timeout.
    Timeout,
    /// The client cancelled or went away.
    Cancelled,
    /// The backend failed while executing.
    Backend,
    /// The instance was lost while executing.
    InstanceLost,
    /// Shared-memory regions: unknown, too small, gone.
    SharedMemory,
    /// Something this server does not offer: unknown path, wrong method, unsupported feature.
    Unsupported,
    /// Who asks may not: the part of the protocol is restricted.
    Restricted,
    /// Who asks has not shown a token that is valid for this.
    Unauthenticated,
    /// A fault of the server itself.
    Internal,
}

impl Reason {
    /// Every reason, in the order in which they are documented.
    pub const ALL: [Reason; 15] = [
        Self::Malformed,
        Self::Invalid,
        Self::UnknownModel,
        Self::NotReady,
        Self::TooLarge,
        Self::QueueFull,
        Self::Timeout,
        Self::Cancelled,
        Self::Backend,
        Self::InstanceLost,
        Self::SharedMemory,
        Self::Unsupported,
        Self::Restricted,
        Self::Unauthenticated,
        Self::Internal,
    ];

    /// The label's value, for example `QUEUE_FULL`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "MALFORMED",
            Self::Invalid => "INVALID",
            Self::UnknownModel => "UNKNOWN_MODEL",
            Self::NotReady => "NOT_READY",
            Self::TooLarge => "TOO_LARGE",
            Self::QueueFull => "QUEUE_FULL",
            Self::Timeout => "TIMEOUT",
            Self::Cancelled => "CANCELLED",
            Self::Backend => "BACKEND",
            Self::InstanceLost => "INSTANCE_LOST",
            Self::SharedMemory => "SHARED_MEMORY",
            Self::Unsupported => "UNSUPPORTED",
            Self::Restricted => "RESTRICTED",
            Self::Unauthenticated => "UNAUTHENTICATED",
            Self::Internal => "INTERNAL",
        }
    }
}

/// One error of one request: the code decides the status, the reason the metric, the message is what the client reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferError {
    /// What kind of error this is to the client.
    pub code: ErrorCode,
    /// What kind of error this is to the operator.
    pub reason: Reason,
    /// The client's text: what was wrong, with which value, and what is allowed.
    pub message: String,
}

impl InferError {
    /// An error with its own code and reason.
    pub fn new(code: ErrorCode, reason: Reason, message: impl Into<String>) -> Self {
        Self { code, reason, message: message.into() }
    }

    /// The request is understood but not valid (`InvalidArg`, `INVALID`).
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArg, Reason::Invalid, message)
    }

    /// The bytes are not understood (`InvalidArg`, `MALFORMED`).
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArg, Reason::Malformed, message)
    }

    /// The server or the model is not ready for this (`Unavailable`, `NOT_READY`).
    pub fn not_ready(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unavailable, Reason::NotReady, message)
    }

    /// The server does not offer this (`Unsupported`, `UNSUPPORTED`).
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unsupported, Reason::Unsupported, message)
    }

    /// A fault of the server (`Internal`, `INTERNAL`).
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Internal, Reason::Internal, message)
    }

    /// The client went away or cancelled; the text is empty, as Triton's is.
    pub fn cancelled() -> Self {
        Self::new(ErrorCode::Cancelled, Reason::Cancelled, "")
    }

    /// The same error with Triton's prefix for errors of a parsed request: `[request id: ID] `.
    pub fn with_request_id(mut self, id: &str) -> Self {
        let id = if id.is_empty() { "<id_unknown>" } else { id };
        self.message = format!("[request id: {id}] {}", self.message);
        self
    }
}

impl fmt::Display for InferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for InferError {}
