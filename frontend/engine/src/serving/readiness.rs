//! Whether models can answer requests.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Executor, ModelTable, Serving};
use crate::ensemble::Members;
use crate::wire::{self, SharedLink};

impl ModelTable {
    /// Returns whether every model that should serve has at least one ready instance.
    pub(crate) fn all_ready(&self) -> bool {
        let snapshot = self.snapshot();
        let mut serving = snapshot.serving.values().flat_map(BTreeMap::values);
        snapshot.states.all_ready(|name| {
            snapshot.on_demand.contains_key(name) && !snapshot.named.contains(name)
        }) && serving.all(|serving| self.is_ready(serving))
    }

    /// Returns whether an ensemble was loaded with members that have been replaced since.
    pub(crate) fn has_other_members(&self, serving: &Serving) -> bool {
        let Executor::Ensemble { ensemble, members } = &*serving.executor else { return false };
        let mut loaded = ensemble.plan().steps().iter().zip(members);
        loaded.any(|(step, loaded)| {
            self.member(step)
                .map_or(true, |now| !std::ptr::eq(loaded.as_ptr(), Arc::as_ptr(&now.executor)))
        })
    }

    /// Returns whether a version can answer now and the model code of its (or its members')
    /// instances reports readiness.
    pub(crate) async fn check_ready(&self, name: &str, version: &str) -> bool {
        let mut links = Vec::new();
        let ready = self.serving(name, version).is_ok_and(|serving| {
            self.collect_links(&serving, &mut links);
            self.is_ready(&serving)
        });
        ready && wire::all_ready(&links).await
    }

    /// Returns why a version cannot answer now, if its (or its members') instances have been lost.
    pub(crate) fn why_not_ready(&self, name: &str, version: &str) -> Option<String> {
        let serving = self.serving(name, version).ok()?;
        if self.is_ready(&serving) { None } else { self.outage(&serving) }
    }

    /// Returns which instances of a version, or of an ensemble's members, do not run after a loss,
    /// and why.
    pub(crate) fn outage(&self, serving: &Serving) -> Option<String> {
        let plan = match &*serving.executor {
            Executor::Instances { instances, .. } => return instances.outage(),
            Executor::Ensemble { ensemble, .. } => ensemble.plan(),
        };
        let mut outages = Vec::new();
        for member in plan.steps().iter().filter_map(|step| self.member(step).ok()) {
            let Some(outage) = self.outage(&member) else { continue };
            let outage = match member.ensemble() {
                Some(_) => outage,
                None => format!("model '{}': {outage}", member.model.name),
            };
            if !outages.contains(&outage) {
                outages.push(outage);
            }
        }
        (!outages.is_empty()).then(|| outages.join("; "))
    }

    fn collect_links(&self, serving: &Serving, links: &mut Vec<SharedLink>) {
        match &*serving.executor {
            Executor::Instances { instances, .. } => links.extend(instances.links()),
            Executor::Ensemble { ensemble, .. } => {
                let members =
                    ensemble.plan().steps().iter().filter_map(|step| self.member(step).ok());
                members.for_each(|member| self.collect_links(&member, links));
            }
        }
    }

    /// Returns whether a version can answer now: an instance is ready, or all members of an
    /// ensemble are.
    pub(crate) fn is_ready(&self, serving: &Serving) -> bool {
        match &*serving.executor {
            Executor::Instances { instances, .. } => instances.ready() > 0,
            Executor::Ensemble { ensemble, .. } => {
                let steps = ensemble.plan().steps().iter();
                let mut members = steps.map(|step| self.member(step));
                members.all(|member| member.is_ok_and(|member| self.is_ready(&member)))
            }
        }
    }
}
