//! The options of the model repository.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};

use super::backend_setting::{BackendSetting, backend_setting};
use super::{MODELS, boolean, positive_seconds, whole};
use pharos_engine::store::{Location, Locations};

/// Which models are served.
#[derive(Clone, Debug, Args)]
pub struct Models {
    /// Where models are: a directory, or several separated by ':'; or s3://BUCKET/PATH, s3://https://HOST:PORT/BUCKET/PATH,
    /// gs://BUCKET/PATH, as://ACCOUNT/CONTAINER/PATH. May be given several times
    #[arg(id = "model-repository", long = "model-repository", alias = "model-store", value_name = "PLACE", required = true, env = "PHAROS_MODEL_REPOSITORY", help_heading = MODELS)]
    pub repositories: Vec<Locations>,
    /// The name of the model, where a repository is no directory of models but holds the files of one model; without it
    /// the name in its config.pbtxt, or that of the directory
    #[arg(id = "model-name", long = "model-name", value_name = "NAME", env = "PHAROS_MODEL_NAME", value_parser = model_name, help_heading = MODELS)]
    pub model_name: Option<String>,
    /// Keep what is fetched from object stores here, also for the next start; a temporary directory if this is not given
    #[arg(id = "repository-cache-directory", long = "repository-cache-directory", value_name = "DIR", env = "PHAROS_REPOSITORY_CACHE_DIRECTORY", help_heading = MODELS)]
    pub cache_directory: Option<PathBuf>,
    /// When models are loaded and unloaded: "none", all at start; "poll", all at start and as the repositories change;
    /// "explicit", those of --load-model at start, others by request
    #[arg(id = "model-control-mode", long = "model-control-mode", value_name = "MODE", default_value = "none", env = "PHAROS_MODEL_CONTROL_MODE", value_parser = control_mode, help_heading = MODELS)]
    pub control_mode: ControlMode,
    /// Seconds between two looks at the repositories, with --model-control-mode=poll
    #[arg(id = "repository-poll-secs", long = "repository-poll-secs", value_name = "SECONDS", default_value = "15", env = "PHAROS_REPOSITORY_POLL_SECS", value_parser = positive_seconds, help_heading = MODELS)]
    pub poll: Duration,
    /// A model to load at start, with --model-control-mode=explicit; may be given several times, or several separated by
    /// ','. '*' alone means all
    #[arg(id = "load-model", long = "load-model", value_name = "NAME", env = "PHAROS_LOAD_MODEL", value_delimiter = ',', help_heading = MODELS)]
    pub load_model: Vec<String>,
    /// Take configs/NAME.pbtxt in a model's directory for its configuration, where that is there
    #[arg(id = "model-config-name", long = "model-config-name", value_name = "NAME", env = "PHAROS_MODEL_CONFIG_NAME", value_parser = config_name, help_heading = MODELS)]
    pub config_name: Option<String>,
    /// Let models of the same name be in several repositories; they are told apart by those
    #[arg(id = "model-namespacing", long = "model-namespacing", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_MODEL_NAMESPACING", value_parser = boolean, help_heading = MODELS)]
    pub namespacing: bool,
    /// Models loaded side by side, whether at start or by requests
    #[arg(id = "model-load-thread-count", long = "model-load-thread-count", value_name = "N", default_value_t = 4, env = "PHAROS_MODEL_LOAD_THREAD_COUNT", value_parser = whole(1..=1024u32), help_heading = MODELS)]
    pub load_thread_count: u32,
    /// How often a model that cannot be loaded is tried again
    #[arg(id = "model-load-retry-count", long = "model-load-retry-count", value_name = "N", default_value_t = 0, env = "PHAROS_MODEL_LOAD_RETRY_COUNT", value_parser = whole(0..=1000u32), help_heading = MODELS)]
    pub load_retry_count: u32,
    /// Do not fill what a model's configuration leaves out from the model itself
    #[arg(id = "disable-auto-complete-config", long = "disable-auto-complete-config", value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_DISABLE_AUTO_COMPLETE_CONFIG", value_parser = boolean, help_heading = MODELS)]
    disable_auto_complete_config: bool,
    /// Deprecated: --disable-auto-complete-config
    #[arg(id = "strict-model-config", long = "strict-model-config", value_name = "BOOL", default_missing_value = "true", num_args = 0..=1, action = ArgAction::Set, env = "PHAROS_STRICT_MODEL_CONFIG", value_parser = boolean, help_heading = MODELS)]
    strict_model_config: Option<bool>,
    /// A setting of all backends or of one: KEY=VALUE or BACKEND,KEY=VALUE; may be given several times. Known to all:
    /// default-max-batch-size (4), the maximum batch size that auto-complete gives a model that can batch. Known to python:
    /// stub-timeout-seconds, in place of --worker-start-timeout-secs
    #[arg(id = "backend-config", long = "backend-config", value_name = "SETTING", env = "PHAROS_BACKEND_CONFIG", value_parser = backend_setting, help_heading = MODELS)]
    pub backend_config: Vec<BackendSetting>,
}

/// When models are loaded and unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlMode {
    /// All at start, none later.
    None,
    /// All at start, and as the repositories change.
    Poll,
    /// By request.
    Explicit,
}

impl Models {
    /// The maximum batch size that auto-complete gives (`--backend-config [BACKEND,]default-max-batch-size=N`); a setting
    /// of the backend itself wins, the last given of equals.
    pub fn default_max_batch_size(&self, backend: &str) -> u32 {
        let of = |name: Option<&str>| {
            let settings = self.backend_config.iter().rev();
            let mut settings = settings.filter(|s| s.key == "default-max-batch-size" && s.backend.as_deref() == name);
            settings.next().and_then(|setting| setting.value.parse().ok())
        };
        of(Some(backend)).or_else(|| of(None)).unwrap_or(4)
    }

    /// How long Python workers may take to load their models, if that is said for them alone
    /// (`--backend-config=python,stub-timeout-seconds=N`); the last given of equals.
    pub fn python_start_timeout(&self) -> Option<Duration> {
        self.backend_config.iter().rev().find_map(BackendSetting::python_start_timeout)
    }

    /// Whether configurations are completed from the models' files.
    pub fn auto_complete(&self) -> bool {
        !self.disable_auto_complete_config && self.strict_model_config != Some(true)
    }

    /// What was given and is probably not meant so, a sentence each.
    pub(super) fn warnings(&self) -> Vec<String> {
        let deprecated = "--strict-model-config is deprecated: use --disable-auto-complete-config";
        let strict = match (self.strict_model_config, self.disable_auto_complete_config) {
            (None, _) => None,
            (Some(false), true) => Some(format!(
                "{deprecated}; --strict-model-config=false is overridden by --disable-auto-complete-config"
            )),
            (Some(_), _) => Some(deprecated.to_owned()),
        };
        strict.into_iter().chain(self.backend_config.iter().filter_map(BackendSetting::warning)).collect()
    }

    /// Every repository.
    pub fn locations(&self) -> Vec<Location> {
        self.repositories.iter().flat_map(|locations| &locations.0).cloned().collect()
    }

    /// Whether all models are loaded at start.
    pub fn loads_all(&self) -> bool {
        self.control_mode != ControlMode::Explicit || self.load_model == ["*"]
    }

    /// # Errors
    /// What is said about the models to load does not hold together; Triton's texts.
    pub(super) fn check(&self) -> Result<(), String> {
        if !self.load_model.is_empty() && self.control_mode != ControlMode::Explicit {
            return Err("Use of '--load-model' requires setting '--model-control-mode=explicit' as well.".to_owned());
        }
        if self.load_model.len() > 1 && self.load_model.iter().any(|name| name == "*") {
            return Err("Wildcard model name '*' must be the ONLY startup model if specified at all.".to_owned());
        }
        let mut named = self.load_model.iter().filter(|name| *name != "*");
        named.try_for_each(|name| pharos::repository::check_model_name(name))
    }
}

fn control_mode(text: &str) -> Result<ControlMode, String> {
    match text.to_ascii_lowercase().as_str() {
        "none" => Ok(ControlMode::None),
        "poll" => Ok(ControlMode::Poll),
        "explicit" => Ok(ControlMode::Explicit),
        _ => Err("allowed are none, poll and explicit".to_owned()),
    }
}

fn model_name(text: &str) -> Result<String, String> {
    pharos::repository::check_model_name(text).map(|()| text.to_owned())
}

/// The name of a file without its ending.
fn config_name(text: &str) -> Result<String, String> {
    pharos::repository::check_model_name(text)
        .map_err(|_| "allowed is the name of a file in 'configs', without '.pbtxt' and without '/'".to_owned())?;
    Ok(text.to_owned())
}
