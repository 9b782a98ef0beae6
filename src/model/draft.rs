//! A model configuration as written, and its conversion to a checked one.

use prost::Message;

use super::autocomplete_text::LLAMACPP;
use super::text_files::{TEXT_BACKEND, TextFiles, TextModel};
use super::{Completion, ConfigError, ModelConfig};
use super::{
    agents, autocomplete, autocomplete_text, gguf, json, normalize, onnx, proto, text, validate,
    warnings,
};

/// The parameter that decides whether a model runs in a sandbox.
pub const SANDBOX: &str = "sandbox";

/// A configuration that follows the schema. Its content is not checked: fields may be missing or
/// contradict each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    pub(super) proto: proto::ModelConfig,
    /// Warnings about the text, each with its position.
    warnings: Vec<String>,
}

impl Draft {
    /// Returns an empty configuration, which a model without a configuration file has.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Reads the protobuf text format (`config.pbtxt`).
    ///
    /// # Errors
    /// One line, `FILE:LINE:COLUMN: what was wrong`, with the allowed names for an unknown field or
    /// enum value.
    pub fn from_text(source: &str, file_name: &str) -> Result<Self, ConfigError> {
        let (message, warnings) = text::parse(source, &proto::descriptor())
            .map_err(|error| ConfigError::new(error.locate(source, file_name)))?;
        let warnings =
            warnings.into_iter().map(|warning| warning.locate(source, file_name)).collect();
        Ok(Self { proto: proto::from_dynamic(&message)?, warnings })
    }

    /// Reads the JSON mapping of protobuf, as leniently as protobuf does.
    ///
    /// # Errors
    /// One line, `model configuration JSON:LINE:COLUMN: what was wrong`, with the allowed names for
    /// an unknown field or enum value.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let message = json::parse(json, &proto::descriptor())
            .map_err(|error| ConfigError::new(error.locate(json, "model configuration JSON")))?;
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

    /// Returns the model's file from the configuration (`default_model_filename`); empty if it has
    /// none.
    pub fn model_file(&self) -> &str {
        &self.proto.default_model_filename
    }

    /// Returns the name of the model's file if its signature can be read ([`onnx::signature`]).
    /// `files` are the names in the version directories. A Python model may have such a file beside
    /// its code.
    pub fn onnx_file<'a>(&'a self, files: &[String]) -> Option<&'a str> {
        let name = match self.proto.default_model_filename.as_str() {
            "" => normalize::default_file("onnxruntime", files)?,
            name => name,
        };
        let has_signature =
            name.rsplit_once('.').is_some_and(|(_, ending)| onnx::EXTENSIONS.contains(&ending));
        (self.may_be_onnx() && has_signature).then_some(name)
    }

    /// Returns the name of the model's file if the backend of GGUF files serves it
    /// ([`gguf::metadata`]). `files` are the names in the version directories. A model of another
    /// backend may have such a file beside its code.
    pub fn gguf_file<'a>(&'a self, files: &[String]) -> Option<&'a str> {
        let named = self.proto.default_model_filename.as_str();
        let backend = match self.proto.backend.as_str() {
            "" if self.proto.platform.is_empty() => normalize::backend_by_file(named, files)?,
            backend => backend,
        };
        let name = match named {
            "" => normalize::default_file(LLAMACPP, files)?,
            named => named,
        };
        (backend == LLAMACPP && name.ends_with(gguf::ENDING)).then_some(name)
    }

    /// Reads a text model from its files, if the backend of text models serves them; see
    /// [`TextFiles::are_in`] for `names`, the names in the version directories.
    ///
    /// # Errors
    /// The files contradict each other or the configuration, or allow several tasks.
    pub fn text_model(
        &self,
        names: &[String],
        read: impl FnOnce() -> Result<TextFiles, String>,
    ) -> Result<Option<TextModel>, String> {
        if !self.is_text_model(names) {
            return Ok(None);
        }
        let parameter = |name: &str| {
            self.proto.parameters.get(name).map(|parameter| parameter.string_value.clone())
        };
        TextModel::of(&read()?, &self.proto.default_model_filename, &parameter).map(Some)
    }

    /// Returns whether the backend of text models serves the model: its configuration says so, or it
    /// names no backend and no inputs, and the files are a text model.
    fn is_text_model(&self, names: &[String]) -> bool {
        let proto::ModelConfig { backend, platform, input, .. } = &self.proto;
        match backend.as_str() {
            TEXT_BACKEND => true,
            "" => {
                platform.is_empty()
                    && input.is_empty()
                    && TextFiles::are_in(names.iter().map(String::as_str))
            }
            _ => false,
        }
    }

    /// Returns whether the model may be an ONNX file.
    pub(super) fn may_be_onnx(&self) -> bool {
        let proto::ModelConfig { backend, platform, .. } = &self.proto;
        matches!(backend.as_str(), "" | "onnxruntime" | "tract")
            && matches!(platform.as_str(), "" | "onnxruntime_onnx")
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

    /// Checks that the configuration's name, if it has one, is the name of the model's directory.
    ///
    /// # Errors
    /// The name differs.
    pub fn check_name(&self, directory: &str) -> Result<(), ConfigError> {
        normalize::check_name(&self.proto, directory)
    }

    /// Fills in missing fields from the model file, its directory and the defaults, and checks the
    /// result.
    ///
    /// # Errors
    /// The first field that is missing, wrong or contradicts the model file; with Triton's text
    /// where Triton has one.
    pub fn complete(mut self, completion: &Completion<'_>) -> Result<ModelConfig, ConfigError> {
        normalize::name(&mut self.proto, completion);
        normalize::backend(&mut self.proto, completion)?;
        if let Some(signature) = completion
            .signature
            .filter(|_| matches!(self.proto.backend.as_str(), "onnxruntime" | "tract"))
        {
            if completion.auto_complete {
                let warning = autocomplete::fill(
                    &mut self.proto,
                    signature,
                    completion.default_max_batch_size,
                )?;
                self.warnings.extend(warning);
            }
            autocomplete::compare(&self.proto, signature)?;
        }
        if self.proto.backend == LLAMACPP && completion.auto_complete {
            autocomplete_text::fill(&mut self.proto, completion.gguf);
        }
        if let Some(model) = completion
            .text
            .filter(|_| self.proto.backend == TEXT_BACKEND && completion.auto_complete)
        {
            autocomplete_text::fill_of_files(&mut self.proto, model);
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

    /// Returns a copy with this transaction policy. An ensemble's policy depends on the policies of
    /// its members.
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
