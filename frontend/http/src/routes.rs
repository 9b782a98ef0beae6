//! The routes of v2, v1 and OpenAI's API, each with its path, its [`Route`] and its handlers.

use axum::routing::{MethodRouter, get, post};
use pharos::service::{Route, SharedService};

use super::{Edge, Settings, generate, infer, logging, model, openai, repository, server, shared_memory, trace, v1};
use pharos_edge::answering::Gate;
use pharos_edge::routing::{Builder, RouteOf, Routes};

/// Returns the routes of v2 and v1 behind the access check `gate`, which replaces the tokens and restrictions of `settings`.
pub fn router<G: Gate>(service: SharedService, settings: Settings, gate: G) -> Routes<G> {
    table(Edge::new(service, settings), gate)
}

/// Returns the routes behind the access check `gate`.
pub(crate) fn table<G: Gate>(edge: Edge, gate: G) -> Routes<G> {
    declared(edge).build(gate, |_| super::not_found())
}

/// Declares the routes. Not generic, so that the handlers are compiled once, in this package.
fn declared(edge: Edge) -> Builder<Edge> {
    let router = Builder::new(edge, |_| super::wrong_method())
        .route("/v2", Route::ServerMetadata, get(server::metadata))
        .route("/v2/health/live", Route::Live, get(server::live))
        .route("/v2/health/ready", Route::Ready, get(server::ready))
        .route("/v2/models/stats", Route::ModelStatistics, get(model::all_statistics));
    let router = model_route(router, "", Route::ModelMetadata, || get(model::metadata));
    let router = model_route(router, "/ready", Route::ModelReady, || get(model::ready));
    let router = model_route(router, "/config", Route::ModelConfig, || get(model::config));
    let router = model_route(router, "/stats", Route::ModelStatistics, || get(model::statistics));
    let router = model_route(router, "/infer", Route::Infer, || post(infer::infer));
    let router = model_route(router, "/generate", Route::Generate, || post(generate::generate));
    let stream = || post(generate::generate_stream);
    let router = model_route(router, "/generate_stream", Route::GenerateStream, stream);
    let trace_of_model = get(trace::get_of).post(trace::post_of);
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
        .route("/v2/trace/setting", Route::TraceSetting, get(trace::get).post(trace::post))
        .route("/v2/models/{model}/trace/setting", Route::TraceSetting, trace_of_model)
        .route("/v2/logging", Route::LogSettings, get(logging::get).post(logging::post));
    openai::routes(v1::routes(shared_memory::routes(router)))
}

/// Adds `/v2/models/M<suffix>` and `/v2/models/M/versions/V<suffix>`.
fn model_route(
    router: Builder<Edge>,
    suffix: &str,
    route: Route,
    methods: impl Fn() -> MethodRouter<Edge>,
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

    fn check(path: &str, expected: Route) {
        let edge = Edge::new(EchoService::default().shared(), Settings::default());
        assert_eq!(table(edge.clone(), edge).route_of(path), expected, "{path}");
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
            ("/v1/chat/completions", Route::Infer),
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
