//! Classifies requests: which route a path of HTTP or gRPC leads to, and which part of the protocol a route belongs to. All
//! listeners decide here, from the path as it was received, before a handler runs. A path that is not listed is
//! [`Route::Unknown`], and an unknown route is refused wherever anything is refused.

use pharos::access::Api;
use pharos::metrics::labels::Route;

/// What a route belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Open to every client: metrics, and descriptions of an API.
    Open,
    /// A part of the protocol, which tokens and restrictions can guard.
    Part(Api),
    /// No route of this server.
    Unknown,
}

/// The class of a route.
pub fn class(route: Route) -> Class {
    Class::Part(match route {
        Route::Live | Route::Ready | Route::ModelReady | Route::HealthCheck | Route::Ping => Api::Health,
        // Reflection shows what the server can do, as metadata does.
        Route::ServerMetadata | Route::ModelMetadata | Route::Reflection => Api::Metadata,
        Route::Infer
        | Route::StreamInfer
        | Route::Generate
        | Route::GenerateStream
        | Route::Predict
        | Route::StreamPredict
        | Route::Explain => Api::Inference,
        Route::ModelConfig => Api::ModelConfig,
        Route::ModelStatistics => Api::Statistics,
        Route::RepositoryIndex
        | Route::RepositoryLoad
        | Route::RepositoryUnload
        | Route::ModelList
        | Route::ModelDescribe
        | Route::ModelRegister
        | Route::ModelScale
        | Route::ModelSetDefault
        | Route::ModelUnregister
        | Route::Token => Api::ModelRepository,
        Route::SystemSharedMemoryStatus
        | Route::SystemSharedMemoryRegister
        | Route::SystemSharedMemoryUnregister
        | Route::CudaSharedMemoryStatus
        | Route::CudaSharedMemoryRegister
        | Route::CudaSharedMemoryUnregister => Api::SharedMemory,
        Route::TraceSetting => Api::Trace,
        Route::LogSettings => Api::Logging,
        Route::Metrics | Route::ApiDescription => return Class::Open,
        Route::Unknown => return Class::Unknown,
    })
}

/// The route of a path of the protocols v1 and v2 over HTTP.
pub fn of_http(path: &str) -> Route {
    if path == "/" || path.starts_with("/v1/") {
        return of_v1(path);
    }
    let Some(rest) = path.strip_prefix("/v2") else { return Route::Unknown };
    if rest.is_empty() {
        return Route::ServerMetadata;
    }
    let Some(rest) = rest.strip_prefix('/') else { return Route::Unknown };
    let segments: Vec<&str> = rest.split('/').collect();
    match segments.as_slice() {
        ["health", "live"] => Route::Live,
        ["health", "ready"] => Route::Ready,
        ["models", "stats"] => Route::ModelStatistics,
        ["models", model, "versions", version, verb @ ..] if !model.is_empty() && !version.is_empty() => of_model(verb),
        ["models", model, "trace", "setting"] if !model.is_empty() => Route::TraceSetting,
        ["models", model, verb @ ..] if !model.is_empty() => of_model(verb),
        ["repository", "index"] => Route::RepositoryIndex,
        // The name may have slashes, and the last segment may be percent-encoded: everything below is one or the other.
        ["repository", "models", .., last] if last.ends_with("unload") => Route::RepositoryUnload,
        ["repository", "models", _, ..] => Route::RepositoryLoad,
        ["systemsharedmemory", rest @ ..] => of_region(rest, SYSTEM),
        ["cudasharedmemory", rest @ ..] => of_region(rest, CUDA),
        ["trace", "setting"] => Route::TraceSetting,
        ["logging"] => Route::LogSettings,
        _ => Route::Unknown,
    }
}

/// The route of a path of KServe's v1. The list of models shows what the repository's index shows. A name with a colon or
/// an escape may lead to `:predict`: it has the class of inference.
fn of_v1(path: &str) -> Route {
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    match segments.as_slice() {
        [""] => Route::Live,
        ["v1", "models"] => Route::RepositoryIndex,
        ["v1", "models", model] | ["v1", "models", model, "versions", _] if model.is_empty() => Route::Unknown,
        ["v1", "models", last] | ["v1", "models", _, "versions", last] if last.contains([':', '%']) => Route::Infer,
        ["v1", "models", last] | ["v1", "models", _, "versions", last] if !last.is_empty() => Route::ModelReady,
        _ => Route::Unknown,
    }
}

/// The route of what stands behind a model's name and version.
fn of_model(verb: &[&str]) -> Route {
    match verb {
        [] => Route::ModelMetadata,
        ["ready"] => Route::ModelReady,
        ["infer"] => Route::Infer,
        ["generate"] => Route::Generate,
        ["generate_stream"] => Route::GenerateStream,
        ["config"] => Route::ModelConfig,
        ["stats"] => Route::ModelStatistics,
        _ => Route::Unknown,
    }
}

const SYSTEM: [Route; 3] =
    [Route::SystemSharedMemoryStatus, Route::SystemSharedMemoryRegister, Route::SystemSharedMemoryUnregister];
const CUDA: [Route; 3] =
    [Route::CudaSharedMemoryStatus, Route::CudaSharedMemoryRegister, Route::CudaSharedMemoryUnregister];

fn of_region(rest: &[&str], [status, register, unregister]: [Route; 3]) -> Route {
    match rest {
        ["status"] | ["region", _, "status"] => status,
        ["region", _, "register"] => register,
        ["unregister"] | ["region", _, "unregister"] => unregister,
        _ => Route::Unknown,
    }
}

/// The route of a path of gRPC: the v2 protocol, health and reflection.
pub fn of_grpc(path: &str) -> Route {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else {
        return Route::Unknown;
    };
    match (service, method) {
        ("inference.GRPCInferenceService", method) => of_inference_service(method),
        ("grpc.health.v1.Health", "Check" | "Watch") => Route::HealthCheck,
        (
            "grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection",
            "ServerReflectionInfo",
        ) => Route::Reflection,
        _ => Route::Unknown,
    }
}

fn of_inference_service(method: &str) -> Route {
    match method {
        "ServerLive" => Route::Live,
        "ServerReady" => Route::Ready,
        "ServerMetadata" => Route::ServerMetadata,
        "ModelReady" => Route::ModelReady,
        "ModelMetadata" => Route::ModelMetadata,
        "ModelConfig" => Route::ModelConfig,
        "ModelInfer" => Route::Infer,
        "ModelStreamInfer" => Route::StreamInfer,
        "ModelStatistics" => Route::ModelStatistics,
        "RepositoryIndex" => Route::RepositoryIndex,
        "RepositoryModelLoad" => Route::RepositoryLoad,
        "RepositoryModelUnload" => Route::RepositoryUnload,
        "SystemSharedMemoryStatus" => Route::SystemSharedMemoryStatus,
        "SystemSharedMemoryRegister" => Route::SystemSharedMemoryRegister,
        "SystemSharedMemoryUnregister" => Route::SystemSharedMemoryUnregister,
        "CudaSharedMemoryStatus" => Route::CudaSharedMemoryStatus,
        "CudaSharedMemoryRegister" => Route::CudaSharedMemoryRegister,
        "CudaSharedMemoryUnregister" => Route::CudaSharedMemoryUnregister,
        "TraceSetting" => Route::TraceSetting,
        "LogSettings" => Route::LogSettings,
        _ => Route::Unknown,
    }
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
            ("/v2/repository/models/m%2Fload", Api::ModelRepository),
            ("/v2/repository/models/a/../b/unload", Api::ModelRepository),
            ("/v2/systemsharedmemory/status", Api::SharedMemory),
            ("/v2/cudasharedmemory/region/r/register", Api::SharedMemory),
            ("/", Api::Health),
            ("/v1/models", Api::ModelRepository),
            ("/v1/models/m", Api::Health),
            ("/v1/models/m/versions/1", Api::Health),
            ("/v1/models/m:predict", Api::Inference),
            ("/v1/models/m%3apredict", Api::Inference),
            ("/v1/models/m:%70redict", Api::Inference),
            ("/v1/models/m/versions/1:predict", Api::Inference),
        ] {
            assert_eq!(class(of_http(path)), Class::Part(api), "{path}");
        }
    }

    #[test]
    fn other_paths_are_unknown() {
        for path in [
            "/v1",
            "/v1/",
            "/v1/models/",
            "/v1/models//versions/1",
            "/v1/models/m/versions",
            "/v1/models/m/versions/",
            "/v1/models/m/versions/1/x",
            "/v2/",
            "/v2x",
            "/v3",
            "//v2",
            "/v2//repository/index",
            "/v2/repository/index/",
            "/v2/repository",
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
            "/metrics",
        ] {
            assert_eq!(class(of_http(path)), Class::Unknown, "{path}");
        }
    }

    #[test]
    fn every_call_belongs_to_its_part() {
        for (path, api) in [
            ("/inference.GRPCInferenceService/RepositoryModelLoad", Api::ModelRepository),
            ("/inference.GRPCInferenceService/LogSettings", Api::Logging),
            ("/grpc.health.v1.Health/Watch", Api::Health),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Api::Metadata),
        ] {
            assert_eq!(class(of_grpc(path)), Class::Part(api), "{path}");
        }
        for path in [
            "",
            "/",
            "inference.GRPCInferenceService/ModelInfer",
            "//inference.GRPCInferenceService/ModelInfer",
            "/inference.GRPCInferenceService/ModelInfer/",
            "/inference.GRPCInferenceService/%4dodelInfer",
            "/inference.GRPCInferenceService/",
            "/grpc.health.v1.Health/None",
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
        ] {
            assert_eq!(class(of_grpc(path)), Class::Unknown, "{path}");
        }
    }
}
