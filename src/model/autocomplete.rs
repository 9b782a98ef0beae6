//! Fills in missing fields of a configuration from the model file, and refuses a configuration that
//! contradicts the file. The rules come from Triton's ONNX Runtime backend.

use super::controls::is_made_by_server;
use super::proto::model_config::SchedulingChoice;
use super::proto::{self, ModelTensorReshape};
use super::{ConfigError, ModelSignature, SignatureTensor, state};
use crate::tensor::{DataType, format_shape};

/// The common part of a configuration's inputs and outputs.
trait TensorConfig: Default {
    const ROLE: &'static str;
    fn name(&self) -> &str;
    fn datatype(&self) -> i32;
    fn dims(&self) -> &[i64];
    fn reshape(&self) -> Option<&ModelTensorReshape>;
    fn fill(&mut self, name: &str, datatype: DataType);
    fn set_dims(&mut self, dims: Vec<i64>, reshape: Option<ModelTensorReshape>);
    /// Whether the model receives the elements of all requests concatenated in one dimension.
    fn is_flat(&self, config: &proto::ModelConfig) -> bool;
    /// The model's dimensions, without the batch.
    fn model_dims(&self) -> &[i64] {
        self.reshape().map_or(self.dims(), |reshape| &reshape.shape)
    }
}

macro_rules! tensor_config {
    ($type:ty, $role:literal, $is_flat:expr) => {
        impl TensorConfig for $type {
            const ROLE: &'static str = $role;
            fn name(&self) -> &str {
                &self.name
            }
            fn datatype(&self) -> i32 {
                self.data_type
            }
            fn dims(&self) -> &[i64] {
                &self.dims
            }
            fn reshape(&self) -> Option<&ModelTensorReshape> {
                self.reshape.as_ref()
            }
            fn fill(&mut self, name: &str, datatype: DataType) {
                self.name = name.to_owned();
                if self.data_type == 0 {
                    self.data_type = i32::from(datatype.number());
                }
            }
            fn set_dims(&mut self, dims: Vec<i64>, reshape: Option<ModelTensorReshape>) {
                self.dims = dims;
                self.reshape = reshape;
            }
            fn is_flat(&self, config: &proto::ModelConfig) -> bool {
                config.max_batch_size > 0 && $is_flat(self, config)
            }
        }
    };
}

tensor_config!(proto::ModelInput, "input", |input: &Self, _: &proto::ModelConfig| input
    .allow_ragged_batch);
tensor_config!(proto::ModelOutput, "output", |output: &Self, config: &proto::ModelConfig| {
    config.batch_output.iter().any(|scattered| scattered.target_name.contains(&output.name))
});

/// Fills in missing inputs, outputs, datatypes, dimensions and the maximum batch size. Filling in
/// the maximum batch size also enables the dynamic batcher, unless a scheduler is configured.
/// Returns a warning if the maximum batch size is not filled in although the shapes alone would
/// allow it.
pub(super) fn fill(
    config: &mut proto::ModelConfig,
    signature: &ModelSignature,
    default_max_batch_size: u32,
) -> Result<Option<String>, ConfigError> {
    let fixed = signature.inputs.iter().chain(&signature.outputs).find(|tensor| !has_batch(tensor));
    let default = i32::try_from(default_max_batch_size).unwrap_or(i32::MAX);
    let mut warning = None;
    if config.max_batch_size == 0
        && fixed.is_none()
        && leaves_room(config, signature)
        && default > 0
    {
        warning = different_first_dims(signature);
        if warning.is_none() {
            config.max_batch_size = default;
            if default > 1 && config.scheduling_choice.is_none() {
                config.scheduling_choice =
                    Some(SchedulingChoice::DynamicBatching(Default::default()));
            }
        }
    }
    let batching = config.max_batch_size > 0;
    if let (true, Some(tensor)) = (batching, fixed) {
        return Err(ConfigError::new(format!(
            "autofill failed for model '{}': model does not support batching while non-zero \
             max_batch_size is specified: tensor '{}' has shape {}, its first dimension is not \
             variable",
            config.name,
            tensor.name,
            tensor.dims.as_deref().map_or("unknown".to_owned(), format_shape),
        )));
    }
    let inputs: Vec<_> = signature
        .inputs
        .iter()
        .filter(|model| !is_made_by_server(config, &model.name) && !is_state(config, &model.name))
        .cloned()
        .collect();
    let outputs: Vec<_> = signature
        .outputs
        .iter()
        .filter(|model| {
            state::configured_states(config).iter().all(|state| state.output_name != model.name)
        })
        .cloned()
        .collect();
    let whole = config.clone();
    fill_tensors(&whole, &mut config.input, &inputs);
    // A state is among the outputs only if the configuration lists it there.
    let outputs = if whole.output.is_empty() { &outputs } else { &signature.outputs };
    fill_tensors(&whole, &mut config.output, outputs);
    Ok(warning)
}

/// Returns whether the input is a state, which the server keeps.
fn is_state(config: &proto::ModelConfig, input: &str) -> bool {
    state::configured_states(config).iter().any(|state| state.input_name == input)
}

/// Returns the model's inputs and outputs for the states.
fn states(config: &proto::ModelConfig) -> (Vec<proto::ModelInput>, Vec<proto::ModelOutput>) {
    let both = state::configured_states(config).iter().map(|state| {
        let data_type = state.data_type;
        let dims = state.dims.clone();
        let input = proto::ModelInput {
            name: state.input_name.clone(),
            data_type,
            dims,
            ..Default::default()
        };
        (
            input,
            proto::ModelOutput {
                name: state.output_name.clone(),
                data_type,
                dims: state.dims.clone(),
                ..Default::default()
            },
        )
    });
    both.unzip()
}

/// Returns a warning if two first dimensions have different names. Their sizes may differ then, so
/// that the outputs of a batch could not be divided among its requests. Triton batches such models.
fn different_first_dims(signature: &ModelSignature) -> Option<String> {
    let tensors = signature.inputs.iter().chain(&signature.outputs);
    let mut named =
        tensors.filter_map(|tensor| Some((&tensor.name, tensor.first_dim_name.as_ref()?)));
    let (tensor, name) = named.next()?;
    let (other_tensor, other_name) = named.find(|(_, other_name)| *other_name != name)?;
    Some(format!(
        "requests are not batched: the first dimension of '{tensor}' is named '{name}' and that \
         of '{other_tensor}' '{other_name}', so that their sizes may differ; if both are the \
         batch, set 'max_batch_size'"
    ))
}

fn has_batch(tensor: &SignatureTensor) -> bool {
    tensor.dims.as_ref().is_some_and(|dims| dims.first() == Some(&-1))
}

/// Returns whether every tensor with configured dimensions has one dimension less than the model's,
/// which is the batch.
fn leaves_room(config: &proto::ModelConfig, signature: &ModelSignature) -> bool {
    let (inputs, outputs) = states(config);
    one_short(config, &config.input, &signature.inputs)
        && one_short(config, &config.output, &signature.outputs)
        && one_short(config, &inputs, &signature.inputs)
        && one_short(config, &outputs, &signature.outputs)
}

fn one_short<T: TensorConfig>(
    config: &proto::ModelConfig,
    tensors: &[T],
    signature: &[SignatureTensor],
) -> bool {
    tensors.iter().filter(|tensor| !tensor.dims().is_empty() && !tensor.is_flat(config)).all(
        |tensor| {
            let model = signature.iter().find(|model| model.name == tensor.name());
            let rank = model.and_then(|model| model.dims.as_ref()).map_or(0, Vec::len);
            tensor.model_dims().len() + 1 == rank
        },
    )
}

fn fill_tensors<T: TensorConfig>(
    config: &proto::ModelConfig,
    tensors: &mut Vec<T>,
    signature: &[SignatureTensor],
) {
    if tensors.is_empty() {
        tensors.extend(signature.iter().map(|model| {
            let mut tensor = T::default();
            tensor.fill(&model.name, model.datatype);
            tensor
        }));
    }
    for tensor in tensors {
        let Some(model) = signature.iter().find(|model| model.name == tensor.name()) else {
            continue;
        };
        tensor.fill(&model.name, model.datatype);
        let Some(dims) = model.dims.as_ref().filter(|_| tensor.dims().is_empty()) else { continue };
        let first = usize::from(config.max_batch_size > 0 && !tensor.is_flat(config));
        let dims = dims.get(first..).unwrap_or_default();
        if dims.is_empty() {
            // A scalar per item: the protocol's shape is [1]; the model's tensor has only the batch
            // dimension.
            tensor.set_dims(vec![1], Some(ModelTensorReshape { shape: Vec::new() }));
        } else {
            tensor.set_dims(dims.to_vec(), tensor.reshape().cloned());
        }
    }
}

/// Refuses a configuration that names unknown tensors, omits an input of the model, or differs in
/// datatype or shape.
pub(super) fn compare(
    config: &proto::ModelConfig,
    signature: &ModelSignature,
) -> Result<(), ConfigError> {
    compare_tensors(config, &config.input, &signature.inputs)?;
    compare_tensors(config, &config.output, &signature.outputs)?;
    compare_made(config, signature)?;
    let (inputs, outputs) = states(config);
    compare_tensors(config, &inputs, &signature.inputs)?;
    compare_tensors(config, &outputs, &signature.outputs)?;
    let is_known = |name: &String| {
        config.input.iter().any(|input| input.name == *name)
            || is_made_by_server(config, name)
            || is_state(config, name)
    };
    let missing = signature.inputs.iter().find(|model| !is_known(&model.name));
    match missing {
        Some(model) => Err(ConfigError::new(format!(
            "unable to load model '{}', configuration expects {} inputs, model provides {}: input \
             '{}' is not configured",
            config.name,
            config.input.len(),
            signature.inputs.len(),
            model.name
        ))),
        None => Ok(()),
    }
}

/// Checks that the model has each batch input with the configured datatype.
fn compare_made(
    config: &proto::ModelConfig,
    signature: &ModelSignature,
) -> Result<(), ConfigError> {
    for made in &config.batch_input {
        for target in &made.target_name {
            let model = signature.inputs.iter().find(|model| model.name == *target);
            let Some(model) = model else {
                return Err(unexpected("input", target, config, &signature.inputs));
            };
            if made.data_type != i32::from(model.datatype.number()) {
                return Err(ConfigError::new(format!(
                    "unable to load model '{}', configuration expects datatype {} for batch input \
                     '{target}', model provides TYPE_{}",
                    config.name,
                    made.data_type().as_str_name(),
                    model.datatype.name()
                )));
            }
        }
    }
    Ok(())
}

fn unexpected(
    role: &str,
    name: &str,
    config: &proto::ModelConfig,
    signature: &[SignatureTensor],
) -> ConfigError {
    let allowed: Vec<&str> = signature.iter().map(|model| model.name.as_str()).collect();
    let model = &config.name;
    let allowed = allowed.join(", ");
    ConfigError::new(format!(
        "unexpected inference {role} '{name}' for model '{model}', allowed {role}s are: {allowed}"
    ))
}

fn compare_tensors<T: TensorConfig>(
    config: &proto::ModelConfig,
    tensors: &[T],
    signature: &[SignatureTensor],
) -> Result<(), ConfigError> {
    for tensor in tensors.iter().filter(|tensor| !tensor.name().is_empty()) {
        let Some(model) = signature.iter().find(|model| model.name == tensor.name()) else {
            return Err(unexpected(T::ROLE, tensor.name(), config, signature));
        };
        if tensor.datatype() != 0 && tensor.datatype() != i32::from(model.datatype.number()) {
            let configured = proto::DataType::try_from(tensor.datatype())
                .unwrap_or(proto::DataType::TypeInvalid);
            let provided =
                proto::DataType::try_from(i32::from(model.datatype.number())).unwrap_or_default();
            return Err(ConfigError::new(format!(
                "unable to load model '{}', configuration expects datatype {} for {} '{}', model \
                 provides {}",
                config.name,
                configured.as_str_name(),
                T::ROLE,
                tensor.name(),
                provided.as_str_name()
            )));
        }
        compare_shape(config, tensor, model)?;
    }
    Ok(())
}

fn compare_shape<T: TensorConfig>(
    config: &proto::ModelConfig,
    tensor: &T,
    model: &SignatureTensor,
) -> Result<(), ConfigError> {
    let Some(provided) = model.dims.as_deref().filter(|_| !tensor.dims().is_empty()) else {
        return Ok(());
    };
    if tensor.is_flat(config) {
        return match provided {
            [-1] => Ok(()),
            _ => Err(ConfigError::new(format!(
                "unable to load model '{}', configuration expects model provides {role} with \
                 shape [-1] for ragged {role} '{}', model provides {}",
                config.name,
                tensor.name(),
                format_shape(provided),
                role = T::ROLE
            ))),
        };
    }
    let mut full = tensor.model_dims().to_vec();
    if config.max_batch_size > 0 {
        full.insert(0, -1);
    }
    if provided.len() == full.len()
        && provided
            .iter()
            .zip(&full)
            .all(|(&provided, &configured)| provided == -1 || provided == configured)
    {
        return Ok(());
    }
    let how = if config.max_batch_size > 0 {
        format!(
            "an initial batch dimension because max_batch_size > 0 followed by the explicit \
             tensor shape, making complete shape {}",
            format_shape(&full)
        )
    } else {
        format!("shape {}", format_shape(&full))
    };
    Err(ConfigError::new(format!(
        "model '{}', tensor '{}': the model expects {} dimensions (shape {}) but the model \
         configuration specifies {} dimensions ({how})",
        config.name,
        tensor.name(),
        provided.len(),
        format_shape(provided),
        full.len()
    )))
}
