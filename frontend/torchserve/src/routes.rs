//! Maps paths to endpoints. A path is decoded and then split at `/`. As in Java, trailing empty
//! segments are ignored.

use http::Method;
use percent_encoding::percent_decode_str;
use pharos::metrics::labels::Route;

use super::token::Purpose;
use pharos::access::Api;
use pharos_edge::access::routes::{self, Class};

/// The APIs that a listener serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Apis {
    /// Predictions and health.
    pub inference: bool,
    /// Model management.
    pub management: bool,
    /// Metrics.
    pub metrics: bool,
}

/// The target of a prediction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The model; `None` if the query or the form names it.
    pub model: Option<String>,
    /// The version; empty if not given.
    pub version: String,
    /// The value of the header `explain`, if TorchServe sets it.
    pub explain: Option<bool>,
    /// The value of the header `url_path`, if TorchServe sets it.
    pub url_path: Option<String>,
    /// Whether the query's pairs are also parts.
    pub query: bool,
}

/// The endpoint of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// The description of the API.
    ApiDescription,
    /// Health.
    Ping,
    /// A prediction or an explanation.
    Predict(Target),
    /// The v2 protocol, which has its own table of routes and access check.
    Kserve,
    /// List the models.
    List,
    /// Register a model.
    Register,
    /// Describe a version (empty: the default one) or `all` versions.
    Describe(String, String),
    /// Describe the management API of a version.
    ManagementApi(String, String),
    /// Scale the workers of a version (empty: the default one, or the one in the query).
    Scale(String, String),
    /// Set the default version.
    SetDefault(String, String),
    /// Unregister a version (empty: the default one).
    Unregister(String, String),
    /// Readiness of a model in KServe's v1 protocol: whether it has workers.
    V1Ready(String),
    /// Create a new token.
    Token,
    /// The list of workflows, which is always empty.
    Workflows,
    /// A prediction by a workflow. Workflows are not supported; the response is 404.
    Workflow(String),
    /// Management of a workflow. Workflows are not supported; the response is 404.
    ManageWorkflow(String),
    /// The metrics.
    Metrics,
    /// A document of the live page, by its path.
    Dashboard(String),
    /// The path is unknown.
    NotFound,
    /// The path does not support this method.
    WrongMethod,
}

impl Endpoint {
    /// Returns the route for counting responses.
    pub fn route(&self) -> Route {
        match self {
            Self::ApiDescription | Self::ManagementApi(..) => Route::ApiDescription,
            Self::Ping => Route::Ping,
            Self::Predict(Target { explain: Some(true), .. }) => Route::Explain,
            Self::Predict(_) => Route::Predict,
            Self::List => Route::ModelList,
            Self::Register => Route::ModelRegister,
            Self::Describe(..) => Route::ModelDescribe,
            Self::Scale(..) => Route::ModelScale,
            Self::SetDefault(..) => Route::ModelSetDefault,
            Self::Unregister(..) => Route::ModelUnregister,
            Self::V1Ready(_) => Route::ModelReady,
            Self::Token => Route::Token,
            Self::Metrics | Self::Dashboard(_) => Route::Metrics,
            Self::Kserve
            | Self::Workflows
            | Self::Workflow(_)
            | Self::ManageWorkflow(_)
            | Self::NotFound
            | Self::WrongMethod => Route::Unknown,
        }
    }

    /// Returns the class of the endpoint for access checks.
    pub(crate) fn class(&self) -> Class {
        match self {
            // These have no route, or share one with inference.
            Self::ManagementApi(..)
            | Self::Workflows
            | Self::ManageWorkflow(_)
            | Self::V1Ready(_) => Class::Part(Api::ModelRepository),
            Self::Workflow(_) => Class::Part(Api::Inference),
            endpoint => routes::class(endpoint.route()),
        }
    }

    /// Returns the key that the endpoint requires; `None` if it requires none.
    pub fn purpose(&self, apis: Apis) -> Option<Purpose> {
        let otherwise = match apis {
            Apis { inference: true, .. } => Some(Purpose::Inference),
            Apis { metrics: true, .. } => None,
            _ => Some(Purpose::Management),
        };
        if *self == Self::Token {
            Some(Purpose::Renewal)
        } else {
            super::guard::purpose(self.class(), otherwise)
        }
    }
}

/// Returns the endpoint of a request on a listener with these APIs.
pub fn endpoint(apis: Apis, method: &Method, path: &str) -> Endpoint {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut segments: Vec<&str> =
        decoded.strip_prefix('/').unwrap_or(&decoded).split('/').collect();
    while segments.last().is_some_and(|segment| segment.is_empty()) {
        segments.pop();
    }
    match segments.as_slice() {
        [] if *method == Method::OPTIONS => Endpoint::ApiDescription,
        [] => Endpoint::WrongMethod,
        ["api-description", ..] => Endpoint::ApiDescription,
        ["metrics", ..] if apis.metrics => Endpoint::Metrics,
        ["dashboard", ..] if apis.metrics => match *method == Method::GET {
            true => Endpoint::Dashboard(format!("/{}", segments.join("/"))),
            false => Endpoint::WrongMethod,
        },
        segments => {
            let prediction = apis.inference.then(|| inference(segments)).flatten();
            let found = prediction
                .or_else(|| apis.management.then(|| management(method, segments)).flatten());
            found.unwrap_or(Endpoint::NotFound)
        }
    }
}

fn inference(segments: &[&str]) -> Option<Endpoint> {
    let target = |model: &str, version: &str| Target {
        model: Some(model.to_owned()),
        version: version.to_owned(),
        ..Target::default()
    };
    let with_query = |target: Target| Endpoint::Predict(Target { query: true, ..target });
    Some(match segments {
        ["ping", ..] => Endpoint::Ping,
        ["predictions" | "explanations", model, rest @ ..] => {
            let (version, extra) =
                rest.split_first().map_or(("", rest), |(version, extra)| (*version, extra));
            let explain = Some(segments.first() == Some(&"explanations"));
            Endpoint::Predict(Target {
                explain,
                url_path: Some(extra.join("/")),
                ..target(model, version)
            })
        }
        ["invocations"] => with_query(Target::default()),
        ["models", model, "invoke"] => with_query(target(model, "")),
        ["v1", "models", call] if call.contains(":predict") || call.contains(":explain") => {
            let model = call.split(':').next().unwrap_or_default();
            Endpoint::Predict(Target {
                explain: Some(call.contains(":explain")),
                ..target(model, "")
            })
        }
        ["v2", "models", model, verb @ ("infer" | "explain")] => {
            Endpoint::Predict(Target { explain: Some(*verb == "explain"), ..target(model, "") })
        }
        ["v2", ..] => Endpoint::Kserve,
        ["wfpredict", workflow, ..] => Endpoint::Workflow((*workflow).to_owned()),
        [model, "predict"] => with_query(target(model, "")),
        [model, version, "predict"] => with_query(target(model, version)),
        _ => return None,
    })
}

fn management(method: &Method, segments: &[&str]) -> Option<Endpoint> {
    let get = *method == Method::GET;
    Some(match segments {
        ["models"] => match *method {
            Method::GET => Endpoint::List,
            Method::POST => Endpoint::Register,
            _ => Endpoint::WrongMethod,
        },
        ["models", model, version, "set-default"] if *method == Method::PUT => {
            Endpoint::SetDefault((*model).to_owned(), (*version).to_owned())
        }
        ["models", model] | ["models", model, _] | ["models", model, _, "set-default"] => {
            let model = (*model).to_owned();
            let version = segments.get(2).copied().unwrap_or_default().to_owned();
            match *method {
                Method::GET => Endpoint::Describe(model, version),
                Method::PUT => Endpoint::Scale(model, version),
                Method::DELETE => Endpoint::Unregister(model, version),
                Method::OPTIONS => Endpoint::ManagementApi(model, version),
                _ => Endpoint::WrongMethod,
            }
        }
        ["v1", "models", model] if get => {
            Endpoint::V1Ready(model.split(':').next().unwrap_or_default().to_owned())
        }
        ["v1", "models", _] => Endpoint::WrongMethod,
        ["token"] if get => Endpoint::Token,
        ["workflows"] if get => Endpoint::Workflows,
        ["workflows"] => Endpoint::WrongMethod,
        ["workflows", workflow] => Endpoint::ManageWorkflow((*workflow).to_owned()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFERENCE: Apis = Apis { inference: true, management: false, metrics: false };
    const MANAGEMENT: Apis = Apis { inference: false, management: true, metrics: false };
    const METRICS: Apis = Apis { inference: false, management: false, metrics: true };

    fn predict(model: &str, version: &str, rest: (Option<bool>, Option<&str>, bool)) -> Endpoint {
        let model = Some(model).filter(|model| !model.is_empty()).map(str::to_owned);
        let (explain, url_path, query) = rest;
        Endpoint::Predict(Target {
            model,
            version: version.into(),
            explain,
            url_path: url_path.map(str::to_owned),
            query,
        })
    }

    #[test]
    fn maps_all_paths_of_predictions() {
        for (path, expected) in [
            ("/ping", Endpoint::Ping),
            ("/ping/x", Endpoint::Ping),
            ("/predictions/m", predict("m", "", (Some(false), Some(""), false))),
            ("/predictions/m/1.0/a/b", predict("m", "1.0", (Some(false), Some("a/b"), false))),
            ("/predictions/a%20b/", predict("a b", "", (Some(false), Some(""), false))),
            ("/explanations/m", predict("m", "", (Some(true), Some(""), false))),
            ("/invocations", predict("", "", (None, None, true))),
            ("/models/m/invoke", predict("m", "", (None, None, true))),
            ("/m/predict", predict("m", "", (None, None, true))),
            ("/m/2/predict", predict("m", "2", (None, None, true))),
            ("/v1/models/m:predict", predict("m", "", (Some(false), None, false))),
            ("/v1/models/m:explain", predict("m", "", (Some(true), None, false))),
            ("/v2/models/m/infer", predict("m", "", (Some(false), None, false))),
            ("/v2/models/m/explain", predict("m", "", (Some(true), None, false))),
            ("/v2/models/m/ready", Endpoint::Kserve),
            ("/v2", Endpoint::Kserve),
            ("/%762/repository/index", Endpoint::Kserve),
            ("/v2/repository/index/", Endpoint::Kserve),
            ("/wfpredict/w", Endpoint::Workflow("w".into())),
            ("/predictions", Endpoint::NotFound),
            ("/models/m/invokes", Endpoint::NotFound),
            ("/models", Endpoint::NotFound),
            ("/v1/models/m", Endpoint::NotFound),
            ("/metrics", Endpoint::NotFound),
            ("/", Endpoint::WrongMethod),
            ("/api-description", Endpoint::ApiDescription),
        ] {
            assert_eq!(endpoint(INFERENCE, &Method::GET, path), expected, "{path}");
        }
        assert_eq!(endpoint(INFERENCE, &Method::OPTIONS, "/"), Endpoint::ApiDescription);
    }

    #[test]
    fn maps_management_paths() {
        let m = || "m".to_owned();
        for (method, path, expected) in [
            (Method::GET, "/models", Endpoint::List),
            (Method::POST, "/models", Endpoint::Register),
            (Method::DELETE, "/models", Endpoint::WrongMethod),
            (Method::GET, "/models/m", Endpoint::Describe(m(), String::new())),
            (Method::GET, "/models/m/all", Endpoint::Describe(m(), "all".into())),
            (Method::GET, "/models/m/1/set-default", Endpoint::Describe(m(), "1".into())),
            (Method::PUT, "/models/m/1/set-default", Endpoint::SetDefault(m(), "1".into())),
            (Method::PUT, "/models/m/1", Endpoint::Scale(m(), "1".into())),
            (Method::DELETE, "/models/m", Endpoint::Unregister(m(), String::new())),
            (Method::OPTIONS, "/models/m", Endpoint::ManagementApi(m(), String::new())),
            (Method::PATCH, "/models/m", Endpoint::WrongMethod),
            (Method::GET, "/models/m/1/x", Endpoint::NotFound),
            (Method::GET, "/v1/models/m", Endpoint::V1Ready(m())),
            (Method::POST, "/v1/models/m", Endpoint::WrongMethod),
            (Method::GET, "/token", Endpoint::Token),
            (Method::GET, "/workflows", Endpoint::Workflows),
            (Method::GET, "/ping", Endpoint::NotFound),
            (Method::POST, "/", Endpoint::WrongMethod),
        ] {
            assert_eq!(endpoint(MANAGEMENT, &method, path), expected, "{method} {path}");
        }
    }

    #[test]
    fn one_listener_can_serve_several_apis() {
        let both = Apis { inference: true, management: true, metrics: false };
        assert_eq!(endpoint(both, &Method::GET, "/models"), Endpoint::List);
        assert_eq!(
            endpoint(both, &Method::POST, "/models/m/invoke"),
            predict("m", "", (None, None, true))
        );
        assert_eq!(endpoint(both, &Method::GET, "/v1/models/m"), Endpoint::V1Ready("m".into()));
        assert_eq!(endpoint(METRICS, &Method::POST, "/metrics/x"), Endpoint::Metrics);
        assert_eq!(endpoint(METRICS, &Method::GET, "/ping"), Endpoint::NotFound);
        let page = |path: &str| Endpoint::Dashboard(path.to_owned());
        assert_eq!(endpoint(METRICS, &Method::GET, "/dashboard/"), page("/dashboard"));
        assert_eq!(
            endpoint(METRICS, &Method::GET, "/dashboard/style.css"),
            page("/dashboard/style.css")
        );
        assert_eq!(endpoint(METRICS, &Method::POST, "/dashboard"), Endpoint::WrongMethod);
        assert_eq!(endpoint(INFERENCE, &Method::GET, "/dashboard"), Endpoint::NotFound);
    }

    #[test]
    fn endpoints_require_the_key_of_their_purpose() {
        let purpose =
            |apis: Apis, method: Method, path: &str| endpoint(apis, &method, path).purpose(apis);
        assert_eq!(purpose(INFERENCE, Method::GET, "/ping"), Some(Purpose::Inference));
        assert_eq!(purpose(INFERENCE, Method::GET, "/nowhere"), Some(Purpose::Inference));
        assert_eq!(purpose(INFERENCE, Method::OPTIONS, "/"), None);
        assert_eq!(purpose(INFERENCE, Method::POST, "/predictions/m"), Some(Purpose::Inference));
        assert_eq!(purpose(MANAGEMENT, Method::OPTIONS, "/models/m"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/workflows"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::DELETE, "/workflows/w"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/models"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/nowhere"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/token"), Some(Purpose::Renewal));
        assert_eq!(purpose(METRICS, Method::GET, "/metrics"), None);
        assert_eq!(purpose(METRICS, Method::GET, "/dashboard"), None);
        assert_eq!(purpose(METRICS, Method::GET, "/nowhere"), None);
    }
}
