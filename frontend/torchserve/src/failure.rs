//! Maps the engine's errors to TorchServe's statuses, exception types and messages for predictions.

use pharos::error::{ErrorCode, InferError, Reason};

use super::registry::ModelReference;
use super::{ErrorResponse, Exception};

/// The prefix of a worker's error message that sets a status other than 503.
const STATUS: &str = "HTTP ";

/// The end of a worker process that was executing a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Killed by a signal from the system, as the out-of-memory killer does.
    Killed,
    /// Any other exit.
    Died,
}

/// Returns the refusal for a model without workers. `more` is appended to the message.
pub fn no_worker(reference: ModelReference<'_>, more: &str) -> ErrorResponse {
    // The unbalanced quotation mark is TorchServe's.
    let ModelReference { name, version } = reference;
    let of_version =
        if version.is_empty() { String::new() } else { format!(" Version {version}\"") };
    let message = format!(
        "Model \"{name}\"{of_version} has no worker to serve inference request. Please use scale \
         workers API to add workers. If this is a sequence inference, please check if it is \
         closed, or expired; or exceeds maxSequenceJobQueueSize{more}"
    );
    ErrorResponse::new(503, Exception::ServiceUnavailable, message)
}

/// Returns the client's view of an engine error.
pub fn refused(
    error: &InferError,
    reference: ModelReference<'_>,
    end: impl FnOnce() -> End,
) -> ErrorResponse {
    by_reason(error, reference, end).because(error.reason)
}

/// The message is without the request's id, which clients find in a header.
fn by_reason(
    error: &InferError,
    reference: ModelReference<'_>,
    end: impl FnOnce() -> End,
) -> ErrorResponse {
    let message = error.message_without_id();
    let with = |status: u16, exception: Exception| {
        ErrorResponse::new(status, exception, message.to_owned())
    };
    match error.reason {
        Reason::QueueFull => no_worker(reference, &format!(". Its queue is full: {message}")),
        Reason::NotReady => no_worker(reference, &format!(". {message}")),
        Reason::UnknownModel => with(404, Exception::ModelNotFound),
        Reason::InstanceLost => worker_died(end()),
        Reason::Timeout if error.code == ErrorCode::InvalidArg => {
            with(408, Exception::RequestTimeout)
        }
        Reason::Timeout => {
            let text =
                format!("The request waited longer than clientTimeoutInMills allows: {message}");
            ErrorResponse::new(408, Exception::RequestTimeout, text)
        }
        Reason::RateLimited => with(429, Exception::ServiceUnavailable),
        Reason::TooLarge => with(413, Exception::BadRequest),
        Reason::Malformed | Reason::Invalid | Reason::Unsupported | Reason::SharedMemory => {
            with(400, Exception::BadRequest)
        }
        Reason::Restricted | Reason::Unauthenticated => with(400, Exception::InvalidKey),
        Reason::Cancelled if message.is_empty() => {
            ErrorResponse::internal("The request was cancelled")
        }
        Reason::Cancelled | Reason::Internal => with(500, Exception::InternalServer),
        Reason::Backend => {
            let (status, text) = with_status(message);
            ErrorResponse::new(status, Exception::InternalServer, text.to_owned())
        }
    }
}

/// Returns the refusal of a request whose worker process ended.
pub fn worker_died(end: End) -> ErrorResponse {
    let status = if end == End::Killed { 507 } else { 500 };
    ErrorResponse::new(status, Exception::InternalServer, "Worker died.".to_owned())
}

/// Splits a worker's message into the status that it sets and the rest. A status below 200 would
/// not end the response.
fn with_status(message: &str) -> (u16, &str) {
    let parts = message.strip_prefix(STATUS).and_then(|rest| rest.split_once(": "));
    let given = parts.and_then(|(status, text)| Some((status.parse().ok()?, text)));
    given.filter(|(status, _)| (200..=999).contains(status)).unwrap_or((503, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_torchserve_codes() {
        let backend = |text: &str| InferError::new(ErrorCode::Internal, Reason::Backend, text);
        let full = InferError::new(
            ErrorCode::Unavailable,
            Reason::QueueFull,
            "Exceeds maximum queue size",
        );
        let lost = InferError::new(ErrorCode::Unavailable, Reason::InstanceLost, "x");
        for (error, status, kind, text) in [
            (backend("Prediction failed"), 503, Exception::InternalServer, "Prediction failed"),
            (
                backend("HTTP 418: my: text").with_request_id("a-b"),
                418,
                Exception::InternalServer,
                "my: text",
            ),
            (backend("HTTP x: y"), 503, Exception::InternalServer, "HTTP x: y"),
            (backend("HTTP 101: y"), 503, Exception::InternalServer, "HTTP 101: y"),
            (backend("HTTP 42: y"), 503, Exception::InternalServer, "HTTP 42: y"),
            (lost, 500, Exception::InternalServer, "Worker died."),
            (InferError::invalid("bad"), 400, Exception::BadRequest, "bad"),
            (
                full.with_request_id("1"),
                503,
                Exception::ServiceUnavailable,
                "Model \"m\" has no worker to serve inference request. Please use scale workers \
                 API to add workers. If this is a sequence inference, please check if it is \
                 closed, or expired; or exceeds maxSequenceJobQueueSize. Its queue is full: \
                 Exceeds maximum queue size",
            ),
        ] {
            let refused = refused(&error, ModelReference { name: "m", version: "" }, || End::Died);
            assert_eq!(
                (refused.status, refused.exception, &*refused.message),
                (status, kind, text)
            );
        }
        assert_eq!(worker_died(End::Killed).status, 507);
        let reference = ModelReference { name: "m", version: "1.0" };
        assert!(
            no_worker(reference, "").message.starts_with("Model \"m\" Version 1.0\" has no worker")
        );
    }
}
