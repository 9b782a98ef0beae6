//! Warnings about settings of a configuration that are valid but probably unintended, or have no
//! effect in this server. Triton accepts them silently and existing repositories may contain them,
//! so they are not errors: they are logged when the model loads.
//!
//! `tests/fields.rs` has the table of all fields of the schema.

use super::config::{InstanceKind, ModelConfig};
use super::normalize::uses_onnx_runtime;
use super::proto::model_config::SchedulingChoice;
use super::proto::model_optimization_policy::{ExecutionAccelerators, ModelPriority};
use super::scheduling::Scheduling;
use super::session::PARAMETERS;
use super::{normalize, proto};

/// Returns the warnings, one sentence each.
pub(super) fn of(config: &ModelConfig) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(SchedulingChoice::SequenceBatching(sequence)) = &config.proto.scheduling_choice {
        let silent = sequence.control_input.iter().filter(|input| input.control.is_empty());
        found.extend(silent.map(|input| {
            format!(
                "the control input '{}' has no 'control': the model is not given this input",
                input.name
            )
        }));
    }
    if config.backend == "python" && config.inputs.is_empty() && config.outputs.is_empty() {
        found.push(
            "it has neither inputs nor outputs, so requests with inputs are refused and outputs \
             of the model are dropped: name them in config.pbtxt, or add them in the \
             auto_complete_config of model.py"
                .to_owned(),
        );
    }
    if !normalize::is_own(&config.backend) {
        // A custom backend reads the configuration itself.
        return found;
    }
    let groups = [
        of_model(config),
        of_tensors(config),
        of_instances(config),
        of_optimization(config),
        of_session(config),
    ];
    let without_effect = groups.into_iter().flatten().filter(|(_, given, _)| *given);
    found.extend(without_effect.map(|(field, _, why)| format!("'{field}' has no effect: {why}")));
    found
}

const OF_ONNX: &str = "it is an option of the backends onnxruntime and text";

/// A field, whether it is set, and why it has no effect.
type Row = (&'static str, bool, &'static str);

fn of_model(config: &ModelConfig) -> Vec<Row> {
    let proto = &config.proto;
    let is_onnx = uses_onnx_runtime(&config.backend);
    let operations =
        proto.model_operations.as_ref().is_some_and(|all| !all.op_library_filename.is_empty());
    vec![
        (
            "runtime",
            !proto.runtime.is_empty() && config.library().is_none(),
            "'backend' alone selects the program that runs the model; 'runtime' selects only \
             libraries of Triton's backends, libtriton_NAME.so",
        ),
        (
            "cc_model_filenames",
            !proto.cc_model_filenames.is_empty(),
            "all GPUs get the file that 'default_model_filename' names",
        ),
        (
            "model_operations.op_library_filename",
            operations && !is_onnx,
            "only the backends onnxruntime and text load libraries of operators",
        ),
    ]
}

fn of_tensors(config: &ModelConfig) -> Vec<Row> {
    let proto = &config.proto;
    let state =
        |has: fn(&proto::model_sequence_batching::State) -> bool| match &proto.scheduling_choice {
            Some(SchedulingChoice::SequenceBatching(sequence)) => sequence.state.iter().any(has),
            _ => false,
        };
    let tensorrt = "it is for TensorRT plans, which are not served";
    vec![
        ("input.is_shape_tensor", proto.input.iter().any(|input| input.is_shape_tensor), tensorrt),
        (
            "output.is_shape_tensor",
            proto.output.iter().any(|output| output.is_shape_tensor),
            tensorrt,
        ),
        (
            "input.is_non_linear_format_io",
            proto.input.iter().any(|input| input.is_non_linear_format_io),
            tensorrt,
        ),
        (
            "output.is_non_linear_format_io",
            proto.output.iter().any(|output| output.is_non_linear_format_io),
            tensorrt,
        ),
        (
            "sequence_batching.state.use_same_buffer_for_input_output",
            state(|state| state.use_same_buffer_for_input_output),
            "the old and the new value of a state use separate buffers",
        ),
        (
            "sequence_batching.state.use_growable_memory",
            state(|state| state.use_growable_memory),
            "states are in host memory, which grows with them",
        ),
    ]
}

fn of_instances(config: &ModelConfig) -> Vec<Row> {
    let groups = &config.proto.instance_group;
    vec![
        (
            "instance_group.secondary_devices",
            groups.iter().any(|group| !group.secondary_devices.is_empty()),
            "DLA cores are not used",
        ),
        (
            "instance_group.profile",
            groups.iter().any(|group| !group.profile.is_empty()) && config.backend != "tensorrt",
            "it selects profiles of TensorRT plans, which only the backend tensorrt reads",
        ),
    ]
}

fn of_optimization(config: &ModelConfig) -> Vec<Row> {
    let Some(all) = &config.proto.optimization else { return Vec::new() };
    let is_onnx = uses_onnx_runtime(&config.backend);
    let pinned = "all models share the pool of --pinned-memory-pool-byte-size; 0 disables it";
    let off = |buffer: &Option<proto::model_optimization_policy::PinnedMemoryBuffer>| {
        buffer.is_some_and(|buffer| !buffer.enable)
    };
    let mut rows = vec![
        (
            "optimization.graph",
            all.graph.is_some_and(|graph| graph.level != 0) && !is_onnx,
            OF_ONNX,
        ),
        (
            "optimization.priority",
            all.priority() != ModelPriority::PriorityDefault,
            "it sets priorities of TensorRT's streams; see rate_limiter and dynamic_batching for \
             priorities of requests",
        ),
        (
            "optimization.cuda",
            all.cuda.is_some(),
            "CUDA graphs, busy waiting and streams of outputs are not used: each batch has its \
             own memory",
        ),
        ("optimization.input_pinned_memory", off(&all.input_pinned_memory), pinned),
        ("optimization.output_pinned_memory", off(&all.output_pinned_memory), pinned),
        (
            "optimization.gather_kernel_buffer_threshold",
            all.gather_kernel_buffer_threshold != 0,
            "inputs are gathered in host memory and copied to the GPU in one step",
        ),
        (
            "optimization.eager_batching",
            all.eager_batching,
            "the next batch is always prepared early if that cannot make it smaller",
        ),
    ];
    rows.extend(of_accelerators(config, &all.execution_accelerators.clone().unwrap_or_default()));
    rows
}

fn of_accelerators(config: &ModelConfig, accelerators: &ExecutionAccelerators) -> [Row; 4] {
    let is_onnx = uses_onnx_runtime(&config.backend);
    let on_processors = !config.instance_groups.iter().any(|group| group.kind == InstanceKind::Gpu);
    let on_gpus = config.instance_groups.iter().all(|group| group.kind == InstanceKind::Gpu);
    let gpu = !accelerators.gpu_execution_accelerator.is_empty();
    [
        ("optimization.execution_accelerators.gpu_execution_accelerator", gpu && !is_onnx, OF_ONNX),
        (
            "optimization.execution_accelerators.gpu_execution_accelerator",
            gpu && is_onnx && on_processors,
            "no instance of the model runs on a GPU",
        ),
        (
            "optimization.execution_accelerators.cpu_execution_accelerator",
            !accelerators.cpu_execution_accelerator.is_empty() && is_onnx && on_gpus,
            "all instances of the model run on GPUs",
        ),
        (
            "optimization.execution_accelerators.cpu_execution_accelerator",
            !accelerators.cpu_execution_accelerator.is_empty() && !is_onnx,
            OF_ONNX,
        ),
    ]
}

fn of_session(config: &ModelConfig) -> Vec<Row> {
    let given = |key: &str| config.parameters.contains_key(key);
    let is_onnx = uses_onnx_runtime(&config.backend);
    let runs_onnx = is_onnx || config.backend == "tract";
    let session = config.parameters.keys().any(|key| key.starts_with("session."));
    let own = PARAMETERS.iter().map(|key| (*key, given(key) && !is_onnx && runs_onnx, OF_ONNX));
    let mut rows: Vec<Row> = own.collect();
    rows.extend([
        ("parameters session.*", session && !is_onnx && runs_onnx, OF_ONNX),
        (
            "memory.enable_memory_arena_shrinkage",
            given("memory.enable_memory_arena_shrinkage") && runs_onnx,
            "the arena keeps its memory for the next batch; enable_mem_arena disables it",
        ),
        (
            "share_session_between_instances",
            given("share_session_between_instances") && runs_onnx,
            "each instance is a process with its own session",
        ),
        (
            "do_copy_in_default_stream",
            given("do_copy_in_default_stream") && runs_onnx,
            "the server copies tensors in its own streams",
        ),
    ]);
    rows
}

impl ModelConfig {
    /// Returns a warning if an ensemble is configured as decoupled but none of its members is.
    pub(super) fn ineffective_decoupled_warning(&self, decoupled: bool) -> Option<String> {
        let is_ensemble = matches!(self.scheduling, Scheduling::Ensemble { .. });
        (is_ensemble && self.decoupled && !decoupled).then(|| {
            "'model_transaction_policy' says that it is decoupled, but none of its members is: it \
             answers once"
                .to_owned()
        })
    }
}
