//! NVIDIA devices, through the driver's management library (NVML), which is loaded if present.
//!
//! Values that a device does not support or may not report are left out. A device in MIG mode
//! mostly reports only its memory, so its MIG devices are also read, each under its UUID. Power and
//! temperature are always values of the whole device.

use std::collections::BTreeMap;
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};

use super::process_memory::GpuProcesses;
use pharos_os::clock;

/// A CUDA compute capability, ordered by the major, then the minor number.
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
    /// The minimum capability of usable devices.
    minimum: Capability,
    /// The devices at the start, by number.
    found: Vec<Found>,
}

/// The state of a device at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) uuid: Option<String>,
    /// The UUIDs of its MIG devices.
    pub(crate) mig: Vec<String>,
    /// The bytes of its memory, if it reports them.
    pub(crate) memory: Option<u64>,
    /// Why the device cannot be used.
    pub(crate) error: Option<String>,
}

/// A device on which an instance can run, or whose MIG devices can be used.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Usable {
    pub(crate) uuid: String,
    /// The bus address in the form of `/sys`, such as `0000:3b:00.0`.
    pub(crate) bus: Option<String>,
    pub(crate) memory: Option<GpuMemory>,
    /// Its MIG devices with their memory, if it is in MIG mode.
    pub(crate) mig: Option<Vec<(String, Option<GpuMemory>)>>,
    /// The processors near it, as far as the driver reports them.
    pub(crate) cpus: Vec<usize>,
}

/// The reading of a device or a MIG device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuReading {
    /// The device's number; for a MIG device the number of its parent.
    pub(crate) index: u32,
    /// Whether it is a MIG device.
    pub(crate) mig: bool,
    pub(crate) uuid: String,
    /// The share of the time in which a kernel ran, 0 to 1, over the driver's last interval (1/6 s
    /// to 1 s).
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
    /// Process ids and the bytes of their memory here. In a container with a PID namespace, the
    /// driver may report ids of the host, which match no process here.
    pub(crate) processes: Vec<(u32, u64)>,
    /// Process ids and the share of the time since the last reading in which their kernels ran
    /// here, 0 to 1, for all processes that compute here; `None` if the device does not report it.
    /// The ids are as above.
    pub(crate) kernels: Option<Vec<(u32, f64)>>,
}

/// Bytes of a device's memory; memory reserved by the driver is neither used nor free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    pub(crate) total: u64,
    pub used: u64,
}

/// The tolerance by which the driver's clock may be ahead, microseconds.
const CLOCKS_APART: u64 = 1_000_000;

/// A device number, with the readings of the device and its MIG devices, or why it cannot be read.
pub(crate) type DeviceReading = (u32, Result<Vec<GpuReading>, String>);

/// The time of the last sample of process utilization that was read, by device UUID: microseconds
/// of the driver's clock.
pub(crate) type LastSamples = BTreeMap<String, u64>;

impl Gpus {
    /// Loads `library`, or the system's `libnvidia-ml.so.1`. May take seconds if the driver has to
    /// wake its devices.
    ///
    /// # Errors
    /// The library or the driver is missing, or may not be used.
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

    /// Returns the devices at the start, by number.
    pub(crate) fn found(&self) -> &[Found] {
        &self.found
    }

    /// Returns the current state of a device for an instance that will run on it.
    ///
    /// # Errors
    /// The device cannot be used.
    pub(crate) fn usable(&self, number: u32) -> Result<Usable, String> {
        let device = self.nvml.device_by_index(number).map_err(|error| text(&error))?;
        let uuid = device.uuid().map_err(|error| text(&error))?;
        let was =
            usize::try_from(number).ok().and_then(|number| self.found.get(number)?.uuid.as_ref());
        if let Some(was) = was.filter(|was| **was != uuid) {
            return Err(format!("its UUID changed from {was} to {uuid}"));
        }
        let mut values = Values::default();
        let memory = memory(&device, &mut values);
        if let Some(reason) = values.gone {
            return Err(reason);
        }
        self.check_capability(&device)?;
        let parts = mig_devices(&device)
            .into_iter()
            .filter_map(|part| Some((part.uuid().ok()?, memory_of(&part))));
        let mig = in_mig_mode(&device).then(|| parts.collect::<Vec<_>>());
        let bus = device.pci_info().ok().and_then(|place| bus_id(&place.bus_id));
        Ok(Usable { uuid, bus, memory, mig, cpus: cpus(&device) })
    }

    /// # Errors
    /// The device's compute capability is below the minimum. An unknown capability is accepted.
    fn check_capability(&self, device: &Device<'_>) -> Result<(), String> {
        let Capability { major, minor } = self.minimum;
        match device.cuda_compute_capability() {
            Ok(here)
                if (i64::from(here.major), i64::from(here.minor))
                    < (i64::from(major), i64::from(minor)) =>
            {
                Err(format!(
                    "its compute capability is {}.{}, below \
                     --min-supported-compute-capability={major}.{minor}",
                    here.major, here.minor
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks that a device is still usable.
    ///
    /// # Errors
    /// The device is lost; the text is the driver's. Values that the device does not report are
    /// ignored.
    pub(crate) fn check(&self, number: u32) -> Result<(), String> {
        let device = self.nvml.device_by_index(number).map_err(|error| text(&error))?;
        let mut values = Values::default();
        values.take(device.uuid());
        values.take(device.memory_info());
        values.gone.map_or(Ok(()), Err)
    }

    /// Describes the number of devices and the driver's version.
    pub(crate) fn describe(&self) -> String {
        let version =
            self.nvml.sys_driver_version().unwrap_or_else(|_| "version unknown".to_owned());
        match self.nvml.device_count() {
            Ok(count) => format!("{count} (driver {version})"),
            Err(error) => format!("unknown number: {error} (driver {version})"),
        }
    }

    /// Reads every device. Process utilization covers the samples after those in `seen`, which is
    /// updated.
    ///
    /// # Errors
    /// The library does not respond.
    pub(crate) fn read(&self, seen: &mut LastSamples) -> Result<Vec<DeviceReading>, String> {
        let count = self.nvml.device_count().map_err(|error| text(&error))?;
        let mut readings = Vec::new();
        for index in 0..count {
            let device = self.nvml.device_by_index(index).map_err(|error| text(&error));
            readings.push((index, device.and_then(|device| read(&device, index, seen))));
        }
        Ok(readings)
    }

    /// Returns the memory of the processes on each device by its number, without devices that
    /// cannot be read.
    pub(crate) fn processes(&self) -> Vec<(u32, GpuProcesses)> {
        let numbers = 0..self.nvml.device_count().unwrap_or(0);
        numbers.filter_map(|number| Some((number, self.processes_on(number).ok()?))).collect()
    }

    /// # Errors
    /// The device or one of its MIG devices cannot be read.
    fn processes_on(&self, number: u32) -> Result<GpuProcesses, NvmlError> {
        let device = self.nvml.device_by_index(number)?;
        let mut parts = mig_devices(&device);
        if parts.is_empty() {
            parts.push(device);
        }
        let mut processes = Vec::new();
        for part in parts {
            let running = part.running_compute_processes()?;
            processes.extend(running.iter().map(|process| (process.pid, bytes_of(process))));
        }
        Ok(GpuProcesses { processes })
    }
}

/// Reads a device and its MIG devices.
fn read(
    device: &Device<'_>,
    index: u32,
    seen: &mut LastSamples,
) -> Result<Vec<GpuReading>, String> {
    let parts = mig_devices(device);
    // In MIG mode, the device would report the processes of its MIG devices again.
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

/// Reads the values that devices and MIG devices share; with `seen`, also the values of processes.
fn read_values(
    device: &Device<'_>,
    seen: Option<&mut LastSamples>,
) -> Result<(GpuReading, Values), String> {
    let uuid = device.uuid().map_err(|error| text(&error))?;
    let mut values = Values::default();
    let rates = values.take(device.utilization_rates());
    let memory = memory(device, &mut values);
    let processes = seen
        .is_some()
        .then(|| values.take(device.running_compute_processes()))
        .flatten()
        .unwrap_or_default();
    let since = seen.map(|seen| seen.entry(uuid.clone()).or_default());
    let kernels = since.and_then(|since| values.take(kernels(device, &processes, since)));
    let reading = GpuReading {
        uuid,
        utilization: rates.as_ref().map(|rates| f64::from(rates.gpu) / 100.0),
        bandwidth: rates.as_ref().map(|rates| f64::from(rates.memory) / 100.0),
        memory,
        processes: memory_by_process(&processes),
        kernels,
        ..GpuReading::default()
    };
    Ok((reading, values))
}

/// Reads the values that only whole devices have.
fn read_board(
    device: &Device<'_>,
    reading: &mut GpuReading,
    mut values: Values,
) -> Result<(), String> {
    reading.power = values.take(device.power_usage()).map(|milliwatts| f64::from(milliwatts) / 1e3);
    reading.power_limit =
        values.take(device.enforced_power_limit()).map(|milliwatts| f64::from(milliwatts) / 1e3);
    reading.energy =
        values.take(device.total_energy_consumption()).map(|millijoules| millijoules as f64 / 1e3);
    reading.temperature = values.take(device.temperature(TemperatureSensor::Gpu)).map(f64::from);
    values.verdict()
}

fn memory(device: &Device<'_>, values: &mut Values) -> Option<GpuMemory> {
    values
        .take(device.memory_info())
        .map(|memory| GpuMemory { total: memory.total, used: memory.used })
}

fn memory_of(device: &Device<'_>) -> Option<GpuMemory> {
    memory(device, &mut Values::default())
}

impl Found {
    fn of(usable: &Result<Usable, String>) -> Self {
        match usable {
            Ok(Usable { uuid, mig, memory, .. }) => Self {
                uuid: Some(uuid.clone()),
                memory: memory.map(|memory| memory.total),
                mig: mig.iter().flatten().map(|(uuid, _)| uuid.clone()).collect(),
                error: mig.as_ref().is_some_and(Vec::is_empty).then(|| NO_PARTS.to_owned()),
            },
            Err(reason) => Self { error: Some(reason.clone()), ..Self::default() },
        }
    }
}

/// The error for a device in MIG mode without MIG devices.
pub(super) const NO_PARTS: &str =
    "it is in MIG mode and has no MIG devices; `nvidia-smi mig` creates them";

/// The number of words in a processor mask: as many processors as a process can be bound to.
const CPU_WORDS: usize = 1024 / 64;

/// Returns the processors near a device, from the driver.
fn cpus(device: &Device<'_>) -> Vec<usize> {
    let words = device.cpu_affinity(CPU_WORDS).unwrap_or_default();
    let bits = words.iter().zip((0..).step_by(64));
    bits.flat_map(|(word, first)| {
        (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
    })
    .collect()
}

/// Converts a bus address from the driver's form, `00000000:3B:00.0`, to the form of `/sys`.
fn bus_id(text: &str) -> Option<String> {
    let (domain, place) = text.trim_end_matches('\0').split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let plain = place.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    plain.then(|| format!("{domain:04x}:{}", place.to_ascii_lowercase()))
}

fn in_mig_mode(device: &Device<'_>) -> bool {
    device.mig_mode().is_ok_and(|mode| mode.current == 1)
}

/// Returns the MIG devices of a device in MIG mode.
fn mig_devices<'nvml>(device: &Device<'nvml>) -> Vec<Device<'nvml>> {
    if !in_mig_mode(device) {
        return Vec::new();
    }
    // The maximum number; missing ones return an error.
    let most = device.mig_device_count().unwrap_or(0);
    (0..most).filter_map(|number| device.mig_device_by_index(number).ok()).collect()
}

/// Returns the memory of processes on a device by process id, if the driver reports it.
fn memory_by_process(processes: &[ProcessInfo]) -> Vec<(u32, u64)> {
    processes.iter().filter_map(|process| Some((process.pid, bytes_of(process)?))).collect()
}

/// Returns the bytes of a process, if the driver reports them.
fn bytes_of(process: &ProcessInfo) -> Option<u64> {
    match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) => Some(bytes),
        UsedGpuMemory::Unavailable => None,
    }
}

/// Returns the shares of the time in which kernels of processes ran on a device: means of the
/// samples after `since`, which is set to the last sample's time. The driver has samples only for
/// active processes; others have a share of 0. Samples are stamped by the wall clock: stamps in the
/// future are from before the clock was set back.
fn kernels(
    device: &Device<'_>,
    processes: &[ProcessInfo],
    since: &mut u64,
) -> Result<Vec<(u32, f64)>, NvmlError> {
    let now = clock::wall_ns() / 1000;
    *since = now.min(*since);
    let samples = match device.process_utilization_stats(*since) {
        Err(NvmlError::NotFound) => Vec::new(),
        result => result?,
    };
    let mut found: BTreeMap<u32, Vec<u32>> =
        processes.iter().map(|process| (process.pid, Vec::new())).collect();
    let before = *since;
    // Drivers are known to return old samples and uninitialized entries.
    let fresh = before + 1..=now.saturating_add(CLOCKS_APART);
    for sample in
        samples.iter().filter(|sample| fresh.contains(&sample.timestamp) && sample.sm_util <= 100)
    {
        found.entry(sample.pid).or_default().push(sample.sm_util);
        *since = sample.timestamp.max(*since);
    }
    let mut shares = Vec::new();
    for (pid, percents) in found {
        let mean = f64::from(percents.iter().sum::<u32>()) / percents.len().max(1) as f64;
        shares.push((pid, mean / 100.0));
    }
    Ok(shares)
}

/// Distinguishes values that a device does not have from a lost device.
#[derive(Default)]
struct Values {
    /// Why the device itself cannot be used.
    gone: Option<String>,
    /// Why a value could not be read, if the reason is unusual.
    odd: Option<String>,
    read: bool,
}

impl Values {
    fn take<T>(&mut self, result: Result<T, NvmlError>) -> Option<T> {
        use NvmlError::*;
        match &result {
            Ok(_) => self.read = true,
            Err(
                NotSupported
                | NoPermission
                | FailedToLoadSymbol(_)
                | InvalidArg
                | NotFound
                | NoData,
            ) => {}
            Err(
                error @ (GpuLost | ResetRequired | Uninitialized | DriverNotLoaded
                | LibRmVersionMismatch),
            ) => {
                self.gone.get_or_insert_with(|| text(error));
            }
            Err(error) => {
                self.odd.get_or_insert_with(|| text(error));
            }
        }
        result.ok()
    }

    /// Returns an error if the device is lost, or if no value could be read and one failed for an
    /// unusual reason.
    fn verdict(self) -> Result<(), String> {
        match self.gone.or(self.odd.filter(|_| !self.read)) {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }
}

/// Returns the error text. The loader's message is only in the source of the error.
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
    fn converts_bus_addresses_to_the_form_of_sys() {
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
