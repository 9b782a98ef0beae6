//! Brings a model to its wanted versions, as `pharos::repository::changes` decides. New versions
//! become ready before old ones end; if one fails to load, the previous versions continue to serve.

use std::collections::BTreeMap;
use std::sync::Arc;

use pharos::metrics::cache::Cache;
use pharos::metrics::labels::ModelChange;
use pharos::metrics::record;
use pharos::repository::{Change, State, StateReason, VersionFingerprint, changes};

use super::Loader;
use super::prepare::Prepared;
use crate::serving::{RetireReason, Serving};
use crate::supervisor::{Ending, Instances};

/// What happens to serving versions whose successors cannot be loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OnLoadFailure {
    /// The versions continue to serve.
    #[default]
    Keep,
    /// The versions end, because their members have changed.
    Withdraw,
}

/// Versions that are ready to serve, and the reasons of failed versions. Removes the series of new
/// versions on drop.
struct Outcome {
    cache: Arc<Cache>,
    ready: Vec<Ready>,
    failed: BTreeMap<u64, String>,
    /// The instances that changes in place have removed.
    removed: Vec<Ending>,
}

/// A version that is ready to serve.
struct Ready {
    serving: Serving,
    /// Whether it was just loaded; otherwise its instances have served before.
    is_new: bool,
    /// Whether it continues the series of the serving version.
    goes_on: bool,
}

impl Drop for Outcome {
    fn drop(&mut self) {
        let new = self.ready.iter().filter(|ready| ready.is_new && !ready.goes_on);
        new.for_each(|ready| self.cache.model_unloaded(&ready.serving.series));
    }
}

impl Loader {
    /// Applies a prepared model, and waits for the instances that it has removed. Must be called
    /// with the model's lock. If the future is dropped before the change, nothing has changed
    /// except states that are LOADING.
    ///
    /// # Errors
    /// The reasons of versions that failed to load, by number.
    pub(super) async fn apply(
        self: &Arc<Self>,
        prepared: &Prepared,
        reload: bool,
        failing: OnLoadFailure,
    ) -> Result<(), BTreeMap<u64, String>> {
        let model = prepared.name.as_str();
        warn_of_missing(prepared);
        let running = self.models.snapshot().serving.get(model).cloned().unwrap_or_default();
        let fingerprints: BTreeMap<u64, VersionFingerprint> =
            running.iter().map(|(number, serving)| (*number, serving.fingerprint)).collect();
        let wanted: BTreeMap<u64, VersionFingerprint> = prepared
            .versions
            .iter()
            .map(|(number, version)| (*number, version.fingerprint))
            .collect();
        let mut plan = changes(&fingerprints, &wanted, reload);
        for (number, change) in &mut plan {
            let Some(runs) = running.get(number) else { continue };
            if *change == Change::Replace
                && Some(&runs.fingerprint) != wanted.get(number)
                && let Some(less) = self.change_when_complete(runs, prepared).await
            {
                *change = less;
            }
            let any_given_up = runs.instances().is_some_and(Instances::any_given_up);
            if any_given_up && matches!(change, Change::Keep | Change::Describe) {
                *change = Change::Resize;
            }
        }
        let mut outcome = Outcome {
            cache: self.cache().clone(),
            ready: Vec::new(),
            failed: BTreeMap::new(),
            removed: Vec::new(),
        };
        for (&number, &change) in &plan {
            self.perform(prepared, number, change, running.get(&number), &mut outcome).await;
        }
        let failed = outcome.failed.clone();
        let removed = std::mem::take(&mut outcome.removed);
        // All versions change or none does. If no version has served before, the loaded versions
        // serve.
        if failed.is_empty() || running.is_empty() {
            self.commit(prepared, &plan, outcome);
        } else {
            self.give_up(prepared, outcome);
            if failing == OnLoadFailure::Withdraw {
                self.withdraw_failed(model, &failed);
            }
        }
        for ending in removed {
            if !ending.wait().await {
                tracing::warn!(%model, "removed instances still execute requests; the load does not wait for them any longer");
            }
        }
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }

    /// Performs the part of a version's change that comes before the end of old versions.
    async fn perform(
        self: &Arc<Self>,
        prepared: &Prepared,
        number: u64,
        change: Change,
        runs: Option<&Arc<Serving>>,
        outcome: &mut Outcome,
    ) {
        let model = prepared.name.as_str();
        let mut follows = Ok(None);
        match (change, runs) {
            (Change::Keep | Change::Unload, _) => return,
            (Change::Describe | Change::Resize, Some(runs)) => {
                follows = self.follow(runs, prepared).await
            }
            (Change::Load, _) => self
                .models
                .change(|table| table.states.set(model, number, State::Loading, StateReason::None)),
            _ => {}
        }
        let is_new = !matches!(follows, Ok(Some(_)) | Err(_));
        let go_on = runs.filter(|_| change == Change::Resize).map(|runs| &runs.series);
        let result = match follows {
            Ok(Some((same, removed))) => {
                outcome.removed.push(removed);
                Ok(same)
            }
            Ok(None) => self.load_version(prepared, number, go_on).await,
            Err(reason) => Err(reason),
        };
        if change != Change::Describe {
            let recorded = if is_new { ModelChange::Load } else { ModelChange::Resize };
            record::model_changed(self.cache(), recorded, result.is_ok());
        }
        match result {
            Ok(serving) => outcome.ready.push(Ready { serving, is_new, goes_on: go_on.is_some() }),
            Err(reason) => {
                tracing::error!(%model, version = number, "model cannot be loaded: {reason}");
                outcome.failed.insert(number, reason);
            }
        }
    }

    /// Makes the ready versions serve, and ends replaced and unwanted versions, in one change of
    /// the table.
    fn commit(
        self: &Arc<Self>,
        prepared: &Prepared,
        plan: &BTreeMap<u64, Change>,
        mut outcome: Outcome,
    ) {
        let model = prepared.name.as_str();
        let ready = std::mem::take(&mut outcome.ready);
        for ready in &ready {
            self.cache().show_model(&ready.serving.series);
        }
        let mut gone = Vec::new();
        self.models.change(|table| {
            let mut serving = table.serving.remove(model).unwrap_or_default();
            for (number, reason) in &outcome.failed {
                table.states.set(
                    model,
                    *number,
                    State::Unavailable,
                    StateReason::Other(reason.clone()),
                );
            }
            for Ready { serving: ready, is_new, .. } in ready {
                let number = ready.model.version;
                table.states.set(model, number, State::Ready, StateReason::None);
                let old = serving.insert(number, Arc::new(ready));
                gone.extend(old.filter(|_| is_new).map(|old| (old, RetireReason::Replaced)));
            }
            table
                .states
                .forget_unavailable(model, |version| prepared.versions.contains_key(&version));
            for (number, _) in plan.iter().filter(|(_, change)| **change == Change::Unload) {
                table.states.set(model, *number, State::Unloading, StateReason::None);
                let unload = table.begin_unload(model, *number);
                gone.extend(
                    serving.remove(number).map(|old| (old, RetireReason::Outdated(unload))),
                );
            }
            // In the same change, so that a request of a sequence always finds the old version in
            // one of the two maps.
            gone.iter().for_each(|(old, _)| table.begin_ending(old));
            if !serving.is_empty() {
                table.serving.insert(model.to_owned(), serving);
            }
        });
        gone.into_iter().for_each(|(serving, ending)| self.models.retire(serving, ending));
    }

    /// Ends the new versions; the old ones continue to serve.
    fn give_up(self: &Arc<Self>, prepared: &Prepared, mut outcome: Outcome) {
        let model = prepared.name.as_str();
        let snapshot = self.models.snapshot();
        let serves = |number: u64| {
            snapshot.serving.get(model).is_some_and(|versions| versions.contains_key(&number))
        };
        let ready = std::mem::take(&mut outcome.ready);
        self.models.change(|table| {
            for (number, reason) in outcome.failed.iter().filter(|(number, _)| !serves(**number)) {
                table.states.set(
                    model,
                    *number,
                    State::Unavailable,
                    StateReason::Other(reason.clone()),
                );
            }
            for ready in ready.iter().filter(|ready| !serves(ready.serving.model.version)) {
                let reason = "loaded, but another version of the model failed to load";
                table.states.set(
                    model,
                    ready.serving.model.version,
                    State::Unavailable,
                    StateReason::Other(reason.to_owned()),
                );
            }
            table
                .states
                .forget_unavailable(model, |version| prepared.versions.contains_key(&version));
        });
        for Ready { serving, .. } in ready.into_iter().filter(|ready| ready.is_new) {
            self.models.retire(Arc::new(serving), RetireReason::Unserved);
        }
    }

    /// Ends serving versions that could not be reloaded.
    fn withdraw_failed(self: &Arc<Self>, model: &str, failed: &BTreeMap<u64, String>) {
        let mut gone = Vec::new();
        self.models.change(|table| {
            for (number, reason) in failed {
                table.states.set(
                    model,
                    *number,
                    State::Unavailable,
                    StateReason::Other(reason.clone()),
                );
                gone.extend(
                    table.serving.get_mut(model).and_then(|versions| versions.remove(number)),
                );
            }
            table.serving.retain(|_, versions| !versions.is_empty());
        });
        gone.into_iter().for_each(|serving| self.models.retire(serving, RetireReason::Failed));
    }
}

/// Warns about versions that the policy names but that have no directory; the other versions serve.
fn warn_of_missing(prepared: &Prepared) {
    let model = &prepared.name;
    let place = prepared.model_files.path().display();
    for version in &prepared.missing {
        tracing::warn!(%model, "version {version} is specified in 'version_policy', but '{place}' has no such directory");
    }
}
