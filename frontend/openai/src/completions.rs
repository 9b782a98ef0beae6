//! `POST /v1/completions`.

use axum::body::Body;
use axum::response::Response;
use http::HeaderMap;
use pharos_edge::Call;
use pharos_edge::routing::Routed;

use crate::answer::Failure;
use crate::choice::{Delta, Finish, Parsers};
use crate::completion::{CompletionRequest, DEFAULT_MAX_TOKENS, Prompt as ClientPrompt};
use crate::contract::Prompt;
use crate::edge::{Edge, RequestId, log_unknown, refuse_unsupported};
use crate::error::ApiError;
use crate::events::Chunks;
use crate::generation::{Deltas, Generation};
use crate::respond::{Form, Running, respond};
use crate::response::logprobs::LogprobsForm;
use crate::response::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, Extensions, Head, Usage,
    to_json, write_event,
};

/// The most choices of a request over all of its prompts. Each prompt is an inference.
const MAX_CHOICES: usize = 128;

/// Answers a request.
pub(crate) async fn answer(edge: Edge, mut call: Call, routed: Routed) -> Response {
    let (parts, body) = routed.request.into_parts();
    let id = RequestId::of(&parts.headers);
    call.read_headers(&parts.headers);
    let begun = begin(&edge, &mut call, &id, &parts.headers, body).await;
    respond(&edge, call, &id, begun).await
}

async fn begin(
    edge: &Edge,
    call: &mut Call,
    id: &RequestId,
    headers: &HeaderMap,
    body: Body,
) -> Result<Running<CompletionForm>, Failure> {
    let request = edge.parse(headers, body, CompletionRequest::parse).await?;
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
    if request.sampling.max_tokens == Some(0) {
        let text = "max_tokens 0 with echo, which scores a prompt, is not supported";
        return Err(ApiError::invalid_field("max_tokens", text).into());
    }
    let (name, model) = edge.model_of(call, &request.options, headers).await?;
    log_unknown(&name, &request.unknown);
    let parsers = Parsers::of(&request.sampling, &request.options);
    let head = id.head("cmpl", &request.options, &name);
    let choices = request.sampling.choices_per_prompt();
    let is_streamed = request.options.stream.is_some();
    let mut generation = Generation::new();
    for prompt in &request.prompts {
        let ClientPrompt::Text(text) = prompt else {
            return Err(ApiError::invalid_field(
                "prompt",
                format!("the model '{name}' takes prompts as text, not as token ids"),
            )
            .into());
        };
        let responses = edge.begin(
            call,
            &head,
            &model,
            &request.options,
            &Prompt {
                text,
                sampling: &request.sampling,
                default_max_tokens: Some(DEFAULT_MAX_TOKENS),
                stream: is_streamed,
                token_ids: request.options.return_token_ids,
            },
        )?;
        let limit = request.sampling.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        generation.add(responses, choices, &parsers, Some(limit));
    }
    Ok(Running { generation, form: CompletionForm::new(head, &request), is_streamed })
}

/// Returns the prompt of a choice if the client wants it in the text.
fn echoed(request: &CompletionRequest, choice: usize) -> &str {
    let of_prompt = request.sampling.choices_per_prompt().max(1) as usize;
    match request.prompts.get(choice / of_prompt) {
        Some(ClientPrompt::Text(text)) if request.echo => text,
        _ => "",
    }
}

/// The form of the response to a completion.
struct CompletionForm {
    head: Head,
    include_usage: bool,
    continuous_usage: bool,
    token_ids: bool,
    logprobs: Option<LogprobsForm>,
    /// Of each choice.
    choices: Vec<CompletionState>,
}

/// The progress of a choice.
struct CompletionState {
    /// The prompt, until it is written before the first text.
    echo: String,
    /// Where the next token begins, in characters.
    offset: u64,
}

impl CompletionForm {
    fn new(head: Head, request: &CompletionRequest) -> Self {
        let stream = request.options.stream.unwrap_or_default();
        let choices = (0..request.choices())
            .map(|index| CompletionState { echo: echoed(request, index).to_owned(), offset: 0 });
        Self {
            head,
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            token_ids: request.options.return_token_ids,
            logprobs: LogprobsForm::of(&request.sampling, &request.options),
            choices: choices.collect(),
        }
    }
}

impl Form for CompletionForm {
    fn whole(&self, choices: Vec<Delta>, usage: Option<Usage>) -> Vec<u8> {
        let choices = (0..).zip(choices).zip(&self.choices).map(|((index, choice), own)| {
            let Finish { reason, stop_reason } = choice.finish.unwrap_or_default();
            CompletionChoice {
                index,
                text: format!("{}{}", own.echo, choice.content),
                logprobs: self.logprobs.map(|form| form.completion(&choice.logprobs, 0)),
                finish_reason: reason,
                stop_reason,
                token_ids: self.token_ids.then_some(choice.token_ids),
                prompt_logprobs: None,
                prompt_token_ids: None,
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
            let mut text = std::mem::take(&mut own.echo);
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
