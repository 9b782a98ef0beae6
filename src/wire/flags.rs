//! Cancellation flags of executing requests: one bit per request, in 64-bit words at the start of
//! the input arena, accessed only as atomics. An instance may hold two batches; each has one row of
//! words, which is zero when the batch is sent.

/// Number of rows.
pub const ROWS: u8 = 2;
/// Words in a row.
pub const WORDS: usize = 32;
/// Size of the flags at the start of the arena, bytes.
pub const BYTES: u64 = ROWS as u64 * WORDS as u64 * 8;

/// Returns the words of row `row` as a range of the words at the start of the arena.
pub fn row(row: u8) -> std::ops::Range<usize> {
    let start = usize::from(row) * WORDS;
    start..start + WORDS
}

/// Returns the word and the bit of a request by its position in the batch. `None` for a position
/// beyond the row: such a request always executes to the end.
pub fn bit(row: u8, position: usize) -> Option<(usize, u64)> {
    let word = self::row(row).nth(position / 64)?;
    (row < ROWS).then_some((word, 1 << (position % 64)))
}
