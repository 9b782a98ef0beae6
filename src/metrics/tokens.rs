//! The tokens of a model that generates text, and the times at which they arrive. Every token is
//! counted once, where its response leaves the model, whatever the protocol of the client is.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use pharos_base::timeline::{Instant, Timeline};

use super::atomic::Count;
use super::durations::{Buckets, copy_of, definition};
use super::family::Registry;
use super::labels::FinishReason;
use super::reading::{Details, Number, Reading};
use super::source::{ModelValue, TokenDistribution, TokenValue};

/// The most tokens of one response whose times are observed one by one: a model reports the number.
const MAX_OBSERVED: u64 = 4096;

/// The tokens of one response, as the model has counted them; `None` if it does not count them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Tokens of the prompt, the same in each response to a request.
    pub prompt: Option<u64>,
    /// Tokens of the prompt that were in a cache.
    pub cached: Option<u64>,
    /// Tokens that the model has generated since the previous response.
    pub generated: Option<u64>,
    /// Tokens that the model has generated for the request until now, if it counts them from the
    /// beginning.
    pub generated_in_all: Option<u64>,
    /// Tokens that arrive with this response, if the model counts them at another time than they
    /// arrive.
    pub arrived: Option<u64>,
    /// Choices that have ended with this response.
    pub finished: Finished,
    /// What the budget of a tenant is charged for numbers that the response does not have.
    pub estimated: EstimatedTokens,
}

/// An estimate of tokens from the bytes of texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EstimatedTokens {
    /// Tokens of the prompt, the same for each response to a request.
    pub prompt: u64,
    /// Tokens of this response.
    pub generated: u64,
}

/// The number of choices that have ended, by [`FinishReason`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Finished([u64; FinishReason::ALL.len()]);

impl Finished {
    /// Counts a choice.
    pub fn add(&mut self, reason: FinishReason) {
        self.0[reason.index()] += 1;
    }

    /// Returns the reason of each choice.
    pub fn reasons(&self) -> impl Iterator<Item = FinishReason> {
        let counts = FinishReason::ALL.into_iter().zip(self.0);
        counts.flat_map(|(reason, count)| (0..count).map(move |_| reason))
    }
}

/// The progress of one request's tokens. Its responses arrive one after the other.
#[derive(Debug, Default)]
pub struct TokenProgress {
    is_prompt_counted: AtomicBool,
    /// The tokens of the prompt.
    prompt: AtomicU64,
    /// What the budget of the tenant was charged for the prompt by an estimate.
    estimated_prompt: AtomicU64,
    /// What the budget of the tenant was charged for generated tokens.
    charged: AtomicU64,
    /// The start of the execution that made the first response; 0 before it.
    started: AtomicU64,
    /// The arrivals of the first and of the latest response with tokens; 0 before the first.
    first: AtomicU64,
    latest: AtomicU64,
    /// The generated tokens.
    generated: AtomicU64,
    /// Those after the first response with tokens.
    later: AtomicU64,
}

/// What a finished request adds to the distributions of its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FinishedRequest {
    queue_ns: u64,
    request_ns: u64,
    /// `None` if no response had the number.
    prompt: Option<u64>,
    /// `None` if no response had a token.
    generated: Option<u64>,
    /// The mean time between two tokens, if there are several responses with tokens.
    per_token_ns: Option<u64>,
}

/// What a response adds to the tokens of its model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AddedTokens {
    pub(super) prompt: u64,
    cached: u64,
    pub(super) generated: u64,
    /// The time to the first token, if this response has it.
    pub(super) first_ns: Option<u64>,
    /// The number of tokens that followed another one, and the time of each since that one.
    pub(super) intervals: u64,
    pub(super) interval_ns: u64,
    finished: Finished,
    /// What the budget of the tenant is charged.
    pub(super) charged: u64,
}

impl TokenProgress {
    /// Returns the counts of a response with the tokens since the previous one, which is counted
    /// already.
    #[must_use]
    pub fn since_previous(&self, counts: TokenCounts) -> TokenCounts {
        let before = self.generated.load(Ordering::Relaxed);
        let in_all = counts.generated_in_all.map(|in_all| in_all.saturating_sub(before));
        TokenCounts { generated: in_all.or(counts.generated), ..counts }
    }

    /// Takes a response that arrived at the end of `timeline`, which begins with the arrival of the
    /// request. The times of tokens are unknown if one response has the whole output.
    pub(super) fn advance(
        &self,
        counts: TokenCounts,
        timeline: &Timeline,
        is_whole: bool,
    ) -> AddedTokens {
        let now = timeline.request_end;
        let mut added = AddedTokens { finished: counts.finished, ..AddedTokens::default() };
        if self.started.load(Ordering::Relaxed) == 0 {
            self.started.store(timeline.compute.start.0, Ordering::Relaxed);
        }
        if let Some(prompt) = counts.prompt
            && !self.is_prompt_counted.swap(true, Ordering::Relaxed)
        {
            added.prompt = prompt;
            self.prompt.store(prompt, Ordering::Relaxed);
            added.cached = counts.cached.unwrap_or(0).min(prompt);
        }
        added.generated = counts.generated.unwrap_or(0);
        added.charged = self.charged(&counts, added.prompt);
        // A model reports the number: sums must not wrap around.
        add_up(&self.generated, added.generated);
        let arrived = counts.arrived.filter(|_| !is_whole).unwrap_or(added.generated);
        if arrived == 0 {
            return added;
        }
        let latest = self.latest.swap(now.0, Ordering::Relaxed);
        if latest == 0 {
            self.first.store(now.0, Ordering::Relaxed);
            if !is_whole || arrived == 1 {
                added.first_ns = Some(now.ns_since(timeline.received));
            }
            // Nothing is known about the times of the other tokens of the first response.
            return added;
        }
        add_up(&self.later, arrived);
        added.intervals = arrived.min(MAX_OBSERVED);
        added.interval_ns = now.ns_since(Instant(latest)) / arrived;
        added
    }

    /// Returns what the request adds that has ended successfully at the end of `timeline`.
    pub(super) fn finished(&self, timeline: &Timeline) -> FinishedRequest {
        let started = match self.started.load(Ordering::Relaxed) {
            0 => timeline.compute.start,
            started => Instant(started),
        };
        let latest = Instant(self.latest.load(Ordering::Relaxed));
        let since_first = latest.ns_since(Instant(self.first.load(Ordering::Relaxed)));
        FinishedRequest {
            queue_ns: started.ns_since(timeline.received),
            request_ns: timeline.request_end.ns_since(timeline.received),
            prompt: self.has_prompt().then(|| self.prompt.load(Ordering::Relaxed)),
            generated: Some(self.generated.load(Ordering::Relaxed)).filter(|tokens| *tokens > 0),
            per_token_ns: since_first.checked_div(self.later.load(Ordering::Relaxed)),
        }
    }

    /// Returns whether a response had the number of tokens of the prompt.
    pub fn has_prompt(&self) -> bool {
        self.is_prompt_counted.load(Ordering::Relaxed)
    }

    /// Returns whether a response had a token.
    pub fn has_token(&self) -> bool {
        self.latest.load(Ordering::Relaxed) != 0
    }

    /// Returns what a response costs, whose prompt adds `prompt` tokens.
    fn charged(&self, counts: &TokenCounts, prompt: u64) -> u64 {
        let TokenCounts { estimated, .. } = counts;
        let of_prompt = if counts.prompt.is_some() || self.is_prompt_counted.load(Ordering::Relaxed)
        {
            prompt.saturating_sub(self.estimated_prompt.load(Ordering::Relaxed))
        } else if self.estimated_prompt.swap(estimated.prompt, Ordering::Relaxed) == 0 {
            estimated.prompt
        } else {
            0
        };
        let of_output = match counts.generated_in_all {
            // Responses before it may have been charged by an estimate.
            Some(in_all) => in_all.saturating_sub(self.charged.load(Ordering::Relaxed)),
            None => counts.generated.unwrap_or(estimated.generated),
        };
        add_up(&self.charged, of_output);
        of_prompt.saturating_add(of_output)
    }
}

/// The tokens of a model that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// None: the model has no texts.
    None,
    /// Those of prompts: the model makes vectors or scores of texts.
    Prompts,
    /// All: the model generates text.
    All,
}

/// The tokens of one model.
#[derive(Debug, Default)]
pub(super) struct TokenCells {
    /// Which tokens are counted, as the number of a [`Counted`].
    counted: AtomicU8,
    prompt: Count,
    cached: Count,
    generated: Count,
    /// Choices that have ended, by [`FinishReason`].
    finished: [Count; FinishReason::ALL.len()],
    /// Each is created when a definition first enables its metric.
    distributions: [OnceLock<Buckets>; TokenDistribution::ALL.len()],
}

impl TokenCells {
    /// Whether the model generates text.
    pub(super) fn is_on(&self) -> bool {
        self.counted.load(Ordering::Relaxed) == Counted::All as u8
    }

    /// Whether the model has a series of a value.
    pub(super) fn has(&self, value: TokenValue) -> bool {
        match value {
            TokenValue::Prompt => self.counted.load(Ordering::Relaxed) != Counted::None as u8,
            _ => self.is_on(),
        }
    }

    pub(super) fn count(&self, counted: Counted) {
        self.counted.store(counted as u8, Ordering::Relaxed);
    }

    /// Returns the values of this moment, with the requested details of the distributions; `None`
    /// leaves these out.
    pub(super) fn copy(&self, details: Option<Details>) -> Self {
        let copy = |distribution: &OnceLock<Buckets>| match details {
            Some(details) => copy_of(distribution, details),
            None => OnceLock::new(),
        };
        Self {
            counted: AtomicU8::new(self.counted.load(Ordering::Relaxed)),
            prompt: self.prompt.clone(),
            cached: self.cached.clone(),
            generated: self.generated.clone(),
            finished: self.finished.clone(),
            distributions: self.distributions.each_ref().map(copy),
        }
    }

    /// Creates the histograms that are defined and missing. `own` are the model's own buckets, by
    /// metric name.
    pub(super) fn define(&self, registry: &Registry, own: &[(String, Vec<f64>)]) {
        for (distribution, slot) in TokenDistribution::ALL.into_iter().zip(&self.distributions) {
            let value = ModelValue::Tokens(TokenValue::Distribution(distribution));
            if let Some((spec, unit)) = definition(registry, value) {
                slot.get_or_init(|| Buckets::new(own, &spec, unit));
            }
        }
    }

    fn observe(&self, distribution: TokenDistribution, value: u64, times: u64) {
        if let Some(buckets) = self.distributions[distribution as usize].get() {
            buckets.observe_times(value, times);
        }
    }

    /// Counts what a response has added.
    pub(super) fn add(&self, added: AddedTokens) {
        self.prompt.add(added.prompt);
        self.cached.add(added.cached);
        self.generated.add(added.generated);
        for (count, finished) in self.finished.iter().zip(added.finished.0) {
            count.add(finished);
        }
        if let Some(ns) = added.first_ns {
            self.observe(TokenDistribution::First, ns, 1);
        }
        self.observe(TokenDistribution::Interval, added.interval_ns, added.intervals);
    }

    /// Counts a request that has ended successfully.
    pub(super) fn add_finished(&self, request: FinishedRequest) {
        self.observe(TokenDistribution::Queue, request.queue_ns, 1);
        self.observe(TokenDistribution::Request, request.request_ns, 1);
        for (distribution, value) in [
            (TokenDistribution::PromptLength, request.prompt),
            (TokenDistribution::GenerationLength, request.generated),
            (TokenDistribution::PerToken, request.per_token_ns),
        ] {
            if let Some(value) = value {
                self.observe(distribution, value, 1);
            }
        }
    }

    /// Counts a request that has failed, or whose client has left.
    pub(super) fn failed(&self, reason: FinishReason) {
        self.finished[reason.index()].add(1);
    }

    /// Returns the numbers of choices that have ended.
    pub(super) fn finished(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = FinishReason::ALL.iter().zip(&self.finished);
        counts.map(|(reason, count)| (reason.as_str(), count.get()))
    }

    pub(super) fn read(&self, value: TokenValue, details: Details) -> Option<Reading> {
        let whole = |count: &Count| Some(Reading::Number(Number::Whole(count.get())));
        match value {
            TokenValue::Prompt => whole(&self.prompt),
            TokenValue::Cached => whole(&self.cached),
            TokenValue::Generated => whole(&self.generated),
            // The gauges of engines are not in these cells.
            TokenValue::Queued => None,
            TokenValue::Distribution(distribution) => {
                let buckets = self.distributions[distribution as usize].get()?;
                Some(Reading::Histogram(buckets.read(details)))
            }
        }
    }
}

/// Adds tokens to a sum, which one thread at a time changes.
fn add_up(sum: &AtomicU64, tokens: u64) {
    let before = sum.load(Ordering::Relaxed);
    sum.store(before.saturating_add(tokens), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(cells: &TokenCells) -> [u64; 3] {
        [&cells.prompt, &cells.cached, &cells.generated].map(Count::get)
    }

    /// Of a request that arrived at 1, began at 5, and has a response at `now`.
    fn timeline(now: u64) -> Timeline {
        let mut timeline = Timeline { received: Instant(1), ..Timeline::default() };
        timeline.compute.start = Instant(5);
        timeline.request_end = Instant(now);
        timeline
    }

    #[test]
    fn a_prompt_counts_once_and_tokens_with_each_response() {
        let cells = TokenCells::default();
        let progress = TokenProgress::default();
        let response = TokenCounts {
            prompt: Some(7),
            cached: Some(9),
            generated: Some(2),
            ..TokenCounts::default()
        };
        for now in [10, 20, 30] {
            cells.add(progress.advance(response, &timeline(now), false));
        }
        // No more tokens can have been in a cache than the prompt has.
        assert_eq!(counts(&cells), [7, 7, 6]);
        cells.add(progress.advance(TokenCounts::default(), &timeline(40), false));
        assert_eq!(counts(&cells), [7, 7, 6]);
    }

    #[test]
    fn what_is_not_counted_is_charged_by_an_estimate() {
        let estimated = EstimatedTokens { prompt: 5, generated: 2 };
        let charged = |progress: &TokenProgress, prompt, generated| {
            let counts = TokenCounts { prompt, generated, estimated, ..Default::default() };
            progress.advance(counts, &timeline(2), false).charged
        };
        let counted = TokenProgress::default();
        assert_eq!([7, 1].map(|prompt| charged(&counted, Some(prompt), Some(3))), [10, 3]);
        assert_eq!(charged(&counted, None, Some(3)), 3);
        let uncounted = TokenProgress::default();
        assert_eq!([(); 2].map(|()| charged(&uncounted, None, None)), [7, 2]);
        // The prompt is counted after all, with more tokens than estimated.
        assert_eq!(charged(&uncounted, Some(9), Some(1)), 4 + 1);
    }

    #[test]
    fn tokens_that_are_counted_at_the_end_arrive_before() {
        let estimated = EstimatedTokens { prompt: 0, generated: 1 };
        let progress = TokenProgress::default();
        let advance = |now, generated_in_all, arrived| {
            let counts = TokenCounts { generated_in_all, arrived, estimated, ..Default::default() };
            progress.advance(progress.since_previous(counts), &timeline(now), false)
        };
        let role = advance(5, None, Some(0));
        assert_eq!((role.generated, role.first_ns, role.charged), (0, None, 1));
        let first = advance(11, None, Some(1));
        assert_eq!((first.generated, first.first_ns, first.charged), (0, Some(10), 1));
        let counted = advance(21, Some(3), Some(1));
        assert_eq!((counted.generated, counted.intervals, counted.interval_ns), (3, 1, 10));
        assert_eq!(counted.charged, 1);
        let usage = advance(22, Some(5), Some(0));
        assert_eq!((usage.generated, usage.intervals, usage.charged), (2, 0, 2));
        // A response with the whole output says nothing about the times of its tokens.
        let whole = TokenProgress::default();
        let counts =
            TokenCounts { generated_in_all: Some(4), arrived: Some(1), ..Default::default() };
        let added = whole.advance(whole.since_previous(counts), &timeline(9), true);
        assert_eq!((added.generated, added.first_ns), (4, None));
    }

    #[test]
    fn the_charge_of_a_huge_number_does_not_wrap_around() {
        let progress = TokenProgress::default();
        let charged = |generated, generated_in_all| {
            let counts = TokenCounts { generated, generated_in_all, ..Default::default() };
            progress.advance(counts, &timeline(2), false).charged
        };
        assert_eq!(charged(Some(u64::MAX), None), u64::MAX);
        assert_eq!(charged(Some(2), None), 2);
        assert_eq!(charged(None, Some(9)), 0, "more was charged before");
    }

    #[test]
    fn the_tokens_of_a_response_share_its_time() {
        let progress = TokenProgress::default();
        let tokens = |generated| TokenCounts { generated: Some(generated), ..Default::default() };
        let first = progress.advance(tokens(1), &timeline(11), false);
        assert_eq!((first.first_ns, first.intervals), (Some(10), 0));
        let later = progress.advance(tokens(4), &timeline(31), false);
        assert_eq!((later.first_ns, later.intervals, later.interval_ns), (None, 4, 5));
        let huge = progress.advance(tokens(u64::MAX), &timeline(32), true);
        assert_eq!(huge.intervals, MAX_OBSERVED);
    }

    #[test]
    fn a_whole_output_has_no_times() {
        let mut whole =
            TokenCounts { prompt: Some(1), generated: Some(9), ..TokenCounts::default() };
        whole.finished.add(FinishReason::Length);
        let added = TokenProgress::default().advance(whole, &timeline(10), true);
        assert_eq!((added.generated, added.first_ns, added.intervals), (9, None, 0));
        let cells = TokenCells::default();
        cells.add(added);
        cells.failed(FinishReason::Abort);
        let finished: Vec<_> = cells.finished().filter(|(_, count)| *count > 0).collect();
        assert_eq!(finished, [("length", 1), ("abort", 1)]);
    }

    #[test]
    fn a_finished_request_has_its_numbers() {
        let tokens = |prompt, generated| TokenCounts { prompt, generated, ..Default::default() };
        let stream = TokenProgress::default();
        stream.advance(tokens(Some(7), Some(2)), &timeline(11), false);
        stream.advance(tokens(Some(7), Some(3)), &timeline(31), false);
        stream.advance(tokens(None, Some(1)), &timeline(51), false);
        // A later execution of the request.
        let mut end = timeline(60);
        end.compute.start = Instant(55);
        let expected = FinishedRequest {
            queue_ns: 4,
            request_ns: 59,
            prompt: Some(7),
            generated: Some(6),
            // Four tokens followed the first response, in 40 ns.
            per_token_ns: Some(10),
        };
        assert_eq!(stream.finished(&end), expected);
        let whole = TokenProgress::default();
        whole.advance(tokens(Some(7), Some(u64::MAX)), &timeline(11), true);
        let found = whole.finished(&timeline(11));
        assert_eq!((found.generated, found.per_token_ns), (Some(u64::MAX), None));
        // A model that does not count its tokens.
        let uncounted = TokenProgress::default();
        uncounted.advance(tokens(None, None), &timeline(11), true);
        let expected = FinishedRequest {
            queue_ns: 4,
            request_ns: 10,
            prompt: None,
            generated: None,
            per_token_ns: None,
        };
        assert_eq!(uncounted.finished(&timeline(11)), expected);
    }
}
