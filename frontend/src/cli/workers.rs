//! The options of the processes that run models.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use regex::Regex;

use super::{WORKERS, positive_seconds, seconds, whole};

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
