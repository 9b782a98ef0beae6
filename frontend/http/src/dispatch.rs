//! The way of a request to its handler: inference, which comes thousands of times a second, directly; everything else
//! through the table of routes.

use pharos::service::Service;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::header::TRANSFER_ENCODING;
use http::{Method, Request};
use tower::Service as _;

use super::model::ModelPath;
use super::{Edge, access_check, infer};
use pharos_listener::body_timeout::{Pace, Paced};
use pharos_listener::request_log;

type Answering = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

/// All of the protocol, as one service.
#[derive(Clone)]
pub(super) struct Dispatch<S: Service> {
    pub(super) edge: Edge<S>,
    pub(super) router: Router,
}

impl<S: Service, B> tower::Service<Request<B>> for Dispatch<S>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        // Neither a route nor the handler of inference ever waits to be ready.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        if request_log::is_enabled() {
            return self.call_and_tell(request);
        }
        self.answer(request)
    }
}

impl<S: Service> Dispatch<S> {
    /// Answers, and logs a line about it.
    fn call_and_tell<B>(&mut self, request: Request<B>) -> Answering
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    {
        let (service, began) = (self.edge.service.clone(), self.edge.service.now());
        let what = format!("{} {}", request.method(), request.uri());
        let answering = self.answer(request);
        Box::pin(async move {
            let answer = answering.await;
            let status = answer.as_ref().map_or(0, |answer| answer.status().as_u16());
            request_log::answered("http", &what, status, service.now().ns_since(began));
            answer
        })
    }

    fn answer<B>(&mut self, request: Request<B>) -> Answering
    where
        B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    {
        if let Some(refused) = access_check::refusal(&self.edge, request.uri().path(), request.headers()) {
            return Box::pin(std::future::ready(Ok(refused)));
        }
        let request = paced(&self.edge, request);
        match plain_infer(&request) {
            Some(path) => {
                let edge = self.edge.clone();
                Box::pin(async move { Ok(infer::answer(edge, path, request).await) })
            }
            None => Box::pin(self.router.clone().call(request)),
        }
    }
}

/// A request whose body has to arrive in time.
pub(super) fn paced<S: Service, B>(edge: &Edge<S>, request: Request<B>) -> Request<Body>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    let chunked = request.headers().contains_key(TRANSFER_ENCODING);
    let pace = Pace { patience: edge.settings.body_timeout, chunked };
    request.map(|body| Body::new(Paced::new(body, pace, |fault| Box::new(fault))))
}

/// The model of a `POST /v2/models/M/infer` without version and without encoded characters. The table of routes answers
/// every other path, and this one too, only slower.
fn plain_infer<B>(request: &Request<B>) -> Option<ModelPath> {
    let model = request.uri().path().strip_prefix("/v2/models/")?.strip_suffix("/infer")?;
    let plain = request.method() == Method::POST && !model.is_empty() && !model.contains(['/', '%']);
    plain.then(|| ModelPath { model: model.to_owned(), version: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_inference_takes_the_short_way() {
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
