//! What `config.properties`, the environment and the command line of TorchServe say, checked: whatever is in a [`Settings`]
//! can be used as it is.

mod address;
mod keys;
mod models;
mod read;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use regex::Regex;

pub use keys::{Effect, KEYS, Key};
pub use models::{LoadModels, ModelProperties};
pub use read::Noted;

/// Where a listener listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// Address and port.
    pub socket: SocketAddr,
    /// Whether it speaks TLS, with the files of [`Settings::tls`].
    pub tls: bool,
}

/// How requests are let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// How long a token is good.
    pub expiration: Duration,
    /// Where the tokens are written for the operator.
    pub file: PathBuf,
}

/// The files of TLS, both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsPaths {
    /// The server's certificate and those that it leads to.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
}

/// What browsers of other origins may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cors {
    /// `access-control-allow-origin`.
    pub origin: Option<String>,
    /// `access-control-allow-methods`.
    pub methods: Option<String>,
    /// `access-control-allow-headers`.
    pub headers: Option<String>,
}

/// How long connections of gRPC live: until asked to go, and from then until they are closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Age {
    /// `grpc_*_max_connection_age_ms`.
    pub age: Option<Duration>,
    /// `grpc_*_max_connection_age_grace_ms`.
    pub grace: Option<Duration>,
}

/// Everything that TorchServe's routes of configuration say.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Predictions.
    pub inference: Address,
    /// Management; if it equals [`Settings::inference`], one listener serves both.
    pub management: Address,
    /// Metrics; `None` with `enable_metrics_api=false`.
    pub metrics: Option<Address>,
    /// `InferenceAPIsService`.
    pub grpc_inference: Address,
    /// Connections of it.
    pub grpc_inference_age: Age,
    /// `ManagementAPIsService`.
    pub grpc_management: Address,
    /// Connections of it.
    pub grpc_management_age: Age,
    /// Present if any address speaks TLS.
    pub tls: Option<TlsPaths>,
    /// What browsers of other origins may do.
    pub cors: Cors,
    /// The most bytes of a request's body.
    pub max_request_size: u64,
    /// The most bytes of a response's body.
    pub max_response_size: u64,
    /// `None`: no token is asked for.
    pub token: Option<Token>,
    /// Whether models can be registered and unregistered through the management API.
    pub model_api: bool,
    /// Whether `/v2` answers as with `ts_open_inference_protocol=true`.
    pub open_inference_protocol: bool,
    /// The names of the headers that tell a sequence, its start and its end.
    pub sequence_headers: [String; 3],

    /// Where archives are looked for by name.
    pub model_store: Option<PathBuf>,
    /// What is registered at the start, unless a snapshot says.
    pub load_models: LoadModels,
    /// `model_snapshot`: what is registered at the start in place of [`Settings::load_models`].
    pub snapshot: Vec<ModelProperties>,
    /// `models`: what is said about single models and versions.
    pub models: Vec<ModelProperties>,
    /// From where archives may be fetched.
    pub allowed_urls: Vec<Regex>,
    /// `install_py_dep_per_model`.
    pub install_requirements: bool,
    /// The interpreter that installs them.
    pub python: PathBuf,
    /// `default_workers_per_model`; 0 if it is not configured.
    pub configured_workers: u32,
    /// The numbers of the GPUs that workers are spread over.
    pub gpus: Vec<u32>,
    /// Requests that may wait for one model version.
    pub job_queue_size: u32,
    /// For a batch.
    pub default_response_timeout: u32,
    /// For loading a model.
    pub default_startup_timeout: u32,
    /// For unregistering.
    pub unregister_model_timeout: u32,
    /// The handler of archives that name none.
    pub default_handler: Option<String>,
    /// `service_envelope`.
    pub envelope: Option<String>,
    /// Whether workers decode bodies by their content type.
    pub decode_input_request: bool,
    /// Whether handlers of images refuse the largest.
    pub limit_max_image_pixels: bool,
    /// The number that the first worker's name and id have.
    pub initial_worker_port: u16,
    /// Variables of the environment that workers do not see.
    pub blacklist_env_vars: Option<String>,

    /// `metrics_mode` (`log`, `prometheus` or `legacy`); `None` if it is not said.
    pub metrics_mode: Option<String>,
    /// `metrics_config`.
    pub metrics_config: Option<PathBuf>,
    /// `model_metrics_auto_detect`.
    pub metrics_auto_detect: bool,
    /// `disable_system_metrics`.
    pub disable_system_metrics: bool,
    /// `metric_time_interval`, in seconds.
    pub metric_time_interval: u32,

    /// Whether snapshots are written, and the newest is read at the start.
    pub snapshots: bool,
    /// The configuration as it was read, for snapshots.
    pub properties: Vec<(String, String)>,
    /// A private directory of this server: archives are unpacked in it, and the repository is in it.
    pub work_directory: PathBuf,
}

impl Settings {
    /// Workers of a model at the start where nothing else says: as configured, else one for each GPU, else one for each
    /// processor.
    pub fn default_workers(&self) -> u32 {
        let cores = || std::thread::available_parallelism().map_or(1, |count| u32::try_from(count.get()).unwrap_or(1));
        match (self.configured_workers, u32::try_from(self.gpus.len()).unwrap_or(0)) {
            (0, 0) => cores(),
            (0, gpus) => gpus,
            (workers, _) => workers,
        }
    }

    /// What `models` says about a version of a model.
    pub fn said(&self, name: &str, version: &str) -> Option<&ModelProperties> {
        self.models.iter().find(|said| said.name == name && said.version == version)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing)]
mod tests;
