//! Converts refusals to gRPC statuses: the message, followed by a line with the class of TorchServe's exception, which clients
//! parse.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, OnceLock};

use http::Response;
use pharos::error::Reason;
use tonic::{Code, Status};

use crate::{Exception, Refused};

/// Converts a refusal to a status with the gRPC code that matches its HTTP status.
pub(super) fn status(refused: &Refused) -> Status {
    with_code(code(refused.status), refused)
}

/// Converts a refusal to a status with the given code.
pub(super) fn with_code(code: Code, refused: &Refused) -> Status {
    let mut status = Status::new(code, format!("{}\n{}", refused.message, class(refused.exception)));
    status.set_source(Arc::new(Cause(refused.reason)));
    status
}

/// Returns the reason of a response that a status ended; `None` if the status is not one of these.
pub(super) fn reason_of<B>(response: &Response<B>) -> Option<Reason> {
    cause_of(response.extensions().get()?)
}

/// Returns the reason of a status; `None` if the status is not one of these.
fn cause_of(status: &Status) -> Option<Reason> {
    status.source()?.downcast_ref::<Cause>().map(|cause| cause.0)
}

/// The reason for which a stream of responses fails: trailers have only the code. An extension of the response to the call.
#[derive(Clone, Debug, Default)]
pub(super) struct StreamFailure(Arc<OnceLock<Reason>>);

impl StreamFailure {
    /// Notes the reason of the status that ends the stream.
    pub(super) fn note(&self, status: &Status) {
        if let Some(reason) = cause_of(status) {
            self.0.get_or_init(|| reason);
        }
    }

    /// Returns the reason; `None` if the stream has not failed or its status has no reason.
    pub(super) fn reason(&self) -> Option<Reason> {
        self.0.get().copied()
    }
}

/// The reason of a refusal, as the source of its status.
#[derive(Debug)]
struct Cause(Reason);

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.as_str())
    }
}

impl Error for Cause {}

/// Maps an HTTP status to a gRPC code.
fn code(status: u16) -> Code {
    match status {
        200..=299 => Code::Ok,
        400 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        409 => Code::Aborted,
        413 | 429 => Code::ResourceExhausted,
        416 => Code::OutOfRange,
        499 => Code::Cancelled,
        501 => Code::Unimplemented,
        503 => Code::Unavailable,
        504 => Code::DeadlineExceeded,
        _ if status / 100 == 4 => Code::FailedPrecondition,
        _ if status / 100 == 5 => Code::Internal,
        _ => Code::Unknown,
    }
}

/// Returns the qualified class name of a Java exception.
fn class(exception: Exception) -> String {
    let package = match exception {
        Exception::ModelNotFound
        | Exception::ModelVersionNotFound
        | Exception::InvalidModel
        | Exception::InvalidKey
        | Exception::InvalidArchiveUrl => "archive.model",
        Exception::DownloadArchive => "archive",
        _ => "http",
    };
    format!("org.pytorch.serve.{package}.{}", exception.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_has_the_exception_class_below_the_message() {
        let shown = status(&Refused::not_found("Model not found: m"));
        assert_eq!(shown.code(), Code::NotFound);
        assert_eq!(shown.message(), "Model not found: m\norg.pytorch.serve.archive.model.ModelNotFoundException");
        for (status, expected) in [
            (400, Code::InvalidArgument),
            (409, Code::Aborted),
            (418, Code::FailedPrecondition),
            (503, Code::Unavailable),
            (507, Code::Internal),
            (42, Code::Unknown),
        ] {
            assert_eq!(code(status), expected, "{status}");
        }
    }
}
