//! `POST /v1/completions`.

use axum::response::Response;

use crate::answer::Failure;
use crate::choice::{Finish, Parsers};
use crate::completion::{CompletionRequest, DEFAULT_MAX_TOKENS};
use crate::contract::Prompt;
use crate::edge::{Received, log_unknown, refuse_unsupported};
use crate::error::ApiError;
use crate::events::Chunks;
use crate::generation::{Deltas, Generation};
use crate::respond::{Form, Running, Whole, respond};
use crate::response::logprobs::{
    CompletionLogprobs, LogprobsForm, Position, parse_vllm, prompt_logprobs,
};
use crate::response::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, Extensions, Head, Usage,
    to_json, write_event,
};
use crate::tokenizer::Tokenizer;

/// The most choices of a request over all of its prompts. Each prompt is an inference.
const MAX_CHOICES: usize = 128;

/// Answers a request.
pub(crate) async fn answer(mut received: Received) -> Response {
    let begun = begin(&mut received).await;
    respond(received, begun).await
}

async fn begin(received: &mut Received) -> Result<Running<CompletionForm>, Failure> {
    let mut request = received.parse(CompletionRequest::parse).await?;
    request.options.set_path(received.segments.take());
    refuse_unsupported(&request.options, &request.sampling)?;
    if request.choices() > MAX_CHOICES {
        return Err(ApiError::invalid_field(
            "prompt",
            format!(
                "the request asks for {} choices: allowed are {MAX_CHOICES}, as the number of \
                 prompts times n",
                request.choices()
            ),
        )
        .into());
    }
    let is_streamed = request.options.stream.is_some();
    // The log probabilities of an echoed prompt come from the engine too.
    let scores_prompts = request.echo
        && (request.sampling.logprobs.is_some() || request.sampling.max_tokens == Some(0));
    if scores_prompts && is_streamed {
        let text = "echo with logprobs, or with max_tokens 0, is not available with stream true";
        return Err(ApiError::invalid_field("echo", text).into());
    }
    if scores_prompts {
        let count = request.sampling.logprobs.unwrap_or(0);
        request.sampling.prompt_logprobs.get_or_insert(count);
    }
    let (name, model) = received.model_of(&request.options).await?;
    log_unknown(&name, &request.unknown);
    let parsers = Parsers::of(&request.sampling, &request.options);
    let head = received.id.head("cmpl", &request.options, &name);
    let choices = request.sampling.choices_per_prompt();
    let echoes = match request.echo {
        true => echoes(received, &request, &name, scores_prompts).await?,
        false => Vec::new(),
    };
    let mut generation = Generation::new("prompt");
    for prompt in &request.prompts {
        let responses = received.begin(
            &head,
            &model,
            &request.options,
            &Prompt {
                text: prompt.text(),
                tokens: prompt.tokens(),
                media: &[],
                // Models add them by default.
                add_special_tokens: Some(false).filter(|_| !request.add_special_tokens),
                sampling: &request.sampling,
                default_max_tokens: Some(DEFAULT_MAX_TOKENS),
                stream: is_streamed,
                token_ids: request.options.return_token_ids,
            },
        )?;
        let limit = request.sampling.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        generation.add(responses, choices, &parsers, Some(limit));
    }
    Ok(Running { generation, form: CompletionForm::new(head, &request, echoes), is_streamed })
}

/// A prompt that is part of the text of its choices.
#[derive(Clone, Default)]
struct Echo {
    text: String,
    /// The text of its first token, if its log probabilities are wanted.
    first_token: String,
}

/// Returns the prompts as texts. Only the engine knows the texts of tokens.
async fn echoes(
    received: &mut Received,
    request: &CompletionRequest,
    name: &str,
    with_tokens: bool,
) -> Result<Vec<Echo>, Failure> {
    let Received { edge, call, .. } = received;
    let mut found = Vec::with_capacity(request.prompts.len());
    for prompt in &request.prompts {
        let mut echo = Echo { text: prompt.text().to_owned(), first_token: String::new() };
        if with_tokens || prompt.tokens().is_some() {
            let tokenizer = Tokenizer::of(&*edge.service.model_config(name, "")?)?;
            let add_special_tokens = request.add_special_tokens;
            if let Some(tokens) = prompt.tokens() {
                echo.text = tokenizer.detokenize(edge, call, tokens, true).await?;
            }
            if with_tokens {
                let tokens = tokenizer.tokenize(edge, call, prompt, add_special_tokens).await?;
                echo.first_token = tokens.texts.into_iter().next().unwrap_or_default();
            }
        }
        found.push(echo);
    }
    Ok(found)
}

/// The form of the response to a completion.
struct CompletionForm {
    head: Head,
    include_usage: bool,
    continuous_usage: bool,
    token_ids: bool,
    logprobs: Option<LogprobsForm>,
    choices_per_prompt: usize,
    /// Of each choice.
    choices: Vec<CompletionState>,
}

/// The progress of a choice.
struct CompletionState {
    /// The prompt, until it is written before the first text.
    echo: Echo,
    /// Where the next token begins, in characters.
    offset: u64,
}

impl CompletionForm {
    /// `echoes` has one element for each prompt that is part of the text, else it is empty.
    fn new(head: Head, request: &CompletionRequest, echoes: Vec<Echo>) -> Self {
        let stream = request.options.stream.unwrap_or_default();
        let of_prompt = request.sampling.choices_per_prompt().max(1) as usize;
        let choices = (0..request.choices()).map(|index| {
            let echo = echoes.get(index / of_prompt).cloned().unwrap_or_default();
            CompletionState { echo, offset: 0 }
        });
        Self {
            head,
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            token_ids: request.options.return_token_ids,
            logprobs: LogprobsForm::of(&request.sampling, &request.options),
            choices_per_prompt: of_prompt,
            choices: choices.collect(),
        }
    }

    /// Returns the log probabilities of a choice. Where the text of the choice begins with the
    /// prompt, the log probabilities of the prompt come first.
    fn logprobs(
        &self,
        own: &CompletionState,
        prompt: Option<&str>,
        positions: &[Position],
    ) -> Option<CompletionLogprobs> {
        let form = self.logprobs?;
        let Some(prompt) = prompt.filter(|_| !own.echo.text.is_empty()) else {
            return Some(form.completion(positions, 0));
        };
        let mut logprobs = CompletionLogprobs::beginning_at(0);
        logprobs.push_first_of_prompt(&own.echo.first_token);
        let of_prompt = parse_vllm(prompt).unwrap_or_default();
        for position in of_prompt.iter().chain(positions) {
            logprobs.push(position, form.top, form.tokens);
        }
        Some(logprobs)
    }
}

impl Form for CompletionForm {
    fn whole(&self, whole: Whole) -> Vec<u8> {
        let Whole { choices, usage, prompts } = whole;
        let choices = (0..).zip(choices).zip(&self.choices).map(|((index, choice), own)| {
            let prompt = prompts.get(index as usize / self.choices_per_prompt);
            let of_prompt = prompt.and_then(|prompt| prompt.logprobs.as_deref());
            let Finish { reason, stop_reason } = choice.finish.unwrap_or_default();
            CompletionChoice {
                index,
                text: format!("{}{}", own.echo.text, choice.content),
                logprobs: self.logprobs(own, of_prompt, &choice.logprobs),
                finish_reason: reason,
                stop_reason,
                token_ids: self.token_ids.then_some(choice.token_ids),
                prompt_logprobs: of_prompt.and_then(prompt_logprobs),
                prompt_token_ids: prompt
                    .and_then(|prompt| prompt.token_ids.clone())
                    .filter(|_| self.token_ids),
            }
        });
        to_json(&Completion {
            head: self.head.clone(),
            choices: choices.collect(),
            usage,
            extensions: Extensions::default(),
        })
    }
}

impl Chunks for CompletionForm {
    fn write(&mut self, deltas: Deltas, usage: Option<Usage>, out: &mut Vec<u8>) {
        let usage = usage.filter(|_| self.continuous_usage);
        for (index, delta) in deltas {
            let Some(own) = self.choices.get_mut(index as usize) else { continue };
            let mut text = std::mem::take(&mut own.echo.text);
            text.push_str(&delta.content);
            let logprobs = self.logprobs.map(|form| form.completion(&delta.logprobs, own.offset));
            if let Some(logprobs) = &logprobs {
                own.offset = logprobs.next_offset();
            }
            let choice = CompletionChunkChoice {
                index,
                text: &text,
                logprobs: logprobs.as_ref().filter(|logprobs| !logprobs.tokens.is_empty()),
                finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
                stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
                token_ids: self.token_ids.then_some(delta.token_ids.as_slice()),
            };
            write_event(&CompletionChunk { head: &self.head, choices: &[choice], usage }, out);
        }
    }

    fn write_end(&mut self, usage: Option<Usage>, out: &mut Vec<u8>) {
        if self.include_usage {
            write_event(&CompletionChunk { head: &self.head, choices: &[], usage }, out);
        }
    }
}
