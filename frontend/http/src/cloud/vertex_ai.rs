//! Google Vertex AI: a health route and a prediction route, whose paths the platform chooses. The
//! header `X-Vertex-Ai-Triton-Redirect` redirects a prediction request to a v2 path or to
//! `metrics`.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::response::Response;
use http::{Method, Request, Uri};
use pharos::error::InferError;
use pharos::id::bare_name;
use pharos::service::{Route, Service, SharedService};

use super::{BinaryForm, Dispatch, fail, forward_as_v2, model_path, unknown};
use crate::wrong_method;
use pharos_edge::Incoming;
use pharos_edge::routing::Routes;

const FORM: BinaryForm = BinaryForm {
    media_type: "application/vnd.vertex-ai-triton.binary+json;json-header-size=",
    in_answers: false,
};
const REDIRECT: &str = "x-vertex-ai-triton-redirect";
const FLAG: &str = "--vertex-ai-default-model";
const NO_DEFAULT: &str = "Expect the model repository contains only a single model if default \
                          model is not specified (--vertex-ai-default-model specifies one)";

/// Vertex AI's endpoints.
#[derive(Clone, Debug)]
pub struct VertexAi {
    health_route: Arc<str>,
    predict_route: Arc<str>,
    /// The default model, for requests without a redirect, from the options.
    wanted: Option<String>,
    /// The default model, once the models are loaded.
    model: Arc<OnceLock<String>>,
}

impl VertexAi {
    /// Configures the endpoints from the environment of the container. `model` serves requests
    /// without a redirect; if it is `None`, the only ready model does.
    ///
    /// # Errors
    /// Fails if a route is missing.
    pub fn new(
        model: Option<String>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let route = |name: &str| {
            let missing = || format!("{name} is not defined for Vertex AI endpoint");
            variable(name).filter(|route| !route.is_empty()).ok_or_else(missing)
        };
        let predict_route = route("AIP_PREDICT_ROUTE")?;
        let health_route = route("AIP_HEALTH_ROUTE")?;
        let wanted = model.filter(|model| !model.is_empty());
        Ok(Self {
            health_route: health_route.into(),
            predict_route: predict_route.into(),
            wanted,
            model: Arc::default(),
        })
    }

    /// Finds the default model among those that are ready.
    ///
    /// # Errors
    /// Fails with Triton's texts and a remedy if the named model is not ready or, without a name,
    /// not exactly one is ready.
    pub async fn resolve_default_model(&self, service: &dyn Service) -> Result<(), String> {
        let entries = service.repository_index(true).await.map_err(|error| error.message)?;
        let names: BTreeSet<String> = entries.into_iter().map(|entry| entry.name).collect();
        let model = match &self.wanted {
            Some(wanted)
                if names.iter().any(|name| name == wanted || bare_name(name) == wanted) =>
            {
                wanted.clone()
            }
            Some(wanted) => {
                return Err(format!("Expect the default model '{wanted}' is loaded ({FLAG})"));
            }
            None => {
                let mut names = names.into_iter();
                let (Some(only), None) = (names.next(), names.next()) else {
                    return Err(NO_DEFAULT.to_owned());
                };
                only
            }
        };
        self.model.get_or_init(|| model);
        Ok(())
    }

    pub(super) async fn answer(
        &self,
        dispatch: Dispatch,
        metrics: &Routes<SharedService>,
        incoming: Incoming<Body>,
    ) -> Response {
        let method = incoming.request.method().clone();
        let path = incoming.request.uri().path();
        if path == &*self.health_route {
            // The server is ready a moment before the default model is known.
            if method == Method::GET && self.model.get().is_none() {
                return fail(&dispatch, Route::Ready, incoming, not_loaded());
            }
            return forward_as_v2(dispatch, incoming, method, "/v2/health/ready", &FORM).await;
        }
        if path != &*self.predict_route {
            return unknown(&dispatch, incoming);
        }
        let redirect = incoming.request.headers().get(REDIRECT);
        if let Some(redirect) = redirect.map(|path| path.to_str().unwrap_or_default().to_owned()) {
            return redirected(dispatch, metrics, incoming, &redirect).await;
        }
        match self.model.get() {
            Some(model) => {
                forward_as_v2(dispatch, incoming, method, &model_path(model, "infer"), &FORM).await
            }
            None => fail(&dispatch, Route::Infer, incoming, not_loaded()),
        }
    }
}

fn not_loaded() -> InferError {
    InferError::not_ready("the default model is unknown until the models are loaded")
}

/// Answers a request that is redirected to a v2 path; `redirect` is the path without its leading
/// slash.
async fn redirected(
    dispatch: Dispatch,
    metrics: &Routes<SharedService>,
    mut incoming: Incoming<Body>,
    redirect: &str,
) -> Response {
    if incoming.request.method() != Method::POST {
        return dispatch.routes.answer_unknown(incoming, wrong_method());
    }
    if redirect == "metrics" {
        // Clients of the platform can reach this listener, so metrics require the access of model
        // statistics.
        if let Some(refused) = dispatch.routes.refusal(Route::ModelStatistics, &mut incoming) {
            return refused;
        }
        incoming.request = Request::new(Body::empty());
        *incoming.request.uri_mut() = Uri::from_static("/metrics");
        return metrics.answer(incoming).await;
    }
    match method_of(redirect) {
        Some(method) => {
            forward_as_v2(dispatch, incoming, method, &format!("/{redirect}"), &FORM).await
        }
        None => unknown(&dispatch, incoming),
    }
}

/// Returns the method of a v2 path that requests may be redirected to.
fn method_of(path: &str) -> Option<Method> {
    let segments: Vec<&str> = path.split('/').collect();
    let verb = match segments.as_slice() {
        ["v2"] | ["v2", "health", "live" | "ready"] | ["v2", "models", "stats"] => {
            return Some(Method::GET);
        }
        ["v2", "models", _] | ["v2", "models", _, "versions", _] => return Some(Method::GET),
        ["v2", "models", _, verb] | ["v2", "models", _, "versions", _, verb] => *verb,
        ["v2", "repository", "index"] | ["v2", "repository", "models", _, "load" | "unload"] => {
            "repository"
        }
        ["v2", "systemsharedmemory" | "cudasharedmemory", rest @ ..] => {
            rest.last().copied().unwrap_or_default()
        }
        _ => return None,
    };
    match verb {
        "ready" | "config" | "stats" | "status" => Some(Method::GET),
        "infer" | "repository" | "register" | "unregister" => Some(Method::POST),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn both_routes_must_be_given() {
        let with = |names: &'static [&'static str]| {
            VertexAi::new(None, |name| names.contains(&name).then(|| "/route".to_owned())).map(drop)
        };
        assert_eq!(with(&["AIP_PREDICT_ROUTE", "AIP_HEALTH_ROUTE"]), Ok(()));
        assert_eq!(
            with(&["AIP_HEALTH_ROUTE"]).unwrap_err(),
            "AIP_PREDICT_ROUTE is not defined for Vertex AI endpoint"
        );
        assert_eq!(
            with(&["AIP_PREDICT_ROUTE"]).unwrap_err(),
            "AIP_HEALTH_ROUTE is not defined for Vertex AI endpoint"
        );
    }

    #[test]
    fn redirects_have_the_methods_of_v2() {
        for (path, method) in [
            ("v2", Some(Method::GET)),
            ("v2/health/live", Some(Method::GET)),
            ("v2/models/stats", Some(Method::GET)),
            ("v2/models/m", Some(Method::GET)),
            ("v2/models/m/versions/1", Some(Method::GET)),
            ("v2/models/m/versions/1/config", Some(Method::GET)),
            ("v2/models/m/infer", Some(Method::POST)),
            ("v2/repository/index", Some(Method::POST)),
            ("v2/repository/models/m/load", Some(Method::POST)),
            ("v2/systemsharedmemory/status", Some(Method::GET)),
            ("v2/cudasharedmemory/region/r/register", Some(Method::POST)),
            ("v2/models/m/generate", None),
            ("v2/logging", None),
            ("v1/models", None),
            ("../v2", None),
            ("", None),
        ] {
            assert_eq!(method_of(path), method, "{path}");
        }
    }
}
