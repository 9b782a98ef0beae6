//! What is said about models at the start: `load_models`, `models` and `model_snapshot`.

use serde_json::{Map, Value};

/// Which models are registered at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LoadModels {
    /// None.
    #[default]
    None,
    /// Everything in the model store.
    All,
    /// These: a name, if one is given, and where the archive is.
    Listed(Vec<(Option<String>, String)>),
}

impl LoadModels {
    /// `all`, `none`, or `[NAME=]URL` separated by `,`.
    pub(super) fn parse(text: &str) -> Self {
        let text = text.trim();
        match text.to_ascii_lowercase().as_str() {
            "" | "none" => return Self::None,
            "all" => return Self::All,
            _ => {}
        }
        let listed = text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| {
            match part.split_once('=') {
                // A URL may have a query.
                Some((name, url)) if !name.contains([':', '/']) => {
                    (Some(name.trim().to_owned()), url.trim().to_owned())
                }
                _ => (None, part.to_owned()),
            }
        });
        Self::Listed(listed.collect())
    }
}

/// What `models` or a snapshot says about one version of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelProperties {
    /// Of the model.
    pub name: String,
    /// Of the version.
    pub version: String,
    /// Whether requests without a version mean this one.
    pub default_version: bool,
    /// The archive.
    pub mar_name: Option<String>,
    /// See [`super::super::ModelYaml`], here and below.
    pub min_workers: Option<u32>,
    /// The most workers.
    pub max_workers: Option<u32>,
    /// Requests in a batch.
    pub batch_size: Option<u32>,
    /// Milliseconds that a batch waits for more requests.
    pub max_batch_delay: Option<u32>,
    /// Seconds for a batch.
    pub response_timeout: Option<u32>,
    /// Seconds for loading the model.
    pub startup_timeout: Option<u32>,
    /// `python` or `python3`.
    pub runtime_type: Option<String>,
}

/// What the JSON object of `key` says: names, below them versions, below them properties. What cannot be used is told to
/// `warn` and left out.
///
/// # Errors
/// It is no JSON object.
pub(super) fn parse(key: &str, text: &str, warn: &mut dyn FnMut(String)) -> Result<Vec<ModelProperties>, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("{key} is no JSON: {error}"))?;
    let Value::Object(models) = &value else { return Err(format!("{key} is no JSON object")) };
    // A snapshot has its models one level below.
    let models = match (key, models.get("models")) {
        ("model_snapshot", Some(Value::Object(models))) => models,
        ("model_snapshot", _) => return Err(format!("{key} has no object 'models'")),
        _ => models,
    };
    let mut all = Vec::new();
    for (name, versions) in models {
        let Value::Object(versions) = versions else {
            warn(format!("{key}: what it says about '{name}' is no object of versions and is ignored"));
            continue;
        };
        for (version, said) in versions {
            let Value::Object(said) = said else {
                warn(format!("{key}: what it says about version '{version}' of '{name}' is no object and is ignored"));
                continue;
            };
            all.push(properties((name, version), said, &mut |what| warn(format!("{key}: '{name}' {version}: {what}"))));
        }
    }
    Ok(all)
}

fn properties(
    (name, version): (&str, &str),
    said: &Map<String, Value>,
    warn: &mut dyn FnMut(String),
) -> ModelProperties {
    let mut properties = ModelProperties { name: name.to_owned(), version: version.to_owned(), ..Default::default() };
    for (key, value) in said {
        match key.as_str() {
            "defaultVersion" => properties.default_version = value.as_bool().unwrap_or(false),
            "runtimeType" => match value.as_str() {
                Some(runtime @ ("python" | "python3")) => properties.runtime_type = Some(runtime.to_owned()),
                _ => warn(format!("{key} is {value}; allowed are \"python\" and \"python3\"; it is ignored")),
            },
            "marName" => properties.mar_name = value.as_str().map(str::to_owned),
            _ => match (number_field(&mut properties, key), number(value)) {
                (Some(field), Some(number)) => *field = Some(number),
                (Some(_), None) => warn(format!("{key} is {value}; allowed are whole numbers; it is ignored")),
                (None, _) if NO_EFFECT.contains(&key.as_str()) => {}
                (None, _) => warn(format!("{key} is not known and is ignored")),
            },
        }
    }
    properties
}

/// What TorchServe writes there too; nothing here depends on it.
const NO_EFFECT: [&str; 8] = [
    "parallelLevel",
    "parallelType",
    "deviceType",
    "deviceIds",
    "jobQueueSize",
    "clientTimeoutInMills",
    "maxRetryTimeoutInSec",
    "useJobTicket",
];

fn number_field<'a>(properties: &'a mut ModelProperties, key: &str) -> Option<&'a mut Option<u32>> {
    match key {
        "minWorkers" => Some(&mut properties.min_workers),
        "maxWorkers" => Some(&mut properties.max_workers),
        "batchSize" => Some(&mut properties.batch_size),
        "maxBatchDelay" => Some(&mut properties.max_batch_delay),
        "responseTimeout" => Some(&mut properties.response_timeout),
        "startupTimeout" => Some(&mut properties.startup_timeout),
        _ => None,
    }
}

/// A whole number, also as a text: snapshots that were written by hand have both.
fn number(value: &Value) -> Option<u32> {
    match value {
        Value::Number(number) => number.as_u64().and_then(|number| u32::try_from(number).ok()),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}
