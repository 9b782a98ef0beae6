//! OpenAI's API over HTTP: its description of models, which shares the paths of KServe's v1, and
//! the answers for the paths of its API that this server does not have.

use std::future::ready;

use http::StatusCode;
use pharos::error::InferError;
use pharos::model::generation::context_length;
use pharos::service::Route;
use pharos_openai::Adapter;
use serde::Serialize;

use super::answer::{get, post};
use super::{Edge, answer};
use pharos_edge::routing::{Builder, Routed};

/// What a client of a model can use instead.
const TENSORS: &str = "POST /v2/models/MODEL/infer or /v1/models/MODEL:predict";

/// The paths of OpenAI's API at which clients send requests to models, each with what this server
/// has instead.
const UNAVAILABLE: [(&str, &str); 7] = [
    ("/v1/moderations", TENSORS),
    ("/v1/images/generations", TENSORS),
    ("/v1/images/edits", TENSORS),
    ("/v1/images/variations", TENSORS),
    ("/v1/audio/speech", TENSORS),
    ("/v1/audio/transcriptions", TENSORS),
    ("/v1/audio/translations", TENSORS),
];

/// The list of models in OpenAI's form.
#[derive(Serialize)]
pub(super) struct ModelList<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
}

impl<'a> ModelList<'a> {
    /// Returns the list of the models with these names, each before its adapters.
    pub(super) fn new(
        edge: &'a Edge,
        names: impl IntoIterator<Item = &'a str>,
        adapters: &'a [Adapter],
    ) -> Self {
        let mut data = Vec::new();
        for name in names {
            data.push(Model::new(edge, name, None));
            let own = adapters.iter().filter(|adapter| adapter.model == name);
            data.extend(own.map(|adapter| Model::new(edge, &adapter.name, Some(name))));
        }
        Self { object: "list", data }
    }
}

/// A model in OpenAI's form.
#[derive(Serialize)]
pub(super) struct Model<'a> {
    id: &'a str,
    object: &'static str,
    /// The start of the server, in seconds since 1970.
    created: u64,
    owned_by: &'a str,
    /// The model that an adapter belongs to (vLLM's extension).
    parent: Option<&'a str>,
    /// The most tokens of a request, if the configuration says it (vLLM's extension).
    max_model_len: Option<u64>,
}

impl<'a> Model<'a> {
    /// Returns a model, or an adapter of the model `parent`.
    pub(super) fn new(edge: &'a Edge, name: &'a str, parent: Option<&'a str>) -> Self {
        let config = edge.service.model_config(parent.unwrap_or(name), "");
        Self {
            id: name,
            object: "model",
            created: edge.created,
            owned_by: edge.service.server_name(),
            parent,
            max_model_len: config.ok().and_then(|config| context_length(&config)),
        }
    }
}

/// An error in OpenAI's form.
#[derive(Serialize)]
struct Failure<'a> {
    error: Details<'a>,
}

#[derive(Serialize)]
struct Details<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'static str>,
    code: Option<&'static str>,
}

/// Adds the paths that this server does not have. They need the access of inference, so that a
/// client without it learns nothing about the server.
pub(super) fn routes(router: Builder<Edge>) -> Builder<Edge> {
    // Probes of vLLM's deployments use the first path, probes of Triton's OpenAI frontend the second.
    let router = router.route("/health", Route::Ready, get(health)).route(
        "/health/ready",
        Route::Ready,
        get(health),
    );
    UNAVAILABLE.iter().fold(router, |router, &(path, instead)| {
        router.route(path, Route::Infer, post(move |_, _| ready(Err(unavailable(path, instead)))))
    })
}

/// Answers 200 while the server is ready, else 503.
async fn health(edge: Edge, _: Routed) -> answer::HandlerResult {
    if edge.service.ready() && !edge.service.exiting() {
        return Ok(answer::with_body(StatusCode::OK, "text/plain; charset=utf-8", ""));
    }
    Err(InferError::not_ready("the server is not ready").into())
}

fn unavailable(path: &str, instead: &str) -> answer::Failure {
    let message = format!(
        "this server does not have OpenAI's API {path} yet: send {instead}; GET /v1/models lists \
         the models"
    );
    let details =
        Details { message: &message, kind: "invalid_request_error", param: None, code: None };
    let body = serde_json::to_vec(&Failure { error: details }).unwrap_or_default();
    answer::Failure::Unknown(Box::new(answer::with_body(
        StatusCode::NOT_FOUND,
        "application/json",
        body,
    )))
}
