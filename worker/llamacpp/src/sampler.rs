//! The choice of the next token from the logits of the model.
//!
//! The order of the steps is vLLM's: allowed tokens and the structure of the text, bias, penalties,
//! temperature, `min_p`, `top_k` and `top_p`. The model's log probabilities are
//! returned, before all of these steps.

use std::collections::{HashMap, HashSet};

use fastrand::Rng;
use toktrie::SimpleVob;

use crate::sampling::Sampling;

/// Below this temperature, the most likely token is chosen.
const COLD: f32 = 1e-5;

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sampled {
    pub(crate) token: i32,
    /// The chosen token and the most likely ones, if the client wants them.
    pub(crate) logprobs: Vec<Logprob>,
}

/// The probability of a token at a position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Logprob {
    pub(crate) token: i32,
    pub(crate) logprob: f32,
    /// 1 for the most likely token.
    pub(crate) rank: usize,
}

/// A token that may be chosen.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: i32,
    logit: f32,
}

/// Chooses the tokens of one choice.
#[derive(Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    random: Rng,
    /// How often each token was generated.
    generated: HashMap<i32, u32>,
    /// The tokens of the prompt, if they are penalised.
    prompt: HashSet<i32>,
    /// Reused for each token.
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Creates the sampler of the choice at a position. `random_seed` serves a request without a
    /// seed.
    pub(crate) fn new(sampling: &Sampling, prompt: &[i32], choice: u32, random_seed: u64) -> Self {
        let seed = sampling.seed.unwrap_or(random_seed).wrapping_add(choice.into());
        let is_penalised = sampling.repetition_penalty != 1.0;
        Self {
            sampling: sampling.clone(),
            random: Rng::with_seed(seed),
            generated: HashMap::new(),
            prompt: if is_penalised { prompt.iter().copied().collect() } else { HashSet::new() },
            candidates: Vec::new(),
        }
    }

    /// Chooses a token.
    ///
    /// `logits` has one element for each token of the vocabulary; `allowed` are the tokens that the
    /// structure of the text allows; `banned` may not be chosen yet.
    pub(crate) fn sample(
        &mut self,
        logits: &[f32],
        allowed: Option<&SimpleVob>,
        banned: &[i32],
    ) -> Sampled {
        let token = self.choose(logits, allowed, banned);
        if self.has_penalties() {
            *self.generated.entry(token).or_default() += 1;
        }
        let logprobs = match self.sampling.logprobs {
            Some(count) => logprobs(logits, token, count),
            None => Vec::new(),
        };
        Sampled { token, logprobs }
    }

    fn has_penalties(&self) -> bool {
        let Sampling { presence_penalty, frequency_penalty, repetition_penalty, .. } =
            self.sampling;
        presence_penalty != 0.0 || frequency_penalty != 0.0 || repetition_penalty != 1.0
    }

    fn choose(&mut self, logits: &[f32], allowed: Option<&SimpleVob>, banned: &[i32]) -> i32 {
        let is_plain = allowed.is_none()
            && banned.is_empty()
            && self.sampling.allowed.is_empty()
            && self.sampling.logit_bias.is_empty()
            && !self.has_penalties();
        if is_plain && self.sampling.temperature < COLD {
            return most_likely(logits);
        }
        self.collect(logits, allowed, banned);
        self.penalise();
        if self.sampling.temperature < COLD {
            let best = self
                .candidates
                .iter()
                .copied()
                .reduce(|best, next| if next.logit > best.logit { next } else { best });
            return best.map_or_else(|| most_likely(logits), |best| best.token);
        }
        for candidate in &mut self.candidates {
            candidate.logit /= self.sampling.temperature;
        }
        self.keep_min_p();
        self.keep_top_k();
        self.keep_top_p();
        self.draw().unwrap_or_else(|| most_likely(logits))
    }

    /// Collects the tokens that may be chosen, with their bias.
    fn collect(&mut self, logits: &[f32], allowed: Option<&SimpleVob>, banned: &[i32]) {
        self.candidates.clear();
        let Sampling { allowed: chosen, logit_bias, .. } = &self.sampling;
        let may =
            |token: i32| (chosen.is_empty() || chosen.contains(&token)) && !banned.contains(&token);
        match allowed {
            Some(allowed) => {
                for token in allowed.iter() {
                    if let Some(logit) = logits.get(token as usize)
                        && may(token.cast_signed())
                    {
                        let token = token.cast_signed();
                        self.candidates.push(Candidate { token, logit: *logit });
                    }
                }
            }
            None => {
                let all = (0..).zip(logits).filter(|(token, _)| may(*token));
                self.candidates
                    .extend(all.map(|(token, logit)| Candidate { token, logit: *logit }));
            }
        }
        if !logit_bias.is_empty() {
            for candidate in &mut self.candidates {
                candidate.logit += logit_bias.get(&candidate.token).copied().unwrap_or(0.0);
            }
        }
    }

    fn penalise(&mut self) {
        if !self.has_penalties() {
            return;
        }
        let Sampling { presence_penalty, frequency_penalty, repetition_penalty, .. } =
            self.sampling;
        for candidate in &mut self.candidates {
            let count = self.generated.get(&candidate.token).copied().unwrap_or(0);
            if count > 0 || self.prompt.contains(&candidate.token) {
                match candidate.logit > 0.0 {
                    true => candidate.logit /= repetition_penalty,
                    false => candidate.logit *= repetition_penalty,
                }
            }
            if count > 0 {
                candidate.logit -= presence_penalty + frequency_penalty * count as f32;
            }
        }
    }

    fn highest(&self) -> f32 {
        self.candidates.iter().map(|candidate| candidate.logit).fold(f32::NEG_INFINITY, f32::max)
    }

    fn keep_min_p(&mut self) {
        if self.sampling.min_p > 0.0 {
            let least = self.highest() + self.sampling.min_p.ln();
            self.candidates.retain(|candidate| candidate.logit >= least);
        }
    }

    fn keep_top_k(&mut self) {
        let count = self.sampling.top_k;
        if count > 0 && count < self.candidates.len() {
            self.candidates.select_nth_unstable_by(count - 1, descending);
            self.candidates.truncate(count);
        }
    }

    /// Keeps the most likely tokens that together have the probability `top_p`. They are searched
    /// among the few most likely ones first: a vocabulary is not sorted for one token.
    fn keep_top_p(&mut self) {
        let wanted = self.sampling.top_p;
        if wanted >= 1.0 || self.candidates.is_empty() {
            return;
        }
        let highest = self.highest();
        let total: f32 = self.candidates.iter().map(|one| (one.logit - highest).exp()).sum();
        let mut count = 256;
        loop {
            let all = count >= self.candidates.len();
            if !all {
                self.candidates.select_nth_unstable_by(count - 1, descending);
            }
            let length = count.min(self.candidates.len());
            let head = &mut self.candidates[..length];
            head.sort_unstable_by(descending);
            let mut sum = 0.0;
            let enough = head.iter().position(|one| {
                sum += (one.logit - highest).exp();
                sum >= wanted * total
            });
            match enough {
                Some(last) => return self.candidates.truncate(last + 1),
                None if all => return,
                None => count *= 8,
            }
        }
    }

    /// Draws one of the candidates by their probabilities.
    fn draw(&mut self) -> Option<i32> {
        let highest = self.highest();
        let weight = |candidate: &Candidate| (candidate.logit - highest).exp();
        let total: f32 = self.candidates.iter().map(weight).sum();
        let mut rest = self.random.f32() * total;
        for candidate in &self.candidates {
            rest -= weight(candidate);
            if rest < 0.0 {
                return Some(candidate.token);
            }
        }
        self.candidates.last().map(|candidate| candidate.token)
    }
}

/// Orders the most likely tokens first, and equal ones by their ids.
fn descending(first: &Candidate, second: &Candidate) -> std::cmp::Ordering {
    second.logit.total_cmp(&first.logit).then(first.token.cmp(&second.token))
}

/// Returns the most likely token; the first of equal ones.
fn most_likely(logits: &[f32]) -> i32 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    logits.iter().position(|logit| *logit == highest).unwrap_or(0) as i32
}

/// Returns the probability of the chosen token, and of the `count` most likely ones.
pub(crate) fn logprobs(logits: &[f32], chosen: i32, count: usize) -> Vec<Logprob> {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - highest).exp()).sum();
    let normaliser = highest + sum.ln() as f32;
    let logit_of = |token: i32| logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let better = logits.iter().filter(|logit| **logit > logit_of(chosen)).count();
    let mut found =
        vec![Logprob { token: chosen, logprob: logit_of(chosen) - normaliser, rank: better + 1 }];
    if count > 0 {
        let mut all: Vec<Candidate> =
            (0..).zip(logits).map(|(token, logit)| Candidate { token, logit: *logit }).collect();
        if count < all.len() {
            all.select_nth_unstable_by(count - 1, descending);
            all.truncate(count);
        }
        all.sort_unstable_by(descending);
        let top = all.iter().zip(1..).filter(|(one, _)| one.token != chosen);
        found.extend(top.map(|(one, rank)| Logprob {
            token: one.token,
            logprob: one.logit - normaliser,
            rank,
        }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [0.0, 2.0, 1.0, -1.0];

    fn draws(sampling: &Sampling) -> HashMap<i32, usize> {
        let mut sampler = Sampler::new(sampling, &[], 0, 7);
        let mut counts = HashMap::new();
        for _ in 0..10_000 {
            *counts.entry(sampler.sample(&LOGITS, None, &[]).token).or_default() += 1;
        }
        counts
    }

    #[test]
    fn tokens_are_drawn_by_their_probabilities() {
        let counts = draws(&Sampling::default());
        let total: f32 = LOGITS.iter().map(|logit| logit.exp()).sum();
        for (token, logit) in (0..).zip(LOGITS) {
            let expected = 10_000.0 * logit.exp() / total;
            let difference = counts[&token] as f32 - expected;
            assert!(difference.abs() < 5.0 * expected.sqrt(), "{token}: {counts:?}");
        }
    }

    #[test]
    fn a_seed_repeats_the_tokens() {
        let sampling = Sampling { seed: Some(3), ..Sampling::default() };
        let tokens = |choice| {
            let mut sampler = Sampler::new(&sampling, &[], choice, 0);
            (0..20).map(|_| sampler.sample(&LOGITS, None, &[]).token).collect::<Vec<_>>()
        };
        assert_eq!(tokens(0), tokens(0));
        assert_ne!(tokens(0), tokens(1));
    }

    #[test]
    fn unlikely_tokens_are_left_out() {
        let left = |sampling: Sampling| {
            let mut tokens: Vec<i32> = draws(&sampling).into_keys().collect();
            tokens.sort_unstable();
            tokens
        };
        assert_eq!(left(Sampling { temperature: 0.0, ..Sampling::default() }), [1]);
        assert_eq!(left(Sampling { top_k: 2, ..Sampling::default() }), [1, 2]);
        // The probabilities are 0.64, 0.24, 0.09 and 0.03.
        assert_eq!(left(Sampling { top_p: 0.65, ..Sampling::default() }), [1, 2]);
        assert_eq!(left(Sampling { top_p: 0.0, ..Sampling::default() }), [1]);
        assert_eq!(left(Sampling { min_p: 0.3, ..Sampling::default() }), [1, 2]);
        assert_eq!(left(Sampling { allowed: [0, 3].into(), ..Sampling::default() }), [0, 3]);
        let bias = [(3, 100.0)].into();
        assert_eq!(left(Sampling { logit_bias: bias, ..Sampling::default() }), [3]);
    }

    #[test]
    fn top_p_of_a_large_vocabulary_is_exact() {
        let logits: Vec<f32> = (0..5000).map(|token| -(token as f32) / 1000.0).collect();
        let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
        let mut sampler = Sampler::new(&sampling, &[], 0, 0);
        sampler.collect(&logits, None, &[]);
        sampler.keep_top_p();
        let total: f32 = logits.iter().map(|logit| logit.exp()).sum();
        let kept: f32 = sampler.candidates.iter().map(|one| one.logit.exp()).sum();
        assert!((kept / total - 0.9).abs() < 0.001, "{}", kept / total);
    }

    #[test]
    fn repeated_tokens_are_penalised() {
        let sampling = Sampling { temperature: 0.0, frequency_penalty: 0.8, ..Sampling::default() };
        let mut sampler = Sampler::new(&sampling, &[], 0, 0);
        let tokens: Vec<i32> = (0..4).map(|_| sampler.sample(&LOGITS, None, &[]).token).collect();
        assert_eq!(tokens, [1, 1, 2, 1]);
        let sampling =
            Sampling { temperature: 0.0, repetition_penalty: 3.0, ..Sampling::default() };
        let mut sampler = Sampler::new(&sampling, &[1], 0, 0);
        assert_eq!(sampler.sample(&LOGITS, None, &[]).token, 2);
    }

    #[test]
    fn masks_and_bans_hold() {
        let mut allowed = SimpleVob::alloc(4);
        allowed.allow_token(0);
        allowed.allow_token(3);
        let mut sampler = Sampler::new(&Sampling::default(), &[], 0, 0);
        for _ in 0..100 {
            assert_eq!(sampler.sample(&LOGITS, Some(&allowed), &[0]).token, 3);
        }
    }

    #[test]
    fn logprobs_are_those_of_the_model() {
        let sampling = Sampling { temperature: 0.0, logprobs: Some(2), ..Sampling::default() };
        let sampled = Sampler::new(&sampling, &[], 0, 0).sample(&LOGITS, None, &[1]);
        assert_eq!(sampled.token, 2);
        let [chosen, best] = sampled.logprobs.as_slice() else { panic!("{sampled:?}") };
        assert_eq!((chosen.token, chosen.rank, best.token, best.rank), (2, 2, 1, 1));
        let sum: f32 = LOGITS.iter().map(|logit| logit.exp()).sum();
        assert!((best.logprob - (2.0 - sum.ln())).abs() < 1e-5);
    }
}
