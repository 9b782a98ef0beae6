//! The end of what served: whatever was accepted is answered, sequences come to their ends, then the workers stop.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use pharos::id::{CorrelationId, ModelVersion};
use pharos::metrics::labels::ModelChange;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use pharos::model::Scheduling;
use pharos::repository::State;
use tokio::time::sleep;

use super::serving::Executor;
use super::{Repository, Serving, Table};

/// How often what is to end is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The most models that are remembered after they were unloaded and are in no repository.
const MOST_GONE: usize = 1000;

/// Why a version does not serve any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Another one serves in its place. Sequences that it has begun go on with it until they end or are idle for too long.
    Replaced,
    /// Other versions serve, and no longer this one: sequences go on in the same way. The number tells this unload from
    /// others.
    Outdated(u64),
    /// The model was unloaded.
    Unloaded(u64),
    /// It cannot serve any more.
    Failed,
    /// It never served.
    Unserved,
}

/// What has been taken out of the table and has not ended.
pub(super) struct Retired {
    pub(super) model: ModelVersion,
    executor: Weak<Executor>,
    served: bool,
}

impl Retired {
    /// It, unless it has ended.
    pub(super) fn executor(&self) -> Option<Arc<Executor>> {
        self.executor.upgrade()
    }

    /// It, if it has served and has not ended.
    pub(super) fn served(&self) -> Option<Arc<Executor>> {
        self.executor().filter(|_| self.served)
    }
}

impl Table {
    /// A version that served is being unloaded; gives the number of this unload.
    pub(super) fn begin_unload(&mut self, model: &str, version: u64) -> u64 {
        let number = self.unloads;
        self.unloads += 1;
        self.unloading.insert(ModelVersion::new(model, version), number);
        number
    }

    /// A model was unloaded, and no repository has it. Its versions stay known, so that requests get the same answer as for
    /// any other unloaded model, but not those of more than [`MOST_GONE`] models.
    pub(super) fn forget(&mut self, model: &str) {
        let versions = self.states.model(model).map(|status| &status.versions);
        if self.namespaces || versions.is_none_or(BTreeMap::is_empty) {
            self.states.remove(model);
            return;
        }
        if versions.is_some_and(|versions| versions.values().any(|version| version.state != State::Unavailable)) {
            // It is being loaded again.
            return;
        }
        self.remember(model);
        self.gone.push_back(model.to_owned());
        if self.gone.len() > MOST_GONE {
            self.gone.pop_front().iter().for_each(|oldest| self.states.remove(oldest));
        }
    }

    /// A model is being loaded, which may have been unloaded before.
    pub(super) fn remember(&mut self, model: &str) {
        self.gone.retain(|other| other != model);
    }

    /// A version goes, of which requests in flight and sequences may remain: they find it here.
    pub(super) fn begin_ending(&mut self, serving: &Arc<Serving>) {
        if has_sequences(serving) {
            self.ending.entry(serving.model.name.to_string()).or_default().push(serving.clone());
        }
    }

    fn is_ending(&self, serving: &Arc<Serving>) -> bool {
        self.ending.get(&*serving.model.name).is_some_and(|all| all.iter().any(|other| Arc::ptr_eq(other, serving)))
    }
}

impl Repository {
    /// Ends a version that no new request finds any more, in a task of its own.
    pub(super) fn retire(self: &Arc<Self>, serving: Arc<Serving>, ending: Ending) {
        let executor = serving.executor.clone();
        let (model, served) = (serving.model.clone(), ending != Ending::Unserved);
        let retired = Retired { model, executor: Arc::downgrade(&executor), served };
        self.retired.lock().unwrap_or_else(PoisonError::into_inner).push(retired);
        let sequences = matches!(ending, Ending::Replaced | Ending::Outdated(_)) && has_sequences(&serving);
        let repository = self.clone();
        tokio::spawn(async move {
            if sequences {
                repository.end_sequences(&serving, &executor).await;
            }
            let Serving { model, series, local, .. } = (*serving).clone();
            drop(serving);
            // A request in flight holds it from the look-up to the answer.
            while Arc::strong_count(&executor) > 1 {
                sleep(LOOK).await;
            }
            executor.stop().await;
            if let Some(driver) = executor.driver() {
                repository.count_sequences(driver);
            }
            drop(executor);
            repository.ended(model, &series, ending);
            // The directory of files that a client gave.
            let _ = tokio::task::spawn_blocking(|| drop(local)).await;
        });
    }

    /// Waits until its sequences have ended, and the requests that have found it, which may begin some.
    async fn end_sequences(&self, serving: &Arc<Serving>, executor: &Arc<Executor>) {
        // Held here and in the table; of the executor, here and by what serves.
        let is_held = || Arc::strong_count(serving) > 2 || Arc::strong_count(executor) > 2;
        while (is_held() || executor.running_sequences() > 0) && self.table().is_ending(serving) {
            sleep(LOOK).await;
        }
        self.change(|table| {
            if let Some(all) = table.ending.get_mut(&*serving.model.name) {
                all.retain(|other| !Arc::ptr_eq(other, serving));
            }
            table.ending.retain(|_, all| !all.is_empty());
        });
    }

    /// Its workers are gone.
    fn ended(&self, model: ModelVersion, series: &Arc<ModelSeries>, ending: Ending) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|retired| retired.executor.strong_count() > 0);
        drop(retired);
        // What was loaded anew only for its instances counts on in the same series.
        if !self.all().iter().any(|serving| Arc::ptr_eq(&serving.series, series)) {
            self.cache.model_unloaded(series);
        }
        let (Ending::Outdated(number) | Ending::Unloaded(number)) = ending else { return };
        record::model_changed(&self.cache, ModelChange::Unload, true);
        tracing::info!(%model, "unloaded");
        self.change(|table| {
            if table.unloading.get(&model) != Some(&number) {
                return;
            }
            table.unloading.remove(&model);
            table.states.unloaded(&model.name, model.version);
            if table.nowhere.contains(&*model.name) && table.unloading.keys().all(|other| other.name != model.name) {
                table.nowhere.remove(&*model.name);
                if !table.serving.contains_key(&*model.name) {
                    table.forget(&model.name);
                }
            }
        });
    }

    /// The version (of this number, or any) that is on its way out and has begun the sequence with this id. None if the one
    /// that serves has begun such a one since.
    pub(super) fn with_sequence(
        table: &Table,
        (name, version): (&str, &str),
        id: &CorrelationId,
    ) -> Option<Arc<Serving>> {
        if id.is_none() || table.ending.is_empty() {
            return None;
        }
        let all = table.ending.get(table.called(name).ok()?)?;
        let has = |serving: &Arc<Serving>| serving.driver().is_some_and(|driver| driver.has_sequence(id));
        if table.serving(name, version).is_ok_and(|serving| has(&serving)) {
            return None;
        }
        let named = |serving: &Arc<Serving>| version.is_empty() || version.parse() == Ok(serving.model.version);
        all.iter().rev().find(|serving| named(serving) && has(serving)).cloned()
    }
}

/// Whether it has sequences that last longer than a request.
fn has_sequences(serving: &Serving) -> bool {
    matches!(&serving.config.scheduling, Scheduling::Sequence(batching) if !batching.iterative || batching.overlapping)
}
