//! A bound in bytes over the crate `lru`, which counts entries only.

use ::lru::LruCache;

use super::Key;

/// Values by key, of at most `capacity` bytes together. The caller states the size of each value.
#[derive(Debug)]
pub struct Lru<V> {
    capacity: u64,
    used: u64,
    /// Values with their sizes.
    entries: LruCache<Key, (V, u64)>,
}

impl<V> Lru<V> {
    /// An empty one.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, entries: LruCache::unbounded() }
    }

    /// The most bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes now.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Entries now.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of a key, which is now the most recently used.
    pub fn get(&mut self, key: &Key) -> Option<&V> {
        self.entries.get(key).map(|(value, _)| value)
    }

    /// Adds a value of `size` bytes and returns the values that were evicted for it. The caller should drop them where it
    /// holds no lock.
    ///
    /// # Errors
    /// The value itself, where it alone is larger than the capacity, or where the key is there already: that one keeps its
    /// value and is now the most recently used.
    pub fn insert(&mut self, key: Key, value: V, size: u64) -> Result<Vec<V>, V> {
        if size > self.capacity || self.get(&key).is_some() {
            return Err(value);
        }
        let mut evicted = Vec::new();
        while self.used > self.capacity - size {
            let Some((_, (oldest, freed))) = self.entries.pop_lru() else { break };
            self.used -= freed;
            evicted.push(oldest);
        }
        self.used += size;
        self.entries.push(key, (value, size));
        Ok(evicted)
    }
}
