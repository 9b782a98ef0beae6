//! A model configuration as written, and its conversion to a checked one.

use prost::Message;

use super::lexer::TextError;
use super::onnx::ModelSignature;
use super::{Completion, ConfigError, ModelConfig};
use super::{agents, autocomplete, json, normalize, proto, text, validate, warnings};

/// The parameter that decides whether a model runs in a sandbox.
pub const SANDBOX: &str = "sandbox";

/// The options of ONNX Runtime's accelerators that are plain values. Others may name files, such as `trt_extra_plugin_lib_paths`.
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

/// A configuration that follows the schema. Its content is not checked: fields may be missing or contradict each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    pub(super) proto: proto::ModelConfig,
    /// Warnings about the text, each with its position.
    warnings: Vec<String>,
}

impl Draft {
    /// Returns an empty configuration: that of a model without a configuration file.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Reads the protobuf text format (`config.pbtxt`).
    ///
    /// # Errors
    /// One line, `FILE:LINE:COLUMN: what was wrong`, with the allowed names for an unknown field or enum value.
    pub fn from_text(source: &str, file_name: &str) -> Result<Self, ConfigError> {
        let located = |error: TextError| ConfigError::new(error.locate(source, file_name));
        let (message, warnings) = text::parse(source, &proto::descriptor()).map_err(located)?;
        let warnings = warnings.into_iter().map(|warning| warning.locate(source, file_name)).collect();
        Ok(Self { proto: proto::from_dynamic(&message)?, warnings })
    }

    /// Reads the JSON mapping of protobuf, as leniently as protobuf does.
    ///
    /// # Errors
    /// One line, `model configuration JSON:LINE:COLUMN: what was wrong`, with the allowed names for an unknown field or enum
    /// value.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let located = |error: TextError| ConfigError::new(error.locate(json, "model configuration JSON"));
        let message = json::parse(json, &proto::descriptor()).map_err(located)?;
        Ok(Self { proto: proto::from_dynamic(&message)?, warnings: Vec::new() })
    }

    /// Returns the model's name from the configuration; empty if it has none.
    pub fn name(&self) -> &str {
        &self.proto.name
    }

    /// Replaces the model's name.
    pub fn rename(&mut self, name: &str) {
        name.clone_into(&mut self.proto.name);
    }

    /// Returns the model's file from the configuration (`default_model_filename`); empty if it has none.
    pub fn model_file(&self) -> &str {
        &self.proto.default_model_filename
    }

    /// Returns whether an ONNX file in the version directory may be the model. A Python model may have one beside its code.
    pub fn may_be_onnx(&self) -> bool {
        let proto::ModelConfig { backend, platform, .. } = &self.proto;
        matches!(backend.as_str(), "" | "onnxruntime" | "tract") && matches!(platform.as_str(), "" | "onnxruntime_onnx")
    }

    /// Returns whether a model of this configuration can run other code than that of the server: its backend is not one of those
    /// that only read the model's file, or is not named, or the configuration decides about the sandbox or names other files.
    pub fn can_run_code(&self) -> bool {
        let proto::ModelConfig { backend, platform, parameters, .. } = &self.proto;
        let reads_files = match backend.as_str() {
            "" => matches!(platform.as_str(), "ensemble" | "onnxruntime_onnx"),
            name => matches!(name, "builtin" | "onnxruntime" | "tract"),
        };
        !reads_files || parameters.contains_key(SANDBOX) || self.names_files()
    }

    /// Returns whether a model of this configuration can run other code than with that of its repository, whose files it has. Both are
    /// compared as they are completed from the files.
    pub fn brings_code_to(&self, repository: &Self, completion: &Completion<'_>) -> bool {
        let code = |draft: &Self| {
            // The load reports why a configuration cannot be completed.
            let mut proto =
                draft.clone().resolve(completion).map_or_else(|_| draft.proto.clone(), |resolved| resolved.proto);
            // The server adds it to the configuration that it shows.
            proto.parameters.remove("engine");
            let accelerators = proto.optimization.and_then(|all| all.execution_accelerators);
            let files = (proto.default_model_filename, proto.cc_model_filenames, proto.model_operations);
            (proto.backend, proto.platform, proto.runtime, proto.parameters, files, accelerators)
        };
        self.can_run_code() && code(self) != code(repository)
    }

    /// Returns whether the configuration names files that ONNX Runtime reads, loads as libraries or writes: libraries of operators,
    /// and options that it gets unchanged and that are not known to be plain values.
    fn names_files(&self) -> bool {
        let proto::ModelConfig { model_operations, optimization, parameters, .. } = &self.proto;
        let libraries = model_operations.as_ref().is_some_and(|all| !all.op_library_filename.is_empty());
        let accelerators = optimization.as_ref().and_then(|all| all.execution_accelerators.as_ref());
        let mut of_gpus_and_processors = accelerators
            .into_iter()
            .flat_map(|all| all.gpu_execution_accelerator.iter().chain(&all.cpu_execution_accelerator));
        let plain = |key: &String| PLAIN_OPTIONS.contains(&key.as_str());
        let options = of_gpus_and_processors.any(|one| !one.parameters.keys().all(plain));
        let entry = |key: &String| key.starts_with("session.") && (key.contains("file") || key.contains("path"));
        libraries || options || parameters.keys().any(entry)
    }

    /// Encodes the draft as protobuf bytes of `inference.ModelConfig`.
    pub fn encode(&self) -> Vec<u8> {
        self.proto.encode_to_vec()
    }

    /// Decodes the output of [`Draft::encode`] or any other encoded `inference.ModelConfig`.
    ///
    /// # Errors
    /// The bytes are not such a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, ConfigError> {
        let proto = proto::ModelConfig::decode(bytes)
            .map_err(|error| ConfigError::new(format!("model configuration bytes: {error}")))?;
        Ok(Self { proto, warnings: Vec::new() })
    }

    /// Returns the checksums that files of the model must have, sorted by file name.
    ///
    /// # Errors
    /// The configuration names another agent, or a parameter that cannot be checked.
    pub fn checksums(&self) -> Result<Vec<agents::Checksum>, ConfigError> {
        agents::of(&self.proto)
    }

    /// Checks that the configuration's name, if it has one, is that of the model's directory.
    ///
    /// # Errors
    /// The name differs.
    pub fn check_name(&self, directory: &str) -> Result<(), ConfigError> {
        normalize::check_name(&self.proto, directory)
    }

    /// Fills in missing fields from the model file, its directory and the defaults, and checks the result.
    ///
    /// # Errors
    /// The first field that is missing, wrong or contradicts the model file; with Triton's text where Triton has one.
    pub fn complete(mut self, completion: &Completion<'_>) -> Result<ModelConfig, ConfigError> {
        normalize::name(&mut self.proto, completion);
        normalize::backend(&mut self.proto, completion)?;
        let of_onnx = |_: &&ModelSignature| matches!(self.proto.backend.as_str(), "onnxruntime" | "tract");
        if let Some(signature) = completion.signature.filter(of_onnx) {
            if completion.auto_complete {
                autocomplete::fill(&mut self.proto, signature, completion.default_max_batch_size)?;
            }
            autocomplete::compare(&self.proto, signature)?;
        }
        self.warnings.extend(normalize::defaults(&mut self.proto, completion));
        agents::of(&self.proto)?;
        let mut config = validate::config(self.proto)?;
        validate::placement(&config, completion)?;
        normalize::check_name(&config.proto, completion.directory)?;
        config.warnings = self.warnings;
        config.warnings.extend(warnings::of(&config));
        Ok(config)
    }
}

impl ModelConfig {
    /// Decodes the output of [`ModelConfig::encode`] and checks it again.
    ///
    /// # Errors
    /// The bytes are not a configuration, or not a valid and completed one.
    pub fn decode(bytes: &[u8]) -> Result<Self, ConfigError> {
        validate::config(Draft::decode(bytes)?.proto)
    }

    /// Returns a copy with this transaction policy. An ensemble's policy depends on that of its members.
    ///
    /// # Errors
    /// The model is decoupled but uses a feature that requires exactly one response per request.
    pub fn with_decoupled(&self, decoupled: bool) -> Result<Self, ConfigError> {
        validate::check_cache(&self.proto, self.response_cache, decoupled)?;
        let mut config = self.clone();
        config.warnings.extend(self.ineffective_decoupled_warning(decoupled));
        config.decoupled = decoupled;
        config.proto.model_transaction_policy = Some(proto::ModelTransactionPolicy { decoupled });
        Ok(config)
    }
}
