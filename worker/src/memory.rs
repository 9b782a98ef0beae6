//! The worker's view of the shared arenas. Unsafe in name only here: the mapping's contract is `pharos::shm`'s.
//!
//! Contract kept here: the frontend does not touch an input block between the Execute that names it and the Done that
//! answers it (or the return of what that says is held), and reads an output block only after the frame that names it;
//! output blocks come from this process's own [`Arena`] and never overlap while they are out. What is registered with the
//! driver of a GPU is unregistered before it is unmapped, and its pages are never handed back to the system, by neither
//! side: the device would go on with the old ones.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use pharos::arena::{Arena, Block};
use pharos::shm::SharedMemory;
use pharos::wire::flags;

use crate::descriptors::SharedDescriptors;
use crate::device::{Cuda, Fault, OWN};

/// Where inputs are read from.
pub(crate) struct InputArena {
    // First, so that it goes before the mapping.
    pinned: OnceLock<Pinned>,
    memory: SharedMemory,
}

impl InputArena {
    /// The flags of the batch that has this row.
    pub(crate) fn flags(&self, row: u8) -> Flags<'_> {
        Flags { words: self.memory.words(), row }
    }

    /// As [`OutputArena::pin`].
    pub(crate) fn pin(&self, cuda: &Arc<Cuda>, bytes: u64) -> Result<u64, Fault> {
        pin((&self.pinned, &self.memory), cuda, bytes)
    }

    /// The bytes of an input; `None` if they are not within the arena.
    pub(crate) fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        // SAFETY: the frontend leaves the block alone until it is answered (contract above).
        unsafe { self.memory.slice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?) }
    }

    /// Where in the arena these bytes are; `None` if they are elsewhere.
    pub(crate) fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let offset = bytes.as_ptr().addr().checked_sub(self.memory.as_ptr().addr())?;
        (offset.checked_add(bytes.len())? <= self.memory.len()).then_some(offset as u64)
    }

    /// The pointer to an address in the arena that `len` bytes follow.
    pub(crate) fn address_of(&self, address: usize, len: usize) -> Option<*const u8> {
        let offset = address.checked_sub(self.memory.as_ptr().addr())?;
        (offset.checked_add(len)? <= self.memory.len()).then(|| self.memory.as_ptr().wrapping_add(offset).cast_const())
    }
}

/// Which requests of a batch nobody waits for any more.
#[derive(Clone, Copy)]
pub(crate) struct Flags<'a> {
    words: &'a [AtomicU64],
    row: u8,
}

impl Flags<'_> {
    /// Whether the request at this position of the batch is given up.
    pub(crate) fn is_set(&self, position: usize) -> bool {
        let found = flags::bit(self.row, position).and_then(|(word, bit)| Some((self.words.get(word)?, bit)));
        found.is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }
}

/// Where outputs are written to, by any thread.
pub(crate) struct OutputArena {
    // First, so that it goes before the mapping.
    pinned: OnceLock<Pinned>,
    memory: SharedMemory,
    // Held for a few instructions.
    blocks: Mutex<Blocks>,
}

struct Blocks {
    arena: Arena,
    live: HashMap<u64, Block>,
}

impl OutputArena {
    /// A block of `len` bytes, its content undefined, and its memory; `None` when the arena is full.
    ///
    /// The memory stays valid while the arena's mapping exists; it is this block's alone until it is released.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn allocate(&self, len: u64) -> Option<(Block, &mut [u8])> {
        let block = {
            let mut blocks = self.lock();
            let block = blocks.arena.allocate(len)?;
            blocks.live.insert(block.offset, block);
            block
        };
        // SAFETY: blocks of one arena do not overlap, and this one is new.
        let memory = unsafe { self.memory.slice_mut(usize::try_from(block.offset).ok()?, usize::try_from(len).ok()?)? };
        Some((block, memory))
    }

    /// The content of a block that is out; `None` for one that is not.
    pub(crate) fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        self.lock().live.get(&offset).filter(|block| block.len == len)?;
        // SAFETY: within the mapping, or refused; nobody writes to a block whose run is over.
        unsafe { self.memory.slice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?) }
    }

    /// Gives blocks back by their offsets; unknown offsets are ignored (a block is never released twice).
    pub(crate) fn release(&self, offsets: &[u64]) {
        if offsets.is_empty() {
            return;
        }
        let mut blocks = self.lock();
        for offset in offsets {
            if let Some(block) = blocks.live.remove(offset) {
                blocks.arena.release(block);
            }
        }
    }

    /// Registers up to so many bytes at the beginning with the driver, once: how many it has become.
    ///
    /// # Errors
    /// The driver does not want to; the arena can be used all the same.
    pub(crate) fn pin(&self, cuda: &Arc<Cuda>, bytes: u64) -> Result<u64, Fault> {
        // No block is partly there: the driver refuses to copy what is registered in part.
        let len = whole_pages(&self.memory, bytes) as u64;
        if len == 0 || self.pinned.get().is_some() {
            return Ok(0);
        }
        if !self.lock().arena.fence(len) {
            return Err(Fault::Refused("outputs are in use at its end".to_owned()));
        }
        pin((&self.pinned, &self.memory), cuda, bytes).inspect_err(|_| self.lock().arena.unfence(len))
    }

    /// Hands memory beyond `keep` bytes, and beyond what is registered, back to the system if nobody uses it.
    pub(crate) fn trim(&self, keep: u64) {
        let keep = keep.max(self.pinned.get().map_or(0, |pinned| pinned.len as u64));
        let mut blocks = self.lock();
        if let Some((offset, len)) = blocks.arena.idle_tail(keep)
            && let (Ok(offset), Ok(len)) = (usize::try_from(offset), usize::try_from(len))
        {
            // A hole that cannot be punched costs memory, nothing else. Under the lock, so that nobody gets the block.
            let _ = self.memory.punch_hole(offset, len);
        }
    }

    /// The size of the arena in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.memory.len() as u64
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maps both arenas.
///
/// # Errors
/// A descriptor cannot be mapped.
pub(crate) fn map(descriptors: &SharedDescriptors) -> io::Result<(InputArena, OutputArena)> {
    let inputs = SharedMemory::map(&descriptors.inputs, length(&descriptors.inputs)?)?;
    let length = length(&descriptors.outputs)?;
    let outputs = SharedMemory::map(&descriptors.outputs, length)?;
    let blocks = Blocks { arena: Arena::new(length as u64), live: HashMap::new() };
    let inputs = InputArena { pinned: OnceLock::new(), memory: inputs };
    Ok((inputs, OutputArena { pinned: OnceLock::new(), memory: outputs, blocks: Mutex::new(blocks) }))
}

/// The beginning of a mapping that is registered with the driver.
struct Pinned {
    cuda: Arc<Cuda>,
    start: *mut u8,
    len: usize,
}

// SAFETY: the address of a mapping that lives longer; nothing is read or written through it.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.cuda.ask(|driver| {
            // SAFETY: registered by `pin`; who copies borrows the arena that this is a part of.
            unsafe { driver.unregister(OWN, self.start) };
            Ok(())
        });
    }
}

fn pin((cell, memory): (&OnceLock<Pinned>, &SharedMemory), cuda: &Arc<Cuda>, bytes: u64) -> Result<u64, Fault> {
    let len = whole_pages(memory, bytes);
    if len == 0 || cell.get().is_some() {
        return Ok(0);
    }
    let start = memory.as_ptr();
    // SAFETY: within the mapping, which is unmapped after `Pinned` is gone.
    cuda.ask(|driver| unsafe { driver.register(OWN, start, len) })?;
    let _ = cell.set(Pinned { cuda: cuda.clone(), start, len });
    Ok(len as u64)
}

fn whole_pages(memory: &SharedMemory, bytes: u64) -> usize {
    let whole = usize::try_from(bytes).unwrap_or(usize::MAX).min(memory.len());
    whole / rustix::param::page_size() * rustix::param::page_size()
}

fn length(descriptor: &std::os::fd::OwnedFd) -> io::Result<usize> {
    usize::try_from(rustix::fs::fstat(descriptor)?.st_size).map_err(io::Error::other)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::device::fake::Fake;

    const PAGE: u64 = 4096;

    fn outputs() -> OutputArena {
        let descriptor = pharos::shm::create("outputs", 64 * PAGE).unwrap();
        let memory = SharedMemory::map(&descriptor, 64 * 4096).unwrap();
        let blocks = Blocks { arena: Arena::new(64 * PAGE), live: HashMap::new() };
        OutputArena { pinned: OnceLock::new(), memory, blocks: Mutex::new(blocks) }
    }

    /// Writes into the whole arena, gives it back, trims to `keep`: how many of its pages are there still.
    fn left(arena: &OutputArena, keep: u64) -> usize {
        let blocks = std::iter::from_fn(|| arena.allocate(PAGE / 2));
        let fill = |(block, memory): (Block, &mut [u8])| {
            memory.fill(1);
            block.offset
        };
        let offsets: Vec<u64> = blocks.map(fill).collect();
        arena.release(&offsets);
        arena.trim(keep);
        let mut all = vec![0; 64 * 4096];
        assert!(arena.memory.copy_out(0, &mut all));
        all.chunks(4096).filter(|page| page[1024] == 1).count()
    }

    #[test]
    fn no_block_is_registered_in_part() {
        let (fake, arena) = (Fake::new(1), outputs());
        let cuda = Cuda::with(Box::new(fake.clone()), None);
        let (block, _) = arena.allocate(8 * PAGE).unwrap();
        let why = Fault::Refused("outputs are in use at its end".into());
        assert_eq!(arena.pin(&cuda, 4 * PAGE), Err(why));
        arena.release(&[block.offset]);
        assert_eq!(arena.pin(&cuda, 4 * PAGE), Ok(4 * PAGE));
        let offsets = [3, 3, 1].map(|pages| arena.allocate(pages * PAGE).unwrap().0.offset);
        assert_eq!(offsets, [0, 4 * PAGE + 64, 3 * PAGE]);
    }

    #[test]
    fn what_is_registered_is_never_handed_back() {
        let (fake, arena) = (Fake::new(1), outputs());
        let cuda = Cuda::with(Box::new(fake.clone()), None);
        assert_eq!(left(&arena, PAGE), 1);
        // Whole pages, once.
        assert_eq!(arena.pin(&cuda, 4 * PAGE + 100), Ok(4 * PAGE));
        assert_eq!(arena.pin(&cuda, 4 * PAGE), Ok(0));
        assert_eq!(fake.registered(), [(arena.memory.as_ptr().addr(), 4 * 4096)]);
        // And pages that blocks end in: those behind what is registered begin a little later.
        assert!((4..=6).contains(&left(&arena, PAGE)));
        assert!((9..=11).contains(&left(&arena, 9 * PAGE)));
        drop(arena);
        assert_eq!(fake.registered(), []);
    }

    #[test]
    fn no_more_is_registered_than_there_is_and_a_refusal_leaves_the_arena_as_it_was() {
        let (fake, arena) = (Fake::new(1), outputs());
        let cuda = Cuda::with(Box::new(fake.clone()), None);
        fake.fail("register", 0, Fault::Refused("too much".into()));
        assert_eq!(arena.pin(&cuda, PAGE), Err(Fault::Refused("too much".into())));
        assert_eq!(left(&arena, PAGE), 1);
        assert_eq!(arena.pin(&cuda, 100), Ok(0));
        assert_eq!(arena.pin(&cuda, u64::MAX), Ok(64 * PAGE));
    }
}
