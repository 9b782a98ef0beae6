//! `model-config.yaml`: parses the keys that the frontend uses. The handler gets the whole file (`context.model_yaml_config`).

use std::path::Path;

use serde_json::{Map, Value};

/// The largest size of the file, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// TorchServe's keys.
const KEYS: [&str; 25] = [
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
    "deviceType",
    "deviceIds",
    "parallelType",
    "parallelLevel",
    "torchrun",
    "maxRetryTimeoutInSec",
    "clientTimeoutInMills",
    "jobQueueSize",
    "useJobTicket",
    "sequenceMaxIdleMSec",
    "sequenceTimeoutMSec",
    "maxSequenceJobQueueSize",
    "maxNumSequence",
    "continuousBatching",
    "sequenceBatching",
    "asyncCommunication",
    "useVenv",
    "streaming",
    "micro_batching",
];

/// TorchServe's keys that have no effect here, and the reasons.
const NO_EFFECT: [(&str, &str); 5] = [
    ("useVenv", "requirements are installed separately for each model, and all models use one interpreter"),
    ("parallelType", "a worker is one process, which may use all GPUs that it sees"),
    ("parallelLevel", "a worker is one process, which may use all GPUs that it sees"),
    ("torchrun", "a worker is one process, which may use all GPUs that it sees"),
    ("sequenceTimeoutMSec", "a sequence ends explicitly or after sequenceMaxIdleMSec without requests"),
];

/// The keys that the frontend uses. A key that is missing or has the wrong type is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelYaml {
    /// The number of workers that are kept running.
    pub min_workers: Option<u32>,
    /// The most workers.
    pub max_workers: Option<u32>,
    /// The most requests in a batch.
    pub batch_size: Option<u32>,
    /// How long a batch waits for more requests, in milliseconds.
    pub max_batch_delay: Option<u32>,
    /// The timeout of a batch, in seconds.
    pub response_timeout: Option<u32>,
    /// The timeout of loading the model, in seconds.
    pub startup_timeout: Option<u32>,
    /// `cpu` or `gpu`.
    pub device_type: Option<String>,
    /// The ids of GPUs.
    pub device_ids: Option<Vec<u32>>,
    /// `pp`, `tp`, `pptp` or `custom`.
    pub parallel_type: Option<String>,
    /// The number of processes of a worker.
    pub parallel_level: Option<u32>,
    /// How long a worker that dies is restarted, in seconds.
    pub max_retry_timeout: Option<u32>,
    /// The timeout of a request, in milliseconds.
    pub client_timeout: Option<u32>,
    /// The most queued requests.
    pub job_queue_size: Option<u32>,
    /// Accept requests only while a worker is idle.
    pub use_job_ticket: Option<bool>,
    /// Milliseconds without requests after which a sequence ends.
    pub sequence_max_idle: Option<u32>,
    /// `sequenceTimeoutMSec`, which has no effect.
    pub sequence_timeout: Option<u32>,
    /// The most queued requests of one sequence.
    pub max_sequence_job_queue_size: Option<u32>,
    /// The most concurrent sequences.
    pub max_num_sequence: Option<u32>,
    /// Requests stay in their batch until they are complete (continuous batching).
    pub continuous_batching: Option<bool>,
    /// All requests of a sequence go to one worker, in order.
    pub sequence_batching: Option<bool>,
    /// The handler is asynchronous.
    pub async_communication: Option<bool>,
    /// The model has a separate virtual environment.
    pub use_venv: Option<bool>,
    /// Whether the handler streams its response; a key of this server only.
    pub streaming: Option<bool>,
    /// The whole file; an empty object if the file is empty or missing.
    pub whole: Value,
}

impl ModelYaml {
    /// Reads a file.
    ///
    /// # Errors
    /// The file is missing, too long or not YAML. Reports errors of single keys to `warn` instead.
    pub fn read(path: &Path, warn: &mut dyn FnMut(String)) -> Result<Self, String> {
        let shown = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let bytes = std::fs::metadata(path).map_err(|error| format!("cannot read {shown}: {error}"))?.len();
        if bytes > MAX_BYTES {
            return Err(format!("{shown} has {bytes} bytes; at most {MAX_BYTES} are allowed"));
        }
        let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {shown}: {error}"))?;
        Self::parse(&text, warn).map_err(|error| format!("{shown} is invalid: {error}"))
    }

    /// Parses the text of a file.
    ///
    /// # Errors
    /// The text is not YAML, or not a mapping.
    pub fn parse(text: &str, warn: &mut dyn FnMut(String)) -> Result<Self, String> {
        let mut document: serde_yaml::Value = serde_yaml::from_str(text).map_err(|error| error.to_string())?;
        document.apply_merge().map_err(|error| error.to_string())?;
        let whole: Value = serde_yaml::from_value(document).map_err(|error| error.to_string())?;
        let mut yaml = Self::default();
        match &whole {
            Value::Null => {}
            Value::Object(keys) => yaml.take(keys, warn),
            _ => return Err("expected a mapping of keys to values".to_owned()),
        }
        yaml.whole = if whole.is_null() { Value::Object(Map::new()) } else { whole };
        Ok(yaml)
    }

    fn take(&mut self, keys: &Map<String, Value>, warn: &mut dyn FnMut(String)) {
        for (key, value) in keys {
            if let Err(allowed) = self.take_one(key, value) {
                warn(format!("{key} is {value}; allowed are {allowed}; ignored"));
            }
            let meant = |known: &&&str| *known != key && known.eq_ignore_ascii_case(key);
            if let Some(meant) = KEYS.iter().find(meant) {
                warn(format!("unknown key {key}; did you mean {meant}?"));
            }
            let no_effect = NO_EFFECT.iter().find(|(name, _)| name == key);
            if let Some((_, why)) = no_effect.filter(|_| !matches!(value, Value::Null | Value::Bool(false))) {
                warn(format!("{key} is {value}, which has no effect: {why}"));
            }
        }
    }

    /// # Errors
    /// The allowed values, if this value is invalid.
    fn take_one(&mut self, key: &str, value: &Value) -> Result<(), &'static str> {
        if let Some(number) = self.number(key) {
            *number = Some(whole_number(value).ok_or("whole numbers from 0 to 4294967295")?);
            return Ok(());
        }
        if let Some(flag) = self.flag(key) {
            *flag = Some(value.as_bool().ok_or("true and false")?);
            return Ok(());
        }
        self.take_other(key, value)
    }

    fn number(&mut self, key: &str) -> Option<&mut Option<u32>> {
        Some(match key {
            "minWorkers" => &mut self.min_workers,
            "maxWorkers" => &mut self.max_workers,
            "batchSize" => &mut self.batch_size,
            "maxBatchDelay" => &mut self.max_batch_delay,
            "responseTimeout" => &mut self.response_timeout,
            "startupTimeout" => &mut self.startup_timeout,
            "parallelLevel" => &mut self.parallel_level,
            "maxRetryTimeoutInSec" => &mut self.max_retry_timeout,
            "clientTimeoutInMills" => &mut self.client_timeout,
            "jobQueueSize" => &mut self.job_queue_size,
            "sequenceMaxIdleMSec" => &mut self.sequence_max_idle,
            "sequenceTimeoutMSec" => &mut self.sequence_timeout,
            "maxSequenceJobQueueSize" => &mut self.max_sequence_job_queue_size,
            "maxNumSequence" => &mut self.max_num_sequence,
            _ => return None,
        })
    }

    fn flag(&mut self, key: &str) -> Option<&mut Option<bool>> {
        Some(match key {
            "useJobTicket" => &mut self.use_job_ticket,
            "continuousBatching" => &mut self.continuous_batching,
            "sequenceBatching" => &mut self.sequence_batching,
            "asyncCommunication" => &mut self.async_communication,
            "useVenv" => &mut self.use_venv,
            "streaming" => &mut self.streaming,
            _ => return None,
        })
    }

    fn take_other(&mut self, key: &str, value: &Value) -> Result<(), &'static str> {
        let named = |names: &[&'static str]| value.as_str().filter(|text| names.contains(text)).map(str::to_owned);
        match key {
            "deviceType" => self.device_type = Some(named(&["cpu", "gpu"]).ok_or("cpu and gpu")?),
            "parallelType" => {
                let known = named(&["pp", "tp", "pptp", "custom"]);
                self.parallel_type = Some(known.ok_or("pp, tp, pptp and custom")?);
            }
            "deviceIds" => {
                let ids = value.as_array().and_then(|ids| ids.iter().map(whole_number).collect::<Option<Vec<u32>>>());
                self.device_ids = Some(ids.ok_or("lists of whole numbers")?);
            }
            _ => {}
        }
        Ok(())
    }
}

fn whole_number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| u32::try_from(number).ok())
}
