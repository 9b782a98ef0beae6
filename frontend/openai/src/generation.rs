//! The run of a request: one inference for each prompt, whose responses become deltas of choices.

use std::future::poll_fn;
use std::task::{Context, Poll};

use pharos::error::InferError;
use pharos::service::{Responses, Streamed};
use pharos::timeline::Timeline;

use crate::answer::Failure;
use crate::choice::{Choice, Delta, Parsers};
use crate::contract::Step;
use crate::response::{FinishReason, Usage};

/// What one response of a model adds, by the number of the choice.
pub(crate) type Deltas = Vec<(u32, Delta)>;

/// The inferences of a request. Dropping it cancels those that run.
pub(crate) struct Generation {
    runs: Vec<Run>,
    /// The run to poll first, so that no prompt starves the others.
    next: usize,
    /// The time of the latest response.
    timeline: Timeline,
    /// The field of the client with the prompt, for errors.
    prompt_field: &'static str,
    structure_field: Option<&'static str>,
}

/// The inference of one prompt.
struct Run {
    /// `None` after the last response.
    responses: Option<Box<dyn Responses>>,
    /// The number of its first choice.
    first: u32,
    choices: Vec<Choice>,
    /// The limit of tokens of each choice, if the client set one.
    max_tokens: Option<u64>,
    /// Whether the client wants log probabilities.
    with_logprobs: bool,
    prompt_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    output_tokens: Option<u64>,
    prompt: PromptDetails,
    /// Whether a response was taken.
    has_begun: bool,
}

/// What a model returns of a prompt, if the client wants it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptDetails {
    pub(crate) token_ids: Option<Vec<u32>>,
    /// JSON: the log probabilities of its tokens.
    pub(crate) logprobs: Option<String>,
}

impl Generation {
    /// Creates a request without inferences. `prompt_field` is the field of the client with the
    /// prompt.
    pub(crate) fn new(prompt_field: &'static str) -> Self {
        Self {
            runs: Vec::new(),
            next: 0,
            timeline: Timeline::default(),
            prompt_field,
            structure_field: None,
        }
    }

    /// Returns the failure of an inference, with the field of the client that is at fault.
    pub(crate) fn failure(&self, error: InferError) -> Failure {
        Failure::of_model(error, self.prompt_field, self.structure_field)
    }

    /// Adds the inference of a prompt with this number of choices.
    pub(crate) fn add(
        &mut self,
        responses: Box<dyn Responses>,
        choices: u32,
        parsers: &Parsers,
        max_tokens: Option<u64>,
    ) {
        self.structure_field = parsers.structure_field;
        let first = self.runs.iter().map(|run| run.choices.len() as u32).sum();
        self.runs.push(Run {
            responses: Some(responses),
            first,
            choices: (0..choices).map(|_| Choice::new(parsers.clone())).collect(),
            max_tokens,
            with_logprobs: parsers.logprobs,
            prompt_tokens: None,
            cached_tokens: None,
            output_tokens: None,
            prompt: PromptDetails::default(),
            has_begun: false,
        });
    }

    /// Returns the numbers of tokens so far; `None` if a model does not count them.
    pub(crate) fn usage(&self) -> Option<Usage> {
        let mut usage = Usage::default();
        for run in &self.runs {
            usage.prompt_tokens = usage.prompt_tokens.saturating_add(run.prompt_tokens?);
            usage.completion_tokens = usage.completion_tokens.saturating_add(run.output_tokens?);
            if let Some(cached) = run.cached_tokens {
                let before = usage.cached_tokens.unwrap_or(0);
                usage.cached_tokens = Some(before.saturating_add(cached));
            }
        }
        Some(usage)
    }

    /// Returns what the models have returned of the prompts, in their order.
    pub(crate) fn prompts(&mut self) -> Vec<PromptDetails> {
        self.runs.iter_mut().map(|run| std::mem::take(&mut run.prompt)).collect()
    }

    /// Returns the times of the request, as of the latest response.
    pub(crate) fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Collects what all responses add, by choice.
    ///
    /// # Errors
    /// An inference failed.
    pub(crate) async fn collect(&mut self) -> Result<Vec<Delta>, InferError> {
        let count = self.runs.iter().map(|run| run.choices.len()).sum();
        let mut choices: Vec<Delta> = Vec::new();
        choices.resize_with(count, Delta::default);
        while let Some(deltas) = self.next().await {
            for (index, delta) in deltas? {
                if let Some(choice) = choices.get_mut(index as usize) {
                    choice.append(delta);
                }
            }
        }
        Ok(choices)
    }

    /// Returns what the next response adds; `None` after the last one.
    pub(crate) fn next(&mut self) -> impl Future<Output = Option<Result<Deltas, InferError>>> {
        poll_fn(|cx| self.poll_next(cx))
    }

    /// Polls for what the next response adds; `None` after the last one. After an error, all
    /// inferences are cancelled.
    pub(crate) fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Deltas, InferError>>> {
        let count = self.runs.len();
        let mut is_running = false;
        for offset in 0..count {
            let at = (self.next + offset) % count;
            let Some(run) = self.runs.get_mut(at) else { continue };
            let Some(responses) = &mut run.responses else { continue };
            is_running = true;
            let Poll::Ready(streamed) = responses.poll_next(cx) else { continue };
            self.next = at + 1;
            if let Some(Streamed { answer: Ok(response), .. }) = &streamed {
                self.timeline = response.timeline;
            }
            let deltas = run.take(streamed);
            if deltas.is_err() {
                self.runs.clear();
            }
            return Poll::Ready(Some(deltas));
        }
        if is_running { Poll::Pending } else { Poll::Ready(None) }
    }
}

impl Run {
    /// Takes a response; `None` means that there are no more.
    fn take(&mut self, streamed: Option<Streamed>) -> Result<Deltas, InferError> {
        let mut deltas = Vec::new();
        let is_last = streamed.as_ref().is_none_or(|streamed| streamed.last);
        if let Some(Streamed { answer, empty, .. }) = streamed {
            let response = answer?;
            if !empty {
                self.read(Step::read(&response, self.with_logprobs)?, &mut deltas);
            }
        }
        if is_last {
            let reason = self.reason_at_end();
            for (index, choice) in (self.first..).zip(&mut self.choices) {
                if !choice.is_finished() {
                    deltas.push((index, choice.end(reason)));
                }
            }
        }
        // The model may go on after a stop string, which it does not know.
        if is_last || self.choices.iter().all(Choice::is_finished) {
            self.responses = None;
        }
        Ok(deltas)
    }

    fn read(&mut self, step: Step, deltas: &mut Deltas) {
        self.prompt_tokens = step.tokens.prompt.or(self.prompt_tokens);
        self.cached_tokens = step.tokens.cached.or(self.cached_tokens);
        if let Some(tokens) = step.tokens.generated {
            self.output_tokens = Some(self.output_tokens.unwrap_or(0).saturating_add(tokens));
        }
        if !step.prompt_token_ids.is_empty() {
            self.prompt.token_ids = Some(step.prompt_token_ids);
        }
        self.prompt.logprobs = step.prompt_logprobs.or(self.prompt.logprobs.take());
        let choices = (self.first..).zip(&mut self.choices).zip(step.choices);
        for ((index, choice), step) in choices {
            let delta = choice.push(step);
            // A client takes the first chunk for the first token, also if its text is held back: a
            // part of a character, or what may begin a stop string.
            if !delta.is_empty() || !self.has_begun {
                deltas.push((index, delta));
            }
        }
        self.has_begun = true;
    }

    /// Returns why choices ended whose model gave no reason.
    fn reason_at_end(&self) -> FinishReason {
        let limit = self.max_tokens.map(|limit| limit.saturating_mul(self.choices.len() as u64));
        match (self.output_tokens, limit) {
            (Some(tokens), Some(limit)) if tokens >= limit => FinishReason::Length,
            _ => FinishReason::Stop,
        }
    }
}
