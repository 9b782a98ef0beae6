//! The HTTP edge: KServe v2 over HTTP/1.1 and HTTP/2 in clear text, with Triton's extensions (spec 1.1, 1.3).
//!
//! Handlers translate between HTTP and the verbs of a `pharos::service::Service` and decide nothing else. Query strings are accepted and
//! ignored. Every answer is counted once, by the layer of
//! [`pharos_listener::answering`].

mod access_check;
mod answer;
pub mod cloud;
pub mod codec;
mod compression;
mod dashboard;
mod data;
mod dispatch;
pub mod fuzzing;
mod generate;
mod headers;
mod infer;
mod json;
mod logging;
pub mod metrics;
mod model;
mod parse;
mod pieces;
mod render;
mod repository;
mod routes;
mod server;
mod shared_memory;
mod trace;
mod v1;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use pharos::access::Restrictions;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::metrics::labels::Listener;
use pharos::service::{Protocol, Route, Service};
use tokio::net::TcpListener;

use dispatch::Dispatch;
pub use routes::router;

use pharos_listener as listener;
use pharos_listener::access::{Access, Forward};
use pharos_listener::http_service::HttpService;
use pharos_listener::receiving::Budget;
use pharos_listener::receiving::body::{self, Read};
use pharos_listener::{Life, Speaks};

/// What the HTTP edge is told at start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `--http-max-input-size`: the most bytes of a request's JSON, and of its binary data, each.
    pub max_input_size: u64,
    /// `--http-restricted-api`.
    pub restricted: Arc<Restrictions>,
    /// The tokens that are asked for.
    pub access: Access,
    /// `--http-header-forward-pattern`.
    pub forward: Forward,
    /// `--http-body-timeout-secs`; zero for none.
    pub body_timeout: Duration,
    /// The memory of what is being received.
    pub budget: Budget,
}

/// How a listener treats its connections unless it is told otherwise.
pub fn connections() -> listener::Settings {
    listener::Settings::new(Listener::Http)
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_input_size: 64 << 20,
            restricted: Arc::default(),
            access: Access::default(),
            forward: Forward::default(),
            body_timeout: Duration::from_secs(60),
            budget: Budget::default(),
        }
    }
}

/// The most bytes of a body that has a handful of members.
const MAX_SHORT_BODY: u64 = 64 << 10;

/// What every handler has.
#[derive(Clone)]
pub(crate) struct Edge<S: Service> {
    service: S,
    settings: Arc<Settings>,
}

impl<S: Service> Edge<S> {
    fn new(service: S, settings: Settings) -> Self {
        Self { service, settings: Arc::new(settings) }
    }

    /// The whole body of a request that has a handful of members.
    ///
    /// # Errors
    /// It has more than 64 KiB, or arrives too slowly.
    async fn read_short(&self, body: Body, what: &str) -> Result<Bytes, InferError> {
        match body::read(&self.settings.budget, body, MAX_SHORT_BODY, false).await? {
            Read::Whole(body) => Ok(body.join()),
            Read::TooLarge(size) => {
                let text = format!("the body has {size} bytes; {what} has at most {MAX_SHORT_BODY}");
                Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text))
            }
        }
    }
}

/// Serves the v2 protocol on `listener` until `life` says to stop and the requests in flight are answered.
pub async fn serve<S: Service>(
    listener: TcpListener,
    service: S,
    (settings, connections): (Settings, listener::Settings),
    life: Life,
) {
    let body_timeout = settings.body_timeout;
    let dispatch = HttpService::new(Dispatch::new(service.clone(), settings), body_timeout);
    listener::serve(listener, (Speaks::Http, connections), dispatch, refused(service), life).await;
}

/// Counts what is refused before it is a request, by its status.
fn refused<S: Service>(service: S) -> impl Fn(u16) + Clone + Send + 'static {
    move |status| {
        let reason = if status == 400 { Reason::Malformed } else { Reason::TooLarge };
        service.record_answered(Protocol::Http, Route::Unknown, status, Some(reason));
    }
}

/// The answer to a path that does not exist.
fn not_found() -> Response {
    answer::unknown(StatusCode::NOT_FOUND, "Not Found")
}

/// The answer to a method that a path does not have.
fn wrong_method() -> Response {
    answer::unknown(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
}

#[cfg(test)]
mod tests;
