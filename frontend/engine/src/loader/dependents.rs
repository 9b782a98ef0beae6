//! Reloads the ensembles that depend on changed models.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pharos_os::blocking;

use super::change::OnLoadFailure;
use super::control::{LoadRequest, has_other_overrides};
use super::prepare::PrepareError;
use super::{Loader, Mode};
use crate::store::Overrides;

impl Loader {
    /// Reloads the wanted ensembles that depend on changed models, or withdraws those that can no longer be loaded.
    pub(super) async fn reload_dependents(self: &Arc<Self>, changed: &BTreeSet<String>) {
        for name in self.dependents_of(changed) {
            if self.stores.namespaces() && !self.members_changed(&name, changed).await {
                continue;
            }
            while self.reload_dependent(&name).await {}
        }
    }

    /// Reloads or withdraws one of them. Returns whether to do it again: a client has loaded it with other overrides meanwhile, but with
    /// the members of before.
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
        let failing = OnLoadFailure::Withdraw;
        let wanted = LoadRequest { reload: true, failing, ..LoadRequest::new(name, overrides.clone()) };
        let (wanted, begun) = self.begin(wanted);
        let (loader, model) = (self.clone(), name.to_owned());
        let prepared = blocking::run(move || loader.prepare(&model, overrides.as_deref())).await;
        let prepared = prepared.unwrap_or_else(|error| Err(PrepareError::Unreadable(error.to_string())));
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

    /// Returns the wanted ensembles that depend on changed models, sorted by depth, so that an ensemble of ensembles finds its
    /// reloaded members.
    fn dependents_of(&self, changed: &BTreeSet<String>) -> Vec<String> {
        let table = self.models.snapshot();
        let mut all: Vec<String> = Vec::new();
        for name in changed {
            let dependents = table.touched_by(name).into_iter();
            let new = dependents.filter(|name| table.wanted.contains(name) && !changed.contains(name));
            for dependent in new {
                if !all.contains(&dependent) {
                    all.push(dependent);
                }
            }
        }
        all.sort_by_key(|name| table.dependencies.depth(name));
        all
    }

    /// Returns the overrides of an ensemble, if it has any, while all its members serve; `None` otherwise.
    fn overrides_with_members(&self, name: &str) -> Option<Option<Arc<Overrides>>> {
        let table = self.models.snapshot();
        let all_serve = table.dependencies.members(name).all(|member| table.serving.contains_key(member));
        all_serve.then(|| table.overrides.get(name).cloned())
    }
}
