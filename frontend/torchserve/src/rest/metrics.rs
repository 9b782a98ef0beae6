//! `/metrics` in TorchServe's format or, if the scraper prefers it, Prometheus' protobuf format.
//! Accepts any method.

use axum::body::Body;
use axum::response::Response;
use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use pharos::metrics::catalog::MetricSpec;
use pharos::metrics::exposition::{self, Encoding, Format, Names, java_client};
use pharos_edge::renderings::Rendered;

use super::{RequestHead, Shared};
use crate::{ErrorResponse, form};

/// Renders the metrics selected by the query.
pub(super) async fn metrics(
    shared: &Shared,
    head: &RequestHead,
) -> Result<Response, ErrorResponse> {
    let pairs = form::pairs(head.uri.query().unwrap_or_default());
    let pairs =
        pairs.into_iter().map(|pair| (pair.name, String::from_utf8_lossy(&pair.data).into_owned()));
    let names = Names::of_query(pairs);
    let accept = head.headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let encoding = match Encoding::negotiate(accept) {
        Encoding::Protobuf => Encoding::Protobuf,
        // TorchServe does not write OpenMetrics.
        Encoding::Text(_) => Encoding::Text(Format::Text),
    };
    let service = shared.service.clone();
    let document = format!("{encoding:?} {names:?}");
    // On a blocking thread: rendering thousands of series takes milliseconds and would delay
    // inference.
    let rendered = shared.renderings.get(document, move || {
        let cache = service.current_metrics();
        let mut body = match encoding {
            Encoding::Protobuf => exposition::encode(&cache, encoding, &names),
            Encoding::Text(_) => java_client::render(&cache, &names, help).into_bytes(),
        };
        body.shrink_to_fit();
        Rendered { coding: None, body: body.into() }
    });
    let Ok(rendered) = rendered.await else {
        return Err(ErrorResponse::internal("Cannot render the metrics; the log has the reason"));
    };
    let mut response = Response::new(Body::from(rendered.body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(encoding.content_type()));
    Ok(response)
}

/// Returns the help of a metric in TorchServe's wording.
fn help(spec: &MetricSpec) -> String {
    format!("Torchserve prometheus {} metric with unit: {}", spec.kind.as_str(), spec.unit)
}
