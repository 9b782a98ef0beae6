//! Server health and metadata.

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use pharos::error::InferError;

use super::answer::Answer;
use super::{Edge, answer};

/// The extensions advertised, in Triton's order.
const EXTENSIONS: &str = concat!(
    r#"["classification","sequence","model_repository","model_repository(unload_dependents)","schedule_policy","#,
    r#""model_configuration","system_shared_memory","cuda_shared_memory","binary_tensor_data","parameters","#,
    r#""statistics","trace","logging"]"#
);

pub(super) async fn live(State(edge): State<Edge>) -> Answer {
    health(&edge, "live", edge.service.live())
}

pub(super) async fn ready(State(edge): State<Edge>) -> Answer {
    health(&edge, "ready", edge.service.ready())
}

/// Returns 200 or 400 with the state as JSON, which KServe's clients read. Fails while the server is exiting.
fn health(edge: &Edge, state: &str, healthy: bool) -> Answer {
    if edge.service.exiting() {
        return Err(InferError::not_ready("Server exiting").into());
    }
    let status = if healthy { StatusCode::OK } else { StatusCode::BAD_REQUEST };
    Ok(answer::with_body(status, "application/json", format!("{{\"{state}\":{healthy}}}")))
}

pub(super) async fn metadata(State(edge): State<Edge>) -> Response {
    let name = serde_json::to_string(edge.service.server_name()).unwrap_or_else(|_| "\"triton\"".to_owned());
    let version = env!("CARGO_PKG_VERSION");
    let body = format!("{{\"name\":{name},\"version\":\"{version}\",\"extensions\":{EXTENSIONS}}}");
    answer::json(body)
}
