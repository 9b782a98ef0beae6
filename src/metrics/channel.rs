//! The channel of a worker's metric samples to the frontend: a ring in shared memory with one
//! producer and one consumer.
//!
//! # Layout, version 3
//! The memory is 64-bit words in the machine's byte order, all accessed as atomics:
//!
//! | word | written by | what |
//! |---|---|---|
//! | 0 | creator | [`MAGIC`] |
//! | 1 | creator | [`VERSION`] |
//! | 2 | creator | capacity: the number of data words, a power of two |
//! | 8 | producer | head: data words written since the start |
//! | 16 | consumer | tail: data words read since the start |
//! | 24 | producer | samples dropped because the ring stayed full |
//! | 32.. | producer | data; word number n of the stream lies at n modulo capacity |
//!
//! Head, tail and the counter each have a cache line. The stream is a sequence of records. A
//! record's first word holds, from the lowest bit: kind (8 bits), padding (8 bits), length of the
//! record in words (16 bits), series number (32 bits). A record of a series holds its whole
//! definition, so the two sides may have read different versions of `metrics.yaml`. A text in a
//! record fills whole words, the lowest byte of a word first; padding is the number of unused bytes
//! in the last word (0 to 7).
//!
//! | kind | words after the first | meaning |
//! |---|---|---|
//! | 1 | type, text | the series number stands for this series; type: 0 counter, 1 gauge, 2 histogram, 3 summary; the text is the metric's name, its unit, and then name and value of each label, each after its length as a 4-byte little-endian number; numbers are given in order from 0 |
//! | 2 | value (bits of an f64), clock, text | a sample: of this series, at this time (ns of CLOCK_MONOTONIC), for the request whose id is the text |
//! | 3 | type, number of buckets, their upper bounds (bits of f64s), text | the model itself describes a metric, before its first series; the text is the name, the description and the labels' names, in the form of kind 1; the series number is 0 |
//!
//! # Guarantees
//! A record is committed by one release store of the head, after all of its words. Uncommitted
//! words of a killed producer are not read; committed records remain, because the mapping outlives
//! the process. The consumer trusts nothing: it copies each record once into private memory and
//! checks the copy. An invalid record ends the channel ([`Corrupt`]).

mod reader;
mod writer;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use pharos_base::shm::{self, SharedMemory};

use super::catalog::Kind;
pub use reader::{Corrupt, Event, Reader};
pub use writer::{PushError, Sample, Writer};

/// The first word of a ring: `PHRSRING`.
pub const MAGIC: u64 = u64::from_ne_bytes(*b"PHRSRING");
/// The version of the layout above.
pub const VERSION: u64 = 3;
/// The longest record, in words (8 KiB). Limits label values and request ids.
pub const MAX_RECORD_WORDS: usize = 1024;
/// The number of series that one ring may define, at most.
pub const MAX_SERIES: usize = 1 << 16;

const CAPACITY: usize = 2;
const HEAD: usize = 8;
const TAIL: usize = 16;
const DROPPED: usize = 24;
const DATA: usize = 32;

const KIND_SERIES: u8 = 1;
const KIND_SAMPLE: u8 = 2;
const KIND_METRIC: u8 = 3;

/// A series as a worker defines it: the metric, and the labels in the metric's order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Definition {
    /// The metric's name.
    pub name: String,
    /// Its type; `None` if the sender does not know it (lines of text). The type of the defined
    /// metric then applies.
    pub kind: Option<Kind>,
    /// Its unit.
    pub unit: String,
    /// Names and values of its labels.
    pub labels: Vec<(String, String)>,
}

/// A metric that a model describes, independently of `metrics.yaml`: Triton's custom metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    /// The metric's name.
    pub name: String,
    /// Its type.
    pub kind: Kind,
    /// What it counts or measures.
    pub description: String,
    /// The upper bounds of a histogram, ascending and finite; empty for other types.
    pub buckets: Vec<f64>,
    /// The names of its labels.
    pub dimensions: Vec<String>,
}

/// The types, indexed by their number in a record.
const KINDS: [Kind; 4] = [Kind::Counter, Kind::Gauge, Kind::Histogram, Kind::Summary];

/// Creates a ring for at least `bytes` of records (at least 16 KiB, rounded up to a power of two)
/// and its reader.
///
/// The descriptor is for the worker, which opens it with [`Writer::open`].
///
/// # Errors
/// The kernel refuses the memory, or `bytes` overflows an address.
pub fn create(bytes: usize) -> io::Result<(OwnedFd, Reader)> {
    let words =
        bytes.div_ceil(size_of::<u64>()).max(2 * MAX_RECORD_WORDS).checked_next_power_of_two();
    let len = words.and_then(|words| words.checked_add(DATA)?.checked_mul(size_of::<u64>()));
    let (Some(words), Some(len)) = (words, len) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a metrics ring of {bytes} bytes is too large"),
        ));
    };
    let fd = shm::create("pharos-metrics", len as u64)?;
    let memory = SharedMemory::map(&fd, len)?;
    for (at, value) in [(0, MAGIC), (1, VERSION), (CAPACITY, words as u64)] {
        if let Some(word) = memory.words().get(at) {
            word.store(value, Ordering::Relaxed);
        }
    }
    let reader = Reader::open(memory).map_err(io::Error::other)?;
    Ok((fd, reader))
}

/// A ring with a checked header, and the capacity that the header had then.
#[derive(Debug)]
struct Ring {
    memory: SharedMemory,
    capacity: usize,
}

impl Ring {
    /// Checks the header.
    fn open(memory: SharedMemory) -> Result<Self, Corrupt> {
        let word = |at: usize| memory.words().get(at).map(|word| word.load(Ordering::Relaxed));
        let bad = |what: String| Err(Corrupt(what));
        if word(0) != Some(MAGIC) || word(1) != Some(VERSION) {
            return bad("not a metrics ring of version 3".to_owned());
        }
        let capacity = word(CAPACITY).and_then(|words| usize::try_from(words).ok()).unwrap_or(0);
        let room = memory.words().len().saturating_sub(DATA);
        if !capacity.is_power_of_two() || capacity < MAX_RECORD_WORDS || capacity > room {
            return bad(format!(
                "a capacity of {capacity} words does not fit a mapping with room for {room}"
            ));
        }
        Ok(Self { memory, capacity })
    }

    /// Returns a word of the header; `open` has checked that the mapping is long enough.
    fn header(&self, at: usize) -> Option<&AtomicU64> {
        self.memory.words().get(at)
    }

    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.header(at).map_or(0, |word| word.load(order))
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        if let Some(word) = self.header(at) {
            word.store(value, order);
        }
    }

    /// Returns the data words, exactly `capacity` of them.
    fn data(&self) -> &[AtomicU64] {
        self.memory.words().get(DATA..DATA + self.capacity).unwrap_or(&[])
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
