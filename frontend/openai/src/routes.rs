//! The routes of OpenAI's API.

use std::sync::Arc;

use axum::response::Response;
use pharos::service::{Route, SharedService};
use pharos_edge::http_settings::HttpSettings;
use pharos_edge::routing::{Builder, Fallbacks, Handler, Methods, RouteOf, handler};

use crate::answer::{no_access, not_found, wrong_method};
use crate::edge::{Edge, Received};
use crate::models::Models;
use crate::passthrough::{
    self, CHATS, CLASSIFY, COMPLETIONS, DETOKENIZE, EMBEDDINGS, Passthrough, RERANK, RESPONSES,
    SCORE, TOKENIZE,
};
use crate::sleep::{self, Verb};
use crate::{
    adapters, chat_completions, classes, completions, embeddings, responses, scores, tei, tokenize,
};

/// Returns the route of a path with a model in it. `.` names no model, so that a path has one
/// spelling.
pub fn route_of_prediction(path: &str) -> Route {
    let model = path.split('/').nth(2).unwrap_or_default();
    if model == "." || model.eq_ignore_ascii_case("%2e") {
        return Route::Unknown;
    }
    match path.rsplit('/').next() {
        Some("completions") if path.ends_with("/chat/completions") => Route::ChatCompletion,
        Some("completions") => Route::Completion,
        Some("embeddings") => Route::Embeddings,
        Some("models") => Route::Models,
        _ => Route::Unknown,
    }
}

/// Adds the paths of OpenAI's API to the table of a port. `models` remembers the models that were
/// asked.
#[must_use]
pub fn add_to<T>(
    router: Builder<T>,
    service: SharedService,
    settings: Arc<HttpSettings>,
    models: Arc<Models>,
) -> Builder<T>
where
    T: Clone + Send + Sync + 'static,
{
    let edge = Edge::new(service, settings, models);
    let mut declared = Builder::default();
    for prefix in ["/v1", "/openai/v1"] {
        let path = |path: &str| format!("{prefix}/{path}");
        let not_stored = || handler(responses::answer_not_stored);
        declared = declared
            .route(&path(CHATS), Route::ChatCompletion, post(CHATS, chat_completions::answer))
            .route(&path(COMPLETIONS), Route::Completion, post(COMPLETIONS, completions::answer))
            .route(&path(EMBEDDINGS), Route::Embeddings, post(EMBEDDINGS, embeddings::answer))
            .route(&path(RESPONSES), Route::Response, post(RESPONSES, responses::answer))
            .route(
                &path("responses/{id}"),
                Route::StoredResponse,
                Methods::get(not_stored()).and_delete(not_stored()),
            )
            .route(
                &path("responses/{id}/cancel"),
                Route::StoredResponse,
                Methods::post(not_stored()),
            )
            .route(
                &path("responses/{id}/input_items"),
                Route::StoredResponse,
                Methods::get(not_stored()),
            );
    }
    for prefix in ["/v1", "/openai/v1", ""] {
        let path = |path: &str| format!("{prefix}/{path}");
        declared = declared
            .route(&path(RERANK), Route::Rerank, post(RERANK, rerank))
            .route(&path(SCORE), Route::Score, post(SCORE, scores::pairs))
            .route(&path(CLASSIFY), Route::Classify, post(CLASSIFY, classes::answer))
            .route(&path(TOKENIZE), Route::Tokenize, post(TOKENIZE, tokenize))
            .route(&path(DETOKENIZE), Route::Detokenize, post(DETOKENIZE, tokenize::detokenize));
    }
    // The paths of text-embeddings-inference, except for those that both have.
    declared = declared
        .route("/embed", Route::Embeddings, receive(tei::embed))
        .route("/embed_all", Route::Embeddings, receive(tei::refuse))
        .route("/embed_sparse", Route::Embeddings, receive(tei::refuse))
        .route("/predict", Route::Classify, receive(tei::predict))
        .route("/similarity", Route::Score, receive(tei::similarity))
        .route("/decode", Route::Detokenize, receive(tei::decode))
        .route("/info", Route::Models, Methods::get(whole(tei::info)));
    // Paths with the model in them, for clients whose base URL has it.
    for prefix in ["/predictions/{model}/v1", "/predictions/{model}/{version}/v1"] {
        let path = |path: &str| format!("{prefix}/{path}");
        let route = RouteOf::Path(route_of_prediction);
        declared = declared
            .route(&path(CHATS), route, post(CHATS, chat_completions::answer))
            .route(&path(COMPLETIONS), route, post(COMPLETIONS, completions::answer))
            .route(&path(EMBEDDINGS), route, post(EMBEDDINGS, embeddings::answer));
    }
    let fallbacks = Fallbacks { not_found, wrong_method, refused: no_access };
    let router = router.include(declared, edge.clone(), fallbacks);
    router.include_post("/", Route::Embeddings, whole(tei::root), edge)
}

/// Answers a request for documents in the order of their relevance, in the form of vLLM or of
/// text-embeddings-inference.
async fn rerank(received: Received) -> Response {
    match tei::Form::of(&received).await.has_texts {
        true => tei::rerank(received).await,
        false => scores::rerank(received).await,
    }
}

/// Answers a request for the tokens of a text, in one of the same two forms.
async fn tokenize(received: Received) -> Response {
    match tei::Form::of(&received).await.has_inputs {
        true => tei::tokenize(received).await,
        false => tokenize::tokenize(received).await,
    }
}

/// Adds the paths that change what is loaded, adapters and the sleep of models, which need the
/// access of loading and unloading models.
#[must_use]
pub fn add_management_to<T>(
    router: Builder<T>,
    service: SharedService,
    settings: Arc<HttpSettings>,
    models: Arc<Models>,
) -> Builder<T>
where
    T: Clone + Send + Sync + 'static,
{
    let mut declared = Builder::default();
    for prefix in ["/v1", "/openai/v1"] {
        let load = receive(adapters::load);
        let unload = receive(adapters::unload);
        declared = declared
            .route(&format!("{prefix}/load_lora_adapter"), Route::RepositoryLoad, load)
            .route(&format!("{prefix}/unload_lora_adapter"), Route::RepositoryUnload, unload);
    }
    for prefix in ["/v1", "/openai/v1", ""] {
        let sleep = receive(|received| sleep::answer(received, Verb::Sleep));
        let wake_up = receive(|received| sleep::answer(received, Verb::WakeUp));
        let is_sleeping = Methods::get(whole(|received| sleep::answer(received, Verb::IsSleeping)));
        declared = declared
            .route(&format!("{prefix}/sleep"), Route::RepositoryUnload, sleep)
            .route(&format!("{prefix}/wake_up"), Route::RepositoryLoad, wake_up)
            .route(&format!("{prefix}/is_sleeping"), Route::RepositoryIndex, is_sleeping);
    }
    let fallbacks = Fallbacks { not_found, wrong_method, refused: no_access };
    router.include(declared, Edge::new(service, settings, models), fallbacks)
}

/// Returns the handler of requests to this path of the API. A model that implements the API itself gets
/// them as they are; `answer` answers those to other models.
fn post<F>(
    path: &'static str,
    answer: impl Fn(Received) -> F + Copy + Send + Sync + 'static,
) -> Methods<Edge>
where
    F: Future<Output = Response> + Send + 'static,
{
    receive(move |received| async move {
        match Passthrough::named_by(&received).await {
            Some(model) => passthrough::answer(received, &model, path).await,
            None => answer(received).await,
        }
    })
}

/// Returns the handler of POST requests that are received as a whole.
fn receive<F>(answer: impl Fn(Received) -> F + Copy + Send + Sync + 'static) -> Methods<Edge>
where
    F: Future<Output = Response> + Send + 'static,
{
    Methods::post(whole(answer))
}

/// Returns the handler of requests of any method that are received as a whole.
fn whole<F>(answer: impl Fn(Received) -> F + Copy + Send + Sync + 'static) -> Handler<Edge>
where
    F: Future<Output = Response> + Send + 'static,
{
    handler(move |edge, call, routed| async move {
        match Received::receive(edge, call, routed).await {
            Ok(received) => answer(received).await,
            Err(response) => response,
        }
    })
}
