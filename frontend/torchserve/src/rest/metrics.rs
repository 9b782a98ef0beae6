//! `/metrics` in TorchServe's format. Accepts any method.

use axum::body::Body;
use axum::response::Response;
use http::header::{CONTENT_TYPE, HeaderValue};
use pharos::metrics::catalog::MetricSpec;
use pharos::metrics::exposition::{Names, java_client};
use pharos::service::Management;

use super::{RequestHead, Shared};
use crate::{Refused, form};

/// Renders the metrics selected by the query.
pub(super) async fn metrics<S: Management>(shared: &Shared<S>, head: &RequestHead) -> Result<Response, Refused> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let pairs = form::pairs(head.uri.query().unwrap_or_default());
    let names = Names::of_query(pairs.into_iter().map(|pair| (pair.name, text(&pair.data))));
    let service = shared.service.clone();
    // Runs on a blocking thread: rendering thousands of series takes milliseconds and would delay inference.
    let rendered =
        tokio::task::spawn_blocking(move || service.render_metrics(|cache| java_client::render(cache, &names, help)))
            .await;
    let rendered = rendered.map_err(|error| Refused::internal(format!("Cannot render the metrics: {error}")))?;
    let mut response = Response::new(Body::from(rendered));
    let content_type = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, content_type);
    Ok(response)
}

/// Returns the help of a metric in TorchServe's wording.
fn help(spec: &MetricSpec) -> String {
    format!("Torchserve prometheus {} metric with unit: {}", spec.kind.as_str(), spec.unit)
}
