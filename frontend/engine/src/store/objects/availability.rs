//! The last listing of a store, and whether it is reachable.

use std::collections::BTreeMap;
use std::io;

use parking_lot::{Mutex, MutexGuard};
use pharos::repository::Stamp;
use pharos::timeline::Instant;

use pharos_os::clock;

/// The time without requests after a failure, in nanoseconds.
const PAUSE: u64 = 5_000_000_000;

/// The last listing and the failures of a store.
#[derive(Debug)]
pub(super) struct Availability {
    store: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    names: Option<Vec<String>>,
    polled: Vec<(String, Stamp)>,
    /// The time and reason of the last failure; `None` while the store can be read.
    failure: Option<(Instant, String)>,
    /// The number of failed fetches of each model.
    failures: BTreeMap<String, u64>,
}

impl Availability {
    /// Creates the state of a store of this name that has not been read yet.
    pub(super) fn new(store: &str) -> Self {
        Self { store: store.to_owned(), state: Mutex::default() }
    }

    /// Returns the listed names, or the names of the last listing while the store cannot be read,
    /// and if `list` is `None`, because the server exits.
    pub(super) fn names_or(
        &self,
        list: impl FnOnce() -> Option<io::Result<Vec<String>>>,
    ) -> Vec<String> {
        let answer = self.answer(list);
        let mut state = self.state();
        if let Some(names) = answer {
            if names.is_empty() && state.names.as_ref().is_none_or(|last| !last.is_empty()) {
                tracing::warn!("'{}' has no models", self.store);
            }
            state.failures.retain(|model, _| names.contains(model));
            state.names = Some(names);
        }
        state.names.clone().unwrap_or_default()
    }

    /// Returns the listed fingerprints, or the fingerprints of the last listing, as
    /// [`Availability::names_or`] does.
    pub(super) fn poll_or(
        &self,
        list: impl FnOnce() -> Option<io::Result<Vec<(String, Stamp)>>>,
    ) -> Vec<(String, Stamp)> {
        let answer = self.answer(list);
        let mut state = self.state();
        if let Some(polled) = answer {
            state.names = Some(polled.iter().map(|(name, _)| name.clone()).collect());
            state.polled = polled;
        }
        state.polled.clone()
    }

    /// Returns the answer of the store; `None` if it fails or failed recently, or if the server
    /// exits, which is no failure.
    fn answer<T>(&self, request: impl FnOnce() -> Option<io::Result<T>>) -> Option<T> {
        self.check_pause().ok()?;
        let answer = request()?;
        self.record_result(answer.as_ref().err());
        answer.ok()
    }

    /// # Errors
    /// The store failed recently.
    pub(super) fn check_pause(&self) -> io::Result<()> {
        match &self.state().failure {
            Some((since, reason)) if clock::now().0.saturating_sub(since.0) < PAUSE => {
                Err(io::Error::other(reason.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Records whether the store has answered.
    pub(super) fn record_result(&self, error: Option<&io::Error>) {
        let mut state = self.state();
        match error {
            None if state.failure.take().is_some() => {
                tracing::info!("'{}' can be read again", self.store)
            }
            None => {}
            Some(error) => {
                if state.failure.is_none() {
                    tracing::error!(
                        "'{}' cannot be read; its models stay unchanged: {error}",
                        self.store
                    );
                }
                state.failure = Some((clock::now(), error.to_string()));
            }
        }
    }

    /// Returns why the store cannot be read.
    pub(super) fn failure(&self) -> Option<String> {
        self.state().failure.as_ref().map(|(_, reason)| reason.clone())
    }

    /// Returns whether the last listing contains a model.
    pub(super) fn has(&self, model: &str) -> bool {
        self.state().names.as_ref().is_some_and(|names| names.iter().any(|name| name == model))
    }

    /// Counts a failed fetch that may succeed later.
    pub(super) fn failed(&self, model: &str) {
        *self.state().failures.entry(model.to_owned()).or_default() += 1;
    }

    /// Returns the number of failed fetches of a model.
    pub(super) fn failures(&self, model: &str) -> u64 {
        self.state().failures.get(model).copied().unwrap_or(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn down<T>() -> Option<io::Result<T>> {
        Some(Err(io::Error::other("no answer")))
    }

    #[test]
    fn the_last_listing_is_used_while_the_store_is_down() {
        let availability = Availability::new("s3://b");
        assert!(
            availability.names_or(down).is_empty()
                && availability.failure().unwrap() == "no answer"
        );
        let never = || -> Option<io::Result<Vec<String>>> { panic!("request during the pause") };
        assert!(availability.names_or(never).is_empty());
        assert_eq!(availability.check_pause().unwrap_err().to_string(), "no answer");
        availability.record_result(None);
        let polled = vec![("m".to_owned(), Stamp::of(&1))];
        assert_eq!(availability.poll_or(|| Some(Ok(polled.clone()))), polled);
        assert!(
            availability.has("m") && !availability.has("n") && availability.failure().is_none()
        );
        assert_eq!(
            (availability.poll_or(down), availability.names_or(never)),
            (polled, vec!["m".to_owned()])
        );
        availability.record_result(None);
        assert!(
            availability.names_or(|| Some(Ok(Vec::new()))).is_empty() && !availability.has("m")
        );
    }

    #[test]
    fn the_exit_of_the_server_is_no_failure_of_the_store() {
        let availability = Availability::new("s3://b");
        availability.names_or(|| Some(Ok(vec!["m".to_owned()])));
        assert_eq!(
            (availability.names_or(|| None), availability.poll_or(|| None)),
            (vec!["m".to_owned()], Vec::new())
        );
        assert_eq!(availability.failure(), None);
    }

    #[test]
    fn failed_fetches_are_counted_by_model() {
        let availability = Availability::new("s3://b");
        availability.failed("m");
        availability.failed("m");
        assert_eq!((availability.failures("m"), availability.failures("n")), (2, 0));
        availability.names_or(|| Some(Ok(vec!["n".to_owned()])));
        assert_eq!(availability.failures("m"), 0, "the model was removed");
    }
}
