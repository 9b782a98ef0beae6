//! Dispatches requests to handlers. Plain inference requests, the hot path, skip the route table.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::{Method, Request};
use pharos::service::{Route, SharedService};
use pharos_edge::Incoming;
use pharos_edge::cors::{Origins, is_preflight};
use pharos_edge::http_service::Handle;
use pharos_edge::request_log::FIELDS;
use pharos_edge::routing::{Builder, Routes};

use super::model::ModelPath;
use super::{Edge, Models, Settings, infer, metrics, routes};

/// The whole protocol behind the tokens and restrictions of its settings.
#[derive(Clone)]
pub(super) struct Dispatch {
    pub(super) routes: Routes<Edge>,
    /// The routes of `/metrics`, which are open and not counted.
    metrics: Option<Routes<SharedService>>,
    /// Whether the port serves the v2 protocol.
    serves_v2: bool,
}

impl Dispatch {
    pub(super) fn new(service: SharedService, settings: Settings, models: Arc<Models>) -> Self {
        let edge = Edge::new(service, settings, models);
        let declared = routes::declared(&edge);
        Self::with(edge, declared, true)
    }

    /// Returns OpenAI's API with the routes that its clients need besides.
    pub(super) fn of_openai(
        service: SharedService,
        settings: Settings,
        models: Arc<Models>,
    ) -> Self {
        Self::with(Edge::new(service, settings, models), routes::declared_for_openai(), false)
    }

    fn with(edge: Edge, declared: Builder<Edge>, serves_v2: bool) -> Self {
        let policy = edge.settings.policy(edge.service.clone());
        let metrics = edge.settings.serves_metrics.then(|| metrics::router(edge.service.clone()));
        let routes = routes::build(edge, declared, policy, super::answer::no_access);
        Self { routes, metrics, serves_v2 }
    }

    pub(super) fn edge(&self) -> &Edge {
        self.routes.state()
    }

    /// Answers a request. A `Result`, as a service needs: another future around this one would be
    /// copied with it.
    pub(super) async fn answer(self, mut incoming: Incoming<Body>) -> Result<Response, Infallible> {
        if !self.is_plain() {
            return Ok(Box::pin(self.answer_with_extras(incoming)).await);
        }
        Ok(match plain_infer(&incoming.request) {
            Some(path) => match self.routes.admit(Route::Infer, &mut incoming) {
                Ok(call) => {
                    infer::answer(self.edge(), call, path, incoming.request, |_| None).await
                }
                Err(refused) => refused,
            },
            // Boxed: the hot path should not move the large future of all routes.
            None => Box::pin(self.routes.answer(incoming)).await,
        })
    }
}

impl Dispatch {
    /// Whether the port has the v2 protocol alone.
    fn is_plain(&self) -> bool {
        self.serves_v2 && self.metrics.is_none() && *self.edge().settings.origins == Origins::None
    }

    /// Answers a request on a port that serves metrics, or whose answers pages of other origins may
    /// read.
    async fn answer_with_extras(self, mut incoming: Incoming<Body>) -> Response {
        let headers = incoming.request.headers();
        let permission = self.edge().settings.origins.permission(headers);
        if let Some(permission) = permission.clone()
            && is_preflight(&incoming.request)
        {
            let response = permission.preflight(incoming.request.headers());
            return self.routes.answer_unknown(incoming, response);
        }
        let mut response = match &self.metrics {
            Some(metrics) if incoming.request.uri().path() == "/metrics" => {
                metrics.answer(incoming).await
            }
            _ => match plain_infer(&incoming.request).filter(|_| self.serves_v2) {
                Some(path) => match self.routes.admit(Route::Infer, &mut incoming) {
                    Ok(call) => {
                        infer::answer(self.edge(), call, path, incoming.request, |_| None).await
                    }
                    Err(refused) => refused,
                },
                None => self.routes.answer(incoming).await,
            },
        };
        if let Some(permission) = permission {
            permission.grant(&mut response);
        }
        response
    }
}

impl Handle for Dispatch {
    fn handle(
        self,
        request: Request<Body>,
    ) -> impl Future<Output = Result<Response, Infallible>> + Send {
        self.answer(Incoming::over_http(request, &FIELDS))
    }

    fn refuse(&self, request: Request<Body>, response: Response) -> Response {
        self.routes.refuse(request, response)
    }
}

/// Returns the model of a `POST /v2/models/M/infer` without version and percent-encoded characters.
/// The route table handles all other paths.
fn plain_infer<B>(request: &Request<B>) -> Option<ModelPath> {
    let model = request.uri().path().strip_prefix("/v2/models/")?.strip_suffix("/infer")?;
    let plain =
        request.method() == Method::POST && !model.is_empty() && !model.contains(['/', '%']);
    plain.then(|| ModelPath { model: model.to_owned(), version: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_inference_skips_the_route_table() {
        let model = |method: Method, uri: &str| {
            let request =
                Request::builder().method(method).uri(uri).body(()).expect("a valid request");
            plain_infer(&request).map(|path| path.model)
        };
        assert_eq!(model(Method::POST, "/v2/models/m/infer?x=1"), Some("m".to_owned()));
        for uri in [
            "/v2/models/m/versions/1/infer",
            "/v2/models/a%20b/infer",
            "/v2/models//infer",
            "/v2/models/m/generate",
        ] {
            assert_eq!(model(Method::POST, uri), None, "{uri}");
        }
        assert_eq!(model(Method::GET, "/v2/models/m/infer"), None);
    }
}
