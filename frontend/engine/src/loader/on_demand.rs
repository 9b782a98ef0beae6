//! Loads models with their first request (`--model-control-mode=on-demand`, or the model parameter
//! `load`), and unloads them when they have had no requests for a while, with the members of
//! ensembles that nothing else needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::InferRequest;
use pharos::metrics::labels::OnDemandUnload;
use pharos::metrics::record;
use pharos::repository::{
    LOAD_PARAMETER, MIN_LOADED_PARAMETER, ON_DEMAND_VALUE, State, StateReason,
};
use pharos::timeline::Instant;

use super::prepare::{Configuration, Prepared};
use super::{LoadRequest, Loader, Mode};
use crate::serving::{Awaited, Executor, ModelTable, OnDemand, Outcome, Serving, Snapshot};
use pharos_os::{blocking, clock};

/// The longest time between two looks for models without use.
const LONGEST_LOOK: Duration = Duration::from_secs(5);

/// The longest time that a loaded model is kept for the requests that waited for it.
const LONGEST_ARRIVAL: Duration = Duration::from_secs(1);

/// The time between two measurements of the memory that models use.
const MEMORY_LOOK: Duration = Duration::from_secs(1);

/// A request that waits for a load; counted until it is dropped.
struct Waiting<'t>(&'t ModelTable);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.load_waits.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The time that a request waits for its model; recorded when it ends, also if the request is
/// cancelled.
struct WaitTime<'t> {
    loader: &'t Loader,
    model: &'t str,
    began: Instant,
}

impl Drop for WaitTime<'_> {
    fn drop(&mut self) {
        record::on_demand_waited(
            self.loader.cache(),
            self.model,
            clock::now().ns_since(self.began),
        );
    }
}

impl Loader {
    /// Loads the model of a request if it is loaded on demand and not loaded. Returns the load for
    /// which the request has waited, if any: until it is dropped, for at most [`LONGEST_ARRIVAL`],
    /// the model is not unloaded to make room for others. Requests to the same model wait for the
    /// same load, which continues if the future is dropped.
    ///
    /// # Errors
    /// The model cannot be loaded, or not within `limit`, or too many requests wait already, or the
    /// server exits.
    pub(crate) async fn demand(
        self: &Arc<Self>,
        name: &str,
        version: &str,
        limit: Option<Duration>,
    ) -> Result<Option<Outcome>, InferError> {
        let Some((full_name, model)) = self.unloaded(name, version) else { return Ok(None) };
        let name = full_name.as_str();
        let _waiting = self.wait(name)?;
        let began = clock::now();
        if let Some((left, reason)) = model.attempts().pause(began) {
            return Err(InferError::not_ready(format!(
                "model '{name}' could not be loaded on demand: {reason}; the next request that \
                 loads it is accepted in {} s",
                left.as_secs() + 1
            )));
        }
        let _time = WaitTime { loader: self, model: name, began };
        let mut outcome = model.join(|sender| {
            let loader = self.clone();
            let name = name.to_owned();
            let model = model.clone();
            self.runtime.spawn(async move {
                let loaded = loader.load_on_demand(&name, &model).await;
                sender.send_replace(Some(loaded.as_ref().map(|_| ()).map_err(Clone::clone)));
                model.forget_load();
                if loaded.is_ok() {
                    let _ = clock::timeout(LONGEST_ARRIVAL, sender.closed()).await;
                }
            });
        });
        let ended = async {
            let loaded =
                outcome.wait_for(Option::is_some).await.ok().and_then(|loaded| loaded.clone());
            loaded.unwrap_or_else(|| {
                Err(InferError::internal(format!("the load of model '{name}' failed")))
            })
        };
        let unless_exiting = async {
            let loaded = blocking::until_exit(self.exiting.subscribe(), ended).await;
            loaded.unwrap_or_else(|| Err(InferError::exiting()))
        };
        match limit {
            Some(limit) => clock::timeout(limit, unless_exiting)
                .await
                .unwrap_or_else(|| Err(too_late(name, limit)))?,
            None => unless_exiting.await?,
        }
        Ok(Some(outcome))
    }

    /// Returns whether the model of a request is loaded on demand, and is not loaded.
    pub(crate) fn may_be_demanded(&self, request: &InferRequest) -> bool {
        let table = self.models.snapshot();
        let model = table
            .on_demand(&request.model_name)
            .filter(|(name, _)| !table.serving.contains_key(*name));
        model.is_some_and(|(_, model)| model.has_version(&request.model_version))
    }

    /// Returns the full name of a model that is loaded on demand, has this version, and is not
    /// loaded. Counts the request if the model is loaded. Does not return the table: it has
    /// versions, which could not end while a request waits.
    fn unloaded(&self, name: &str, version: &str) -> Option<(String, Arc<OnDemand>)> {
        let table = self.models.snapshot();
        let (name, model) = table.on_demand(name)?;
        if table.serving.contains_key(name) {
            model.record_found();
            return None;
        }
        model.has_version(version).then(|| (name.to_owned(), model.clone()))
    }

    /// Counts a request that waits for a model, if not too many do.
    fn wait(&self, name: &str) -> Result<Waiting<'_>, InferError> {
        let most = self.settings.on_demand.max_waiting;
        let waiting = Waiting(&self.models);
        if self.models.load_waits.fetch_add(1, Ordering::Relaxed) < most {
            return Ok(waiting);
        }
        let text = format!(
            "model '{name}' is not loaded, and {most} requests wait for models to load, which is \
             the maximum (--on-demand-max-waiting)"
        );
        Err(InferError::new(ErrorCode::Unavailable, Reason::QueueFull, text))
    }

    /// Loads a model, and keeps it until the returned value is dropped.
    async fn load_on_demand(
        self: &Arc<Self>,
        name: &str,
        model: &Arc<OnDemand>,
    ) -> Result<Awaited, InferError> {
        let reservation = self.reserve_for(name).await.map_err(|reason| {
            record::on_demand_refused(self.cache(), name);
            InferError::not_ready(format!("model '{name}' could not be loaded on demand: {reason}"))
        })?;
        let begun = self.locks.of(name).begin_load();
        let overrides = self.models.snapshot().overrides.get(name).cloned();
        let mut all_loaded = self.load_all_of(vec![LoadRequest::new(name, overrides)]).await;
        drop(reservation);
        let loaded = match all_loaded.remove(name) {
            Some(loaded) => loaded,
            None => Err(InferError::internal(format!("model '{name}' was not loaded"))),
        };
        record::on_demand_loaded(self.cache(), name, loaded.is_ok());
        match loaded {
            Ok(()) => {
                model.attempts().succeeded();
                // Before it can be unloaded.
                let awaited = model.await_requests();
                self.models.change(|table| {
                    // Unless its configuration no longer says that requests load it.
                    if table.on_demand.contains_key(name) {
                        table.demanded.insert(name.to_owned());
                    }
                });
                Ok(awaited)
            }
            Err(error) => {
                self.models.change(|table| {
                    match table.serving.contains_key(name) {
                        // Other versions of the model serve. They are unloaded when they have no
                        // use, and loaded again with all.
                        true => drop(table.demanded.insert(name.to_owned())),
                        false if !table.named.contains(name) => {
                            table.wanted.remove(name);
                            leave_members(table, name);
                        }
                        false => {}
                    }
                });
                // The reasons of several versions are separated, and ended, by semicolons.
                let reason = error.message.trim_end_matches([';', ' ', '\n']);
                // An unload by request is no reason to refuse the next request.
                if !begun.is_unloaded() {
                    model.attempts().failed(clock::now(), reason);
                }
                let text = format!("model '{name}' could not be loaded on demand: {reason}");
                Err(InferError::not_ready(text))
            }
        }
    }

    /// Returns whether requests load this model.
    pub(super) fn is_on_demand(&self, prepared: &Prepared) -> bool {
        self.settings.mode == Mode::OnDemand
            || prepared
                .configuration
                .parameter(LOAD_PARAMETER)
                .is_some_and(|value| value == ON_DEMAND_VALUE)
    }

    /// Returns which of these models the server does not load by itself: models that are loaded on
    /// demand, unless an ensemble needs them that it loads.
    pub(super) fn on_demand_among<'p>(
        &self,
        all: impl Iterator<Item = (&'p LoadRequest, &'p Prepared)>,
    ) -> BTreeSet<String> {
        let all: Vec<_> = all.collect();
        let table = self.models.snapshot();
        let mut found: BTreeSet<String> = all
            .iter()
            .filter(|(wanted, prepared)| wanted.by_itself && self.is_on_demand(prepared))
            .filter(|(wanted, _)| !table.serving.contains_key(&wanted.name))
            .map(|(wanted, _)| wanted.name.clone())
            .collect();
        // A member of an ensemble that is loaded is loaded too, and its own members.
        let mut needed: Vec<&str> = all
            .iter()
            .map(|(wanted, _)| wanted.name.as_str())
            .filter(|name| !found.contains(*name))
            .collect();
        while let Some(name) = needed.pop() {
            for member in table.dependencies.members(name) {
                if found.remove(member) {
                    needed.push(member);
                }
            }
        }
        found
    }

    /// Adds a model that is loaded on demand to the model table, unless a request has loaded it or
    /// is loading it, perhaps with other files than these. Returns whether it did.
    pub(super) fn add_on_demand(&self, prepared: &Prepared) -> bool {
        let model = OnDemand::new(prepared.versions.iter().map(|(number, version)| {
            let config = match &prepared.configuration {
                Configuration::Known(config) => Some((**config).clone()),
                Configuration::CompletedByCode(code) if code.may_answer(&version.directory) => None,
                Configuration::CompletedByCode(code) => code.unanswered().ok(),
            };
            (*number, version.directory.clone(), config)
        }));
        let name = prepared.name.as_str();
        let mut added = false;
        self.models.change(|table| {
            added = !table.serving.contains_key(name) && !self.locks.has_other_loads(name);
            if !added {
                return;
            }
            table.wanted.remove(name);
            table.states.forget_unavailable(name, |_| false);
            for number in prepared.versions.keys() {
                table.states.set(name, *number, State::Unavailable, StateReason::OnDemand);
            }
            table.states.load_ended(name, true);
            match table.on_demand.get(name) {
                Some(known) => known.update(model),
                None => drop(table.on_demand.insert(name.to_owned(), Arc::new(model))),
            }
        });
        added
    }

    /// Watches the loaded models until the server exits: unloads those without use if the settings
    /// say after which time, and keeps their memory within the limits, if there are any.
    pub(super) fn start_watching_models(self: &Arc<Self>) {
        let idle = self.settings.on_demand.idle;
        let limited = self.models.shared.memory.is_limited();
        let interval = match (idle, limited) {
            (None, false) => return,
            (None, true) => MEMORY_LOOK,
            (Some(idle), _) => (idle / 4).min(if limited { MEMORY_LOOK } else { LONGEST_LOOK }),
        };
        let loader = self.clone();
        tokio::spawn(async move {
            while !loader.is_exiting() {
                clock::sleep(interval).await;
                loader.unload_idle(idle.unwrap_or(Duration::MAX));
                loader.watch_memory().await;
            }
        });
    }

    /// Unloads the models that may be unloaded and had no requests for `idle`.
    fn unload_idle(self: &Arc<Self>, idle: Duration) {
        let unused = {
            let table = self.models.snapshot();
            self.memory.uses().retain(|name| table.on_demand.contains_key(name));
            self.look_at_uses(&table, &demanded(&table), clock::now(), idle)
        };
        for name in unused {
            self.unload_unused(&name, OnDemandUnload::Idle);
        }
    }

    /// Records which models were used since the last look. Returns the models that may be unloaded
    /// and had no requests for `idle`.
    pub(super) fn look_at_uses(
        &self,
        table: &Snapshot,
        demanded: &[Demanded<'_>],
        now: Instant,
        idle: Duration,
    ) -> Vec<String> {
        let loaded = demanded.iter().filter_map(|(name, ends)| {
            let versions = table.serving.get(*name)?;
            let model = table.on_demand.get(*name)?;
            Some((*name, ends.as_ref().and_then(|_| model.uses(versions))))
        });
        self.memory.uses().look(now, idle, loaded)
    }

    /// Unloads a model that is loaded on demand, and the members of an ensemble that nothing else
    /// needs, unless it is used or being changed now.
    pub(super) fn unload_unused(self: &Arc<Self>, name: &str, reason: OnDemandUnload) {
        if !self.withdraw_at_once(name, |table| unloadable(table, name).is_some()) {
            return;
        }
        record::on_demand_unloaded(self.cache(), name, reason);
        tracing::info!(
            model = name,
            reason = reason.as_str(),
            "unloaded a model that is loaded on demand"
        );
        let table = self.models.snapshot();
        for member in released(&table, name) {
            // Unless a request loads the ensemble again.
            let is_released = |table: &Snapshot| {
                !table.wanted.contains(name) && released(table, name).contains(member)
            };
            if !self.withdraw_at_once(member, is_released) {
                // An operation changes the member. It is unloaded later, when it has no use.
                self.models.change(|table| {
                    if is_released(table) && table.serving.contains_key(member) {
                        table.demanded.insert(member.to_owned());
                    }
                });
            }
        }
    }

    /// Removes a model from the table if the condition holds and no operation changes it or is
    /// about to. Returns whether it did.
    fn withdraw_at_once(
        self: &Arc<Self>,
        name: &str,
        condition: impl FnOnce(&Snapshot) -> bool,
    ) -> bool {
        let lock = self.locks.of(name);
        // Not waited for: the holder of the lock may wait until this model has made room.
        let Some(_held) = lock.held_at_once() else { return false };
        let withdrawn = self.withdraw_if(name, condition);
        if withdrawn {
            self.models.change(|table| {
                table.wanted.remove(name);
            });
        }
        withdrawn
    }
}

/// Returns the models that the unload of a model ends: itself, and the members of an ensemble that
/// nothing else needs. `None` if it may not be unloaded when it has no use: no request has loaded
/// it, a client has loaded it by name, a loaded ensemble needs it, its configuration keeps it,
/// requests that waited for its load have not all found it yet, or one of these models executes
/// requests or sequences.
pub(super) fn unloadable<'t>(table: &'t Snapshot, name: &'t str) -> Option<Vec<&'t str>> {
    unloadable_if(table, name, Executor::is_idle)
}

/// As [`unloadable`], with another condition for what executes these models.
fn unloadable_if<'t>(
    table: &'t Snapshot,
    name: &'t str,
    may_end: impl Fn(&Executor) -> bool,
) -> Option<Vec<&'t str>> {
    if is_awaited(table, name)
        || !table.demanded.contains(name)
        || !table.serving.contains_key(name)
        || table.named.contains(name)
        || table
            .dependencies
            .dependents(name)
            .iter()
            .any(|ensemble| table.wanted.contains(*ensemble))
    {
        return None;
    }
    let mut gone: Vec<&str> = released(table, name).into_iter().collect();
    gone.push(name);
    let mut versions =
        gone.iter().filter_map(|model| table.serving.get(*model)).flat_map(BTreeMap::values);
    versions.all(|serving| !is_kept(serving) && may_end(&serving.executor)).then_some(gone)
}

/// Returns whether a model may be unloaded as soon as the requests are answered that it executes
/// now.
pub(super) fn any_executes(table: &Snapshot) -> bool {
    table.demanded.iter().any(|name| {
        unloadable(table, name).is_none()
            && unloadable_if(table, name, |executor| executor.open_sequences() == 0).is_some()
    })
}

/// Returns whether requests that waited for a model have not all found it yet.
fn is_awaited(table: &Snapshot, name: &str) -> bool {
    table.on_demand.get(name).is_some_and(|model| model.is_awaited())
}

/// Returns whether a model was just loaded that may be unloaded soon: requests that waited for it
/// have not all found it yet.
pub(super) fn any_is_awaited(table: &Snapshot) -> bool {
    table.demanded.iter().any(|name| table.serving.contains_key(name) && is_awaited(table, name))
}

/// A model that requests have loaded, with the models that its unload ends; see [`unloadable`].
pub(super) type Demanded<'t> = (&'t str, Option<Vec<&'t str>>);

/// Returns all models that requests have loaded.
pub(super) fn demanded(table: &Snapshot) -> Vec<Demanded<'_>> {
    table.demanded.iter().map(|name| (name.as_str(), unloadable(table, name))).collect()
}

/// Returns the members of an ensemble that nothing needs without it.
fn released<'t>(table: &'t Snapshot, name: &str) -> BTreeSet<&'t str> {
    let kept = |member: &str| {
        table.named.contains(member)
            || table.demanded.contains(member)
            || !table.on_demand.contains_key(member)
    };
    let loaded = |ensemble: &str| table.wanted.contains(ensemble) && ensemble != name;
    table.dependencies.released(name, kept, loaded)
}

/// Leaves the loaded members of an ensemble that is not loaded to be unloaded when they have no
/// use, if nothing else needs them.
pub(super) fn leave_members(table: &mut Snapshot, ensemble: &str) {
    let members =
        released(table, ensemble).into_iter().filter(|member| table.serving.contains_key(*member));
    let left: Vec<String> = members.map(str::to_owned).collect();
    table.demanded.extend(left);
}

/// Leaves the members of the ensembles that were loaded on demand and ended with the unload of this
/// model: a request loads them again. `is_held` tells whether an operation changes a model.
pub(super) fn leave_ensembles(table: &mut Snapshot, model: &str, is_held: impl Fn(&str) -> bool) {
    let mut ended = Vec::new();
    for name in table.dependencies.dependents(model) {
        if table.on_demand.contains_key(name)
            && !table.named.contains(name)
            && !table.serving.contains_key(name)
            && !is_held(name)
        {
            ended.push(name.to_owned());
        }
    }
    for ensemble in ended {
        table.wanted.remove(&ensemble);
        leave_members(table, &ensemble);
    }
}

/// Returns whether the configuration keeps a loaded model.
fn is_kept(serving: &Serving) -> bool {
    let least = serving.config.parameters.get(MIN_LOADED_PARAMETER);
    least.is_some_and(|least| least.parse::<u64>().is_ok_and(|least| least > 0))
}

/// Returns how long a request may wait for its model to be loaded.
pub(crate) fn wait_limit(request: &InferRequest) -> Option<Duration> {
    (request.timeout_us > 0).then(|| Duration::from_micros(request.timeout_us))
}

fn too_late(name: &str, limit: Duration) -> InferError {
    let text = format!(
        "Request timeout expired: model '{name}' was not loaded within the request's {} us",
        limit.as_micros()
    );
    InferError::new(ErrorCode::Unavailable, Reason::Timeout, text)
}
