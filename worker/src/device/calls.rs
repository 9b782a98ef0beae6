//! The calls of the driver that are needed, so that there can be another one in tests.
//!
//! Contract: the calls that are `unsafe` use memory of the process after they have returned; their callers (`work.rs`, and
//! `crate::pinning` for registered memory) keep it where it is until then. All others are given memory of devices by
//! number, which is checked where such ranges are made.

use std::ffi::CStr;
use std::time::Duration;

use pharos::region::CUDA_HANDLE;

use super::{DeviceMemory, Event, Fault, Function, Module, Stream};

/// The calls of the driver that are needed. Devices are numbered as the process sees them. Streams, events, modules and
/// functions are of the device that they are used with.
pub(crate) trait Driver: Send + Sync {
    /// How many devices there are.
    fn count(&self) -> Result<u32, Fault>;

    /// Makes a device ready for this process.
    fn enter(&self, device: u32) -> Result<(), Fault>;

    /// Whether somebody in this process uses the device already. Does not begin to.
    fn is_active(&self, device: u32) -> bool;

    /// The device's name.
    fn name(&self, device: u32) -> Result<String, Fault>;

    /// Takes memory of the device, its content undefined.
    fn allocate(&self, device: u32, len: usize) -> Result<u64, Fault>;

    /// Gives it back, when the work that uses it is done.
    fn free(&self, device: u32, address: u64);

    /// Has the driver keep these bytes of the process in their place, for direct copies.
    ///
    /// # Safety
    /// They are mapped until they are unregistered.
    unsafe fn register(&self, device: u32, start: *mut u8, len: usize) -> Result<(), Fault>;

    /// Ends that.
    ///
    /// # Safety
    /// They were registered, and no copy uses them.
    unsafe fn unregister(&self, device: u32, start: *mut u8);

    /// Makes a stream.
    fn stream(&self, device: u32) -> Result<Stream, Fault>;

    /// Ends it, when its work is done.
    fn close_stream(&self, device: u32, stream: Stream);

    /// Waits until all work of the stream is done.
    fn synchronize(&self, device: u32, stream: Stream) -> Result<(), Fault>;

    /// Makes an event.
    fn event(&self, device: u32) -> Result<Event, Fault>;

    /// Ends it.
    fn close_event(&self, device: u32, event: Event);

    /// Puts the event behind the work that the stream has now.
    fn record(&self, device: u32, event: Event, stream: Stream) -> Result<(), Fault>;

    /// Has later work of the stream wait for the event as it was recorded last.
    fn wait(&self, device: u32, stream: Stream, event: Event) -> Result<(), Fault>;

    /// Waits for the event itself.
    fn wait_here(&self, device: u32, event: Event) -> Result<(), Fault>;

    /// The time between two events that are over.
    fn elapsed(&self, device: u32, from: Event, to: Event) -> Result<Duration, Fault>;

    /// Copies to the device, in the stream's turn.
    ///
    /// # Safety
    /// The bytes are there until the copy is done. `to` has room for them.
    unsafe fn upload(&self, device: u32, stream: Stream, to: u64, from: (*const u8, usize)) -> Result<(), Fault>;

    /// Copies from the device, in the stream's turn.
    ///
    /// # Safety
    /// The memory is there, and nobody else's, until the copy is done. `from` has as many bytes.
    unsafe fn download(&self, device: u32, stream: Stream, from: u64, into: (*mut u8, usize)) -> Result<(), Fault>;

    /// Copies on the device, or between two, in the turn of the first one's stream.
    fn copy(&self, device: u32, stream: Stream, from: DeviceMemory, to: DeviceMemory) -> Result<(), Fault>;

    /// Sets bytes to zero, in the stream's turn.
    fn zero(&self, device: u32, stream: Stream, memory: DeviceMemory) -> Result<(), Fault>;

    /// Compiles PTX for the device.
    fn module(&self, device: u32, source: &CStr) -> Result<Module, Fault>;

    /// A kernel of it.
    fn function(&self, device: u32, module: Module, name: &CStr) -> Result<Function, Fault>;

    /// Runs a kernel whose parameters are all 64 bits wide, in the stream's turn, with about as many threads.
    fn launch(&self, device: u32, stream: Stream, call: (Function, &[u64]), threads: u64) -> Result<(), Fault>;

    /// Is told before others, that are no kernels of ours, begin to compute in a stream with this memory. For a driver that
    /// sees to it that one stream waits for another; a device needs no telling.
    fn others(&self, _device: u32, _stream: Stream, _memory: (&[DeviceMemory], &[DeviceMemory])) -> Result<(), Fault> {
        Ok(())
    }

    /// Whether the memory of its devices is the process's own, as that of a driver for tests is.
    fn is_here(&self) -> bool {
        false
    }

    /// Opens memory of another process: its address, and how many bytes there are from it.
    fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Fault>;

    /// Ends that.
    fn close(&self, device: u32, address: u64);

    /// Copies from the device; done when it returns.
    fn read(&self, device: u32, address: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies to the device; done when it returns.
    fn write(&self, device: u32, address: u64, from: &[u8]) -> Result<(), Fault>;
}
