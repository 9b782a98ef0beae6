//! Models that report their own readiness. A client's readiness request sends a question to the model; all requests that arrive
//! before its answer share it.

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
    wanted: AtomicBool,
    /// Whether a question is pending.
    asked: AtomicBool,
    answers: watch::Sender<bool>,
}

impl Readiness {
    pub(super) fn wanted(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Relaxed);
    }
}

impl Link {
    /// Records the model's answer.
    pub(crate) fn ready_reported(&self, ready: bool) {
        // In this order: a caller that finds a pending question has subscribed before the answer is published.
        self.readiness.asked.store(false, Ordering::SeqCst);
        self.readiness.answers.send_replace(ready);
    }

    /// Asks the model if it reports its readiness. The receiver gets the answer.
    fn ask_ready(&self) -> Option<watch::Receiver<bool>> {
        if !self.readiness.wanted.load(Ordering::Relaxed) {
            return None;
        }
        let answers = self.readiness.answers.subscribe();
        if !self.readiness.asked.swap(true, Ordering::SeqCst) {
            self.send(&ToWorker::AskReady);
        }
        Some(answers)
    }
}

/// Returns whether the models of all these workers report to be ready or report nothing. A timeout counts as not ready.
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
