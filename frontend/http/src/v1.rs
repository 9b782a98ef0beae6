//! The v1 protocol of KServe and TensorFlow Serving over HTTP: the model list, model readiness and
//! `:predict`. The first two also have the members of OpenAI's answers at the same paths.
//!
//! Paths and bodies follow KServe's data plane v1 and TensorFlow Serving's REST interface.
//! Inference uses the same path as v2. The JSON is interpreted by the model's inputs, and each
//! request is counted under the route of its v2 counterpart.

pub(super) mod request;
mod response;

use std::collections::BTreeSet;

use axum::body::Body;
use axum::response::Response;
use http::{HeaderMap, Request, StatusCode};
use pharos::error::{InferError, Reason};
use pharos::infer::InferRequest;
use pharos::service::{Endpoint, Route};
use serde::Serialize;

use self::request::ModelInputs;
use super::answer::{Failure, HandlerResult, get};
use super::generate::read;
use super::infer::{LONG, on_a_thread_if};
use super::model::ModelPath;
use super::{Edge, answer, openai};
use pharos_edge::Call;
use pharos_edge::headers::check_encoding;
use pharos_edge::routing::{Builder, RouteOf, Routed, handler};

/// The suffix of the model's name or version in the path of an inference request.
const PREDICT: &str = ":predict";

/// Adds the routes of v1.
pub(super) fn routes(router: Builder<Edge>) -> Builder<Edge> {
    let of_model = RouteOf::Path(route_of_model);
    list_of_models(router)
        .route("/", Route::Live, get(alive))
        .route("/v1/models/{model}", of_model, get(ready).and_post(handler(predict)))
        .route(
            "/v1/models/{model}/versions/{version}",
            of_model,
            get(ready).and_post(handler(predict)),
        )
}

/// Adds the list of models and its elements, without predictions.
pub(super) fn models(router: Builder<Edge>) -> Builder<Edge> {
    list_of_models(router).route("/v1/models/{model}", Route::ModelReady, get(ready))
}

fn list_of_models(router: Builder<Edge>) -> Builder<Edge> {
    router
        // A client that may send requests may know the models. Clients of OpenAI's API list them first.
        .route("/v1/models", Route::Models, get(list))
        // The prefix of KServe's runtimes for language models.
        .route("/openai/v1/models", Route::Models, get(list))
        .route("/openai/v1/models/{model}", Route::ModelReady, get(ready))
        // Paths with the model in them, for clients whose base URL has it.
        .route("/predictions/{model}/v1/models", Route::Models, get(list))
        .route(
            "/predictions/{model}/{version}/v1/models",
            RouteOf::Path(pharos_openai::route_of_prediction),
            get(list),
        )
}

/// Returns the route of a model's path. A last segment with a colon or an escape may end with
/// `:predict` and needs the access of inference.
fn route_of_model(path: &str) -> Route {
    let last = path.rsplit('/').next().unwrap_or_default();
    if last.contains([':', '%']) { Route::Infer } else { Route::ModelReady }
}

/// `GET /`: KServe's liveness check of v1.
async fn alive(_: Edge, _: Routed) -> HandlerResult {
    Ok(answer::json(r#"{"status":"alive"}"#))
}

/// The list of models, for clients of KServe and of OpenAI.
#[derive(Serialize)]
struct List<'a> {
    models: &'a BTreeSet<&'a str>,
    #[serde(flatten)]
    openai: openai::ModelList<'a>,
}

/// `GET /v1/models`: the models with at least one ready version.
async fn list(edge: Edge, _: Routed) -> HandlerResult {
    let entries = edge.service.repository_index(true).await?;
    let names: BTreeSet<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    let adapters = edge.models.adapters(&*edge.service, &names).await;
    let openai = openai::ModelList::new(&edge, names.iter().copied(), &adapters);
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

/// Answers 200 if the model is ready, 503 if it is not, and 404 if it does not exist, like KServe's
/// model server.
async fn ready(edge: Edge, mut routed: Routed) -> HandlerResult {
    let ModelPath { model, version } = ModelPath::of(&mut routed)?;
    let failure = match edge.service.model_ready(&model, &version).await {
        Ok(true) => {
            return answer::json_of(&Ready {
                name: &model,
                ready: true,
                openai: openai::Model::new(&edge, &model, None),
            });
        }
        // Treat a malformed version like one that is not ready.
        Ok(false) | Err(InferError { reason: Reason::Invalid, .. }) => {
            match edge.service.model_metadata(&model, &version) {
                Err(error) if error.reason == Reason::UnknownModel => {
                    let base = edge.models.base_of(&*edge.service, &model).await;
                    if base != model && version.is_empty() {
                        return answer::json_of(&Ready {
                            name: &model,
                            ready: true,
                            openai: openai::Model::new(&edge, &model, Some(&base)),
                        });
                    }
                    error
                }
                _ => InferError::not_ready(format!("Model with name {model} is not ready.")),
            }
        }
        Err(error) => error,
    };
    Err(refusal(failure))
}

async fn predict(edge: Edge, call: Call, mut routed: Routed) -> Response {
    let ModelPath { model, version } = match ModelPath::of(&mut routed) {
        Ok(path) => path,
        Err(failure) => return answer::finish(call, Err(failure)),
    };
    let named = match version.is_empty() {
        true => model.strip_suffix(PREDICT).map(|model| (model, "")),
        false => version.strip_suffix(PREDICT).map(|version| (model.as_str(), version)),
    };
    match named {
        Some((model, version)) => answer_predict(&edge, call, model, version, routed.request).await,
        None => answer::finish(call, Err(answer::unknown_path())),
    }
}

async fn answer_predict(
    edge: &Edge,
    mut call: Call,
    model: &str,
    version: &str,
    request: Request<Body>,
) -> Response {
    let (parts, body) = request.into_parts();
    call.begin_trace(model, &parts.headers);
    call.read_headers(&parts.headers);
    let result = async {
        let (request, form) = receive(edge, model, version, &parts.headers, body).await?;
        call.forward(&edge.settings.forward, &parts.headers)?;
        let response = call.infer(Box::new(request), Endpoint::HttpInfer).await?;
        let size: usize =
            response.outputs.iter().map(|output| output.tensor.data.bytes_here()).sum();
        on_a_thread_if(size > LONG / 2, move || response::write(&response, form).map(answer::json))
            .await
    };
    let result = result.await.inspect_err(|error| call.has_failed(error));
    answer::finish(call, result.map_err(refusal))
}

/// Reads a request for the model in its path.
async fn receive(
    edge: &Edge,
    model: &str,
    version: &str,
    headers: &HeaderMap,
    body: Body,
) -> Result<(InferRequest, request::Form), InferError> {
    check_encoding(headers)?;
    edge.service.demand(model, version, 0).await?;
    let metadata = edge.service.model_metadata(model, version)?;
    let config = edge.service.model_config(model, version)?;
    let body = read(edge, body).await?;
    let (inputs, form) = on_a_thread_if(body.len() > LONG, move || {
        let is_optional =
            |name: &str| config.inputs.iter().any(|input| input.name == name && input.optional);
        request::parse(&body.join(), ModelInputs::new(&metadata.inputs, is_optional))
    })
    .await?;
    let request = InferRequest {
        model_name: model.to_owned(),
        model_version: version.to_owned(),
        inputs,
        ..InferRequest::default()
    };
    Ok((request, form))
}

/// Returns an error with the status that KServe's model server uses for it.
fn refusal(error: InferError) -> Failure {
    let status = match error.reason {
        Reason::UnknownModel => StatusCode::NOT_FOUND,
        Reason::NotReady => StatusCode::SERVICE_UNAVAILABLE,
        _ => return Failure::from(error),
    };
    answer::refused(answer::error_text(status, &error.message), error.reason)
}
