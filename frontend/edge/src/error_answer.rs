//! What all answers to errors over HTTP have in common, whatever their form is.

use axum::body::Body;
use axum::response::Response;
use http::StatusCode;
use http::header::{CONNECTION, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use pharos::error::{Cause, ErrorCode, InferError, Reason};

use crate::access::Refusal;

/// Returns the status of an error.
pub fn status_of(error: &InferError) -> StatusCode {
    StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// Returns the header `Retry-After` of an error whose client can know when to try again.
pub fn retry_after(error: &InferError) -> Option<HeaderValue> {
    match error.cause {
        Cause::RateLimited { retry_after_s } => Some(HeaderValue::from(retry_after_s)),
        _ => None,
    }
}

/// Returns the answer to a failed request: the status of the error, and this body. If the body of
/// the client was too large or too slow, the connection ends, because the rest of the body, which
/// the client may still send, is not a request.
pub fn answer_error(error: &InferError, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status_of(error);
    if error.reason == Reason::TooLarge
        || (error.reason, error.code) == (Reason::Timeout, ErrorCode::InvalidArg)
    {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if let Some(seconds) = retry_after(error) {
        response.headers_mut().insert(RETRY_AFTER, seconds);
    }
    response
}

/// Returns the answer to a client without access to a route: the status, the challenge if the
/// client can authenticate itself, and this body.
pub fn answer_refusal(refusal: &Refusal, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::FORBIDDEN);
    if let Some(challenge) = refusal.challenge {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}
