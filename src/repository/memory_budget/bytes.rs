//! The memories that models use, and numbers of bytes in them.

use std::collections::BTreeMap;

/// A memory that models use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Memory {
    /// The memory of the machine or the container.
    Main,
    /// GPU memory, by the GPU's number.
    Gpu(u32),
}

/// Numbers of bytes by memory. A memory without an entry has 0 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryBytes(BTreeMap<Memory, u64>);

impl MemoryBytes {
    /// Returns the bytes in a memory, if it has an entry.
    pub fn get(&self, memory: Memory) -> Option<u64> {
        self.0.get(&memory).copied()
    }

    /// Returns the bytes in a memory.
    pub fn of(&self, memory: Memory) -> u64 {
        self.get(memory).unwrap_or_default()
    }

    /// Sets the bytes in a memory.
    pub fn set(&mut self, memory: Memory, bytes: u64) {
        self.0.insert(memory, bytes);
    }

    /// Returns the entries.
    pub fn iter(&self) -> impl Iterator<Item = (Memory, u64)> + '_ {
        self.0.iter().map(|(memory, bytes)| (*memory, *bytes))
    }

    /// Returns whether all entries are 0.
    pub fn is_zero(&self) -> bool {
        self.0.values().all(|bytes| *bytes == 0)
    }

    /// Adds the bytes of each memory.
    pub fn add(&mut self, other: &Self) {
        for (memory, bytes) in other.iter() {
            let sum = self.0.entry(memory).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Subtracts the bytes of each memory; a memory with fewer has 0 left.
    pub fn subtract(&mut self, other: &Self) {
        for (memory, bytes) in &mut self.0 {
            *bytes = bytes.saturating_sub(other.of(*memory));
        }
    }

    /// Returns whether each memory has at least as many bytes as in `other`.
    pub fn covers(&self, other: &Self) -> bool {
        other.iter().all(|(memory, bytes)| self.of(memory) >= bytes)
    }
}

/// Entries of the same memory add up.
impl FromIterator<(Memory, u64)> for MemoryBytes {
    fn from_iter<I: IntoIterator<Item = (Memory, u64)>>(entries: I) -> Self {
        let mut all = Self::default();
        entries.into_iter().for_each(|entry| all.add(&Self(BTreeMap::from([entry]))));
        all
    }
}
