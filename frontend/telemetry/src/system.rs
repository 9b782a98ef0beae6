//! Measures the machine, this process, the workers and the GPUs, in process, every few seconds.
//!
//! `Sampler::sample` returns readings in natural units, `publish` turns them into metrics, and
//! `polling` is the thread that does both. Nothing here may run on the path of a request: the
//! driver's library can be slow, and it is known to hang when a device falls off the bus, which
//! then only blocks this thread.

mod container;
mod device_files;
mod devices;
mod gpu;
mod host;
mod host_policies;
mod latest;
mod memory;
mod polling;
mod process;
mod process_memory;
mod publish;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use pharos::id::ModelVersion;
use pharos::timeline::Instant;

pub use device_files::create_device_files;
pub use devices::{ChosenDevice, DeviceRequest, Devices};
pub use gpu::Capability;
pub use gpu::{GpuReading, Gpus};
pub use host_policies::{HostPolicies, HostPolicy, Processors, cores};
pub use latest::{Latest, LatestGpus, LatestHost};
pub use polling::{Polling, find_gpus};

use container::Container;
use gpu::LastSamples;
use host::{Host, HostReading};
use process::{ProcessReading, Processes};
pub use process::{process_of, written_memory};
pub use process_memory::ProcessMemory;

/// The settings of the readings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The time between two readings.
    pub interval: Duration,
    /// The time between two log entries of one of the system metrics with the label `Level`.
    pub log_interval: Duration,
    /// Whether the host, this process and the workers are read.
    pub cpu: bool,
    /// The GPUs to read, if any.
    pub gpus: Option<Arc<Gpus>>,
    /// The roots of the system's file systems.
    pub roots: Roots,
}

impl Settings {
    /// Returns whether the settings enable any reading.
    pub(crate) fn any(&self) -> bool {
        self.cpu || self.gpus.is_some()
    }
}

/// Returns the bytes of memory that this process may use: the minimum of the machine's memory, the
/// container's limits, and the limit of the address space (`ulimit -v`).
pub fn memory_limit(roots: &Roots) -> u64 {
    use rustix::process::{Resource, getrlimit};
    let info = rustix::system::sysinfo();
    let machine = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
    let container =
        Container::new(&roots.proc, &roots.cgroup).memory(machine).map(|memory| memory.total);
    let space = getrlimit(Resource::As).current;
    [container, space].into_iter().flatten().fold(machine, u64::min)
}

/// Returns the file that says how long processes wait for memory: in this process's container, or
/// otherwise on the machine.
pub fn memory_pressure(roots: &Roots) -> PathBuf {
    let of_machine = roots.proc.join("pressure/memory");
    Container::new(&roots.proc, &roots.cgroup).memory_pressure().unwrap_or(of_machine)
}

/// Returns whether a control group limits the processor time of this process.
pub fn has_cpu_quota(roots: &Roots) -> bool {
    Container::new(&roots.proc, &roots.cgroup).has_cpu_quota()
}

/// The mount points of the system's file systems.
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

/// The reading of the process of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerReading {
    pub(crate) worker: Worker,
    /// `None` without a process.
    pub(crate) pid: Option<u32>,
    /// Processor time since the last reading.
    pub(crate) cpu_seconds: f64,
    pub(crate) resident_bytes: u64,
}

/// All readings of one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Readings {
    pub(crate) host: Option<HostReading>,
    pub(crate) process: Option<ProcessReading>,
    pub(crate) workers: Vec<WorkerReading>,
    pub(crate) gpus: Vec<GpuReading>,
    /// The use of the GPUs by workers.
    pub(crate) worker_gpus: Vec<WorkerOnGpu>,
}

/// The use of a GPU or MIG device by the process of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct WorkerOnGpu {
    pub(crate) worker: Worker,
    /// The UUID of the device.
    pub(crate) uuid: String,
    /// The memory of the process, if any.
    pub(crate) bytes: Option<u64>,
    /// The share of the time since the last reading in which its kernels ran, 0 to 1, if the
    /// device reports it.
    pub(crate) utilization: Option<f64>,
}

/// Reads the system.
pub(crate) struct Sampler {
    host: Option<Host>,
    processes: Option<Processes>,
    gpus: Option<Arc<Gpus>>,
    seen: LastSamples,
    /// The devices whose last read failed; `None` stands for all.
    lost: BTreeSet<Option<u32>>,
}

impl Sampler {
    /// Creates a sampler for these settings.
    pub(crate) fn new(settings: &Settings) -> Self {
        let roots = &settings.roots;
        let mut sampler = Self {
            host: None,
            processes: None,
            gpus: settings.gpus.clone(),
            seen: LastSamples::new(),
            lost: BTreeSet::new(),
        };
        if settings.cpu {
            sampler.host = Host::new(roots)
                .inspect_err(|error| tracing::warn!("cannot measure the host: {error}"))
                .ok();
            sampler.processes =
                Some(Processes::new(&roots.proc, sysinfo::System::boot_time().ok()));
        }
        sampler
    }

    /// Reads everything once. `workers` are the current instances, each with its process if it has
    /// one.
    pub(crate) fn sample(&mut self, now: Instant, workers: &[(Worker, Option<u32>)]) -> Readings {
        let gpus = self.gpus();
        let worker_gpus = on_gpus(&gpus, workers);
        let host = self.host.as_mut().map(|host| host.read(now));
        let process = self.processes.as_ref().and_then(Processes::own);
        let workers =
            self.processes.as_mut().map(|processes| processes.workers(workers)).unwrap_or_default();
        Readings { host, process, workers, gpus, worker_gpus }
    }

    /// Reads the GPUs. Logs which ones begin to fail or answer again.
    fn gpus(&mut self) -> Vec<GpuReading> {
        let Some(gpus) = &self.gpus else { return Vec::new() };
        let mut readings = Vec::new();
        let mut lost = BTreeSet::new();
        let mut failed = |index: Option<u32>, reason: String| {
            if !self.lost.contains(&index) {
                let device =
                    index.map_or_else(|| "the GPUs".to_owned(), |index| format!("GPU {index}"));
                tracing::warn!(
                    "{device} cannot be read: {reason}; no metrics until the next successful \
                     reading"
                );
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

/// Returns the use of the GPUs by the workers' processes, without their child processes.
fn on_gpus(gpus: &[GpuReading], workers: &[(Worker, Option<u32>)]) -> Vec<WorkerOnGpu> {
    let mut found = Vec::new();
    for gpu in gpus {
        for (worker, pid) in workers {
            let own = gpu.processes.iter().filter(|(process, _)| *pid == Some(*process));
            let bytes = Some(own.map(|(_, bytes)| bytes).sum()).filter(|bytes| *bytes > 0);
            let mut kernels = gpu.kernels.iter().flatten();
            let utilization =
                kernels.find(|(process, _)| *pid == Some(*process)).map(|(_, share)| *share);
            if bytes.is_some() || utilization.is_some() {
                found.push(WorkerOnGpu {
                    worker: worker.clone(),
                    uuid: gpu.uuid.clone(),
                    bytes,
                    utilization,
                });
            }
        }
    }
    found
}

impl Roots {
    /// Returns the usual mount points; `cgroup` is `--cgroup-root`.
    pub fn new(cgroup: &Path) -> Self {
        Self {
            proc: PathBuf::from("/proc"),
            cgroup: cgroup.to_owned(),
            bus: PathBuf::from("/sys/bus/pci/devices"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
