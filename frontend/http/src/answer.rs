//! Builders for the answers of the HTTP edge. The failure reason is an extension of the response, from which the layer of
//! [`pharos_edge::answering`] counts it.

use std::borrow::Cow;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONNECTION, CONTENT_TYPE, HeaderValue};
use http::{Extensions, HeaderName, StatusCode};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos_edge::answering::Outcome;

/// An extension of a request: the status of errors for which a platform expects another one than Triton's.
#[derive(Clone, Copy)]
pub(super) struct StatusOf(pub(super) fn(&InferError) -> Option<StatusCode>);

impl StatusOf {
    /// Returns the failure of a request with these extensions.
    pub(super) fn failure(extensions: &Extensions, error: InferError) -> Response {
        let status = extensions.get::<Self>().and_then(|of| (of.0)(&error));
        let mut response = Failure(error).into_response();
        if let Some(status) = status {
            *response.status_mut() = status;
        }
        response
    }
}

/// The return type of handlers.
pub(super) type Answer = Result<Response, Failure>;

/// The failure of a request; it becomes `{"error":"text"}` with the error's status.
#[derive(Debug)]
pub(super) struct Failure(InferError);

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        refused(error(&self.0), self.0.reason)
    }
}

/// Marks a response as failed with the reason under which it is counted.
pub(super) fn refused(mut response: Response, reason: Reason) -> Response {
    response.extensions_mut().insert(Outcome::Failed(reason));
    response
}

/// Returns the answer for an unknown path or method.
pub(super) fn unknown(status: StatusCode, text: &str) -> Response {
    of_unknown(error_text(status, text))
}

/// Marks a response as that to an unknown path or method, so that it is counted as one.
pub(super) fn of_unknown(mut response: Response) -> Response {
    response.extensions_mut().insert(Outcome::Unknown);
    response
}

/// Returns the answer of a verb that reports only success or failure.
pub(super) fn done(result: Result<(), InferError>) -> Answer {
    Ok(result.map(|()| empty(StatusCode::OK))?)
}

/// Returns an answer with a body of this content type.
pub(super) fn with_body(status: StatusCode, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Returns JSON with status 200.
pub(super) fn json(body: impl Into<Bytes>) -> Response {
    with_body(StatusCode::OK, "application/json", body.into())
}

/// Returns a value as JSON with status 200.
pub(super) fn json_of(value: &impl serde::Serialize) -> Answer {
    let body =
        serde_json::to_vec(value).map_err(|error| InferError::internal(format!("cannot write JSON: {error}")))?;
    Ok(json(body))
}

/// Returns an answer without a body.
pub(super) fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// Returns `{"error":"text"}` with the error's status.
fn error(error: &InferError) -> Response {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = error_text(status, &error.message);
    // The client may still be sending the rest of a body that was too large or too slow; it must not be parsed as a request.
    if error.reason == Reason::TooLarge || (error.reason, error.code) == (Reason::Timeout, ErrorCode::InvalidArg) {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// The maximum bytes of the text of an error; the rest is left out. A text can contain names of a request, which are as long as its
/// body.
const MAX_TEXT: usize = 64 << 10;

/// Returns the first bytes of a text, at most [`MAX_TEXT`], and whether there are more.
fn shortened(text: &str) -> (&str, bool) {
    let end = (0..=MAX_TEXT.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    (text.get(..end).unwrap_or_default(), end < text.len())
}

/// Returns `{"error":"text"}` with the given status.
pub(crate) fn error_text(status: StatusCode, text: &str) -> Response {
    let text = match shortened(text) {
        (all, false) => Cow::Borrowed(all),
        (first, true) => Cow::Owned(format!("{first}...")),
    };
    let text = serde_json::to_string(&text).unwrap_or_else(|_| "\"\"".to_owned());
    with_body(status, "application/json", format!("{{\"error\":{text}}}"))
}

/// Refuses a content coding: 501 with the supported codings.
pub(super) fn unsupported_coding() -> Response {
    let mut response = error_text(StatusCode::NOT_IMPLEMENTED, "Unsupported compression type");
    response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate"));
    response
}

/// Sets a header to a number.
pub(super) fn number_header(response: &mut Response, name: HeaderName, number: usize) {
    response.headers_mut().insert(name, HeaderValue::from(number));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(shortened("é"), ("é", false));
        let exact = "x".repeat(MAX_TEXT);
        assert_eq!(shortened(&exact), (exact.as_str(), false));
        // The character at the limit is left out, not split.
        let text = format!("{}é", "x".repeat(MAX_TEXT - 1));
        assert_eq!(shortened(&text), (text.trim_end_matches('é'), true));
        let response = error_text(StatusCode::BAD_REQUEST, &"x".repeat(MAX_TEXT + 1));
        assert_eq!(http_body::Body::size_hint(response.body()).exact(), Some(MAX_TEXT as u64 + 14 + 1));
    }
}
