//! Where the bytes of inputs and outputs are: in the memory of the process, which is shared with the
//! server, or in a client's memory on the instance's GPU.

use std::ffi::{c_int, c_void};

use pharos::error::InferError;
use pharos_backend::{Content, Memory, ReceivedOnDevice, ReceivedPiece, Runtime};

use crate::answer::Answer;
use crate::memory::Place;
use crate::values::GPU;

/// Returns the address of a part of an input.
pub(crate) fn start(part: &ReceivedPiece) -> *const c_void {
    match part {
        ReceivedPiece::Host(bytes) => bytes.as_ptr().cast(),
        ReceivedPiece::Device(kept) => of_device(kept),
    }
}

/// Returns where a part of an input is.
pub(crate) fn place(part: &ReceivedPiece, runtime: &Runtime) -> Place {
    match part {
        ReceivedPiece::Host(bytes) => Place::of_host(bytes, runtime),
        ReceivedPiece::Device(kept) => Place::of_device(kept),
    }
}

/// The bytes of an output, which the backend writes.
pub(crate) enum OutputBytes {
    Host(Memory),
    Device(ReceivedOnDevice),
}

impl OutputBytes {
    /// Allocates `len` bytes for an output. They are on the GPU if the backend prefers that and the
    /// client wants the output in aligned memory there.
    ///
    /// # Errors
    /// There is no memory.
    pub(crate) fn allocate(
        answer: &Answer,
        output: usize,
        len: usize,
        preferred: c_int,
    ) -> Result<Self, InferError> {
        let on_device = if preferred == GPU { answer.place_on_device(output, len) } else { None };
        match on_device {
            Some(kept) => Ok(Self::Device(kept)),
            None => answer.model.runtime.memory(len).map(Self::Host),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Host(memory) => memory.len(),
            Self::Device(kept) => kept.memory().len(),
        }
    }

    pub(crate) fn start(&mut self) -> *mut c_void {
        match self {
            Self::Host(memory) => memory.as_mut_ptr().cast(),
            Self::Device(kept) => of_device(kept).cast_mut(),
        }
    }

    pub(crate) fn place(&self, runtime: &Runtime) -> Place {
        match self {
            Self::Host(memory) => Place::of_host(memory, runtime),
            Self::Device(kept) => Place::of_device(kept),
        }
    }

    /// Returns the bytes in the form of the worker.
    pub(crate) fn into_content(self) -> Content {
        match self {
            Self::Host(memory) => Content::Memory(memory),
            Self::Device(kept) => Content::Placed(kept.memory().len()),
        }
    }
}

/// The address of memory on a device as the interface passes it: a pointer that only the device can
/// follow.
fn of_device(kept: &ReceivedOnDevice) -> *const c_void {
    let address = usize::try_from(kept.memory().address()).unwrap_or_default();
    std::ptr::with_exposed_provenance(address)
}
