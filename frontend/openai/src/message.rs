//! Messages of a chat: checked, and kept as the JSON values that chat templates read.
//!
//! Messages differ from what the client wrote in few ways, all of which `transformers` or vLLM do
//! before they render a template: `arguments` of tool calls are parsed from JSON text, members with
//! `null` are removed (except `content`), `reasoning` also has its older name `reasoning_content`, and
//! images and audio are taken out, so that their parts only have a type.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::{Budget, invalid_value};
use crate::media::Media;

/// The most messages of a chat.
pub const MAX_MESSAGES: usize = 16_384;
/// The most content parts of a message.
pub const MAX_PARTS: usize = 1_024;
/// The most tool calls of a message.
pub const MAX_TOOL_CALLS: usize = 128;
/// The longest name of a role, in bytes.
const MAX_ROLE_BYTES: usize = 64;

/// The types of parts that have text, and the member that has it.
const TEXT_PARTS: [TextPart; 4] = [
    TextPart { name: "text", member: "text" },
    TextPart { name: "input_text", member: "text" },
    TextPart { name: "output_text", member: "text" },
    TextPart { name: "refusal", member: "refusal" },
];
/// The types of parts of a client.
const PARTS: &str = "text, image_url, input_audio or audio_url";

struct TextPart {
    name: &'static str,
    member: &'static str,
}

/// One message of a chat.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    members: Map<String, Value>,
    media: Vec<Media>,
}

/// The content of a message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Content<'a> {
    /// `null` or absent: an assistant message that has only tool calls or reasoning.
    Absent,
    /// A text.
    Text(&'a str),
    /// Content parts: `{"type":"text","text"}`, or the type alone for an image or audio,
    /// `{"type":"image"}`.
    Parts(&'a [Value]),
}

impl Message {
    /// Checks the messages of a request. `value` is the value of the field `messages`.
    ///
    /// # Errors
    ///
    /// 400 with the dotted name of the field at fault.
    pub(crate) fn parse_all(value: Value, budget: &mut Budget) -> Result<Vec<Self>, ApiError> {
        let allowed = format_args!("a list of 1 to {MAX_MESSAGES} messages");
        let Value::Array(values) = value else {
            return Err(invalid_value("messages", &value, allowed));
        };
        if values.is_empty() || values.len() > MAX_MESSAGES {
            let message = format!("messages has {} elements: expected {allowed}", values.len());
            return Err(ApiError::invalid_field("messages", message));
        }
        values
            .into_iter()
            .enumerate()
            .map(|(index, value)| Self::parse(value, &format!("messages[{index}]"), budget))
            .collect()
    }

    /// Checks one message. `path` is its dotted name.
    ///
    /// # Errors
    ///
    /// 400 with the dotted name of the field at fault.
    pub(crate) fn parse(value: Value, path: &str, budget: &mut Budget) -> Result<Self, ApiError> {
        let Value::Object(mut members) = value else {
            return Err(invalid_value(path, &value, "an object with role and content"));
        };
        members.retain(|name, value| name == "content" || !value.is_null());

        let role = match members.get("role") {
            Some(Value::String(role)) if !role.is_empty() && role.len() <= MAX_ROLE_BYTES => role,
            Some(other) => {
                let allowed = "system, developer, user, assistant, tool \
                               or a role of the chat template";
                return Err(invalid_value(&format!("{path}.role"), other, allowed));
            }
            None => return Err(missing(&format!("{path}.role"))),
        };
        let is_assistant = role == "assistant";
        for name in ["name", "tool_call_id", "refusal"] {
            check_text(&members, path, name)?;
        }

        let media = match members.get_mut("content") {
            Some(Value::String(_)) => Vec::new(),
            Some(Value::Array(parts)) => check_parts(parts, path)?,
            Some(Value::Null) | None if is_assistant => Vec::new(),
            None => return Err(missing(&format!("{path}.content"))),
            Some(other) => {
                let allowed = if is_assistant {
                    "a string, a list of content parts or null"
                } else {
                    "a string or a list of content parts"
                };
                return Err(invalid_value(&format!("{path}.content"), other, allowed));
            }
        };
        if let Some(calls) = members.get_mut("tool_calls") {
            check_tool_calls(calls, &format!("{path}.tool_calls"), budget)?;
            if calls.as_array().is_some_and(Vec::is_empty) {
                members.shift_remove("tool_calls");
            }
        }
        copy_reasoning(&mut members, path)?;
        Ok(Self { members, media })
    }

    /// Returns the role: `system`, `developer`, `user`, `assistant`, `tool`, or another role that
    /// only the chat template may know.
    pub fn role(&self) -> &str {
        self.members.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns the content.
    pub fn content(&self) -> Content<'_> {
        match self.members.get("content") {
            Some(Value::String(text)) => Content::Text(text),
            Some(Value::Array(parts)) => Content::Parts(parts),
            _ => Content::Absent,
        }
    }

    /// Returns all members, in the client's order, as templates read them.
    pub fn members(&self) -> &Map<String, Value> {
        &self.members
    }

    /// Returns the images and audio, in the order of their parts.
    pub fn media(&self) -> &[Media] {
        &self.media
    }
}

fn missing(path: &str) -> ApiError {
    ApiError::invalid_field(path, format!("the required field `{path}` is missing"))
}

fn check_text(members: &Map<String, Value>, path: &str, name: &str) -> Result<(), ApiError> {
    match members.get(name) {
        None | Some(Value::String(_)) => Ok(()),
        Some(other) => Err(invalid_value(&format!("{path}.{name}"), other, "a string")),
    }
}

/// Checks content parts, rewrites those with text to one form, and takes images and audio out.
fn check_parts(parts: &mut [Value], path: &str) -> Result<Vec<Media>, ApiError> {
    let path = format!("{path}.content");
    if parts.len() > MAX_PARTS {
        let message = format!("{path} has {} parts: at most {MAX_PARTS} are allowed", parts.len());
        return Err(ApiError::invalid_field(path, message));
    }
    let mut media = Vec::new();
    for (index, part) in parts.iter_mut().enumerate() {
        let path = format!("{path}[{index}]");
        let text = match part {
            Value::String(text) => std::mem::take(text),
            Value::Object(members) => {
                if let Some(found) = Media::take_from(members, &path)? {
                    *part = part_of([("type", found.kind.as_str().to_owned())]);
                    media.push(found);
                    continue;
                }
                let kind = members.get("type").and_then(Value::as_str).unwrap_or_default();
                let Some(form) = TEXT_PARTS.iter().find(|form| form.name == kind) else {
                    let kind = members.get("type").unwrap_or(&Value::Null);
                    return Err(invalid_value(&format!("{path}.type"), kind, PARTS));
                };
                let path = format!("{path}.{}", form.member);
                match members.get_mut(form.member) {
                    Some(Value::String(text)) => std::mem::take(text),
                    Some(other) => return Err(invalid_value(&path, other, "a string")),
                    None => return Err(missing(&path)),
                }
            }
            other => return Err(invalid_value(&path, other, "a content part")),
        };
        *part = part_of([("type", "text".to_owned()), ("text", text)]);
    }
    Ok(media)
}

/// Returns a content part with these members.
fn part_of<const N: usize>(members: [(&str, String); N]) -> Value {
    let members = members.into_iter();
    Value::Object(members.map(|(name, text)| (name.to_owned(), Value::String(text))).collect())
}

/// Checks the tool calls of an assistant message and parses the arguments.
fn check_tool_calls(calls: &mut Value, path: &str, budget: &mut Budget) -> Result<(), ApiError> {
    let allowed = format_args!("a list of at most {MAX_TOOL_CALLS} tool calls");
    let Value::Array(calls) = calls else { return Err(invalid_value(path, calls, allowed)) };
    if calls.len() > MAX_TOOL_CALLS {
        let message = format!("{path} has {} elements: expected {allowed}", calls.len());
        return Err(ApiError::invalid_field(path, message));
    }
    for (index, call) in calls.iter_mut().enumerate() {
        let path = format!("{path}[{index}]");
        let Value::Object(call) = call else {
            return Err(invalid_value(&path, call, "an object with id, type and function"));
        };
        call.retain(|_, value| !value.is_null());
        check_text(call, &path, "id")?;
        let path = format!("{path}.function");
        let function = match call.get_mut("function") {
            Some(Value::Object(function)) => function,
            Some(other) => {
                return Err(invalid_value(&path, other, "an object with name and arguments"));
            }
            None => return Err(missing(&path)),
        };
        if !function.get("name").is_some_and(Value::is_string) {
            let name = function.get("name").unwrap_or(&Value::Null);
            return Err(invalid_value(&format!("{path}.name"), name, "a string"));
        }
        let arguments = match function.remove("arguments") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => budget.parse(&text, &format!("{path}.arguments"))?,
            Some(other) => other,
        };
        function.insert("arguments".to_owned(), arguments);
    }
    Ok(())
}

/// Gives the reasoning of an earlier answer both of its names.
fn copy_reasoning(members: &mut Map<String, Value>, path: &str) -> Result<(), ApiError> {
    const NAMES: [&str; 2] = ["reasoning", "reasoning_content"];
    for name in NAMES {
        check_text(members, path, name)?;
    }
    let Some(text) = NAMES.iter().find_map(|name| members.get(*name)).cloned() else {
        return Ok(());
    };
    for name in NAMES {
        members.entry(name).or_insert_with(|| text.clone());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: Value) -> Result<Vec<Message>, ApiError> {
        Message::parse_all(value, &mut Budget::new())
    }

    fn check_error(value: Value, param: &str, part_of_message: &str) {
        let error = parse(value).unwrap_err();
        assert_eq!(error.status, 400);
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert!(error.message.contains(part_of_message), "{}", error.message);
    }

    #[test]
    fn usual_messages() {
        let messages = parse(json!([
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b",
                {"type": "input_text", "text": "c"}]},
            {"role": "assistant", "content": null, "refusal": null, "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2]}"}},
                {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}]},
            {"role": "tool", "tool_call_id": "1", "content": "r"},
            {"role": "critic", "content": "a role of the template"},
        ]))
        .unwrap();
        assert_eq!(messages[0].content(), Content::Text("s"));
        let parts = ["a", "b", "c"].map(|text| json!({"type": "text", "text": text}));
        assert_eq!(messages[1].content(), Content::Parts(&parts));
        assert_eq!(messages[2].content(), Content::Absent);
        assert!(!messages[2].members().contains_key("refusal"));
        let calls = &messages[2].members()["tool_calls"];
        assert_eq!(calls[0]["function"]["arguments"].to_string(), r#"{"b":1,"a":[2]}"#);
        assert_eq!(calls[1]["function"]["arguments"], json!({}));
        assert_eq!(messages[4].role(), "critic");
        assert!(messages.iter().all(|message| message.media().is_empty()));
    }

    #[test]
    fn media_are_taken_out_of_their_parts() {
        let url = "data:image/png;base64,aGk=";
        let image = json!({"type": "image_url", "image_url": {"url": url}, "uuid": "u"});
        let audio = json!({"type": "input_audio", "input_audio": {"data": "aGkh"}});
        let messages = parse(json!([{"role": "user", "content": [image, "a", audio]}])).unwrap();
        let found: Vec<(&str, &str)> =
            messages[0].media().iter().map(|one| (&*one.path, &*one.base64)).collect();
        let expected = [
            ("messages[0].content[0].image_url", "aGk="),
            ("messages[0].content[2].input_audio", "aGkh"),
        ];
        assert_eq!(found, expected);
        let left = [
            json!({"type": "image"}),
            json!({"type": "text", "text": "a"}),
            json!({"type": "audio"}),
        ];
        assert_eq!(messages[0].content(), Content::Parts(&left));
    }

    #[test]
    fn reasoning_has_both_names() {
        for name in ["reasoning", "reasoning_content"] {
            let messages = parse(json!([{"role": "assistant", "content": "x", name: "r"}]));
            let members = messages.unwrap()[0].members().clone();
            assert_eq!(members["reasoning"], "r");
            assert_eq!(members["reasoning_content"], "r");
        }
    }

    #[test]
    fn errors_name_the_field() {
        check_error(json!("x"), "messages", "invalid messages \"x\"");
        check_error(json!([]), "messages", "1 to 16384");
        check_error(json!([{"content": "x"}]), "messages[0].role", "missing");
        check_error(json!([{"role": 5, "content": "x"}]), "messages[0].role", "5");
        check_error(json!([{"role": "user"}]), "messages[0].content", "missing");
        check_error(json!([{"role": "user", "content": null}]), "messages[0].content", "null");
        check_error(json!([{"role": "user", "content": 7}]), "messages[0].content", "7");
        check_error(json!([{"role": "user", "content": "x", "name": 1}]), "messages[0].name", "1");
        check_error(
            json!([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "x"}]}]),
            "messages[1].content[0].type",
            "image_url",
        );
        check_error(
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            "messages[0].content[0].text",
            "missing",
        );
        check_error(
            json!([{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0].image_url",
            "null",
        );
        check_error(
            json!([{"role": "user", "content": vec![json!("x"); MAX_PARTS + 1]}]),
            "messages[0].content",
            "1025 parts",
        );
        check_error(
            json!([{"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": "{"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
            "valid JSON",
        );
        check_error(
            json!([{"role": "assistant", "tool_calls": [{"function": {}}]}]),
            "messages[0].tool_calls[0].function.name",
            "a string",
        );
    }

    #[test]
    fn arguments_within_text_have_limits_too() {
        let deep = format!("{}{}", "[".repeat(101), "]".repeat(101));
        check_error(
            json!([{"role": "assistant", "tool_calls": [
                {"function": {"name": "f", "arguments": deep}}]}]),
            "messages[0].tool_calls[0].function.arguments",
            "100 levels",
        );
    }

    #[test]
    fn many_messages_are_refused() {
        let message = json!({"role": "user", "content": "x"});
        assert!(parse(Value::Array(vec![message.clone(); MAX_MESSAGES])).is_ok());
        let many = Value::Array(vec![message; MAX_MESSAGES + 1]);
        check_error(many, "messages", "16385 elements");
    }
}
