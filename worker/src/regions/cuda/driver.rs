//! The CUDA driver through `cudarc`, which loads it when it is first needed.
//!
//! Contract: cudarc panics when the library or one of its functions is missing, so that nothing here is called before
//! `is_culib_present` and `cuInit` have said that there is a driver. Each call is made with the device's primary context,
//! which is kept from the first use to the end of the process, current on the calling thread. Addresses are those that
//! `open` gave, with an offset that the caller has checked against the size; the driver itself checks them too.

use std::collections::HashMap;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use pharos::region::CUDA_HANDLE;

use super::{Driver, Failure};

/// The driver.
#[derive(Default)]
pub(crate) struct Cudarc {
    /// The contexts that are in use, by device.
    contexts: Mutex<HashMap<u32, Context>>,
}

/// A context of the driver's.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a handle that any thread may make its own current context.
unsafe impl Send for Context {}

impl Cudarc {
    /// Has the calling thread use a device.
    fn enter(&self, device: u32) -> Result<(), Failure> {
        let known = self.contexts().get(&device).copied();
        let context = known.map_or_else(|| self.context(device).map(Context), Ok)?;
        self.contexts().insert(device, context);
        // SAFETY: a context that is never released.
        call(unsafe { sys::cuCtxSetCurrent(context.0) }).map_err(Failure::Refused)
    }

    fn contexts(&self) -> MutexGuard<'_, HashMap<u32, Context>> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The primary context of a device, kept to the end of the process.
    fn context(&self, device: u32) -> Result<sys::CUcontext, Failure> {
        // SAFETY: only looks whether the library can be opened.
        if !unsafe { sys::is_culib_present() } {
            return Err(Failure::NoGpu("the library of the CUDA driver cannot be loaded".to_owned()));
        }
        // SAFETY: the library is there. May be called any number of times.
        call(unsafe { sys::cuInit(0) }).map_err(Failure::NoGpu)?;
        let mut count = 0;
        // SAFETY: writes one integer.
        call(unsafe { sys::cuDeviceGetCount(&mut count) }).map_err(Failure::NoGpu)?;
        let number = i32::try_from(device).ok().filter(|number| *number < count);
        let Some(number) = number else {
            let failure = if count == 0 { Failure::NoGpu } else { Failure::Refused };
            return Err(failure(format!("there is no device {device}: there are {count}")));
        };
        let (mut handle, mut context) = (0, std::ptr::null_mut());
        // SAFETY: this and the next write what they are given the address of.
        call(unsafe { sys::cuDeviceGet(&mut handle, number) }).map_err(Failure::Refused)?;
        // SAFETY: as above. It is never released.
        call(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, handle) }).map_err(Failure::Refused)?;
        Ok(context)
    }

    /// As [`Cudarc::enter`], for memory that has been opened.
    fn enter_again(&self, device: u32) -> Result<(), String> {
        self.enter(device).map_err(|failure| match failure {
            Failure::NoGpu(why) | Failure::Refused(why) => why,
        })
    }
}

impl Driver for Cudarc {
    fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Failure> {
        self.enter(device)?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as std::ffi::c_char) };
        let lazily = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let (mut address, mut start, mut size) = (0, 0, 0);
        // SAFETY: a handle is 64 bytes of any content, which the driver judges; it writes the address.
        call(unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, lazily) }).map_err(Failure::Refused)?;
        // SAFETY: writes where the allocation begins and how long it is.
        let found = call(unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut size, address) });
        match found {
            Ok(()) => Ok((address, (start + size as u64).saturating_sub(address))),
            Err(why) => {
                self.close(device, address);
                Err(Failure::Refused(why))
            }
        }
    }

    fn close(&self, device: u32, address: u64) {
        if self.enter(device).is_ok() {
            // SAFETY: an address that `open` gave, which nobody uses any more. If that fails, the memory stays mapped.
            let _ = call(unsafe { sys::cuIpcCloseMemHandle(address) });
        }
    }

    fn read(&self, device: u32, address: u64, into: &mut [u8]) -> Result<(), String> {
        self.enter_again(device)?;
        // SAFETY: `into` takes as many bytes as are asked for; to memory that is not pinned the copy is synchronous.
        call(unsafe { sys::cuMemcpyDtoH_v2(into.as_mut_ptr().cast(), address, into.len()) })
    }

    fn write(&self, device: u32, address: u64, from: &[u8]) -> Result<(), String> {
        self.enter_again(device)?;
        // SAFETY: `from` has as many bytes as are given. From memory that is not pinned the copy may still be on its way
        // from a buffer of the driver's when this returns; the synchronisation waits for it, so that the client finds it.
        call(unsafe { sys::cuMemcpyHtoD_v2(address, from.as_ptr().cast(), from.len()) })?;
        // SAFETY: waits for the device's work in this context.
        call(unsafe { sys::cuCtxSynchronize() })
    }
}

/// The result of a call, in the driver's words.
fn call(result: sys::CUresult) -> Result<(), String> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = MaybeUninit::uninit();
    // SAFETY: writes the address of a text that lives as long as the library.
    let found = unsafe { sys::cuGetErrorString(result, text.as_mut_ptr()) };
    if found != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("the CUDA driver says {}", result as u32));
    }
    // SAFETY: written above, and ends with a zero.
    let text = unsafe { CStr::from_ptr(text.assume_init()) };
    Err(format!("the CUDA driver says: {}", text.to_string_lossy()))
}
