//! Converts refusals to gRPC statuses: the message, followed by a line with the class of
//! TorchServe's exception, which clients parse.

use pharos_edge::status_for;
use tonic::{Code, Status};

use crate::{ErrorResponse, Exception};

/// Converts a refusal to a status with the gRPC code that matches its HTTP status.
pub(super) fn status(refused: &ErrorResponse) -> Status {
    with_code(code(refused.status), refused)
}

/// Converts a refusal to a status with the given code.
pub(super) fn with_code(code: Code, refused: &ErrorResponse) -> Status {
    let text = format!("{}\n{}", refused.message, class(refused.exception));
    status_for(code, text, refused.reason)
}

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
        let shown = status(&ErrorResponse::not_found("Model not found: m"));
        assert_eq!(shown.code(), Code::NotFound);
        assert_eq!(
            shown.message(),
            "Model not found: m\norg.pytorch.serve.archive.model.ModelNotFoundException"
        );
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
