//! Process memory with the alignment of tensors.

/// Tensors begin at a multiple of this number of bytes.
const ALIGNMENT: usize = 64;

/// A byte buffer that begins at a multiple of 64.
#[derive(Default)]
pub struct AlignedBuffer {
    /// Longer than the data by the padding that alignment may need.
    bytes: Vec<u8>,
    start: usize,
}

impl AlignedBuffer {
    /// Creates a buffer of this many zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buffer = Self { bytes: vec![0; len + ALIGNMENT - 1], start: 0 };
        buffer.align();
        buffer
    }

    /// Replaces the content.
    pub fn set(&mut self, data: &[u8]) {
        self.bytes.resize(data.len() + ALIGNMENT - 1, 0);
        // Growing may have moved the allocation.
        self.align();
        self.as_mut_slice().copy_from_slice(data);
    }

    fn align(&mut self) {
        self.start = self.bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT - 1);
    }

    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        let end = self.start + self.bytes.len().saturating_sub(ALIGNMENT - 1);
        self.bytes.get(self.start..end).unwrap_or_default()
    }

    /// Returns the bytes for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let end = self.start + self.bytes.len().saturating_sub(ALIGNMENT - 1);
        self.bytes.get_mut(self.start..end).unwrap_or_default()
    }

    /// Returns the memory that the buffer occupies, in bytes.
    pub fn capacity(&self) -> u64 {
        self.bytes.capacity() as u64
    }
}

/// Returns a buffer with all pieces concatenated.
pub fn joined<'a>(pieces: impl Iterator<Item = &'a [u8]> + Clone) -> AlignedBuffer {
    let mut buffer = AlignedBuffer::zeroed(pieces.clone().map(<[u8]>::len).sum());
    let mut rest = buffer.as_mut_slice();
    for piece in pieces {
        let Some((place, after)) = rest.split_at_mut_checked(piece.len()) else { break };
        place.copy_from_slice(piece);
        rest = after;
    }
    buffer
}
