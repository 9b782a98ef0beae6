//! The memory of the machine or of the container.

/// Bytes of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// All memory.
    pub(crate) total: u64,
    /// Memory that programs can allocate without swapping.
    pub(crate) available: u64,
}

impl Memory {
    /// Returns the memory in use.
    pub(crate) fn used(self) -> u64 {
        self.total.saturating_sub(self.available)
    }
}
