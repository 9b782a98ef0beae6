//! Tokens, and restricted parts of the protocol (`--http-restricted-api`): checked before anything of a request is looked at
//! but its path and its headers.

use axum::response::Response;
use http::header::{HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, StatusCode};
use pharos::access::tokens::Refusal;
use pharos::error::Reason;

use super::{Edge, answer};
use crate::access::{Denied, Guard, routes};

/// The refusal of a request, if it asks for a part without the token or the key's value that this needs, or for none.
pub(super) fn refusal(edge: &Edge, path: &str, headers: &HeaderMap) -> Option<Response> {
    let guard = Guard { access: &edge.settings.access, restricted: &edge.settings.restricted, prefix: "" };
    if guard.is_open() {
        return None;
    }
    let route = routes::of_http(path);
    let denied = guard.check(route, headers).err()?;
    if denied == Denied::Unknown {
        return Some(super::not_found_response(&edge.engine));
    }
    let (response, reason) = denied_response(&denied);
    Some(edge.pending(route).finish_as(response, Some(reason)))
}

/// What a client that is denied a route gets, and the reason for the metrics.
pub(crate) fn denied_response(denied: &Denied) -> (Response, Reason) {
    match denied {
        Denied::Unknown => (answer::error_text(StatusCode::NOT_FOUND, "Not Found"), Reason::Unsupported),
        Denied::Token(refusal) => (unauthenticated(*refusal), Reason::Unauthenticated),
        Denied::Restricted(key) => {
            let text = format!("This API is restricted, expecting header '{key}'");
            (answer::error_text(StatusCode::FORBIDDEN, &text), Reason::Restricted)
        }
    }
}

/// RFC 6750, 3.1.
fn unauthenticated(refusal: Refusal) -> Response {
    let status = match refusal {
        Refusal::Missing(_) | Refusal::Unknown(_) => StatusCode::UNAUTHORIZED,
        Refusal::Insufficient => StatusCode::FORBIDDEN,
    };
    let mut response = answer::error_text(status, &refusal.text());
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(refusal.challenge()));
    response
}
