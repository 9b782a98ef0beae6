//! Requests of `POST /v1/chat/completions`.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::json::{Budget, Fields, invalid, invalid_value};
use crate::media::Media;
use crate::message::Message;
use crate::options::RequestOptions;
use crate::sampling::{Form, MAX_LOGPROBS, Sampling, small};

/// The most tools of a request.
pub const MAX_TOOLS: usize = 128;
/// The longest name of a tool, in bytes.
pub const MAX_TOOL_NAME_BYTES: usize = 256;
/// The longest chat template of a client, in bytes.
pub const MAX_TEMPLATE_BYTES: usize = 256 * 1_024;
/// The longest value of `reasoning_effort`, in bytes.
pub(crate) const MAX_EFFORT_BYTES: usize = 64;

/// Fields that have no effect on text models.
const IGNORED: [&str; 3] = ["verbosity", "prediction", "audio"];

/// A function that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// The name of the function, 1 to 256 bytes.
    pub name: String,
    /// The whole tool as the client wrote it: `{"type":"function","function":{...}}`.
    pub value: Value,
}

/// Which tools the model calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// None: the default without tools.
    #[default]
    None,
    /// The model decides: the default with tools.
    Auto,
    /// At least one.
    Required,
    /// The one with this name, which is among the tools.
    Function(String),
}

impl ToolChoice {
    /// Whether the model must call a tool.
    pub fn is_forced(&self) -> bool {
        matches!(self, Self::Required | Self::Function(_))
    }
}

/// What the chat template gets in addition to messages and tools.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptOptions {
    /// A chat template of the client. Callers decide whether to use or to refuse it; by default a
    /// server should refuse it, because a template is a program.
    pub chat_template: Option<String>,
    /// Whether the prompt ends with the beginning of an assistant message.
    pub add_generation_prompt: bool,
    /// Whether the model continues the last message.
    pub continue_final_message: bool,
    /// Whether the tokenizer adds special tokens to the rendered prompt.
    pub add_special_tokens: bool,
    /// Documents for retrieval-augmented templates.
    pub documents: Option<Value>,
    /// Variables for the template.
    pub chat_template_kwargs: Map<String, Value>,
    /// The variable `reasoning_effort` of templates.
    pub reasoning_effort: Option<String>,
}

/// A checked request of `POST /v1/chat/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The messages, at least one.
    pub messages: Vec<Message>,
    /// The tools, at most 128.
    pub tools: Vec<Tool>,
    /// Which tools the model calls.
    pub tool_choice: ToolChoice,
    /// Whether an answer may have several tool calls. If not, only the first one counts.
    pub parallel_tool_calls: bool,
    /// What the chat template gets in addition.
    pub prompt: PromptOptions,
    /// Whether the answer has the reasoning of the model.
    pub include_reasoning: bool,
    /// Whether the answer begins with the last message, if that is the assistant's.
    pub echo: bool,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Model, stream and extensions.
    pub options: RequestOptions,
    /// The names of unknown fields, at most 16. They have no effect.
    pub unknown: Vec<String>,
}

impl ChatRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let mut budget = Budget::new();
        fields.ignore(&IGNORED);
        refuse_replaced(&mut fields)?;
        check_modalities(&mut fields)?;

        let options = RequestOptions::read(&mut fields, &mut budget)?;
        let Some(messages) = fields.take("messages") else {
            return Err(fields.missing("messages"));
        };
        let messages = budget.parse(messages.get(), "messages")?;
        let messages = Message::parse_all(messages, &mut budget)?;
        let tools = read_tools(&mut fields, &mut budget)?;
        let tool_choice = read_tool_choice(&mut fields, &tools)?;

        const FORM: Form =
            Form { max_tokens: &["max_completion_tokens", "max_tokens"], min_max_tokens: 1 };
        let mut sampling = Sampling::read(&mut fields, FORM, &mut budget)?;
        sampling.logprobs = read_logprobs(&mut fields)?;
        if sampling.structured.is_some() && tool_choice.is_forced() {
            return Err(ApiError::invalid_field(
                "tool_choice",
                "a tool_choice that forces a call excludes response_format and structured_outputs",
            ));
        }
        options.add_extra_args(&mut sampling.extra_args);

        Ok(Self {
            messages,
            tools,
            tool_choice,
            parallel_tool_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
            prompt: PromptOptions::read(&mut fields, &mut budget)?,
            include_reasoning: fields.boolean("include_reasoning")?.unwrap_or(true),
            echo: fields.boolean("echo")?.unwrap_or(false),
            sampling,
            options,
            unknown: fields.unknown(),
        })
    }

    /// Returns the images and audio of all messages, in their order.
    pub fn media(&self) -> impl Iterator<Item = &Media> {
        self.messages.iter().flat_map(Message::media)
    }

    /// Returns the JSON schema of the output that a forced tool call needs: for `required` a list
    /// of `{"name","parameters"}`, for a certain function its arguments. `None` if no call is
    /// forced.
    ///
    /// The forms are vLLM's; the parser `json` of [`crate::tools`] reads the former.
    pub fn forced_call_schema(&self) -> Option<Value> {
        match &self.tool_choice {
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Function(name) => {
                self.tools.iter().find(|tool| tool.name == *name).map(Tool::parameters)
            }
            ToolChoice::Required => {
                let mut definitions = Map::new();
                let calls: Vec<Value> =
                    self.tools.iter().map(|tool| tool.call_schema(&mut definitions)).collect();
                let mut list = json!({
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "object", "anyOf": calls},
                });
                if !self.parallel_tool_calls {
                    list["maxItems"] = Value::from(1);
                }
                if !definitions.is_empty() {
                    list["$defs"] = Value::Object(definitions);
                }
                Some(list)
            }
        }
    }
}

impl Tool {
    /// Returns the JSON schema of the arguments. A function without one accepts any object.
    pub fn parameters(&self) -> Value {
        match self.value.pointer("/function/parameters") {
            Some(schema @ Value::Object(_)) => schema.clone(),
            _ => json!({"type": "object"}),
        }
    }

    /// Returns the schema of a call of this tool. Definitions move to `definitions`, because
    /// references (`#/$defs/...`) start at the root of the whole schema.
    fn call_schema(&self, definitions: &mut Map<String, Value>) -> Value {
        let mut parameters = self.parameters();
        if let Some(Value::Object(own)) =
            parameters.as_object_mut().and_then(|schema| schema.shift_remove("$defs"))
        {
            for (name, definition) in own {
                definitions.entry(name).or_insert(definition);
            }
        }
        json!({
            "properties": {
                "name": {"type": "string", "enum": [self.name]},
                "parameters": parameters,
            },
            "required": ["name", "parameters"],
        })
    }
}

impl PromptOptions {
    pub(crate) fn read(fields: &mut Fields<'_>, budget: &mut Budget) -> Result<Self, ApiError> {
        let generation = fields.boolean("add_generation_prompt")?;
        let continues = fields.boolean("continue_final_message")?.unwrap_or(false);
        if continues && generation == Some(true) {
            return Err(ApiError::invalid_field(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            ));
        }
        Ok(Self {
            chat_template: fields.text("chat_template", MAX_TEMPLATE_BYTES)?,
            add_generation_prompt: generation.unwrap_or(!continues),
            continue_final_message: continues,
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(false),
            documents: read_documents(fields, budget)?,
            chat_template_kwargs: fields
                .object("chat_template_kwargs", budget)?
                .unwrap_or_default(),
            reasoning_effort: fields.text("reasoning_effort", MAX_EFFORT_BYTES)?,
        })
    }
}

/// Refuses the predecessors of `tools`: without effect, they would silently return text.
fn refuse_replaced(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    if fields.take("functions").is_some() {
        let message = "functions is no longer supported: use tools instead";
        return Err(ApiError::invalid_field("functions", message));
    }
    if fields.take("function_call").is_some() {
        let message = "function_call is no longer supported: use tool_choice instead";
        return Err(ApiError::invalid_field("function_call", message));
    }
    Ok(())
}

fn check_modalities(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let allowed = "[\"text\"]";
    let modalities = fields.list::<String>("modalities", 16, allowed)?.unwrap_or_default();
    match modalities.iter().find(|modality| *modality != "text") {
        Some(modality) => Err(invalid("modalities", modality, allowed)),
        None => Ok(()),
    }
}

fn read_documents(fields: &mut Fields<'_>, budget: &mut Budget) -> Result<Option<Value>, ApiError> {
    let Some(value) = fields.take("documents") else { return Ok(None) };
    let documents = budget.parse(value.get(), "documents")?;
    let are_objects =
        documents.as_array().is_some_and(|documents| documents.iter().all(Value::is_object));
    if !are_objects {
        return Err(invalid("documents", value.get(), "a list of objects"));
    }
    Ok(Some(documents))
}

fn read_tools(fields: &mut Fields<'_>, budget: &mut Budget) -> Result<Vec<Tool>, ApiError> {
    let Some(value) = fields.take("tools") else { return Ok(Vec::new()) };
    let allowed = format_args!("a list of 1 to {MAX_TOOLS} tools; omit the field without tools");
    let Value::Array(values) = budget.parse(value.get(), "tools")? else {
        return Err(invalid("tools", value.get(), allowed));
    };
    if values.is_empty() || values.len() > MAX_TOOLS {
        let message = format!("tools has {} elements: expected {allowed}", values.len());
        return Err(ApiError::invalid_field("tools", message));
    }
    values.into_iter().enumerate().map(|(index, value)| read_tool(index, value)).collect()
}

fn read_tool(index: usize, value: Value) -> Result<Tool, ApiError> {
    let path = format!("tools[{index}]");
    match value.get("type") {
        Some(Value::String(kind)) if kind == "function" => {}
        Some(other) => return Err(invalid_value(&format!("{path}.type"), other, "function")),
        None => {
            return Err(invalid_value(&path, &value, "an object with type and function"));
        }
    }
    let path = format!("{path}.function");
    let Some(Value::Object(function)) = value.get("function") else {
        let function = value.get("function").unwrap_or(&Value::Null);
        return Err(invalid_value(&path, function, "an object with name and parameters"));
    };
    let name = name_of_function(function, &path)?;
    Ok(Tool { name, value })
}

/// Checks a function that the model may call, and returns its name. `path` is the dotted name of
/// `function`.
pub(crate) fn name_of_function(
    function: &Map<String, Value>,
    path: &str,
) -> Result<String, ApiError> {
    if let Some(parameters) = function.get("parameters")
        && !(parameters.is_object() || parameters.is_null())
    {
        let allowed = "a JSON schema, which is an object";
        return Err(invalid_value(&format!("{path}.parameters"), parameters, allowed));
    }
    match function.get("name") {
        Some(Value::String(name)) if !name.is_empty() && name.len() <= MAX_TOOL_NAME_BYTES => {
            Ok(name.clone())
        }
        other => {
            let name = other.unwrap_or(&Value::Null);
            let allowed = format_args!("a string of 1 to {MAX_TOOL_NAME_BYTES} bytes");
            Err(invalid_value(&format!("{path}.name"), name, allowed))
        }
    }
}

fn read_tool_choice(fields: &mut Fields<'_>, tools: &[Tool]) -> Result<ToolChoice, ApiError> {
    const PATH: &str = "tool_choice";
    const ALLOWED: &str =
        "none, auto, required or {\"type\":\"function\",\"function\":{\"name\":...}}";
    let Some(value) = fields.take(PATH) else {
        return Ok(if tools.is_empty() { ToolChoice::None } else { ToolChoice::Auto });
    };
    let choice = match value.get() {
        "\"none\"" => return Ok(ToolChoice::None),
        "\"auto\"" if tools.is_empty() => return Ok(ToolChoice::None),
        "\"auto\"" => return Ok(ToolChoice::Auto),
        "\"required\"" => ToolChoice::Required,
        object if object.starts_with('{') => {
            let mut members = Fields::of_member(value, PATH)?;
            if members.take("type").is_none_or(|kind| kind.get() != "\"function\"") {
                return Err(invalid(PATH, value.get(), ALLOWED));
            }
            let Some(function) = members.take("function") else {
                return Err(members.missing("function"));
            };
            let mut function = Fields::of_member(function, "tool_choice.function")?;
            let Some(name) = function.text("name", MAX_TOOL_NAME_BYTES)? else {
                return Err(function.missing("name"));
            };
            ToolChoice::Function(name)
        }
        other => return Err(invalid(PATH, other, ALLOWED)),
    };
    check_forced(&choice, tools, "tool_choice.function.name")?;
    Ok(choice)
}

/// Checks that the tools have the calls that a choice forces. `path_of_name` is the dotted name of
/// the name of a certain function.
pub(crate) fn check_forced(
    choice: &ToolChoice,
    tools: &[Tool],
    path_of_name: &str,
) -> Result<(), ApiError> {
    if !choice.is_forced() {
        return Ok(());
    }
    if tools.is_empty() {
        let message = "a tool_choice that forces a call needs the field tools";
        return Err(ApiError::invalid_field("tool_choice", message));
    }
    if let ToolChoice::Function(name) = choice
        && !tools.iter().any(|tool| tool.name == *name)
    {
        let allowed = "the name of one of the tools";
        return Err(invalid(path_of_name, name, allowed));
    }
    Ok(())
}

/// Returns the number of log probabilities of each token.
fn read_logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, ApiError> {
    let logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    let top = small(fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?).unwrap_or(0);
    if top > 0 && !logprobs {
        let message = format!("invalid top_logprobs {top}: it needs logprobs true");
        return Err(ApiError::invalid_field("top_logprobs", message));
    }
    Ok(logprobs.then_some(top))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Content;

    fn parse(rest: &str) -> Result<ChatRequest, ApiError> {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{rest}}}"#);
        ChatRequest::parse(body.as_bytes())
    }

    fn check_error(rest: &str, param: &str, part_of_message: &str) {
        let error = parse(rest).unwrap_err();
        assert_eq!(error.status, 400);
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert!(error.message.contains(part_of_message), "{}", error.message);
    }

    const TOOLS: &str = r##","tools":[{"type":"function","function":{"name":"f","parameters":
        {"type":"object","properties":{"a":{"$ref":"#/$defs/A"}},"$defs":{"A":{"type":"string"}}}}},
        {"type":"function","function":{"name":"g"}}]"##;

    #[test]
    fn defaults() {
        let request = parse("").unwrap();
        assert_eq!(request.messages[0].content(), Content::Text("hi"));
        assert_eq!(request.tool_choice, ToolChoice::None);
        assert!(request.parallel_tool_calls);
        assert!(request.include_reasoning);
        assert!(request.prompt.add_generation_prompt);
        assert!(!request.prompt.add_special_tokens);
        assert_eq!(request.media().count(), 0);
        assert_eq!(request.sampling, Sampling::default());
        assert_eq!(request.options, RequestOptions::default());
        assert_eq!(request.forced_call_schema(), None);
        assert_eq!(parse(r#","logprobs":true"#).unwrap().sampling.logprobs, Some(0));
        assert_eq!(
            parse(r#","logprobs":true,"top_logprobs":20"#).unwrap().sampling.logprobs,
            Some(20)
        );
        assert_eq!(parse(r#","top_logprobs":0"#).unwrap().sampling.logprobs, None);
    }

    #[test]
    fn messages_are_required() {
        let error = ChatRequest::parse(b"{}").unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages"));
        let error = ChatRequest::parse(br#"{"messages":[]}"#).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages"));
    }

    #[test]
    fn unknown_fields_are_named() {
        let request = parse(
            r#","user":"u","store":false,"metadata":{},"service_tier":"x","prompt_cache_key":"k",
            "safety_identifier":"s","verbosity":"low","prediction":{},"modalities":["text"],
            "min_p":0.1,"best":1,"other":{"a":[1]}"#,
        );
        assert_eq!(request.unwrap().unknown, ["best", "other"]);
    }

    #[test]
    fn tools_and_choices() {
        let choice = |rest: &str| parse(&format!("{TOOLS}{rest}")).unwrap().tool_choice;
        assert_eq!(choice(""), ToolChoice::Auto);
        assert_eq!(choice(r#","tool_choice":null"#), ToolChoice::Auto);
        assert_eq!(choice(r#","tool_choice":"none""#), ToolChoice::None);
        assert_eq!(choice(r#","tool_choice":"required""#), ToolChoice::Required);
        assert_eq!(
            choice(r#","tool_choice":{"type":"function","function":{"name":"g"}}"#),
            ToolChoice::Function("g".to_owned())
        );
        assert_eq!(parse(r#","tool_choice":"auto""#).unwrap().tool_choice, ToolChoice::None);
        let request = parse(TOOLS).unwrap();
        assert_eq!(request.tools.len(), 2);
        assert_eq!(request.tools[1].parameters(), json!({"type": "object"}));
    }

    #[test]
    fn schemas_of_forced_calls() {
        let request = parse(&format!("{TOOLS},\"tool_choice\":\"required\"")).unwrap();
        let schema = request.forced_call_schema().unwrap();
        assert_eq!(schema["$defs"], json!({"A": {"type": "string"}}));
        let first = &schema["items"]["anyOf"][0]["properties"];
        assert_eq!(first["name"]["enum"], json!(["f"]));
        assert!(first["parameters"].get("$defs").is_none());
        assert!(schema.get("maxItems").is_none());
        let request =
            parse(&format!(r#"{TOOLS},"parallel_tool_calls":false,"tool_choice":"required""#));
        assert_eq!(request.unwrap().forced_call_schema().unwrap()["maxItems"], 1);
        let request = parse(&format!(
            r#"{TOOLS},"tool_choice":{{"type":"function","function":{{"name":"g"}}}}"#
        ));
        assert_eq!(request.unwrap().forced_call_schema(), Some(json!({"type": "object"})));
    }

    #[test]
    fn errors_name_the_field() {
        check_error(r#","tools":[]"#, "tools", "omit the field");
        check_error(r#","tools":{}"#, "tools", "1 to 128");
        check_error(r#","tools":[{"type":"custom"}]"#, "tools[0].type", "\"custom\"");
        check_error(
            r#","tools":[{"type":"function","function":{}}]"#,
            "tools[0].function.name",
            "1 to 256",
        );
        check_error(
            r#","tools":[{"type":"function","function":{"name":"f","parameters":[]}}]"#,
            "tools[0].function.parameters",
            "schema",
        );
        check_error(r#","tool_choice":"required""#, "tool_choice", "needs the field tools");
        check_error(&format!("{TOOLS},\"tool_choice\":\"any\""), "tool_choice", "\"any\"");
        check_error(
            &format!(r#"{TOOLS},"tool_choice":{{"type":"function","function":{{"name":"h"}}}}"#),
            "tool_choice.function.name",
            "one of the tools",
        );
        check_error(
            &format!(
                r#"{TOOLS},"tool_choice":"required","response_format":{{"type":"json_object"}}"#
            ),
            "tool_choice",
            "excludes",
        );
        check_error(r#","top_logprobs":3"#, "top_logprobs", "needs logprobs");
        check_error(r#","logprobs":true,"top_logprobs":25"#, "top_logprobs", "0 to 20");
        check_error(r#","logprobs":3"#, "logprobs", "true or false");
        check_error(r#","modalities":["text","audio"]"#, "modalities", "audio");
        check_error(r#","functions":[]"#, "functions", "use tools");
        check_error(r#","documents":[1]"#, "documents", "a list of objects");
        check_error(
            r#","continue_final_message":true,"add_generation_prompt":true"#,
            "continue_final_message",
            "exclude",
        );
        let request = parse(r#","continue_final_message":true"#).unwrap();
        assert!(!request.prompt.add_generation_prompt);
    }

    #[test]
    fn extra_arguments_reach_the_engine() {
        let request = parse(r#","vllm_xargs":{"a":1},"kv_transfer_params":{"b":2}"#).unwrap();
        assert_eq!(
            request.sampling.to_vllm(None, None),
            r#"{"extra_args":{"a":1,"kv_transfer_params":{"b":2}}}"#
        );
    }

    #[test]
    fn every_prefix_and_many_mutations_are_answered() {
        let body = format!(
            r#"{{"messages":[{{"role":"user","content":[{{"type":"text","text":"é"}}]}}]{TOOLS},
            "stop":["a"],"logit_bias":{{"1":2}},"n":2,"temperature":0.1}}"#
        );
        assert!(ChatRequest::parse(body.as_bytes()).is_ok());
        for end in 0..body.len() {
            assert!(ChatRequest::parse(&body.as_bytes()[..end]).is_err());
        }
        for position in 0..body.len() {
            for byte in [b'{', b']', b'"', b'0', 0xff] {
                let mut mutated = body.clone().into_bytes();
                mutated[position] = byte;
                let _ = ChatRequest::parse(&mutated);
            }
        }
    }
}
