//! Metadata, readiness, configuration and statistics of one model.

use http::StatusCode;
use pharos::error::{InferError, Reason};
use pharos::model::{ModelMetadata, TensorMetadata};
use serde_json::json;

use super::answer::{Failure, HandlerResult};
use super::{Edge, answer};
use pharos_edge::routing::Routed;

/// The model in a path `/v2/models/{model}[/versions/{version}]`. The engine validates the version.
pub(super) struct ModelPath {
    pub(super) model: String,
    /// Empty if the path has no version.
    pub(super) version: String,
}

impl ModelPath {
    /// Returns the model in the path of a request.
    ///
    /// # Errors
    /// A name is not valid UTF-8: the path does not exist.
    pub(super) fn of(routed: &mut Routed) -> Result<Self, Failure> {
        let mut names = routed.parameters.take().into_iter().flatten();
        let model = names.next().ok_or_else(answer::unknown_path)?;
        Ok(Self { model, version: names.next().unwrap_or_default() })
    }
}

pub(super) async fn metadata(edge: Edge, mut routed: Routed) -> HandlerResult {
    let path = ModelPath::of(&mut routed)?;
    Ok(answer::json(metadata_json(&edge.service.model_metadata(&path.model, &path.version)?)))
}

fn metadata_json(metadata: &ModelMetadata) -> String {
    // Written without an intermediate value, in the order of the format.
    let tensors = |tensors: &[TensorMetadata]| {
        let tensor = |t: &TensorMetadata| {
            format!(
                "{{\"name\":{},\"datatype\":\"{}\",\"shape\":{}}}",
                json!(t.name),
                t.datatype,
                json!(t.shape)
            )
        };
        tensors.iter().map(tensor).collect::<Vec<_>>().join(",")
    };
    format!(
        "{{\"name\":{},\"versions\":{},\"platform\":{},\"inputs\":[{}],\"outputs\":[{}]}}",
        json!(metadata.name),
        json!(metadata.versions),
        json!(metadata.platform),
        tensors(&metadata.inputs),
        tensors(&metadata.outputs)
    )
}

/// Answers 200 with an empty body, else 400 with the reason if known; also for a model that does
/// not exist.
pub(super) async fn ready(edge: Edge, mut routed: Routed) -> HandlerResult {
    let path = ModelPath::of(&mut routed)?;
    let reason = match edge.service.model_ready(&path.model, &path.version).await {
        Ok(true) => return Ok(answer::empty(StatusCode::OK)),
        // Treat a malformed version like one that is not ready.
        Ok(false) | Err(InferError { reason: Reason::Invalid, .. }) => Reason::NotReady,
        Err(error) => error.reason,
    };
    let mut text = "Model version not ready".to_owned();
    if let Some(why) = edge.service.why_not_ready(&path.model, &path.version) {
        text = format!("{text}: {why}");
    }
    Err(answer::refused(answer::error_text(StatusCode::BAD_REQUEST, &text), reason))
}

pub(super) async fn config(edge: Edge, mut routed: Routed) -> HandlerResult {
    let path = ModelPath::of(&mut routed)?;
    Ok(answer::json(edge.service.model_config_json(&path.model, &path.version)?))
}

pub(super) async fn statistics(edge: Edge, mut routed: Routed) -> HandlerResult {
    let path = ModelPath::of(&mut routed)?;
    statistics_json(&edge, &path.model, &path.version)
}

pub(super) async fn all_statistics(edge: Edge, _: Routed) -> HandlerResult {
    statistics_json(&edge, "", "")
}

fn statistics_json(edge: &Edge, model: &str, version: &str) -> HandlerResult {
    #[derive(serde::Serialize)]
    struct Statistics<T> {
        model_stats: T,
    }
    answer::json_of(&Statistics { model_stats: edge.service.statistics(model, version)? })
}
