//! The live page at `/dashboard` of the metrics listener, for use without Grafana. Its documents
//! are part of the binary and draw `/metrics` in the browser; the server keeps no state for them
//! and does not count their requests.
//!
//! The page may load only its own files: its content security policy forbids inline scripts and
//! other hosts.

use std::future::ready;

use axum::response::Response;
use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderValue, StatusCode};
use pharos::service::Route;

use super::answer;
use pharos_edge::routing::{Builder, Handler, Methods, handler};

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src \
                      'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors \
                      'none'";

/// A document: path, content type and text.
type Document = (&'static str, &'static str, &'static str);

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

const DOCUMENTS: [Document; 9] = [
    ("/dashboard", HTML, include_str!("dashboard/index.html")),
    ("/dashboard/style.css", CSS, include_str!("dashboard/style.css")),
    ("/dashboard/measure.js", SCRIPT, include_str!("dashboard/measure.js")),
    ("/dashboard/charts.js", SCRIPT, include_str!("dashboard/charts.js")),
    ("/dashboard/streams.js", SCRIPT, include_str!("dashboard/streams.js")),
    ("/dashboard/usage.js", SCRIPT, include_str!("dashboard/usage.js")),
    ("/dashboard/demand.js", SCRIPT, include_str!("dashboard/demand.js")),
    ("/dashboard/events.js", SCRIPT, include_str!("dashboard/events.js")),
    ("/dashboard/view.js", SCRIPT, include_str!("dashboard/view.js")),
];

/// Returns the document at a path, for listeners with other routes.
pub fn document(path: &str) -> Option<Response> {
    DOCUMENTS.into_iter().find(|(known, ..)| *known == path).map(show)
}

/// Adds a route for each document.
pub(super) fn add_to<S: Clone + Send + Sync + 'static>(router: Builder<S>) -> Builder<S> {
    DOCUMENTS.into_iter().fold(router, |router, document| {
        router.route(document.0, Route::Metrics, Methods::get(show_always(document)))
    })
}

/// Returns a handler that answers with a document.
fn show_always<S: Send + 'static>(document: Document) -> Handler<S> {
    handler(move |_: S, call, _| ready(call.finish(show(document), None)))
}

fn show((_, content_type, text): Document) -> Response {
    let mut response = answer::with_body(StatusCode::OK, content_type, text);
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    // The documents are small and mostly read from the same machine; after an upgrade the browser
    // must load the new ones.
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}
