//! The checked model configuration.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::hash::RandomState;
use std::time::Duration;

use prost::Message;

use super::error::ConfigError;
use super::proto;
use super::proto::model_optimization_policy::execution_accelerators::Accelerator;
use super::ragged::{BatchInput, BatchOutput};
use super::scheduling::Scheduling;
use super::state::StateSpec;
use super::unsupported_backends;
use crate::tensor::DataType;

/// A valid model configuration. Created only by [`Draft::complete`](super::Draft::complete) and
/// [`ModelConfig::decode`].
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// The model's name, which is the name of its directory.
    pub name: String,
    /// The platform, as shown in the metadata; may be empty.
    pub platform: String,
    /// The backend that executes the model; empty for an ensemble.
    pub backend: String,
    /// Which versions should run.
    pub version_policy: VersionPolicy,
    /// The maximum batch size; 0 if the model does not batch and its shapes have no batch
    /// dimension.
    pub max_batch_size: u32,
    /// Inputs.
    pub inputs: Vec<TensorSpec>,
    /// Outputs.
    pub outputs: Vec<TensorSpec>,
    /// Inputs that the server generates from the batch as a whole.
    pub batch_inputs: Vec<BatchInput>,
    /// Outputs of the batch as a whole that the server splits.
    pub batch_outputs: Vec<BatchOutput>,
    /// Tensors that the server keeps for each sequence between its requests.
    pub states: Vec<StateSpec>,
    /// How requests are combined into batches.
    pub scheduling: Scheduling,
    /// Which instances run; empty for an ensemble only.
    pub instance_groups: Vec<InstanceGroup>,
    /// The model's file in its version directory.
    pub default_model_filename: String,
    /// Free parameters for the backend.
    pub parameters: BTreeMap<String, String>,
    /// Additional labels of the model's metrics (without the `_` that is prepended to their
    /// names).
    pub metric_tags: BTreeMap<String, String>,
    /// The model's own upper bounds for histograms, by the metric's name
    /// (`model_metrics.metric_control`).
    pub histogram_buckets: Vec<(String, Vec<f64>)>,
    /// Whether a request may be answered by any number of responses.
    pub decoupled: bool,
    /// Whether responses may come from the response cache.
    pub response_cache: bool,
    /// Requests to run before the model is ready.
    pub warmups: Vec<Warmup>,
    /// Whether a request fails if an output has another datatype or batch dimension than
    /// configured; otherwise the output is returned as the model produced it. From the parameter
    /// `strict_output_types`.
    pub strict_output_types: bool,
    /// The most requests that an instance answers at a time after their batches (it has deferred
    /// them). At this number it gets no batch. From the parameter `max_open_requests`.
    pub max_open_requests: usize,
    /// How long a request of a decoupled model waits for its responses.
    pub response_timeouts: ResponseTimeouts,
    /// Warnings about valid but probably unintended settings, for the log; one sentence each.
    pub warnings: Vec<String>,
    /// The configuration in the schema's form, for the model configuration extension.
    pub(super) proto: proto::ModelConfig,
    /// The random key of the shape hash: clients cannot construct collisions of different shapes.
    pub(super) shape_hash: RandomState,
}

/// How long a request of a decoupled model waits for a response; `None` for ever.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseTimeouts {
    /// From the arrival in the queue to the first response. From the parameter
    /// `first_response_timeout_ms`.
    pub first: Option<Duration>,
    /// From one response to the next one. From the parameter `response_interval_timeout_ms`.
    pub interval: Option<Duration>,
}

/// One input or output of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// The datatype of its elements.
    pub datatype: DataType,
    /// Dimensions without the batch: 1 or greater, or -1 for a variable dimension.
    pub dims: Vec<i64>,
    /// The dimensions that the backend receives instead, without the batch.
    pub reshape: Option<Vec<i64>>,
    /// Inputs: whether a request may omit it.
    pub optional: bool,
    /// Inputs: whether requests of different shapes may share a batch.
    pub allow_ragged_batch: bool,
    /// Whether its values are a shape (TensorRT).
    pub is_shape_tensor: bool,
    /// Outputs: the file with the names of the classes; may be empty.
    pub label_filename: String,
}

impl TensorSpec {
    /// Converts a shape of the protocol to the shape that the backend receives. `batching` means
    /// that both start with a batch dimension, which does not change.
    pub fn backend_shape(&self, shape: &[i64], batching: bool) -> Vec<i64> {
        match &self.reshape {
            Some(reshape) => remap(&self.dims, reshape, shape, batching),
            None => shape.to_vec(),
        }
    }

    /// Converts a shape that a backend produced to the shape of the protocol: the inverse of
    /// [`TensorSpec::backend_shape`].
    pub fn protocol_shape<'a>(&self, shape: &'a [i64], batching: bool) -> Cow<'a, [i64]> {
        match &self.reshape {
            Some(reshape) => remap(reshape, &self.dims, shape, batching).into(),
            None => shape.into(),
        }
    }

    /// Returns whether any dimension is variable.
    pub fn is_variable(&self) -> bool {
        self.dims.contains(&-1)
    }
}

/// Returns `to` with its variable dimensions replaced, in order, by the values of `shape` at the
/// variable dimensions of `from`.
fn remap(from: &[i64], to: &[i64], shape: &[i64], batching: bool) -> Vec<i64> {
    let (batch, dims) = shape.split_at(usize::from(batching).min(shape.len()));
    let mut variable = from.iter().zip(dims).filter(|(from, _)| **from == -1).map(|(_, dim)| *dim);
    let to = to.iter().map(|&dim| if dim == -1 { variable.next().unwrap_or(dim) } else { dim });
    batch.iter().copied().chain(to).collect()
}

/// Which of the versions in a model's directory should run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VersionPolicy {
    /// The given number of highest versions.
    Latest(u32),
    /// Every version.
    All,
    /// The listed versions, if they exist.
    Specific(Vec<u64>),
}

/// A group of instances of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceGroup {
    /// Its name; instances are called `<name>_<number>`.
    pub name: String,
    /// Where the instances run.
    pub kind: InstanceKind,
    /// The number of instances, 1 or more; for [`InstanceKind::Gpu`] on each GPU.
    pub count: u32,
    /// The GPUs, for [`InstanceKind::Gpu`] only.
    pub gpus: Vec<u32>,
    /// Whether the scheduler ignores the instances.
    pub passive: bool,
    /// The name of the host policy; may be empty.
    pub host_policy: String,
    /// The resources that each instance holds while it executes, if the server's rate limiter is
    /// on.
    pub resources: Vec<Resource>,
    /// Weight in the rate limiter: an instance of priority 2 gets half as many executions as one
    /// of priority 1. 0 means 1.
    pub priority: u32,
}

/// An amount of a resource that instances share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Its name, not empty.
    pub name: String,
    /// Whether all devices share it; otherwise each device has its own.
    pub global: bool,
    /// The number of units.
    pub count: u32,
}

/// Where instances run. `KIND_AUTO` is resolved when the configuration is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceKind {
    /// On the CPUs.
    Cpu,
    /// On GPUs.
    Gpu,
    /// The backend decides.
    Model,
}

/// A request that runs before the model is ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warmup {
    /// Its name, for the log.
    pub name: String,
    /// The batch size; 0 for a model that does not batch.
    pub batch_size: u32,
    /// How many times it runs, 1 or more.
    pub count: u32,
    /// Inputs, by name.
    pub inputs: BTreeMap<String, WarmupInput>,
}

/// One input of a [`Warmup`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupInput {
    /// The datatype of its elements.
    pub datatype: DataType,
    /// Its dimensions without the batch.
    pub dims: Vec<i64>,
    /// Where its values come from.
    pub data: WarmupData,
}

/// Where the values of a [`WarmupInput`] come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WarmupData {
    /// All values are zero.
    Zero,
    /// Pseudo-random values.
    Random,
    /// The bytes of this file in the model's `warmup` directory.
    File(String),
}

impl ModelConfig {
    /// The parameter that allows a model to run on CPUs instead of a GPU.
    pub const CPU_FALLBACK: &str = "allow_cpu_fallback";
    /// The parameter with the most open requests of an instance.
    pub const MAX_OPEN_REQUESTS: &str = "max_open_requests";

    /// Returns whether the model may run on CPUs if it cannot run on its GPU.
    ///
    /// # Errors
    /// The parameter is neither `true` nor `false`; such configurations are refused.
    pub fn allows_cpu_fallback(&self) -> Result<bool, ConfigError> {
        match self.parameters.get(Self::CPU_FALLBACK).map(String::as_str) {
            Some("true") => Ok(true),
            None | Some("false") => Ok(false),
            Some(text) => {
                let name = Self::CPU_FALLBACK;
                let model = &self.name;
                Err(ConfigError::new(format!(
                    "parameter '{name}' must be true or false for {model}, got '{text}'"
                )))
            }
        }
    }

    /// Returns whether shapes start with a batch dimension.
    pub fn batches(&self) -> bool {
        self.max_batch_size > 0
    }

    /// Returns the input with this name.
    pub fn input(&self, name: &str) -> Option<&TensorSpec> {
        self.inputs.iter().find(|input| input.name == name)
    }

    /// Returns the output with this name.
    pub fn output(&self, name: &str) -> Option<&TensorSpec> {
        self.outputs.iter().find(|output| output.name == name)
    }

    /// Returns the library of a backend of Triton that `runtime` names.
    pub fn library(&self) -> Option<&str> {
        unsupported_backends::library(&self.proto.runtime)
    }

    /// Encodes the completed configuration as protobuf bytes of `inference.ModelConfig`.
    pub fn encode(&self) -> Vec<u8> {
        self.proto.encode_to_vec()
    }

    /// Encodes the configuration without the instance groups: the result does not depend on where
    /// and how often the model runs.
    pub fn encode_without_instances(&self) -> Vec<u8> {
        let proto = proto::ModelConfig { instance_group: Vec::new(), ..self.proto.clone() };
        proto.encode_to_vec()
    }

    /// Returns the accelerators of `optimization.execution_accelerators.gpu_execution_accelerator`
    /// in their order: names, and parameters sorted by name.
    pub fn gpu_accelerators(&self) -> impl Iterator<Item = (&str, Vec<(&str, &str)>)> {
        let optimization = self.proto.optimization.as_ref();
        let named = optimization.and_then(|all| all.execution_accelerators.as_ref());
        named.into_iter().flat_map(|named| &named.gpu_execution_accelerator).map(accelerator)
    }

    /// Returns a copy with an additional free parameter, for settings that the server itself adds.
    pub fn with_parameter(&self, name: &str, value: &str) -> Self {
        let mut config = self.clone();
        config.parameters.insert(name.to_owned(), value.to_owned());
        let parameter = proto::ModelParameter { string_value: value.to_owned() };
        config.proto.parameters.insert(name.to_owned(), parameter);
        config
    }

    /// Encodes the configuration in three parts, which change for different reasons: instance
    /// groups, version policy, the rest.
    pub fn encode_parts(&self) -> [Vec<u8>; 3] {
        encode_parts(&self.proto)
    }
}

/// Returns the name of an accelerator, and its parameters sorted by name.
pub(super) fn accelerator(accelerator: &Accelerator) -> (&str, Vec<(&str, &str)>) {
    let parameters =
        accelerator.parameters.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let mut parameters: Vec<_> = parameters.collect();
    parameters.sort_unstable();
    (accelerator.name.as_str(), parameters)
}

/// See [`ModelConfig::encode_parts`].
pub(super) fn encode_parts(config: &proto::ModelConfig) -> [Vec<u8>; 3] {
    let empty = proto::ModelConfig::default;
    let instances = proto::ModelConfig { instance_group: config.instance_group.clone(), ..empty() };
    let policy = proto::ModelConfig { version_policy: config.version_policy.clone(), ..empty() };
    let rest =
        proto::ModelConfig { instance_group: Vec::new(), version_policy: None, ..config.clone() };
    [instances, policy, rest].map(|part| part.encode_to_vec())
}
