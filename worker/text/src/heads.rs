//! Results from the logits of a graph: scores, probabilities, spans and predictions of tokens.
//!
//! Source of the definitions: the pipelines of transformers 4.57 (`text-classification`,
//! `token-classification` with the strategy `simple`, `fill-mask`).

use pharos::error::InferError;
use pharos::model::text_files::{Activation, TextModel};
use pharos_backend::run_error;
use serde::Serialize;

use crate::tokens::{Texts, Tokens};

/// The label of tokens that belong to no class.
const NO_CLASS: &str = "O";

/// Returns the logit or the score of a pair.
pub(crate) fn activate(logits: &mut [f32], activation: Activation) {
    match activation {
        Activation::Identity => {}
        Activation::Sigmoid => logits.iter_mut().for_each(|logit| *logit = sigmoid(*logit)),
        Activation::Softmax => softmax(logits),
    }
}

fn sigmoid(logit: f32) -> f32 {
    (1.0 / (1.0 + f64::from(-logit).exp())) as f32
}

fn softmax(logits: &mut [f32]) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for logit in logits.iter_mut() {
        *logit = (*logit - most).exp();
        sum += *logit;
    }
    logits.iter_mut().for_each(|logit| *logit /= sum);
}

/// Returns the position of the greatest number.
pub(crate) fn greatest(numbers: &[f32]) -> usize {
    let mut found = 0;
    for (at, number) in numbers.iter().enumerate() {
        if numbers.get(found).is_some_and(|best| number > best) {
            found = at;
        }
    }
    found
}

/// Returns the positions of this many of the greatest numbers, the greatest first. Of equal numbers,
/// the first one comes first.
fn greatest_first(numbers: &[f32], count: usize) -> Vec<usize> {
    let number = |at: usize| numbers.get(at).copied().unwrap_or(f32::NEG_INFINITY);
    let order =
        |one: &usize, other: &usize| number(*other).total_cmp(&number(*one)).then(one.cmp(other));
    let mut found: Vec<usize> = (0..numbers.len()).collect();
    if (1..found.len()).contains(&count) {
        // A vocabulary has many tokens, of which few are wanted.
        found.select_nth_unstable_by(count - 1, order);
        found.truncate(count);
    }
    found.sort_unstable_by(order);
    found
}

/// The most predictions of a text, each of which has the whole text.
pub(crate) const MAX_PREDICTIONS: usize = 1024;

/// A span of a text that belongs to a class.
#[derive(Debug, Serialize)]
struct Entity<'a> {
    entity_group: &'a str,
    score: f32,
    word: String,
    /// The first character, and the one after the last.
    start: usize,
    end: usize,
}

/// A token with its class.
struct Classified<'a> {
    at: usize,
    label: &'a str,
    score: f32,
}

/// Returns the spans of a text as JSON, from the logits of its tokens.
///
/// # Errors
/// The tokenizer cannot decode a span.
pub(crate) fn entities(
    logits: &[f32],
    text: &str,
    tokens: &Tokens,
    model: &TextModel,
    texts: &Texts,
) -> Result<String, InferError> {
    let width = model.labels.len().max(1);
    let mut spans: Vec<Vec<Classified<'_>>> = Vec::new();
    let mut before = None;
    let named = model.unknown_token.as_ref().and_then(|token| texts.id(token));
    let unknown = named.or_else(|| texts.unknown());
    for (at, logits) in logits.chunks_exact(width).enumerate() {
        if tokens.special.get(at).is_none_or(|special| *special != 0) {
            continue;
        }
        let mut scores = logits.to_vec();
        softmax(&mut scores);
        let class = greatest(&scores);
        let label = model.labels.get(class).map_or("", String::as_str);
        let (begins, tag) = match label.split_at_checked(2) {
            Some(("B-", tag)) => (true, tag),
            Some(("I-", tag)) => (false, tag),
            _ => (false, label),
        };
        let token = Classified { at, label: tag, score: scores.get(class).copied().unwrap_or(0.0) };
        match spans.last_mut() {
            Some(span) if before == Some(tag) && !begins => span.push(token),
            _ => spans.push(vec![token]),
        }
        before = Some(tag);
    }
    let mut found = Vec::new();
    for span in spans {
        let (Some(first), Some(last)) = (span.first(), span.last()) else { continue };
        if first.label == NO_CLASS {
            continue;
        }
        let place = |at: usize| tokens.offsets.get(at).copied().unwrap_or_default();
        let words = span.iter().map(|token| {
            // What the vocabulary does not have is shown as the text has it.
            match tokens.ids.get(token.at) {
                Some(id) if Some(*id) != unknown => texts.token(*id),
                _ => {
                    let (start, end) = place(token.at);
                    slice(text, start, end).to_owned()
                }
            }
        });
        let words = words.collect();
        let sum: f32 = span.iter().map(|token| token.score).sum();
        found.push(Entity {
            entity_group: first.label,
            score: sum / span.len() as f32,
            word: texts.join(words)?,
            start: place(first.at).0,
            end: place(last.at).1,
        });
    }
    to_json(&found)
}

/// Returns a part of a text, from a character to another one.
fn slice(text: &str, start: usize, end: usize) -> &str {
    let at = |number: usize| text.char_indices().nth(number).map_or(text.len(), |(at, _)| at);
    text.get(at(start)..at(end)).unwrap_or_default()
}

/// A token in place of a mask.
#[derive(Debug, Serialize)]
struct Prediction {
    score: f32,
    token: u32,
    token_str: String,
    sequence: String,
}

/// Returns the tokens that may stand in place of the masks of a text as JSON, from the logits of its
/// tokens: a list, or a list for each mask of several.
///
/// # Errors
/// The text has no mask, or the tokenizer cannot decode a token.
pub(crate) fn predictions(
    logits: &[f32],
    tokens: &Tokens,
    mask: u32,
    count: usize,
    texts: &Texts,
) -> Result<String, InferError> {
    let width = logits.len() / tokens.ids.len().max(1);
    let masks: Vec<usize> =
        (0..).zip(&tokens.ids).filter(|(_, id)| **id == mask).map(|(at, _)| at).collect();
    if masks.len().saturating_mul(count) > MAX_PREDICTIONS {
        return Err(InferError::invalid(format!(
            "a text has {} masks, and top_k is {count}; at most {MAX_PREDICTIONS} predictions of a text \
             are allowed",
            masks.len()
        )));
    }
    let mut found = Vec::new();
    for at in masks {
        let own = logits.get(at * width..(at + 1) * width).unwrap_or_default();
        let mut scores = own.to_vec();
        softmax(&mut scores);
        let mut best = Vec::new();
        for token in greatest_first(&scores, count) {
            let id = u32::try_from(token).unwrap_or(u32::MAX);
            let mut ids = tokens.ids.clone();
            if let Some(place) = ids.get_mut(at) {
                *place = id;
            }
            best.push(Prediction {
                score: scores.get(token).copied().unwrap_or(0.0),
                token: id,
                token_str: texts.decode(&[id], false)?,
                sequence: texts.decode(&ids, true)?,
            });
        }
        found.push(best);
    }
    match found.as_slice() {
        [] => Err(InferError::invalid(format!("a text has no mask '{}'", texts.token(mask)))),
        [only] => to_json(only),
        all => to_json(all),
    }
}

fn to_json(value: &(impl Serialize + ?Sized)) -> Result<String, InferError> {
    serde_json::to_string(value).map_err(|error| run_error(format!("a result is no JSON: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_have_the_sum_one() {
        let mut logits = [1000.0, 1000.0, -1000.0];
        activate(&mut logits, Activation::Softmax);
        assert_eq!(logits, [0.5, 0.5, 0.0]);
        let mut logits = [0.0, 100.0, -1000.0];
        activate(&mut logits, Activation::Sigmoid);
        assert_eq!(logits, [0.5, 1.0, 0.0]);
        assert_eq!(greatest(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(greatest(&[]), 0);
    }

    #[test]
    fn parts_of_texts_are_counted_in_characters() {
        assert_eq!(slice("Größe 👩 x", 2, 7), "öße 👩");
        assert_eq!(slice("ab", 1, 9), "b");
        assert_eq!(slice("ab", 2, 1), "");
    }

    #[test]
    fn the_greatest_numbers_come_first() {
        assert_eq!(greatest_first(&[1.0, 3.0, 2.0, 3.0, 0.0], 3), [1, 3, 2]);
        assert_eq!(greatest_first(&[1.0, 3.0], 5), [1, 0]);
        assert!(greatest_first(&[], 5).is_empty());
    }
}
