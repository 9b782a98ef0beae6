//! Requests of `POST /v1/completions`.

use crate::error::ApiError;
use crate::json::{Budget, Fields};
use crate::options::RequestOptions;
pub use crate::prompt::Prompt;
use crate::sampling::{Form, MAX_LOGPROBS, MAX_N, Sampling, small};

/// The most prompts of a request.
pub const MAX_PROMPTS: usize = 1_024;
/// The limit of output tokens of a request that sets none, as OpenAI and vLLM have it.
pub const DEFAULT_MAX_TOKENS: u64 = 16;

/// A checked request of `POST /v1/completions`.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    /// The prompts, from 1 to 1,024. Choice `prompt * n + i` is the i-th of a prompt.
    pub prompts: Vec<Prompt>,
    /// Whether the text of a choice begins with the prompt.
    pub echo: bool,
    /// Whether the tokenizer adds special tokens to a prompt that is text.
    pub add_special_tokens: bool,
    /// Sampling parameters.
    pub sampling: Sampling,
    /// Model, stream and extensions.
    pub options: RequestOptions,
    /// The names of unknown fields, at most 16. They have no effect.
    pub unknown: Vec<String>,
}

impl CompletionRequest {
    /// Parses and checks the body of a request.
    ///
    /// # Errors
    ///
    /// 400, with the field at fault in dotted form.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::of_body(body)?;
        let mut budget = Budget::new();
        let options = RequestOptions::read(&mut fields, &mut budget)?;
        let Some(prompt) = fields.take("prompt") else { return Err(fields.missing("prompt")) };
        let prompts = Prompt::read_all(prompt, "prompt", MAX_PROMPTS)?;

        if fields.take("suffix").is_some_and(|suffix| suffix.get() != "\"\"") {
            return Err(ApiError::invalid_field(
                "suffix",
                "suffix is not supported: models here complete text only at its end",
            ));
        }
        let echo = fields.boolean("echo")?.unwrap_or(false);
        // Without output, the request scores its prompt.
        let form = Form { max_tokens: &["max_tokens"], min_max_tokens: i64::from(!echo) };
        let mut sampling = Sampling::read(&mut fields, form, &mut budget)?;
        sampling.logprobs = small(fields.integer("logprobs", 0..=MAX_LOGPROBS)?);
        options.add_extra_args(&mut sampling.extra_args);
        let n = sampling.choices_per_prompt();
        if let Some(best_of) = fields.integer("best_of", 1..=MAX_N)?
            && best_of != i64::from(n)
        {
            return Err(ApiError::invalid_field(
                "best_of",
                format!("invalid best_of {best_of}: expected n, which is {n}"),
            ));
        }
        Ok(Self {
            prompts,
            echo,
            add_special_tokens: fields.boolean("add_special_tokens")?.unwrap_or(true),
            sampling,
            options,
            unknown: fields.unknown(),
        })
    }

    /// Returns the number of choices of the response.
    pub fn choices(&self) -> usize {
        self.prompts.len() * self.sampling.choices_per_prompt() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Result<CompletionRequest, ApiError> {
        CompletionRequest::parse(body.as_bytes())
    }

    fn check_prompts(prompt: &str, expected: &[Prompt]) {
        let request = parse(&format!(r#"{{"prompt":{prompt}}}"#)).unwrap();
        assert_eq!(request.prompts, expected, "{prompt}");
    }

    fn check_error(body: &str, param: &str, part_of_message: &str) {
        let error = parse(body).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert!(error.message.contains(part_of_message), "{}", error.message);
    }

    #[test]
    fn forms_of_prompts() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        check_prompts(r#""a""#, &[text("a")]);
        check_prompts(r#"["a"]"#, &[text("a")]);
        check_prompts(r#" [ "a" , "[" ] "#, &[text("a"), text("[")]);
        check_prompts("[1,2]", &[Prompt::Tokens(vec![1, 2])]);
        check_prompts("[ [1,2] , [3] ]", &[Prompt::Tokens(vec![1, 2]), Prompt::Tokens(vec![3])]);
        for prompt in [
            "\"\"",
            "[]",
            "[[]]",
            "[\"\"]",
            "[\"a\",1]",
            "[1,\"a\"]",
            "[[1],2]",
            "[[1],\"a\"]",
            "[[[1]]]",
            "7",
            "{}",
            "true",
            "[-1]",
            "[1.5]",
            "[4294967296]",
            "[[\"a\"]]",
            "[{}]",
        ] {
            let body = format!(r#"{{"prompt":{prompt}}}"#);
            check_error(&body, "prompt", "expected a string");
        }
        check_error("{}", "prompt", "missing");
    }

    #[test]
    fn numbers_of_prompts() {
        let body = |number: usize| format!(r#"{{"prompt":[{}"a"]}}"#, "\"a\",".repeat(number - 1));
        assert_eq!(parse(&body(MAX_PROMPTS)).unwrap().prompts.len(), MAX_PROMPTS);
        assert!(parse(&body(MAX_PROMPTS + 1)).is_err());
        // The number of token ids of one prompt has no limit besides that of the body.
        let ids = format!(r#"{{"prompt":[{}1]}}"#, "1,".repeat(300_000));
        assert_eq!(parse(&ids).unwrap().prompts.len(), 1);
    }

    #[test]
    fn fields() {
        let request = parse(
            r#"{"prompt":["a","b"],"n":3,"best_of":3,"logprobs":5,"echo":true,"max_tokens":0,
            "suffix":null,"user":"u","x":1}"#,
        )
        .unwrap();
        assert_eq!(request.choices(), 6);
        assert!(request.echo);
        assert_eq!(request.sampling.logprobs, Some(5));
        assert_eq!(request.sampling.max_tokens, Some(0));
        assert_eq!(request.unknown, ["x"]);
        check_error(r#"{"prompt":"a","max_tokens":0}"#, "max_tokens", "from 1 to");
        check_error(r#"{"prompt":"a","suffix":"b"}"#, "suffix", "not supported");
        check_error(r#"{"prompt":"a","best_of":2}"#, "best_of", "expected n, which is 1");
        check_error(r#"{"prompt":"a","logprobs":21}"#, "logprobs", "0 to 20");
        check_error(r#"{"prompt":"a","logprobs":true}"#, "logprobs", "an integer");
    }
}
