//! Tokens, and restricted parts of the protocol (`--http-restricted-api`): asked before anything of a request is looked at
//! but its method and path.

use axum::response::Response;
use http::header::{HeaderValue, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, StatusCode};
use pharos::access::Api;
use pharos::access::tokens::Refusal;
use pharos::error::Reason;

use super::{Edge, answer};
use crate::engine::Route;

/// The refusal of a request, if it asks for a part without the token or the key's value that this needs.
pub(super) fn refusal(edge: &Edge, method: &Method, path: &str, headers: &HeaderMap) -> Option<Response> {
    let (api, route) = part(method, path)?;
    if let Err(refusal) = edge.settings.access.check(api, headers) {
        return Some(edge.pending(route).finish_as(unauthenticated(refusal), Some(Reason::Unauthenticated)));
    }
    let given = |key: &str| headers.get(key).map(|value| value.as_bytes());
    let key = edge.settings.restricted.check(api, given).err()?;
    let text = format!("This API is restricted, expecting header '{key}'");
    let response = answer::error_text(StatusCode::FORBIDDEN, &text);
    Some(edge.pending(route).finish_as(response, Some(Reason::Restricted)))
}

/// RFC 6750, 3.1.
fn unauthenticated(refusal: Refusal) -> Response {
    let status = match refusal {
        Refusal::Missing(_) | Refusal::Unknown(_) => StatusCode::UNAUTHORIZED,
        Refusal::Insufficient => StatusCode::FORBIDDEN,
    };
    let mut response = answer::error_text(status, &refusal.text());
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(refusal.challenge()));
    response
}

/// What a path asks for; `None` for one that is none of the protocol's.
fn part(method: &Method, path: &str) -> Option<(Api, Route)> {
    let is_get = *method == Method::GET;
    if path == "/" || path.starts_with("/v1/") {
        return Some(v1(method, path));
    }
    let mut segments = path.strip_prefix("/v2")?.split('/').skip(1);
    let (first, second) = (segments.next(), segments.next());
    Some(match (first, second) {
        (None, _) => (Api::Metadata, Route::ServerMetadata),
        (Some("health"), Some("live")) => (Api::Health, Route::Live),
        (Some("health"), _) => (Api::Health, Route::Ready),
        (Some("models"), Some("stats")) if segments.next().is_none() => (Api::Statistics, Route::ModelStatistics),
        (Some("models"), Some(_)) => model(path)?,
        (Some("systemsharedmemory"), _) => match (is_get, path.ends_with("/unregister")) {
            (true, _) => (Api::SharedMemory, Route::SystemSharedMemoryStatus),
            (false, true) => (Api::SharedMemory, Route::SystemSharedMemoryUnregister),
            (false, false) => (Api::SharedMemory, Route::SystemSharedMemoryRegister),
        },
        (Some("cudasharedmemory"), _) => match (is_get, path.ends_with("/unregister")) {
            (true, _) => (Api::SharedMemory, Route::CudaSharedMemoryStatus),
            (false, true) => (Api::SharedMemory, Route::CudaSharedMemoryUnregister),
            (false, false) => (Api::SharedMemory, Route::CudaSharedMemoryRegister),
        },
        (Some("repository"), Some("index")) => (Api::ModelRepository, Route::RepositoryIndex),
        (Some("repository"), _) if path.ends_with("/unload") => (Api::ModelRepository, Route::RepositoryUnload),
        (Some("repository"), _) => (Api::ModelRepository, Route::RepositoryLoad),
        (Some("trace"), _) => (Api::Trace, Route::TraceSetting),
        (Some("logging"), _) => (Api::Logging, Route::LogSettings),
        _ => return None,
    })
}

/// What a path of KServe's v1 asks for. The list of models is what the repository's index shows.
fn v1(method: &Method, path: &str) -> (Api, Route) {
    match path {
        "/" => (Api::Health, Route::Live),
        "/v1/models" => (Api::ModelRepository, Route::RepositoryIndex),
        _ if *method == Method::POST => (Api::Inference, Route::Infer),
        _ => (Api::Health, Route::ModelReady),
    }
}

/// What a path below `/v2/models/` asks for.
fn model(path: &str) -> Option<(Api, Route)> {
    let mut segments = path.strip_prefix("/v2/models/")?.split('/').skip(1);
    let verb = match segments.next() {
        Some("versions") => {
            segments.next()?;
            segments.next()
        }
        verb => verb,
    };
    Some(match verb {
        None | Some("") => (Api::Metadata, Route::ModelMetadata),
        Some("ready") => (Api::Health, Route::ModelReady),
        Some("infer") => (Api::Inference, Route::Infer),
        Some("generate") => (Api::Inference, Route::Generate),
        Some("generate_stream") => (Api::Inference, Route::GenerateStream),
        Some("config") => (Api::ModelConfig, Route::ModelConfig),
        Some("stats") => (Api::Statistics, Route::ModelStatistics),
        Some("trace") => (Api::Trace, Route::TraceSetting),
        Some(_) => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_belongs_to_its_part() {
        for (path, api) in [
            ("/v2", Api::Metadata),
            ("/v2/health/live", Api::Health),
            ("/v2/health/ready", Api::Health),
            ("/v2/models/stats", Api::Statistics),
            ("/v2/models/stats/stats", Api::Statistics),
            ("/v2/models/stats/infer", Api::Inference),
            ("/v2/models/m", Api::Metadata),
            ("/v2/models/m/versions/1", Api::Metadata),
            ("/v2/models/m/ready", Api::Health),
            ("/v2/models/m/versions/1/ready", Api::Health),
            ("/v2/models/m/infer", Api::Inference),
            ("/v2/models/m/versions/1/generate_stream", Api::Inference),
            ("/v2/models/versions/versions/1/infer", Api::Inference),
            ("/v2/models/m/config", Api::ModelConfig),
            ("/v2/models/m/trace/setting", Api::Trace),
            ("/v2/trace/setting", Api::Trace),
            ("/v2/logging", Api::Logging),
            ("/v2/repository/index", Api::ModelRepository),
            ("/v2/repository/models/m/load", Api::ModelRepository),
            ("/v2/systemsharedmemory/status", Api::SharedMemory),
            ("/v2/cudasharedmemory/region/r/register", Api::SharedMemory),
            ("/", Api::Health),
            ("/v1/models", Api::ModelRepository),
        ] {
            for method in [Method::GET, Method::POST] {
                assert_eq!(part(&method, path).map(|(api, _)| api), Some(api), "{path}");
            }
        }
        for path in ["/v1/models/m:predict", "/v1/models/m%3apredict", "/v1/models/m/versions/1:predict"] {
            assert_eq!(part(&Method::POST, path), Some((Api::Inference, Route::Infer)), "{path}");
        }
        for path in ["/v1/models/m", "/v1/models/m/versions/1"] {
            assert_eq!(part(&Method::GET, path), Some((Api::Health, Route::ModelReady)), "{path}");
        }
        for path in ["/v1", "/v3", "/v2/none", "/v2/models/m/none", "/metrics"] {
            assert_eq!(part(&Method::GET, path), None, "{path}");
        }
    }
}
