//! The metrics listener: `GET /metrics`, in Prometheus' text form or, if the scraper asks, OpenMetrics.
//!
//! It is a listener of its own so that scraping can be firewalled apart from inference. Its answers are not counted: a
//! scrape would change what it reads.

use std::future::Future;

use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use http::header::ACCEPT;
use http::{HeaderMap, StatusCode};
use pharos::metrics::exposition::Format;
use tokio::net::TcpListener;

use super::{Engine, answer, dashboard};
use crate::listener::{self, Speaks};

/// Serves metrics on `listener` until `shutdown` is ready.
pub async fn serve(listener: TcpListener, engine: Engine, shutdown: impl Future<Output = ()>) {
    listener::serve(listener, Speaks::Http, router(engine), |_| {}, shutdown).await;
}

/// `/metrics`, and the page that draws it.
pub fn router(engine: Engine) -> Router {
    dashboard::add_to(Router::new().route("/metrics", get(metrics)))
        .fallback(elsewhere)
        .method_not_allowed_fallback(wrong_method)
        .with_state(engine)
}

async fn metrics(State(engine): State<Engine>, headers: HeaderMap) -> Response {
    let accepts: Vec<&str> = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let format = Format::negotiate(Some(&accepts.join(",")));
    answer::with_body(StatusCode::OK, format.content_type(), engine.metrics_text(format))
}

async fn elsewhere() -> Response {
    answer::with_body(
        StatusCode::NOT_FOUND,
        "text/plain; charset=utf-8",
        "Metrics are at /metrics, a page that draws them at /dashboard.\n",
    )
}

async fn wrong_method() -> Response {
    let sentence = "Metrics are read with GET /metrics.\n";
    answer::with_body(StatusCode::METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", sentence)
}
