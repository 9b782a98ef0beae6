//! Fills in fields that do not depend on the model file: name, backend, instance groups and the
//! defaults that clients see in the model configuration extension.

use super::autocomplete_text::LLAMACPP;
use super::proto::model_instance_group::Kind;
use super::proto::model_version_policy::{Latest, PolicyChoice};
use super::proto::{self, model_config::SchedulingChoice, model_sequence_batching::StrategyChoice};
use super::text_files::TEXT_BACKEND;
use super::{Completion, ConfigError, ModelConfig, gguf, unsupported_backends};

/// A backend, the platform of its models (Triton's pairs), and the names of their files, the most
/// common first.
struct KnownBackend {
    backend: &'static str,
    platform: &'static str,
    files: &'static [&'static str],
    /// The endings of other file names of its models.
    endings: &'static [&'static str],
}

const fn known(
    backend: &'static str,
    platform: &'static str,
    files: &'static [&'static str],
    endings: &'static [&'static str],
) -> KnownBackend {
    KnownBackend { backend, platform, files, endings }
}

/// The ending of the file names of TorchServe archives.
const ARCHIVE: &str = ".mar";

/// If a model configures no backend, the first one whose file exists is used.
const BACKENDS: [KnownBackend; 9] = [
    known("onnxruntime", "onnxruntime_onnx", &["model.onnx", "model.ort"], &[".onnx", ".ort"]),
    // tract does not read ORT format, and says so.
    known("tract", "onnxruntime_onnx", &["model.onnx", "model.ort"], &[]),
    known("pytorch", "pytorch_libtorch", &["model.pt", "model.pt2"], &[".pt", ".pt2"]),
    known("python", "", &["model.py"], &[".py"]),
    known("sklearn", "", &["model.joblib", "model.pkl"], &[".joblib"]),
    known("xgboost", "", &["model.json", "model.ubj"], &[".ubj"]),
    known(LLAMACPP, "", &["model.gguf"], &[gguf::ENDING]),
    known("torchserve", "", &[], &[ARCHIVE]),
    known("builtin", "", &[], &[]),
];

/// Backends of Triton whose libraries an operator may add: the platform and the file of their
/// models.
const OF_TRITON: [(&str, &str, &str); 4] = [
    ("tensorrt", "tensorrt_plan", "model.plan"),
    ("openvino", "", "model.xml"),
    ("tensorflow", "tensorflow_savedmodel", "model.savedmodel"),
    ("tensorflow", "tensorflow_graphdef", "model.graphdef"),
];

/// Returns the backend of Triton that a platform, or in its absence the model's files, name. Files of
/// this server's backends take precedence.
pub(super) fn backend_of_triton(platform: &str, files: &[String]) -> Option<&'static str> {
    if platform.is_empty() && backend_by_file("", files).is_some() {
        return None;
    }
    let row = OF_TRITON.iter().find(|(_, known, file)| match platform {
        "" => is_there(file, files),
        platform => *known == platform,
    });
    row.map(|(backend, ..)| *backend)
}

/// Returns the name under which a backend looks for a model file of this name: the name itself, or
/// the backend's default name with the same ending; `None` for any other kind of file.
pub fn default_model_file(name: &str) -> Option<String> {
    if BACKENDS.iter().any(|row| {
        row.files.contains(&name) || (row.endings.contains(&ARCHIVE) && name.ends_with(ARCHIVE))
    }) {
        return Some(name.to_owned());
    }
    let (_, ending) = name.rsplit_once('.')?;
    let mut files = BACKENDS
        .iter()
        .filter(|row| row.endings.iter().any(|known| known.get(1..) == Some(ending)));
    // A `.py` file may be any program.
    let found = files
        .find_map(|row| {
            row.files
                .iter()
                .find(|file| file.rsplit_once('.').is_some_and(|(_, of_file)| of_file == ending))
        })
        .filter(|_| ending != "py");
    found.map(|file| (*file).to_owned())
}

/// The backend of models in Hugging Face's layout.
const VLLM: &str = "vllm";

/// Returns whether files are a model in Hugging Face's layout, which vLLM serves.
pub fn is_hugging_face<'f>(files: impl IntoIterator<Item = &'f str>) -> bool {
    let mut has_config = false;
    let mut has_weights = false;
    for file in files {
        has_config |= file == "config.json";
        has_weights |= file.ends_with(".safetensors");
    }
    has_config && has_weights
}

/// The maximum number of instances of one group. A higher number is taken for a mistake.
pub const MAX_INSTANCES: u32 = 4096;

/// The parameter that allows a model to run on CPUs instead of a GPU.
const CPU_FALLBACK: &str = ModelConfig::CPU_FALLBACK;

/// Triton's default for `max_sequence_idle_microseconds`.
const SEQUENCE_IDLE_US: u64 = 1_000_000;

/// Takes the model's name from its directory if the configuration has none.
pub(super) fn name(config: &mut proto::ModelConfig, completion: &Completion<'_>) {
    if config.name.is_empty() {
        config.name = completion.directory.to_owned();
    }
}

/// Checks that the configuration's name is the name of the directory.
pub(super) fn check_name(config: &proto::ModelConfig, directory: &str) -> Result<(), ConfigError> {
    if config.name != directory {
        return Err(ConfigError::new(format!(
            "unexpected directory name '{directory}' for model '{}', directory name must equal \
             model name",
            config.name
        )));
    }
    Ok(())
}

/// Fills in `backend` from `platform` or from the model's files, and `platform` and the file name
/// from `backend`.
pub(super) fn backend(
    config: &mut proto::ModelConfig,
    completion: &Completion<'_>,
) -> Result<(), ConfigError> {
    if config.platform == "ensemble" {
        return match config.backend.as_str() {
            "" => Ok(()),
            _ => Err(ConfigError::new(format!(
                "Ensemble model '{}' must have platform type 'ensemble' and empty backend type",
                config.name
            ))),
        };
    }
    if config.backend.is_empty() {
        config.backend = missing_backend(config, completion)?;
    }
    check_pair(config)?;
    let here =
        |backend: &str| completion.backends.is_empty() || completion.backends.contains(&backend);
    if config.backend == "onnxruntime" && !here("onnxruntime") && here("tract") {
        // Without ONNX Runtime's library, the embedded engine serves the model; the configuration
        // shows which one is used.
        config.backend = "tract".to_owned();
    }
    if !here(&config.backend) {
        return Err(ConfigError::new(format!(
            "backend '{}' of model '{}' is not available here; available: {}{}",
            config.backend,
            config.name,
            completion.backends.join(", "),
            unsupported_backends::advice_clause(&config.backend)
        )));
    }
    let Some(known) = BACKENDS.iter().find(|row| row.backend == config.backend) else {
        return Ok(());
    };
    if config.platform.is_empty() && known.backend != "tract" {
        config.platform = known.platform.to_owned();
    }
    if config.default_model_filename.is_empty() {
        let file = default_file(&config.backend, completion.files);
        config.default_model_filename = file.unwrap_or_default().to_owned();
    }
    Ok(())
}

/// Returns the first file name of a backend that is among these, or else its most common one;
/// `None` for a backend without usual names.
pub(super) fn default_file(backend: &str, files: &[String]) -> Option<&'static str> {
    let usual = BACKENDS.iter().find(|row| row.backend == backend)?.files;
    usual.iter().find(|name| is_there(name, files)).or(usual.first()).copied()
}

fn is_there(name: &str, files: &[String]) -> bool {
    files.iter().any(|file| file == name)
}

/// Returns whether a version has a TorchServe archive, which may have any name.
fn has_archive(files: &[String]) -> bool {
    files.iter().any(|name| name.ends_with(ARCHIVE))
}

/// Returns whether this server includes the backend.
pub(super) fn is_own(backend: &str) -> bool {
    backend.is_empty() || BACKENDS.iter().any(|row| row.backend == backend)
}

fn missing_backend(
    config: &proto::ModelConfig,
    completion: &Completion<'_>,
) -> Result<String, ConfigError> {
    let of_triton = backend_of_triton(&config.platform, completion.files)
        .filter(|backend| completion.backends.contains(backend));
    if let Some(backend) = of_triton {
        return Ok(backend.to_owned());
    }
    if !config.platform.is_empty() {
        let row = BACKENDS.iter().find(|row| row.platform == config.platform);
        return row.map(|row| row.backend.to_owned()).ok_or_else(|| {
            let platform = &config.platform;
            let advice = unsupported_backends::advice_clause(platform);
            ConfigError::new(format!(
                "unexpected platform type '{platform}' for {}{advice}",
                config.name
            ))
        });
    }
    if completion.text.is_some() {
        return Ok(TEXT_BACKEND.to_owned());
    }
    let by_file = backend_by_file(&config.default_model_filename, completion.files);
    by_file.or_else(|| backend_of_name(completion.directory)).map(str::to_owned).ok_or_else(|| {
        let mut files: Vec<&str> = Vec::new();
        for file in BACKENDS.iter().flat_map(|row| row.files) {
            if !files.contains(file) {
                files.push(file);
            }
        }
        ConfigError::new(format!(
            "must specify 'platform' or 'backend' for '{}': its version directories hold no \
             archive ({ARCHIVE}), no model of Hugging Face (config.json and *.safetensors) and \
             none of {}, and its name does not have the form NAME.BACKEND",
            config.name,
            files.join(", ")
        ))
    })
}

/// Returns the backend that the files of a model select; `named` is the model's file from the
/// configuration, or empty.
pub(super) fn backend_by_file(named: &str, files: &[String]) -> Option<&'static str> {
    let is_hugging_face = is_hugging_face(files.iter().map(String::as_str));
    let row = BACKENDS
        .iter()
        .find(|row| row.files.iter().any(|file| named == *file || is_there(file, files)))
        // `model.json` then has the arguments of vLLM.
        .filter(|row| !(is_hugging_face && row.backend == "xgboost"));
    row.or_else(|| {
        BACKENDS.iter().find(|row| row.endings.iter().any(|ending| named.ends_with(ending)))
    })
    .or_else(|| BACKENDS.iter().find(|row| row.endings.contains(&ARCHIVE) && has_archive(files)))
    .map(|row| row.backend)
    .or_else(|| is_hugging_face.then_some(VLLM))
}

/// Returns the backend of a model named `NAME.BACKEND`.
fn backend_of_name(model: &str) -> Option<&str> {
    model.split_once('.').map(|(_, backend)| backend).filter(|backend| !backend.is_empty())
}

fn check_pair(config: &proto::ModelConfig) -> Result<(), ConfigError> {
    if config.platform.is_empty() {
        return Ok(());
    }
    let by_platform = BACKENDS.iter().any(|row| row.platform == config.platform);
    let by_backend = BACKENDS.iter().any(|row| row.backend == config.backend);
    let agree =
        BACKENDS.iter().any(|row| row.backend == config.backend && row.platform == config.platform);
    if agree || (!by_platform && !by_backend) {
        Ok(())
    } else {
        Err(pair(&config.platform, &config.backend))
    }
}

fn pair(platform: &str, backend: &str) -> ConfigError {
    ConfigError::new(format!("unexpected 'platform' and 'backend' pair, got:{platform}, {backend}"))
}

/// Sets the default version policy: only the highest version runs.
pub(super) fn version_policy(config: &mut proto::ModelConfig) {
    let policy = config.version_policy.get_or_insert_default();
    policy.policy_choice.get_or_insert(PolicyChoice::Latest(Latest { num_versions: 1 }));
}

/// Fills in the defaults that depend on the final maximum batch size. Returns a warning for each
/// instance group that runs on another kind of device than configured.
pub(super) fn defaults(
    config: &mut proto::ModelConfig,
    completion: &Completion<'_>,
) -> Vec<String> {
    version_policy(config);
    scheduling(config);
    if config.platform == "ensemble" {
        // Ensembles have neither instances nor optimizations.
        return Vec::new();
    }
    let optimization = config.optimization.get_or_insert_default();
    let pinned = proto::model_optimization_policy::PinnedMemoryBuffer { enable: true };
    optimization.input_pinned_memory.get_or_insert(pinned);
    optimization.output_pinned_memory.get_or_insert(pinned);
    instance_groups(config, completion);
    fall_back(config, completion)
}

/// Moves groups of kind GPU to CPUs if no GPU can be used and the model's parameter allows that.
fn fall_back(config: &mut proto::ModelConfig, completion: &Completion<'_>) -> Vec<String> {
    let allowed = config
        .parameters
        .get(CPU_FALLBACK)
        .is_some_and(|parameter| parameter.string_value == "true");
    let why = match config.backend.as_str() {
        _ if !allowed => return Vec::new(),
        _ if completion.gpus.is_empty() && completion.unusable_gpus.is_empty() => {
            "no GPUs are available".to_owned()
        }
        "sklearn" | "tract" => format!("its backend '{}' runs on CPUs only", config.backend),
        _ => return Vec::new(),
    };
    let on_gpus = config.instance_group.iter_mut().filter(|group| group.kind() == Kind::Gpu);
    on_gpus
        .map(|group| {
            group.set_kind(Kind::Cpu);
            group.gpus.clear();
            format!(
                "instance group {} runs on processors, as {CPU_FALLBACK} allows: {why}",
                group.name
            )
        })
        .collect()
}

fn scheduling(config: &mut proto::ModelConfig) {
    let batch = config.max_batch_size;
    match &mut config.scheduling_choice {
        Some(SchedulingChoice::DynamicBatching(dynamic))
            if batch > 0 && dynamic.preferred_batch_size.is_empty() =>
        {
            dynamic.preferred_batch_size.push(batch);
        }
        Some(SchedulingChoice::SequenceBatching(sequence)) => {
            if sequence.max_sequence_idle_microseconds == 0 {
                sequence.max_sequence_idle_microseconds = SEQUENCE_IDLE_US;
            }
            if let Some(StrategyChoice::Oldest(oldest)) = &mut sequence.strategy_choice
                && oldest.preferred_batch_size.is_empty()
            {
                oldest.preferred_batch_size.push(batch.max(1));
            }
        }
        _ => {}
    }
}

fn instance_groups(config: &mut proto::ModelConfig, completion: &Completion<'_>) {
    let takes_gpus = !completion.gpus.is_empty() && takes_gpus(&config.backend, completion);
    if config.instance_group.is_empty() {
        let mut group =
            proto::ModelInstanceGroup { name: config.name.clone(), ..Default::default() };
        if config.backend == VLLM {
            // One engine places its processes on GPUs itself.
            group.set_kind(Kind::Model);
        }
        config.instance_group.push(group);
    }
    for (index, group) in config.instance_group.iter_mut().enumerate() {
        if group.name.is_empty() {
            group.name = format!("{}_{index}", config.name);
        }
        if group.kind() == Kind::Auto {
            // A list of GPUs implies the kind GPU, as in Triton.
            group.set_kind(if takes_gpus || !group.gpus.is_empty() {
                Kind::Gpu
            } else {
                Kind::Cpu
            });
        }
        if group.count < 1 {
            group.count = 1;
        }
        if group.kind() == Kind::Gpu && group.gpus.is_empty() {
            group.gpus =
                completion.gpus.iter().filter_map(|&gpu| i32::try_from(gpu).ok()).collect();
        }
    }
}

/// Returns whether a backend computes graphs with ONNX Runtime, and so has its options.
pub(super) fn uses_onnx_runtime(backend: &str) -> bool {
    matches!(backend, "onnxruntime" | TEXT_BACKEND)
}

/// Returns whether models of a backend are placed on GPUs by default.
fn takes_gpus(backend: &str, completion: &Completion<'_>) -> bool {
    match backend {
        _ if completion.compiled => true,
        "onnxruntime_genai" | "python" | "pytorch" | "torchserve" | "vllm" => true,
        name => uses_onnx_runtime(name) && completion.no_cuda_provider.is_none(),
    }
}
