//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::HeaderMap;
use pharos::service::Protocol;
use pharos_edge::Call;
use pharos_edge::routing::Routed;
use pharos_os::clock;

use crate::answer::Failure;
use crate::chat::{ChatRequest, ToolChoice};
use crate::choice::{Delta as ChoiceDelta, Finish, Parsers, ToolMode};
use crate::contract::Prompt;
use crate::edge::{
    Edge, RequestId, event_stream, finish_failed, json, log_unknown, on_a_thread_if, random_id,
    refuse_unsupported,
};
use crate::error::ApiError;
use crate::events::{Chunks, Events};
use crate::generation::{Deltas, Generation};
use crate::message::{Content, Message};
use crate::models::TextModel;
use crate::response::logprobs::{ChatLogprobs, Position, TokenForm};
use crate::response::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatMessage, Delta, Extensions,
    FinishReason, Head, ToolCall, ToolCallDelta, Usage, to_json, write_event,
};
use crate::structured::{Structured, StructuredOutput};
use crate::template::CivilTime;
use crate::tools::{ToolDelta, ToolParser};

/// Prompts of more bytes than this are rendered on a blocking thread.
const LONG_MESSAGES: usize = 16 << 10;

/// Answers a request.
pub(crate) async fn answer(edge: Edge, mut call: Call, routed: Routed) -> Response {
    let (parts, body) = routed.request.into_parts();
    let id = RequestId::of(&parts.headers);
    call.read_headers(&parts.headers);
    let mut chat = match Chat::begin(&edge, &mut call, &id, &parts.headers, body).await {
        Ok(chat) => chat,
        Err(failure) => return finish_failed(call, &id, &failure),
    };
    if chat.request.options.stream.is_none() {
        return match chat.complete().await {
            Ok(body) => {
                call.has_responded();
                call.set_times(chat.generation.timeline());
                call.finish(json(&id, body), None)
            }
            Err(failure) => finish_failed(call, &id, &failure),
        };
    }
    let open = edge.service.stream_open(Protocol::Http);
    // The first response determines the status; later errors are events.
    let first = match chat.generation.next().await {
        Some(Err(error)) => return finish_failed(call, &id, &error.into()),
        first => first,
    };
    let mut response = event_stream(&id);
    let sending = call.begin_stream(&mut response);
    let Chat { generation, request, head, choices, .. } = chat;
    let chunks = ChatChunks::new(head, &request, choices);
    response.map(|_| Body::new(Events::new(generation, first, chunks, call, sending, open)))
}

/// A request whose inference runs.
struct Chat {
    request: ChatRequest,
    head: Head,
    choices: u32,
    generation: Generation,
}

impl Chat {
    async fn begin(
        edge: &Edge,
        call: &mut Call,
        id: &RequestId,
        headers: &HeaderMap,
        body: Body,
    ) -> Result<Self, Failure> {
        let mut request = edge.parse(headers, body, ChatRequest::parse).await?;
        refuse_unsupported(&request.options, &request.sampling)?;
        refuse_in_chat(&request)?;
        let (name, model) = edge.model_of(call, &request.options, headers).await?;
        log_unknown(&name, &request.unknown);
        let tools = tools_of(&mut request, &model, &name)?;
        let prompt;
        (request, prompt) = render(request, &model, &name).await?;
        let parsers = Parsers {
            stop: request.sampling.stop.clone(),
            include_stop: request.sampling.include_stop_str_in_output.unwrap_or(false),
            reasoning: model.reasoning_parser.clone().map(|parser| parser.after_prompt(&prompt)),
            tools,
            one_call: !request.parallel_tool_calls,
            logprobs: request.sampling.logprobs.is_some(),
            token_ids: request.options.return_token_ids,
        };
        let head = id.head("chatcmpl", &request.options, &name);
        let responses = edge.begin(
            call,
            &head,
            &model,
            &request.options,
            &Prompt {
                text: &prompt,
                sampling: &request.sampling,
                default_max_tokens: model.default_max_tokens,
                stream: request.options.stream.is_some(),
                token_ids: request.options.return_token_ids,
            },
        )?;
        let choices = request.sampling.choices_per_prompt();
        let mut generation = Generation::new();
        generation.add(responses, choices, &parsers, request.sampling.max_tokens);
        Ok(Self { request, head, choices, generation })
    }

    /// Collects all responses into one.
    async fn complete(&mut self) -> Result<Vec<u8>, Failure> {
        let mut choices: Vec<Collected> = Vec::new();
        choices.resize_with(self.choices as usize, Collected::default);
        while let Some(deltas) = self.generation.next().await {
            for (index, delta) in deltas? {
                if let Some(choice) = choices.get_mut(index as usize) {
                    choice.add(delta);
                }
            }
        }
        let wants_ids = self.request.options.return_token_ids;
        let logprobs = LogprobsForm::of(&self.request);
        let choices = (0..).zip(choices).map(|(index, collected)| {
            let Finish { reason, stop_reason } = collected
                .finish
                .unwrap_or(Finish { reason: FinishReason::Error, stop_reason: None });
            let has_calls = !collected.tool_calls.is_empty();
            ChatChoice {
                index,
                message: ChatMessage {
                    content: (!has_calls || !collected.content.is_empty())
                        .then_some(collected.content),
                    reasoning: (!collected.reasoning.is_empty() && self.request.include_reasoning)
                        .then_some(collected.reasoning),
                    tool_calls: collected.tool_calls,
                },
                logprobs: logprobs.map(|form| form.of_positions(&collected.logprobs)),
                finish_reason: reason,
                stop_reason,
                token_ids: wants_ids.then_some(collected.token_ids),
            }
        });
        let completion = ChatCompletion {
            head: self.head.clone(),
            choices: choices.collect(),
            usage: self.generation.usage(),
            extensions: Extensions::default(),
        };
        Ok(to_json(&completion))
    }
}

/// Refuses fields of a chat that no model here can honour.
fn refuse_in_chat(request: &ChatRequest) -> Result<(), ApiError> {
    if request.prompt.chat_template.is_some() {
        return Err(ApiError::invalid_field(
            "chat_template",
            "chat_template is not accepted from clients: the template of the model is used",
        ));
    }
    if request.echo {
        return Err(ApiError::invalid_field("echo", "echo is not supported in chats"));
    }
    Ok(())
}

/// Returns how the output becomes tool calls, and constrains the output of a request that forces a
/// call.
fn tools_of(
    request: &mut ChatRequest,
    model: &TextModel,
    name: &str,
) -> Result<ToolMode, ApiError> {
    let schema = request.forced_call_schema();
    if let Some(schema) = schema {
        let output = StructuredOutput::JsonSchema { schema, name: None, strict: Some(true) };
        request.sampling.structured = Some(Structured {
            output,
            whitespace_pattern: None,
            disable_any_whitespace: None,
            disable_additional_properties: None,
        });
    }
    match &request.tool_choice {
        ToolChoice::None => Ok(ToolMode::Text),
        ToolChoice::Function(function) => Ok(ToolMode::Call(function.clone())),
        ToolChoice::Required => {
            let parser = ToolParser::named("json").map(Box::new);
            Ok(parser.map_or(ToolMode::Text, ToolMode::Parse))
        }
        ToolChoice::Auto => {
            let parser = model.tool_parser.clone().ok_or_else(|| {
                ApiError::invalid_field(
                    "tool_choice",
                    format!(
                        "tool_choice \"auto\" needs a parser for the calls of the model '{name}': \
                         set the parameter 'tool_call_parser' of its configuration, or use \
                         \"required\" or a certain function"
                    ),
                )
            })?;
            if parser.needs_special_tokens() {
                request.sampling.skip_special_tokens.get_or_insert(false);
            }
            Ok(ToolMode::Parse(parser.into()))
        }
    }
}

/// Renders the prompt, on another thread if the messages are long. Returns the request too.
async fn render(
    request: ChatRequest,
    model: &Arc<TextModel>,
    name: &str,
) -> Result<(ChatRequest, String), Failure> {
    if model.template.is_none() {
        return Err(ApiError::invalid_field(
            "model",
            format!(
                "the model '{name}' has no chat template: add chat_template.jinja or \
                 tokenizer_config.json to its directory, or use /v1/completions"
            ),
        )
        .into());
    }
    let now = CivilTime::from_unix(i64::try_from(clock::wall_ms() / 1000).unwrap_or(i64::MAX));
    let size: usize = request.messages.iter().map(text_bytes).sum();
    let model = model.clone();
    let (request, rendered) = on_a_thread_if(size > LONG_MESSAGES, move || {
        let rendered = match &model.template {
            Some(template) => template.render(&request, now),
            None => Ok(String::new()),
        };
        (request, rendered)
    })
    .await?;
    Ok((request, rendered?))
}

/// Returns the bytes of the text of a message.
fn text_bytes(message: &Message) -> usize {
    match message.content() {
        Content::Absent => 0,
        Content::Text(text) => text.len(),
        Content::Parts(parts) => {
            let texts = parts.iter().filter_map(|part| part.get("text")?.as_str());
            texts.map(str::len).sum()
        }
    }
}

/// How log probabilities are written.
#[derive(Clone, Copy)]
struct LogprobsForm {
    top: u32,
    tokens: TokenForm,
}

impl LogprobsForm {
    /// Returns the form; `None` if the client wants none.
    fn of(request: &ChatRequest) -> Option<Self> {
        let top = request.sampling.logprobs?;
        let tokens = match request.options.return_tokens_as_token_ids {
            true => TokenForm::Id,
            false => TokenForm::Text,
        };
        Some(Self { top, tokens })
    }

    fn of_positions(self, positions: &[Position]) -> ChatLogprobs {
        let mut logprobs = ChatLogprobs::default();
        positions.iter().for_each(|position| logprobs.push(position, self.top, self.tokens));
        logprobs
    }
}

/// A choice of a whole response, so far.
#[derive(Default)]
struct Collected {
    content: String,
    reasoning: String,
    tool_calls: Vec<ToolCall>,
    logprobs: Vec<Position>,
    token_ids: Vec<u32>,
    finish: Option<Finish>,
}

impl Collected {
    fn add(&mut self, delta: ChoiceDelta) {
        self.content.push_str(&delta.content);
        self.reasoning.push_str(&delta.reasoning);
        self.logprobs.extend(delta.logprobs);
        self.token_ids.extend(delta.token_ids);
        self.finish = delta.finish.or(self.finish.take());
        for piece in delta.tools {
            match piece {
                ToolDelta::Begin { name, .. } => {
                    self.tool_calls.push(ToolCall {
                        id: call_id(),
                        name,
                        arguments: String::new(),
                    });
                }
                ToolDelta::Arguments { text, .. } => {
                    if let Some(tool_call) = self.tool_calls.last_mut() {
                        tool_call.arguments.push_str(&text);
                    }
                }
                ToolDelta::Text(_) | ToolDelta::End { .. } => {}
            }
        }
    }
}

/// Returns the id of a tool call, unique in every conversation.
fn call_id() -> String {
    format!("call_{}", random_id().get(..24).unwrap_or_default())
}

/// The chunks of a chat.
struct ChatChunks {
    head: Head,
    choices: u32,
    /// Whether the chunk with the role was written, which each choice begins with.
    has_begun: bool,
    include_usage: bool,
    continuous_usage: bool,
    include_reasoning: bool,
    token_ids: bool,
    logprobs: Option<LogprobsForm>,
}

impl ChatChunks {
    fn new(head: Head, request: &ChatRequest, choices: u32) -> Self {
        let stream = request.options.stream.unwrap_or_default();
        Self {
            head,
            choices,
            has_begun: false,
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            include_reasoning: request.include_reasoning,
            token_ids: request.options.return_token_ids,
            logprobs: LogprobsForm::of(request),
        }
    }

    fn write_chunk(
        &self,
        choices: &[ChatChunkChoice<'_>],
        usage: Option<Usage>,
        out: &mut Vec<u8>,
    ) {
        write_event(&ChatChunk { head: &self.head, choices, usage }, out);
    }
}

impl Chunks for ChatChunks {
    fn write(&mut self, deltas: Deltas, usage: Option<Usage>, out: &mut Vec<u8>) {
        let usage = usage.filter(|_| self.continuous_usage);
        if !deltas.is_empty() && !std::mem::replace(&mut self.has_begun, true) {
            for index in 0..self.choices {
                let choice = ChatChunkChoice {
                    index,
                    delta: Delta::first(),
                    logprobs: None,
                    finish_reason: None,
                    stop_reason: None,
                    token_ids: None,
                };
                self.write_chunk(&[choice], usage, out);
            }
        }
        for (index, delta) in deltas {
            // An id is made once for each call: its beginning is in one delta.
            let ids: Vec<String> = delta.tools.iter().map(|_| call_id()).collect();
            let pieces = delta.tools.iter().zip(&ids).filter_map(|(piece, id)| match piece {
                ToolDelta::Begin { index, name } => {
                    Some(ToolCallDelta::Begin { index: *index, id, name })
                }
                ToolDelta::Arguments { index, text } => {
                    Some(ToolCallDelta::Arguments { index: *index, text })
                }
                ToolDelta::Text(_) | ToolDelta::End { .. } => None,
            });
            let tool_calls: Vec<ToolCallDelta<'_>> = pieces.collect();
            let logprobs = self.logprobs.map(|form| form.of_positions(&delta.logprobs));
            let reasoning = Some(delta.reasoning.as_str())
                .filter(|text| !text.is_empty() && self.include_reasoning);
            // Clients join the contents of all chunks, so that it is only absent beside others.
            let content = (!delta.content.is_empty()
                || (tool_calls.is_empty() && reasoning.is_none()))
            .then_some(delta.content.as_str());
            let choice = ChatChunkChoice {
                index,
                delta: Delta { role: false, content, reasoning, tool_calls: &tool_calls },
                logprobs: logprobs.as_ref().filter(|logprobs| !logprobs.content.is_empty()),
                finish_reason: delta.finish.as_ref().map(|finish| finish.reason),
                stop_reason: delta.finish.as_ref().and_then(|finish| finish.stop_reason.as_ref()),
                token_ids: self.token_ids.then_some(delta.token_ids.as_slice()),
            };
            self.write_chunk(&[choice], usage, out);
        }
    }

    fn write_end(&mut self, usage: Option<Usage>, out: &mut Vec<u8>) {
        if self.include_usage {
            self.write_chunk(&[], usage, out);
        }
    }
}
