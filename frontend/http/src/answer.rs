//! Answers, and that each is counted once.

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{HeaderName, StatusCode};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::service::{Protocol, Route, Service};

/// A request that is being answered. Dropped without an answer (the client went away), it counts as cancelled.
pub(super) struct Pending<S: Service> {
    service: S,
    route: Route,
    counted: bool,
}

impl<S: Service> Pending<S> {
    pub(super) fn new(service: &S, route: Route) -> Self {
        Self { service: service.clone(), route, counted: false }
    }

    /// Turns a handler's result into the answer and counts it.
    pub(super) fn finish(mut self, result: Result<Response, InferError>) -> Response {
        let (response, reason) = match result {
            Ok(response) => (response, None),
            Err(failure) => (error(&failure), Some(failure.reason)),
        };
        self.count(response.status().as_u16(), reason);
        response
    }

    /// Counts an answer that is not an error of the engine's kind: a bare status, with the reason if it is a refusal.
    pub(super) fn finish_as(mut self, response: Response, reason: Option<Reason>) -> Response {
        self.count(response.status().as_u16(), reason);
        response
    }

    /// Counts an answer whose body says itself how it ended, with its status.
    pub(super) fn note(mut self, code: u16, reason: Option<Reason>) {
        self.count(code, reason);
    }

    fn count(&mut self, code: u16, reason: Option<Reason>) {
        self.counted = true;
        self.service.record_answered(Protocol::Http, self.route, code, reason);
    }
}

impl<S: Service> Drop for Pending<S> {
    fn drop(&mut self) {
        if !self.counted {
            self.count(ErrorCode::Cancelled.http_status(), Some(Reason::Cancelled));
        }
    }
}

/// An answer with a body of this type.
pub(super) fn with_body(status: StatusCode, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// JSON with status 200.
pub(super) fn json(body: impl Into<Bytes>) -> Response {
    with_body(StatusCode::OK, "application/json", body.into())
}

/// A value as JSON with status 200.
pub(super) fn json_of(value: &impl serde::Serialize) -> Result<Response, InferError> {
    let body =
        serde_json::to_vec(value).map_err(|error| InferError::internal(format!("cannot write JSON: {error}")))?;
    Ok(json(body))
}

/// A status and nothing else.
pub(super) fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// `{"error":"text"}` with the error's status.
pub(super) fn error(error: &InferError) -> Response {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = error_text(status, &error.message);
    // Of a body that was too much or too slow there may be more to come, which is no request.
    if error.reason == Reason::TooLarge || (error.reason, error.code) == (Reason::Timeout, ErrorCode::InvalidArg) {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// `{"error":"text"}` with a status of its own.
pub(crate) fn error_text(status: StatusCode, text: &str) -> Response {
    let text = serde_json::to_string(text).unwrap_or_else(|_| "\"\"".to_owned());
    with_body(status, "application/json", format!("{{\"error\":{text}}}"))
}

/// The refusal of a content coding: 501 with the codings that are accepted.
pub(super) fn unsupported_coding() -> Response {
    let mut response = error_text(StatusCode::NOT_IMPLEMENTED, "Unsupported compression type");
    response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate"));
    response
}

/// A header with a number.
pub(super) fn number_header(response: &mut Response, name: &'static str, number: usize) {
    response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from(number));
}
