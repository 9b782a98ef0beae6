//! Errors of TorchServe's endpoints: a status, the simple name of a Java exception that clients check, and a message.

use std::fmt;

/// An error, as in the response body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The HTTP status.
    pub status: u16,
    /// The `type` of the JSON body.
    pub kind: &'static str,
    /// The message.
    pub message: String,
}

impl Refused {
    /// The model does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { status: 404, kind: "ModelNotFoundException", message: message.into() }
    }

    /// The archive is invalid or malicious.
    pub fn invalid_model(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "InvalidModelException", message: message.into() }
    }

    /// The archive's URL is not allowed.
    pub fn invalid_url(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "InvalidArchiveURLException", message: message.into() }
    }

    /// The archive cannot be downloaded.
    pub fn download(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "DownloadArchiveException", message: message.into() }
    }

    /// The request is invalid.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "BadRequestException", message: message.into() }
    }

    /// The model version is already registered.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self { status: 409, kind: "ConflictStatusException", message: message.into() }
    }

    /// An internal error.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { status: 500, kind: "InternalServerException", message: message.into() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
