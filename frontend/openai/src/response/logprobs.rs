//! Log probabilities of tokens, in the forms of chats and of completions.

use std::borrow::Cow;

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Map, Value};

use crate::options::RequestOptions;
use crate::sampling::Sampling;

/// What stands for minus infinity, which JSON does not have. vLLM uses the same number.
pub const MINUS_INFINITY: f64 = -9999.0;

/// One token that was possible at a position.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// The id of the token.
    pub token_id: u32,
    /// The natural logarithm of its probability.
    pub logprob: f64,
    /// Its rank, from 1, if the engine knows it.
    pub rank: Option<u32>,
    /// Its text. For parts of a UTF-8 character, these are replacement characters.
    pub token: String,
}

/// The candidates at one position, the token of the output first. A first token of a prompt has
/// none.
pub type Position = Vec<Candidate>;

/// Reads the tensor `logprobs` of Triton's vllm_backend: a JSON list with an object for each token,
/// `{id: {"logprob","rank","decoded_token"}}`, or `null`.
///
/// Python writes `-Infinity` and `NaN`, which JSON does not have; both are read as
/// [`MINUS_INFINITY`].
///
/// # Errors
///
/// What is wrong with the text, for logs.
pub fn parse_vllm(text: &str) -> Result<Vec<Position>, String> {
    let text = without_infinities(text);
    let positions: Option<Vec<Option<Map<String, Value>>>> = serde_json::from_str(&text)
        .map_err(|error| format!("invalid log probabilities: {error}"))?;
    let mut list = Vec::new();
    for position in positions.unwrap_or_default() {
        let mut candidates = Vec::new();
        for (id, value) in &position.unwrap_or_default() {
            candidates.push(candidate(id, value)?);
        }
        list.push(candidates);
    }
    Ok(list)
}

/// Returns the tensor `prompt_logprobs` as the value of the response; `None` if it is not JSON.
pub fn prompt_logprobs(text: &str) -> Option<Value> {
    serde_json::from_str(&without_infinities(text)).ok()
}

fn candidate(id: &str, value: &Value) -> Result<Candidate, String> {
    let token_id =
        id.parse().map_err(|_| format!("invalid token id {id:?} of a log probability"))?;
    let logprob = value.get("logprob").and_then(Value::as_f64);
    Ok(Candidate {
        token_id,
        logprob: logprob.ok_or_else(|| format!("token {id} has no log probability"))?,
        rank: value.get("rank").and_then(Value::as_u64).and_then(|rank| u32::try_from(rank).ok()),
        token: value.get("decoded_token").and_then(Value::as_str).unwrap_or_default().to_owned(),
    })
}

/// Replaces Python's names of numbers outside of strings.
fn without_infinities(text: &str) -> Cow<'_, str> {
    const NAMES: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    if !NAMES.iter().any(|name| text.contains(name)) {
        return Cow::Borrowed(text);
    }
    let mut output = String::with_capacity(text.len());
    let mut in_string = false;
    let mut escaped = false;
    let mut rest = text;
    while let Some(character) = rest.chars().next() {
        if !in_string && let Some(name) = NAMES.iter().find(|name| rest.starts_with(**name)) {
            output.push_str("-9999.0");
            rest = &rest[name.len()..];
            continue;
        }
        match character {
            _ if escaped => escaped = false,
            '\\' if in_string => escaped = true,
            '"' => in_string = !in_string,
            _ => {}
        }
        output.push(character);
        rest = &rest[character.len_utf8()..];
    }
    Cow::Owned(output)
}

/// How tokens are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TokenForm {
    /// As their text.
    #[default]
    Text,
    /// As `token_id:N` (`return_tokens_as_token_ids`).
    Id,
}

/// How the log probabilities of a response are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogprobsForm {
    /// The number of the most probable tokens at each position.
    pub top: u32,
    /// How tokens are written.
    pub tokens: TokenForm,
}

impl LogprobsForm {
    /// Returns the form for a request; `None` if the client wants none.
    pub fn of(sampling: &Sampling, options: &RequestOptions) -> Option<Self> {
        let tokens = match options.return_tokens_as_token_ids {
            true => TokenForm::Id,
            false => TokenForm::Text,
        };
        Some(Self { top: sampling.logprobs?, tokens })
    }

    /// Returns the log probabilities of a chat choice or chunk.
    pub fn chat(self, positions: &[Position]) -> ChatLogprobs {
        let mut logprobs = ChatLogprobs::default();
        positions.iter().for_each(|position| logprobs.push(position, self.top, self.tokens));
        logprobs
    }

    /// Returns the log probabilities of a completion choice or chunk. `offset` is where the text of
    /// the first token begins, in characters.
    pub fn completion(self, positions: &[Position], offset: u64) -> CompletionLogprobs {
        let mut logprobs = CompletionLogprobs::beginning_at(offset);
        positions.iter().for_each(|position| logprobs.push(position, self.top, self.tokens));
        logprobs
    }
}

impl Candidate {
    fn text(&self, form: TokenForm) -> String {
        match form {
            TokenForm::Text => self.token.clone(),
            TokenForm::Id => format!("token_id:{}", self.token_id),
        }
    }

    fn finite_logprob(&self) -> f64 {
        if self.logprob.is_finite() { self.logprob.max(MINUS_INFINITY) } else { MINUS_INFINITY }
    }
}

/// One of the most probable tokens at a position of a chat.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TopLogprob {
    /// The text of the token.
    pub token: String,
    /// The natural logarithm of its probability; -9999 stands for minus infinity.
    pub logprob: f64,
    /// The text as bytes of UTF-8.
    pub bytes: Vec<u8>,
}

/// A token of a chat.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The text of the token.
    pub token: String,
    /// The natural logarithm of its probability; -9999 stands for minus infinity.
    pub logprob: f64,
    /// The text as bytes of UTF-8.
    pub bytes: Vec<u8>,
    /// The most probable tokens at this position, the most probable one first.
    pub top_logprobs: Vec<TopLogprob>,
}

/// The log probabilities of a chat choice or chunk.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ChatLogprobs {
    /// The tokens in order.
    pub content: Vec<TokenLogprob>,
}

impl ChatLogprobs {
    /// Adds a token with the `top` most probable ones at its position. A position without
    /// candidates is left out.
    pub fn push(&mut self, position: &[Candidate], top: u32, form: TokenForm) {
        let Some(chosen) = position.first() else { return };
        let mut ranked: Vec<&Candidate> = position.iter().collect();
        // Stable: without ranks, the engine's order remains.
        ranked.sort_by_key(|candidate| candidate.rank.unwrap_or(u32::MAX));
        let top_logprobs = ranked.iter().take(top as usize).map(|candidate| TopLogprob {
            token: candidate.text(form),
            logprob: candidate.finite_logprob(),
            bytes: candidate.token.as_bytes().to_vec(),
        });
        self.content.push(TokenLogprob {
            token: chosen.text(form),
            logprob: chosen.finite_logprob(),
            bytes: chosen.token.as_bytes().to_vec(),
            top_logprobs: top_logprobs.collect(),
        });
    }
}

/// The log probabilities of a completion choice or chunk.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct CompletionLogprobs {
    /// Where each token begins in the text, in characters.
    pub text_offset: Vec<u64>,
    /// The natural logarithm of each token's probability. The first token of an echoed prompt has
    /// none.
    pub token_logprobs: Vec<Option<f64>>,
    /// The texts of the tokens.
    pub tokens: Vec<String>,
    /// The most probable tokens at each position, with the token itself.
    pub top_logprobs: Vec<Option<TopTokens>>,
    #[serde(skip)]
    next_offset: u64,
}

/// The most probable tokens at a position of a completion: an object from texts to logarithms.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TopTokens(Vec<TopToken>);

#[derive(Debug, Clone, PartialEq)]
struct TopToken {
    token: String,
    logprob: f64,
}

impl Serialize for TopTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for top in &self.0 {
            map.serialize_entry(&top.token, &top.logprob)?;
        }
        map.end()
    }
}

impl CompletionLogprobs {
    /// Creates the log probabilities of text that begins at an offset, in characters: 0 for whole
    /// choices, the length of the text so far for chunks.
    pub fn beginning_at(offset: u64) -> Self {
        Self { next_offset: offset, ..Self::default() }
    }

    /// Returns where the next token begins, in characters.
    pub fn next_offset(&self) -> u64 {
        self.next_offset
    }

    /// Adds a token with the `top` most probable ones at its position and itself, so that there are
    /// up to `top + 1` entries.
    pub fn push(&mut self, position: &[Candidate], top: u32, form: TokenForm) {
        let Some(chosen) = position.first() else { return };
        self.push_token(chosen.text(form), &chosen.token);
        self.token_logprobs.push(Some(chosen.finite_logprob()));
        let mut tops: Vec<TopToken> = Vec::new();
        for (index, candidate) in position.iter().enumerate() {
            let is_among_top = match candidate.rank {
                Some(rank) => rank <= top,
                None => index < top as usize,
            };
            let token = candidate.text(form);
            // An object has each name once; parts of characters have the same text.
            if (index == 0 || is_among_top) && !tops.iter().any(|other| other.token == token) {
                tops.push(TopToken { token, logprob: candidate.finite_logprob() });
            }
        }
        self.top_logprobs.push(Some(TopTokens(tops)));
    }

    /// Adds the first token of an echoed prompt, which has no probability.
    pub fn push_first_of_prompt(&mut self, token: &str) {
        self.push_token(token.to_owned(), token);
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
    }

    fn push_token(&mut self, written: String, text: &str) {
        self.text_offset.push(self.next_offset);
        self.next_offset += text.chars().count() as u64;
        self.tokens.push(written);
    }
}
