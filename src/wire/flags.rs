//! The flags of requests that were given up while a worker executes them: a bit for each request, in 64-bit words at the
//! start of the arena of the inputs, which are accessed as atomics only. There is a row for each of the two batches that an
//! instance may hold; a row is zero when a batch is sent.

/// Rows.
pub const ROWS: u8 = 2;
/// Words in a row.
pub const WORDS: usize = 32;
/// Bytes at the start of the arena.
pub const BYTES: u64 = ROWS as u64 * WORDS as u64 * 8;

/// The words of a row, as a range over those at the start of the arena.
pub fn row(row: u8) -> std::ops::Range<usize> {
    let start = usize::from(row) * WORDS;
    start..start + WORDS
}

/// The word and the bit for a request, by its position in the batch. `None` for one beyond the row, which is always
/// executed to the end.
pub fn bit(row: u8, position: usize) -> Option<(usize, u64)> {
    let word = self::row(row).nth(position / 64)?;
    (row < ROWS).then_some((word, 1 << (position % 64)))
}
