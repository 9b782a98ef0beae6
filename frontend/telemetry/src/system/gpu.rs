//! NVIDIA's devices, through the driver's management library (NVML), which is loaded when there is one.
//!
//! What a device does not have or may not tell, it leaves out; the rest is read all the same. A device in MIG mode mostly
//! tells only about its memory, so its MIG devices are read as well, each under its own UUID. Power and temperature are
//! those of the whole device always.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use pharos_os::clock;

/// A CUDA compute capability; of two, the one with the greater major number is greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capability {
    /// The generation.
    pub major: u32,
    /// The revision.
    pub minor: u32,
}

/// The GPUs of this machine. They may be read from any thread.
#[derive(Debug)]
pub struct Gpus {
    nvml: Nvml,
    /// Devices with less are not used.
    minimum: Capability,
    /// As they were at the start, by number.
    found: Vec<Found>,
}

/// A device as it was at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) uuid: Option<String>,
    /// The UUIDs of its MIG devices.
    pub(crate) mig: Vec<String>,
    /// Why it cannot be used.
    pub(crate) trouble: Option<String>,
}

/// A device, or the MIG device of it, that an instance can run on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Usable {
    pub(crate) uuid: String,
    /// Its place on the bus in the form of `/sys`, such as `0000:3b:00.0`.
    pub(crate) bus: Option<String>,
    pub(crate) memory: Option<GpuMemory>,
    /// Its MIG devices with their memory, if it is in MIG mode.
    pub(crate) mig: Option<Vec<(String, Option<GpuMemory>)>>,
    /// The processors near it, as far as the driver knows them.
    pub(crate) cpus: Vec<usize>,
}

/// What one device, or one MIG device of it, tells.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuReading {
    /// The device's number; for a MIG device that of its parent.
    pub(crate) index: u32,
    /// Whether it is a MIG device.
    pub(crate) mig: bool,
    pub(crate) uuid: String,
    /// The share of the time in which a kernel ran, 0 to 1, over the driver's own last interval (1/6 s to 1 s).
    pub utilization: Option<f64>,
    /// The share of the time in which memory was read or written, 0 to 1, over the same interval.
    pub bandwidth: Option<f64>,
    /// Bytes of its memory.
    pub memory: Option<GpuMemory>,
    /// Watts.
    pub(crate) power: Option<f64>,
    /// Watts.
    pub(crate) power_limit: Option<f64>,
    /// Joules since the driver was loaded.
    pub(crate) energy: Option<f64>,
    /// Degrees Celsius.
    pub(crate) temperature: Option<f64>,
    /// Process id and bytes of its memory here. In a container with process ids of its own, the driver may tell those of
    /// the host, which are nobody's here.
    pub(crate) processes: Vec<(u32, u64)>,
    /// Process id and the share of the time since the last reading in which its kernels ran here, 0 to 1, of all that compute
    /// here; `None` where the device does not tell. Process ids are as above.
    pub(crate) kernels: Option<Vec<(u32, f64)>>,
}

/// Bytes of a device's memory; what the driver reserves for itself is neither used nor free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    pub(crate) total: u64,
    pub used: u64,
}

/// How far the driver's clock may be ahead of ours, microseconds.
const CLOCKS_APART: u64 = 1_000_000;

/// A device: what it and its MIG devices tell, or why it cannot be read now.
pub(crate) type DeviceReading = (u32, Result<Vec<GpuReading>, String>);

/// The last samples of what processes did that were read, by the device's UUID: microseconds by the driver's clock.
pub(crate) type LastSamples = BTreeMap<String, u64>;

impl Gpus {
    /// Loads the library: `library`, or `libnvidia-ml.so.1` where the system has it. May take seconds where the driver has
    /// to wake its devices.
    ///
    /// # Errors
    /// There is no such library, or no driver, or no permission to use it.
    pub(crate) fn open(library: Option<&Path>, minimum: Capability) -> Result<Self, String> {
        let mut builder = Nvml::builder();
        if let Some(library) = library {
            builder.lib_path(library.as_os_str());
        }
        let nvml = builder.init().map_err(|error| text(&error))?;
        let mut gpus = Self { nvml, minimum, found: Vec::new() };
        let count = gpus.nvml.device_count().unwrap_or(0);
        gpus.found = (0..count).map(|number| Found::of(&gpus.usable(number))).collect();
        Ok(gpus)
    }

    /// The devices as they were at the start, by number.
    pub(crate) fn found(&self) -> &[Found] {
        &self.found
    }

    /// What a device is now, for an instance that is to run on it.
    ///
    /// # Errors
    /// It cannot be used.
    pub(crate) fn usable(&self, number: u32) -> Result<Usable, String> {
        let device = self.nvml.device_by_index(number).map_err(|error| text(&error))?;
        let uuid = device.uuid().map_err(|error| text(&error))?;
        let was = usize::try_from(number).ok().and_then(|number| self.found.get(number)?.uuid.as_ref());
        if let Some(was) = was.filter(|was| **was != uuid) {
            return Err(format!("it was {was} and is {uuid} now"));
        }
        let mut values = Values::default();
        let memory = memory(&device, &mut values);
        if let Some(reason) = values.gone {
            return Err(reason);
        }
        self.check_capability(&device)?;
        let parts = mig_devices(&device).into_iter().filter_map(|part| Some((part.uuid().ok()?, memory_of(&part))));
        let mig = in_mig_mode(&device).then(|| parts.collect::<Vec<_>>());
        let bus = device.pci_info().ok().and_then(|place| bus_id(&place.bus_id));
        Ok(Usable { uuid, bus, memory, mig, cpus: cpus(&device) })
    }

    /// # Errors
    /// The device's compute capability is below the minimum. What the driver does not tell is no error.
    fn check_capability(&self, device: &Device<'_>) -> Result<(), String> {
        let Capability { major, minor } = self.minimum;
        match device.cuda_compute_capability() {
            Ok(here) if (i64::from(here.major), i64::from(here.minor)) < (i64::from(major), i64::from(minor)) => {
                Err(format!(
                    "its compute capability is {}.{}, below --min-supported-compute-capability={major}.{minor}",
                    here.major, here.minor
                ))
            }
            _ => Ok(()),
        }
    }

    /// Whether a device is still there.
    ///
    /// # Errors
    /// It is not; what the driver says. What it only does not tell is no error.
    pub(crate) fn check(&self, number: u32) -> Result<(), String> {
        let device = self.nvml.device_by_index(number).map_err(|error| text(&error))?;
        let mut values = Values::default();
        values.take(device.uuid());
        values.take(device.memory_info());
        values.gone.map_or(Ok(()), Err)
    }

    /// How many devices there are, and the driver's version, in words.
    pub(crate) fn describe(&self) -> String {
        let version = self.nvml.sys_driver_version().unwrap_or_else(|_| "of unknown version".to_owned());
        match self.nvml.device_count() {
            Ok(count) => format!("{count} (driver {version})"),
            Err(error) => format!("unknown in number: {error} (driver {version})"),
        }
    }

    /// Reads every device. What processes did is told since the samples that have been `seen`, which become the last ones here.
    ///
    /// # Errors
    /// The library does not answer at all.
    pub(crate) fn read(&self, seen: &mut LastSamples) -> Result<Vec<DeviceReading>, String> {
        let count = self.nvml.device_count().map_err(|error| text(&error))?;
        let device = |index| self.nvml.device_by_index(index).map_err(|error| text(&error));
        let mut read = |index| device(index).and_then(|device| read(&device, index, seen));
        Ok((0..count).map(|index| (index, read(index))).collect())
    }

    /// The memory of some processes together, by the number of the device; devices where they have none are left out.
    pub(crate) fn memory_of(&self, pids: &[u32]) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        for index in 0..self.nvml.device_count().unwrap_or(0) {
            let Ok(device) = self.nvml.device_by_index(index) else { continue };
            let mut parts = mig_devices(&device);
            if parts.is_empty() {
                parts.push(device);
            }
            let processes = parts.iter().filter_map(|part| part.running_compute_processes().ok());
            let processes = processes.flat_map(|processes| memory_by_process(&processes));
            let bytes = processes.filter(|(pid, _)| pids.contains(pid)).map(|(_, bytes)| bytes).sum();
            if bytes > 0 {
                found.push((index, bytes));
            }
        }
        found
    }
}

/// Reads a device and its MIG devices.
fn read(device: &Device<'_>, index: u32, seen: &mut LastSamples) -> Result<Vec<GpuReading>, String> {
    let parts = mig_devices(device);
    // In MIG mode the device would name the processes of its parts once more.
    let (whole, values) = read_values(device, parts.is_empty().then_some(&mut *seen))?;
    let mut whole = GpuReading { index, ..whole };
    read_board(device, &mut whole, values)?;
    let mut readings = vec![whole];
    for part in parts {
        if let Ok((part, _)) = read_values(&part, Some(seen)) {
            readings.push(GpuReading { index, mig: true, ..part });
        }
    }
    Ok(readings)
}

/// What devices and MIG devices tell alike; with `seen` also of their processes.
fn read_values(device: &Device<'_>, seen: Option<&mut LastSamples>) -> Result<(GpuReading, Values), String> {
    let uuid = device.uuid().map_err(|error| text(&error))?;
    let mut values = Values::default();
    let rates = values.take(device.utilization_rates());
    let share = |percent: u32| f64::from(percent) / 100.0;
    let memory = memory(device, &mut values);
    let processes =
        seen.is_some().then(|| values.take(device.running_compute_processes())).flatten().unwrap_or_default();
    let since = seen.map(|seen| seen.entry(uuid.clone()).or_default());
    let kernels = since.and_then(|since| values.take(kernels(device, &processes, since)));
    let reading = GpuReading {
        uuid,
        utilization: rates.as_ref().map(|rates| share(rates.gpu)),
        bandwidth: rates.as_ref().map(|rates| share(rates.memory)),
        memory,
        processes: memory_by_process(&processes),
        kernels,
        ..GpuReading::default()
    };
    Ok((reading, values))
}

/// What only whole devices have.
fn read_board(device: &Device<'_>, reading: &mut GpuReading, mut values: Values) -> Result<(), String> {
    let thousandths = |value: u64| value as f64 / 1e3;
    reading.power = values.take(device.power_usage()).map(|watts| thousandths(watts.into()));
    reading.power_limit = values.take(device.enforced_power_limit()).map(|watts| thousandths(watts.into()));
    reading.energy = values.take(device.total_energy_consumption()).map(thousandths);
    reading.temperature = values.take(device.temperature(TemperatureSensor::Gpu)).map(f64::from);
    values.verdict()
}

fn memory(device: &Device<'_>, values: &mut Values) -> Option<GpuMemory> {
    values.take(device.memory_info()).map(|memory| GpuMemory { total: memory.total, used: memory.used })
}

fn memory_of(device: &Device<'_>) -> Option<GpuMemory> {
    memory(device, &mut Values::default())
}

impl Found {
    fn of(usable: &Result<Usable, String>) -> Self {
        match usable {
            Ok(Usable { uuid, mig, .. }) => Self {
                uuid: Some(uuid.clone()),
                mig: mig.iter().flatten().map(|(uuid, _)| uuid.clone()).collect(),
                trouble: mig.as_ref().is_some_and(Vec::is_empty).then(|| NO_PARTS.to_owned()),
            },
            Err(reason) => Self { trouble: Some(reason.clone()), ..Self::default() },
        }
    }
}

/// Why a device in MIG mode cannot be used that has no MIG devices.
pub(super) const NO_PARTS: &str = "it is in MIG mode and has no MIG devices; `nvidia-smi mig` makes them";

/// The words of a mask of processors: as many processors as a process can be bound to.
const CPU_WORDS: usize = 1024 / 64;

/// The processors near a device that the driver tells.
fn cpus(device: &Device<'_>) -> Vec<usize> {
    let words = device.cpu_affinity(CPU_WORDS).unwrap_or_default();
    let bits = words.iter().zip((0..).step_by(64));
    bits.flat_map(|(word, first)| (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)).collect()
}

/// The driver's form of a place on the bus, `00000000:3B:00.0`, as `/sys` writes it.
fn bus_id(text: &str) -> Option<String> {
    let (domain, place) = text.trim_end_matches('\0').split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let plain = place.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    plain.then(|| format!("{domain:04x}:{}", place.to_ascii_lowercase()))
}

fn in_mig_mode(device: &Device<'_>) -> bool {
    device.mig_mode().is_ok_and(|mode| mode.current == 1)
}

/// The MIG devices of a device in MIG mode.
fn mig_devices<'nvml>(device: &Device<'nvml>) -> Vec<Device<'nvml>> {
    if !in_mig_mode(device) {
        return Vec::new();
    }
    // The most that there may be; what is not there answers with an error.
    let most = device.mig_device_count().unwrap_or(0);
    (0..most).filter_map(|number| device.mig_device_by_index(number).ok()).collect()
}

/// The memory of processes on a device, by their ids, as far as the driver knows it.
fn memory_by_process(processes: &[ProcessInfo]) -> Vec<(u32, u64)> {
    let bytes = |process: &ProcessInfo| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some((process.pid, bytes)),
        UsedGpuMemory::Unavailable => None,
    };
    processes.iter().filter_map(bytes).collect()
}

/// The shares of the time in which kernels of processes ran on a device: means of the samples after `since`, which becomes the
/// last one's time. The driver has samples of those alone that did something; the others did nothing. It stamps them by the wall
/// clock: what is later than now is from before somebody has set that back.
fn kernels(device: &Device<'_>, processes: &[ProcessInfo], since: &mut u64) -> Result<Vec<(u32, f64)>, NvmlError> {
    let now = clock::wall_ns() / 1000;
    *since = now.min(*since);
    let samples = match device.process_utilization_stats(*since) {
        Err(NvmlError::NotFound) => Vec::new(),
        told => told?,
    };
    let mut found: BTreeMap<u32, Vec<u32>> = processes.iter().map(|process| (process.pid, Vec::new())).collect();
    let before = *since;
    // Drivers are known to give old samples again, and places of their list that they have not filled.
    let fresh = before + 1..=now.saturating_add(CLOCKS_APART);
    for sample in samples.iter().filter(|sample| fresh.contains(&sample.timestamp) && sample.sm_util <= 100) {
        found.entry(sample.pid).or_default().push(sample.sm_util);
        *since = sample.timestamp.max(*since);
    }
    let mean = |percent: Vec<u32>| f64::from(percent.iter().sum::<u32>()) / percent.len().max(1) as f64;
    Ok(found.into_iter().map(|(pid, percent)| (pid, mean(percent) / 100.0)).collect())
}

/// Tells values that a device does not have from a device that is gone.
#[derive(Default)]
struct Values {
    /// The device itself cannot be used.
    gone: Option<String>,
    /// One value could not be read, for a reason that is none of the ordinary ones.
    odd: Option<String>,
    read: bool,
}

impl Values {
    fn take<T>(&mut self, result: Result<T, NvmlError>) -> Option<T> {
        use NvmlError::*;
        match &result {
            Ok(_) => self.read = true,
            Err(NotSupported | NoPermission | FailedToLoadSymbol(_) | InvalidArg | NotFound | NoData) => {}
            Err(error @ (GpuLost | ResetRequired | Uninitialized | DriverNotLoaded | LibRmVersionMismatch)) => {
                self.gone.get_or_insert_with(|| text(error));
            }
            Err(error) => {
                self.odd.get_or_insert_with(|| text(error));
            }
        }
        result.ok()
    }

    /// A device is gone if it says so, or if nothing can be read and not only because it has nothing to tell.
    fn verdict(self) -> Result<(), String> {
        match self.gone.or(self.odd.filter(|_| !self.read)) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }
}

/// What went wrong. The loader's message is in the error's source only.
fn text(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(inner) => inner.to_string(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_on_the_bus_are_written_as_the_system_does() {
        for (text, expected) in [
            ("00000000:3B:00.0", Some("0000:3b:00.0")),
            ("00010000:AF:10.1\0\0", Some("10000:af:10.1")),
            ("0000:01:00.0", Some("0000:01:00.0")),
            ("../../x:y", None),
            ("00000000:../..", None),
            ("", None),
        ] {
            assert_eq!(bus_id(text).as_deref(), expected, "{text}");
        }
    }
}
