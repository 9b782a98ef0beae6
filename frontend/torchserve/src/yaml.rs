//! `model-config.yaml`: parses the keys that the frontend uses. The handler gets the whole file
//! (`context.model_yaml_config`).

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::ModelParameters;

/// The largest size of the file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The most opening brackets in the file. The parser takes a time that grows with the square of
/// nested brackets, before it refuses their depth.
const MAX_BRACKETS: usize = 4096;

/// The values that a key allows.
#[derive(Clone, Copy)]
enum Allowed {
    /// Whole numbers.
    Number,
    /// Lists of whole numbers.
    Numbers,
    /// `true` and `false`.
    Flag,
    /// These words; the text lists them.
    Words(&'static [&'static str], &'static str),
    /// All values; the frontend does not use the key.
    All,
}

impl Allowed {
    fn allows(self, value: &Value) -> bool {
        let number =
            |value: &Value| value.as_u64().is_some_and(|number| u32::try_from(number).is_ok());
        match self {
            Self::Number => number(value),
            Self::Numbers => value.as_array().is_some_and(|all| all.iter().all(number)),
            Self::Flag => value.is_boolean(),
            Self::Words(words, _) => value.as_str().is_some_and(|text| words.contains(&text)),
            Self::All => true,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Number => "whole numbers from 0 to 4294967295",
            Self::Numbers => "lists of whole numbers",
            Self::Flag => "true and false",
            Self::Words(_, text) => text,
            Self::All => "all values",
        }
    }
}

/// TorchServe's keys, and `streaming`, a key of this server only.
const KEYS: [(&str, Allowed); 25] = [
    ("minWorkers", Allowed::Number),
    ("maxWorkers", Allowed::Number),
    ("batchSize", Allowed::Number),
    ("maxBatchDelay", Allowed::Number),
    ("responseTimeout", Allowed::Number),
    ("startupTimeout", Allowed::Number),
    ("deviceType", Allowed::Words(&["cpu", "gpu"], "cpu and gpu")),
    ("deviceIds", Allowed::Numbers),
    ("parallelType", Allowed::Words(&["pp", "tp", "pptp", "custom"], "pp, tp, pptp and custom")),
    ("parallelLevel", Allowed::Number),
    ("torchrun", Allowed::All),
    ("maxRetryTimeoutInSec", Allowed::Number),
    ("clientTimeoutInMills", Allowed::Number),
    ("jobQueueSize", Allowed::Number),
    ("useJobTicket", Allowed::Flag),
    ("sequenceMaxIdleMSec", Allowed::Number),
    ("sequenceTimeoutMSec", Allowed::Number),
    ("maxSequenceJobQueueSize", Allowed::Number),
    ("maxNumSequence", Allowed::Number),
    ("continuousBatching", Allowed::Flag),
    ("sequenceBatching", Allowed::Flag),
    ("asyncCommunication", Allowed::Flag),
    ("useVenv", Allowed::Flag),
    ("streaming", Allowed::Flag),
    ("micro_batching", Allowed::All),
];

/// TorchServe's keys that have no effect here, and the reasons.
const NO_EFFECT: [(&str, &str); 5] = [
    (
        "useVenv",
        "requirements are installed separately for each model, and all models use one interpreter",
    ),
    ("parallelType", "a worker is one process, which may use all GPUs that it sees"),
    ("parallelLevel", "a worker is one process, which may use all GPUs that it sees"),
    ("torchrun", "a worker is one process, which may use all GPUs that it sees"),
    (
        "sequenceTimeoutMSec",
        "a sequence ends explicitly or after sequenceMaxIdleMSec without requests",
    ),
];

/// The keys that the frontend uses. A key that is missing or has the wrong type is `None`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelYaml {
    /// The parameters that a registration may replace.
    #[serde(flatten)]
    pub model: ModelParameters,
    /// `cpu` or `gpu`.
    pub device_type: Option<String>,
    /// The ids of GPUs.
    pub device_ids: Option<Vec<u32>>,
    /// `pp`, `tp`, `pptp` or `custom`.
    pub parallel_type: Option<String>,
    /// The number of processes of a worker.
    pub parallel_level: Option<u32>,
    /// The time for which a worker that dies is restarted, in seconds.
    #[serde(rename = "maxRetryTimeoutInSec")]
    pub max_retry_timeout: Option<u32>,
    /// The timeout of a request, in milliseconds.
    #[serde(rename = "clientTimeoutInMills")]
    pub client_timeout: Option<u32>,
    /// The most queued requests.
    pub job_queue_size: Option<u32>,
    /// Accept requests only while a worker is idle.
    pub use_job_ticket: Option<bool>,
    /// Milliseconds without requests after which a sequence ends.
    #[serde(rename = "sequenceMaxIdleMSec")]
    pub sequence_max_idle: Option<u32>,
    /// `sequenceTimeoutMSec`, which has no effect.
    #[serde(rename = "sequenceTimeoutMSec")]
    pub sequence_timeout: Option<u32>,
    /// The most queued requests of one sequence.
    pub max_sequence_job_queue_size: Option<u32>,
    /// The most concurrent sequences.
    pub max_num_sequence: Option<u32>,
    /// Requests stay in their batch until they are complete (continuous batching).
    pub continuous_batching: Option<bool>,
    /// All requests of a sequence go to one worker, in order.
    pub sequence_batching: Option<bool>,
    /// The model has a separate virtual environment.
    pub use_venv: Option<bool>,
    /// Whether the handler streams its response; a key of this server only.
    pub streaming: Option<bool>,
    /// The whole file; an empty object if the file is empty or missing.
    #[serde(skip)]
    pub whole: Value,
}

impl ModelYaml {
    /// Reads a file.
    ///
    /// # Errors
    /// The file is missing, too long or not YAML. Reports errors of single keys to `warn` instead.
    pub fn read(path: &Path, warn: &mut dyn FnMut(String)) -> Result<Self, String> {
        let shown = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes =
            std::fs::metadata(path).map_err(|error| format!("cannot read {shown}: {error}"))?.len();
        if bytes > MAX_BYTES {
            return Err(format!("{shown} has {bytes} bytes; at most {MAX_BYTES} are allowed"));
        }
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("cannot read {shown}: {error}"))?;
        Self::parse(&text, warn).map_err(|error| format!("{shown} is invalid: {error}"))
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// The text is not YAML, or not a mapping.
    pub fn parse(text: &str, warn: &mut dyn FnMut(String)) -> Result<Self, String> {
        let brackets = text.bytes().filter(|byte| b"[{".contains(byte)).count();
        if brackets > MAX_BRACKETS {
            return Err(format!(
                "it has {brackets} opening brackets; at most {MAX_BRACKETS} are allowed"
            ));
        }
        let mut document: serde_yaml::Value =
            serde_yaml::from_str(text).map_err(|error| error.to_string())?;
        document.apply_merge().map_err(|error| error.to_string())?;
        let whole = match serde_yaml::from_value(document).map_err(|error| error.to_string())? {
            Value::Null => Value::Object(Map::new()),
            whole => whole,
        };
        let Value::Object(keys) = &whole else {
            return Err("expected a mapping of keys to values".to_owned());
        };
        let yaml = Self::deserialize(Value::Object(usable(keys, warn)))
            .map_err(|error| error.to_string())?;
        Ok(Self { whole, ..yaml })
    }
}

/// Returns the known keys with allowed values. Reports the others that are probably mistakes, and
/// keys without effect, to `warn`.
fn usable(keys: &Map<String, Value>, warn: &mut dyn FnMut(String)) -> Map<String, Value> {
    let mut usable = Map::new();
    for (key, value) in keys {
        match KEYS.iter().find(|(known, _)| known == key) {
            Some((_, allowed)) if allowed.allows(value) => {
                _ = usable.insert(key.clone(), value.clone())
            }
            Some((_, allowed)) => {
                warn(format!("{key} is {value}; allowed are {}; ignored", allowed.as_str()))
            }
            None => {
                if let Some((meant, _)) =
                    KEYS.iter().find(|(known, _)| known.eq_ignore_ascii_case(key))
                {
                    warn(format!("unknown key {key}; did you mean {meant}?"));
                }
            }
        }
        let no_effect = NO_EFFECT.iter().find(|(name, _)| name == key);
        if let Some((_, why)) =
            no_effect.filter(|_| !matches!(value, Value::Null | Value::Bool(false)))
        {
            warn(format!("{key} is {value}, which has no effect: {why}"));
        }
    }
    usable
}
