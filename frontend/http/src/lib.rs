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
mod server;
mod shared_memory;
mod trace;
mod v1;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use axum::routing::{MethodRouter, get, post};
use http::StatusCode;
use pharos::access::Restrictions;
use pharos::error::Reason;
use pharos::metrics::labels::Listener;
use pharos::service::{Protocol, Route, Service};
use tokio::net::TcpListener;

use dispatch::Dispatch;

use pharos_listener as listener;
use pharos_listener::access::{Access, Forward};
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
    let edge = Edge { service: service.clone(), settings: Arc::new(settings) };
    let dispatch = Dispatch { router: routes(edge.clone()), edge };
    listener::serve(listener, (Speaks::Http, connections), dispatch, refused(service), life).await;
}

/// Counts what is refused before it is a request, by its status.
fn refused<S: Service>(service: S) -> impl Fn(u16) + Clone + Send + 'static {
    move |status| {
        let reason = if status == 400 { Reason::Malformed } else { Reason::TooLarge };
        service.record_answered(Protocol::Http, Route::Unknown, status, Some(reason));
    }
}

/// The table of routes.
pub fn router<S: Service>(service: S, settings: Settings) -> Router {
    routes(Edge { service, settings: Arc::new(settings) })
}

fn routes<S: Service>(edge: Edge<S>) -> Router {
    let router = Router::new()
        .route("/v2", get(server::metadata::<S>))
        .route("/v2/health/live", get(server::live::<S>))
        .route("/v2/health/ready", get(server::ready::<S>))
        .route("/v2/models/stats", get(model::all_statistics::<S>));
    let router = model_route(router, "", || get(model::metadata::<S>));
    let router = model_route(router, "/ready", || get(model::ready::<S>));
    let router = model_route(router, "/config", || get(model::config::<S>));
    let router = model_route(router, "/stats", || get(model::statistics::<S>));
    let router = model_route(router, "/infer", || post(infer::infer::<S>));
    let router = model_route(router, "/generate", || post(generate::generate::<S>));
    let router = model_route(router, "/generate_stream", || post(generate::generate_stream::<S>));
    let router = router
        .route("/v2/repository/index", post(repository::index::<S>))
        .route("/v2/repository/models/{*operation}", post(repository::operate::<S>))
        .route("/v2/trace/setting", get(trace::get::<S>).post(trace::post::<S>))
        .route("/v2/models/{model}/trace/setting", get(trace::get_of::<S>).post(trace::post_of::<S>))
        .route("/v2/logging", get(logging::get::<S>).post(logging::post::<S>));
    let router = v1::routes(shared_memory::routes(router));
    router.fallback(not_found::<S>).method_not_allowed_fallback(method_not_allowed::<S>).with_state(edge)
}

/// Adds `/v2/models/M<suffix>` and `/v2/models/M/versions/V<suffix>`.
fn model_route<S: Service>(
    router: Router<Edge<S>>,
    suffix: &str,
    method: impl Fn() -> MethodRouter<Edge<S>>,
) -> Router<Edge<S>> {
    router
        .route(&format!("/v2/models/{{model}}{suffix}"), method())
        .route(&format!("/v2/models/{{model}}/versions/{{version}}{suffix}"), method())
}

async fn not_found<S: Service>(axum::extract::State(edge): axum::extract::State<Edge<S>>) -> Response {
    not_found_response(&edge.service)
}

/// The answer to a path that is not known, counted.
pub(crate) fn not_found_response<S: Service>(service: &S) -> Response {
    let response = answer::error_text(StatusCode::NOT_FOUND, "Not Found");
    answer::Pending::new(service, Route::Unknown).finish_as(response, Some(Reason::Unsupported))
}

async fn method_not_allowed<S: Service>(axum::extract::State(edge): axum::extract::State<Edge<S>>) -> Response {
    let response = answer::error_text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    edge.pending(Route::Unknown).finish_as(response, Some(Reason::Unsupported))
}

#[cfg(test)]
mod tests;
