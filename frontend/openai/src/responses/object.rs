//! The response of `POST /v1/responses` as JSON: its items, its outcome, and what it repeats of the
//! request. The names of members come from OpenAI's API reference.

use serde::Serialize;
use serde_json::{Map, Value};

use super::request::{Echo, ResponsesRequest};
use crate::error::ApiError;
use crate::response::logprobs::TokenLogprob;
use crate::response::{FinishReason, Head, Usage};

/// The state of a response or an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Status {
    /// The model writes it.
    InProgress,
    /// The model has ended it.
    Completed,
    /// A limit has ended it.
    Incomplete,
    /// The model has failed. Only responses have this state.
    Failed,
}

/// A part of an item.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Part {
    /// Text of the answer.
    OutputText {
        /// The text.
        text: String,
        /// Citations, which no model here makes.
        annotations: [(); 0],
        /// Log probabilities; empty if the client wants none.
        logprobs: Vec<TokenLogprob>,
    },
    /// Text of the reasoning.
    ReasoningText {
        /// The text.
        text: String,
    },
}

/// An item of the output.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum Item {
    /// The reasoning of the model.
    Reasoning {
        /// `rs_...`
        id: String,
        /// The state of the item.
        status: Status,
        /// Summaries, which the server does not make.
        summary: [(); 0],
        /// At most one part.
        content: Vec<Part>,
        /// Reasoning is not encrypted.
        encrypted_content: (),
    },
    /// A text for the user.
    Message {
        /// `msg_...`
        id: String,
        /// The state of the item.
        status: Status,
        /// Always `assistant`.
        role: &'static str,
        /// At most one part.
        content: Vec<Part>,
    },
    /// A call that the client is to make.
    FunctionCall {
        /// `fc_...`
        id: String,
        /// The state of the item.
        status: Status,
        /// `call_...`, which the client repeats with the output of the call.
        call_id: String,
        /// The name of the function.
        name: String,
        /// The arguments as JSON text, as the model wrote them.
        arguments: String,
    },
}

impl Item {
    /// Returns the id.
    pub(crate) fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. }
            | Self::Message { id, .. }
            | Self::FunctionCall { id, .. } => id,
        }
    }

    /// Changes the state.
    pub(crate) fn set_status(&mut self, new: Status) {
        match self {
            Self::Reasoning { status, .. }
            | Self::Message { status, .. }
            | Self::FunctionCall { status, .. } => *status = new,
        }
    }
}

/// How a response ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The model writes it.
    InProgress,
    /// The model has ended it.
    Completed,
    /// It is incomplete, for a reason of the API.
    Incomplete(&'static str),
    /// The model has failed.
    Failed(ResponseError),
}

/// Why a response failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ResponseError {
    /// A code of the API.
    pub code: &'static str,
    /// What happened.
    pub message: String,
}

impl Outcome {
    /// Returns how a choice with this reason ended.
    pub(crate) fn of(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop
            | FinishReason::ToolCalls
            | FinishReason::FunctionCall
            | FinishReason::Repetition => Self::Completed,
            FinishReason::Length => Self::Incomplete("max_output_tokens"),
            FinishReason::ContentFilter => Self::Incomplete("content_filter"),
            FinishReason::Abort | FinishReason::Error => Self::Failed(ResponseError {
                code: "server_error",
                message: "the model has ended its output before it was complete".to_owned(),
            }),
        }
    }

    /// Returns the outcome of a failed request.
    pub(crate) fn failed(error: &ApiError) -> Self {
        let code = match error.status {
            429 => "rate_limit_exceeded",
            400..=499 => "invalid_prompt",
            _ => "server_error",
        };
        Self::Failed(ResponseError { code, message: error.message.clone() })
    }

    /// Returns the state of a response.
    pub(crate) fn status(&self) -> Status {
        match self {
            Self::InProgress => Status::InProgress,
            Self::Completed => Status::Completed,
            Self::Incomplete(_) => Status::Incomplete,
            Self::Failed(_) => Status::Failed,
        }
    }

    /// Returns the state of the last item, with which the response ended.
    pub(crate) fn status_of_last_item(&self) -> Status {
        match self {
            Self::Completed => Status::Completed,
            _ => Status::Incomplete,
        }
    }

    /// Returns the type of the event that ends the stream.
    pub(crate) fn event(&self) -> &'static str {
        match self {
            Self::InProgress => "response.in_progress",
            Self::Completed => "response.completed",
            Self::Incomplete(_) => "response.incomplete",
            Self::Failed(_) => "response.failed",
        }
    }
}

/// What all states of a response have in common.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frame {
    head: Head,
    echo: Echo,
    max_output_tokens: Option<u64>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    parallel_tool_calls: bool,
    effort: Option<String>,
}

/// A response.
#[derive(Debug, Serialize)]
pub(crate) struct ResponseObject<'a> {
    id: &'a str,
    object: &'static str,
    created_at: i64,
    status: Status,
    completed_at: Option<i64>,
    background: bool,
    error: Option<&'a ResponseError>,
    incomplete_details: Option<IncompleteDetails>,
    instructions: Option<&'a str>,
    max_output_tokens: Option<u64>,
    max_tool_calls: Option<u32>,
    model: &'a str,
    output: &'a [Item],
    parallel_tool_calls: bool,
    previous_response_id: (),
    prompt_cache_key: Option<&'a str>,
    reasoning: Reasoning<'a>,
    safety_identifier: Option<&'a str>,
    service_tier: &'static str,
    store: bool,
    temperature: Option<f64>,
    text: Text<'a>,
    tool_choice: &'a Value,
    tools: &'a [Value],
    top_logprobs: u32,
    top_p: Option<f64>,
    truncation: &'static str,
    usage: Option<ResponseUsage>,
    user: Option<&'a str>,
    metadata: &'a Map<String, Value>,
}

#[derive(Debug, Serialize)]
struct IncompleteDetails {
    reason: &'static str,
}

#[derive(Debug, Serialize)]
struct Reasoning<'a> {
    effort: Option<&'a str>,
    summary: (),
}

#[derive(Debug, Serialize)]
struct Text<'a> {
    format: &'a Value,
}

#[derive(Debug, Serialize)]
struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Debug, Serialize)]
struct InputDetails {
    cached_tokens: u64,
    cache_write_tokens: u64,
}

#[derive(Debug, Serialize)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl From<Usage> for ResponseUsage {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails {
                cached_tokens: usage.cached_tokens.unwrap_or(0),
                cache_write_tokens: 0,
            },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails {
                reasoning_tokens: usage.reasoning_tokens.unwrap_or(0),
            },
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
        }
    }
}

impl Frame {
    /// Returns what the responses to a request have in common.
    pub(crate) fn new(head: Head, request: ResponsesRequest) -> Self {
        let ResponsesRequest { chat, echo } = request;
        Self {
            head,
            echo,
            max_output_tokens: chat.sampling.max_tokens,
            temperature: chat.sampling.temperature,
            top_p: chat.sampling.top_p,
            parallel_tool_calls: chat.parallel_tool_calls,
            effort: chat.prompt.reasoning_effort,
        }
    }

    /// Returns a response. `completed_at` is in seconds since 1970.
    pub(crate) fn response<'a>(
        &'a self,
        outcome: &'a Outcome,
        output: &'a [Item],
        usage: Option<Usage>,
        completed_at: Option<i64>,
    ) -> ResponseObject<'a> {
        let echo = &self.echo;
        ResponseObject {
            id: &self.head.id,
            object: "response",
            created_at: self.head.created,
            status: outcome.status(),
            completed_at,
            background: false,
            error: match outcome {
                Outcome::Failed(error) => Some(error),
                _ => None,
            },
            incomplete_details: match outcome {
                Outcome::Incomplete(reason) => Some(IncompleteDetails { reason }),
                _ => None,
            },
            instructions: echo.instructions.as_deref(),
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: echo.max_tool_calls,
            model: &self.head.model,
            output,
            parallel_tool_calls: self.parallel_tool_calls,
            previous_response_id: (),
            prompt_cache_key: echo.prompt_cache_key.as_deref(),
            reasoning: Reasoning { effort: self.effort.as_deref(), summary: () },
            safety_identifier: echo.safety_identifier.as_deref(),
            service_tier: "default",
            store: false,
            temperature: self.temperature,
            text: Text { format: &echo.text_format },
            tool_choice: &echo.tool_choice,
            tools: &echo.tools,
            top_logprobs: echo.top_logprobs,
            top_p: self.top_p,
            truncation: "disabled",
            usage: usage.map(ResponseUsage::from),
            user: echo.user.as_deref(),
            metadata: &echo.metadata,
        }
    }
}
