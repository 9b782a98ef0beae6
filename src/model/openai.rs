//! Models that implement OpenAI's API themselves: a request is the JSON of the client, a response the
//! JSON of the answer or of a chunk. Which models they are, and how their tokens are counted.

use std::borrow::Cow;

use pharos_metrics::record::{FinishReason, TokenCounts};
use serde::Deserialize;

use super::config::{ModelConfig, TensorSpec};
use crate::tensor::{DataType, Tensor, bytes_elements};

/// The input with the JSON of a request.
pub const OPENAI_REQUEST: &str = "openai_request";
/// The optional input with the path of a request below `/v1`, such as `chat/completions`.
pub const OPENAI_PATH: &str = "openai_path";
/// The output with the JSON of the response, or of each chunk of a stream.
pub const OPENAI_RESPONSE: &str = "openai_response";

/// The longest output whose tokens are counted, in bytes: longer JSON would delay other requests.
const MAX_COUNTED: usize = 1 << 20;

/// Returns whether a model implements OpenAI's API itself.
pub fn implements_openai(config: &ModelConfig) -> bool {
    let has = |specs: &[TensorSpec], name: &str| {
        specs.iter().any(|spec| spec.name == name && spec.datatype == DataType::Bytes)
    };
    has(&config.inputs, OPENAI_REQUEST) && has(&config.outputs, OPENAI_RESPONSE)
}

/// The members of a response, or of a chunk, that have numbers of tokens or text.
#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    usage: Option<Usage>,
    /// The type of an event of `responses`.
    #[serde(borrow)]
    r#type: Option<Cow<'a, str>>,
    /// The response in an event of `responses`.
    #[serde(borrow)]
    response: Option<Response<'a>>,
    /// The state of a whole response of `responses`.
    #[serde(borrow)]
    status: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
}

#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    tool_calls: Option<Vec<serde::de::IgnoredAny>>,
}

#[derive(Deserialize)]
struct Response<'a> {
    usage: Option<Usage>,
    #[serde(borrow)]
    status: Option<Cow<'a, str>>,
}

/// Numbers of tokens, with the names of each path.
#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    input_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    output_tokens: Option<u64>,
    total_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
    input_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

/// Adds the numbers of tokens in the JSON of an output, as far as they can be read.
pub(super) fn add_counts(tensor: &Tensor, counts: &mut TokenCounts) {
    if tensor.datatype != DataType::Bytes || tensor.data.len() > MAX_COUNTED {
        return;
    }
    let bytes = tensor.data.as_slice();
    for json in bytes_elements(&bytes).flatten() {
        let mut arrived = 0;
        if let Ok(answer) = serde_json::from_slice::<Answer<'_>>(json) {
            answer.add_to(counts);
            arrived = u64::from(answer.has_text());
        }
        counts.arrived = Some(counts.arrived.unwrap_or(0).saturating_add(arrived));
    }
}

impl Answer<'_> {
    fn add_to(&self, counts: &mut TokenCounts) {
        let of_event = self.response.as_ref();
        if let Some(usage) = self.usage.as_ref().or(of_event.and_then(|one| one.usage.as_ref())) {
            usage.set_in(counts);
        }
        for choice in self.choices.iter().flatten() {
            let reason = choice.finish_reason.as_deref().and_then(FinishReason::named);
            reason.into_iter().for_each(|reason| counts.finished.add(reason));
        }
        let status = self.status.as_deref().or(of_event.and_then(|one| one.status.as_deref()));
        let reason = match status {
            Some("completed") => FinishReason::named("stop"),
            Some("incomplete") => FinishReason::named("length"),
            Some("failed") => FinishReason::named("error"),
            _ => None,
        };
        reason.into_iter().for_each(|reason| counts.finished.add(reason));
    }

    /// Whether a chunk adds to the output of the model.
    fn has_text(&self) -> bool {
        let is_text = |text: &Option<Cow<'_, str>>| text.as_ref().is_some_and(|t| !t.is_empty());
        let adds = |choice: &Choice<'_>| {
            let of_delta = choice.delta.as_ref().is_some_and(|delta| {
                is_text(&delta.content)
                    || is_text(&delta.reasoning)
                    || is_text(&delta.reasoning_content)
                    || delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
            });
            of_delta || is_text(&choice.text)
        };
        self.choices.iter().flatten().any(adds)
            || self.r#type.as_ref().is_some_and(|kind| kind.ends_with(".delta"))
    }
}

impl Usage {
    fn set_in(&self, counts: &mut TokenCounts) {
        let generated = self.completion_tokens.or(self.output_tokens);
        let prompt = self.prompt_tokens.or(self.input_tokens);
        // Some forms of `rerank` have the sum alone.
        let sum = self.total_tokens.filter(|_| generated.is_none());
        counts.prompt = prompt.or(sum).or(counts.prompt);
        counts.generated_in_all = generated.or(counts.generated_in_all);
        let details = self.prompt_tokens_details.as_ref().or(self.input_tokens_details.as_ref());
        counts.cached = details.and_then(|details| details.cached_tokens).or(counts.cached);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::push_bytes_element;

    fn counts(answers: &[&str]) -> TokenCounts {
        let mut data = Vec::new();
        answers.iter().for_each(|json| assert!(push_bytes_element(&mut data, json.as_bytes())));
        let shape = vec![answers.len() as i64];
        let tensor = Tensor { datatype: DataType::Bytes, shape, data: data.into() };
        let mut counts = TokenCounts::default();
        add_counts(&tensor, &mut counts);
        counts
    }

    #[test]
    fn the_usage_of_each_path() {
        for (json, prompt, generated, cached) in [
            (
                r#"{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":
                {"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,
                "prompt_tokens_details":{"cached_tokens":1}}}"#,
                3,
                Some(2),
                Some(1),
            ),
            (
                r#"{"object":"response","status":"completed","usage":{"input_tokens":3,
                "output_tokens":2,"input_tokens_details":{"cached_tokens":0}}}"#,
                3,
                Some(2),
                Some(0),
            ),
            (
                r#"{"type":"response.incomplete","response":{"status":"incomplete","usage":
                {"input_tokens":3,"output_tokens":2}}}"#,
                3,
                Some(2),
                None,
            ),
            (
                r#"{"data":[{"embedding":[0.5]}],"usage":{"prompt_tokens":4,"total_tokens":4}}"#,
                4,
                None,
                None,
            ),
            (r#"{"results":[],"usage":{"total_tokens":9}}"#, 9, None, None),
        ] {
            let found = counts(&[json]);
            assert_eq!((found.prompt, found.generated_in_all), (Some(prompt), generated), "{json}");
            assert_eq!((found.cached, found.generated), (cached, None), "{json}");
            assert_eq!(
                found.finished.reasons().count(),
                usize::from(generated.is_some()),
                "{json}"
            );
        }
    }

    #[test]
    fn chunks_with_text_arrive() {
        for (json, arrived) in [
            (r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, 0),
            (r#"{"choices":[{"delta":{"content":"a\n"}}],"usage":null}"#, 1),
            (r#"{"choices":[{"delta":{"reasoning":"a"}}]}"#, 1),
            (r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#, 1),
            (r#"{"choices":[{"text":"a"}]}"#, 1),
            (r#"{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}"#, 0),
            (r#"{"type":"response.output_text.delta","delta":"a"}"#, 1),
            (r#"{"type":"response.created","response":{"status":"in_progress","usage":null}}"#, 0),
            ("no JSON", 0),
        ] {
            let found = counts(&[json]);
            assert_eq!(found.arrived, Some(arrived), "{json}");
            assert_eq!(found.finished.reasons().count(), 0, "{json}");
        }
        let two = counts(&[r#"{"choices":[{"text":"a"}]}"#; 2]);
        assert_eq!(two.arrived, Some(2));
    }

    #[test]
    fn long_outputs_are_not_read() {
        let long =
            format!(r#"{{"usage":{{"prompt_tokens":1}},"x":"{}"}}"#, "x".repeat(MAX_COUNTED));
        assert_eq!(counts(&[&long]), TokenCounts::default());
    }
}
