//! Polls the repositories. Loads new and changed models, and unloads removed ones.
//!
//! A change takes effect after two consecutive polls with the same result, so that a directory is not loaded while it is being
//! written (unless its writer pauses). The second poll follows after [`SETTLING`].

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pharos::repository::Stamp;
use pharos_os::{blocking, clock};

use super::control::LoadRequest;
use super::{Loader, Mode};

/// The time until a changed model is checked again.
const SETTLING: Duration = Duration::from_secs(1);

/// The fingerprint of every model's files.
pub(super) type Fingerprints = BTreeMap<String, Stamp>;

/// The results of earlier polls.
pub(super) struct Poll {
    /// The fingerprints at the last load.
    acted: Fingerprints,
    /// The fingerprints of the last poll.
    seen: Fingerprints,
}

/// The loads and unloads after a poll.
#[derive(Debug, Default, PartialEq, Eq)]
struct PollChanges {
    load: Vec<String>,
    unload: Vec<String>,
    /// Whether something has changed since the last poll and may still be changing.
    unsettled: bool,
}

impl Poll {
    pub(super) fn new(polled: Fingerprints) -> Self {
        Self { acted: polled.clone(), seen: polled }
    }

    fn next(&mut self, polled: Fingerprints) -> PollChanges {
        let mut due = PollChanges::default();
        let names: Vec<String> = polled.keys().chain(self.acted.keys()).cloned().collect();
        for name in names {
            let (now, acted) = (polled.get(&name), self.acted.get(&name));
            if now == acted {
                continue;
            }
            if now != self.seen.get(&name) {
                due.unsettled = true;
                continue;
            }
            match now {
                Some(stamp) => {
                    self.acted.insert(name.clone(), *stamp);
                    due.load.push(name);
                }
                None => {
                    self.acted.remove(&name);
                    due.unload.push(name);
                }
            }
        }
        self.seen = polled;
        due
    }
}

impl Loader {
    /// Returns the current fingerprints of the repositories. Blocks.
    ///
    /// # Errors
    /// A repository cannot be listed.
    pub(super) fn poll(&self) -> io::Result<Fingerprints> {
        self.stores.poll()
    }

    /// Polls until the server exits, in poll mode.
    pub(super) fn start_polling(self: &Arc<Self>, mut poll: Poll) {
        let Mode::Poll(interval) = self.settings.mode else { return };
        let loader = self.clone();
        self.runtime.spawn(async move {
            let mut pause = interval;
            loop {
                clock::sleep(pause).await;
                if loader.exiting.load(Ordering::Relaxed) {
                    return;
                }
                pause = interval;
                match loader.poll_blocking().await {
                    Ok(polled) => {
                        let due = poll.next(polled);
                        if due.unsettled {
                            pause = SETTLING.min(interval);
                        }
                        loader.act(due);
                    }
                    Err(error) => tracing::error!("cannot poll the repositories; models stay unchanged: {error}"),
                }
            }
        });
    }

    /// Calls [`Loader::poll`] on a thread for blocking work.
    pub(super) async fn poll_blocking(self: &Arc<Self>) -> io::Result<Fingerprints> {
        let loader = self.clone();
        blocking::run(move || loader.poll()).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Calls [`Sources::list`](super::Sources::list) on a thread for blocking work.
    pub(super) async fn list_blocking(&self) -> io::Result<BTreeMap<String, usize>> {
        let stores = self.stores.clone();
        blocking::run(move || stores.list()).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Starts tasks, so that a slow load does not delay the next poll.
    fn act(self: &Arc<Self>, due: PollChanges) {
        if !due.unload.is_empty() {
            tracing::info!(models = due.unload.join(", "), "models were removed from the repository");
            let loader = self.clone();
            tokio::spawn(async move { loader.unload_all_of(due.unload).await });
        }
        if !due.load.is_empty() {
            tracing::info!(models = due.load.join(", "), "models are new or changed in the repository");
            let loader = self.clone();
            let wanted =
                due.load.iter().map(|name| LoadRequest { by_itself: true, ..LoadRequest::new(name, None) }).collect();
            tokio::spawn(async move { loader.load_all_of(wanted).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polled(models: &[(&str, u8)]) -> Fingerprints {
        models.iter().map(|(name, stamp)| ((*name).to_owned(), Stamp::of(stamp))).collect()
    }

    fn names(all: &[&str]) -> Vec<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_change_seen_twice_takes_effect_once() {
        let mut poll = Poll::new(polled(&[("a", 1), ("b", 1)]));
        let unsettled = || PollChanges { unsettled: true, ..PollChanges::default() };
        assert_eq!(poll.next(polled(&[("a", 1), ("b", 1)])), PollChanges::default());
        // One model is changed, one is removed, one is new and still being written.
        assert_eq!(poll.next(polled(&[("a", 2), ("c", 1)])), unsettled());
        let due = PollChanges { load: names(&["a"]), unload: names(&["b"]), unsettled: true };
        assert_eq!(poll.next(polled(&[("a", 2), ("c", 2)])), due);
        assert_eq!(
            poll.next(polled(&[("a", 2), ("c", 2)])),
            PollChanges { load: names(&["c"]), ..PollChanges::default() }
        );
        assert_eq!(poll.next(polled(&[("a", 2), ("c", 2)])), PollChanges::default());
        // A model whose previous state was restored has not changed.
        assert_eq!(poll.next(polled(&[("a", 3), ("c", 2)])), unsettled());
        assert_eq!(poll.next(polled(&[("a", 2), ("c", 2)])), PollChanges::default());
    }
}
