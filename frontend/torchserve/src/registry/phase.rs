//! Whether the workers of a version are there yet: requests wait while they load for the first time, as they do in TorchServe,
//! and are refused once that is given up.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

/// What the first worker of a version is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// No worker is wanted, or starting them was given up.
    #[default]
    Stopped,
    /// It loads the model, or is started again.
    Loading,
    /// The engine has the model: what becomes of later workers is its concern.
    Loaded,
}

/// The phase of a version, and the requests that wait for the next one.
#[derive(Debug, Default)]
pub(super) struct Progress {
    phase: watch::Sender<Phase>,
    waiting: AtomicUsize,
}

/// A request that waits, until it is dropped.
pub(super) struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Progress {
    pub(super) fn is_loading(&self) -> bool {
        *self.phase.borrow() == Phase::Loading
    }

    /// Workers are to be started. A model that is loaded stays so while their number changes.
    pub(super) fn begin(&self) {
        self.phase.send_if_modified(|phase| {
            let begins = *phase == Phase::Stopped;
            if begins {
                *phase = Phase::Loading;
            }
            begins
        });
    }

    pub(super) fn set(&self, phase: Phase) {
        self.phase.send_replace(phase);
    }

    /// A place among at most `most` requests that wait; `None` if all are taken.
    pub(super) fn wait(&self, most: usize) -> Option<Waiting<'_>> {
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let place = Waiting(&self.waiting);
        (before < most).then_some(place)
    }

    pub(super) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed) as u64
    }

    /// Until the workers are there, or are not to come.
    pub(super) async fn settled(&self) {
        let mut phase = self.phase.subscribe();
        // The sender lives as long as `self`.
        let _ = phase.wait_for(|phase| *phase != Phase::Loading).await;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn requests_wait_while_a_model_loads_and_no_longer() {
        let progress = Progress::default();
        assert!(!progress.is_loading());
        progress.settled().await;
        progress.begin();
        let first = progress.wait(1).unwrap();
        assert!(progress.is_loading() && progress.wait(1).is_none());
        assert_eq!(progress.waiting(), 1);
        tokio::join!(progress.settled(), async { progress.set(Phase::Loaded) });
        drop(first);
        progress.begin();
        assert!(!progress.is_loading() && progress.wait(1).is_some(), "a loaded model stays loaded");
        progress.set(Phase::Stopped);
        progress.begin();
        assert!(progress.is_loading());
    }
}
