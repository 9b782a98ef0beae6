//! What is known of one model: metadata, readiness, configuration, statistics.

use axum::extract::{FromRequestParts, Path, State};
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use pharos::error::{InferError, Reason};
use pharos::model::{ModelMetadata, TensorMetadata};
use serde::Deserialize;
use serde_json::json;

use super::{Edge, answer};
use crate::engine::Route;

/// The model that a path names, `/v2/models/{model}[/versions/{version}]`. Whether a version is a number, the engine says.
#[derive(Deserialize)]
pub(super) struct ModelPath {
    pub(super) model: String,
    #[serde(default)]
    pub(super) version: String,
}

impl FromRequestParts<Edge> for ModelPath {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, edge: &Edge) -> Result<Self, Response> {
        match Path::<Self>::from_request_parts(parts, edge).await {
            Ok(Path(path)) => Ok(path),
            Err(_) => Err(super::not_found_response(&edge.engine)),
        }
    }
}

pub(super) async fn metadata(State(edge): State<Edge>, path: ModelPath) -> Response {
    let metadata = edge.engine.model_metadata(&path.model, &path.version);
    edge.pending(Route::ModelMetadata).finish(metadata.map(|metadata| answer::json(metadata_json(&metadata))))
}

fn metadata_json(metadata: &ModelMetadata) -> String {
    // Built by hand because the order of the keys is part of the form (serde_json's maps sort them).
    let tensors = |tensors: &[TensorMetadata]| {
        let tensor = |t: &TensorMetadata| {
            format!("{{\"name\":{},\"datatype\":\"{}\",\"shape\":{}}}", json!(t.name), t.datatype, json!(t.shape))
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

/// 200 with an empty body, else 400, also for a model that does not exist; with the reason where one is known.
pub(super) async fn ready(State(edge): State<Edge>, path: ModelPath) -> Response {
    let pending = edge.pending(Route::ModelReady);
    let reason = match edge.engine.model_ready(&path.model, &path.version).await {
        Ok(true) => return pending.finish_as(answer::empty(StatusCode::OK), None),
        Ok(false) => Reason::NotReady,
        Err(error) => error.reason,
    };
    let mut text = "Model version not ready".to_owned();
    if let Some(why) = edge.engine.why_not_ready(&path.model, &path.version) {
        text = format!("{text}: {why}");
    }
    pending.finish_as(answer::error_text(StatusCode::BAD_REQUEST, &text), Some(reason))
}

pub(super) async fn config(State(edge): State<Edge>, path: ModelPath) -> Response {
    let config = edge.engine.model_config_json(&path.model, &path.version);
    edge.pending(Route::ModelConfig).finish(config.map(answer::json))
}

pub(super) async fn statistics(State(edge): State<Edge>, path: ModelPath) -> Response {
    edge.pending(Route::ModelStatistics).finish(statistics_json(&edge, &path.model, &path.version))
}

pub(super) async fn all_statistics(State(edge): State<Edge>) -> Response {
    edge.pending(Route::ModelStatistics).finish(statistics_json(&edge, "", ""))
}

fn statistics_json(edge: &Edge, model: &str, version: &str) -> Result<Response, InferError> {
    #[derive(serde::Serialize)]
    struct Answer<T> {
        model_stats: T,
    }
    answer::json_of(&Answer { model_stats: edge.engine.statistics(model, version)? })
}
