//! Every field of the schema has an effect, causes a warning when the model is loaded, or is
//! refused. A field that is in no table fails the test.

use std::collections::BTreeSet;

use prost_reflect::{Kind, MessageDescriptor};

use super::super::proto::descriptor;
use super::super::{Checksum, GraphLevel, InstanceKind, SessionOptions};
use super::*;

/// Fields with an effect, by the message that they are in.
const DONE: [(&str, &[&str]); 41] = [
    (
        "",
        &["name", "platform", "backend", "max_batch_size", "default_model_filename", "metric_tags"],
    ),
    ("version_policy.latest", &["num_versions"]),
    ("version_policy", &["all"]),
    ("version_policy.specific", &["versions"]),
    ("input", &["name", "data_type", "format", "dims", "allow_ragged_batch", "optional"]),
    ("input.reshape", &["shape"]),
    ("output", &["name", "data_type", "dims", "label_filename"]),
    ("output.reshape", &["shape"]),
    ("batch_input", &["kind", "target_name", "data_type", "source_input"]),
    ("batch_output", &["target_name", "kind", "source_input"]),
    ("optimization.graph", &["level"]),
    ("optimization.execution_accelerators.gpu_execution_accelerator", &["name", "parameters"]),
    ("optimization.execution_accelerators.cpu_execution_accelerator", &["name", "parameters"]),
    (
        "dynamic_batching",
        &["preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering"],
    ),
    ("dynamic_batching", &["priority_levels", "default_priority_level"]),
    ("dynamic_batching.default_queue_policy", &QUEUE_POLICY),
    ("dynamic_batching.priority_queue_policy", &QUEUE_POLICY),
    ("sequence_batching.direct", &["max_queue_delay_microseconds", "minimum_slot_utilization"]),
    ("sequence_batching.oldest", &["max_candidate_sequences", "preferred_batch_size"]),
    ("sequence_batching.oldest", &["max_queue_delay_microseconds", "preserve_ordering"]),
    ("sequence_batching", &["max_sequence_idle_microseconds", "iterative_sequence"]),
    ("sequence_batching.control_input", &["name"]),
    ("sequence_batching.control_input.control", &["kind", "int32_false_true", "fp32_false_true"]),
    ("sequence_batching.control_input.control", &["bool_false_true", "data_type"]),
    ("sequence_batching.state", &["input_name", "output_name", "data_type", "dims"]),
    ("sequence_batching.state.initial_state", &["data_type", "dims", "zero_data", "data_file"]),
    // For readers only.
    ("sequence_batching.state.initial_state", &["name"]),
    ("ensemble_scheduling", &["max_inflight_requests"]),
    (
        "ensemble_scheduling.step",
        &["model_name", "model_version", "input_map", "output_map", "model_namespace"],
    ),
    ("instance_group", &["name", "kind", "count", "gpus", "passive", "host_policy"]),
    ("instance_group.rate_limiter", &["priority"]),
    ("instance_group.rate_limiter.resources", &["name", "global", "count"]),
    ("parameters", &["string_value"]),
    ("model_warmup", &["name", "batch_size", "count"]),
    ("model_warmup.inputs", &["data_type", "dims", "zero_data", "random_data", "input_data_file"]),
    ("model_operations", &["op_library_filename"]),
    ("model_transaction_policy", &["decoupled"]),
    ("model_repository_agents.agents", &["name", "parameters"]),
    ("response_cache", &["enable"]),
    ("model_metrics.metric_control.metric_identifier", &["family"]),
    ("model_metrics.metric_control.histogram_options", &["buckets"]),
];

const QUEUE_POLICY: [&str; 4] =
    ["timeout_action", "default_timeout_microseconds", "allow_timeout_override", "max_queue_size"];

/// Fields without effect, or messages whose fields all have no effect; and a configuration that
/// contains them.
const WARNED: [(&str, &str); 15] = [
    ("runtime", "runtime: 'x.so'"),
    ("cc_model_filenames", "cc_model_filenames { key: '7.5' value: 'm.onnx' }"),
    (
        "input.is_shape_tensor",
        "input { name: 'X' data_type: TYPE_INT32 dims: 1 is_shape_tensor: true }",
    ),
    (
        "input.is_non_linear_format_io",
        "input { name: 'X' data_type: TYPE_INT32 dims: 1 is_non_linear_format_io: true }",
    ),
    (
        "output.is_shape_tensor",
        "output { name: 'Y' data_type: TYPE_INT32 dims: 1 is_shape_tensor: true }",
    ),
    (
        "output.is_non_linear_format_io",
        "output { name: 'Y' data_type: TYPE_INT32 dims: 1 is_non_linear_format_io: true }",
    ),
    ("optimization.priority", "optimization { priority: PRIORITY_MAX }"),
    ("optimization.cuda", "optimization { cuda { graphs: true } }"),
    ("optimization.input_pinned_memory", "optimization { input_pinned_memory { enable: false } }"),
    (
        "optimization.output_pinned_memory",
        "optimization { output_pinned_memory { enable: false } }",
    ),
    (
        "optimization.gather_kernel_buffer_threshold",
        "optimization { gather_kernel_buffer_threshold: 40 }",
    ),
    ("optimization.eager_batching", "optimization { eager_batching: true }"),
    (
        "sequence_batching.state.use_same_buffer_for_input_output",
        "sequence_batching { state { input_name: 'I' output_name: 'O' data_type: TYPE_INT32 dims: \
         1 use_same_buffer_for_input_output: true } }",
    ),
    (
        "sequence_batching.state.use_growable_memory",
        "sequence_batching { state { input_name: 'I' output_name: 'O' data_type: TYPE_INT32 dims: \
         1 use_growable_memory: true } }",
    ),
    ("instance_group.profile", "instance_group { kind: KIND_CPU profile: '1' }"),
];

/// As above, for fields that have an effect for other backends only.
const WARNED_OF_OTHER_BACKENDS: [(&str, &str); 9] = [
    (
        "instance_group.secondary_devices",
        "instance_group { kind: KIND_CPU secondary_devices { device_id: 0 } }",
    ),
    ("model_operations.op_library_filename", "model_operations { op_library_filename: 'x.so' }"),
    ("optimization.graph", "optimization { graph { level: 1 } }"),
    (
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "optimization { execution_accelerators { gpu_execution_accelerator: [ { name: 'cuda' } ] \
         } }",
    ),
    (
        "optimization.execution_accelerators.cpu_execution_accelerator",
        "optimization { execution_accelerators { cpu_execution_accelerator: [ { name: 'openvino' \
         } ] } }",
    ),
    (
        "intra_op_thread_count",
        "parameters { key: 'intra_op_thread_count' value { string_value: '1' } }",
    ),
    ("parameters session.*", "parameters { key: 'session.x' value { string_value: '1' } }"),
    (
        "share_session_between_instances",
        "parameters { key: 'share_session_between_instances' value { string_value: 'true' } }",
    ),
    (
        "memory.enable_memory_arena_shrinkage",
        "parameters { key: 'memory.enable_memory_arena_shrinkage' value { string_value: 'cpu:0' } \
         }",
    ),
];

const IO: &str = "input { name: 'INPUT0' data_type: TYPE_INT32 dims: 1 } output { name: 'OUTPUT0' \
                  data_type: TYPE_INT32 dims: 1 }";

/// Collects the fields that hold values, each with its path.
fn leaves(message: &MessageDescriptor, path: &str, all: &mut BTreeSet<String>) {
    for field in message.fields() {
        let path = if path.is_empty() {
            field.name().to_owned()
        } else {
            format!("{path}.{}", field.name())
        };
        let inner = match field.kind() {
            Kind::Message(entry) if field.is_map() => match entry.map_entry_value_field().kind() {
                Kind::Message(value) => Some(value),
                _ => None,
            },
            Kind::Message(inner) => Some(inner),
            _ => None,
        };
        match inner.filter(|inner| inner.fields().len() > 0) {
            Some(inner) => leaves(&inner, &path, all),
            None => drop(all.insert(path)),
        }
    }
}

#[test]
fn every_field_has_an_effect_or_a_warning() {
    let mut all = BTreeSet::new();
    leaves(&descriptor(), "", &mut all);
    let done = DONE.iter().flat_map(|(path, fields)| {
        fields.iter().map(move |field| {
            if path.is_empty() { (*field).to_owned() } else { format!("{path}.{field}") }
        })
    });
    let done: BTreeSet<String> = done.collect();
    let warned: Vec<&str> =
        WARNED.iter().chain(&WARNED_OF_OTHER_BACKENDS[..1]).map(|(field, _)| *field).collect();
    let is_warned = |leaf: &str| {
        warned.iter().any(|field| leaf == *field || leaf.starts_with(&format!("{field}.")))
    };
    let nowhere: Vec<&String> =
        all.iter().filter(|leaf| !done.contains(*leaf) && !is_warned(leaf)).collect();
    assert!(nowhere.is_empty(), "fields in no table: {nowhere:?}");
    let unknown: Vec<&String> = done.iter().filter(|leaf| !all.contains(*leaf)).collect();
    assert!(unknown.is_empty(), "fields that the schema does not have: {unknown:?}");
    for field in warned {
        assert!(all.iter().any(|leaf| leaf.starts_with(field)), "{field} is not in the schema");
        assert!(!done.contains(field), "{field} is in both tables");
    }
}

#[test]
fn fields_without_effect_are_named() {
    for (backend, rows) in [("python", &WARNED[..]), ("tract", &WARNED_OF_OTHER_BACKENDS[..])] {
        let silent = config("m", &format!("backend: '{backend}' {IO}")).warnings;
        assert_eq!(silent, Vec::<String>::new(), "{backend}");
        for (field, text) in rows {
            let warnings = config("m", &format!("backend: '{backend}' {IO} {text}")).warnings;
            let named = warnings.iter().filter(|warning| {
                warning
                    .strip_prefix(&format!("'{field}' has no effect: "))
                    .is_some_and(|why| !why.is_empty())
            });
            assert_eq!(named.count(), 1, "{field}: {warnings:?}");
        }
    }
    let own = config(
        "m",
        &format!(
            "backend: 'custom' {IO} optimization {{ eager_batching: true graph {{ level: 7 }} }}"
        ),
    );
    assert_eq!(
        own.warnings,
        Vec::<String>::new(),
        "a custom backend reads the configuration itself"
    );
}

#[test]
fn agents_are_checked_or_refused() {
    let sums = |agents: &str| {
        let text = format!("name: 'm' backend: 'python' model_repository_agents {{ {agents} }}");
        Draft::from_text(&text, "config.pbtxt")
            .unwrap()
            .checksums()
            .map_err(|error| error.to_string())
    };
    let agent = |key: &str, value: &str| {
        format!("agents [ {{ name: 'checksum' parameters {{ key: '{key}' value: '{value}' }} }} ]")
    };
    let sum = "0123456789ABCDEF0123456789abcdef";
    let expected = Checksum { file: "1/model.onnx".to_owned(), md5: sum.to_ascii_lowercase() };
    assert_eq!(sums(&agent("MD5:1/model.onnx", sum)), Ok(vec![expected]));
    assert_eq!(sums(""), Ok(Vec::new()));
    for (agents, why) in [
        (
            "agents { name: 'decrypt' }".to_owned(),
            "repository agent 'decrypt' is not known; allowed is checksum",
        ),
        (agent("SHA256:f", sum), "parameter 'SHA256:f' is not supported; allowed are MD5:FILE"),
        (agent("model.onnx", sum), "parameter 'model.onnx' is not supported"),
        (
            agent("MD5:../other/f", sum),
            "'MD5:../other/f' must name a file in the model's directory",
        ),
        (agent("MD5:/etc/passwd", sum), "must name a file in the model's directory"),
        (agent("MD5:", sum), "must name a file in the model's directory"),
        (agent("MD5:f", "12"), "'12' is not an MD5 sum for 'f': expected 32 hexadecimal digits"),
    ] {
        let error = sums(&agents).unwrap_err();
        assert!(error.contains(why), "{error}");
        let complete =
            complete("m", &format!("backend: 'python' model_repository_agents {{ {agents} }}"));
        assert!(complete.unwrap_err().contains(why), "{agents}");
    }
}

/// Returns the session options of an ONNX model with this configuration.
fn options(more: &str) -> Result<SessionOptions, String> {
    let config = complete("m", &format!("backend: 'onnxruntime' {IO} {more}"))?;
    config.session_options().map_err(|error| error.to_string())
}

fn parameter(key: &str, value: &str) -> String {
    format!("parameters {{ key: '{key}' value {{ string_value: '{value}' }} }} ")
}

#[test]
fn sessions_have_tritons_options() {
    assert_eq!(options(""), Ok(SessionOptions::default()));
    for (level, expected) in [
        (-1, GraphLevel::Basic),
        (0, GraphLevel::All),
        (1, GraphLevel::Extended),
        (2, GraphLevel::Disabled),
    ] {
        let given = options(&format!("optimization {{ graph {{ level: {level} }} }}"));
        assert_eq!(given.unwrap().level, expected, "{level}");
    }
    let all = [
        ("execution_mode", "1"),
        ("intra_op_thread_count", "3"),
        ("inter_op_thread_count", "2"),
        ("session.disable_prepacking", "1"),
        ("enable_mem_arena", "false"),
        ("enable_mem_pattern", "1"),
        ("graph_optimization_level", "2"),
    ];
    let text: String = all.iter().map(|(key, value)| parameter(key, value)).collect();
    let expected = SessionOptions {
        level: GraphLevel::Extended,
        parallel: true,
        intra_threads: Some(3),
        inter_threads: Some(2),
        entries: vec![("session.disable_prepacking".to_owned(), "1".to_owned())],
        arena: Some(false),
        pattern: Some(true),
        libraries: vec!["ops.so".to_owned()],
    };
    assert_eq!(
        options(&format!("{text} model_operations {{ op_library_filename: 'ops.so' }}")),
        Ok(expected)
    );
    assert_eq!(options(&parameter("intra_op_thread_count", "0")), Ok(SessionOptions::default()));
}

#[test]
fn wrong_options_of_sessions_are_refused() {
    for (text, why) in [
        (
            parameter("execution_mode", "2"),
            "parameter 'execution_mode' of model m is '2'; allowed are 0 (sequential) and 1",
        ),
        (
            parameter("intra_op_thread_count", "-1"),
            "'intra_op_thread_count' of model m is '-1'; allowed are whole numbers",
        ),
        (
            parameter("enable_mem_arena", "maybe"),
            "is 'maybe'; allowed are 0, 1, true, false, on and off",
        ),
        (parameter("graph_optimization_level", "3"), "is '3'; allowed are 0 (none), 1 (basic)"),
        (
            "optimization { graph { level: 5 } }".to_owned(),
            "optimization.graph.level of model m is 5; allowed are -1",
        ),
        (
            "optimization { execution_accelerators { cpu_execution_accelerator: [ { name: 'dnnl' \
             } ] } }"
                .to_owned(),
            "the cpu_execution_accelerator 'dnnl' of model m is not known; allowed is openvino",
        ),
    ] {
        let error = options(&text).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn errors_of_limits_name_the_allowed_values() {
    for (key, value, allowed) in [
        (
            "max_queued_sequences",
            "many",
            "a whole number from 0 (no limit) to 18446744073709551615 or 'none' (no sequence may \
             wait)",
        ),
        (
            "max_queued_sequences",
            "-1",
            "a whole number from 0 (no limit) to 18446744073709551615 or 'none' (no sequence may \
             wait)",
        ),
        (
            "max_queue_size_per_sequence",
            "none",
            "a whole number from 0 (no limit) to 18446744073709551615",
        ),
    ] {
        let error =
            options(&format!("sequence_batching {{ }} {}", parameter(key, value))).unwrap_err();
        assert_eq!(error, format!("parameter '{key}' must be {allowed} for m, got '{value}'"));
    }
}

#[test]
fn errors_for_unsupported_backends_include_advice() {
    for (text, expected) in [
        (
            "platform: 'tensorflow_savedmodel'",
            "python -m tf2onnx.convert --saved-model DIR --output model.onnx",
        ),
        ("platform: 'tensorrt_plan'", "serve the ONNX file that the plan was built from"),
        ("backend: 'openvino'", "cpu_execution_accelerator: [ { name: \"openvino\" } ]"),
        ("backend: 'tensorrt'", "gpu_execution_accelerator: [ { name: \"tensorrt\" } ]"),
        ("backend: 'fil'", "backend: \"xgboost\""),
    ] {
        let completion = Completion {
            directory: "m",
            backends: &["onnxruntime", "tract"],
            ..Completion::default()
        };
        let draft = Draft::from_text(&format!("{text} {IO}"), "config.pbtxt").unwrap();
        let error = draft.complete(&completion).unwrap_err().to_string();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn groups_of_kind_gpu_fall_back_to_cpus_without_gpus() {
    let fallback = "parameters { key: 'allow_cpu_fallback' value { string_value: 'true' } }";
    for backend in ["python", "onnxruntime", "xgboost", "builtin", "custom", "tract"] {
        let text = format!(
            "backend: '{backend}' {IO} instance_group {{ name: 'g' kind: KIND_GPU gpus: [0] }}"
        );
        let refused = complete("m", &text).unwrap_err();
        assert!(refused.ends_with("has kind KIND_GPU but no GPUs are available"), "{refused}");
        let config = config("m", &format!("{text} {fallback}"));
        let group = &config.instance_groups[0];
        assert_eq!((group.kind, group.gpus.len()), (InstanceKind::Cpu, 0), "{backend}");
        let expected = "instance group g runs on processors, as allow_cpu_fallback allows: no \
                        GPUs are available";
        assert!(config.warnings.iter().any(|warning| warning == expected), "{:?}", config.warnings);
    }
    let tract =
        format!("backend: 'tract' {IO} instance_group {{ name: 'g' kind: KIND_GPU }} {fallback}");
    let completion = Completion { directory: "m", gpus: &[0], ..Completion::default() };
    let config = Draft::from_text(&tract, "config.pbtxt").unwrap().complete(&completion).unwrap();
    assert_eq!(config.instance_groups[0].kind, InstanceKind::Cpu);
    assert!(
        config.warnings[0].ends_with("its backend 'tract' runs on CPUs only"),
        "{:?}",
        config.warnings
    );
}

#[test]
fn the_error_for_a_quoted_enum_value_lists_allowed_values() {
    let error = Draft::from_text("input { name: 'a' data_type: \"FP32\" dims: 1 }", "config.pbtxt")
        .unwrap_err();
    let error = error.to_string();
    assert!(error.contains("expected a value of DataType without quotes, found"), "{error}");
    assert!(
        error.contains("allowed: TYPE_BF16, TYPE_BOOL,") && error.contains("TYPE_FP32"),
        "{error}"
    );
}
