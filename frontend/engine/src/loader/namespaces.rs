//! Resolves the names of loads and unloads where repositories may contain models of the same name (`--model-namespacing`).

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;

use pharos::error::InferError;
use pharos::id::bare_name;
use pharos::repository::check_model_name;
use pharos_os::blocking;

use super::Loader;
use crate::serving::ambiguous;

impl Loader {
    /// Returns an error for names that no model can have.
    pub(super) fn check_name(&self, name: &str) -> Result<(), InferError> {
        check_model_name(self.stores.without_namespace(name)).map_err(InferError::invalid)
    }

    /// Returns the full names of the models with these names; an unknown name is returned unchanged.
    ///
    /// # Errors
    /// A repository cannot be listed.
    pub(super) async fn of_names(&self, names: &[String]) -> io::Result<Vec<String>> {
        let (stores, names) = (self.stores.clone(), names.to_vec());
        let all = move || {
            let mut found = Vec::new();
            for name in names {
                let of_name = stores.of_name(&name)?;
                if of_name.is_empty() { found.push(name) } else { found.extend(of_name) }
            }
            Ok(found)
        };
        blocking::run(all).await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }

    /// Returns the models that a load of this name loads. Overrides apply to one model.
    ///
    /// # Errors
    /// A repository cannot be listed, or overrides are given and several models match.
    pub(super) async fn to_load(&self, name: &str, has_overrides: bool) -> Result<Vec<String>, InferError> {
        let all = self.of_names(&[name.to_owned()]).await;
        let mut all = all.map_err(|error| super::control::not_polled(name, &error.to_string()))?;
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
        if known.is_empty() { vec![name.to_owned()] } else { known.into_iter().map(str::to_owned).collect() }
    }

    /// Unloads models with the same bare names as the loaded ones that were loaded only as members and are no longer in a
    /// repository: their ensembles now use the loaded models.
    pub(super) async fn unload_obsolete(self: &Arc<Self>, loaded: Vec<String>) {
        if !self.stores.namespaces() {
            return;
        }
        let Ok(present) = self.list_blocking().await else { return };
        let names: BTreeSet<&str> = loaded.iter().map(|called| bare_name(called)).collect();
        let obsolete: Vec<String> = {
            let table = self.models.snapshot();
            let obsolete = table.wanted.iter().filter(|called| {
                let free = !table.named.contains(*called)
                    && !table.overrides.contains_key(*called)
                    && !present.contains_key(*called);
                free && names.contains(bare_name(called))
            });
            obsolete.cloned().collect()
        };
        if !obsolete.is_empty() {
            self.unload_all_of(obsolete).await;
        }
    }

    /// Resolves the members of an ensemble again, because other repositories may contain them now. Returns whether any member
    /// differs or depends on a changed model.
    pub(super) async fn members_changed(self: &Arc<Self>, ensemble: &str, changed: &BTreeSet<String>) -> bool {
        let overrides = self.models.snapshot().overrides.get(ensemble).cloned();
        let (loader, name) = (self.clone(), ensemble.to_owned());
        let prepared = blocking::run(move || loader.prepare(&name, overrides.as_deref())).await;
        let Ok(Ok(prepared)) = prepared else { return true };
        let members = prepared.plan.as_ref().map(|plan| plan.members()).unwrap_or_default();
        let table = self.models.snapshot();
        let before: BTreeSet<&str> = table.dependencies.members(ensemble).collect();
        if members == before {
            return before.iter().any(|member| changed.contains(*member) || table.dependencies.depth(member) > 0);
        }
        self.models.change(|table| table.dependencies.insert(ensemble, members));
        true
    }
}
