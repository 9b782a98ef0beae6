//! Converts a completed configuration in the schema's form to a [`ModelConfig`], and refuses
//! invalid ones. Texts are Triton's where Triton has one.

use std::hash::RandomState;
use std::time::Duration;

use super::config::*;
use super::error::error;
use super::proto::model_config::SchedulingChoice;
use super::proto::model_instance_group::Kind;
use super::proto::model_version_policy::PolicyChoice;
use super::proto::model_warmup::input::InputDataType;
use super::proto::{self, ModelTensorReshape, datatype};
use super::ragged::{batch_inputs, batch_outputs};
use super::scheduling::{Scheduling, flag, scheduling};
use super::state::states;
use super::{Completion, ConfigError, normalize, session};
use crate::tensor::DataType;

/// Backends of this server that require a model's inputs and outputs to be known before they start.
const NEEDS_TENSORS: [&str; 3] = ["onnxruntime", "tract", "builtin"];

/// Checks and converts a configuration.
pub(super) fn config(proto: proto::ModelConfig) -> Result<ModelConfig, ConfigError> {
    let name = proto.name.as_str();
    let is_ensemble = proto.platform == "ensemble";
    if proto.platform.is_empty() && proto.backend.is_empty() {
        return error(format!("must specify 'platform' or 'backend' for '{name}'"));
    }
    let Ok(max_batch_size) = u32::try_from(proto.max_batch_size) else {
        let given = proto.max_batch_size;
        return error(format!(
            "'max_batch_size' must be non-negative value for {name}: {given} is given"
        ));
    };
    let decoupled = decoupled(&proto);
    let cache = proto.response_cache.is_some_and(|cache| cache.enable);
    check_cache(&proto, cache, decoupled)?;
    let config = ModelConfig {
        name: proto.name.clone(),
        platform: proto.platform.clone(),
        backend: proto.backend.clone(),
        version_policy: version_policy(&proto)?,
        max_batch_size,
        inputs: inputs(&proto)?,
        outputs: outputs(&proto)?,
        batch_inputs: batch_inputs(&proto)?,
        batch_outputs: batch_outputs(&proto)?,
        states: states(&proto)?,
        scheduling: scheduling(&proto, max_batch_size)?,
        instance_groups: if is_ensemble { Vec::new() } else { instance_groups(&proto)? },
        default_model_filename: file_name(&proto)?,
        parameters: proto
            .parameters
            .iter()
            .map(|(key, value)| (key.clone(), value.string_value.clone()))
            .collect(),
        metric_tags: proto.metric_tags.clone(),
        histogram_buckets: histogram_buckets(&proto)?,
        decoupled,
        response_cache: cache,
        warmups: proto
            .model_warmup
            .iter()
            .map(|raw| warmup(raw, name))
            .collect::<Result<_, _>>()?,
        strict_output_types: flag(&proto, "strict_output_types")?,
        max_open_requests: max_open_requests(&proto)?,
        response_timeouts: response_timeouts(&proto, decoupled)?,
        warnings: Vec::new(),
        proto,
        shape_hash: RandomState::new(),
    };
    check_tensors(&config)?;
    check_ensemble(&config)?;
    config.allows_cpu_fallback()?;
    if normalize::uses_onnx_runtime(&config.backend) {
        session::check(&config)?;
    }
    Ok(config)
}

/// Reads the parameter [`ModelConfig::MAX_OPEN_REQUESTS`].
fn max_open_requests(proto: &proto::ModelConfig) -> Result<usize, ConfigError> {
    const MAX_OPEN_REQUESTS: &str = ModelConfig::MAX_OPEN_REQUESTS;
    let Some(number) = above_zero(proto, MAX_OPEN_REQUESTS)? else { return Ok(usize::MAX) };
    if let Some(SchedulingChoice::SequenceBatching(_)) = proto.scheduling_choice {
        return error(format!(
            "model '{}' has the parameter '{MAX_OPEN_REQUESTS}', which models with \
             sequence_batching do not have",
            proto.name
        ));
    }
    Ok(usize::try_from(number).unwrap_or(usize::MAX))
}

/// Reads the timeouts of responses.
fn response_timeouts(
    proto: &proto::ModelConfig,
    decoupled: bool,
) -> Result<ResponseTimeouts, ConfigError> {
    let read = |name: &str| match above_zero(proto, name)? {
        Some(_) if !decoupled => error(format!(
            "model '{}' has the parameter '{name}', which only decoupled models have",
            proto.name
        )),
        limit => Ok(limit.map(Duration::from_millis)),
    };
    Ok(ResponseTimeouts {
        first: read("first_response_timeout_ms")?,
        interval: read("response_interval_timeout_ms")?,
    })
}

/// Reads a parameter that must be an integer above 0; `None` without it.
fn above_zero(proto: &proto::ModelConfig, name: &str) -> Result<Option<u64>, ConfigError> {
    let Some(parameter) = proto.parameters.get(name) else { return Ok(None) };
    let text = parameter.string_value.as_str();
    match text.parse() {
        Ok(number) if number > 0 => Ok(Some(number)),
        _ => error(format!(
            "the parameter '{name}' of model '{}' is '{}'; allowed are integers above 0",
            proto.name,
            text.escape_debug()
        )),
    }
}

/// Checks the instance groups against this machine's GPUs and the backend's capabilities.
pub(super) fn placement(
    config: &ModelConfig,
    completion: &Completion<'_>,
) -> Result<(), ConfigError> {
    let Completion { gpus, unusable_gpus, .. } = completion;
    for group in &config.instance_groups {
        let this = format!("instance group {} of model {}", group.name, config.name);
        match group.kind {
            InstanceKind::Gpu if gpus.is_empty() && unusable_gpus.is_empty() => {
                return error(format!("{this} has kind KIND_GPU but no GPUs are available"));
            }
            InstanceKind::Gpu => {
                if let Some(why) = keeps_off_gpus(config, completion)? {
                    return error(format!("{this} has kind KIND_GPU but {why}"));
                }
                let mut here: Vec<u32> = gpus.iter().chain(*unusable_gpus).copied().collect();
                here.sort_unstable();
                let known = || here.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
                if let Some(unknown) = group.gpus.iter().find(|gpu| !here.contains(gpu)) {
                    let known = known();
                    return error(format!(
                        "{this} specifies invalid or unsupported gpu id {unknown}; GPUs here: \
                         {known}"
                    ));
                }
                if group.gpus.is_empty() {
                    return error(format!(
                        "{this} has kind KIND_GPU but none of the GPUs here can be used: {}",
                        known()
                    ));
                }
            }
            InstanceKind::Cpu if !group.gpus.is_empty() => {
                return error(format!("{this} has kind KIND_CPU but specifies one or more GPUs"));
            }
            InstanceKind::Model if !group.gpus.is_empty() => {
                return error(format!("{this} has kind KIND_MODEL but specifies one or more GPUs"));
            }
            InstanceKind::Cpu | InstanceKind::Model => {}
        }
    }
    Ok(())
}

/// Returns why a model cannot run on any GPU, as the end of a sentence; `None` if it can.
fn keeps_off_gpus(
    config: &ModelConfig,
    completion: &Completion<'_>,
) -> Result<Option<String>, ConfigError> {
    let own =
        |advice: &str| Some(format!("its backend '{}' runs on CPUs only{advice}", config.backend));
    Ok(match config.backend.as_str() {
        _ if completion.compiled => None,
        "sklearn" => own(""),
        "tract" => own("; ONNX models run on GPUs with backend 'onnxruntime' and `pip install \
                        onnxruntime-gpu[cuda,cudnn]`"),
        name if !normalize::uses_onnx_runtime(name) => None,
        _ if config.allows_cpu_fallback()? => None,
        _ => completion.no_cuda_provider.map(|why| {
            let fallback = ModelConfig::CPU_FALLBACK;
            format!("{why}; the parameter {fallback}: \"true\" lets the model run on CPUs instead")
        }),
    })
}

fn decoupled(proto: &proto::ModelConfig) -> bool {
    proto.model_transaction_policy.is_some_and(|policy| policy.decoupled)
}

pub(super) fn check_cache(
    proto: &proto::ModelConfig,
    cache: bool,
    decoupled: bool,
) -> Result<(), ConfigError> {
    let sequences = matches!(proto.scheduling_choice, Some(SchedulingChoice::SequenceBatching(_)));
    let why = match (cache, decoupled, sequences) {
        (true, true, _) => "'decoupled' transaction policy",
        (true, _, true) => "sequence batching scheduler",
        _ => return Ok(()),
    };
    error(format!(
        "Response Cache does not currently support model {} with {why}. Please disable the \
         response cache.",
        proto.name
    ))
}

pub(super) fn version_policy(proto: &proto::ModelConfig) -> Result<VersionPolicy, ConfigError> {
    match proto.version_policy.as_ref().and_then(|policy| policy.policy_choice.as_ref()) {
        Some(PolicyChoice::Latest(latest)) => Ok(VersionPolicy::Latest(latest.num_versions)),
        Some(PolicyChoice::All(_)) => Ok(VersionPolicy::All),
        Some(PolicyChoice::Specific(specific)) => {
            let versions: Option<Vec<u64>> = specific
                .versions
                .iter()
                .map(|&version| u64::try_from(version).ok().filter(|&version| version > 0))
                .collect();
            versions.map(VersionPolicy::Specific).ok_or_else(|| {
                ConfigError::new(format!(
                    "'version_policy.specific' must list versions of 1 or greater for {}",
                    proto.name
                ))
            })
        }
        None => error(format!("must specify 'version policy' for {}", proto.name)),
    }
}

/// Checks that the name of the model's file, which is untrusted, stays within the version
/// directory.
fn file_name(proto: &proto::ModelConfig) -> Result<String, ConfigError> {
    let name = &proto.default_model_filename;
    if name.starts_with('/') || name.contains('\0') || name.split('/').any(|part| part == "..") {
        return error(format!(
            "'default_model_filename' must stay in the version directory for {}, got '{}'",
            proto.name,
            name.escape_debug()
        ));
    }
    Ok(name.clone())
}

fn inputs(proto: &proto::ModelConfig) -> Result<Vec<TensorSpec>, ConfigError> {
    proto
        .input
        .iter()
        .map(|input| {
            let spec = TensorSpec {
                name: input.name.clone(),
                datatype: datatype(input.data_type).unwrap_or(DataType::Bool),
                dims: input.dims.clone(),
                reshape: input.reshape.as_ref().map(|reshape| reshape.shape.clone()),
                optional: input.optional,
                allow_ragged_batch: input.allow_ragged_batch,
                is_shape_tensor: input.is_shape_tensor,
                label_filename: String::new(),
            };
            let dims = input.dims.as_slice();
            let reshape = input.reshape.as_ref();
            check_io(
                proto,
                &Io { role: "input", name: &input.name, data_type: input.data_type, dims, reshape },
            )?;
            if input.format() != proto::model_input::Format::None && input.dims.len() != 3 {
                return error(format!("model input NHWC/NCHW require 3 dims for {}", proto.name));
            }
            Ok(spec)
        })
        .collect()
}

fn outputs(proto: &proto::ModelConfig) -> Result<Vec<TensorSpec>, ConfigError> {
    proto
        .output
        .iter()
        .map(|output| {
            let dims = output.dims.as_slice();
            let reshape = output.reshape.as_ref();
            check_io(
                proto,
                &Io {
                    role: "output",
                    name: &output.name,
                    data_type: output.data_type,
                    dims,
                    reshape,
                },
            )?;
            Ok(TensorSpec {
                name: output.name.clone(),
                datatype: datatype(output.data_type).unwrap_or(DataType::Bool),
                dims: output.dims.clone(),
                reshape: output.reshape.as_ref().map(|reshape| reshape.shape.clone()),
                optional: false,
                allow_ragged_batch: false,
                is_shape_tensor: output.is_shape_tensor,
                label_filename: output.label_filename.clone(),
            })
        })
        .collect()
}

/// One input or output as written.
struct Io<'a> {
    /// `input` or `output`, for messages.
    role: &'static str,
    name: &'a str,
    data_type: i32,
    dims: &'a [i64],
    reshape: Option<&'a ModelTensorReshape>,
}

/// Checks that an input or output has a name, a datatype, dimensions, and a reshape with the same
/// number of elements.
fn check_io(proto: &proto::ModelConfig, io: &Io<'_>) -> Result<(), ConfigError> {
    let Io { role, name, data_type, dims, reshape } = *io;
    let model = proto.name.as_str();
    if name.is_empty() {
        return error(format!("model {role} must specify 'name' for {model}"));
    }
    let wrong = |what: &str| error(format!("model {role} '{name}' {what} for {model}"));
    if datatype(data_type).is_none() {
        return wrong("must specify 'data_type'");
    }
    if dims.is_empty() {
        return wrong("must specify 'dims'");
    }
    let is_dim = |dim: &i64| *dim >= 1 || *dim == -1;
    let wrong_dims = |what: &str, dims: &[i64]| {
        let rule = "must be integer >= 1, or -1 to indicate a variable-size dimension";
        error(format!("model {role} '{name}' {what} {rule} for {model}: {dims:?} is given"))
    };
    if !dims.iter().all(is_dim) {
        return wrong_dims("dimension", dims);
    }
    let Some(reshape) = reshape.map(|reshape| reshape.shape.as_slice()) else { return Ok(()) };
    if !reshape.iter().all(is_dim) {
        return wrong_dims("reshape dimensions", reshape);
    }
    if reshape.is_empty() && proto.max_batch_size == 0 {
        return wrong(
            "cannot have empty reshape for non-batching model as scalar tensors are not supported",
        );
    }
    let dims = fixed_parts(dims);
    let reshape = fixed_parts(reshape);
    match (dims.len() == 1) == (reshape.len() == 1) {
        true if dims.len() != reshape.len() => {
            wrong("has different number of variable-size dimensions for dims and reshape")
        }
        true if dims == reshape => Ok(()),
        _ => wrong("has different size for dims and reshape"),
    }
}

/// Returns the products of the fixed dimensions before, between and after the variable ones.
/// Saturating is harmless: no real tensor is that large.
fn fixed_parts(dims: &[i64]) -> Vec<i64> {
    dims.split(|&dim| dim == -1)
        .map(|part| part.iter().fold(1i64, |product, &dim| product.saturating_mul(dim)))
        .collect()
}

fn check_tensors(config: &ModelConfig) -> Result<(), ConfigError> {
    for (role, tensors) in [("input", &config.inputs), ("output", &config.outputs)] {
        let mut names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        if let Some([twice, _]) = names.array_windows().find(|[one, next]| one == next) {
            return error(format!("model {role} '{twice}' is listed twice for {}", config.name));
        }
        let needed =
            NEEDS_TENSORS.contains(&config.backend.as_str()) || config.platform == "ensemble";
        if needed && tensors.is_empty() {
            return error(format!(
                "must specify at least one '{role}' for '{}': the configuration has none and the \
                 model file gives none",
                config.name
            ));
        }
    }
    Ok(())
}

fn check_ensemble(config: &ModelConfig) -> Result<(), ConfigError> {
    let name = &config.name;
    let Scheduling::Ensemble { steps, .. } = &config.scheduling else {
        return match config.platform.as_str() {
            "ensemble" => error(format!(
                "ensemble scheduling must be set for ensemble {name} whose platform is ensemble"
            )),
            _ => Ok(()),
        };
    };
    if config.platform != "ensemble" {
        return error(format!(
            "ensemble scheduling cannot be set for model '{name}' whose platform is not ensemble"
        ));
    }
    if !config.proto.instance_group.is_empty() {
        return error(format!("instance group should not be specified for ensemble '{name}'"));
    }
    if config.proto.optimization.is_some() {
        return error(format!("optimization should not be specified for ensemble '{name}'"));
    }
    if !config.warmups.is_empty() {
        return error(format!("model_warmup can not be specified for ensemble '{name}'"));
    }
    if steps.is_empty() {
        return error(format!("must specify 'step' for ensemble '{name}'"));
    }
    Ok(())
}

fn instance_groups(proto: &proto::ModelConfig) -> Result<Vec<InstanceGroup>, ConfigError> {
    if proto.instance_group.is_empty() {
        return error(format!("must specify one or more 'instance group's for {}", proto.name));
    }
    proto
        .instance_group
        .iter()
        .map(|group| {
            let this = format!("instance group {} of model {}", group.name, proto.name);
            let kind = match group.kind() {
                Kind::Auto => return error(format!("{this} has unexpected kind KIND_AUTO")),
                Kind::Gpu => InstanceKind::Gpu,
                Kind::Cpu => InstanceKind::Cpu,
                Kind::Model => InstanceKind::Model,
            };
            let count = u32::try_from(group.count).unwrap_or(0);
            if !(1..=normalize::MAX_INSTANCES).contains(&count) {
                return error(format!(
                    "{this} has count {}, allowed: 1 to {}",
                    group.count,
                    normalize::MAX_INSTANCES
                ));
            }
            let limiter = group.rate_limiter.clone().unwrap_or_default();
            if limiter.resources.iter().any(|resource| resource.name.is_empty()) {
                return error(format!("{this} has a rate limiter resource without a name"));
            }
            Ok(InstanceGroup {
                name: group.name.clone(),
                kind,
                count,
                gpus: group
                    .gpus
                    .iter()
                    .map(|&gpu| {
                        u32::try_from(gpu).map_err(|_| {
                            ConfigError::new(format!(
                                "{this} specifies invalid or unsupported gpu id {gpu}"
                            ))
                        })
                    })
                    .collect::<Result<_, _>>()?,
                passive: group.passive,
                host_policy: group.host_policy.clone(),
                resources: limiter
                    .resources
                    .into_iter()
                    .map(|raw| Resource { name: raw.name, global: raw.global, count: raw.count })
                    .collect(),
                priority: limiter.priority,
            })
        })
        .collect()
}

fn warmup(raw: &proto::ModelWarmup, model: &str) -> Result<Warmup, ConfigError> {
    Ok(Warmup {
        name: raw.name.clone(),
        batch_size: raw.batch_size,
        count: raw.count.max(1),
        inputs: raw
            .inputs
            .iter()
            .map(|(name, input)| {
                let this = format!("warmup '{}' of model {model}, input '{name}'", raw.name);
                let data = match &input.input_data_type {
                    Some(InputDataType::ZeroData(_)) => WarmupData::Zero,
                    Some(InputDataType::RandomData(_)) => WarmupData::Random,
                    Some(InputDataType::InputDataFile(file)) => WarmupData::File(file.clone()),
                    None => {
                        return error(format!(
                            "{this}: one of zero_data, random_data and input_data_file must be \
                             given"
                        ));
                    }
                };
                let Some(datatype) = datatype(input.data_type) else {
                    return error(format!("{this}: data_type must be given"));
                };
                Ok((name.clone(), WarmupInput { datatype, dims: input.dims.clone(), data }))
            })
            .collect::<Result<_, _>>()?,
    })
}

/// Converts `model_metrics.metric_control`. Each family's buckets must be finite and ascending, as
/// in `metrics.yaml`; a last bound of infinity is dropped, because it is implied.
fn histogram_buckets(proto: &proto::ModelConfig) -> Result<Vec<(String, Vec<f64>)>, ConfigError> {
    use proto::model_metrics::metric_control::MetricOptions;
    let controls = proto.model_metrics.iter().flat_map(|metrics| &metrics.metric_control);
    let mut all = Vec::new();
    for control in controls {
        let family =
            control.metric_identifier.as_ref().map_or("", |identifier| identifier.family.as_str());
        let Some(MetricOptions::HistogramOptions(options)) = &control.metric_options else {
            return error(format!(
                "model_metrics: the control of family '{family}' needs 'histogram_options'"
            ));
        };
        if options.buckets.is_empty() {
            return error(format!(
                "model_metrics: the 'histogram_options' of family '{family}' need 'buckets'"
            ));
        }
        let mut bounds = options.buckets.clone();
        bounds.pop_if(|bound| *bound == f64::INFINITY);
        let ascend = bounds.iter().zip(bounds.iter().skip(1)).all(|(one, next)| one < next);
        if family.is_empty() || !ascend || bounds.iter().any(|bound| !bound.is_finite()) {
            let text = format!(
                "model_metrics: the buckets {:?} of family '{family}' are not allowed; a control \
                 needs the name of a histogram and ascending, finite upper bounds",
                options.buckets
            );
            return Err(ConfigError::new(text));
        }
        all.push((family.to_owned(), bounds));
    }
    Ok(all)
}
