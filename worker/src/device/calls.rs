//! The driver calls that the worker needs, as a trait so that tests can substitute another driver.
//!
//! Contract: the `unsafe` calls access memory of the process after they return; their callers
//! (`work.rs`, and `crate::pinning` for registered memory) keep it in place until then. All other
//! calls get device memory as addresses, which are checked where such ranges are created.

use std::ffi::CStr;
use std::time::Duration;

use pharos::region::CUDA_HANDLE;

use super::{DeviceMemory, Event, Fault, Function, Module, Stream};

/// The driver calls that the worker needs. Devices have the process's numbering. Streams, events,
/// modules and functions belong to the device that they are used with.
pub(crate) trait Driver: Send + Sync {
    /// Returns the number of devices.
    fn count(&self) -> Result<u32, Fault>;

    /// Initializes a device for this process.
    fn enter(&self, device: u32) -> Result<(), Fault>;

    /// Whether any code in this process already uses the device. Does not initialize the device.
    fn is_active(&self, device: u32) -> bool;

    /// The device's name.
    fn name(&self, device: u32) -> Result<String, Fault>;

    /// Allocates memory on the device; its content is undefined.
    fn allocate(&self, device: u32, len: usize) -> Result<u64, Fault>;

    /// Frees memory after the work that uses it is done.
    fn free(&self, device: u32, address: u64);

    /// Pins these bytes of the process, for direct copies.
    ///
    /// # Safety
    /// They stay mapped until they are unregistered.
    unsafe fn register(&self, device: u32, start: *mut u8, len: usize) -> Result<(), Fault>;

    /// Unpins these bytes.
    ///
    /// # Safety
    /// They were registered, and no copy uses them.
    unsafe fn unregister(&self, device: u32, start: *mut u8);

    /// Creates a stream.
    fn stream(&self, device: u32) -> Result<Stream, Fault>;

    /// Destroys a stream after its work is done.
    fn close_stream(&self, device: u32, stream: Stream);

    /// Waits until all work of the stream is done.
    fn synchronize(&self, device: u32, stream: Stream) -> Result<(), Fault>;

    /// Creates an event.
    fn event(&self, device: u32) -> Result<Event, Fault>;

    /// Destroys an event.
    fn close_event(&self, device: u32, event: Event);

    /// Records the event in the stream, after its current work.
    fn record(&self, device: u32, event: Event, stream: Stream) -> Result<(), Fault>;

    /// Makes later work of the stream wait for the event's latest recording.
    fn wait(&self, device: u32, stream: Stream, event: Event) -> Result<(), Fault>;

    /// Blocks until the event is reached.
    fn wait_here(&self, device: u32, event: Event) -> Result<(), Fault>;

    /// Returns the time between two completed events.
    fn elapsed(&self, device: u32, from: Event, to: Event) -> Result<Duration, Fault>;

    /// Copies to the device, ordered in the stream.
    ///
    /// # Safety
    /// The bytes stay valid until the copy is done. `to` has room for them.
    unsafe fn upload(
        &self,
        device: u32,
        stream: Stream,
        to: u64,
        from: *const [u8],
    ) -> Result<(), Fault>;

    /// Copies from the device, ordered in the stream.
    ///
    /// # Safety
    /// The memory stays valid and is not accessed otherwise until the copy is done. `from` has as
    /// many bytes.
    unsafe fn download(
        &self,
        device: u32,
        stream: Stream,
        from: u64,
        into: *mut [u8],
    ) -> Result<(), Fault>;

    /// Copies within a device or between two, ordered in a stream of the first.
    fn copy(
        &self,
        device: u32,
        stream: Stream,
        from: DeviceMemory,
        to: DeviceMemory,
    ) -> Result<(), Fault>;

    /// Sets bytes to zero, ordered in the stream.
    fn zero(&self, device: u32, stream: Stream, memory: DeviceMemory) -> Result<(), Fault>;

    /// Compiles PTX for the device.
    fn module(&self, device: u32, source: &CStr) -> Result<Module, Fault>;

    /// Returns a kernel of a module.
    fn function(&self, device: u32, module: Module, name: &CStr) -> Result<Function, Fault>;

    /// Runs a kernel whose parameters are all 64 bits wide, ordered in the stream, with about this
    /// many threads.
    fn launch(
        &self,
        device: u32,
        stream: Stream,
        function: Function,
        arguments: &[u64],
        threads: u64,
    ) -> Result<(), Fault>;

    /// Announces that foreign kernels are about to compute in a stream, reading `from` and writing
    /// `to`. For a driver that checks the ordering of streams; a real device ignores it.
    fn foreign_compute(
        &self,
        _device: u32,
        _stream: Stream,
        _from: &[DeviceMemory],
        _to: &[DeviceMemory],
    ) -> Result<(), Fault> {
        Ok(())
    }

    /// Whether device memory is the process's memory, as for a test driver.
    fn is_host_memory(&self) -> bool {
        false
    }

    /// Opens memory of another process; returns its address and the number of bytes from there.
    fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Fault>;

    /// Closes memory that `open` opened.
    fn close(&self, device: u32, address: u64);

    /// Copies from the device; complete on return.
    fn read(&self, device: u32, address: u64, into: &mut [u8]) -> Result<(), Fault>;

    /// Copies to the device; complete on return.
    fn write(&self, device: u32, address: u64, from: &[u8]) -> Result<(), Fault>;
}
