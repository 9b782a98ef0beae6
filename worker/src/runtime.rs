//! What a backend may use from any thread and at any time, also between batches: memory for answers, requests that it
//! answers when it likes, and the other models of the server.
//!
//! The socket to the frontend has no thread of its own. Whoever waits for something (the main thread for its next batch, a
//! thread for the answer of another model, a sender for its reader) reads it while nobody else does, and hands what is not
//! for itself to the others ([`board`]). So a worker that only executes batches pays nothing for all this.

mod board;
#[allow(unsafe_code)]
mod bytes;
mod calls;
mod readiness;
mod responder;
mod stash;

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::wire::{Load, Placement, ToFrontend};

use crate::backend::{load_error, run_error};
use crate::descriptors::SharedDescriptors;
use crate::device::{Cuda, DeviceMemory, Fault, OWN, Stream};
use crate::instance::lent;
use crate::memory::{self, InputArena, OutputArena};
use crate::metrics::Metrics;
use crate::regions::{self, ReceivedOnDevice, Regions};
use crate::state::Buffer;
use crate::wire::{Reader, Sender};

use board::Board;
use bytes::Loans;
pub(crate) use bytes::{Loan, LoanCell};
pub use bytes::{Memory, Received};
pub use calls::{Call, CallInput, Called, CalledOutput, Canceller, Pending};
pub(crate) use responder::{Collected, Sent};
pub use responder::{Content, Reply, ReplyOutput, Responder};
pub(crate) use stash::{Stash, merge};

/// The runtime, for backends: clones are the same one.
#[derive(Clone)]
pub struct Runtime(pub(crate) Arc<Shared>);

/// What all threads of the process share.
pub(crate) struct Shared {
    pub(crate) board: Board,
    pub(crate) inputs: InputArena,
    pub(crate) outputs: OutputArena,
    pub(crate) metrics: Metrics,
    // Changed by the main thread only, between batches.
    regions: RwLock<Regions>,
    pub(crate) cuda: Arc<Cuda>,
    loans: Loans,
    next_call: AtomicU64,
}

impl Runtime {
    /// Maps the shared memory, and reads from this connection from now on.
    ///
    /// # Errors
    /// What the user is told about why the model cannot be loaded.
    pub(crate) fn open(
        load: &Load,
        (reader, sender): (Reader, Sender),
        descriptors: SharedDescriptors,
        cuda: Arc<Cuda>,
    ) -> Result<Self, InferError> {
        let unmapped = |error: io::Error| load_error(format!("shared memory cannot be mapped: {error}"));
        let (inputs, outputs) = memory::map(&descriptors).map_err(unmapped)?;
        let metrics = Metrics::open(&descriptors.metrics, descriptors.bell, load);
        let metrics = metrics.map_err(|error| load_error(format!("metrics cannot be recorded: {error}")))?;
        let board = Board::new(reader, sender);
        let regions = RwLock::new(Regions::new(descriptors.regions, cuda.clone()));
        let (loans, next_call) = (Loans::default(), AtomicU64::new(1));
        Ok(Self(Arc::new(Shared { board, inputs, outputs, metrics, regions, cuda, loans, next_call })))
    }

    /// A block of the memory in which answers travel; its content is undefined. For [`Content::Memory`].
    ///
    /// # Errors
    /// That memory is full.
    pub fn memory(&self, len: usize) -> Result<Memory, InferError> {
        Memory::allocate(&self.0, len).ok_or_else(|| full(len, self.0.outputs.capacity()))
    }

    /// The bytes of a living input that `len` bytes at this address of the process are a part of, so that a view of an
    /// input is known again when it is given as an output; `None` for any others.
    pub fn locate(&self, address: usize, len: usize) -> Option<Received> {
        self.0.loans.locate(address, len)
    }

    /// Copies memory of a device, as the process counts them, behind the work of its default stream; done when it returns.
    ///
    /// # Errors
    /// What the driver says.
    pub fn read_device(&self, (device, address): (u32, u64), into: &mut [u8]) -> Result<(), InferError> {
        if into.is_empty() {
            return Ok(());
        }
        let read = regions::ask(&self.0.cuda, device, |driver| driver.read(device, address, into));
        read.map_err(|why| run_error(format!("memory of device {device} cannot be copied: {why}")))
    }

    /// Copies memory of a device, this or another one, to a client's on a device, behind the work of the default stream of the
    /// device that it comes from; done when it returns. As many bytes as both have.
    ///
    /// # Errors
    /// As [`Runtime::read_device`].
    pub fn copy_on_device(&self, (device, address): (u32, u64), to: &ReceivedOnDevice) -> Result<(), InferError> {
        let to = to.memory();
        if to.is_empty() {
            return Ok(());
        }
        let copied = regions::ask(&self.0.cuda, device, |driver| {
            driver.copy(device, Stream::DEFAULT, DeviceMemory::new(device, address, to.len()), to)?;
            driver.synchronize(device, Stream::DEFAULT)
        });
        copied.map_err(|why| run_error(format!("memory of device {device} cannot be copied: {why}")))
    }

    /// A copy of memory of a device in the process's memory, aligned to 64 bytes.
    ///
    /// # Errors
    /// As [`Runtime::read_device`].
    pub fn fetch(&self, memory: DeviceMemory) -> Result<Received, InferError> {
        let mut buffer = Buffer::zeroed(memory.len());
        self.read_device((memory.device(), memory.address()), buffer.as_mut_slice())?;
        Ok(Received::of_buffer(buffer))
    }

    /// The metrics of this process.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }
}

impl Shared {
    /// Sends a frame. A broken connection shows where frames are read.
    pub(crate) fn send(&self, frame: &ToFrontend) {
        let _ = self.board.sender.send(frame);
    }

    /// As [`Shared::send`], for what a model says, which may be too much for a frame.
    ///
    /// # Errors
    /// It is; nothing was sent.
    fn send_if_it_fits(&self, frame: &ToFrontend) -> Result<(), InferError> {
        match self.board.sender.send(frame) {
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, error.to_string()))
            }
            _ => Ok(()),
        }
    }

    /// Registers the beginning of both arenas with the driver if the model uses the instance's device from this process:
    /// how many bytes. What loads nothing on a device has nothing of it, and is not made to have a context there.
    pub(crate) fn pin(&self) -> u64 {
        let Some(device) = self.cuda.device().filter(|device| device.pinned > 0) else { return 0 };
        if !self.cuda.ask(|driver| Ok(driver.is_active(OWN))).unwrap_or(false) {
            return 0;
        }
        let pinned = [self.inputs.pin(&self.cuda, device.pinned), self.outputs.pin(&self.cuda, device.pinned)];
        let warned = |fault: Fault| {
            let number = device.number;
            eprintln!("pharos-worker: memory for copies from and to GPU {number} cannot be pinned: {fault}");
        };
        pinned.into_iter().map(|pinned| pinned.map_err(warned).unwrap_or(0)).sum()
    }

    /// Memory of clients.
    pub(crate) fn regions(&self) -> RwLockReadGuard<'_, Regions> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Shared::regions`], to open or forget some.
    pub(crate) fn regions_to_change(&self) -> RwLockWriteGuard<'_, Regions> {
        self.regions.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes an output where its client wants it.
    ///
    /// # Errors
    /// There is no room for it, or the memory has gone.
    fn write_placed(&self, (placement, name): (&Placement, &str), bytes: &[u8]) -> Result<(), InferError> {
        lent::write(&self.regions(), placement, (name, bytes))
    }
}

/// The error of an arena that has no room.
pub(crate) fn full(len: usize, capacity: u64) -> InferError {
    run_error(format!("{len} bytes of output do not fit in the {capacity} bytes of the output arena"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing)]
mod tests;
