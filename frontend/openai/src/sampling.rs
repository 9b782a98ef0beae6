//! How a model chooses tokens: the fields that chat and completion requests share.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::json::{Budget, Fields, MAX_MEMBERS, invalid};
use crate::structured::Structured;

/// The most stop strings. OpenAI and vLLM allow 4; more is an extension.
pub const MAX_STOP_STRINGS: usize = 16;
/// The longest stop string or bad word, in bytes.
pub const MAX_STOP_BYTES: usize = 1_024;
/// The most stop tokens and bad words.
pub const MAX_STOP_TOKENS: usize = 1_024;
/// The most entries of a logit bias.
pub const MAX_LOGIT_BIAS: usize = MAX_MEMBERS;
/// The most allowed token ids: above the vocabularies of today's models.
pub const MAX_ALLOWED_TOKENS: usize = 1 << 20;
/// The most choices of a request for one prompt.
pub const MAX_N: i64 = 128;
/// The most log probabilities of one token.
pub const MAX_LOGPROBS: i64 = 20;

/// Sampling parameters. `None` and empty lists mean that the client did not set them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Sampling {
    /// From 0 (greedy) to 2.
    pub temperature: Option<f64>,
    /// Above 0, at most 1.
    pub top_p: Option<f64>,
    /// The number of tokens to choose from; 0 and -1 mean all.
    pub top_k: Option<i64>,
    /// From 0 to 1.
    pub min_p: Option<f64>,
    /// From -2 to 2.
    pub presence_penalty: Option<f64>,
    /// From -2 to 2.
    pub frequency_penalty: Option<f64>,
    /// Above 0; 1 is neutral.
    pub repetition_penalty: Option<f64>,
    /// The seed of the random numbers.
    pub seed: Option<i64>,
    /// Texts that end the output: at most 16 of 1 to 1,024 bytes.
    pub stop: Vec<String>,
    /// Tokens that end the output.
    pub stop_token_ids: Vec<u32>,
    /// Tokens of output at most. 0 only with `echo`, to score a prompt.
    pub max_tokens: Option<u64>,
    /// Tokens of output at least.
    pub min_tokens: Option<u64>,
    /// Whether the end-of-sequence token does not end the output.
    pub ignore_eos: Option<bool>,
    /// What is added to the logits of tokens, from -100 to 100 each.
    pub logit_bias: BTreeMap<u32, f64>,
    /// Texts that the model must not write.
    pub bad_words: Vec<String>,
    /// The only tokens that the model may write; empty means all.
    pub allowed_token_ids: Vec<u32>,
    /// Whether special tokens are left out of the text.
    pub skip_special_tokens: Option<bool>,
    /// Whether special tokens are separated by spaces.
    pub spaces_between_special_tokens: Option<bool>,
    /// Whether the text includes the stop string that ended it.
    pub include_stop_str_in_output: Option<bool>,
    /// The number of choices for each prompt, from 1 to 128.
    pub n: Option<u32>,
    /// The number of log probabilities for each token of output, in addition to that of the token
    /// itself: 0 to 20. `None` means that the client wants none at all.
    pub logprobs: Option<u32>,
    /// The same for tokens of the prompt.
    pub prompt_logprobs: Option<u32>,
    /// The priority of the request in the engine's queue; lower is earlier. It is no sampling
    /// parameter of vLLM, so [`Sampling::to_vllm`] leaves it out.
    pub priority: Option<i64>,
    /// The most tokens of reasoning.
    pub thinking_token_budget: Option<u64>,
    /// A constraint on the output.
    pub structured: Option<Structured>,
    /// Parameters for extensions of vLLM, in its `extra_args`.
    pub extra_args: Map<String, Value>,
}

/// Where the endpoints differ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    /// The names of the field for the most tokens, the preferred one first.
    pub(crate) max_tokens: &'static [&'static str],
    /// The smallest value of that field.
    pub(crate) min_max_tokens: i64,
}

impl Sampling {
    /// Reads all fields but `logprobs`, whose forms differ between the endpoints.
    pub(crate) fn read(
        fields: &mut Fields<'_>,
        form: Form,
        budget: &mut Budget,
    ) -> Result<Self, ApiError> {
        let penalty = "a number from -2 to 2";
        let is_penalty = |number: f64| (-2.0..=2.0).contains(&number);
        let sampling = Self {
            temperature: fields.number("temperature", "a number from 0 to 2", |number| {
                (0.0..=2.0).contains(&number)
            })?,
            top_p: fields.number("top_p", "a number above 0 and at most 1", |number| {
                number > 0.0 && number <= 1.0
            })?,
            top_k: fields.integer("top_k", -1..=i64::from(i32::MAX))?,
            min_p: fields
                .number("min_p", "a number from 0 to 1", |number| (0.0..=1.0).contains(&number))?,
            presence_penalty: fields.number("presence_penalty", penalty, is_penalty)?,
            frequency_penalty: fields.number("frequency_penalty", penalty, is_penalty)?,
            repetition_penalty: fields.number(
                "repetition_penalty",
                "a number above 0",
                |number| number > 0.0,
            )?,
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?,
            stop: read_stop(fields)?,
            stop_token_ids: read_tokens(fields, "stop_token_ids", MAX_STOP_TOKENS)?,
            max_tokens: read_max_tokens(fields, form)?,
            min_tokens: unsigned(fields.integer("min_tokens", 0..=i64::MAX)?),
            ignore_eos: fields.boolean("ignore_eos")?,
            logit_bias: read_logit_bias(fields)?,
            bad_words: read_bad_words(fields)?,
            allowed_token_ids: read_tokens(fields, "allowed_token_ids", MAX_ALLOWED_TOKENS)?,
            skip_special_tokens: fields.boolean("skip_special_tokens")?,
            spaces_between_special_tokens: fields.boolean("spaces_between_special_tokens")?,
            include_stop_str_in_output: fields.boolean("include_stop_str_in_output")?,
            n: small(fields.integer("n", 1..=MAX_N)?),
            logprobs: None,
            prompt_logprobs: small(fields.integer("prompt_logprobs", 0..=MAX_LOGPROBS)?),
            priority: fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?,
            thinking_token_budget: unsigned(fields.integer("thinking_token_budget", 0..=i64::MAX)?),
            structured: Structured::read(fields, budget)?,
            extra_args: Map::new(),
        };
        sampling.check(fields)?;
        Ok(sampling)
    }

    /// Checks what depends on several fields.
    fn check(&self, fields: &mut Fields<'_>) -> Result<(), ApiError> {
        let n = self.choices_per_prompt();
        if n > 1 && self.temperature == Some(0.0) {
            return Err(ApiError::invalid_field(
                "n",
                format!("invalid n {n}: expected 1, because temperature 0 makes all choices equal"),
            ));
        }
        if let (Some(least), Some(most)) = (self.min_tokens, self.max_tokens)
            && least > most
        {
            return Err(ApiError::invalid_field(
                "min_tokens",
                format!("invalid min_tokens {least}: expected at most max_tokens, which is {most}"),
            ));
        }
        if self.prompt_logprobs.is_some() && fields.boolean("stream")? == Some(true) {
            return Err(ApiError::invalid_field(
                "prompt_logprobs",
                "prompt_logprobs is not available with stream true",
            ));
        }
        Ok(())
    }

    /// Returns the number of choices for each prompt.
    pub fn choices_per_prompt(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Returns a JSON object for the tensor `sampling_parameters` of Triton's vllm_backend: names
    /// of vLLM's `SamplingParams`, only fields that the client set. `structured_outputs` is JSON
    /// text within the JSON, as vllm_backend expects it.
    ///
    /// `default_max_tokens` is used if the client set no limit. Without either, vLLM's own default
    /// of 16 tokens applies.
    /// `adapter` is the name of the adapter, for which vllm_backend has the parameter `lora_name`.
    pub fn to_vllm(&self, default_max_tokens: Option<u64>, adapter: Option<&str>) -> String {
        let mut members = Map::new();
        set(&mut members, "lora_name", adapter);
        set(&mut members, "n", self.n);
        set(&mut members, "presence_penalty", self.presence_penalty);
        set(&mut members, "frequency_penalty", self.frequency_penalty);
        set(&mut members, "repetition_penalty", self.repetition_penalty);
        set(&mut members, "temperature", self.temperature);
        set(&mut members, "top_p", self.top_p);
        set(&mut members, "top_k", self.top_k);
        set(&mut members, "min_p", self.min_p);
        set(&mut members, "seed", self.seed);
        set(&mut members, "stop", not_empty(&self.stop));
        set(&mut members, "stop_token_ids", not_empty(&self.stop_token_ids));
        set(&mut members, "ignore_eos", self.ignore_eos);
        set(&mut members, "max_tokens", self.max_tokens.or(default_max_tokens));
        set(&mut members, "min_tokens", self.min_tokens);
        set(&mut members, "logprobs", self.logprobs);
        set(&mut members, "prompt_logprobs", self.prompt_logprobs);
        set(&mut members, "skip_special_tokens", self.skip_special_tokens);
        set(&mut members, "spaces_between_special_tokens", self.spaces_between_special_tokens);
        set(&mut members, "include_stop_str_in_output", self.include_stop_str_in_output);
        if !self.logit_bias.is_empty() {
            let bias = self.logit_bias.iter();
            let bias: Map<String, Value> =
                bias.map(|(token, bias)| (token.to_string(), Value::from(*bias))).collect();
            members.insert("logit_bias".to_owned(), Value::Object(bias));
        }
        set(&mut members, "bad_words", not_empty(&self.bad_words));
        set(&mut members, "allowed_token_ids", not_empty(&self.allowed_token_ids));
        set(&mut members, "thinking_token_budget", self.thinking_token_budget);
        set(&mut members, "structured_outputs", self.structured.as_ref().map(Structured::to_vllm));
        if !self.extra_args.is_empty() {
            members.insert("extra_args".to_owned(), Value::Object(self.extra_args.clone()));
        }
        Value::Object(members).to_string()
    }
}

fn set(members: &mut Map<String, Value>, name: &str, value: Option<impl Into<Value>>) {
    if let Some(value) = value {
        members.insert(name.to_owned(), value.into());
    }
}

fn not_empty<T>(list: &[T]) -> Option<&[T]> {
    (!list.is_empty()).then_some(list)
}

/// Returns an integer whose reader excluded negative numbers.
fn unsigned(number: Option<i64>) -> Option<u64> {
    number.and_then(|number| u64::try_from(number).ok())
}

/// Returns an integer whose reader allowed small numbers only.
pub(crate) fn small(number: Option<i64>) -> Option<u32> {
    number.and_then(|number| u32::try_from(number).ok())
}

fn read_max_tokens(fields: &mut Fields<'_>, form: Form) -> Result<Option<u64>, ApiError> {
    let mut first = None;
    for name in form.max_tokens {
        let number = unsigned(fields.integer(name, form.min_max_tokens..=i64::MAX)?);
        first = first.or(number);
    }
    Ok(first)
}

fn read_stop(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let Some(value) = fields.take("stop") else { return Ok(Vec::new()) };
    let strings = match serde_json::from_str::<String>(value.get()) {
        Ok(text) => Some(vec![text]),
        Err(_) => crate::json::bounded_list::<String>(value.get(), MAX_STOP_STRINGS),
    };
    match strings.filter(|strings| strings.iter().all(|text| is_stop(text))) {
        Some(strings) => Ok(strings),
        None => {
            let allowed = format_args!(
                "a string or at most {MAX_STOP_STRINGS} strings, each of 1 to {MAX_STOP_BYTES} bytes"
            );
            Err(invalid("stop", value.get(), allowed))
        }
    }
}

fn is_stop(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_STOP_BYTES
}

fn read_bad_words(fields: &mut Fields<'_>) -> Result<Vec<String>, ApiError> {
    let allowed = format!("at most {MAX_STOP_TOKENS} strings, each of 1 to {MAX_STOP_BYTES} bytes");
    let words = fields.list::<String>("bad_words", MAX_STOP_TOKENS, &allowed)?.unwrap_or_default();
    if let Some(word) = words.iter().find(|word| !is_stop(word)) {
        return Err(invalid("bad_words", word, allowed));
    }
    Ok(words)
}

fn read_tokens(fields: &mut Fields<'_>, name: &str, most: usize) -> Result<Vec<u32>, ApiError> {
    let allowed = format!("a list of at most {most} token ids");
    Ok(fields.list::<u32>(name, most, &allowed)?.unwrap_or_default())
}

fn read_logit_bias(fields: &mut Fields<'_>) -> Result<BTreeMap<u32, f64>, ApiError> {
    let mut entries = BTreeMap::new();
    let Some(value) = fields.take("logit_bias") else { return Ok(entries) };
    // The limit on the members of an object is that of the entries.
    for entry in Fields::of_member(value, "logit_bias")?.into_entries() {
        let path = format!("logit_bias.{}", crate::error::quoted(&entry.name));
        let Ok(token) = entry.name.parse::<u32>() else {
            return Err(invalid(&path, &entry.name, "a token id as the name of the member"));
        };
        match serde_json::from_str::<f64>(entry.value) {
            Ok(bias) if (-100.0..=100.0).contains(&bias) => entries.insert(token, bias),
            _ => return Err(invalid(&path, entry.value, "a number from -100 to 100")),
        };
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form =
        Form { max_tokens: &["max_completion_tokens", "max_tokens"], min_max_tokens: 1 };

    fn read(body: &str) -> Result<Sampling, ApiError> {
        let mut fields = Fields::of_body(body.as_bytes())?;
        let sampling = Sampling::read(&mut fields, FORM, &mut Budget::new())?;
        assert!(fields.unknown().is_empty(), "{body}: {:?}", fields.unknown());
        Ok(sampling)
    }

    fn check_error(body: &str, message: &str) {
        let error = read(body).unwrap_err();
        assert_eq!(error.message, message);
        let param = error.param.unwrap();
        assert!(body.contains(param.split('.').next().unwrap()), "{param}");
    }

    #[test]
    fn nothing_set_writes_nothing() {
        let sampling = read(r#"{"temperature":null,"stop":null,"stop_token_ids":[],"n":null}"#);
        let sampling = sampling.unwrap();
        assert_eq!(sampling, Sampling::default());
        assert_eq!(sampling.to_vllm(None, None), "{}");
        assert_eq!(sampling.to_vllm(Some(16), None), r#"{"max_tokens":16}"#);
    }

    #[test]
    fn everything_set_has_the_names_of_vllm() {
        let sampling = read(
            r#"{"temperature":0.5,"top_p":1,"top_k":-1,"min_p":0,"presence_penalty":-2,
            "frequency_penalty":2,"repetition_penalty":1.1,"seed":-7,"stop":"x","stop_token_ids":[1],
            "max_tokens":9,"max_completion_tokens":8.0,"min_tokens":2,"ignore_eos":true,
            "logit_bias":{"5":-100,"1":0.5},"bad_words":["b"],"allowed_token_ids":[2,3],
            "skip_special_tokens":false,"spaces_between_special_tokens":false,
            "include_stop_str_in_output":true,"n":2,"prompt_logprobs":0,"priority":-1,
            "thinking_token_budget":5,"response_format":{"type":"json_object"}}"#,
        )
        .unwrap();
        assert_eq!(
            sampling.to_vllm(Some(16), None),
            concat!(
                r#"{"n":2,"presence_penalty":-2.0,"frequency_penalty":2.0,"repetition_penalty":1.1,"#,
                r#""temperature":0.5,"top_p":1.0,"top_k":-1,"min_p":0.0,"seed":-7,"stop":["x"],"#,
                r#""stop_token_ids":[1],"ignore_eos":true,"max_tokens":8,"min_tokens":2,"#,
                r#""prompt_logprobs":0,"skip_special_tokens":false,"#,
                r#""spaces_between_special_tokens":false,"include_stop_str_in_output":true,"#,
                r#""logit_bias":{"1":0.5,"5":-100.0},"bad_words":["b"],"allowed_token_ids":[2,3],"#,
                r#""thinking_token_budget":5,"structured_outputs":"{\"json_object\":true}"}"#
            )
        );
        assert_eq!(sampling.priority, Some(-1));
    }

    #[test]
    fn errors_name_value_and_limits() {
        check_error(
            r#"{"temperature":2.5}"#,
            "invalid temperature 2.5: expected a number from 0 to 2",
        );
        check_error(r#"{"top_p":0}"#, "invalid top_p 0: expected a number above 0 and at most 1");
        check_error(
            r#"{"max_tokens":0}"#,
            "invalid max_tokens 0: expected an integer from 1 to 9223372036854775807",
        );
        check_error(
            r#"{"n":2,"temperature":0}"#,
            "invalid n 2: expected 1, because temperature 0 makes all choices equal",
        );
        check_error(r#"{"n":129}"#, "invalid n 129: expected an integer from 1 to 128");
        check_error(
            r#"{"stop":["a",""]}"#,
            "invalid stop [\"a\",\"\"]: expected a string or at most 16 strings, each of 1 to 1024 bytes",
        );
        check_error(
            r#"{"logit_bias":{"5":101}}"#,
            "invalid logit_bias.5 101: expected a number from -100 to 100",
        );
        check_error(
            r#"{"logit_bias":{"x":1}}"#,
            "invalid logit_bias.x x: expected a token id as the name of the member",
        );
        check_error(
            r#"{"min_tokens":5,"max_tokens":4}"#,
            "invalid min_tokens 5: expected at most max_tokens, which is 4",
        );
        check_error(
            r#"{"prompt_logprobs":1,"stream":true}"#,
            "prompt_logprobs is not available with stream true",
        );
        check_error(
            r#"{"seed":1.5}"#,
            "invalid seed 1.5: expected an integer from -9223372036854775808 to 9223372036854775807",
        );
    }

    #[test]
    fn stops() {
        assert_eq!(read(r#"{"stop":["a","b"]}"#).unwrap().stop, ["a", "b"]);
        assert!(read(r#"{"stop":[]}"#).unwrap().stop.is_empty());
        let many = vec!["x"; MAX_STOP_STRINGS + 1];
        let long = "x".repeat(MAX_STOP_BYTES + 1);
        for value in [Value::from(many), Value::from(long), Value::from(""), Value::from(5)] {
            let body = format!(r#"{{"stop":{value}}}"#);
            assert_eq!(read(&body).unwrap_err().param.as_deref(), Some("stop"));
        }
    }

    #[test]
    fn lists_of_tokens_have_limits() {
        let many = Value::from(vec![1; MAX_STOP_TOKENS + 1]);
        assert!(read(&format!(r#"{{"stop_token_ids":{many}}}"#)).is_err());
        assert!(read(r#"{"stop_token_ids":[-1]}"#).is_err());
        let bias: Vec<String> =
            (0..=MAX_LOGIT_BIAS).map(|token| format!("\"{token}\":1")).collect();
        let error = read(&format!(r#"{{"logit_bias":{{{}}}}}"#, bias.join(","))).unwrap_err();
        assert!(error.message.contains("1024 members"), "{}", error.message);
    }
}
