//! What a chat template expects of messages, and the messages in that form. Runs in the frontend,
//! and reads nothing of the template itself.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};
use serde::{Deserialize, Serialize as DeriveSerialize};
use serde_json::{Map, Value, json};

use super::CivilTime;
use crate::chat::ChatRequest;
use crate::error::ApiError;
use crate::message::{Content, Message};

/// The form of contents that a template reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, DeriveSerialize, Deserialize)]
pub enum ContentForm {
    /// Texts only. The texts of several parts are joined with line breaks, as in vLLM.
    #[default]
    Text,
    /// Lists of parts only.
    Parts,
    /// Both: contents stay as the client wrote them.
    Both,
}

/// What the templates of a model expect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, DeriveSerialize, Deserialize)]
pub struct Expectations {
    pub(super) default: Traits,
    /// Those of the template for requests with tools, if there is one.
    pub(super) tool_use: Option<Traits>,
}

/// What a template expects of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, DeriveSerialize, Deserialize)]
pub(super) struct Traits {
    pub(super) form: ContentForm,
    /// Whether the content of a message with tool calls may be `null`.
    pub(super) accepts_null: bool,
}

impl Default for Traits {
    fn default() -> Self {
        Self { form: ContentForm::Text, accepts_null: true }
    }
}

impl Expectations {
    /// Returns the form of contents that the template for requests without tools reads.
    pub fn content_form(&self) -> ContentForm {
        self.default.form
    }

    /// Returns what the template renders for a request, as JSON. A template that the request itself
    /// brings is not used.
    ///
    /// # Errors
    ///
    /// 400 if the template cannot express media that a message has.
    pub fn input(&self, request: &ChatRequest, now: CivilTime) -> Result<Vec<u8>, ApiError> {
        let tool_use = self.tool_use.filter(|_| !request.tools.is_empty());
        let traits = tool_use.unwrap_or(self.default);
        if traits.form == ContentForm::Text
            && let Some(index) = request.messages.iter().position(|one| !one.media().is_empty())
        {
            return Err(ApiError::invalid_field(
                format!("messages[{index}].content"),
                "the model accepts text only: its chat template has no images or audio",
            ));
        }
        let variables = Variables { request, traits };
        let input = Input { tool_use: tool_use.is_some(), now, variables };
        serde_json::to_vec(&input).map_err(|error| {
            ApiError::internal(format!("the messages cannot be written for the template: {error}"))
        })
    }

    /// Returns the prompt of a request, of what its template has rendered.
    ///
    /// # Errors
    ///
    /// 400 if the model cannot continue the last message, because it is not in the prompt.
    pub fn prompt(&self, request: &ChatRequest, rendered: String) -> Result<String, ApiError> {
        let mut prompt = rendered;
        if request.prompt.continue_final_message
            && let Some(message) = request.messages.last()
        {
            cut_after_final_message(&mut prompt, message)?;
        }
        Ok(prompt)
    }
}

/// Returns the error of messages that a template refuses or cannot render (400).
pub fn refused(why: impl Into<String>) -> ApiError {
    ApiError::invalid_field("messages", why)
}

#[derive(DeriveSerialize)]
struct Input<'a> {
    tool_use: bool,
    now: CivilTime,
    variables: Variables<'a>,
}

/// The variables of a template. Of equal names, the last counts: the variables of the request
/// itself are after `chat_template_kwargs`.
struct Variables<'a> {
    request: &'a ChatRequest,
    traits: Traits,
}

impl Serialize for Variables<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { request, traits } = *self;
        let prompt = &request.prompt;
        let kwargs: &Map<String, Value> = &prompt.chat_template_kwargs;
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in kwargs {
            map.serialize_entry(name, value)?;
        }
        if let Some(effort) = &prompt.reasoning_effort {
            map.serialize_entry("reasoning_effort", effort)?;
        }
        let messages = request.messages.iter();
        let messages: Vec<_> =
            messages.map(|message| TemplateMessage { message, traits }).collect();
        map.serialize_entry("messages", &messages)?;
        // `transformers` passes `None` for what is absent, not an undefined variable.
        let tools: Vec<&Value> = request.tools.iter().map(|tool| &tool.value).collect();
        map.serialize_entry("tools", &Some(tools).filter(|tools| !tools.is_empty()))?;
        map.serialize_entry("documents", &prompt.documents)?;
        map.serialize_entry("add_generation_prompt", &prompt.add_generation_prompt)?;
        map.end()
    }
}

/// A message as a template reads it: members in the client's order, the content in the template's
/// form.
struct TemplateMessage<'a> {
    message: &'a Message,
    traits: Traits,
}

impl Serialize for TemplateMessage<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let content = TemplateContent { message: self.message, traits: self.traits };
        let members = self.message.members();
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in members {
            if name == "content" {
                map.serialize_entry(name, &content)?;
            } else {
                map.serialize_entry(name, value)?;
            }
        }
        if !members.contains_key("content") {
            map.serialize_entry("content", &content)?;
        }
        map.end()
    }
}

struct TemplateContent<'a> {
    message: &'a Message,
    traits: Traits,
}

impl Serialize for TemplateContent<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match (self.message.content(), self.traits.form) {
            (Content::Absent, form) => {
                let has_calls = self.message.members().contains_key("tool_calls");
                if has_calls && self.traits.accepts_null {
                    serializer.serialize_unit()
                } else if form == ContentForm::Parts {
                    serializer.serialize_seq(Some(0))?.end()
                } else {
                    serializer.serialize_str("")
                }
            }
            (Content::Text(text), ContentForm::Parts) => {
                let mut list = serializer.serialize_seq(Some(1))?;
                list.serialize_element(&json!({"type": "text", "text": text}))?;
                list.end()
            }
            (Content::Text(text), _) => serializer.serialize_str(text),
            (Content::Parts(parts), ContentForm::Text) => {
                let texts: Vec<&str> = parts.iter().filter_map(part_text).collect();
                serializer.serialize_str(&texts.join("\n"))
            }
            (Content::Parts(parts), _) => {
                let mut list = serializer.serialize_seq(Some(parts.len()))?;
                for part in parts {
                    list.serialize_element(part)?;
                }
                list.end()
            }
        }
    }
}

fn part_text(part: &Value) -> Option<&str> {
    let is_text = part.get("type").is_some_and(|kind| kind == "text");
    part.get("text").filter(|_| is_text).and_then(Value::as_str)
}

/// Cuts the prompt at the end of the last message's text, so that the model continues it.
fn cut_after_final_message(prompt: &mut String, message: &Message) -> Result<(), ApiError> {
    let text = match message.content() {
        Content::Text(text) => text,
        Content::Parts(parts) => parts.iter().filter_map(part_text).next_back().unwrap_or_default(),
        Content::Absent => "",
    };
    let trimmed = text.trim();
    let Some(position) = prompt.rfind(trimmed).filter(|_| !trimmed.is_empty()) else {
        return Err(ApiError::invalid_field(
            "continue_final_message",
            "continue_final_message needs a last message with a text that the chat template keeps",
        ));
    };
    // Templates may trim contents. The whitespace at the end stays if the template has kept it.
    let untrimmed = text.trim_start();
    let kept = if prompt[position..].starts_with(untrimmed) { untrimmed } else { trimmed };
    prompt.truncate(position + kept.len());
    Ok(())
}
