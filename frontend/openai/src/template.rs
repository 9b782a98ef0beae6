//! Renders chat templates: Jinja as `transformers` configures it.
//!
//! Source: `transformers`, "Chat templates" and `utils/chat_template_utils.py`. Blocks are trimmed
//! (`trim_blocks`, `lstrip_blocks`), strings and dictionaries have Python's methods, loops have
//! `break` and `continue`, and the globals are `raise_exception` and `strftime_now`.
//! `{% generation %}` marks the answer for training and changes nothing here.
//!
//! A template is a program. Fuel and the length of the output are limited, so that no template runs
//! long or fills the memory; the loops of a template over the messages of a client count too.

mod config;
mod json;
mod time;

use std::collections::BTreeMap;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

pub use config::{TemplateSource, TokenizerConfig};
pub use time::CivilTime;

use crate::chat::ChatRequest;
use crate::error::{ApiError, quoted};
use crate::message::{Content, Message};

/// The most work of one rendering: one unit for each instruction, and one for each 64 bytes that
/// are made.
pub const MAX_FUEL: u64 = 10_000_000;
/// The most work of one of the short chats that find out what a template expects.
const MAX_PROBE_FUEL: u64 = 100_000;
/// The longest rendered prompt, in bytes.
pub const MAX_OUTPUT_BYTES: usize = 16 << 20;
/// The most nested calls of a template: macros, loops, conditions.
const MAX_RECURSION: usize = 200;

/// ChatML: the template of a server for models that have none.
pub const CHATML: &str = "{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}";

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// The form of contents that a template reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentForm {
    /// Texts only. The texts of several parts are joined with line breaks, as in vLLM.
    Text,
    /// Lists of parts only.
    Parts,
    /// Both: contents stay as the client wrote them.
    Both,
}

/// A chat template, or two: one for requests with tools and one for others.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    default: Traits,
    tool_use: Option<Traits>,
}

/// What a template expects of messages.
#[derive(Debug, Clone, Copy)]
struct Traits {
    name: &'static str,
    form: ContentForm,
    /// Whether the content of a message with tool calls may be `null`.
    accepts_null: bool,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are variables for it: `bos_token`, `eos_token`, ...
    ///
    /// Of named templates, `default` and `tool_use` count; a single one counts whatever its name
    /// is.
    ///
    /// # Errors
    ///
    /// What is wrong with the template, for logs.
    pub fn new(
        source: TemplateSource,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, String> {
        let mut named = match source {
            TemplateSource::Single(text) => BTreeMap::from([(DEFAULT.to_owned(), text)]),
            TemplateSource::Named(named) => named,
        };
        let mut tool_use = named.remove(TOOL_USE);
        let mut default = named.remove(DEFAULT).or_else(|| tool_use.take());
        if default.is_none() && named.len() == 1 {
            default = named.into_values().next();
        }
        let Some(default) = default else {
            return Err("there is no chat template with the name `default`".to_owned());
        };
        let mut environment = new_environment()?;
        environment.set_fuel(Some(MAX_PROBE_FUEL));
        add_template(&mut environment, DEFAULT, &default)?;
        if let Some(source) = &tool_use {
            add_template(&mut environment, TOOL_USE, source)?;
        }
        let unprobed = |name| Traits { name, form: ContentForm::Text, accepts_null: true };
        let mut template = Self {
            environment,
            special_tokens,
            default: unprobed(DEFAULT),
            tool_use: tool_use.is_some().then(|| unprobed(TOOL_USE)),
        };
        template.default = template.probe(DEFAULT);
        template.tool_use = template.tool_use.map(|traits| template.probe(traits.name));
        template.environment.set_fuel(Some(MAX_FUEL));
        Ok(template)
    }

    /// Returns the form of contents that the template for requests without tools reads.
    pub fn content_form(&self) -> ContentForm {
        self.default.form
    }

    /// Renders the prompt of a request. A template that the request itself brings is not used:
    /// callers that allow it create a [`ChatTemplate`] from it.
    ///
    /// # Errors
    ///
    /// 400 if the template refuses the messages (`raise_exception`), cannot render them or exceeds
    /// a limit, and if it cannot express media that a message has.
    pub fn render(&self, request: &ChatRequest, now: CivilTime) -> Result<String, ApiError> {
        let traits = match self.tool_use {
            Some(traits) if !request.tools.is_empty() => traits,
            _ => self.default,
        };
        if traits.form == ContentForm::Text
            && let Some(index) = request.messages.iter().position(Message::has_media)
        {
            return Err(ApiError::invalid_field(
                format!("messages[{index}].content"),
                "the model accepts text only: its chat template has no images, audio, videos or files",
            ));
        }
        let mut context = self.variables(now);
        for (name, value) in &request.prompt.chat_template_kwargs {
            context.insert(name.clone(), Value::from(Serde(value)));
        }
        if let Some(effort) = &request.prompt.reasoning_effort {
            context.insert("reasoning_effort".to_owned(), Value::from(effort.as_str()));
        }
        let messages = request.messages.iter();
        let messages: Vec<Value> = messages
            .map(|message| Value::from(Serde(TemplateMessage { message, traits })))
            .collect();
        context.insert("messages".to_owned(), Value::from(messages));
        // `transformers` passes `None` for what is absent, not an undefined variable.
        let tools = request.tools.iter();
        let tools: Vec<Value> = tools.map(|tool| Value::from(Serde(&tool.value))).collect();
        let tools = if tools.is_empty() { Value::from(()) } else { Value::from(tools) };
        context.insert("tools".to_owned(), tools);
        let documents = request.prompt.documents.as_ref();
        let documents = documents.map_or(Value::from(()), |list| Value::from(Serde(list)));
        context.insert("documents".to_owned(), documents);
        context.insert(
            "add_generation_prompt".to_owned(),
            Value::from(request.prompt.add_generation_prompt),
        );
        let mut prompt = self.render_named(traits.name, context)?;
        if request.prompt.continue_final_message
            && let Some(message) = request.messages.last()
        {
            cut_after_final_message(&mut prompt, message)?;
        }
        Ok(prompt)
    }

    /// Returns the variables that every rendering has.
    fn variables(&self, now: CivilTime) -> BTreeMap<String, Value> {
        let tokens = self.special_tokens.iter();
        let mut variables: BTreeMap<String, Value> =
            tokens.map(|(name, token)| (name.clone(), Value::from(token.as_str()))).collect();
        let strftime_now = Value::from_function(move |format: &str| now.format(format));
        variables.insert("strftime_now".to_owned(), strftime_now);
        variables
    }

    fn render_named(
        &self,
        name: &str,
        context: BTreeMap<String, Value>,
    ) -> Result<String, ApiError> {
        let mut output = Output { bytes: Vec::new(), is_full: false };
        let rendered = match self.environment.get_template(name) {
            Ok(template) => {
                template.render_captured_to(Value::from(context), &mut output).map(drop)
            }
            Err(error) => Err(error),
        };
        match rendered {
            Ok(()) => String::from_utf8(output.bytes)
                .map_err(|_| ApiError::internal("the chat template wrote invalid UTF-8")),
            Err(_) if output.is_full => Err(ApiError::invalid_field(
                "messages",
                format!("the chat template writes more than {MAX_OUTPUT_BYTES} bytes"),
            )),
            Err(error) => Err(render_error(&error)),
        }
    }

    /// Finds out what a template expects: renders short chats and looks for their texts.
    fn probe(&self, name: &'static str) -> Traits {
        const NEEDLE: &str = "pharosneedle";
        let render = |messages: serde_json::Value| {
            let mut context = self.variables(CivilTime::from_unix(0));
            context.insert("messages".to_owned(), Value::from(Serde(&messages)));
            context.insert("tools".to_owned(), Value::from(()));
            context.insert("documents".to_owned(), Value::from(()));
            context.insert("add_generation_prompt".to_owned(), Value::from(false));
            self.render_named(name, context).unwrap_or_default()
        };
        let text = render(serde_json::json!([{"role": "user", "content": NEEDLE}]));
        let parts = render(serde_json::json!([
            {"role": "user", "content": [{"type": "text", "text": NEEDLE}]}
        ]));
        // A list that is printed as a whole has quotation marks around its texts.
        let reads_parts =
            parts.find(NEEDLE).is_some_and(|position| !parts[..position].ends_with(['"', '\'']));
        let form = match (text.contains(NEEDLE), reads_parts) {
            (false, true) => ContentForm::Parts,
            (true, true) => ContentForm::Both,
            (_, false) => ContentForm::Text,
        };
        let call = |content: serde_json::Value| {
            let function = serde_json::json!({"name": NEEDLE, "arguments": {"a": 1}});
            render(serde_json::json!([
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": content, "tool_calls": [
                    {"id": "abcdefghi", "type": "function", "function": function},
                ]},
            ]))
        };
        let with_null = call(serde_json::Value::Null);
        let with_text = call(serde_json::Value::from(""));
        let accepts_null = with_null.contains(NEEDLE) && !with_null.contains("None");
        Traits { name, form, accepts_null: accepts_null || !with_text.contains(NEEDLE) }
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
                list.serialize_element(&TypedPart { kind: "text", text: Some(text) })?;
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
                    let text = part_text(part);
                    let kind = if text.is_some() { "text" } else { media_kind(part) };
                    list.serialize_element(&TypedPart { kind, text })?;
                }
                list.end()
            }
        }
    }
}

/// A content part: `{"type":"text","text"}`, or a placeholder for media such as
/// `{"type":"image"}`.
struct TypedPart<'a> {
    kind: &'a str,
    text: Option<&'a str>,
}

impl Serialize for TypedPart<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("type", self.kind)?;
        if let Some(text) = self.text {
            map.serialize_entry("text", text)?;
        }
        map.end()
    }
}

fn part_text(part: &serde_json::Value) -> Option<&str> {
    let is_text = part.get("type").is_some_and(|kind| kind == "text");
    part.get("text").filter(|_| is_text).and_then(serde_json::Value::as_str)
}

/// Returns the name that templates have for the media of a part. The names are vLLM's.
fn media_kind(part: &serde_json::Value) -> &str {
    match part.get("type").and_then(serde_json::Value::as_str).unwrap_or_default() {
        "image_url" => "image",
        "input_audio" | "audio_url" => "audio",
        "video_url" => "video",
        other => other,
    }
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

/// Collects the output up to a limit.
struct Output {
    bytes: Vec<u8>,
    is_full: bool,
}

impl io::Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT_BYTES {
            self.is_full = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The message of a template's `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn render_error(error: &Error) -> ApiError {
    const MAX_MESSAGE_CHARACTERS: usize = 512;
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<Raised>() {
            let message = raised.0.chars().take(MAX_MESSAGE_CHARACTERS).collect::<String>();
            return ApiError::invalid_field("messages", message);
        }
        let is_out_of_fuel =
            cause.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel);
        if is_out_of_fuel {
            return ApiError::invalid_field(
                "messages",
                format!("the chat template needs more than {MAX_FUEL} steps for these messages"),
            );
        }
        source = cause.source();
    }
    let reason: String = error.to_string().chars().take(MAX_MESSAGE_CHARACTERS).collect();
    let message = format!("the chat template cannot render the messages: {reason}");
    ApiError::invalid_field("messages", message)
}

fn new_environment() -> Result<Environment<'static>, String> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    let mut environment = Environment::new();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(python_method);
    environment.add_filter("tojson", json::tojson);
    environment.add_function("raise_exception", raise_exception);
    Ok(environment)
}

fn add_template(
    environment: &mut Environment<'static>,
    name: &'static str,
    source: &str,
) -> Result<(), String> {
    environment
        .add_template_owned(name, without_generation_blocks(source))
        .map_err(|error| format!("invalid chat template `{name}`: {error}"))
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    let text = quoted(message);
    Err(Error::new(ErrorKind::InvalidOperation, text).with_source(Raised(message.to_owned())))
}

/// Methods of Python that templates call and minijinja's own compatibility does not have.
fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (method, value.as_str()) {
        ("removeprefix", Some(text)) => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        ("removesuffix", Some(text)) => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        ("rsplit", Some(text)) => {
            let (separator, most): (&str, Option<i64>) = from_args(args)?;
            let most = most.and_then(|most| usize::try_from(most).ok());
            let mut parts: Vec<&str> = match most {
                Some(most) => text.rsplitn(most.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().collect())
        }
        ("partition", Some(text)) => {
            let (separator,): (&str,) = from_args(args)?;
            let parts = match text.split_once(separator) {
                Some((before, after)) => vec![before, separator, after],
                None => vec![text, "", ""],
            };
            Ok(parts.into_iter().collect())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}` by a condition that is always true, with
/// the same control of whitespace.
fn without_generation_blocks(source: &str) -> String {
    let mut output = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(begin) = rest.find("{%") {
        output.push_str(&rest[..begin]);
        rest = &rest[begin..];
        let tag = Tag::at(rest);
        match tag.as_ref().map(|tag| tag.name) {
            Some("generation") => push_tag(tag.as_ref(), "if true", &mut output),
            Some("endgeneration") => push_tag(tag.as_ref(), "endif", &mut output),
            _ => {
                output.push_str("{%");
                rest = &rest[2..];
                continue;
            }
        }
        rest = &rest[tag.map_or(0, |tag| tag.length)..];
    }
    output.push_str(rest);
    output
}

/// A tag that has only a name.
struct Tag<'a> {
    name: &'a str,
    /// Control of whitespace before and after: `-`, `+` or nothing.
    before: &'a str,
    after: &'a str,
    length: usize,
}

impl<'a> Tag<'a> {
    fn at(text: &'a str) -> Option<Self> {
        // Far longer than the tags in question: a bounded look ahead.
        const MAX_LENGTH: usize = 64;
        let mut end = text.len().min(MAX_LENGTH);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let end = text[..end].find("%}")?;
        let mut inner = &text[2..end];
        let before = control(inner.get(..1));
        inner = &inner[before.len()..];
        let last = inner.len().checked_sub(1).and_then(|last| inner.get(last..));
        let after = control(last);
        inner = &inner[..inner.len() - after.len()];
        Some(Self { name: inner.trim(), before, after, length: end + 2 })
    }
}

fn control(character: Option<&str>) -> &str {
    character.filter(|character| matches!(*character, "-" | "+")).unwrap_or_default()
}

fn push_tag(tag: Option<&Tag<'_>>, text: &str, output: &mut String) {
    if let Some(tag) = tag {
        output.push_str(&format!("{{%{} {text} {}%}}", tag.before, tag.after));
    }
}

#[cfg(test)]
mod tests;
