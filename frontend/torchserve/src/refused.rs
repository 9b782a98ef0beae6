//! What TorchServe's endpoints refuse with: a status, the simple name of a Java exception that clients look for, and a text.

use std::fmt;

/// A refusal, as the body of an error has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The status of HTTP.
    pub status: u16,
    /// The `type` of the JSON body.
    pub kind: &'static str,
    /// What is wrong.
    pub message: String,
}

impl Refused {
    /// There is no such model.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self { status: 404, kind: "ModelNotFoundException", message: message.into() }
    }

    /// The archive is none, or a hostile one.
    pub fn invalid_model(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "InvalidModelException", message: message.into() }
    }

    /// The archive is from a place that is not allowed.
    pub fn invalid_url(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "InvalidArchiveURLException", message: message.into() }
    }

    /// The archive cannot be fetched.
    pub fn download(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "DownloadArchiveException", message: message.into() }
    }

    /// The request makes no sense.
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self { status: 400, kind: "BadRequestException", message: message.into() }
    }

    /// There is one already.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self { status: 409, kind: "ConflictStatusException", message: message.into() }
    }

    /// The server's own fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Self { status: 500, kind: "InternalServerException", message: message.into() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
