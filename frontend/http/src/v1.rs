//! The v1 protocol of KServe and TensorFlow Serving over HTTP: the model list, model readiness and `:predict`. The first two also
//! have the members of OpenAI's answers at the same paths.
//!
//! Paths and bodies follow KServe's data plane v1 and TensorFlow Serving's REST interface. Inference uses the same path as v2.
//! The JSON is interpreted by the model's inputs, and each request is counted under the route of its v2 counterpart.

pub(super) mod request;
mod response;

use std::collections::BTreeSet;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use http::{HeaderMap, Request, StatusCode};
use pharos::error::{InferError, Reason};
use pharos::infer::InferRequest;
use pharos::service::Route;
use serde::Serialize;

use super::answer::{Answer, Failure};
use super::generate::{check_encoding, read};
use super::infer::{LONG, execute, forward, on_a_thread_if};
use super::model::ModelPath;
use super::{Edge, answer, openai, trace};
use pharos_edge::request_trace::HTTP;
use pharos_edge::routing::{Builder, RouteOf};
use pharos_edge::tenants;

/// The suffix of the model's name or version in the path of an inference request.
const PREDICT: &str = ":predict";

/// Adds the routes of v1.
pub(super) fn routes(router: Builder<Edge>) -> Builder<Edge> {
    let of_model = RouteOf::Path(route_of_model);
    router
        .route("/", Route::Live, get(alive))
        // The list of models needs the same access as the repository index.
        .route("/v1/models", Route::RepositoryIndex, get(list))
        .route("/v1/models/{model}", of_model, get(ready).post(predict))
        .route("/v1/models/{model}/versions/{version}", of_model, get(ready).post(predict))
}

/// Returns the route of a model's path. A last segment with a colon or an escape may end with `:predict` and needs the access of
/// inference.
fn route_of_model(path: &str) -> Route {
    let last = path.rsplit('/').next().unwrap_or_default();
    if last.contains([':', '%']) { Route::Infer } else { Route::ModelReady }
}

/// `GET /`: KServe's liveness check of v1.
async fn alive() -> Response {
    answer::json(r#"{"status":"alive"}"#)
}

/// The list of models, for clients of KServe and of OpenAI.
#[derive(Serialize)]
struct List<'a> {
    models: &'a BTreeSet<&'a str>,
    #[serde(flatten)]
    openai: openai::ModelList<'a>,
}

/// `GET /v1/models`: the models with at least one ready version.
async fn list(State(edge): State<Edge>) -> Answer {
    let entries = edge.service.repository_index(true).await?;
    let names: BTreeSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    let openai = openai::ModelList::new(&edge, names.iter().copied());
    answer::json_of(&List { models: &names, openai })
}

/// A ready model, for clients of KServe and of OpenAI.
#[derive(Serialize)]
struct Ready<'a> {
    name: &'a str,
    ready: bool,
    #[serde(flatten)]
    openai: openai::Model<'a>,
}

/// Answers 200 if the model is ready, 503 if it is not, and 404 if it does not exist, like KServe's model server.
async fn ready(State(edge): State<Edge>, ModelPath { model, version }: ModelPath) -> Answer {
    let failure = match edge.service.model_ready(&model, &version).await {
        Ok(true) => {
            return answer::json_of(&Ready { name: &model, ready: true, openai: openai::Model::new(&edge, &model) });
        }
        // Treat a malformed version like one that is not ready.
        Ok(false) | Err(InferError { reason: Reason::Invalid, .. }) => {
            match edge.service.model_metadata(&model, &version) {
                Err(error) if error.reason == Reason::UnknownModel => error,
                _ => InferError::not_ready(format!("Model with name {model} is not ready.")),
            }
        }
        Err(error) => error,
    };
    Ok(refusal(failure))
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
        None => super::not_found(),
    }
}

async fn answer_predict(edge: &Edge, model: (&str, &str), request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let traced = trace::begin(edge, model.0, &parts.headers);
    let received = edge.service.now();
    let (timing, mut times) = (edge.settings.timing.of(&parts.headers), None);
    let result = async {
        let (mut request, form) = receive(edge, model, &parts.headers, body).await?;
        request.trace = timing.trace();
        request.tenant = tenants::of(&*edge.service, &parts.headers, &parts.extensions);
        let response = execute(&*edge.service, Box::new(request), traced.as_ref(), received).await?;
        times = timing.value(&response.timeline);
        let size: usize = response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
        on_a_thread_if(size > LONG / 2, move || response::write(&response, form).map(answer::json)).await
    };
    let result = result.await.inspect_err(|error| HTTP.refused(traced.as_ref(), received, error));
    trace::answered(traced, (timing, times), result.unwrap_or_else(refusal))
}

/// Reads a request for the model in its path.
async fn receive(
    edge: &Edge,
    (model, version): (&str, &str),
    headers: &HeaderMap,
    body: Body,
) -> Result<(InferRequest, request::Form), InferError> {
    check_encoding(headers)?;
    edge.service.demand(model, version, 0).await?;
    let metadata = edge.service.model_metadata(model, version)?;
    let body = read(edge, body).await?;
    let (inputs, form) =
        on_a_thread_if(body.len() > LONG, move || request::parse(&body.join(), &metadata.inputs)).await?;
    let mut request = InferRequest {
        model_name: model.to_owned(),
        model_version: version.to_owned(),
        inputs,
        ..InferRequest::default()
    };
    forward(edge, headers, &mut request)?;
    Ok((request, form))
}

/// Returns an error with the status that KServe's model server uses for it.
fn refusal(error: InferError) -> Response {
    let status = match error.reason {
        Reason::UnknownModel => StatusCode::NOT_FOUND,
        Reason::NotReady => StatusCode::SERVICE_UNAVAILABLE,
        _ => return Failure::from(error).into_response(),
    };
    answer::refused(answer::error_text(status, &error.message), error.reason)
}
