//! The tokens of a model that generates text, and the times at which they arrive. Every token is
//! counted once, where its response leaves the model, whatever the protocol of the client is.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use pharos_base::timeline::Instant;

use super::atomic::Count;
use super::durations::{Buckets, copy_of, definition};
use super::family::Registry;
use super::labels::FinishReason;
use super::reading::{Details, Number, Reading};
use super::source::{ModelValue, TokenValue};

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
    /// What the budget of the tenant was charged for the prompt by an estimate.
    estimated_prompt: AtomicU64,
    /// Generated tokens that were counted.
    generated: AtomicU64,
    /// What the budget of the tenant was charged for generated tokens.
    charged: AtomicU64,
    /// The arrival of the latest response with tokens; 0 before the first.
    latest: AtomicU64,
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
    /// Returns the counts of the next response with the tokens since the previous one. Call once for
    /// each response.
    #[must_use]
    pub fn since_previous(&self, counts: TokenCounts) -> TokenCounts {
        let before = self.generated.load(Ordering::Relaxed);
        let in_all = counts.generated_in_all.map(|in_all| in_all.saturating_sub(before));
        let generated = in_all.or(counts.generated);
        self.generated.fetch_add(generated.unwrap_or(0), Ordering::Relaxed);
        TokenCounts { generated, ..counts }
    }

    /// Takes a response that arrived at `now` to a request that arrived at `received`. The times of
    /// tokens are unknown if one response has the whole output.
    pub(super) fn advance(
        &self,
        counts: TokenCounts,
        received: Instant,
        now: Instant,
        is_whole: bool,
    ) -> AddedTokens {
        let mut added = AddedTokens { finished: counts.finished, ..AddedTokens::default() };
        if let Some(prompt) = counts.prompt
            && !self.is_prompt_counted.swap(true, Ordering::Relaxed)
        {
            added.prompt = prompt;
            added.cached = counts.cached.unwrap_or(0).min(prompt);
        }
        added.generated = counts.generated.unwrap_or(0);
        added.charged = self.charged(&counts, added.prompt);
        let arrived = counts.arrived.filter(|_| !is_whole).unwrap_or(added.generated);
        if arrived == 0 {
            return added;
        }
        let latest = self.latest.swap(now.0, Ordering::Relaxed);
        if latest == 0 {
            if !is_whole || arrived == 1 {
                added.first_ns = Some(now.ns_since(received));
            }
            // Nothing is known about the times of the other tokens of the first response.
            return added;
        }
        added.intervals = arrived.min(MAX_OBSERVED);
        added.interval_ns = now.ns_since(Instant(latest)) / arrived;
        added
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
        self.charged.fetch_add(of_output, Ordering::Relaxed);
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
    /// Created when a definition first enables the metric.
    first: OnceLock<Buckets>,
    interval: OnceLock<Buckets>,
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
            first: copy(&self.first),
            interval: copy(&self.interval),
        }
    }

    /// Creates the histograms that are defined and missing. `own` are the model's own buckets, by
    /// metric name.
    pub(super) fn define(&self, registry: &Registry, own: &[(String, Vec<f64>)]) {
        for (value, distribution) in
            [(TokenValue::First, &self.first), (TokenValue::Interval, &self.interval)]
        {
            if let Some((spec, unit)) = definition(registry, ModelValue::Tokens(value)) {
                distribution.get_or_init(|| Buckets::new(own, &spec, unit));
            }
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
        if let (Some(ns), Some(first)) = (added.first_ns, self.first.get()) {
            first.observe(ns);
        }
        if let Some(interval) = self.interval.get() {
            (0..added.intervals).for_each(|_| interval.observe(added.interval_ns));
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
        let histogram = |distribution: &OnceLock<Buckets>| {
            Some(Reading::Histogram(distribution.get()?.read(details)))
        };
        match value {
            TokenValue::Prompt => whole(&self.prompt),
            TokenValue::Cached => whole(&self.cached),
            TokenValue::Generated => whole(&self.generated),
            TokenValue::First => histogram(&self.first),
            TokenValue::Interval => histogram(&self.interval),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(cells: &TokenCells) -> [u64; 3] {
        [&cells.prompt, &cells.cached, &cells.generated].map(Count::get)
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
            cells.add(progress.advance(response, Instant(1), Instant(now), false));
        }
        // No more tokens can have been in a cache than the prompt has.
        assert_eq!(counts(&cells), [7, 7, 6]);
        cells.add(progress.advance(TokenCounts::default(), Instant(1), Instant(40), false));
        assert_eq!(counts(&cells), [7, 7, 6]);
    }

    #[test]
    fn what_is_not_counted_is_charged_by_an_estimate() {
        let estimated = EstimatedTokens { prompt: 5, generated: 2 };
        let charged = |progress: &TokenProgress, prompt, generated| {
            let counts = TokenCounts { prompt, generated, estimated, ..Default::default() };
            progress.advance(counts, Instant(1), Instant(2), false).charged
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
            progress.advance(progress.since_previous(counts), Instant(1), Instant(now), false)
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
        let added = whole.advance(whole.since_previous(counts), Instant(1), Instant(9), true);
        assert_eq!((added.generated, added.first_ns), (4, None));
    }

    #[test]
    fn the_tokens_of_a_response_share_its_time() {
        let progress = TokenProgress::default();
        let tokens = |generated| TokenCounts { generated: Some(generated), ..Default::default() };
        let first = progress.advance(tokens(1), Instant(1), Instant(11), false);
        assert_eq!((first.first_ns, first.intervals), (Some(10), 0));
        let later = progress.advance(tokens(4), Instant(1), Instant(31), false);
        assert_eq!((later.first_ns, later.intervals, later.interval_ns), (None, 4, 5));
        let huge = progress.advance(tokens(u64::MAX), Instant(1), Instant(32), true);
        assert_eq!(huge.intervals, MAX_OBSERVED);
    }

    #[test]
    fn a_whole_output_has_no_times() {
        let mut whole =
            TokenCounts { prompt: Some(1), generated: Some(9), ..TokenCounts::default() };
        whole.finished.add(FinishReason::Length);
        let added = TokenProgress::default().advance(whole, Instant(1), Instant(10), true);
        assert_eq!((added.generated, added.first_ns, added.intervals), (9, None, 0));
        let cells = TokenCells::default();
        cells.add(added);
        cells.failed(FinishReason::Abort);
        let finished: Vec<_> = cells.finished().filter(|(_, count)| *count > 0).collect();
        assert_eq!(finished, [("length", 1), ("abort", 1)]);
    }
}
