//! What the machine, this process, the workers and the GPUs do: read in process every few seconds.
//!
//! `Sampler::sample` gives plain readings in natural units; `publish` turns them into metrics, `polling` is the thread
//! that does both. Nothing here may run on a request's way: the driver's library may take its time, and is known to
//! hang when a device falls off the bus, which costs this thread and nothing else.

mod container;
mod devices;
mod gpu;
mod host;
mod host_policies;
mod latest;
mod memory;
mod polling;
mod process;
mod publish;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pharos::id::ModelVersion;
use pharos::timeline::Instant;

pub use devices::{ChosenDevice, Devices, Wanted};
pub use gpu::Capability;
pub use gpu::{GpuReading, Gpus};
pub use host_policies::{HostPolicies, HostPolicy, Processors, cores};
pub use latest::LatestGpus;
pub use polling::{Polling, find_gpus, gpu_memory};

use container::Container;
use gpu::LastSamples;
use host::{Host, HostReading};
pub use process::process_of;
use process::{ProcessReading, Processes};

/// What is read, and how often.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The time between two readings.
    pub interval: Duration,
    /// The time between two log entries of one of the system metrics with the label `Level`.
    pub log_interval: Duration,
    /// Whether the host, this process and the workers are read.
    pub cpu: bool,
    /// The GPUs, if they are to be read and there are any.
    pub gpus: Option<Arc<Gpus>>,
    /// Where the system shows itself.
    pub roots: Roots,
}

impl Settings {
    /// Whether there is anything to read.
    pub(crate) fn any(&self) -> bool {
        self.cpu || self.gpus.is_some()
    }
}

/// Bytes of memory that this process may use: the machine's, the smallest limit of the container's, or that of the address
/// space (`ulimit -v`), whichever is least.
pub fn memory_limit(roots: &Roots) -> u64 {
    use rustix::process::{Resource, getrlimit};
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
    let container = Container::new(&roots.proc, &roots.cgroup).memory(machine).map(|memory| memory.total);
    let space = getrlimit(Resource::As).current;
    [container, space].into_iter().flatten().fold(machine, u64::min)
}

/// Where the system's own file systems are mounted.
#[derive(Clone, Debug)]
pub struct Roots {
    /// Processes.
    pub proc: PathBuf,
    /// Control groups.
    pub cgroup: PathBuf,
    /// Devices on the PCI bus.
    pub bus: PathBuf,
}

/// An instance of a model version, for labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Worker {
    /// The model version that it runs.
    pub model: ModelVersion,
    /// Its name, `NAME_GROUP_COPY`.
    pub instance: String,
}

/// What was read about the process of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerReading {
    pub(crate) worker: Worker,
    /// `None` while it has none.
    pub(crate) pid: Option<u32>,
    /// Computed since the last reading.
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
}

/// Everything that was read at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Readings {
    pub(crate) host: Option<HostReading>,
    pub(crate) process: Option<ProcessReading>,
    pub(crate) workers: Vec<WorkerReading>,
    pub(crate) gpus: Vec<GpuReading>,
    /// What the workers have and do on the GPUs.
    pub(crate) worker_gpus: Vec<WorkerOnGpu>,
}

/// What was read about the process of an instance on a GPU, or on a MIG device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerOnGpu {
    pub(crate) worker: Worker,
    /// The device's.
    pub(crate) uuid: String,
    /// Its memory, if it has some.
    pub(crate) bytes: Option<u64>,
    /// The share of the time since the last reading in which its kernels ran, 0 to 1, where the device tells.
    pub(crate) utilization: Option<f64>,
}

/// Reads the system.
pub(crate) struct Sampler {
    host: Option<Host>,
    processes: Option<Processes>,
    gpus: Option<Arc<Gpus>>,
    seen: LastSamples,
    /// The devices that could not be read last time; all of them under `None`.
    lost: BTreeSet<Option<u32>>,
}

impl Sampler {
    /// Reads what the settings say.
    pub(crate) fn new(settings: &Settings) -> Self {
        let roots = &settings.roots;
        let without = |error: &sysinfo::Error| tracing::warn!("the host cannot be measured: {error}");
        let host = settings.cpu.then(|| Host::new(roots).inspect_err(without).ok()).flatten();
        let boot = || sysinfo::System::boot_time().ok();
        let processes = settings.cpu.then(|| Processes::new(&roots.proc, boot(), std::process::id()));
        Self { host, processes, gpus: settings.gpus.clone(), seen: LastSamples::new(), lost: BTreeSet::new() }
    }

    /// Reads everything once. `workers` are the instances there are now, each with its process if it has one.
    pub(crate) fn sample(&mut self, now: Instant, workers: &[(Worker, Option<u32>)]) -> Readings {
        let gpus = self.gpus();
        let worker_gpus = on_gpus(&gpus, workers);
        let host = self.host.as_mut().map(|host| host.read(now));
        let process = self.processes.as_ref().and_then(Processes::own);
        let workers = self.processes.as_mut().map(|processes| processes.workers(workers)).unwrap_or_default();
        Readings { host, process, workers, gpus, worker_gpus }
    }

    /// Reads the GPUs, and says in the log which have begun to fail or to answer again.
    fn gpus(&mut self) -> Vec<GpuReading> {
        let Some(gpus) = &self.gpus else { return Vec::new() };
        let mut readings = Vec::new();
        let mut lost = BTreeSet::new();
        let mut failed = |index: Option<u32>, reason: String| {
            if !self.lost.contains(&index) {
                let who = index.map_or_else(|| "the GPUs".to_owned(), |index| format!("GPU {index}"));
                tracing::warn!("{who} cannot be read: {reason}; the metrics go on without until it answers again");
            }
            lost.insert(index);
        };
        match gpus.read(&mut self.seen) {
            Err(reason) => failed(None, reason),
            Ok(devices) => {
                for (index, device) in devices {
                    match device {
                        Ok(parts) => readings.extend(parts),
                        Err(reason) => failed(Some(index), reason),
                    }
                }
            }
        }
        for index in readings.iter().map(|reading| reading.index).collect::<BTreeSet<_>>() {
            if self.lost.contains(&Some(index)) || self.lost.contains(&None) {
                tracing::info!("GPU {index} answers again");
            }
        }
        self.lost = lost;
        readings
    }
}

/// What the workers have and do on the GPUs: their own processes, not what those start.
fn on_gpus(gpus: &[GpuReading], workers: &[(Worker, Option<u32>)]) -> Vec<WorkerOnGpu> {
    let mut found = Vec::new();
    for gpu in gpus {
        for (worker, pid) in workers {
            let own = gpu.processes.iter().filter(|(process, _)| *pid == Some(*process));
            let bytes = Some(own.map(|(_, bytes)| bytes).sum()).filter(|bytes| *bytes > 0);
            let mut kernels = gpu.kernels.iter().flatten();
            let utilization = kernels.find(|(process, _)| *pid == Some(*process)).map(|(_, share)| *share);
            if bytes.is_some() || utilization.is_some() {
                found.push(WorkerOnGpu { worker: worker.clone(), uuid: gpu.uuid.clone(), bytes, utilization });
            }
        }
    }
    found
}

impl Roots {
    /// The usual places; `cgroup` is `--cgroup-root`.
    pub fn new(cgroup: &Path) -> Self {
        Self { proc: PathBuf::from("/proc"), cgroup: cgroup.to_owned(), bus: PathBuf::from("/sys/bus/pci/devices") }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
