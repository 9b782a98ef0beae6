//! Responses as JSON: whole ones, chunks of streams, usage, and lists of models.
//!
//! Names, order and `null` members are those of vLLM 0.32, whose answers are the golden files in
//! `testdata`. OpenAI's clients accept all of them.

pub mod logprobs;

use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use logprobs::{ChatLogprobs, CompletionLogprobs};

/// The event that ends a stream.
pub const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";
/// A comment that keeps an idle stream open. Clients skip it.
pub const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";
/// The content type of streams.
pub const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// Returns a response as JSON.
pub fn to_json(response: &impl Serialize) -> Vec<u8> {
    // The types here have no maps with keys other than texts and write to memory: this cannot fail.
    serde_json::to_vec(response).unwrap_or_default()
}

/// Appends a chunk to a stream, as an event (server-sent events).
pub fn write_event(chunk: &impl Serialize, stream: &mut Vec<u8>) {
    stream.extend_from_slice(b"data: ");
    // As in `to_json`, this cannot fail.
    let _ = serde_json::to_writer(&mut *stream, chunk);
    stream.extend_from_slice(b"\n\n");
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The end-of-sequence token, a stop token or a stop string.
    Stop,
    /// The limit of tokens or the context of the model.
    Length,
    /// The choice has tool calls that the client did not force by name.
    ToolCalls,
    /// A filter left out content.
    ContentFilter,
    /// The predecessor of `ToolCalls`.
    FunctionCall,
    /// The request was cancelled (vLLM's extension).
    Abort,
    /// The engine failed (vLLM's extension).
    Error,
    /// The engine found a repetition (vLLM's extension).
    Repetition,
}

impl FinishReason {
    /// Returns the reason with a name of the API; `None` for other names, such as `None`, which
    /// vllm_backend sends for choices that go on.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "stop" => Self::Stop,
            "length" => Self::Length,
            "tool_calls" => Self::ToolCalls,
            "content_filter" => Self::ContentFilter,
            "function_call" => Self::FunctionCall,
            "abort" => Self::Abort,
            "error" => Self::Error,
            "repetition" => Self::Repetition,
            _ => return None,
        })
    }
}

/// What stopped a choice (vLLM's extension). The end-of-sequence token is no stop reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// A stop token.
    Token(u32),
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt_tokens: u64,
    /// Tokens of all choices, with stop tokens.
    pub completion_tokens: u64,
    /// Tokens of prompts that were in the prefix cache. `None` leaves the details out.
    pub cached_tokens: Option<u64>,
    /// Tokens of reasoning. `None` leaves the details out.
    pub reasoning_tokens: Option<u64>,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: u64,
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let prompt = self.cached_tokens.map(|cached_tokens| PromptDetails { cached_tokens });
        let completion =
            self.reasoning_tokens.map(|reasoning_tokens| CompletionDetails { reasoning_tokens });
        let mut map = serializer.serialize_map(Some(5))?;
        map.serialize_entry("prompt_tokens", &self.prompt_tokens)?;
        let total = self.prompt_tokens.saturating_add(self.completion_tokens);
        map.serialize_entry("total_tokens", &total)?;
        map.serialize_entry("completion_tokens", &self.completion_tokens)?;
        map.serialize_entry("prompt_tokens_details", &prompt)?;
        map.serialize_entry("completion_tokens_details", &completion)?;
        map.end()
    }
}

/// What all responses and chunks to one request begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The id of the response: `chatcmpl-...` or `cmpl-...`.
    pub id: String,
    /// The time of the request, in seconds since 1970.
    pub created: i64,
    /// The name of the model or LoRA under which it is served.
    pub model: String,
    /// Identifies the configuration of the server.
    pub system_fingerprint: Option<String>,
}

impl Head {
    pub(crate) fn write<M: SerializeMap>(&self, object: &str, map: &mut M) -> Result<(), M::Error> {
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("object", object)?;
        map.serialize_entry("created", &self.created)?;
        map.serialize_entry("model", &self.model)
    }
}

/// Members of whole responses that vLLM has added. All are `null` by default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Extensions {
    /// The log probabilities of the prompt (chat only; completions have them in each choice).
    pub prompt_logprobs: Option<Value>,
    /// The token ids of the prompt (chat only; completions have them in each choice).
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Parameters of a transfer of key-value caches between engines.
    pub kv_transfer_params: Option<Value>,
    /// Times of the request.
    pub metrics: Option<Value>,
}

/// A call of a tool, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The id, unique among all calls of a conversation: `call_...`.
    pub id: String,
    /// The name of the function.
    pub name: String,
    /// The arguments as JSON text, as the model wrote them.
    pub arguments: String,
}

#[derive(Serialize)]
struct Function<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl Serialize for ToolCall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let function = Function { name: Some(&self.name), arguments: &self.arguments };
        let mut map = serializer.serialize_map(Some(3))?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("type", "function")?;
        map.serialize_entry("function", &function)?;
        map.end()
    }
}

/// The message of a chat choice.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChatMessage {
    /// The text; `None` if there are only tool calls or reasoning.
    pub content: Option<String>,
    /// The reasoning before the text.
    pub reasoning: Option<String>,
    /// Tool calls. The member is left out without a call.
    pub tool_calls: Vec<ToolCall>,
}

impl Serialize for ChatMessage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", "assistant")?;
        map.serialize_entry("content", &self.content)?;
        for name in ["refusal", "annotations", "audio", "function_call"] {
            map.serialize_entry(name, &())?;
        }
        if !self.tool_calls.is_empty() {
            map.serialize_entry("tool_calls", &self.tool_calls)?;
        }
        map.serialize_entry("reasoning", &self.reasoning)?;
        map.end()
    }
}

/// A choice of a chat response.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatChoice {
    /// The number of the choice, from 0.
    pub index: u32,
    /// The message.
    pub message: ChatMessage,
    /// Log probabilities, if the client wants them.
    pub logprobs: Option<ChatLogprobs>,
    /// Why the choice ended.
    pub finish_reason: FinishReason,
    /// What stopped it.
    pub stop_reason: Option<StopReason>,
    /// Token ids, if the client wants them.
    pub token_ids: Option<Vec<u32>>,
}

impl Serialize for ChatChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(7))?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry("message", &self.message)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &self.finish_reason)?;
        map.serialize_entry("stop_reason", &self.stop_reason)?;
        map.serialize_entry("token_ids", &self.token_ids)?;
        map.serialize_entry("routed_experts", &())?;
        map.end()
    }
}

/// A whole response of `POST /v1/chat/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatCompletion {
    /// Id, time and model.
    pub head: Head,
    /// The choices in the order of their indexes.
    pub choices: Vec<ChatChoice>,
    /// Numbers of tokens over all choices; `None` if the model does not count them.
    pub usage: Option<Usage>,
    /// vLLM's members.
    pub extensions: Extensions,
}

impl Serialize for ChatCompletion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("chat.completion", &mut map)?;
        map.serialize_entry("choices", &self.choices)?;
        map.serialize_entry("service_tier", &())?;
        map.serialize_entry("system_fingerprint", &self.head.system_fingerprint)?;
        map.serialize_entry("usage", &self.usage)?;
        map.serialize_entry("prompt_logprobs", &self.extensions.prompt_logprobs)?;
        map.serialize_entry("prompt_token_ids", &self.extensions.prompt_token_ids)?;
        map.serialize_entry("prompt_text", &())?;
        map.serialize_entry("kv_transfer_params", &self.extensions.kv_transfer_params)?;
        map.serialize_entry("ec_transfer_params", &())?;
        map.serialize_entry("metrics", &self.extensions.metrics)?;
        map.end()
    }
}

/// A piece of a tool call in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolCallDelta<'a> {
    /// A call begins. Its id and name are sent only here.
    Begin {
        /// The number of the call in this choice, from 0.
        index: u32,
        /// The id of the call.
        id: &'a str,
        /// The name of the function.
        name: &'a str,
    },
    /// Text to append to the arguments.
    Arguments {
        /// The number of the call.
        index: u32,
        /// The text.
        text: &'a str,
    },
}

impl Serialize for ToolCallDelta<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Begin { index, id, name } => {
                map.serialize_entry("index", index)?;
                map.serialize_entry("id", id)?;
                map.serialize_entry("type", "function")?;
                let function = Function { name: Some(name), arguments: "" };
                map.serialize_entry("function", &function)?;
            }
            Self::Arguments { index, text } => {
                map.serialize_entry("index", index)?;
                map.serialize_entry("function", &Function { name: None, arguments: text })?;
            }
        }
        map.end()
    }
}

/// What a chunk adds to the message of a choice. Absent members are left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delta<'a> {
    /// Whether the chunk has the role: the first one of a choice.
    pub role: bool,
    /// More of the text.
    pub content: Option<&'a str>,
    /// More of the reasoning.
    pub reasoning: Option<&'a str>,
    /// Pieces of tool calls.
    pub tool_calls: &'a [ToolCallDelta<'a>],
}

impl Delta<'_> {
    /// Returns what the first chunk of a choice has: the role and an empty text.
    pub fn first() -> Self {
        Self { role: true, content: Some(""), ..Self::default() }
    }
}

impl Serialize for Delta<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        if self.role {
            map.serialize_entry("role", "assistant")?;
        }
        if let Some(content) = self.content {
            map.serialize_entry("content", content)?;
        }
        if let Some(reasoning) = self.reasoning {
            map.serialize_entry("reasoning", reasoning)?;
        }
        if !self.tool_calls.is_empty() {
            map.serialize_entry("tool_calls", self.tool_calls)?;
        }
        map.end()
    }
}

/// A choice in a chunk of a chat stream.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatChunkChoice<'a> {
    /// The number of the choice, from 0.
    pub index: u32,
    /// What the chunk adds.
    pub delta: Delta<'a>,
    /// Log probabilities of the chunk's tokens, if the client wants them.
    pub logprobs: Option<&'a ChatLogprobs>,
    /// Why the choice ended, in its last chunk.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it. The member is written with a finish reason only.
    pub stop_reason: Option<&'a StopReason>,
    /// Token ids of the chunk, if the client wants them. Left out if not.
    pub token_ids: Option<&'a [u32]>,
}

impl Serialize for ChatChunkChoice<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry("delta", &self.delta)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &self.finish_reason)?;
        if self.finish_reason.is_some() {
            map.serialize_entry("stop_reason", &self.stop_reason)?;
        }
        if let Some(token_ids) = self.token_ids {
            map.serialize_entry("token_ids", token_ids)?;
        }
        map.end()
    }
}

/// A chunk of a chat stream. The chunk with the usage has no choices.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatChunk<'a> {
    /// Id, time and model, the same in all chunks.
    pub head: &'a Head,
    /// The choices that go on.
    pub choices: &'a [ChatChunkChoice<'a>],
    /// Numbers of tokens so far. Left out if `None`, as in vLLM.
    pub usage: Option<Usage>,
}

impl Serialize for ChatChunk<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("chat.completion.chunk", &mut map)?;
        if let Some(fingerprint) = &self.head.system_fingerprint {
            map.serialize_entry("system_fingerprint", fingerprint)?;
        }
        map.serialize_entry("choices", self.choices)?;
        if let Some(usage) = &self.usage {
            map.serialize_entry("usage", usage)?;
        }
        map.end()
    }
}

/// A choice of a completion response.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionChoice {
    /// The number of the choice: `prompt * n + i`.
    pub index: u32,
    /// The text, after the prompt with `echo`.
    pub text: String,
    /// Log probabilities, if the client wants them.
    pub logprobs: Option<CompletionLogprobs>,
    /// Why the choice ended.
    pub finish_reason: FinishReason,
    /// What stopped it.
    pub stop_reason: Option<StopReason>,
    /// Token ids, if the client wants them.
    pub token_ids: Option<Vec<u32>>,
    /// The log probabilities of the prompt in vLLM's form, if the client wants them.
    pub prompt_logprobs: Option<Value>,
    /// Token ids of the prompt, if the client wants them.
    pub prompt_token_ids: Option<Vec<u32>>,
}

impl Serialize for CompletionChoice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(9))?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry("text", &self.text)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &self.finish_reason)?;
        map.serialize_entry("stop_reason", &self.stop_reason)?;
        map.serialize_entry("token_ids", &self.token_ids)?;
        map.serialize_entry("prompt_logprobs", &self.prompt_logprobs)?;
        map.serialize_entry("prompt_token_ids", &self.prompt_token_ids)?;
        map.serialize_entry("routed_experts", &())?;
        map.end()
    }
}

/// A whole response of `POST /v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Id, time and model.
    pub head: Head,
    /// The choices in the order of their indexes.
    pub choices: Vec<CompletionChoice>,
    /// Numbers of tokens over all prompts and choices; `None` if the model does not count them.
    pub usage: Option<Usage>,
    /// vLLM's members.
    pub extensions: Extensions,
}

impl Serialize for Completion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("text_completion", &mut map)?;
        map.serialize_entry("choices", &self.choices)?;
        map.serialize_entry("service_tier", &())?;
        map.serialize_entry("system_fingerprint", &self.head.system_fingerprint)?;
        map.serialize_entry("usage", &self.usage)?;
        map.serialize_entry("kv_transfer_params", &self.extensions.kv_transfer_params)?;
        map.serialize_entry("ec_transfer_params", &())?;
        map.serialize_entry("metrics", &self.extensions.metrics)?;
        map.end()
    }
}

/// A choice in a chunk of a completion stream.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionChunkChoice<'a> {
    /// The number of the choice: `prompt * n + i`.
    pub index: u32,
    /// More of the text.
    pub text: &'a str,
    /// Log probabilities of the chunk's tokens, if the client wants them.
    pub logprobs: Option<&'a CompletionLogprobs>,
    /// Why the choice ended, in its last chunk.
    pub finish_reason: Option<FinishReason>,
    /// What stopped it.
    pub stop_reason: Option<&'a StopReason>,
    /// Token ids of the chunk, if the client wants them. Left out if not.
    pub token_ids: Option<&'a [u32]>,
}

impl Serialize for CompletionChunkChoice<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("index", &self.index)?;
        map.serialize_entry("text", self.text)?;
        map.serialize_entry("logprobs", &self.logprobs)?;
        map.serialize_entry("finish_reason", &self.finish_reason)?;
        map.serialize_entry("stop_reason", &self.stop_reason)?;
        if let Some(token_ids) = self.token_ids {
            map.serialize_entry("token_ids", token_ids)?;
        }
        map.end()
    }
}

/// A chunk of a completion stream. The chunk with the usage has no choices.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionChunk<'a> {
    /// Id, time and model, the same in all chunks.
    pub head: &'a Head,
    /// The choices that go on.
    pub choices: &'a [CompletionChunkChoice<'a>],
    /// Numbers of tokens so far; `null` if `None`, as in vLLM.
    pub usage: Option<Usage>,
}

impl Serialize for CompletionChunk<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.head.write("text_completion", &mut map)?;
        if let Some(fingerprint) = &self.head.system_fingerprint {
            map.serialize_entry("system_fingerprint", fingerprint)?;
        }
        map.serialize_entry("choices", self.choices)?;
        map.serialize_entry("usage", &self.usage)?;
        map.end()
    }
}

/// A model as `GET /v1/models` lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// The name under which the model is served.
    pub id: String,
    /// The time of the load, in seconds since 1970.
    pub created: i64,
    /// The owner, such as `pharos`.
    pub owned_by: String,
    /// The model behind the name; `None` means `id`.
    pub root: Option<String>,
    /// The base model of a LoRA.
    pub parent: Option<String>,
    /// The length of the context in tokens, if it is known.
    pub max_model_len: Option<u64>,
    /// Adds the members `name` and `ready` of KServe's v1 protocol, which has the same path.
    pub ready: Option<bool>,
}

impl Serialize for Model {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("id", &self.id)?;
        map.serialize_entry("object", "model")?;
        map.serialize_entry("created", &self.created)?;
        map.serialize_entry("owned_by", &self.owned_by)?;
        map.serialize_entry("root", self.root.as_ref().unwrap_or(&self.id))?;
        map.serialize_entry("parent", &self.parent)?;
        map.serialize_entry("max_model_len", &self.max_model_len)?;
        map.serialize_entry::<_, [(); 0]>("permission", &[])?;
        if let Some(ready) = self.ready {
            map.serialize_entry("name", &self.id)?;
            map.serialize_entry("ready", &ready)?;
        }
        map.end()
    }
}

/// The response of `GET /v1/models`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelList {
    /// The models.
    pub data: Vec<Model>,
    /// Adds the member `models` of KServe's v1 protocol, which has the same path: names of models,
    /// also of those that are no language models.
    pub kserve_models: Option<Vec<String>>,
}

impl Serialize for ModelList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("object", "list")?;
        map.serialize_entry("data", &self.data)?;
        if let Some(models) = &self.kserve_models {
            map.serialize_entry("models", models)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests;
