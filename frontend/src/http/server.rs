//! Health of the server, and what it is.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use pharos::error::InferError;

use super::{Edge, answer};
use crate::engine::Route;

/// The extensions advertised, in Triton's order.
const EXTENSIONS: &str = concat!(
    r#"["classification","sequence","model_repository","model_repository(unload_dependents)","schedule_policy","#,
    r#""model_configuration","system_shared_memory","cuda_shared_memory","binary_tensor_data","parameters","#,
    r#""statistics","trace","logging"]"#
);

pub(super) async fn live(State(edge): State<Edge>) -> Response {
    let live = edge.engine.live();
    edge.pending(Route::Live).finish(health(&edge, "live", live))
}

pub(super) async fn ready(State(edge): State<Edge>) -> Response {
    let ready = edge.engine.ready();
    edge.pending(Route::Ready).finish(health(&edge, "ready", ready))
}

/// 200 or 400, with a body that says the same for KServe's clients; an error while exiting.
fn health(edge: &Edge, state: &str, healthy: bool) -> Result<Response, InferError> {
    if edge.engine.exiting() {
        return Err(InferError::not_ready("Server exiting"));
    }
    let status = if healthy { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    Ok(answer::with_body(status, "application/json", format!("{{\"{state}\":{healthy}}}")))
}

pub(super) async fn metadata(State(edge): State<Edge>) -> Response {
    let name = serde_json::to_string(edge.engine.server_name()).unwrap_or_else(|_| "\"triton\"".to_owned());
    let version = env!("CARGO_PKG_VERSION");
    let body = format!("{{\"name\":{name},\"version\":\"{version}\",\"extensions\":{EXTENSIONS}}}");
    edge.pending(Route::ServerMetadata).finish(Ok(answer::json(body)))
}
