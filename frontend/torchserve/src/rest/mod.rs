//! TorchServe's REST API: three listeners, or fewer if addresses are equal. Every response gets an id, is counted once and is
//! written to the access log once; a streamed response when it ends.

mod access_log;
mod answer;
mod body_end;
mod describe;
mod ended;
mod manage;
mod metrics;
mod openapi;
mod predict;
mod streaming;
mod v2;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{Extensions, HeaderMap, Method, Request, Uri, Version};
use pharos::error::Reason;
use pharos::metrics::cache::Cache;
use pharos::service::{Protocol, SharedManagement};
use pharos::timeline::Instant;

use super::guard::{Denied, Guard, RequiredAccess};
use super::ids::Ids;
use super::routes::{Apis, Endpoint, endpoint};
use super::{Refused, Registry, Settings};
use pharos_edge::access;
use pharos_edge::answering::{Account, Gate as _};
use pharos_edge::http_service::Handle;
use pharos_edge::load_report::Requested;
use pharos_edge::renderings::Renderings;
use pharos_edge::response_timing::ResponseTiming;
use pharos_edge::routing::Routes;
use pharos_listener::Peer;
use pharos_listener::receiving::Budget;
use pharos_os::clock;
use pharos_os::event_loops::EventLoops;

pub(super) use access_log::AccessLog;
pub(super) use describe::descriptions;
pub(super) use ended::EndedSequences;
pub(super) use manage::Registration;
pub(super) use predict::{end_of, enter, first_of, loaded};
pub use v2::V2Gate;

/// The header of v2 requests with binary tensors behind the JSON.
const BINARY: &str = "inference-header-content-length";

/// The longest pause while a body is received.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// The state that all listeners share.
pub(crate) struct Shared {
    /// The server, with TorchServe's model names.
    pub(super) service: SharedManagement,
    /// The server, without per-name counting.
    pub(super) uncounted: SharedManagement,
    pub(super) registry: Arc<Registry>,
    /// The metrics cache that counts connections.
    pub(super) metrics: Arc<Cache>,
    pub(super) settings: Arc<Settings>,
    pub(super) guard: Guard,
    pub(super) budget: Budget,
    pub(super) event_loops: EventLoops,
    pub(super) timing: ResponseTiming,
    pub(super) ids: Ids,
    pub(super) renderings: Renderings,
    /// Returns a document of the live page.
    pub(super) page: Page,
}

/// Returns the document of the live page at a path.
pub type Page = fn(&str) -> Option<Response>;

/// The service of one listener.
#[derive(Clone)]
pub(super) struct Port {
    pub(super) shared: Arc<Shared>,
    pub(super) apis: Apis,
    /// The routes of the v2 protocol.
    pub(super) v2: Routes<V2Gate>,
}

/// A request without its body.
struct RequestHead {
    method: Method,
    uri: Uri,
    version: Version,
    headers: HeaderMap,
    extensions: Extensions,
    id: String,
    received: Instant,
}

impl RequestHead {
    /// Returns the client's address.
    fn peer(&self) -> Option<SocketAddr> {
        self.extensions.get::<Peer>().and_then(|peer| peer.address)
    }

    /// Returns the decoded value of a query parameter; the first one if there are several.
    fn query(&self, name: &str) -> Option<String> {
        let pairs = super::form::pairs(self.uri.query().unwrap_or_default());
        let found = pairs.into_iter().find(|pair| pair.name == name);
        found.map(|pair| String::from_utf8_lossy(&pair.data).into_owned())
    }

    /// Returns an integer query parameter. As in TorchServe, an invalid one counts as absent.
    fn number(&self, name: &str) -> Option<i64> {
        self.query(name)?.parse().ok()
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl Handle for Port {
    async fn handle(self, request: Request<Body>) -> Result<Response, Infallible> {
        let (parts, body) = request.into_parts();
        let head = RequestHead {
            extensions: parts.extensions,
            method: parts.method,
            uri: parts.uri,
            version: parts.version,
            headers: parts.headers,
            id: self.shared.ids.next(),
            received: clock::now(),
        };
        let RequestHead { method, uri, version, received, .. } = &head;
        let what = || format!("{method} {uri} {version:?}");
        let logged = AccessLog::new((Protocol::Http, head.peer(), *received), what);
        let path = uri.path();
        let mut response = match endpoint(self.apis, &head.method, path) {
            Endpoint::Kserve => self.answer_v2(&head, body).await,
            // Binary tensors behind the JSON cannot be passed to a handler; the v2 edge takes them.
            Endpoint::Predict(_) if head.headers.contains_key(BINARY) && path.starts_with("/v2/") => {
                self.answer_v2(&head, body).await
            }
            endpoint => self.answer_own(endpoint, &head, body).await,
        };
        answer::finish(&mut response, &head, &self.shared.settings.cors);
        let Some(logged) = logged else { return Ok(response) };
        let status = response.status().as_u16();
        Ok(body_end::at_end(response, method, move |_| logged.answered(status)))
    }
}

impl Port {
    /// Checks access to a TorchServe endpoint, executes the request and counts the response, a streamed one when it ends.
    async fn answer_own(&self, endpoint: Endpoint, head: &RequestHead, body: Body) -> Response {
        let route = endpoint.route();
        let gate = V2Gate(self.shared.clone());
        let count = Account::new(gate.clone(), route);
        if let Some((response, reason)) = self.denied(&endpoint, head) {
            count.end(response.status().as_u16(), Some(reason));
            return response;
        }
        let (mut response, reason) = match self.answer(endpoint, head, body).await {
            Ok(response) => (response, None),
            Err(refused) => (answer::refusal(&refused), Some(refused.reason)),
        };
        if let Some(requested) = Requested::of(route, &head.headers, &head.uri) {
            requested.add_to(&mut response, |model, version| gate.load_report(model, version));
        }
        let status = response.status().as_u16();
        body_end::at_end(response, &head.method, move |failed| count.end(status, reason.or(failed)))
    }

    /// Returns the refusal of a request that is denied or has no matching endpoint.
    fn denied(&self, endpoint: &Endpoint, head: &RequestHead) -> Option<(Response, Reason)> {
        let wanted =
            RequiredAccess { route: endpoint.route(), class: endpoint.class(), purpose: endpoint.purpose(self.apis) };
        let denied = self.shared.guard.check(Protocol::Http, wanted, &head.headers).err()?;
        let refused = match (endpoint, denied) {
            (Endpoint::NotFound, Denied::Server(access::Denied::Unknown)) => answer::not_found(),
            (Endpoint::WrongMethod, Denied::Server(access::Denied::Unknown)) => answer::wrong_method(),
            (_, denied) => return Some(answer::denied(denied)),
        };
        Some((answer::refusal(&refused), refused.reason))
    }

    async fn answer(&self, endpoint: Endpoint, head: &RequestHead, body: Body) -> Result<Response, Refused> {
        let shared = &self.shared;
        match endpoint {
            Endpoint::ApiDescription => Ok(answer::json(&openapi::description(self.apis))),
            Endpoint::Ping => Ok(answer::health(shared.registry.is_healthy())),
            Endpoint::Predict(target) => predict::predict(self, head, target, body).await,
            Endpoint::List => Ok(manage::list(shared, head)),
            Endpoint::Register => manage::register(shared, head, body).await,
            Endpoint::Describe(model, version) => describe::describe(shared, head, (&model, &version)).await,
            Endpoint::ManagementApi(model, version) => {
                shared.registry.find(&model, &version)?;
                Ok(answer::json(&openapi::of_management(&model)))
            }
            Endpoint::Scale(model, version) => manage::scale(shared, head, (&model, &version)).await,
            Endpoint::SetDefault(model, version) => Ok(answer::done(shared.registry.set_default(&model, &version)?)),
            Endpoint::Unregister(model, version) => manage::unregister(shared, (&model, &version)).await,
            Endpoint::V1Ready(model) => manage::ready(shared, &model),
            Endpoint::Token => manage::token(shared, head).await,
            Endpoint::Workflows => Ok(answer::json(&serde_json::json!({ "workflows": [] }))),
            Endpoint::Workflow(name) | Endpoint::ManageWorkflow(name) => Err(answer::no_workflow(&name)),
            Endpoint::Metrics => metrics::metrics(shared, head).await,
            Endpoint::Dashboard(path) => (shared.page)(&path).ok_or_else(answer::not_found),
            Endpoint::Kserve | Endpoint::NotFound => Err(answer::not_found()),
            Endpoint::WrongMethod => Err(answer::wrong_method()),
        }
    }
}
