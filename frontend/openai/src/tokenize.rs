//! `POST /tokenize` and `POST /detokenize`: the tokens of a text, and the text of tokens.
//!
//! Sources of the forms: vLLM 0.32, and llama.cpp's server (`content` in place of `prompt`).

use axum::response::Response;
use pharos::model::generation::context_length;
use serde::Serialize;

use crate::answer::Failure;
use crate::chat::ChatRequest;
use crate::chat_inference::render;
use crate::edge::Received;
use crate::error::ApiError;
use crate::json::{Budget, Fields};
use crate::options::RequestOptions;
use crate::prompt::Prompt;
use crate::response::to_json;
use crate::tokenizer::Tokenizer;

/// The most tokens of a request to detokenise.
const MAX_TOKENS: usize = 1 << 20;

/// A checked request of `POST /tokenize`.
#[derive(Debug, Clone)]
pub struct TokenizeRequest {
    input: Input,
    add_special_tokens: bool,
    /// Whether the response has the text of each token.
    with_texts: bool,
    options: RequestOptions,
}

/// What is tokenised.
#[derive(Debug, Clone)]
enum Input {
    Text(String),
    /// A chat, as the template of the model renders it.
    Chat(Box<ChatRequest>),
}

impl TokenizeRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let is_chat = fields.take("messages").is_some();
        let options = RequestOptions::read(&mut fields, &mut Budget::new())?;
        let own = fields.boolean("add_special_tokens")?.or(fields.boolean("add_special")?);
        let with_texts = fields.boolean("return_token_strs")?.or(fields.boolean("with_pieces")?);
        let input = if is_chat {
            Input::Chat(Box::new(ChatRequest::parse(body)?))
        } else {
            let text = fields.text("prompt", usize::MAX)?.or(fields.text("content", usize::MAX)?);
            Input::Text(text.ok_or_else(|| fields.missing("prompt"))?)
        };
        Ok(Self {
            // A template writes the special tokens itself.
            add_special_tokens: own.unwrap_or(!is_chat),
            with_texts: with_texts.unwrap_or(false),
            input,
            options,
        })
    }
}

/// A checked request of `POST /detokenize`.
#[derive(Debug, Clone)]
pub struct DetokenizeRequest {
    tokens: Vec<u32>,
    options: RequestOptions,
}

impl DetokenizeRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let options = RequestOptions::read(&mut fields, &mut Budget::new())?;
        let allowed = format!("a list of at most {MAX_TOKENS} token ids");
        let tokens = fields.list("tokens", MAX_TOKENS, &allowed)?;
        let tokens = tokens.ok_or_else(|| fields.missing("tokens"))?;
        Ok(Self { tokens, options })
    }
}

#[derive(Serialize)]
struct TokenizeResponse {
    count: usize,
    max_model_len: Option<u64>,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

#[derive(Serialize)]
struct DetokenizeResponse<'a> {
    prompt: &'a str,
    content: &'a str,
}

/// Answers a request of `POST /tokenize`.
pub(crate) async fn tokenize(mut received: Received) -> Response {
    let answer = tokens_of(&mut received).await;
    received.finish(answer)
}

/// Answers a request of `POST /detokenize`.
pub(crate) async fn detokenize(mut received: Received) -> Response {
    let answer = text_of(&mut received).await;
    received.finish(answer)
}

async fn tokens_of(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(TokenizeRequest::parse).await?;
    let name = received.enter_model(&request.options).await?;
    let Received { edge, call, .. } = received;
    let config = edge.service.model_config(&name, "")?;
    let tokenizer = Tokenizer::of(&config)?;
    let text = match request.input {
        Input::Text(text) => text,
        Input::Chat(chat) => {
            if let Some(media) = chat.media().next() {
                let message = format!("{} cannot be tokenized: only text has tokens", media.path);
                return Err(ApiError::invalid_field(media.path.as_str(), message).into());
            }
            let model = edge.models.get(&*edge.service, &name, &name).await?;
            render(*chat, &model, &name).await?.1
        }
    };
    let prompt = Prompt::Text(text);
    let tokens = tokenizer.tokenize(edge, call, &prompt, request.add_special_tokens).await?;
    Ok(to_json(&TokenizeResponse {
        count: tokens.ids.len(),
        max_model_len: context_length(&config),
        token_strs: request.with_texts.then_some(tokens.texts),
        tokens: tokens.ids,
    }))
}

async fn text_of(received: &mut Received) -> Result<Vec<u8>, Failure> {
    let request = received.parse(DetokenizeRequest::parse).await?;
    let name = received.enter_model(&request.options).await?;
    let Received { edge, call, .. } = received;
    let tokenizer = Tokenizer::of(&*edge.service.model_config(&name, "")?)?;
    let text = tokenizer.detokenize(edge, call, &request.tokens, true).await?;
    Ok(to_json(&DetokenizeResponse { prompt: &text, content: &text }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<TokenizeRequest, ApiError> {
        TokenizeRequest::parse(body.as_bytes())
    }

    #[test]
    fn a_chat_brings_its_own_special_tokens() {
        let text = parse(r#"{"prompt":"a","return_token_strs":true}"#).unwrap();
        assert!(text.add_special_tokens && text.with_texts);
        assert!(parse(r#"{"content":"a","add_special":false}"#).unwrap().with_texts.eq(&false));
        let chat = parse(r#"{"messages":[{"role":"user","content":"a"}]}"#).unwrap();
        assert!(!chat.add_special_tokens);
        assert_eq!(parse("{}").unwrap_err().param.as_deref(), Some("prompt"));
    }

    #[test]
    fn tokens_are_ids() {
        let error = |body: &str| DetokenizeRequest::parse(body.as_bytes()).unwrap_err();
        assert_eq!(error("{}").param.as_deref(), Some("tokens"));
        assert!(error(r#"{"tokens":[-1]}"#).message.contains("token ids"));
        assert!(DetokenizeRequest::parse(br#"{"tokens":[]}"#).is_ok());
    }
}
