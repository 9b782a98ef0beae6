//! Requests of clients as the engines take them: checked, and with their texts as tokens.

use serde_json::{Map, Value};

use crate::engine::{Request, Returns};
use crate::host::{Batch, Failure};
use crate::model::Model;
use crate::pooling::PoolingRequest;
use crate::sampling::Sampling;

/// What a request wants besides the task of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// The task of the model.
    Task,
    /// The tokens of a text.
    Tokenize,
    /// The text of tokens.
    Detokenize,
}

/// A request of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) batch: &'a Batch<'a>,
    pub(crate) position: usize,
    pub(crate) model: &'a Model,
}

fn wrong(name: &str, what: &str) -> Failure {
    Failure::invalid(format!("the input '{name}' must have {what} for each request"))
}

impl<'a> Reader<'a> {
    fn text(self, name: &str) -> Result<Option<&'a str>, Failure> {
        let Some(input) = self.batch.input(name) else { return Ok(None) };
        input.string(self.position).map(Some).ok_or_else(|| wrong(name, "one string in UTF-8"))
    }

    fn required_text(self, name: &str) -> Result<&'a str, Failure> {
        self.text(name)?.ok_or_else(|| wrong(name, "one string"))
    }

    fn flag(self, name: &str, default: bool) -> Result<bool, Failure> {
        let Some(input) = self.batch.input(name) else { return Ok(default) };
        input.boolean(self.position).ok_or_else(|| wrong(name, "one boolean"))
    }

    pub(crate) fn operation(self) -> Result<Operation, Failure> {
        match self.text("operation")? {
            None | Some("") => Ok(Operation::Task),
            Some("tokenize") => Ok(Operation::Tokenize),
            Some("detokenize") => Ok(Operation::Detokenize),
            Some(other) => Err(Failure::invalid(format!(
                "the input 'operation' is '{}'; allowed are tokenize and detokenize",
                other.escape_debug()
            ))),
        }
    }

    /// Returns the tokens that the client gives in place of a text; `None` if it gives none.
    fn given_tokens(self) -> Result<Option<Vec<i32>>, Failure> {
        let name = "prompt_token_ids";
        let Some(input) = self.batch.input(name) else { return Ok(None) };
        let ids = input.naturals().ok_or_else(|| wrong(name, "token ids"))?;
        let count = self.model.inner.vocab().n_tokens();
        let tokens = ids.into_iter().map(|id| match i32::try_from(id) {
            Ok(token) if token < count => Ok(token),
            _ => Err(Failure::invalid(format!(
                "the token id {id} is not allowed: the vocabulary of the model has {count} tokens"
            ))),
        });
        tokens.collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// Returns the tokens of a request to tokenise, and the text of each.
    pub(crate) fn to_tokenize(self, input: &str) -> Result<(Vec<u32>, Vec<Vec<u8>>), Failure> {
        let text = self.required_text(input)?;
        let tokens = self.model.tokenize(text, self.flag("add_special_tokens", true)?);
        let pieces = tokens.iter().map(|token| self.model.piece(*token, true)).collect();
        Ok((tokens.iter().map(|token| token.cast_unsigned()).collect(), pieces))
    }

    /// Returns the text of the tokens of a request.
    pub(crate) fn to_detokenize(self) -> Result<String, Failure> {
        let tokens = self.given_tokens()?;
        let tokens = tokens.ok_or_else(|| wrong("prompt_token_ids", "token ids"))?;
        Ok(self.model.detokenize(&tokens))
    }

    /// Returns a request to generate text.
    pub(crate) fn to_generate(
        self,
        max_sequences: u32,
        is_decoupled: bool,
    ) -> Result<Request, Failure> {
        let prompt = self.required_text("text_input")?;
        let sampling = match self.text("sampling_parameters")? {
            Some(json) => Sampling::read(members(json)?)?,
            None => Sampling::read(self.batch.parameters(self.position))?,
        };
        let is_streamed = self.flag("stream", false)?;
        let excludes_prompt = self.flag("exclude_input_in_output", is_streamed)?;
        if is_streamed && !excludes_prompt {
            return Err(Failure::invalid(
                "a stream has no prompt in its output: exclude_input_in_output must be true",
            ));
        }
        if is_streamed && !is_decoupled {
            return Err(Failure::invalid(
                "stream is true, but the configuration of the model is not decoupled",
            ));
        }
        if sampling.n > max_sequences {
            return Err(Failure::invalid(format!(
                "n {} is not allowed: the model generates at most {max_sequences} choices \
                 together (its parameter 'max_sequences')",
                sampling.n
            )));
        }
        let adapter = match &sampling.adapter {
            None => None,
            Some(name) => Some(self.adapter(name)?),
        };
        let tokens = self.prompt_tokens(prompt, &sampling)?;
        let matcher = sampling.structure.as_ref();
        let matcher = matcher.map(|structure| self.model.matcher(structure)).transpose()?;
        let returns = Returns {
            finish_reason: self.flag("return_finish_reason", true)?,
            counts: self.flag("return_num_output_tokens", true)?,
            logprobs: sampling.logprobs.is_some() && self.flag("return_logprobs", true)?,
            token_ids: self.flag("return_token_ids", false)? && sampling.n == 1,
            prompt_token_ids: self.flag("return_prompt_token_ids", false)?,
        };
        Ok(Request {
            prefix: if excludes_prompt { String::new() } else { prompt.to_owned() },
            prompt: tokens,
            sampling,
            matcher,
            is_streamed,
            returns,
            adapter,
            responder: self.batch.detach(self.position)?,
        })
    }

    /// Returns the position of an adapter in the model's list.
    fn adapter(self, name: &str) -> Result<usize, Failure> {
        let names = &self.model.adapters;
        names.iter().position(|known| known == name).ok_or_else(|| {
            let known = match names.is_empty() {
                true => "the model has no adapters (multi_lora.json)".to_owned(),
                false => format!("available are {}", names.join(", ")),
            };
            Failure::invalid(format!("unknown adapter '{}': {known}", name.escape_debug()))
        })
    }

    /// Returns the tokens of a prompt that leaves room for output.
    fn prompt_tokens(self, prompt: &str, sampling: &Sampling) -> Result<Vec<i32>, Failure> {
        let limit = self.model.context_length as usize;
        let given = self.given_tokens()?.filter(|tokens| !tokens.is_empty());
        let mut tokens = match given {
            Some(tokens) => tokens,
            None => self.model.tokenize(prompt, self.flag("add_special_tokens", true)?),
        };
        if let Some(wanted) = sampling.truncate_prompt {
            tokens.drain(..tokens.len().saturating_sub(wanted));
        }
        match tokens.len() {
            0 => Err(Failure::invalid("the prompt has no tokens")),
            length if length >= limit => Err(Failure::invalid(format!(
                "the prompt has {length} tokens, and the context of the model is {limit} tokens: \
                 a shorter prompt leaves room for the output"
            ))),
            _ => Ok(tokens),
        }
    }

    /// Returns a request for the embedding of a text, or, with `is_pair`, for the score of a pair.
    pub(crate) fn to_pool(self, is_pair: bool) -> Result<PoolingRequest, Failure> {
        let text = self.required_text("text")?;
        let given = self.given_tokens()?.filter(|tokens| !tokens.is_empty());
        let mut tokens = match given {
            Some(tokens) => tokens,
            None if is_pair => self.model.tokenize_pair(text, self.required_text("text_pair")?),
            None => self.model.tokenize(text, self.flag("add_special_tokens", true)?),
        };
        let limit = self.model.context_length as usize;
        self.truncate(&mut tokens, limit)?;
        match tokens.len() {
            0 => Err(Failure::invalid("the text has no tokens")),
            length if length > limit => Err(Failure::invalid(format!(
                "the text has {length} tokens, and the context of the model is {limit} tokens: \
                 truncate_prompt_tokens -1 cuts the rest off"
            ))),
            _ => Ok(PoolingRequest {
                tokens,
                normalize: self.flag("normalize", true)?,
                returns_tokens: self.flag("return_prompt_token_ids", false)?,
                responder: self.batch.detach(self.position)?,
            }),
        }
    }

    /// Cuts off what the client does not want, or, if it says -1, what does not fit. The token that
    /// ends a text stays.
    fn truncate(self, tokens: &mut Vec<i32>, limit: usize) -> Result<(), Failure> {
        let name = "truncate_prompt_tokens";
        let Some(input) = self.batch.input(name) else { return Ok(()) };
        let wanted = input.integer(self.position).ok_or_else(|| wrong(name, "one integer"))?;
        let wanted = match usize::try_from(wanted) {
            Err(_) if wanted == -1 => limit,
            Ok(wanted) if wanted >= 1 => wanted,
            _ => {
                return Err(Failure::invalid(format!(
                    "{name} {wanted} is not allowed: it must be -1, for the context of the model, \
                     or a number from 1"
                )));
            }
        };
        let Some(last) = tokens.last().copied().filter(|_| tokens.len() > wanted) else {
            return Ok(());
        };
        tokens.truncate(wanted);
        let is_special = self.model.inner.vocab().is_control(llama_cpp_2::token::LlamaToken(last));
        if is_special && let Some(end) = tokens.last_mut() {
            *end = last;
        }
        Ok(())
    }
}

/// Reads JSON with the parameters of sampling.
fn members(json: &str) -> Result<Map<String, Value>, Failure> {
    let wrong = |why: &str| {
        Failure::invalid(format!("the input 'sampling_parameters' is not a JSON object: {why}"))
    };
    match serde_json::from_str(json) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(_) => Err(wrong("it is another value")),
        Err(error) => Err(wrong(&error.to_string())),
    }
}
