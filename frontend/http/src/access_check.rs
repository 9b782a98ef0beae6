//! Tokens and restricted parts of the protocol (`--http-restricted-api`), checked from the route and the headers of a request
//! before anything else of it is read.

use axum::response::Response;
use http::header::{HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, StatusCode};
use pharos::service::{Route, Service};

use super::{Edge, answer};
use pharos_listener::access::{Denied, DeniedAnswer, Gate, Guard};

impl<S: Service> Gate for Edge<S> {
    fn refuse(&self, route: Route, headers: &HeaderMap) -> Option<Response> {
        let guard = Guard { access: &self.settings.access, restricted: &self.settings.restricted, prefix: "" };
        if guard.is_open() {
            return None;
        }
        let denied = guard.check(route, headers).err()?;
        if denied == Denied::Unknown {
            return Some(super::not_found(self));
        }
        let denied = denied.over_http();
        let reason = denied.reason;
        Some(self.pending(route).finish_as(denied_response(denied), Some(reason)))
    }
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
