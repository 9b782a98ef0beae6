//! Models that have a word in whether they are ready: they are asked when a client asks, and all who ask before the answer has
//! come share it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pharos::wire::ToWorker;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::{Link, SharedLink};

/// How long a model may take to say that it is ready; Triton waits as long.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a worker has said.
#[derive(Default)]
pub(super) struct Readiness {
    /// Its model has a word in that.
    wanted: AtomicBool,
    /// A question is on its way.
    asked: AtomicBool,
    said: watch::Sender<bool>,
}

impl Readiness {
    pub(super) fn wanted(&self, wanted: bool) {
        self.wanted.store(wanted, Ordering::Relaxed);
    }
}

impl Link {
    /// Takes what the model says.
    pub(crate) fn says_ready(&self, ready: bool) {
        // In this order: who finds a question on its way has listened before its answer is told.
        self.readiness.asked.store(false, Ordering::SeqCst);
        self.readiness.said.send_replace(ready);
    }

    /// Asks, if the model wants that; what is given hears the answer.
    fn ask_ready(&self) -> Option<watch::Receiver<bool>> {
        if !self.readiness.wanted.load(Ordering::Relaxed) {
            return None;
        }
        let said = self.readiness.said.subscribe();
        if !self.readiness.asked.swap(true, Ordering::SeqCst) {
            self.send(&ToWorker::AskReady);
        }
        Some(said)
    }
}

/// Whether the models of all these workers say that they are ready, or say nothing of it. Who takes too long is not.
pub(crate) async fn all_say_ready(links: &[SharedLink]) -> bool {
    let said: Vec<_> = links.iter().filter_map(|link| link.ask_ready()).collect();
    let end = Instant::now() + PATIENCE;
    for mut said in said {
        if !matches!(timeout_at(end, said.changed()).await, Ok(Ok(()))) || !*said.borrow() {
            return false;
        }
    }
    true
}
