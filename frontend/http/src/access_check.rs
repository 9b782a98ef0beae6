//! Tokens and restricted parts of the protocol (`--http-restricted-api`), checked from the path and the headers of a request
//! before anything else of it is read.

use axum::response::Response;
use http::header::{HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, StatusCode};
use pharos::service::Service;

use super::{Edge, answer};
use pharos_listener::access::{Denied, DeniedAnswer, Guard, routes};

/// The refusal of a request, if it asks for a part without the token or the key's value that this needs, or for none.
pub(super) fn refusal<S: Service>(edge: &Edge<S>, path: &str, headers: &HeaderMap) -> Option<Response> {
    let guard = Guard { access: &edge.settings.access, restricted: &edge.settings.restricted, prefix: "" };
    if guard.is_open() {
        return None;
    }
    let route = routes::of_http(path);
    let denied = guard.check(route, headers).err()?;
    if denied == Denied::Unknown {
        return Some(super::not_found_response(&edge.service));
    }
    let denied = denied.over_http();
    let reason = denied.reason;
    Some(edge.pending(route).finish_as(denied_response(denied), Some(reason)))
}

/// The answer to a client that is denied a route.
fn denied_response(denied: DeniedAnswer) -> Response {
    let status = StatusCode::from_u16(denied.code).unwrap_or(StatusCode::FORBIDDEN);
    let mut response = answer::error_text(status, &denied.text);
    if let Some(challenge) = denied.challenge {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}
