//! Memory of this process that plays a device's.
//!
//! Contract: it is touched through its address alone, as long as it is allocated, because others are given the address too:
//! who computes there is done before the next call of the driver.

use std::alloc::{Layout, alloc, dealloc};

use super::RUBBISH;

/// Memory that plays a device's: an address, and how many bytes.
pub(super) struct Memory(pub(super) usize, pub(super) usize);

impl Memory {
    pub(super) fn new(len: usize) -> Self {
        // SAFETY: of at least one byte, and written as long as it is.
        let start = unsafe { alloc(Self::layout(len)) };
        assert!(!start.is_null());
        let mut memory = Self(start.expose_provenance(), len);
        memory.write(0, &vec![RUBBISH; len]);
        memory
    }

    /// Aligned as CUDA aligns.
    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len.max(1), 256).unwrap()
    }

    pub(super) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.1);
        let mut bytes = vec![0; len];
        let from = std::ptr::with_exposed_provenance::<u8>(self.0 + at);
        // SAFETY: within what is allocated, and nobody else's now.
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
        // SAFETY: what was allocated, once.
        unsafe { dealloc(std::ptr::with_exposed_provenance_mut(self.0), Self::layout(self.1)) };
    }
}
