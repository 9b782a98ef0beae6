//! Keeps the memory of all models within `--model-memory-limit` and `--model-gpu-memory-limit`: unloads models that are loaded on
//! demand, or refuses a load.

use std::collections::BTreeMap;
use std::fs;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pharos::metrics::labels::OnDemandUnload;
use pharos::model::{ModelConfig, Scheduling};
use pharos::repository::memory_budget::{
    Candidate, Expectation, KnownSize, Memory, MemoryBytes, Shortage, Sizes, insufficient, refusal, to_unload,
    under_pressure,
};
use pharos::repository::{Uses, VersionFingerprint};
use pharos::timeline::Instant;
use tokio::sync;

use super::Loader;
use super::memory_sizes::{ToLoad, ToMeasure, files_of};
use super::unloading::{any_executes, any_is_awaited, demanded};
use crate::model_memory::{MemoryShare, Totals};
use crate::serving::{Serving, Snapshot, UnloadedVersion};
use pharos_os::{blocking, clock};

/// The longest time between two checks whether a model fits: a model that executed requests may be unloaded now.
const LOOK: Duration = Duration::from_millis(5);

/// How often models are chosen to be unloaded for a model that turned out larger than expected, before its load fails.
const MOST_UNLOADS: usize = 16;

/// The longest time that a load waits for unloaded models to end.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The longest time that a load waits for requests that other models execute, if these models may be unloaded afterwards. Counted
/// from the request, so that loads that wait for their turn meanwhile do not add up their times.
const LONGEST_EXECUTION: Duration = Duration::from_secs(1);

/// What the limits need to know about models.
#[derive(Default)]
pub(super) struct MemoryBudget {
    // Locked only to read or change it.
    sizes: Mutex<Sizes>,
    /// How often models are used. Locked only for one look at all models.
    uses: Mutex<Uses>,
    /// Memory that is reserved for the versions of models whose load has not begun, by the name of the model.
    reserved: Mutex<BTreeMap<String, Reserved>>,
    /// Held while models are chosen and withdrawn, and while what is free is reserved, without any wait.
    turn: Mutex<()>,
    /// Held by a load on demand until it has a reservation, so that a large one gets its turn. Loads that have begun do not wait for
    /// it: what it waits for may be their end.
    queue: sync::Mutex<()>,
}

impl MemoryBudget {
    pub(super) fn sizes(&self) -> MutexGuard<'_, Sizes> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserved(&self) -> MutexGuard<'_, BTreeMap<String, Reserved>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The memory that is reserved for a model whose load has not begun.
struct Reserved {
    share: MemoryShare,
    /// Whether it is less than expected, because a guess alone is no reason to refuse a load.
    reduced: bool,
}

/// The memory that a load on demand has reserved.
pub(super) struct Reservation {
    loader: Arc<Loader>,
    /// The models, with the bytes for each.
    parts: Vec<(String, MemoryBytes)>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.loader.memory.reserved();
        for (name, bytes) in &self.parts {
            // Another load can have reserved for the same model.
            if let Some(left) = reserved.get(name) {
                drop(left.share.split(bytes));
                if left.share.bytes().is_zero() {
                    reserved.remove(name);
                }
            }
        }
    }
}

/// A version after its load.
pub(super) struct Loaded<'l> {
    /// The memory that was reserved for it.
    pub(super) share: &'l MemoryShare,
    /// The ids of its processes.
    pub(super) pids: Vec<u32>,
    /// The duration of the load.
    pub(super) time: Duration,
    pub(super) fingerprint: VersionFingerprint,
}

/// A model that can be unloaded, with what is known of it.
struct Unloadable {
    name: String,
    bytes: MemoryBytes,
    uses_per_second: f64,
    load: Duration,
}

impl Unloadable {
    fn as_candidate(&self) -> Candidate<'_> {
        let Self { name, bytes, uses_per_second, load } = self;
        Candidate { name, bytes, uses_per_second: *uses_per_second, load: *load }
    }
}

impl Loader {
    /// Reserves memory for a version, and unloads others if it does not fit. Returns `None` without a limit.
    ///
    /// # Errors
    /// It does not fit, and unloading what may be unloaded is not enough; the text has the numbers.
    pub(super) async fn room_for(self: &Arc<Self>, model: &ToLoad<'_>) -> Result<Option<MemoryShare>, String> {
        let memory = &self.models.shared.memory;
        if !memory.is_limited() {
            return Ok(None);
        }
        let unmeasured = self.unmeasured(model).await;
        let expected = || self.expected(model.name, model.version, &unmeasured).within(memory.limits());
        // The model may have other versions, or more instances, than when its memory was reserved.
        let of_model = |reserved: &Reserved| (reserved.share.split(&expected()), reserved.reduced);
        let reserved = self.memory.reserved().get(model.name).map(of_model);
        let needed = || match &reserved {
            None => expected(),
            Some((_, true)) => MemoryBytes::default(),
            Some((share, false)) => {
                let mut needed = expected();
                needed.subtract(&share.bytes());
                needed
            }
        };
        // The loads of others that have begun will end, but those that have not may wait for what this load holds.
        let share = self.make_room(model.name, clock::now(), needed, |totals| totals.loading > 0).await?;
        if let Some((reserved, _)) = reserved {
            share.merge(&reserved);
        }
        share.begin_load();
        Ok(Some(share))
    }

    /// Returns what a loaded version will use with the instances of another configuration: as much for each as its instances use now.
    pub(super) fn size_with(&self, serving: &Serving, config: &ModelConfig) -> MemoryBytes {
        let used = serving.executor.memory().map(|share| share.bytes()).unwrap_or_default();
        let version = serving.model.version;
        let before = self.instances_by_memory(Some(&serving.config), version);
        let after = self.instances_by_memory(Some(config), version);
        let of = |(memory, after): (Memory, u64)| {
            let before = before.get(&memory).copied().unwrap_or_default().max(1);
            (memory, (used.of(memory) / before).saturating_mul(after))
        };
        after.into_iter().map(of).collect()
    }

    /// Reserves memory for what a loaded version will use beyond what it uses now. Returns `None` without a limit.
    ///
    /// # Errors
    /// As [`Loader::room_for`].
    pub(super) async fn room_for_more(
        self: &Arc<Self>,
        serving: &Serving,
        size: &MemoryBytes,
    ) -> Result<Option<MemoryShare>, String> {
        let Some(share) = serving.executor.memory() else { return Ok(None) };
        let needed = || {
            let mut needed = size.clone();
            needed.subtract(&share.bytes());
            needed
        };
        let (name, began) = (serving.model.name.to_string(), clock::now());
        let room = self.make_room(&name, began, needed, |totals| totals.loading > 0).await?;
        room.begin_load();
        Ok(Some(room))
    }

    /// Reserves memory for all versions of a model that is loaded on demand, and of its members that are not loaded.
    /// [`Loader::room_for`] returns the parts. Dropping the reservation frees what is left of it.
    ///
    /// # Errors
    /// As [`Loader::room_for`].
    pub(super) async fn reserve_for(self: &Arc<Self>, name: &str) -> Result<Reservation, String> {
        let memory = &self.models.shared.memory;
        if !memory.is_limited() {
            return Ok(Reservation { loader: self.clone(), parts: Vec::new() });
        }
        let began = clock::now();
        let versions = self.unloaded_versions(name);
        let mut models = Vec::new();
        for (name, (version, directory, config)) in &versions {
            let model = ToLoad { name, version: *version, directory, config: config.as_deref() };
            models.push((name, *version, self.unmeasured(&model).await));
        }
        let expected = || -> Vec<_> {
            let expected = |(name, version, model): &(&String, u64, _)| self.expected(name, *version, model);
            models.iter().map(expected).collect()
        };
        let sum = |expected: &[Expectation]| {
            let mut all = Expectation::default();
            expected.iter().for_each(|one| all.add(one));
            all
        };
        let may_change = |totals: &Totals| totals.loading > 0 || totals.reserved > 0;
        let needed = || sum(&expected()).within(memory.limits());
        let _queue = self.memory.queue.lock().await;
        let reserved = self.make_room(name, began, needed, may_change).await?;
        let (whole, expected) = (reserved.bytes(), expected());
        let all = sum(&expected);
        let reduced = !whole.covers(&all.bytes());
        let parts = expected.iter().map(|one| reserved.split(&one.part_of(&whole, &all)));
        let mut by_name = self.memory.reserved();
        let mut reservation = Reservation { loader: self.clone(), parts: Vec::new() };
        for ((name, ..), part) in models.iter().zip(parts) {
            reservation.parts.push(((*name).clone(), part.bytes()));
            match by_name.get_mut(*name) {
                Some(others) => {
                    others.share.merge(&part);
                    others.reduced |= reduced;
                }
                None => drop(by_name.insert((*name).clone(), Reserved { share: part, reduced })),
            }
        }
        Ok(reservation)
    }

    /// Returns the versions with workers of a model and its members, of those that are loaded on demand and not loaded.
    fn unloaded_versions(&self, name: &str) -> Vec<(String, UnloadedVersion)> {
        let table = self.models.snapshot();
        let mut versions = Vec::new();
        for name in with_members(&table, name) {
            let Some(model) = table.on_demand.get(name).filter(|_| !table.serving.contains_key(name)) else { continue };
            let is_ensemble = |config: &Arc<ModelConfig>| matches!(config.scheduling, Scheduling::Ensemble { .. });
            let with_workers =
                model.to_load().into_iter().filter(|(.., config)| !config.as_ref().is_some_and(is_ensemble));
            versions.extend(with_workers.map(|version| (name.to_owned(), version)));
        }
        versions
    }

    /// Measures a version after its load, unless that was done for a recent one, and unloads others if it is larger than expected.
    ///
    /// # Errors
    /// It does not fit; the text has the numbers.
    pub(super) async fn measure_loaded(self: &Arc<Self>, model: &ToLoad<'_>, loaded: Loaded<'_>) -> Result<(), String> {
        let Loaded { share, pids, time, fingerprint } = loaded;
        let instances = self.instances_by_memory(model.config, model.version);
        let now = clock::now();
        let recent = self.memory.sizes().recent(model.name, model.version, fingerprint, now, &instances);
        let (bytes, measured) = match recent {
            // The kernel walks all pages of a process to answer, for 0.3 ms and more, and the versions are measured each second anyway.
            Some(known) => known,
            None => {
                let before = share.bytes();
                let memories = instances.keys().copied().collect();
                let to_measure = ToMeasure { memories, pids, before: before.clone(), just_loaded: true };
                (self.measure(vec![to_measure]).await.pop().unwrap_or(before), now)
            }
        };
        let is_known = self.memory.sizes().is_known(model.name, model.version, instances.keys());
        let files = if is_known { None } else { Some(files_of(model.directory).await) };
        let size = KnownSize { bytes: bytes.clone(), instances: instances.clone(), load: time, fingerprint, measured };
        // A model that can never be loaded says nothing about what others of its backend need.
        let limits = self.models.shared.memory.limits();
        let is_possible = bytes.iter().all(|(memory, bytes)| limits.get(memory).is_none_or(|limit| bytes <= limit));
        let unmeasured = files.filter(|_| is_possible).map(|files| model.unmeasured(files, instances));
        self.memory.sizes().loaded(model.name, model.version, size, unmeasured.as_ref());
        share.set(bytes.clone());
        // Other memories may have no room left because of other models.
        let excess = || -> MemoryBytes {
            self.models.shared.memory.excess().iter().filter(|(memory, _)| bytes.of(*memory) > 0).collect()
        };
        if excess().is_zero() {
            return Ok(());
        }
        let _turn = self.memory.turn();
        match unload_until_within(excess, |bytes| self.unload_some(bytes, OnDemandUnload::Memory)).iter().next() {
            None => Ok(()),
            Some((memory, _)) => Err(self.refused(model.name, memory, (bytes.of(memory), bytes.of(memory)))),
        }
    }

    /// Measures the loaded models, and unloads some if they have grown beyond a limit, or one if the machine lacks memory.
    pub(super) async fn watch_memory(self: &Arc<Self>) {
        let memory = &self.models.shared.memory;
        if !memory.is_limited() {
            return;
        }
        self.measure_all().await;
        // One by one: room can be made in one memory even if it cannot in another.
        for (limited, _) in memory.limits().iter() {
            let _turn = self.memory.turn();
            let excess = memory.excess().of(limited);
            self.unload_some(&MemoryBytes::from_iter([(limited, excess)]), OnDemandUnload::Memory);
        }
        if memory.limits().get(Memory::Main).is_none() {
            return;
        }
        let pressure = self.settings.on_demand.memory_pressure.clone();
        let text = blocking::run(move || fs::read_to_string(pressure)).await;
        if text.is_ok_and(|text| text.is_ok_and(|text| under_pressure(&text))) {
            let _turn = self.memory.turn();
            self.unload_some(&MemoryBytes::from_iter([(Memory::Main, 1)]), OnDemandUnload::Pressure);
        }
    }

    async fn measure_all(&self) {
        let (mut loaded, mut to_measure) = (Vec::new(), Vec::new());
        {
            let table = self.models.snapshot();
            let versions = table
                .serving
                .iter()
                .flat_map(|(name, all)| all.iter().map(move |(number, version)| (name, number, version)));
            for (name, number, serving) in versions {
                let (Some(share), Some(instances)) = (serving.executor.memory(), serving.instances()) else { continue };
                let of_each = self.instances_by_memory(Some(&*serving.config), *number);
                let memories = of_each.keys().copied().collect();
                let (pids, before) = (instances.pids(), share.bytes());
                to_measure.push(ToMeasure { memories, pids, before, just_loaded: false });
                loaded.push((name.clone(), *number, share.clone(), of_each));
            }
        }
        for ((name, version, share, of_each), bytes) in loaded.into_iter().zip(self.measure(to_measure).await) {
            self.memory.sizes().grown(&name, version, &bytes, &of_each);
            share.set(bytes);
        }
    }

    /// Waits until the bytes that `needed` returns are free, and reserves them. If unloading models is not enough, waits for requests
    /// that others execute, until [`LONGEST_EXECUTION`] after `began`, and while `may_change` for the memories that lack them: the
    /// sizes of models that are being loaded may be smaller than reserved, and they may be unloaded afterwards, once the requests
    /// that waited for them have found them. What is needed may change too, since models of the same backend are measured meanwhile.
    async fn make_room(
        self: &Arc<Self>,
        name: &str,
        began: Instant,
        needed: impl Fn() -> MemoryBytes,
        may_change: impl Fn(&Totals) -> bool,
    ) -> Result<MemoryShare, String> {
        let memory = &self.models.shared.memory;
        let (turn, mut lacking, mut changes) = (clock::now(), (Memory::Main, 0), memory.changes());
        while !self.is_exiting() && clock::now() - turn < LONGEST_WAIT {
            changes.mark_unchanged();
            let needed = needed();
            let executes = || clock::now() - began < LONGEST_EXECUTION && any_executes(&self.models.snapshot());
            if let Some(share) = self.reserve_or_unload(name, &needed, |totals| may_change(totals) || executes())? {
                return Ok(share);
            }
            lacking = memory.missing(&needed).iter().next().map_or(lacking, |(first, _)| (first, needed.of(first)));
            let _ = clock::timeout(LOOK, changes.changed()).await;
        }
        Err(self.refused(name, lacking.0, (lacking.1, 0)))
    }

    /// Reserves memory if it is free. Otherwise begins to unload models, and returns `None`.
    ///
    /// # Errors
    /// Unloading models is not enough, and nothing may change that.
    fn reserve_or_unload(
        self: &Arc<Self>,
        name: &str,
        needed: &MemoryBytes,
        may_change: impl Fn(&Totals) -> bool,
    ) -> Result<Option<MemoryShare>, String> {
        let memory = &self.models.shared.memory;
        let _turn = self.memory.turn();
        // Read first: if a load ends afterwards, the next call considers its size, and may unload it.
        let limits = memory.limits().iter().map(|(limited, _)| limited);
        let awaited = any_is_awaited(&self.models.snapshot());
        let changing: Vec<Memory> = limits.filter(|limited| awaited || may_change(&memory.totals(*limited))).collect();
        if memory.missing(needed).is_zero() {
            return Ok(Some(memory.reserve(needed.clone())));
        }
        let short = self.unload_some(&memory.missing_after_ends(needed), OnDemandUnload::Memory);
        let settled =
            |limited: &Memory| needed.of(*limited) > memory.limits().of(*limited) || !changing.contains(limited);
        match short.into_iter().find(settled) {
            Some(limited) => Err(self.refused(name, limited, (needed.of(limited), 0))),
            None => Ok(None),
        }
    }

    /// Returns the text for a model that does not fit: it needs so many bytes, of which it uses some already.
    fn refused(&self, name: &str, memory: Memory, (needed, own): (u64, u64)) -> String {
        let all = &self.models.shared.memory;
        let (limit, used) = (all.limits().of(memory), all.totals(memory).used.saturating_sub(own));
        let unused = self.unloadable().iter().map(|model| model.bytes.of(memory)).sum();
        refusal(name, Shortage { memory, needed, limit, used, unused })
    }

    /// Begins to unload models that together have at least these bytes. If all of them have too few bytes in some memories, unloads
    /// none, and returns these memories.
    fn unload_some(self: &Arc<Self>, bytes: &MemoryBytes, reason: OnDemandUnload) -> Vec<Memory> {
        if bytes.is_zero() {
            return Vec::new();
        }
        let models = self.unloadable();
        let candidates: Vec<_> = models.iter().map(Unloadable::as_candidate).collect();
        let Some(chosen) = to_unload(bytes, &candidates) else { return insufficient(bytes, &candidates) };
        for name in chosen {
            self.unload_unused(name, reason);
        }
        Vec::new()
    }

    /// Returns the models that may be unloaded now: those without use that no operation changes. The operation may be the load that
    /// needs room, of another version of the model.
    fn unloadable(&self) -> Vec<Unloadable> {
        let (table, now) = (self.models.snapshot(), clock::now());
        let demanded = demanded(&table);
        // The looks of each second are too seldom: with many loads, models stay for less than that.
        self.look_at_uses(&table, &demanded, (now, Duration::MAX));
        let uses = self.memory.uses();
        let sizes = self.memory.sizes();
        let mut all = Vec::new();
        for (name, ends) in demanded.into_iter().filter(|(name, _)| !self.locks.is_held(name)) {
            let Some(gone) = ends else { continue };
            let (mut bytes, mut load) = (MemoryBytes::default(), Duration::ZERO);
            for model in &gone {
                for (version, serving) in table.serving.get(*model).into_iter().flatten() {
                    serving.executor.memory().iter().for_each(|share| bytes.add(&share.bytes()));
                    load += sizes.known(model, *version).map_or(Duration::ZERO, |known| known.load);
                }
            }
            all.push(Unloadable { name: name.to_owned(), bytes, uses_per_second: uses.per_second(now, name), load });
        }
        all
    }
}

/// Calls `unload` with the `excess` until it is zero, or until unloading models is not enough. Returns the excess that is left.
/// One call may not suffice: a model that is chosen can receive a request before it is unloaded, and the sizes of other models are
/// measured meanwhile.
fn unload_until_within(excess: impl Fn() -> MemoryBytes, unload: impl Fn(&MemoryBytes) -> Vec<Memory>) -> MemoryBytes {
    for _ in 0..MOST_UNLOADS {
        let beyond = excess();
        if beyond.is_zero() || !unload(&beyond).is_empty() {
            return beyond;
        }
    }
    excess()
}

/// Returns a model and its members, recursively, each once.
fn with_members<'t>(table: &'t Snapshot, name: &'t str) -> Vec<&'t str> {
    let mut all = vec![name];
    let mut next = 0;
    while let Some(model) = all.get(next) {
        let new: Vec<&str> = table.dependencies.members(model).filter(|member| !all.contains(member)).collect();
        all.extend(new);
        next += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Returns what is left of the excess if the calls find these excesses, and how often models are unloaded. Unloads are not enough
    /// for more than 100 bytes.
    fn unloaded(found: &[u64]) -> (u64, Vec<u64>) {
        let main = |bytes| MemoryBytes::from_iter([(Memory::Main, bytes)]);
        let (left, unloads) = (RefCell::new(found.iter()), RefCell::new(Vec::new()));
        let excess = || main(left.borrow_mut().next().copied().unwrap_or_default());
        let rest = unload_until_within(excess, |bytes| {
            unloads.borrow_mut().push(bytes.of(Memory::Main));
            if bytes.of(Memory::Main) > 100 { vec![Memory::Main] } else { Vec::new() }
        });
        (rest.of(Memory::Main), unloads.into_inner())
    }

    #[test]
    fn models_are_unloaded_until_the_rest_is_within_the_limit() {
        assert_eq!(unloaded(&[0]), (0, vec![]));
        assert_eq!(unloaded(&[100, 0]), (0, vec![100]));
        assert_eq!(unloaded(&[100, 20, 0]), (0, vec![100, 20]), "a chosen model was used, or another one has grown");
        assert_eq!(unloaded(&[100, 120, 0]), (120, vec![100, 120]), "it is not enough");
        assert_eq!(unloaded(&[1; 100]), (1, vec![1; MOST_UNLOADS]), "not for ever");
    }
}
