//! Models that report their own readiness. A client's readiness request sends a question to the
//! model; all requests that arrive before its answer share it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pharos::wire::ToWorker;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::{Link, SharedLink};

/// The time limit of a readiness answer, as in Triton.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The readiness state of one worker.
#[derive(Default)]
pub(super) struct Readiness {
    /// Whether the model reports its readiness.
    supported: AtomicBool,
    /// Whether a question is pending.
    pending: AtomicBool,
    /// Whether the connection has ended, so that no more answers arrive.
    ended: AtomicBool,
    answers: watch::Sender<bool>,
}

impl Readiness {
    pub(super) fn set_supported(&self, supported: bool) {
        self.supported.store(supported, Ordering::Relaxed);
    }
}

impl Link {
    /// Records the model's answer.
    pub(crate) fn ready_reported(&self, ready: bool) {
        // In this order: a caller that finds a pending question has subscribed before the answer is
        // published.
        self.readiness.pending.store(false, Ordering::SeqCst);
        self.readiness.answers.send_replace(ready);
    }

    /// Answers pending and later questions with `false`: the connection has ended.
    pub(crate) fn end_readiness(&self) {
        self.readiness.ended.store(true, Ordering::SeqCst);
        self.ready_reported(false);
    }

    /// Asks the model if it reports its readiness. The receiver gets the answer.
    fn ask_ready(&self) -> Option<watch::Receiver<bool>> {
        if !self.readiness.supported.load(Ordering::Relaxed) {
            return None;
        }
        let answers = self.readiness.answers.subscribe();
        if !self.readiness.pending.swap(true, Ordering::SeqCst) {
            self.send(&ToWorker::CheckReadiness);
        }
        // Afterwards: either the end of the connection finds the question, or the question the end.
        if self.readiness.ended.load(Ordering::SeqCst) {
            self.ready_reported(false);
        }
        Some(answers)
    }
}

/// Returns whether the models of all these workers report to be ready or report nothing. A timeout
/// counts as not ready.
pub(crate) async fn all_ready(links: &[SharedLink]) -> bool {
    let answers: Vec<_> = links.iter().filter_map(|link| link.ask_ready()).collect();
    let end = Instant::now() + TIMEOUT;
    for mut answers in answers {
        if !matches!(timeout_at(end, answers.changed()).await, Ok(Ok(()))) || !*answers.borrow() {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::worker_end;

    #[tokio::test]
    async fn questions_end_with_the_connection() {
        let (link, _worker) = worker_end::connect();
        link.readiness.set_supported(true);
        let begun = Instant::now();
        let links = [link.clone()];
        let end = async { link.end_readiness() };
        assert!(!tokio::join!(all_ready(&links), end).0);
        assert!(!all_ready(&links).await);
        assert!(begun.elapsed() < TIMEOUT);
    }
}
