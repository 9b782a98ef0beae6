//! Reads the metadata of a GGUF file, in which llama.cpp keeps language models: what the server
//! needs to know besides the tensors. The weights are not read.
//!
//! Source of the format: `docs/gguf.md` of ggml.

use std::fmt;

/// The ending of the file names.
pub const ENDING: &str = ".gguf";

const MAGIC: &[u8; 4] = b"GGUF";
/// The versions of the format with lengths of 64 bits in little-endian order.
const VERSIONS: [u32; 2] = [2, 3];
/// The most entries of a file. Models have about fifty.
const MAX_ENTRIES: u64 = 65_536;
/// The most bytes of a text that is returned.
const MAX_TEXT: usize = 1 << 20;

const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// The metadata of a language model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GgufMetadata {
    /// The chat template; `None` for a base model.
    pub chat_template: Option<String>,
    /// The token that begins a text.
    pub bos_token: Option<String>,
    /// The token that ends a text.
    pub eos_token: Option<String>,
    /// The most tokens of a text in the training.
    pub context_length: Option<u64>,
    /// How the vectors of a text's tokens become one result; `None` for a model that generates text.
    pub pooling: Option<Pooling>,
}

/// How a model that does not generate text makes one result from the vectors of a text's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The result is an embedding: the mean, or the vector of one token.
    Embedding,
    /// The result is the score of a pair of texts.
    Score,
}

impl Pooling {
    /// Returns what a number of llama.cpp's `llama_pooling_type` means.
    fn numbered(number: u64) -> Option<Self> {
        match number {
            1..=3 => Some(Self::Embedding),
            4 => Some(Self::Score),
            _ => None,
        }
    }
}

/// Why a file cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufError(String);

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not a GGUF file that can be served: {}", self.0)
    }
}

impl std::error::Error for GgufError {}

fn error(why: impl Into<String>) -> GgufError {
    GgufError(why.into())
}

/// Reads the metadata at the beginning of a file. The time is linear in its size without the
/// weights.
///
/// # Errors
/// The bytes are not a GGUF file, or one of an unknown version.
pub fn metadata(file: &[u8]) -> Result<GgufMetadata, GgufError> {
    let mut reader = Reader { rest: file };
    if reader.bytes(4)? != MAGIC {
        return Err(error("it does not begin with 'GGUF'"));
    }
    let version = reader.u32()?;
    if !VERSIONS.contains(&version) {
        return Err(error(format!("it has version {version}; versions 2 and 3 are supported")));
    }
    let _tensors = reader.u64()?;
    let entries = reader.u64()?;
    if entries > MAX_ENTRIES {
        return Err(error(format!("it has {entries} entries; at most {MAX_ENTRIES} are allowed")));
    }
    let mut found = GgufMetadata::default();
    let mut tokens = None;
    let mut first = None;
    let mut last = None;
    for _ in 0..entries {
        let key = reader.text()?;
        let kind = reader.u32()?;
        let before = reader.rest;
        match (key, kind) {
            ("tokenizer.chat_template", STRING) => {
                found.chat_template = Some(reader.short_text()?.to_owned());
            }
            ("tokenizer.ggml.tokens", ARRAY) => {
                reader.skip(kind)?;
                tokens = Some(before);
            }
            ("tokenizer.ggml.bos_token_id", _) => first = reader.natural(kind)?,
            ("tokenizer.ggml.eos_token_id", _) => last = reader.natural(kind)?,
            // The keys of a model begin with the name of its architecture.
            (key, _) if key.ends_with(".context_length") => {
                found.context_length = reader.natural(kind)?;
            }
            (key, _) if key.ends_with(".pooling_type") => {
                found.pooling = reader.natural(kind)?.and_then(Pooling::numbered);
            }
            _ => reader.skip(kind)?,
        }
    }
    if let Some(tokens) = tokens {
        found.bos_token = first.and_then(|id| element(tokens, id));
        found.eos_token = last.and_then(|id| element(tokens, id));
    }
    Ok(found)
}

/// Returns a string of an array; `None` without it.
fn element(array: &[u8], position: u64) -> Option<String> {
    let mut reader = Reader { rest: array };
    let kind = reader.u32().ok()?;
    let count = reader.u64().ok()?;
    if kind != STRING || position >= count {
        return None;
    }
    for _ in 0..position {
        reader.text_bytes().ok()?;
    }
    reader.short_text().ok().map(str::to_owned)
}

/// Reads values one after the other.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, count: u64) -> Result<&'a [u8], GgufError> {
        let split = usize::try_from(count).ok().and_then(|count| self.rest.split_at_checked(count));
        let (bytes, rest) = split.ok_or_else(|| error("it ends too early"))?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let (bytes, rest) =
            self.rest.split_first_chunk().ok_or_else(|| error("it ends too early"))?;
        self.rest = rest;
        Ok(*bytes)
    }

    fn u32(&mut self) -> Result<u32, GgufError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, GgufError> {
        self.array().map(u64::from_le_bytes)
    }

    fn text_bytes(&mut self) -> Result<&'a [u8], GgufError> {
        let length = self.u64()?;
        self.bytes(length)
    }

    fn text(&mut self) -> Result<&'a str, GgufError> {
        std::str::from_utf8(self.text_bytes()?).map_err(|_| error("a text is not UTF-8"))
    }

    fn short_text(&mut self) -> Result<&'a str, GgufError> {
        let text = self.text()?;
        match text.len() <= MAX_TEXT {
            true => Ok(text),
            false => Err(error(format!("a text has more than {MAX_TEXT} bytes"))),
        }
    }

    /// Reads a value of this kind; `None` if it is not a natural number.
    fn natural(&mut self, kind: u32) -> Result<Option<u64>, GgufError> {
        match kind {
            4 => self.u32().map(|number| Some(number.into())),
            5 => self.u32().map(|number| u64::try_from(number.cast_signed()).ok()),
            10 => self.u64().map(Some),
            11 => self.u64().map(|number| u64::try_from(number.cast_signed()).ok()),
            kind => self.skip(kind).map(|()| None),
        }
    }

    /// Skips a value of this kind.
    fn skip(&mut self, kind: u32) -> Result<(), GgufError> {
        if kind != ARRAY {
            return self.skip_element(kind);
        }
        let kind = self.u32()?;
        let count = self.u64()?;
        match size(kind) {
            Some(size) => self.bytes(count.saturating_mul(size)).map(drop),
            None => (0..count).try_for_each(|_| self.skip_element(kind)),
        }
    }

    fn skip_element(&mut self, kind: u32) -> Result<(), GgufError> {
        match size(kind) {
            Some(size) => self.bytes(size).map(drop),
            None if kind == STRING => self.text_bytes().map(drop),
            None => Err(error(format!("a value has the unknown kind {kind}"))),
        }
    }
}

/// Returns the bytes of a value of this kind; `None` for texts and unknown kinds.
const fn size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
        [text(key).as_slice(), &kind.to_le_bytes(), value].concat()
    }

    fn tokens(tokens: &[&str]) -> Vec<u8> {
        let mut array = STRING.to_le_bytes().to_vec();
        array.extend((tokens.len() as u64).to_le_bytes());
        tokens.iter().for_each(|token| array.extend(text(token)));
        array
    }

    fn file(entries: &[Vec<u8>]) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend(3_u32.to_le_bytes());
        file.extend(0_u64.to_le_bytes());
        file.extend((entries.len() as u64).to_le_bytes());
        file.extend(entries.concat());
        file
    }

    fn example() -> Vec<u8> {
        file(&[
            entry("llama.context_length", 4, &2048_u32.to_le_bytes()),
            entry("general.architecture", STRING, &text("llama")),
            entry(
                "tokenizer.ggml.scores",
                ARRAY,
                &[6_u32.to_le_bytes().as_slice(), &1_u64.to_le_bytes(), &[0; 4]].concat(),
            ),
            entry("tokenizer.ggml.bos_token_id", 4, &1_u32.to_le_bytes()),
            entry("tokenizer.ggml.tokens", ARRAY, &tokens(&["<unk>", "<s>", "</s>"])),
            entry("tokenizer.ggml.eos_token_id", 5, &2_i32.to_le_bytes()),
            entry("tokenizer.chat_template", STRING, &text("{{ messages }}")),
            entry("general.quantized", 7, &[1]),
        ])
    }

    #[test]
    fn metadata_is_found_in_any_order() {
        assert_eq!(
            metadata(&example()),
            Ok(GgufMetadata {
                chat_template: Some("{{ messages }}".to_owned()),
                bos_token: Some("<s>".to_owned()),
                eos_token: Some("</s>".to_owned()),
                context_length: Some(2048),
                pooling: None,
            })
        );
    }

    #[test]
    fn the_pooling_says_what_a_model_is_for() {
        let pooling = |number: u32| {
            let file = file(&[entry("bert.pooling_type", 4, &number.to_le_bytes())]);
            metadata(&file).unwrap().pooling
        };
        assert_eq!([0, 1, 2, 3, 9].map(pooling), {
            let some = Some(Pooling::Embedding);
            [None, some, some, some, None]
        });
        assert_eq!(pooling(4), Some(Pooling::Score));
    }

    #[test]
    fn broken_files_are_refused() {
        let example = example();
        for length in 0..example.len() {
            assert!(metadata(&example[..length]).is_err(), "{length}");
        }
        let wrong = |file: &[u8]| metadata(file).unwrap_err().to_string();
        assert!(wrong(b"GGML\x03\0\0\0").contains("does not begin with 'GGUF'"));
        assert!(wrong(b"GGUF\x01\0\0\0").contains("version 1; versions 2 and 3"));
        assert!(wrong(&file(&[entry("a", 99, &[])])).contains("unknown kind 99"));
        let mut endless = file(&[]);
        endless[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(wrong(&endless).contains("at most 65536"));
        // A length that a file claims costs nothing.
        let long = [u64::MAX.to_le_bytes().as_slice(), b"x"].concat();
        assert!(wrong(&file(&[entry("a", STRING, &long)])).contains("ends too early"));
    }
}
