//! The response cache in this process.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pharos::cache::{Entry, Key, Lru};

/// A bounded number of bytes of responses; the least recently used is evicted first.
pub(super) struct Local {
    // Held for a lookup or an insertion, never while a response is hashed, copied or freed.
    kept: Mutex<Kept>,
    capacity: u64,
}

struct Kept {
    entries: Lru<Arc<Entry>>,
    /// Entries evicted since the last call of [`Local::usage`].
    evicted: u64,
}

/// The current size of the cache.
pub(super) struct Usage {
    pub(super) entries: usize,
    pub(super) bytes: u64,
    /// Entries evicted since the last call.
    pub(super) evicted: u64,
}

impl Local {
    pub(super) fn new(capacity: u64) -> Self {
        Self { kept: Mutex::new(Kept { entries: Lru::new(capacity), evicted: 0 }), capacity }
    }

    pub(super) fn get(&self, key: &Key) -> Option<Arc<Entry>> {
        self.lock().entries.get(key).cloned()
    }

    /// Returns whether an entry of this size can be stored.
    pub(super) fn fits(&self, size: u64) -> bool {
        size <= self.capacity
    }

    /// Stores an entry. An existing entry of the same key stays.
    pub(super) fn insert(&self, key: Key, entry: Arc<Entry>) {
        let size = entry.size();
        let gone = {
            let mut kept = self.lock();
            let gone = kept.entries.insert(key, entry, size);
            kept.evicted += gone.as_ref().map_or(0, |evicted| evicted.len() as u64);
            gone
        };
        drop(gone);
    }

    pub(super) fn usage(&self) -> Usage {
        let mut kept = self.lock();
        let evicted = std::mem::take(&mut kept.evicted);
        Usage { entries: kept.entries.len(), bytes: kept.entries.used(), evicted }
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock()
    }
}
