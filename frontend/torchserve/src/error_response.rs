//! Errors of TorchServe's endpoints: a status, a Java exception, and a message.

use std::fmt;

use pharos::error::{EXITING_TEXT, Reason};

/// The Java exception of an error; clients check its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exception {
    /// The request is invalid.
    BadRequest,
    /// The model version is already registered.
    ConflictStatus,
    /// The archive cannot be downloaded.
    DownloadArchive,
    /// A page of a list does not exist.
    IndexOutOfBounds,
    /// The server or a worker failed.
    InternalServer,
    /// The archive's URL is not allowed.
    InvalidArchiveUrl,
    /// The request has no valid token.
    InvalidKey,
    /// The archive is invalid or malicious.
    InvalidModel,
    /// The version cannot be unregistered.
    InvalidModelVersion,
    /// The path does not accept the method.
    MethodNotAllowed,
    /// The model does not exist.
    ModelNotFound,
    /// The version of the model does not exist.
    ModelVersionNotFound,
    /// The request took too long.
    RequestTimeout,
    /// The path does not exist.
    ResourceNotFound,
    /// No worker can serve the request, or the server exits.
    ServiceUnavailable,
    /// There are no workflows.
    WorkflowNotFound,
}

impl Exception {
    /// Returns the simple name of the Java class.
    pub fn name(self) -> &'static str {
        match self {
            Self::BadRequest => "BadRequestException",
            Self::ConflictStatus => "ConflictStatusException",
            Self::DownloadArchive => "DownloadArchiveException",
            Self::IndexOutOfBounds => "IndexOutOfBoundsException",
            Self::InternalServer => "InternalServerException",
            Self::InvalidArchiveUrl => "InvalidArchiveURLException",
            Self::InvalidKey => "InvalidKeyException",
            Self::InvalidModel => "InvalidModelException",
            Self::InvalidModelVersion => "InvalidModelVersionException",
            Self::MethodNotAllowed => "MethodNotAllowedException",
            Self::ModelNotFound => "ModelNotFoundException",
            Self::ModelVersionNotFound => "ModelVersionNotFoundException",
            Self::RequestTimeout => "RequestTimeoutException",
            Self::ResourceNotFound => "ResourceNotFoundException",
            Self::ServiceUnavailable => "ServiceUnavailableException",
            Self::WorkflowNotFound => "WorkflowNotFoundException",
        }
    }
}

/// An error, as in the response body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorResponse {
    /// The HTTP status.
    pub status: u16,
    /// The `type` of the JSON body.
    pub exception: Exception,
    /// The message.
    pub message: String,
    /// The reason for the metrics.
    pub reason: Reason,
}

impl ErrorResponse {
    /// Creates an error; its reason follows from the status and the exception.
    pub fn new(status: u16, exception: Exception, message: String) -> Self {
        let reason = match (status, exception) {
            (_, Exception::InvalidKey) => Reason::Unauthenticated,
            (404, Exception::ModelNotFound | Exception::ModelVersionNotFound) => {
                Reason::UnknownModel
            }
            (404 | 405, _) => Reason::Unsupported,
            (408, _) => Reason::Timeout,
            (413, _) => Reason::TooLarge,
            (400..=499, _) => Reason::Invalid,
            (503, Exception::ServiceUnavailable) => Reason::NotReady,
            (_, Exception::InternalServer) => Reason::Backend,
            _ => Reason::Internal,
        };
        Self { status, exception, message, reason }
    }

    /// Returns the same error with another reason.
    #[must_use]
    pub fn because(self, reason: Reason) -> Self {
        Self { reason, ..self }
    }

    /// The model does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, Exception::ModelNotFound, message.into())
    }

    /// The archive is invalid or malicious.
    pub fn invalid_model(message: impl Into<String>) -> Self {
        Self::new(400, Exception::InvalidModel, message.into())
    }

    /// The archive's URL is not allowed.
    pub fn invalid_url(message: impl Into<String>) -> Self {
        Self::new(400, Exception::InvalidArchiveUrl, message.into())
    }

    /// The archive cannot be downloaded.
    pub fn download(message: impl Into<String>) -> Self {
        Self::new(400, Exception::DownloadArchive, message.into())
    }

    /// The request is invalid.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, Exception::BadRequest, message.into())
    }

    /// The model version is already registered.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(409, Exception::ConflictStatus, message.into())
    }

    /// The server exits.
    pub fn exiting() -> Self {
        Self::new(503, Exception::ServiceUnavailable, EXITING_TEXT.to_owned())
    }

    /// An internal error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, Exception::InternalServer, message.into())
    }
}

impl fmt::Display for ErrorResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
