//! Loads and unloads models by name, together with their dependencies and dependents. Operations on
//! the same model are serialized; those on different models run concurrently.
//!
//! Where repositories may contain models of the same name (`--model-namespacing`), a name can mean
//! several models.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use pharos::error::{Cause, ErrorCode, InferError, Reason};
use pharos::id::bare_name;
use pharos::metrics::labels::ModelChange;
use pharos::metrics::record;
use pharos::repository::{LoadScope, Override, check_model_name};
use pharos_os::blocking;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::change::OnLoadFailure;
use super::locks::BegunLoad;
use super::on_demand::leave_ensembles;
use super::prepare::{PrepareError, Prepared};
use super::{LoadRequest, Loaded, Loader, Mode};
use crate::calls::Caller;
use crate::serving::{RetireReason, Snapshot, ambiguous};
use crate::store::Overrides;

/// A load whose files have been read.
struct PreparedLoad {
    wanted: LoadRequest,
    begun: BegunLoad,
    prepared: Prepared,
    /// Dropped when the model is loaded, or its load has failed.
    done: watch::Sender<()>,
}

impl Loader {
    /// Loads a model for a client, from the repositories or with the client's overrides. The load
    /// continues if the future is dropped, so that a disconnecting client leaves no model half
    /// loaded.
    ///
    /// # Errors
    /// Triton's codes and texts: loading by request is disabled, the name is invalid, the model
    /// does not exist, or it cannot be loaded.
    pub(crate) async fn load_model(
        self: &Arc<Self>,
        name: &str,
        overrides: Option<Override>,
        scope: LoadScope,
    ) -> Loaded {
        self.load(name, overrides, scope, None).await
    }

    /// Loads a model for a client, or for a worker.
    pub(super) async fn load(
        self: &Arc<Self>,
        name: &str,
        overrides: Option<Override>,
        scope: LoadScope,
        caller: Option<Arc<Caller>>,
    ) -> Loaded {
        self.check_by_request()?;
        self.check_name(name)?;
        let loader = self.clone();
        let name = name.to_owned();
        let load =
            async move { loader.load_named(&name, overrides, scope, caller.as_deref()).await };
        self.result(self.runtime.spawn(load)).await?
    }

    /// Unloads a model and, with `dependents`, the members of an ensemble that nothing else needs.
    /// On return new requests no longer find it; its accepted requests finish afterwards, and until
    /// then its versions are UNLOADING, as in Triton.
    ///
    /// # Errors
    /// Unloading by request is disabled. Unloading an unknown model is not an error.
    pub(crate) async fn unload_model(self: &Arc<Self>, name: &str, dependents: bool) -> Loaded {
        self.check_by_request()?;
        let loader = self.clone();
        let name = name.to_owned();
        let unload =
            async move { loader.unload_all_of(loader.unloaded_with(&name, dependents)).await };
        self.result(self.runtime.spawn(unload)).await
    }

    /// Returns the result of a load or unload.
    ///
    /// # Errors
    /// The server exits: the runtime may end before the task does. Or the task panicked.
    async fn result<T>(&self, task: JoinHandle<T>) -> Result<T, InferError> {
        let done = blocking::until_exit(self.exiting.subscribe(), task).await;
        done.ok_or_else(InferError::exiting)?
            .map_err(|error| InferError::internal(format!("the task failed: {error}")))
    }

    /// Returns an error unless models are loaded by request.
    pub(crate) fn check_by_request(&self) -> Loaded {
        let mode = match self.settings.mode {
            Mode::None => "none",
            Mode::Poll(_) => "poll",
            Mode::Explicit | Mode::OnDemand => return Ok(()),
        };
        // Triton's text for both modes, with a remedy.
        let text = format!(
            "explicit model load / unload is not allowed if polling is enabled; the model control \
             mode is '{mode}', and loads and unloads by request need \
             --model-control-mode=explicit (modes: none, poll, explicit, on-demand)"
        );
        Err(InferError::new(ErrorCode::Unavailable, Reason::Unsupported, text))
    }

    async fn load_named(
        self: &Arc<Self>,
        name: &str,
        overrides: Option<Override>,
        scope: LoadScope,
        caller: Option<&Caller>,
    ) -> Loaded {
        let all = self.to_load(name, overrides.is_some()).await?;
        match caller {
            Some(caller) => {
                for name in &all {
                    self.claim(caller, name, overrides.is_some()).await?;
                }
            }
            None => self
                .models
                .change(|table| all.iter().for_each(|name| drop(table.owners.remove(name)))),
        }
        let overrides = match overrides {
            Some(overrides) => {
                let loader = self.clone();
                let loaded_by = caller.map(|caller| caller.sandbox);
                let writing = blocking::run(move || {
                    Overrides::new(overrides, scope, loaded_by, &loader.override_directories)
                });
                let written = writing.await.unwrap_or_else(|error| Err(io::Error::other(error)));
                Some(Arc::new(written.map_err(|error| not_polled(name, &error.to_string()))?))
            }
            None => None,
        };
        // Overrides of an earlier load apply as long as the model is loaded.
        let mut wanted = Vec::new();
        for name in &all {
            wanted.push(match &overrides {
                Some(overrides) => LoadRequest {
                    overriding: true,
                    owner: caller.map(|caller| caller.model.clone()),
                    ..LoadRequest::new(name, Some(overrides.clone()))
                },
                None => LoadRequest::new(name, self.models.snapshot().overrides.get(name).cloned()),
            });
        }
        // Until they are recorded as named, so that they are not unloaded before.
        let _begun: Vec<BegunLoad> =
            all.iter().map(|name| self.locks.of(name).begin_load()).collect();
        let mut loaded = self.load_all_of(wanted).await;
        self.unload_obsolete(loaded.keys().cloned().collect()).await;
        let mut result = Ok(());
        for name in all {
            match loaded.remove(&name) {
                Some(Ok(())) => self.models.change(|table| {
                    table.named.insert(name);
                }),
                Some(error) => result = result.and(error),
                None => {
                    result = Err(InferError::internal(format!("model '{name}' was not loaded")))
                }
            }
        }
        result
    }

    /// Loads models concurrently, including the members of ensembles; an ensemble loads after its
    /// members. Then checks the ensembles that depend on any of them. Returns the result of each
    /// model.
    pub(super) async fn load_all_of(
        self: &Arc<Self>,
        wanted: Vec<LoadRequest>,
    ) -> BTreeMap<String, Loaded> {
        let loaded = self.load_side_by_side(wanted).await;
        let changed: BTreeSet<String> = loaded.keys().cloned().collect();
        self.reload_dependents(&changed).await;
        loaded
    }

    async fn load_side_by_side(
        self: &Arc<Self>,
        wanted: Vec<LoadRequest>,
    ) -> BTreeMap<String, Loaded> {
        let mut results = BTreeMap::new();
        let mut loads: Vec<PreparedLoad> = Vec::new();
        // Ensembles are recognized only by their configurations, so all are read before anything is
        // loaded.
        for (wanted, begun, prepared) in self.with_members(wanted).await {
            let name = wanted.name.clone();
            match self.checked_dependencies(&name, prepared).await {
                Ok(prepared) => loads.push(PreparedLoad {
                    wanted,
                    begun,
                    prepared,
                    done: watch::Sender::new(()),
                }),
                Err(_) if self.is_exiting() => {
                    drop(results.insert(name, Err(InferError::exiting())))
                }
                Err(unprepared) => {
                    drop(results.insert(name, Err(self.not_prepared(&wanted, &begun, &unprepared))))
                }
            }
        }
        let on_demand =
            self.on_demand_among(loads.iter().map(|load| (&load.wanted, &load.prepared)));
        loads.retain_mut(|load| {
            load.wanted.after_request = on_demand.contains(&load.wanted.name);
            let added = load.wanted.after_request && self.add_on_demand(&load.prepared);
            if added {
                results.insert(load.wanted.name.clone(), Ok(()));
            }
            !added
        });
        let instances: usize = loads.iter().map(|load| load.prepared.instances()).sum();
        if let Some(warning) = self.settings.descriptors.warning(loads.len(), instances) {
            tracing::warn!("{warning}");
        }
        let done: BTreeMap<String, watch::Receiver<()>> =
            loads.iter().map(|load| (load.wanted.name.clone(), load.done.subscribe())).collect();
        let mut tasks = Vec::new();
        for PreparedLoad { wanted, begun, prepared, done: sender } in loads {
            let mut members: Vec<watch::Receiver<()>> = Vec::new();
            for member in self.models.snapshot().dependencies.members(&wanted.name) {
                members.extend(done.get(member).cloned());
            }
            let loader = self.clone();
            tasks.push(tokio::spawn(async move {
                for mut member in members {
                    while member.changed().await.is_ok() {}
                }
                let loaded = loader.load_one(&wanted, begun, &prepared).await;
                drop(sender);
                (wanted.name, loaded)
            }));
        }
        drop(done);
        for task in tasks {
            match task.await {
                Ok((name, loaded)) => drop(results.insert(name, loaded)),
                Err(error) => tracing::error!("loading a model panicked: {error}"),
            }
        }
        results
    }

    /// Reads these models and the members of ensembles among them, recursively, each once. Files
    /// may have to be fetched first; an unload that arrives meanwhile takes effect.
    async fn with_members(
        self: &Arc<Self>,
        wanted: Vec<LoadRequest>,
    ) -> Vec<(LoadRequest, BegunLoad, Result<Prepared, PrepareError>)> {
        let loader = self.clone();
        let reading = blocking::run(move || {
            let mut all: Vec<(LoadRequest, BegunLoad, Result<Prepared, PrepareError>)> = Vec::new();
            let requested: BTreeSet<String> = wanted
                .iter()
                .filter(|wanted| !wanted.by_itself)
                .map(|wanted| wanted.name.clone())
                .collect();
            let mut next: Vec<(LoadRequest, BegunLoad)> =
                wanted.into_iter().map(|wanted| loader.begin(wanted)).collect();
            while let Some((wanted, begun)) = next.pop() {
                if all.iter().any(|(known, _, _)| known.name == wanted.name) {
                    continue;
                }
                let prepared = loader.prepare(&wanted.name, wanted.overrides.as_deref());
                let members = prepared.as_ref().ok().and_then(|prepared| prepared.plan.as_ref());
                for member in members.map(|plan| plan.members()).unwrap_or_default() {
                    let overrides = loader.models.snapshot().overrides.get(member).cloned();
                    // The load of the ensemble reports a missing member.
                    if overrides.is_some() || loader.stores.local(member).is_ok() {
                        let by_itself = wanted.by_itself && !requested.contains(member);
                        next.push(loader.begin(LoadRequest {
                            by_itself,
                            ..LoadRequest::new(member, overrides)
                        }));
                    }
                }
                all.push((wanted, begun, prepared));
            }
            all
        });
        let read = reading.await.unwrap_or_else(|error| {
            tracing::error!("cannot read the models to load: {error}");
            Vec::new()
        });
        self.models.change(|table| {
            for (wanted, _, prepared) in read.iter().filter(|(_, begun, _)| !begun.is_unloaded()) {
                // Registered now, so that ensembles find their members.
                table.states.add(&wanted.name);
                table.wanted.insert(wanted.name.clone());
                if let Ok(prepared) = prepared {
                    table.keep(&wanted.name);
                    match &prepared.plan {
                        Some(plan) => table.dependencies.insert(&wanted.name, plan.members()),
                        None => table.dependencies.remove(&wanted.name),
                    }
                }
            }
        });
        read
    }

    fn begin(&self, wanted: LoadRequest) -> (LoadRequest, BegunLoad) {
        let begun = self.locks.of(&wanted.name).begin_load();
        (wanted, begun)
    }

    async fn checked_dependencies(
        self: &Arc<Self>,
        name: &str,
        prepared: Result<Prepared, PrepareError>,
    ) -> Result<Prepared, PrepareError> {
        let prepared = prepared?;
        self.check_dependencies(name).await.map_err(PrepareError::Members)?;
        Ok(prepared)
    }

    /// Records that the load of a model could not begin. Serving versions continue, unless they are
    /// to be withdrawn.
    fn not_prepared(
        self: &Arc<Self>,
        wanted: &LoadRequest,
        begun: &BegunLoad,
        unprepared: &PrepareError,
    ) -> InferError {
        let name = wanted.name.as_str();
        let reason = unprepared.reason();
        tracing::error!(model = name, "model cannot be loaded: {reason}");
        record::model_changed(self.cache(), ModelChange::Load, false);
        if wanted.failing == OnLoadFailure::Withdraw {
            self.withdraw(name);
        }
        self.models.change(|table| {
            if begun.is_unloaded() {
                return;
            }
            let bare = table.states.model(name).is_some_and(|status| status.versions.is_empty());
            match self.settings.mode {
                _ if table.serving.contains_key(name) => {}
                Mode::None | Mode::Poll(_) => table.states.fail(name, unprepared.state_reason()),
                Mode::OnDemand if wanted.by_itself => {
                    table.states.fail(name, unprepared.state_reason())
                }
                // A load at the start has no response.
                _ if matches!(unprepared, PrepareError::Unreadable(_))
                    && bare
                    && table.named.contains(name) =>
                {
                    table.states.fail(name, unprepared.state_reason());
                }
                // The response contains the reason; the state of the model is unchanged.
                _ if bare && !matches!(unprepared, PrepareError::NoVersion(_)) => {
                    table.states.remove(name);
                    table.wanted.remove(name);
                }
                Mode::Explicit | Mode::OnDemand => {}
            }
            table.states.load_ended(name, false);
        });
        match unprepared {
            PrepareError::NotFound(reason)
            | PrepareError::Ambiguous(reason)
            | PrepareError::Unreadable(reason) => not_polled(name, reason),
            PrepareError::Restricted(error) => error.clone(),
            PrepareError::Excessive(reason) => load_failed(name, &format!("{reason}\n")),
            PrepareError::Members(reason) => load_failed(name, &format!("{reason}\n")),
            PrepareError::NoVersion(reason) => {
                let rule =
                    "at least one version must be available under the version policy of model";
                load_failed(name, &format!("{rule} '{name}': {reason}\n"))
            }
        }
    }

    /// Loads one model, unless it is unloaded or the server exits meanwhile.
    async fn load_one(
        self: &Arc<Self>,
        wanted: &LoadRequest,
        mut begun: BegunLoad,
        prepared: &Prepared,
    ) -> Loaded {
        let name = wanted.name.as_str();
        let lock = self.locks.of(name);
        let is_unloaded = begun.unload_check();
        let load = async {
            let _held = lock.held().await;
            let _permit = self.permits.acquire().await;
            if !wanted.overriding && has_other_overrides(&self.models.snapshot(), wanted) {
                return Ok(());
            }
            if let Some(owner) = &wanted.owner
                && self.models.snapshot().owners.get(name) != Some(owner)
            {
                return Err(load_failed(name, "another client has loaded it meanwhile\n"));
            }
            // An ensemble must be reloaded after a member was.
            let running = self.models.snapshot().serving.get(name).cloned().unwrap_or_default();
            let (reload, failing) =
                match running.values().any(|serving| self.models.has_other_members(serving)) {
                    true => (true, OnLoadFailure::Withdraw),
                    false => (wanted.reload, wanted.failing),
                };
            drop(running);
            let applied = self.apply(prepared, reload, failing).await;
            self.models.change(|table| {
                table.states.load_ended(name, applied.is_ok());
                // An unload that has come removes what this would insert, or has removed it
                // already.
                if applied.is_ok() && !is_unloaded() {
                    self.record_loaded(table, wanted, prepared);
                }
            });
            applied.map_err(|failed| {
                let reasons: String = failed
                    .iter()
                    .map(|(version, why)| format!("{}{why};\n", unavailable_version(*version)))
                    .collect();
                load_failed(name, &reasons).with_cause(Cause::FailedVersions(Arc::new(failed)))
            })
        };
        let mut exiting = self.exiting.subscribe();
        tokio::select! {
            biased;
            () = begun.unloaded() => Err(load_failed(name, "it was unloaded during the load\n")),
            _ = exiting.wait_for(|exiting| *exiting) => Err(InferError::exiting()),
            loaded = load => loaded,
        }
    }

    /// Records in the table that a load has succeeded.
    fn record_loaded(&self, table: &mut Snapshot, wanted: &LoadRequest, prepared: &Prepared) {
        let name = wanted.name.as_str();
        // Another load of the model, which has failed meanwhile, may have removed it.
        table.wanted.insert(name.to_owned());
        match &wanted.overrides {
            Some(overrides) => drop(table.overrides.insert(name.to_owned(), overrides.clone())),
            None => {
                table.overrides.remove(name);
                if self.is_on_demand(prepared) {
                    table.remember_on_demand(name);
                    if wanted.after_request {
                        table.demanded.insert(name.to_owned());
                    }
                } else {
                    table.forget_on_demand(name);
                }
            }
        }
    }

    /// Returns the models that an unload of this name unloads, with `dependents` also the members
    /// that only they need.
    fn unloaded_with(&self, name: &str, dependents: bool) -> Vec<String> {
        let table = self.models.snapshot();
        let named = self.to_unload(name);
        let mut unloaded = named.clone();
        if dependents {
            let kept = |member: &str| table.named.contains(member);
            let loaded = |ensemble: &str| {
                table.wanted.contains(ensemble) && !named.iter().any(|name| name == ensemble)
            };
            let released =
                named.iter().flat_map(|name| table.dependencies.released(name, kept, loaded));
            unloaded.extend(released.map(str::to_owned));
        }
        unloaded
    }

    /// Unloads models, and cancels running loads of them.
    pub(super) async fn unload_all_of(self: &Arc<Self>, unloaded: Vec<String>) {
        for name in &unloaded {
            let lock = self.locks.of(name);
            // Before what the loads have recorded is removed, so that none of them records it
            // afterwards.
            lock.unload();
            self.models.change(|table| {
                table.wanted.remove(name);
                table.named.remove(name);
                table.demanded.remove(name);
                table.overrides.remove(name);
                table.owners.remove(name);
            });
            let _held = lock.held().await;
            let is_removed =
                self.list_blocking().await.is_ok_and(|names| !names.contains_key(name));
            self.models.change(|table| {
                table.states.mark_unloaded(name);
                if is_removed {
                    table.on_demand.remove(name);
                    table.removed_from_repository.insert(name.clone());
                }
            });
            self.withdraw(name);
        }
        self.reload_dependents(&unloaded.iter().cloned().collect()).await;
        self.models.change(|table| {
            unloaded
                .iter()
                .for_each(|model| leave_ensembles(table, model, |name| self.locks.is_held(name)));
            let wanted = table.wanted.clone();
            table.dependencies.retain(|ensemble| wanted.contains(ensemble));
        });
    }

    /// Removes the model from the table; accepted requests finish.
    pub(super) fn withdraw(self: &Arc<Self>, model: &str) {
        self.withdraw_if(model, |_| true);
    }

    /// Removes the model from the table if the condition holds at that moment. Returns whether it
    /// did.
    pub(super) fn withdraw_if(
        self: &Arc<Self>,
        model: &str,
        condition: impl FnOnce(&Snapshot) -> bool,
    ) -> bool {
        let mut gone = Vec::new();
        let mut holds = false;
        self.models.change(|table| {
            holds = condition(table);
            if !holds {
                return;
            }
            table.demanded.remove(model);
            table.owners.remove(model);
            table.end_sequences(model);
            let serving = table.serving.remove(model).unwrap_or_default();
            table.states.withdraw(model);
            for (number, serving) in serving {
                gone.push((serving, RetireReason::Unloaded(table.begin_unload(model, number))));
            }
            if gone.is_empty() && table.removed_from_repository.remove(model) {
                table.drop_unloaded(model);
            }
        });
        gone.into_iter().for_each(|(serving, ending)| self.models.retire(serving, ending));
        holds
    }

    /// Reloads the wanted ensembles that depend on changed models, or withdraws ensembles that can
    /// no longer be loaded.
    async fn reload_dependents(self: &Arc<Self>, changed: &BTreeSet<String>) {
        for name in self.dependents_of(changed) {
            if self.stores.namespaces() && !self.members_changed(&name, changed).await {
                continue;
            }
            while self.reload_dependent(&name).await {}
        }
    }

    /// Reloads or withdraws one ensemble. Returns whether to do it again: a client has loaded the
    /// ensemble with other overrides meanwhile, but with the members of before.
    async fn reload_dependent(self: &Arc<Self>, name: &str) -> bool {
        let Some(overrides) = self.overrides_with_members(name) else {
            if self.models.snapshot().serving.contains_key(name) {
                let lock = self.locks.of(name);
                let _held = lock.held().await;
                self.withdraw(name);
                if matches!(self.settings.mode, Mode::None | Mode::Poll(_)) {
                    // A member was removed, but not the ensemble.
                    self.models.change(|table| table.states.load_ended(name, false));
                }
            }
            return false;
        };
        let (wanted, begun) = self.begin(LoadRequest {
            reload: true,
            failing: OnLoadFailure::Withdraw,
            ..LoadRequest::new(name, overrides.clone())
        });
        let loader = self.clone();
        let model = name.to_owned();
        let reading = blocking::run(move || loader.prepare(&model, overrides.as_deref()));
        let prepared =
            reading.await.unwrap_or_else(|error| Err(PrepareError::Unreadable(error.to_string())));
        match self.checked_dependencies(name, prepared).await {
            Ok(prepared) => drop(self.load_one(&wanted, begun, &prepared).await),
            // At the exit, ensembles stay until their requests have ended.
            Err(_) if self.is_exiting() => {}
            Err(unprepared) => {
                let lock = self.locks.of(name);
                let _held = lock.held().await;
                drop(self.not_prepared(&wanted, &begun, &unprepared));
            }
        }
        let table = self.models.snapshot();
        let mut serving = table.serving.get(name).into_iter().flat_map(BTreeMap::values);
        let is_wanted = !self.is_exiting() && table.wanted.contains(name);
        is_wanted
            && has_other_overrides(&table, &wanted)
            && serving.any(|serving| self.models.has_other_members(serving))
    }

    /// Returns the wanted ensembles that depend on changed models, sorted by depth, so that an
    /// ensemble of ensembles finds its reloaded members.
    fn dependents_of(&self, changed: &BTreeSet<String>) -> Vec<String> {
        let table = self.models.snapshot();
        let mut all: Vec<String> = Vec::new();
        for name in changed {
            for dependent in table.touched_by(name) {
                if table.wanted.contains(&dependent)
                    && !changed.contains(&dependent)
                    && !all.contains(&dependent)
                {
                    all.push(dependent);
                }
            }
        }
        all.sort_by_key(|name| table.dependencies.depth(name));
        all
    }

    /// Returns the overrides of an ensemble, if it has any, while all its members serve; `None`
    /// otherwise.
    fn overrides_with_members(&self, name: &str) -> Option<Option<Arc<Overrides>>> {
        let table = self.models.snapshot();
        let all_serve =
            table.dependencies.members(name).all(|member| table.serving.contains_key(member));
        all_serve.then(|| table.overrides.get(name).cloned())
    }

    /// Returns an error for names that no model can have.
    fn check_name(&self, name: &str) -> Result<(), InferError> {
        check_model_name(self.stores.without_namespace(name)).map_err(InferError::invalid)
    }

    /// Returns the full names of the models with these names; an unknown name is returned
    /// unchanged.
    ///
    /// # Errors
    /// A repository cannot be listed.
    pub(super) async fn of_names(&self, names: &[String]) -> io::Result<Vec<String>> {
        let stores = self.stores.clone();
        let names = names.to_vec();
        let searching = blocking::run(move || {
            let mut found = Vec::new();
            for name in names {
                let of_name = stores.of_name(&name)?;
                if of_name.is_empty() { found.push(name) } else { found.extend(of_name) }
            }
            Ok(found)
        });
        searching.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Returns the models that a load of this name loads. Overrides apply to one model.
    ///
    /// # Errors
    /// A repository cannot be listed, or overrides are given and several models match.
    async fn to_load(&self, name: &str, has_overrides: bool) -> Result<Vec<String>, InferError> {
        let found = self.of_names(&[name.to_owned()]).await;
        let mut all = found.map_err(|error| not_polled(name, &error.to_string()))?;
        // A model that consists entirely of a client's files is in no repository.
        if self.stores.namespaces()
            && self.models.snapshot().overrides.contains_key(name)
            && !all.iter().any(|one| one == name)
        {
            all.push(name.to_owned());
        }
        if has_overrides && all.len() > 1 {
            return Err(ambiguous(name, &all.iter().map(String::as_str).collect::<Vec<_>>()));
        }
        Ok(all)
    }

    /// Returns the models that an unload of this name unloads.
    pub(super) fn to_unload(&self, name: &str) -> Vec<String> {
        let table = self.models.snapshot();
        let known = if table.namespaces && table.states.model(name).is_none() {
            table.with_bare_name(name)
        } else {
            Vec::new()
        };
        if known.is_empty() {
            vec![name.to_owned()]
        } else {
            known.into_iter().map(str::to_owned).collect()
        }
    }

    /// Unloads models with the same bare names as the loaded ones that were loaded only as members
    /// and are no longer in a repository: their ensembles now use the loaded models.
    async fn unload_obsolete(self: &Arc<Self>, loaded: Vec<String>) {
        if !self.stores.namespaces() {
            return;
        }
        let Ok(present) = self.list_blocking().await else { return };
        let names: BTreeSet<&str> = loaded.iter().map(|called| bare_name(called)).collect();
        let mut obsolete = Vec::new();
        {
            let table = self.models.snapshot();
            for called in &table.wanted {
                if !table.named.contains(called)
                    && !table.overrides.contains_key(called)
                    && !present.contains_key(called)
                    && names.contains(bare_name(called))
                {
                    obsolete.push(called.clone());
                }
            }
        }
        if !obsolete.is_empty() {
            self.unload_all_of(obsolete).await;
        }
    }

    /// Resolves the members of an ensemble again, because other repositories may contain them now.
    /// Returns whether any member differs or depends on a changed model.
    async fn members_changed(self: &Arc<Self>, ensemble: &str, changed: &BTreeSet<String>) -> bool {
        let overrides = self.models.snapshot().overrides.get(ensemble).cloned();
        let loader = self.clone();
        let name = ensemble.to_owned();
        let prepared = blocking::run(move || loader.prepare(&name, overrides.as_deref())).await;
        let Ok(Ok(prepared)) = prepared else { return true };
        let members = prepared.plan.as_ref().map(|plan| plan.members()).unwrap_or_default();
        let table = self.models.snapshot();
        let before: BTreeSet<&str> = table.dependencies.members(ensemble).collect();
        if members == before {
            return before
                .iter()
                .any(|member| changed.contains(*member) || table.dependencies.depth(member) > 0);
        }
        self.models.change(|table| table.dependencies.insert(ensemble, members));
        true
    }
}

/// Triton's error for an unreadable model, with the reason, which Triton only logs.
fn not_polled(model: &str, reason: &str) -> InferError {
    InferError::internal(format!(
        "failed to load '{model}', failed to poll from model repository: {reason}"
    ))
}

/// Returns whether a client has loaded a model with other overrides since this load was prepared.
/// They apply as long as the model is loaded.
fn has_other_overrides(table: &Snapshot, wanted: &LoadRequest) -> bool {
    let loaded = table.overrides.get(&wanted.name).map(Arc::as_ptr);
    table.serving.contains_key(&wanted.name) && loaded != wanted.overrides.as_ref().map(Arc::as_ptr)
}

fn load_failed(model: &str, reasons: &str) -> InferError {
    InferError::invalid(format!("load failed for model '{model}': {reasons}"))
}

/// Returns the beginning of Triton's text for a version that could not be loaded; its reason
/// follows.
pub(super) fn unavailable_version(version: u64) -> String {
    format!("version {version} is at UNAVAILABLE state: ")
}
