//! Access to GPUs from this process. [`Driver`] abstracts the CUDA driver, so that all other code
//! is tested without a GPU.
//!
//! Instances on CPUs never use this module, except for client memory on a device. After a permanent
//! fault ([`Fault::Permanent`]) the process makes no further driver calls: it answers its batch,
//! reports the fault and ends, because only a new process gets a working context.

#[allow(unsafe_code)]
mod calls;
#[allow(unsafe_code)]
mod driver;
#[cfg(test)]
#[allow(unsafe_code, clippy::unwrap_used)]
pub(crate) mod fake;
mod memory;
#[allow(unsafe_code)]
mod scratch;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
#[allow(unsafe_code)]
mod work;

use std::sync::{Arc, OnceLock};

use pharos::wire::Device;

pub(crate) use calls::Driver;
pub(crate) use memory::{Buffer, Pool, is_usable};
pub(crate) use pharos_backend::DeviceMemory;
pub(crate) use scratch::Scratch;
pub(crate) use work::{Prefetch, Queues, Work};

/// The instance's device, in the process's numbering: see [`Device::visible`].
pub(crate) const OWN: u32 = 0;

/// Why a driver call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    /// There is no driver, or no device.
    #[error("{0}")]
    Absent(String),
    /// The driver refuses this call; other calls may succeed.
    #[error("{0}")]
    Refused(String),
    /// The device, or this process's context on it, is permanently broken.
    #[error("{0}")]
    Permanent(String),
}

/// A queue of work on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream(usize);

impl Stream {
    /// The device's default stream, which synchronizes with other blocking streams.
    pub(crate) const DEFAULT: Self = Self(0);
}

/// A point in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event(usize);

/// Compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Module(usize);

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(usize);

/// The driver, and the device that the instance runs on.
pub(crate) struct Cuda {
    driver: Box<dyn Driver>,
    device: Option<Device>,
    broken: OnceLock<String>,
}

impl Cuda {
    /// Creates access for an instance on this device, or on CPUs. Does not call the driver yet.
    pub(crate) fn new(device: Option<Device>) -> Arc<Self> {
        Self::with(Box::new(driver::Cudarc::default()), device)
    }

    /// Creates access through a given driver.
    pub(crate) fn with(driver: Box<dyn Driver>, device: Option<Device>) -> Arc<Self> {
        Arc::new(Self { driver, device, broken: OnceLock::new() })
    }

    /// Calls the driver, unless a permanent fault has occurred.
    pub(crate) fn call<T>(
        &self,
        call: impl FnOnce(&dyn Driver) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        if let Some(why) = self.broken.get() {
            return Err(Fault::Permanent(why.clone()));
        }
        let result = call(&*self.driver);
        if let Err(Fault::Permanent(why)) = &result {
            let _ = self.broken.set(why.clone());
        }
        result
    }

    /// Returns the message with which the process must end if the device is permanently broken.
    pub(crate) fn broken(&self) -> Option<String> {
        let why = self.broken.get()?;
        Some(format!(
            "{} is no longer usable: {why}; the worker process must be replaced",
            self.device_name()
        ))
    }

    /// Whether device memory is the process's memory, as in tests.
    pub(crate) fn is_host_memory(&self) -> bool {
        self.driver.is_host_memory()
    }

    /// Returns the device that the instance runs on, if any.
    pub(crate) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Checks whether an error of a framework has permanently broken the instance's device: the
    /// framework shares this process's context, in which every call fails from then on. Does
    /// nothing unless `doubtful`.
    pub(crate) fn check_after_failure(&self, doubtful: bool) {
        if !doubtful || self.device.is_none() {
            return;
        }
        // `call` records a permanent fault.
        let _ = self.call(|driver| {
            if driver.is_active(OWN) {
                driver.enter(OWN)?;
                let event = driver.event(OWN)?;
                driver.close_event(OWN, event);
            }
            Ok(())
        });
    }

    /// Initializes the instance's device.
    ///
    /// # Errors
    /// Why the device cannot be used, for the user.
    pub(crate) fn open(&self) -> Result<(), Fault> {
        let opened = self.call(|driver| match driver.count()? {
            0 => Err(Fault::Absent("the CUDA driver reports no device".to_owned())),
            _ => driver.enter(OWN),
        });
        opened.map_err(|fault| {
            let text = format!("{} cannot be used: {fault}", self.device_name());
            match fault {
                Fault::Absent(_) => Fault::Absent(text),
                Fault::Refused(_) => Fault::Refused(text),
                Fault::Permanent(_) => Fault::Permanent(text),
            }
        })
    }

    /// Converts a device number of the machine to this process's numbering.
    ///
    /// # Errors
    /// The device is not visible to this process.
    pub(crate) fn ordinal(&self, number: u32) -> Result<u32, Fault> {
        let Some(device) = &self.device else { return Ok(number) };
        let position = device.visible.iter().position(|visible| *visible == number);
        position.and_then(|position| u32::try_from(position).ok()).ok_or_else(|| {
            Fault::Refused(format!(
                "it is on GPU {number}, which is not visible to an instance on GPU {}; visible: \
                 {:?}",
                device.number, device.visible
            ))
        })
    }

    fn device_name(&self) -> String {
        match &self.device {
            Some(Device { number, uuid, .. }) => format!("GPU {number} ({uuid})"),
            None => "a GPU".to_owned(),
        }
    }
}
