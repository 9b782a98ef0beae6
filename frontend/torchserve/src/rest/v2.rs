//! The v2 protocol on TorchServe's ports: its access check, and forwarding of requests.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, Request};
use pharos::error::Reason;
use pharos::load_report::LoadReport;
use pharos::service::{Protocol, Route};

use super::{Port, RequestHead, Shared, answer};
use crate::guard::{RequiredAccess, purpose};
use crate::token::Purpose;
use pharos_edge::access::routes::class;
use pharos_edge::answering::{Count, Gate, Outcome};

/// The access check of the v2 protocol on these ports.
#[derive(Clone)]
pub struct V2Gate(pub(crate) Arc<Shared>);

impl Count for V2Gate {
    const PROTOCOL: Protocol = Protocol::Http;

    fn count(&self, route: Route, code: u16, reason: Option<Reason>) {
        self.0.service.record_answered(Self::PROTOCOL, route, code, reason);
    }
}

impl Gate for V2Gate {
    fn refuse(&self, route: Route, headers: &HeaderMap) -> Option<Response> {
        let class = class(route);
        // Unknown paths need the key of the port that serves the protocol.
        let wanted = RequiredAccess { route, class, purpose: purpose(class, Some(Purpose::Inference)) };
        let denied = self.0.guard.check(Protocol::Http, wanted, headers).err()?;
        let (mut response, reason) = answer::denied(denied);
        response.extensions_mut().insert(Outcome::Failed(reason));
        Some(response)
    }

    fn load_report(&self, model: &str, version: &str) -> Option<Arc<LoadReport>> {
        Some(self.0.service.load_report(model, version))
    }
}

impl Port {
    /// Forwards a request to the v2 protocol's edge, which counts the response.
    pub(super) async fn answer_v2(&self, head: &RequestHead, body: Body) -> Response {
        let mut request = Request::new(body);
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = head.uri.clone();
        *request.version_mut() = head.version;
        request.headers_mut().clone_from(&head.headers);
        request.extensions_mut().clone_from(&head.extensions);
        self.v2.answer(request).await
    }
}
