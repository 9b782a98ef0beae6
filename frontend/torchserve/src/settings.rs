//! TorchServe's `config.properties`, environment and command line, validated: a [`Settings`] value
//! needs no further checks.

mod address;
mod keys;
mod models;
mod read;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pharos::wire::sandbox::Permissions;
use pharos_listener::TlsFiles;
use pharos_os::threads;
use pharos_os::worker_user::WorkerUser;
use regex::Regex;

pub use keys::{Effect, KEYS, Key};
pub use models::{LoadModels, ModelProperties};
pub use read::Note;

/// The address of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The IP address and port.
    pub socket: SocketAddr,
    /// Whether the listener uses TLS, with the files of [`Settings::tls`].
    pub tls: bool,
}

/// The program that installs packages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pip {
    /// The interpreter that runs it.
    pub python: PathBuf,
    /// The user of the process; `None` for the user of this process.
    pub user: Option<Arc<WorkerUser>>,
    /// The sandbox for archives that came by request; `None` without sandboxes.
    pub sandbox: Option<PipSandbox>,
}

/// The sandbox of pip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipSandbox {
    /// The worker's executable, which restricts itself and becomes pip.
    pub worker: PathBuf,
    /// What pip may use besides the directories of the archive and of its packages.
    pub permissions: Permissions,
}

impl Default for Pip {
    fn default() -> Self {
        Self { python: "python3".into(), user: None, sandbox: None }
    }
}

/// Token authorization.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// The lifetime of a token.
    pub expiration: Duration,
    /// The file that the tokens are written to for the operator.
    pub file: PathBuf,
}

/// The CORS headers for browsers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// `access-control-allow-origin`.
    pub origin: Option<String>,
    /// `access-control-allow-methods`.
    pub methods: Option<String>,
    /// `access-control-allow-headers`.
    pub headers: Option<String>,
}

/// Limits on the lifetime of gRPC connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Age {
    /// `grpc_*_max_connection_age_ms`: the age after which clients must reconnect.
    pub age: Option<Duration>,
    /// `grpc_*_max_connection_age_grace_ms`: the time from then until the connection is closed.
    pub grace: Option<Duration>,
}

/// TorchServe's configuration.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The address for predictions.
    pub inference: Address,
    /// The address for management. If it equals [`Settings::inference`], one listener serves both.
    pub management: Address,
    /// The address for metrics; `None` with `enable_metrics_api=false`.
    pub metrics: Option<Address>,
    /// The address of `InferenceAPIsService`.
    pub grpc_inference: Address,
    /// The connection lifetime of `InferenceAPIsService`.
    pub grpc_inference_age: Age,
    /// The address of `ManagementAPIsService`.
    pub grpc_management: Address,
    /// The connection lifetime of `ManagementAPIsService`.
    pub grpc_management_age: Age,
    /// The TLS files; present if any address uses TLS.
    pub tls: Option<TlsFiles>,
    /// The CORS headers for browsers.
    pub cors: Cors,
    /// The largest request body, in bytes.
    pub max_request_size: u64,
    /// The largest response body, in bytes.
    pub max_response_size: u64,
    /// Token authorization; `None` if it is disabled.
    pub token: Option<Token>,
    /// Whether models can be registered and unregistered through the management API.
    pub model_api: bool,
    /// The headers for the id, the start and the end of a sequence.
    pub sequence_headers: [String; 3],

    /// The directory of model archives.
    pub model_store: Option<PathBuf>,
    /// The models to register at server start, unless a snapshot determines them.
    pub load_models: LoadModels,
    /// `model_snapshot`: the models to register at server start instead of
    /// [`Settings::load_models`], even if it is empty.
    pub snapshot: Option<Vec<ModelProperties>>,
    /// `models`: properties of single model versions.
    pub models: Vec<ModelProperties>,
    /// The patterns of URLs that archives may be loaded from.
    pub allowed_urls: Vec<Regex>,
    /// `install_py_dep_per_model`.
    pub install_requirements: bool,
    /// How packages are installed.
    pub pip: Pip,
    /// `default_workers_per_model`; 0 if it is not configured.
    pub configured_workers: u32,
    /// The ids of the GPUs that workers are distributed over.
    pub gpus: Vec<u32>,
    /// The most queued requests of a model version.
    pub job_queue_size: u32,
    /// The timeout of a batch, in seconds.
    pub default_response_timeout: u32,
    /// The timeout of loading a model, in seconds.
    pub default_startup_timeout: u32,
    /// The handler of archives that name none.
    pub default_handler: Option<String>,
    /// `service_envelope`.
    pub envelope: Option<String>,
    /// Whether workers decode bodies by their content type.
    pub decode_input_request: bool,
    /// Whether image handlers refuse very large images.
    pub limit_max_image_pixels: bool,
    /// The number in the name and id of the first worker.
    pub initial_worker_port: u16,
    /// The environment variables to hide from workers.
    pub blacklist_env_vars: Option<String>,

    /// `metrics_mode` (`log`, `prometheus` or `legacy`); `None` if not set.
    pub metrics_mode: Option<String>,
    /// `metrics_config`.
    pub metrics_config: Option<PathBuf>,
    /// `model_metrics_auto_detect`.
    pub metrics_auto_detect: bool,
    /// `disable_system_metrics`.
    pub disable_system_metrics: bool,
    /// `metric_time_interval`, in seconds.
    pub metric_time_interval: u32,

    /// Whether to write snapshots, and to start from the newest one.
    pub snapshots: bool,
    /// The configuration as read, for snapshots.
    pub properties: Vec<(String, String)>,
    /// The private directory of this server, with unpacked archives and the model repository.
    pub work_directory: PathBuf,
}

impl Settings {
    /// Returns the default number of workers of a model at server start: the configured one, else
    /// one for each GPU, else one for each CPU.
    pub fn default_workers(&self) -> u32 {
        match (self.configured_workers, u32::try_from(self.gpus.len()).unwrap_or(0)) {
            (0, 0) => u32::try_from(threads::processors()).unwrap_or(1),
            (0, gpus) => gpus,
            (workers, _) => workers,
        }
    }

    /// Returns the properties in `models` for a model version.
    pub fn model_properties(&self, name: &str, version: &str) -> Option<&ModelProperties> {
        self.models.iter().find(|said| said.name == name && said.version == version)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;
