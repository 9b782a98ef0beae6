//! Whether the workers of a version are ready. As in TorchServe, requests wait while workers load
//! the model for the first time, and are refused once loading is given up.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;

/// The state of a version's first worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// No worker is configured, or starting was given up.
    #[default]
    Stopped,
    /// The worker is loading the model or waiting for a restart.
    Loading,
    /// The engine has loaded the model, and handles later worker failures itself.
    Loaded,
}

/// The phase of a version, and the requests that wait for it to change.
#[derive(Debug, Default)]
pub(super) struct Progress {
    phase: watch::Sender<Phase>,
    waiting: AtomicUsize,
}

/// A place among the waiting requests, until it is dropped.
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

    /// Enters the loading phase. A loaded model stays loaded while the number of its workers
    /// changes.
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

    /// Reserves a place among at most `most` waiting requests; `None` if all are taken.
    pub(super) fn wait(&self, most: usize) -> Option<Waiting<'_>> {
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let place = Waiting(&self.waiting);
        (before < most).then_some(place)
    }

    pub(super) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed) as u64
    }

    /// Waits until the loading phase ends.
    pub(super) async fn settled(&self) {
        let mut phase = self.phase.subscribe();
        // Cannot fail: the sender lives as long as `self`.
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
        assert!(
            !progress.is_loading() && progress.wait(1).is_some(),
            "a loaded model stays loaded"
        );
        progress.set(Phase::Stopped);
        progress.begin();
        assert!(progress.is_loading());
    }
}
