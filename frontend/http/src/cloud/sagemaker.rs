//! Amazon SageMaker: `/ping` and `/invocations` of single-model endpoints, and `/models` of
//! multi-model endpoints.

use axum::body::Body;
use axum::response::Response;
use http::{Method, Uri};
use percent_encoding::percent_decode_str;
use pharos::service::Route;

use super::models::{Models, not_loaded, status_without_memory};
use super::{
    BinaryForm, Dispatch, fail, forward_as_v2, in_form, model_path, take_header_length, unknown,
};
use crate::model::ModelPath;
use crate::{answer, infer};
use pharos_edge::Incoming;

const FORM: BinaryForm = BinaryForm {
    media_type: "application/vnd.sagemaker-triton.binary+json;json-header-size=",
    in_answers: true,
};
/// Triton's name for the model of `/invocations` if the environment sets none. Requests to it fail
/// with this name.
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
        let value =
            |name: &str, default: &str| variable(name).unwrap_or_else(|| default.to_owned());
        let health = match &*value("SAGEMAKER_TRITON_PING_MODE", "ready") {
            "ready" => "/v2/health/ready",
            "live" => "/v2/health/live",
            other => return Err(invalid("SAGEMAKER_TRITON_PING_MODE", other, "ready, live")),
        };
        let verb = value("SAGEMAKER_TRITON_INFERENCE_TYPE", "infer");
        if !["infer", "generate", "generate_stream"].contains(&&*verb) {
            return Err(invalid(
                "SAGEMAKER_TRITON_INFERENCE_TYPE",
                &verb,
                "infer, generate, generate_stream",
            ));
        }
        let invocations =
            model_path(&value("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", NO_DEFAULT), &verb);
        Ok(Self { health, invocations, models: Models::default() })
    }

    pub(super) async fn answer(&self, dispatch: Dispatch, incoming: Incoming<Body>) -> Response {
        let method = incoming.request.method().clone();
        let path = incoming.request.uri().path().to_owned();
        match path.as_str() {
            "/ping" => forward_as_v2(dispatch, incoming, method, self.health, &FORM).await,
            "/invocations" => {
                forward_as_v2(dispatch, incoming, method, &self.invocations, &FORM).await
            }
            _ => match path.strip_prefix("/models") {
                Some(rest) => self.manage(dispatch, incoming, rest).await,
                None => unknown(&dispatch, incoming),
            },
        }
    }

    /// Answers `/models` and the paths below it. Each request needs the access of its v2
    /// counterpart.
    async fn manage(
        &self,
        dispatch: Dispatch,
        mut incoming: Incoming<Body>,
        rest: &str,
    ) -> Response {
        let segments: Vec<&str> = rest.split('/').collect();
        let (route, id) = match (incoming.request.method(), segments.as_slice()) {
            (&Method::GET, [""] | ["", ""]) => (Route::RepositoryIndex, ""),
            (&Method::POST, [""] | ["", ""]) => (Route::RepositoryLoad, ""),
            (&Method::GET, ["", id]) => (Route::RepositoryIndex, *id),
            (&Method::DELETE, ["", id]) if !id.is_empty() => (Route::RepositoryUnload, *id),
            (&Method::POST, ["", id, "invoke"]) if !id.is_empty() => (Route::Infer, *id),
            _ => return unknown(&dispatch, incoming),
        };
        let id = percent_decode_str(id).decode_utf8_lossy();
        let invoked = if route == Route::Infer { self.models.name(&id) } else { None };
        if let Some(model) = &invoked {
            let Ok(uri) = Uri::try_from(model_path(model, "infer")) else {
                return unknown(&dispatch, incoming);
            };
            *incoming.request.uri_mut() = uri;
            if let Err(error) = take_header_length(incoming.request.headers_mut(), &FORM) {
                return fail(&dispatch, route, incoming, error);
            }
        }
        let call = match dispatch.routes.admit(route, &mut incoming) {
            Ok(call) => call,
            Err(refused) => return refused,
        };
        let edge = dispatch.edge();
        if let Some(model) = invoked {
            let path = ModelPath { model, version: String::new() };
            return in_form(
                infer::answer(edge, call, path, incoming.request, status_without_memory).await,
                &FORM,
            );
        }
        let answer = match route {
            Route::RepositoryIndex if id.is_empty() => self.models.list(edge).await,
            Route::RepositoryIndex => self.models.describe(&id),
            Route::RepositoryUnload => self.models.unload(edge, &id).await,
            Route::RepositoryLoad => self.models.load(edge, incoming.request).await,
            _ => Err(not_loaded(&id)),
        };
        answer::finish(call, answer)
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
        let with = |name: &'static str, value: &'static str| {
            SageMaker::new(|asked| (asked == name).then(|| value.to_owned()))
        };
        let usual = with("", "").unwrap();
        assert_eq!(
            (usual.health, usual.invocations),
            ("/v2/health/ready", model_path(NO_DEFAULT, "infer"))
        );
        assert_eq!(with("SAGEMAKER_TRITON_PING_MODE", "live").unwrap().health, "/v2/health/live");
        let generate = with("SAGEMAKER_TRITON_INFERENCE_TYPE", "generate").unwrap();
        assert_eq!(generate.invocations, model_path(NO_DEFAULT, "generate"));
        let named = with("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "m").unwrap();
        assert_eq!(named.invocations, "/v2/models/m/infer");
        for (name, value) in
            [("SAGEMAKER_TRITON_PING_MODE", "x"), ("SAGEMAKER_TRITON_INFERENCE_TYPE", "")]
        {
            assert!(
                with(name, value)
                    .unwrap_err()
                    .starts_with(&format!("invalid {name} \"{value}\": expected"))
            );
        }
    }
}
