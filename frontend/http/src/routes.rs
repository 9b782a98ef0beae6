//! The routes of v2, v1 and OpenAI's API, each with its path, its [`Route`] and its handlers.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use pharos::service::{Route, SharedService};
use pharos_edge::routing::{Answering, Builder, Fallbacks, Methods, RouteOf, Routes, handler};
use pharos_edge::{Incoming, Policy, Refusal};

use super::answer::{answers, get, post};
use super::{
    Edge, Models, Settings, generate, health, infer, logging, model, openai, repository, server,
    shared_memory, trace, v1,
};

/// Answers the requests for v2 and v1 on a port of another protocol.
pub type V2 = Arc<dyn Fn(Incoming<Body>) -> Answering + Send + Sync>;

/// Returns the routes of v2 and v1 behind a policy, which replaces the tokens and restrictions of
/// `settings`. `refused` renders its refusals.
pub fn router(
    service: SharedService,
    settings: Settings,
    models: Arc<Models>,
    policy: Arc<dyn Policy>,
    refused: fn(Refusal) -> Response,
) -> V2 {
    let routes = table(Edge::new(service, settings, models), policy, refused);
    Arc::new(move |incoming| {
        let routes = routes.clone();
        Box::pin(async move { routes.answer(incoming).await })
    })
}

/// Returns the routes behind a policy.
pub(crate) fn table(
    edge: Edge,
    policy: Arc<dyn Policy>,
    refused: fn(Refusal) -> Response,
) -> Routes<Edge> {
    let declared = declared(&edge);
    build(edge, declared, policy, refused)
}

/// Returns these routes and the routes of OpenAI's API behind a policy.
pub(crate) fn build(
    edge: Edge,
    declared: Builder<Edge>,
    policy: Arc<dyn Policy>,
    refused: fn(Refusal) -> Response,
) -> Routes<Edge> {
    let fallbacks =
        Fallbacks { not_found: super::not_found_at, wrong_method: super::wrong_method, refused };
    let service = edge.service.clone();
    let settings = edge.settings.clone();
    let router = pharos_openai::add_to(declared, service, settings, edge.models.clone());
    router.build(edge, policy, fallbacks)
}

/// Returns what clients of OpenAI's API need besides it: the models, and health in the forms of
/// KServe, vLLM and Triton's OpenAI frontend.
pub(crate) fn declared_for_openai() -> Builder<Edge> {
    let router = Builder::default().route("/v2/health/live", Route::Live, get(health::live)).route(
        "/v2/health/ready",
        Route::Ready,
        get(health::ready),
    );
    openai::routes(v1::models(router))
}

/// Returns the routes of v2 and v1, and of OpenAI's API those that change what is loaded.
pub(crate) fn declared(edge: &Edge) -> Builder<Edge> {
    let router = Builder::default()
        .route("/v2", Route::ServerMetadata, get(server::metadata))
        .route("/v2/health/live", Route::Live, get(health::live))
        .route("/v2/health/ready", Route::Ready, get(health::ready))
        .route("/v2/models/stats", Route::ModelStatistics, get(model::all_statistics));
    let router = model_route(router, "", Route::ModelMetadata, || get(model::metadata));
    let router = model_route(router, "/ready", Route::ModelReady, || get(model::ready));
    let router = model_route(router, "/config", Route::ModelConfig, || get(model::config));
    let router = model_route(router, "/stats", Route::ModelStatistics, || get(model::statistics));
    let router =
        model_route(router, "/infer", Route::Infer, || Methods::post(handler(infer::infer)));
    let router = model_route(router, "/generate", Route::Generate, || {
        Methods::post(handler(generate::generate))
    });
    let stream = || Methods::post(handler(generate::generate_stream));
    let router = model_route(router, "/generate_stream", Route::GenerateStream, stream);
    let router = router
        .route("/v2/repository/index", Route::RepositoryIndex, post(repository::index))
        .route("/v2/repository/{repository}/index", Route::RepositoryIndex, post(repository::index))
        .route(
            "/v2/repository/models/{*operation}",
            RouteOf::Path(repository::route_of_operation),
            post(repository::operate),
        )
        .route(
            "/v2/repository/{repository}/models/{*operation}",
            RouteOf::Path(repository::route_of_operation),
            post(repository::operate_in),
        )
        .route(
            "/v2/trace/setting",
            Route::TraceSetting,
            get(trace::get).and_post(answers(trace::post)),
        )
        .route(
            "/v2/models/{model}/trace/setting",
            Route::TraceSetting,
            get(trace::get_of).and_post(answers(trace::post_of)),
        )
        .route(
            "/v2/logging",
            Route::LogSettings,
            get(logging::get).and_post(answers(logging::post)),
        );
    let router = openai::routes(v1::routes(shared_memory::routes(router)));
    let Edge { service, settings, models, .. } = edge.clone();
    pharos_openai::add_management_to(router, service, settings, models)
}

/// Adds `/v2/models/M<suffix>` and `/v2/models/M/versions/V<suffix>`.
fn model_route(
    router: Builder<Edge>,
    suffix: &str,
    route: Route,
    methods: impl Fn() -> Methods<Edge>,
) -> Builder<Edge> {
    router.route(&format!("/v2/models/{{model}}{suffix}"), route, methods()).route(
        &format!("/v2/models/{{model}}/versions/{{version}}{suffix}"),
        route,
        methods(),
    )
}

#[cfg(test)]
mod tests {
    use pharos_service_double::EchoService;

    use super::*;
    use crate::answer::no_access;

    fn check(path: &str, expected: Route) {
        let service = EchoService::default().shared();
        let settings = Settings::default();
        let policy = settings.policy(service.clone());
        let routes = table(Edge::new(service, settings, crate::tests::models()), policy, no_access);
        assert_eq!(routes.route_of(path), expected, "{path}");
    }

    #[test]
    fn the_path_selects_among_routes_that_share_a_pattern() {
        for (path, expected) in [
            ("/v2/models/stats", Route::ModelStatistics),
            ("/v2/models/stats/stats", Route::ModelStatistics),
            ("/v2/models/stats/infer", Route::Infer),
            ("/v2/models/versions/versions/1/infer", Route::Infer),
            ("/v2/repository/models/m/load", Route::RepositoryLoad),
            ("/v2/repository/models/m%2Fload", Route::RepositoryLoad),
            ("/v2/repository/models/a/../b/unload", Route::RepositoryUnload),
            ("/v2/repository/r/index", Route::RepositoryIndex),
            ("/v2/repository/r/models/m/load", Route::RepositoryLoad),
            ("/v2/repository/r/models/m/unload", Route::RepositoryUnload),
            ("/v2/cudasharedmemory/region/r/register", Route::CudaSharedMemoryRegister),
            ("/v2/systemsharedmemory/region/r/status", Route::SystemSharedMemoryStatus),
            ("/v1/models/m", Route::ModelReady),
            ("/v1/models/m/versions/1", Route::ModelReady),
            ("/v1/models/m:predict", Route::Infer),
            ("/v1/models/m%3apredict", Route::Infer),
            ("/v1/models/m:%70redict", Route::Infer),
            ("/v1/models/m/versions/1:predict", Route::Infer),
            ("/v1/chat/completions", Route::ChatCompletion),
            ("/openai/v1/completions", Route::Completion),
            ("/v1/load_lora_adapter", Route::RepositoryLoad),
            ("/openai/v1/unload_lora_adapter", Route::RepositoryUnload),
            ("/sleep", Route::RepositoryUnload),
            ("/v1/wake_up", Route::RepositoryLoad),
            ("/openai/v1/is_sleeping", Route::RepositoryIndex),
        ] {
            check(path, expected);
        }
    }

    #[test]
    fn other_spellings_are_unknown() {
        for path in [
            "/v1",
            "/v1/",
            "/v1/models/",
            "/v1/models//versions/1",
            "/v1/models/m/versions",
            "/v1/models/m/versions/",
            "/v1/models/m/versions/1/x",
            "/v1/chat",
            "/v1/chat/completions/",
            "/chat/completions",
            "/v2/",
            "/v2x",
            "//v2",
            "/v2//repository/index",
            "/v2/repository/index/",
            "/v2/repository",
            "/v2/repository/models/",
            "/v2/repository/r",
            "/v2/repository/r/models/",
            "/v2/repository/r/s/index",
            "/v2/%72epository/index",
            "/v2/health",
            "/v2/health/ready/x",
            "/v2/models/",
            "/v2/models//infer",
            "/v2/models/m/none",
            "/v2/models/m/versions",
            "/v2/models/m/versions//infer",
            "/v2/trace",
            "/v2/logging/",
            "/v2/systemsharedmemory",
            "/v2/systemsharedmemory/region//status",
            "/metrics",
        ] {
            check(path, Route::Unknown);
        }
    }
}
