//! Reads a model's files into a form that can be loaded: its configuration, the versions to run, and their fingerprints.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use pharos::ensemble::Plan as EnsemblePlan;
use pharos::error::InferError;
use pharos::model::{
    CodeOrigin, Completion, ConfigError, Draft, ModelConfig, ModelSignature, Provenance, SANDBOX, VersionPolicy,
    may_auto_complete, onnx,
};
use pharos::repository::{self, Stamp, StateReason, VersionFingerprint};

use super::checksums;
use super::client_configuration::{self, Refusal};
use super::{Loader, Settings};
use crate::launch::{self, backends};
use crate::scheduler::placement;
use crate::store::scan::{self, Contents, LoadedFiles, VersionFiles};
use crate::store::{LocalError, ModelFiles, Overrides, Stores};
use pharos_os::blocking;
use pharos_telemetry::system::Devices;

/// A model that can be loaded.
#[derive(Clone)]
pub(super) struct Prepared {
    /// The server's name for it: its name, prefixed with the repository if namespaces are on.
    pub(super) name: String,
    pub(super) configuration: Configuration,
    /// The sources of the model and of its code.
    pub(super) provenance: Provenance,
    /// The plan, if it is an ensemble.
    pub(super) plan: Option<EnsemblePlan>,
    /// The versions to run.
    pub(super) versions: BTreeMap<u64, Version>,
    /// Versions that the policy names and that do not exist.
    pub(super) missing: Vec<u64>,
    /// Its files.
    pub(super) model_files: Arc<ModelFiles>,
}

impl Prepared {
    /// Returns the number of instances of all versions; an estimate if the model's code completes the configuration.
    pub(super) fn instances(&self) -> usize {
        let of_version = match &self.configuration {
            _ if self.plan.is_some() => 0,
            Configuration::Known(config) => placement::of(config, 1).len(),
            Configuration::CompletedByCode(_) => 1,
        };
        of_version * self.versions.len()
    }
}

/// The state of a model's configuration before loading.
#[derive(Clone)]
pub(super) enum Configuration {
    /// The complete configuration.
    Known(Box<ModelConfig>),
    /// A configuration that the model's code completes, separately for each version.
    CompletedByCode(Box<CodeCompletion>),
}

/// A configuration that the model's code completes.
#[derive(Clone)]
pub(super) struct CodeCompletion {
    pub(super) draft: Draft,
    /// The model's name without its namespace.
    directory: String,
    files: Vec<String>,
    default_max_batch_size: u32,
    /// The GPUs that instances may run on.
    devices: Arc<Devices>,
}

impl CodeCompletion {
    /// Returns the GPUs for instances if the configuration names none.
    pub(super) fn gpus(&self) -> &[u32] {
        self.devices.usable()
    }

    /// Returns the checked configuration, completed with the answer of a version's code.
    pub(super) fn merge_answer(&self, answer: &str) -> Result<ModelConfig, ConfigError> {
        self.complete(self.draft.clone().merge_answer(answer, self.gpus())?)
    }

    /// Returns the configuration of a version whose code adds nothing.
    pub(super) fn unanswered(&self) -> Result<ModelConfig, ConfigError> {
        self.complete(self.draft.clone())
    }

    /// Returns whether the code of the version in this directory may complete the configuration. Blocks.
    pub(super) fn may_answer(&self, version: &Path) -> bool {
        let code = || scan::read_text(&version.join(self.draft.model_file()));
        self.draft.backend() != "python" || code().map_or(true, |code| may_auto_complete(&code))
    }

    fn complete(&self, draft: Draft) -> Result<ModelConfig, ConfigError> {
        let completion = Completion {
            directory: &self.directory,
            files: &self.files,
            auto_complete: true,
            default_max_batch_size: self.default_max_batch_size,
            gpus: self.devices.usable(),
            unusable_gpus: self.devices.unusable(),
            ..Completion::default()
        };
        draft.complete(&completion)
    }
}

impl Configuration {
    pub(super) fn known(&self) -> Option<&ModelConfig> {
        match self {
            Self::Known(config) => Some(config),
            Self::CompletedByCode(_) => None,
        }
    }

    pub(super) fn backend(&self) -> &str {
        match self {
            Self::Known(config) => &config.backend,
            Self::CompletedByCode(code) => code.draft.backend(),
        }
    }

    /// Returns what the choice of a program needs to know of a model, with its directory and that of the version.
    pub(super) fn launched<'a>(
        &'a self,
        name: &'a str,
        (directory, version): (&'a Path, &'a Path),
        provenance: Provenance,
    ) -> launch::Model<'a> {
        launch::Model {
            name,
            backend: self.backend(),
            environment: self.parameter(launch::ENVIRONMENT),
            sandbox: self.parameter(SANDBOX),
            provenance,
            limits: launch::limits::Parameters::of(|name| self.parameter(name)),
            directory,
            version,
        }
    }

    pub(super) fn parameter(&self, name: &str) -> Option<&str> {
        match self {
            Self::Known(config) => config.parameters.get(name).map(String::as_str),
            Self::CompletedByCode(code) => code.draft.parameter(name),
        }
    }

    fn version_policy(&self) -> Result<VersionPolicy, ConfigError> {
        match self {
            Self::Known(config) => Ok(config.version_policy.clone()),
            Self::CompletedByCode(code) => code.draft.version_policy(),
        }
    }

    fn encode_parts(&self) -> [Vec<u8>; 3] {
        match self {
            Self::Known(config) => config.encode_parts(),
            Self::CompletedByCode(code) => code.draft.encode_parts(),
        }
    }
}

/// A version that can be loaded.
#[derive(Clone)]
pub(super) struct Version {
    pub(super) directory: PathBuf,
    /// Its environment and its backend, as [`launch::outside`] returns them.
    pub(super) outside: Vec<PathBuf>,
    pub(super) fingerprint: VersionFingerprint,
}

/// The reason why a model cannot be prepared for loading.
#[derive(Clone, Debug)]
pub(super) enum PrepareError {
    /// No repository contains it, or the repositories cannot be read.
    NotFound(String),
    /// Several repositories contain it.
    Ambiguous(String),
    /// Its files or its configuration cannot be read.
    Unreadable(String),
    /// No version matches its version policy.
    NoVersion(String),
    /// A client's configuration brings code that the client may not bring.
    Restricted(InferError),
    /// A client's configuration asks for more than a request may, or names files that it may not read.
    Excessive(String),
    /// A member of the ensemble does not exist, or is the ensemble itself.
    Members(String),
}

impl PrepareError {
    pub(super) fn reason(&self) -> &str {
        match self {
            Self::NotFound(reason)
            | Self::Ambiguous(reason)
            | Self::Unreadable(reason)
            | Self::NoVersion(reason)
            | Self::Excessive(reason)
            | Self::Members(reason) => reason,
            Self::Restricted(error) => &error.message,
        }
    }

    /// Returns the reason for the state of the model.
    pub(super) fn state_reason(&self) -> StateReason {
        match self {
            Self::Ambiguous(reason) => StateReason::Ambiguous(reason.clone()),
            _ => StateReason::Other(self.reason().to_owned()),
        }
    }
}

impl From<LocalError> for PrepareError {
    fn from(error: LocalError) -> Self {
        match error {
            LocalError::NotFound(reason) => Self::NotFound(reason),
            LocalError::Ambiguous(reason) => Self::Ambiguous(reason),
        }
    }
}

/// The maximum number of characters of an error about a client's configuration, which may repeat the client's input.
const LONGEST_ERROR: usize = 2000;

impl Loader {
    /// Reads a model from the repositories or from a client's overrides. Blocks.
    ///
    /// # Errors
    /// The model cannot be loaded.
    pub(super) fn prepare(&self, model: &str, overrides: Option<&Overrides>) -> Result<Prepared, PrepareError> {
        prepare(&self.settings, &self.stores, model, overrides)
    }

    /// Returns the files of a version as they are now, if the server has a response cache.
    pub(super) async fn loaded_files(&self, prepared: &Prepared, version: &Version) -> Option<Arc<LoadedFiles>> {
        self.models.shared.response_cache.as_ref()?;
        let model = prepared.model_files.path().to_owned();
        let files = VersionFiles { model, version: version.directory.clone(), outside: version.outside.clone() };
        blocking::run(move || LoadedFiles::new(files)).await.ok()?.ok().map(Arc::new)
    }
}

fn prepare(
    settings: &Settings,
    stores: &Stores,
    model: &str,
    overrides: Option<&Overrides>,
) -> Result<Prepared, PrepareError> {
    let unreadable = PrepareError::Unreadable;
    let model_files = match overrides.and_then(|overrides| overrides.files.clone()) {
        Some(model_files) => model_files,
        None => Arc::new(stores.local(model)?),
    };
    let contents = scan::contents(model_files.path(), settings.config_name.as_deref());
    let contents = contents.map_err(|error| unreadable(error.to_string()))?;
    let mut draft = draft(settings, &contents, overrides).map_err(unreadable)?;
    if let Some(overrides) = overrides {
        let checked =
            client_configuration::check(settings, stores.without_namespace(model), &contents, overrides, &draft);
        checked.map_err(|refusal| match refusal {
            Refusal::Restricted(error) => PrepareError::Restricted(error),
            Refusal::Excessive(reason) => PrepareError::Excessive(reason),
            Refusal::Unreadable(reason) => PrepareError::Unreadable(reason),
        })?;
    }
    if overrides.is_none() && stores.name_model(model) {
        draft.rename(stores.without_namespace(model));
    }
    let provenance = provenance(settings, stores.without_namespace(model), &model_files, overrides, &draft, &contents);
    let sums = draft.checksums().map_err(|error| unreadable(error.to_string()))?;
    checksums::verify(model_files.path(), &sums).map_err(unreadable)?;
    let configuration =
        configuration(settings, stores.without_namespace(model), &contents, draft).map_err(unreadable)?;
    let mut plan = match &configuration {
        Configuration::Known(config) => EnsemblePlan::new(config).transpose().map_err(unreadable)?,
        Configuration::CompletedByCode(_) => None,
    };
    if let Some(plan) = &mut plan {
        plan.rename(|namespace, name| stores.member(model, namespace, name));
    }
    let present: Vec<u64> = contents.versions.keys().copied().collect();
    let policy = configuration.version_policy().map_err(|error| unreadable(error.to_string()))?;
    let wanted = repository::select(&policy, &present);
    if wanted.is_empty() {
        let bare = stores.without_namespace(model);
        let there = match plan {
            _ if !present.is_empty() => unselected(&policy, &present),
            Some(_) => format!("no version directories; create '{bare}/1', which stays empty for an ensemble"),
            None => format!("no version directories; create '{bare}/1' with the model's files"),
        };
        let place = model_files.path().display();
        return Err(PrepareError::NoVersion(format!("no version to run: '{place}' has {there}")));
    }
    let versions = contents.versions.into_iter().filter(|(version, _)| wanted.contains(version)).collect();
    // The fingerprint includes the members, because other members of the same name make another ensemble.
    let members = Stamp::of(&plan.as_ref().map(EnsemblePlan::members));
    let files = Files { settings, model, directory: model_files.path(), members, provenance };
    let versions = versions_made(&configuration, &files, versions).map_err(|error| unreadable(error.to_string()))?;
    let missing = missing(&policy, &present);
    Ok(Prepared { name: model.to_owned(), configuration, provenance, plan, versions, missing, model_files })
}

/// Returns the sources of a model and of its code: the place that decides what counts as code by request. `model` is its name without a
/// namespace.
fn provenance(
    settings: &Settings,
    model: &str,
    files: &ModelFiles,
    overrides: Option<&Overrides>,
    draft: &Draft,
    contents: &Contents,
) -> Provenance {
    let completion = Completion { directory: model, files: &contents.files, ..Completion::default() };
    let of_repository =
        || contents.config.as_deref().and_then(|text| Draft::from_text(text, "").ok()).unwrap_or_else(Draft::empty);
    let brings_code = overrides.is_some() && !draft.code_beyond(&of_repository(), &completion).is_empty();
    let origin = if files.origin() == CodeOrigin::Request || brings_code {
        CodeOrigin::Request
    } else {
        settings.model_policy.origin(&|name| draft.parameter(name))
    };
    Provenance { origin, loaded_by: overrides.and_then(|overrides| overrides.loaded_by) }
}

/// Describes versions of which the policy selects none.
fn unselected(policy: &VersionPolicy, present: &[u64]) -> String {
    match policy {
        VersionPolicy::Latest(count) => {
            format!("versions {present:?}, and its 'version_policy' selects the latest {count}")
        }
        VersionPolicy::Specific(named) => {
            format!("versions {present:?}, and its 'version_policy' selects {named:?}")
        }
        VersionPolicy::All => format!("versions {present:?}"),
    }
}

/// Returns the complete configuration, or a draft if the model's code is to complete it.
fn configuration(settings: &Settings, model: &str, contents: &Contents, draft: Draft) -> Result<Configuration, String> {
    let signature = match draft.onnx_file(&contents.files) {
        Some(name) => signature(contents, name)?,
        None => None,
    };
    let mut names: Vec<&str> = launch::ORDINARY.into_iter().chain(settings.program.python_backends()).collect();
    let own = draft.backend().to_owned();
    let mut is_python = false;
    if !own.is_empty() && !names.contains(&own.as_str()) {
        let places = contents.versions.values().map(PathBuf::as_path).chain(contents.config_path.parent());
        let found = backends::find(&settings.program, (model, &own), &places.collect::<Vec<_>>())?;
        is_python = matches!(found, backends::Found::Python(_));
        names.push(&own);
    }
    let no_cuda_provider = launch::no_cuda_provider(&settings.program);
    let completion = Completion {
        directory: model,
        files: &contents.files,
        backends: &names,
        gpus: settings.devices.usable(),
        unusable_gpus: settings.devices.unusable(),
        no_cuda_provider: no_cuda_provider.as_deref(),
        signature: signature.as_ref(),
        auto_complete: settings.auto_complete,
        default_max_batch_size: settings.default_max_batch_size,
    };
    let draft = draft.resolve(&completion).map_err(|error| error.to_string())?;
    is_python |= settings.program.is_python(draft.backend()) && !draft.is_complete();
    if settings.auto_complete && is_python {
        draft.check_name(model).map_err(|error| error.to_string())?;
        let (directory, files) = (model.to_owned(), contents.files.clone());
        let default_max_batch_size = settings.default_max_batch_size;
        let devices = settings.devices.clone();
        let code = CodeCompletion { draft, directory, files, default_max_batch_size, devices };
        return Ok(Configuration::CompletedByCode(Box::new(code)));
    }
    let config = draft.complete(&completion).map_err(|error| error.to_string())?;
    Ok(Configuration::Known(Box::new(config)))
}

/// Returns the configuration as written by the client or in the model's files.
fn draft(settings: &Settings, contents: &Contents, overrides: Option<&Overrides>) -> Result<Draft, String> {
    if let Some(overrides) = overrides {
        let refused = |error: String| {
            format!("Invalid config override: {}", error.chars().take(LONGEST_ERROR).collect::<String>())
        };
        return Draft::from_json(&overrides.config).map_err(|error| refused(error.to_string()));
    }
    let path = &contents.config_path;
    match &contents.config {
        Some(text) => Draft::from_text(text, &path.to_string_lossy()).map_err(|error| error.to_string()),
        None if settings.auto_complete => Ok(Draft::empty()),
        None => Err(format!("'{}' does not exist, and auto-complete is off", path.display())),
    }
}

/// The files of a model, for fingerprints.
struct Files<'a> {
    settings: &'a Settings,
    model: &'a str,
    /// The model's directory.
    directory: &'a Path,
    /// The fingerprint of an ensemble's members.
    members: Stamp,
    provenance: Provenance,
}

/// Returns the versions with their fingerprints.
fn versions_made(
    configuration: &Configuration,
    files: &Files<'_>,
    versions: BTreeMap<u64, PathBuf>,
) -> io::Result<BTreeMap<u64, Version>> {
    let shared = scan::shared_stamp(files.directory)?;
    let parts = configuration.encode_parts();
    let version = |(number, directory): (u64, PathBuf)| {
        let launched = configuration.launched(files.model, (files.directory, &directory), files.provenance);
        let outside = launch::outside(&files.settings.program, &launched);
        let own = VersionFiles { model: files.directory.to_owned(), version: directory, outside };
        let stamp = Stamp::of(&(files.members, own.stamp_with(shared)?));
        let VersionFiles { version: directory, outside, .. } = own;
        Ok((number, Version { fingerprint: VersionFingerprint::of_parts(&parts, stamp), directory, outside }))
    };
    versions.into_iter().map(version).collect()
}

/// Returns the versions that a policy names and that do not exist.
fn missing(policy: &VersionPolicy, present: &[u64]) -> Vec<u64> {
    match policy {
        VersionPolicy::Specific(named) => named.iter().filter(|version| !present.contains(version)).copied().collect(),
        VersionPolicy::Latest(_) | VersionPolicy::All => Vec::new(),
    }
}

/// Returns the inputs and outputs of the newest version's file of this name, or of the file within, if it is a directory; `None`
/// without such a file.
fn signature(contents: &Contents, file_name: &str) -> Result<Option<ModelSignature>, String> {
    let Some(mut path) = contents.versions.values().next_back().map(|directory| directory.join(file_name)) else {
        return Ok(None);
    };
    if path.is_dir() {
        path.push(onnx::FILE_IN_DIRECTORY);
    }
    if !path.is_file() {
        return Ok(None);
    }
    let file = map(&path).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))?;
    onnx::signature(&file).map(Some).map_err(|error| format!("'{}': {error}", path.display()))
}

/// Maps a file, to avoid reading weights only to find the names of inputs.
#[allow(unsafe_code)]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: The mapping is read once, immediately, by a parser that checks everything it reads. A file truncated during that
    // time ends the process, as it would any program that maps its model.
    unsafe { Mmap::map(&file) }
}
