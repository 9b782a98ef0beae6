//! Dispatches requests to handlers. Plain inference requests, the hot path, skip the route table.

use std::convert::Infallible;

use axum::body::Body;
use axum::response::Response;
use http::{Method, Request};
use pharos::service::{Route, SharedService};

use super::model::ModelPath;
use super::{Edge, Settings, infer, routes};
use pharos_edge::answering::Admitted;
use pharos_edge::http_service::Handle;
use pharos_edge::routing::Routes;

/// The whole protocol behind the tokens and restrictions of its settings.
#[derive(Clone)]
pub(super) struct Dispatch {
    pub(super) routes: Routes<Edge>,
}

impl Dispatch {
    pub(super) fn new(service: SharedService, settings: Settings) -> Self {
        let edge = Edge::new(service, settings);
        Self { routes: routes::table(edge.clone(), edge) }
    }

    pub(super) fn edge(&self) -> &Edge {
        self.routes.gate()
    }
}

impl Handle for Dispatch {
    async fn handle(self, request: Request<Body>) -> Result<Response, Infallible> {
        Ok(match plain_infer(&request) {
            Some(path) => match Admitted::new(self.edge(), Route::Infer, &request) {
                Ok(admitted) => admitted.finish(infer::answer(self.edge(), path, request).await),
                Err(refused) => refused,
            },
            // Boxed: the hot path should not move the large future of all routes.
            None => Box::pin(self.routes.answer(request)).await,
        })
    }
}

/// Returns the model of a `POST /v2/models/M/infer` without version and percent-encoded characters. The route table handles all
/// other paths.
fn plain_infer<B>(request: &Request<B>) -> Option<ModelPath> {
    let model = request.uri().path().strip_prefix("/v2/models/")?.strip_suffix("/infer")?;
    let plain = request.method() == Method::POST && !model.is_empty() && !model.contains(['/', '%']);
    plain.then(|| ModelPath { model: model.to_owned(), version: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_inference_skips_the_route_table() {
        let model = |method: Method, uri: &str| {
            let request = Request::builder().method(method).uri(uri).body(()).expect("a valid request");
            plain_infer(&request).map(|path| path.model)
        };
        assert_eq!(model(Method::POST, "/v2/models/m/infer?x=1"), Some("m".to_owned()));
        for uri in
            ["/v2/models/m/versions/1/infer", "/v2/models/a%20b/infer", "/v2/models//infer", "/v2/models/m/generate"]
        {
            assert_eq!(model(Method::POST, uri), None, "{uri}");
        }
        assert_eq!(model(Method::GET, "/v2/models/m/infer"), None);
    }
}
