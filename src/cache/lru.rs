//! Limits the crate `lru`, which counts only entries, by bytes.

use ::lru::LruCache;

use super::Key;

/// Values by key, with at most `capacity` bytes in total. The caller gives the size of each value.
#[derive(Debug)]
pub struct Lru<V> {
    capacity: u64,
    used: u64,
    /// Values with their sizes.
    entries: LruCache<Key, (V, u64)>,
}

impl<V> Lru<V> {
    /// Creates an empty cache.
    pub fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, entries: LruCache::unbounded() }
    }

    /// Returns the maximum number of bytes.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the current number of bytes.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Returns the current number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the value of a key and makes it the most recently used.
    pub fn get(&mut self, key: &Key) -> Option<&V> {
        self.entries.get(key).map(|(value, _)| value)
    }

    /// Adds a value of `size` bytes and returns the values evicted for it. The caller should drop
    /// them without holding a lock.
    ///
    /// # Errors
    /// Returns the value if it is larger than the capacity, or if the key already exists. An
    /// existing key keeps its value and becomes the most recently used.
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
