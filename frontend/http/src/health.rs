//! `GET /v2/health/live` and `/v2/health/ready`.

use http::StatusCode;
use pharos::error::InferError;
use pharos_edge::routing::Routed;

use super::answer::HandlerResult;
use super::{Edge, answer};

pub(super) async fn live(edge: Edge, _: Routed) -> HandlerResult {
    health(&edge, "live", edge.service.live())
}

pub(super) async fn ready(edge: Edge, _: Routed) -> HandlerResult {
    health(&edge, "ready", edge.service.ready())
}

/// Returns 200 or 400 with the state as JSON, which KServe's clients read. Fails while the server
/// is exiting.
fn health(edge: &Edge, state: &str, healthy: bool) -> HandlerResult {
    if edge.service.exiting() {
        return Err(InferError::not_ready("Server exiting").into());
    }
    let status = if healthy { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    Ok(answer::with_body(status, "application/json", format!("{{\"{state}\":{healthy}}}")))
}
