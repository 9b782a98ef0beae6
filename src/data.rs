//! The bytes of a tensor: in one piece, in the pieces that were received from a socket, or in a
//! client's shared memory.
//!
//! Data that is copied anyway (to a worker's arena) is copied from the pieces; joining them first
//! would copy every byte of a large body once more. Data in a client's shared memory has a length
//! and no pieces here: only workers read it.

use std::borrow::Cow;

use bytes::{Bytes, BytesMut};

use crate::region::Slice;

/// Bytes in one or several pieces, or in a client's shared memory. Cloning is cheap: the pieces are
/// shared.
#[derive(Clone, Debug)]
pub struct Data(Repr);

#[derive(Clone, Debug)]
enum Repr {
    One(Bytes),
    /// In order; none is empty.
    Many(Vec<Bytes>),
    /// In the client's shared memory.
    Region(Box<Slice>),
}

impl Data {
    /// Returns empty data.
    pub const fn new() -> Self {
        Self(Repr::One(Bytes::new()))
    }

    /// Returns the number of bytes, those in the client's shared memory included.
    pub fn len(&self) -> usize {
        match &self.0 {
            Repr::Region(slice) => usize::try_from(slice.len).unwrap_or(usize::MAX),
            _ => self.bytes_here(),
        }
    }

    /// Returns the number of bytes in the pieces; 0 for data in the client's shared memory.
    pub fn bytes_here(&self) -> usize {
        self.pieces().iter().map(Bytes::len).sum()
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the range of the client's shared memory that holds the bytes; `None` if they are in
    /// pieces.
    pub fn region(&self) -> Option<&Slice> {
        match &self.0 {
            Repr::Region(slice) => Some(slice),
            _ => None,
        }
    }

    /// Does the same as [`Data::region`], mutably.
    pub fn region_mut(&mut self) -> Option<&mut Slice> {
        match &mut self.0 {
            Repr::Region(slice) => Some(slice),
            _ => None,
        }
    }

    /// Returns the pieces in order; none for data in the client's shared memory.
    pub fn pieces(&self) -> &[Bytes] {
        match &self.0 {
            Repr::One(piece) => std::slice::from_ref(piece),
            Repr::Many(pieces) => pieces,
            Repr::Region(_) => &[],
        }
    }

    /// Splits off the first `at` bytes, or all if there are fewer. Returns empty data for data in
    /// the client's shared memory.
    #[must_use]
    pub fn split_to(&mut self, at: usize) -> Self {
        match &mut self.0 {
            Repr::One(piece) => piece.split_to(at.min(piece.len())).into(),
            Repr::Many(pieces) => {
                let mut first = Vec::new();
                let mut missing = at;
                let whole = pieces.iter().take_while(|piece| {
                    let fits = piece.len() <= missing;
                    missing -= if fits { piece.len() } else { 0 };
                    fits
                });
                let whole = whole.count();
                first.extend(pieces.drain(..whole));
                if missing > 0
                    && let Some(piece) = pieces.first_mut()
                {
                    first.push(piece.split_to(missing));
                }
                let rest = std::mem::take(pieces);
                *self = rest.into();
                first.into()
            }
            Repr::Region(_) => Self::new(),
        }
    }

    /// Returns the bytes in one piece; copies only if there are several pieces. Empty for data in
    /// the client's shared memory.
    pub fn join(self) -> Bytes {
        match self.0 {
            Repr::One(piece) => piece,
            Repr::Many(pieces) => pieces.concat().into(),
            Repr::Region(_) => Bytes::new(),
        }
    }

    /// Returns the bytes in one slice; copies only if there are several pieces. Empty for data in
    /// the client's shared memory.
    pub fn as_slice(&self) -> Cow<'_, [u8]> {
        match &self.0 {
            Repr::One(piece) => Cow::Borrowed(piece),
            Repr::Many(pieces) => Cow::Owned(pieces.concat()),
            Repr::Region(_) => Cow::Borrowed(&[]),
        }
    }
}

impl Default for Data {
    fn default() -> Self {
        Self::new()
    }
}

impl From<Bytes> for Data {
    fn from(piece: Bytes) -> Self {
        Self(Repr::One(piece))
    }
}

impl From<Vec<u8>> for Data {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

impl From<Vec<Bytes>> for Data {
    fn from(mut pieces: Vec<Bytes>) -> Self {
        pieces.retain(|piece| !piece.is_empty());
        match pieces.len() {
            0 => Self::new(),
            1 => pieces.remove(0).into(),
            _ => Self(Repr::Many(pieces)),
        }
    }
}

impl From<Slice> for Data {
    fn from(slice: Slice) -> Self {
        Self(Repr::Region(Box::new(slice)))
    }
}

impl PartialEq<[u8]> for Data {
    fn eq(&self, other: &[u8]) -> bool {
        *self.as_slice() == *other
    }
}

/// Compares the bytes, however they are split; in shared memory, the ranges.
impl PartialEq for Data {
    fn eq(&self, other: &Self) -> bool {
        self.region() == other.region()
            && self.len() == other.len()
            && self.as_slice() == other.as_slice()
    }
}

/// Collects received pieces. Joins small ones, so that one-byte pieces do not cost more memory than
/// their bytes.
#[derive(Debug, Default)]
pub struct Collector {
    pieces: Vec<Bytes>,
    /// Joined small pieces that follow the last of `pieces`.
    small: BytesMut,
    len: usize,
}

impl Collector {
    /// Pieces shorter than this are copied.
    pub const SMALL: usize = 4096;

    /// Appends a piece.
    pub fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if piece.len() < Self::SMALL {
            self.small.extend_from_slice(&piece);
            return;
        }
        if !self.small.is_empty() {
            self.pieces.push(self.small.split().freeze());
        }
        self.pieces.push(piece);
    }

    /// Returns the number of bytes so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no bytes have been collected.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns all collected bytes.
    pub fn finish(mut self) -> Data {
        if !self.small.is_empty() {
            self.pieces.push(self.small.freeze());
        }
        self.pieces.into()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn collect(pieces: &[Vec<u8>]) -> Data {
        let mut collector = Collector::default();
        pieces.iter().for_each(|piece| collector.push(Bytes::from(piece.clone())));
        assert_eq!(collector.len(), pieces.concat().len());
        collector.finish()
    }

    proptest! {
        #[test]
        fn pieces_keep_their_bytes_wherever_they_are_split(
            lengths in proptest::collection::vec(prop_oneof![0usize..20, 4000usize..9000], 0..8),
            cuts in proptest::collection::vec(0usize..30_000, 0..6),
        ) {
            let mut next = 0u8;
            let pieces: Vec<Vec<u8>> = lengths
                .iter()
                .map(|&length| (0..length).map(|_| { next = next.wrapping_add(1); next }).collect())
                .collect();
            let whole = pieces.concat();
            let mut data = collect(&pieces);
            prop_assert_eq!(data.as_slice(), &whole[..]);
            prop_assert_eq!(&data, &Data::from(whole.clone()));
            let mut parts = Vec::new();
            for cut in cuts {
                let before = data.len();
                let part = data.split_to(cut);
                prop_assert_eq!(part.len(), cut.min(before));
                prop_assert_eq!(data.len(), before - part.len());
                parts.extend_from_slice(&part.as_slice());
            }
            prop_assert_eq!(data.is_empty(), data == Data::new());
            parts.extend_from_slice(&data.join());
            prop_assert_eq!(parts, whole);
        }
    }

    #[test]
    fn large_pieces_are_kept_and_small_ones_joined() {
        let large = Bytes::from(vec![1u8; 5000]);
        let mut collector = Collector::default();
        (0..10).for_each(|_| collector.push(Bytes::from_static(b"ab")));
        collector.push(large.clone());
        collector.push(Bytes::from_static(b"c"));
        let data = collector.finish();
        let lengths: Vec<usize> = data.pieces().iter().map(Bytes::len).collect();
        assert_eq!(lengths, [20, 5000, 1]);
        assert_eq!(data.pieces()[1].as_ptr(), large.as_ptr());
    }
}
