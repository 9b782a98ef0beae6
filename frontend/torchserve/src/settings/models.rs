//! Parses the configuration of models: `load_models`, `models` and `model_snapshot`.

use serde::{Deserialize as _, Serialize};
use serde_json::{Map, Value};

use crate::ModelParameters;

/// The models to register at server start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LoadModels {
    /// None.
    #[default]
    None,
    /// All archives in the model store.
    All,
    /// These archives: an optional name, and the URL.
    Listed(Vec<(Option<String>, String)>),
}

impl LoadModels {
    /// Parses `all`, `none`, or `[NAME=]URL` separated by `,`.
    pub(super) fn parse(text: &str) -> Self {
        match text.trim().to_ascii_lowercase().as_str() {
            "" | "none" => return Self::None,
            "all" => return Self::All,
            _ => {}
        }
        let listed = text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(|part| {
            match part.split_once('=') {
                // A `=` in the query of a URL does not separate a name.
                Some((name, url)) if !name.contains([':', '/']) => {
                    (Some(name.trim().to_owned()), url.trim().to_owned())
                }
                _ => (None, part.to_owned()),
            }
        });
        Self::Listed(listed.collect())
    }
}

/// The properties of a model version in `models` or a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelProperties {
    /// The model's name.
    #[serde(skip)]
    pub name: String,
    /// The version.
    #[serde(skip)]
    pub version: String,
    /// Whether this is the default version.
    pub default_version: bool,
    /// The archive's name in the model store, or its URL.
    pub mar_name: Option<String>,
    /// The parameters that apply where `model-config.yaml` sets none.
    #[serde(flatten)]
    pub model: ModelParameters,
    /// `python` or `python3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_type: Option<String>,
}

/// Parses the JSON object of `key`: names map to versions, which map to properties. Reports invalid
/// entries to `warn` and skips them.
///
/// # Errors
/// The text is not a JSON object.
pub(super) fn parse(
    key: &str,
    text: &str,
    warn: &mut dyn FnMut(String),
) -> Result<Vec<ModelProperties>, String> {
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("{key} is not valid JSON: {error}"))?;
    let Value::Object(models) = &value else { return Err(format!("{key} is not a JSON object")) };
    // In a snapshot, the models are one level deeper.
    let models = match (key, models.get("models")) {
        ("model_snapshot", Some(Value::Object(models))) => models,
        ("model_snapshot", _) => return Err(format!("{key} has no object 'models'")),
        _ => models,
    };
    let mut all = Vec::new();
    for (name, versions) in models {
        let Value::Object(versions) = versions else {
            warn(format!("{key}: ignored the entry '{name}', which is not an object of versions"));
            continue;
        };
        for (version, said) in versions {
            let Value::Object(said) = said else {
                warn(format!(
                    "{key}: ignored version '{version}' of '{name}', which is not an object"
                ));
                continue;
            };
            let mut warn_of_version = |what| warn(format!("{key}: '{name}' {version}: {what}"));
            // A snapshot always has these properties.
            if key != "model_snapshot" {
                for unused in said.keys().filter(|property| NO_EFFECT.contains(&property.as_str()))
                {
                    warn_of_version(format!(
                        "{unused} has no effect here; set it in the archive's model-config.yaml"
                    ));
                }
            }
            all.push(properties(name, version, said, &mut warn_of_version));
        }
    }
    Ok(all)
}

fn properties(
    name: &str,
    version: &str,
    said: &Map<String, Value>,
    warn: &mut dyn FnMut(String),
) -> ModelProperties {
    let mut properties = ModelProperties {
        name: name.to_owned(),
        version: version.to_owned(),
        ..Default::default()
    };
    let mut numbers = Map::new();
    for (key, value) in said {
        match key.as_str() {
            "defaultVersion" => properties.default_version = value.as_bool().unwrap_or(false),
            "runtimeType" => match value.as_str() {
                Some(runtime @ ("python" | "python3")) => {
                    properties.runtime_type = Some(runtime.to_owned())
                }
                _ => warn(format!(
                    "{key} is {value}; allowed are \"python\" and \"python3\"; ignored"
                )),
            },
            "marName" => properties.mar_name = value.as_str().map(str::to_owned),
            name if ModelParameters::KEYS.contains(&name) => match number(value) {
                Some(number) => _ = numbers.insert(key.clone(), number.into()),
                None => warn(format!(
                    "{key} is {value}; allowed are whole numbers from 0 to {}; ignored",
                    u32::MAX
                )),
            },
            name if NO_EFFECT.contains(&name) => {}
            _ => warn(format!("unknown key {key}; allowed are {KEYS}; ignored")),
        }
    }
    properties.model = ModelParameters::deserialize(Value::Object(numbers)).unwrap_or_default();
    properties
}

/// The properties that have an effect.
const KEYS: &str = "defaultVersion, marName, runtimeType, minWorkers, maxWorkers, batchSize, \
                    maxBatchDelay, responseTimeout and startupTimeout";

/// Properties of snapshots without effect: the archive's `model-config.yaml` sets them.
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

/// Parses a whole number. Hand-written snapshots may contain numbers as strings.
fn number(value: &Value) -> Option<u32> {
    match value {
        Value::Number(number) => number.as_u64().and_then(|number| u32::try_from(number).ok()),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    }
}
