//! How much a model needs: as much as the last time, or an estimate before its first load.

use std::collections::BTreeMap;
use std::time::Duration;

use super::bytes::{Memory, MemoryBytes};
use crate::repository::VersionFingerprint;
use crate::timeline::Instant;

/// How long the measurement of a version is used for its next loads too.
const MEASURED_AGAIN: Duration = Duration::from_secs(60);

/// What is known of a model version from its loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownSize {
    /// The bytes that it used, with an entry for each memory that was measured.
    pub bytes: MemoryBytes,
    /// The number of its instances that used each memory.
    pub instances: BTreeMap<Memory, u64>,
    /// The duration of its loads: an average in which the last one weighs a quarter.
    pub load: Duration,
    /// The files and the configuration that it was loaded with.
    pub fingerprint: VersionFingerprint,
    /// When it was measured, after this load or after an earlier one.
    pub measured: Instant,
}

impl KnownSize {
    /// Returns the bytes of this many instances in a memory; `None` if it was not measured.
    fn bytes_of(&self, memory: Memory, instances: u64) -> Option<u64> {
        let bytes = self.bytes.get(memory)?;
        let before = self.instances.get(&memory).copied().unwrap_or_default();
        if before == 0 || before == instances {
            return Some(bytes);
        }
        Some(
            u64::try_from(u128::from(bytes) * u128::from(instances) / u128::from(before))
                .unwrap_or(u64::MAX),
        )
    }
}

/// The files and the program of a model version that was never loaded.
#[derive(Clone, Debug)]
pub struct Unmeasured<'b> {
    /// The backend.
    pub backend: &'b str,
    /// The bytes of its files.
    pub files: u64,
    /// The number of its instances that use each memory.
    pub instances: BTreeMap<Memory, u64>,
}

/// The bytes that a version is expected to use in one memory.
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
}

/// The bytes that one or several versions are expected to use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expectation(BTreeMap<Memory, Expected>);

impl Expectation {
    /// Adds the bytes of another version.
    pub fn add(&mut self, other: &Self) {
        for (memory, expected) in &other.0 {
            let sum = self.0.entry(*memory).or_insert(Expected::Known(0));
            *sum = sum.plus(*expected);
        }
    }

    /// Returns the bytes, guesses included.
    pub fn bytes(&self) -> MemoryBytes {
        self.0.iter().map(|(memory, expected)| (*memory, expected.bytes())).collect()
    }

    /// Returns the bytes to make free. A guess alone is no reason to refuse a load: the size is
    /// checked after it.
    pub fn within(&self, limits: &MemoryBytes) -> MemoryBytes {
        self.0
            .iter()
            .map(|(memory, expected)| {
                let bytes = match expected {
                    Expected::Known(bytes) => *bytes,
                    Expected::Guessed(bytes) => {
                        limits.get(*memory).map_or(*bytes, |limit| limit.min(*bytes))
                    }
                };
                (*memory, bytes)
            })
            .collect()
    }

    /// Returns the part of `whole` for this version, of several with the sum `all`.
    pub fn part_of(&self, whole: &MemoryBytes, all: &Self) -> MemoryBytes {
        self.0
            .iter()
            .map(|(memory, expected)| {
                let sum = all.0.get(memory).map_or(0, |sum| sum.bytes()).max(1);
                let part =
                    u128::from(expected.bytes()) * u128::from(whole.of(*memory)) / u128::from(sum);
                (*memory, u64::try_from(part).unwrap_or(u64::MAX))
            })
            .collect()
    }
}

/// The bytes that an instance writes with its first requests: parts of its stack and of the queues
/// that it shares with the server.
const FIRST_REQUESTS: u64 = 32 << 10;

/// Returns the bytes of main memory that a version is expected to use after its first requests.
/// `measured` are its bytes before them, `instances` is the number of its processes.
pub fn after_first_requests(measured: u64, instances: usize) -> u64 {
    measured.saturating_add(FIRST_REQUESTS.saturating_mul(instances as u64))
}

/// The sizes of models that were loaded before.
#[derive(Debug, Default)]
pub struct Sizes {
    versions: BTreeMap<(String, u64), KnownSize>,
    /// The largest numbers of bytes that an instance used beyond the files of its model, by
    /// backend.
    overheads: BTreeMap<String, Overheads>,
}

/// The bytes that an instance used beyond the files of its model; `None` if none was measured.
#[derive(Clone, Copy, Debug, Default)]
struct Overheads {
    main: Option<u64>,
    gpu: Option<u64>,
}

/// The bytes that an instance is expected to use beyond the files of its model, before one of its
/// backend was measured.
const OVERHEAD: u64 = 16 << 20;

/// The same for Python models, which import libraries.
const PYTHON_OVERHEAD: u64 = 32 << 20;

/// The same on a GPU: the CUDA context of the process with the kernels of its framework takes some
/// hundred MiB, whatever the size of the model. A guess that is too small is corrected after the
/// load; one that is too large unloads models that could stay.
const GPU_OVERHEAD: u64 = 512 << 20;

impl Overheads {
    fn of(&mut self, memory: Memory) -> &mut Option<u64> {
        match memory {
            Memory::Main => &mut self.main,
            Memory::Gpu(_) => &mut self.gpu,
        }
    }
}

impl Sizes {
    /// Returns what is known of a version.
    pub fn known(&self, name: &str, version: u64) -> Option<&KnownSize> {
        self.versions.get(&(name.to_owned(), version))
    }

    /// Returns whether the version was measured in all of these memories.
    pub fn is_known<'m>(
        &self,
        name: &str,
        version: u64,
        mut memories: impl Iterator<Item = &'m Memory>,
    ) -> bool {
        self.known(name, version)
            .is_some_and(|known| memories.all(|memory| known.bytes.get(*memory).is_some()))
    }

    /// Returns the bytes of a version with this many instances that use each memory, and when they
    /// were measured, if that was recently and with the same files and configuration.
    pub fn recent(
        &self,
        name: &str,
        version: u64,
        fingerprint: VersionFingerprint,
        now: Instant,
        instances: &BTreeMap<Memory, u64>,
    ) -> Option<(MemoryBytes, Instant)> {
        let known = self.known(name, version)?;
        if known.fingerprint != fingerprint || now - known.measured >= MEASURED_AGAIN {
            return None;
        }
        Some((
            instances
                .iter()
                .map(|(memory, instances)| Some((*memory, known.bytes_of(*memory, *instances)?)))
                .collect::<Option<MemoryBytes>>()?,
            known.measured,
        ))
    }

    /// Returns the bytes that a version is expected to use in the memories of its instances: for
    /// each instance as many as in its last load. Of a memory in which it was never loaded, each
    /// instance is expected to need the files and the largest overhead that was measured with this
    /// backend.
    pub fn expected(&self, name: &str, version: u64, model: &Unmeasured<'_>) -> Expectation {
        let known = self.known(name, version);
        Expectation(
            model
                .instances
                .iter()
                .map(|(memory, instances)| {
                    let expected = match known.and_then(|known| known.bytes_of(*memory, *instances))
                    {
                        Some(bytes) => Expected::Known(bytes),
                        None => {
                            Expected::Guessed(self.guess(*memory, model).saturating_mul(*instances))
                        }
                    };
                    (*memory, expected)
                })
                .collect(),
        )
    }

    /// Returns the bytes that an instance of a backend is expected to use in a memory.
    fn guess(&self, memory: Memory, model: &Unmeasured<'_>) -> u64 {
        let unknown = match memory {
            Memory::Main if model.backend == "python" => PYTHON_OVERHEAD,
            Memory::Main => OVERHEAD,
            Memory::Gpu(_) => GPU_OVERHEAD,
        };
        let measured =
            self.overheads.get(model.backend).and_then(|overheads| *overheads.clone().of(memory));
        model.files.saturating_add(measured.unwrap_or(unknown))
    }

    /// Records the measured size of a version after its load, and the duration of this load.
    /// `model` is given if its size was only expected.
    pub fn loaded(
        &mut self,
        name: &str,
        version: u64,
        mut size: KnownSize,
        model: Option<&Unmeasured<'_>>,
    ) {
        if let Some(model) = model {
            let overheads = self.overheads.entry(model.backend.to_owned()).or_default();
            for (memory, bytes) in size.bytes.iter() {
                let instances = model.instances.get(&memory).copied().unwrap_or_default().max(1);
                let overhead = (bytes / instances).saturating_sub(model.files);
                let known = overheads.of(memory);
                *known = (*known).max(Some(overhead));
            }
        }
        // A load that waited for a processor once does not make the model expensive.
        if let Some(known) =
            self.known(name, version).filter(|known| known.fingerprint == size.fingerprint)
        {
            size.load = (known.load * 3 + size.load) / 4;
        }
        self.versions.insert((name.to_owned(), version), size);
    }

    /// Records the size of a version that has served since, and the number of its instances that
    /// use each memory; a larger one is expected of its next load.
    pub fn grown(
        &mut self,
        name: &str,
        version: u64,
        bytes: &MemoryBytes,
        instances: &BTreeMap<Memory, u64>,
    ) {
        if let Some(known) = self.versions.get_mut(&(name.to_owned(), version)) {
            for (memory, bytes) in bytes.iter() {
                let instances = instances.get(&memory).copied().unwrap_or_default();
                let largest = known.bytes_of(memory, instances).unwrap_or_default().max(bytes);
                known.bytes.set(memory, largest);
            }
            known.instances.clone_from(instances);
        }
    }
}
