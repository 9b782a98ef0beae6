//! What is collected of a request to a model that generates text, for the attributes that
//! OpenTelemetry defines for generative models.

use crate::metrics::record::{FinishReason, TokenCounts};
use crate::timeline::Instant;

/// The most choices whose reasons of the end are collected.
const MAX_REASONS: usize = 128;

/// The kind of a request to a model that generates text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operation {
    /// A prompt that the model continues.
    #[default]
    TextCompletion,
    /// Messages, from which the server makes the prompt.
    Chat,
}

impl Operation {
    /// Returns the value of `gen_ai.operation.name`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TextCompletion => "text_completion",
            Self::Chat => "chat",
        }
    }
}

/// The parameters of a request that a trace has.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingLimits {
    /// The most tokens of each choice.
    pub max_tokens: Option<u64>,
    /// The temperature of sampling.
    pub temperature: Option<f64>,
}

/// What one request has generated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedGeneration {
    /// The parameters.
    pub limits: SamplingLimits,
    /// Tokens of all prompts, if the model counts them.
    pub input_tokens: Option<u64>,
    /// Tokens of all choices, if the model counts them.
    pub output_tokens: Option<u64>,
    /// The arrival of the first response with a token, and of the last response.
    pub responses: Option<(Instant, Instant)>,
    /// The reasons for which choices have ended; of 128 choices at most.
    pub reasons: Vec<FinishReason>,
}

impl TracedGeneration {
    /// Adds a response that arrived at `at`. Without numbers, every response has a token. The tokens
    /// of the prompt are given once for each prompt.
    pub(super) fn add(&mut self, counts: &TokenCounts, at: Instant) {
        if let Some(prompt) = counts.prompt {
            let before = self.input_tokens.unwrap_or(0);
            self.input_tokens = Some(before.saturating_add(prompt));
        }
        if let Some(generated) = counts.generated {
            let before = self.output_tokens.unwrap_or(0);
            self.output_tokens = Some(before.saturating_add(generated));
        }
        if counts.generated.or(counts.arrived) != Some(0) || self.responses.is_some() {
            let first = self.responses.map_or(at, |(first, _)| first);
            self.responses = Some((first, at));
        }
        let room = MAX_REASONS.saturating_sub(self.reasons.len());
        self.reasons.extend(counts.finished.reasons().take(room));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_add_up_and_are_limited() {
        let mut generation = TracedGeneration::default();
        let response = |generated, reasons: u64| {
            let mut counts =
                TokenCounts { prompt: Some(2), generated: Some(generated), ..Default::default() };
            (0..reasons).for_each(|_| counts.finished.add(FinishReason::Stop));
            counts
        };
        generation.add(&response(0, 0), Instant(1));
        assert_eq!(generation.responses, None, "the response has no token");
        generation.add(&response(2, 0), Instant(2));
        generation.add(&response(3, 1), Instant(3));
        assert_eq!((generation.input_tokens, generation.output_tokens), (Some(6), Some(5)));
        assert_eq!(generation.responses, Some((Instant(2), Instant(3))));
        assert_eq!(generation.reasons, [FinishReason::Stop]);
        generation.add(&response(u64::MAX, 1000), Instant(4));
        assert_eq!((generation.output_tokens, generation.reasons.len()), (Some(u64::MAX), 128));
    }
}
