//! The flags of the model repository.

use std::path::PathBuf;
use std::time::Duration;

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Args};

use super::backend_setting::{BackendSetting, backend_setting};
use super::{MODELS, boolean, positive_seconds, whole};
use crate::examples;
use pharos::model::LoadLimits;
use pharos_engine::loader::{self, BackendSettings};
use pharos_engine::store::{Location, Locations};

/// The model repository.
#[derive(Clone, Debug, Args)]
pub struct Models {
    /// Model repository: a directory, several directories separated by ':', or an object store
    /// (s3://BUCKET/PATH, s3://https://HOST:PORT/BUCKET/PATH, gs://BUCKET/PATH,
    /// as://ACCOUNT/CONTAINER/PATH). May be repeated
    #[arg(
        id = "model-repository", long = "model-repository", alias = "model-store",
        value_name = "PLACE", required_unless_present = "example", env = "PHAROS_MODEL_REPOSITORY",
        help_heading = MODELS
    )]
    pub repositories: Vec<Locations>,
    /// Serve a model that is part of the server, for a first request: digits (an ONNX model that
    /// classifies handwritten digits) or simple (adds and subtracts, without an engine). May be
    /// repeated, also beside model repositories
    #[arg(
        id = "example", long = "example", value_name = "NAME", env = "PHAROS_EXAMPLE",
        value_parser = examples::NAMES, value_delimiter = ',', help_heading = MODELS
    )]
    pub examples: Vec<String>,
    /// Name of the model if a repository contains the files of a single model instead of
    /// directories of models [default: the name in its config.pbtxt, else the name of the
    /// directory]
    #[arg(
        id = "model-name", long = "model-name", value_name = "NAME", env = "PHAROS_MODEL_NAME",
        value_parser = model_name, help_heading = MODELS
    )]
    pub model_name: Option<String>,
    /// Directory for files fetched from object stores, kept across restarts [default: a temporary
    /// directory]
    #[arg(
        id = "repository-cache-directory", long = "repository-cache-directory", value_name = "DIR",
        env = "PHAROS_REPOSITORY_CACHE_DIRECTORY", help_heading = MODELS
    )]
    pub cache_directory: Option<PathBuf>,
    /// When to load and unload models: none (load all at start), poll (load all at start, then
    /// follow changes of the repositories), explicit (load those of --load-model at start, others
    /// by request) or on-demand (load each with its first request or by request, those of
    /// --load-model at start)
    #[arg(
        id = "model-control-mode", long = "model-control-mode", value_name = "MODE",
        default_value = "none", env = "PHAROS_MODEL_CONTROL_MODE", value_parser = control_mode,
        help_heading = MODELS
    )]
    pub control_mode: ControlMode,
    /// Seconds between checks of the repositories with --model-control-mode=poll
    #[arg(
        id = "repository-poll-secs", long = "repository-poll-secs", value_name = "SECONDS",
        default_value = "15", env = "PHAROS_REPOSITORY_POLL_SECS", value_parser = positive_seconds,
        help_heading = MODELS
    )]
    pub poll: Duration,
    /// Maximum number of requests that wait for models to be loaded on demand; further requests
    /// get an error
    #[arg(
        id = "on-demand-max-waiting", long = "on-demand-max-waiting", value_name = "N",
        default_value_t = 1000, env = "PHAROS_ON_DEMAND_MAX_WAITING",
        value_parser = whole(1..=1_000_000u32), help_heading = MODELS
    )]
    pub on_demand_max_waiting: u32,
    /// Seconds without requests after which a model that was loaded on demand is unloaded
    /// [default: never]
    #[arg(
        id = "model-idle-unload-secs", long = "model-idle-unload-secs", value_name = "SECONDS",
        env = "PHAROS_MODEL_IDLE_UNLOAD_SECS", value_parser = positive_seconds,
        help_heading = MODELS
    )]
    pub idle_unload: Option<Duration>,
    /// The most memory that models may use, in bytes or as a share of the machine's or the
    /// container's memory, for example 60%: models that are loaded on demand are unloaded to make
    /// room for others, and loads that do not fit are refused [default: unlimited]
    #[arg(
        id = "model-memory-limit", long = "model-memory-limit", value_name = "BYTES|PERCENT%",
        env = "PHAROS_MODEL_MEMORY_LIMIT", value_parser = memory_limit, help_heading = MODELS
    )]
    pub memory_limit: Option<MemoryLimit>,
    /// Model to load at start with --model-control-mode=explicit or on-demand; may be repeated, or
    /// given as a list separated by ','. '*' alone loads all models
    #[arg(
        id = "load-model", long = "load-model", value_name = "NAME", env = "PHAROS_LOAD_MODEL",
        value_delimiter = ',', help_heading = MODELS
    )]
    pub load_model: Vec<String>,
    /// Use configs/NAME.pbtxt in a model's directory as its configuration, if it exists
    #[arg(
        id = "model-config-name", long = "model-config-name", value_name = "NAME",
        env = "PHAROS_MODEL_CONFIG_NAME", value_parser = config_name, help_heading = MODELS
    )]
    pub config_name: Option<String>,
    /// Allow models of the same name in several repositories; the repository is their namespace
    #[arg(
        id = "model-namespacing", long = "model-namespacing", value_name = "BOOL",
        default_value = "false", default_missing_value = "true", num_args = 0..=1,
        action = ArgAction::Set, env = "PHAROS_MODEL_NAMESPACING", value_parser = boolean,
        help_heading = MODELS
    )]
    pub namespacing: bool,
    /// Permit requests that load a model to contain its files, or a configuration whose backend
    /// runs code [default: true if loading by request requires a token or a key of a restricted
    /// API, else false]
    #[arg(
        id = "allow-model-upload", long = "allow-model-upload", value_name = "BOOL",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_ALLOW_MODEL_UPLOAD", value_parser = boolean, help_heading = MODELS
    )]
    pub allow_upload: Option<bool>,
    /// Maximum number of instances, over all versions, that a configuration sent with a load may
    /// ask for, or a request that scales a TorchServe model; 0 for no limit. A model's own
    /// configuration is not limited
    #[arg(
        id = "load-request-max-instances", long = "load-request-max-instances", value_name = "N",
        default_value_t = 128, env = "PHAROS_LOAD_REQUEST_MAX_INSTANCES", help_heading = MODELS
    )]
    pub load_request_max_instances: u64,
    /// Maximum number of bytes of the largest warm-up sample of a configuration sent with a load,
    /// over all instances; 0 for no limit
    #[arg(
        id = "load-request-max-warmup-byte-size", long = "load-request-max-warmup-byte-size",
        value_name = "BYTES", default_value_t = 512 << 20,
        env = "PHAROS_LOAD_REQUEST_MAX_WARMUP_BYTE_SIZE", help_heading = MODELS
    )]
    pub load_request_max_warmup: u64,
    /// Maximum number of priority levels, sequences in batches and limits of queues in a
    /// configuration sent with a load; 0 for no limit
    #[arg(
        id = "load-request-max-queue-size", long = "load-request-max-queue-size", value_name = "N",
        default_value_t = 65536, env = "PHAROS_LOAD_REQUEST_MAX_QUEUE_SIZE", help_heading = MODELS
    )]
    pub load_request_max_queue: u64,
    /// Maximum number of threads of an ONNX Runtime session that a configuration sent with a load
    /// may ask for; 0 for no limit
    #[arg(
        id = "load-request-max-threads", long = "load-request-max-threads", value_name = "N",
        default_value_t = 256, env = "PHAROS_LOAD_REQUEST_MAX_THREADS", help_heading = MODELS
    )]
    pub load_request_max_threads: u64,
    /// Maximum number of models to load concurrently, at start and by requests
    #[arg(
        id = "model-load-thread-count", long = "model-load-thread-count", value_name = "N",
        default_value_t = 4, env = "PHAROS_MODEL_LOAD_THREAD_COUNT",
        value_parser = whole(1..=1024u32), help_heading = MODELS
    )]
    pub load_thread_count: u32,
    /// Number of retries after a model fails to load
    #[arg(
        id = "model-load-retry-count", long = "model-load-retry-count", value_name = "N",
        default_value_t = 0, env = "PHAROS_MODEL_LOAD_RETRY_COUNT",
        value_parser = whole(0..=1000u32), help_heading = MODELS
    )]
    pub load_retry_count: u32,
    /// Do not complete a model's configuration from the model's files
    #[arg(
        id = "disable-auto-complete-config", long = "disable-auto-complete-config",
        value_name = "BOOL", default_value = "false", default_missing_value = "true",
        num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_DISABLE_AUTO_COMPLETE_CONFIG",
        value_parser = boolean, help_heading = MODELS
    )]
    disable_auto_complete_config: bool,
    /// Deprecated: use --disable-auto-complete-config
    #[arg(
        id = "strict-model-config", long = "strict-model-config", value_name = "BOOL",
        default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set,
        env = "PHAROS_STRICT_MODEL_CONFIG", value_parser = boolean, help_heading = MODELS
    )]
    strict_model_config: Option<bool>,
    /// Setting of all backends or of one: KEY=VALUE or BACKEND,KEY=VALUE; may be repeated. All
    /// backends: default-max-batch-size (default 4), the maximum batch size that auto-complete
    /// sets for a model that supports batches. python: stub-timeout-seconds, which overrides
    /// --worker-start-timeout-secs
    #[arg(
        id = "backend-config", long = "backend-config", value_name = "SETTING",
        env = "PHAROS_BACKEND_CONFIG", value_parser = backend_setting, help_heading = MODELS
    )]
    pub backend_config: Vec<BackendSetting>,
}

/// When models are loaded and unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlMode {
    /// Load all at start.
    None,
    /// Load all at start, then follow changes of the repositories.
    Poll,
    /// Load and unload by request.
    Explicit,
    /// Load with the first request, or by request.
    OnDemand,
}

/// A limit of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryLimit {
    /// A number of bytes.
    Bytes(u64),
    /// A share of the memory of the machine, the container or the GPU, in percent.
    Percent(f64),
}

impl MemoryLimit {
    /// Returns the limit in bytes on a machine, in a container or on a GPU with `total` bytes.
    pub fn bytes(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        }
    }
}

impl ControlMode {
    /// Returns whether clients may load and unload models.
    pub fn by_request(self) -> bool {
        matches!(self, Self::Explicit | Self::OnDemand)
    }
}

impl Models {
    /// Returns the limits of configurations that clients send with a load.
    pub fn load_limits(&self) -> LoadLimits {
        LoadLimits {
            instances: self.load_request_max_instances,
            warmup_bytes: self.load_request_max_warmup,
            queue_size: self.load_request_max_queue,
            threads: self.load_request_max_threads,
        }
    }

    /// Returns the maximum batch size that auto-complete sets (`--backend-config
    /// [BACKEND,]default-max-batch-size=N`). A setting of the backend takes precedence over a
    /// general one, and a later one over an earlier one.
    pub fn default_max_batch_size(&self, backend: &str) -> u32 {
        let of = |name: Option<&str>| {
            let mut settings = self.backend_config.iter().rev();
            let last = settings
                .find(|s| s.key == "default-max-batch-size" && s.backend.as_deref() == name);
            last.and_then(|setting| setting.value.parse().ok())
        };
        of(Some(backend)).or_else(|| of(None)).unwrap_or(4)
    }

    /// Returns the settings that libraries of Triton's backends read.
    pub fn backend_settings(&self) -> BackendSettings {
        let settings = self.backend_config.iter().map(|setting| loader::BackendSetting {
            backend: setting.backend.clone(),
            name: setting.key.clone(),
            value: setting.value.clone(),
        });
        BackendSettings(settings.collect())
    }

    /// Returns the time limit for Python workers to load their models, if it is set
    /// (`--backend-config=python,stub-timeout-seconds=N`); the last setting applies.
    pub fn python_start_timeout(&self) -> Option<Duration> {
        self.backend_config.iter().rev().find_map(BackendSetting::python_start_timeout)
    }

    /// Returns whether configurations are completed from the models' files.
    pub fn auto_complete(&self) -> bool {
        !self.disable_auto_complete_config && self.strict_model_config != Some(true)
    }

    /// Returns warnings about deprecated flags and settings without effect.
    pub(super) fn warnings(&self) -> Vec<String> {
        let deprecated = "--strict-model-config is deprecated: use --disable-auto-complete-config";
        let strict = match (self.strict_model_config, self.disable_auto_complete_config) {
            (None, _) => None,
            (Some(false), true) => Some(format!(
                "{deprecated}; --strict-model-config=false is overridden by \
                 --disable-auto-complete-config"
            )),
            (Some(_), _) => Some(deprecated.to_owned()),
        };
        strict
            .into_iter()
            .chain(self.backend_config.iter().filter_map(BackendSetting::warning))
            .collect()
    }

    /// Returns all repositories.
    pub fn locations(&self) -> Vec<Location> {
        self.repositories.iter().flat_map(|locations| &locations.0).cloned().collect()
    }

    /// Returns whether all models are loaded at start.
    pub fn loads_all(&self) -> bool {
        !self.control_mode.by_request() || self.load_model == ["*"]
    }

    /// Checks the flags of the models to load. The error texts are Triton's.
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.load_model.is_empty() && !self.control_mode.by_request() {
            return Err("Use of '--load-model' requires setting '--model-control-mode=explicit' \
                        as well."
                .to_owned());
        }
        if self.load_model.len() > 1 && self.load_model.iter().any(|name| name == "*") {
            return Err("Wildcard model name '*' must be the ONLY startup model if specified at \
                        all."
                .to_owned());
        }
        let mut named = self.load_model.iter().filter(|name| *name != "*");
        named.try_for_each(|name| pharos::repository::check_model_name(name))
    }
}

/// Returns a warning if the flag for polls is given in another control mode. Flags of models that
/// are loaded on demand have an effect in all modes: the configuration of a model can say that
/// requests load it.
pub(super) fn without_mode(matches: &ArgMatches) -> Option<String> {
    let is_given = matches
        .value_source("repository-poll-secs")
        .is_some_and(|source| source != ValueSource::DefaultValue);
    let polls = matches.get_one("model-control-mode") == Some(&ControlMode::Poll);
    let text = "--repository-poll-secs has no effect without --model-control-mode=poll";
    (is_given && !polls).then(|| text.to_owned())
}

pub(super) fn memory_limit(text: &str) -> Result<MemoryLimit, String> {
    let limit = match text.strip_suffix('%') {
        Some(percent) => percent
            .parse()
            .ok()
            .filter(|percent| (1.0..=100.0).contains(percent))
            .map(MemoryLimit::Percent),
        None => text.parse().ok().filter(|bytes| *bytes > 0).map(MemoryLimit::Bytes),
    };
    limit.ok_or_else(|| {
        "expected a number of bytes, or a share of the memory from 1% to 100%".to_owned()
    })
}

fn control_mode(text: &str) -> Result<ControlMode, String> {
    match text.to_ascii_lowercase().as_str() {
        "none" => Ok(ControlMode::None),
        "poll" => Ok(ControlMode::Poll),
        "explicit" => Ok(ControlMode::Explicit),
        "on-demand" => Ok(ControlMode::OnDemand),
        _ => Err("expected none, poll, explicit or on-demand".to_owned()),
    }
}

fn model_name(text: &str) -> Result<String, String> {
    pharos::repository::check_model_name(text).map(|()| text.to_owned())
}

/// Parses the name of a file without its extension.
fn config_name(text: &str) -> Result<String, String> {
    pharos::repository::check_model_name(text).map_err(|_| {
        "allowed is the name of a file in 'configs', without '.pbtxt' and without '/'".to_owned()
    })?;
    Ok(text.to_owned())
}
