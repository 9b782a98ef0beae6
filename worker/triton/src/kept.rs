//! The answer to a request, and its new states, until its batch ends.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use pharos::tensor::DataType;
use pharos_backend::{Memory, Reply};

/// An output or a state of one request.
pub(crate) struct Part {
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<i64>,
    pub(crate) memory: Memory,
}

/// Wakes the thread that waits for the requests of a batch.
#[derive(Default)]
pub(crate) struct Releases {
    lock: Mutex<()>,
    released: Condvar,
}

/// How long the thread waits at most before it looks again: the deletion of the last response or
/// factory of a request wakes nothing.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Releases {
    /// Waits until `is_done` returns true; calls it after each release.
    pub(crate) fn wait_until(&self, is_done: impl Fn() -> bool) {
        let mut lock = self.lock.lock();
        while !is_done() {
            self.released.wait_for(&mut lock, LOOK_AGAIN);
        }
    }
}

/// What the batch keeps of one request.
pub(crate) struct Kept {
    place: (u64, u32),
    releases: Arc<Releases>,
    /// Locked to read or write it only.
    content: Mutex<KeptContent>,
}

/// The answer to a request, and its new states.
#[derive(Default)]
pub(crate) struct KeptContent {
    pub(crate) reply: Option<Reply>,
    /// The new states, by position in the configuration.
    pub(crate) states: Vec<(usize, Part)>,
}

impl Kept {
    /// Creates it for a request, given by its batch and its position there.
    pub(crate) fn new(place: (u64, u32), releases: &Arc<Releases>) -> Self {
        Self { place, releases: releases.clone(), content: Mutex::default() }
    }

    /// Wakes the thread that waits for the batch.
    pub(crate) fn released(&self) {
        drop(self.releases.lock.lock());
        self.releases.released.notify_one();
    }

    pub(crate) fn place(&self) -> (u64, u32) {
        self.place
    }

    pub(crate) fn reply(&self, reply: Reply) {
        self.content.lock().reply = Some(reply);
    }

    /// Stores the new value of the state at this position of the configuration.
    pub(crate) fn update(&self, state: usize, part: Part) {
        let mut content = self.content.lock();
        content.states.retain(|(other, _)| *other != state);
        content.states.push((state, part));
    }

    /// Returns what it has, and leaves nothing.
    pub(crate) fn take(&self) -> KeptContent {
        std::mem::take(&mut *self.content.lock())
    }
}
