//! The routes of the gRPC ports: TorchServe's services, and the v2 protocol under both of its
//! package names.

use http::Uri;
use http::uri::PathAndQuery;
use pharos::service::Route;

use pharos_edge::access::routes;

/// The path prefix of `InferenceAPIsService`.
pub(super) const INFERENCE: &str = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/";
/// The path prefix of `ManagementAPIsService`.
pub(super) const MANAGEMENT: &str = "/org.pytorch.serve.grpc.management.ManagementAPIsService/";
/// The path prefixes of the v2 protocol: in TorchServe's package, and in the standard package.
const ALIAS: &str = "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/";
const STANDARD: &str = "/inference.GRPCInferenceService/";

/// Whether a path belongs to one of TorchServe's services.
pub(super) fn is_own(path: &str) -> bool {
    path.starts_with(INFERENCE) || path.starts_with(MANAGEMENT)
}

/// Returns whether a client may send several messages in a call of this path: predictions of
/// sequences, and reflection.
pub(super) fn has_many_messages(path: &str) -> bool {
    path.strip_prefix(INFERENCE) == Some("StreamPredictions2") || of_path(path) == Route::Reflection
}

/// Returns the route of a path.
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

/// Rewrites the URI of a call in TorchServe's package to the standard package; `None` for other
/// calls.
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
    use pharos_edge::access::routes::{Class, class};

    #[test]
    fn maps_every_call_to_its_route() {
        for (path, api) in [
            (
                "/org.pytorch.serve.grpc.openinference.GRPCInferenceService/LogSettings",
                Api::Logging,
            ),
            ("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions", Api::Inference),
            (
                "/org.pytorch.serve.grpc.management.ManagementAPIsService/RegisterModel",
                Api::ModelRepository,
            ),
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
