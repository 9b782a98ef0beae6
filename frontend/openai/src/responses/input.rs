//! The input of a request as the messages of a chat.
//!
//! Items of one turn of the assistant become one message, as chat templates expect it: its
//! reasoning, then its text, then its calls.

use std::collections::HashSet;

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use crate::chat::MAX_TOOL_NAME_BYTES;
use crate::error::ApiError;
use crate::json::{Budget, invalid, invalid_value};
use crate::message::{MAX_MESSAGES, MAX_PARTS, MAX_TOOL_CALLS, Message};
use crate::options::MAX_ID_BYTES;

/// The type of parts with an image.
const INPUT_IMAGE: &str = "input_image";

/// The most items of an input.
pub(crate) const MAX_ITEMS: usize = MAX_MESSAGES;

/// The types of parts that messages of a user may have.
const USER_PARTS: [&str; 2] = ["input_text", INPUT_IMAGE];
/// The types of parts that other messages of a client may have.
const INPUT_PARTS: [&str; 1] = ["input_text"];
/// The types of parts that messages of the assistant may have.
const OUTPUT_PARTS: [&str; 3] = ["output_text", "refusal", "input_text"];

/// Returns the messages of a chat with these instructions and this input.
pub(crate) fn messages(
    instructions: Option<&str>,
    input: &RawValue,
    budget: &mut Budget,
) -> Result<Vec<Message>, ApiError> {
    let allowed = format_args!("a string or a list of 1 to {MAX_ITEMS} items");
    let mut dialog =
        Dialog { messages: Vec::new(), turn: Turn::default(), call_ids: HashSet::new(), budget };
    if let Some(text) = instructions {
        dialog.push(json!({"role": "system", "content": text}), "instructions")?;
    }
    match dialog.budget.parse(input.get(), "input")? {
        Value::String(text) => dialog.push(json!({"role": "user", "content": text}), "input")?,
        Value::Array(items) if (1..=MAX_ITEMS).contains(&items.len()) => {
            for (index, item) in items.into_iter().enumerate() {
                dialog.take(item, &format!("input[{index}]"))?;
            }
            dialog.end_turn()?;
        }
        Value::Array(items) => {
            let message = format!("input has {} items: expected {allowed}", items.len());
            return Err(ApiError::invalid_field("input", message));
        }
        other => return Err(invalid_value("input", &other, allowed)),
    }
    Ok(dialog.messages)
}

/// Items that became messages.
struct Dialog<'a> {
    messages: Vec<Message>,
    turn: Turn,
    /// The ids of all calls.
    call_ids: HashSet<String>,
    budget: &'a mut Budget,
}

/// A message of the assistant to which more items may belong.
#[derive(Default)]
struct Turn {
    /// The path of the first item.
    path: String,
    reasoning: Option<String>,
    content: Option<Value>,
    calls: Vec<Value>,
}

impl Turn {
    fn is_empty(&self) -> bool {
        self.reasoning.is_none() && self.content.is_none() && self.calls.is_empty()
    }
}

impl Dialog<'_> {
    fn push(&mut self, message: Value, path: &str) -> Result<(), ApiError> {
        self.messages.push(Message::parse(message, path, self.budget)?);
        Ok(())
    }

    fn take(&mut self, item: Value, path: &str) -> Result<(), ApiError> {
        const ALLOWED: &str = "message, function_call, function_call_output or reasoning";
        let Value::Object(mut item) = item else {
            return Err(invalid_value(path, &item, "an object with a type, or a role and content"));
        };
        item.retain(|_, value| !value.is_null());
        let kind = match item.get("type") {
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => return Err(invalid_value(&format!("{path}.type"), other, ALLOWED)),
            None if item.contains_key("role") || !item.contains_key("id") => "message",
            None => "item_reference",
        };
        match kind {
            "message" => self.take_message(&mut item, path),
            "reasoning" => self.take_reasoning(&item, path),
            "function_call" => self.take_call(&mut item, path),
            "function_call_output" => self.take_call_output(&mut item, path),
            "item_reference" => Err(ApiError::invalid_field(
                path,
                "item_reference is not supported: the server stores no responses; send the item \
                 itself",
            )),
            other => Err(invalid(&format!("{path}.type"), &format!("\"{other}\""), ALLOWED)),
        }
    }

    fn take_message(&mut self, item: &mut Map<String, Value>, path: &str) -> Result<(), ApiError> {
        let role = match item.get("role") {
            Some(Value::String(role)) => role.clone(),
            other => {
                let role = other.unwrap_or(&Value::Null);
                return Err(invalid_role(path, role));
            }
        };
        let parts: &[&str] = match role.as_str() {
            "user" => &USER_PARTS,
            "system" | "developer" => &INPUT_PARTS,
            "assistant" => &OUTPUT_PARTS,
            _ => return Err(invalid_role(path, &Value::String(role))),
        };
        let content = content(item.remove("content"), &format!("{path}.content"), parts)?;
        if role != "assistant" {
            self.end_turn()?;
            return self.push(json!({"role": role, "content": content}), path);
        }
        if self.turn.content.is_some() || !self.turn.calls.is_empty() {
            self.end_turn()?;
        }
        self.begin_item(path);
        self.turn.content = Some(content);
        Ok(())
    }

    fn take_reasoning(&mut self, item: &Map<String, Value>, path: &str) -> Result<(), ApiError> {
        let mut text = texts(item, path, "content", "reasoning_text", "")?;
        if text.is_empty() {
            if item.contains_key("encrypted_content") {
                return Err(ApiError::invalid_field(
                    format!("{path}.encrypted_content"),
                    "encrypted reasoning cannot be read by this server: send the reasoning as \
                     content, or leave the item out",
                ));
            }
            text = texts(item, path, "summary", "summary_text", "\n")?;
        }
        if self.turn.content.is_some() || !self.turn.calls.is_empty() {
            self.end_turn()?;
        }
        if !text.is_empty() {
            self.begin_item(path);
            self.turn.reasoning = Some(match self.turn.reasoning.take() {
                Some(before) => format!("{before}\n{text}"),
                None => text,
            });
        }
        Ok(())
    }

    fn take_call(&mut self, item: &mut Map<String, Value>, path: &str) -> Result<(), ApiError> {
        let name = text_of(item, path, "name", MAX_TOOL_NAME_BYTES)?;
        let id = text_of(item, path, "call_id", MAX_ID_BYTES)?;
        let path_of_arguments = format!("{path}.arguments");
        let arguments = match item.get("arguments") {
            Some(Value::String(text)) if text.trim().is_empty() => json!({}),
            Some(Value::String(text)) => self.budget.parse(text, &path_of_arguments)?,
            other => other.cloned().unwrap_or(Value::Null),
        };
        if !arguments.is_object() {
            let allowed = "a string with a JSON object";
            return Err(invalid_value(&path_of_arguments, &arguments, allowed));
        }
        if self.turn.calls.len() >= MAX_TOOL_CALLS {
            let message = format!("more than {MAX_TOOL_CALLS} calls without another item");
            return Err(ApiError::invalid_field(path, message));
        }
        self.begin_item(path);
        self.turn.calls.push(json!({
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }));
        self.call_ids.insert(id);
        Ok(())
    }

    fn take_call_output(
        &mut self,
        item: &mut Map<String, Value>,
        path: &str,
    ) -> Result<(), ApiError> {
        let id = text_of(item, path, "call_id", MAX_ID_BYTES)?;
        if !self.call_ids.contains(&id) {
            let allowed = "the call_id of an earlier function_call of the input";
            return Err(invalid(&format!("{path}.call_id"), &format!("\"{id}\""), allowed));
        }
        let output = content(item.remove("output"), &format!("{path}.output"), &INPUT_PARTS)?;
        self.end_turn()?;
        self.push(json!({"role": "tool", "tool_call_id": id, "content": output}), path)
    }

    fn begin_item(&mut self, path: &str) {
        if self.turn.is_empty() {
            path.clone_into(&mut self.turn.path);
        }
    }

    /// Ends the message of the assistant.
    fn end_turn(&mut self) -> Result<(), ApiError> {
        let turn = std::mem::take(&mut self.turn);
        if turn.is_empty() {
            return Ok(());
        }
        let mut message = Map::new();
        message.insert("role".to_owned(), Value::from("assistant"));
        message.insert("content".to_owned(), turn.content.unwrap_or(Value::Null));
        if let Some(text) = turn.reasoning {
            message.insert("reasoning".to_owned(), Value::String(text));
        }
        if !turn.calls.is_empty() {
            message.insert("tool_calls".to_owned(), Value::Array(turn.calls));
        }
        self.push(Value::Object(message), &turn.path)
    }
}

fn invalid_role(path: &str, role: &Value) -> ApiError {
    invalid_value(&format!("{path}.role"), role, "user, assistant, system or developer")
}

/// Returns a required text of 1 to `max_bytes` bytes.
fn text_of(
    item: &mut Map<String, Value>,
    path: &str,
    name: &str,
    max_bytes: usize,
) -> Result<String, ApiError> {
    match item.remove(name) {
        Some(Value::String(text)) if (1..=max_bytes).contains(&text.len()) => Ok(text),
        other => {
            let allowed = format_args!("a string of 1 to {max_bytes} bytes");
            Err(invalid_value(&format!("{path}.{name}"), &other.unwrap_or(Value::Null), allowed))
        }
    }
}

/// Returns the content of a message: a text, or parts in the form of chats.
fn content(value: Option<Value>, path: &str, allowed: &[&str]) -> Result<Value, ApiError> {
    let parts = match value {
        Some(text @ Value::String(_)) => return Ok(text),
        Some(Value::Array(parts)) => parts,
        other => {
            let allowed = "a string or a list of content parts";
            return Err(invalid_value(path, &other.unwrap_or(Value::Null), allowed));
        }
    };
    if parts.len() > MAX_PARTS {
        let message = format!("{path} has {} parts: at most {MAX_PARTS} are allowed", parts.len());
        return Err(ApiError::invalid_field(path, message));
    }
    let parts = parts.into_iter().enumerate();
    let parts = parts.map(|(index, part)| part_of(part, &format!("{path}[{index}]"), allowed));
    parts.collect::<Result<Vec<Value>, ApiError>>().map(Value::Array)
}

fn part_of(mut part: Value, path: &str, allowed: &[&str]) -> Result<Value, ApiError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    if kind == INPUT_IMAGE && allowed.contains(&kind) {
        if part.get("file_id").is_some_and(|id| !id.is_null()) {
            let message = "file_id is not supported: the server stores no files";
            return Err(ApiError::invalid_field(format!("{path}.file_id"), message));
        }
        let url = part.get_mut("image_url").map(Value::take).unwrap_or_default();
        return Ok(json!({"type": "image_url", "image_url": url}));
    }
    if kind.starts_with("input_") && !allowed.contains(&kind) {
        return Err(ApiError::invalid_field(
            format!("{path}.type"),
            format!(
                "{} is not supported here: allowed are {}",
                crate::error::quoted(kind),
                allowed.join(", ")
            ),
        ));
    }
    if !allowed.contains(&kind) {
        let path = format!("{path}.type");
        let kind = part.get("type").unwrap_or(&Value::Null);
        return Err(invalid_value(&path, kind, allowed.join(", ")));
    }
    let member = if kind == "refusal" { "refusal" } else { "text" };
    match part.get_mut(member).map(Value::take) {
        Some(Value::String(text)) => Ok(json!({"type": "text", "text": text})),
        other => {
            let path = format!("{path}.{member}");
            Err(invalid_value(&path, &other.unwrap_or(Value::Null), "a string"))
        }
    }
}

/// Joins the texts of a list of parts of one type; empty if there is no list.
fn texts(
    item: &Map<String, Value>,
    path: &str,
    name: &str,
    kind: &str,
    separator: &str,
) -> Result<String, ApiError> {
    let path = format!("{path}.{name}");
    let allowed = format_args!("a list of at most {MAX_PARTS} objects with type {kind} and text");
    let parts = match item.get(name) {
        None => return Ok(String::new()),
        Some(Value::Array(parts)) if parts.len() <= MAX_PARTS => parts,
        Some(other) => return Err(invalid_value(&path, other, allowed)),
    };
    let mut texts = Vec::new();
    for part in parts {
        match (part.get("type"), part.get("text")) {
            (Some(Value::String(own)), Some(Value::String(text))) if own == kind => {
                texts.push(text.as_str());
            }
            _ => return Err(invalid_value(&path, part, allowed)),
        }
    }
    Ok(texts.join(separator))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(instructions: Option<&str>, input: &Value) -> Result<Vec<Message>, ApiError> {
        let raw = RawValue::from_string(input.to_string()).unwrap();
        messages(instructions, &raw, &mut Budget::new())
    }

    fn check(input: &Value, expected: &Value) {
        let messages = read(None, input).unwrap();
        let members: Vec<&Map<String, Value>> = messages.iter().map(Message::members).collect();
        assert_eq!(json!(members), *expected, "{input}");
    }

    fn check_error(input: &Value, param: &str, part_of_message: &str) {
        let error = read(None, input).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        assert!(error.message.contains(part_of_message), "{}", error.message);
    }

    #[test]
    fn texts_and_messages() {
        check(&json!("hi"), &json!([{"role": "user", "content": "hi"}]));
        let both = read(Some("be brief"), &json!("hi")).unwrap();
        assert_eq!((both[0].role(), both[1].role()), ("system", "user"));
        check(
            &json!([
                {"role": "developer", "content": "d"},
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                 "phase": null, "content": [
                    {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "no"}]},
            ]),
            &json!([
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [
                    {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {"role": "assistant", "content": [
                    {"type": "text", "text": "c"}, {"type": "text", "text": "no"}]},
            ]),
        );
    }

    #[test]
    fn images_are_those_of_chats() {
        let url = "data:image/png;base64,aGk=";
        let image = json!({"type": "input_image", "image_url": url, "detail": "auto"});
        let content = json!([{"type": "input_text", "text": "a"}, image]);
        let messages = read(None, &json!([{"role": "user", "content": content}])).unwrap();
        let [media] = messages[0].media() else { panic!("one image") };
        assert_eq!(media.path, "input[0].content[1].image_url");
        assert_eq!(media.base64, "aGk=");
    }

    #[test]
    fn items_of_one_turn_are_one_message() {
        let call = |id: &str| {
            json!({"id": "fc_1", "type": "function_call", "call_id": id,
            "name": "f", "arguments": "{\"b\": 1}", "status": "completed"})
        };
        let made = |id: &str| {
            json!({"id": id, "type": "function",
            "function": {"name": "f", "arguments": {"b": 1}}})
        };
        check(
            &json!([
                {"role": "user", "content": "u"},
                {"id": "rs_1", "type": "reasoning", "summary": [], "content": [
                    {"type": "reasoning_text", "text": "hm"}], "encrypted_content": null},
                {"role": "assistant", "content": "a"},
                call("c1"),
                call("c2"),
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "function_call_output", "call_id": "c2", "output": [
                    {"type": "input_text", "text": "2"}]},
                {"type": "reasoning", "id": "rs_2", "summary": [
                    {"type": "summary_text", "text": "x"}, {"type": "summary_text", "text": "y"}]},
                {"role": "assistant", "content": "b"},
                {"role": "assistant", "content": "c"},
            ]),
            &json!([
                {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a", "reasoning": "hm",
                 "tool_calls": [made("c1"), made("c2")], "reasoning_content": "hm"},
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}]},
                {"role": "assistant", "content": "b", "reasoning": "x\ny",
                 "reasoning_content": "x\ny"},
                {"role": "assistant", "content": "c"},
            ]),
        );
    }

    #[test]
    fn errors_name_the_item() {
        check_error(&json!(5), "input", "a string or a list");
        check_error(&json!([]), "input", "0 items");
        check_error(&json!(["a"]), "input[0]", "an object");
        check_error(&json!([{"content": "a"}]), "input[0].role", "developer");
        check_error(&json!([{"role": "tool", "content": "a"}]), "input[0].role", "\"tool\"");
        check_error(&json!([{"role": "user"}]), "input[0].content", "a string or a list");
        check_error(&json!([{"id": "msg_1"}]), "input[0]", "item_reference");
        check_error(&json!([{"type": "item_reference", "id": "m"}]), "input[0]", "stores no");
        check_error(&json!([{"type": "web_search_call"}]), "input[0].type", "\"web_search_call\"");
        check_error(&json!([{"type": 7}]), "input[0].type", "7");
        let part = |part: Value| json!([{"role": "user", "content": [part]}]);
        check_error(&part(json!("a")), "input[0].content[0].type", "input_text");
        check_error(
            &part(json!({"type": "text", "text": "a"})),
            "input[0].content[0].type",
            "text",
        );
        check_error(
            &part(json!({"type": "input_image", "image_url": "data:,"})),
            "input[0].content[0].image_url",
            "base64",
        );
        check_error(
            &part(json!({"type": "input_image", "file_id": "f"})),
            "input[0].content[0].file_id",
            "stores no files",
        );
        check_error(
            &part(json!({"type": "input_file", "file_id": "f"})),
            "input[0].content[0].type",
            "input_file is not supported",
        );
        check_error(
            &part(json!({"type": "input_text", "text": 1})),
            "input[0].content[0].text",
            "a string",
        );
        check_error(&part(json!({"type": "input_text"})), "input[0].content[0].text", "null");
        check_error(
            &json!([{"role": "user", "content": vec![json!(1); MAX_PARTS + 1]}]),
            "input[0].content",
            "1025 parts",
        );
        let call = |arguments: Value| {
            json!([{"type": "function_call", "call_id": "c",
            "name": "f", "arguments": arguments}])
        };
        for arguments in [json!("[1]"), json!("\"{}\""), json!(null), json!(1)] {
            check_error(&call(arguments), "input[0].arguments", "JSON object");
        }
        check_error(&call(json!("{")), "input[0].arguments", "valid JSON");
        check_error(
            &json!([{"type": "function_call", "name": "f", "arguments": "{}"}]),
            "input[0].call_id",
            "1 to 256",
        );
        check_error(
            &json!([{"type": "function_call_output", "call_id": "c", "output": "x"}]),
            "input[0].call_id",
            "an earlier function_call",
        );
        check_error(
            &json!([{"type": "reasoning", "summary": [], "encrypted_content": "x"}]),
            "input[0].encrypted_content",
            "cannot be read",
        );
        check_error(
            &json!([{"type": "reasoning", "content": [{"type": "x"}]}]),
            "input[0].content",
            "reasoning_text",
        );
        let many = vec![json!({"role": "user", "content": "a"}); MAX_ITEMS + 1];
        check_error(&json!(many), "input", "16385 items");
        let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
        check_error(&json!(vec![call; MAX_TOOL_CALLS + 1]), "input[128]", "more than 128 calls");
    }
}
