//! Process memory that simulates device memory.
//!
//! Contract: it is only accessed through its address while it is allocated, because other code
//! receives the address too; that code completes its accesses before the next call of the driver.

use std::alloc::{Layout, alloc, dealloc};

use super::GARBAGE;

/// Simulated device memory: address and length.
pub(super) struct Memory(pub(super) usize, pub(super) usize);

impl Memory {
    pub(super) fn new(len: usize) -> Self {
        // SAFETY: at least one byte, and initialized below over the whole length.
        let start = unsafe { alloc(Self::layout(len)) };
        assert!(!start.is_null());
        let mut memory = Self(start.expose_provenance(), len);
        memory.write(0, &vec![GARBAGE; len]);
        memory
    }

    /// The alignment of CUDA allocations.
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1), 256).unwrap()
    }

    pub(super) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.1);
        let mut bytes = vec![0; len];
        let from = std::ptr::with_exposed_provenance::<u8>(self.0 + at);
        // SAFETY: within the allocation, and no other code accesses it now.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }

    pub(super) fn write(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.1);
        let to = std::ptr::with_exposed_provenance_mut::<u8>(self.0 + at);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout, and freed once.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(self.0), Self::layout(self.1)) };
    }
}
