//! Allocates blocks in a shared-memory tensor arena. Works with offsets only and never touches the
//! memory.
//!
//! Each side of a worker's connection allocates only in the arena that it writes, from private
//! bookkeeping: data that the other process writes never decides where a block lies. First fit from
//! the lowest address keeps the touched part of a large sparse arena small; [`Arena::idle_tail`]
//! returns the part that can be given back to the system.

use std::collections::BTreeMap;

/// Blocks start at multiples of this many bytes: a cache line, and enough for any vector
/// instruction.
pub const ALIGNMENT: u64 = 64;

/// A block of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// First byte, a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Requested length in bytes; may be 0.
    pub len: u64,
}

/// The bookkeeping of one arena.
#[derive(Debug)]
pub struct Arena {
    capacity: u64,
    used: u64,
    /// No block has been allocated beyond this offset since the last trim.
    touched: u64,
    /// Free spans by offset; neighbours are always merged.
    free: BTreeMap<u64, u64>,
}

impl Arena {
    /// Creates an empty arena of `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        let capacity = capacity / ALIGNMENT * ALIGNMENT;
        let mut free = BTreeMap::new();
        if capacity > 0 {
            free.insert(0, capacity);
        }
        Self { capacity, used: 0, touched: 0, free }
    }

    /// Returns the size of the arena in bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the allocated bytes, alignment included.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Allocates `len` bytes; `None` if no free span is large enough. An empty block occupies space
    /// too, so that every block can be released by its offset.
    pub fn allocate(&mut self, len: u64) -> Option<Block> {
        let size = span(len)?;
        let (&offset, &available) = self.free.iter().find(|(_, available)| **available >= size)?;
        self.free.remove(&offset);
        if available > size {
            self.free.insert(offset + size, available - size);
        }
        self.used += size;
        self.touched = self.touched.max(offset + size);
        Some(Block { offset, len })
    }

    /// Releases a block. The block must come from [`Arena::allocate`] of this arena and be released
    /// once.
    pub fn release(&mut self, block: Block) {
        let Some(size) = span(block.len) else { return };
        self.used = self.used.saturating_sub(size);
        self.give_back(block.offset, size);
    }

    /// Reserves a span at `at`, a multiple of [`ALIGNMENT`], so that no block crosses it until
    /// [`Arena::unfence`]. Returns false if a block lies there. Does nothing at or beyond the end
    /// of the arena.
    pub fn fence(&mut self, at: u64) -> bool {
        if at >= self.capacity {
            return true;
        }
        let Some((&start, &length)) = self.free.range(..=at).next_back() else { return false };
        let before = at - start;
        let end = start + length;
        if end < at + ALIGNMENT {
            return false;
        }
        self.free.remove(&start);
        let parts = [(start, before), (at + ALIGNMENT, end - at - ALIGNMENT)];
        self.free.extend(parts.into_iter().filter(|(_, length)| *length > 0));
        true
    }

    /// Removes the reservation of [`Arena::fence`].
    pub fn unfence(&mut self, at: u64) {
        if at < self.capacity {
            self.give_back(at, ALIGNMENT);
        }
    }

    fn give_back(&mut self, mut offset: u64, mut size: u64) {
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            offset = before;
            size += length;
        }
        if let Some(length) = self.free.remove(&(offset + size)) {
            size += length;
        }
        self.free.insert(offset, size);
    }

    /// Returns the span from `keep` (or the end of the last block, if that is later) to the highest
    /// byte ever touched, if it is not empty; the arena counts it as untouched from now on.
    pub fn idle_tail(&mut self, keep: u64) -> Option<(u64, u64)> {
        let (&last, &length) = self.free.iter().next_back()?;
        if last + length != self.capacity {
            return None;
        }
        let start = last.max(keep);
        if start >= self.touched {
            return None;
        }
        let tail = (start, self.touched - start);
        self.touched = start;
        Some(tail)
    }
}

/// Returns the aligned size of a block of `len` bytes; `None` if it overflows `u64`.
fn span(len: u64) -> Option<u64> {
    len.max(1).checked_next_multiple_of(ALIGNMENT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn freed_neighbours_merge() {
        let mut arena = Arena::new(256);
        let blocks: Vec<_> = (0..4).filter_map(|_| arena.allocate(64)).collect();
        assert_eq!(blocks.len(), 4);
        assert_eq!(arena.allocate(1), None);
        for index in [0, 2, 1, 3] {
            arena.release(blocks[index]);
        }
        assert_eq!(arena.allocate(256), Some(Block { offset: 0, len: 256 }));
    }

    #[test]
    fn returns_the_idle_tail_once() {
        let mut arena = Arena::new(1024);
        let low = arena.allocate(64);
        let high = arena.allocate(512);
        assert_eq!(arena.idle_tail(0), None);
        arena.release(high.expect("fits"));
        assert_eq!(arena.idle_tail(128), Some((128, 448)));
        assert_eq!(arena.idle_tail(128), None);
        arena.release(low.expect("fits"));
        assert_eq!(arena.idle_tail(0), Some((0, 128)));
    }

    #[test]
    fn no_block_crosses_a_fence() {
        let mut arena = Arena::new(1024);
        assert!(arena.fence(256) && arena.fence(1024) && arena.fence(1 << 40));
        assert!(!arena.fence(256), "the fence exists already");
        let taken: Vec<_> =
            [192, 192, 64, 512].iter().filter_map(|len| arena.allocate(*len)).collect();
        assert_eq!(taken.iter().map(|block| block.offset).collect::<Vec<_>>(), [0, 320, 192, 512]);
        assert_eq!((arena.allocate(1), arena.used()), (None, 960));
        assert!(!arena.fence(512), "a block is in the way");
        taken.into_iter().for_each(|block| arena.release(block));
        // The tail beyond the fence can still be given back.
        assert_eq!((arena.idle_tail(0), arena.used()), (Some((320, 704)), 0));
        arena.unfence(256);
        arena.unfence(1024);
        assert_eq!(arena.allocate(1024), Some(Block { offset: 0, len: 1024 }));
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        assert_eq!(Arena::new(1024).allocate(u64::MAX), None);
    }

    proptest! {
        #[test]
        fn blocks_never_overlap_and_all_can_be_released(steps in prop::collection::vec((any::<bool>(), 0u64..700), 1..200)) {
            let mut arena = Arena::new(8192);
            let mut live: Vec<Block> = Vec::new();
            for (take, number) in steps {
                if take {
                    if let Some(block) = arena.allocate(number) {
                        prop_assert_eq!(block.offset % ALIGNMENT, 0);
                        for other in &live {
                            prop_assert!(block.offset + block.len.max(1) <= other.offset || other.offset + other.len.max(1) <= block.offset);
                        }
                        live.push(block);
                    }
                } else if !live.is_empty() {
                    let index = number as usize % live.len();
                    arena.release(live.swap_remove(index));
                }
            }
            for block in live.drain(..) {
                arena.release(block);
            }
            prop_assert_eq!(arena.used(), 0);
            prop_assert_eq!(arena.allocate(8192), Some(Block { offset: 0, len: 8192 }));
        }
    }
}
