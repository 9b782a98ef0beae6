//! The frontend's view of the arenas that it shares with one worker.
//!
//! Contract: The frontend writes an input block between its allocation and the frame that names it.
//! It does not change the block until the batch is done or the worker has returned what it keeps. A
//! worker does not change an output block between the Done frame that names it and its release. A
//! worker that breaks this can only change the bytes of its answers: offsets and lengths are
//! checked here against lengths that the worker cannot change.

mod pinned;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use pharos::arena::{Arena, Block};
use pharos::shm::{self, SharedMemory};
use pharos::wire::flags;

pub(crate) use pinned::{PinnedPool, Share};

/// The size of each arena in bytes. This is address space; only pages that are touched use memory.
pub(crate) const CAPACITY: u64 = 8 << 30;

/// The most bytes of outputs that are copied because readers are slow. The server allocates them,
/// and a worker can name the same block again when it is copied.
const MOST_COPIED: u64 = CAPACITY / 4;

/// The amount of unused input memory that is kept; more is returned to the system.
const KEEP: u64 = 16 << 20;

/// The arena where batches are gathered.
pub(crate) struct Inputs {
    memory: SharedMemory,
    // Held only for short operations on the allocator.
    arena: Mutex<Arena>,
    /// Bytes at the start that the worker may have registered with its GPU driver; their pages
    /// must stay.
    pinned: AtomicU64,
}

impl Inputs {
    /// Allocates a block of `len` bytes; `None` if the arena is full.
    pub(crate) fn allocate(&self, len: u64) -> Option<Block> {
        self.arena.lock().allocate(len)
    }

    /// Copies `data` to `offset` of the arena; returns `false` if it does not fit.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> bool {
        usize::try_from(offset).is_ok_and(|offset| self.memory.copy_in(offset, data))
    }

    /// Sets the flag that a request of a batch was cancelled; the worker reads it.
    pub(crate) fn set_cancelled(&self, row: u8, position: usize) {
        if let Some((word, bit)) = flags::bit(row, position)
            && let Some(word) = self.memory.words().get(word)
        {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Clears all flags of [`Inputs::set_cancelled`] for the batch of this row.
    pub(crate) fn clear_flags(&self, row: u8) {
        let words = self.memory.words().get(flags::row(row)).unwrap_or_default();
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// Returns all flags combined; 0 if none is set.
    #[cfg(test)]
    pub(crate) fn flag_words(&self) -> u64 {
        let rows = (0..flags::ROWS).filter_map(|row| self.memory.words().get(flags::row(row)));
        rows.flatten().fold(0, |all, word| all | word.load(Ordering::Relaxed))
    }

    /// Returns bytes of a lent block that a worker passes on as a result, which keep the lease
    /// alive. `None` if they are not within one of its blocks.
    pub(crate) fn pass_on(lease: &Arc<Lease>, offset: u64, len: u64) -> Option<Bytes> {
        let end = offset.checked_add(len)?;
        let within = |block: &&Block| block.offset <= offset && end <= block.offset + block.len;
        lease.blocks.iter().find(within)?;
        let start = usize::try_from(offset).ok()?;
        let length = usize::try_from(len).ok()?;
        // SAFETY: Only checks the bounds; the slice is dropped immediately.
        unsafe { lease.inputs.memory.slice(start, length) }?;
        Some(Bytes::from_owner(PassedOnInput { lease: lease.clone(), start, length }))
    }

    /// Returns the number of allocated bytes.
    pub(crate) fn used(&self) -> u64 {
        self.arena.lock().used() - flags::BYTES
    }

    /// Frees blocks.
    pub(crate) fn release(&self, blocks: &[Block]) {
        let mut arena = self.arena.lock();
        for block in blocks {
            arena.release(*block);
        }
    }

    /// Never returns the first `pinned` bytes to the system, because the driver of a GPU copies
    /// from these pages. No block crosses their end, because the driver refuses to copy partly
    /// registered memory.
    pub(crate) fn keep(&self, pinned: u64) {
        let mut arena = self.arena.lock();
        let before = self.pinned.swap(pinned, Ordering::Relaxed);
        if before > 0 {
            arena.unfence(before);
        }
        if pinned > 0 && !arena.fence(pinned) {
            tracing::error!(
                "cannot pin the first {pinned} bytes of the input arena: they are in use"
            );
        }
    }

    /// Returns memory that has not been used recently to the system.
    pub(crate) fn trim(&self) {
        let mut arena = self.arena.lock();
        if let Some((offset, len)) = arena.idle_tail(KEEP.max(self.pinned.load(Ordering::Relaxed)))
            && let (Ok(offset), Ok(len)) = (usize::try_from(offset), usize::try_from(len))
        {
            // A failed hole only costs memory. Punched under the lock, so that the block cannot be
            // allocated meanwhile.
            let _ = self.memory.punch_hole(offset, len);
        }
    }
}

/// Input memory that was lent to a worker; freed with the last clone.
pub(crate) struct Lease {
    inputs: Arc<Inputs>,
    blocks: Vec<Block>,
}

impl Lease {
    /// Creates a lease of these blocks.
    pub(crate) fn new(inputs: &Arc<Inputs>, blocks: Vec<Block>) -> Arc<Self> {
        Arc::new(Self { inputs: inputs.clone(), blocks })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.inputs.release(&self.blocks);
    }
}

/// An input that a worker has passed on, as the owner of a [`Bytes`].
struct PassedOnInput {
    lease: Arc<Lease>,
    start: usize,
    length: usize,
}

impl AsRef<[u8]> for PassedOnInput {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: The lease keeps the frontend from writing its blocks. A worker that follows the
        // protocol does not change what it passes on. The bounds were checked.
        unsafe { self.lease.inputs.memory.slice(self.start, self.length) }.unwrap_or_default()
    }
}

/// The arena where a worker's outputs are read.
pub(crate) struct Outputs {
    memory: SharedMemory,
    released: Mutex<Released>,
}

/// Released blocks that the worker has not been notified of.
#[derive(Default)]
struct Released {
    offsets: Vec<u64>,
    bytes: u64,
    /// The bytes of all blocks that have not been released.
    held: u64,
    /// The bytes of copied blocks that are still in use.
    copied: u64,
}

impl Outputs {
    /// Takes a block that a Done frame names; it is released when the last clone or slice of the
    /// result is dropped. `None` if the block is not within the arena, or if it must be copied and
    /// too much is copied already.
    pub(crate) fn take(self: &Arc<Self>, offset: u64, len: u64) -> Option<Bytes> {
        let start = usize::try_from(offset).ok()?;
        let length = usize::try_from(len).ok()?;
        // SAFETY: Only checks the bounds; the slice is dropped immediately.
        unsafe { self.memory.slice(start, length) }?;
        let held = {
            let mut released = self.lock();
            released.held += len;
            released.held
        };
        let block = Bytes::from_owner(OutputBlock { outputs: self.clone(), offset, start, length });
        if held <= CAPACITY / 2 {
            return Some(block);
        }
        // A slow reader must not stall the instance: if much is held, the block is copied and
        // released now.
        Some(Bytes::from_owner(CopiedOutput::new(self, &block)?))
    }

    /// Returns the offsets released since the last call.
    pub(crate) fn take_released(&self) -> Vec<u64> {
        let mut released = self.lock();
        released.bytes = 0;
        std::mem::take(&mut released.offsets)
    }

    /// Returns the bytes of outputs that are still in use.
    pub(crate) fn used(&self) -> u64 {
        self.lock().held
    }

    /// Returns whether enough was released to notify the worker before its next batch.
    pub(crate) fn should_notify(&self) -> bool {
        self.lock().bytes > CAPACITY / 8
    }

    fn lock(&self) -> MutexGuard<'_, Released> {
        self.released.lock()
    }
}

/// A block of outputs, as the owner of a [`Bytes`].
struct OutputBlock {
    outputs: Arc<Outputs>,
    offset: u64,
    start: usize,
    length: usize,
}

impl AsRef<[u8]> for OutputBlock {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: The block is within the arena (checked when it was taken), and the worker does
        // not change it until this owner is dropped (the contract of this module).
        unsafe { self.outputs.memory.slice(self.start, self.length) }.unwrap_or_default()
    }
}

impl Drop for OutputBlock {
    fn drop(&mut self) {
        let mut released = self.outputs.lock();
        released.offsets.push(self.offset);
        released.bytes += self.length as u64;
        released.held = released.held.saturating_sub(self.length as u64);
    }
}

/// A copied block of outputs, as the owner of a [`Bytes`]. Its bytes are counted until it is
/// dropped.
struct CopiedOutput {
    outputs: Arc<Outputs>,
    data: Vec<u8>,
}

impl CopiedOutput {
    /// Copies a block; `None` if too much is copied already.
    fn new(outputs: &Arc<Outputs>, block: &[u8]) -> Option<Self> {
        {
            let mut released = outputs.lock();
            let copied = released.copied + block.len() as u64;
            if copied > MOST_COPIED {
                return None;
            }
            released.copied = copied;
        }
        Some(Self { outputs: outputs.clone(), data: block.to_vec() })
    }
}

impl Drop for CopiedOutput {
    fn drop(&mut self) {
        self.outputs.lock().copied -= self.data.len() as u64;
    }
}

impl AsRef<[u8]> for CopiedOutput {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// Returns whether blocks overlap, each an offset and a length in bytes. Empty blocks have a place
/// too.
pub(crate) fn overlap(blocks: impl Iterator<Item = (u64, u64)>) -> bool {
    let mut spans: Vec<_> =
        blocks.map(|(offset, len)| (offset, offset.saturating_add(len.max(1)))).collect();
    spans.sort_unstable();
    spans.windows(2).any(|pair| pair[0].1 > pair[1].0)
}

/// Both arenas of a worker.
pub(crate) struct Arenas {
    pub(crate) inputs: Arc<Inputs>,
    pub(crate) outputs: Arc<Outputs>,
}

/// Creates and maps both arenas. Returns them with the descriptors (inputs, outputs) for the
/// worker.
///
/// # Errors
/// The system has no descriptors, memory or address space left.
pub(crate) fn create() -> io::Result<(Arenas, OwnedFd, OwnedFd)> {
    let inputs = shm::create("pharos-inputs", CAPACITY)?;
    let outputs = shm::create("pharos-outputs", CAPACITY)?;
    let length = usize::try_from(CAPACITY).map_err(io::Error::other)?;
    let mut arena = Arena::new(CAPACITY);
    // Never released: the flags are at offset 0.
    arena
        .allocate(flags::BYTES)
        .ok_or_else(|| io::Error::other("the arena has no room for flags"))?;
    let arenas = Arenas {
        inputs: Arc::new(Inputs {
            memory: SharedMemory::map(&inputs, length)?,
            arena: Mutex::new(arena),
            pinned: AtomicU64::new(0),
        }),
        outputs: Arc::new(Outputs {
            memory: SharedMemory::map(&outputs, length)?,
            released: Mutex::new(Released::default()),
        }),
    };
    Ok((arenas, inputs, outputs))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// Allocates and frees inputs, trims, and returns the number of bytes that the system still
    /// holds.
    fn left(pinned: u64) -> u64 {
        let (arenas, inputs, _outputs) = create().unwrap();
        arenas.inputs.keep(pinned);
        let blocks: Vec<Block> =
            (0..64 << 8).map(|_| arenas.inputs.allocate(4096).unwrap()).collect();
        assert!(blocks.iter().all(|block| arenas.inputs.write(block.offset, &[1; 4096])));
        arenas.inputs.release(&blocks);
        arenas.inputs.trim();
        std::fs::File::from(inputs).metadata().unwrap().blocks() * 512
    }

    #[test]
    fn copies_for_slow_readers_are_limited() {
        let (arenas, ..) = create().unwrap();
        let outputs = &arenas.outputs;
        let unread = outputs.take(0, CAPACITY / 2).unwrap();
        // Small blocks: the rest is counted, not copied.
        outputs.lock().copied = MOST_COPIED - 200;
        let copies = [outputs.take(64, 100).unwrap(), outputs.take(64, 100).unwrap()];
        assert!(outputs.take(64, 100).is_none());
        assert_eq!(outputs.take_released(), [64, 64, 64], "each is released at once");
        drop(copies);
        assert!(outputs.take(64, 100).is_some());
        drop(unread);
        assert_eq!((outputs.used(), outputs.lock().copied), (0, MOST_COPIED - 200));
        assert!(outputs.take(64, 100).is_some() && outputs.take(CAPACITY, 1).is_none());
    }

    #[test]
    fn blocks_that_share_a_byte_overlap() {
        for (blocks, expected) in [
            (vec![(0, 64), (64, 64)], false),
            (vec![(64, 64), (0, 65)], true),
            (vec![(0, 0), (0, 0)], true),
            (vec![(1, u64::MAX), (0, 1)], false),
            (vec![(1, u64::MAX), (2, u64::MAX)], true),
            (vec![], false),
        ] {
            assert_eq!(overlap(blocks.iter().copied()), expected, "{blocks:?}");
        }
    }

    #[test]
    fn no_block_crosses_the_end_of_pinned_memory() {
        let (arenas, ..) = create().unwrap();
        arenas.inputs.keep(1 << 20);
        let taken =
            [700 << 10, 700 << 10, 200 << 10].map(|len| arenas.inputs.allocate(len).unwrap());
        let pinned = taken.map(|block| block.offset + block.len <= 1 << 20);
        assert_eq!((pinned, taken[1].offset > 1 << 20), ([true, false, true], true));
        arenas.inputs.release(&taken);
        // Without pinned memory, blocks may use the whole arena again.
        arenas.inputs.keep(0);
        assert!(arenas.inputs.allocate(CAPACITY - (2 << 20)).is_some());
    }

    #[test]
    fn pinned_memory_is_not_returned_to_the_system() {
        // Blocks end within a page, after the flags; none crosses the end of the pinned memory.
        let whole = |bytes: u64| bytes - 4096..=bytes + 2 * 4096;
        for (pinned, expected) in [(0, KEEP), (48 << 20, 48 << 20), (128 << 20, 64 << 20)] {
            let left = left(pinned);
            assert!(whole(expected).contains(&left), "{pinned}: {left}");
        }
    }
}
