//! The states of model versions, and the choice of the version that serves a request. Pure data:
//! callers list directories, load models and report the outcome.

mod attempts;
pub mod memory_budget;
mod on_demand;
mod overrides;
mod plan;
mod uses;

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{ErrorCode, InferError, Reason};
use crate::model::VersionPolicy;

pub use attempts::{Attempts, Pauses};
pub use on_demand::{LOAD_PARAMETER, MIN_LOADED_PARAMETER, ON_DEMAND_VALUE};
pub use overrides::{Kind as LoadParameter, LoadScope, Override};
pub use plan::{Change, Stamp, VersionFingerprint, changes};
pub use uses::Uses;

/// Returns the versions to run, ascending, given the versions in the model's directory.
pub fn select(policy: &VersionPolicy, present: &[u64]) -> Vec<u64> {
    let mut versions = present.to_vec();
    versions.sort_unstable();
    versions.dedup();
    match policy {
        VersionPolicy::All => {}
        VersionPolicy::Latest(count) => {
            let count = usize::try_from(*count).unwrap_or(usize::MAX);
            versions.drain(..versions.len().saturating_sub(count));
        }
        VersionPolicy::Specific(wanted) => versions.retain(|version| wanted.contains(version)),
    }
    versions
}

/// Parses the name of a version directory: a number of 1 or greater without leading zeros. Other
/// directories are ignored.
pub fn parse_version_directory(name: &str) -> Option<u64> {
    let digits = name.bytes().all(|byte| byte.is_ascii_digit()) && !name.starts_with('0');
    // Versions are signed in the protocol.
    if digits {
        name.parse().ok().filter(|&version: &u64| i64::try_from(version).is_ok())
    } else {
        None
    }
}

/// Checks the name of a model, which becomes part of paths, labels and log lines.
///
/// # Errors
/// A text with the name, what is wrong with it and what is allowed.
pub fn check_model_name(name: &str) -> Result<(), String> {
    if name.trim().is_empty() {
        return Err("Model name cannot be empty. Please enter a valid name to deploy.".to_owned());
    }
    if name.contains('/') || name.contains('\\') || matches!(name.trim(), "." | "..") {
        return Err(format!(
            "invalid model name '{}', model name must not contain path traversal characters ('/', \
             '\\') and must not be '.' or '..'",
            name.escape_debug()
        ));
    }
    if name.len() > 255 || name.chars().any(char::is_control) {
        return Err(format!(
            "invalid model name '{}', model name must be at most 255 bytes without control \
             characters",
            name.escape_debug()
        ));
    }
    Ok(())
}

/// The state of a model version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum State {
    /// The state is not known.
    #[default]
    Unknown,
    /// The version accepts requests.
    Ready,
    /// The version was not loaded, failed to load, or was unloaded.
    Unavailable,
    /// The version is being loaded.
    Loading,
    /// The version completes its accepted requests and accepts no others.
    Unloading,
}

impl State {
    /// Every known state, in the order of a version's life.
    pub const ALL: [Self; 4] = [Self::Loading, Self::Ready, Self::Unloading, Self::Unavailable];

    /// Returns the name in the repository index.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "UNKNOWN",
            Self::Ready => "READY",
            Self::Unavailable => "UNAVAILABLE",
            Self::Loading => "LOADING",
            Self::Unloading => "UNLOADING",
        }
    }
}

/// The reason of the state of a version or of a whole model. [`StateReason::as_str`] is its text in
/// the repository index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StateReason {
    /// The state needs no reason.
    #[default]
    None,
    /// A request unloaded the version.
    Unloaded,
    /// The first request to the version loads it.
    OnDemand,
    /// Several repositories have the model.
    Duplicate,
    /// Several repositories had the model when it was to be loaded; the text names them.
    Ambiguous(String),
    /// Another reason, usually of a failed load.
    Other(String),
}

impl StateReason {
    /// Returns the text in the repository index; empty for [`StateReason::None`].
    pub fn as_str(&self) -> &str {
        match self {
            Self::None => "",
            Self::Unloaded => "unloaded",
            Self::OnDemand => "loaded on demand",
            Self::Duplicate => DUPLICATE,
            Self::Ambiguous(text) | Self::Other(text) => text,
        }
    }

    /// Returns whether there is a reason.
    pub fn is_some(&self) -> bool {
        *self != Self::None
    }
}

impl fmt::Display for StateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The text for a model that is in several repositories.
pub const DUPLICATE: &str = "model appears in two or more repositories";

/// The state of a version and its reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VersionStatus {
    /// The state.
    pub state: State,
    /// The reason.
    pub reason: StateReason,
}

/// The state of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelStatus {
    /// The versions, by number.
    pub versions: BTreeMap<u64, VersionStatus>,
    /// Why the model as a whole could not be loaded, for example because of an invalid
    /// configuration or a lack of versions.
    pub failure: StateReason,
    /// Whether its latest load or reload failed, also if earlier versions continue to serve. An
    /// unload sets it back.
    pub load_failed: bool,
    /// Whether it was unloaded and no load has changed its versions since: those that could not be
    /// loaded keep their reason, but do not count for the readiness of the server.
    pub unloaded: bool,
}

/// One line of the repository index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// The model's name.
    pub name: String,
    /// The version; `None` for a model without known versions.
    pub version: Option<u64>,
    /// The state; `None` for a model that was never loaded.
    pub state: Option<State>,
    /// The reason of the state.
    pub reason: StateReason,
}

/// The states of all models.
#[derive(Clone, Debug, Default)]
pub struct States {
    models: BTreeMap<String, ModelStatus>,
}

impl States {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a model, if it is not known yet.
    pub fn add(&mut self, model: &str) {
        self.entry(model);
    }

    /// Removes a model.
    pub fn remove(&mut self, model: &str) {
        self.models.remove(model);
    }

    /// Sets the state of a version.
    pub fn set(&mut self, model: &str, version: u64, state: State, reason: StateReason) {
        let status = self.entry(model);
        status.failure = StateReason::None;
        status.unloaded = false;
        status.versions.insert(version, VersionStatus { state, reason });
    }

    /// Removes the versions that are not available, unless they were unloaded by a request or
    /// `keep` returns true. A version without a directory cannot be loaded, and the reason why its
    /// last load failed no longer says why.
    pub fn forget_unavailable(&mut self, model: &str, keep: impl Fn(u64) -> bool) {
        let Some(status) = self.models.get_mut(model) else { return };
        status.versions.retain(|version, status| {
            status.state != State::Unavailable
                || status.reason == StateReason::Unloaded
                || keep(*version)
        });
    }

    /// Records why the model as a whole cannot be loaded, in place of the reasons why its versions
    /// could not. Running versions continue to serve.
    pub fn fail(&mut self, model: &str, reason: StateReason) {
        self.forget_unavailable(model, |_| false);
        let status = self.entry(model);
        status.failure = reason;
        status.load_failed = true;
        status.unloaded = false;
    }

    /// Records whether the latest load or reload of a model succeeded. Does nothing if the model is
    /// not known.
    pub fn load_ended(&mut self, model: &str, succeeded: bool) {
        if let Some(status) = self.models.get_mut(model) {
            status.load_failed = !succeeded;
        }
    }

    /// Records that the model is unloaded, not only withdrawn: versions that could not be loaded no
    /// longer count.
    pub fn mark_unloaded(&mut self, model: &str) {
        if let Some(status) = self.models.get_mut(model) {
            status.unloaded = true;
        }
    }

    /// Records that several repositories have the model, so that it cannot be loaded. The index
    /// shows this in place of versions.
    pub fn mark_duplicate(&mut self, model: &str) {
        *self.entry(model) = ModelStatus {
            failure: StateReason::Duplicate,
            load_failed: true,
            ..ModelStatus::default()
        };
    }

    /// Begins to unload a model: ready versions become unloading, loading versions become
    /// unavailable, and a model without known versions is removed.
    pub fn withdraw(&mut self, model: &str) {
        let Some(status) = self.models.get_mut(model) else { return };
        if status.versions.is_empty() {
            self.remove(model);
            return;
        }
        status.failure = StateReason::None;
        status.load_failed = false;
        for version in status.versions.values_mut() {
            match version.state {
                State::Ready => {
                    *version = VersionStatus { state: State::Unloading, reason: StateReason::None }
                }
                State::Loading => {
                    *version =
                        VersionStatus { state: State::Unavailable, reason: StateReason::Unloaded };
                }
                State::Unknown | State::Unavailable | State::Unloading => {}
            }
        }
    }

    /// Records that an unloading version has completed its requests, with the reason of its new
    /// state. Does nothing if the version is loading or ready again.
    pub fn unloaded(&mut self, model: &str, version: u64, reason: StateReason) {
        let status =
            self.models.get_mut(model).and_then(|status| status.versions.get_mut(&version));
        if let Some(status) = status.filter(|status| status.state == State::Unloading) {
            *status = VersionStatus { state: State::Unavailable, reason };
        }
    }

    /// Removes a version that has completed its requests and can no longer be loaded, if it is
    /// unloading.
    pub fn forget_unloading(&mut self, model: &str, version: u64) {
        if let Some(status) = self.models.get_mut(model) {
            status
                .versions
                .retain(|number, status| *number != version || status.state != State::Unloading);
        }
    }

    fn entry(&mut self, model: &str) -> &mut ModelStatus {
        self.models.entry(model.to_owned()).or_default()
    }

    /// Returns the state of a model.
    pub fn model(&self, name: &str) -> Option<&ModelStatus> {
        self.models.get(name)
    }

    /// Returns all models by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &ModelStatus)> {
        self.models.iter().map(|(name, status)| (name.as_str(), status))
    }

    /// Returns the ready versions of a model, ascending; none for an unknown model.
    pub fn ready_versions(&self, model: &str) -> impl DoubleEndedIterator<Item = u64> + '_ {
        let versions = self.models.get(model).into_iter().flat_map(|status| &status.versions);
        versions.filter(|(_, status)| status.state == State::Ready).map(|(version, _)| *version)
    }

    /// Returns whether every version of every model is ready or was unloaded: the readiness of the
    /// server. Models for which `optional` returns true do not count.
    pub fn all_ready(&self, optional: impl Fn(&str) -> bool) -> bool {
        let mut required = self.models.iter().filter(|(name, _)| !optional(name));
        required.all(|(_, model)| {
            !model.failure.is_some()
                && model.versions.values().all(|status| match status.state {
                    State::Ready => true,
                    State::Unavailable => model.unloaded || status.reason == StateReason::Unloaded,
                    State::Unknown | State::Loading | State::Unloading => false,
                })
        })
    }

    /// Returns the version that serves a request. `version` is the client's text; empty means the
    /// highest ready version.
    ///
    /// # Errors
    /// As Triton: unknown model and invalid version 400, unknown version and no ready version 404,
    /// version not ready 503.
    pub fn lookup(&self, model: &str, version: &str) -> Result<u64, InferError> {
        let unknown = |code, reason, what: &str| {
            Err(InferError::new(
                code,
                reason,
                format!("Request for unknown model: '{model}' {what}"),
            ))
        };
        let Some(status) = self.models.get(model) else {
            return unknown(ErrorCode::InvalidArg, Reason::UnknownModel, "is not found");
        };
        if version.is_empty() {
            return match self.ready_versions(model).next_back() {
                Some(version) => Ok(version),
                None => unknown(ErrorCode::NotFound, Reason::NotReady, "has no available versions"),
            };
        }
        let number = parse_version(version)?;
        match status.versions.get(&number) {
            None => unknown(
                ErrorCode::NotFound,
                Reason::UnknownModel,
                &format!("version {number} is not found"),
            ),
            Some(status) if status.state == State::Ready => Ok(number),
            Some(_) => Err(not_at_ready_state(model, number)),
        }
    }

    /// Returns the repository index, ordered by name and version; with `ready`, only versions that
    /// accept requests.
    pub fn index(&self, ready: bool) -> Vec<IndexEntry> {
        let mut entries = Vec::new();
        for (name, model) in &self.models {
            for (version, status) in &model.versions {
                if !ready || status.state == State::Ready {
                    entries.push(IndexEntry {
                        name: name.clone(),
                        version: Some(*version),
                        state: Some(status.state),
                        reason: status.reason.clone(),
                    });
                }
            }
            // Triton lists a model that several repositories have in both forms of the index.
            if model.versions.is_empty() && (!ready || model.failure == StateReason::Duplicate) {
                entries.push(IndexEntry {
                    name: name.clone(),
                    version: None,
                    state: model.failure.is_some().then_some(State::Unavailable),
                    reason: model.failure.clone(),
                });
            }
        }
        entries
    }
}

/// Returns the error for a version that exists but is not ready.
pub fn not_at_ready_state(model: &str, version: u64) -> InferError {
    InferError::not_ready(format!(
        "Request for unknown model: '{model}' version {version} is not at ready state"
    ))
}

/// Parses a version as a client writes it.
///
/// # Errors
/// INVALID_ARG with Triton's text if it is not an integer of 0 or greater.
pub fn parse_version(text: &str) -> Result<u64, InferError> {
    let details = match text.parse::<i64>() {
        Ok(number) if number >= 0 => return Ok(number.unsigned_abs()),
        Ok(_) => "",
        // Triton's text contains the C++ function that failed.
        Err(_) => " (details: stol)",
    };
    Err(InferError::invalid(format!(
        "failed to get model version from specified version string '{text}'{details}, version \
         should be an integral value > 0"
    )))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use super::*;

    #[test]
    fn policies_select_versions() {
        for (policy, present, expected) in [
            (VersionPolicy::Latest(1), &[3, 1, 2][..], &[3][..]),
            (VersionPolicy::Latest(2), &[3, 1, 20], &[3, 20]),
            (VersionPolicy::Latest(9), &[2, 1], &[1, 2]),
            (VersionPolicy::Latest(0), &[2, 1], &[]),
            (VersionPolicy::All, &[5, 1, 5], &[1, 5]),
            (VersionPolicy::Specific(vec![7, 1]), &[1, 2, 3], &[1]),
        ] {
            assert_eq!(select(&policy, present), expected, "{policy:?} of {present:?}");
        }
    }

    #[test]
    fn version_directories_are_numbers() {
        for (name, expected) in [
            ("1", Some(1)),
            ("20240131", Some(20_240_131)),
            ("9223372036854775807", Some(i64::MAX as u64)),
            ("9223372036854775808", None),
            ("0", None),
            ("01", None),
            ("+1", None),
            ("-1", None),
            ("1a", None),
            ("", None),
            ("٣", None),
        ] {
            assert_eq!(parse_version_directory(name), expected, "{name}");
        }
    }

    #[test]
    fn checks_model_names() {
        for name in ["simple", "...", "..my_model", "model..1", "mit leerzeichen", "日本"] {
            assert_eq!(check_model_name(name), Ok(()), "{name}");
        }
        for name in ["", "  ", "a/b", "..", ".", ".. ", "a\\b", "a\nb", "\0", &"x".repeat(256)] {
            assert!(check_model_name(name).is_err(), "{name:?}");
        }
        let error = check_model_name("a/../b").unwrap_err();
        assert_eq!(
            error,
            "invalid model name 'a/../b', model name must not contain path traversal characters \
             ('/', '\\') and must not be '.' or '..'"
        );
    }

    fn other(text: &str) -> StateReason {
        StateReason::Other(text.to_owned())
    }

    fn states() -> States {
        let mut states = States::new();
        states.set("simple", 1, State::Ready, StateReason::None);
        states.set("simple", 2, State::Ready, StateReason::None);
        states.set("simple", 3, State::Loading, StateReason::None);
        states.set("gone", 1, State::Unavailable, StateReason::Unloaded);
        states.fail("broken", other("config.pbtxt:1:1: expected a field name, found '}'"));
        states.add("never");
        states
    }

    #[test]
    fn requests_find_their_version() {
        let states = states();
        for (model, version, expected) in
            [("simple", "", 2), ("simple", "1", 1), ("simple", "01", 1)]
        {
            assert_eq!(states.lookup(model, version).unwrap(), expected);
        }
        let unknown = Reason::UnknownModel;
        let not_ready = Reason::NotReady;
        let invalid = Reason::Invalid;
        for (model, version, status, reason, expected) in [
            ("foo", "", 400, unknown, "Request for unknown model: 'foo' is not found"),
            ("foo", "1", 400, unknown, "Request for unknown model: 'foo' is not found"),
            (
                "simple",
                "99",
                404,
                unknown,
                "Request for unknown model: 'simple' version 99 is not found",
            ),
            (
                "simple",
                "0",
                404,
                unknown,
                "Request for unknown model: 'simple' version 0 is not found",
            ),
            (
                "gone",
                "",
                404,
                not_ready,
                "Request for unknown model: 'gone' has no available versions",
            ),
            (
                "broken",
                "",
                404,
                not_ready,
                "Request for unknown model: 'broken' has no available versions",
            ),
            (
                "simple",
                "3",
                503,
                not_ready,
                "Request for unknown model: 'simple' version 3 is not at ready state",
            ),
            (
                "gone",
                "1",
                503,
                not_ready,
                "Request for unknown model: 'gone' version 1 is not at ready state",
            ),
            (
                "simple",
                "1x",
                400,
                invalid,
                "failed to get model version from specified version string '1x' (details: stol), \
                 version should be an integral value > 0",
            ),
            (
                "simple",
                "-1",
                400,
                invalid,
                "failed to get model version from specified version string '-1', version should \
                 be an integral value > 0",
            ),
        ] {
            let error = states.lookup(model, version).unwrap_err();
            assert_eq!(error.message, expected);
            assert_eq!(
                (error.code.http_status(), error.reason),
                (status, reason),
                "{model} {version}"
            );
        }
    }

    #[test]
    fn the_index_lists_every_model() {
        let lines = |ready| -> Vec<String> {
            states()
                .index(ready)
                .into_iter()
                .map(|entry| {
                    let version =
                        entry.version.map_or(String::new(), |version| version.to_string());
                    format!(
                        "{} {version} {} {}",
                        entry.name,
                        entry.state.map_or("", State::as_str),
                        entry.reason
                    )
                })
                .collect()
        };
        assert_eq!(
            lines(false),
            [
                "broken  UNAVAILABLE config.pbtxt:1:1: expected a field name, found '}'",
                "gone 1 UNAVAILABLE unloaded",
                "never   ",
                "simple 1 READY ",
                "simple 2 READY ",
                "simple 3 LOADING ",
            ]
        );
        assert_eq!(lines(true), ["simple 1 READY ", "simple 2 READY "]);
    }

    #[test]
    fn failures_end_with_an_unload() {
        let mut states = States::new();
        states.set("broken", 1, State::Unavailable, other("a bad file"));
        states.set("broken", 2, State::Unavailable, StateReason::OnDemand);
        states.load_ended("broken", false);
        assert!(!states.all_ready(|_| false));
        states.mark_unloaded("broken");
        states.withdraw("broken");
        let reason = |version| states.model("broken").unwrap().versions[&version].reason.clone();
        assert_eq!([reason(1), reason(2)], [other("a bad file"), StateReason::OnDemand]);
        assert!(states.all_ready(|_| false) && !states.model("broken").unwrap().load_failed);
        states.set("broken", 1, State::Unavailable, other("still bad"));
        assert!(!states.all_ready(|_| false));
        states.mark_unloaded("unknown");
        assert!(states.model("unknown").is_none());
    }

    #[test]
    fn withdrawn_versions_complete_their_requests() {
        let mut states = states();
        states.set("simple", 4, State::Unavailable, other("broken"));
        states.withdraw("simple");
        states.withdraw("never");
        states.withdraw("unknown");
        let of =
            |states: &States, version| states.model("simple").unwrap().versions[&version].clone();
        let now = |states: &States| [1, 2, 3, 4].map(|version| of(states, version).state);
        assert_eq!(
            now(&states),
            [State::Unloading, State::Unloading, State::Unavailable, State::Unavailable]
        );
        assert_eq!(
            (of(&states, 3).reason, of(&states, 4).reason),
            (StateReason::Unloaded, other("broken"))
        );
        assert!(states.model("never").is_none());
        states.set("simple", 2, State::Ready, StateReason::None);
        (1..=4).for_each(|version| states.unloaded("simple", version, StateReason::Unloaded));
        assert_eq!(
            now(&states),
            [State::Unavailable, State::Ready, State::Unavailable, State::Unavailable]
        );
        assert_eq!(of(&states, 1).reason, StateReason::Unloaded);
        states.withdraw("simple");
        (1..=4).for_each(|version| states.forget_unloading("simple", version));
        let left: Vec<u64> = states.model("simple").unwrap().versions.keys().copied().collect();
        assert_eq!(left, [1, 3, 4], "version 2 was unloading");
    }

    #[test]
    fn the_latest_load_of_a_model_fails_or_succeeds() {
        let mut states = states();
        let failed = |states: &States| -> Vec<String> {
            states
                .iter()
                .filter(|(_, model)| model.load_failed)
                .map(|(name, _)| name.to_owned())
                .collect()
        };
        assert_eq!(failed(&states), ["broken"]);
        states.load_ended("simple", false);
        states.load_ended("unknown", false);
        states.mark_duplicate("twice");
        assert_eq!(failed(&states), ["broken", "simple", "twice"]);
        assert!(states.model("unknown").is_none());
        states.load_ended("broken", true);
        states.withdraw("simple");
        assert_eq!(failed(&states), ["twice"], "an unload ends the failure");
    }

    #[test]
    fn readiness_ignores_only_unloaded_versions() {
        let mut states = states();
        assert!(!states.all_ready(|_| false));
        states.remove("broken");
        assert!(!states.all_ready(|_| false), "version 3 is still loading");
        states.set("simple", 3, State::Ready, StateReason::None);
        assert!(states.all_ready(|_| false));
        states.fail("simple", other("lost"));
        assert!(!states.all_ready(|_| false));
        states.set("simple", 3, State::Ready, StateReason::None);
        assert!(states.all_ready(|_| false), "a version that becomes ready clears the failure");
    }
}
