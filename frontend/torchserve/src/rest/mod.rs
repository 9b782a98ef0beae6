//! TorchServe's REST: three listeners, or fewer where their addresses are the same. Every answer has an id, is counted once,
//! and is told to the access log.

mod answer;
mod describe;
mod ended;
mod manage;
mod metrics;
mod openapi;
mod predict;
mod streaming;
mod v2;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, Method, Request, Uri, Version};
use pharos::error::Reason;
use pharos::metrics::cache::Cache;
use pharos::service::{Management, Protocol};
use pharos::timeline::Instant;

use super::guard::{Denied, Guard, Wanted};
use super::ids::Ids;
use super::routes::{Apis, Endpoint, endpoint};
use super::{Refused, Registry, Settings};
use pharos_listener::Peer;
use pharos_listener::access;
use pharos_listener::answering::Account;
use pharos_listener::http_service::Handle;
use pharos_listener::receiving::Budget;
use pharos_listener::request_log;
use pharos_listener::routing::Routes;
use pharos_os::clock;

pub(super) use describe::descriptions;
pub(super) use ended::EndedSequences;
pub(super) use manage::Registration;
pub(super) use predict::{end_of, enter, first_of, loaded};
pub use v2::V2Gate;

/// Tensors behind the JSON of the v2 protocol.
const BINARY: &str = "inference-header-content-length";

/// How long a body may not go on.
pub(super) const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// What all listeners share.
pub(crate) struct Shared<S: Management> {
    /// Its clients call models by TorchServe's names.
    pub(super) service: S,
    /// The same, without counting by name.
    pub(super) uncounted: S,
    pub(super) registry: Arc<Registry<S>>,
    /// Counts connections.
    pub(super) metrics: Arc<Cache>,
    pub(super) settings: Arc<Settings>,
    pub(super) guard: Guard,
    pub(super) budget: Budget,
    pub(super) ids: Ids,
}

/// One listener's service.
#[derive(Clone)]
pub(super) struct Port<S: Management> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) apis: Apis,
    /// The v2 protocol.
    pub(super) v2: Routes<V2Gate<S>>,
}

/// A request, but for its body.
struct Asked {
    method: Method,
    uri: Uri,
    version: Version,
    headers: HeaderMap,
    peer: Option<SocketAddr>,
    id: String,
    received: Instant,
}

impl Asked {
    /// A pair of the query, decoded; of several the first.
    fn query(&self, name: &str) -> Option<String> {
        let pairs = super::form::pairs(self.uri.query().unwrap_or_default());
        let found = pairs.into_iter().find(|pair| pair.name == name);
        found.map(|pair| String::from_utf8_lossy(&pair.data).into_owned())
    }

    /// A whole number of the query; one that is none counts as absent, as in TorchServe.
    fn number(&self, name: &str) -> Option<i64> {
        self.query(name)?.parse().ok()
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl<S: Management> Handle for Port<S> {
    async fn handle(self, request: Request<Body>) -> Response {
        let (parts, body) = request.into_parts();
        let asked = Asked {
            peer: parts.extensions.get::<Peer>().map(|peer| peer.0),
            method: parts.method,
            uri: parts.uri,
            version: parts.version,
            headers: parts.headers,
            id: self.shared.ids.next(),
            received: clock::now(),
        };
        let path = asked.uri.path();
        let mut response = match endpoint(self.apis, &asked.method, path) {
            Endpoint::Kserve => self.answer_v2(&asked, body).await,
            // Tensors behind the JSON are no body for a handler.
            Endpoint::Predict(_) if asked.headers.contains_key(BINARY) && path.starts_with("/v2/") => {
                self.answer_v2(&asked, body).await
            }
            endpoint => self.answer_own(endpoint, &asked, body).await,
        };
        answer::finish(&mut response, &asked, &self.shared.settings.cors);
        Self::log(&asked, response.status().as_u16());
        response
    }
}

impl<S: Management> Port<S> {
    /// Checks the access to an endpoint of TorchServe, answers and counts the answer.
    async fn answer_own(&self, endpoint: Endpoint, asked: &Asked, body: Body) -> Response {
        let route = endpoint.route();
        let count = Account::new(V2Gate(self.shared.clone()), route);
        let (response, reason) = match self.denied(&endpoint, asked) {
            Some((response, reason)) => (response, Some(reason)),
            None => match self.answer(endpoint, asked, body).await {
                Ok(response) => (response, None),
                Err(refused) => (answer::refusal(&refused), Some(answer::reason(&refused))),
            },
        };
        count.end(response.status().as_u16(), reason);
        response
    }

    /// The refusal of a request that may not have what it asks for, or asks for nothing that is there.
    fn denied(&self, endpoint: &Endpoint, asked: &Asked) -> Option<(Response, Reason)> {
        let wanted = Wanted { route: endpoint.route(), class: endpoint.class(), purpose: endpoint.purpose(self.apis) };
        let denied = self.shared.guard.check(Protocol::Http, wanted, &asked.headers).err()?;
        let refused = match (endpoint, denied) {
            (Endpoint::NotFound, Denied::Server(access::Denied::Unknown)) => answer::not_found(),
            (Endpoint::WrongMethod, Denied::Server(access::Denied::Unknown)) => answer::wrong_method(),
            (_, denied) => return Some(answer::denied(denied)),
        };
        Some((answer::refusal(&refused), answer::reason(&refused)))
    }

    async fn answer(&self, endpoint: Endpoint, asked: &Asked, body: Body) -> Result<Response, Refused> {
        let shared = &self.shared;
        match endpoint {
            Endpoint::ApiDescription => Ok(answer::json(&openapi::description(self.apis))),
            Endpoint::Ping => Ok(answer::health(shared.registry.is_healthy())),
            Endpoint::Predict(target) => predict::predict(self, asked, target, body).await,
            Endpoint::List => Ok(manage::list(shared, asked)),
            Endpoint::Register => manage::register(shared, asked, body).await,
            Endpoint::Describe(model, version) => describe::describe(shared, asked, (&model, &version)).await,
            Endpoint::ManagementApi(model, version) => {
                shared.registry.find(&model, &version)?;
                Ok(answer::json(&openapi::of_management(&model)))
            }
            Endpoint::Scale(model, version) => manage::scale(shared, asked, (&model, &version)).await,
            Endpoint::SetDefault(model, version) => Ok(answer::done(shared.registry.set_default(&model, &version)?)),
            Endpoint::Unregister(model, version) => manage::unregister(shared, (&model, &version)).await,
            Endpoint::V1Ready(model) => manage::ready(shared, &model),
            Endpoint::Token => manage::token(shared, asked).await,
            Endpoint::Workflows => Ok(answer::json(&serde_json::json!({ "workflows": [] }))),
            Endpoint::Workflow(name) | Endpoint::ManageWorkflow(name) => Err(answer::no_workflow(&name)),
            Endpoint::Metrics => metrics::metrics(shared, asked).await,
            Endpoint::Kserve | Endpoint::NotFound => Err(answer::not_found()),
            Endpoint::WrongMethod => Err(answer::wrong_method()),
        }
    }

    fn log(asked: &Asked, status: u16) {
        if !request_log::is_enabled() {
            return;
        }
        let Asked { method, uri, version, received, .. } = asked;
        let peer = asked.peer.map_or_else(|| "0.0.0.0".to_owned(), |peer| peer.to_string());
        let ms = (clock::now() - *received).as_millis();
        request_log::answered_line(&format!("/{peer} \"{method} {uri} {version:?}\" {status} {ms}"));
    }
}
