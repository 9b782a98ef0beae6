//! The tokens of texts, which the engine of a model knows: a request with the input `operation`.

use pharos::infer::{InferInput, InferRequest};
use pharos::model::ModelConfig;
use pharos::model::generation::{
    DETOKENIZE, OPERATION, PROMPT_TOKEN_IDS, TEXT_INPUT, TEXT_OUTPUT, TOKENIZE,
};
use pharos::model::pooling::TEXT;
use pharos::service::Streamed;
use pharos::tensor::{DataType, Tensor};
use pharos_edge::Call;

use crate::answer::Failure;
use crate::contract::{ADD_SPECIAL_TOKENS, strings, token_ids, violation};
use crate::edge::Edge;
use crate::error::ApiError;
use crate::prompt::Prompt;
use crate::tensors;

/// The tokenizer of a model.
#[derive(Clone, Debug)]
pub(crate) struct Tokenizer {
    model: String,
    /// The input with the text.
    text: &'static str,
    has_batch: bool,
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
        let has = |name: &str| config.inputs.iter().any(|spec| spec.name == name);
        let text = [TEXT_INPUT, TEXT].into_iter().find(|name| has(name));
        let returns = |name: &str| config.outputs.iter().any(|spec| spec.name == name);
        let is_complete = has(OPERATION)
            && has(PROMPT_TOKEN_IDS)
            && returns(PROMPT_TOKEN_IDS)
            && returns(TEXT_OUTPUT);
        match text.filter(|_| is_complete) {
            Some(text) => {
                let input = config.inputs.iter().find(|spec| spec.name == PROMPT_TOKEN_IDS);
                Ok(Self {
                    model: config.name.clone(),
                    text,
                    has_batch: config.max_batch_size > 0,
                    tokens: input.map_or(DataType::Uint32, |spec| spec.datatype),
                })
            }
            None => Err(ApiError {
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
        let mut inputs = vec![
            self.string(OPERATION, TOKENIZE)?,
            self.string(self.text, prompt.text())?,
            self.input(ADD_SPECIAL_TOKENS, DataType::Bool, 1, vec![add_special_tokens.into()]),
        ];
        inputs.extend(prompt.tokens().map(|tokens| self.tokens(tokens)));
        self.run(edge, call, inputs).await
    }

    /// Returns the text of tokens.
    pub(crate) async fn detokenize(
        &self,
        edge: &Edge,
        call: &mut Call,
        tokens: &[u32],
    ) -> Result<String, Failure> {
        let inputs = vec![
            self.string(OPERATION, DETOKENIZE)?,
            self.string(self.text, "")?,
            self.tokens(tokens),
        ];
        let found = self.run(edge, call, inputs).await?;
        found.texts.into_iter().next().ok_or_else(|| violation(TEXT_OUTPUT).into())
    }

    async fn run(
        &self,
        edge: &Edge,
        call: &mut Call,
        inputs: Vec<InferInput>,
    ) -> Result<Tokens, Failure> {
        let mut request =
            InferRequest { model_name: self.model.clone(), inputs, ..InferRequest::default() };
        call.describe_client_in(&mut request, edge.service.now());
        let mut responses = edge.service.stream(request)?;
        let mut tokens = Tokens::default();
        while let Some(Streamed { answer, empty, last, .. }) = responses.next_response().await {
            let response = answer?;
            if !empty {
                for output in &response.outputs {
                    match output.name.as_str() {
                        TEXT_OUTPUT => tokens.texts = strings(&output.name, &output.tensor)?,
                        PROMPT_TOKEN_IDS => tokens.ids = token_ids(&output.name, &output.tensor)?,
                        _ => {}
                    }
                }
            }
            if last {
                break;
            }
        }
        Ok(tokens)
    }

    fn string(&self, name: &str, text: &str) -> Result<InferInput, ApiError> {
        Ok(self.input(name, DataType::Bytes, 1, tensors::texts([text])?))
    }

    fn tokens(&self, tokens: &[u32]) -> InferInput {
        let data = tensors::tokens(self.tokens, tokens);
        self.input(PROMPT_TOKEN_IDS, self.tokens, tokens.len(), data)
    }

    fn input(&self, name: &str, datatype: DataType, elements: usize, data: Vec<u8>) -> InferInput {
        let mut shape = vec![1; usize::from(self.has_batch)];
        shape.push(elements as i64);
        InferInput { name: name.to_owned(), tensor: Tensor { datatype, shape, data: data.into() } }
    }
}
