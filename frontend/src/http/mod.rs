//! The HTTP edge: KServe v2 over HTTP/1.1 and HTTP/2 in clear text, with Triton's extensions (spec 1.1, 1.3).
//!
//! Handlers translate between HTTP and the engine's verbs and decide nothing else. Query strings are accepted and
//! ignored. Every answer is counted once, by `answer::Pending`.

mod answer;
pub(crate) mod body;
pub mod cloud;
pub mod codec;
mod compression;
mod dashboard;
mod data;
mod dispatch;
pub mod fuzzing;
mod generate;
mod infer;
mod json;
mod logging;
pub mod metrics;
mod model;
mod parse;
mod render;
mod repository;
mod restrict;
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
use tokio::net::TcpListener;

#[cfg(not(test))]
pub(crate) use answer::error_text as error_response;
use dispatch::Dispatch;
#[cfg(not(test))]
pub(crate) use restrict::denied_response;

// The unit tests of this edge put an engine that echoes in the place of the real one.
use crate::access::{Access, Forward};
#[cfg(not(test))]
use crate::engine::{Engine, OpenStream};
use crate::engine::{Protocol, Route};
#[cfg(test)]
use crate::fake_engine::{Engine, OpenStream};
use crate::listener::{self, Life, Speaks};
use crate::receiving::Budget;

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
pub(crate) struct Edge {
    engine: Engine,
    settings: Arc<Settings>,
}

impl Edge {
    fn pending(&self, route: Route) -> answer::Pending {
        answer::Pending::new(&self.engine, route)
    }
}

/// Serves the v2 protocol on `listener` until `life` says to stop and the requests in flight are answered.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    (settings, connections): (Settings, listener::Settings),
    life: Life,
) {
    let edge = Edge { engine: engine.clone(), settings: Arc::new(settings) };
    let dispatch = Dispatch { router: routes(edge.clone()), edge };
    listener::serve(listener, (Speaks::Http, connections), dispatch, refused(engine), life).await;
}

/// Counts what is refused before it is a request, by its status.
fn refused(engine: Engine) -> impl Fn(u16) + Clone + Send + 'static {
    move |status| {
        let reason = if status == 400 { Reason::Malformed } else { Reason::TooLarge };
        engine.record_answered(Protocol::Http, Route::Unknown, status, Some(reason));
    }
}

/// The table of routes.
pub fn router(engine: Engine, settings: Settings) -> Router {
    routes(Edge { engine, settings: Arc::new(settings) })
}

fn routes(edge: Edge) -> Router {
    let router = Router::new()
        .route("/v2", get(server::metadata))
        .route("/v2/health/live", get(server::live))
        .route("/v2/health/ready", get(server::ready))
        .route("/v2/models/stats", get(model::all_statistics));
    let router = model_route(router, "", || get(model::metadata));
    let router = model_route(router, "/ready", || get(model::ready));
    let router = model_route(router, "/config", || get(model::config));
    let router = model_route(router, "/stats", || get(model::statistics));
    let router = model_route(router, "/infer", || post(infer::infer));
    let router = model_route(router, "/generate", || post(generate::generate));
    let router = model_route(router, "/generate_stream", || post(generate::generate_stream));
    let router = router
        .route("/v2/repository/index", post(repository::index))
        .route("/v2/repository/models/{*operation}", post(repository::operate))
        .route("/v2/trace/setting", get(trace::get).post(trace::post))
        .route("/v2/models/{model}/trace/setting", get(trace::get_of).post(trace::post_of))
        .route("/v2/logging", get(logging::get).post(logging::post));
    let router = v1::routes(shared_memory::routes(router));
    router.fallback(not_found).method_not_allowed_fallback(method_not_allowed).with_state(edge)
}

/// Adds `/v2/models/M<suffix>` and `/v2/models/M/versions/V<suffix>`.
fn model_route(router: Router<Edge>, suffix: &str, method: impl Fn() -> MethodRouter<Edge>) -> Router<Edge> {
    router
        .route(&format!("/v2/models/{{model}}{suffix}"), method())
        .route(&format!("/v2/models/{{model}}/versions/{{version}}{suffix}"), method())
}

async fn not_found(axum::extract::State(edge): axum::extract::State<Edge>) -> Response {
    not_found_response(&edge.engine)
}

/// The answer to a path that is not known, counted.
pub(crate) fn not_found_response(engine: &Engine) -> Response {
    let response = answer::error_text(StatusCode::NOT_FOUND, "Not Found");
    answer::Pending::new(engine, Route::Unknown).finish_as(response, Some(Reason::Unsupported))
}

async fn method_not_allowed(axum::extract::State(edge): axum::extract::State<Edge>) -> Response {
    let response = answer::error_text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
    edge.pending(Route::Unknown).finish_as(response, Some(Reason::Unsupported))
}

#[cfg(test)]
mod tests;
