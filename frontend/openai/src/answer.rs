//! Errors as responses in OpenAI's form.

use axum::response::Response;
use http::StatusCode;
use http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use pharos::error::{Cause, ErrorCode, InferError, Reason};
use pharos_edge::{Refusal, answer_error, answer_refusal};

use crate::error::{ApiError, quoted};

/// When a client may try again a request that the server cannot serve now, in seconds.
const RETRY_AFTER_S: u32 = 1;

/// The failure of a request: what the client gets, and the reason under which it is counted.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) error: ApiError,
    pub(crate) reason: Reason,
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let reason = match error.status {
            404 => Reason::UnknownModel,
            413 => Reason::TooLarge,
            429 => Reason::RateLimited,
            501 => Reason::Unsupported,
            503 => Reason::NotReady,
            500 => Reason::Internal,
            _ => Reason::Invalid,
        };
        Self { error, reason }
    }
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        Self { error: of_engine(&error), reason: error.reason }
    }
}

/// What engines call a prompt that does not fit: vLLM, llama.cpp's server and the backends here.
/// Clients find it by this phrase of OpenAI too.
const TOO_LONG: &str = "maximum context length";
/// The parameter of sampling with the structure of the output, with which the errors of engines
/// about it begin.
const STRUCTURE: &str = "structured_outputs";

impl Failure {
    /// Returns the failure of an inference. A text is all that engines give, so the field at fault
    /// follows from its words.
    pub(crate) fn of_model(
        error: InferError,
        prompt_field: &str,
        structure_field: Option<&str>,
    ) -> Self {
        let mut failure = Self::from(error);
        if failure.error.status != 400 {
            return failure;
        }
        if failure.error.message.contains(TOO_LONG) {
            let message = std::mem::take(&mut failure.error.message);
            failure.error = ApiError::context_length_exceeded(prompt_field, message);
        } else if let Some(field) = structure_field
            && let Some(rest) = failure.error.message.strip_prefix(STRUCTURE)
        {
            failure.error.message = format!("{field}{rest}");
            failure.error.param = Some(field.to_owned());
        }
        failure
    }

    /// Returns the failure as an error of the engine, for the trace of the request.
    pub(crate) fn to_infer_error(&self) -> InferError {
        let code = match self.error.status {
            404 => ErrorCode::NotFound,
            429 => ErrorCode::ResourceExhausted,
            500 => ErrorCode::Internal,
            501 => ErrorCode::Unsupported,
            503 => ErrorCode::Unavailable,
            _ => ErrorCode::InvalidArg,
        };
        InferError::new(code, self.reason, self.error.message.clone())
    }

    /// Returns the response: JSON with the status of the error.
    pub(crate) fn response(&self) -> Response {
        let mut response = answer_error(&self.to_infer_error(), self.error.to_json());
        // The engine's codes have fewer statuses.
        if let Ok(status) = StatusCode::from_u16(self.error.status) {
            *response.status_mut() = status;
        }
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.error.retry_after_s {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Returns an error of the engine in OpenAI's form.
pub(crate) fn of_engine(error: &InferError) -> ApiError {
    let message = error.message.as_str();
    match (error.reason, error.code.http_status()) {
        (Reason::UnknownModel, _) | (Reason::NotReady, 404) => ApiError {
            status: 404,
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..ApiError::invalid_request(message)
        },
        (Reason::TooLarge, 400) => ApiError {
            status: 413,
            code: Some("content_too_large"),
            ..ApiError::invalid_request(message)
        },
        (_, 429) => {
            let seconds = match error.cause {
                Cause::RateLimited { retry_after_s } => retry_after_s.try_into().ok(),
                _ => None,
            };
            ApiError::rate_limited(message, seconds)
        }
        (_, 503) => ApiError::unavailable(message, Some(RETRY_AFTER_S)),
        (_, 501) => ApiError::not_implemented(message),
        (_, status @ 500..) => ApiError { status, ..ApiError::internal(message) },
        (_, status) => ApiError { status, ..ApiError::invalid_request(message) },
    }
}

/// Returns the answer to a client without access.
pub(crate) fn no_access(refusal: Refusal) -> Response {
    let error = match refusal.code {
        401 => ApiError::unauthorized(refusal.text.as_str()),
        status => ApiError { status, ..ApiError::invalid_request(refusal.text.as_str()) },
    };
    with_json(answer_refusal(&refusal, error.to_json()))
}

/// Returns the answer to a method that a path does not have.
pub(crate) fn wrong_method() -> Response {
    let text = "this path has no such method: requests to models are sent with POST";
    let error = ApiError { status: 405, ..ApiError::invalid_request(text) };
    Failure { error, reason: Reason::Unsupported }.response()
}

/// Returns the answer to an unknown path.
pub fn not_found(path: &str) -> Response {
    let message = format!("there is no path {}", quoted(path));
    let error = ApiError { status: 404, ..ApiError::invalid_request(message) };
    Failure { error, reason: Reason::Unsupported }.response()
}

fn with_json(mut response: Response) -> Response {
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
