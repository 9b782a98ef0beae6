//! A real instance of the function `repeat` over a connection whose other end the test holds: which
//! frames it sends, when it waits, and how it handles frames that arrive meanwhile.

#![allow(clippy::panic)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use pharos::metrics::channel;
use pharos::model::{Completion, Draft};
use pharos::shm::{self, SharedMemory};
use pharos::wire::{
    self, BatchRequest, CREDITS, Credits, Done, Execute, InputBlock, PREFIX, Resumed, ToFrontend,
    ToWorker, decode_to_frontend, flags, payload_length,
};

use pharos::tensor::DataType;

use super::test_connection::{FrontendEnd, connection, load};
use super::*;
use crate::descriptors::SharedDescriptors;
use crate::device::Cuda;

const CONFIG: &str = "backend: 'test' model_transaction_policy { decoupled: true }
    input { name: 'IN' data_type: TYPE_INT32 dims: -1 } output { name: 'OUT' data_type: TYPE_INT32 \
                      dims: 1 }
    parameters { key: 'function' value { string_value: 'repeat' } }";
const BYTES: u64 = 1 << 20;
const ELEMENTS: u32 = 100;

/// The frontend's side.
struct Frontend {
    socket: FrontendEnd,
    inputs: SharedMemory,
    /// Returns the outcome and the frames that the worker receives after it.
    worker: JoinHandle<(Done, Vec<ToWorker>)>,
}

/// Returns a batch of one request with this many bytes of input.
fn execute(len: u64) -> Execute {
    let input = InputBlock {
        input: 0,
        datatype: DataType::Int32,
        shape: vec![i64::from(ELEMENTS)],
        offset: flags::BYTES,
        len,
        pieces: Vec::new(),
    };
    let requests = vec![BatchRequest { rows: 1, ..BatchRequest::default() }];
    let inputs = vec![input];
    let outputs = vec![];
    let released = vec![];
    let placements = vec![];
    let elements = vec![];
    Execute {
        batch: 7,
        requests,
        inputs,
        outputs,
        released,
        flags: 1,
        placements,
        elements,
        resumed: vec![],
    }
}

/// Starts an instance that executes one batch of one request with [`ELEMENTS`] elements, and then
/// reads until the connection is closed.
fn start() -> Frontend {
    resume(Vec::new())
}

/// Like [`start`], for a request that may have been executed before.
fn resume(resumed: Vec<Resumed>) -> Frontend {
    let draft = Draft::from_text(CONFIG, "config.pbtxt").unwrap();
    let config = draft.complete(&Completion { directory: "m", ..Completion::default() }).unwrap();
    let inputs = shm::create("inputs", BYTES).unwrap();
    let outputs = shm::create("outputs", BYTES).unwrap();
    let (ring, _) = channel::create(0).unwrap();
    let (_, wakeup) = rustix::pipe::pipe().unwrap();
    let mapped = SharedMemory::map(&inputs, usize::try_from(BYTES).unwrap()).unwrap();
    let data: Vec<u8> = (0..ELEMENTS).flat_map(u32::to_le_bytes).collect();
    assert!(mapped.copy_in(usize::try_from(flags::BYTES).unwrap(), &data));
    let load = load(config.encode());
    let execute = Execute { resumed, ..execute(data.len() as u64) };
    let (regions, _) = UnixStream::pair().unwrap();
    let regions = regions.into();
    let (reader, sender, socket) = connection();
    let descriptors = SharedDescriptors { inputs, outputs, metrics: ring, wakeup, regions };
    let worker = thread::spawn(move || {
        let opened = crate::open(&load, reader, sender.clone(), descriptors, Cuda::new(None));
        let (runtime, regions) = opened.unwrap();
        let mut instance =
            Instance::load(&load, runtime.clone(), regions, &tests::backends()).unwrap();
        let Executed { done, panicked, .. } = instance.execute(&execute);
        assert!(!panicked);
        sender.send(&ToFrontend::Done(done.clone())).unwrap();
        let mut received = Vec::new();
        while let Ok(Some(frame)) = runtime.session().connection.receive() {
            received.push(frame);
        }
        (done, received)
    });
    socket.set_read_timeout(Duration::from_secs(10));
    Frontend { socket, inputs: mapped, worker }
}

impl Frontend {
    fn read(&mut self) -> ToFrontend {
        let mut prefix = [0; PREFIX];
        self.socket.read_exact(&mut prefix).unwrap();
        let mut payload = vec![0; payload_length(prefix).unwrap()];
        self.socket.read_exact(&mut payload).unwrap();
        decode_to_frontend(&payload).unwrap()
    }

    /// Reads this many responses of the first request; returns the last one.
    fn responses(&mut self, count: u32) -> wire::Response {
        let mut last = None;
        for _ in 0..count {
            let ToFrontend::Response(response) = self.read() else { panic!("expected a response") };
            assert_eq!((response.batch, response.request, &response.error), (7, 0, &None));
            last = Some(response);
        }
        last.unwrap()
    }

    fn send(&mut self, frame: &ToWorker) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.socket.write_all(&bytes).unwrap();
    }

    /// Sends the total number of responses that the client has read.
    fn credits(&mut self, batch: u64, taken: u32, released: Vec<u64>) {
        self.send(&ToWorker::Credits(Credits { batch, request: 0, taken: taken.into(), released }));
    }

    /// Whether the worker sends nothing for a while.
    fn is_quiet(&mut self) -> bool {
        self.socket.set_read_timeout(Duration::from_millis(200));
        let quiet = self.socket.read(&mut [0]).is_err();
        self.socket.set_read_timeout(Duration::from_secs(10));
        quiet
    }

    fn cancel(&self, position: usize) {
        let (word, bit) = flags::bit(1, position).unwrap();
        self.inputs.words()[word].fetch_or(bit, Ordering::Relaxed);
    }

    fn end(mut self) -> (Done, Vec<ToWorker>) {
        while !matches!(self.read(), ToFrontend::Done(_)) {}
        drop(self.socket);
        self.worker.join().unwrap()
    }
}

#[test]
fn a_worker_waits_for_credit_and_keeps_frames_that_arrive_meanwhile() {
    let mut frontend = start();
    let first = frontend.responses(CREDITS);
    assert_eq!(first.outputs.len(), 1);
    assert!(frontend.is_quiet());
    // For another batch, for no batch, and for this batch without new credit: only wakes the
    // worker.
    frontend.credits(6, 5, Vec::new());
    frontend.credits(7, 0, Vec::new());
    let meanwhile = [ToWorker::Metrics("mode: both".into()), ToWorker::Release(vec![u64::MAX])];
    meanwhile.iter().for_each(|frame| frontend.send(frame));
    assert!(frontend.is_quiet());
    frontend.credits(7, 3, vec![first.outputs[0].offset]);
    let next = frontend.responses(3);
    assert!(frontend.is_quiet());
    assert!(next.stamps.output_start <= next.stamps.end && first.stamps.start == next.stamps.start);
    // A repeated total grants no further credit.
    frontend.credits(7, 3, Vec::new());
    assert!(frontend.is_quiet());
    for (taken, count) in
        [(3 + CREDITS, CREDITS), (3 + 2 * CREDITS, CREDITS), (ELEMENTS, ELEMENTS - 3 * CREDITS - 3)]
    {
        frontend.credits(7, taken, Vec::new());
        frontend.responses(count);
    }
    let ToFrontend::Response(end) = frontend.read() else { panic!("no last response") };
    assert!(end.last && end.empty && end.outputs.is_empty());
    let (done, received) = frontend.end();
    assert_eq!((done.error, done.outputs.len()), (None, 0));
    assert_eq!(
        received,
        [ToWorker::Metrics("mode: both".into())],
        "released memory and credits are used at once"
    );
}

#[test]
fn a_resumed_request_has_its_remaining_credit() {
    let mut frontend = resume(vec![Resumed { request: 0, sent: 70, taken: 40 }]);
    frontend.responses(2);
    assert!(frontend.is_quiet());
    frontend.credits(7, 70, Vec::new());
    frontend.responses(30);
    assert!(frontend.is_quiet());
    frontend.credits(7, 70 + ELEMENTS, Vec::new());
    frontend.responses(ELEMENTS - 32);
    let (done, _) = frontend.end();
    assert_eq!(done.error, None);
}

#[test]
fn a_wait_ends_when_the_request_is_cancelled() {
    let mut frontend = start();
    frontend.responses(CREDITS);
    frontend.cancel(0);
    frontend.credits(7, 0, Vec::new());
    let (done, _) = frontend.end();
    assert_eq!(done.error, None);
}

#[test]
fn a_wait_ends_when_the_process_must_stop() {
    let mut frontend = start();
    frontend.responses(CREDITS);
    frontend.send(&ToWorker::Shutdown);
    let (_, received) = frontend.end();
    assert_eq!(received, [ToWorker::Shutdown]);
}
