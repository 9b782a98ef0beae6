//! TorchServe's REST API: three listeners, or fewer if addresses are equal. Every response gets an
//! id, is counted once and is written to the access log once; a streamed response when it ends.

mod answer;
mod describe;
mod ended;
mod manage;
mod metrics;
mod openapi;
mod port_policy;
mod predict;
mod streaming;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, Method, Request, Uri};
use pharos::metrics::cache::Cache;
use pharos::service::{Protocol, SharedManagement};
use pharos::timeline::Instant;

use super::access_log::ACCESS_LOG;
use super::guard::{Denied, Guard, RequiredAccess};
use super::ids::Ids;
use super::registry::ModelReference;
use super::routes::{Apis, Endpoint, endpoint};
use super::{ErrorResponse, Registry, Settings};
use answer::Persistence;
use pharos_edge::access;
use pharos_edge::http_service::Handle;
use pharos_edge::renderings::Renderings;
use pharos_edge::response_timing::ResponseTiming;
use pharos_edge::routing::Answering;
use pharos_edge::{Call, Incoming, Policy, Refusal};
use pharos_listener::receiving::Budget;
use pharos_os::clock;
use pharos_os::event_loops::EventLoops;

pub(crate) use answer::refusal;
pub(super) use describe::{DescriptionCall, descriptions};
pub(super) use ended::EndedSequences;
pub(super) use manage::Registration;
pub(super) use predict::{accept, end_of_worker, first_response, wait_until_loaded};

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

/// Answers the requests of the v2 protocol over HTTP.
pub type KserveHttp = Arc<dyn Fn(Incoming<Body>) -> Answering + Send + Sync>;

/// Returns the document of the live page at a path.
pub type Page = fn(&str) -> Option<Response>;

/// The service of one listener.
#[derive(Clone)]
pub(super) struct Port {
    pub(super) shared: Arc<Shared>,
    pub(super) apis: Apis,
    /// The v2 protocol.
    pub(super) v2: KserveHttp,
}

/// A request without its body.
struct RequestHead {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    id: String,
    received: Instant,
}

impl RequestHead {
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
        let incoming = Incoming::over_http(request, &ACCESS_LOG);
        let id = self.shared.ids.next();
        let persistence = Persistence::of(&incoming.request);
        let path = incoming.request.uri().path();
        let mut response = match endpoint(self.apis, incoming.request.method(), path) {
            Endpoint::Kserve => (self.v2)(incoming).await,
            // Binary tensors behind the JSON cannot be passed to a handler; the v2 edge takes them.
            Endpoint::Predict(_)
                if incoming.request.headers().contains_key(BINARY) && path.starts_with("/v2/") =>
            {
                (self.v2)(incoming).await
            }
            endpoint => self.answer_own(endpoint, incoming, &id).await,
        };
        answer::finish(&mut response, &id, &persistence, &self.shared.settings.cors);
        Ok(response)
    }

    fn refuse(&self, request: Request<Body>, response: Response) -> Response {
        let persistence = Persistence::of(&request);
        let incoming = Incoming::over_http(request, &ACCESS_LOG);
        let policy: Arc<dyn Policy> = self.shared.clone();
        let mut response = Call::answer_unrouted(incoming, &policy, response);
        answer::finish(
            &mut response,
            &self.shared.ids.next(),
            &persistence,
            &self.shared.settings.cors,
        );
        response
    }
}

impl Port {
    /// Checks access to a TorchServe endpoint and executes the request, which ends when its
    /// response has been sent.
    async fn answer_own(
        &self,
        endpoint: Endpoint,
        mut incoming: Incoming<Body>,
        id: &str,
    ) -> Response {
        let access = self.check(&endpoint, incoming.request.headers());
        let policy: Arc<dyn Policy> = self.shared.clone();
        let mut call = match Call::admit_if(
            access,
            Protocol::Http,
            endpoint.route(),
            &mut incoming,
            &policy,
        ) {
            Ok(call) => call,
            Err(refusal) => return answer::refusal(refusal),
        };
        let (parts, body) = incoming.request.into_parts();
        let head = RequestHead {
            method: parts.method,
            uri: parts.uri,
            headers: parts.headers,
            id: id.to_owned(),
            received: clock::now(),
        };
        let (response, reason) = match self.answer(endpoint, &head, body, &mut call).await {
            Ok(response) => (response, None),
            Err(refused) => (answer::error(&refused), Some(refused.reason)),
        };
        call.finish_with_body(response, reason, &head.method)
    }

    /// Checks access to an endpoint.
    ///
    /// # Errors
    /// The request is denied, or has no matching endpoint.
    fn check(&self, endpoint: &Endpoint, headers: &HeaderMap) -> Result<(), Refusal> {
        let wanted = RequiredAccess {
            route: endpoint.route(),
            class: endpoint.class(),
            purpose: endpoint.purpose(self.apis),
        };
        let checked = self.shared.guard.check(Protocol::Http, wanted, headers);
        checked.map_err(|denied| match (endpoint, denied) {
            (Endpoint::NotFound, Denied::Server(access::Denied::Unknown)) => {
                answer::not_found().into()
            }
            (Endpoint::WrongMethod, Denied::Server(access::Denied::Unknown)) => {
                answer::wrong_method().into()
            }
            (_, denied) => denied.refusal(Protocol::Http),
        })
    }

    async fn answer(
        &self,
        endpoint: Endpoint,
        head: &RequestHead,
        body: Body,
        call: &mut Call,
    ) -> Result<Response, ErrorResponse> {
        let shared = &self.shared;
        match endpoint {
            Endpoint::ApiDescription => Ok(answer::json(&openapi::description(self.apis))),
            Endpoint::Ping => Ok(answer::health(shared.registry.is_healthy())),
            Endpoint::Predict(target) => predict::predict(self, head, call, target, body).await,
            Endpoint::List => Ok(manage::list(shared, head)),
            Endpoint::Register => manage::register(shared, head, body).await,
            Endpoint::Describe(model, version) => {
                describe::describe(shared, head, ModelReference { name: &model, version: &version })
                    .await
            }
            Endpoint::ManagementApi(model, version) => {
                shared.registry.find(&model, &version)?;
                Ok(answer::json(&openapi::of_management(&model)))
            }
            Endpoint::Scale(model, version) => {
                manage::scale(shared, head, ModelReference { name: &model, version: &version })
                    .await
            }
            Endpoint::SetDefault(model, version) => {
                Ok(answer::done(shared.registry.set_default(&model, &version)?))
            }
            Endpoint::Unregister(model, version) => {
                manage::unregister(shared, &model, &version).await
            }
            Endpoint::V1Ready(model) => manage::ready(shared, &model),
            Endpoint::Token => manage::token(shared, head).await,
            Endpoint::Workflows => Ok(answer::json(&serde_json::json!({ "workflows": [] }))),
            Endpoint::Workflow(name) | Endpoint::ManageWorkflow(name) => {
                Err(answer::no_workflow(&name))
            }
            Endpoint::Metrics => metrics::metrics(shared, head).await,
            Endpoint::Dashboard(path) => (shared.page)(&path).ok_or_else(answer::not_found),
            Endpoint::Kserve | Endpoint::NotFound => Err(answer::not_found()),
            Endpoint::WrongMethod => Err(answer::wrong_method()),
        }
    }
}
