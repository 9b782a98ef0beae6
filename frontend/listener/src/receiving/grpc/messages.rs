//! Cuts the bytes of a call into its messages (gRPC over HTTP/2, "Length-Prefixed-Message"), however the network has cut
//! them. Memory grows with the bytes that came, never with the length that a message says it has.

use bytes::{Buf, Bytes};
use pharos::data::{Collector, Data};

/// A message's head: whether it is compressed, and its length.
pub(crate) const PREFIX: usize = 5;

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// 0: plain; 1: compressed; others are not defined.
    pub flag: u8,
    /// Bytes of the message behind the head.
    pub length: usize,
}

impl Head {
    /// The head at the beginning of `bytes`, if it is all there.
    pub(crate) fn at(bytes: &[u8]) -> Option<Self> {
        let (prefix, _) = bytes.split_first_chunk::<PREFIX>()?;
        let [flag, a, b, c, d] = *prefix;
        Some(Self { flag, length: u32::from_be_bytes([a, b, c, d]) as usize })
    }

    /// Its bytes.
    pub fn bytes(self) -> Bytes {
        let [a, b, c, d] = u32::try_from(self.length).unwrap_or(u32::MAX).to_be_bytes();
        Bytes::copy_from_slice(&[self.flag, a, b, c, d])
    }
}

/// A message of which not everything is here.
#[derive(Default)]
pub struct Partial {
    prefix: Vec<u8>,
    head: Option<Head>,
    came: Collector,
}

impl Partial {
    /// Whether nothing of a message is here.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefix.is_empty()
    }

    /// The head of the message, once it is here.
    pub fn head(&self) -> Option<Head> {
        self.head
    }

    /// Takes the bytes of the head off `data`.
    pub fn take_head(&mut self, data: &mut Bytes) {
        let missing = (PREFIX - self.prefix.len()).min(data.len());
        self.prefix.extend_from_slice(&data.split_to(missing));
        self.head = Head::at(&self.prefix);
    }

    /// How many of `available` bytes belong to the message.
    pub(crate) fn wants(&self, available: usize) -> usize {
        self.head.map_or(0, |head| (head.length - self.came.len()).min(available))
    }

    /// Takes bytes of the message off `data`, and gives the message if that was the last of them.
    pub fn take(&mut self, data: &mut Bytes) -> Option<(Head, Data)> {
        let head = self.head?;
        let wanted = self.wants(data.len());
        if wanted > 0 {
            self.came.push(data.split_to(wanted));
        }
        (self.came.len() == head.length).then(|| (head, std::mem::take(self).came.finish()))
    }
}

/// How many bytes at the beginning of `data` are messages that are all here; each head must pass `check`.
///
/// # Errors
/// The first that `check` gives.
pub(crate) fn whole<E>(data: &Bytes, mut check: impl FnMut(Head) -> Result<bool, E>) -> Result<usize, E> {
    let mut rest = &data[..];
    while let Some(head) = Head::at(rest) {
        let length = PREFIX + head.length;
        if !check(head)? || rest.len() < length {
            break;
        }
        rest.advance(length);
    }
    Ok(data.len() - rest.len())
}
