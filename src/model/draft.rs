//! A model configuration as somebody wrote it, and its way to a checked one.

use prost::Message;

use super::lexer::TextError;
use super::onnx::ModelSignature;
use super::{Completion, ConfigError, ModelConfig};
use super::{agents, autocomplete, json, normalize, proto, text, validate, warnings};

/// A configuration that has the right form and may lack or contradict anything else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    pub(super) proto: proto::ModelConfig,
    /// Warnings about the text, each with its position.
    warnings: Vec<String>,
}

impl Draft {
    /// A configuration that says nothing: that of a model without a configuration file.
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

    /// The model's name as the configuration says it; empty if it does not.
    pub fn name(&self) -> &str {
        &self.proto.name
    }

    /// Gives the model a name in place of the one that the configuration says.
    pub fn rename(&mut self, name: &str) {
        name.clone_into(&mut self.proto.name);
    }

    /// The model's file as the configuration names it (`default_model_filename`); empty if it does not.
    pub fn model_file(&self) -> &str {
        &self.proto.default_model_filename
    }

    /// Whether a file of ONNX may be what it is about: a Python model may have one beside its code.
    pub fn may_be_onnx(&self) -> bool {
        let proto::ModelConfig { backend, platform, .. } = &self.proto;
        matches!(backend.as_str(), "" | "onnxruntime" | "tract") && matches!(platform.as_str(), "" | "onnxruntime_onnx")
    }

    /// The draft as protobuf bytes of `inference.ModelConfig`.
    pub fn encode(&self) -> Vec<u8> {
        self.proto.encode_to_vec()
    }

    /// Reads what [`Draft::encode`] or any other writer of `inference.ModelConfig` made.
    ///
    /// # Errors
    /// When the bytes are no such message.
    pub fn decode(bytes: &[u8]) -> Result<Self, ConfigError> {
        let proto = proto::ModelConfig::decode(bytes)
            .map_err(|error| ConfigError::new(format!("model configuration bytes: {error}")))?;
        Ok(Self { proto, warnings: Vec::new() })
    }

    /// The sums that files of the model must have, in the order of their names.
    ///
    /// # Errors
    /// There is another agent, or a parameter that cannot be checked.
    pub fn checksums(&self) -> Result<Vec<agents::Checksum>, ConfigError> {
        agents::of(&self.proto)
    }

    /// Checks that a configuration that names its model names it as its directory does.
    ///
    /// # Errors
    /// It has another name.
    pub fn check_name(&self, directory: &str) -> Result<(), ConfigError> {
        normalize::check_name(&self.proto, directory)
    }

    /// Fills in what the model file, its directory and the defaults say, and checks the whole.
    ///
    /// # Errors
    /// The first thing that is missing, wrong or contradicted by the model file; Triton's text where it has one.
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
    /// Reads what [`ModelConfig::encode`] made, checking it again.
    ///
    /// # Errors
    /// When the bytes are no configuration or not a valid, completed one.
    pub fn decode(bytes: &[u8]) -> Result<Self, ConfigError> {
        validate::config(Draft::decode(bytes)?.proto)
    }

    /// The same configuration of a model that answers any number of times, or once: an ensemble does as its members do.
    ///
    /// # Errors
    /// It asks for what is only there for models that answer once.
    pub fn with_decoupled(&self, decoupled: bool) -> Result<Self, ConfigError> {
        validate::check_cache(&self.proto, self.response_cache, decoupled)?;
        let mut config = self.clone();
        config.warnings.extend(self.says_decoupled_in_vain(decoupled));
        config.decoupled = decoupled;
        config.proto.model_transaction_policy = Some(proto::ModelTransactionPolicy { decoupled });
        Ok(config)
    }
}
