//! Keeps the memory of all models within `--model-memory-limit` and `--model-gpu-memory-limit`:
//! unloads models that are loaded on demand, or refuses a load. The sizes of models are expected
//! from their files and from earlier loads, and measured while they run.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::metrics::labels::OnDemandUnload;
use pharos::model::{ModelConfig, Scheduling};
use pharos::repository::memory_budget::{
    Candidate, Expectation, KnownSize, Memory, MemoryBytes, Shortage, Sizes, Unmeasured,
    after_first_requests, insufficient, refusal, to_unload, under_pressure,
};
use pharos::repository::{Uses, VersionFingerprint};
use pharos::timeline::Instant;
use tokio::sync;

use super::Loader;
use super::on_demand::{any_executes, any_is_awaited, demanded};
use crate::model_memory::{MemoryShare, Totals};
use crate::scheduler::placement;
use crate::serving::{Serving, Snapshot, UnloadedVersion};
use pharos_os::{blocking, clock};
use pharos_telemetry::system::{self, ProcessMemory};

/// The longest time between two checks whether a model fits: a model that executed requests may be
/// unloaded now.
const LOOK: Duration = Duration::from_millis(5);

/// How often models are chosen to be unloaded for a model that turned out larger than expected,
/// before its load fails.
const MOST_UNLOADS: usize = 16;

/// The longest time that a load waits for unloaded models to end.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The longest time that a load waits for requests that other models execute, if these models may
/// be unloaded afterwards. Counted from the request, so that loads that wait for their turn
/// meanwhile do not add up their times.
const LONGEST_EXECUTION: Duration = Duration::from_secs(1);

/// The most files of a model whose sizes are read.
const MAX_FILES: usize = 100_000;

/// What the limits need to know about models.
#[derive(Default)]
pub(super) struct MemoryBudget {
    // Locked only to read or change it.
    sizes: Mutex<Sizes>,
    /// How often models are used. Locked only for one look at all models.
    uses: Mutex<Uses>,
    /// Memory that is reserved for the versions of models whose load has not begun, by the name of
    /// the model.
    reserved: Mutex<BTreeMap<String, Reserved>>,
    /// Held while models are chosen and withdrawn, and while what is free is reserved, without any
    /// wait.
    turn: Mutex<()>,
    /// Held by a load on demand until it has a reservation, so that a large one gets its turn.
    /// Loads that have begun do not wait for it: what it waits for may be their end.
    queue: sync::Mutex<()>,
}

impl MemoryBudget {
    pub(super) fn sizes(&self) -> MutexGuard<'_, Sizes> {
        self.sizes.lock()
    }

    pub(super) fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock()
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    fn reserved(&self) -> MutexGuard<'_, BTreeMap<String, Reserved>> {
        self.reserved.lock()
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
pub(super) struct LoadedVersion<'l> {
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

/// A model version that is about to be loaded.
pub(super) struct ToLoad<'l> {
    pub(super) name: &'l str,
    pub(super) version: u64,
    pub(super) directory: &'l Path,
    pub(super) config: Option<&'l ModelConfig>,
}

impl<'l> ToLoad<'l> {
    /// Returns what estimates of its size are based on. `instances` is the number of them that use
    /// each memory.
    fn unmeasured(&self, files: u64, instances: BTreeMap<Memory, u64>) -> Unmeasured<'l> {
        Unmeasured {
            backend: self.config.map_or("python", |config| config.backend.as_str()),
            files,
            instances,
        }
    }
}

/// A loaded version to measure.
struct ToMeasure {
    /// The limited memories of its instances.
    memories: Vec<Memory>,
    /// The ids of its processes.
    pids: Vec<u32>,
    /// The last known size.
    before: MemoryBytes,
    /// Whether its load has just ended, so that it has had no requests, except warm-ups.
    just_loaded: bool,
}

impl ToMeasure {
    /// Returns the bytes that its processes use in each of its memories; the last known number
    /// where they cannot be read.
    fn measure(&self, gpus: &ProcessMemory) -> MemoryBytes {
        let sizes = self.memories.iter().map(|memory| {
            let bytes = match *memory {
                Memory::Main if self.just_loaded => written_memory(&self.pids)
                    .map(|bytes| after_first_requests(bytes, self.pids.len())),
                Memory::Main => written_memory(&self.pids),
                Memory::Gpu(number) => gpus.of(number, &self.pids),
            };
            (*memory, bytes.unwrap_or_else(|| self.before.of(*memory)))
        });
        sizes.collect()
    }
}

impl Loader {
    /// Reserves memory for a version, and unloads others if it does not fit. Returns `None` without
    /// a limit.
    ///
    /// # Errors
    /// The version does not fit, and unloading what may be unloaded is not enough; the text has the
    /// numbers.
    pub(super) async fn room_for(
        self: &Arc<Self>,
        model: &ToLoad<'_>,
    ) -> Result<Option<MemoryShare>, String> {
        let memory = &self.models.shared.memory;
        if !memory.is_limited() {
            return Ok(None);
        }
        let unmeasured = self.unmeasured(model).await;
        let expected =
            || self.expected(model.name, model.version, &unmeasured).within(memory.limits());
        // The model may have other versions, or more instances, than when its memory was reserved.
        let reserved = self.memory.reserved().get(model.name).map(|reserved| Reserved {
            share: reserved.share.split(&expected()),
            reduced: reserved.reduced,
        });
        let needed = || match &reserved {
            None => expected(),
            Some(Reserved { reduced: true, .. }) => MemoryBytes::default(),
            Some(Reserved { reduced: false, share }) => {
                let mut needed = expected();
                needed.subtract(&share.bytes());
                needed
            }
        };
        // Loads of others that have begun will end, but loads that have not begun may wait for what
        // this load holds.
        let share =
            self.make_room(model.name, clock::now(), needed, |totals| totals.loading > 0).await?;
        if let Some(reserved) = reserved {
            share.merge(&reserved.share);
        }
        share.begin_load();
        Ok(Some(share))
    }

    /// Returns what a loaded version will use with the instances of another configuration: as much
    /// for each as its instances use now.
    pub(super) fn size_with(&self, serving: &Serving, config: &ModelConfig) -> MemoryBytes {
        let used = serving.executor.memory().map(|share| share.bytes()).unwrap_or_default();
        let version = serving.model.version;
        let before = self.instances_by_memory(Some(&serving.config), version);
        let after = self.instances_by_memory(Some(config), version);
        let sizes = after.into_iter().map(|(memory, instances)| {
            let instances_before = before.get(&memory).copied().unwrap_or_default().max(1);
            (memory, (used.of(memory) / instances_before).saturating_mul(instances))
        });
        sizes.collect()
    }

    /// Reserves memory for what a loaded version will use beyond what it uses now. Returns `None`
    /// without a limit.
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
        let name = serving.model.name.to_string();
        let room = self.make_room(&name, clock::now(), needed, |totals| totals.loading > 0).await?;
        room.begin_load();
        Ok(Some(room))
    }

    /// Reserves memory for all versions of a model that is loaded on demand, and of its members
    /// that are not loaded. [`Loader::room_for`] returns the parts. Dropping the reservation frees
    /// what is left of it.
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
        let expected = || -> Vec<Expectation> {
            models
                .iter()
                .map(|(name, version, model)| self.expected(name, *version, model))
                .collect()
        };
        let _queue = self.memory.queue.lock().await;
        let needed = || sum_of(&expected()).within(memory.limits());
        let may_change = |totals: &Totals| totals.loading > 0 || totals.reserved > 0;
        let reserved = self.make_room(name, began, needed, may_change).await?;
        let whole = reserved.bytes();
        let expected_now = expected();
        let all = sum_of(&expected_now);
        let reduced = !whole.covers(&all.bytes());
        let mut by_name = self.memory.reserved();
        let mut reservation = Reservation { loader: self.clone(), parts: Vec::new() };
        for ((name, ..), expectation) in models.iter().zip(&expected_now) {
            let part = reserved.split(&expectation.part_of(&whole, &all));
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

    /// Returns the versions with workers of a model and its members, where they are loaded on
    /// demand and not loaded.
    fn unloaded_versions(&self, name: &str) -> Vec<(String, UnloadedVersion)> {
        let table = self.models.snapshot();
        let mut versions = Vec::new();
        for name in with_members(&table, name) {
            let Some(model) =
                table.on_demand.get(name).filter(|_| !table.serving.contains_key(name))
            else {
                continue;
            };
            for version in model.to_load() {
                let config = version.2.as_deref();
                if !config
                    .is_some_and(|config| matches!(config.scheduling, Scheduling::Ensemble { .. }))
                {
                    versions.push((name.to_owned(), version));
                }
            }
        }
        versions
    }

    /// Measures a version after its load, unless that was done for a recent one, and unloads others
    /// if it is larger than expected.
    ///
    /// # Errors
    /// The version does not fit; the text has the numbers.
    pub(super) async fn measure_loaded(
        self: &Arc<Self>,
        model: &ToLoad<'_>,
        loaded: LoadedVersion<'_>,
    ) -> Result<(), String> {
        let LoadedVersion { share, pids, time, fingerprint } = loaded;
        let instances = self.instances_by_memory(model.config, model.version);
        let now = clock::now();
        let recent =
            self.memory.sizes().recent(model.name, model.version, fingerprint, now, &instances);
        let (bytes, measured) = match recent {
            // The kernel walks all pages of a process to answer, for 0.3 ms and more, and the
            // versions are measured each second anyway.
            Some(known) => known,
            None => {
                let before = share.bytes();
                let memories = instances.keys().copied().collect();
                let to_measure =
                    ToMeasure { memories, pids, before: before.clone(), just_loaded: true };
                (self.measure(vec![to_measure]).await.pop().unwrap_or(before), now)
            }
        };
        let is_known = self.memory.sizes().is_known(model.name, model.version, instances.keys());
        let files = if is_known { None } else { Some(files_of(model.directory).await) };
        let size = KnownSize {
            bytes: bytes.clone(),
            instances: instances.clone(),
            load: time,
            fingerprint,
            measured,
        };
        // The size of a model that can never be loaded does not predict what others of its backend
        // need.
        let limits = self.models.shared.memory.limits();
        let is_possible = bytes
            .iter()
            .all(|(memory, bytes)| limits.get(memory).is_none_or(|limit| bytes <= limit));
        let unmeasured =
            files.filter(|_| is_possible).map(|files| model.unmeasured(files, instances));
        self.memory.sizes().loaded(model.name, model.version, size, unmeasured.as_ref());
        share.set(bytes.clone());
        // Other memories may have no room left because of other models.
        let excess = || -> MemoryBytes {
            self.models
                .shared
                .memory
                .excess()
                .iter()
                .filter(|(memory, _)| bytes.of(*memory) > 0)
                .collect()
        };
        if excess().is_zero() {
            return Ok(());
        }
        let _turn = self.memory.turn();
        match unload_until_within(excess, |bytes| self.unload_some(bytes, OnDemandUnload::Memory))
            .iter()
            .next()
        {
            None => Ok(()),
            Some((memory, _)) => {
                Err(self.refused(model.name, memory, bytes.of(memory), bytes.of(memory)))
            }
        }
    }

    /// Measures the loaded models, and unloads some if they have grown beyond a limit, or one if
    /// the machine lacks memory.
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
            self.unload_some(
                &MemoryBytes::from_iter([(Memory::Main, 1)]),
                OnDemandUnload::Pressure,
            );
        }
    }

    async fn measure_all(&self) {
        let mut loaded = Vec::new();
        let mut to_measure = Vec::new();
        for (name, versions) in &self.models.snapshot().serving {
            for (number, serving) in versions {
                let Some(share) = serving.executor.memory() else { continue };
                let Some(instances) = serving.instances() else { continue };
                let of_each = self.instances_by_memory(Some(&*serving.config), *number);
                to_measure.push(ToMeasure {
                    memories: of_each.keys().copied().collect(),
                    pids: instances.pids(),
                    before: share.bytes(),
                    just_loaded: false,
                });
                loaded.push((name.clone(), *number, share.clone(), of_each));
            }
        }
        for ((name, version, share, of_each), bytes) in
            loaded.into_iter().zip(self.measure(to_measure).await)
        {
            self.memory.sizes().grown(&name, version, &bytes, &of_each);
            share.set(bytes);
        }
    }

    /// Waits until the bytes that `needed` returns are free, and reserves them. If unloading models
    /// is not enough, waits for requests that others execute, until [`LONGEST_EXECUTION`] after
    /// `began`, and while `may_change` for the memories that lack them: the sizes of models that
    /// are being loaded may be smaller than reserved, and they may be unloaded afterwards, once the
    /// requests that waited for them have found them. What is needed may change too, since models
    /// of the same backend are measured meanwhile.
    async fn make_room(
        self: &Arc<Self>,
        name: &str,
        began: Instant,
        needed: impl Fn() -> MemoryBytes,
        may_change: impl Fn(&Totals) -> bool,
    ) -> Result<MemoryShare, String> {
        let memory = &self.models.shared.memory;
        let turn_began = clock::now();
        let mut lacking = Memory::Main;
        let mut lacking_bytes = 0;
        let mut changes = memory.changes();
        while !self.is_exiting() && clock::now() - turn_began < LONGEST_WAIT {
            changes.mark_unchanged();
            let bytes = needed();
            let reserved = self.reserve_or_unload(name, &bytes, |totals| {
                may_change(totals)
                    || (clock::now() - began < LONGEST_EXECUTION
                        && any_executes(&self.models.snapshot()))
            });
            if let Some(share) = reserved? {
                return Ok(share);
            }
            if let Some((first, _)) = memory.missing(&bytes).iter().next() {
                lacking = first;
                lacking_bytes = bytes.of(first);
            }
            let _ = clock::timeout(LOOK, changes.changed()).await;
        }
        Err(self.refused(name, lacking, lacking_bytes, 0))
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
        // Read first: if a load ends afterwards, the next call considers its size, and may unload
        // it.
        let limits = memory.limits().iter().map(|(limited, _)| limited);
        let awaited = any_is_awaited(&self.models.snapshot());
        let changing: Vec<Memory> =
            limits.filter(|limited| awaited || may_change(&memory.totals(*limited))).collect();
        if memory.missing(needed).is_zero() {
            return Ok(Some(memory.reserve(needed.clone())));
        }
        let short = self.unload_some(&memory.missing_after_ends(needed), OnDemandUnload::Memory);
        let settled = |limited: &Memory| {
            needed.of(*limited) > memory.limits().of(*limited) || !changing.contains(limited)
        };
        match short.into_iter().find(settled) {
            Some(limited) => Err(self.refused(name, limited, needed.of(limited), 0)),
            None => Ok(None),
        }
    }

    /// Returns the text for a model that needs `needed` bytes, already uses `own` of them, and does
    /// not fit.
    fn refused(&self, name: &str, memory: Memory, needed: u64, own: u64) -> String {
        let all = &self.models.shared.memory;
        let limit = all.limits().of(memory);
        let used = all.totals(memory).used.saturating_sub(own);
        let unused = self.unloadable().iter().map(|model| model.bytes.of(memory)).sum();
        refusal(name, Shortage { memory, needed, limit, used, unused })
    }

    /// Begins to unload models that together have at least these bytes. If all of them have too few
    /// bytes in some memories, unloads none, and returns these memories.
    fn unload_some(self: &Arc<Self>, bytes: &MemoryBytes, reason: OnDemandUnload) -> Vec<Memory> {
        if bytes.is_zero() {
            return Vec::new();
        }
        let models = self.unloadable();
        let candidates: Vec<_> = models.iter().map(Unloadable::as_candidate).collect();
        let Some(chosen) = to_unload(bytes, &candidates) else {
            return insufficient(bytes, &candidates);
        };
        for name in chosen {
            self.unload_unused(name, reason);
        }
        Vec::new()
    }

    /// Returns the models that may be unloaded now: those without use that no operation changes.
    /// The operation may be the load that needs room, of another version of the model.
    fn unloadable(&self) -> Vec<Unloadable> {
        let table = self.models.snapshot();
        let now = clock::now();
        let demanded = demanded(&table);
        // The looks of each second are too seldom: with many loads, models stay for less than that.
        self.look_at_uses(&table, &demanded, now, Duration::MAX);
        let uses = self.memory.uses();
        let sizes = self.memory.sizes();
        let mut all = Vec::new();
        for (name, ends) in demanded.into_iter().filter(|(name, _)| !self.locks.is_held(name)) {
            let Some(gone) = ends else { continue };
            let mut bytes = MemoryBytes::default();
            let mut load = Duration::ZERO;
            for model in &gone {
                for (version, serving) in table.serving.get(*model).into_iter().flatten() {
                    serving.executor.memory().iter().for_each(|share| bytes.add(&share.bytes()));
                    load += sizes.known(model, *version).map_or(Duration::ZERO, |known| known.load);
                }
            }
            all.push(Unloadable {
                name: name.to_owned(),
                bytes,
                uses_per_second: uses.per_second(now, name),
                load,
            });
        }
        all
    }

    /// Returns what estimates of a version's size are based on. Reads the sizes of its files if it
    /// was never loaded.
    async fn unmeasured<'l>(&self, model: &ToLoad<'l>) -> Unmeasured<'l> {
        let instances = self.instances_by_memory(model.config, model.version);
        let is_known = self.memory.sizes().is_known(model.name, model.version, instances.keys());
        let files = if is_known { 0 } else { files_of(model.directory).await };
        model.unmeasured(files, instances)
    }

    /// Returns what a version is expected to use of each limited memory.
    fn expected(&self, name: &str, version: u64, model: &Unmeasured<'_>) -> Expectation {
        self.memory.sizes().expected(name, version, model)
    }

    /// Returns the number of instances of a version that use each limited memory. Without a
    /// configuration, which the code of a Python model completes, they are placed as by default: on
    /// every GPU, or on processors if there are no GPUs.
    fn instances_by_memory(
        &self,
        config: Option<&ModelConfig>,
        version: u64,
    ) -> BTreeMap<Memory, u64> {
        let gpus: Vec<Option<u32>> = match (config, self.settings.devices.usable()) {
            (Some(config), _) => {
                let placements = placement::of(config, version).into_iter();
                placements.map(|placement| placement.device.map(|device| device.number)).collect()
            }
            (None, []) => vec![None],
            (None, gpus) => gpus.iter().copied().map(Some).collect(),
        };
        let limits = self.models.shared.memory.limits();
        let mut instances = BTreeMap::new();
        for gpu in gpus {
            let memories = [Some(Memory::Main), gpu.map(Memory::Gpu)].into_iter().flatten();
            for memory in memories.filter(|memory| limits.get(*memory).is_some()) {
                *instances.entry(memory).or_default() += 1;
            }
        }
        instances
    }

    /// Measures versions, in their order.
    async fn measure(&self, versions: Vec<ToMeasure>) -> Vec<MemoryBytes> {
        let on_gpus = versions
            .iter()
            .flat_map(|version| &version.memories)
            .any(|memory| *memory != Memory::Main);
        let gpus = if on_gpus {
            self.settings.devices.process_memory().await
        } else {
            ProcessMemory::default()
        };
        blocking::run(move || versions.iter().map(|version| version.measure(&gpus)).collect())
            .await
            .unwrap_or_default()
    }
}

/// Calls `unload` with the `excess` until it is zero, or until unloading models is not enough.
/// Returns the excess that is left. One call may not suffice: a model that is chosen can receive a
/// request before it is unloaded, and the sizes of other models are measured meanwhile.
fn unload_until_within(
    excess: impl Fn() -> MemoryBytes,
    unload: impl Fn(&MemoryBytes) -> Vec<Memory>,
) -> MemoryBytes {
    for _ in 0..MOST_UNLOADS {
        let beyond = excess();
        if beyond.is_zero() || !unload(&beyond).is_empty() {
            return beyond;
        }
    }
    excess()
}

fn sum_of(expected: &[Expectation]) -> Expectation {
    let mut sum = Expectation::default();
    expected.iter().for_each(|one| sum.add(one));
    sum
}

/// Returns a model and its members, recursively, each once.
fn with_members<'t>(table: &'t Snapshot, name: &'t str) -> Vec<&'t str> {
    let mut all = vec![name];
    let mut next = 0;
    while let Some(model) = all.get(next) {
        let new: Vec<&str> =
            table.dependencies.members(model).filter(|member| !all.contains(member)).collect();
        all.extend(new);
        next += 1;
    }
    all
}

/// Returns the bytes of the files in a directory of a model.
async fn files_of(directory: &Path) -> u64 {
    let directory = directory.to_owned();
    blocking::run(move || bytes_in(&directory)).await.unwrap_or_default()
}

/// Links count as what they lead to, as in caches of models; a directory counts once.
fn bytes_in(directory: &Path) -> u64 {
    let mut bytes = 0u64;
    let mut read = 0;
    let mut directories = vec![directory.to_owned()];
    let mut known = HashSet::new();
    while let Some(directory) = directories.pop() {
        if !fs::metadata(&directory)
            .is_ok_and(|metadata| known.insert((metadata.dev(), metadata.ino())))
        {
            continue;
        }
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            read += 1;
            match fs::metadata(entry.path()) {
                Ok(metadata) if metadata.is_dir() => directories.push(entry.path()),
                Ok(metadata) if metadata.is_file() => bytes = bytes.saturating_add(metadata.len()),
                _ => {}
            }
            if read >= MAX_FILES {
                return bytes;
            }
        }
    }
    bytes
}

/// Returns the bytes that these processes have written; `None` if one cannot be read.
fn written_memory(pids: &[u32]) -> Option<u64> {
    let read = pids.iter().map(|pid| system::written_memory(Path::new("/proc"), *pid));
    read.sum::<Option<u64>>().filter(|bytes| *bytes > 0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Returns what is left of the excess if the calls find these excesses, and how often models
    /// are unloaded. Unloads are not enough for more than 100 bytes.
    fn unloaded(found: &[u64]) -> (u64, Vec<u64>) {
        let main = |bytes| MemoryBytes::from_iter([(Memory::Main, bytes)]);
        let left = RefCell::new(found.iter());
        let unloads = RefCell::new(Vec::new());
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
        assert_eq!(
            unloaded(&[100, 20, 0]),
            (0, vec![100, 20]),
            "a chosen model was used, or another one has grown"
        );
        assert_eq!(unloaded(&[100, 120, 0]), (120, vec![100, 120]), "it is not enough");
        assert_eq!(unloaded(&[1; 100]), (1, vec![1; MOST_UNLOADS]), "not for ever");
    }

    #[test]
    fn first_requests_are_counted_if_the_processes_can_be_read() {
        let before = MemoryBytes::from_iter([(Memory::Main, 7)]);
        let measured = |pids: Vec<u32>, just_loaded| {
            let version = ToMeasure {
                memories: vec![Memory::Main],
                pids,
                before: before.clone(),
                just_loaded,
            };
            version.measure(&ProcessMemory::default()).of(Memory::Main)
        };
        let mut process = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let two = vec![process.id(); 2];
        // A process that has just begun still changes its memory.
        let more = || measured(two.clone(), true).checked_sub(measured(two.clone(), false));
        let is_counted = (0..10_000).any(|_| more() == Some(64 << 10));
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(is_counted);
        assert_eq!(measured(vec![u32::MAX], true), 7, "unreadable");
    }

    #[test]
    fn the_files_of_a_model_are_those_in_all_its_directories() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        fs::write(directory.path().join("model.onnx"), [0; 100]).unwrap();
        fs::write(directory.path().join("a/b/weights"), [0; 23]).unwrap();
        std::os::unix::fs::symlink("../..", directory.path().join("a/b/loop")).unwrap();
        std::os::unix::fs::symlink("../../model.onnx", directory.path().join("a/b/link.onnx"))
            .unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::write(elsewhere.path().join("external"), [0; 1000]).unwrap();
        for name in ["external", "again"] {
            std::os::unix::fs::symlink(elsewhere.path(), directory.path().join(name)).unwrap();
        }
        assert_eq!(bytes_in(directory.path()), 1223);
        assert_eq!(bytes_in(&directory.path().join("none")), 0);
    }
}
