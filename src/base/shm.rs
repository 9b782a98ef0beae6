//! Shared memory between the frontend and its workers: anonymous files (`memfd`), sealed and
//! mapped.
//!
//! This is the only module of the crate with `unsafe`. It has two kinds of access:
//!
//! * Safe: [`SharedMemory::words`] (every 8 bytes as an atomic) and [`SharedMemory::copy_in`] /
//!   [`SharedMemory::copy_out`]. Concurrent writes of the other process only change the bytes that
//!   these return.
//! * Unsafe: [`SharedMemory::slice`] and [`SharedMemory::slice_mut`], Rust references to the shared
//!   bytes. Their callers must fulfil the contract in their documentation.
//!
//! The memory has no name in a file system: a client can neither open nor guess it. Only files that
//! cannot shrink any more are mapped, so that a peer cannot make an access fault (SIGBUS).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw, UncheckedAdvice};
use rustix::fs::{MemfdFlags, SealFlags};

/// The atomics of modules that `tests/loom` compiles with doubles of them.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering, fence};
}

/// Creates an anonymous file of `len` bytes, all zero, sealed against shrinking, growing and
/// further seals.
///
/// The file is sparse: pages are allocated when they are touched. `name` appears only in
/// `/proc/PID/fd`. The descriptor is close-on-exec; a caller that passes it to a child must clear
/// the flag.
///
/// # Errors
/// The kernel refuses: no memfd support, no descriptors left, or an unsupported length.
pub fn create(name: &str, len: u64) -> io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(fd)
}

/// A writable mapping of the start of a file that [`create`] made, shared with every process that
/// maps it.
///
/// The mapping outlives the descriptor and the other processes: data that a worker wrote before it
/// was killed can still be read.
#[derive(Debug)]
pub struct SharedMemory {
    map: MmapRaw,
    /// The unit in which memory is freed: the file's block size, which for a memfd is the page
    /// size (or huge page size).
    page: usize,
}

impl SharedMemory {
    /// Maps the first `len` bytes (`MAP_SHARED`, no swap reserved).
    ///
    /// # Errors
    /// `InvalidInput` if `len` is 0 or exceeds the file, or if the file can be shrunk; otherwise
    /// the error of the kernel.
    pub fn map(fd: impl AsFd, len: usize) -> io::Result<Self> {
        let fd = fd.as_fd();
        let stat = rustix::fs::fstat(fd)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let page = usize::try_from(stat.st_blksize).unwrap_or(0);
        if len == 0 || len as u64 > size || page == 0 {
            return Err(invalid(format!("cannot map {len} bytes of a file of {size} bytes")));
        }
        let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SealFlags::SHRINK) {
            return Err(invalid(
                "cannot map a file that is not sealed against shrinking".to_owned(),
            ));
        }
        let map = MmapOptions::new().len(len).no_reserve_swap().map_raw(&fd)?;
        Ok(Self { map, page })
    }

    /// Returns the length of the mapping in bytes; never 0.
    #[inline]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns false: a mapping is never empty.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns the start of the mapping, aligned to a page and valid for [`SharedMemory::len`]
    /// bytes while `self` lives.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }

    /// Returns the whole mapping as 64-bit words in native byte order, without up to 7 trailing
    /// bytes.
    ///
    /// Words that either side also accesses through slices lose the guarantees of atomics: use one
    /// kind of access per range.
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, readable and writable for its length, and lives as
        // long as `self`. Any bit pattern is an AtomicU64, and atomics allow changes by other
        // threads and processes.
        unsafe {
            std::slice::from_raw_parts(
                self.as_ptr().cast::<AtomicU64>(),
                self.len() / size_of::<AtomicU64>(),
            )
        }
    }

    /// Returns the atomic word at the byte `offset`; `None` if it exceeds the mapping or `offset`
    /// is not a multiple of 8.
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> Option<&AtomicU64> {
        if !offset.is_multiple_of(size_of::<AtomicU64>()) {
            return None;
        }
        self.words().get(offset / size_of::<AtomicU64>())
    }

    /// Copies `bytes` to `offset`. Returns false and writes nothing if they do not fit.
    #[must_use]
    #[inline]
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) -> bool {
        let Some(to) = self.range(offset, bytes.len()) else { return false };
        // SAFETY: `range` checked that the destination lies in the mapping. Source and destination
        // cannot overlap: no safe function returns the mapping's bytes as a slice, and the contract
        // of the unsafe ones excludes writes to the slice.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        true
    }

    /// Copies from `offset` into all of `bytes`. Returns false and reads nothing if the range
    /// exceeds the mapping.
    ///
    /// While another process writes the range, the result may mix old and new bytes.
    #[must_use]
    #[inline]
    pub fn copy_out(&self, offset: usize, bytes: &mut [u8]) -> bool {
        let Some(from) = self.range(offset, bytes.len()) else { return false };
        // SAFETY: `range` checked that the source lies in the mapping; `bytes` is exclusively
        // borrowed, so they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
        true
    }

    /// Returns the bytes `offset .. offset + len`; `None` if they exceed the mapping.
    ///
    /// # Safety
    /// While the slice lives, nothing may write the range: no other thread through `self` or
    /// another mapping, and no other process that follows the protocol (a range belongs to one side
    /// until a message hands it over). A peer that violates the protocol makes the bytes
    /// unpredictable, so readers must accept any bytes, read lengths and offsets from a checked
    /// message instead, and never base two decisions on the same bytes.
    #[inline]
    pub unsafe fn slice(&self, offset: usize, len: usize) -> Option<&[u8]> {
        let start = self.range(offset, len)?;
        // SAFETY: the range lies in the mapping, which lives as long as `self`; the caller excludes
        // writers.
        Some(unsafe { std::slice::from_raw_parts(start, len) })
    }

    /// Returns the bytes `offset .. offset + len`, writable; `None` if they exceed the mapping.
    ///
    /// # Safety
    /// While the slice lives, nothing else may read or write the range; otherwise as for
    /// [`SharedMemory::slice`]. `self` is borrowed as shared so that disjoint ranges can be used at
    /// once; the caller (the arena allocator) must keep them disjoint.
    #[allow(clippy::mut_from_ref)]
    #[inline]
    pub unsafe fn slice_mut(&self, offset: usize, len: usize) -> Option<&mut [u8]> {
        let start = self.range(offset, len)?;
        // SAFETY: the range lies in the mapping, which lives as long as `self`; the caller excludes
        // other users.
        Some(unsafe { std::slice::from_raw_parts_mut(start, len) })
    }

    /// Gives the memory of the whole pages inside `offset .. offset + len` back to the system; they
    /// read as 0 afterwards. Partial pages at either end do not change.
    ///
    /// The range must not overlap a live [`SharedMemory::slice`] or [`SharedMemory::slice_mut`]:
    /// this is a write.
    ///
    /// # Errors
    /// `InvalidInput` if the range exceeds the mapping; otherwise the error of the kernel.
    pub fn punch_hole(&self, offset: usize, len: usize) -> io::Result<()> {
        if self.range(offset, len).is_none() {
            return Err(invalid(format!(
                "cannot free {len} bytes at {offset} of a mapping of {} bytes",
                self.len()
            )));
        }
        let Some(first) = offset.checked_next_multiple_of(self.page) else { return Ok(()) };
        let end = (offset + len) / self.page * self.page;
        if first >= end {
            return Ok(());
        }
        // SAFETY: MADV_REMOVE keeps the mapping valid and only sets the range, checked above, to
        // zero. For Rust, it is a write by another process, which every reader here must expect.
        unsafe { self.map.unchecked_advise_range(UncheckedAdvice::Remove, first, end - first) }
    }

    fn range(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        // SAFETY: `offset` is at most the mapping's length.
        (end <= self.len()).then(|| unsafe { self.as_ptr().add(offset) })
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    fn kind(result: io::Result<SharedMemory>) -> io::ErrorKind {
        result.unwrap_err().kind()
    }

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let fd = create("test", 8192).unwrap();
        let a = SharedMemory::map(&fd, 8192).unwrap();
        let b = SharedMemory::map(&fd, 8192).unwrap();
        drop(fd);
        assert!(a.copy_in(8190, b"hi"));
        let mut read = [0; 2];
        assert!(b.copy_out(8190, &mut read));
        assert_eq!(&read, b"hi");
        a.atomic_u64(16).unwrap().store(7, Ordering::Release);
        assert_eq!(b.words()[2].load(Ordering::Acquire), 7);
        // SAFETY: this thread is the only one, and the two ranges are disjoint and dropped here.
        unsafe {
            a.slice_mut(100, 3).unwrap().copy_from_slice(b"abc");
            assert_eq!(b.slice(99, 5).unwrap(), b"\0abc\0");
        }
    }

    #[test]
    fn refuses_ranges_beyond_the_mapping() {
        let fd = create("test", 4096).unwrap();
        let memory = SharedMemory::map(&fd, 100).unwrap();
        assert_eq!(memory.words().len(), 12);
        assert!(!memory.copy_in(99, b"ab"));
        assert!(!memory.copy_in(usize::MAX, b"ab"));
        assert!(!memory.copy_out(100, &mut [0]));
        assert!(memory.copy_out(100, &mut []));
        assert!(memory.atomic_u64(96).is_none());
        assert!(memory.atomic_u64(88).is_some());
        assert!(memory.atomic_u64(4).is_none());
        assert!(memory.punch_hole(0, 101).is_err());
        // SAFETY: neither call returns a slice.
        unsafe {
            assert!(memory.slice(50, 51).is_none());
            assert!(memory.slice_mut(usize::MAX, 2).is_none());
        }
    }

    #[test]
    fn refuses_to_map_a_file_that_can_shrink_or_is_too_short() {
        let loose =
            rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .unwrap();
        rustix::fs::ftruncate(&loose, 4096).unwrap();
        assert_eq!(kind(SharedMemory::map(&loose, 4096)), io::ErrorKind::InvalidInput);
        let fd = create("test", 4096).unwrap();
        assert_eq!(kind(SharedMemory::map(&fd, 4097)), io::ErrorKind::InvalidInput);
        assert_eq!(kind(SharedMemory::map(&fd, 0)), io::ErrorKind::InvalidInput);
        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 8192).is_err());
    }

    #[test]
    fn a_hole_frees_whole_pages_only() {
        let page = SharedMemory::map(create("test", 1).unwrap(), 1).unwrap().page;
        let fd = create("test", 4 * page as u64).unwrap();
        let memory = SharedMemory::map(&fd, 4 * page).unwrap();
        assert!(memory.copy_in(0, &vec![1; 4 * page]));
        let blocks = rustix::fs::fstat(&fd).unwrap().st_blocks;
        memory.punch_hole(1, 3 * page).unwrap();
        assert!(rustix::fs::fstat(&fd).unwrap().st_blocks < blocks);
        let mut bytes = vec![9; 4 * page];
        assert!(memory.copy_out(0, &mut bytes));
        assert!(bytes[..page].iter().all(|&byte| byte == 1));
        assert!(bytes[page..3 * page].iter().all(|&byte| byte == 0));
        assert!(bytes[3 * page..].iter().all(|&byte| byte == 1));
        memory.punch_hole(10, 20).unwrap();
    }
}
