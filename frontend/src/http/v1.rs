//! The v1 protocol of KServe and TensorFlow Serving over HTTP: the list of models, the readiness of one, and `:predict`.
//!
//! Paths and bodies follow KServe's data plane v1 and TensorFlow Serving's REST interface. Inference goes the way of v2: the
//! model's inputs decide what the JSON means, and every request is counted under the route of its v2 counterpart.

mod request;
mod response;

use std::collections::BTreeSet;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use http::header::EXPECT;
use http::{HeaderMap, Request, StatusCode};
use pharos::error::{InferError, Reason};
use pharos::id::TraceId;
use pharos::infer::InferRequest;
use serde_json::json;

use super::generate::{check_encoding, read};
use super::infer::{LONG, TRACEPARENT, forward, on_a_thread_if, text};
use super::model::ModelPath;
use super::{Edge, answer, trace};
use crate::engine::{Endpoint, Route};

/// What stands behind the model's name or version in the path of an inference request.
const PREDICT: &str = ":predict";

/// Adds the routes of v1.
pub(super) fn routes(router: Router<Edge>) -> Router<Edge> {
    router
        .route("/", get(alive))
        .route("/v1/models", get(list))
        .route("/v1/models/{model}", get(ready).post(predict))
        .route("/v1/models/{model}/versions/{version}", get(ready).post(predict))
}

/// `GET /`: KServe's liveness of v1.
async fn alive(State(edge): State<Edge>) -> Response {
    edge.pending(Route::Live).finish_as(answer::json(r#"{"status":"alive"}"#), None)
}

/// `GET /v1/models`: the models that have a version that is ready.
async fn list(State(edge): State<Edge>) -> Response {
    let pending = edge.pending(Route::RepositoryIndex);
    let entries = edge.engine.repository_index(true).await;
    pending.finish(entries.and_then(|entries| {
        let names: BTreeSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        answer::json_of(&json!({ "models": names }))
    }))
}

/// 200 if the model is ready, 503 if it is not, 404 if it does not exist, as from KServe's model server.
async fn ready(State(edge): State<Edge>, ModelPath { model, version }: ModelPath) -> Response {
    let pending = edge.pending(Route::ModelReady);
    let failure = match edge.engine.model_ready(&model, &version).await {
        Ok(true) => return pending.finish(answer::json_of(&json!({ "name": model, "ready": true }))),
        Ok(false) => match edge.engine.model_metadata(&model, &version) {
            Err(error) if error.reason == Reason::UnknownModel => error,
            _ => InferError::not_ready(format!("Model with name {model} is not ready.")),
        },
        Err(error) => error,
    };
    refuse(pending, &failure)
}

async fn predict(
    State(edge): State<Edge>,
    ModelPath { model, version }: ModelPath,
    request: Request<Body>,
) -> Response {
    let named = match version.is_empty() {
        true => model.strip_suffix(PREDICT).map(|model| (model, "")),
        false => version.strip_suffix(PREDICT).map(|version| (model.as_str(), version)),
    };
    match named {
        Some(named) => answer_predict(&edge, named, request).await,
        None => super::not_found_response(&edge.engine),
    }
}

async fn answer_predict(edge: &Edge, model: (&str, &str), request: Request<Body>) -> Response {
    let pending = edge.pending(Route::Infer);
    let (parts, body) = request.into_parts();
    let traced = trace::begin(edge, model.0, &parts.headers);
    let received = edge.engine.now();
    let result = async {
        let (mut request, form) = receive(edge, model, &parts.headers, body).await?;
        request.timeline.received = received;
        trace::received(traced.as_ref(), &mut request);
        request.timeline.request_start = edge.engine.now();
        let response = edge.engine.infer(request, Endpoint::HttpInfer).await;
        trace::complete(traced.as_ref());
        let response = response?;
        let size: usize = response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
        on_a_thread_if(size > LONG / 16, move || response::write(&response, form).map(answer::json)).await
    };
    let result = result.await.inspect_err(|error| trace::refused(traced.as_ref(), received, error));
    let answer = match result {
        Ok(response) => pending.finish(Ok(response)),
        Err(error) => refuse(pending, &error),
    };
    trace::sending(traced, answer)
}

/// Reads a request, for the model that it names.
async fn receive(
    edge: &Edge,
    (model, version): (&str, &str),
    headers: &HeaderMap,
    body: Body,
) -> Result<(InferRequest, request::Form), InferError> {
    check_encoding(headers)?;
    let metadata = edge.engine.model_metadata(model, version)?;
    let body = read(edge, body, headers.contains_key(EXPECT)).await?;
    let (inputs, form) =
        on_a_thread_if(body.len() > LONG, move || request::parse(&body.join(), &metadata.inputs)).await?;
    let mut request = InferRequest {
        model_name: model.to_owned(),
        model_version: version.to_owned(),
        inputs,
        trace: text(headers, TRACEPARENT).and_then(|header| TraceId::from_traceparent(&header)),
        ..InferRequest::default()
    };
    forward(edge, headers, &mut request)?;
    Ok((request, form))
}

/// An error with the status that KServe's model server has for it.
fn refuse(pending: answer::Pending, error: &InferError) -> Response {
    let status = match error.reason {
        Reason::UnknownModel => StatusCode::NOT_FOUND,
        Reason::NotReady => StatusCode::SERVICE_UNAVAILABLE,
        _ => return pending.finish(Err(error.clone())),
    };
    pending.finish_as(answer::error_text(status, &error.message), Some(error.reason))
}
