//! CUDA memory of clients, by the handle that its process has given. What the driver does is behind [`Driver`], so that
//! all around it is tested without a GPU.

#[allow(unsafe_code)]
mod driver;

use std::io::Read;

use pharos::region::CUDA_HANDLE;
use pharos::wire::regions::Probed;

pub(super) use driver::Cudarc;

/// Why memory cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// There is no GPU, or no driver for it.
    NoGpu(String),
    /// The driver does not open it.
    Refused(String),
}

/// The few calls of the driver that are needed.
pub(super) trait Driver: Send + Sync {
    /// Opens memory of another process: its address, and how many bytes there are from it.
    fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Failure>;

    /// Ends that.
    fn close(&self, device: u32, address: u64);

    /// Copies from the device; done when it returns.
    fn read(&self, device: u32, address: u64, into: &mut [u8]) -> Result<(), String>;

    /// Copies to the device; done when it returns.
    fn write(&self, device: u32, address: u64, from: &[u8]) -> Result<(), String>;
}

/// What the process is to print that only looks at memory: the handle is read from standard input.
pub(crate) fn probe(device: &str) -> Probed {
    look(&Cudarc::default(), device, &mut std::io::stdin().lock())
}

fn look(driver: &dyn Driver, device: &str, input: &mut impl Read) -> Probed {
    let mut handle = [0; CUDA_HANDLE];
    let Ok(device) = device.parse() else { return Probed::Refused(format!("there is no device {device}")) };
    if let Err(error) = input.read_exact(&mut handle) {
        return Probed::Refused(format!("the handle cannot be read: {error}"));
    }
    match driver.open(device, &handle) {
        Ok((address, size)) => {
            driver.close(device, address);
            Probed::Bytes(size)
        }
        Err(Failure::NoGpu(why)) => Probed::NoGpu(why),
        Err(Failure::Refused(why)) => Probed::Refused(why),
    }
}

/// A driver for tests: its devices are vectors, and a handle is the address of one of them.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod fake {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What is where, by device; and how often memory is open.
    #[derive(Clone, Default)]
    pub(crate) struct Fake {
        pub(crate) memory: Arc<Mutex<Vec<Vec<u8>>>>,
        pub(crate) open: Arc<Mutex<i32>>,
    }

    /// Device memory begins here: an address is nothing that this process could use.
    const BASE: u64 = 1 << 32;

    impl Driver for Fake {
        fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Failure> {
            let memory = self.memory.lock().unwrap();
            if memory.is_empty() {
                return Err(Failure::NoGpu("no device".to_owned()));
            }
            match memory.get(device as usize) {
                Some(memory) if handle[0] == 1 => {
                    *self.open.lock().unwrap() += 1;
                    Ok((BASE, memory.len() as u64))
                }
                _ => Err(Failure::Refused("invalid handle".to_owned())),
            }
        }

        fn close(&self, _: u32, _: u64) {
            *self.open.lock().unwrap() -= 1;
        }

        fn read(&self, device: u32, address: u64, into: &mut [u8]) -> Result<(), String> {
            let (memory, at) = (self.memory.lock().unwrap(), usize::try_from(address - BASE).unwrap_or(usize::MAX));
            let from = memory.get(device as usize).and_then(|memory| memory.get(at..at + into.len()));
            into.copy_from_slice(from.ok_or("outside")?);
            Ok(())
        }

        fn write(&self, device: u32, address: u64, from: &[u8]) -> Result<(), String> {
            let (mut memory, at) = (self.memory.lock().unwrap(), usize::try_from(address - BASE).unwrap_or(usize::MAX));
            let into = memory.get_mut(device as usize).and_then(|memory| memory.get_mut(at..at + from.len()));
            into.ok_or("outside")?.copy_from_slice(from);
            Ok(())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::fake::Fake;
    use super::*;

    #[test]
    fn a_probe_says_what_a_handle_opens() {
        let fake = Fake::default();
        let ask = |device: &str, handle: &[u8]| look(&fake, device, &mut &*handle);
        let good = [1; CUDA_HANDLE];
        assert_eq!(ask("0", &good), Probed::NoGpu("no device".into()));
        fake.memory.lock().unwrap().push(vec![0; 77]);
        assert_eq!(ask("0", &good), Probed::Bytes(77));
        assert_eq!(*fake.open.lock().unwrap(), 0);
        assert_eq!(ask("1", &good), Probed::Refused("invalid handle".into()));
        assert_eq!(ask("0", &[0; CUDA_HANDLE]), Probed::Refused("invalid handle".into()));
        assert!(matches!(ask("0", &good[1..]), Probed::Refused(why) if why.contains("cannot be read")));
        assert!(matches!(ask("x", &good), Probed::Refused(why) if why.contains("there is no device x")));
    }
}
