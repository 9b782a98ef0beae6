//! `GET /v2`: the metadata of the server.

use pharos_edge::routing::Routed;

use super::answer::HandlerResult;
use super::{Edge, answer};

/// The extensions advertised, in Triton's order.
const EXTENSIONS: &str = concat!(
    r#"["classification","sequence","model_repository","model_repository(unload_dependents)","schedule_policy","#,
    r#""model_configuration","system_shared_memory","cuda_shared_memory","binary_tensor_data","parameters","#,
    r#""statistics","trace","logging"]"#
);

pub(super) async fn metadata(edge: Edge, _: Routed) -> HandlerResult {
    let name = serde_json::to_string(edge.service.server_name())
        .unwrap_or_else(|_| "\"triton\"".to_owned());
    let version = env!("CARGO_PKG_VERSION");
    let body = format!("{{\"name\":{name},\"version\":\"{version}\",\"extensions\":{EXTENSIONS}}}");
    Ok(answer::json(body))
}
