//! Requests of clients as the engines take them: checked, and with their texts as tokens.

use llama_cpp_2::token::LlamaToken;
use llguidance::Matcher;
use serde_json::{Map, Value};

use crate::adapters::{AdapterId, RequestedAdapter};
use crate::engine::{Request, Returns};
use crate::host::{Batch, Failure, Responder};
use crate::model::Model;
use crate::pooling::PoolingRequest;
use crate::sampling::Sampling;

/// Texts of more bytes than this are prepared on another thread, because the tokens of a long text
/// take milliseconds.
const LONG: usize = 64 << 10;

/// What a request wants besides the task of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// The task of the model.
    Task,
    /// The tokens of a text.
    Tokenize,
    /// The text of tokens.
    Detokenize,
    /// Loads an adapter.
    LoadAdapter,
    /// Frees the memory of an adapter.
    UnloadAdapter,
}

/// A request of a batch.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a> {
    pub(crate) batch: &'a Batch<'a>,
    pub(crate) position: usize,
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

    fn operation(self) -> Result<Operation, Failure> {
        match self.text("operation")? {
            None | Some("") => Ok(Operation::Task),
            Some("tokenize") => Ok(Operation::Tokenize),
            Some("detokenize") => Ok(Operation::Detokenize),
            Some("load_adapter") => Ok(Operation::LoadAdapter),
            Some("unload_adapter") => Ok(Operation::UnloadAdapter),
            Some(other) => Err(Failure::invalid(format!(
                "the input 'operation' is '{}'; allowed are tokenize, detokenize, load_adapter and \
                 unload_adapter",
                other.escape_debug()
            ))),
        }
    }

    /// Copies what a request has, and takes it out of its batch. Everything that takes long for long
    /// texts is left to [`Draft::prepare`].
    pub(crate) fn to_draft(self, kind: Kind) -> Result<Draft, Failure> {
        let own = |text: Option<&str>| text.map(str::to_owned);
        let text_input = match kind {
            Kind::Generate { .. } => "text_input",
            Kind::Embed | Kind::Score => "text",
        };
        let operation = self.operation()?;
        let pair = match kind {
            Kind::Score if operation == Operation::Task => {
                Some(self.required_text("text_pair")?.to_owned())
            }
            _ => None,
        };
        let truncate = match self.batch.input("truncate_prompt_tokens") {
            None => None,
            Some(input) => Some(
                input
                    .integer(self.position)
                    .ok_or_else(|| wrong("truncate_prompt_tokens", "one integer"))?,
            ),
        };
        let is_streamed = self.flag("stream", false)?;
        let mut parameters = self.batch.parameters(self.position);
        Ok(Draft {
            adapter: RequestedAdapter::take(&mut parameters)?,
            kind,
            operation,
            text: self.required_text(text_input)?.to_owned(),
            pair,
            given_tokens: self.given_tokens()?,
            sampling: own(self.text("sampling_parameters")?),
            parameters,
            add_special_tokens: self.flag("add_special_tokens", true)?,
            truncate,
            normalize: self.flag("normalize", true)?,
            is_streamed,
            excludes_prompt: self.flag("exclude_input_in_output", is_streamed)?,
            returns: Returns {
                finish_reason: self.flag("return_finish_reason", true)?,
                counts: self.flag("return_num_output_tokens", true)?,
                logprobs: self.flag("return_logprobs", true)?,
                token_ids: self.flag("return_token_ids", false)?,
                prompt_token_ids: self.flag("return_prompt_token_ids", false)?,
            },
            responder: self.batch.detach(self.position)?,
        })
    }

    /// Returns the token ids of a request; `None` if it has none.
    fn given_tokens(self) -> Result<Option<Vec<u32>>, Failure> {
        let name = "prompt_token_ids";
        let Some(input) = self.batch.input(name) else { return Ok(None) };
        input.naturals().map(Some).ok_or_else(|| wrong(name, "token ids"))
    }
}

/// What the model of a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Generate {
        /// The most choices that the engine generates together.
        max_sequences: u32,
        is_decoupled: bool,
    },
    Embed,
    Score,
}

/// A request as it was received.
pub(crate) struct Draft {
    kind: Kind,
    pub(crate) operation: Operation,
    text: String,
    pair: Option<String>,
    given_tokens: Option<Vec<u32>>,
    /// JSON.
    sampling: Option<String>,
    parameters: Map<String, Value>,
    /// The adapter that was loaded by request.
    adapter: Option<RequestedAdapter>,
    add_special_tokens: bool,
    truncate: Option<i32>,
    normalize: bool,
    is_streamed: bool,
    excludes_prompt: bool,
    returns: Returns,
    responder: Responder,
}

/// A request for an engine, or what its client gets at once.
pub(crate) enum Prepared {
    Generate(Box<Request>),
    Pool(PoolingRequest),
    /// Tokens, and the text of each.
    Tokens(Responder, Vec<u32>, Vec<Vec<u8>>),
    Text(Responder, String),
    Load(Responder, RequestedAdapter),
    Unload(Responder, RequestedAdapter),
}

impl Draft {
    /// Whether the preparation may take longer than a few milliseconds.
    pub(crate) fn is_long(&self, model: &Model) -> bool {
        let json = self.sampling.as_deref().unwrap_or_default();
        let is_loaded = |adapter: &RequestedAdapter| model.known_adapters.has(adapter.load);
        self.text.len() > LONG
            || self.adapter.as_ref().is_some_and(|adapter| !is_loaded(adapter))
            || self.pair.as_ref().is_some_and(|pair| pair.len() > LONG)
            || json.len() > LONG
            || json.contains("structured_outputs")
            || json.contains("guided_decoding")
            || ["structured_outputs", "guided_decoding"]
                .iter()
                .any(|name| self.parameters.contains_key(*name))
    }

    /// Returns the request for the engine. A request that is wrong fails.
    pub(crate) fn prepare(mut self, model: &Model) -> Option<Prepared> {
        let prepared = match (self.operation, self.kind) {
            (Operation::Tokenize, _) => self.tokenize(model).map(Work::Tokens),
            (Operation::Detokenize, _) => self.detokenize(model).map(Work::Text),
            (Operation::Task, Kind::Generate { max_sequences, is_decoupled }) => {
                self.generate(model, max_sequences, is_decoupled).map(Box::new).map(Work::Generate)
            }
            (Operation::Task, Kind::Embed | Kind::Score) => self.pool(model).map(Work::Pool),
            (Operation::LoadAdapter, kind) => self.adapter(model, kind).map(Work::Load),
            (Operation::UnloadAdapter, kind) => self.adapter(model, kind).map(Work::Unload),
        };
        let work = match prepared {
            Ok(work) => work,
            Err(failure) => {
                self.responder.fail(&failure);
                return None;
            }
        };
        Some(match work {
            Work::Tokens((tokens, pieces)) => Prepared::Tokens(self.responder, tokens, pieces),
            Work::Text(text) => Prepared::Text(self.responder, text),
            Work::Load(adapter) => Prepared::Load(self.responder, adapter),
            Work::Unload(adapter) => Prepared::Unload(self.responder, adapter),
            Work::Pool(tokens) => Prepared::Pool(PoolingRequest {
                tokens,
                normalize: self.normalize,
                returns_tokens: self.returns.prompt_token_ids,
                responder: self.responder,
            }),
            Work::Generate(prompt) => {
                let Prompt { tokens, sampling, matcher, adapter } = *prompt;
                let returns = Returns {
                    logprobs: self.returns.logprobs && sampling.logprobs.is_some(),
                    token_ids: self.returns.token_ids && sampling.n == 1,
                    ..self.returns
                };
                let prefix = if self.excludes_prompt { String::new() } else { self.text };
                Prepared::Generate(Box::new(Request {
                    prefix,
                    prompt: tokens,
                    sampling,
                    matcher,
                    is_streamed: self.is_streamed,
                    returns,
                    adapter,
                    requested: self.adapter,
                    responder: self.responder,
                }))
            }
        })
    }

    /// Returns the tokens that the client gives in place of a text; `None` if it gives none.
    fn checked_tokens(&mut self, model: &Model) -> Result<Option<Vec<i32>>, Failure> {
        let Some(ids) = self.given_tokens.take() else { return Ok(None) };
        let count = model.inner.vocab().n_tokens();
        let tokens = ids.into_iter().map(|id| match i32::try_from(id) {
            Ok(token) if token < count => Ok(token),
            _ => Err(Failure::invalid(format!(
                "the token id {id} is not allowed: the vocabulary of the model has {count} tokens"
            ))),
        });
        tokens.collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// Returns the tokens of the text, unless the client gives some.
    fn tokens(&mut self, model: &Model) -> Result<Vec<i32>, Failure> {
        let given = self.checked_tokens(model)?.filter(|tokens| !tokens.is_empty());
        Ok(match (given, &self.pair) {
            (Some(tokens), _) => tokens,
            (None, Some(pair)) => model.tokenize_pair(&self.text, pair),
            (None, None) => model.tokenize(&self.text, self.add_special_tokens),
        })
    }

    fn tokenize(&mut self, model: &Model) -> Result<(Vec<u32>, Vec<Vec<u8>>), Failure> {
        let tokens = self.tokens(model)?;
        let pieces = tokens.iter().map(|token| model.piece(*token, true)).collect();
        Ok((tokens.iter().map(|token| token.cast_unsigned()).collect(), pieces))
    }

    fn detokenize(&mut self, model: &Model) -> Result<String, Failure> {
        let tokens = self.checked_tokens(model)?;
        let tokens = tokens.ok_or_else(|| wrong("prompt_token_ids", "token ids"))?;
        Ok(model.detokenize(&tokens))
    }

    fn generate(
        &mut self,
        model: &Model,
        max_sequences: u32,
        is_decoupled: bool,
    ) -> Result<Prompt, Failure> {
        let mut sampling = match &self.sampling {
            Some(json) => Sampling::read(members(json)?)?,
            None => Sampling::read(std::mem::take(&mut self.parameters))?,
        };
        if self.is_streamed && !self.excludes_prompt {
            return Err(Failure::invalid(
                "a stream has no prompt in its output: exclude_input_in_output must be true",
            ));
        }
        if self.is_streamed && !is_decoupled {
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
        let id = match (&sampling.adapter, &mut self.adapter) {
            (None, None) => None,
            (Some(name), None) => Some(AdapterId::Listed(adapter(model, name)?)),
            (None, Some(requested)) => {
                requested.find(&model.adapter_places, &model.known_adapters);
                sampling.adapter = Some(requested.name.clone());
                Some(AdapterId::Loaded(requested.load))
            }
            (Some(name), Some(requested)) => {
                return Err(Failure::invalid(format!(
                    "lora_name '{}' is not allowed beside the adapter '{}'",
                    name.escape_debug(),
                    requested.name
                )));
            }
        };
        let mut tokens = self.tokens(model)?;
        if let Some(wanted) = sampling.truncate_prompt {
            tokens.drain(..tokens.len().saturating_sub(wanted));
        }
        let limit = model.context_length as usize;
        match tokens.len() {
            0 => return Err(Failure::invalid("the prompt has no tokens")),
            length if length >= limit => {
                return Err(Failure::invalid(format!(
                    "this model's maximum context length is {limit} tokens, and the prompt has \
                     {length} tokens: a shorter prompt leaves room for the output"
                )));
            }
            _ => {}
        }
        let matcher = sampling.structure.as_ref();
        let matcher = matcher.map(|structure| model.matcher(structure)).transpose()?;
        Ok(Prompt { tokens, sampling, matcher, adapter: id })
    }

    /// Returns the adapter of an operation, with its file.
    fn adapter(&mut self, model: &Model, kind: Kind) -> Result<RequestedAdapter, Failure> {
        if !matches!(kind, Kind::Generate { .. }) {
            return Err(Failure::invalid("only models that generate text have adapters"));
        }
        let mut adapter = self.adapter.take().ok_or_else(|| {
            Failure::invalid(
                "adapters are loaded and unloaded by POST /v1/load_lora_adapter and \
                 /v1/unload_lora_adapter",
            )
        })?;
        if self.operation == Operation::LoadAdapter {
            adapter.find(&model.adapter_places, &model.known_adapters);
        }
        Ok(adapter)
    }

    /// Returns the tokens of a text, or of a pair of texts.
    fn pool(&mut self, model: &Model) -> Result<Vec<i32>, Failure> {
        let mut tokens = self.tokens(model)?;
        let limit = model.context_length as usize;
        self.truncate(model, &mut tokens, limit)?;
        match tokens.len() {
            0 => Err(Failure::invalid("the text has no tokens")),
            length if length > limit => Err(Failure::invalid(format!(
                "this model's maximum context length is {limit} tokens, and the text has {length} \
                 tokens: truncate_prompt_tokens -1 cuts the rest off"
            ))),
            _ => Ok(tokens),
        }
    }

    /// Cuts off what the client does not want, or, if it says -1, what does not fit. The token that
    /// ends a text stays.
    fn truncate(&self, model: &Model, tokens: &mut Vec<i32>, limit: usize) -> Result<(), Failure> {
        let Some(wanted) = self.truncate else { return Ok(()) };
        let wanted = match usize::try_from(wanted) {
            Err(_) if wanted == -1 => limit,
            Ok(wanted) if wanted >= 1 => wanted,
            _ => {
                return Err(Failure::invalid(format!(
                    "truncate_prompt_tokens {wanted} is not allowed: it must be -1, for the \
                     context of the model, or a number from 1"
                )));
            }
        };
        let Some(last) = tokens.last().copied().filter(|_| tokens.len() > wanted) else {
            return Ok(());
        };
        tokens.truncate(wanted);
        if model.inner.vocab().is_control(LlamaToken(last))
            && let Some(end) = tokens.last_mut()
        {
            *end = last;
        }
        Ok(())
    }
}

/// What a draft has become, without its responder.
enum Work {
    Generate(Box<Prompt>),
    Pool(Vec<i32>),
    Tokens((Vec<u32>, Vec<Vec<u8>>)),
    Text(String),
    Load(RequestedAdapter),
    Unload(RequestedAdapter),
}

/// The checked parts of a request to generate text.
struct Prompt {
    tokens: Vec<i32>,
    sampling: Sampling,
    matcher: Option<Matcher>,
    adapter: Option<AdapterId>,
}

/// Returns the position of an adapter in the list of `multi_lora.json`.
fn adapter(model: &Model, name: &str) -> Result<usize, Failure> {
    let names = &model.adapters;
    names.iter().position(|known| known == name).ok_or_else(|| {
        let known = match names.is_empty() {
            true => "the model has no adapters (multi_lora.json)".to_owned(),
            false => format!("available are {}", names.join(", ")),
        };
        Failure::invalid(format!("unknown adapter '{}': {known}", name.escape_debug()))
    })
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
