//! Auto-complete by the model's own code: builds the query for the code and merges its answer into
//! the configuration.
//!
//! As in Triton, only the maximum batch size, inputs, outputs, the scheduler and the transaction
//! policy are taken from the answer; for TorchServe archives also the instance count and placement.
//! Configured values are never overwritten. Triton leaves that to `pb_utils.ModelConfig` and
//! replaces the lists of inputs and outputs with the lists in the answer.

use prost_reflect::DynamicMessage;
use serde_json::value::RawValue;

use super::completion::Completion;
use super::config::VersionPolicy;
use super::draft::Draft;
use super::proto::model_config::SchedulingChoice;
use super::proto::model_instance_group::Kind;
use super::{ConfigError, normalize, proto, render, unsupported_backends, validate};

/// The answer of the model's code.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer<'a> {
    #[serde(borrow)]
    config: Option<&'a RawValue>,
    error: Option<String>,
    /// The groups of instances that a compiled backend prefers, the most preferred first.
    #[serde(default)]
    preferred_groups: Vec<PreferredGroup>,
}

/// A group of instances that a compiled backend prefers
/// (`TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup`).
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct PreferredGroup {
    kind: String,
    /// 0 for no preference.
    count: i32,
    /// Empty for all GPUs.
    gpus: Vec<i32>,
}

impl PreferredGroup {
    fn kind(&self) -> Option<Kind> {
        Kind::from_str_name(&self.kind)
    }

    /// Returns the group for instances on some of these GPUs; `None` if it needs others.
    fn group(&self, name: &str, gpus: &[i32]) -> Option<proto::ModelInstanceGroup> {
        let kind = self.kind()?;
        let mut group = proto::ModelInstanceGroup {
            name: name.to_owned(),
            count: self.count,
            ..Default::default()
        };
        group.set_kind(kind);
        if kind == Kind::Gpu {
            let wanted = |gpu: &i32| self.gpus.is_empty() || self.gpus.contains(gpu);
            group.gpus = gpus.iter().copied().filter(wanted).collect();
        }
        (kind != Kind::Gpu || !group.gpus.is_empty()).then_some(group)
    }
}

/// The location of the version whose code is queried.
#[derive(Clone, Copy, Debug)]
pub struct CodeLocation<'a> {
    /// The version's number.
    pub version: u64,
    /// Its directory.
    pub directory: &'a str,
    /// The model's directory.
    pub model_directory: &'a str,
    /// The settings of `--backend-config` for the backend and for all backends.
    pub backend_settings: &'a [(String, String)],
}

impl Draft {
    /// Fills in the name, the backend, the platform, the model's file name and the version policy,
    /// and checks nothing else.
    ///
    /// # Errors
    /// The backend cannot be determined, or contradicts the platform or the available backends.
    pub fn resolve(mut self, completion: &Completion<'_>) -> Result<Self, ConfigError> {
        normalize::name(&mut self.proto, completion);
        normalize::backend(&mut self.proto, completion)?;
        normalize::version_policy(&mut self.proto);
        Ok(self)
    }

    /// Returns the backend from the configuration; empty if it has none.
    pub fn backend(&self) -> &str {
        &self.proto.backend
    }

    /// Returns the backend of Triton that the platform, or in its absence the model's files, name;
    /// `None` if the configuration has a backend.
    pub fn backend_of_triton(&self, files: &[String]) -> Option<&'static str> {
        if !self.proto.backend.is_empty() {
            return None;
        }
        normalize::backend_of_triton(&self.proto.platform, files)
    }

    /// Returns the platform from the configuration; empty if it has none.
    pub fn platform(&self) -> &str {
        &self.proto.platform
    }

    /// Returns the library of a backend of Triton that `runtime` names.
    pub fn library(&self) -> Option<&str> {
        unsupported_backends::library(&self.proto.runtime)
    }

    /// Returns the value of a free parameter of the configuration.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.proto.parameters.get(name).map(|parameter| parameter.string_value.as_str())
    }

    /// Returns whether querying the model's code can be skipped, which saves starting an
    /// interpreter twice: the configuration of a TorchServe archive is taken to be complete if it
    /// has inputs and outputs.
    pub fn is_complete(&self) -> bool {
        self.proto.backend == "torchserve"
            && !self.proto.input.is_empty()
            && !self.proto.output.is_empty()
    }

    /// Returns which versions should run.
    ///
    /// # Errors
    /// The draft is not resolved, or lists invalid versions.
    pub fn version_policy(&self) -> Result<VersionPolicy, ConfigError> {
        validate::version_policy(&self.proto)
    }

    /// Encodes the draft as [`ModelConfig::encode_parts`](super::ModelConfig::encode_parts) does.
    pub fn encode_parts(&self) -> [Vec<u8>; 3] {
        super::config::encode_parts(&self.proto)
    }

    /// Builds the query for the code of a resolved model, as JSON: `{"config": {...}, "directory":
    /// "...", "model_directory": "...", "version": N, "backend": "...", "backend_settings": {...}}`.
    /// The configuration includes all defaults, as in Triton. Of `completion`, only the hardware
    /// matters.
    pub fn query(&self, place: &CodeLocation<'_>, completion: &Completion<'_>) -> String {
        let mut config = self.proto.clone();
        normalize::defaults(&mut config, completion);
        let text = |text: &str| serde_json::Value::from(text);
        let settings = place.backend_settings.iter();
        let settings = settings.map(|(name, value)| (name.clone(), text(value)));
        let settings = serde_json::Value::Object(settings.collect());
        format!(
            "{{\"config\":{},\"directory\":{},\"model_directory\":{},\"version\":{},\"backend\":\
             {},\"backend_settings\":{settings}}}",
            render::json(&config),
            text(place.directory),
            text(place.model_directory),
            place.version,
            text(&self.proto.backend)
        )
    }

    /// Merges the answer, `{"config": {...}}` or `{"error": "..."}`, into the draft. `gpus` are the
    /// GPUs on which instances are placed if the configuration names none.
    ///
    /// # Errors
    /// The answer is an error, has another form, or contradicts the configuration.
    pub fn merge_answer(mut self, answer: &str, gpus: &[u32]) -> Result<Self, ConfigError> {
        let name = self.proto.name.clone();
        let wrong = |what: &str| {
            ConfigError::new(format!("auto-complete of model '{name}' has answered {what}"))
        };
        let parsed: Answer<'_> = serde_json::from_str(answer)
            .map_err(|error| wrong(&format!("JSON of the wrong form: {error}")))?;
        let config = match &parsed {
            Answer { error: Some(error), .. } => return Err(ConfigError::new(error.trim_end())),
            Answer { config: Some(config), .. } => config,
            Answer { config: None, error: None, .. } => {
                return Err(wrong("neither a configuration nor an error"));
            }
        };
        let mut reader = serde_json::Deserializer::from_str(config.get());
        let message = DynamicMessage::deserialize(proto::descriptor(), &mut reader)
            .map_err(|error| wrong(&format!("an invalid model configuration: {error}")))?;
        let answer = proto::from_dynamic(&message)?;
        workers(&mut self.proto, &answer, gpus);
        prefer(&mut self.proto, &parsed.preferred_groups, gpus);
        merge(&mut self.proto, answer)?;
        Ok(self)
    }
}

/// Merges the fields of the answer that a model may set.
fn merge(config: &mut proto::ModelConfig, answer: proto::ModelConfig) -> Result<(), ConfigError> {
    if answer.max_batch_size < config.max_batch_size {
        return Err(ConfigError::new(format!(
            "configuration specified max_batch_size {}, but in auto-complete-config function for \
             model '{}' specified max_batch_size {}",
            config.max_batch_size, config.name, answer.max_batch_size
        )));
    }
    config.max_batch_size = answer.max_batch_size;
    if matches!(config.backend.as_str(), "onnxruntime_genai" | "torchserve" | "vllm") {
        // An archive may set parameters, such as the timeouts of its workers, and a language model
        // has a chat template.
        for (key, value) in answer.parameters {
            config.parameters.entry(key).or_insert(value);
        }
    }
    let model = config.name.as_str();
    config.input = tensors(model, std::mem::take(&mut config.input), answer.input)?;
    config.output = tensors(model, std::mem::take(&mut config.output), answer.output)?;
    let scheduler = answer.scheduling_choice;
    let chosen =
        scheduler.filter(|choice| !matches!(choice, SchedulingChoice::EnsembleScheduling(_)));
    if config.scheduling_choice.is_none() {
        config.scheduling_choice = chosen;
    }
    if let Some(policy) = answer.model_transaction_policy {
        if let Some(configured) = config.model_transaction_policy
            && configured.decoupled != policy.decoupled
        {
            return Err(ConfigError::new(format!(
                "trying to change decoupled property in auto-complete-config for model '{model}', \
                 which is already set to '{}'",
                configured.decoupled
            )));
        }
        config.model_transaction_policy = Some(policy);
    }
    Ok(())
}

/// Adds the instance groups that the answer of a TorchServe archive requests, distributed over the
/// GPUs in turn. For other models only the configuration defines instance groups.
fn workers(config: &mut proto::ModelConfig, answer: &proto::ModelConfig, gpus: &[u32]) {
    let Some(wanted) = answer.instance_group.first() else { return };
    if config.backend != "torchserve" || !config.instance_group.is_empty() {
        return;
    }
    let here: Vec<i32> = gpus.iter().filter_map(|&gpu| i32::try_from(gpu).ok()).collect();
    let gpus = match wanted.kind() {
        Kind::Cpu => Vec::new(),
        _ if here.is_empty() || wanted.gpus.is_empty() => here.clone(),
        _ => wanted.gpus.clone(),
    };
    let kind = if gpus.is_empty() { Kind::Cpu } else { Kind::Gpu }.into();
    let count = wanted.count;
    let of_one = config.name.clone();
    let mut add = |group| config.instance_group.push(proto::ModelInstanceGroup { kind, ..group });
    match i32::try_from(gpus.len()) {
        // The default placement already has this form.
        _ if count <= 1 && gpus == here => {}
        _ if count <= 1 => {
            add(proto::ModelInstanceGroup { name: of_one, gpus, ..Default::default() })
        }
        Ok(devices) if devices > 0 => {
            for (gpu, place) in gpus.into_iter().zip(0..count) {
                let count = count / devices + i32::from(place < count % devices);
                add(proto::ModelInstanceGroup { count, gpus: vec![gpu], ..Default::default() });
            }
        }
        _ => add(proto::ModelInstanceGroup { count, ..Default::default() }),
    }
}

/// Adds the first preferred group that these GPUs allow if the configuration has none, and takes the
/// number of instances from the preferred group of the same kind where the configuration has none.
fn prefer(config: &mut proto::ModelConfig, preferred: &[PreferredGroup], gpus: &[u32]) {
    let gpus: Vec<i32> = gpus.iter().filter_map(|&gpu| i32::try_from(gpu).ok()).collect();
    if config.instance_group.is_empty() {
        let found = preferred.iter().find_map(|preferred| preferred.group(&config.name, &gpus));
        config.instance_group.extend(found);
        return;
    }
    for group in config.instance_group.iter_mut().filter(|group| group.count < 1) {
        let kind = group.kind();
        if let Some(preferred) = preferred.iter().find(|other| other.kind() == Some(kind)) {
            group.count = preferred.count;
        }
    }
}

/// The common part of inputs and outputs.
trait Tensor {
    const ROLE: &'static str;
    fn name(&self) -> &str;
    fn datatype(&mut self) -> &mut i32;
    fn dims(&mut self) -> &mut Vec<i64>;
}

macro_rules! tensor {
    ($type:ty, $role:literal) => {
        impl Tensor for $type {
            const ROLE: &'static str = $role;
            fn name(&self) -> &str {
                &self.name
            }
            fn datatype(&mut self) -> &mut i32 {
                &mut self.data_type
            }
            fn dims(&mut self) -> &mut Vec<i64> {
                &mut self.dims
            }
        }
    };
}

tensor!(proto::ModelInput, "input");
tensor!(proto::ModelOutput, "output");

/// Returns the configured tensors, with missing fields filled in, then those that only the answer
/// contains.
fn tensors<T: Tensor>(
    model: &str,
    mut configured: Vec<T>,
    answered: Vec<T>,
) -> Result<Vec<T>, ConfigError> {
    for mut new in answered {
        match configured.iter_mut().find(|tensor| tensor.name() == new.name()) {
            Some(tensor) => fill(model, tensor, &mut new)?,
            None => configured.push(new),
        }
    }
    Ok(configured)
}

fn fill<T: Tensor>(model: &str, configured: &mut T, new: &mut T) -> Result<(), ConfigError> {
    let name = new.name().to_owned();
    let expected = *configured.datatype();
    let provided = *new.datatype();
    if expected == 0 {
        *configured.datatype() = provided;
    } else if provided != 0 && provided != expected {
        let name_of = |number| proto::DataType::try_from(number).unwrap_or_default().as_str_name();
        return Err(ConfigError::new(format!(
            "unable to load model '{model}', configuration expects datatype {} for {} '{name}', \
             model provides {}",
            name_of(expected),
            T::ROLE,
            name_of(provided)
        )));
    }
    if configured.dims().is_empty() {
        *configured.dims() = new.dims().clone();
    } else if !new.dims().is_empty() && new.dims() != configured.dims() {
        return Err(ConfigError::new(format!(
            "model '{model}', tensor '{name}': the model expects dims {:?} but the model \
             configuration specifies dims {:?}",
            new.dims(),
            configured.dims()
        )));
    }
    Ok(())
}
