//! A driver for tests: its devices are memory of this process, and its kernels are Rust functions
//! that a test supplies by name, or libraries that compute with the addresses that they receive.
//!
//! It completes work as late as a real driver may: a download contains garbage until the copy has
//! been waited for. It has a simulated clock, on which streams run in parallel and copies take
//! time. It panics when two streams use the same memory without one waiting for the other. A test
//! can make it fail at a given call; a permanent fault then persists.
//!
//! Contract: the memory of a download is written when the copy is waited for, as by a real device;
//! the caller keeps the memory valid until then.

mod memory;

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use pharos::region::CUDA_HANDLE;

use self::memory::Memory;
use super::{DeviceMemory, Driver, Event, Fault, Function, Module, Stream};

/// The content of memory that has not been written yet, or whose copy has not been waited for.
pub(crate) const GARBAGE: u8 = 0xdd;

/// Runs the kernel of this name with these parameters.
pub(crate) type Kernel = fn(&str, &[u64], &mut Touch<'_>) -> Result<(), Fault>;

/// The driver; clones share the same state.
#[derive(Clone, Default)]
pub(crate) struct Fake(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    devices: u32,
    absent: bool,
    active: bool,
    kernel: Option<Kernel>,
    memory: BTreeMap<u64, Allocation>,
    /// Memory opened from another process, with the number of times it is open.
    opened: HashMap<u64, i32>,
    registered: Vec<(usize, usize)>,
    streams: HashMap<Stream, Queue>,
    /// The times at which events are reached.
    events: HashMap<Event, u64>,
    functions: HashMap<Function, String>,
    next: usize,
    /// The calls made, in order.
    calls: Vec<&'static str>,
    failures: Vec<(&'static str, usize, Fault)>,
    lost: Option<Fault>,
    /// The time of the simulated clock.
    now: u64,
}

struct Allocation {
    memory: Memory,
    device: u32,
    of_client: bool,
    /// The last stream to write it and to read it, and when that ends.
    written: Option<(Stream, u64)>,
    read: Option<(Stream, u64)>,
}

#[derive(Default)]
struct Queue {
    busy_until: u64,
    /// Downloads that have not been waited for: end time, destination and content.
    late: Vec<(u64, usize, Vec<u8>)>,
}

/// The memory that a kernel may access.
pub(crate) struct Touch<'s> {
    state: &'s mut State,
    turn: Turn,
}

/// A use of memory: the stream, its begin and its end.
type Turn = (Stream, u64, u64);

impl Touch<'_> {
    /// Copies from the device.
    pub(crate) fn read(&mut self, address: u64, len: usize) -> Result<Vec<u8>, Fault> {
        self.state.read(address, len, self.turn)
    }

    /// Copies to the device.
    pub(crate) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.state.write(address, bytes, self.turn)
    }
}

impl Fake {
    /// Creates a driver with this many devices.
    pub(crate) fn new(devices: u32) -> Self {
        let fake = Self::default();
        fake.state().devices = devices;
        fake
    }

    /// Simulates a machine without the driver's library.
    pub(crate) fn absent() -> Self {
        let fake = Self::default();
        fake.state().absent = true;
        fake
    }

    /// Sets the kernels.
    pub(crate) fn with_kernels(self, kernel: Kernel) -> Self {
        self.state().kernel = Some(kernel);
        self
    }

    /// Marks the device as used by other code in the process.
    pub(crate) fn activate(&self) {
        self.state().active = true;
    }

    /// Makes the `nth` call of this name from now on fail, counted from 0.
    pub(crate) fn fail(&self, call: &'static str, nth: usize, fault: Fault) {
        let mut state = self.state();
        let at = state.count(call) + nth;
        state.failures.push((call, at, fault));
    }

    /// Creates client memory on a device; returns its address and handle.
    pub(crate) fn share(&self, device: u32, bytes: &[u8]) -> (u64, [u8; CUDA_HANDLE]) {
        let mut state = self.state();
        let address = state.allocate(device, bytes.len(), true);
        state.memory.get_mut(&address).unwrap().memory.write(0, bytes);
        let mut handle = [0; CUDA_HANDLE];
        handle[..8].copy_from_slice(&address.to_le_bytes());
        (address, handle)
    }

    /// Returns the current content of memory.
    pub(crate) fn content(&self, address: u64) -> Vec<u8> {
        let state = self.state();
        let memory = &state.memory.get(&address).unwrap().memory;
        memory.read(0, memory.1)
    }

    /// Returns the number of open handles on client memory.
    pub(crate) fn open_count(&self) -> i32 {
        self.state().opened.values().sum()
    }

    /// Returns the number of calls of this name.
    pub(crate) fn count(&self, call: &str) -> usize {
        self.state().count(call)
    }

    /// Returns the number of allocated buffers.
    pub(crate) fn buffers(&self) -> usize {
        self.state().memory.values().filter(|allocation| !allocation.of_client).count()
    }

    /// Returns the number of open streams and events.
    pub(crate) fn handles(&self) -> usize {
        let state = self.state();
        state.streams.len() + state.events.len()
    }

    /// Returns the registered ranges: address and length.
    pub(crate) fn registered(&self) -> Vec<(usize, usize)> {
        self.state().registered.clone()
    }

    /// Whether no download is in progress.
    pub(crate) fn is_idle(&self) -> bool {
        self.state().streams.values().all(|queue| queue.late.is_empty())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// Records a call; returns the state unless the call fails.
    fn call(&self, name: &'static str) -> Result<MutexGuard<'_, State>, Fault> {
        let mut state = self.state();
        if state.absent {
            return Err(Fault::Absent("no driver".to_owned()));
        }
        if let Some(fault) = &state.lost {
            return Err(fault.clone());
        }
        let nth = state.count(name);
        state.calls.push(name);
        let failure = state.failures.iter().find(|(call, at, _)| *call == name && *at == nth);
        if let Some(fault) = failure.map(|(_, _, fault)| fault.clone()) {
            if matches!(fault, Fault::Permanent(_)) {
                state.lost = Some(fault.clone());
            }
            return Err(fault);
        }
        Ok(state)
    }
}

impl State {
    /// Like the driver, allows copies of memory that is registered or is not, but refuses partially
    /// registered memory.
    fn check_registered(&self, start: usize, len: usize) -> Result<(), Fault> {
        match self.registered.iter().any(|&(from, size): &(usize, usize)| {
            let within = start.max(from)..(start + len).min(from + size);
            !within.is_empty() && within.len() < len
        }) {
            true => Err(Fault::Refused("invalid argument".to_owned())),
            false => Ok(()),
        }
    }

    fn count(&self, call: &str) -> usize {
        self.calls.iter().filter(|name| **name == call).count()
    }

    fn handle(&mut self) -> usize {
        self.next += 1;
        self.next
    }

    fn allocate(&mut self, device: u32, len: usize, of_client: bool) -> u64 {
        let memory = Memory::new(len);
        let address = memory.0 as u64;
        let allocation = Allocation { memory, device, of_client, written: None, read: None };
        self.memory.insert(address, allocation);
        address
    }

    /// Reserves time of a stream for a copy or kernel of this length.
    fn spend(&mut self, stream: Stream, len: usize) -> Turn {
        let now = self.now;
        let queue = self.streams.get_mut(&stream).unwrap();
        let begin = queue.busy_until.max(now);
        queue.busy_until = begin + 100 + len as u64;
        (stream, begin, queue.busy_until)
    }

    fn find(&mut self, address: u64, len: usize) -> Result<(&mut Allocation, usize), Fault> {
        let illegal = || {
            Fault::Permanent(
                "CUDA driver error: an illegal memory access was encountered".to_owned(),
            )
        };
        let (start, allocation) =
            self.memory.range_mut(..=address).next_back().ok_or_else(illegal)?;
        let at = usize::try_from(address - start).unwrap();
        if at + len > allocation.memory.1 { Err(illegal()) } else { Ok((allocation, at)) }
    }

    fn read(
        &mut self,
        address: u64,
        len: usize,
        (stream, begin, end): Turn,
    ) -> Result<Vec<u8>, Fault> {
        let (allocation, at) = self.find(address, len)?;
        check(allocation.written, "written", stream, begin);
        allocation.read = Some((stream, end));
        Ok(allocation.memory.read(at, len))
    }

    fn write(
        &mut self,
        address: u64,
        bytes: &[u8],
        (stream, begin, end): Turn,
    ) -> Result<(), Fault> {
        let (allocation, at) = self.find(address, bytes.len())?;
        check(allocation.written, "written", stream, begin);
        check(allocation.read, "read", stream, begin);
        allocation.written = Some((stream, end));
        allocation.memory.write(at, bytes);
        Ok(())
    }

    /// Completes the downloads that end by then.
    fn settle(&mut self, stream: Option<Stream>, until: u64) {
        self.now = self.now.max(until);
        for (_, queue) in
            self.streams.iter_mut().filter(|(one, _)| stream.is_none_or(|stream| stream == **one))
        {
            for (_, into, bytes) in queue.late.extract_if(.., |(end, _, _)| *end <= until) {
                let into = std::ptr::with_exposed_provenance_mut::<u8>(into);
                // SAFETY: the length of the destination; the caller of `download` keeps it valid
                // until this is waited for.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
            }
        }
    }
}

/// Panics if another stream is still using the memory.
fn check(last: Option<(Stream, u64)>, what: &str, stream: Stream, begin: u64) {
    if let Some((other, until)) = last {
        assert!(
            other == stream || until <= begin,
            "memory is used while another stream has not {what} it yet"
        );
    }
}

impl Driver for Fake {
    fn count(&self) -> Result<u32, Fault> {
        Ok(self.call("count")?.devices)
    }

    fn enter(&self, device: u32) -> Result<(), Fault> {
        let mut state = self.call("enter")?;
        match device < state.devices {
            true => {
                state.active = true;
                Ok(())
            }
            false => Err(Fault::Refused(format!(
                "device {device} does not exist: the driver reports {} devices",
                state.devices
            ))),
        }
    }

    fn is_active(&self, _: u32) -> bool {
        let state = self.state();
        state.active && !state.absent
    }

    fn name(&self, device: u32) -> Result<String, Fault> {
        let _state = self.call("name")?;
        Ok(format!("Fake {device}"))
    }

    fn allocate(&self, device: u32, len: usize) -> Result<u64, Fault> {
        Ok(self.call("allocate")?.allocate(device, len, false))
    }

    fn free(&self, _: u32, address: u64) {
        assert!(self.state().memory.remove(&address).is_some(), "freed twice");
    }

    unsafe fn register(&self, _: u32, start: *mut u8, len: usize) -> Result<(), Fault> {
        self.call("register")?.registered.push((start.addr(), len));
        Ok(())
    }

    unsafe fn unregister(&self, _: u32, start: *mut u8) {
        self.state().registered.retain(|(address, _)| *address != start.addr());
    }

    fn stream(&self, _: u32) -> Result<Stream, Fault> {
        let mut state = self.call("stream")?;
        let stream = Stream(state.handle());
        state.streams.insert(stream, Queue::default());
        Ok(stream)
    }

    fn close_stream(&self, _: u32, stream: Stream) {
        assert!(self.state().streams.remove(&stream).is_some());
    }

    fn synchronize(&self, _: u32, stream: Stream) -> Result<(), Fault> {
        let mut state = self.call("synchronize")?;
        let until = state.streams.get(&stream).unwrap().busy_until;
        state.settle(Some(stream), until);
        Ok(())
    }

    fn event(&self, _: u32) -> Result<Event, Fault> {
        let mut state = self.call("event")?;
        let event = Event(state.handle());
        state.events.insert(event, 0);
        Ok(event)
    }

    fn close_event(&self, _: u32, event: Event) {
        assert!(self.state().events.remove(&event).is_some());
    }

    fn record(&self, _: u32, event: Event, stream: Stream) -> Result<(), Fault> {
        let mut state = self.call("record")?;
        let at = state.streams.get(&stream).unwrap().busy_until.max(state.now);
        *state.events.get_mut(&event).unwrap() = at;
        Ok(())
    }

    fn wait(&self, _: u32, stream: Stream, event: Event) -> Result<(), Fault> {
        let mut state = self.call("wait")?;
        let at = *state.events.get(&event).unwrap();
        let queue = state.streams.get_mut(&stream).unwrap();
        queue.busy_until = queue.busy_until.max(at);
        Ok(())
    }

    fn wait_here(&self, _: u32, event: Event) -> Result<(), Fault> {
        let mut state = self.call("wait_here")?;
        let at = *state.events.get(&event).unwrap();
        state.settle(None, at);
        Ok(())
    }

    fn elapsed(&self, _: u32, from: Event, to: Event) -> Result<Duration, Fault> {
        let state = self.call("elapsed")?;
        let from = state.events[&from];
        let to = state.events[&to];
        assert!(to <= state.now, "an event that is not over");
        Ok(Duration::from_nanos(to - from))
    }

    unsafe fn upload(
        &self,
        _: u32,
        stream: Stream,
        to: u64,
        from: *const [u8],
    ) -> Result<(), Fault> {
        let mut state = self.call("upload")?;
        state.check_registered(from.addr(), from.len())?;
        // SAFETY: the caller keeps the bytes valid.
        let bytes = unsafe { &*from };
        let turn = state.spend(stream, bytes.len());
        state.write(to, bytes, turn)
    }

    unsafe fn download(
        &self,
        _: u32,
        stream: Stream,
        from: u64,
        into: *mut [u8],
    ) -> Result<(), Fault> {
        let mut state = self.call("download")?;
        state.check_registered(into.addr(), into.len())?;
        let turn = state.spend(stream, into.len());
        let bytes = state.read(from, into.len(), turn)?;
        // SAFETY: the caller keeps the memory valid.
        unsafe { into.cast::<u8>().write_bytes(GARBAGE, into.len()) };
        state.streams.get_mut(&stream).unwrap().late.push((
            turn.2,
            into.cast::<u8>().expose_provenance(),
            bytes,
        ));
        Ok(())
    }

    fn copy(
        &self,
        _: u32,
        stream: Stream,
        from: DeviceMemory,
        to: DeviceMemory,
    ) -> Result<(), Fault> {
        let mut state =
            self.call(if from.device() == to.device() { "copy" } else { "copy_peer" })?;
        let start = from.address().max(to.address());
        let end = from.address().min(to.address()) + from.len() as u64;
        assert!(start >= end, "overlapping copies are undefined in the driver");
        let turn = state.spend(stream, from.len());
        let bytes = state.read(from.address(), from.len(), turn)?;
        state.write(to.address(), &bytes, turn)
    }

    fn zero(&self, _: u32, stream: Stream, memory: DeviceMemory) -> Result<(), Fault> {
        let mut state = self.call("zero")?;
        let turn = state.spend(stream, memory.len());
        state.write(memory.address(), &vec![0; memory.len()], turn)
    }

    fn module(&self, _: u32, source: &CStr) -> Result<Module, Fault> {
        assert!(source.to_bytes().starts_with(b".version"));
        Ok(Module(self.call("module")?.handle()))
    }

    fn function(&self, _: u32, _: Module, name: &CStr) -> Result<Function, Fault> {
        let mut state = self.call("function")?;
        let function = Function(state.handle());
        state.functions.insert(function, name.to_str().unwrap().to_owned());
        Ok(function)
    }

    fn launch(
        &self,
        _: u32,
        stream: Stream,
        function: Function,
        arguments: &[u64],
        threads: u64,
    ) -> Result<(), Fault> {
        let mut state = self.call("launch")?;
        let name = state.functions[&function].clone();
        let turn = state.spend(stream, usize::try_from(threads * 8).unwrap());
        let kernel = state.kernel.unwrap();
        let result = kernel(&name, arguments, &mut Touch { state: &mut state, turn });
        if let Err(fault @ Fault::Permanent(_)) = &result {
            state.lost = Some(fault.clone());
        }
        result
    }

    fn foreign_compute(
        &self,
        _: u32,
        stream: Stream,
        read: &[DeviceMemory],
        written: &[DeviceMemory],
    ) -> Result<(), Fault> {
        let mut state = self.call("foreign_compute")?;
        let len = read.iter().chain(written).map(DeviceMemory::len).sum();
        let turn = state.spend(stream, len);
        for from in read {
            state.read(from.address(), from.len(), turn)?;
        }
        // The previous content of an output must not be used.
        written.iter().try_for_each(|to| state.write(to.address(), &vec![GARBAGE; to.len()], turn))
    }

    fn is_host_memory(&self) -> bool {
        true
    }

    fn open(&self, device: u32, handle: &[u8; CUDA_HANDLE]) -> Result<(u64, u64), Fault> {
        let mut state = self.call("open")?;
        if state.devices == 0 {
            return Err(Fault::Absent("no device".to_owned()));
        }
        let address = u64::from_le_bytes(handle[..8].try_into().unwrap());
        let there = state.memory.get(&address).filter(|allocation| allocation.device == device);
        let len = there
            .map(|allocation| allocation.memory.1 as u64)
            .ok_or_else(|| Fault::Refused("invalid handle".to_owned()))?;
        *state.opened.entry(address).or_default() += 1;
        Ok((address, len))
    }

    fn close(&self, _: u32, address: u64) {
        *self.state().opened.get_mut(&address).unwrap() -= 1;
    }

    fn read(&self, _: u32, address: u64, into: &mut [u8]) -> Result<(), Fault> {
        let mut state = self.call("read")?;
        state.check_registered(into.as_ptr().addr(), into.len())?;
        let (allocation, at) = state.find(address, into.len())?;
        into.copy_from_slice(&allocation.memory.read(at, into.len()));
        Ok(())
    }

    fn write(&self, _: u32, address: u64, from: &[u8]) -> Result<(), Fault> {
        let mut state = self.call("write")?;
        state.check_registered(from.as_ptr().addr(), from.len())?;
        let (allocation, at) = state.find(address, from.len())?;
        allocation.memory.write(at, from);
        Ok(())
    }
}
