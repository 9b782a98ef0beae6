//! Splits the bytes of a call into messages (gRPC over HTTP/2, "Length-Prefixed-Message"). Memory
//! grows with the bytes that were received, never with the declared length of a message.

use bytes::{Buf, Bytes};
use pharos::data::{Collector, Data};

/// The size of a message's head: a flag, and the length of the message.
pub(crate) const PREFIX: usize = 5;

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// 0: plain; 1: compressed; other values are undefined.
    pub flag: u8,
    /// The number of bytes after the head.
    pub length: usize,
}

impl Head {
    /// Parses the head at the start of `bytes`, if it is complete.
    pub(crate) fn at(bytes: &[u8]) -> Option<Self> {
        let (prefix, _) = bytes.split_first_chunk::<PREFIX>()?;
        let [flag, a, b, c, d] = *prefix;
        Some(Self { flag, length: u32::from_be_bytes([a, b, c, d]) as usize })
    }

    /// Returns the bytes of the head.
    pub fn bytes(self) -> Bytes {
        let [a, b, c, d] = u32::try_from(self.length).unwrap_or(u32::MAX).to_be_bytes();
        Bytes::copy_from_slice(&[self.flag, a, b, c, d])
    }
}

/// A message that is not complete yet.
#[derive(Default)]
pub struct Partial {
    prefix: Vec<u8>,
    head: Option<Head>,
    received: Collector,
}

impl Partial {
    /// Returns whether no byte of a message was received.
    pub(crate) fn is_empty(&self) -> bool {
        self.prefix.is_empty()
    }

    /// Returns the head of the message, once it is complete.
    pub fn head(&self) -> Option<Head> {
        self.head
    }

    /// Moves the bytes of the head out of `data`.
    pub fn take_head(&mut self, data: &mut Bytes) {
        let missing = (PREFIX - self.prefix.len()).min(data.len());
        self.prefix.extend_from_slice(&data.split_to(missing));
        self.head = Head::at(&self.prefix);
    }

    /// Returns how many of `available` bytes belong to the message.
    pub(crate) fn missing_bytes(&self, available: usize) -> usize {
        self.head.map_or(0, |head| (head.length - self.received.len()).min(available))
    }

    /// Moves bytes of the message out of `data`, and returns the message once it is complete.
    pub fn take(&mut self, data: &mut Bytes) -> Option<(Head, Data)> {
        let head = self.head?;
        let wanted = self.missing_bytes(data.len());
        if wanted > 0 {
            self.received.push(data.split_to(wanted));
        }
        (self.received.len() == head.length).then(|| (head, std::mem::take(self).received.finish()))
    }
}

/// Returns the length of the complete messages at the start of `data`; each head must pass `check`.
///
/// # Errors
/// The first error of `check`.
pub(crate) fn whole<E>(
    data: &Bytes,
    mut check: impl FnMut(Head) -> Result<bool, E>,
) -> Result<usize, E> {
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
