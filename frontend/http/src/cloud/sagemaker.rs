//! Amazon SageMaker: `/ping` and `/invocations` of single-model endpoints, and `/models` of multi-model endpoints.

use axum::body::Body;
use axum::response::{IntoResponse as _, Response};
use http::{Method, Request};
use percent_encoding::percent_decode_str;
use pharos::service::Route;

use super::models::{Models, not_loaded, status_without_memory};
use super::{BinaryForm, Dispatch, forward_as_v2, model_path, unknown};
use crate::answer::StatusOf;
use pharos_edge::answering;

const FORM: BinaryForm =
    BinaryForm { media_type: "application/vnd.sagemaker-triton.binary+json;json-header-size=", in_answers: true };
/// Triton's name for the model of `/invocations` if the environment sets none. Requests to it fail with this name.
const NO_DEFAULT: &str = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME";

/// SageMaker's endpoints.
#[derive(Clone, Debug)]
pub struct SageMaker {
    /// The v2 path that `/ping` maps to.
    health: &'static str,
    /// The v2 path that `/invocations` maps to.
    invocations: String,
    /// The models of `/models`.
    models: Models,
}

impl SageMaker {
    /// Configures the endpoints from the environment of the container.
    ///
    /// # Errors
    /// Fails if a variable has an invalid value.
    pub fn new(variable: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let value = |name: &str, default: &str| variable(name).unwrap_or_else(|| default.to_owned());
        let health = match &*value("SAGEMAKER_TRITON_PING_MODE", "ready") {
            "ready" => "/v2/health/ready",
            "live" => "/v2/health/live",
            other => return Err(invalid("SAGEMAKER_TRITON_PING_MODE", other, "ready, live")),
        };
        let verb = value("SAGEMAKER_TRITON_INFERENCE_TYPE", "infer");
        if !["infer", "generate", "generate_stream"].contains(&&*verb) {
            return Err(invalid("SAGEMAKER_TRITON_INFERENCE_TYPE", &verb, "infer, generate, generate_stream"));
        }
        let invocations = model_path(&value("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", NO_DEFAULT), &verb);
        Ok(Self { health, invocations, models: Models::default() })
    }

    pub(super) async fn answer(&self, dispatch: Dispatch, request: Request<Body>) -> Response {
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        match path.as_str() {
            "/ping" => forward_as_v2(dispatch, request, (method, self.health), &FORM).await,
            "/invocations" => forward_as_v2(dispatch, request, (method, &self.invocations), &FORM).await,
            _ => match path.strip_prefix("/models") {
                Some(rest) => self.manage(dispatch, request, rest).await,
                None => unknown(dispatch.edge()),
            },
        }
    }

    /// Answers `/models` and the paths below it. Each request needs the access of its v2 counterpart.
    async fn manage(&self, dispatch: Dispatch, request: Request<Body>, rest: &str) -> Response {
        let (method, segments) = (request.method().clone(), rest.split('/').collect::<Vec<_>>());
        let (route, id) = match (&method, segments.as_slice()) {
            (&Method::GET, [""] | ["", ""]) => (Route::RepositoryIndex, ""),
            (&Method::POST, [""] | ["", ""]) => (Route::RepositoryLoad, ""),
            (&Method::GET, ["", id]) => (Route::RepositoryIndex, *id),
            (&Method::DELETE, ["", id]) if !id.is_empty() => (Route::RepositoryUnload, *id),
            (&Method::POST, ["", id, "invoke"]) if !id.is_empty() => (Route::Infer, *id),
            _ => return unknown(dispatch.edge()),
        };
        let id = percent_decode_str(id).decode_utf8_lossy();
        if let (Route::Infer, Some(name)) = (route, self.models.name(&id)) {
            let mut request = request;
            request.extensions_mut().insert(StatusOf(status_without_memory));
            return forward_as_v2(dispatch, request, (method, &model_path(&name, "infer")), &FORM).await;
        }
        let edge = dispatch.edge();
        let handler = async |request: Request<Body>| match route {
            Route::RepositoryIndex if id.is_empty() => self.models.list(edge).await.into_response(),
            Route::RepositoryIndex => self.models.describe(&id).into_response(),
            Route::RepositoryUnload => self.models.unload(edge, &id).await.into_response(),
            Route::RepositoryLoad => self.models.load(edge, request).await,
            _ => not_loaded(&id),
        };
        answering::answer(edge, route, request, handler).await
    }
}

fn invalid(name: &str, value: &str, allowed: &str) -> String {
    format!("invalid {name} \"{value}\": expected one of {allowed}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_chooses_the_paths() {
        let with =
            |name: &'static str, value: &'static str| SageMaker::new(|asked| (asked == name).then(|| value.to_owned()));
        let usual = with("", "").unwrap();
        assert_eq!((usual.health, usual.invocations), ("/v2/health/ready", model_path(NO_DEFAULT, "infer")));
        assert_eq!(with("SAGEMAKER_TRITON_PING_MODE", "live").unwrap().health, "/v2/health/live");
        let generate = with("SAGEMAKER_TRITON_INFERENCE_TYPE", "generate").unwrap();
        assert_eq!(generate.invocations, model_path(NO_DEFAULT, "generate"));
        let named = with("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "m").unwrap();
        assert_eq!(named.invocations, "/v2/models/m/infer");
        for (name, value) in [("SAGEMAKER_TRITON_PING_MODE", "x"), ("SAGEMAKER_TRITON_INFERENCE_TYPE", "")] {
            assert!(with(name, value).unwrap_err().starts_with(&format!("invalid {name} \"{value}\": expected")));
        }
    }
}
