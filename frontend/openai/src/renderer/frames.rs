//! The frames between the frontend and the process of a template: a kind (one byte), a length (four
//! bytes, little-endian) and that many bytes. Each frame to the process has one answer.
//!
//! | kind | to the process | its answer |
//! |---|---|---|
//! | `S` | the template, as JSON; the first frame | what it expects, as JSON |
//! | `R` | the variables of a prompt, as JSON | the text |
//! | `E` | | the error: the template is invalid or refuses the messages |
//!
//! Memory grows with the bytes that arrive, never by a length alone.

use std::collections::BTreeMap;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::template::{Expectations, MAX_OUTPUT_BYTES, TemplateSource};

pub(super) const SETUP: u8 = b'S';
pub(super) const RENDER: u8 = b'R';
pub(super) const ERROR: u8 = b'E';

/// The bytes before the content of a frame.
const HEAD: usize = 5;
/// The longest frame that the process reads, which limits its memory anyway.
const MAX_REQUEST_BYTES: usize = 256 << 20;
/// The longest error that the frontend reads.
const MAX_ERROR_BYTES: usize = 64 << 10;

/// The template of a model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Setup {
    pub(super) source: TemplateSource,
    pub(super) special_tokens: BTreeMap<String, String>,
    /// What the template expects, if that is known.
    pub(super) expectations: Option<Expectations>,
}

impl Setup {
    pub(super) fn frame(&self) -> Vec<u8> {
        // Texts and maps of texts are always valid JSON; the process refuses an empty frame.
        frame(SETUP, &serde_json::to_vec(self).unwrap_or_default())
    }
}

/// The answer of a process.
#[derive(Debug)]
pub(super) enum Answer {
    Done(Vec<u8>),
    Failed(String),
}

pub(super) fn frame(kind: u8, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let mut frame = Vec::with_capacity(HEAD + content.len());
    frame.push(kind);
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(content);
    frame
}

pub(super) fn expectations(json: &[u8]) -> Option<Expectations> {
    serde_json::from_slice(json).ok()
}

fn parse(head: [u8; HEAD]) -> (u8, usize) {
    let [kind, length @ ..] = head;
    (kind, usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX))
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads an answer.
pub(super) async fn read_answer(input: &mut (impl AsyncRead + Unpin)) -> io::Result<Answer> {
    let mut head = [0; HEAD];
    input.read_exact(&mut head).await?;
    let (kind, length) = parse(head);
    let most = if kind == ERROR { MAX_ERROR_BYTES } else { MAX_OUTPUT_BYTES };
    if length > most {
        return Err(invalid(format!(
            "it wrote a frame of {length} bytes; at most {most} are allowed"
        )));
    }
    let mut content = Vec::new();
    input.take(length as u64).read_to_end(&mut content).await?;
    if content.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match kind {
        SETUP | RENDER => Ok(Answer::Done(content)),
        ERROR => Ok(Answer::Failed(String::from_utf8_lossy(&content).into_owned())),
        other => Err(invalid(format!("it wrote a frame of the unknown kind {other}"))),
    }
}

/// Reads a frame to the process; `None` at the end of the input.
pub(super) fn read_request(input: &mut impl Read) -> io::Result<Option<(u8, Vec<u8>)>> {
    let mut head = [0; HEAD];
    if let Err(error) = input.read_exact(&mut head) {
        let is_end = error.kind() == io::ErrorKind::UnexpectedEof;
        return if is_end { Ok(None) } else { Err(error) };
    }
    let (kind, length) = parse(head);
    if length > MAX_REQUEST_BYTES {
        return Err(invalid(format!("a frame of {length} bytes")));
    }
    let mut content = Vec::new();
    input.by_ref().take(length as u64).read_to_end(&mut content)?;
    Ok(Some((kind, content)).filter(|(_, content)| content.len() == length))
}
