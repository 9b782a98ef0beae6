//! The metrics listener: `GET /metrics` in the Prometheus text format or, if the scraper prefers
//! it, OpenMetrics or Prometheus' protobuf format.
//!
//! The listener is separate so that a firewall can treat scraping and inference differently. Its
//! answers are not counted, because a scrape would change the values that it reads.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT, ACCEPT_ENCODING, CONTENT_ENCODING, HeaderValue, VARY};
use http::{HeaderMap, StatusCode, Uri};
use pharos::metrics::exposition::{Encoding, Names};
use pharos::service::{Route, SharedService};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::compression::{Coding, compress};
use super::{answer, dashboard};
use pharos_edge::headers::text;
use pharos_edge::http_service::HttpService;
use pharos_edge::query::pairs;
use pharos_edge::renderings::{Rendered, Renderings};
use pharos_edge::routing::{Builder, Fallbacks, Methods, Routed, Routes, handler};
use pharos_edge::{Call, OpenPolicy};
use pharos_listener::{self as listener, PhaseReceiver};

/// Spawns a task that serves metrics on `listener` until `phases` signals shutdown.
#[must_use]
pub fn serve(
    listener: TcpListener,
    service: SharedService,
    connections: listener::Settings,
    phases: PhaseReceiver,
) -> JoinHandle<()> {
    let routes = HttpService::new(router(service), Duration::ZERO);
    tokio::spawn(listener::serve(listener, connections, routes, |_| {}, phases))
}

/// Returns the routes of `/metrics` and of the live page.
pub fn router(service: SharedService) -> Routes<SharedService> {
    let renderings = Renderings::default();
    let scrape = move |service, call: Call, routed: Routed| {
        let renderings = renderings.clone();
        async move {
            let request = routed.request;
            call.finish(metrics(&renderings, service, request.uri(), request.headers()).await, None)
        }
    };
    let router =
        Builder::default().route("/metrics", Route::Metrics, Methods::get(handler(scrape)));
    let fallbacks =
        Fallbacks { not_found: |_| elsewhere(), wrong_method, refused: |_| elsewhere() };
    dashboard::add_to(router).build(service.clone(), Arc::new(OpenPolicy::new(service)), fallbacks)
}

async fn metrics(
    renderings: &Renderings,
    service: SharedService,
    uri: &Uri,
    headers: &HeaderMap,
) -> Response {
    let encoding = Encoding::negotiate(text(headers, ACCEPT).as_deref());
    let names = Names::of_query(uri.query().map_or_else(Vec::new, pairs));
    let coding = Coding::of_response(text(headers, ACCEPT_ENCODING).as_deref());
    let document = format!("{encoding:?} {coding:?} {names:?}");
    // On a blocking thread: thousands of series take milliseconds, which must not delay inference.
    let rendered = renderings.get(document, move || {
        let mut body = service.scrape(encoding, &names);
        body.shrink_to_fit();
        let body = Bytes::from(body);
        let compressed = coding
            .name()
            .and_then(|name| Some((name, compress(std::iter::once(&body), coding).ok()?)));
        match compressed {
            Some((name, body)) => Rendered { coding: Some(name), body },
            None => Rendered { coding: None, body },
        }
    });
    let Ok(Rendered { coding, body }) = rendered.await else {
        let sentence = "Failed to render the metrics.\n";
        return answer::with_body(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain; charset=utf-8",
            sentence,
        );
    };
    let mut response = answer::with_body(StatusCode::OK, encoding.content_type(), body);
    if let Some(name) = coding {
        response.headers_mut().insert(CONTENT_ENCODING, HeaderValue::from_static(name));
    }
    response.headers_mut().insert(VARY, HeaderValue::from_static("accept, accept-encoding"));
    response
}

fn elsewhere() -> Response {
    answer::with_body(
        StatusCode::NOT_FOUND,
        "text/plain; charset=utf-8",
        "Metrics are at /metrics, a page that draws them at /dashboard.\n",
    )
}

fn wrong_method() -> Response {
    let sentence = "Method not allowed: use GET /metrics.\n";
    answer::with_body(StatusCode::METHOD_NOT_ALLOWED, "text/plain; charset=utf-8", sentence)
}
