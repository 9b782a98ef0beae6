//! A lock for each model that something is done with.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{self, watch};

/// The locks that are in use.
#[derive(Clone, Default)]
pub(in crate::loader) struct Locks(Arc<Mutex<BTreeMap<String, Arc<One>>>>);

struct One {
    // Held while one operation is performed, over everything that it waits for.
    turn: sync::Mutex<()>,
    /// Changes with each unload: loads that began before it are given up.
    unloads: watch::Sender<u64>,
}

/// The lock of one model; it is forgotten with the last of these.
pub(super) struct Lock {
    locks: Locks,
    name: String,
    one: Arc<One>,
}

/// Unloads that come after this was made.
pub(super) struct Unloads {
    unloads: watch::Receiver<u64>,
    /// Without it the next unload would be another lock's.
    _lock: Lock,
}

impl Unloads {
    /// Waits for the next.
    pub(super) async fn next(&mut self) {
        if self.unloads.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Whether there has been one.
    pub(super) fn has_come(&self) -> bool {
        self.unloads.has_changed().unwrap_or(false)
    }
}

impl Locks {
    pub(super) fn of(&self, name: &str) -> Lock {
        let new = || Arc::new(One { turn: sync::Mutex::new(()), unloads: watch::Sender::new(0) });
        let one = self.all().entry(name.to_owned()).or_insert_with(new).clone();
        Lock { locks: self.clone(), name: name.to_owned(), one }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<One>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lock {
    /// Waits until it is this operation's turn, which ends when what is returned is dropped.
    pub(super) async fn held(&self) -> sync::MutexGuard<'_, ()> {
        self.one.turn.lock().await
    }

    /// Gives up the loads that have begun.
    pub(super) fn unload(&self) {
        self.one.unloads.send_modify(|count| *count += 1);
    }

    pub(super) fn unloads(&self) -> Unloads {
        Unloads { unloads: self.one.unloads.subscribe(), _lock: self.locks.of(&self.name) }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let mut all = self.locks.all();
        // This one and the map's.
        if Arc::strong_count(&self.one) <= 2 {
            all.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lock_is_forgotten_with_its_last_user() {
        let locks = Locks::default();
        let (first, second) = (locks.of("m"), locks.of("m"));
        let mut unloads = first.unloads();
        let held = first.held().await;
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
