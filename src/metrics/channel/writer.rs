//! The producer's end, in a worker.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use pharos_base::shm::SharedMemory;
use pharos_base::timeline::Instant;

use super::{
    DROPPED, Definition, Described, HEAD, KIND_METRIC, KIND_SAMPLE, KIND_SERIES, KINDS,
    MAX_RECORD_WORDS, MAX_SERIES, Ring, TAIL,
};
use crate::catalog::Kind;

/// Why a record was not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The ring has no room at the moment.
    #[error("the metrics channel is full")]
    Full,
    /// The record exceeds [`MAX_RECORD_WORDS`]: label values or a request id of more than 8,000
    /// bytes.
    #[error("a metric's labels or request id exceed {} bytes", 8 * (MAX_RECORD_WORDS - 8))]
    TooLong,
    /// The ring already defines [`MAX_SERIES`] series.
    #[error("a worker may have at most {MAX_SERIES} series of metrics")]
    TooManySeries,
    /// The series was not interned in this ring.
    #[error("the metric series is not defined in this channel")]
    UnknownSeries,
}

/// One value of one series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The series' number in its ring.
    pub series: u32,
    /// A counter's increment, a gauge's value, a histogram's observation.
    pub value: f64,
    /// The time of recording.
    pub clock: Instant,
    /// The ids of the requests that it belongs to, joined by commas; may be empty.
    pub request_id: &'a str,
}

/// Writes records into a ring. There is only one producer: a worker with several threads must put
/// it behind a mutex.
#[derive(Debug)]
pub struct Writer {
    ring: Ring,
    /// Words written so far. The ring's copy is only ever written from this one.
    head: u64,
    /// The consumer's tail when it was last read.
    tail: u64,
    /// The consumer's tail when it was last woken; see [`Writer::needs_wakeup`].
    woken_at: Option<u64>,
    series: HashMap<Definition, u32>,
    text: Vec<u8>,
}

impl Writer {
    /// Opens the ring that the frontend created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not such a ring; otherwise the kernel's error.
    pub fn open(fd: impl AsFd) -> io::Result<Self> {
        let len = usize::try_from(rustix::fs::fstat(&fd)?.st_size).unwrap_or(0);
        let memory = SharedMemory::map(&fd, len)?;
        let ring = Ring::open(memory)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let head = ring.load(HEAD, Ordering::Relaxed);
        let tail = ring.load(TAIL, Ordering::Acquire);
        Ok(Self { ring, head, tail, woken_at: None, series: HashMap::new(), text: Vec::new() })
    }

    /// Returns the number of a series, and defines it for the consumer if it is new. Keep the
    /// number: this call costs a look-up, a sample does not. A definition without a type is written
    /// as a gauge.
    ///
    /// # Errors
    /// The series is new and its definition does not fit; the caller may try again later.
    pub fn intern(&mut self, series: &Definition) -> Result<u32, PushError> {
        if let Some(&number) = self.series.get(series) {
            return Ok(number);
        }
        let number = u32::try_from(self.series.len()).map_err(|_| PushError::TooManySeries)?;
        if self.series.len() >= MAX_SERIES {
            return Err(PushError::TooManySeries);
        }
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        let labels = series.labels.iter().flat_map(|(name, value)| [name, value]);
        put_texts(&mut text, [&series.name, &series.unit].into_iter().chain(labels))?;
        let kind = number_of(series.kind.unwrap_or(Kind::Gauge));
        let pushed = self.push(KIND_SERIES, number, &[kind], &text);
        self.text = text;
        pushed?;
        self.series.insert(series.clone(), number);
        Ok(number)
    }

    /// Describes a metric of the model to the consumer. Call it before the metric's series are
    /// defined.
    ///
    /// # Errors
    /// The description does not fit; the caller may try again later.
    pub fn describe(&mut self, metric: &Described) -> Result<(), PushError> {
        let mut text = Vec::new();
        put_texts(
            &mut text,
            [&metric.name, &metric.description].into_iter().chain(&metric.dimensions),
        )?;
        let fixed = [number_of(metric.kind), metric.buckets.len() as u64];
        let fixed: Vec<u64> =
            fixed.into_iter().chain(metric.buckets.iter().map(|bound| bound.to_bits())).collect();
        self.push(KIND_METRIC, 0, &fixed, &text)
    }

    /// Writes one sample.
    ///
    /// # Errors
    /// The sample does not fit, and nothing is written.
    pub fn sample(&mut self, sample: &Sample<'_>) -> Result<(), PushError> {
        if sample.series as usize >= self.series.len() {
            return Err(PushError::UnknownSeries);
        }
        let fixed = [sample.value.to_bits(), sample.clock.0];
        self.push(KIND_SAMPLE, sample.series, &fixed, sample.request_id.as_bytes())
    }

    /// Writes one sample. While the ring is full, calls `wait`, which should wait a little and
    /// return whether to try again.
    ///
    /// # Errors
    /// The sample was not written; it is counted as dropped, which the frontend reads.
    pub fn sample_or_drop(
        &mut self,
        sample: &Sample<'_>,
        mut wait: impl FnMut() -> bool,
    ) -> Result<(), PushError> {
        loop {
            match self.sample(sample) {
                Err(PushError::Full) if wait() => {}
                Err(error) => {
                    self.count_dropped();
                    return Err(error);
                }
                Ok(()) => return Ok(()),
            }
        }
    }

    /// Returns whether to wake the consumer now: more than half of the ring is in use, and the
    /// consumer has not been woken since it last gave room back. Call it after each record; costs a
    /// comparison while there is room.
    pub fn needs_wakeup(&mut self) -> bool {
        let half = self.ring.capacity as u64 / 2;
        if self.head.wrapping_sub(self.tail) <= half || self.woken_at == Some(self.tail) {
            return false;
        }
        self.tail = self.ring.load(TAIL, Ordering::Acquire);
        if self.head.wrapping_sub(self.tail) <= half || self.woken_at == Some(self.tail) {
            return false;
        }
        self.woken_at = Some(self.tail);
        true
    }

    /// Counts a sample that could not be written, for example because its series could not be
    /// defined.
    pub fn count_dropped(&mut self) {
        // The producer is the only writer of this word.
        let dropped = self.ring.load(DROPPED, Ordering::Relaxed).wrapping_add(1);
        self.ring.store(DROPPED, dropped, Ordering::Relaxed);
    }

    #[inline]
    fn push(&mut self, kind: u8, series: u32, fixed: &[u64], text: &[u8]) -> Result<(), PushError> {
        let words = 1 + fixed.len() + text.len().div_ceil(8);
        if words > MAX_RECORD_WORDS {
            return Err(PushError::TooLong);
        }
        self.make_room(words)?;
        let padding = text.len().next_multiple_of(8) - text.len();
        let first = u64::from(kind)
            | (padding as u64) << 8
            | (words as u64) << 16
            | u64::from(series) << 32;
        let data = self.ring.data();
        let mask = self.ring.capacity - 1;
        let mut at = self.head as usize;
        let mut put = |word: u64| {
            if let Some(to) = data.get(at & mask) {
                to.store(word, Ordering::Relaxed);
            }
            at = at.wrapping_add(1);
        };
        put(first);
        fixed.iter().for_each(|&word| put(word));
        let (whole, rest) = text.as_chunks::<8>();
        whole.iter().for_each(|bytes| put(u64::from_le_bytes(*bytes)));
        if !rest.is_empty() {
            let mut last = [0; 8];
            last.iter_mut().zip(rest).for_each(|(to, &from)| *to = from);
            put(u64::from_le_bytes(last));
        }
        self.head = self.head.wrapping_add(words as u64);
        self.ring.store(HEAD, self.head, Ordering::Release);
        Ok(())
    }

    fn make_room(&mut self, words: usize) -> Result<(), PushError> {
        let fits = |head: u64, tail: u64| {
            let used = head.wrapping_sub(tail);
            used.checked_add(words as u64).is_some_and(|used| used <= self.ring.capacity as u64)
        };
        if !fits(self.head, self.tail) {
            // Acquire: the consumer has finished reading the words that it gave back before they
            // are overwritten.
            self.tail = self.ring.load(TAIL, Ordering::Acquire);
            if !fits(self.head, self.tail) {
                return Err(PushError::Full);
            }
        }
        Ok(())
    }
}

/// Returns the type's number in a record.
fn number_of(kind: Kind) -> u64 {
    KINDS.iter().position(|known| *known == kind).unwrap_or_default() as u64
}

/// Appends texts, each after its length.
fn put_texts<'a>(
    out: &mut Vec<u8>,
    texts: impl Iterator<Item = &'a String>,
) -> Result<(), PushError> {
    for text in texts {
        let length = u32::try_from(text.len()).map_err(|_| PushError::TooLong)?;
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(text.as_bytes());
    }
    Ok(())
}
