//! `POST /v1/chat/completions`.

use axum::response::Response;

use crate::answer::Failure;
use crate::chat::ChatRequest;
use crate::chat_inference::{self, Begun, call_id};
use crate::choice::Finish;
use crate::edge::Received;
use crate::events::Chunks;
use crate::generation::Deltas;
use crate::respond::{Form, Running, Whole, respond};
use crate::response::logprobs::{LogprobsForm, prompt_logprobs};
use crate::response::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatMessage, Delta, Extensions, Head,
    ToolCall, ToolCallDelta, Usage, to_json, write_event,
};
use crate::tools::ToolDelta;

/// Answers a request.
pub(crate) async fn answer(mut received: Received) -> Response {
    let begun = begin(&mut received).await;
    respond(received, begun).await
}

async fn begin(received: &mut Received) -> Result<Running<ChatForm>, Failure> {
    let mut request = received.parse(ChatRequest::parse).await?;
    request.options.set_path(received.segments.take());
    let begun = chat_inference::begin(received, request, |id, model, options| {
        id.head("chatcmpl", options, model)
    });
    let Begun { request, head, generation } = begun.await?;
    let is_streamed = request.options.stream.is_some();
    Ok(Running { generation, form: ChatForm::new(head, &request), is_streamed })
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
            let content = choice.content + &choice.content_after_calls;
            ChatChoice {
                index,
                message: ChatMessage {
                    content: (tool_calls.is_empty() || !content.is_empty()).then_some(content),
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
            let content = delta.content + &delta.content_after_calls;
            let content = Some(content.as_str()).filter(|content| {
                !content.is_empty() || (tool_calls.is_empty() && reasoning.is_none())
            });
            let chunk = ChatChunkChoice {
                index,
                delta: Delta { role: false, content, reasoning, tool_calls: &tool_calls },
                logprobs: logprobs.as_ref().filter(|logprobs| !logprobs.content.is_empty()),
                finish_reason: None,
                stop_reason: None,
                token_ids: self.token_ids.then_some(delta.token_ids.as_slice()),
            };
            let Some(finish) = &delta.finish else {
                self.write_chunk(&[chunk], usage, out);
                continue;
            };
            let end = ChatChunkChoice {
                finish_reason: Some(finish.reason),
                stop_reason: finish.stop_reason.as_ref(),
                ..chunk.clone()
            };
            if tool_calls.is_empty() {
                self.write_chunk(&[end], usage, out);
            } else {
                // OpenAI's client takes a call as whole only with a later chunk.
                self.write_chunk(&[chunk], usage, out);
                let delta = Delta::default();
                let token_ids = None;
                let end = ChatChunkChoice { delta, logprobs: None, token_ids, ..end };
                self.write_chunk(&[end], usage, out);
            }
        }
    }

    fn write_end(&mut self, usage: Option<Usage>, out: &mut Vec<u8>) {
        if self.include_usage {
            self.write_chunk(&[], usage, out);
        }
    }
}
