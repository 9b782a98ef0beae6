//! Texts as tokens.
//!
//! The library is Hugging Face's own, so that the numbers are those with which a model was trained.
//! The truncation and the padding of the tokenizer's file are not used: each request says what
//! happens to long texts, and batches of texts of similar lengths are padded here.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use pharos::error::InferError;
use pharos_backend::load_error;
use rayon::ThreadPool;
use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};
use tokenizers::models::ModelWrapper;
use tokenizers::utils::truncation::{TruncationStrategy, truncate_encodings};
use tokenizers::{
    Decoder as _, EncodeInput, Encoding, Tokenizer, TruncationDirection, TruncationParams,
};

/// The most bytes of a text. The time of a tokenizer grows with the text, whatever the model takes.
pub(crate) const MAX_BYTES: usize = 1 << 20;
/// Texts with fewer bytes together than this are tokenised by the calling thread: waking another
/// thread takes longer.
const FEW_BYTES: usize = 4096;

/// The tokenizer of a model.
pub(crate) struct Texts {
    tokenizer: Tokenizer,
    direction: TruncationDirection,
    pool: ThreadPool,
    /// Whether the places of tokens in their text are needed.
    with_offsets: bool,
}

/// A text, or a pair of texts.
#[derive(Clone, Debug)]
pub(crate) struct Item<'a> {
    /// The text that is put before the text.
    pub(crate) prompt: &'a str,
    pub(crate) text: &'a str,
    pub(crate) pair: Option<&'a str>,
    pub(crate) add_special_tokens: bool,
    pub(crate) limit: Limit,
}

/// What happens to a text with more tokens than this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// It is refused.
    Refuse(usize),
    /// The rest is cut off.
    Truncate(usize),
}

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<u32>,
    /// The number of the text that a token belongs to: 0 or 1.
    pub(crate) types: Vec<u32>,
    /// 1 for a token that is not part of a text.
    pub(crate) special: Vec<u32>,
    /// The first character of each token, and the one after its last.
    pub(crate) offsets: Vec<(usize, usize)>,
    pub(crate) is_truncated: bool,
}

impl Texts {
    /// Reads a tokenizer's file. The texts of a batch are tokenised on this many threads.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn open(
        file: &Path,
        threads: usize,
        with_offsets: bool,
    ) -> Result<Self, InferError> {
        let unusable = |error: &dyn std::fmt::Display| {
            load_error(format!("'{}' is not a tokenizer that can be used: {error}", file.display()))
        };
        let mut tokenizer = guarded(|| Tokenizer::from_file(file))
            .and_then(|read| read.map_err(|error| error.to_string()))
            .map_err(|error| unusable(&error))?;
        let direction =
            tokenizer.get_truncation().map_or(TruncationDirection::Right, |own| own.direction);
        tokenizer.with_truncation(None).map_err(|error| unusable(&error))?;
        tokenizer.with_padding(None);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|number| format!("tokenize-{number}"))
            .build()
            .map_err(|error| unusable(&error))?;
        Ok(Self { tokenizer, direction, pool, with_offsets })
    }

    /// Returns the tokens of texts, or for each why it has none.
    pub(crate) fn encode_all(&self, items: &[Item<'_>]) -> Vec<Result<Tokens, InferError>> {
        let bytes: usize = items.iter().map(Item::bytes).sum();
        if items.len() == 1 || bytes < FEW_BYTES {
            return items.iter().map(|item| self.encode(item)).collect();
        }
        self.pool
            .install(|| items.par_iter().with_max_len(1).map(|item| self.encode(item)).collect())
    }

    /// Returns the tokens of a text.
    ///
    /// # Errors
    /// The text is too long, or the tokenizer fails.
    pub(crate) fn encode(&self, item: &Item<'_>) -> Result<Tokens, InferError> {
        if item.bytes() > MAX_BYTES {
            return Err(InferError::invalid(format!(
                "a text has {} bytes; at most {MAX_BYTES} are allowed",
                item.bytes()
            )));
        }
        let prompted = match item.prompt {
            "" => None,
            prompt => Some(format!("{prompt}{}", item.text)),
        };
        let text = prompted.as_deref().unwrap_or(item.text);
        // The library has functions that panic on files that contradict themselves.
        guarded(|| self.encoding(item, text))
            .unwrap_or_else(Err)
            .map_err(|error| InferError::invalid(format!("a text cannot be tokenised: {error}")))
            .and_then(|(encoding, length)| match item.limit {
                Limit::Refuse(most) if length > most => Err(too_long(length, most)),
                Limit::Refuse(most) | Limit::Truncate(most) => {
                    Ok(self.tokens(&encoding, length > most))
                }
            })
    }

    /// Returns the encoding of a text, cut off if that is wanted, and the number of its tokens before
    /// that.
    fn encoding(&self, item: &Item<'_>, text: &str) -> Result<(Encoding, usize), String> {
        let whole: EncodeInput<'_> = match item.pair {
            Some(pair) => (text, pair).into(),
            None => text.into(),
        };
        let encoding = self.encode_input(whole, item.add_special_tokens)?;
        let length = encoding.len();
        let Limit::Truncate(most) = item.limit else { return Ok((encoding, length)) };
        if length <= most {
            return Ok((encoding, length));
        }
        // The special tokens are not cut off: the texts are, before the special tokens are added.
        let text = self.encode_input(text.into(), false)?;
        let pair = item.pair.map(|pair| self.encode_input(pair.into(), false)).transpose()?;
        let texts = text.len() + pair.as_ref().map_or(0, Encoding::len);
        let special = length.saturating_sub(texts);
        if special > most {
            return Err(format!(
                "at most {most} tokens are wanted, and the model adds {special} special tokens"
            ));
        }
        let parameters = TruncationParams {
            max_length: most.saturating_sub(special),
            strategy: TruncationStrategy::LongestFirst,
            stride: 0,
            direction: self.direction,
        };
        let (text, pair) =
            truncate_encodings(text, pair, &parameters).map_err(|error| error.to_string())?;
        let encoding = self
            .tokenizer
            .post_process(text, pair, item.add_special_tokens)
            .map_err(|error| error.to_string())?;
        Ok((encoding, length))
    }

    fn encode_input(&self, input: EncodeInput<'_>, special: bool) -> Result<Encoding, String> {
        match self.with_offsets {
            true => self.tokenizer.encode_char_offsets(input, special),
            false => self.tokenizer.encode_fast(input, special),
        }
        .map_err(|error| error.to_string())
    }

    fn tokens(&self, encoding: &Encoding, is_truncated: bool) -> Tokens {
        Tokens {
            ids: encoding.get_ids().to_vec(),
            types: encoding.get_type_ids().to_vec(),
            special: encoding.get_special_tokens_mask().to_vec(),
            offsets: if self.with_offsets { encoding.get_offsets().to_vec() } else { Vec::new() },
            is_truncated,
        }
    }

    /// Returns the number of tokens, with the tokens that were added to the vocabulary.
    pub(crate) fn vocabulary(&self) -> usize {
        self.tokenizer.get_vocab_size(true)
    }

    /// Returns the text of a token, as its vocabulary has it.
    pub(crate) fn token(&self, id: u32) -> String {
        self.tokenizer.id_to_token(id).unwrap_or_default()
    }

    /// Returns the number of the token for what the vocabulary does not have.
    pub(crate) fn unknown(&self) -> Option<u32> {
        let token = match self.tokenizer.get_model() {
            ModelWrapper::WordPiece(model) => Some(model.unk_token.as_str()),
            ModelWrapper::WordLevel(model) => Some(model.unk_token.as_str()),
            ModelWrapper::BPE(model) => model.unk_token.as_deref(),
            // Its token for this is a number, which the library keeps to itself.
            ModelWrapper::Unigram(_) => None,
        };
        self.id(token?)
    }

    /// Returns the number of a token of the vocabulary.
    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Returns the text of tokens that are given as texts.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub(crate) fn join(&self, tokens: Vec<String>) -> Result<String, InferError> {
        let decoder = self.tokenizer.get_decoder();
        let Some(decoder) = decoder else { return Ok(tokens.join(" ")) };
        guarded(|| decoder.decode(tokens).map_err(|error| error.to_string()))
            .unwrap_or_else(Err)
            .map_err(|error| InferError::invalid(format!("tokens have no text: {error}")))
    }

    /// Returns the text of tokens.
    ///
    /// # Errors
    /// The tokenizer's decoder fails.
    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, InferError> {
        guarded(|| self.tokenizer.decode(ids, skip_special).map_err(|error| error.to_string()))
            .unwrap_or_else(Err)
            .map_err(|error| InferError::invalid(format!("tokens have no text: {error}")))
    }
}

/// Returns the error of a text with more tokens than a model takes.
pub(crate) fn too_long(length: usize, most: usize) -> InferError {
    InferError::invalid(format!(
        "this model's maximum context length is {most} tokens, and a text has {length} tokens: \
         truncate_prompt_tokens -1 cuts the rest off"
    ))
}

impl Item<'_> {
    fn bytes(&self) -> usize {
        self.prompt.len() + self.text.len() + self.pair.map_or(0, str::len)
    }
}

/// Calls a function of the library; a panic is an error.
fn guarded<T>(function: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(function))
        .map_err(|_| "the tokenizer failed unexpectedly".to_owned())
}
