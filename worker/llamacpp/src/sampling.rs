//! The parameters of sampling of a request, with vLLM's names, as Triton's vllm_backend takes them.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::host::Failure;

/// The most choices of a request.
const MAX_CHOICES: u64 = 128;
/// The most tokens with probabilities for a position.
const MAX_LOGPROBS: u64 = 20;
/// The most stop strings of a request, and their length in bytes.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;
/// The longest JSON of a schema, or grammar, in bytes.
const MAX_STRUCTURE_BYTES: usize = 256 << 10;
/// The longest regular expression, in bytes: the time to compile one grows faster than its length.
const MAX_REGEX_BYTES: usize = 8 << 10;
/// The most tokens in a list.
const MAX_TOKENS_IN_LIST: usize = 16_384;

/// How the next token of a request is chosen, and where its text ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sampling {
    /// The number of choices.
    pub(crate) n: u32,
    /// 0: always the most likely token.
    pub(crate) temperature: f32,
    /// The most likely tokens that together have this probability; 1: all.
    pub(crate) top_p: f32,
    /// This many of the most likely tokens; 0: all.
    pub(crate) top_k: usize,
    /// Tokens with at least this share of the probability of the most likely one.
    pub(crate) min_p: f32,
    pub(crate) presence_penalty: f32,
    pub(crate) frequency_penalty: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_token_ids: BTreeSet<i32>,
    pub(crate) include_stop: bool,
    pub(crate) ignore_eos: bool,
    /// The most tokens of a choice; `None` for the rest of the context.
    pub(crate) max_tokens: Option<u64>,
    pub(crate) min_tokens: u64,
    /// The number of tokens with probabilities at each position; `None` for no probabilities.
    pub(crate) logprobs: Option<usize>,
    pub(crate) skip_special_tokens: bool,
    pub(crate) logit_bias: BTreeMap<i32, f32>,
    /// The tokens that may be chosen; empty for all.
    pub(crate) allowed: BTreeSet<i32>,
    /// Takes only the last tokens of the prompt.
    pub(crate) truncate_prompt: Option<usize>,
    pub(crate) structure: Option<Structure>,
    /// The number of tokens with probabilities at each position of the prompt.
    pub(crate) prompt_logprobs: Option<usize>,
    /// The name of the adapter.
    pub(crate) adapter: Option<String>,
}

/// The form that the text must have.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Structure {
    /// JSON that follows a schema.
    Json(Value),
    /// A regular expression.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in Lark's syntax.
    Grammar(String),
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            n: 1,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed: None,
            stop: Vec::new(),
            stop_token_ids: BTreeSet::new(),
            include_stop: false,
            ignore_eos: false,
            max_tokens: None,
            min_tokens: 0,
            logprobs: None,
            skip_special_tokens: true,
            logit_bias: BTreeMap::new(),
            allowed: BTreeSet::new(),
            truncate_prompt: None,
            structure: None,
            prompt_logprobs: None,
            adapter: None,
        }
    }
}

impl Sampling {
    /// Reads the parameters of a request. Numbers and flags may be strings, as clients of
    /// vllm_backend write them.
    ///
    /// # Errors
    /// A parameter is unknown, or has a value that is not allowed.
    pub(crate) fn read(members: Map<String, Value>) -> Result<Self, Failure> {
        let mut sampling = Self::default();
        for (name, value) in members {
            if !value.is_null() {
                sampling.set(&name, value)?;
            }
        }
        if sampling.max_tokens == Some(0) && sampling.prompt_logprobs.is_none() {
            return Err(wrong("max_tokens", &Value::from(0), "an integer from 1"));
        }
        Ok(sampling)
    }

    fn set(&mut self, name: &str, value: Value) -> Result<(), Failure> {
        match name {
            "n" => self.n = integer(name, &value, 1, MAX_CHOICES)? as u32,
            "temperature" => self.temperature = number(name, &value, 0.0, 100.0)?,
            "top_p" => self.top_p = number(name, &value, 0.0, 1.0)?,
            // vLLM's older form of 0.
            "top_k" if value == -1 => self.top_k = 0,
            "top_k" => self.top_k = integer(name, &value, 0, i32::MAX as u64)? as usize,
            "min_p" => self.min_p = number(name, &value, 0.0, 1.0)?,
            "presence_penalty" => self.presence_penalty = number(name, &value, -2.0, 2.0)?,
            "frequency_penalty" => self.frequency_penalty = number(name, &value, -2.0, 2.0)?,
            "repetition_penalty" => self.repetition_penalty = number(name, &value, 0.01, 100.0)?,
            "seed" => {
                self.seed = match value.as_i64() {
                    Some(seed) => Some(seed.cast_unsigned()),
                    None => Some(integer(name, &value, 0, u64::MAX)?),
                };
            }
            "stop" => self.stop = stops(&value)?,
            "stop_token_ids" => self.stop_token_ids = tokens(name, &value)?,
            "include_stop_str_in_output" => self.include_stop = flag(name, &value)?,
            "ignore_eos" => self.ignore_eos = flag(name, &value)?,
            "max_tokens" => self.max_tokens = Some(integer(name, &value, 0, u64::MAX)?),
            "min_tokens" => self.min_tokens = integer(name, &value, 0, u64::MAX)?,
            "logprobs" => {
                self.logprobs = Some(integer(name, &value, 0, MAX_LOGPROBS)? as usize);
            }
            "prompt_logprobs" => {
                self.prompt_logprobs = Some(integer(name, &value, 0, MAX_LOGPROBS)? as usize);
            }
            "lora_name" => match value {
                Value::String(name) => self.adapter = Some(name),
                value => return Err(wrong(name, &value, "a string")),
            },
            "skip_special_tokens" => self.skip_special_tokens = flag(name, &value)?,
            // Pieces of llama.cpp have their own spaces.
            "spaces_between_special_tokens" | "detokenize" if flag(name, &value)? => {}
            "logit_bias" => self.logit_bias = biases(&value)?,
            "allowed_token_ids" => self.allowed = tokens(name, &value)?,
            "truncate_prompt_tokens" => {
                self.truncate_prompt = Some(integer(name, &value, 1, i32::MAX as u64)? as usize);
            }
            "structured_outputs" | "guided_decoding" => self.structure = structure(&value)?,
            _ => {
                return Err(Failure::invalid(format!(
                    "the backend llamacpp does not support {name} {}",
                    shortened(&value)
                )));
            }
        }
        Ok(())
    }
}

/// Returns the text of a value for a message.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn wrong(name: &str, value: &Value, allowed: &str) -> Failure {
    Failure::invalid(format!("{name} {} is not allowed: it must be {allowed}", shortened(value)))
}

fn number(name: &str, value: &Value, least: f32, most: f32) -> Result<f32, Failure> {
    let number = match value {
        Value::String(text) => text.trim().parse::<f64>().ok(),
        value => value.as_f64(),
    };
    let number = number.map(|number| number as f32);
    number
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| wrong(name, value, &format!("a number from {least} to {most}")))
}

fn integer(name: &str, value: &Value, least: u64, most: u64) -> Result<u64, Failure> {
    let number = match value {
        Value::String(text) => text.trim().parse().ok(),
        value => value.as_u64(),
    };
    number
        .filter(|number| (least..=most).contains(number))
        .ok_or_else(|| wrong(name, value, &format!("an integer from {least} to {most}")))
}

fn flag(name: &str, value: &Value) -> Result<bool, Failure> {
    match value {
        Value::Bool(flag) => Ok(*flag),
        Value::String(text) if text.eq_ignore_ascii_case("true") => Ok(true),
        Value::String(text) if text.eq_ignore_ascii_case("false") => Ok(false),
        value => Err(wrong(name, value, "true or false")),
    }
}

fn stops(value: &Value) -> Result<Vec<String>, Failure> {
    let list = match value {
        Value::String(text) => Some(vec![text.clone()]),
        Value::Array(list) if list.len() <= MAX_STOPS => {
            list.iter().map(|text| text.as_str().map(str::to_owned)).collect()
        }
        _ => None,
    };
    list.filter(|list| list.iter().all(|text| (1..=MAX_STOP_BYTES).contains(&text.len())))
        .ok_or_else(|| {
            let allowed = format!(
                "a string or at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_BYTES} bytes"
            );
            wrong("stop", value, &allowed)
        })
}

fn token(value: &Value) -> Option<i32> {
    i32::try_from(value.as_u64()?).ok()
}

fn tokens(name: &str, value: &Value) -> Result<BTreeSet<i32>, Failure> {
    let list = value.as_array().filter(|list| list.len() <= MAX_TOKENS_IN_LIST);
    list.and_then(|list| list.iter().map(token).collect())
        .ok_or_else(|| wrong(name, value, &format!("at most {MAX_TOKENS_IN_LIST} token ids")))
}

fn biases(value: &Value) -> Result<BTreeMap<i32, f32>, Failure> {
    let members = value.as_object().filter(|members| members.len() <= MAX_TOKENS_IN_LIST);
    let biases = members.and_then(|members| {
        members.iter().map(|(token, bias)| Some((token_id(token)?, finite(bias)?))).collect()
    });
    biases.ok_or_else(|| {
        let allowed = format!("an object with at most {MAX_TOKENS_IN_LIST} token ids and numbers");
        wrong("logit_bias", value, &allowed)
    })
}

fn token_id(text: &str) -> Option<i32> {
    text.parse().ok().filter(|token| *token >= 0)
}

fn finite(value: &Value) -> Option<f32> {
    value.as_f64().filter(|number| number.is_finite()).map(|number| number as f32)
}

/// Reads vLLM's `structured_outputs`.
fn structure(value: &Value) -> Result<Option<Structure>, Failure> {
    let name = "structured_outputs";
    // Clients of Triton's OpenAI frontend send its JSON as a string.
    let parsed;
    let members = match value {
        Value::String(text) => {
            parsed = serde_json::from_str::<Value>(text).unwrap_or_default();
            parsed.as_object()
        }
        value => value.as_object(),
    };
    let allowed = "an object with one of json, json_object, regex, choice and grammar";
    let members = members.ok_or_else(|| wrong(name, value, allowed))?;
    let mut found = None;
    for (key, member) in members.iter().filter(|(_, member)| !member.is_null()) {
        let text = |what| match member {
            Value::String(text) => Ok(text.clone()),
            member => Err(wrong(&format!("{name}.{key}"), member, what)),
        };
        let one = match key.as_str() {
            "json" => match member {
                Value::String(text) => Structure::Json(
                    serde_json::from_str(text)
                        .map_err(|_| wrong(&format!("{name}.json"), member, "a JSON schema"))?,
                ),
                schema => Structure::Json(schema.clone()),
            },
            "json_object" if member == false => continue,
            "json_object" => Structure::Json(serde_json::json!({"type": "object"})),
            "regex" => Structure::Regex(text("a regular expression")?),
            "grammar" => Structure::Grammar(text("a grammar in Lark's syntax")?),
            "choice" => {
                let texts = member.as_array().filter(|list| !list.is_empty());
                let texts = texts.and_then(|list| {
                    list.iter().map(|text| text.as_str().map(str::to_owned)).collect()
                });
                Structure::Choice(
                    texts.ok_or_else(|| wrong(&format!("{name}.choice"), member, "strings"))?,
                )
            }
            // False has no effect.
            _ if member == false => continue,
            _ => {
                return Err(Failure::invalid(format!(
                    "the backend llamacpp does not support {name}.{key}"
                )));
            }
        };
        if found.replace(one).is_some() {
            return Err(wrong(name, value, allowed));
        }
    }
    let found = found.ok_or_else(|| wrong(name, value, allowed))?;
    let (length, most) = match &found {
        Structure::Regex(text) => (text.len(), MAX_REGEX_BYTES),
        Structure::Json(schema) => (schema.to_string().len(), MAX_STRUCTURE_BYTES),
        Structure::Grammar(text) => (text.len(), MAX_STRUCTURE_BYTES),
        Structure::Choice(texts) => (texts.iter().map(String::len).sum(), MAX_STRUCTURE_BYTES),
    };
    if length > most {
        return Err(Failure::invalid(format!(
            "{name} is too long: it has {length} bytes, and at most {most} are allowed for its kind"
        )));
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Sampling, String> {
        let Value::Object(members) = value else { panic!("an object") };
        Sampling::read(members).map_err(|failure| failure.message)
    }

    #[test]
    fn numbers_may_be_strings() {
        let sampling = read(json!({"temperature": "0.5", "max_tokens": "7", "ignore_eos": "True"}));
        let expected = Sampling {
            temperature: 0.5,
            max_tokens: Some(7),
            ignore_eos: true,
            ..Sampling::default()
        };
        assert_eq!(sampling, Ok(expected));
        assert_eq!(read(json!({"seed": -1, "top_k": -1})).unwrap().seed, Some(u64::MAX));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused() {
        for (wrong, part) in [
            (json!({"bad_words": ["a"]}), "does not support bad_words [\"a\"]"),
            (
                json!({"temperature": -1}),
                "temperature -1 is not allowed: it must be a number from 0",
            ),
            (json!({"temperature": "hot"}), "a number from 0 to 100"),
            (json!({"top_p": 1.5}), "a number from 0 to 1"),
            (json!({"max_tokens": 0}), "an integer from 1"),
            (json!({"stop": ["", "a"]}), "each of 1 to 1024 bytes"),
            (json!({"detokenize": false}), "does not support detokenize false"),
            (json!({"logit_bias": {"-1": 1}}), "token ids and numbers"),
            (json!({"structured_outputs": {}}), "an object with one of"),
            (
                json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
                "an object with one of",
            ),
            (json!({"structured_outputs": {"structural_tag": "x"}}), "structural_tag"),
        ] {
            let error = read(wrong.clone()).unwrap_err();
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }

    #[test]
    fn structures_are_those_of_vllm() {
        let structure = |value| read(json!({"structured_outputs": value})).unwrap().structure;
        let schema = json!({"type": "integer"});
        assert_eq!(structure(json!({"json": schema})), Some(Structure::Json(schema.clone())));
        assert_eq!(structure(json!({"json": schema.to_string()})), Some(Structure::Json(schema)));
        assert_eq!(structure(json!({"regex": "a+"})), Some(Structure::Regex("a+".to_owned())));
        let json = structure(json!({"json_object": true, "disable_any_whitespace": false}));
        assert_eq!(json, Some(Structure::Json(json!({"type": "object"}))));
    }
}
