//! The HTTP edge: KServe v2 over HTTP/1.1 and HTTP/2 in clear text, with Triton's extensions (spec 1.1, 1.3).
//!
//! Handlers translate between HTTP and the verbs of a `pharos::service::Service` and decide nothing else. Query strings are accepted and
//! ignored. Every answer is counted once, by `answer::Pending`.

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

use axum::response::Response;
use http::StatusCode;
use pharos::access::Restrictions;
use pharos::error::Reason;
use pharos::metrics::labels::Listener;
use pharos::service::{Protocol, Route, Service};
use tokio::net::TcpListener;

use dispatch::Dispatch;
pub use routes::router;

use pharos_listener as listener;
use pharos_listener::access::{Access, Forward};
use pharos_listener::http_service::HttpService;
use pharos_listener::receiving::Budget;
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

    fn pending(&self, route: Route) -> answer::Pending<S> {
        answer::Pending::new(&self.service, route)
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

/// The answer to a path that is not known, counted.
pub(crate) fn not_found<S: Service>(edge: &Edge<S>) -> Response {
    let response = answer::error_text(StatusCode::NOT_FOUND, "Not Found");
    edge.pending(Route::Unknown).finish_as(response, Some(Reason::Unsupported))
}

/// The answer to a method that a path does not have, counted.
fn wrong_method<S: Service>(edge: &Edge<S>) -> Response {
    let response = answer::error_text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    edge.pending(Route::Unknown).finish_as(response, Some(Reason::Unsupported))
}

#[cfg(test)]
mod tests;
