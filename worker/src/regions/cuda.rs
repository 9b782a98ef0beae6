//! CUDA memory of clients, opened by the handles that their processes have registered: stays open
//! in this process while it is in use. Also probes such memory in a separate process.

use std::io::Read;
use std::sync::Arc;

use pharos::region::CUDA_HANDLE;
use pharos::wire::regions::Probed;
use pharos_backend::DeviceMemory;

use crate::device::{Cuda, Driver, Fault, OWN};

/// A client's memory that is open in this process; closed on drop.
pub(super) struct Opened {
    cuda: Arc<Cuda>,
    memory: DeviceMemory,
}

impl Opened {
    /// Opens `len` bytes of a device's memory, in the process's numbering of devices; if there are
    /// fewer, returns how many.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn new(
        cuda: &Arc<Cuda>,
        device: u32,
        handle: &[u8; CUDA_HANDLE],
        len: u64,
    ) -> Result<Result<Arc<Self>, u64>, Fault> {
        let (address, size) = call(cuda, device, |driver| driver.open(device, handle))?;
        let room = usize::try_from(len).ok().filter(|_| size >= len);
        let opened = Self {
            cuda: cuda.clone(),
            memory: DeviceMemory::new(device, address, room.unwrap_or(0)),
        };
        Ok(if room.is_some() { Ok(Arc::new(opened)) } else { Err(size) })
    }

    /// Returns the whole range.
    pub(super) fn memory(&self) -> DeviceMemory {
        self.memory
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        let memory = self.memory;
        let _ = call(&self.cuda, memory.device(), |driver| {
            driver.close(memory.device(), memory.address());
            Ok(())
        });
    }
}

/// Calls the driver for a device, then makes the instance's device current on the calling thread
/// again: frameworks in the same process use the thread's current device when none is named.
pub(super) fn call<T>(
    cuda: &Cuda,
    device: u32,
    call: impl FnOnce(&dyn Driver) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let result = cuda.call(call);
    if device != OWN && cuda.device().is_some() {
        let _ = cuda.call(|driver| driver.enter(OWN));
    }
    result
}

/// Returns the output of a probe process; reads the handle from standard input.
pub(crate) fn probe(device: &str) -> Probed {
    look(&Cuda::new(None), device, &mut std::io::stdin().lock())
}

fn look(cuda: &Cuda, device: &str, input: &mut impl Read) -> Probed {
    let mut handle = [0; CUDA_HANDLE];
    let Ok(device) = device.parse() else {
        return Probed::Refused(format!("there is no device {device}"));
    };
    if let Err(error) = input.read_exact(&mut handle) {
        return Probed::Refused(format!("the handle cannot be read: {error}"));
    }
    let opened = cuda.call(|driver| {
        let (address, size) = driver.open(device, &handle)?;
        driver.close(device, address);
        Ok(size)
    });
    match opened {
        Ok(size) => Probed::Bytes(size),
        Err(Fault::Absent(why)) => Probed::NoGpu(why),
        Err(Fault::Refused(why) | Fault::Permanent(why)) => Probed::Refused(why),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::device::fake::Fake;

    #[test]
    fn a_probe_says_what_a_handle_opens() {
        let fake = Fake::new(0);
        let (_, good) = fake.share(0, &[0; 77]);
        let ask = |fake: &Fake, device: &str, handle: &[u8]| {
            look(&Cuda::with(Box::new(fake.clone()), None), device, &mut &*handle)
        };
        assert_eq!(ask(&fake, "0", &good), Probed::NoGpu("no device".into()));
        assert_eq!(ask(&Fake::absent(), "0", &good), Probed::NoGpu("no driver".into()));
        let fake = Fake::new(1);
        let (_, good) = fake.share(0, &[0; 77]);
        assert_eq!(ask(&fake, "0", &good), Probed::Bytes(77));
        assert_eq!(fake.open_count(), 0);
        assert_eq!(ask(&fake, "1", &good), Probed::Refused("invalid handle".into()));
        assert_eq!(ask(&fake, "0", &[0; CUDA_HANDLE]), Probed::Refused("invalid handle".into()));
        assert!(
            matches!(ask(&fake, "0", &good[1..]), Probed::Refused(why) if why.contains("cannot be read"))
        );
        assert!(
            matches!(ask(&fake, "x", &good), Probed::Refused(why) if why.contains("there is no device x"))
        );
    }
}
