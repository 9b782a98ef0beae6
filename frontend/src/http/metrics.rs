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
use tokio::net::TcpListener;

use super::{Engine, answer};
use crate::listener::{self, Speaks};

const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves metrics on `listener` until `shutdown` is ready.
pub async fn serve(listener: TcpListener, engine: Engine, shutdown: impl Future<Output = ()>) {
    listener::serve(listener, Speaks::Http, router(engine), shutdown).await;
}

/// The one route.
pub fn router(engine: Engine) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .fallback(elsewhere)
        .method_not_allowed_fallback(wrong_method)
        .with_state(engine)
}

async fn metrics(State(engine): State<Engine>, headers: HeaderMap) -> Response {
    let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let openmetrics = prefers_openmetrics(accepts);
    let content_type = if openmetrics { OPENMETRICS } else { PROMETHEUS };
    answer::with_body(StatusCode::OK, content_type, engine.metrics_text(openmetrics))
}

/// Whether OpenMetrics has a greater weight than plain text. Of equals plain text wins: it is the form that every reader of
/// the `nv_*` families knows.
fn prefers_openmetrics<'a>(accepts: impl Iterator<Item = &'a str>) -> bool {
    let (mut open, mut plain) = (0.0, 0.0);
    for item in accepts.flat_map(|value| value.split(',')) {
        let mut parts = item.split(';').map(str::trim);
        let media = parts.next().unwrap_or_default();
        let weight: f64 = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok()).unwrap_or(1.0);
        match media {
            "application/openmetrics-text" => open = weight.max(open),
            "text/plain" | "text/*" | "*/*" => plain = weight.max(plain),
            _ => {}
        }
    }
    open > plain
}

async fn elsewhere() -> Response {
    answer::with_body(StatusCode::NOT_FOUND, "text/plain; charset=utf-8", "Metrics are at /metrics.\n")
}

async fn wrong_method() -> Response {
    let sentence = "Metrics are read with GET /metrics.\n";
    answer::with_body(StatusCode::METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", sentence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn openmetrics_is_chosen_only_when_preferred() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        assert!(prefers_openmetrics([prometheus].into_iter()));
        assert!(prefers_openmetrics(["application/openmetrics-text", "text/plain;q=0.5"].into_iter()));
        assert!(!prefers_openmetrics(["*/*"].into_iter()));
        assert!(!prefers_openmetrics(["text/plain;q=0.9,application/openmetrics-text;q=0.5"].into_iter()));
        assert!(!prefers_openmetrics(std::iter::empty()));
    }
}
