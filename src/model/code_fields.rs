//! Which fields of a model configuration bring code. A load whose client may not bring code can
//! change all other fields of a model of the repository.

use prost_reflect::{DynamicMessage, ReflectMessage, Value};

use super::draft::SANDBOX;
use super::{Completion, Draft, proto};

/// What a field can bring to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Brings {
    /// Code, or names of files that a program loads, reads or writes; or it takes away a protection
    /// from code.
    Code,
    /// Numbers, names of tensors, schedules. Files of labels and of warm-ups are bounded elsewhere:
    /// both must be the operator's.
    Settings,
}

use Brings::{Code, Settings};

/// All fields of `ModelConfig`; each field of `optimization` has a row. A field that is not in the
/// table counts as code.
const FIELDS: [(&str, Brings); 32] = [
    ("name", Settings),
    ("platform", Code),
    ("backend", Code),
    ("runtime", Code),
    ("version_policy", Settings),
    ("max_batch_size", Settings),
    ("input", Settings),
    ("output", Settings),
    ("batch_input", Settings),
    ("batch_output", Settings),
    ("optimization.graph", Settings),
    ("optimization.priority", Settings),
    ("optimization.cuda", Settings),
    ("optimization.execution_accelerators", Code),
    ("optimization.input_pinned_memory", Settings),
    ("optimization.output_pinned_memory", Settings),
    ("optimization.gather_kernel_buffer_threshold", Settings),
    ("optimization.eager_batching", Settings),
    ("dynamic_batching", Settings),
    ("sequence_batching", Settings),
    // The members are models of the repositories.
    ("ensemble_scheduling", Settings),
    ("instance_group", Settings),
    ("default_model_filename", Code),
    ("cc_model_filenames", Code),
    ("metric_tags", Settings),
    ("parameters", Code),
    ("model_warmup", Settings),
    ("model_operations", Code),
    ("model_transaction_policy", Settings),
    // Checksums of the model's files.
    ("model_repository_agents", Code),
    ("response_cache", Settings),
    ("model_metrics", Settings),
];

/// The backends that only read the file of the model; the model `ensemble` has no backend.
const READERS: [&str; 4] = ["builtin", "onnxruntime", "text", "tract"];

/// The options of ONNX Runtime's accelerators that are plain values. Others may name files, such as
/// `trt_extra_plugin_lib_paths`.
const PLAIN_OPTIONS: [&str; 14] = [
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "device_type",
    "gpu_mem_limit",
    "int8_use_native_calibration_table",
    "max_cached_engines",
    "max_workspace_size_bytes",
    "minimum_segment_size",
    "num_of_threads",
    "num_streams",
    "precision",
    "precision_mode",
    "use_cuda_graph",
    "use_tf32",
];

/// Parameters that limit what a worker can do and use.
const PROTECTIONS: [&str; 4] = [SANDBOX, "memory_limit", "task_limit", "cpu_limit"];

/// The parameter that the server adds to the configuration that it shows.
const ENGINE: &str = "engine";

fn brings_code(field: &str) -> bool {
    FIELDS.iter().find(|(name, _)| *name == field).is_none_or(|(_, brings)| *brings == Code)
}

/// Returns the fields as the table names them, with their values.
fn fields(draft: &Draft) -> Vec<(String, Value)> {
    let message = proto::to_dynamic(&draft.proto);
    let descriptor = message.descriptor();
    let mut all = Vec::new();
    for field in descriptor.fields() {
        let value = message.get_field(&field).into_owned();
        match (field.name(), &value) {
            ("optimization", Value::Message(inner)) => all.extend(nested(field.name(), inner)),
            (name, _) => all.push((name.to_owned(), value)),
        }
    }
    all
}

fn nested(name: &str, message: &DynamicMessage) -> Vec<(String, Value)> {
    let fields = message.descriptor();
    fields
        .fields()
        .map(|field| (format!("{name}.{}", field.name()), message.get_field(&field).into_owned()))
        .collect()
}

impl Draft {
    /// Returns the fields that bring code in a configuration that a client sent for a model whose
    /// configuration in the repository is `repository`: those with another value than there, unless
    /// the value is harmless. Both are compared as the server completes them from the files in
    /// `completion`. Empty if it brings no code.
    pub fn code_beyond(&self, repository: &Self, completion: &Completion<'_>) -> Vec<String> {
        // The load reports an error of the completion.
        let completed =
            |draft: &Self| draft.clone().resolve(completion).unwrap_or_else(|_| draft.clone());
        let sent = completed(self);
        let known = completed(repository);
        let only_reads = sent.only_reads_files();
        let mut brought = Vec::new();
        for ((field, value), (_, there)) in fields(&sent).into_iter().zip(fields(&known)) {
            if !brings_code(&field) || value == there {
                continue;
            }
            let is_harmless = match field.as_str() {
                "platform" | "backend" => only_reads,
                // The default of the backend.
                "default_model_filename" => self.proto.default_model_filename.is_empty(),
                "optimization.execution_accelerators" => {
                    only_reads && sent.has_plain_accelerators()
                }
                "parameters" => {
                    let changed = sent.parameters_beyond(&known);
                    let of_code =
                        changed.into_iter().filter(|key| !only_reads || is_code_for_readers(key));
                    brought
                        .extend(of_code.map(|key| format!("parameters['{}']", key.escape_debug())));
                    true
                }
                _ => false,
            };
            if !is_harmless {
                brought.push(field);
            }
        }
        brought
    }

    /// Returns whether a model of this configuration brings no code: its backend only reads the
    /// model's file, and no library is named in its place.
    fn only_reads_files(&self) -> bool {
        if self.library().is_some() {
            return false;
        }
        match self.proto.backend.as_str() {
            "" => matches!(self.proto.platform.as_str(), "ensemble" | "onnxruntime_onnx"),
            backend => READERS.contains(&backend),
        }
    }

    fn has_plain_accelerators(&self) -> bool {
        let optimization = self.proto.optimization.as_ref();
        let accelerators = optimization.and_then(|all| all.execution_accelerators.as_ref());
        let mut both = accelerators.into_iter().flat_map(|all| {
            all.gpu_execution_accelerator.iter().chain(&all.cpu_execution_accelerator)
        });
        both.all(|one| one.parameters.keys().all(|key| PLAIN_OPTIONS.contains(&key.as_str())))
    }

    /// Returns the names of the parameters that only one of the configurations has, or that have
    /// different values.
    fn parameters_beyond(&self, other: &Self) -> Vec<String> {
        let keys = self.proto.parameters.keys().chain(other.proto.parameters.keys());
        let mut differing: Vec<String> = keys
            .filter(|key| *key != ENGINE && self.parameter(key) != other.parameter(key))
            .cloned()
            .collect();
        differing.sort_unstable();
        differing.dedup();
        differing
    }

    /// Returns the label files that the configuration names.
    pub fn label_files(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = self.proto.output.iter().filter(|output| !output.label_filename.is_empty());
        named.map(|output| (output.name.as_str(), output.label_filename.as_str()))
    }
}

/// Returns whether a parameter brings code to a model whose backend only reads its file: it is a
/// protection, or an entry of ONNX Runtime's session with the name of a file.
fn is_code_for_readers(key: &str) -> bool {
    PROTECTIONS.contains(&key)
        || (key.starts_with("session.") && (key.contains("file") || key.contains("path")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_field_of_the_schema() {
        let draft = Draft::from_json(r#"{"optimization":{"eager_batching":true}}"#).unwrap();
        let mut fields: Vec<String> = fields(&draft).into_iter().map(|(name, _)| name).collect();
        let mut table: Vec<&str> = FIELDS.iter().map(|(name, _)| *name).collect();
        fields.sort_unstable();
        table.sort_unstable();
        assert_eq!(fields, table, "decide whether a new field brings code");
        assert!(brings_code("a_field_of_tomorrow"));
    }

    /// Returns what a configuration brings to a model with these files.
    fn brought(sent: &str, repository: &str, files: &[&str]) -> String {
        let files: Vec<String> = files.iter().map(|name| (*name).to_owned()).collect();
        let completion = Completion { directory: "m", files: &files, ..Completion::default() };
        let sent = Draft::from_json(sent).unwrap();
        sent.code_beyond(&Draft::from_text(repository, "config.pbtxt").unwrap(), &completion)
            .join(" ")
    }

    #[test]
    fn settings_of_any_model_bring_no_code() {
        const PYTHON: &str =
            r#"backend: "python" parameters { key: "token" value { string_value: "x" } }"#;
        const SAME: &str = r#""backend":"python","parameters":{"token":{"string_value":"x"}}"#;
        for change in [
            r#""version_policy":{"specific":{"versions":[1]}}"#,
            r#""instance_group":[{"count":2,"kind":"KIND_CPU"}]"#,
            r#""max_batch_size":8,"dynamic_batching":{"max_queue_delay_microseconds":5}"#,
            r#""sequence_batching":{}"#,
            r#""model_warmup":[{"name":"w","batch_size":1}]"#,
            r#""response_cache":{"enable":true}"#,
            r#""optimization":{"eager_batching":true}"#,
            r#""default_model_filename":"model.py""#,
        ] {
            assert_eq!(
                brought(&format!("{{{SAME},{change}}}"), PYTHON, &["model.py"]),
                "",
                "{change}"
            );
        }
        // The configuration that the server shows.
        let shown = r#"{"backend":"python","parameters":{"token":{"string_value":"x"},"engine":{"string_value":"python"}}}"#;
        assert_eq!(brought(shown, PYTHON, &["model.py"]), "");
        // What a configuration leaves out is completed from the operator's files.
        assert_eq!(brought(r#"{"instance_group":[{"count":2}]}"#, "", &["model.py"]), "");
        assert_eq!(
            brought(r#"{"max_batch_size":2}"#, r#"backend: "onnxruntime""#, &["model.onnx"]),
            ""
        );
    }

    #[test]
    fn another_program_is_code() {
        const PYTHON: &str =
            r#"backend: "python" parameters { key: "sandbox" value { string_value: "on" } }"#;
        for (sent, expected) in [
            (r#"{"backend":"python"}"#, "parameters['sandbox']"),
            (
                r#"{"backend":"python","parameters":{"sandbox":{"string_value":"off"}}}"#,
                "parameters['sandbox']",
            ),
            (
                r#"{"backend":"python","parameters":{"sandbox":{"string_value":"on"},"EXECUTION_ENV_PATH":{"string_value":"/x"}}}"#,
                "parameters['EXECUTION_ENV_PATH']",
            ),
            (r#"{"backend":"mine","parameters":{"sandbox":{"string_value":"on"}}}"#, "backend"),
            (
                r#"{"backend":"python","default_model_filename":"other.py","parameters":{"sandbox":{"string_value":"on"}}}"#,
                "default_model_filename",
            ),
        ] {
            assert_eq!(brought(sent, PYTHON, &["model.py"]), expected, "{sent}");
        }
        assert_eq!(
            brought(r#"{"backend":"python"}"#, "", &["model.onnx", "model.py"]),
            "platform backend"
        );
        assert_eq!(brought(r#"{"runtime":"x.so"}"#, "", &["model.onnx"]), "runtime");
    }

    #[test]
    fn backends_that_only_read_files_may_change_other_settings() {
        for sent in [
            r#"{"backend":"onnxruntime"}"#,
            r#"{"backend":"tract","max_batch_size":4,"parameters":{"x":{"string_value":"y"}}}"#,
            r#"{"backend":"builtin"}"#,
            r#"{"platform":"onnxruntime_onnx"}"#,
            r#"{"platform":"ensemble"}"#,
            r#"{"backend":"onnxruntime","optimization":{"execution_accelerators":{"gpu_execution_accelerator":[{"name":"tensorrt",
                "parameters":{"precision_mode":"FP16"}}]}},"parameters":{"session.x":{"string_value":"y"}}}"#,
        ] {
            assert_eq!(brought(sent, r#"backend: "onnxruntime""#, &["model.onnx"]), "", "{sent}");
            assert_eq!(brought(sent, "", &["model.py"]), "", "{sent}");
        }
        for (sent, expected) in [
            (
                r#"{"backend":"onnxruntime","parameters":{"sandbox":{"string_value":"off"}}}"#,
                "parameters['sandbox']",
            ),
            (
                r#"{"backend":"onnxruntime","model_operations":{"op_library_filename":["/tmp/x.so"]}}"#,
                "model_operations",
            ),
            (
                r#"{"backend":"onnxruntime","default_model_filename":"/etc/passwd"}"#,
                "default_model_filename",
            ),
            (
                r#"{"backend":"onnxruntime","optimization":{"execution_accelerators":{"gpu_execution_accelerator":[{"name":"tensorrt",
                "parameters":{"trt_extra_plugin_lib_paths":"/tmp/x.so"}}]}}}"#,
                "optimization.execution_accelerators",
            ),
            (
                r#"{"backend":"onnxruntime","parameters":{"session.collect_node_memory_stats_to_file":{"string_value":"/tmp/x"}}}"#,
                "parameters['session.collect_node_memory_stats_to_file']",
            ),
        ] {
            assert_eq!(brought(sent, "", &["model.onnx"]), expected, "{sent}");
        }
        // A library in place of the backend reads the parameters.
        assert_eq!(
            brought(
                r#"{"backend":"onnxruntime","runtime":"libtriton_x.so","parameters":{"x":{"string_value":"y"}}}"#,
                r#"backend: "python" runtime: "libtriton_x.so""#,
                &["model.onnx"]
            ),
            "platform parameters['x'] backend"
        );
        // The operator's own libraries stay.
        const LIBRARY: &str =
            r#"backend: "onnxruntime" model_operations { op_library_filename: "x.so" }"#;
        let same = r#"{"backend":"onnxruntime","max_batch_size":2,"model_operations":{"op_library_filename":["x.so"]}}"#;
        assert_eq!(brought(same, LIBRARY, &["model.onnx"]), "");
    }
}
