//! A mapping of memory that a client can write to, truncate or remove at any moment.
//!
//! Contract: the memory is only accessed through a [`Mapping`], which lives longer than all ranges
//! borrowed from it. Its bytes may change while they are borrowed: code that borrows them
//! ([`Mapping::bytes`]) must work with any bytes and must not make two decisions from separate
//! reads of the same bytes, as `pharos::shm::SharedMemory::slice` requires. Code that cannot
//! guarantee this must use a copy. Ranges borrowed for writing do not overlap others that this
//! process has borrowed. If the object has been truncated, a fault is answered with zeros
//! (`fault.rs`).

use std::io;
use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::fault::{self, Guard};

/// A mapped range of a file that a client created.
pub(super) struct Mapping {
    /// The start of the mapped pages.
    start: *mut u8,
    pages: usize,
    /// The offset of the region in the first page.
    skip: usize,
    len: usize,
    guard: Guard,
}

// SAFETY: the address stays valid on any thread while the mapping lives; the type has no other
// state.
unsafe impl Send for Mapping {}
// SAFETY: as above; other processes may change its bytes at any moment anyway, which the contract
// leaves to the reader.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes from `offset`.
    ///
    /// # Errors
    /// The kernel's error, or a length beyond the address space.
    pub(super) fn new(file: impl AsFd, offset: u64, len: u64) -> io::Result<Self> {
        let page = rustix::param::page_size() as u64;
        let first = offset / page * page;
        let too_large = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let skip = usize::try_from(offset - first).map_err(too_large)?;
        let len = usize::try_from(len).map_err(too_large)?;
        let wanted = skip
            .checked_add(len)
            .and_then(|end| end.checked_next_multiple_of(rustix::param::page_size()));
        let pages = wanted.filter(|pages| *pages > 0).ok_or(io::ErrorKind::OutOfMemory)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let start =
            unsafe { mmap(std::ptr::null_mut(), pages, access, flags, file, first) }?.cast::<u8>();
        Ok(Self { start, pages, skip, len, guard: fault::watch(start as usize, pages) })
    }

    /// Whether a fault showed that the memory was truncated; it then contains zeros instead of the
    /// client's memory.
    pub(super) fn is_truncated(&self) -> bool {
        self.guard.is_truncated()
    }

    /// Returns the bytes `offset .. offset + len`; `None` if they exceed the mapping. See the
    /// contract above.
    pub(super) fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let (start, len) = self.range(offset, len)?;
        // SAFETY: in the mapping, which lives as long as the borrow. The borrower must tolerate
        // concurrent writes of the client (contract above).
        Some(unsafe { std::slice::from_raw_parts(start, len) })
    }

    /// Like [`Mapping::bytes`], for writing. Ranges borrowed at the same time must not overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn bytes_mut(&self, offset: u64, len: u64) -> Option<&mut [u8]> {
        let (start, len) = self.range(offset, len)?;
        // SAFETY: as above; callers keep simultaneous ranges apart.
        Some(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }

    /// Copies from `offset` into all of `into`; returns false if the range exceeds the mapping.
    pub(super) fn copy_out(&self, offset: u64, into: &mut [u8]) -> bool {
        let Some((start, len)) = self.range(offset, into.len() as u64) else { return false };
        // SAFETY: the source is in the mapping, and `into` is private memory of this process.
        unsafe { std::ptr::copy_nonoverlapping(start, into.as_mut_ptr(), len) };
        true
    }

    /// Copies all of `from` to `offset`; returns false if the range exceeds the mapping.
    pub(super) fn copy_in(&self, offset: u64, from: &[u8]) -> bool {
        let Some((start, len)) = self.range(offset, from.len() as u64) else { return false };
        // SAFETY: the target is in the mapping; `copy` allows a source that overlaps it.
        unsafe { std::ptr::copy(from.as_ptr(), start, len) };
        true
    }

    /// Ends the watch, so that a fault in the mapping counts as foreign.
    #[cfg(test)]
    pub(super) fn forget_watch(&self) {
        self.guard.release();
    }

    fn range(&self, offset: u64, len: u64) -> Option<(*mut u8, usize)> {
        let offset = usize::try_from(offset).ok()?;
        let len = usize::try_from(len).ok()?;
        let end = offset.checked_add(len)?;
        // SAFETY: `skip + offset` is at most `skip + len`, which is within the pages.
        (end <= self.len).then(|| (unsafe { self.start.add(self.skip + offset) }, len))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First, so that a fault in a later mapping at the same address is not mistaken for one of
        // this mapping.
        self.guard.release();
        // SAFETY: `new` mapped these pages, no other code owns them, and borrows of them have ended
        // with `self`.
        let _ = unsafe { munmap(self.start.cast(), self.pages) };
    }
}
