//! Loads models with their first request (`--model-control-mode=on-demand`, or the model parameter `load`), and unloads them
//! when they have had no requests for a while.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::InferRequest;
use pharos::metrics::labels::OnDemandUnload;
use pharos::metrics::record;
use pharos::repository::{LOAD_PARAMETER, ON_DEMAND_VALUE, State, StateReason};
use pharos::timeline::Instant;

use super::control::LoadRequest;
use super::prepare::{Configuration, Prepared};
use super::unloading::{Demanded, demanded, leave_members};
use super::{Loader, Mode};
use crate::serving::{Awaited, ModelTable, OnDemand, Outcome, Snapshot};
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

/// The time that a request waits for its model; recorded when it ends, also if the request is cancelled.
struct WaitTime<'t> {
    loader: &'t Loader,
    model: &'t str,
    began: Instant,
}

impl Drop for WaitTime<'_> {
    fn drop(&mut self) {
        record::on_demand_waited(self.loader.cache(), self.model, clock::now().ns_since(self.began));
    }
}

impl Loader {
    /// Loads the model of a request if it is loaded on demand and not loaded. Returns the load for which the request has waited, if
    /// any: until it is dropped, for at most [`LONGEST_ARRIVAL`], the model is not unloaded to make room for others. Requests to the
    /// same model wait for the same load, which continues if the future is dropped.
    ///
    /// # Errors
    /// The model cannot be loaded, or not within `limit`, or too many requests wait already, or the server exits.
    pub(crate) async fn demand(
        self: &Arc<Self>,
        (name, version): (&str, &str),
        limit: Option<Duration>,
    ) -> Result<Option<Outcome>, InferError> {
        let Some((name, model)) = self.unloaded(name, version) else { return Ok(None) };
        let name = name.as_str();
        let _waiting = self.wait(name)?;
        let began = clock::now();
        if let Some((left, reason)) = model.attempts().pause(began) {
            return Err(InferError::not_ready(format!(
                "model '{name}' could not be loaded on demand: {reason}; the next request that loads it is accepted in {} s",
                left.as_secs() + 1
            )));
        }
        let _time = WaitTime { loader: self, model: name, began };
        let mut outcome = model.join(|sender| {
            let (loader, name, model) = (self.clone(), name.to_owned(), model.clone());
            self.runtime.spawn(async move {
                let loaded = loader.load_on_demand(&name, &model).await;
                sender.send_replace(Some(loaded.as_ref().map(|_| ()).map_err(Clone::clone)));
                model.forget_load();
                if loaded.is_ok() {
                    let _ = clock::timeout(LONGEST_ARRIVAL, sender.closed()).await;
                }
            });
        });
        let loaded = blocking::until_exit(self.exiting.subscribe(), async {
            let loaded = outcome.wait_for(Option::is_some).await.ok().and_then(|loaded| loaded.clone());
            loaded.unwrap_or_else(|| Err(InferError::internal(format!("the load of model '{name}' failed"))))
        });
        let loaded = async { loaded.await.unwrap_or_else(|| Err(InferError::exiting())) };
        let loaded = match limit {
            Some(limit) => clock::timeout(limit, loaded).await.unwrap_or_else(|| Err(too_late(name, limit))),
            None => loaded.await,
        };
        loaded.map(|()| Some(outcome))
    }

    /// Returns whether the model of a request is loaded on demand, and is not loaded.
    pub(crate) fn may_be_demanded(&self, request: &InferRequest) -> bool {
        let table = self.models.snapshot();
        let model = table.on_demand(&request.model_name).filter(|(name, _)| !table.serving.contains_key(*name));
        model.is_some_and(|(_, model)| model.has_version(&request.model_version))
    }

    /// Returns the full name of a model that is loaded on demand, has this version, and is not loaded. Counts the request if the
    /// model is loaded. Does not return the table: it has versions, which could not end while a request waits.
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
            "model '{name}' is not loaded, and {most} requests wait for models to load, which is the maximum \
             (--on-demand-max-waiting)"
        );
        Err(InferError::new(ErrorCode::Unavailable, Reason::QueueFull, text))
    }

    /// Loads a model, and keeps it until the returned value is dropped.
    async fn load_on_demand(self: &Arc<Self>, name: &str, model: &Arc<OnDemand>) -> Result<Awaited, InferError> {
        let reservation = self.reserve_for(name).await.map_err(|reason| {
            record::on_demand_refused(self.cache(), name);
            InferError::not_ready(format!("model '{name}' could not be loaded on demand: {reason}"))
        })?;
        let begun = self.locks.of(name).begin_load();
        let overrides = self.models.snapshot().overrides.get(name).cloned();
        let mut loaded = self.load_all_of(vec![LoadRequest::new(name, overrides)]).await;
        drop(reservation);
        let missing = || Err(InferError::internal(format!("model '{name}' was not loaded")));
        let loaded = loaded.remove(name).unwrap_or_else(missing);
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
                        // Other versions of the model serve. They are unloaded when they have no use, and loaded again with all.
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
        let by_parameter =
            || prepared.configuration.parameter(LOAD_PARAMETER).is_some_and(|value| value == ON_DEMAND_VALUE);
        self.settings.mode == Mode::OnDemand || by_parameter()
    }

    /// Returns which of these models the server does not load by itself: those that are loaded on demand, unless an ensemble needs
    /// them that it loads.
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
        let mut needed: Vec<&str> =
            all.iter().map(|(wanted, _)| wanted.name.as_str()).filter(|name| !found.contains(*name)).collect();
        while let Some(name) = needed.pop() {
            for member in table.dependencies.members(name) {
                if found.remove(member) {
                    needed.push(member);
                }
            }
        }
        found
    }

    /// Adds a model that is loaded on demand to the model table, unless a request has loaded it or is loading it, perhaps with other
    /// files than these. Returns whether it did.
    pub(super) fn add_on_demand(&self, prepared: &Prepared) -> bool {
        let config = |directory| match &prepared.configuration {
            Configuration::Known(config) => Some((**config).clone()),
            Configuration::CompletedByCode(code) if code.may_answer(directory) => None,
            Configuration::CompletedByCode(code) => code.unanswered().ok(),
        };
        let versions = prepared.versions.iter();
        let model = OnDemand::new(
            versions.map(|(number, version)| (*number, version.directory.clone(), config(&version.directory))),
        );
        let (name, mut added) = (prepared.name.as_str(), false);
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

    /// Watches the loaded models until the server exits: unloads those without use if the settings say after which time, and keeps
    /// their memory within the limits, if there are any.
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
            self.look_at_uses(&table, &demanded(&table), (clock::now(), idle))
        };
        for name in unused {
            self.unload_unused(&name, OnDemandUnload::Idle);
        }
    }

    /// Records which models were used since the last look. Returns those that may be unloaded and had no requests for `idle`.
    pub(super) fn look_at_uses(
        &self,
        table: &Snapshot,
        demanded: &[Demanded<'_>],
        (now, idle): (Instant, Duration),
    ) -> Vec<String> {
        let loaded = demanded.iter().filter_map(|(name, ends)| {
            let (versions, model) = (table.serving.get(*name)?, table.on_demand.get(*name)?);
            Some((*name, ends.as_ref().and_then(|_| model.uses(versions))))
        });
        self.memory.uses().look(now, idle, loaded)
    }
}

/// Returns how long a request may wait for its model to be loaded.
pub(crate) fn wait_limit(request: &InferRequest) -> Option<Duration> {
    (request.timeout_us > 0).then(|| Duration::from_micros(request.timeout_us))
}

fn too_late(name: &str, limit: Duration) -> InferError {
    let text =
        format!("Request timeout expired: model '{name}' was not loaded within the request's {} us", limit.as_micros());
    InferError::new(ErrorCode::Unavailable, Reason::Timeout, text)
}
