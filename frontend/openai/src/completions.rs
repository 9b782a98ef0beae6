//! `POST /v1/completions`.

use axum::body::Body;
use axum::response::Response;
use http::HeaderMap;
use pharos::service::Protocol;
use pharos_edge::Call;
use pharos_edge::routing::Routed;

use crate::answer::Failure;
use crate::choice::{Finish, Parsers};
use crate::completion::{CompletionRequest, DEFAULT_MAX_TOKENS, Prompt as ClientPrompt};
use crate::contract::Prompt;
use crate::edge::{
    Edge, RequestId, event_stream, finish_failed, json, log_unknown, refuse_unsupported,
};
use crate::error::ApiError;
use crate::events::{Chunks, Events};
use crate::generation::{Deltas, Generation};
use crate::response::logprobs::{CompletionLogprobs, Position, TokenForm};
use crate::response::{
    Completion, CompletionChoice, CompletionChunk, CompletionChunkChoice, Extensions, FinishReason,
    Head, Usage, to_json, write_event,
};

/// The most choices of a request over all of its prompts. Each prompt is an inference.
const MAX_CHOICES: usize = 128;

/// Answers a request.
pub(crate) async fn answer(edge: Edge, mut call: Call, routed: Routed) -> Response {
    let (parts, body) = routed.request.into_parts();
    let id = RequestId::of(&parts.headers);
    call.read_headers(&parts.headers);
    let mut run = match Run::begin(&edge, &mut call, &id, &parts.headers, body).await {
        Ok(run) => run,
        Err(failure) => return finish_failed(call, &id, &failure),
    };
    if run.request.options.stream.is_none() {
        return match run.complete().await {
            Ok(body) => {
                call.has_responded();
                call.set_times(run.generation.timeline());
                call.finish(json(&id, body), None)
            }
            Err(failure) => finish_failed(call, &id, &failure),
        };
    }
    let open = edge.service.stream_open(Protocol::Http);
    // The first response determines the status; later errors are events.
    let first = match run.generation.next().await {
        Some(Err(error)) => return finish_failed(call, &id, &error.into()),
        first => first,
    };
    let mut response = event_stream(&id);
    let sending = call.begin_stream(&mut response);
    let Run { generation, request, head } = run;
    let chunks = CompletionChunks::new(head, &request);
    response.map(|_| Body::new(Events::new(generation, first, chunks, call, sending, open)))
}

/// A request whose inferences run.
struct Run {
    request: CompletionRequest,
    head: Head,
    generation: Generation,
}

impl Run {
    async fn begin(
        edge: &Edge,
        call: &mut Call,
        id: &RequestId,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Self, Failure> {
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
        let parsers = Parsers {
            stop: request.sampling.stop.clone(),
            include_stop: request.sampling.include_stop_str_in_output.unwrap_or(false),
            logprobs: request.sampling.logprobs.is_some(),
            token_ids: request.options.return_token_ids,
            ..Parsers::default()
        };
        let head = id.head("cmpl", &request.options, &name);
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
                    stream: request.options.stream.is_some(),
                    token_ids: request.options.return_token_ids,
                },
            )?;
            let limit = request.sampling.max_tokens.or(Some(DEFAULT_MAX_TOKENS));
            let choices = request.sampling.choices_per_prompt();
            generation.add(responses, choices, &parsers, limit);
        }
        Ok(Self { request, head, generation })
    }

    /// Collects all responses into one.
    async fn complete(&mut self) -> Result<Vec<u8>, Failure> {
        let mut choices: Vec<Collected> = Vec::new();
        choices.resize_with(self.request.choices(), Collected::default);
        for (index, choice) in choices.iter_mut().enumerate() {
            choice.text.push_str(echoed(&self.request, index));
        }
        while let Some(deltas) = self.generation.next().await {
            for (index, delta) in deltas? {
                let Some(choice) = choices.get_mut(index as usize) else { continue };
                choice.text.push_str(&delta.content);
                choice.logprobs.extend(delta.logprobs);
                choice.token_ids.extend(delta.token_ids);
                choice.finish = delta.finish.or(choice.finish.take());
            }
        }
        let logprobs = LogprobsForm::of(&self.request);
        let wants_ids = self.request.options.return_token_ids;
        let choices = (0..).zip(choices).map(|(index, collected)| {
            let Finish { reason, stop_reason } = collected
                .finish
                .unwrap_or(Finish { reason: FinishReason::Error, stop_reason: None });
            CompletionChoice {
                index,
                text: collected.text,
                logprobs: logprobs.map(|form| form.of_positions(&collected.logprobs, 0)),
                finish_reason: reason,
                stop_reason,
                token_ids: wants_ids.then_some(collected.token_ids),
                prompt_logprobs: None,
                prompt_token_ids: None,
            }
        });
        let completion = Completion {
            head: self.head.clone(),
            choices: choices.collect(),
            usage: self.generation.usage(),
            extensions: Extensions::default(),
        };
        Ok(to_json(&completion))
    }
}

/// Returns the prompt of a choice if the client wants it in the text.
fn echoed(request: &CompletionRequest, choice: usize) -> &str {
    let of_prompt = request.sampling.choices_per_prompt().max(1) as usize;
    match request.prompts.get(choice / of_prompt) {
        Some(ClientPrompt::Text(text)) if request.echo => text,
        _ => "",
    }
}

/// A choice of a whole response, so far.
#[derive(Default)]
struct Collected {
    text: String,
    logprobs: Vec<Position>,
    token_ids: Vec<u32>,
    finish: Option<Finish>,
}

/// How log probabilities are written.
#[derive(Clone, Copy)]
struct LogprobsForm {
    top: u32,
    tokens: TokenForm,
}

impl LogprobsForm {
    /// Returns the form; `None` if the client wants none.
    fn of(request: &CompletionRequest) -> Option<Self> {
        let top = request.sampling.logprobs?;
        let tokens = match request.options.return_tokens_as_token_ids {
            true => TokenForm::Id,
            false => TokenForm::Text,
        };
        Some(Self { top, tokens })
    }

    /// `offset` is where the text of the first token begins, in characters.
    fn of_positions(self, positions: &[Position], offset: u64) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::beginning_at(offset);
        positions.iter().for_each(|position| logprobs.push(position, self.top, self.tokens));
        logprobs
    }
}

/// The chunks of a completion.
struct CompletionChunks {
    head: Head,
    include_usage: bool,
    continuous_usage: bool,
    token_ids: bool,
    logprobs: Option<LogprobsForm>,
    /// Of each choice.
    choices: Vec<ChunkedChoice>,
}

struct ChunkedChoice {
    /// The prompt, before its first text.
    echo: String,
    /// Where the next token begins, in characters.
    offset: u64,
}

impl CompletionChunks {
    fn new(head: Head, request: &CompletionRequest) -> Self {
        let stream = request.options.stream.unwrap_or_default();
        let choices = (0..request.choices())
            .map(|index| ChunkedChoice { echo: echoed(request, index).to_owned(), offset: 0 });
        Self {
            head,
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            token_ids: request.options.return_token_ids,
            logprobs: LogprobsForm::of(request),
            choices: choices.collect(),
        }
    }
}

impl Chunks for CompletionChunks {
    fn write(&mut self, deltas: Deltas, usage: Option<Usage>, out: &mut Vec<u8>) {
        let usage = usage.filter(|_| self.continuous_usage);
        for (index, delta) in deltas {
            let Some(own) = self.choices.get_mut(index as usize) else { continue };
            let mut text = std::mem::take(&mut own.echo);
            text.push_str(&delta.content);
            let logprobs = self.logprobs.map(|form| form.of_positions(&delta.logprobs, own.offset));
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
