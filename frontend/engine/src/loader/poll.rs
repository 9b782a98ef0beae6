//! Polls the repositories. Loads new and changed models, and unloads removed ones.
//!
//! A change takes effect after two consecutive polls with the same result, so that a directory is
//! not loaded while it is being written (unless its writer pauses). The second poll follows after
//! [`SETTLING`].
//!
//! A load that has failed is repeated, with growing pauses ([`PAUSES`]): what it lacked, such as a
//! permission or memory, may be there later without a change of the files.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pharos::repository::{Attempts, Pauses, Stamp};
use pharos::timeline::Instant;
use pharos_os::{blocking, clock};
use tokio::sync::mpsc;

use super::{LoadRequest, Loaded, Loader, Mode};

/// The time until a changed model is checked again.
const SETTLING: Duration = Duration::from_secs(1);

/// How long a failed load is not repeated while the files of the model stay the same.
const PAUSES: Pauses = Pauses { first: Duration::from_secs(10), longest: Duration::from_secs(300) };

/// The fingerprint of every model's files.
pub(super) type Fingerprints = BTreeMap<String, Stamp>;

/// The results of loads, by model.
pub(super) type Results = BTreeMap<String, Loaded>;

/// The results of earlier polls, and of the loads that followed them.
pub(super) struct Poll {
    /// The fingerprints at the last load.
    acted: Fingerprints,
    /// The fingerprints of the last poll.
    seen: Fingerprints,
    /// The models whose last load has failed.
    failed: BTreeMap<String, Attempts>,
    /// The models that are being loaded after a poll.
    loading: BTreeSet<String>,
}

/// The loads and unloads after a poll.
#[derive(Debug, Default, PartialEq, Eq)]
struct PollChanges {
    load: Vec<String>,
    unload: Vec<String>,
    /// The models whose failed loads are repeated.
    repeat: Vec<String>,
    /// Whether something has changed since the last poll and may still be changing.
    unsettled: bool,
}

impl Poll {
    pub(super) fn new(polled: Fingerprints) -> Self {
        Self {
            acted: polled.clone(),
            seen: polled,
            failed: BTreeMap::new(),
            loading: BTreeSet::new(),
        }
    }

    /// Records the results of loads, also of members of ensembles.
    pub(super) fn record(&mut self, now: Instant, results: &Results) {
        for (name, result) in results {
            self.loading.remove(name);
            match result {
                Err(error) if self.acted.contains_key(name) => {
                    let attempts =
                        self.failed.entry(name.clone()).or_insert_with(|| Attempts::new(PAUSES));
                    attempts.failed(now, &error.message);
                }
                _ => drop(self.failed.remove(name)),
            }
        }
    }

    fn next(&mut self, now: Instant, polled: Fingerprints) -> PollChanges {
        let mut due = PollChanges::default();
        let names: Vec<String> = polled.keys().chain(self.acted.keys()).cloned().collect();
        for name in names {
            let current = polled.get(&name);
            if current == self.acted.get(&name) {
                continue;
            }
            if current != self.seen.get(&name) {
                due.unsettled = true;
                continue;
            }
            self.failed.remove(&name);
            match current {
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
        self.loading.extend(due.load.iter().cloned());
        let over = self.failed.iter().filter(|(name, attempts)| {
            attempts.pause(now).is_none()
                && !self.loading.contains(*name)
                && polled.get(*name) == self.acted.get(*name)
        });
        due.repeat = over.map(|(name, _)| name.clone()).collect();
        self.loading.extend(due.repeat.iter().cloned());
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
        let (sender, mut results) = mpsc::unbounded_channel();
        self.runtime.spawn(async move {
            let mut pause = interval;
            loop {
                clock::sleep(pause).await;
                if loader.is_exiting() {
                    return;
                }
                pause = interval;
                while let Ok(results) = results.try_recv() {
                    poll.record(clock::now(), &results);
                }
                match loader.poll_blocking().await {
                    Ok(polled) => {
                        let due = poll.next(clock::now(), polled);
                        if due.unsettled {
                            pause = SETTLING.min(interval);
                        }
                        loader.act(due, &sender);
                    }
                    Err(error) => tracing::error!(
                        "cannot poll the repositories; models stay unchanged: {error}"
                    ),
                }
            }
        });
    }

    /// Calls [`Loader::poll`] on a thread for blocking work.
    pub(super) async fn poll_blocking(self: &Arc<Self>) -> io::Result<Fingerprints> {
        let loader = self.clone();
        blocking::run(move || loader.poll())
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Calls [`Sources::list`](super::Sources::list) on a thread for blocking work.
    pub(super) async fn list_blocking(&self) -> io::Result<BTreeMap<String, usize>> {
        let stores = self.stores.clone();
        blocking::run(move || stores.list())
            .await
            .unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Starts tasks, so that a slow load does not delay the next poll. They send the results of
    /// loads.
    fn act(self: &Arc<Self>, due: PollChanges, results: &mpsc::UnboundedSender<Results>) {
        if !due.unload.is_empty() {
            tracing::info!(
                models = due.unload.join(", "),
                "models were removed from the repository"
            );
            let loader = self.clone();
            tokio::spawn(async move { loader.unload_all_of(due.unload).await });
        }
        if !due.load.is_empty() {
            tracing::info!(
                models = due.load.join(", "),
                "models are new or changed in the repository"
            );
        }
        if !due.repeat.is_empty() {
            tracing::info!(
                models = due.repeat.join(", "),
                "models that could not be loaded are tried again"
            );
        }
        let all = due.load.iter().chain(&due.repeat);
        let wanted: Vec<LoadRequest> = all
            .map(|name| LoadRequest { by_itself: true, ..LoadRequest::new(name, None) })
            .collect();
        if !wanted.is_empty() {
            let loader = self.clone();
            let results = results.clone();
            // The receiver is dropped when the server exits.
            tokio::spawn(async move { results.send(loader.load_all_of(wanted).await) });
        }
    }
}

#[cfg(test)]
mod tests {
    use pharos::error::InferError;

    use super::*;

    fn polled(models: &[(&str, u8)]) -> Fingerprints {
        models.iter().map(|(name, stamp)| ((*name).to_owned(), Stamp::of(stamp))).collect()
    }

    fn names(all: &[&str]) -> Vec<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    fn at(seconds: u64) -> Instant {
        Instant(seconds * 1_000_000_000)
    }

    #[test]
    fn a_change_seen_twice_takes_effect_once() {
        let mut poll = Poll::new(polled(&[("a", 1), ("b", 1)]));
        let unsettled = || PollChanges { unsettled: true, ..PollChanges::default() };
        let mut next = |models: &[(&str, u8)]| poll.next(at(0), polled(models));
        assert_eq!(next(&[("a", 1), ("b", 1)]), PollChanges::default());
        // One model is changed, one is removed, one is new and still being written.
        assert_eq!(next(&[("a", 2), ("c", 1)]), unsettled());
        let due = PollChanges {
            load: names(&["a"]),
            unload: names(&["b"]),
            unsettled: true,
            ..PollChanges::default()
        };
        assert_eq!(next(&[("a", 2), ("c", 2)]), due);
        assert_eq!(
            next(&[("a", 2), ("c", 2)]),
            PollChanges { load: names(&["c"]), ..PollChanges::default() }
        );
        assert_eq!(next(&[("a", 2), ("c", 2)]), PollChanges::default());
        // A model whose previous state was restored has not changed.
        assert_eq!(next(&[("a", 3), ("c", 2)]), unsettled());
        assert_eq!(next(&[("a", 2), ("c", 2)]), PollChanges::default());
    }

    #[test]
    fn a_failed_load_is_repeated_after_a_pause_until_it_succeeds() {
        let files = || polled(&[("a", 1), ("b", 1)]);
        let mut poll = Poll::new(files());
        let failed =
            || Results::from([("a".to_owned(), Err(InferError::internal("no permission")))]);
        let repeat = || PollChanges { repeat: names(&["a"]), ..PollChanges::default() };
        poll.record(at(100), &failed());
        assert_eq!(poll.next(at(109), files()), PollChanges::default());
        assert_eq!(poll.next(at(110), files()), repeat());
        // It is not repeated while it runs.
        assert_eq!(poll.next(at(200), files()), PollChanges::default());
        poll.record(at(200), &failed());
        assert_eq!(poll.next(at(219), files()), PollChanges::default());
        assert_eq!(poll.next(at(220), files()), repeat());
        poll.record(at(221), &Results::from([("a".to_owned(), Ok(()))]));
        assert_eq!(poll.next(at(10_000), files()), PollChanges::default());
    }

    #[test]
    fn a_change_of_the_files_is_not_a_repetition() {
        let failed =
            || Results::from([("a".to_owned(), Err(InferError::internal("no permission")))]);
        let mut poll = Poll::new(polled(&[("a", 1)]));
        poll.record(at(100), &failed());
        assert!(
            poll.next(at(110), polled(&[("a", 2)])).unsettled,
            "a model is repeated while it is written"
        );
        assert_eq!(
            poll.next(at(111), polled(&[("a", 2)])),
            PollChanges { load: names(&["a"]), ..PollChanges::default() }
        );
        assert_eq!(
            poll.next(at(200), polled(&[("a", 2)])),
            PollChanges::default(),
            "the load is still running"
        );
        poll.record(at(200), &failed());
        // A removed model is forgotten, also if the result of its load comes later.
        let _ = poll.next(at(201), polled(&[]));
        assert_eq!(poll.next(at(202), polled(&[])).unload, names(&["a"]));
        poll.record(at(203), &failed());
        assert_eq!(poll.next(at(1000), polled(&[])), PollChanges::default());
    }
}
