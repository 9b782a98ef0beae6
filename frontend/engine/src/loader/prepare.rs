//! Reads a model's files into a form that can be loaded: its configuration, the versions to run,
//! and their fingerprints. Checks a configuration that a client has sent by the model's own:
//! whether it brings code, how much it asks for, and which files it names.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use md5::{Digest, Md5};
use memmap2::Mmap;
use pharos::ensemble::Plan as EnsemblePlan;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::gguf::GgufMetadata;
use pharos::model::text_files::{TEXT_BACKEND, TextDirectory, TextFiles};
use pharos::model::{
    Checksum, CodeOrigin, Completion, ConfigError, Draft, LLAMACPP, ModelConfig, ModelSignature,
    Provenance, SANDBOX, VersionPolicy, gguf, may_auto_complete, onnx,
};
use pharos::repository::{self, LoadScope, Stamp, StateReason, VersionFingerprint};

use super::{Loader, Settings};
use crate::launch::{self, backends};
use crate::scheduler::placement;
use crate::store::scan::{self, Contents, LoadedFiles, VersionFiles};
use crate::store::{LocalError, ModelFiles, Overrides, Stores};
use pharos_os::blocking;
use pharos_telemetry::system::Devices;

/// The backend of ONNX models.
const ONNXRUNTIME: &str = "onnxruntime";

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
    /// The files of the model.
    pub(super) model_files: Arc<ModelFiles>,
}

impl Prepared {
    /// Returns the number of instances of all versions; an estimate if the model's code completes
    /// the configuration.
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
    /// Whether a compiled backend of Triton runs the model.
    compiled: bool,
}

impl CodeCompletion {
    /// Returns the checked configuration, completed with the answer of a version's code.
    pub(super) fn merge_answer(&self, answer: &str) -> Result<ModelConfig, ConfigError> {
        self.complete(self.draft.clone().merge_answer(answer, self.devices.usable())?)
    }

    /// Returns the configuration of a version whose code adds nothing.
    pub(super) fn unanswered(&self) -> Result<ModelConfig, ConfigError> {
        self.complete(self.draft.clone())
    }

    /// Returns whether the code of the version in this directory may complete the configuration.
    /// Blocks.
    pub(super) fn may_answer(&self, version: &Path) -> bool {
        if self.draft.backend() != "python" || self.draft.library().is_some() {
            return true;
        }
        scan::read_text(&version.join(self.draft.model_file()))
            .map_or(true, |code| may_auto_complete(&code))
    }

    /// Returns the facts that complete the configuration beside the answer.
    pub(super) fn facts(&self) -> Completion<'_> {
        Completion {
            directory: &self.directory,
            files: &self.files,
            auto_complete: true,
            default_max_batch_size: self.default_max_batch_size,
            gpus: self.devices.usable(),
            unusable_gpus: self.devices.unusable(),
            compiled: self.compiled,
            ..Completion::default()
        }
    }

    fn complete(&self, draft: Draft) -> Result<ModelConfig, ConfigError> {
        draft.complete(&self.facts())
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

    /// Returns what the choice of a program needs to know of a model in `directory` and of its
    /// version in the directory `version`.
    pub(super) fn launched<'a>(
        &'a self,
        name: &'a str,
        directory: &'a Path,
        version: &'a Path,
        provenance: Provenance,
    ) -> launch::Model<'a> {
        launch::Model {
            name,
            backend: self.backend(),
            library: self.library(),
            environment: self.parameter(launch::ENVIRONMENT),
            sandbox: self.parameter(SANDBOX),
            provenance,
            limits: launch::limits::Parameters::of(|name| self.parameter(name)),
            directory,
            version,
        }
    }

    /// Returns the library of a backend of Triton that `runtime` names.
    fn library(&self) -> Option<&str> {
        match self {
            Self::Known(config) => config.library(),
            Self::CompletedByCode(code) => code.draft.library(),
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
    /// The environment and the backend of the version, as [`launch::outside`] returns them.
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
    /// The files or the configuration cannot be read.
    Unreadable(String),
    /// No version matches its version policy.
    NoVersion(String),
    /// A client's configuration brings code that the client may not bring.
    Restricted(InferError),
    /// A client's configuration asks for more than a request may, or names files that it may not
    /// read.
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

/// The maximum number of characters of an error about a client's configuration, which may repeat
/// the client's input.
const LONGEST_ERROR: usize = 2000;

impl Loader {
    /// Reads a model from the repositories or from a client's overrides. Blocks.
    ///
    /// # Errors
    /// The model cannot be loaded.
    pub(super) fn prepare(
        &self,
        model: &str,
        overrides: Option<&Overrides>,
    ) -> Result<Prepared, PrepareError> {
        prepare(&self.settings, &self.stores, model, overrides)
    }

    /// Returns the files of a version as they are now, if the server has a response cache.
    pub(super) async fn loaded_files(
        &self,
        prepared: &Prepared,
        version: &Version,
    ) -> Option<Arc<LoadedFiles>> {
        self.models.shared.response_cache.as_ref()?;
        let model = prepared.model_files.path().to_owned();
        let files = VersionFiles {
            model,
            version: version.directory.clone(),
            outside: version.outside.clone(),
        };
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
    let bare = stores.without_namespace(model);
    let model_files = match overrides.and_then(|overrides| overrides.files.clone()) {
        Some(model_files) => model_files,
        None => Arc::new(stores.local(model)?),
    };
    let contents = scan::contents(model_files.path(), settings.config_name.as_deref())
        .map_err(|error| unreadable(error.to_string()))?;
    let mut draft = draft(settings, &contents, overrides).map_err(unreadable)?;
    if let Some(overrides) = overrides {
        check_client_configuration(settings, bare, &contents, overrides, &draft)?;
    }
    if overrides.is_none() && stores.name_model(model) {
        draft.rename(bare);
    }
    let provenance = provenance(settings, bare, &model_files, overrides, &draft, &contents);
    let sums = draft.checksums().map_err(|error| unreadable(error.to_string()))?;
    verify_checksums(model_files.path(), &sums).map_err(unreadable)?;
    let configuration = configuration(settings, bare, &contents, draft).map_err(unreadable)?;
    let mut plan = match &configuration {
        Configuration::Known(config) => {
            EnsemblePlan::new(config).transpose().map_err(unreadable)?
        }
        Configuration::CompletedByCode(_) => None,
    };
    if let Some(plan) = &mut plan {
        plan.rename(|namespace, name| stores.member(model, namespace, name));
    }
    let present: Vec<u64> = contents.versions.keys().copied().collect();
    let policy = configuration.version_policy().map_err(|error| unreadable(error.to_string()))?;
    let wanted = repository::select(&policy, &present);
    if wanted.is_empty() {
        let there = match plan {
            _ if !present.is_empty() => unselected(&policy, &present),
            Some(_) => format!(
                "no version directories; create '{bare}/1', which stays empty for an ensemble"
            ),
            None => format!("no version directories; create '{bare}/1' with the model's files"),
        };
        let place = model_files.path().display();
        return Err(PrepareError::NoVersion(format!("no version to run: '{place}' has {there}")));
    }
    let selected =
        contents.versions.into_iter().filter(|(version, _)| wanted.contains(version)).collect();
    // The fingerprint includes the members, because other members of the same name make another
    // ensemble.
    let members = Stamp::of(&plan.as_ref().map(EnsemblePlan::members));
    let files = Files { settings, model, directory: model_files.path(), members, provenance };
    let versions = versions_made(&configuration, &files, selected)
        .map_err(|error| unreadable(error.to_string()))?;
    let missing = missing(&policy, &present);
    Ok(Prepared {
        name: model.to_owned(),
        configuration,
        provenance,
        plan,
        versions,
        missing,
        model_files,
    })
}

/// Returns the sources of a model and of its code: the place that decides what counts as code by
/// request. `model` is its name without a namespace.
fn provenance(
    settings: &Settings,
    model: &str,
    files: &ModelFiles,
    overrides: Option<&Overrides>,
    draft: &Draft,
    contents: &Contents,
) -> Provenance {
    let completion =
        Completion { directory: model, files: &contents.files, ..Completion::default() };
    let of_repository = || {
        contents
            .config
            .as_deref()
            .and_then(|text| Draft::from_text(text, "").ok())
            .unwrap_or_else(Draft::empty)
    };
    let brings_code =
        overrides.is_some() && !draft.code_beyond(&of_repository(), &completion).is_empty();
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
fn configuration(
    settings: &Settings,
    model: &str,
    contents: &Contents,
    draft: Draft,
) -> Result<Configuration, String> {
    let signature = match draft.onnx_file(&contents.files) {
        Some(name) => signature(contents, name)?,
        None => None,
    };
    let gguf = match draft.gguf_file(&contents.files) {
        Some(name) => gguf_metadata(contents, name)?,
        None => None,
    };
    let text = draft.text_model(&contents.files, || text_files(contents))?;
    let mut names: Vec<&str> =
        launch::ORDINARY.into_iter().chain(settings.program.python_backends()).collect();
    if settings.program.onnxruntime.is_none() && launch::has_tract(&settings.program) {
        names.retain(|name| *name != ONNXRUNTIME);
        names.push(backends::TRACT);
    }
    let own = match draft.backend() {
        "" if gguf.is_some() => LLAMACPP.to_owned(),
        "" if text.is_some() => TEXT_BACKEND.to_owned(),
        "" => draft.backend_of_triton(&contents.files).unwrap_or_default().to_owned(),
        own => own.to_owned(),
    };
    let is_of_triton = draft.backend_of_triton(&contents.files) == Some(own.as_str());
    let mut completes = false;
    let mut compiled = false;
    let places: Vec<&Path> = contents
        .versions
        .values()
        .map(PathBuf::as_path)
        .chain(contents.config_path.parent())
        .collect();
    if let Some(library) = draft.library() {
        backends::named_library(&settings.program, model, &own, library, &places)?;
        completes = true;
        compiled = true;
        names.push(&own);
    } else if !own.is_empty() && own != ONNXRUNTIME && !names.contains(&own.as_str()) {
        match backends::find(&settings.program, model, &own, &places) {
            Ok(found) => {
                compiled = matches!(found, backends::Found::Triton(_));
                completes = compiled || matches!(found, backends::Found::Python(_));
                names.push(&own);
            }
            // The files alone do not ask for this backend.
            Err(_) if is_of_triton && draft.platform().is_empty() => {}
            Err(error) => return Err(error),
        }
    }
    let no_cuda_provider = launch::no_cuda_provider(&settings.program);
    let completion = Completion {
        directory: model,
        files: &contents.files,
        backends: &names,
        gpus: settings.devices.usable(),
        unusable_gpus: settings.devices.unusable(),
        no_cuda_provider: no_cuda_provider.as_deref(),
        compiled,
        signature: signature.as_ref(),
        gguf: gguf.as_ref(),
        text: text.as_ref(),
        auto_complete: settings.auto_complete,
        default_max_batch_size: settings.default_max_batch_size,
    };
    let draft = draft.resolve(&completion).map_err(|error| error.to_string())?;
    completes |= settings.program.is_python(draft.backend()) && !draft.is_complete();
    if settings.auto_complete && completes {
        draft.check_name(model).map_err(|error| error.to_string())?;
        let code = CodeCompletion {
            draft,
            directory: model.to_owned(),
            files: contents.files.clone(),
            default_max_batch_size: settings.default_max_batch_size,
            devices: settings.devices.clone(),
            compiled,
        };
        return Ok(Configuration::CompletedByCode(Box::new(code)));
    }
    let config = draft.complete(&completion).map_err(|error| error.to_string())?;
    Ok(Configuration::Known(Box::new(config)))
}

/// Returns the configuration as written by the client or in the model's files.
fn draft(
    settings: &Settings,
    contents: &Contents,
    overrides: Option<&Overrides>,
) -> Result<Draft, String> {
    if let Some(overrides) = overrides {
        let refused = |error: String| {
            format!(
                "Invalid config override: {}",
                error.chars().take(LONGEST_ERROR).collect::<String>()
            )
        };
        return Draft::from_json(&overrides.config).map_err(|error| refused(error.to_string()));
    }
    let path = &contents.config_path;
    match &contents.config {
        Some(text) => {
            Draft::from_text(text, &path.to_string_lossy()).map_err(|error| error.to_string())
        }
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
    let mut made = BTreeMap::new();
    for (number, directory) in versions {
        let launched =
            configuration.launched(files.model, files.directory, &directory, files.provenance);
        let outside = launch::outside(&files.settings.program, &launched);
        let own = VersionFiles { model: files.directory.to_owned(), version: directory, outside };
        let stamp = Stamp::of(&(files.members, own.stamp_with(shared)?));
        let fingerprint = VersionFingerprint::of_parts(&parts, stamp);
        made.insert(number, Version { directory: own.version, outside: own.outside, fingerprint });
    }
    Ok(made)
}

/// Returns the versions that a policy names and that do not exist.
fn missing(policy: &VersionPolicy, present: &[u64]) -> Vec<u64> {
    match policy {
        VersionPolicy::Specific(named) => {
            named.iter().filter(|version| !present.contains(version)).copied().collect()
        }
        VersionPolicy::Latest(_) | VersionPolicy::All => Vec::new(),
    }
}

/// Returns the inputs and outputs of the newest version's file of this name, or of the file within,
/// if it is a directory; `None` without such a file.
fn signature(contents: &Contents, file_name: &str) -> Result<Option<ModelSignature>, String> {
    let Some(mut path) = newest(contents, file_name) else { return Ok(None) };
    if path.is_dir() {
        path.push(onnx::FILE_IN_DIRECTORY);
    }
    let Some(file) = map_model(&path)? else { return Ok(None) };
    onnx::signature(&file).map(Some).map_err(|error| format!("'{}': {error}", path.display()))
}

/// Returns the metadata of the newest version's GGUF file of this name; `None` without such a file.
fn gguf_metadata(contents: &Contents, file_name: &str) -> Result<Option<GgufMetadata>, String> {
    let Some(path) = newest(contents, file_name) else { return Ok(None) };
    let Some(file) = map_model(&path)? else { return Ok(None) };
    gguf::metadata(&file).map(Some).map_err(|error| format!("'{}': {error}", path.display()))
}

/// Reads the files of a text model from the newest version's directory.
fn text_files(contents: &Contents) -> Result<TextFiles, String> {
    let newest = contents.versions.values().next_back();
    newest
        .map_or_else(|| Ok(TextFiles::default()), |path| TextFiles::gather(&VersionDirectory(path)))
}

/// The directory of a version.
struct VersionDirectory<'a>(&'a Path);

impl TextDirectory for VersionDirectory<'_> {
    fn entries(&self, path: &str) -> Result<Vec<(String, bool)>, String> {
        let path = self.0.join(path);
        let unreadable = |error: io::Error| format!("'{}' cannot be read: {error}", path.display());
        let entries = std::fs::read_dir(&path).map_err(unreadable)?;
        let entries = entries.map(|entry| {
            let entry = entry?;
            // Links lead to the store of Hugging Face's cache.
            let is_directory = entry.path().is_dir();
            Ok((entry.file_name().to_string_lossy().into_owned(), is_directory))
        });
        entries.collect::<io::Result<_>>().map_err(unreadable)
    }

    fn read(&self, path: &str) -> Result<String, String> {
        let path = self.0.join(path);
        scan::read_model_text(&path)
            .map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
    }
}

/// Returns the path of a file in the newest version's directory.
fn newest(contents: &Contents, file_name: &str) -> Option<PathBuf> {
    contents.versions.values().next_back().map(|directory| directory.join(file_name))
}

/// Maps a model file; `None` if it does not exist.
fn map_model(path: &Path) -> Result<Option<Mmap>, String> {
    if !path.is_file() {
        return Ok(None);
    }
    map(path).map(Some).map_err(|error| format!("'{}' cannot be read: {error}", path.display()))
}

/// Maps a file, to avoid reading weights only to find the names of inputs.
#[allow(unsafe_code)]
fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: The mapping is read once, immediately, by a parser that checks everything it reads. A
    // file truncated during that time ends the process, as it would any program that maps its
    // model.
    unsafe { Mmap::map(&file) }
}

/// How the operator permits loads that bring code.
const REMEDY: &str =
    "Start the server with '--allow-model-upload=true' or '--management-token-file' to permit it.";

/// Returns the error of a load that brings code without permission.
pub(crate) fn brings_code(model: &str, what: &str) -> InferError {
    let text = format!("failed to load '{model}', {what}. {REMEDY}");
    InferError::new(ErrorCode::Unsupported, Reason::Restricted, text)
}

/// Checks the configuration of a client. `contents` are the files of the model; `model` is its name
/// without a namespace.
///
/// # Errors
/// The configuration brings code and the client may not, asks for more than a request may, or names
/// label files that are neither the operator's nor sent with it.
fn check_client_configuration(
    settings: &Settings,
    model: &str,
    contents: &Contents,
    overrides: &Overrides,
    sent: &Draft,
) -> Result<(), PrepareError> {
    // Sent files have replaced the model's own configuration.
    let own = match (&overrides.files, &contents.config) {
        (None, Some(text)) => Draft::from_text(text, &contents.config_path.to_string_lossy())
            .map_err(|error| PrepareError::Unreadable(error.to_string()))?,
        _ => Draft::empty(),
    };
    if overrides.scope == LoadScope::Settings {
        let completion =
            Completion { directory: model, files: &contents.files, ..Completion::default() };
        let brought = sent.code_beyond(&own, &completion);
        if !brought.is_empty() {
            let fields = brought.join(", ");
            let what = format!(
                "the configuration in the request differs from the model's own in {fields}, which \
                 can bring code or files. Without permission, a load may change all other settings"
            );
            return Err(PrepareError::Restricted(brings_code(model, &what)));
        }
    }
    let present: Vec<u64> = contents.versions.keys().copied().collect();
    let selected = |policy: &VersionPolicy| repository::select(policy, &present).len();
    settings.load_limits.check(sent, &own, selected, settings.devices.usable().len()).map_err(
        |what| {
            PrepareError::Excessive(format!("the configuration in the request is refused: {what}"))
        },
    )?;
    match overrides.files {
        Some(_) => Ok(()),
        None => check_labels(sent, &own),
    }
}

/// Checks that the model's own configuration names the label files too: any other file of the
/// model, such as its code, would be sent to clients with classifications.
fn check_labels(sent: &Draft, own: &Draft) -> Result<(), PrepareError> {
    let known: Vec<&str> = own.label_files().map(|(_, file)| file).collect();
    let Some((output, file)) = sent.label_files().find(|(_, file)| !known.contains(file)) else {
        return Ok(());
    };
    let named = match known.as_slice() {
        [] => "names none".to_owned(),
        known => format!(
            "names {}",
            known.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ")
        ),
    };
    Err(PrepareError::Excessive(format!(
        "the configuration in the request is refused: label file '{}' of output '{}' must be one \
         that the model's configuration in the repository names, which {named}, or be sent with \
         the load",
        file.escape_debug(),
        output.escape_debug()
    )))
}

/// The number of bytes of a file that are read at a time for its MD5 sum.
const PIECE: usize = 1 << 20;

/// Compares the MD5 sums of files in a model's directory with the sums in the configuration of the
/// repository agent `checksum`. Blocks.
///
/// # Errors
/// A sum differs, or a file cannot be read.
fn verify_checksums(directory: &Path, checksums: &[Checksum]) -> Result<(), String> {
    for Checksum { file, md5 } in checksums {
        let path = directory.join(file);
        let found = md5_sum(&path).map_err(|error| {
            format!(
                "repository agent checksum: cannot compute the MD5 sum of '{}': {error}",
                path.display()
            )
        })?;
        if found != *md5 {
            return Err(format!(
                "repository agent checksum: Mismatched MD5 hash for file {file}, expect: {md5}, \
                 got: {found}"
            ));
        }
    }
    Ok(())
}

fn md5_sum(path: &Path) -> io::Result<String> {
    if !path.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut file = File::open(path)?;
    let mut hash = Md5::new();
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => hash.update(&piece[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
