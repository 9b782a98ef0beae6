//! A look at CUDA memory of a client, by the handle that its process has given, in a process of its own.

use std::io::Read;

use pharos::region::CUDA_HANDLE;
use pharos::wire::regions::Probed;

use crate::device::{Cuda, Fault};

/// What the process is to print that only looks at memory: the handle is read from standard input.
pub(crate) fn probe(device: &str) -> Probed {
    look(&Cuda::new(None), device, &mut std::io::stdin().lock())
}

fn look(cuda: &Cuda, device: &str, input: &mut impl Read) -> Probed {
    let mut handle = [0; CUDA_HANDLE];
    let Ok(device) = device.parse() else { return Probed::Refused(format!("there is no device {device}")) };
    if let Err(error) = input.read_exact(&mut handle) {
        return Probed::Refused(format!("the handle cannot be read: {error}"));
    }
    let opened = cuda.ask(|driver| {
        let (address, size) = driver.open(device, &handle)?;
        driver.close(device, address);
        Ok(size)
    });
    match opened {
        Ok(size) => Probed::Bytes(size),
        Err(Fault::Absent(why)) => Probed::NoGpu(why),
        Err(Fault::Refused(why) | Fault::Lasting(why)) => Probed::Refused(why),
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
        assert!(matches!(ask(&fake, "0", &good[1..]), Probed::Refused(why) if why.contains("cannot be read")));
        assert!(matches!(ask(&fake, "x", &good), Probed::Refused(why) if why.contains("there is no device x")));
    }
}
