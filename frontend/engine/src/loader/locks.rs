//! Serializes operations on each model.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{self, watch};

/// The locks in use.
#[derive(Clone, Default)]
pub(super) struct Locks(Arc<Mutex<BTreeMap<String, Arc<ModelLock>>>>);

#[derive(Default)]
struct ModelLock {
    // Held during one operation, including all its waits.
    turn: sync::Mutex<()>,
    /// Incremented by each unload, which cancels loads that began before.
    unloads: watch::Sender<u64>,
    /// The number of loads that have begun and not ended.
    loads: AtomicUsize,
}

impl ModelLock {
    /// Returns the lock if no operation has it, and no load has begun.
    fn free(&self) -> Option<sync::MutexGuard<'_, ()>> {
        let turn = self.turn.try_lock().ok()?;
        (self.loads.load(Ordering::Relaxed) == 0).then_some(turn)
    }
}

/// A handle of one model's lock, which is removed with its last handle.
pub(super) struct Lock {
    locks: Locks,
    name: String,
    one: Arc<ModelLock>,
}

/// A load, from its beginning until this is dropped. Notifies of unloads of the model meanwhile.
pub(super) struct BegunLoad {
    unloads: watch::Receiver<u64>,
    /// Keeps the lock in the map, so that the next unload notifies this receiver.
    lock: Lock,
}

impl Drop for BegunLoad {
    fn drop(&mut self) {
        self.lock.one.loads.fetch_sub(1, Ordering::Relaxed);
    }
}

impl BegunLoad {
    /// Waits until the model is unloaded.
    pub(super) async fn unloaded(&mut self) {
        if self.unloads.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns whether the model was unloaded.
    pub(super) fn is_unloaded(&self) -> bool {
        self.unloads.has_changed().unwrap_or(false)
    }

    /// Returns a function that tells whether the model was unloaded.
    pub(super) fn unload_check(&self) -> impl Fn() -> bool + use<> {
        let unloads = self.unloads.clone();
        move || unloads.has_changed().unwrap_or(false)
    }
}

impl Locks {
    pub(super) fn of(&self, name: &str) -> Lock {
        let one = self.all().entry(name.to_owned()).or_default().clone();
        Lock { locks: self.clone(), name: name.to_owned(), one }
    }

    /// Returns whether an operation has the lock of a model, or a load has begun.
    pub(super) fn is_held(&self, name: &str) -> bool {
        self.all().get(name).is_some_and(|one| one.free().is_none())
    }

    /// Returns whether another load of a model has begun than the one of the caller.
    pub(super) fn has_other_loads(&self, name: &str) -> bool {
        self.all().get(name).is_some_and(|one| one.loads.load(Ordering::Relaxed) > 1)
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<ModelLock>>> {
        self.0.lock()
    }
}

impl Lock {
    /// Waits for the lock. The operation ends when the returned guard is dropped.
    pub(super) async fn held(&self) -> sync::MutexGuard<'_, ()> {
        self.one.turn.lock().await
    }

    /// Returns the lock if no operation has it, and no load has begun.
    pub(super) fn held_at_once(&self) -> Option<sync::MutexGuard<'_, ()>> {
        self.one.free()
    }

    /// Cancels the running loads.
    pub(super) fn unload(&self) {
        self.one.unloads.send_modify(|count| *count += 1);
    }

    /// Begins a load. Until it ends, the model is not unloaded for want of use.
    pub(super) fn begin_load(&self) -> BegunLoad {
        self.one.loads.fetch_add(1, Ordering::Relaxed);
        BegunLoad { unloads: self.one.unloads.subscribe(), lock: self.locks.of(&self.name) }
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
        let first = locks.of("m");
        let second = locks.of("m");
        assert!(!locks.is_held("m"));
        let mut load = first.begin_load();
        assert!(locks.is_held("m") && second.held_at_once().is_none(), "a load has begun");
        assert!(!locks.has_other_loads("m"));
        let other = first.begin_load();
        assert!(locks.has_other_loads("m"));
        drop(other);
        let is_unloaded = load.unload_check();
        let held = first.held().await;
        assert!(locks.is_held("m") && !locks.is_held("other"));
        assert!(second.one.turn.try_lock().is_err());
        assert!(locks.of("other").one.turn.try_lock().is_ok());
        assert_eq!(locks.all().len(), 1);
        assert!(!load.is_unloaded());
        second.unload();
        assert!(load.is_unloaded() && is_unloaded());
        load.unloaded().await;
        assert!(!load.is_unloaded());
        drop(load);
        drop(held);
        drop(first);
        assert!(locks.of("m").one.turn.try_lock().is_ok());
        assert_eq!(locks.all().len(), 1);
        drop(second);
        assert!(locks.all().is_empty());
    }
}
