//! The options of the processes that run models, and the settings of their backends.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use regex::Regex;

use super::{Models, WORKERS, positive_seconds, seconds, whole};

/// One `--backend-config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSetting {
    /// The backend that it is for; `None` for all.
    pub backend: Option<String>,
    /// What is set.
    pub key: String,
    /// To what.
    pub value: String,
}

/// The processes that run models.
#[derive(Clone, Debug, Args)]
pub struct Workers {
    /// The worker executable [default: pharos-worker beside this executable]
    #[arg(long, value_name = "FILE", env = "PHAROS_WORKER_BINARY", help_heading = WORKERS)]
    pub worker_binary: Option<PathBuf>,
    /// The ONNX Runtime library [default: ORT_DYLIB_PATH, else that of the Python on the PATH; without one, the embedded
    /// runtime serves ONNX models]
    #[arg(long, value_name = "FILE", env = "PHAROS_ONNXRUNTIME_LIBRARY", help_heading = WORKERS)]
    pub onnxruntime_library: Option<PathBuf>,
    /// Seconds that a worker may take to load its model
    #[arg(long, value_name = "SECONDS", default_value = "300", env = "PHAROS_WORKER_START_TIMEOUT_SECS", value_parser = positive_seconds, help_heading = WORKERS)]
    pub worker_start_timeout_secs: Duration,
    /// The longest pause in seconds before a worker that keeps dying is started again; the first is 0.1 s, each is twice the last
    #[arg(long, value_name = "SECONDS", default_value = "30", env = "PHAROS_WORKER_MAX_BACKOFF_SECS", value_parser = positive_seconds, help_heading = WORKERS)]
    pub worker_max_backoff_secs: Duration,
    /// The longest time in seconds that a request waits while no instance of its model is ready because all are started again
    #[arg(long, value_name = "SECONDS", default_value = "60", env = "PHAROS_WORKER_MAX_WAIT_SECS", value_parser = seconds, help_heading = WORKERS)]
    pub worker_max_wait_secs: Duration,
    /// Seconds that a worker may take to execute one batch; 0 for no limit
    #[arg(long, value_name = "SECONDS", default_value = "0", env = "PHAROS_WORKER_EXECUTION_TIMEOUT_SECS", value_parser = seconds, help_heading = WORKERS)]
    pub worker_execution_timeout_secs: Duration,
    /// Threads that one instance computes with [default: the cores divided by the instances]
    #[arg(long, value_name = "N", env = "PHAROS_WORKER_THREADS", value_parser = whole(1..=1024u32), help_heading = WORKERS)]
    pub worker_threads: Option<u32>,
    /// The Python of models that bring none with them; it needs the package pharos-worker [default: python3 of the PATH]
    #[arg(long, value_name = "FILE", env = "PHAROS_PYTHON", help_heading = WORKERS)]
    pub python: Option<PathBuf>,
    /// Variables of the environment that workers do not get: those whose whole name matches this regular expression
    #[arg(long, value_name = "REGEX", env = "PHAROS_WORKER_HIDDEN_VARIABLES", value_parser = whole_name, help_heading = WORKERS)]
    pub worker_hidden_variables: Option<Regex>,
    /// Where further backends are: DIR/NAME/libpharos_NAME.so, DIR/NAME/pharos-worker-NAME or DIR/NAME/model.py [default:
    /// backends beside this executable, if that is there]
    #[arg(long, value_name = "DIR", env = "PHAROS_BACKEND_DIRECTORY", help_heading = WORKERS)]
    pub backend_directory: Option<PathBuf>,
    /// Where archives that EXECUTION_ENV_PATH names are unpacked, once for all who use them; what is unused for two weeks goes
    /// [default: pharos/environments in the user's cache folder]
    #[arg(long, value_name = "DIR", env = "PHAROS_ENVIRONMENT_CACHE_DIRECTORY", help_heading = WORKERS)]
    pub environment_cache_directory: Option<PathBuf>,
}

/// A regular expression for whole names.
fn whole_name(text: &str) -> Result<Regex, String> {
    Regex::new(&format!("^(?:{text})$")).map_err(|error| format!("it is no regular expression: {error}"))
}

/// What Triton's Python backend is told about its shared memory and threads; here they are as they are needed.
const NOT_NEEDED: [&str; 4] =
    ["shm-default-byte-size", "shm-growth-byte-size", "shm-region-prefix-name", "thread-pool-size"];

/// How long Triton's Python backend waits for its processes.
const PYTHON_TIMEOUT: &str = "stub-timeout-seconds";

/// The batch size that auto-complete gives, a setting of every backend.
const MAX_BATCH_SIZE: &str = "default-max-batch-size";

impl BackendSetting {
    /// Why it has no effect, for a setting that has none.
    fn without_effect(&self) -> String {
        let Self { backend, key, .. } = self;
        let flag = match backend {
            Some(backend) => format!("--backend-config={backend},{key}"),
            None => format!("--backend-config={key}"),
        };
        let why = match (backend.as_deref(), key.as_str()) {
            (Some("python"), key) if NOT_NEEDED.contains(&key) || key.starts_with("shm-") => {
                "tensors are in shared memory that grows as it is used".to_owned()
            }
            (Some("python"), _) => format!("known settings of python are {PYTHON_TIMEOUT}, {MAX_BATCH_SIZE}"),
            (Some("onnxruntime"), "enable-global-threadpool" | "intra_op_thread_count" | "inter_op_thread_count") => {
                "each instance is a process with its own threads; see --worker-threads, and the parameters \
                 intra_op_thread_count and inter_op_thread_count of a model"
                    .to_owned()
            }
            (Some("tensorflow" | "tensorrt" | "openvino" | "dali"), _) => {
                "this backend is not part of the server; --backend-directory adds backends".to_owned()
            }
            _ => format!("the known setting is {MAX_BATCH_SIZE}"),
        };
        format!("{flag} has no effect: {why}")
    }
}

impl Models {
    /// The settings of the Python backend, the last given of equals first.
    fn python_settings(&self) -> impl Iterator<Item = &BackendSetting> {
        self.backend_config.iter().rev().filter(|setting| setting.backend.as_deref() == Some("python"))
    }

    /// How long Python workers may take to load their models, if that is said for them alone
    /// (`--backend-config=python,stub-timeout-seconds=N`).
    pub fn python_start_timeout(&self) -> Option<Duration> {
        let mut named = self.python_settings().filter(|setting| setting.key == PYTHON_TIMEOUT);
        named.next().and_then(|setting| positive_seconds(&setting.value).ok())
    }

    /// The settings of backends that have no effect here, a sentence each.
    pub(super) fn backend_warnings(&self) -> Vec<String> {
        let known = |setting: &BackendSetting| match (setting.backend.as_deref(), setting.key.as_str()) {
            (_, MAX_BATCH_SIZE) => true,
            (backend, key) => backend == Some("python") && key == PYTHON_TIMEOUT,
        };
        self.backend_config.iter().filter(|setting| !known(setting)).map(BackendSetting::without_effect).collect()
    }
}

pub(super) fn backend_setting(text: &str) -> Result<BackendSetting, String> {
    let form = "allowed are KEY=VALUE and BACKEND,KEY=VALUE, for example default-max-batch-size=8";
    let (backend, setting) = match text.split_once(',') {
        Some((backend, setting)) => (Some(backend), setting),
        None => (None, text),
    };
    let (key, value) = setting.split_once('=').ok_or(form)?;
    if key.is_empty() || value.is_empty() || backend.is_some_and(str::is_empty) {
        return Err(form.to_owned());
    }
    if key == MAX_BATCH_SIZE && value.parse::<u32>().is_err() {
        return Err(format!("default-max-batch-size is '{value}'; allowed are whole numbers from 0 to {}", u32::MAX));
    }
    if backend == Some("python") && key == PYTHON_TIMEOUT {
        positive_seconds(value).map_err(|allowed| format!("{PYTHON_TIMEOUT} is '{value}'; {allowed}"))?;
    }
    Ok(BackendSetting { backend: backend.map(str::to_owned), key: key.to_owned(), value: value.to_owned() })
}
