//! Errors of TorchServe's endpoints: a status, the simple name of a Java exception that clients check, and a message.

use std::fmt;

use pharos::error::Reason;
use pharos::service::EXITING_TEXT;

/// An error, as in the response body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The HTTP status.
    pub status: u16,
    /// The `type` of the JSON body.
    pub kind: &'static str,
    /// The message.
    pub message: String,
    /// The reason for the metrics.
    pub reason: Reason,
}

impl Refused {
    /// Creates an error; its reason follows from the status and the type.
    pub fn new(status: u16, kind: &'static str, message: String) -> Self {
        let reason = match (status, kind) {
            (_, "InvalidKeyException") => Reason::Unauthenticated,
            (404, "ModelNotFoundException" | "ModelVersionNotFoundException") => Reason::UnknownModel,
            (404 | 405, _) => Reason::Unsupported,
            (408, _) => Reason::Timeout,
            (413, _) => Reason::TooLarge,
            (400..=499, _) => Reason::Invalid,
            (503, "ServiceUnavailableException") => Reason::NotReady,
            (_, "InternalServerException") => Reason::Backend,
            _ => Reason::Internal,
        };
        Self { status, kind, message, reason }
    }

    /// Returns the same error with another reason.
    #[must_use]
    pub fn because(self, reason: Reason) -> Self {
        Self { reason, ..self }
    }

    /// The model does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(404, "ModelNotFoundException", message.into())
    }

    /// The archive is invalid or malicious.
    pub fn invalid_model(message: impl Into<String>) -> Self {
        Self::new(400, "InvalidModelException", message.into())
    }

    /// The archive's URL is not allowed.
    pub fn invalid_url(message: impl Into<String>) -> Self {
        Self::new(400, "InvalidArchiveURLException", message.into())
    }

    /// The archive cannot be downloaded.
    pub fn download(message: impl Into<String>) -> Self {
        Self::new(400, "DownloadArchiveException", message.into())
    }

    /// The request is invalid.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequestException", message.into())
    }

    /// The model version is already registered.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(409, "ConflictStatusException", message.into())
    }

    /// The server exits.
    pub fn exiting() -> Self {
        Self::new(503, "ServiceUnavailableException", EXITING_TEXT.to_owned())
    }

    /// An internal error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(500, "InternalServerException", message.into())
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
