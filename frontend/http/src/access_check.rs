//! Checks tokens and restricted APIs (`--http-restricted-api`) from the route and the headers, before the body of a request is
//! read.

use std::sync::Arc;

use axum::response::Response;
use http::header::{HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, StatusCode};
use pharos::error::Reason;
use pharos::load_report::LoadReport;
use pharos::service::{Protocol, Route};

use super::{Edge, answer};
use pharos_edge::access::{Denied, DeniedAnswer, Guard};
use pharos_edge::answering::{Count, Gate};

impl Count for Edge {
    const PROTOCOL: Protocol = Protocol::Http;

    fn count(&self, route: Route, code: u16, reason: Option<Reason>) {
        self.service.record_answered(Self::PROTOCOL, route, code, reason);
    }
}

impl Gate for Edge {
    fn refuse(&self, route: Route, headers: &HeaderMap) -> Option<Response> {
        let guard = Guard { access: &self.settings.access, restricted: &self.settings.restricted, prefix: "" };
        if guard.is_open() {
            return None;
        }
        let denied = guard.check(route, headers).err()?;
        if denied == Denied::Unknown {
            return Some(super::not_found());
        }
        let denied = denied.over_http();
        let reason = denied.reason;
        Some(answer::refused(denied_response(denied), reason))
    }

    fn load_report(&self, model: &str, version: &str) -> Option<Arc<LoadReport>> {
        Some(self.service.load_report(model, version))
    }
}

/// Returns the answer to a client without access to a route.
fn denied_response(denied: DeniedAnswer) -> Response {
    let status = StatusCode::from_u16(denied.code).unwrap_or(StatusCode::FORBIDDEN);
    let mut response = answer::error_text(status, &denied.text);
    if let Some(challenge) = denied.challenge {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    }
    response
}
