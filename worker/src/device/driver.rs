//! The CUDA driver through `cudarc`, which loads it on first use.
//!
//! Contract: cudarc panics when the library or one of its functions is missing, so no call is made
//! before [`Cudarc::ready`] has found the library and each function of [`NEEDED`] in it. Each call
//! runs with the device's primary context current on the calling thread. Frameworks in the same
//! process share this context, which is retained from the first use until the process
//! ends. Addresses, streams, events, modules and functions come from earlier calls here for the
//! same device, and are used until they are closed. Each device address and length is within an
//! allocated or opened range, which the callers have checked.

use std::collections::HashMap;
use std::ffi::{CStr, c_uint, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::time::Duration;

use cudarc::driver::sys;
use parking_lot::{Mutex, MutexGuard};
use pharos::region::CUDA_HANDLE;

use super::{DeviceMemory, Driver, Event, Fault, Function, Module, Stream};

/// The library functions used here, by name.
const NEEDED: &[&CStr] = &[
    c"cuInit",
    c"cuGetErrorString",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxGetState",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemGetAddressRange_v2",
    c"cuMemHostRegister_v2",
    c"cuMemHostUnregister",
    c"cuMemcpyDtoH_v2",
    c"cuMemcpyHtoD_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemcpyPeerAsync",
    c"cuMemsetD8Async",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventSynchronize",
    c"cuEventElapsedTime",
    c"cuModuleLoadData",
    c"cuModuleGetFunction",
    c"cuLaunchKernel",
    c"cuIpcOpenMemHandle_v2",
    c"cuIpcCloseMemHandle",
];

/// Results after which no call works in this process any more, because the context or the device is
/// lost: 46 device unavailable, 214 uncorrectable ECC error, 220 uncorrectable NVLink error, 226
/// contained error, 700 illegal address, 702 launch timeout, 709 context destroyed, 710 assertion
/// in a kernel, 714 hardware stack error, 715 illegal instruction, 716 misaligned address, 717
/// invalid address space, 718 invalid program counter, 719 launch failure, 721 leak of tensor
/// memory, 810 terminated by MPS, 911 external device failed, 999 unknown (returned by a device
/// that has fallen off the bus).
const PERMANENT: &[u32] =
    &[46, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999];

/// Threads per block.
const BLOCK: u32 = 256;

/// Maximum number of blocks of a launch: kernels iterate over their elements.
const MAX_BLOCKS: u64 = 1 << 15;

/// The driver.
#[derive(Default)]
pub(super) struct Cudarc {
    /// The result of the search for the driver: the number of devices.
    ready: OnceLock<Result<u32, Fault>>,
    /// The contexts in use, by device. Locked during the first use of a device, otherwise for a
    /// few instructions.
    contexts: Mutex<HashMap<u32, Context>>,
}

/// A context of the driver.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: any thread may make this context current.
unsafe impl Send for Context {}

impl Cudarc {
    /// Checks that the library exists and has the needed functions.
    fn library() -> Result<(), Fault> {
        // SAFETY: only checks whether the library can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Err(Fault::Absent("cannot load the library of the CUDA driver".to_owned()));
        }
        let has = |name: &&&CStr| {
            // SAFETY: the library has been found. The symbol is looked up, not called.
            unsafe { sys::culib().get::<*const c_void>(name.to_bytes_with_nul()) }.is_ok()
        };
        match NEEDED.iter().find(|name| !has(name)) {
            Some(name) => Err(Fault::Absent(format!(
                "the CUDA driver is too old: it has no {}",
                name.to_string_lossy()
            ))),
            None => Ok(()),
        }
    }

    /// Returns the number of devices; searches for the driver on the first call.
    fn ready(&self) -> Result<u32, Fault> {
        self.ready
            .get_or_init(|| {
                Self::library()?;
                // SAFETY: the library has been found. May be called any number of times.
                call(unsafe { sys::cuInit(0) }).map_err(absent)?;
                let mut count = 0;
                // SAFETY: writes one integer.
                call(unsafe { sys::cuDeviceGetCount(&mut count) }).map_err(absent)?;
                Ok(u32::try_from(count).unwrap_or(0))
            })
            .clone()
    }

    /// Makes a device current on the calling thread.
    fn context(&self, device: u32) -> Result<sys::CUcontext, Fault> {
        let count = self.ready()?;
        let mut contexts = self.contexts();
        let context = match contexts.get(&device) {
            Some(context) => *context,
            None => {
                let context = retain(device, count)?;
                contexts.insert(device, context);
                context
            }
        };
        drop(contexts);
        // SAFETY: the context is never released.
        call(unsafe { sys::cuCtxSetCurrent(context.0) })?;
        Ok(context.0)
    }

    fn contexts(&self) -> MutexGuard<'_, HashMap<u32, Context>> {
        self.contexts.lock()
    }
}

/// Returns the primary context of a device, retained until the process ends.
fn retain(device: u32, count: u32) -> Result<Context, Fault> {
    let number = i32::try_from(device).ok().filter(|_| device < count);
    let Some(number) = number else {
        let failure = if count == 0 { Fault::Absent } else { Fault::Refused };
        return Err(failure(format!(
            "device {device} does not exist: the driver reports {count} devices"
        )));
    };
    let mut handle = 0;
    let mut context = ptr::null_mut();
    // SAFETY: this call and the next write to the addresses that they receive.
    call(unsafe { sys::cuDeviceGet(&mut handle, number) })?;
    // SAFETY: as above. It is never released.
    call(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) })?;
    Ok(Context(context))
}

impl Driver for Cudarc {
    fn count(&self) -> Result<u32, Fault> {
        self.ready()
    }

    fn enter(&self, device: u32) -> Result<(), Fault> {
        self.context(device).map(|_| ())
    }

    fn is_active(&self, device: u32) -> bool {
        let Ok(number) = i32::try_from(device) else { return false };
        if Self::library().is_err() {
            return false;
        }
        let mut handle = 0;
        let mut flags = 0;
        let mut active = 0;
        // Without `cuInit`, which would affect children that a model forks: code that uses the
        // device has called it. SAFETY: this call and the next write integers; they return an error
        // if the driver is not initialized.
        let found = call(unsafe { sys::cuDeviceGet(&mut handle, number) });
        let found = found.and_then(|()| {
            // SAFETY: as above.
            call(unsafe { sys::cuDevicePrimaryCtxGetState(handle, &mut flags, &mut active) })
        });
        found.is_ok() && active != 0
    }

    fn name(&self, device: u32) -> Result<String, Fault> {
        self.context(device)?;
        let mut handle = 0;
        let mut text = [0; 256];
        // SAFETY: writes an integer.
        call(unsafe { sys::cuDeviceGet(&mut handle, i32::try_from(device).unwrap_or(-1)) })?;
        // SAFETY: writes at most the given number of bytes, including the final zero.
        call(unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), 256, handle) })?;
        let bytes: Vec<u8> =
            text.iter().map(|byte| byte.to_ne_bytes()[0]).take_while(|byte| *byte != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn allocate(&self, device: u32, len: usize) -> Result<u64, Fault> {
        self.context(device)?;
        let mut address = 0;
        // SAFETY: writes the address.
        call(unsafe { sys::cuMemAlloc_v2(&mut address, len) })?;
        Ok(address)
    }

    fn free(&self, device: u32, address: u64) {
        if self.context(device).is_ok() {
            // SAFETY: returned by `allocate` and freed once. Waits for the device's work.
            let _ = call(unsafe { sys::cuMemFree_v2(address) });
        }
    }

    unsafe fn register(&self, device: u32, start: *mut u8, len: usize) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: the caller guarantees that the range is mapped.
        call(unsafe {
            sys::cuMemHostRegister_v2(start.cast(), len, sys::CU_MEMHOSTREGISTER_PORTABLE)
        })
    }

    unsafe fn unregister(&self, device: u32, start: *mut u8) {
        if self.context(device).is_ok() {
            // SAFETY: the caller guarantees that the range is registered and unused.
            let _ = call(unsafe { sys::cuMemHostUnregister(start.cast()) });
        }
    }

    fn stream(&self, device: u32) -> Result<Stream, Fault> {
        self.context(device)?;
        // A blocking stream, so that copies by other code in the device's default stream wait for
        // its work: ONNX Runtime makes such copies of inputs for nodes on the processor, and cannot
        // order them after the stream that uploads the inputs.
        let mut stream = ptr::null_mut();
        let in_turn = sys::CUstream_flags_enum::CU_STREAM_DEFAULT as c_uint;
        // SAFETY: writes the handle.
        call(unsafe { sys::cuStreamCreate(&mut stream, in_turn) })?;
        Ok(Stream(stream.expose_provenance()))
    }

    fn close_stream(&self, device: u32, stream: Stream) {
        if self.context(device).is_ok() {
            // SAFETY: returned by `stream` and closed once. Its work completes before it is
            // destroyed.
            let _ = call(unsafe { sys::cuStreamDestroy_v2(handle(stream.0)) });
        }
    }

    fn synchronize(&self, device: u32, stream: Stream) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: the stream is open.
        call(unsafe { sys::cuStreamSynchronize(handle(stream.0)) })
    }

    fn event(&self, device: u32) -> Result<Event, Fault> {
        self.context(device)?;
        let mut event = ptr::null_mut();
        let timed = sys::CUevent_flags_enum::CU_EVENT_DEFAULT as c_uint;
        // SAFETY: writes the handle.
        call(unsafe { sys::cuEventCreate(&mut event, timed) })?;
        Ok(Event(event.expose_provenance()))
    }

    fn close_event(&self, device: u32, event: Event) {
        if self.context(device).is_ok() {
            // SAFETY: returned by `event` and closed once.
            let _ = call(unsafe { sys::cuEventDestroy_v2(handle(event.0)) });
        }
    }

    fn record(&self, device: u32, event: Event, stream: Stream) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: both are open and belong to this device.
        call(unsafe { sys::cuEventRecord(handle(event.0), handle(stream.0)) })
    }

    fn wait(&self, device: u32, stream: Stream, event: Event) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: both are open.
        call(unsafe { sys::cuStreamWaitEvent(handle(stream.0), handle(event.0), 0) })
    }

    fn wait_here(&self, device: u32, event: Event) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: the event is open.
        call(unsafe { sys::cuEventSynchronize(handle(event.0)) })
    }

    fn elapsed(&self, device: u32, from: Event, to: Event) -> Result<Duration, Fault> {
        self.context(device)?;
        let mut milliseconds = 0.0;
        // SAFETY: both are open and were recorded; writes a number.
        call(unsafe { sys::cuEventElapsedTime(&mut milliseconds, handle(from.0), handle(to.0)) })?;
        Ok(Duration::try_from_secs_f32(milliseconds / 1e3).unwrap_or_default())
    }

    unsafe fn upload(
        &self,
        device: u32,
        stream: Stream,
        to: u64,
        from: *const [u8],
    ) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: the caller keeps the bytes valid, and there is room for them.
        call(unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), from.len(), handle(stream.0)) })
    }

    unsafe fn download(
        &self,
        device: u32,
        stream: Stream,
        from: u64,
        into: *mut [u8],
    ) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: the caller keeps the memory valid and does not access it meanwhile.
        call(unsafe { sys::cuMemcpyDtoHAsync_v2(into.cast(), from, into.len(), handle(stream.0)) })
    }

    fn copy(
        &self,
        device: u32,
        stream: Stream,
        from: DeviceMemory,
        to: DeviceMemory,
    ) -> Result<(), Fault> {
        let len = from.len().min(to.len());
        if from.device() == to.device() {
            self.context(device)?;
            // SAFETY: open ranges of device memory of at least this length.
            return call(unsafe {
                sys::cuMemcpyDtoDAsync_v2(to.address(), from.address(), len, handle(stream.0))
            });
        }
        let contexts = (self.context(to.device())?, self.context(from.device())?);
        self.context(device)?;
        let to = to.address();
        let from = from.address();
        // SAFETY: as above, each in its device's context.
        call(unsafe {
            sys::cuMemcpyPeerAsync(to, contexts.0, from, contexts.1, len, handle(stream.0))
        })
    }

    fn zero(&self, device: u32, stream: Stream, memory: DeviceMemory) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: an open range of device memory.
        call(unsafe { sys::cuMemsetD8Async(memory.address(), 0, memory.len(), handle(stream.0)) })
    }

    fn module(&self, device: u32, source: &CStr) -> Result<Module, Fault> {
        self.context(device)?;
        let mut module = ptr::null_mut();
        // SAFETY: a string that ends with a zero and is read before the call returns; writes the
        // handle.
        call(unsafe { sys::cuModuleLoadData(&mut module, source.as_ptr().cast()) })?;
        Ok(Module(module.expose_provenance()))
    }

    fn function(&self, device: u32, module: Module, name: &CStr) -> Result<Function, Fault> {
        self.context(device)?;
        let mut function = ptr::null_mut();
        // SAFETY: modules are never unloaded; writes the handle.
        call(unsafe { sys::cuModuleGetFunction(&mut function, handle(module.0), name.as_ptr()) })?;
        Ok(Function(function.expose_provenance()))
    }

    fn launch(
        &self,
        device: u32,
        stream: Stream,
        function: Function,
        arguments: &[u64],
        threads: u64,
    ) -> Result<(), Fault> {
        self.context(device)?;
        let mut values = arguments.to_vec();
        let mut places: Vec<*mut c_void> =
            values.iter_mut().map(|value| ptr::from_mut(value).cast()).collect();
        let blocks =
            u32::try_from(threads.div_ceil(u64::from(BLOCK)).clamp(1, MAX_BLOCKS)).unwrap_or(1);
        let function = handle(function.0);
        let stream = handle(stream.0);
        let extra = ptr::null_mut();
        // SAFETY: the kernel has this number of parameters, each of 64 bits, which are copied
        // before the call returns. The addresses and lengths among them are within allocated or
        // opened memory, and aligned.
        call(unsafe {
            sys::cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                BLOCK,
                1,
                1,
                0,
                stream,
                places.as_mut_ptr(),
                extra,
            )
        })
    }

    fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Fault> {
        self.context(device)?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        let mut start = 0;
        let mut size = 0;
        // SAFETY: a handle is 64 bytes of any content, which the driver validates; writes the
        // address.
        let opened = call(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, lazily) });
        // Results that otherwise mean a lost device may be caused by the handle here. If the device
        // is lost, the next check finds it.
        opened.map_err(|fault| match fault {
            Fault::Permanent(why) => Fault::Refused(why),
            other => other,
        })?;
        // SAFETY: writes the start and the length of the allocation.
        let found = call(unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut size, address) });
        match found {
            Ok(()) => Ok((address, (start + size as u64).saturating_sub(address))),
            Err(why) => {
                self.close(device, address);
                Err(why)
            }
        }
    }

    fn close(&self, device: u32, address: u64) {
        if self.context(device).is_ok() {
            // SAFETY: the address came from `open` and is no longer used. If the call fails, the
            // memory stays mapped.
            let _ = call(unsafe { sys::cuIpcCloseMemHandle(address) });
        }
    }

    fn read(&self, device: u32, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: `into` has the requested length; complete on return, even for registered memory.
        call(unsafe { sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), address, into.len()) })
    }

    fn write(&self, device: u32, address: u64, from: &[u8]) -> Result<(), Fault> {
        self.context(device)?;
        // SAFETY: `from` has this number of bytes. If its memory is not pinned, the copy from the
        // driver's staging buffer may still be in progress on return; the synchronization waits for
        // it, so that the client finds the data.
        call(unsafe { sys::cuMemcpyHtoD_v2(address, from.as_ptr().cast(), from.len()) })?;
        // SAFETY: waits for the work of this context.
        call(unsafe { sys::cuCtxSynchronize() })
    }
}

/// Converts a number to a handle of the driver.
fn handle<T>(number: usize) -> *mut T {
    ptr::with_exposed_provenance_mut(number)
}

fn absent(fault: Fault) -> Fault {
    Fault::Absent(fault.to_string())
}

/// Converts the result of a call to an error with the driver's description.
fn call(result: sys::CUresult) -> Result<(), Fault> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let number = result as u32;
    let kind = if PERMANENT.contains(&number) { Fault::Permanent } else { Fault::Refused };
    let mut text = MaybeUninit::uninit();
    // SAFETY: writes the address of a string that lives as long as the library.
    let found = unsafe { sys::cuGetErrorString(result, text.as_mut_ptr()) };
    if found != sys::CUresult::CUDA_SUCCESS {
        return Err(kind(format!("CUDA driver error {number}")));
    }
    // SAFETY: written above, and ends with a zero.
    let text = unsafe { CStr::from_ptr(text.assume_init()) };
    Err(kind(format!("CUDA driver error: {}", text.to_string_lossy())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_driver_is_an_error_and_not_a_panic() {
        let driver = Cudarc::default();
        match driver.count() {
            // A machine with a GPU: the driver must at least respond.
            Ok(count) => assert!(driver.enter(count).is_err()),
            Err(fault) => {
                assert!(matches!(&fault, Fault::Absent(_)), "{fault:?}");
                assert_eq!(driver.enter(0), Err(fault));
                assert!(!driver.is_active(0));
            }
        }
    }
}
