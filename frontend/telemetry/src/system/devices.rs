//! The GPUs of instances: lists them, prepares processes to run on them, and detects lost ones.
//!
//! Devices have the numbers that CUDA gives them in this process: their order on the bus, or the
//! order of `CUDA_VISIBLE_DEVICES`. Workers and probes of client memory use the same numbers. The
//! driver is queried when an instance starts, in separate threads and with a timeout, because it
//! may hang when a device falls off the bus.

mod cpus;
mod visible;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use pharos_os::blocking;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::gpu::{Found, GpuMemory, NO_PARTS, Usable};
use super::polling::DRIVER_TIMEOUT;
use super::process_memory::ProcessMemory;
use super::{Gpus, Roots};
use visible::VisibleDevices;

/// The interval at which devices in use are checked.
const WATCH: Duration = Duration::from_secs(1);

/// The maximum number of concurrent queries of the driver, and so of threads that wait for one that
/// hangs.
const QUESTIONS: usize = 8;

/// The environment of a process that uses a device as its device 0 and runs near it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChosenDevice {
    /// The device's number.
    pub number: u32,
    /// The UUID of the device, or of the MIG device on it.
    pub uuid: String,
    /// The numbers of the devices that the process sees, in its order.
    pub visible: Vec<u32>,
    /// The value of `CUDA_VISIBLE_DEVICES`.
    pub uuids: String,
    /// The processors that the process should use; empty for all that it may use.
    pub cpus: Vec<usize>,
}

/// A device requested for an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRequest {
    /// The device.
    pub number: u32,
    /// The index of the instance among the instances of its group on this device: MIG devices are
    /// assigned in turn.
    pub turn: u32,
    /// Whether a model is being loaded, so that `--model-load-gpu-limit` applies.
    pub loading: bool,
}

/// The GPUs that instances may run on.
#[derive(Debug)]
pub struct Devices {
    gpus: Option<Arc<Gpus>>,
    shown: VisibleDevices,
    usable: Vec<u32>,
    unusable: Vec<u32>,
    /// The maximum share of a device's memory in use, 0 to 1, for loading a model onto it.
    limits: BTreeMap<u32, f64>,
    /// The directory of the system with the devices of the bus.
    bus: PathBuf,
    questions: Arc<Semaphore>,
    /// Locked briefly.
    watched: Mutex<Watched>,
}

/// The devices that are checked, because an instance runs on them.
#[derive(Debug, Default)]
struct Watched {
    /// Why a device is lost; `None` if it is not.
    lost: BTreeMap<u32, Option<String>>,
}

impl Devices {
    /// Lists the devices of this machine, without devices that `visible`, the value of
    /// `CUDA_VISIBLE_DEVICES`, hides.
    pub fn new(
        gpus: Option<Arc<Gpus>>,
        visible: Option<&str>,
        limits: impl IntoIterator<Item = (u32, f64)>,
        roots: &Roots,
    ) -> Arc<Self> {
        let found = gpus.as_ref().map_or(&[][..], |gpus| gpus.found());
        let shown = VisibleDevices::new(found, visible);
        let (usable, unusable) = shown.numbers().partition(|number| {
            shown_of(&shown, found, *number).is_some_and(|found| found.error.is_none())
        });
        let devices = Self {
            usable,
            unusable,
            shown,
            limits: limits.into_iter().collect(),
            bus: roots.bus.clone(),
            questions: Arc::new(Semaphore::new(QUESTIONS)),
            watched: Mutex::default(),
            gpus,
        };
        devices.log(visible);
        Arc::new(devices)
    }

    /// Logs hidden and unusable devices, and limits for devices that do not exist.
    fn log(&self, visible: Option<&str>) {
        let found = self.gpus.as_ref().map_or(&[][..], |gpus| gpus.found());
        if let Some(visible) = visible.filter(|_| !found.is_empty()) {
            let mut devices = Vec::new();
            for number in self.shown.numbers() {
                let uuid =
                    self.found(number).and_then(|found| found.uuid.as_deref()).unwrap_or("?");
                devices.push(format!("{number} is {uuid}"));
            }
            let shown = joined(&devices, "none are visible");
            tracing::info!("CUDA_VISIBLE_DEVICES is '{visible}': of {} GPUs, {shown}", found.len());
        }
        for number in &self.unusable {
            let error =
                self.found(*number).and_then(|found| found.error.as_deref()).unwrap_or_default();
            tracing::warn!("GPU {number} cannot be used: {error}");
        }
        let here: Vec<u32> = self.shown.numbers().collect();
        for number in self.limits.keys().filter(|number| !here.contains(number)) {
            tracing::warn!(
                "--model-load-gpu-limit names GPU {number}, which does not exist; existing GPUs: \
                 {here:?}"
            );
        }
    }

    /// Returns the number on the bus of the device with this number.
    pub fn bus_number(&self, number: u32) -> Option<u32> {
        self.shown.bus_number(number)
    }

    /// Returns the number of the device with this number on the bus.
    fn number_of(&self, bus: u32) -> Option<u32> {
        self.shown.numbers().find(|number| self.shown.bus_number(*number) == Some(bus))
    }

    /// Returns the numbers of all devices, in ascending order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> {
        self.shown.numbers()
    }

    /// Returns the UUIDs of the devices at the start by number, without devices that could not be
    /// read.
    pub fn uuids(&self) -> BTreeMap<u32, String> {
        self.numbers()
            .filter_map(|number| Some((number, self.found(number)?.uuid.clone()?)))
            .collect()
    }

    /// Returns the bytes of a device's memory, if the device reported them at the start; in MIG
    /// mode, the sum of its MIG devices.
    pub fn total_memory(&self, number: u32) -> Option<u64> {
        self.found(number)?.memory
    }

    fn found(&self, number: u32) -> Option<&Found> {
        shown_of(&self.shown, self.gpus.as_ref()?.found(), number)
    }

    /// Returns the memory of the processes on the devices; empty if the driver does not respond in
    /// time.
    pub async fn process_memory(&self) -> ProcessMemory {
        let Some(gpus) = self.gpus.clone() else { return ProcessMemory::default() };
        let asked = async {
            // Held until the driver responds, even after the timeout.
            let question = self.questions.clone().acquire_owned().await.ok();
            blocking::run(move || (gpus.processes(), question).0).await
        };
        let found =
            timeout(DRIVER_TIMEOUT, asked).await.ok().and_then(Result::ok).unwrap_or_default();
        ProcessMemory::new(
            found
                .into_iter()
                .filter_map(|(bus, processes)| Some((self.number_of(bus)?, processes))),
        )
    }

    /// Returns the devices that were usable at the start, for instances that may run on any.
    pub fn usable(&self) -> &[u32] {
        &self.usable
    }

    /// Returns the devices that were not usable at the start.
    pub fn unusable(&self) -> &[u32] {
        &self.unusable
    }

    /// Returns the environment of a process that will run on a device, and checks the device from
    /// now on.
    ///
    /// # Errors
    /// The device cannot be used, or too much of its memory is in use; the text lists the usable
    /// devices.
    pub async fn choose(self: &Arc<Self>, wanted: DeviceRequest) -> Result<ChosenDevice, String> {
        let devices = self.clone();
        let gpu = wanted.number;
        let gpus = self
            .gpus
            .clone()
            .ok_or_else(|| format!("GPU {gpu} cannot be used: no GPUs are available"))?;
        let asked = async {
            // Held until the driver responds, even after the timeout.
            let question = self.questions.clone().acquire_owned().await.ok();
            blocking::run(move || (devices.find(&gpus, wanted), question).0).await
        };
        let chosen = match timeout(DRIVER_TIMEOUT, asked).await {
            Ok(Ok(chosen)) => chosen?,
            Ok(Err(error)) => return Err(format!("GPU {gpu} cannot be used: {error}")),
            Err(_) => {
                let seconds = DRIVER_TIMEOUT.as_secs();
                return Err(format!(
                    "GPU {gpu} cannot be used: the driver did not respond within {seconds} s"
                ));
            }
        };
        self.watch(gpu);
        Ok(chosen)
    }

    /// Returns why a device is lost, if it is and an instance uses it.
    pub fn lost(&self, number: u32) -> Option<String> {
        let watched = self.watched.lock();
        watched.lost.get(&number).cloned().flatten()
    }

    /// Queries the driver for the device and its processors.
    fn find(&self, gpus: &Gpus, wanted: DeviceRequest) -> Result<ChosenDevice, String> {
        let number = wanted.number;
        let found: BTreeMap<u32, Result<Usable, String>> =
            self.shown.numbers().map(|number| (number, self.query(gpus, number))).collect();
        let refused = |name: &str, why: &str| {
            let usable = found
                .iter()
                .filter_map(|(number, found)| Some(described(*number, found.as_ref().ok()?)));
            let usable = joined(&usable.collect::<Vec<_>>(), "none");
            format!("{name} cannot be used: {why}; GPUs that can be used: {usable}")
        };
        let own = match found.get(&number) {
            Some(Ok(own)) => own,
            Some(Err(why)) => {
                return Err(refused(&format!("GPU {number}{}", self.called(gpus, number)), why));
            }
            None => return Err(refused(&format!("GPU {number}"), "it does not exist")),
        };
        let (uuid, memory) = part(own, wanted.turn);
        self.check_limit(wanted, memory)?;
        let mut chosen = ChosenDevice {
            number,
            uuid: uuid.to_owned(),
            visible: vec![number],
            ..ChosenDevice::default()
        };
        let mut uuids = vec![uuid];
        // A process sees one MIG device, and then nothing else.
        if own.mig.is_none() {
            for (other, device) in found.iter().filter(|(other, _)| **other != number) {
                if let Ok(Usable { uuid, mig: None, .. }) = device {
                    chosen.visible.push(*other);
                    uuids.push(uuid);
                }
            }
        }
        chosen.uuids = uuids.join(",");
        chosen.cpus = cpus::near(own, &self.bus);
        Ok(chosen)
    }

    /// Queries the current state of a device, with its visible MIG devices.
    fn query(&self, gpus: &Gpus, number: u32) -> Result<Usable, String> {
        let bus = self.shown.bus_number(number).ok_or("it does not exist")?;
        let mut usable = gpus.usable(bus)?;
        if let Some(parts) = &mut usable.mig {
            parts.retain(|(uuid, _)| self.shown.shows_part(number, uuid));
            if parts.is_empty() {
                return Err(NO_PARTS.to_owned());
            }
        }
        Ok(usable)
    }

    /// Returns the UUID that a device had at the start, in parentheses.
    fn called(&self, gpus: &Gpus, number: u32) -> String {
        let uuid =
            shown_of(&self.shown, gpus.found(), number).and_then(|found| found.uuid.as_ref());
        uuid.map(|uuid| format!(" ({uuid})")).unwrap_or_default()
    }

    /// # Errors
    /// More of the device's memory is in use than the limit for loading a model allows; the text
    /// begins as Triton's.
    fn check_limit(&self, wanted: DeviceRequest, memory: Option<GpuMemory>) -> Result<(), String> {
        let number = wanted.number;
        let Some(limit) = self.limits.get(&number).filter(|_| wanted.loading) else {
            return Ok(());
        };
        let Some(GpuMemory { total, used }) = memory.filter(|memory| memory.total > 0) else {
            tracing::warn!(
                "GPU {number} does not report its memory in use: --model-load-gpu-limit is not \
                 enforced"
            );
            return Ok(());
        };
        let share = used as f64 / total as f64;
        if share <= *limit {
            return Ok(());
        }
        Err(format!(
            "memory limit set for GPU {number} has exceeded, model loading is rejected: {used} of \
             {total} bytes are in use ({:.1} %), --model-load-gpu-limit allows {:.1} %",
            share * 100.0,
            limit * 100.0
        ))
    }

    /// Checks a device from now on. The first one starts the checking thread.
    fn watch(self: &Arc<Self>, number: u32) {
        let mut watched = self.watched.lock();
        let is_first = watched.lost.is_empty();
        watched.lost.insert(number, None);
        drop(watched);
        if is_first {
            let devices = Arc::downgrade(self);
            let watch = std::thread::Builder::new()
                .name("watch-gpus".to_owned())
                .spawn(move || watch(&devices));
            if let Err(error) = watch {
                tracing::error!("cannot start the thread that detects lost GPUs: {error}");
            }
        }
    }

    /// Checks the devices in use once.
    fn check_watched(&self) {
        let Some(gpus) = &self.gpus else { return };
        let numbers: Vec<u32> = self.watched.lock().lost.keys().copied().collect();
        for number in numbers {
            let Some(bus) = self.shown.bus_number(number) else { continue };
            let name = format!("GPU {number}{}", self.called(gpus, number));
            let lost = gpus.check(bus).err().map(|reason| format!("{name} is lost: {reason}"));
            self.watched.lock().lost.insert(number, lost);
        }
    }
}

/// Checks the devices until they are dropped.
fn watch(devices: &Weak<Devices>) {
    while let Some(devices) = devices.upgrade() {
        devices.check_watched();
        drop(devices);
        std::thread::sleep(WATCH);
    }
}

fn shown_of<'f>(shown: &VisibleDevices, found: &'f [Found], number: u32) -> Option<&'f Found> {
    found.get(usize::try_from(shown.bus_number(number)?).ok()?)
}

/// Returns the UUID and memory of a process's device: the whole device or a MIG device.
fn part(device: &Usable, turn: u32) -> (&str, Option<GpuMemory>) {
    let parts = device.mig.as_deref().unwrap_or_default();
    let at = usize::try_from(turn).ok().and_then(|turn| turn.checked_rem(parts.len()));
    match at.and_then(|at| parts.get(at)) {
        Some((uuid, memory)) => (uuid, *memory),
        None => (&device.uuid, device.memory),
    }
}

/// Joins a list for messages, or returns `empty`.
fn joined(list: &[String], empty: &str) -> String {
    if list.is_empty() { empty.to_owned() } else { list.join(", ") }
}

/// Describes a device for messages.
fn described(number: u32, device: &Usable) -> String {
    match &device.mig {
        None => format!("{number} ({})", device.uuid),
        Some(parts) => {
            let uuids: Vec<&str> = parts.iter().map(|(uuid, _)| uuid.as_str()).collect();
            format!("{number} ({}, in MIG mode with {})", device.uuid, uuids.join(", "))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
