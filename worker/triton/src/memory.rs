//! `TRITONSERVER_BufferAttributes`: where a buffer is; `TRITONBACKEND_MemoryManager`: memory that a
//! backend uses while it executes.

use std::ffi::{c_int, c_void};

use parking_lot::Mutex;

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::put;
use crate::object::{self, Object, kinds};
use crate::values::{CPU, GPU};

/// Where a buffer is.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) memory: c_int,
    pub(crate) device: i64,
    pub(crate) bytes: usize,
    /// `cudaIpcMemHandle_t`; null without one.
    cuda: *mut c_void,
}

/// `TRITONSERVER_BufferAttributes`. Locked to read or write it only.
pub(crate) struct BufferAttributes(Mutex<Place>);

// SAFETY: the pointer to the CUDA handle is only stored and returned here.
unsafe impl Send for BufferAttributes {}
// SAFETY: as above.
unsafe impl Sync for BufferAttributes {}

/// `TRITONBACKEND_MemoryManager`.
pub(crate) struct MemoryManager;

kinds! {
    BufferAttributes = 4, "buffer attributes";
    MemoryManager = 5, "a memory manager";
}

impl BufferAttributes {
    /// Describes a buffer in the process's memory.
    pub(crate) fn of_host(bytes: usize) -> Self {
        let cuda = std::ptr::null_mut();
        Self(Mutex::new(Place { memory: CPU, device: 0, bytes, cuda }))
    }

    pub(crate) fn place(&self) -> Place {
        *self.0.lock()
    }

    pub(crate) fn set_bytes(&self, bytes: usize) {
        self.0.lock().bytes = bytes;
    }
}

/// Buffer attributes that belong to another object.
pub(crate) struct AttributesPointer(pub(crate) *mut Object<BufferAttributes>);

// SAFETY: the object may be used from any thread.
unsafe impl Send for AttributesPointer {}

impl Drop for AttributesPointer {
    fn drop(&mut self) {
        // SAFETY: created by `make` and deleted here only.
        drop(unsafe { object::take(self.0) });
    }
}

impl AttributesPointer {
    /// Returns the attributes in this place, which describe a buffer of the process; creates them
    /// at first.
    pub(crate) fn of_host(
        place: &Mutex<Option<Self>>,
        bytes: usize,
    ) -> *mut Object<BufferAttributes> {
        place.lock().get_or_insert_with(|| Self(object::make(BufferAttributes::of_host(bytes)))).0
    }
}

/// Returns the kind of memory with this number.
fn memory_kind(kind: c_int) -> Result<c_int, Fault> {
    match kind {
        CPU..=GPU => Ok(kind),
        _ => Err(Fault::invalid(format!(
            "the memory type is {kind}; 0 (CPU), 1 (CPU_PINNED) and 2 (GPU) are allowed"
        ))),
    }
}

interface! {
    /// `TRITONSERVER_BufferAttributesNew`.
    fn attributes_new(attributes: *mut *mut Object<BufferAttributes>) {
        put(attributes, object::make(BufferAttributes::of_host(0)))
    }

    /// `TRITONSERVER_BufferAttributesDelete`.
    fn attributes_delete(attributes: *mut Object<BufferAttributes>) {
        object::delete(attributes)
    }

    /// `TRITONSERVER_BufferAttributesSetMemoryTypeId`.
    fn attributes_set_device(attributes: *const Object<BufferAttributes>, device: i64) {
        object::get(attributes)?.0.lock().device = device;
        Ok(())
    }

    /// `TRITONSERVER_BufferAttributesSetMemoryType`.
    fn attributes_set_memory(attributes: *const Object<BufferAttributes>, memory: c_int) {
        object::get(attributes)?.0.lock().memory = memory_kind(memory)?;
        Ok(())
    }

    /// `TRITONSERVER_BufferAttributesSetCudaIpcHandle`.
    fn attributes_set_cuda(attributes: *const Object<BufferAttributes>, handle: *mut c_void) {
        object::get(attributes)?.0.lock().cuda = handle;
        Ok(())
    }

    /// `TRITONSERVER_BufferAttributesSetByteSize`.
    fn attributes_set_bytes(attributes: *const Object<BufferAttributes>, bytes: usize) {
        object::get(attributes)?.set_bytes(bytes);
        Ok(())
    }

    /// `TRITONSERVER_BufferAttributesMemoryTypeId`.
    fn attributes_device(attributes: *const Object<BufferAttributes>, device: *mut i64) {
        put(device, object::get(attributes)?.place().device)
    }

    /// `TRITONSERVER_BufferAttributesMemoryType`.
    fn attributes_memory(attributes: *const Object<BufferAttributes>, memory: *mut c_int) {
        put(memory, object::get(attributes)?.place().memory)
    }

    /// `TRITONSERVER_BufferAttributesCudaIpcHandle`.
    fn attributes_cuda(attributes: *const Object<BufferAttributes>, handle: *mut *mut c_void) {
        put(handle, object::get(attributes)?.place().cuda)
    }

    /// `TRITONSERVER_BufferAttributesByteSize`.
    fn attributes_bytes(attributes: *const Object<BufferAttributes>, bytes: *mut usize) {
        put(bytes, object::get(attributes)?.place().bytes)
    }

    /// `TRITONBACKEND_MemoryManagerAllocate`. Backends fall back to other memory if a kind is not
    /// supported.
    fn allocate(
        manager: *const Object<MemoryManager>,
        buffer: *mut *mut c_void,
        memory: c_int,
        _device: i64,
        bytes: u64,
    ) {
        object::get(manager)?;
        if memory_kind(memory)? != CPU {
            return Err(Fault::unsupported(
                "the memory manager allocates memory of the CPU only; pinned memory and memory of \
                 GPUs are not supported",
            ));
        }
        let size = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        let memory = libc::malloc(size);
        if memory.is_null() {
            return Err(Fault::unavailable(format!("cannot allocate {bytes} bytes of memory")));
        }
        put(buffer, memory).inspect_err(|_| libc::free(memory))
    }

    /// `TRITONBACKEND_MemoryManagerFree`.
    fn free(
        manager: *const Object<MemoryManager>,
        buffer: *mut c_void,
        memory: c_int,
        _device: i64,
    ) {
        object::get(manager)?;
        if memory_kind(memory)? != CPU {
            return Err(Fault::unsupported("the memory manager frees memory of the CPU only"));
        }
        libc::free(buffer);
        Ok(())
    }
}
