//! A model configuration as somebody wrote it, and its way to a checked one.

use prost::Message;

use super::lexer::TextError;
use super::onnx::ModelSignature;
use super::{ConfigError, ModelConfig, agents, autocomplete, doubtful, json, normalize, proto, text, validate};

/// A configuration that has the right form and may lack or contradict anything else.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    pub(super) proto: proto::ModelConfig,
    /// What its text says and hardly means, each with its place.
    doubtful: Vec<String>,
}

/// What is known about a model apart from its configuration's text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion<'a> {
    /// The name of the model's directory: the model's name.
    pub directory: &'a str,
    /// The names of the files in the model's version directories; they decide the backend where the configuration is
    /// silent.
    pub files: &'a [String],
    /// The backends that can run here; empty to accept any name. ONNX models fall back from `onnxruntime` to `tract`
    /// when only the latter is listed.
    pub backends: &'a [&'a str],
    /// The numbers of this machine's GPUs, which instances are put on where the configuration names none.
    pub gpus: &'a [u32],
    /// Those of further ones that cannot be used now. A configuration may name them: whether they can be used is asked when
    /// an instance is started.
    pub unusable_gpus: &'a [u32],
    /// Why `onnxruntime` cannot use GPUs here, as the end of a sentence; `None` if it can.
    pub no_cuda_provider: Option<&'a str>,
    /// What the model file says about its inputs and outputs, if it could be read.
    pub signature: Option<&'a ModelSignature>,
    /// Whether inputs, outputs, datatypes and the maximum batch size may be filled in from `signature`.
    pub auto_complete: bool,
    /// The maximum batch size to fill in for a model that can batch and says nothing; 4 in Triton.
    pub default_max_batch_size: u32,
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
        let (message, doubtful) = text::parse(source, &proto::descriptor()).map_err(located)?;
        let doubtful = doubtful.into_iter().map(|doubt| doubt.locate(source, file_name)).collect();
        Ok(Self { proto: proto::from_dynamic(&message)?, doubtful })
    }

    /// Reads the JSON mapping of protobuf, as leniently as protobuf does.
    ///
    /// # Errors
    /// One line, `model configuration JSON:LINE:COLUMN: what was wrong`, with the allowed names for an unknown field or enum
    /// value.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let located = |error: TextError| ConfigError::new(error.locate(json, "model configuration JSON"));
        let message = json::parse(json, &proto::descriptor()).map_err(located)?;
        Ok(Self { proto: proto::from_dynamic(&message)?, doubtful: Vec::new() })
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
        Ok(Self { proto, doubtful: Vec::new() })
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
        self.doubtful.extend(normalize::defaults(&mut self.proto, completion));
        agents::of(&self.proto)?;
        let mut config = validate::config(self.proto)?;
        validate::placement(&config, completion)?;
        normalize::check_name(&config.proto, completion.directory)?;
        config.doubtful = self.doubtful;
        config.doubtful.extend(doubtful::of(&config));
        Ok(config)
    }
}
