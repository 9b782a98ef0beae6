//! The GPU, as this process uses it: what the CUDA driver does is behind [`Driver`], so that all around it is tested
//! without a GPU.
//!
//! Nothing here is called for an instance on CPUs, except for memory of clients on a device. A process whose device is
//! broken for good ([`Fault::Lasting`]) asks the driver nothing any more: it answers its batch, says so and ends, because
//! only a new process gets a context that works.

#[allow(unsafe_code)]
mod calls;
#[allow(unsafe_code)]
mod driver;
#[cfg(test)]
#[allow(unsafe_code, clippy::unwrap_used)]
pub(crate) mod fake;
mod memory;
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
pub(crate) use work::{Ahead, Queues, Work};

/// The instance's own device, as the process counts: see [`Device::visible`].
pub(crate) const OWN: u32 = 0;

/// Why a call of the driver did not go well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    /// There is no driver, or no device.
    #[error("{0}")]
    Absent(String),
    /// The driver refuses this; other calls may go well.
    #[error("{0}")]
    Refused(String),
    /// The device, or what this process has on it, is broken for good.
    #[error("{0}")]
    Lasting(String),
}

/// A queue of work on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stream(usize);

impl Stream {
    /// The driver's own of the device, which others that are not made apart from it wait for, and which waits for them.
    pub(crate) const DEFAULT: Self = Self(0);
}

/// A point in a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Event(usize);

/// Compiled kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Module(usize);

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Function(usize);

/// The driver as this process has it, and the device that its instance runs on.
pub(crate) struct Cuda {
    driver: Box<dyn Driver>,
    device: Option<Device>,
    broken: OnceLock<String>,
}

impl Cuda {
    /// For an instance on this device, or on CPUs. Asks the driver nothing yet.
    pub(crate) fn new(device: Option<Device>) -> Arc<Self> {
        Self::with(Box::new(driver::Cudarc::default()), device)
    }

    /// Over a driver.
    pub(crate) fn with(driver: Box<dyn Driver>, device: Option<Device>) -> Arc<Self> {
        Arc::new(Self { driver, device, broken: OnceLock::new() })
    }

    /// Asks the driver, unless all is lost already.
    pub(crate) fn ask<T>(&self, call: impl FnOnce(&dyn Driver) -> Result<T, Fault>) -> Result<T, Fault> {
        if let Some(why) = self.broken.get() {
            return Err(Fault::Lasting(why.clone()));
        }
        let result = call(&*self.driver);
        if let Err(Fault::Lasting(why)) = &result {
            let _ = self.broken.set(why.clone());
        }
        result
    }

    /// The sentence with which the process is to end, if what it has on the device is broken for good.
    pub(crate) fn broken(&self) -> Option<String> {
        let why = self.broken.get()?;
        Some(format!("{} cannot be used any more: {why}; a new process has to take over", self.device_name()))
    }

    /// Whether the memory of the devices is the process's own: in tests.
    pub(crate) fn is_here(&self) -> bool {
        self.driver.is_here()
    }

    /// The device that the instance runs on, if it does on one.
    pub(crate) fn device(&self) -> Option<&Device> {
        self.device.as_ref()
    }

    /// Finds out whether a failure that a framework has met has broken the instance's own device for good: the frameworks'
    /// work is in the same context as ours, in which every call fails from then on. Not asked unless it is `doubtful`.
    pub(crate) fn look(&self, doubtful: bool) {
        if !doubtful || self.device.is_none() {
            return;
        }
        // What it finds is remembered.
        let _ = self.ask(|driver| {
            if driver.is_active(OWN) {
                driver.enter(OWN)?;
                let event = driver.event(OWN)?;
                driver.close_event(OWN, event);
            }
            Ok(())
        });
    }

    /// Makes the instance's own device ready.
    ///
    /// # Errors
    /// What the user is told about why it cannot be used.
    pub(crate) fn open(&self) -> Result<(), Fault> {
        let opened = self.ask(|driver| match driver.count()? {
            0 => Err(Fault::Absent("the CUDA driver sees no device".to_owned())),
            _ => driver.enter(OWN),
        });
        opened.map_err(|fault| {
            let text = format!("{} cannot be used: {fault}", self.device_name());
            match fault {
                Fault::Absent(_) => Fault::Absent(text),
                Fault::Refused(_) => Fault::Refused(text),
                Fault::Lasting(_) => Fault::Lasting(text),
            }
        })
    }

    /// The process's number of a device of the machine.
    ///
    /// # Errors
    /// This process does not see it.
    pub(crate) fn ordinal(&self, number: u32) -> Result<u32, Fault> {
        let Some(device) = &self.device else { return Ok(number) };
        let position = device.visible.iter().position(|visible| *visible == number);
        position.and_then(|position| u32::try_from(position).ok()).ok_or_else(|| {
            Fault::Refused(format!(
                "it is on GPU {number}, which an instance on GPU {} does not see: it sees {:?}",
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
