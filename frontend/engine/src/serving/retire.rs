//! Ends versions that no longer serve: answers accepted requests, lets sequences end, then stops
//! the workers.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use pharos::id::{CorrelationId, ModelVersion};
use pharos::metrics::labels::ModelChange;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::Scheduling;
use pharos::repository::{State, StateReason};
use pharos_os::{blocking, clock};

use super::{Executor, ModelTable, Serving, Snapshot};

/// The interval of checking whether a version can end.
const LOOK: Duration = Duration::from_millis(5);

/// The maximum number of unloaded models whose state is kept although no repository contains them.
const MAX_UNLOADED: usize = 1000;

/// The reason why a version no longer serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetireReason {
    /// Another version took its place. Its sequences continue until they end or reach the idle
    /// limit.
    Replaced,
    /// Other versions serve, but no longer this one; its sequences continue too. The number
    /// identifies the unload.
    Outdated(u64),
    /// The model was unloaded. The number identifies the unload.
    Unloaded(u64),
    /// The version can no longer serve.
    Failed,
    /// The version never served.
    Unserved,
}

/// A version that has left the table and has not ended.
pub(super) struct Retired {
    pub(super) model: ModelVersion,
    executor: Weak<Executor>,
    served: bool,
}

impl Retired {
    /// Returns `None` if it has ended.
    pub(super) fn executor(&self) -> Option<Arc<Executor>> {
        self.executor.upgrade()
    }

    /// Returns `None` if it has ended or never served.
    pub(super) fn served(&self) -> Option<Arc<Executor>> {
        self.executor().filter(|_| self.served)
    }
}

impl Snapshot {
    /// Begins the unload of a serving version. Returns the number of this unload.
    pub(crate) fn begin_unload(&mut self, model: &str, version: u64) -> u64 {
        let number = self.unloads;
        self.unloads += 1;
        self.unloading.insert(ModelVersion::new(model, version), number);
        number
    }

    /// Handles the end of an unload of a model that no repository contains. Its versions stay
    /// known, so that requests get the same error as for any unloaded model, but only those of the
    /// latest [`MAX_UNLOADED`] models.
    pub(crate) fn drop_unloaded(&mut self, model: &str) {
        let versions = self.states.model(model).map(|status| &status.versions);
        if self.namespaces || versions.is_none_or(BTreeMap::is_empty) {
            self.states.remove(model);
            return;
        }
        if versions.is_some_and(|versions| {
            versions.values().any(|version| version.state != State::Unavailable)
        }) {
            // It is being loaded again.
            return;
        }
        self.keep(model);
        self.unloaded_without_files.push_back(model.to_owned());
        if self.unloaded_without_files.len() > MAX_UNLOADED {
            self.unloaded_without_files
                .pop_front()
                .iter()
                .for_each(|oldest| self.states.remove(oldest));
        }
    }

    /// Removes a model from the list of unloaded models without files because it is being loaded.
    pub(crate) fn keep(&mut self, model: &str) {
        self.unloaded_without_files.retain(|other| other != model);
    }

    /// Keeps a version that leaves the table for its requests in flight and its sequences.
    pub(crate) fn begin_ending(&mut self, serving: &Arc<Serving>) {
        if has_sequences(serving) {
            self.ending.entry(serving.model.name.to_string()).or_default().push(serving.clone());
        }
    }

    /// Returns a replaced version (number `version`, or any if empty) that began the sequence with
    /// this id. Returns `None` if the serving version has begun such a sequence since.
    pub(super) fn with_sequence(
        &self,
        name: &str,
        version: &str,
        id: &CorrelationId,
    ) -> Option<Arc<Serving>> {
        let mut all = self.ending_with(name, version, id).peekable();
        all.peek()?;
        if self.serving(name, version).is_ok_and(|serving| has_sequence(&serving, id)) {
            return None;
        }
        all.next().cloned()
    }

    /// Ends the sequence with this id in the replaced versions, because another one begins: it must
    /// not be continued if the new one ends first.
    pub(super) fn begin_sequence(&self, name: &str, version: &str, id: &CorrelationId) {
        for serving in self.ending_with(name, version, id) {
            if let Some(driver) = serving.driver() {
                driver.end_sequence(id);
            }
        }
    }

    /// Returns the replaced versions (number `version`, or any if empty) that run the sequence with
    /// this id, the last one first.
    fn ending_with(
        &self,
        name: &str,
        version: &str,
        id: &CorrelationId,
    ) -> impl Iterator<Item = &Arc<Serving>> {
        let known = !id.is_none() && !self.ending.is_empty();
        let all =
            known.then(|| self.resolve(name).ok()).flatten().and_then(|name| self.ending.get(name));
        all.into_iter().flatten().rev().filter(move |serving| {
            (version.is_empty() || version.parse() == Ok(serving.model.version))
                && has_sequence(serving, id)
        })
    }

    /// Ends the sequences of a model's replaced versions, because the model is unloaded.
    pub(crate) fn end_sequences(&mut self, model: &str) {
        self.ending.remove(model);
    }

    fn is_ending(&self, serving: &Arc<Serving>) -> bool {
        self.ending
            .get(&*serving.model.name)
            .is_some_and(|all| all.iter().any(|other| Arc::ptr_eq(other, serving)))
    }
}

impl ModelTable {
    /// Ends a version that new requests can no longer find, in a separate task.
    pub(crate) fn retire(self: &Arc<Self>, serving: Arc<Serving>, ending: RetireReason) {
        let executor = serving.executor.clone();
        let model = serving.model.clone();
        let served = ending != RetireReason::Unserved;
        let retired = Retired { model, executor: Arc::downgrade(&executor), served };
        self.retired.lock().push(retired);
        let sequences = matches!(ending, RetireReason::Replaced | RetireReason::Outdated(_))
            && has_sequences(&serving);
        if let Some(memory) = executor.memory().filter(|_| !sequences) {
            memory.end();
        }
        let table = self.clone();
        tokio::spawn(async move {
            if sequences {
                table.end_sequences(&serving, &executor).await;
            }
            if let Some(driver) = executor.driver() {
                driver.close_sequences();
            }
            let Serving { model, series, files, .. } = (*serving).clone();
            drop(serving);
            // A request in flight holds the executor from the lookup to the answer.
            while Arc::strong_count(&executor) > 1 {
                clock::sleep(LOOK).await;
            }
            executor.stop().await;
            if let Some(driver) = executor.driver() {
                table.count_sequences(driver);
            }
            drop(executor);
            table.ended(model, &series, ending);
            // Removes the directory of files that a client has sent.
            let _ = blocking::run(|| drop(files)).await;
        });
    }

    /// Waits until the version's sequences have ended, and the requests that hold it and may begin
    /// sequences.
    async fn end_sequences(&self, serving: &Arc<Serving>, executor: &Arc<Executor>) {
        // The version is held here and in the table, its executor here and by the version.
        while (Arc::strong_count(serving) > 2
            || Arc::strong_count(executor) > 2
            || executor.open_sequences() > 0)
            && self.snapshot().is_ending(serving)
        {
            clock::sleep(LOOK).await;
        }
        self.change(|table| {
            if let Some(all) = table.ending.get_mut(&*serving.model.name) {
                all.retain(|other| !Arc::ptr_eq(other, serving));
            }
            table.ending.retain(|_, all| !all.is_empty());
        });
    }

    /// Finishes the retirement of a version whose workers are gone.
    fn ended(&self, model: ModelVersion, series: &Arc<ModelSeries>, ending: RetireReason) {
        let mut retired = self.retired.lock();
        retired.retain(|retired| retired.executor.strong_count() > 0);
        drop(retired);
        self.count_hits(&model, series);
        // A version that was reloaded only to change its instances continues the same series.
        if !self.all().iter().any(|serving| Arc::ptr_eq(&serving.series, series)) {
            self.shared.metrics.model_unloaded(series);
        }
        let (RetireReason::Outdated(number) | RetireReason::Unloaded(number)) = ending else {
            return;
        };
        record::model_changed(&self.shared.metrics, ModelChange::Unload, true);
        tracing::info!(%model, "unloaded");
        self.change(|table| {
            if table.unloading.get(&model) != Some(&number) {
                return;
            }
            table.unloading.remove(&model);
            match table.on_demand.get(&*model.name).map(|of| of.versions().contains(&model.version))
            {
                Some(true) => {
                    table.states.unloaded(&model.name, model.version, StateReason::OnDemand)
                }
                // A load meanwhile has found that the version has no directory any more.
                Some(false) => table.states.forget_unloading(&model.name, model.version),
                None => table.states.unloaded(&model.name, model.version, StateReason::Unloaded),
            }
            if table.removed_from_repository.contains(&*model.name)
                && table.unloading.keys().all(|other| other.name != model.name)
            {
                table.removed_from_repository.remove(&*model.name);
                if !table.serving.contains_key(&*model.name) {
                    table.drop_unloaded(&model.name);
                }
            }
        });
    }
}

/// Returns whether a version runs the sequence with this id.
fn has_sequence(serving: &Serving, id: &CorrelationId) -> bool {
    serving.driver().is_some_and(|driver| driver.has_sequence(id))
}

/// Returns whether a version has sequences that outlast a request.
fn has_sequences(serving: &Serving) -> bool {
    matches!(&serving.config.scheduling, Scheduling::Sequence(batching) if !batching.iterative || batching.overlapping)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_unloaded_models_stay_known() {
        let mut table = Snapshot::default();
        let name = |number: usize| format!("m{number}");
        let unload = |table: &mut Snapshot, number: usize| {
            table.states.set(&name(number), 1, State::Unavailable, StateReason::Unloaded);
            table.drop_unloaded(&name(number));
        };
        (0..MAX_UNLOADED).for_each(|number| unload(&mut table, number));
        // Loaded again, and unloaded again: now it is the latest.
        table.keep(&name(0));
        table.states.set(&name(0), 1, State::Loading, StateReason::None);
        table.drop_unloaded(&name(0));
        unload(&mut table, 0);
        unload(&mut table, MAX_UNLOADED);
        let known = |number: usize| table.states.model(&name(number)).is_some();
        assert!(known(0) && !known(1) && (2..=MAX_UNLOADED).all(known));
    }
}
