//! The service of an HTTP listener: passes requests to a [`Handle`], with timeouts on their bodies.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, TRANSFER_ENCODING};
use http::{HeaderMap, Request, StatusCode};

use pharos::error::Reason;
use pharos::service::{Protocol, Route, SharedService};
use pharos_listener::PhaseReceiver;
use pharos_listener::body_timeout::{BodyLimits, BoxError, LimitedBody};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// Answers the requests of an HTTP listener.
pub trait Handle: Clone + Send + 'static {
    /// Answers a request. The future is dropped if the client disconnects. A `Result`, as a service
    /// needs: another future around this one would be copied with it.
    fn handle(
        self,
        request: Request<Body>,
    ) -> impl Future<Output = Result<Response, Infallible>> + Send;

    /// Counts and logs a request that the service refuses before it is routed. Returns the response
    /// to send.
    fn refuse(&self, request: Request<Body>, response: Response) -> Response;
}

/// Returns a callback that counts the requests that hyper refuses before it has parsed them, by
/// status.
pub fn count_unparsed(service: SharedService) -> impl Fn(u16) + Send + Sync + 'static {
    move |status| {
        let reason = if status == 400 { Reason::Malformed } else { Reason::TooLarge };
        service.record_answered(Protocol::Http, Route::Unknown, status, Some(reason));
    }
}

/// Spawns a task that passes the requests of a listener to a handler, until `phases` says that the
/// server stops and all requests in flight are answered. `body_timeout` is the maximum time without
/// data of a body; zero for no limit.
#[must_use]
pub fn serve(
    listener: TcpListener,
    handler: impl Handle + Sync,
    service: SharedService,
    body_timeout: Duration,
    connections: pharos_listener::Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let http = HttpService::new(handler, body_timeout);
    let unparsed = count_unparsed(service);
    tokio::spawn(pharos_listener::serve(listener, connections, http, unparsed, phases))
}

/// A handler as the service of a listener.
#[derive(Clone, Debug)]
pub struct HttpService<H> {
    handler: H,
    body_timeout: Duration,
}

/// Returns whether a body is chunked.
///
/// # Errors
/// It has another transfer coding, which hyper would ignore (RFC 9112, 6.1: the answer is 501).
fn is_chunked(headers: &HeaderMap) -> Result<bool, ()> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(false),
        (Some(coding), None) if coding.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") => {
            Ok(true)
        }
        _ => Err(()),
    }
}

fn unsupported_transfer_coding() -> Response {
    let text = "{\"error\":\"the only supported transfer coding is 'chunked'\"}";
    let headers = [(CONTENT_TYPE, "application/json"), (CONNECTION, "close")];
    (StatusCode::NOT_IMPLEMENTED, headers, text).into_response()
}

impl<H: Handle> HttpService<H> {
    /// `body_timeout` is the maximum time without data of a body; zero for no limit.
    pub fn new(handler: H, body_timeout: Duration) -> Self {
        Self { handler, body_timeout }
    }
}

impl<H: Handle, B> tower::Service<Request<B>> for HttpService<H>
where
    B: http_body::Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let Ok(chunked) = is_chunked(request.headers()) else {
            let request = request.map(|_| Body::empty());
            let response = self.handler.refuse(request, unsupported_transfer_coding());
            return Box::pin(std::future::ready(Ok(response)));
        };
        let limits = BodyLimits { idle_timeout: self.body_timeout, chunked };
        let request = request.map(|body| Body::new(LimitedBody::new(body, limits)));
        Box::pin(self.handler.clone().handle(request))
    }
}
