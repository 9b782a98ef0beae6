//! What all threads of a worker process share, and what backends may use of it at any time and from any thread.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pharos::error::InferError;

use crate::aligned::AlignedBuffer;
use crate::connection::Connection;
use crate::device::{DeviceMemory, Devices, ReceivedOnDevice};
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
}

/// What a [`Session`] is made of.
pub struct SessionParts {
    /// Both ends of the connection.
    pub connection: (Reader, Sender),
    /// The arenas of inputs and outputs.
    pub arenas: (InputArena, OutputArena),
    /// The metrics of this process.
    pub metrics: Metrics,
    /// Devices, and memory of clients.
    pub devices: Arc<dyn Devices>,
}

/// The other models of the server, memory for answers, and devices; clones are the same one.
#[derive(Clone)]
pub struct Runtime(Arc<Session>);

impl Runtime {
    /// Reads from the connection from now on. For the worker's runtime.
    pub fn new(parts: SessionParts) -> Self {
        let SessionParts { connection: (reader, sender), arenas, metrics, devices } = parts;
        let arenas = Arenas::new(arenas, sender);
        let connection = Connection::new(reader, arenas.clone());
        Self(Arc::new(Session { connection, arenas, metrics, devices, next_call: AtomicU64::new(1) }))
    }

    /// What all threads share. For the worker's runtime.
    #[doc(hidden)]
    pub fn session(&self) -> &Arc<Session> {
        &self.0
    }

    /// A block of the memory in which answers travel; its content is undefined. For
    /// [`Content::Memory`](crate::Content::Memory).
    ///
    /// # Errors
    /// That memory is full.
    pub fn memory(&self, len: usize) -> Result<Memory, InferError> {
        Memory::allocate(&self.0.arenas, len)
    }

    /// The bytes of a living input that contain `len` bytes at this address of the process, so that a view of an input is
    /// recognized when it is passed on as an output; `None` for all other addresses.
    pub fn locate(&self, address: usize, len: usize) -> Option<Received> {
        self.0.arenas.locate(address, len)
    }

    /// Copies memory of a device, in the process's numbering of devices, behind the work of its default stream; complete on
    /// return.
    ///
    /// # Errors
    /// The driver's reason.
    pub fn read_device(&self, from: DeviceMemory, into: &mut [u8]) -> Result<(), InferError> {
        if into.is_empty() { Ok(()) } else { self.0.devices.read(from, into) }
    }

    /// Copies memory of a device to a client's on the same or another device, behind the work of the default stream of the
    /// first; complete on return. As many bytes as both have.
    ///
    /// # Errors
    /// As [`Runtime::read_device`].
    pub fn copy_on_device(&self, from: DeviceMemory, to: &ReceivedOnDevice) -> Result<(), InferError> {
        let to = to.memory();
        if to.is_empty() { Ok(()) } else { self.0.devices.copy(from, to) }
    }

    /// A copy of memory of a device in the process's memory, aligned to 64 bytes.
    ///
    /// # Errors
    /// As [`Runtime::read_device`].
    pub fn fetch(&self, memory: DeviceMemory) -> Result<Received, InferError> {
        let mut buffer = AlignedBuffer::zeroed(memory.len());
        self.read_device(memory, buffer.as_mut_slice())?;
        Ok(Received::of_buffer(buffer))
    }

    /// The metrics of this process.
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }
}
