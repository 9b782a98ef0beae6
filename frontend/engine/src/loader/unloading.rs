//! Unloads models that are loaded on demand and are not used, with the members of ensembles that nothing else needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use pharos::metrics::labels::OnDemandUnload;
use pharos::metrics::record;
use pharos::repository::MIN_LOADED_PARAMETER;

use super::Loader;
use crate::serving::{Executor, Serving, Snapshot};

impl Loader {
    /// Unloads a model that is loaded on demand, and the members of an ensemble that nothing else needs, unless it is used or
    /// being changed now.
    pub(super) fn unload_unused(self: &Arc<Self>, name: &str, reason: OnDemandUnload) {
        if !self.withdraw_at_once(name, |table| unloadable(table, name).is_some()) {
            return;
        }
        record::on_demand_unloaded(self.cache(), name, reason);
        tracing::info!(model = name, reason = reason.as_str(), "unloaded a model that is loaded on demand");
        let table = self.models.snapshot();
        for member in released(&table, name) {
            // Unless a request loads the ensemble again.
            let is_released = |table: &Snapshot| !table.wanted.contains(name) && released(table, name).contains(member);
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

    /// Removes a model from the table if the condition holds and no operation changes it or is about to. Returns whether it did.
    fn withdraw_at_once(self: &Arc<Self>, name: &str, condition: impl FnOnce(&Snapshot) -> bool) -> bool {
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

/// Returns the models that the unload of a model ends: itself, and the members of an ensemble that nothing else needs. `None` if it
/// may not be unloaded when it has no use: no request has loaded it, a client has loaded it by name, a loaded ensemble needs it, its
/// configuration keeps it, requests that waited for its load have not all found it yet, or one of these models executes requests or
/// sequences.
pub(super) fn unloadable<'t>(table: &'t Snapshot, name: &'t str) -> Option<Vec<&'t str>> {
    unloadable_if(table, name, Executor::is_idle)
}

/// As [`unloadable`], with another condition for what executes these models.
fn unloadable_if<'t>(table: &'t Snapshot, name: &'t str, may_end: impl Fn(&Executor) -> bool) -> Option<Vec<&'t str>> {
    let needed = || table.dependencies.dependents(name).iter().any(|ensemble| table.wanted.contains(*ensemble));
    if is_awaited(table, name)
        || !table.demanded.contains(name)
        || !table.serving.contains_key(name)
        || table.named.contains(name)
        || needed()
    {
        return None;
    }
    let mut gone: Vec<&str> = released(table, name).into_iter().collect();
    gone.push(name);
    let mut versions = gone.iter().filter_map(|model| table.serving.get(*model)).flat_map(BTreeMap::values);
    versions.all(|serving| !is_kept(serving) && may_end(&serving.executor)).then_some(gone)
}

/// Returns whether a model may be unloaded as soon as the requests are answered that it executes now.
pub(super) fn any_executes(table: &Snapshot) -> bool {
    let once_answered = |executor: &Executor| executor.open_sequences() == 0;
    let executes =
        |name: &str| unloadable(table, name).is_none() && unloadable_if(table, name, once_answered).is_some();
    table.demanded.iter().any(|name| executes(name))
}

/// Returns whether requests that waited for a model have not all found it yet.
fn is_awaited(table: &Snapshot, name: &str) -> bool {
    table.on_demand.get(name).is_some_and(|model| model.is_awaited())
}

/// Returns whether a model was just loaded that may be unloaded soon: requests that waited for it have not all found it yet.
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
        table.named.contains(member) || table.demanded.contains(member) || !table.on_demand.contains_key(member)
    };
    let loaded = |ensemble: &str| table.wanted.contains(ensemble) && ensemble != name;
    table.dependencies.released(name, kept, loaded)
}

/// Leaves the loaded members of an ensemble that is not loaded to be unloaded when they have no use, if nothing else needs them.
pub(super) fn leave_members(table: &mut Snapshot, ensemble: &str) {
    let members = released(table, ensemble).into_iter().filter(|member| table.serving.contains_key(*member));
    let left: Vec<String> = members.map(str::to_owned).collect();
    table.demanded.extend(left);
}

/// Leaves the members of the ensembles that were loaded on demand and ended with the unload of this model: a request loads them again.
/// `is_held` tells whether an operation changes a model.
pub(super) fn leave_ensembles(table: &mut Snapshot, model: &str, is_held: impl Fn(&str) -> bool) {
    let ended = |name: &str| {
        table.on_demand.contains_key(name)
            && !table.named.contains(name)
            && !table.serving.contains_key(name)
            && !is_held(name)
    };
    let dependents = table.dependencies.dependents(model).into_iter().filter(|name| ended(name));
    let ended: Vec<String> = dependents.map(|name| name.to_string()).collect();
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
