//! The way from a checked chat to its inference: the same for chat completions and for responses.

use std::sync::Arc;

use pharos::request_trace::Operation;
use pharos_os::clock;

use crate::answer::Failure;
use crate::chat::{ChatRequest, ToolChoice};
use crate::choice::{Parsers, ToolMode};
use crate::contract::Prompt;
use crate::edge::{
    Received, RequestId, log_unknown, on_a_thread_if, random_id, refuse_unsupported,
};
use crate::error::ApiError;
use crate::generation::Generation;
use crate::media::Media;
use crate::message::{Content, Message};
use crate::models::TextModel;
use crate::options::RequestOptions;
use crate::response::Head;
use crate::structured::StructuredOutput;
use crate::template::CivilTime;
use crate::tools::ToolParser;

/// Messages of more bytes than this are prepared for their template on a blocking thread.
const LONG_MESSAGES: usize = 16 << 10;

/// A chat whose inference runs.
pub(crate) struct Begun {
    pub(crate) request: ChatRequest,
    pub(crate) head: Head,
    pub(crate) generation: Generation,
}

/// Begins the inference of a chat. `head_of` returns the head of the response, from the id, the name
/// of the model and the options of the request.
pub(crate) async fn begin(
    received: &mut Received,
    mut request: ChatRequest,
    head_of: impl FnOnce(&RequestId, &str, &RequestOptions) -> Head,
) -> Result<Begun, Failure> {
    refuse_unsupported(&request.options, &request.sampling)?;
    refuse_in_chat(&request)?;
    let (name, model) = received.model_of(&request.options).await?;
    if let Some(traced) = received.call.traced() {
        traced.operation(Operation::Chat);
    }
    log_unknown(&name, &request.unknown);
    model.contract.check_media(request.media())?;
    let tools = tools_of(&mut request, &model, &name)?;
    let prompt;
    (request, prompt) = render(request, &model, &name).await?;
    let parsers = Parsers {
        reasoning: model.reasoning_parser.clone().map(|parser| parser.after_prompt(&prompt)),
        tools,
        one_call: !request.parallel_tool_calls,
        ..Parsers::of(&request.sampling, &request.options)
    };
    let media: Vec<&Media> = request.media().collect();
    let head = head_of(&received.id, &name, &request.options);
    let responses = received.begin(
        &head,
        &model,
        &request.options,
        &Prompt {
            text: &prompt,
            tokens: None,
            media: &media,
            // The template writes them.
            add_special_tokens: Some(request.prompt.add_special_tokens).filter(|flag| *flag),
            sampling: &request.sampling,
            default_max_tokens: model.default_max_tokens,
            stream: request.options.stream.is_some(),
            token_ids: request.options.return_token_ids,
        },
    )?;
    let choices = request.sampling.choices_per_prompt();
    let mut generation = Generation::new("messages");
    generation.add(responses, choices, &parsers, request.sampling.max_tokens);
    Ok(Begun { request, head, generation })
}

/// Returns the id of a tool call, unique in every conversation.
pub(crate) fn call_id() -> String {
    format!("call_{}", random_id().get(..24).unwrap_or_default())
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
        request.sampling.structured = Some(output.of_field("tools"));
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
