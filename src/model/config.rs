//! The checked model configuration.

use std::collections::BTreeMap;
use std::hash::RandomState;

use prost::Message;

use super::error::ConfigError;
use super::proto;
use super::ragged::{BatchInput, BatchOutput};
use super::scheduling::Scheduling;
use super::state::StateSpec;
use crate::tensor::DataType;

/// A valid model configuration. Made by [`Draft::complete`](super::Draft::complete) and [`ModelConfig::decode`] only.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The model's name: that of its directory.
    pub name: String,
    /// The platform, as clients see it in the metadata; may be empty.
    pub platform: String,
    /// The backend that executes the model; empty for an ensemble.
    pub backend: String,
    /// Which versions should run.
    pub version_policy: VersionPolicy,
    /// The largest batch; 0 when the model does not batch and its shapes have no batch dimension.
    pub max_batch_size: u32,
    /// Inputs.
    pub inputs: Vec<TensorSpec>,
    /// Outputs.
    pub outputs: Vec<TensorSpec>,
    /// Inputs that the server makes from the batch as a whole.
    pub batch_inputs: Vec<BatchInput>,
    /// Outputs of the batch as a whole that the server takes apart.
    pub batch_outputs: Vec<BatchOutput>,
    /// Tensors that are kept for each sequence between its requests.
    pub states: Vec<StateSpec>,
    /// How requests come together.
    pub scheduling: Scheduling,
    /// Which instances run; empty for an ensemble only.
    pub instance_groups: Vec<InstanceGroup>,
    /// The model's file in its version directory.
    pub default_model_filename: String,
    /// Free parameters for the backend.
    pub parameters: BTreeMap<String, String>,
    /// Labels that the model's metrics carry besides the usual ones (without the `_` put before their names).
    pub metric_tags: BTreeMap<String, String>,
    /// The model's own upper bounds for histograms, by the metric's name (`model_metrics.metric_control`).
    pub histogram_buckets: Vec<(String, Vec<f64>)>,
    /// Whether a request may be answered by any number of responses.
    pub decoupled: bool,
    /// Whether responses may come from the response cache.
    pub response_cache: bool,
    /// Requests to run before the model is ready.
    pub warmups: Vec<Warmup>,
    /// Whether a request fails when an output has another datatype or batch dimension than configured, instead of
    /// passing on what the model gave. From the parameter `strict_output_types`.
    pub strict_output_types: bool,
    /// Warnings about valid but probably unintended settings, a sentence each; for the log.
    pub warnings: Vec<String>,
    /// The same in the schema's form, for the model configuration extension.
    pub(super) proto: proto::ModelConfig,
    /// Keys the hash of shapes, so that no client can make two different shapes look equal.
    pub(super) shape_hash: RandomState,
}

/// One input or output of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// What its elements are.
    pub datatype: DataType,
    /// Dimensions without the batch: 1 or greater, or -1 for a variable one.
    pub dims: Vec<i64>,
    /// The dimensions that the backend sees instead, without the batch.
    pub reshape: Option<Vec<i64>>,
    /// Inputs: a request may leave it out.
    pub optional: bool,
    /// Inputs: requests of different shapes may share a batch.
    pub allow_ragged_batch: bool,
    /// Its values are a shape (TensorRT).
    pub is_shape_tensor: bool,
    /// Outputs: the file with the names of the classes; empty for none.
    pub label_filename: String,
}

impl TensorSpec {
    /// The shape that the backend sees for a shape of the protocol. `batching` says that both start with a batch
    /// dimension, which stays as it is.
    pub fn backend_shape(&self, shape: &[i64], batching: bool) -> Vec<i64> {
        match &self.reshape {
            Some(reshape) => remap(&self.dims, reshape, shape, batching),
            None => shape.to_vec(),
        }
    }

    /// The inverse of [`TensorSpec::backend_shape`]: the shape of the protocol for what a backend produced.
    pub fn protocol_shape(&self, shape: &[i64], batching: bool) -> Vec<i64> {
        match &self.reshape {
            Some(reshape) => remap(reshape, &self.dims, shape, batching),
            None => shape.to_vec(),
        }
    }

    /// Whether any dimension is variable.
    pub fn is_variable(&self) -> bool {
        self.dims.contains(&-1)
    }
}

/// `to` with its variable dimensions replaced, in order, by what `shape` has at those of `from`.
fn remap(from: &[i64], to: &[i64], shape: &[i64], batching: bool) -> Vec<i64> {
    let (batch, dims) = shape.split_at(usize::from(batching).min(shape.len()));
    let mut variable = from.iter().zip(dims).filter(|(from, _)| **from == -1).map(|(_, dim)| *dim);
    let to = to.iter().map(|&dim| if dim == -1 { variable.next().unwrap_or(dim) } else { dim });
    batch.iter().copied().chain(to).collect()
}

/// Which of the versions in a model's directory should run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionPolicy {
    /// The given number of the highest ones.
    Latest(u32),
    /// Every one.
    All,
    /// Those listed, if they are there.
    Specific(Vec<u64>),
}

/// Instances of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceGroup {
    /// Its name; instances are called `<name>_<number>`.
    pub name: String,
    /// Where the instances run.
    pub kind: InstanceKind,
    /// How many, 1 or more; for [`InstanceKind::Gpu`] on each GPU.
    pub count: u32,
    /// The GPUs, for [`InstanceKind::Gpu`] only.
    pub gpus: Vec<u32>,
    /// Whether the instances are kept out of scheduling.
    pub passive: bool,
    /// The name of the host policy; may be empty.
    pub host_policy: String,
    /// What each instance must hold while it executes, when the server has its rate limiter on.
    pub resources: Vec<Resource>,
    /// Weight at the rate limiter: an instance of priority 2 gets half as many executions as one of priority 1; 0 means 1.
    pub priority: u32,
}

/// Some of a resource that instances share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Its name, not empty.
    pub name: String,
    /// Whether all devices share it; otherwise each device has its own.
    pub global: bool,
    /// How many.
    pub count: u32,
}

/// Where instances run. Written `KIND_AUTO` is decided when the configuration is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceKind {
    /// On the CPUs.
    Cpu,
    /// On GPUs.
    Gpu,
    /// The backend decides.
    Model,
}

/// A request to run before the model is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warmup {
    /// Its name, for the log.
    pub name: String,
    /// The batch size, 0 for a model that does not batch.
    pub batch_size: u32,
    /// How many times it runs, 1 or more.
    pub count: u32,
    /// Inputs by name.
    pub inputs: BTreeMap<String, WarmupInput>,
}

/// One input of a [`Warmup`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupInput {
    /// What its elements are.
    pub datatype: DataType,
    /// Its dimensions without the batch.
    pub dims: Vec<i64>,
    /// Where its values come from.
    pub data: WarmupData,
}

/// Where the values of a [`WarmupInput`] come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WarmupData {
    /// All zero.
    Zero,
    /// Anything.
    Random,
    /// The bytes of this file in the model's `warmup` directory.
    File(String),
}

impl ModelConfig {
    /// The parameter with which a model says that it may run on processors in place of a GPU.
    pub const CPU_FALLBACK: &str = "allow_cpu_fallback";

    /// Whether a model may run on processors where it cannot run on its GPU.
    ///
    /// # Errors
    /// The parameter says neither `true` nor `false`; configurations are refused then.
    pub fn allows_cpu_fallback(&self) -> Result<bool, ConfigError> {
        match self.parameters.get(Self::CPU_FALLBACK).map(String::as_str) {
            Some("true") => Ok(true),
            None | Some("false") => Ok(false),
            Some(text) => {
                let (name, model) = (Self::CPU_FALLBACK, &self.name);
                Err(ConfigError::new(format!("parameter '{name}' is '{text}', it must be true or false, for {model}")))
            }
        }
    }

    /// Whether shapes start with a batch dimension.
    pub fn batches(&self) -> bool {
        self.max_batch_size > 0
    }

    /// The input with this name.
    pub fn input(&self, name: &str) -> Option<&TensorSpec> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// The output with this name.
    pub fn output(&self, name: &str) -> Option<&TensorSpec> {
        self.outputs.iter().find(|output| output.name == name)
    }

    /// The completed configuration as protobuf bytes of `inference.ModelConfig`.
    pub fn encode(&self) -> Vec<u8> {
        self.proto.encode_to_vec()
    }

    /// The same bytes without the instance groups: equal wherever and however often the model runs.
    pub fn encode_without_instances(&self) -> Vec<u8> {
        let proto = proto::ModelConfig { instance_group: Vec::new(), ..self.proto.clone() };
        proto.encode_to_vec()
    }

    /// The accelerators of `optimization.execution_accelerators.gpu_execution_accelerator`, in their order: names, and
    /// parameters by name.
    pub fn gpu_accelerators(&self) -> impl Iterator<Item = (&str, Vec<(&str, &str)>)> {
        let optimization = self.proto.optimization.as_ref();
        let named = optimization.and_then(|all| all.execution_accelerators.as_ref());
        named.into_iter().flat_map(|named| &named.gpu_execution_accelerator).map(|accelerator| {
            let parameters = accelerator.parameters.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            let mut parameters: Vec<_> = parameters.collect();
            parameters.sort_unstable();
            (accelerator.name.as_str(), parameters)
        })
    }

    /// The same configuration with one more free parameter, for what the server itself has to say about the model.
    pub fn with_parameter(&self, name: &str, value: &str) -> Self {
        let mut config = self.clone();
        config.parameters.insert(name.to_owned(), value.to_owned());
        let parameter = proto::ModelParameter { string_value: value.to_owned() };
        config.proto.parameters.insert(name.to_owned(), parameter);
        config
    }

    /// The same bytes in three parts, which change for different reasons: the instance groups, the version policy, the rest.
    pub fn encode_parts(&self) -> [Vec<u8>; 3] {
        encode_parts(&self.proto)
    }
}

/// See [`ModelConfig::encode_parts`].
pub(super) fn encode_parts(config: &proto::ModelConfig) -> [Vec<u8>; 3] {
    let empty = proto::ModelConfig::default;
    let instances = proto::ModelConfig { instance_group: config.instance_group.clone(), ..empty() };
    let policy = proto::ModelConfig { version_policy: config.version_policy.clone(), ..empty() };
    let rest = proto::ModelConfig { instance_group: Vec::new(), version_policy: None, ..config.clone() };
    [instances, policy, rest].map(|part| part.encode_to_vec())
}
