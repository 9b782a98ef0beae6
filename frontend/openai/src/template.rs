//! Renders chat templates: Jinja as `transformers` configures it.
//!
//! Source: `transformers`, "Chat templates" and `utils/chat_template_utils.py`. Blocks are trimmed
//! (`trim_blocks`, `lstrip_blocks`), strings and dictionaries have Python's methods, loops have
//! `break` and `continue`, and the globals are `raise_exception` and `strftime_now`.
//! `{% generation %}` marks the answer for training and changes nothing here.
//!
//! A template is a program of the model's author. Fuel and the length of the output are limited; the
//! loops of a template over the messages of a client count too. Fuel counts instructions, not what an
//! instruction computes, so the frontend never compiles or renders a template: [`crate::renderer`]
//! does it in a process with limits. [`Expectations`] is the half that runs in the frontend.

mod config;
mod expectations;
mod json;
mod time;

use std::collections::BTreeMap;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Deserialize;

pub use config::{TemplateSource, TokenizerConfig};
pub use expectations::{ContentForm, Expectations, refused};
pub use time::CivilTime;

use crate::error::quoted;
use expectations::Traits;

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

/// A chat template, or two: one for requests with tools and one for others.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    expectations: Expectations,
}

/// What is rendered, as [`Expectations::input`] writes it.
#[derive(Deserialize)]
struct Input {
    tool_use: bool,
    now: CivilTime,
    /// Of equal names, the last counts.
    variables: BTreeMap<String, Value>,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` are variables for it: `bos_token`, `eos_token`, ...
    /// Finds out what the template expects, unless that is known already.
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
        known: Option<Expectations>,
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
        add_template(&mut environment, DEFAULT, &default)?;
        if let Some(source) = &tool_use {
            add_template(&mut environment, TOOL_USE, source)?;
        }
        let mut template =
            Self { environment, special_tokens, expectations: known.unwrap_or_default() };
        if known.is_none() {
            template.environment.set_fuel(Some(MAX_PROBE_FUEL));
            template.expectations = Expectations {
                default: template.probe(DEFAULT),
                tool_use: tool_use.is_some().then(|| template.probe(TOOL_USE)),
            };
        }
        template.environment.set_fuel(Some(MAX_FUEL));
        Ok(template)
    }

    /// Returns what the template expects of messages.
    pub fn expectations(&self) -> Expectations {
        self.expectations
    }

    /// Renders a prompt. `input` is the result of [`Expectations::input`].
    ///
    /// # Errors
    ///
    /// Why the template refuses the messages (`raise_exception`), cannot render them or exceeds a
    /// limit, for the client.
    pub fn render(&self, input: &[u8]) -> Result<String, String> {
        let input: Input = serde_json::from_slice(input)
            .map_err(|error| format!("the chat template cannot read the messages: {error}"))?;
        let mut context = self.variables(input.now);
        context.extend(input.variables);
        self.render_named(if input.tool_use { TOOL_USE } else { DEFAULT }, context)
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

    fn render_named(&self, name: &str, context: BTreeMap<String, Value>) -> Result<String, String> {
        let mut output = Output { bytes: Vec::new(), is_full: false };
        let rendered = match self.environment.get_template(name) {
            Ok(template) => {
                template.render_captured_to(Value::from(context), &mut output).map(drop)
            }
            Err(error) => Err(error),
        };
        match rendered {
            Ok(()) => String::from_utf8(output.bytes)
                .map_err(|_| "the chat template writes invalid UTF-8".to_owned()),
            Err(_) if output.is_full => {
                Err(format!("the chat template writes more than {MAX_OUTPUT_BYTES} bytes"))
            }
            Err(error) => Err(render_error(&error)),
        }
    }

    /// Finds out what a template expects: renders short chats and looks for their texts.
    fn probe(&self, name: &str) -> Traits {
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
        Traits { form, accepts_null: accepts_null || !with_text.contains(NEEDLE) }
    }
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

/// Returns what went wrong, for the client.
fn render_error(error: &Error) -> String {
    const MAX_MESSAGE_CHARACTERS: usize = 512;
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(raised) = cause.downcast_ref::<Raised>() {
            return raised.0.chars().take(MAX_MESSAGE_CHARACTERS).collect::<String>();
        }
        let is_out_of_fuel =
            cause.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel);
        if is_out_of_fuel {
            return format!(
                "the chat template needs more than {MAX_FUEL} steps for these messages"
            );
        }
        source = cause.source();
    }
    let reason: String = error.to_string().chars().take(MAX_MESSAGE_CHARACTERS).collect();
    format!("the chat template cannot render the messages: {reason}")
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
