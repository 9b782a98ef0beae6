//! The access class of each route, and the routes of gRPC paths. HTTP paths are declared with their
//! routes in [`crate::routing`]. A path that is not listed is [`Route::Unknown`] and has no
//! handler. Where access is configured, such a request is refused before the 404, so that the
//! response reveals nothing.

use pharos::access::Api;
use pharos::metrics::labels::Route;

/// The access class of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Open to every client: metrics, and descriptions of an API.
    Open,
    /// Part of an API that tokens and restrictions can protect.
    Part(Api),
    /// Not a route of this server.
    Unknown,
}

/// Returns the class of a route.
pub fn class(route: Route) -> Class {
    Class::Part(match route {
        Route::Live | Route::Ready | Route::ModelReady | Route::HealthCheck | Route::Ping => {
            Api::Health
        }
        // Reflection describes the server, like metadata.
        Route::ServerMetadata | Route::ModelMetadata | Route::Reflection => Api::Metadata,
        Route::Infer
        | Route::StreamInfer
        | Route::Generate
        | Route::GenerateStream
        | Route::ChatCompletion
        | Route::Completion
        | Route::Embeddings
        | Route::Rerank
        | Route::Score
        | Route::Classify
        | Route::Tokenize
        | Route::Detokenize
        | Route::Response
        | Route::StoredResponse
        | Route::Models
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
        Route::LoadReport => Api::LoadReport,
        Route::Metrics | Route::ApiDescription => return Class::Open,
        Route::Unknown => return Class::Unknown,
    })
}

/// Returns the route of a gRPC path: the v2 protocol, health, reflection and load reports.
pub fn of_grpc(path: &str) -> Route {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/'))
    else {
        return Route::Unknown;
    };
    match (service, method) {
        ("inference.GRPCInferenceService", method) => of_inference_service(method),
        ("grpc.health.v1.Health", "Check" | "Watch") => Route::HealthCheck,
        (
            "grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection",
            "ServerReflectionInfo",
        ) => Route::Reflection,
        ("xds.service.orca.v3.OpenRcaService", "StreamCoreMetrics") => Route::LoadReport,
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
    fn inference_has_the_routes_that_get_load_reports() {
        // The list of models and stored responses are for the same clients.
        let others = [Route::Models, Route::StoredResponse];
        for route in Route::ALL.into_iter().filter(|route| !others.contains(route)) {
            assert_eq!(
                route.is_inference(),
                class(route) == Class::Part(Api::Inference),
                "{route:?}"
            );
        }
    }

    #[test]
    fn classifies_grpc_paths() {
        for (path, api) in [
            ("/inference.GRPCInferenceService/RepositoryModelLoad", Api::ModelRepository),
            ("/inference.GRPCInferenceService/LogSettings", Api::Logging),
            ("/grpc.health.v1.Health/Watch", Api::Health),
            ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Api::Metadata),
            ("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics", Api::LoadReport),
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
            "/xds.service.orca.v3.OpenRcaService/None",
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
        ] {
            assert_eq!(class(of_grpc(path)), Class::Unknown, "{path}");
        }
    }
}
