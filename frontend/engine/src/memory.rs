//! The frontend's view of the arenas that it shares with one worker.
//!
//! Contract: the frontend writes an input block between allocating it and sending the frame that names it, and leaves
//! it alone until the batch is done, or until the worker has returned what it said it keeps; a worker leaves an output
//! block alone between the Done that names it and the release. A worker that breaks this can change the bytes of its own
//! answers, never anything else: offsets and lengths are checked here, against lengths that the worker cannot change.

mod pinned;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use pharos::arena::{Arena, Block};
use pharos::shm::{self, SharedMemory};
use pharos::wire::flags;

pub(crate) use pinned::{PinnedPool, Share};

/// Size of each arena in bytes: address space, not memory. Only what is touched costs.
pub(crate) const CAPACITY: u64 = 8 << 30;

/// Input memory that stays when nobody uses it; more is handed back to the system.
const KEEP: u64 = 16 << 20;

/// Where batches are gathered.
pub(crate) struct Inputs {
    memory: SharedMemory,
    // Held for a few instructions at a time.
    arena: Mutex<Arena>,
    /// Bytes at the beginning that the worker may have registered with the driver of its GPU: their pages must stay.
    pinned: AtomicU64,
}

impl Inputs {
    /// A block of `len` bytes; `None` when the arena is full.
    pub(crate) fn allocate(&self, len: u64) -> Option<Block> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).allocate(len)
    }

    /// Copies `data` to `offset` of the arena; `false` if it does not fit there.
    pub(crate) fn write(&self, offset: u64, data: &[u8]) -> bool {
        usize::try_from(offset).is_ok_and(|offset| self.memory.copy_in(offset, data))
    }

    /// Tells the worker that nobody waits for a request of a batch any more.
    pub(crate) fn give_up(&self, row: u8, position: usize) {
        if let Some((word, bit)) = flags::bit(row, position)
            && let Some(word) = self.memory.words().get(word)
        {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Takes back what [`Inputs::give_up`] said about the batch of this row.
    pub(crate) fn clear_flags(&self, row: u8) {
        let words = self.memory.words().get(flags::row(row)).unwrap_or_default();
        words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// All flags together, for tests: 0 when none is set.
    #[cfg(test)]
    pub(crate) fn flag_words(&self) -> u64 {
        let rows = (0..flags::ROWS).filter_map(|row| self.memory.words().get(flags::row(row)));
        rows.flatten().fold(0, |all, word| all | word.load(Ordering::Relaxed))
    }

    /// Bytes that a worker passes on from what it was lent, which stay as long as the result does. `None` if they are not
    /// within one of its blocks.
    pub(crate) fn pass_on(lease: &Arc<Lease>, offset: u64, len: u64) -> Option<Bytes> {
        let end = offset.checked_add(len)?;
        let within = |block: &&Block| block.offset <= offset && end <= block.offset + block.len;
        lease.blocks.iter().find(within)?;
        let (start, length) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        // SAFETY: only the bounds are of interest here; the slice is dropped at once.
        unsafe { lease.inputs.memory.slice(start, length) }?;
        Some(Bytes::from_owner(PassedOnInput { lease: lease.clone(), start, length }))
    }

    /// Bytes handed out now.
    pub(crate) fn used(&self) -> u64 {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).used() - flags::BYTES
    }

    /// Gives blocks back.
    pub(crate) fn release(&self, blocks: &[Block]) {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        for block in blocks {
            arena.release(*block);
        }
    }

    /// Never hands so many bytes at the beginning back to the system: the driver of a GPU copies from these very pages. No
    /// block is partly there: the driver refuses to copy what is registered in part.
    pub(crate) fn keep(&self, pinned: u64) {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.pinned.swap(pinned, Ordering::Relaxed);
        if before > 0 {
            arena.unfence(before);
        }
        if pinned > 0 && !arena.fence(pinned) {
            tracing::error!("memory for inputs is in use before its first {pinned} bytes are set apart");
        }
    }

    /// Hands memory that has not been used lately back to the system.
    pub(crate) fn trim(&self) {
        let mut arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((offset, len)) = arena.idle_tail(KEEP.max(self.pinned.load(Ordering::Relaxed)))
            && let (Ok(offset), Ok(len)) = (usize::try_from(offset), usize::try_from(len))
        {
            // A hole that cannot be punched costs memory, nothing else. Under the lock, so that nobody gets the block.
            let _ = self.memory.punch_hole(offset, len);
        }
    }
}

/// Input memory that a worker was lent; given back with the last clone.
pub(crate) struct Lease {
    inputs: Arc<Inputs>,
    blocks: Vec<Block>,
}

impl Lease {
    /// Of these blocks.
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
        // SAFETY: the lease keeps its blocks from being written by the frontend, and a worker that follows the protocol
        // passes on what nobody there changes any more; the bounds were checked.
        unsafe { self.lease.inputs.memory.slice(self.start, self.length) }.unwrap_or_default()
    }
}

/// Where a worker's outputs are read.
pub(crate) struct Outputs {
    memory: SharedMemory,
    released: Mutex<Released>,
}

/// Blocks that the worker has not been told about yet.
#[derive(Default)]
struct Released {
    offsets: Vec<u64>,
    bytes: u64,
    /// Bytes of all blocks that have not been released.
    held: u64,
}

impl Outputs {
    /// Takes a block that a Done frame names; it is released when the last clone or slice of the result is dropped.
    /// `None` if the block is not within the arena.
    pub(crate) fn take(self: &Arc<Self>, offset: u64, len: u64) -> Option<Bytes> {
        let (start, length) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        // SAFETY: only the bounds are of interest here; the slice is dropped at once.
        unsafe { self.memory.slice(start, length) }?;
        let held = {
            let mut released = self.lock();
            released.held += len;
            released.held
        };
        let block = Bytes::from_owner(OutputBlock { outputs: self.clone(), offset, start, length });
        // Slow readers must not stall the instance: when much is held, the block is copied out and released now.
        Some(if held > CAPACITY / 2 { Bytes::copy_from_slice(&block) } else { block })
    }

    /// The offsets released since the last call.
    pub(crate) fn take_released(&self) -> Vec<u64> {
        let mut released = self.lock();
        released.bytes = 0;
        std::mem::take(&mut released.offsets)
    }

    /// Bytes of answers that have not left yet.
    pub(crate) fn used(&self) -> u64 {
        self.lock().held
    }

    /// Whether so much has been released that the worker should hear of it before its next batch.
    pub(crate) fn worth_telling(&self) -> bool {
        self.lock().bytes > CAPACITY / 8
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Released> {
        self.released.lock().unwrap_or_else(PoisonError::into_inner)
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
        // SAFETY: within the arena (checked when it was taken); the worker leaves it alone until it is released, which
        // is when this owner is dropped (this module's contract).
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

/// Both arenas of a worker, with the descriptors that it inherits.
pub(crate) struct Arenas {
    pub(crate) inputs: Arc<Inputs>,
    pub(crate) outputs: Arc<Outputs>,
}

/// Makes and maps both arenas. The descriptors are (inputs, outputs).
///
/// # Errors
/// The system has no memory descriptors or no address space left.
pub(crate) fn create() -> io::Result<(Arenas, OwnedFd, OwnedFd)> {
    let (inputs, outputs) = (shm::create("pharos-inputs", CAPACITY)?, shm::create("pharos-outputs", CAPACITY)?);
    let length = usize::try_from(CAPACITY).map_err(io::Error::other)?;
    let mut arena = Arena::new(CAPACITY);
    // Never released: the flags lie at offset 0.
    arena.allocate(flags::BYTES).ok_or_else(|| io::Error::other("the arena has no room for flags"))?;
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

    /// Touches so much of the inputs, gives it back, trims, and says how much the system still holds.
    fn left(pinned: u64) -> u64 {
        let (arenas, inputs, _outputs) = create().unwrap();
        arenas.inputs.keep(pinned);
        let blocks: Vec<Block> = (0..64 << 8).map(|_| arenas.inputs.allocate(4096).unwrap()).collect();
        assert!(blocks.iter().all(|block| arenas.inputs.write(block.offset, &[1; 4096])));
        arenas.inputs.release(&blocks);
        arenas.inputs.trim();
        std::fs::File::from(inputs).metadata().unwrap().blocks() * 512
    }

    #[test]
    fn no_block_is_pinned_in_part() {
        let (arenas, ..) = create().unwrap();
        arenas.inputs.keep(1 << 20);
        let taken = [700 << 10, 700 << 10, 200 << 10].map(|len| arenas.inputs.allocate(len).unwrap());
        let pinned = taken.map(|block| block.offset + block.len <= 1 << 20);
        assert_eq!((pinned, taken[1].offset > 1 << 20), ([true, false, true], true));
        arenas.inputs.release(&taken);
        // Whoever has registered nothing after all has it whole.
        arenas.inputs.keep(0);
        assert!(arenas.inputs.allocate(CAPACITY - (2 << 20)).is_some());
    }

    #[test]
    fn what_is_pinned_is_not_handed_back() {
        // Blocks end within a page, behind the flags; none lies across the end of what is pinned.
        let whole = |bytes: u64| bytes - 4096..=bytes + 2 * 4096;
        for (pinned, expected) in [(0, KEEP), (48 << 20, 48 << 20), (128 << 20, 64 << 20)] {
            let left = left(pinned);
            assert!(whole(expected).contains(&left), "{pinned}: {left}");
        }
    }
}
