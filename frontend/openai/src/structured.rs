//! Constraints on what a model writes: JSON, a schema, a regular expression, a choice, a grammar.
//!
//! Sources: OpenAI's `response_format`, vLLM's `structured_outputs`, and the fields `guided_*` that
//! vLLM has removed. Ignoring those silently would return unconstrained text, so they are refused.

use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::{Budget, Fields, invalid, invalid_value};

/// The longest regular expression, grammar or structural tag, in bytes.
pub const MAX_CONSTRAINT_BYTES: usize = 256 * 1_024;
/// The most alternatives of a choice.
pub const MAX_CHOICES: usize = 1_024;
/// The longest name of a schema, in bytes.
pub(crate) const MAX_SCHEMA_NAME_BYTES: usize = 256;

/// A constraint on the whole output.
#[derive(Debug, Clone, PartialEq)]
pub enum StructuredOutput {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema accepts.
    JsonSchema {
        /// The schema, always an object.
        schema: Value,
        /// The name that the client gave to the schema.
        name: Option<String>,
        /// Whether the client asks that the schema is enforced exactly.
        strict: Option<bool>,
    },
    /// Text that matches a regular expression.
    Regex(String),
    /// One of several texts.
    Choice(Vec<String>),
    /// Text of a context-free grammar, in the engine's notation.
    Grammar(String),
    /// Constraints within tags, as JSON text in the form of xgrammar.
    StructuralTag(String),
}

/// A constraint with vLLM's options for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Structured {
    /// The constraint.
    pub output: StructuredOutput,
    /// The field of the client that has it, for errors.
    pub field: &'static str,
    /// A regular expression for whitespace in JSON.
    pub whitespace_pattern: Option<String>,
    /// Whether JSON has no whitespace.
    pub disable_any_whitespace: Option<bool>,
    /// Whether objects have only the properties of the schema.
    pub disable_additional_properties: Option<bool>,
}

/// A field that vLLM has removed, and the one that replaces it.
struct Removed {
    name: &'static str,
    replacement: &'static str,
}

const REMOVED: [Removed; 9] = [
    Removed { name: "guided_json", replacement: "structured_outputs.json" },
    Removed { name: "guided_json_object", replacement: "structured_outputs.json_object" },
    Removed { name: "guided_regex", replacement: "structured_outputs.regex" },
    Removed { name: "guided_choice", replacement: "structured_outputs.choice" },
    Removed { name: "guided_grammar", replacement: "structured_outputs.grammar" },
    Removed {
        name: "guided_whitespace_pattern",
        replacement: "structured_outputs.whitespace_pattern",
    },
    Removed { name: "guided_decoding_backend", replacement: "structured_outputs" },
    // llama.cpp's server; its grammars have another syntax.
    Removed { name: "grammar", replacement: "structured_outputs.grammar, in Lark's syntax" },
    Removed { name: "json_schema", replacement: "response_format" },
];

impl StructuredOutput {
    /// Returns the constraint of a field without vLLM's options.
    pub(crate) fn of_field(self, field: &'static str) -> Structured {
        Structured {
            output: self,
            field,
            whitespace_pattern: None,
            disable_any_whitespace: None,
            disable_additional_properties: None,
        }
    }
}

impl Structured {
    /// Reads the constraint of a request.
    pub(crate) fn read(
        fields: &mut Fields<'_>,
        budget: &mut Budget,
    ) -> Result<Option<Self>, ApiError> {
        for removed in &REMOVED {
            if fields.take(removed.name).is_some() {
                return Err(ApiError::invalid_field(
                    removed.name,
                    format!(
                        "{} is not supported: use {} instead",
                        removed.name, removed.replacement
                    ),
                ));
            }
        }
        let format = match fields.take("response_format") {
            Some(value) => read_response_format(value, budget)?,
            None => None,
        };
        let Some(value) = fields.take("structured_outputs") else {
            return Ok(format.map(|output| output.of_field("response_format")));
        };
        if format.is_some() {
            return Err(ApiError::invalid_field(
                "structured_outputs",
                "response_format and structured_outputs exclude each other: use one of them",
            ));
        }
        read_structured_outputs(value, budget).map(Some)
    }

    /// Returns the constraint as JSON text in the form of vLLM's `StructuredOutputsParams`.
    pub fn to_vllm(&self) -> String {
        let mut members = Map::new();
        let (name, value) = match &self.output {
            StructuredOutput::JsonObject => ("json_object", Value::Bool(true)),
            StructuredOutput::JsonSchema { schema, .. } => ("json", schema.clone()),
            StructuredOutput::Regex(regex) => ("regex", Value::from(regex.as_str())),
            StructuredOutput::Choice(texts) => ("choice", Value::from(texts.as_slice())),
            StructuredOutput::Grammar(grammar) => ("grammar", Value::from(grammar.as_str())),
            StructuredOutput::StructuralTag(tag) => ("structural_tag", Value::from(tag.as_str())),
        };
        members.insert(name.to_owned(), value);
        if let Some(pattern) = &self.whitespace_pattern {
            members.insert("whitespace_pattern".to_owned(), Value::from(pattern.as_str()));
        }
        if let Some(disable) = self.disable_any_whitespace {
            members.insert("disable_any_whitespace".to_owned(), Value::Bool(disable));
        }
        if let Some(disable) = self.disable_additional_properties {
            members.insert("disable_additional_properties".to_owned(), Value::Bool(disable));
        }
        Value::Object(members).to_string()
    }
}

fn read_response_format(
    value: &RawValue,
    budget: &mut Budget,
) -> Result<Option<StructuredOutput>, ApiError> {
    const ALLOWED: &str = "text, json_object, json_schema or structural_tag";
    let mut format = Fields::of_member(value, "response_format")?;
    let Some(kind) = format.take("type") else { return Err(format.missing("type")) };
    match kind.get() {
        "\"text\"" => Ok(None),
        "\"json_object\"" => match format.object("schema", budget)? {
            Some(schema) => Ok(Some(StructuredOutput::JsonSchema {
                schema: Value::Object(schema),
                name: None,
                strict: None,
            })),
            None => Ok(Some(StructuredOutput::JsonObject)),
        },
        "\"json_schema\"" => {
            let Some(value) = format.take("json_schema") else {
                return Err(format.missing("json_schema"));
            };
            let mut members = Fields::of_member(value, "response_format.json_schema")?;
            let Some(schema) = members.object("schema", budget)? else {
                return Err(members.missing("schema"));
            };
            Ok(Some(StructuredOutput::JsonSchema {
                schema: Value::Object(schema),
                name: members.text("name", MAX_SCHEMA_NAME_BYTES)?,
                strict: members.boolean("strict")?,
            }))
        }
        "\"structural_tag\"" => {
            Ok(Some(StructuredOutput::StructuralTag(structural_tag(value, "response_format")?)))
        }
        other => Err(invalid("response_format.type", other, ALLOWED)),
    }
}

fn read_structured_outputs(value: &RawValue, budget: &mut Budget) -> Result<Structured, ApiError> {
    const CONSTRAINTS: &str = "json, json_object, regex, choice, grammar and structural_tag";
    let mut fields = Fields::of_member(value, "structured_outputs")?;
    let mut outputs = Vec::new();
    if let Some(value) = fields.take("json") {
        let schema = read_schema(value, budget)?;
        outputs.push(StructuredOutput::JsonSchema { schema, name: None, strict: None });
    }
    if fields.boolean("json_object")? == Some(true) {
        outputs.push(StructuredOutput::JsonObject);
    }
    if let Some(regex) = fields.text("regex", MAX_CONSTRAINT_BYTES)? {
        outputs.push(StructuredOutput::Regex(regex));
    }
    let allowed = format!("a list of 1 to {MAX_CHOICES} strings");
    if let Some(choice) = fields.list::<String>("choice", MAX_CHOICES, &allowed)? {
        if choice.is_empty() {
            return Err(invalid("structured_outputs.choice", "[]", allowed));
        }
        outputs.push(StructuredOutput::Choice(choice));
    }
    if let Some(grammar) = fields.text("grammar", MAX_CONSTRAINT_BYTES)? {
        outputs.push(StructuredOutput::Grammar(grammar));
    }
    if let Some(value) = fields.take("structural_tag") {
        let tag = structural_tag(value, "structured_outputs.structural_tag")?;
        outputs.push(StructuredOutput::StructuralTag(tag));
    }
    let number = outputs.len();
    let Some(output) = outputs.pop().filter(|_| number == 1) else {
        return Err(ApiError::invalid_field(
            "structured_outputs",
            format!("structured_outputs has {number} constraints: expected one of {CONSTRAINTS}"),
        ));
    };
    Ok(Structured {
        output,
        field: "structured_outputs",
        whitespace_pattern: fields.text("whitespace_pattern", MAX_CONSTRAINT_BYTES)?,
        disable_any_whitespace: fields.boolean("disable_any_whitespace")?,
        disable_additional_properties: fields.boolean("disable_additional_properties")?,
    })
}

/// Reads a schema that is an object, or an object as JSON text.
fn read_schema(value: &RawValue, budget: &mut Budget) -> Result<Value, ApiError> {
    const PATH: &str = "structured_outputs.json";
    let schema = match budget.parse(value.get(), PATH)? {
        Value::String(text) => budget.parse(&text, PATH)?,
        other => other,
    };
    if !schema.is_object() {
        return Err(invalid_value(PATH, &schema, "a JSON schema, which is an object"));
    }
    Ok(schema)
}

/// Reads a structural tag, which is JSON or JSON as text, and returns it as text.
fn structural_tag(value: &RawValue, path: &str) -> Result<String, ApiError> {
    let text = match serde_json::from_str::<String>(value.get()) {
        Ok(text) => text,
        Err(_) => value.get().to_owned(),
    };
    if !text.trim_start().starts_with('{') || text.len() > MAX_CONSTRAINT_BYTES {
        let allowed = format_args!("an object of at most {MAX_CONSTRAINT_BYTES} bytes");
        return Err(invalid(path, value.get(), allowed));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> Result<Option<Structured>, ApiError> {
        let mut fields = Fields::of_body(body.as_bytes())?;
        Structured::read(&mut fields, &mut Budget::new())
    }

    fn check(body: &str, vllm: &str) {
        let structured = read(body).unwrap().unwrap();
        assert_eq!(structured.to_vllm(), vllm, "{body}");
    }

    fn check_error(body: &str, param: &str, part_of_message: &str) {
        let error = read(body).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert!(error.message.contains(part_of_message), "{}", error.message);
    }

    #[test]
    fn forms() {
        assert_eq!(read("{}").unwrap(), None);
        assert_eq!(read(r#"{"response_format":{"type":"text"}}"#).unwrap(), None);
        check(r#"{"response_format":{"type":"json_object"}}"#, r#"{"json_object":true}"#);
        check(
            r#"{"response_format":{"type":"json_object","schema":{"type":"object"}}}"#,
            r#"{"json":{"type":"object"}}"#,
        );
        check(
            r#"{"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,
                "schema":{"z":1,"a":2}}}}"#,
            r#"{"json":{"z":1,"a":2}}"#,
        );
        check(
            r#"{"structured_outputs":{"json":"{\"z\":1}","disable_any_whitespace":true}}"#,
            r#"{"json":{"z":1},"disable_any_whitespace":true}"#,
        );
        check(r#"{"structured_outputs":{"regex":"a+"}}"#, r#"{"regex":"a+"}"#);
        check(
            r#"{"structured_outputs":{"choice":["a","b"],"whitespace_pattern":" "}}"#,
            r#"{"choice":["a","b"],"whitespace_pattern":" "}"#,
        );
        check(r#"{"structured_outputs":{"grammar":"g"}}"#, r#"{"grammar":"g"}"#);
        check(
            r#"{"response_format":{"type":"structural_tag","x":1}}"#,
            r#"{"structural_tag":"{\"type\":\"structural_tag\",\"x\":1}"}"#,
        );
        let structured = read(
            r#"{"response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,
                "schema":{}}}}"#,
        );
        let StructuredOutput::JsonSchema { name, strict, .. } = structured.unwrap().unwrap().output
        else {
            panic!("not a schema");
        };
        assert_eq!(name.as_deref(), Some("n"));
        assert_eq!(strict, Some(true));
    }

    #[test]
    fn errors() {
        check_error(r#"{"guided_json":{}}"#, "guided_json", "use structured_outputs.json");
        check_error(r#"{"guided_choice":["a"]}"#, "guided_choice", "structured_outputs.choice");
        check_error(r#"{"response_format":{}}"#, "response_format.type", "missing");
        check_error(r#"{"response_format":{"type":"yaml"}}"#, "response_format.type", "\"yaml\"");
        check_error(
            r#"{"response_format":{"type":"json_schema"}}"#,
            "response_format.json_schema",
            "missing",
        );
        check_error(
            r#"{"response_format":{"type":"json_schema","json_schema":{"name":"x"}}}"#,
            "response_format.json_schema.schema",
            "missing",
        );
        check_error(
            r#"{"response_format":{"type":"json_schema","json_schema":{"schema":7}}}"#,
            "response_format.json_schema.schema",
            "an object",
        );
        check_error(r#"{"structured_outputs":{}}"#, "structured_outputs", "0 constraints");
        check_error(
            r#"{"structured_outputs":{"regex":"a","choice":["b"]}}"#,
            "structured_outputs",
            "2 constraints",
        );
        check_error(
            r#"{"structured_outputs":{"choice":[]}}"#,
            "structured_outputs.choice",
            "strings",
        );
        check_error(
            r#"{"structured_outputs":{"json":"[]"}}"#,
            "structured_outputs.json",
            "an object",
        );
        check_error(
            r#"{"structured_outputs":{"regex":"a"},"response_format":{"type":"json_object"}}"#,
            "structured_outputs",
            "exclude",
        );
    }
}
