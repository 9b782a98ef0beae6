//! The consumer's end, in the frontend. It does not trust the worker.

use std::sync::atomic::Ordering;

use pharos_base::shm::SharedMemory;
use pharos_base::timeline::Instant;

use super::{
    DROPPED, Definition, Described, HEAD, KIND_METRIC, KIND_SAMPLE, KIND_SERIES, KINDS,
    MAX_RECORD_WORDS, MAX_SERIES, Ring, Sample, TAIL,
};
use crate::catalog::Kind;

/// A ring whose content violates the layout, and how. The reader reads nothing more from it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the metrics channel is corrupt: {0}")]
pub struct Corrupt(pub(super) String);

/// One record.
#[derive(Clone, Debug, PartialEq)]
pub enum Event<'a> {
    /// Defines the series of the next number (from 0, in order). Not checked against any catalog.
    Series(Definition),
    /// A metric that the model describes. Not checked against any catalog.
    Metric(Described),
    /// A sample of a series that was defined before.
    Sample(Sample<'a>),
}

/// The number of words after which the reader gives room back to the producer, while it still
/// reads.
const GIVE_BACK_WORDS: u64 = 512;

/// Reads records from a ring.
#[derive(Debug)]
pub struct Reader {
    ring: Ring,
    /// Words read so far. The ring's copy is only ever written from this one.
    tail: u64,
    /// Number of series defined so far.
    series: usize,
    /// The record being read.
    record: Vec<u64>,
    text: Vec<u8>,
    failed: Option<Corrupt>,
}

impl Reader {
    /// Creates a reader at the ring's start; [`create`](super::create) creates one with its ring.
    ///
    /// # Errors
    /// The header does not match this version or the size of the memory.
    pub fn open(memory: SharedMemory) -> Result<Self, Corrupt> {
        let ring = Ring::open(memory)?;
        Ok(Self { ring, tail: 0, series: 0, record: Vec::new(), text: Vec::new(), failed: None })
    }

    /// Returns whether no committed record is waiting.
    pub fn is_empty(&self) -> bool {
        self.ring.load(HEAD, Ordering::Relaxed) == self.tail
    }

    /// Returns the number of bytes of committed records that wait to be read; at most the ring's
    /// capacity.
    pub fn waiting_bytes(&self) -> u64 {
        let words = self.ring.load(HEAD, Ordering::Relaxed).wrapping_sub(self.tail);
        words.min(self.ring.capacity as u64) * size_of::<u64>() as u64
    }

    /// Returns the number of samples that the producer could not write, since the start. Not
    /// trustworthy: any number is possible.
    pub fn dropped(&self) -> u64 {
        self.ring.load(DROPPED, Ordering::Relaxed)
    }

    /// Reads every record committed before the call, in order, and returns their number. Never
    /// waits, and always ends, whatever the producer writes meanwhile. Costs one load if the ring
    /// is empty.
    ///
    /// # Errors
    /// The first invalid record. From then on, every call returns the same error.
    pub fn drain(&mut self, mut each: impl FnMut(Event<'_>)) -> Result<usize, Corrupt> {
        if let Some(corrupt) = &self.failed {
            return Err(corrupt.clone());
        }
        if self.is_empty() {
            return Ok(0);
        }
        let result = self.drain_committed(&mut each);
        self.ring.store(TAIL, self.tail, Ordering::Release);
        if let Err(corrupt) = &result {
            self.failed = Some(corrupt.clone());
        }
        result
    }

    fn drain_committed(&mut self, each: &mut impl FnMut(Event<'_>)) -> Result<usize, Corrupt> {
        // Acquire: all words of the records before this head are visible.
        let head = self.ring.load(HEAD, Ordering::Acquire);
        let waiting = head.wrapping_sub(self.tail);
        if waiting > self.ring.capacity as u64 {
            return Err(Corrupt(format!(
                "{waiting} words are waiting in a ring of {}",
                self.ring.capacity
            )));
        }
        let mut records = 0;
        let mut given_back = self.tail;
        while self.tail != head {
            let first = self.copy_record(head.wrapping_sub(self.tail))?;
            each(self.parse(first)?);
            records += 1;
            self.tail = self.tail.wrapping_add(self.record.len() as u64 + 1);
            if self.tail.wrapping_sub(given_back) >= GIVE_BACK_WORDS {
                given_back = self.tail;
                self.ring.store(TAIL, self.tail, Ordering::Release);
            }
        }
        Ok(records)
    }

    /// Copies the record at the tail, of which at most `available` words are committed. Returns its
    /// first word and stores the others in `record`. Reads each shared word once.
    fn copy_record(&mut self, available: u64) -> Result<u64, Corrupt> {
        let data = self.ring.data();
        let mask = self.ring.capacity - 1;
        let mut at = self.tail as usize;
        let mut next = || {
            let word = data.get(at & mask).map_or(0, |word| word.load(Ordering::Relaxed));
            at = at.wrapping_add(1);
            word
        };
        let first = next();
        let words = usize::from((first >> 16) as u16);
        if words == 0 || words > MAX_RECORD_WORDS || words as u64 > available {
            return Err(Corrupt(format!(
                "a record of {words} words where {available} are committed"
            )));
        }
        self.record.clear();
        self.record.extend(std::iter::repeat_with(&mut next).take(words - 1));
        Ok(first)
    }

    fn parse(&mut self, first: u64) -> Result<Event<'_>, Corrupt> {
        let kind = first as u8;
        let padding = usize::from((first >> 8) as u8);
        let number = (first >> 32) as u32;
        match (kind, self.record.as_slice()) {
            (KIND_SAMPLE, &[value, clock, ref text @ ..]) => {
                if number as usize >= self.series {
                    return Err(Corrupt(format!(
                        "a sample of series {number}, but {} are defined",
                        self.series
                    )));
                }
                let request_id = unpack(&mut self.text, text, padding)?;
                let request_id =
                    std::str::from_utf8(request_id).map_err(|_| not_utf8("request id"))?;
                let value = f64::from_bits(value);
                Ok(Event::Sample(Sample {
                    series: number,
                    value,
                    clock: Instant(clock),
                    request_id,
                }))
            }
            (KIND_SERIES, &[kind, ref text @ ..]) => {
                if number as usize != self.series || self.series >= MAX_SERIES {
                    return Err(Corrupt(format!(
                        "a definition of series {number} after {} series",
                        self.series
                    )));
                }
                let definition =
                    definition(kind_of(kind)?, unpack(&mut self.text, text, padding)?)?;
                self.series += 1;
                Ok(Event::Series(definition))
            }
            (KIND_METRIC, &[kind, count, ref rest @ ..]) => {
                let count = usize::try_from(count).ok().filter(|count| *count <= rest.len());
                let count =
                    count.ok_or_else(|| Corrupt("buckets that exceed their record".to_owned()))?;
                let (buckets, text) = rest.split_at(count);
                let buckets = buckets.iter().map(|bits| f64::from_bits(*bits)).collect();
                described(kind_of(kind)?, buckets, unpack(&mut self.text, text, padding)?)
                    .map(Event::Metric)
            }
            (kind, rest) => {
                Err(Corrupt(format!("a record of kind {kind} with {} words", rest.len() + 1)))
            }
        }
    }
}

fn not_utf8(what: &str) -> Corrupt {
    Corrupt(format!("a {what} that is not UTF-8"))
}

/// Returns the bytes packed in `words`, without the padding.
fn unpack<'a>(bytes: &'a mut Vec<u8>, words: &[u64], padding: usize) -> Result<&'a [u8], Corrupt> {
    bytes.clear();
    words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    let length = bytes.len().checked_sub(padding).filter(|_| padding < 8);
    let length = length
        .ok_or_else(|| Corrupt(format!("{padding} bytes of padding in {} words", words.len())))?;
    bytes.truncate(length);
    Ok(bytes)
}

fn kind_of(number: u64) -> Result<Kind, Corrupt> {
    let kind = usize::try_from(number).ok().and_then(|kind| KINDS.get(kind).copied());
    kind.ok_or_else(|| Corrupt("a metric of an unknown type".to_owned()))
}

fn described(kind: Kind, buckets: Vec<f64>, text: &[u8]) -> Result<Described, Corrupt> {
    let mut texts = split(text)?.into_iter();
    let (Some(name), Some(description)) = (texts.next(), texts.next()) else {
        return Err(Corrupt("a metric without name and description".to_owned()));
    };
    Ok(Described { name, kind, description, buckets, dimensions: texts.collect() })
}

fn definition(kind: Kind, text: &[u8]) -> Result<Definition, Corrupt> {
    let mut texts = split(text)?.into_iter();
    let (Some(name), Some(unit)) = (texts.next(), texts.next()) else {
        return Err(Corrupt("a series without name and unit".to_owned()));
    };
    let mut labels = Vec::with_capacity(texts.len() / 2);
    while let Some(label) = texts.next() {
        let value = texts.next().ok_or_else(|| Corrupt("a label without a value".to_owned()))?;
        labels.push((label, value));
    }
    Ok(Definition { name, kind: Some(kind), unit, labels })
}

fn split(mut text: &[u8]) -> Result<Vec<String>, Corrupt> {
    let mut texts = Vec::new();
    while !text.is_empty() {
        let piece = text.split_first_chunk::<4>().and_then(|(length, rest)| {
            let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
            rest.split_at_checked(length)
        });
        let Some((piece, rest)) = piece else {
            return Err(Corrupt("a text that exceeds its record".to_owned()));
        };
        texts.push(String::from_utf8(piece.to_vec()).map_err(|_| not_utf8("text of a series"))?);
        text = rest;
    }
    Ok(texts)
}
