//! `TRITONSERVER_BufferAttributes`: where a buffer is; `TRITONBACKEND_MemoryManager`: memory that a
//! backend uses while it executes.

use std::ffi::{c_int, c_void};
use std::ptr;

use parking_lot::Mutex;
use pharos_backend::{ReceivedOnDevice, Runtime, ScratchKind};

use crate::error::interface;
use crate::fault::Fault;
use crate::foreign::put;
use crate::object::{self, Object, kinds};
use crate::values::{CPU, CPU_PINNED, GPU};

/// Where a buffer is.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) memory: c_int,
    pub(crate) device: i64,
    pub(crate) bytes: usize,
    /// `cudaIpcMemHandle_t`; null without one.
    cuda: *mut c_void,
}

impl Place {
    /// Describes bytes of the process.
    pub(crate) fn of_host(bytes: &[u8], runtime: &Runtime) -> Self {
        let memory = if runtime.is_pinned(bytes) { CPU_PINNED } else { CPU };
        Self { memory, ..Self::of_process(bytes.len()) }
    }

    /// Describes a client's memory on a device. The handle is valid as long as `kept`.
    pub(crate) fn of_device(kept: &ReceivedOnDevice) -> Self {
        let memory = kept.memory();
        Self {
            memory: GPU,
            device: memory.device().into(),
            bytes: memory.len(),
            cuda: kept.handle().as_ptr().cast_mut().cast(),
        }
    }

    /// Describes memory of the process that is not registered with a driver.
    fn of_process(bytes: usize) -> Self {
        Self { memory: CPU, device: 0, bytes, cuda: ptr::null_mut() }
    }

    /// Writes the kind of memory and the number of the device.
    ///
    /// # Safety
    /// The contract of this package.
    pub(crate) unsafe fn put(self, memory: *mut c_int, device: *mut i64) -> Result<(), Fault> {
        // SAFETY: the caller guarantees it.
        unsafe {
            put(memory, self.memory)?;
            put(device, self.device)
        }
    }
}

/// `TRITONSERVER_BufferAttributes`. Locked to read or write it only.
pub(crate) struct BufferAttributes(Mutex<Place>);

// SAFETY: the pointer to the CUDA handle is only stored and returned here.
unsafe impl Send for BufferAttributes {}
// SAFETY: as above.
unsafe impl Sync for BufferAttributes {}

/// `TRITONBACKEND_MemoryManager`.
pub(crate) struct MemoryManager {
    /// The connection of the process; `None` in one that only completes a configuration.
    runtime: Option<Runtime>,
}

kinds! {
    BufferAttributes = 4, "buffer attributes";
    MemoryManager = 5, "a memory manager";
}

impl BufferAttributes {
    /// Describes a buffer in the process's memory.
    pub(crate) fn of_host(bytes: usize) -> Self {
        Self(Mutex::new(Place::of_process(bytes)))
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
        drop(unsafe { object::discard(self.0) });
    }
}

impl AttributesPointer {
    /// Returns the attributes that `kept` has; creates them at first, for a buffer at `place`.
    pub(crate) fn of(kept: &Mutex<Option<Self>>, place: Place) -> *mut Object<BufferAttributes> {
        let make = || Self(object::make(BufferAttributes(Mutex::new(place))));
        kept.lock().get_or_insert_with(make).0
    }
}

impl MemoryManager {
    pub(crate) fn new(runtime: Option<&Runtime>) -> Self {
        Self { runtime: runtime.cloned() }
    }

    /// Returns the connection through which pinned memory or memory of the GPU is allocated.
    fn scratch(&self, kind: c_int) -> Result<(&Runtime, ScratchKind), Fault> {
        let runtime = self.runtime.as_ref().ok_or_else(|| {
            Fault::unsupported(
                "a process that completes a configuration has memory of the CPU only",
            )
        })?;
        Ok((runtime, if kind == GPU { ScratchKind::Device } else { ScratchKind::Pinned }))
    }
}

/// Checks the number of a device: a process allocates on its instance's only.
fn check_device(kind: c_int, device: i64) -> Result<(), Fault> {
    if kind == GPU && device != 0 {
        return Err(Fault::unsupported(format!(
            "memory is allocated on the instance's GPU, which is device 0 in its process; the \
             device is {device}"
        )));
    }
    Ok(())
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
        object::give(attributes, BufferAttributes::of_host(0))
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

    /// `TRITONBACKEND_MemoryManagerAllocate`. Backends use memory of another kind if this
    /// fails.
    fn allocate(
        manager: *const Object<MemoryManager>,
        buffer: *mut *mut c_void,
        memory: c_int,
        device: i64,
        bytes: u64,
    ) {
        let manager = object::get(manager)?;
        let kind = memory_kind(memory)?;
        check_device(kind, device)?;
        let size = usize::try_from(bytes).unwrap_or(usize::MAX).max(1);
        if kind != CPU {
            let (runtime, kind) = manager.scratch(kind)?;
            let address = runtime.allocate_scratch(kind, size)?;
            let start = usize::try_from(address).unwrap_or_default();
            return put(buffer, ptr::with_exposed_provenance_mut(start)).inspect_err(|_| {
                // Allocated above.
                let _ = runtime.free_scratch(kind, address);
            });
        }
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
        device: i64,
    ) {
        let manager = object::get(manager)?;
        let kind = memory_kind(memory)?;
        check_device(kind, device)?;
        if kind != CPU {
            let (runtime, kind) = manager.scratch(kind)?;
            return Ok(runtime.free_scratch(kind, buffer.expose_provenance() as u64)?);
        }
        libc::free(buffer);
        Ok(())
    }
}
