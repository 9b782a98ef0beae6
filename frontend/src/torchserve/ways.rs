//! Which path means what. A path is decoded and then cut at `/`; empty segments at its end do not count, as in Java.

use http::Method;
use percent_encoding::percent_decode_str;
use pharos::metrics::labels::Route;

use super::token::Purpose;
use crate::access::routes::{self, Class};
use pharos::access::Api;

/// What a listener serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Doors {
    /// Predictions and health.
    pub inference: bool,
    /// Models.
    pub management: bool,
    /// Metrics.
    pub metrics: bool,
}

/// A prediction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The model; `None` where the query or the form names it.
    pub model: Option<String>,
    /// The version, if there is one.
    pub version: String,
    /// The header `explain`, where TorchServe sets it.
    pub explain: Option<bool>,
    /// The header `url_path`, where TorchServe sets it.
    pub url_path: Option<String>,
    /// The query's pairs are parts too.
    pub query: bool,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Way {
    /// What the API is.
    ApiDescription,
    /// Health.
    Ping,
    /// A prediction or an explanation.
    Predict(Target),
    /// The v2 protocol, and its route; [`Route::Unknown`] for a path that it does not have.
    Kserve(Route),
    /// The models.
    List,
    /// A new model.
    Register,
    /// A version (empty: the default one) or `all`.
    Describe(String, String),
    /// What can be done with a version.
    ManagementApi(String, String),
    /// Workers of a version (empty: the default one, or that of the query).
    Scale(String, String),
    /// Another default version.
    SetDefault(String, String),
    /// The end of a version (empty: the default one).
    Unregister(String, String),
    /// Whether a model has workers, for KServe.
    V1Ready(String),
    /// A new token.
    Token,
    /// The workflows: there are none.
    Workflows,
    /// A prediction by a workflow: there is none.
    Workflow(String),
    /// The management of a workflow: there is none.
    ManageWorkflow(String),
    /// The metrics.
    Metrics,
    /// Nothing is there.
    NotFound,
    /// Something is there, for another method.
    WrongMethod,
}

impl Way {
    /// How answers are counted.
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
            Self::Metrics => Route::Metrics,
            Self::Kserve(route) => *route,
            Self::Workflows | Self::Workflow(_) | Self::ManageWorkflow(_) | Self::NotFound | Self::WrongMethod => {
                Route::Unknown
            }
        }
    }

    /// What it belongs to.
    pub(crate) fn class(&self) -> Class {
        match self {
            // These have no route of their own, or one that inference needs too.
            Self::ManagementApi(..) | Self::Workflows | Self::ManageWorkflow(_) | Self::V1Ready(_) => {
                Class::Part(Api::ModelRepository)
            }
            Self::Workflow(_) => Class::Part(Api::Inference),
            way => routes::class(way.route()),
        }
    }

    /// The key that it needs; `None` if none.
    pub fn purpose(&self, doors: Doors) -> Option<Purpose> {
        let otherwise = match doors {
            Doors { inference: true, .. } => Some(Purpose::Inference),
            Doors { metrics: true, .. } => None,
            _ => Some(Purpose::Management),
        };
        if *self == Self::Token { Some(Purpose::Renewal) } else { super::guard::purpose(self.class(), otherwise) }
    }
}

/// What a request asks a listener for.
pub fn way(doors: Doors, method: &Method, path: &str) -> Way {
    let decoded = percent_decode_str(path).decode_utf8_lossy();
    let mut segments: Vec<&str> = decoded.strip_prefix('/').unwrap_or(&decoded).split('/').collect();
    while segments.last().is_some_and(|segment| segment.is_empty()) {
        segments.pop();
    }
    match segments.as_slice() {
        [] if *method == Method::OPTIONS => Way::ApiDescription,
        [] => Way::WrongMethod,
        ["api-description", ..] => Way::ApiDescription,
        ["metrics", ..] if doors.metrics => Way::Metrics,
        segments => {
            let found = doors.inference.then(|| inference(segments, path)).flatten();
            let found = found.or_else(|| doors.management.then(|| management(method, segments)).flatten());
            found.unwrap_or(Way::NotFound)
        }
    }
}

fn inference(segments: &[&str], path: &str) -> Option<Way> {
    let target = |model: &str, version: &str| Target {
        model: Some(model.to_owned()),
        version: version.to_owned(),
        ..Target::default()
    };
    let with_query = |target: Target| Way::Predict(Target { query: true, ..target });
    Some(match segments {
        ["ping", ..] => Way::Ping,
        ["predictions" | "explanations", model, rest @ ..] => {
            let (version, extra) = rest.split_first().map_or(("", rest), |(version, extra)| (*version, extra));
            let explain = Some(segments.first() == Some(&"explanations"));
            Way::Predict(Target { explain, url_path: Some(extra.join("/")), ..target(model, version) })
        }
        ["invocations"] => with_query(Target::default()),
        ["models", model, "invoke"] => with_query(target(model, "")),
        ["v1", "models", call] if call.contains(":predict") || call.contains(":explain") => {
            let model = call.split(':').next().unwrap_or_default();
            Way::Predict(Target { explain: Some(call.contains(":explain")), ..target(model, "") })
        }
        ["v2", "models", model, verb @ ("infer" | "explain")] => {
            Way::Predict(Target { explain: Some(*verb == "explain"), ..target(model, "") })
        }
        // The v2 protocol's edge matches the path as it came, so that is what is classified.
        ["v2", ..] => Way::Kserve(routes::of_http(path)),
        ["wfpredict", workflow, ..] => Way::Workflow((*workflow).to_owned()),
        [model, "predict"] => with_query(target(model, "")),
        [model, version, "predict"] => with_query(target(model, version)),
        _ => return None,
    })
}

fn management(method: &Method, segments: &[&str]) -> Option<Way> {
    let get = *method == Method::GET;
    Some(match segments {
        ["models"] => match *method {
            Method::GET => Way::List,
            Method::POST => Way::Register,
            _ => Way::WrongMethod,
        },
        ["models", model, version, "set-default"] if *method == Method::PUT => {
            Way::SetDefault((*model).to_owned(), (*version).to_owned())
        }
        ["models", model] | ["models", model, _] | ["models", model, _, "set-default"] => {
            let (model, version) = ((*model).to_owned(), segments.get(2).copied().unwrap_or_default().to_owned());
            match *method {
                Method::GET => Way::Describe(model, version),
                Method::PUT => Way::Scale(model, version),
                Method::DELETE => Way::Unregister(model, version),
                Method::OPTIONS => Way::ManagementApi(model, version),
                _ => Way::WrongMethod,
            }
        }
        ["v1", "models", model] if get => Way::V1Ready(model.split(':').next().unwrap_or_default().to_owned()),
        ["v1", "models", _] => Way::WrongMethod,
        ["token"] if get => Way::Token,
        ["workflows"] if get => Way::Workflows,
        ["workflows"] => Way::WrongMethod,
        ["workflows", workflow] => Way::ManageWorkflow((*workflow).to_owned()),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFERENCE: Doors = Doors { inference: true, management: false, metrics: false };
    const MANAGEMENT: Doors = Doors { inference: false, management: true, metrics: false };
    const METRICS: Doors = Doors { inference: false, management: false, metrics: true };

    fn predict(model: &str, version: &str, rest: (Option<bool>, Option<&str>, bool)) -> Way {
        let model = Some(model).filter(|model| !model.is_empty()).map(str::to_owned);
        let (explain, url_path, query) = rest;
        Way::Predict(Target { model, version: version.into(), explain, url_path: url_path.map(str::to_owned), query })
    }

    #[test]
    fn predictions_have_many_ways() {
        for (path, expected) in [
            ("/ping", Way::Ping),
            ("/ping/x", Way::Ping),
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
            ("/v2/models/m/ready", Way::Kserve(Route::ModelReady)),
            ("/v2", Way::Kserve(Route::ServerMetadata)),
            ("/v2/repository/index", Way::Kserve(Route::RepositoryIndex)),
            ("/%762/repository/index", Way::Kserve(Route::Unknown)),
            ("/v2/repository/index/", Way::Kserve(Route::Unknown)),
            ("/wfpredict/w", Way::Workflow("w".into())),
            ("/predictions", Way::NotFound),
            ("/models/m/invokes", Way::NotFound),
            ("/models", Way::NotFound),
            ("/v1/models/m", Way::NotFound),
            ("/metrics", Way::NotFound),
            ("/", Way::WrongMethod),
            ("/api-description", Way::ApiDescription),
        ] {
            assert_eq!(way(INFERENCE, &Method::GET, path), expected, "{path}");
        }
        assert_eq!(way(INFERENCE, &Method::OPTIONS, "/"), Way::ApiDescription);
    }

    #[test]
    fn models_are_managed() {
        let m = || "m".to_owned();
        for (method, path, expected) in [
            (Method::GET, "/models", Way::List),
            (Method::POST, "/models", Way::Register),
            (Method::DELETE, "/models", Way::WrongMethod),
            (Method::GET, "/models/m", Way::Describe(m(), String::new())),
            (Method::GET, "/models/m/all", Way::Describe(m(), "all".into())),
            (Method::GET, "/models/m/1/set-default", Way::Describe(m(), "1".into())),
            (Method::PUT, "/models/m/1/set-default", Way::SetDefault(m(), "1".into())),
            (Method::PUT, "/models/m/1", Way::Scale(m(), "1".into())),
            (Method::DELETE, "/models/m", Way::Unregister(m(), String::new())),
            (Method::OPTIONS, "/models/m", Way::ManagementApi(m(), String::new())),
            (Method::PATCH, "/models/m", Way::WrongMethod),
            (Method::GET, "/models/m/1/x", Way::NotFound),
            (Method::GET, "/v1/models/m", Way::V1Ready(m())),
            (Method::POST, "/v1/models/m", Way::WrongMethod),
            (Method::GET, "/token", Way::Token),
            (Method::GET, "/workflows", Way::Workflows),
            (Method::GET, "/ping", Way::NotFound),
            (Method::POST, "/", Way::WrongMethod),
        ] {
            assert_eq!(way(MANAGEMENT, &method, path), expected, "{method} {path}");
        }
    }

    #[test]
    fn one_listener_may_be_several() {
        let both = Doors { inference: true, management: true, metrics: false };
        assert_eq!(way(both, &Method::GET, "/models"), Way::List);
        assert_eq!(way(both, &Method::POST, "/models/m/invoke"), predict("m", "", (None, None, true)));
        assert_eq!(way(both, &Method::GET, "/v1/models/m"), Way::V1Ready("m".into()));
        assert_eq!(way(METRICS, &Method::POST, "/metrics/x"), Way::Metrics);
        assert_eq!(way(METRICS, &Method::GET, "/ping"), Way::NotFound);
    }

    #[test]
    fn what_needs_which_token() {
        let purpose = |doors: Doors, method: Method, path: &str| way(doors, &method, path).purpose(doors);
        assert_eq!(purpose(INFERENCE, Method::GET, "/ping"), Some(Purpose::Inference));
        assert_eq!(purpose(INFERENCE, Method::GET, "/nowhere"), Some(Purpose::Inference));
        assert_eq!(purpose(INFERENCE, Method::OPTIONS, "/"), None);
        assert_eq!(purpose(INFERENCE, Method::POST, "/predictions/m"), Some(Purpose::Inference));
        assert_eq!(purpose(INFERENCE, Method::GET, "/v2/models/m/ready"), Some(Purpose::Inference));
        assert_eq!(purpose(INFERENCE, Method::POST, "/v2/repository/models/m/load"), Some(Purpose::Management));
        assert_eq!(purpose(INFERENCE, Method::GET, "/v2/logging"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::OPTIONS, "/models/m"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/workflows"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::DELETE, "/workflows/w"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/models"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/nowhere"), Some(Purpose::Management));
        assert_eq!(purpose(MANAGEMENT, Method::GET, "/token"), Some(Purpose::Renewal));
        assert_eq!(purpose(METRICS, Method::GET, "/metrics"), None);
        assert_eq!(purpose(METRICS, Method::GET, "/nowhere"), None);
    }
}
