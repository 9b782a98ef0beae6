//! State that all threads of a worker process share, and functions that backends may use at any
//! time and from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use pharos::error::InferError;
use pharos::timeline::Instant;
use pharos::wire::{BackendActivity, ToFrontend};

use crate::aligned::AlignedBuffer;
use crate::connection::Connection;
use crate::device::{DeviceMemory, Devices, ReceivedOnDevice, ScratchKind};
use crate::frames::{Reader, Sender};
use crate::memory::{InputArena, OutputArena};
use crate::metrics::Metrics;
use crate::received::{Arenas, Memory, Received};

/// The connection to the frontend, and the memory and the metrics behind it.
pub struct Session {
    /// Frames from and to the frontend.
    pub connection: Connection,
    /// The memory that is shared with the frontend.
    pub arenas: Arc<Arenas>,
    /// The metrics of this process.
    pub metrics: Metrics,
    pub(crate) devices: Arc<dyn Devices>,
    pub(crate) next_call: AtomicU64,
    /// What [`Runtime::report_load_progress`] has sent: 0 for nothing, else the percentage plus
    /// one.
    load_progress: AtomicU8,
}

/// Access to the other models of the server, memory for answers, and devices. Clones share the same
/// state.
#[derive(Clone)]
pub struct Runtime(Arc<Session>);

impl Runtime {
    /// Starts reading from the connection. For the worker's runtime.
    pub fn new(
        reader: Reader,
        sender: Sender,
        inputs: InputArena,
        outputs: OutputArena,
        metrics: Metrics,
        devices: Arc<dyn Devices>,
    ) -> Self {
        let arenas = Arenas::new(inputs, outputs, sender);
        let connection = Connection::new(reader, arenas.clone());
        Self(Arc::new(Session {
            connection,
            arenas,
            metrics,
            devices,
            next_call: AtomicU64::new(1),
            load_progress: AtomicU8::new(0),
        }))
    }

    /// Returns the state that all threads share. For the worker's runtime.
    #[doc(hidden)]
    pub fn session(&self) -> &Arc<Session> {
        &self.0
    }

    /// Reports how much of the model is loaded, from 0 to 1, while the backend is created. The
    /// server shows it in the repository index, the log and the metrics. Call it as often as is
    /// convenient: only a percentage above all earlier ones is sent. Has no effect after the load.
    ///
    /// # Errors
    /// INVALID_ARG: the fraction is not a number from 0 to 1.
    pub fn report_load_progress(&self, fraction: f64) -> Result<(), InferError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(InferError::invalid(format!(
                "the progress of a load is {fraction}; expected a number from 0 to 1"
            )));
        }
        let percent = (fraction * 100.0).round() as u8;
        let sent = self.0.load_progress.fetch_max(percent + 1, Ordering::Relaxed);
        if sent <= percent {
            self.0.arenas.send(&ToFrontend::LoadProgress(percent));
        }
        Ok(())
    }

    /// Adds a point of the processing of a traced request to its trace. `batch` and `request` are the
    /// numbers that [`Responder::place`](crate::Responder::place) returns. The server ignores requests
    /// that have ended, and names of more than
    /// [`MAX_ACTIVITY_NAME`](pharos::wire::MAX_ACTIVITY_NAME) bytes.
    pub fn report_activity(&self, batch: u64, request: u32, name: &str, at: Instant) {
        let activity = BackendActivity { batch, request, name: name.to_owned(), at };
        self.0.arenas.send(&ToFrontend::Activity(activity));
    }

    /// Allocates a block of the memory for answers, for
    /// [`Content::Memory`](crate::Content::Memory); its content is undefined.
    ///
    /// # Errors
    /// That memory is full.
    pub fn memory(&self, len: usize) -> Result<Memory, InferError> {
        Memory::allocate(&self.0.arenas, len)
    }

    /// Returns the bytes of a living input that contain `len` bytes at this address of the process;
    /// `None` for all other addresses. Recognizes a view of an input that is passed on as an
    /// output.
    pub fn locate(&self, address: usize, len: usize) -> Option<Received> {
        self.0.arenas.locate(address, len)
    }

    /// Copies device memory to the process, ordered after earlier work in the device's default
    /// stream; complete on return. Devices have the process's numbering.
    ///
    /// # Errors
    /// The driver's reason.
    pub fn read_device(&self, from: DeviceMemory, into: &mut [u8]) -> Result<(), InferError> {
        if into.is_empty() { Ok(()) } else { self.0.devices.read(from, into) }
    }

    /// Copies device memory to a client's memory on the same or another device, ordered after
    /// earlier work in the default stream of the source device; complete on return. Both have the
    /// same length.
    ///
    /// # Errors
    /// As [`Runtime::read_device`].
    pub fn copy_on_device(
        &self,
        from: DeviceMemory,
        to: &ReceivedOnDevice,
    ) -> Result<(), InferError> {
        let to = to.memory();
        if to.is_empty() { Ok(()) } else { self.0.devices.copy(from, to) }
    }

    /// Returns a copy of device memory in the process's memory, aligned to 64 bytes.
    ///
    /// # Errors
    /// As [`Runtime::read_device`].
    pub fn fetch(&self, memory: DeviceMemory) -> Result<Received, InferError> {
        let mut buffer = AlignedBuffer::zeroed(memory.len());
        self.read_device(memory, buffer.as_mut_slice())?;
        Ok(Received::of_buffer(buffer))
    }

    /// Allocates memory for the backend's work: at least `len` bytes with undefined content. Returns
    /// the address.
    ///
    /// # Errors
    /// `Unsupported`: the instance runs on processors, or has no pinned memory. `Unavailable`: there
    /// is no memory left.
    pub fn allocate_scratch(&self, kind: ScratchKind, len: usize) -> Result<u64, InferError> {
        self.0.devices.allocate(kind, len)
    }

    /// Frees memory that [`Runtime::allocate_scratch`] has returned. All work that uses it must be
    /// done.
    ///
    /// # Errors
    /// `InvalidArg`: there is no memory of this kind at the address.
    pub fn free_scratch(&self, kind: ScratchKind, address: u64) -> Result<(), InferError> {
        self.0.devices.free(kind, address)
    }

    /// Whether these bytes are in memory that is registered with a GPU driver, from and to which
    /// it copies directly.
    pub fn is_pinned(&self, bytes: &[u8]) -> bool {
        let arenas = &self.0.arenas;
        arenas.inputs.is_pinned(bytes) || arenas.outputs.is_pinned(bytes)
    }

    /// The metrics of this process.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }
}
