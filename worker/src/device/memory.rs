//! Memory of devices: ranges of it, and buffers of this process's own that are kept for the next batch.

use std::sync::Arc;

use super::{Cuda, Fault, OWN};

/// A range of a device's memory: of an own buffer, or of a client's. It is there as long as what it was taken from, for
/// a client's as long as the batch is executed; the client may change its content at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    device: u32,
    address: u64,
    len: usize,
}

impl DeviceMemory {
    pub(crate) const fn new(device: u32, address: u64, len: usize) -> Self {
        Self { device, address, len }
    }

    /// The device, as the process counts: 0 is the instance's own.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Where it begins. Memory of clients is aligned to nothing in particular.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` bytes from `offset`; `None` if they pass the end.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { address: self.address + offset as u64, len, ..*self })
    }

    /// Whether a kernel of the instance's device may use it as elements of `size` bytes: a wrong alignment would cost
    /// the process its context.
    pub(crate) fn is_usable(&self, size: usize) -> bool {
        self.device == OWN && self.address.is_multiple_of(size.max(1) as u64)
    }
}

/// Memory of the instance's device that is this value's alone.
pub(crate) struct Buffer {
    cuda: Arc<Cuda>,
    memory: DeviceMemory,
}

impl Buffer {
    fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, Fault> {
        let address = cuda.ask(|driver| driver.allocate(OWN, len))?;
        Ok(Self { cuda: cuda.clone(), memory: DeviceMemory::new(OWN, address, len) })
    }

    /// Its first bytes; as many as there are at most.
    pub(crate) fn first(&self, len: usize) -> DeviceMemory {
        DeviceMemory { len: len.min(self.memory.len), ..self.memory }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Self { cuda, memory } = self;
        let _ = cuda.ask(|driver| {
            driver.free(memory.device, memory.address);
            Ok(())
        });
    }
}

/// The least that is allocated, bytes.
const LEAST: usize = 64 << 10;

/// Buffers for the next batch. They grow by powers of two and the smallest that is large enough is used, so that
/// batches of changing sizes soon find all that they need.
pub(crate) struct Pool {
    cuda: Arc<Cuda>,
    free: Vec<Buffer>,
}

impl Pool {
    pub(crate) const fn new(cuda: Arc<Cuda>) -> Self {
        Self { cuda, free: Vec::new() }
    }

    /// A buffer of at least `len` bytes.
    ///
    /// # Errors
    /// The device has no memory left, also after what is kept here was given back.
    pub(crate) fn take(&mut self, len: usize) -> Result<Buffer, Fault> {
        let fits = self.free.iter().enumerate().filter(|(_, buffer)| buffer.memory.len >= len);
        if let Some((at, _)) = fits.min_by_key(|(_, buffer)| buffer.memory.len) {
            return Ok(self.free.swap_remove(at));
        }
        let size = len.max(LEAST).checked_next_power_of_two().unwrap_or(len);
        match Buffer::new(&self.cuda, size) {
            Err(Fault::Refused(_)) => {
                self.free.clear();
                Buffer::new(&self.cuda, len.max(LEAST))
            }
            result => result,
        }
    }

    /// Keeps a buffer for later. The work that used it is done, or is in the stream that will use it next.
    pub(crate) fn put(&mut self, buffer: Buffer) {
        self.free.push(buffer);
    }
}
