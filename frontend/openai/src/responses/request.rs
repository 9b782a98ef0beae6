//! Requests of `POST /v1/responses`. Each becomes a chat, so that both forms of the API have the
//! same templates, tools and constraints.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::input::messages;
use crate::chat::{
    ChatRequest, MAX_EFFORT_BYTES, MAX_TOOL_NAME_BYTES, MAX_TOOLS, PromptOptions, Tool, ToolChoice,
    check_forced, name_of_function,
};
use crate::error::ApiError;
use crate::json::{Budget, Fields, invalid, invalid_value};
use crate::options::{MAX_ID_BYTES, RequestOptions};
use crate::sampling::{Form, MAX_LOGPROBS, Sampling, small};
use crate::structured::{MAX_SCHEMA_NAME_BYTES, Structured, StructuredOutput};

/// The most pairs of `metadata`, and the longest of their names and values in bytes.
const MAX_METADATA: usize = 16;
const MAX_METADATA_NAME_BYTES: usize = 256;
const MAX_METADATA_VALUE_BYTES: usize = 2_048;
/// The most elements of `include`.
const MAX_INCLUDED: usize = 16;
/// The longest description of a schema, in bytes.
const MAX_DESCRIPTION_BYTES: usize = 16 * 1_024;

/// What `include` can ask for.
const LOGPROBS: &str = "message.output_text.logprobs";
/// Reasoning is never encrypted here, so that clients can always send it back.
const ENCRYPTED_REASONING: &str = "reasoning.encrypted_content";

/// A field that this API does not have, and what it has instead.
struct Foreign {
    name: &'static str,
    instead: &'static str,
}

/// Fields of the other forms of the API. Ignoring them would change what a client gets.
const FOREIGN: [Foreign; 9] = [
    Foreign { name: "messages", instead: "input" },
    Foreign { name: "max_tokens", instead: "max_output_tokens" },
    Foreign { name: "max_completion_tokens", instead: "max_output_tokens" },
    Foreign { name: "response_format", instead: "text.format" },
    Foreign { name: "reasoning_effort", instead: "reasoning.effort" },
    Foreign { name: "logprobs", instead: "top_logprobs" },
    Foreign { name: "verbosity", instead: "text.verbosity" },
    Foreign { name: "functions", instead: "tools" },
    Foreign { name: "function_call", instead: "tool_choice" },
];

/// A field that this server cannot honour, and why.
struct Refused {
    name: &'static str,
    reason: &'static str,
}

const REFUSED: [Refused; 5] = [
    Refused {
        name: "previous_response_id",
        reason: "the server stores no responses: send the earlier items in input",
    },
    Refused {
        name: "conversation",
        reason: "the server stores no conversations: send the earlier items in input",
    },
    Refused { name: "prompt", reason: "the server stores no prompts: send the text in input" },
    Refused { name: "context_management", reason: "the server does not shorten inputs" },
    Refused { name: "moderation", reason: "the server has no moderation" },
];

/// What a response repeats of its request.
#[derive(Debug, Clone, PartialEq)]
pub struct Echo {
    /// The text before the input.
    pub instructions: Option<String>,
    /// The most calls of tools that the server runs. It runs none, so that this has no effect.
    pub max_tool_calls: Option<u32>,
    /// At most 16 pairs of texts.
    pub metadata: Map<String, Value>,
    /// Identifies requests with a common prefix.
    pub prompt_cache_key: Option<String>,
    /// Identifies the user to a moderation.
    pub safety_identifier: Option<String>,
    /// The user.
    pub user: Option<String>,
    /// The format of the text, as the client wrote it.
    pub text_format: Value,
    /// Which tools the model calls, as the client wrote it.
    pub tool_choice: Value,
    /// The tools, as the client wrote them, with all required members.
    pub tools: Vec<Value>,
    /// The number of log probabilities at each position.
    pub top_logprobs: u32,
}

/// A checked request of `POST /v1/responses`.
#[derive(Debug, Clone, PartialEq)]
pub struct ResponsesRequest {
    /// The chat that answers the request.
    pub chat: ChatRequest,
    /// What the response repeats.
    pub echo: Echo,
}

impl ResponsesRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let mut budget = Budget::new();
        refuse(&mut fields)?;
        let options = RequestOptions::read(&mut fields, &mut budget)?;
        if options.return_token_ids {
            let message = "return_token_ids is not available: responses have no member for them";
            return Err(ApiError::invalid_field("return_token_ids", message));
        }

        let instructions = read_instructions(&mut fields)?;
        let Some(input) = fields.take("input") else { return Err(fields.missing("input")) };
        let messages = messages(instructions.as_deref(), input, &mut budget)?;
        let (tools, tools_of_client) = read_tools(&mut fields, &mut budget)?;
        let (tool_choice, choice_of_client) = read_tool_choice(&mut fields, &tools)?;

        const FORM: Form = Form { max_tokens: &["max_output_tokens"], min_max_tokens: 1 };
        let mut sampling = Sampling::read(&mut fields, FORM, &mut budget)?;
        if sampling.choices_per_prompt() > 1 {
            let n = sampling.choices_per_prompt();
            let message = format!("invalid n {n}: expected 1, because a response has one choice");
            return Err(ApiError::invalid_field("n", message));
        }
        let top_logprobs = small(fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?).unwrap_or(0);
        let includes_logprobs = read_include(&mut fields)?;
        sampling.logprobs = (includes_logprobs || top_logprobs > 0).then_some(top_logprobs);
        let (format, text_format) = read_text(&mut fields, &mut budget)?;
        if format.is_some() && sampling.structured.is_some() {
            return Err(ApiError::invalid_field(
                "structured_outputs",
                "text.format and structured_outputs exclude each other: use one of them",
            ));
        }
        sampling.structured = format.or(sampling.structured);
        if sampling.structured.is_some() && tool_choice.is_forced() {
            return Err(ApiError::invalid_field(
                "tool_choice",
                "a tool_choice that forces a call excludes text.format and structured_outputs",
            ));
        }
        options.add_extra_args(&mut sampling.extra_args);

        let mut prompt = PromptOptions::read(&mut fields, &mut budget)?;
        prompt.reasoning_effort = read_effort(&mut fields)?;
        check_values_without_effect(&mut fields)?;
        let echo = Echo {
            instructions,
            max_tool_calls: small(fields.integer("max_tool_calls", 1..=i64::from(u32::MAX))?),
            metadata: read_metadata(&mut fields, &mut budget)?,
            prompt_cache_key: fields.text("prompt_cache_key", MAX_ID_BYTES)?,
            safety_identifier: fields.text("safety_identifier", MAX_ID_BYTES)?,
            user: fields.text("user", MAX_ID_BYTES)?,
            text_format,
            tool_choice: choice_of_client,
            tools: tools_of_client,
            top_logprobs,
        };
        let chat = ChatRequest {
            messages,
            tools,
            tool_choice,
            parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
            prompt,
            include_reasoning: fields.boolean("include_reasoning")?.unwrap_or(true),
            echo: false,
            sampling,
            options,
            unknown: fields.unknown(),
        };
        Ok(Self { chat, echo })
    }
}

/// Refuses fields of other APIs, and fields that need what this server does not have.
fn refuse(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    for Foreign { name, instead } in FOREIGN {
        if fields.take(name).is_some() {
            let message = format!("{name} is not a field of /v1/responses: use {instead} instead");
            return Err(ApiError::invalid_field(name, message));
        }
    }
    for Refused { name, reason } in REFUSED {
        if fields.take(name).is_some() {
            let message = format!("{name} is not supported: {reason}");
            return Err(ApiError::invalid_field(name, message));
        }
    }
    if fields.boolean("background")? == Some(true) {
        let message = "background true is not supported: the server stores no responses; use a \
                       stream";
        return Err(ApiError::invalid_field("background", message));
    }
    if let Some(options) = fields.take("stream_options") {
        let mut options = Fields::of_member(options, "stream_options")?;
        if options.boolean("include_obfuscation")? == Some(true) {
            return Err(ApiError::invalid_field(
                "stream_options.include_obfuscation",
                "include_obfuscation true is not supported: events have no obfuscation",
            ));
        }
    }
    Ok(())
}

/// Returns the instructions, which are limited by the size of the body as messages are.
fn read_instructions(fields: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(value) = fields.take("instructions") else { return Ok(None) };
    match serde_json::from_str(value.get()) {
        Ok(text) => Ok(Some(text)),
        Err(_) => Err(invalid("instructions", value.get(), "a string")),
    }
}

/// Checks fields whose values have no effect here.
fn check_values_without_effect(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    // The server never stores a response, so the default of OpenAI's API is accepted too.
    fields.boolean("store")?;
    if let Some(value) = fields.take("truncation")
        && value.get() != "\"disabled\""
    {
        let allowed = "disabled: the server does not shorten inputs";
        return Err(invalid("truncation", value.get(), allowed));
    }
    const TIERS: [&str; 7] = ["auto", "default", "fast", "flex", "priority", "scale", "ultrafast"];
    if let Some(tier) = fields.text("service_tier", MAX_ID_BYTES)?
        && !TIERS.contains(&tier.as_str())
    {
        return Err(invalid("service_tier", &tier, TIERS.join(", ")));
    }
    Ok(())
}

/// Returns whether the client asks for log probabilities.
fn read_include(fields: &mut Fields<'_>) -> Result<bool, ApiError> {
    let allowed = format!("a list of {LOGPROBS} and {ENCRYPTED_REASONING}");
    let included = fields.list::<String>("include", MAX_INCLUDED, &allowed)?.unwrap_or_default();
    let is_known = |name: &String| [LOGPROBS, ENCRYPTED_REASONING].contains(&name.as_str());
    match included.iter().find(|name| !is_known(name)) {
        Some(other) => Err(invalid("include", &format!("\"{other}\""), allowed)),
        None => Ok(included.iter().any(|name| name == LOGPROBS)),
    }
}

/// Returns the reasoning effort for the chat template.
fn read_effort(fields: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    let Some(value) = fields.take("reasoning") else { return Ok(None) };
    let mut reasoning = Fields::of_member(value, "reasoning")?;
    for name in ["summary", "generate_summary"] {
        if let Some(summary) = reasoning.take(name)
            && summary.get() != "\"auto\""
        {
            let allowed =
                "auto: the server does not summarize reasoning, it returns the whole text";
            return Err(invalid(&reasoning.path(name), summary.get(), allowed));
        }
    }
    reasoning.text("effort", MAX_EFFORT_BYTES)
}

fn read_metadata(
    fields: &mut Fields<'_>,
    budget: &mut Budget,
) -> Result<Map<String, Value>, ApiError> {
    let metadata = fields.object("metadata", budget)?.unwrap_or_default();
    if metadata.len() > MAX_METADATA {
        let message =
            format!("metadata has {} pairs: at most {MAX_METADATA} are allowed", metadata.len());
        return Err(ApiError::invalid_field("metadata", message));
    }
    for (name, value) in &metadata {
        if name.len() > MAX_METADATA_NAME_BYTES {
            let allowed = format_args!("names of at most {MAX_METADATA_NAME_BYTES} bytes");
            return Err(invalid("metadata", name, allowed));
        }
        if value.as_str().is_none_or(|text| text.len() > MAX_METADATA_VALUE_BYTES) {
            let allowed = format_args!("a string of at most {MAX_METADATA_VALUE_BYTES} bytes");
            return Err(invalid_value(&format!("metadata.{name}"), value, allowed));
        }
    }
    Ok(metadata)
}

/// Reads the format of the text: as a constraint, and as the response repeats it.
fn read_text(
    fields: &mut Fields<'_>,
    budget: &mut Budget,
) -> Result<(Option<Structured>, Value), ApiError> {
    let text = json!({"type": "text"});
    let Some(value) = fields.take("text") else { return Ok((None, text)) };
    let mut members = Fields::of_member(value, "text")?;
    if let Some(verbosity) = members.take("verbosity")
        && !["\"low\"", "\"medium\"", "\"high\""].contains(&verbosity.get())
    {
        return Err(invalid("text.verbosity", verbosity.get(), "low, medium or high"));
    }
    match members.take("format") {
        Some(value) => read_format(value, budget),
        None => Ok((None, text)),
    }
}

fn read_format(
    value: &RawValue,
    budget: &mut Budget,
) -> Result<(Option<Structured>, Value), ApiError> {
    let mut format = Fields::of_member(value, "text.format")?;
    let Some(kind) = format.take("type") else { return Err(format.missing("type")) };
    match kind.get() {
        "\"text\"" => Ok((None, json!({"type": "text"}))),
        "\"json_object\"" => {
            let structured = StructuredOutput::JsonObject.of_field("text.format");
            Ok((Some(structured), json!({"type": "json_object"})))
        }
        "\"json_schema\"" => {
            let Some(name) = format.text("name", MAX_SCHEMA_NAME_BYTES)? else {
                return Err(format.missing("name"));
            };
            let Some(schema) = format.object("schema", budget)?.map(Value::Object) else {
                return Err(format.missing("schema"));
            };
            let strict = format.boolean("strict")?;
            let echo = json!({
                "type": "json_schema",
                "name": name,
                "description": format.text("description", MAX_DESCRIPTION_BYTES)?,
                "schema": schema.clone(),
                "strict": strict,
            });
            let output = StructuredOutput::JsonSchema { schema, name: Some(name), strict };
            Ok((Some(output.of_field("text.format")), echo))
        }
        other => Err(invalid("text.format.type", other, "text, json_object or json_schema")),
    }
}

/// Reads the tools: in the form of chats, and as the response repeats them.
fn read_tools(
    fields: &mut Fields<'_>,
    budget: &mut Budget,
) -> Result<(Vec<Tool>, Vec<Value>), ApiError> {
    let Some(value) = fields.take("tools") else { return Ok((Vec::new(), Vec::new())) };
    let allowed = format_args!("a list of at most {MAX_TOOLS} tools");
    let values = match budget.parse(value.get(), "tools")? {
        Value::Array(values) if values.len() <= MAX_TOOLS => values,
        Value::Array(values) => {
            let message = format!("tools has {} elements: expected {allowed}", values.len());
            return Err(ApiError::invalid_field("tools", message));
        }
        other => return Err(invalid_value("tools", &other, allowed)),
    };
    let tools = values.into_iter().enumerate();
    let tools = tools.map(|(index, value)| read_tool(value, &format!("tools[{index}]")));
    tools.collect()
}

fn read_tool(value: Value, path: &str) -> Result<(Tool, Value), ApiError> {
    let Value::Object(mut echo) = value else {
        return Err(invalid_value(path, &value, "an object with type, name and parameters"));
    };
    if echo.get("type").and_then(Value::as_str) != Some("function") {
        let kind = echo.get("type").unwrap_or(&Value::Null);
        let allowed = "function: the server itself runs no tools";
        return Err(invalid_value(&format!("{path}.type"), kind, allowed));
    }
    for name in ["async", "defer_loading"] {
        if echo.get(name).is_some_and(|value| *value != Value::Bool(false) && !value.is_null()) {
            let message = format!("{name} is not supported: every tool is in the prompt");
            return Err(ApiError::invalid_field(format!("{path}.{name}"), message));
        }
    }
    let name = name_of_function(&echo, path)?;
    if let Some(strict) = echo.get("strict")
        && !(strict.is_boolean() || strict.is_null())
    {
        return Err(invalid_value(&format!("{path}.strict"), strict, "true or false"));
    }
    let mut function = echo.clone();
    function.shift_remove("type");
    for required in ["parameters", "strict"] {
        echo.entry(required).or_insert(Value::Null);
    }
    let value = json!({"type": "function", "function": function});
    Ok((Tool { name, value }, Value::Object(echo)))
}

/// Reads the choice of tools, and as the response repeats it.
fn read_tool_choice(
    fields: &mut Fields<'_>,
    tools: &[Tool],
) -> Result<(ToolChoice, Value), ApiError> {
    const PATH: &str = "tool_choice";
    const ALLOWED: &str = "none, auto, required or {\"type\":\"function\",\"name\":...}";
    let choice = match fields.take(PATH) {
        None => ToolChoice::Auto,
        Some(value) => match value.get() {
            "\"none\"" => ToolChoice::None,
            "\"auto\"" => ToolChoice::Auto,
            "\"required\"" => ToolChoice::Required,
            object if object.starts_with('{') => {
                let mut members = Fields::of_member(value, PATH)?;
                let kind = members.take("type").map_or("null", RawValue::get);
                if kind != "\"function\"" {
                    return Err(invalid("tool_choice.type", kind, "function"));
                }
                let Some(name) = members.text("name", MAX_TOOL_NAME_BYTES)? else {
                    return Err(members.missing("name"));
                };
                ToolChoice::Function(name)
            }
            other => return Err(invalid(PATH, other, ALLOWED)),
        },
    };
    check_forced(&choice, tools, "tool_choice.name")?;
    let echo = match &choice {
        ToolChoice::None => Value::from("none"),
        ToolChoice::Auto => Value::from("auto"),
        ToolChoice::Required => Value::from("required"),
        ToolChoice::Function(name) => json!({"type": "function", "name": name}),
    };
    match choice {
        ToolChoice::Auto if tools.is_empty() => Ok((ToolChoice::None, echo)),
        choice => Ok((choice, echo)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Content;

    fn parse(rest: &str) -> Result<ResponsesRequest, ApiError> {
        ResponsesRequest::parse(format!(r#"{{"input":"hi"{rest}}}"#).as_bytes())
    }

    fn check_error(rest: &str, param: &str, part_of_message: &str) {
        let error = parse(rest).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
        assert!(error.message.contains(part_of_message), "{}", error.message);
    }

    const TOOLS: &str = r#","tools":[{"type":"function","name":"f","description":"d",
        "parameters":{"type":"object"},"strict":true},{"type":"function","name":"g"}]"#;

    #[test]
    fn defaults() {
        let ResponsesRequest { chat, echo } = parse("").unwrap();
        assert_eq!(chat.messages[0].content(), Content::Text("hi"));
        assert_eq!(chat.tool_choice, ToolChoice::None);
        assert_eq!(echo.tool_choice, "auto");
        assert_eq!(echo.text_format, json!({"type": "text"}));
        assert!(chat.parallel_tool_calls && chat.include_reasoning);
        assert_eq!(chat.sampling, Sampling::default());
        assert!(chat.unknown.is_empty());
    }

    #[test]
    fn fields_become_those_of_a_chat() {
        let request = parse(
            r#","model":"m","instructions":"be brief","max_output_tokens":9,"temperature":0.5,
            "top_p":0.9,"top_k":3,"seed":1,"stop":"x","stream":true,"parallel_tool_calls":false,
            "reasoning":{"effort":"high","summary":"auto"},"store":true,"background":false,
            "truncation":"disabled","metadata":{"a":"b"},"user":"u","prompt_cache_key":"k",
            "safety_identifier":"s","service_tier":"flex","max_tool_calls":2,"conversation":null,
            "top_logprobs":2,"include":["reasoning.encrypted_content"],"text":{"verbosity":"low"},
            "stream_options":{"include_obfuscation":false},"vllm_xargs":{"a":1},"other":1"#,
        );
        let ResponsesRequest { chat, echo } = request.unwrap();
        assert_eq!(chat.messages[0].role(), "system");
        assert_eq!((chat.sampling.max_tokens, chat.sampling.top_k), (Some(9), Some(3)));
        assert_eq!(chat.sampling.logprobs, Some(2));
        assert_eq!(chat.prompt.reasoning_effort.as_deref(), Some("high"));
        assert!(chat.options.stream.is_some() && !chat.parallel_tool_calls);
        assert_eq!(chat.sampling.extra_args["a"], 1);
        assert_eq!(chat.unknown, ["other"]);
        assert_eq!(echo.metadata["a"], "b");
        assert_eq!((echo.user.as_deref(), echo.max_tool_calls), (Some("u"), Some(2)));
        let included = parse(r#","include":["message.output_text.logprobs"]"#).unwrap();
        assert_eq!(included.chat.sampling.logprobs, Some(0));
    }

    #[test]
    fn tools_have_the_form_of_chats() {
        let ResponsesRequest { chat, echo } = parse(TOOLS).unwrap();
        assert_eq!(
            chat.tools[0].value,
            json!({"type": "function", "function": {"name": "f", "description": "d",
                "parameters": {"type": "object"}, "strict": true}})
        );
        assert_eq!(chat.tool_choice, ToolChoice::Auto);
        assert_eq!(
            echo.tools[1],
            json!({"type": "function", "name": "g", "parameters": null, "strict": null})
        );
        let choice = |choice: &str| {
            let request = parse(&format!("{TOOLS},\"tool_choice\":{choice}")).unwrap();
            (request.chat.tool_choice, request.echo.tool_choice)
        };
        assert_eq!(choice("\"none\""), (ToolChoice::None, json!("none")));
        assert_eq!(choice("\"required\""), (ToolChoice::Required, json!("required")));
        let function = json!({"type": "function", "name": "g"});
        assert_eq!(choice(&function.to_string()), (ToolChoice::Function("g".to_owned()), function));
        assert!(parse(r#","tools":[]"#).unwrap().chat.tools.is_empty());
    }

    #[test]
    fn formats_of_the_text() {
        let structured = |format: &str| {
            let request = parse(&format!(r#","text":{{"format":{format}}}"#)).unwrap();
            (request.chat.sampling.structured.map(|own| own.to_vllm()), request.echo.text_format)
        };
        assert_eq!(structured(r#"{"type":"text"}"#).0, None);
        let (object, echo) = structured(r#"{"type":"json_object"}"#);
        assert_eq!(object.as_deref(), Some(r#"{"json_object":true}"#));
        assert_eq!(echo, json!({"type": "json_object"}));
        let (schema, echo) = structured(
            r#"{"type":"json_schema","name":"n","schema":{"type":"object"},"strict":true}"#,
        );
        assert_eq!(schema.as_deref(), Some(r#"{"json":{"type":"object"}}"#));
        assert_eq!(echo["schema"], json!({"type": "object"}));
        assert_eq!((&echo["name"], &echo["strict"]), (&json!("n"), &json!(true)));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused() {
        for (name, part) in [
            ("previous_response_id", "stores no responses"),
            ("conversation", "stores no conversations"),
            ("prompt", "stores no prompts"),
            ("context_management", "does not shorten"),
            ("moderation", "no moderation"),
            ("messages", "use input"),
            ("max_tokens", "use max_output_tokens"),
            ("max_completion_tokens", "use max_output_tokens"),
            ("response_format", "use text.format"),
            ("reasoning_effort", "use reasoning.effort"),
            ("logprobs", "use top_logprobs"),
            ("verbosity", "use text.verbosity"),
            ("functions", "use tools"),
            ("function_call", "use tool_choice"),
        ] {
            check_error(&format!(r#","{name}":"x""#), name, part);
            assert!(parse(&format!(r#","{name}":null"#)).is_ok(), "{name}");
        }
        check_error(r#","background":true"#, "background", "use a stream");
        check_error(r#","n":2"#, "n", "one choice");
        check_error(r#","return_token_ids":true"#, "return_token_ids", "no member");
        check_error(r#","truncation":"auto""#, "truncation", "does not shorten");
        check_error(
            r#","stream":true,"stream_options":{"include_obfuscation":true}"#,
            "stream_options.include_obfuscation",
            "no obfuscation",
        );
        check_error(r#","reasoning":{"summary":"detailed"}"#, "reasoning.summary", "auto");
        check_error(r#","include":["web_search_call.results"]"#, "include", "web_search_call");
        check_error(r#","tools":[{"type":"web_search"}]"#, "tools[0].type", "\"web_search\"");
        check_error(
            r#","tools":[{"type":"function","name":"f","defer_loading":true}]"#,
            "tools[0].defer_loading",
            "in the prompt",
        );
    }

    #[test]
    fn errors_name_the_field() {
        let error = ResponsesRequest::parse(b"{}").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input"));
        check_error(r#","instructions":["a"]"#, "instructions", "a string");
        check_error(r#","max_output_tokens":0"#, "max_output_tokens", "from 1");
        check_error(r#","temperature":3"#, "temperature", "0 to 2");
        check_error(r#","top_logprobs":21"#, "top_logprobs", "0 to 20");
        check_error(r#","store":1"#, "store", "true or false");
        check_error(r#","service_tier":"x""#, "service_tier", "auto");
        check_error(r#","metadata":{"a":1}"#, "metadata.a", "a string");
        check_error(r#","tools":{}"#, "tools", "at most 128");
        check_error(r#","tools":[1]"#, "tools[0]", "an object");
        check_error(r#","tools":[{"type":"function"}]"#, "tools[0].name", "1 to 256");
        check_error(
            r#","tools":[{"type":"function","name":"f","parameters":1}]"#,
            "tools[0].parameters",
            "schema",
        );
        check_error(
            r#","tools":[{"type":"function","name":"f","strict":1}]"#,
            "tools[0].strict",
            "true or false",
        );
        check_error(r#","tool_choice":"required""#, "tool_choice", "needs the field tools");
        check_error(r#","tool_choice":"any""#, "tool_choice", "\"any\"");
        check_error(r#","tool_choice":{"type":"mcp"}"#, "tool_choice.type", "\"mcp\"");
        check_error(r#","tool_choice":{"type":"function"}"#, "tool_choice.name", "missing");
        check_error(
            &format!(r#"{TOOLS},"tool_choice":{{"type":"function","name":"h"}}"#),
            "tool_choice.name",
            "one of the tools",
        );
        check_error(
            &format!(
                r#"{TOOLS},"tool_choice":"required","text":{{"format":{{"type":"json_object"}}}}"#
            ),
            "tool_choice",
            "excludes",
        );
        check_error(r#","text":{"format":{"type":"xml"}}"#, "text.format.type", "\"xml\"");
        check_error(
            r#","text":{"format":{"type":"json_schema","name":"n"}}"#,
            "text.format.schema",
            "missing",
        );
        check_error(
            r#","text":{"format":{"type":"json_schema","schema":{}}}"#,
            "text.format.name",
            "missing",
        );
        check_error(
            r#","text":{"format":{"type":"json_object"}},"structured_outputs":{"regex":"a"}"#,
            "structured_outputs",
            "exclude",
        );
        check_error(r#","text":{"verbosity":"loud"}"#, "text.verbosity", "medium");
    }

    #[test]
    fn every_prefix_and_many_mutations_are_answered() {
        let body = format!(
            r#"{{"input":[{{"role":"user","content":[{{"type":"input_text","text":"é"}}]}},
            {{"type":"function_call","call_id":"c","name":"f","arguments":"{{}}"}},
            {{"type":"function_call_output","call_id":"c","output":"1"}}]{TOOLS},
            "text":{{"format":{{"type":"text"}}}},"metadata":{{"a":"b"}},"temperature":0.1}}"#
        );
        assert!(ResponsesRequest::parse(body.as_bytes()).is_ok());
        for end in 0..body.len() {
            assert!(ResponsesRequest::parse(&body.as_bytes()[..end]).is_err());
        }
        for position in 0..body.len() {
            for byte in [b'{', b']', b'"', b'0', 0xff] {
                let mut mutated = body.clone().into_bytes();
                mutated[position] = byte;
                let _ = ResponsesRequest::parse(&mutated);
            }
        }
    }
}
