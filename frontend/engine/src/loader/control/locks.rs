//! Serializes operations on each model.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{self, watch};

/// The locks in use.
#[derive(Clone, Default)]
pub(in crate::loader) struct Locks(Arc<Mutex<BTreeMap<String, Arc<ModelLock>>>>);

struct ModelLock {
    // Held during one operation, including all its waits.
    turn: sync::Mutex<()>,
    /// Incremented by each unload, which cancels loads that began before.
    unloads: watch::Sender<u64>,
}

/// A handle of one model's lock, which is removed with its last handle.
pub(in crate::loader) struct Lock {
    locks: Locks,
    name: String,
    one: Arc<ModelLock>,
}

/// Notifies of unloads after its creation.
pub(in crate::loader) struct Unloads {
    unloads: watch::Receiver<u64>,
    /// Keeps the lock in the map, so that the next unload notifies this receiver.
    _lock: Lock,
}

impl Unloads {
    /// Waits for the next unload.
    pub(super) async fn next(&mut self) {
        if self.unloads.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether an unload has happened.
    pub(in crate::loader) fn has_come(&self) -> bool {
        self.unloads.has_changed().unwrap_or(false)
    }
}

impl Locks {
    pub(in crate::loader) fn of(&self, name: &str) -> Lock {
        let new = || Arc::new(ModelLock { turn: sync::Mutex::new(()), unloads: watch::Sender::new(0) });
        let one = self.all().entry(name.to_owned()).or_insert_with(new).clone();
        Lock { locks: self.clone(), name: name.to_owned(), one }
    }

    /// Returns whether an operation has the lock of a model.
    pub(in crate::loader) fn is_held(&self, name: &str) -> bool {
        self.all().get(name).is_some_and(|one| one.turn.try_lock().is_err())
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<ModelLock>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lock {
    /// Waits for the lock. The operation ends when the returned guard is dropped.
    pub(in crate::loader) async fn held(&self) -> sync::MutexGuard<'_, ()> {
        self.one.turn.lock().await
    }

    /// Returns the lock if no operation has it.
    pub(in crate::loader) fn held_at_once(&self) -> Option<sync::MutexGuard<'_, ()>> {
        self.one.turn.try_lock().ok()
    }

    /// Cancels the running loads.
    pub(super) fn unload(&self) {
        self.one.unloads.send_modify(|count| *count += 1);
    }

    pub(in crate::loader) fn unloads(&self) -> Unloads {
        Unloads { unloads: self.one.unloads.subscribe(), _lock: self.locks.of(&self.name) }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let mut all = self.locks.all();
        // Two references: this handle and the map's.
        if Arc::strong_count(&self.one) <= 2 {
            all.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_removed_with_its_last_handle() {
        let locks = Locks::default();
        let (first, second) = (locks.of("m"), locks.of("m"));
        let mut unloads = first.unloads();
        assert!(!locks.is_held("m"));
        let held = first.held().await;
        assert!(locks.is_held("m") && !locks.is_held("other"));
        assert!(second.one.turn.try_lock().is_err());
        assert!(locks.of("other").one.turn.try_lock().is_ok());
        assert_eq!(locks.all().len(), 1);
        assert!(!unloads.has_come());
        second.unload();
        assert!(unloads.has_come());
        unloads.next().await;
        assert!(!unloads.has_come());
        drop(unloads);
        drop(held);
        drop(first);
        assert!(locks.of("m").one.turn.try_lock().is_ok());
        assert_eq!(locks.all().len(), 1);
        drop(second);
        assert!(locks.all().is_empty());
    }
}
