//! OpenAI's API over HTTP: its description of models, which shares the paths of KServe's v1, and
//! the answers for the paths of its API that this server does not have.

use std::future::ready;

use http::StatusCode;
use pharos::service::Route;
use serde::Serialize;

use super::answer::post;
use super::{Edge, answer};
use pharos_edge::routing::Builder;

/// What a client of a model can use instead.
const TENSORS: &str = "POST /v2/models/MODEL/infer or /v1/models/MODEL:predict";

/// The paths of OpenAI's API at which clients send requests to models, each with what this server
/// has instead.
const UNAVAILABLE: [(&str, &str); 10] = [
    ("/v1/embeddings", TENSORS),
    ("/v1/moderations", TENSORS),
    ("/v1/rerank", TENSORS),
    ("/v1/score", TENSORS),
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
    /// Returns the list of the models with these names.
    pub(super) fn new(edge: &'a Edge, names: impl IntoIterator<Item = &'a str>) -> Self {
        Self {
            object: "list",
            data: names.into_iter().map(|name| Model::new(edge, name)).collect(),
        }
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
}

impl<'a> Model<'a> {
    pub(super) fn new(edge: &'a Edge, name: &'a str) -> Self {
        Self {
            id: name,
            object: "model",
            created: edge.created,
            owned_by: edge.service.server_name(),
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
    UNAVAILABLE.iter().fold(router, |router, &(path, instead)| {
        router.route(path, Route::Infer, post(move |_, _| ready(Err(unavailable(path, instead)))))
    })
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
