//! The routes of the gRPC ports: TorchServe's services, and the v2 protocol in both of its packages.

use http::Uri;
use http::uri::PathAndQuery;
use pharos::service::Route;

use pharos_listener::access::routes;

/// The beginning of the paths of `InferenceAPIsService`.
pub(super) const INFERENCE: &str = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/";
/// The beginning of the paths of `ManagementAPIsService`.
pub(super) const MANAGEMENT: &str = "/org.pytorch.serve.grpc.management.ManagementAPIsService/";
/// The v2 protocol's service in TorchServe's package, and in the standard one.
const ALIAS: &str = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/";
const STANDARD: &str = "/inference.GRPCInferenceService/";

/// Whether a path is one of TorchServe's services.
pub(super) fn is_own(path: &str) -> bool {
    path.starts_with(INFERENCE) || path.starts_with(MANAGEMENT)
}

/// The route of a call.
pub(super) fn of_path(path: &str) -> Route {
    if let Some(method) = path.strip_prefix(INFERENCE) {
        return match method {
            "Ping" => Route::Ping,
            "Predictions" => Route::Predict,
            "StreamPredictions" | "StreamPredictions2" => Route::StreamPredict,
            _ => Route::Unknown,
        };
    }
    if let Some(method) = path.strip_prefix(MANAGEMENT) {
        return match method {
            "DescribeModel" => Route::ModelDescribe,
            "ListModels" => Route::ModelList,
            "RegisterModel" => Route::ModelRegister,
            "ScaleWorker" => Route::ModelScale,
            "SetDefault" => Route::ModelSetDefault,
            "UnregisterModel" => Route::ModelUnregister,
            _ => Route::Unknown,
        };
    }
    match path.strip_prefix(ALIAS) {
        Some(method) => routes::of_grpc(&format!("{STANDARD}{method}")),
        None => routes::of_grpc(path),
    }
}

/// The same call in the standard package, if it names TorchServe's.
pub(super) fn standard(uri: &Uri) -> Option<Uri> {
    let method = uri.path().strip_prefix(ALIAS)?;
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(format!("{STANDARD}{method}")).ok();
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use pharos::access::Api;

    use super::*;
    use pharos_listener::access::routes::{Class, class};

    #[test]
    fn every_call_belongs_to_its_part() {
        for (path, api) in [
            ("/org.pytorch.serve.grpc.openinference.GRPCInferenceService/LogSettings", Api::Logging),
            ("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions", Api::Inference),
            ("/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel", Api::ModelRepository),
            ("/inference.GRPCInferenceService/RepositoryModelLoad", Api::ModelRepository),
            ("/grpc.health.v1.Health/Check", Api::Health),
        ] {
            assert_eq!(class(of_path(path)), Class::Part(api), "{path}");
        }
        for method in ["", "None", "predictions", "Predictions/"] {
            assert_eq!(class(of_path(&format!("{INFERENCE}{method}"))), Class::Unknown, "{method}");
        }
    }
}
