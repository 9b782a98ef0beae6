//! Keeps the memory of all models within `--model-memory-limit`: unloads models that are loaded on demand, or refuses a load.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pharos::metrics::labels::OnDemandUnload;
use pharos::model::{ModelConfig, Scheduling};
use pharos::repository::LastUses;
use pharos::repository::memory_budget::{Candidate, KnownSize, Sizes, Unmeasured, refusal, to_unload, under_pressure};
use tokio::sync;
use tokio::time::sleep;

use super::Loader;
use super::unloading::unloadable;
use crate::scheduler::placement;
use crate::serving::{MemoryShare, Snapshot, Totals, UnloadedVersion};
use pharos_os::clock;
use pharos_telemetry::system;

/// The interval of checking whether unloaded models have ended.
const LOOK: Duration = Duration::from_millis(5);

/// The longest time that a load waits for unloaded models to end.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The most files of a model whose sizes are read.
const MAX_FILES: usize = 100_000;

/// What the limit needs to know about models.
#[derive(Default)]
pub(super) struct MemoryBudget {
    // Locked only to read or change it.
    sizes: Mutex<Sizes>,
    /// When models were last used. Locked only for one look at all models.
    pub(super) uses: Mutex<LastUses>,
    /// Memory that is reserved for versions whose load has not begun, by name and version.
    reserved: Mutex<BTreeMap<(String, u64), MemoryShare>>,
    /// Held while room is made for one load, including the wait for the ends of others.
    turn: sync::Mutex<()>,
}

impl MemoryBudget {
    fn sizes(&self) -> MutexGuard<'_, Sizes> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserved(&self) -> MutexGuard<'_, BTreeMap<(String, u64), MemoryShare>> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A model version that is about to be loaded.
pub(super) struct ToLoad<'l> {
    pub(super) name: &'l str,
    pub(super) version: u64,
    pub(super) directory: &'l Path,
    pub(super) config: Option<&'l ModelConfig>,
}

/// The bytes that a version is expected to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    /// It used so many when it was loaded before.
    Known(u64),
    /// It was never loaded.
    Guessed(u64),
}

impl Expected {
    fn bytes(self) -> u64 {
        let (Self::Known(bytes) | Self::Guessed(bytes)) = self;
        bytes
    }

    fn plus(self, other: Self) -> Self {
        let sum = self.bytes().saturating_add(other.bytes());
        match (self, other) {
            (Self::Known(_), Self::Known(_)) => Self::Known(sum),
            _ => Self::Guessed(sum),
        }
    }

    /// Returns the bytes to make free. A guess alone is no reason to refuse a load: the size is checked after it.
    fn at_most(self, limit: u64) -> u64 {
        match self {
            Self::Known(bytes) => bytes,
            Self::Guessed(bytes) => bytes.min(limit),
        }
    }
}

/// A model that can be unloaded, with what is known of it.
struct Unloadable {
    name: String,
    bytes: u64,
    unused: Duration,
    load: Duration,
}

impl Unloadable {
    fn as_candidate(&self) -> Candidate<'_> {
        Candidate { name: &self.name, bytes: self.bytes, unused: self.unused, load: self.load }
    }
}

impl Loader {
    /// Reserves memory for a version, and unloads others if it does not fit. Returns `None` without a limit.
    ///
    /// # Errors
    /// It does not fit, and unloading what may be unloaded is not enough; the text has the numbers.
    pub(super) async fn room_for(self: &Arc<Self>, model: &ToLoad<'_>) -> Result<Option<MemoryShare>, String> {
        let Some(limit) = self.models.shared.memory.limit() else { return Ok(None) };
        let key = (model.name.to_owned(), model.version);
        let reserved = self.memory.reserved().remove(&key);
        let share = match reserved {
            Some(share) => share,
            None => {
                let needed = self.expected(model).await.at_most(limit);
                // The loads of others that have begun will end, but those that have not may wait for what this load holds.
                self.make_room(model.name, (needed, limit), |totals| totals.loading > 0).await?
            }
        };
        share.begin_load();
        Ok(Some(share))
    }

    /// Reserves memory for all versions of a model that is loaded on demand, and of its members that are not loaded.
    /// [`Loader::room_for`] returns the parts, [`Loader::cancel_reservation`] drops those that are left.
    ///
    /// # Errors
    /// As [`Loader::room_for`].
    pub(super) async fn reserve_for(self: &Arc<Self>, name: &str) -> Result<(), String> {
        let Some(limit) = self.models.shared.memory.limit() else { return Ok(()) };
        let needed = self.expected_of_all(name).await;
        let sum = needed.iter().map(|(_, expected)| *expected).fold(Expected::Known(0), Expected::plus);
        let (whole, all) = (sum.at_most(limit), sum.bytes().max(1));
        let may_change = |totals: &Totals| totals.loading > 0 || totals.reserved > 0;
        let reserved = self.make_room(name, (whole, limit), may_change).await?;
        let part = |expected: Expected| (u128::from(expected.bytes()) * u128::from(whole) / u128::from(all)) as u64;
        self.memory.reserved().extend(needed.into_iter().map(|(key, expected)| (key, reserved.split(part(expected)))));
        Ok(())
    }

    /// Returns what each version of a model and its members is expected to use, of those that are loaded on demand and not loaded.
    async fn expected_of_all(&self, name: &str) -> Vec<((String, u64), Expected)> {
        let mut all = Vec::new();
        for (name, (version, directory, config)) in self.unloaded_versions(name) {
            let model = ToLoad { name: &name, version, directory: &directory, config: config.as_deref() };
            let expected = self.expected(&model).await;
            all.push(((name, version), expected));
        }
        all
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

    /// Drops the reservations of [`Loader::reserve_for`] that no load has used.
    pub(super) fn cancel_reservation(&self, name: &str) {
        let table = self.models.snapshot();
        let names = with_members(&table, name);
        self.memory.reserved().retain(|(model, _), _| !names.contains(&model.as_str()));
    }

    /// Measures a version after its load of `load`, and unloads others if it is larger than expected.
    ///
    /// # Errors
    /// It does not fit; the text has the numbers.
    pub(super) async fn measure_loaded(
        self: &Arc<Self>,
        model: &ToLoad<'_>,
        (share, pids): (&MemoryShare, Vec<u32>),
        load: Duration,
    ) -> Result<(), String> {
        let measured = tokio::task::spawn_blocking(move || written_memory(&pids)).await.ok().flatten();
        let Some(limit) = self.models.shared.memory.limit() else { return Ok(()) };
        let bytes = measured.unwrap_or_else(|| share.bytes());
        let is_new = self.memory.sizes().known(model.name, model.version).is_none();
        let files = if is_new { Some(files_of(model.directory).await) } else { None };
        let unmeasured = files.map(|files| unmeasured(model, files));
        self.memory.sizes().loaded(model.name, model.version, KnownSize { bytes, load }, unmeasured);
        share.set(bytes);
        if self.excess(limit) == 0 {
            return Ok(());
        }
        let _turn = self.memory.turn.lock().await;
        self.unload_some(self.excess(limit), OnDemandUnload::Memory);
        match self.excess(limit) {
            0 => Ok(()),
            _ => Err(self.refused(model.name, (bytes, limit))),
        }
    }

    /// Measures the loaded models, and unloads some if they have grown beyond the limit, or one if the machine lacks memory.
    pub(super) async fn watch_memory(self: &Arc<Self>) {
        let Some(limit) = self.models.shared.memory.limit() else { return };
        self.measure_all().await;
        let _turn = self.memory.turn.lock().await;
        let excess = self.excess(limit);
        if excess > 0 {
            self.unload_some(excess, OnDemandUnload::Memory);
        }
        let pressure = self.settings.on_demand.memory_pressure.clone();
        let text = tokio::task::spawn_blocking(move || fs::read_to_string(pressure)).await;
        if text.is_ok_and(|text| text.is_ok_and(|text| under_pressure(&text))) {
            self.unload_some(1, OnDemandUnload::Pressure);
        }
    }

    async fn measure_all(&self) {
        let loaded: Vec<(String, u64, Arc<MemoryShare>, Vec<u32>)> = {
            let table = self.models.snapshot();
            let loaded = table.serving.iter().flat_map(|(name, versions)| {
                versions.iter().filter_map(move |(version, serving)| {
                    let (memory, pids) = (serving.executor.memory()?.clone(), serving.instances()?.pids());
                    Some((name.clone(), *version, memory, pids))
                })
            });
            loaded.collect()
        };
        let measure = move || {
            let measured = loaded.into_iter().map(|(name, version, share, pids)| {
                let bytes = written_memory(&pids);
                bytes.iter().for_each(|bytes| share.set(*bytes));
                (name, version, bytes)
            });
            measured.collect::<Vec<_>>()
        };
        for (name, version, bytes) in tokio::task::spawn_blocking(measure).await.unwrap_or_default() {
            bytes.iter().for_each(|bytes| self.memory.sizes().grown(&name, version, *bytes));
        }
    }

    /// Returns how many bytes more than the limit models use, without those that are ending.
    fn excess(&self, limit: u64) -> u64 {
        let totals = self.models.shared.memory.totals();
        (totals.used - totals.ending).saturating_sub(limit)
    }

    /// Waits until `needed` bytes are free, and reserves them. If unloading models is not enough, waits while `may_change`: the
    /// sizes of models that are being loaded may be smaller than reserved, and they may be unloaded afterwards.
    async fn make_room(
        self: &Arc<Self>,
        name: &str,
        (needed, limit): (u64, u64),
        may_change: impl Fn(&Totals) -> bool,
    ) -> Result<MemoryShare, String> {
        let memory = &self.models.shared.memory;
        let _turn = self.memory.turn.lock().await;
        let began = clock::now();
        while !self.exiting.load(Ordering::Relaxed) && clock::now() - began < LONGEST_WAIT {
            let totals = memory.totals();
            if totals.used.saturating_add(needed) <= limit {
                return Ok(memory.reserve(needed));
            }
            let missing = (totals.used - totals.ending).saturating_add(needed).saturating_sub(limit);
            if missing > 0
                && !self.unload_some(missing, OnDemandUnload::Memory)
                && (needed > limit || !may_change(&totals))
            {
                return Err(self.refused(name, (needed, limit)));
            }
            sleep(LOOK).await;
        }
        Err(self.refused(name, (needed, limit)))
    }

    fn refused(&self, name: &str, (needed, limit): (u64, u64)) -> String {
        let unused = self.unloadable().iter().map(|model| model.bytes).sum();
        refusal(name, (needed, limit), (self.models.shared.memory.totals().used, unused))
    }

    /// Begins to unload models that together have at least `bytes`. Returns whether there are so many; if not, unloads none.
    fn unload_some(self: &Arc<Self>, bytes: u64, reason: OnDemandUnload) -> bool {
        let models = self.unloadable();
        let candidates: Vec<_> = models.iter().map(Unloadable::as_candidate).collect();
        let Some(chosen) = to_unload(bytes, &candidates) else { return false };
        for name in chosen {
            self.unload_unused(name, reason);
        }
        true
    }

    /// Returns the models that may be unloaded now.
    fn unloadable(&self) -> Vec<Unloadable> {
        let (table, now) = (self.models.snapshot(), clock::now());
        let uses = self.memory.uses.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = self.memory.sizes();
        let mut all = Vec::new();
        for name in &table.demanded {
            let Some(gone) = unloadable(&table, name) else { continue };
            let (mut bytes, mut load) = (0, Duration::ZERO);
            for model in &gone {
                for (version, serving) in table.serving.get(*model).into_iter().flatten() {
                    bytes += serving.executor.memory().map_or(0, |share| share.bytes());
                    load += sizes.known(model, *version).map_or(Duration::ZERO, |known| known.load);
                }
            }
            all.push(Unloadable { name: name.clone(), bytes, unused: uses.unused(now, name), load });
        }
        all
    }

    /// Returns the bytes that a version is expected to use.
    async fn expected(&self, model: &ToLoad<'_>) -> Expected {
        if let Some(known) = self.memory.sizes().known(model.name, model.version) {
            return Expected::Known(known.bytes);
        }
        let files = files_of(model.directory).await;
        Expected::Guessed(self.memory.sizes().expected(unmeasured(model, files)))
    }
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

fn unmeasured<'l>(model: &ToLoad<'l>, files: u64) -> Unmeasured<'l> {
    let instances = model.config.map_or(1, |config| placement::of(config, model.version).len() as u64);
    Unmeasured { backend: model.config.map_or("python", |config| config.backend.as_str()), files, instances }
}

/// Returns the bytes of the files in a directory of a model.
async fn files_of(directory: &Path) -> u64 {
    let directory = directory.to_owned();
    tokio::task::spawn_blocking(move || bytes_in(&directory)).await.unwrap_or_default()
}

fn bytes_in(directory: &Path) -> u64 {
    let (mut bytes, mut read) = (0u64, 0);
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            read += 1;
            // Links to files count as the files, as in caches of models; links to directories are not followed.
            match (entry.file_type(), fs::metadata(entry.path())) {
                (Ok(kind), _) if kind.is_dir() => directories.push(entry.path()),
                (_, Ok(metadata)) if metadata.is_file() => bytes = bytes.saturating_add(metadata.len()),
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
    use super::*;

    #[test]
    fn the_files_of_a_model_are_those_in_all_its_directories() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("a/b")).unwrap();
        fs::write(directory.path().join("model.onnx"), [0; 100]).unwrap();
        fs::write(directory.path().join("a/b/weights"), [0; 23]).unwrap();
        std::os::unix::fs::symlink("../..", directory.path().join("a/b/loop")).unwrap();
        std::os::unix::fs::symlink("../../model.onnx", directory.path().join("a/b/link.onnx")).unwrap();
        assert_eq!(bytes_in(directory.path()), 223);
        assert_eq!(bytes_in(&directory.path().join("none")), 0);
    }
}
