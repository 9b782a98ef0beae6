//! Calls of the interface in any order and with any arguments that its contract allows, chosen by
//! the bytes of a fuzz target: objects of every type, also the wrong one and after their deletion,
//! null, numbers out of range, strings that are not UTF-8. A call must answer or give an error.
//!
//! Functions that wait for the server, and the memory manager, whose memory nothing would free, are
//! left out.

use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use pharos::error::InferError;
use pharos::metrics::catalog::Catalog;
use pharos::metrics::channel;
use pharos::metrics::worker_metrics::WorkerMetrics;
use pharos::model::{Completion, Draft};
use pharos::tensor::DataType;
use pharos::wire::{BatchRequest, Load, ring};
use pharos_backend::runtime::{AlignedBuffer, Devices, RegionRange, connect, map};
use pharos_backend::{DeviceMemory, Metrics, Received, ReceivedOnDevice, Runtime, ScratchKind};

use crate::answer::{Answer, Channel};
use crate::buffer::InputBytes;
use crate::error::ErrorPointer;
use crate::kept::{Kept, Releases};
use crate::model::{
    Attributes, BackendDescription, BackendObject, InstanceDescription, InstanceObject, Model,
    ModelDescription, ModelObject,
};
use crate::object::{self, Kind, Object};
use crate::request::{Input, Request};
use crate::values::KIND_CPU;
use crate::{calls, error, memory, message, metrics, model, request, response, states, statistics};
use crate::{traces, values};

/// A function of the interface, called with arguments from a source.
pub(crate) type Fuzzed = (&'static str, fn(&mut Source<'_>) -> ErrorPointer);

/// The most calls of one run. Deleted objects keep their memory until many later ones are deleted,
/// and a run must not use an object for longer than that.
const MAX_CALLS: usize = 48;

/// The length of arrays and strings: what a function reads at most.
const LONGEST: usize = 4096;

const CONFIG: &str = "name: 'm' backend: 'mine' max_batch_size: 4
    input [ { name: 'INPUT0' data_type: TYPE_INT32 dims: [ -1 ] },
            { name: 'INPUT1' data_type: TYPE_STRING dims: [ -1 ] } ]
    output [ { name: 'OUTPUT0' data_type: TYPE_INT32 dims: [ -1 ] } ]
    sequence_batching { state [ { input_name: 'INPUT_STATE' output_name: 'OUTPUT_STATE'
                                  data_type: TYPE_INT32 dims: [ -1 ] } ] }";

/// Makes the calls that the bytes describe.
pub fn calls(data: &[u8]) {
    let Some(world) = &*WORLD else { return };
    let table = all();
    let mut source = Source::new(data, world);
    for _ in 0..MAX_CALLS {
        let Some(number) = source.next_number() else { break };
        let Some((_, call)) = table.get(usize::from(number) % table.len()) else { break };
        let failed = call(&mut source);
        source.collect_results();
        source.objects.extend((!failed.is_null()).then_some(failed.cast()));
    }
    source.delete_all();
}

/// Returns the functions by the number that selects them.
fn all() -> Vec<Fuzzed> {
    const LEFT_OUT: [&str; 3] = ["memory::allocate", "memory::free", "values::log"];
    let lists = [
        calls::FUZZED,
        memory::FUZZED,
        message::FUZZED,
        metrics::FUZZED,
        model::FUZZED,
        request::FUZZED,
        response::FUZZED,
        states::FUZZED,
        statistics::FUZZED,
        traces::FUZZED,
        values::FUZZED,
    ];
    let all = lists.into_iter().flatten().copied();
    all.filter(|(name, _)| {
        let name = name.trim_start_matches("pharos_triton::");
        !LEFT_OUT.contains(&name) && !name.starts_with("calls::server_")
    })
    .collect()
}

/// What all runs share: the objects that live as long as a process.
struct World {
    model: Arc<Model>,
    releases: Arc<Releases>,
    /// The backend, the model, the instance.
    objects: [usize; 3],
    /// The server's ends of the connection, which nobody reads.
    _server: (UnixStream, std::os::fd::OwnedFd),
}

/// `None` if the process has no memory or descriptors left.
static WORLD: LazyLock<Option<World>> = LazyLock::new(|| World::new().ok());

impl World {
    fn new() -> io::Result<Self> {
        let draft = Draft::from_text(CONFIG, "config.pbtxt").map_err(io::Error::other)?;
        let completion = Completion { directory: "m", ..Completion::default() };
        let config = draft.complete(&completion).map_err(io::Error::other)?;
        let (server, worker) = UnixStream::pair()?;
        let frames = ring::create()?;
        let (reader, sender) = connect(worker, &frames)?;
        let arena = |name| pharos::shm::create(name, 1 << 20);
        let (inputs, outputs) = map(&arena("inputs")?, &arena("outputs")?)?;
        let (samples, _) = channel::create(0)?;
        let load = Load {
            model: config.name.clone(),
            version: 1,
            metrics: WorkerMetrics::of(&Catalog::shipped()).encode(),
            ..Load::default()
        };
        let wakeup = frames.try_clone()?;
        let metrics = Metrics::open(&samples, wakeup, &load)?;
        let runtime = Runtime::new(reader, sender, inputs, outputs, metrics, Arc::new(NoDevices));
        let backend = object::make(BackendObject::new(&BackendDescription {
            name: "mine",
            config: "{}",
            directory: "/",
            runtime: Some(&runtime),
        }));
        let json = config.to_json();
        let of_model = object::make(ModelObject::new(
            &ModelDescription {
                name: "m",
                version: 1,
                directory: "/m",
                config: &json,
                completes: true,
            },
            backend,
        ));
        let description = InstanceDescription {
            name: "m_0",
            kind: KIND_CPU,
            policy: "cpu",
            profiles: &["a".to_owned()],
            passive: false,
        };
        let instance = object::make(InstanceObject::new(&description, of_model));
        Ok(Self {
            model: Model::new(&config, &runtime),
            releases: Arc::default(),
            objects: [
                backend.expose_provenance(),
                of_model.expose_provenance(),
                instance.expose_provenance(),
            ],
            _server: (server, frames),
        })
    }

    /// Creates a request with both inputs.
    fn request(&self, position: u32) -> *mut Object<Request> {
        let kept = Kept::new((1, position), &self.releases);
        let answer = Answer::new(&self.model, Channel::Joined(kept), Vec::new());
        let inputs = [DataType::Int32, DataType::Bytes].into_iter().enumerate();
        let inputs = inputs.map(|(position, datatype)| Input {
            model: self.model.clone(),
            position,
            datatype,
            shape: vec![1, 2],
            data: InputBytes::Host(Received::of_buffer(AlignedBuffer::zeroed(8))),
            attributes: Mutex::new(None),
        });
        let described = BatchRequest { rows: 1, id: "1".into(), ..BatchRequest::default() };
        object::make(Request::new(answer, &described, inputs.collect()))
    }
}

/// A machine without devices.
struct NoDevices;

fn none<T>() -> Result<T, InferError> {
    Err(InferError::unsupported("there are no devices"))
}

impl Devices for NoDevices {
    fn write_region(&self, _: u64, _: u64, _: &[u8]) -> Result<(), InferError> {
        none()
    }

    fn keep_on_device(&self, _: RegionRange) -> Option<ReceivedOnDevice> {
        None
    }

    fn read(&self, _: DeviceMemory, _: &mut [u8]) -> Result<(), InferError> {
        none()
    }

    fn copy(&self, _: DeviceMemory, _: DeviceMemory) -> Result<(), InferError> {
        none()
    }

    fn allocate(&self, _: ScratchKind, _: usize) -> Result<u64, InferError> {
        none()
    }

    fn free(&self, _: ScratchKind, _: u64) -> Result<(), InferError> {
        none()
    }
}

/// The bytes that choose arguments, and what the arguments point to.
pub(crate) struct Source<'d> {
    rest: &'d [u8],
    /// Objects of all types, some of them deleted.
    objects: Vec<*mut c_void>,
    /// Arrays, strings and places for results. They stay as long as the run.
    blocks: Vec<Box<[u64]>>,
    /// Places for objects of the current call.
    results: Vec<*mut *mut c_void>,
    /// The objects that the run creates itself.
    requests: [*mut Object<Request>; 2],
    attributes: *mut Object<Attributes>,
}

impl<'d> Source<'d> {
    fn new(data: &'d [u8], world: &World) -> Self {
        let requests = [world.request(0), world.request(1)];
        let attributes = object::make(Attributes::default());
        let mut objects: Vec<*mut c_void> =
            world.objects.iter().map(|object| ptr::with_exposed_provenance_mut(*object)).collect();
        objects.extend(requests.map(|request| request.cast::<c_void>()));
        objects.push(attributes.cast());
        Self { rest: data, objects, blocks: Vec::new(), results: Vec::new(), requests, attributes }
    }

    /// Returns the next byte; 0 at the end.
    pub(crate) fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        *first
    }

    /// Returns the number of the next call; `None` at the end.
    fn next_number(&mut self) -> Option<u16> {
        let (number, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(u16::from_le_bytes(*number))
    }

    /// Returns an object of any type, or null.
    fn object(&mut self) -> *mut c_void {
        let chosen = usize::from(self.byte());
        // The newest objects come first, because calls that belong together follow each other.
        let from_end = self.objects.len().checked_sub(chosen % (self.objects.len() + 1));
        from_end.and_then(|at| self.objects.get(at)).copied().unwrap_or(ptr::null_mut())
    }

    /// Returns memory of [`LONGEST`] bytes, aligned for every number.
    fn block(&mut self) -> *mut u64 {
        let mut block = vec![0_u64; LONGEST / 8].into_boxed_slice();
        let start = block.as_mut_ptr();
        self.blocks.push(block);
        start
    }

    /// Returns a place for a result, which has a small number before the call; sometimes null.
    fn place(&mut self) -> *mut u64 {
        match self.byte() {
            u8::MAX => ptr::null_mut(),
            before => {
                let place = self.block();
                // SAFETY: the block is longer.
                unsafe { place.write(u64::from(before % 4)) };
                place
            }
        }
    }

    /// Returns a string: a name of the model or two bytes, which may be no UTF-8.
    fn text(&mut self) -> *const c_char {
        const NAMES: [&str; 6] =
            ["INPUT0", "OUTPUT0", "OUTPUT_STATE", "m", "{\"name\":\"m\"}", "BOOL"];
        let chosen = self.byte();
        if chosen == u8::MAX {
            return ptr::null();
        }
        let own = [self.byte(), self.byte()];
        let text = NAMES.get(usize::from(chosen)).map_or(&own[..], |name| name.as_bytes());
        let start = self.block().cast::<u8>();
        // SAFETY: the block is longer, and its zeros end the string.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), start, text.len()) };
        start.cast()
    }

    /// Returns an array of [`LONGEST`] / 8 small numbers; sometimes null.
    fn numbers(&mut self) -> *const u64 {
        match self.byte() {
            u8::MAX => ptr::null(),
            number => {
                let start = self.block();
                for at in 0..LONGEST / 8 {
                    // SAFETY: within the block.
                    unsafe { start.add(at).write(u64::from(number % 5)) };
                }
                start
            }
        }
    }

    /// Returns a number: small, or the largest.
    fn number(&mut self) -> u64 {
        match self.byte() {
            u8::MAX => u64::MAX,
            // What functions count or measure with it is never longer than a block.
            small => u64::from(small) * 2,
        }
    }

    /// Adds the objects that the last call has created.
    fn collect_results(&mut self) {
        for place in self.results.drain(..) {
            // SAFETY: the first pointer of a block.
            let made = unsafe { place.read() };
            if !made.is_null() && !self.objects.contains(&made) {
                self.objects.push(made);
            }
        }
    }

    /// Deletes what the run has created. Makes no errors of the interface, which are objects too.
    fn delete_all(mut self) {
        for object in std::mem::take(&mut self.objects) {
            delete::<calls::Allocator>(object);
            delete::<calls::CallRequestObject>(object);
            delete::<error::ServerError>(object);
            delete::<memory::BufferAttributes>(object);
            delete::<message::Message>(object);
            delete::<message::OwnParameter>(object);
            delete::<metrics::Family>(object);
            delete::<metrics::Metric>(object);
            delete::<metrics::MetricArgs>(object);
            delete::<response::Factory>(object);
            delete::<response::Response>(object);
            delete::<statistics::ResponseStatistics>(object);
            delete::<traces::Trace>(object);
        }
        for request in self.requests {
            // SAFETY: created by this run; an error is a request that was released.
            drop(unsafe { object::take(request) });
        }
        // SAFETY: as above.
        drop(unsafe { object::take(self.attributes) });
    }
}

/// Deletes an object if it has this type and is not deleted.
fn delete<T: Kind>(object: *mut c_void) {
    // SAFETY: an object, whose type is checked; it is kept for longer than a run after its deletion.
    drop(unsafe { object::take(object.cast::<Object<T>>()) });
}

/// An argument of a function of the interface.
pub(crate) trait Argument {
    /// Chooses one.
    fn take(source: &mut Source<'_>) -> Self;
}

impl<T> Argument for *mut Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        source.object().cast()
    }
}

impl<T> Argument for *const Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        source.object().cast()
    }
}

impl<T> Argument for *mut *mut Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        let place = if source.byte() == u8::MAX { return ptr::null_mut() } else { source.block() };
        source.results.push(place.cast());
        place.cast()
    }
}

impl<T> Argument for *const *const Object<T> {
    fn take(source: &mut Source<'_>) -> Self {
        let objects = [source.object(), source.object()];
        let start = source.block().cast::<*mut c_void>();
        for at in 0..LONGEST / size_of::<*mut c_void>() {
            let object = objects.get(at % 2).copied().unwrap_or(ptr::null_mut());
            // SAFETY: within the block.
            unsafe { start.add(at).write(object) };
        }
        start.cast_const().cast()
    }
}

/// Implements [`Argument`] with an expression over the source.
macro_rules! arguments {
    ($($type:ty => |$source:ident| $value:expr;)*) => { $(
        impl Argument for $type {
            fn take($source: &mut Source<'_>) -> Self {
                $value
            }
        }
    )* };
}

arguments! {
    bool => |source| source.byte() % 2 == 1;
    c_int => |source| c_int::from(source.byte().cast_signed()) % 32;
    u32 => |source| u32::from(source.byte()) % 8;
    u64 => |source| source.number();
    i64 => |source| i64::from(source.byte().cast_signed());
    usize => |source| usize::try_from(source.number()).unwrap_or(usize::MAX);
    f64 => |source| f64::from(source.byte().cast_signed()) / 4.0;
    *const c_char => |source| source.text();
    *const i64 => |source| source.numbers().cast();
    *const u64 => |source| source.numbers();
    *const f64 => |source| source.numbers().cast();
    *const usize => |source| source.numbers().cast();
    // The value of a parameter: its kind says what it is.
    *const c_void => |source| source.text().cast();
    // A token of the library, which nothing follows.
    *mut c_void => |source| ptr::without_provenance_mut(usize::from(source.byte()));
    *mut bool => |source| source.place().cast();
    *mut c_int => |source| source.place().cast();
    *mut u32 => |source| source.place().cast();
    *mut u64 => |source| source.place().cast();
    *mut i64 => |source| source.place().cast();
    *mut f64 => |source| source.place().cast();
    *mut usize => |source| source.place().cast();
    *mut *const c_char => |source| source.place().cast();
    *mut *const c_void => |source| source.place().cast();
    *mut *mut c_void => |source| source.place().cast();
    *mut *const i64 => |source| source.place().cast();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_calls_give_results_or_errors() {
        let mut state = 7_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33).to_le_bytes()[0]
        };
        for _ in 0..2000 {
            let data: Vec<u8> = (0..400).map(|_| next()).collect();
            calls(&data);
        }
    }

    #[test]
    fn every_function_with_an_error_is_called() {
        assert!(WORLD.is_some());
        assert!(all().len() > 150, "{}", all().len());
    }
}
