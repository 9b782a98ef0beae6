//! Calls of the interface in any order and with any arguments that its contract allows, chosen by
//! the bytes of a fuzz target: objects of every type, also the wrong one and after their deletion,
//! null, numbers out of range, strings that are not UTF-8. A call must answer or give an error.
//!
//! Functions that wait for the server, and the memory manager, whose memory nothing would free, are
//! left out.

use std::ffi::c_void;
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
use pharos_backend::{
    DeviceMemory, Metrics, Received, ReceivedOnDevice, ReceivedPiece, Runtime, ScratchKind,
};

use crate::answer::{Answer, Channel};
use crate::error::Fuzzed;
use crate::fuzzed::Source;
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

/// The most calls of one run. Deleted objects keep their memory until many later ones are deleted,
/// and a run must not use an object for longer than that.
const MAX_CALLS: usize = 48;

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
    let requests = [world.request(0), world.request(1)];
    let attributes = object::make(Attributes::default());
    let mut objects: Vec<*mut c_void> =
        world.objects.iter().map(|object| ptr::with_exposed_provenance_mut(*object)).collect();
    objects.extend(requests.map(|request| request.cast::<c_void>()));
    objects.push(attributes.cast());
    let mut source = Source::new(data, objects);
    for _ in 0..MAX_CALLS {
        let Some(number) = source.next_number() else { break };
        let Some((_, call)) = table.get(usize::from(number) % table.len()) else { break };
        let failed = call(&mut source);
        source.collect_results();
        source.objects.extend((!failed.is_null()).then_some(failed.cast()));
    }
    delete_all(&source.objects);
    for request in requests {
        // SAFETY: created by this run; an error is a request that was released.
        drop(unsafe { object::discard(request) });
    }
    // SAFETY: as above.
    drop(unsafe { object::take(attributes) });
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
    /// The server's ends of the connection, which are never read.
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
        let inputs = inputs.map(|(position, datatype)| {
            Object::new(Input {
                model: self.model.clone(),
                position,
                datatype,
                shape: vec![1, 2],
                data: ReceivedPiece::Host(Received::of_buffer(AlignedBuffer::zeroed(8))),
                attributes: Mutex::new(None),
            })
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

/// Deletes what a run has created. Makes no errors of the interface, which are objects too.
fn delete_all(objects: &[*mut c_void]) {
    for &object in objects {
        delete::<calls::Allocator>(object);
        delete::<calls::CallRequestObject>(object);
        delete::<error::ServerError>(object);
        delete::<memory::BufferAttributes>(object);
        // SAFETY: an object, whose type is checked.
        let message = unsafe { object::get(object.cast::<Object<message::Message>>()) };
        if message.is_ok_and(|message| !message.is_lent()) {
            delete::<message::Message>(object);
        }
        delete::<message::OwnParameter>(object);
        delete::<metrics::Family>(object);
        delete::<metrics::Metric>(object);
        delete::<metrics::MetricArgs>(object);
        delete::<response::Factory>(object);
        delete::<response::Response>(object);
        delete::<statistics::ResponseStatistics>(object);
        delete::<traces::Trace>(object);
    }
}

/// Deletes an object if it has this type and is not deleted.
fn delete<T: Kind>(object: *mut c_void) {
    // SAFETY: an object, whose type is checked; it is kept for longer than a run after its deletion.
    drop(unsafe { object::take(object.cast::<Object<T>>()) });
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
