//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::response::Response;
use http::HeaderMap;
use pharos_edge::Call;
use pharos_edge::routing::Routed;
use pharos_os::clock;

use crate::answer::Failure;
use crate::chat::{ChatRequest, ToolChoice};
use crate::choice::{Finish, Parsers, ToolMode};
use crate::contract::Prompt;
use crate::edge::{Edge, RequestId, log_unknown, on_a_thread_if, random_id, refuse_unsupported};
use crate::error::ApiError;
use crate::events::Chunks;
use crate::generation::{Deltas, Generation};
use crate::message::{Content, Message};
use crate::models::TextModel;
use crate::respond::{Form, Running, Whole, respond};
use crate::response::logprobs::{LogprobsForm, prompt_logprobs};
use crate::response::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatMessage, Delta, Extensions, Head,
    ToolCall, ToolCallDelta, Usage, to_json, write_event,
};
use crate::structured::{Structured, StructuredOutput};
use crate::template::CivilTime;
use crate::tools::{ToolDelta, ToolParser};

/// Messages of more bytes than this are prepared for their template on a blocking thread.
const LONG_MESSAGES: usize = 16 << 10;

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
) -> Result<Running<ChatForm>, Failure> {
    let mut request = edge.parse(headers, body, ChatRequest::parse).await?;
    refuse_unsupported(&request.options, &request.sampling)?;
    refuse_in_chat(&request)?;
    let (name, model) = edge.model_of(call, &request.options, headers).await?;
    log_unknown(&name, &request.unknown);
    let tools = tools_of(&mut request, &model, &name)?;
    let prompt;
    (request, prompt) = render(request, &model, &name).await?;
    let parsers = Parsers {
        reasoning: model.reasoning_parser.clone().map(|parser| parser.after_prompt(&prompt)),
        tools,
        one_call: !request.parallel_tool_calls,
        ..Parsers::of(&request.sampling, &request.options)
    };
    let head = id.head("chatcmpl", &request.options, &name);
    let responses = edge.begin(
        call,
        &head,
        &model,
        &request.options,
        &Prompt {
            text: &prompt,
            tokens: None,
            // The template writes them.
            add_special_tokens: Some(request.prompt.add_special_tokens).filter(|flag| *flag),
            sampling: &request.sampling,
            default_max_tokens: model.default_max_tokens,
            stream: request.options.stream.is_some(),
            token_ids: request.options.return_token_ids,
        },
    )?;
    let choices = request.sampling.choices_per_prompt();
    let mut generation = Generation::new();
    generation.add(responses, choices, &parsers, request.sampling.max_tokens);
    let is_streamed = request.options.stream.is_some();
    Ok(Running { generation, form: ChatForm::new(head, &request), is_streamed })
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

/// Renders the prompt in the process of the template. Returns the request too.
pub(crate) async fn render(
    request: ChatRequest,
    model: &Arc<TextModel>,
    name: &str,
) -> Result<(ChatRequest, String), Failure> {
    let Some(template) = model.template.clone() else {
        return Err(ApiError::invalid_field(
            "model",
            format!(
                "the model '{name}' has no chat template: add chat_template.jinja or \
                 tokenizer_config.json to its directory, or use /v1/completions"
            ),
        )
        .into());
    };
    let now = CivilTime::from_unix(i64::try_from(clock::wall_ms() / 1000).unwrap_or(i64::MAX));
    let size: usize = request.messages.iter().map(text_bytes).sum();
    let (request, template, input) = on_a_thread_if(size > LONG_MESSAGES, move || {
        let input = template.input(&request, now);
        (request, template, input)
    })
    .await?;
    let text = template.render(input?).await?;
    let is_cut_from_long = request.prompt.continue_final_message && text.len() > LONG_MESSAGES;
    let (request, prompt) = on_a_thread_if(is_cut_from_long, move || {
        let prompt = template.prompt(&request, text);
        (request, prompt)
    })
    .await?;
    Ok((request, prompt?))
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

/// Returns the id of a tool call, unique in every conversation.
fn call_id() -> String {
    format!("call_{}", random_id().get(..24).unwrap_or_default())
}

/// Returns the tool calls of a choice.
fn tool_calls(pieces: Vec<ToolDelta>) -> Vec<ToolCall> {
    let mut calls: Vec<ToolCall> = Vec::new();
    for piece in pieces {
        match piece {
            ToolDelta::Begin { name, .. } => {
                calls.push(ToolCall { id: call_id(), name, arguments: String::new() });
            }
            ToolDelta::Arguments { text, .. } => {
                if let Some(call) = calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
            ToolDelta::Text(_) | ToolDelta::End { .. } => {}
        }
    }
    calls
}

/// The form of the response to a chat.
struct ChatForm {
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

impl ChatForm {
    fn new(head: Head, request: &ChatRequest) -> Self {
        let stream = request.options.stream.unwrap_or_default();
        Self {
            head,
            choices: request.sampling.choices_per_prompt(),
            has_begun: false,
            include_usage: stream.include_usage,
            continuous_usage: stream.continuous_usage_stats,
            include_reasoning: request.include_reasoning,
            token_ids: request.options.return_token_ids,
            logprobs: LogprobsForm::of(&request.sampling, &request.options),
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

impl Form for ChatForm {
    fn whole(&self, whole: Whole) -> Vec<u8> {
        let Whole { choices, usage, prompts } = whole;
        let prompt = prompts.into_iter().next().unwrap_or_default();
        let choices = (0..).zip(choices).map(|(index, choice)| {
            let Finish { reason, stop_reason } = choice.finish.unwrap_or_default();
            let tool_calls = tool_calls(choice.tools);
            ChatChoice {
                index,
                message: ChatMessage {
                    content: (tool_calls.is_empty() || !choice.content.is_empty())
                        .then_some(choice.content),
                    reasoning: Some(choice.reasoning)
                        .filter(|text| !text.is_empty() && self.include_reasoning),
                    tool_calls,
                },
                logprobs: self.logprobs.map(|form| form.chat(&choice.logprobs)),
                finish_reason: reason,
                stop_reason,
                token_ids: self.token_ids.then_some(choice.token_ids),
            }
        });
        to_json(&ChatCompletion {
            head: self.head.clone(),
            choices: choices.collect(),
            usage,
            extensions: Extensions {
                prompt_logprobs: prompt.logprobs.as_deref().and_then(prompt_logprobs),
                prompt_token_ids: prompt.token_ids,
                ..Extensions::default()
            },
        })
    }
}

impl Chunks for ChatForm {
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
            let begun = delta.tools.iter().filter(|p| matches!(p, ToolDelta::Begin { .. }));
            let ids: Vec<String> = begun.map(|_| call_id()).collect();
            let mut ids = ids.iter();
            let pieces = delta.tools.iter().filter_map(|piece| match piece {
                ToolDelta::Begin { index, name } => {
                    Some(ToolCallDelta::Begin { index: *index, id: ids.next()?, name })
                }
                ToolDelta::Arguments { index, text } => {
                    Some(ToolCallDelta::Arguments { index: *index, text })
                }
                ToolDelta::Text(_) | ToolDelta::End { .. } => None,
            });
            let tool_calls: Vec<ToolCallDelta<'_>> = pieces.collect();
            let logprobs = self.logprobs.map(|form| form.chat(&delta.logprobs));
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
