//! The tokens of texts, which the engine of a model knows: a request with the input `operation`.

use pharos::infer::{InferInput, InferOutput};
use pharos::model::ModelConfig;
use pharos::model::generation::{DETOKENIZE, OPERATION, PROMPT_TOKEN_IDS, TEXT_OUTPUT, TOKENIZE};
use pharos::tensor::DataType;
use pharos_edge::Call;

use crate::answer::Failure;
use crate::contract::{ADD_SPECIAL_TOKENS, strings, token_ids, violation};
use crate::edge::Edge;
use crate::error::ApiError;
use crate::operation::Operations;
use crate::prompt::Prompt;
use crate::tensors;

/// The tokenizer of a model.
#[derive(Clone, Debug)]
pub(crate) struct Tokenizer {
    operations: Operations,
    /// The datatype of tokens.
    tokens: DataType,
}

/// A text as tokens.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<u32>,
    /// The text of each token. Parts of characters are replacement characters.
    pub(crate) texts: Vec<String>,
}

impl Tokenizer {
    /// Returns the tokenizer of a model.
    ///
    /// # Errors
    /// The model has no tensors for it.
    pub(crate) fn of(config: &ModelConfig) -> Result<Self, ApiError> {
        let tokens = config.inputs.iter().find(|spec| spec.name == PROMPT_TOKEN_IDS);
        let returns_tokens = config.outputs.iter().any(|spec| spec.name == PROMPT_TOKEN_IDS);
        match (Operations::of(config), tokens) {
            (Some(operations), Some(tokens)) if returns_tokens => {
                Ok(Self { operations, tokens: tokens.datatype })
            }
            _ => Err(ApiError {
                code: Some("model_not_supported"),
                ..ApiError::invalid_field(
                    "model",
                    format!(
                        "the model '{}' does not give its tokens: it has no tensors '{OPERATION}' \
                         and '{PROMPT_TOKEN_IDS}'",
                        config.name
                    ),
                )
            }),
        }
    }

    /// Returns the tokens of a text, or the texts of given tokens.
    pub(crate) async fn tokenize(
        &self,
        edge: &Edge,
        call: &mut Call,
        prompt: &Prompt,
        add_special_tokens: bool,
    ) -> Result<Tokens, Failure> {
        let flag = vec![add_special_tokens.into()];
        let mut inputs = vec![self.operations.input(ADD_SPECIAL_TOKENS, DataType::Bool, 1, flag)];
        inputs.extend(prompt.tokens().map(|tokens| self.tokens(tokens)));
        let run = self.operations.run(edge, call, TOKENIZE, prompt.text(), inputs, None);
        Tokens::read(&run.await?)
    }

    /// Returns the text of tokens. A model may ignore that special tokens are not wanted in it.
    pub(crate) async fn detokenize(
        &self,
        edge: &Edge,
        call: &mut Call,
        tokens: &[u32],
        with_special_tokens: bool,
    ) -> Result<String, Failure> {
        let mut inputs = vec![self.tokens(tokens)];
        if !with_special_tokens {
            inputs.push(self.operations.input(ADD_SPECIAL_TOKENS, DataType::Bool, 1, vec![0]));
        }
        let run = self.operations.run(edge, call, DETOKENIZE, "", inputs, None);
        let found = Tokens::read(&run.await?)?;
        found.texts.into_iter().next().ok_or_else(|| violation(TEXT_OUTPUT).into())
    }

    fn tokens(&self, tokens: &[u32]) -> InferInput {
        let data = tensors::tokens(self.tokens, tokens);
        self.operations.input(PROMPT_TOKEN_IDS, self.tokens, tokens.len(), data)
    }
}

impl Tokens {
    fn read(outputs: &[InferOutput]) -> Result<Self, Failure> {
        let mut tokens = Self::default();
        for output in outputs {
            match output.name.as_str() {
                TEXT_OUTPUT => tokens.texts = strings(&output.name, &output.tensor)?,
                PROMPT_TOKEN_IDS => tokens.ids = token_ids(&output.name, &output.tensor)?,
                _ => {}
            }
        }
        Ok(tokens)
    }
}
