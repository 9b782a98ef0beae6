//! How much memory models use: their expected sizes, from files and earlier loads, and measurements of their processes.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use pharos::model::ModelConfig;
use pharos::repository::memory_budget::{Expectation, Memory, MemoryBytes, Unmeasured, after_first_requests};
use pharos_os::blocking;

use super::Loader;
use crate::scheduler::placement;
use pharos_telemetry::system::{self, ProcessMemory};

/// The most files of a model whose sizes are read.
const MAX_FILES: usize = 100_000;

/// A model version that is about to be loaded.
pub(super) struct ToLoad<'l> {
    pub(super) name: &'l str,
    pub(super) version: u64,
    pub(super) directory: &'l Path,
    pub(super) config: Option<&'l ModelConfig>,
}

impl<'l> ToLoad<'l> {
    /// Returns what estimates of its size are based on. `instances` is the number of them that use each memory.
    pub(super) fn unmeasured(&self, files: u64, instances: BTreeMap<Memory, u64>) -> Unmeasured<'l> {
        Unmeasured { backend: self.config.map_or("python", |config| config.backend.as_str()), files, instances }
    }
}

/// A loaded version to measure.
pub(super) struct ToMeasure {
    /// The limited memories of its instances.
    pub(super) memories: Vec<Memory>,
    /// The ids of its processes.
    pub(super) pids: Vec<u32>,
    /// The last known size.
    pub(super) before: MemoryBytes,
    /// Whether its load has just ended, so that it has had no requests, except warm-ups.
    pub(super) just_loaded: bool,
}

impl ToMeasure {
    /// Returns the bytes that its processes use in each of its memories; the last known number where they cannot be read.
    fn measure(&self, gpus: &ProcessMemory) -> MemoryBytes {
        let bytes = |memory: Memory| match memory {
            Memory::Main if self.just_loaded => {
                written_memory(&self.pids).map(|bytes| after_first_requests(bytes, self.pids.len()))
            }
            Memory::Main => written_memory(&self.pids),
            Memory::Gpu(number) => gpus.of(number, &self.pids),
        };
        let memories = self.memories.iter();
        memories.map(|memory| (*memory, bytes(*memory).unwrap_or_else(|| self.before.of(*memory)))).collect()
    }
}

impl Loader {
    /// Returns what estimates of a version's size are based on. Reads the sizes of its files if it was never loaded.
    pub(super) async fn unmeasured<'l>(&self, model: &ToLoad<'l>) -> Unmeasured<'l> {
        let instances = self.instances_by_memory(model.config, model.version);
        let is_known = self.memory.sizes().is_known(model.name, model.version, instances.keys());
        let files = if is_known { 0 } else { files_of(model.directory).await };
        model.unmeasured(files, instances)
    }

    /// Returns what a version is expected to use of each limited memory.
    pub(super) fn expected(&self, name: &str, version: u64, model: &Unmeasured<'_>) -> Expectation {
        self.memory.sizes().expected(name, version, model)
    }

    /// Returns the number of instances of a version that use each limited memory. Without a configuration, which the code of a
    /// Python model completes, they are placed as by default: on every GPU, or on processors if there are no GPUs.
    pub(super) fn instances_by_memory(&self, config: Option<&ModelConfig>, version: u64) -> BTreeMap<Memory, u64> {
        let by_default = || match self.settings.devices.usable() {
            [] => vec![None],
            gpus => gpus.iter().copied().map(Some).collect(),
        };
        let of_config = |config| {
            let placements = placement::of(config, version).into_iter();
            placements.map(|placement| placement.device.map(|device| device.number)).collect()
        };
        let limits = self.models.shared.memory.limits();
        let mut instances = BTreeMap::new();
        for gpu in config.map_or_else(by_default, of_config) {
            let memories = [Some(Memory::Main), gpu.map(Memory::Gpu)].into_iter().flatten();
            for memory in memories.filter(|memory| limits.get(*memory).is_some()) {
                *instances.entry(memory).or_default() += 1;
            }
        }
        instances
    }

    /// Measures versions, in their order.
    pub(super) async fn measure(&self, versions: Vec<ToMeasure>) -> Vec<MemoryBytes> {
        let on_gpus = versions.iter().flat_map(|version| &version.memories).any(|memory| *memory != Memory::Main);
        let gpus = if on_gpus { self.settings.devices.process_memory().await } else { ProcessMemory::default() };
        let measure = move || versions.iter().map(|version| version.measure(&gpus)).collect();
        blocking::run(measure).await.unwrap_or_default()
    }
}

/// Returns the bytes of the files in a directory of a model.
pub(super) async fn files_of(directory: &Path) -> u64 {
    let directory = directory.to_owned();
    blocking::run(move || bytes_in(&directory)).await.unwrap_or_default()
}

/// Links count as what they lead to, as in caches of models; a directory counts once.
fn bytes_in(directory: &Path) -> u64 {
    let (mut bytes, mut read) = (0u64, 0);
    let mut directories = vec![directory.to_owned()];
    let mut known = HashSet::new();
    while let Some(directory) = directories.pop() {
        if !fs::metadata(&directory).is_ok_and(|metadata| known.insert((metadata.dev(), metadata.ino()))) {
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
    use super::*;

    #[test]
    fn first_requests_are_counted_if_the_processes_can_be_read() {
        let before = MemoryBytes::from_iter([(Memory::Main, 7)]);
        let measured = |pids: Vec<u32>, just_loaded| {
            let version = ToMeasure { memories: vec![Memory::Main], pids, before: before.clone(), just_loaded };
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
        std::os::unix::fs::symlink("../../model.onnx", directory.path().join("a/b/link.onnx")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::write(elsewhere.path().join("external"), [0; 1000]).unwrap();
        for name in ["external", "again"] {
            std::os::unix::fs::symlink(elsewhere.path(), directory.path().join(name)).unwrap();
        }
        assert_eq!(bytes_in(directory.path()), 1223);
        assert_eq!(bytes_in(&directory.path().join("none")), 0);
    }
}
