//! The routes of OpenAI's API.

use std::sync::Arc;

use pharos::service::{Route, SharedService};
use pharos_edge::http_settings::HttpSettings;
use pharos_edge::routing::{Builder, Fallbacks, Methods, RouteOf, handler};

use crate::answer::{no_access, not_found, wrong_method};
use crate::edge::Edge;
use crate::models::Models;
use crate::{adapters, chat_completions, completions, embeddings, responses, scores, tokenize};

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
        let chat = Methods::post(handler(chat_completions::answer));
        let completion = Methods::post(handler(completions::answer));
        declared = declared
            .route(&format!("{prefix}/chat/completions"), Route::ChatCompletion, chat)
            .route(&format!("{prefix}/completions"), Route::Completion, completion);
        let response = Methods::post(handler(responses::answer));
        let not_stored = || handler(responses::answer_not_stored);
        let path = format!("{prefix}/responses");
        declared = declared
            .route(&path, Route::Response, response)
            .route(
                &format!("{path}/{{id}}"),
                Route::StoredResponse,
                Methods::get(not_stored()).and_delete(not_stored()),
            )
            .route(
                &format!("{path}/{{id}}/cancel"),
                Route::StoredResponse,
                Methods::post(not_stored()),
            )
            .route(
                &format!("{path}/{{id}}/input_items"),
                Route::StoredResponse,
                Methods::get(not_stored()),
            );
    }
    for prefix in ["/v1", "/openai/v1", ""] {
        let tokenize = Methods::post(handler(tokenize::tokenize));
        let detokenize = Methods::post(handler(tokenize::detokenize));
        let rerank = Methods::post(handler(scores::rerank));
        let score = Methods::post(handler(scores::pairs));
        declared = declared
            .route(&format!("{prefix}/rerank"), Route::Rerank, rerank)
            .route(&format!("{prefix}/score"), Route::Score, score)
            .route(&format!("{prefix}/tokenize"), Route::Tokenize, tokenize)
            .route(&format!("{prefix}/detokenize"), Route::Detokenize, detokenize);
    }
    for prefix in ["/v1", "/openai/v1"] {
        let embeddings = Methods::post(handler(embeddings::answer));
        declared = declared.route(&format!("{prefix}/embeddings"), Route::Embeddings, embeddings);
    }
    // Paths with the model in them, for clients whose base URL has it.
    for prefix in ["/predictions/{model}/v1", "/predictions/{model}/{version}/v1"] {
        let route = RouteOf::Path(route_of_prediction);
        let chat = Methods::post(handler(chat_completions::answer));
        let completion = Methods::post(handler(completions::answer));
        let embeddings = Methods::post(handler(embeddings::answer));
        declared = declared
            .route(&format!("{prefix}/chat/completions"), route, chat)
            .route(&format!("{prefix}/completions"), route, completion)
            .route(&format!("{prefix}/embeddings"), route, embeddings);
    }
    let fallbacks = Fallbacks { not_found, wrong_method, refused: no_access };
    router.include(declared, edge, fallbacks)
}

/// Adds the paths that load and unload adapters, which need the access of loading models.
#[must_use]
pub fn add_adapters_to<T>(
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
        let load = Methods::post(handler(adapters::load));
        let unload = Methods::post(handler(adapters::unload));
        declared = declared
            .route(&format!("{prefix}/load_lora_adapter"), Route::RepositoryLoad, load)
            .route(&format!("{prefix}/unload_lora_adapter"), Route::RepositoryUnload, unload);
    }
    let fallbacks = Fallbacks { not_found, wrong_method, refused: no_access };
    router.include(declared, Edge::new(service, settings, models), fallbacks)
}
