//! The places of processes. If all are taken, the least recently used idle process makes room.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// A limited number of places.
pub(super) struct Places {
    free: Arc<Semaphore>,
    // Held for a few instructions.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the last use.
    uses: u64,
    /// The idle processes, by their last use.
    idle: BTreeMap<u64, Arc<Notify>>,
    /// How many processes wait for a place.
    waiting: usize,
}

impl fmt::Debug for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Places").field("state", &self.state).finish_non_exhaustive()
    }
}

/// The place of a process, free again when it is dropped.
pub(super) struct Place {
    places: Arc<Places>,
    /// The last use, while the process is idle.
    idle_since: Option<u64>,
    /// Notified if another process needs the place.
    wanted: Arc<Notify>,
    _permit: Option<OwnedSemaphorePermit>,
}

/// Counts a process that waits for a place.
struct Waiting<'a>(&'a Places);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

impl Places {
    pub(super) fn new(count: usize) -> Arc<Self> {
        Arc::new(Self { free: Arc::new(Semaphore::new(count)), state: Mutex::default() })
    }

    /// Returns a place, for a process that works. Waits until one is free.
    pub(super) async fn take(self: &Arc<Self>) -> Place {
        let permit = match self.free.clone().try_acquire_owned() {
            Ok(permit) => Some(permit),
            Err(_) => {
                let waiting = self.wait();
                // The semaphore is never closed.
                let permit = self.free.clone().acquire_owned().await.ok();
                drop(waiting);
                permit
            }
        };
        let wanted = Arc::new(Notify::new());
        Place { places: self.clone(), idle_since: None, wanted, _permit: permit }
    }

    /// Asks the least recently used idle process for its place. If none is idle, the next one that
    /// has done its work leaves.
    fn wait(&self) -> Waiting<'_> {
        let mut state = self.state.lock();
        state.waiting += 1;
        if let Some((_, idle)) = state.idle.pop_first() {
            idle.notify_one();
        }
        drop(state);
        Waiting(self)
    }
}

impl Place {
    /// Marks the process as idle. Returns `false` if others wait for its place.
    pub(super) fn rests(&mut self) -> bool {
        let mut state = self.places.state.lock();
        if state.waiting > 0 {
            return false;
        }
        state.uses += 1;
        let number = state.uses;
        state.idle.insert(number, self.wanted.clone());
        self.idle_since = Some(number);
        true
    }

    /// Marks the process as working.
    pub(super) fn works(&mut self) {
        if let Some(number) = self.idle_since.take() {
            self.places.state.lock().idle.remove(&number);
        }
    }

    /// Waits until another process needs the place.
    pub(super) async fn wanted(&self) {
        self.wanted.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.works();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_least_recently_used_idle_process_makes_room() {
        let places = Places::new(2);
        let mut first = places.take().await;
        let mut second = places.take().await;
        assert!(first.rests() && second.rests());
        first.works();
        assert!(first.rests());
        let third = tokio::spawn({
            let places = places.clone();
            async move { places.take().await }
        });
        second.wanted().await;
        drop(second);
        let third = third.await.unwrap();
        first.works();
        assert!(first.rests(), "its place is not wanted");
        drop((first, third));
        assert_eq!(places.free.available_permits(), 2);
        assert!(places.state.lock().idle.is_empty());
    }

    #[tokio::test]
    async fn a_process_that_has_done_its_work_makes_room() {
        let places = Places::new(1);
        let mut only = places.take().await;
        let next = tokio::spawn({
            let places = places.clone();
            async move { places.take().await }
        });
        while places.state.lock().waiting == 0 {
            tokio::task::yield_now().await;
        }
        assert!(!only.rests());
        drop(only);
        assert!(next.await.unwrap().rests());
        // A process that is not needed any more leaves the queue.
        assert_eq!(places.state.lock().waiting, 0);
    }
}
