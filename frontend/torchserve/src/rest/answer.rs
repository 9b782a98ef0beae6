//! Responses in TorchServe's format: indented JSON with a final line feed; errors have a code, a
//! type and a message.

use axum::body::Body;
use axum::response::Response;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    CACHE_CONTROL, CONNECTION, CONTENT_TYPE, EXPIRES, HeaderName, HeaderValue, PRAGMA,
    WWW_AUTHENTICATE,
};
use http::{Request, StatusCode, Version};
use pharos_edge::Refusal;
use serde::Serialize;

use crate::registry::ManagementOutcome;
use crate::settings::Cors;
use crate::{ErrorResponse, Exception};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

#[derive(Serialize)]
struct ErrorBody<'a> {
    code: u16,
    #[serde(rename = "type")]
    kind: &'a str,
    message: &'a str,
}

#[derive(Serialize)]
struct StatusBody<'a> {
    status: &'a str,
}

/// Returns a value with status 200.
pub(super) fn json(value: &impl Serialize) -> Response {
    with_status(StatusCode::OK, value)
}

fn with_status(status: StatusCode, value: &impl Serialize) -> Response {
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Returns `{"status": "..."}`.
pub(super) fn done(done: ManagementOutcome) -> Response {
    with_status(
        StatusCode::from_u16(done.status).unwrap_or(StatusCode::OK),
        &StatusBody { status: &done.text },
    )
}

/// Returns the response to `/ping`.
pub(super) fn health(healthy: bool) -> Response {
    let (status, text) = if healthy {
        (StatusCode::OK, "Healthy")
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, "Unhealthy")
    };
    with_status(status, &StatusBody { status: text })
}

/// Returns an error response.
pub(super) fn error(error: &ErrorResponse) -> Response {
    let ErrorResponse { status, exception, message, .. } = error;
    error_of(*status, exception.name(), message)
}

fn error_of(status: u16, kind: &str, message: &str) -> Response {
    let code = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    with_status(code, &ErrorBody { code: code.as_u16(), kind, message })
}

/// Returns the response to a denied request: in TorchServe's form, or in the form of the v2
/// protocol, which the server's restrictions use on every port.
pub(crate) fn refusal(refusal: Refusal) -> Response {
    let Refusal { code, text, challenge, kind, .. } = refusal;
    if let Some(kind) = kind {
        return error_of(code, kind, &text);
    }
    let text = serde_json::to_string(&text).unwrap_or_default();
    let mut response = Response::new(Body::from(format!("{{\"error\":{text}}}")));
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::FORBIDDEN);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(challenge) = challenge {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}

/// The error for unknown paths.
pub(super) fn not_found() -> ErrorResponse {
    let message = "Requested resource is not found, please refer to API document.".to_owned();
    ErrorResponse::new(404, Exception::ResourceNotFound, message)
}

/// The error for a known path with an unsupported method, or one that the configuration disables.
pub(super) fn wrong_method() -> ErrorResponse {
    let message = "Requested method is not allowed, please refer to API document.".to_owned();
    ErrorResponse::new(405, Exception::MethodNotAllowed, message)
}

/// The error for workflows, which are not supported.
pub(super) fn no_workflow(name: &str) -> ErrorResponse {
    let message = format!("Workflow not found: {name}");
    ErrorResponse::new(404, Exception::WorkflowNotFound, message)
}

/// The connection that a client wants after a response.
pub(super) struct Persistence {
    version: Version,
    /// Whether the client closes it.
    is_closed: bool,
}

impl Persistence {
    /// Returns what a request asks for.
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        let option = request
            .headers()
            .get(CONNECTION)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        Self { version: request.version(), is_closed: option.eq_ignore_ascii_case("close") }
    }
}

/// Adds the headers that all responses have.
pub(super) fn finish(response: &mut Response, id: &str, persistence: &Persistence, cors: &Cors) {
    let failed = response.status().as_u16() >= 400;
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, id);
    }
    for (name, value) in [
        (ACCESS_CONTROL_ALLOW_ORIGIN, &cors.origin),
        (ACCESS_CONTROL_ALLOW_METHODS, &cors.methods),
        (ACCESS_CONTROL_ALLOW_HEADERS, &cors.headers),
    ] {
        if let Some(value) = value.as_ref().and_then(|value| HeaderValue::from_str(value).ok()) {
            headers.entry(name).or_insert(value);
        }
    }
    headers.insert(PRAGMA, HeaderValue::from_static("no-cache"));
    headers.insert(
        CACHE_CONTROL,
        HeaderValue::from_static("no-cache; no-store, must-revalidate, private"),
    );
    headers.insert(EXPIRES, HeaderValue::from_static("Thu, 01 Jan 1970 00:00:00 UTC"));
    // HTTP/1.0 clients request keep-alive explicitly.
    let Persistence { version, is_closed } = *persistence;
    if failed && version <= Version::HTTP_11 {
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    } else if version == Version::HTTP_11 && !is_closed {
        headers.insert(CONNECTION, HeaderValue::from_static("keep-alive"));
    }
}
