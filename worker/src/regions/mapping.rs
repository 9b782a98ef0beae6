//! A mapping of memory that a client can write to, cut off or remove at any moment.
//!
//! Contract: the memory is only reached through a [`Mapping`], which lives as long as what it lends. Its bytes may change
//! while somebody looks at them: who borrows them ([`Mapping::bytes`]) must be right with any bytes and decide nothing
//! twice from the same ones, as `pharos::shm::SharedMemory::slice` says; who cannot promise that takes a copy. Ranges lent
//! for writing do not overlap others that this process has lent. Where the object has no memory any more, a fault is
//! answered with zeros (`fault.rs`).

use std::io;
use std::os::fd::AsFd;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::fault::{self, Guard};

/// Bytes of a file that a client made.
pub(super) struct Mapping {
    /// Of the pages.
    start: *mut u8,
    pages: usize,
    /// Where the region begins in the first page.
    skip: usize,
    len: usize,
    guard: Guard,
}

// SAFETY: the address stays valid while the mapping lives, whoever holds it; the type has no other state.
unsafe impl Send for Mapping {}
// SAFETY: as above; its bytes may be changed by others at any moment anyway, which the contract leaves to who looks.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes from `offset`.
    ///
    /// # Errors
    /// What the kernel says; a length that no address space has.
    pub(super) fn new(file: impl AsFd, offset: u64, len: u64) -> io::Result<Self> {
        let page = rustix::param::page_size() as u64;
        let first = offset / page * page;
        let too_large = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let (skip, len) =
            (usize::try_from(offset - first).map_err(too_large)?, usize::try_from(len).map_err(too_large)?);
        let wanted = skip.checked_add(len).and_then(|end| end.checked_next_multiple_of(rustix::param::page_size()));
        let pages = wanted.filter(|pages| *pages > 0).ok_or(io::ErrorKind::OutOfMemory)?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap(std::ptr::null_mut(), pages, access, flags, file, first) }?.cast::<u8>();
        Ok(Self { start, pages, skip, len, guard: fault::watch(start as usize, pages) })
    }

    /// Whether it was found to be cut off: then it holds zeros in place of the client's memory.
    pub(super) fn is_cut_off(&self) -> bool {
        self.guard.is_cut_off()
    }

    /// The bytes `offset .. offset + len`; `None` if they pass the end. See the contract above.
    pub(super) fn bytes(&self, offset: u64, len: u64) -> Option<&[u8]> {
        let (start, len) = self.range(offset, len)?;
        // SAFETY: in the mapping, which lives as long as what is lent; that a client may write there meanwhile is the
        // borrower's to bear (contract above).
        Some(unsafe { std::slice::from_raw_parts(start, len) })
    }

    /// As [`Mapping::bytes`], to be written. What is lent out together must not overlap.
    #[allow(clippy::mut_from_ref)]
    pub(super) fn bytes_mut(&self, offset: u64, len: u64) -> Option<&mut [u8]> {
        let (start, len) = self.range(offset, len)?;
        // SAFETY: as above; callers keep what they have at the same time apart.
        Some(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }

    /// Copies from `offset` into all of `into`; false if that passes the end.
    pub(super) fn copy_out(&self, offset: u64, into: &mut [u8]) -> bool {
        let Some((start, len)) = self.range(offset, into.len() as u64) else { return false };
        // SAFETY: the source is in the mapping, and `into` is memory of this process's own.
        unsafe { std::ptr::copy_nonoverlapping(start, into.as_mut_ptr(), len) };
        true
    }

    /// Copies all of `from` to `offset`; false if that passes the end.
    pub(super) fn copy_in(&self, offset: u64, from: &[u8]) -> bool {
        let Some((start, len)) = self.range(offset, from.len() as u64) else { return false };
        // SAFETY: the target is in the mapping; `copy` allows for a source that is lent from it.
        unsafe { std::ptr::copy(from.as_ptr(), start, len) };
        true
    }

    /// Has a fault in it be nobody's.
    #[cfg(test)]
    pub(super) fn forget_watch(&self) {
        self.guard.release();
    }

    fn range(&self, offset: u64, len: u64) -> Option<(*mut u8, usize)> {
        let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        let end = offset.checked_add(len)?;
        // SAFETY: `skip + offset` is at most `skip + len`, which is within the pages.
        (end <= self.len).then(|| (unsafe { self.start.add(self.skip + offset) }, len))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First, so that a fault at an address that belongs to somebody else by then is not taken for one of here.
        self.guard.release();
        // SAFETY: these pages were mapped by `new`, nobody else has them, and what was lent of them is gone with `self`.
        let _ = unsafe { munmap(self.start.cast(), self.pages) };
    }
}
