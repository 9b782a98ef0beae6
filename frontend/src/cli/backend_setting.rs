//! One setting of all backends or of one: `--backend-config`.

use std::time::Duration;

use super::positive_seconds;

/// One `--backend-config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendSetting {
    /// The backend; `None` for all.
    pub backend: Option<String>,
    /// The setting's name.
    pub key: String,
    /// The setting's value.
    pub value: String,
}

/// Settings of shared memory and threads of Triton's Python backend, which have no effect here.
const NOT_NEEDED: [&str; 4] =
    ["shm-default-byte-size", "shm-growth-byte-size", "shm-region-prefix-name", "thread-pool-size"];

/// The backends of this server, whose settings are known.
const OWN: [&str; 4] = ["llamacpp", "onnxruntime", "python", "pytorch"];

/// The start timeout of Triton's Python backend, in seconds.
const PYTHON_TIMEOUT: &str = "stub-timeout-seconds";

/// The maximum batch size that auto-complete sets, a setting of every backend.
const MAX_BATCH_SIZE: &str = "default-max-batch-size";

impl BackendSetting {
    /// Returns a message with the reason why the setting has no effect.
    fn without_effect(&self) -> String {
        let Self { backend, key, .. } = self;
        let flag = match backend {
            Some(backend) => format!("--backend-config={backend},{key}"),
            None => format!("--backend-config={key}"),
        };
        let why = match (backend.as_deref(), key.as_str()) {
            (Some("python"), key) if NOT_NEEDED.contains(&key) || key.starts_with("shm-") => {
                "tensors are in shared memory that grows on demand".to_owned()
            }
            (Some("python"), _) => {
                format!("known settings of python are {PYTHON_TIMEOUT}, {MAX_BATCH_SIZE}")
            }
            (
                Some("onnxruntime"),
                "enable-global-threadpool" | "intra_op_thread_count" | "inter_op_thread_count",
            ) => "each instance is a process with its own threads; see --worker-threads, and the \
                  parameters intra_op_thread_count and inter_op_thread_count of a model"
                .to_owned(),
            _ => format!(
                "the known setting is {MAX_BATCH_SIZE}; only libraries of Triton's backends read \
                 others"
            ),
        };
        format!("{flag} has no effect: {why}")
    }

    /// Returns whether the setting has an effect, or may have one: a library of a backend in
    /// `--backend-directory` reads all settings.
    fn is_known(&self) -> bool {
        let is_other = self.backend.as_deref().is_some_and(|name| !OWN.contains(&name));
        self.key == MAX_BATCH_SIZE || self.is_python_start_timeout() || is_other
    }

    fn is_python_start_timeout(&self) -> bool {
        self.backend.as_deref() == Some("python") && self.key == PYTHON_TIMEOUT
    }

    /// Returns a warning if the setting has no effect.
    pub(super) fn warning(&self) -> Option<String> {
        (!self.is_known()).then(|| self.without_effect())
    }

    /// Returns the time limit for Python workers to load their models, if this setting sets it.
    pub(super) fn python_start_timeout(&self) -> Option<Duration> {
        self.is_python_start_timeout().then(|| positive_seconds(&self.value).ok()).flatten()
    }
}

/// Parses `KEY=VALUE` and `BACKEND,KEY=VALUE`.
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
        return Err(format!(
            "default-max-batch-size is '{value}'; allowed are whole numbers from 0 to {}",
            u32::MAX
        ));
    }
    if backend == Some("python") && key == PYTHON_TIMEOUT {
        positive_seconds(value)
            .map_err(|allowed| format!("{PYTHON_TIMEOUT} is '{value}'; {allowed}"))?;
    }
    Ok(BackendSetting {
        backend: backend.map(str::to_owned),
        key: key.to_owned(),
        value: value.to_owned(),
    })
}
