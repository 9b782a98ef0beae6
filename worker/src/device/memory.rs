//! Device memory: alignment checks, and buffers of this process that are reused by the next batch.

use std::sync::Arc;

use pharos_backend::DeviceMemory;

use super::{Cuda, Fault, OWN};

/// Whether a kernel of the instance's device may access memory as elements of `size` bytes. A
/// misaligned access would destroy the context of the process.
pub(crate) fn is_usable(memory: DeviceMemory, size: usize) -> bool {
    memory.device() == OWN && memory.address().is_multiple_of(size.max(1) as u64)
}

/// Memory of the instance's device, owned by this value.
pub(crate) struct Buffer {
    cuda: Arc<Cuda>,
    memory: DeviceMemory,
}

impl Buffer {
    pub(super) fn new(cuda: &Arc<Cuda>, len: usize) -> Result<Self, Fault> {
        let address = cuda.call(|driver| driver.allocate(OWN, len))?;
        Ok(Self { cuda: cuda.clone(), memory: DeviceMemory::new(OWN, address, len) })
    }

    /// Returns all of it.
    pub(super) fn whole(&self) -> DeviceMemory {
        self.memory
    }

    /// Returns its first bytes; at most its length.
    pub(crate) fn first(&self, len: usize) -> DeviceMemory {
        DeviceMemory::new(self.memory.device(), self.memory.address(), len.min(self.memory.len()))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Self { cuda, memory } = self;
        let _ = cuda.call(|driver| {
            driver.free(memory.device(), memory.address());
            Ok(())
        });
    }
}

/// The minimum allocation, in bytes.
const LEAST: usize = 64 << 10;

/// Buffers for the next batch. Sizes are rounded up to powers of two and the smallest sufficient
/// buffer is used, so that batches of varying sizes soon need no allocations.
pub(crate) struct Pool {
    cuda: Arc<Cuda>,
    free: Vec<Buffer>,
}

impl Pool {
    pub(crate) const fn new(cuda: Arc<Cuda>) -> Self {
        Self { cuda, free: Vec::new() }
    }

    /// Returns a buffer of at least `len` bytes.
    ///
    /// # Errors
    /// The device has no memory left, even after the unused buffers were freed.
    pub(crate) fn take(&mut self, len: usize) -> Result<Buffer, Fault> {
        let fits = self.free.iter().enumerate().filter(|(_, buffer)| buffer.memory.len() >= len);
        if let Some((at, _)) = fits.min_by_key(|(_, buffer)| buffer.memory.len()) {
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

    /// Keeps a buffer for reuse. The work that used it is done, or is ordered before the next use
    /// in the same stream.
    pub(crate) fn put(&mut self, buffer: Buffer) {
        self.free.push(buffer);
    }
}
