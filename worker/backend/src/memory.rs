//! The arenas that this process shares with the frontend. `pharos::shm` states the contract of the
//! mappings themselves.
//!
//! Contract kept here: the frontend does not touch an input block between the Execute that names it
//! and the Done that answers it (or the return of its loan), and reads an output block only after
//! the frame that names it. Output blocks come from this process's [`Arena`] and never overlap
//! while they are allocated. Memory that is registered with a GPU driver is unregistered
//! before it is unmapped, and neither side returns its pages to the system: the device would
//! continue to use the old pages.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use pharos::arena::{Arena, Block};
use pharos::shm::SharedMemory;
use pharos::wire::flags;
use rustc_hash::FxHashMap;

/// The arena that inputs are read from.
pub struct InputArena {
    // Declared first, so that it is dropped before the mapping.
    pinned: OnceLock<Pinned>,
    memory: SharedMemory,
}

impl InputArena {
    /// Returns the cancellation flags of the batch in this row.
    pub fn flags(&self, row: u8) -> Flags<'_> {
        Flags { words: self.memory.words(), row }
    }

    /// Calls `register` once to register up to `bytes` bytes at the beginning with a GPU driver;
    /// returns how many. Dropping the value that `register` returns unregisters them, which happens
    /// before they are unmapped.
    ///
    /// # Errors
    /// The driver's error; the arena remains usable.
    pub fn pin<E>(
        &self,
        bytes: u64,
        register: impl FnOnce(*mut u8, usize) -> Result<Guard, E>,
    ) -> Result<u64, E> {
        pin(&self.pinned, &self.memory, bytes, register)
    }

    /// Whether these bytes are registered with a GPU driver.
    pub(crate) fn is_pinned(&self, bytes: &[u8]) -> bool {
        is_pinned(&self.pinned, &self.memory, bytes)
    }

    /// Returns the bytes of an input; `None` if they are not within the arena.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        // SAFETY: the frontend does not touch the block until it is answered (contract above).
        unsafe { self.memory.slice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?) }
    }

    /// Returns the offset of these bytes in the arena; `None` if they are elsewhere.
    pub fn offset_of(&self, bytes: &[u8]) -> Option<u64> {
        let offset = bytes.as_ptr().addr().checked_sub(self.memory.as_ptr().addr())?;
        (offset.checked_add(bytes.len())? <= self.memory.len()).then_some(offset as u64)
    }

    /// Returns the pointer for an address in the arena that is followed by `len` bytes.
    pub fn address_of(&self, address: usize, len: usize) -> Option<*const u8> {
        let offset = address.checked_sub(self.memory.as_ptr().addr())?;
        (offset.checked_add(len)? <= self.memory.len())
            .then(|| self.memory.as_ptr().wrapping_add(offset).cast_const())
    }
}

/// The cancellation flags of a batch's requests.
#[derive(Clone, Copy)]
pub struct Flags<'a> {
    words: &'a [AtomicU64],
    row: u8,
}

impl Flags<'_> {
    /// Whether the request at this position of the batch is cancelled.
    pub fn is_set(&self, position: usize) -> bool {
        let found = flags::bit(self.row, position)
            .and_then(|(word, bit)| Some((self.words.get(word)?, bit)));
        found.is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
    }
}

/// The arena that outputs are written to, by any thread.
pub struct OutputArena {
    // Declared first, so that it is dropped before the mapping.
    pinned: OnceLock<Pinned>,
    memory: SharedMemory,
    // Held for a few instructions.
    blocks: Mutex<Blocks>,
}

struct Blocks {
    arena: Arena,
    live: FxHashMap<u64, Block>,
}

impl OutputArena {
    /// Allocates a block of `len` bytes with undefined content; returns it and its memory, or
    /// `None` when the arena is full.
    ///
    /// The memory stays valid while the arena's mapping exists; no other block uses it until this
    /// one is released.
    #[allow(clippy::mut_from_ref)]
    pub fn allocate(&self, len: u64) -> Option<(Block, &mut [u8])> {
        let block = {
            let mut blocks = self.lock();
            let block = blocks.arena.allocate(len)?;
            blocks.live.insert(block.offset, block);
            block
        };
        // SAFETY: blocks of one arena do not overlap, and this one is new.
        let memory = unsafe {
            self.memory
                .slice_mut(usize::try_from(block.offset).ok()?, usize::try_from(len).ok()?)?
        };
        Some((block, memory))
    }

    /// Returns the content of an allocated block; `None` if the block is not allocated.
    pub fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        self.lock().live.get(&offset).filter(|block| block.len == len)?;
        // SAFETY: `slice` refuses ranges outside the mapping; no code writes to a block after its
        // execution.
        unsafe { self.memory.slice(usize::try_from(offset).ok()?, usize::try_from(len).ok()?) }
    }

    /// Releases blocks by their offsets. Unknown offsets are ignored.
    pub fn release(&self, offsets: &[u64]) {
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

    /// Like [`InputArena::pin`]; `None` if an allocated block crosses the end of these bytes.
    ///
    /// # Errors
    /// As for [`InputArena::pin`].
    pub fn pin<E>(
        &self,
        bytes: u64,
        register: impl FnOnce(*mut u8, usize) -> Result<Guard, E>,
    ) -> Result<Option<u64>, E> {
        // No block may be registered partially: the driver refuses to copy it.
        let len = whole_pages(&self.memory, bytes) as u64;
        if len == 0 || self.pinned.get().is_some() {
            return Ok(Some(0));
        }
        if !self.lock().arena.fence(len) {
            return Ok(None);
        }
        let pinned = pin(&self.pinned, &self.memory, bytes, register);
        pinned.map(Some).inspect_err(|_| self.lock().arena.unfence(len))
    }

    /// Whether these bytes are registered with a GPU driver.
    pub(crate) fn is_pinned(&self, bytes: &[u8]) -> bool {
        is_pinned(&self.pinned, &self.memory, bytes)
    }

    /// Returns unused memory beyond `keep` bytes, and beyond the registered part, to the system.
    pub fn trim(&self, keep: u64) {
        let keep = keep.max(self.pinned.get().map_or(0, |pinned| pinned.len as u64));
        let mut blocks = self.lock();
        if let Some((offset, len)) = blocks.arena.idle_tail(keep)
            && let (Ok(offset), Ok(len)) = (usize::try_from(offset), usize::try_from(len))
        {
            // A failure only costs memory. The lock is held so that the block is not allocated
            // meanwhile.
            let _ = self.memory.punch_hole(offset, len);
        }
    }

    /// The size of the arena in bytes.
    pub fn capacity(&self) -> u64 {
        self.memory.len() as u64
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock()
    }
}

/// Maps both arenas.
///
/// # Errors
/// A descriptor cannot be mapped.
pub fn map(inputs: &OwnedFd, outputs: &OwnedFd) -> io::Result<(InputArena, OutputArena)> {
    let inputs = SharedMemory::map(inputs, length(inputs)?)?;
    let length = length(outputs)?;
    let outputs = SharedMemory::map(outputs, length)?;
    let blocks = Blocks { arena: Arena::new(length as u64), live: FxHashMap::default() };
    let inputs = InputArena { pinned: OnceLock::new(), memory: inputs };
    Ok((
        inputs,
        OutputArena { pinned: OnceLock::new(), memory: outputs, blocks: Mutex::new(blocks) },
    ))
}

/// Unregisters memory when it is dropped.
pub type Guard = Box<dyn Any + Send + Sync>;

/// The beginning of a mapping, registered with a driver.
struct Pinned {
    len: usize,
    /// Held until it is dropped.
    _guard: Guard,
}

fn pin<E>(
    cell: &OnceLock<Pinned>,
    memory: &SharedMemory,
    bytes: u64,
    register: impl FnOnce(*mut u8, usize) -> Result<Guard, E>,
) -> Result<u64, E> {
    let len = whole_pages(memory, bytes);
    if len == 0 || cell.get().is_some() {
        return Ok(0);
    }
    let guard = register(memory.as_ptr(), len)?;
    let _ = cell.set(Pinned { len, _guard: guard });
    Ok(len as u64)
}

fn is_pinned(cell: &OnceLock<Pinned>, memory: &SharedMemory, bytes: &[u8]) -> bool {
    let Some(pinned) = cell.get() else { return false };
    let offset = bytes.as_ptr().addr().checked_sub(memory.as_ptr().addr());
    offset.and_then(|offset| offset.checked_add(bytes.len())).is_some_and(|end| end <= pinned.len)
}

fn whole_pages(memory: &SharedMemory, bytes: u64) -> usize {
    let whole = usize::try_from(bytes).unwrap_or(usize::MAX).min(memory.len());
    whole / rustix::param::page_size() * rustix::param::page_size()
}

fn length(descriptor: &OwnedFd) -> io::Result<usize> {
    usize::try_from(rustix::fs::fstat(descriptor)?.st_size).map_err(io::Error::other)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const PAGE: u64 = 4096;

    fn outputs() -> OutputArena {
        let descriptor = pharos::shm::create("outputs", 64 * PAGE).unwrap();
        let memory = SharedMemory::map(&descriptor, 64 * 4096).unwrap();
        let blocks = Blocks { arena: Arena::new(64 * PAGE), live: FxHashMap::default() };
        OutputArena { pinned: OnceLock::new(), memory, blocks: Mutex::new(blocks) }
    }

    /// Fills the whole arena, releases it and trims to `keep`. Returns the number of pages still
    /// allocated.
    fn left(arena: &OutputArena, keep: u64) -> usize {
        let blocks = std::iter::from_fn(|| arena.allocate(PAGE / 2));
        let offsets: Vec<u64> = blocks
            .map(|(block, memory)| {
                memory.fill(1);
                block.offset
            })
            .collect();
        arena.release(&offsets);
        arena.trim(keep);
        let mut all = vec![0; 64 * 4096];
        assert!(arena.memory.copy_out(0, &mut all));
        all.chunks(4096).filter(|page| page[1024] == 1).count()
    }

    /// A driver that counts the bytes registered with it.
    #[derive(Clone, Default)]
    struct Driver(Arc<AtomicUsize>);

    struct Registered(Driver, usize);

    impl Drop for Registered {
        fn drop(&mut self) {
            self.0.0.fetch_sub(self.1, Ordering::Relaxed);
        }
    }

    impl Driver {
        fn register(&self, len: usize) -> Result<Guard, &'static str> {
            self.0.fetch_add(len, Ordering::Relaxed);
            Ok(Box::new(Registered(self.clone(), len)))
        }

        fn registered(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    fn pin(arena: &OutputArena, driver: &Driver, bytes: u64) -> Result<Option<u64>, &'static str> {
        arena.pin(bytes, |_, len| driver.register(len))
    }

    #[test]
    fn no_block_is_registered_partially() {
        let driver = Driver::default();
        let arena = outputs();
        let (block, _) = arena.allocate(8 * PAGE).unwrap();
        assert_eq!(pin(&arena, &driver, 4 * PAGE), Ok(None));
        arena.release(&[block.offset]);
        assert_eq!(pin(&arena, &driver, 4 * PAGE), Ok(Some(4 * PAGE)));
        let offsets = [3, 3, 1].map(|pages| arena.allocate(pages * PAGE).unwrap().0.offset);
        assert_eq!(offsets, [0, 4 * PAGE + 64, 3 * PAGE]);
    }

    #[test]
    fn registered_memory_is_never_returned_to_the_system() {
        let driver = Driver::default();
        let arena = outputs();
        assert_eq!(left(&arena, PAGE), 1);
        // Registers whole pages, and only once.
        let mut start = std::ptr::null_mut();
        let pinned = arena.pin(4 * PAGE + 100, |from, len| {
            start = from;
            driver.register(len)
        });
        assert_eq!((pinned, start), (Ok(Some(4 * PAGE)), arena.memory.as_ptr()));
        assert_eq!(pin(&arena, &driver, 4 * PAGE), Ok(Some(0)));
        assert_eq!(driver.registered(), 4 * 4096);
        // Blocks cross page boundaries: those after the registered part begin a little later.
        assert!((4..=6).contains(&left(&arena, PAGE)));
        assert!((9..=11).contains(&left(&arena, 9 * PAGE)));
        drop(arena);
        assert_eq!(driver.registered(), 0);
    }

    #[test]
    fn registration_is_limited_to_the_arena_and_a_failure_changes_nothing() {
        let driver = Driver::default();
        let arena = outputs();
        assert_eq!(arena.pin(PAGE, |_, _| Err("too much")), Err("too much"));
        assert_eq!(left(&arena, PAGE), 1);
        assert_eq!(pin(&arena, &driver, 100), Ok(Some(0)));
        assert_eq!(pin(&arena, &driver, u64::MAX), Ok(Some(64 * PAGE)));
    }
}
