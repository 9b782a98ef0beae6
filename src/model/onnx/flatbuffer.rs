//! A reader of `FlatBuffers` for untrusted bytes: every position is checked before it is used.
//!
//! Source: "FlatBuffer internals" of the `FlatBuffers` project. A table begins with the distance
//! back to its vtable, which has its own size, the size of the table, and for each field the
//! distance from the table, or 0 for an absent field; all of 16 bits. Tables, vectors and strings
//! are referred to by the distance to them, of 32 bits.

use std::cell::Cell;

/// The bytes are not what their format requires.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Damaged;

/// The bytes of a buffer.
#[derive(Debug)]
pub(super) struct Buffer<'a> {
    bytes: &'a [u8],
    /// How many more bytes of texts and elements of vectors may be read. Any number of references
    /// may lead to one text or vector; without this limit, a small file could take long to read.
    left: Cell<usize>,
}

/// How often, on average, a byte may be read. A file that an encoder has written refers to a text a
/// few times.
const MAX_READS: usize = 8;

impl<'a> Buffer<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, left: Cell::new(bytes.len().saturating_mul(MAX_READS)) }
    }

    /// Returns the outermost table.
    pub(super) fn root(&self) -> Result<Table<'_, 'a>, Damaged> {
        Ok(Table { buffer: self, at: self.target(0)? })
    }

    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N], Damaged> {
        let bytes = self.bytes.get(at..).and_then(|rest| rest.first_chunk());
        bytes.copied().ok_or(Damaged)
    }

    fn length(&self, at: usize) -> Result<usize, Damaged> {
        usize::try_from(u32::from_le_bytes(self.array(at)?)).map_err(|_| Damaged)
    }

    /// Returns the position to which the reference at this position leads.
    fn target(&self, at: usize) -> Result<usize, Damaged> {
        at.checked_add(self.length(at)?).ok_or(Damaged)
    }

    fn text(&self, at: usize) -> Result<&'a str, Damaged> {
        let length = self.length(at)?;
        self.spend(length)?;
        let bytes = self.bytes.get(at + 4..).and_then(|rest| rest.get(..length)).ok_or(Damaged)?;
        std::str::from_utf8(bytes).map_err(|_| Damaged)
    }

    fn spend(&self, read: usize) -> Result<(), Damaged> {
        self.left.set(self.left.get().checked_sub(read).ok_or(Damaged)?);
        Ok(())
    }
}

/// A table of a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table<'b, 'a> {
    buffer: &'b Buffer<'a>,
    at: usize,
}

impl<'b, 'a> Table<'b, 'a> {
    /// Returns the position of a field; `None` if it is absent.
    fn field(&self, number: usize) -> Result<Option<usize>, Damaged> {
        let back = i64::from(i32::from_le_bytes(self.buffer.array(self.at)?));
        let vtable = i64::try_from(self.at)
            .ok()
            .and_then(|at| usize::try_from(at - back).ok())
            .ok_or(Damaged)?;
        let entry = 4 + 2 * number;
        if entry + 2 > usize::from(u16::from_le_bytes(self.buffer.array(vtable)?)) {
            return Ok(None);
        }
        let entry = vtable.checked_add(entry).ok_or(Damaged)?;
        let distance = usize::from(u16::from_le_bytes(self.buffer.array(entry)?));
        if distance == 0 {
            Ok(None)
        } else {
            self.at.checked_add(distance).map(Some).ok_or(Damaged)
        }
    }

    pub(super) fn byte(&self, number: usize) -> Result<u8, Damaged> {
        let Some(at) = self.field(number)? else { return Ok(0) };
        self.buffer.array::<1>(at).map(|[byte]| byte)
    }

    pub(super) fn int32(&self, number: usize) -> Result<i32, Damaged> {
        let Some(at) = self.field(number)? else { return Ok(0) };
        self.buffer.array(at).map(i32::from_le_bytes)
    }

    pub(super) fn int64(&self, number: usize) -> Result<i64, Damaged> {
        let Some(at) = self.field(number)? else { return Ok(0) };
        self.buffer.array(at).map(i64::from_le_bytes)
    }

    /// Returns a text; an absent one is empty.
    pub(super) fn text(&self, number: usize) -> Result<&'a str, Damaged> {
        let Some(at) = self.field(number)? else { return Ok("") };
        self.buffer.text(self.buffer.target(at)?)
    }

    pub(super) fn table(&self, number: usize) -> Result<Option<Self>, Damaged> {
        let Some(at) = self.field(number)? else { return Ok(None) };
        Ok(Some(Table { buffer: self.buffer, at: self.buffer.target(at)? }))
    }

    /// Returns the elements of a vector of tables; none if it is absent.
    pub(super) fn tables(
        &self,
        number: usize,
    ) -> Result<impl Iterator<Item = Result<Self, Damaged>> + use<'b, 'a>, Damaged> {
        let buffer = self.buffer;
        let elements = self.elements(number)?;
        Ok(elements.map(move |at| Ok(Table { buffer, at: buffer.target(at)? })))
    }

    /// Returns the elements of a vector of texts; none if it is absent.
    pub(super) fn texts(
        &self,
        number: usize,
    ) -> Result<impl Iterator<Item = Result<&'a str, Damaged>> + use<'b, 'a>, Damaged> {
        let buffer = self.buffer;
        let elements = self.elements(number)?;
        Ok(elements.map(move |at| buffer.text(buffer.target(at)?)))
    }

    /// Returns the positions of the elements of a vector of references.
    fn elements(
        &self,
        number: usize,
    ) -> Result<impl Iterator<Item = usize> + use<'b, 'a>, Damaged> {
        let Some(at) = self.field(number)? else { return Ok((0..0).step_by(4)) };
        let vector = self.buffer.target(at)?;
        let bytes = self.buffer.length(vector)?.checked_mul(4).ok_or(Damaged)?;
        self.buffer.spend(bytes)?;
        let first = vector + 4;
        let end = first
            .checked_add(bytes)
            .filter(|end| *end <= self.buffer.bytes.len())
            .ok_or(Damaged)?;
        Ok((first..end).step_by(4))
    }
}
