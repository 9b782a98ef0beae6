//! Builders for the answers of the HTTP edge.

use std::borrow::Cow;
use std::future::Future;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE, HeaderValue};
use http::{HeaderName, StatusCode};
use pharos::error::{InferError, Reason};
use pharos_edge::routing::{Handler, Methods, Routed, handler};
use pharos_edge::{Call, Refusal};

use super::Edge;

/// The return type of handlers.
pub(super) type HandlerResult = Result<Response, Failure>;

/// The failure of a request.
#[derive(Debug)]
pub(super) enum Failure {
    /// An error, which becomes `{"error":"text"}` with its status.
    Error(InferError),
    /// A whole response, whose form or status differs from the usual ones of an error, and the
    /// reason under which it is counted.
    Refused(Box<Response>, Reason),
    /// The path, method or resource does not exist.
    Unknown(Box<Response>),
}

impl From<InferError> for Failure {
    fn from(error: InferError) -> Self {
        Self::Error(error)
    }
}

/// Ends a request with the answer of its handler.
pub(super) fn finish(call: Call, answer: HandlerResult) -> Response {
    match answer {
        Ok(response) => call.finish(response, None),
        Err(Failure::Error(failure)) => call.finish(error(&failure), Some(failure.reason)),
        Err(Failure::Refused(response, reason)) => call.finish(*response, Some(reason)),
        Err(Failure::Unknown(response)) => call.finish_unknown(*response),
    }
}

/// Returns a handler that ends each call with the answer of a function.
pub(super) fn answers<F>(
    answer: impl Fn(Edge, Routed) -> F + Send + Sync + 'static,
) -> Handler<Edge>
where
    F: Future<Output = HandlerResult> + Send + 'static,
{
    handler(move |edge, call, routed| {
        let answer = answer(edge, routed);
        async move { finish(call, answer.await) }
    })
}

/// Returns a function as the handler of GET.
pub(super) fn get<F>(answer: impl Fn(Edge, Routed) -> F + Send + Sync + 'static) -> Methods<Edge>
where
    F: Future<Output = HandlerResult> + Send + 'static,
{
    Methods::get(answers(answer))
}

/// Returns a function as the handler of POST.
pub(super) fn post<F>(answer: impl Fn(Edge, Routed) -> F + Send + Sync + 'static) -> Methods<Edge>
where
    F: Future<Output = HandlerResult> + Send + 'static,
{
    Methods::post(answers(answer))
}

/// Returns the failure of a request that is refused with this response for a reason.
pub(super) fn refused(response: Response, reason: Reason) -> Failure {
    Failure::Refused(Box::new(response), reason)
}

/// Returns the failure of a request for a path that does not exist.
pub(super) fn unknown_path() -> Failure {
    Failure::Unknown(Box::new(super::not_found()))
}

/// Returns the answer to a client without access to a route.
pub(super) fn no_access(refusal: Refusal) -> Response {
    with_json(pharos_edge::answer_refusal(&refusal, error_json(&refusal.text)))
}

/// Returns the answer of a verb that reports only success or failure.
pub(super) fn done(result: Result<(), InferError>) -> HandlerResult {
    Ok(result.map(|()| empty(StatusCode::OK))?)
}

/// Returns an answer with a body of this content type.
pub(super) fn with_body(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Body>,
) -> Response {
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
pub(super) fn json_of(value: &impl serde::Serialize) -> HandlerResult {
    let body = serde_json::to_vec(value)
        .map_err(|error| InferError::internal(format!("cannot write JSON: {error}")))?;
    Ok(json(body))
}

/// Returns an answer without a body.
pub(super) fn empty(status: StatusCode) -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// Returns `{"error":"text"}` with the error's status.
pub(super) fn error(error: &InferError) -> Response {
    with_json(pharos_edge::answer_error(error, error_json(&error.message)))
}

fn with_json(mut response: Response) -> Response {
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// The maximum bytes of the text of an error; the rest is left out. A text can contain names of a
/// request, which are as long as its body.
const MAX_TEXT: usize = 64 << 10;

/// Returns the first bytes of a text, at most [`MAX_TEXT`], and whether there are more.
fn shortened(text: &str) -> (&str, bool) {
    let end =
        (0..=MAX_TEXT.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    (text.get(..end).unwrap_or_default(), end < text.len())
}

/// Returns `{"error":"text"}` with the given status.
pub(crate) fn error_text(status: StatusCode, text: &str) -> Response {
    with_body(status, "application/json", error_json(text))
}

/// Returns `{"error":"text"}`.
fn error_json(text: &str) -> String {
    let text = match shortened(text) {
        (all, false) => Cow::Borrowed(all),
        (first, true) => Cow::Owned(format!("{first}...")),
    };
    let text = serde_json::to_string(&text).unwrap_or_else(|_| "\"\"".to_owned());
    format!("{{\"error\":{text}}}")
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
        assert_eq!(
            http_body::Body::size_hint(response.body()).exact(),
            Some(MAX_TEXT as u64 + 14 + 1)
        );
    }
}
