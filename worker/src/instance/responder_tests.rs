//! A real instance of a backend that keeps its inputs and responders, over a connection whose other
//! end the test holds.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, Sender as ToTest, channel as messages};
use std::thread;
use std::time::Duration;

use pharos::error::{ErrorCode, Reason};
use pharos::metrics::channel;
use pharos::model::{Completion, Draft};
use pharos::shm::{self, SharedMemory};
use pharos::tensor::DataType;
use pharos::wire::{
    Answer, AnswerOutput, BatchRequest, CREDITS, Done, Execute, FIRST_CALL_LOAN, InputBlock,
    PREFIX, ToFrontend, ToWorker, decode_to_frontend, flags, payload_length,
};
use pharos_backend::runtime::wire_error;
use pharos_backend::{Call, CallRequest, Content, Memory, Reply, ReplyOutput, Responder};

use super::test_connection::{FrontendEnd, connection, load};
use super::*;
use crate::descriptors::SharedDescriptors;
use crate::device::Cuda;

const BYTES: u64 = 1 << 20;

/// The backend's action for each request.
#[derive(Clone, Copy)]
enum What {
    /// Hands responder and input to the test.
    Keep,
    /// Answers immediately with its input.
    PassOn,
    /// Like `PassOn`, and also hands the input to the test.
    PassOnAndKeep,
}

struct Keeper {
    what: What,
    kept: ToTest<(Responder, Received)>,
    inputs: ToTest<Received>,
}

fn passed_on(input: &Received) -> Reply {
    let shape = vec![i64::try_from(input.len()).unwrap()];
    let output = ReplyOutput {
        output: 0,
        datatype: DataType::Uint8,
        shape,
        content: Content::Received(input.clone()),
    };
    Reply { outputs: vec![output], ..Reply::default() }
}

impl Backend for Keeper {
    fn engine(&self) -> String {
        "keeper".into()
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        for request in 0..batch.requests.len() {
            let responder = outputs.detach(request)?;
            assert!(outputs.detach(request).is_err(), "the request already has a responder");
            let input = batch.received(0).unwrap();
            match self.what {
                What::Keep => self.kept.send((responder, input)).unwrap(),
                What::PassOn => responder.respond(passed_on(&input), true)?,
                What::PassOnAndKeep => {
                    responder.respond(passed_on(&input), true)?;
                    self.inputs.send(input).unwrap();
                }
            }
        }
        Ok(())
    }
}

/// The frontend's side.
struct Frontend {
    socket: FrontendEnd,
    inputs: SharedMemory,
    outputs: SharedMemory,
    runtime: Runtime,
    kept: Receiver<(Responder, Received)>,
    inputs_kept: Receiver<Received>,
    /// Permits the end of an executed batch, so that a test can act before.
    ends: mpsc::Sender<()>,
    /// Reports each executed batch, before its end.
    executed: Receiver<()>,
}

fn start(what: What, decoupled: bool) -> Frontend {
    let config = format!(
        "backend: 'keeper' model_transaction_policy {{ decoupled: {decoupled} }}
         input {{ name: 'IN' data_type: TYPE_UINT8 dims: -1 }} output {{ name: 'OUT' data_type: \
         TYPE_UINT8 dims: -1 }}"
    );
    let draft = Draft::from_text(&config, "config.pbtxt").unwrap();
    let config = draft.complete(&Completion { directory: "m", ..Completion::default() }).unwrap();
    let inputs = shm::create("inputs", BYTES).unwrap();
    let outputs = shm::create("outputs", BYTES).unwrap();
    let map = |memory| SharedMemory::map(memory, usize::try_from(BYTES).unwrap()).unwrap();
    let our_inputs = map(&inputs);
    let our_outputs = map(&outputs);
    let (ring, _) = channel::create(0).unwrap();
    let (_, wakeup) = rustix::pipe::pipe().unwrap();
    let regions = UnixStream::pair().unwrap().0.into();
    let (reader, sender, socket) = connection();
    socket.set_read_timeout(Duration::from_secs(10));
    let descriptors = SharedDescriptors { inputs, outputs, metrics: ring, wakeup, regions };
    let (runtime, regions) =
        crate::open(&load(config.encode()), reader, sender.clone(), descriptors, Cuda::new(None))
            .unwrap();
    let (kept, kept_by_test) = messages();
    let (inputs, inputs_kept) = messages();
    let (ends, ended) = mpsc::channel();
    let (executing, executed) = mpsc::channel();
    let main = runtime.clone();
    thread::spawn(move || {
        let mut instance = Instance::new(
            Box::new(Keeper { what, kept, inputs }),
            config,
            main.clone(),
            regions.clone(),
        );
        while let Ok(Some(frame)) = main.session().connection.receive() {
            let ToWorker::Execute(execute) = frame else { break };
            let Executed { done, kept, .. } = instance.execute(&execute);
            if executing.send(()).is_err() || ended.recv().is_err() {
                break;
            }
            sender.send(&ToFrontend::Done(done)).unwrap();
            drop(kept);
            main.session().connection.batch_announced(execute.batch);
        }
    });
    Frontend {
        socket,
        inputs: our_inputs,
        outputs: our_outputs,
        runtime,
        kept: kept_by_test,
        inputs_kept,
        ends,
        executed,
    }
}

impl Frontend {
    /// Executes the first batch, whose request the backend keeps; returns its responder and its
    /// input.
    fn kept_request(&mut self) -> (Responder, Received) {
        self.execute(1, b"x");
        assert_eq!(self.done().open, [0]);
        self.kept.recv().unwrap()
    }

    fn send(&mut self, frame: &ToWorker) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.socket.write_all(&bytes).unwrap();
    }

    fn read(&mut self) -> ToFrontend {
        let mut prefix = [0; PREFIX];
        self.socket.read_exact(&mut prefix).unwrap();
        let mut payload = vec![0; payload_length(prefix).unwrap()];
        self.socket.read_exact(&mut payload).unwrap();
        decode_to_frontend(&payload).unwrap()
    }

    /// Ends a batch, and returns its end.
    fn done(&mut self) -> Done {
        self.ends.send(()).unwrap();
        match self.read() {
            ToFrontend::Done(done) => done,
            other => panic!("{other:?}"),
        }
    }

    fn response(&mut self) -> pharos::wire::Response {
        match self.read() {
            ToFrontend::Response(response) => response,
            other => panic!("{other:?}"),
        }
    }

    fn output(&self, offset: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        assert!(self.outputs.copy_out(usize::try_from(offset).unwrap(), &mut bytes));
        bytes
    }

    /// Sends a batch of one request with this input.
    fn execute(&mut self, batch: u64, input: &[u8]) {
        self.execute_requests(batch, 1, input);
    }

    /// Sends a batch of `count` requests, all of which have this input.
    fn execute_requests(&mut self, batch: u64, count: usize, input: &[u8]) {
        let offset = flags::BYTES + 4096 * batch;
        assert!(self.inputs.copy_in(usize::try_from(offset).unwrap(), input));
        let len = input.len() as u64;
        let shape = vec![i64::try_from(len).unwrap()];
        let datatype = DataType::Uint8;
        let inputs =
            vec![InputBlock { input: 0, datatype, shape, offset, len, pieces: Vec::new() }];
        let requests = vec![BatchRequest { rows: 1, ..BatchRequest::default() }; count];
        let outputs = vec![];
        let released = vec![];
        let placements = vec![];
        let elements = vec![];
        let resumed = vec![];
        self.send(&ToWorker::Execute(Execute {
            batch,
            requests,
            inputs,
            outputs,
            released,
            flags: 0,
            placements,
            elements,
            resumed,
        }));
    }
}

#[test]
fn a_request_outlives_its_batch_and_is_answered_by_another_thread() {
    for decoupled in [false, true] {
        let mut frontend = start(What::Keep, decoupled);
        frontend.execute(1, b"first");
        let done = frontend.done();
        assert_eq!((done.open, done.held, done.outputs.len()), (vec![0], true, 0));
        // The instance takes its next batch meanwhile.
        frontend.execute(2, b"second");
        assert_eq!(frontend.done().open, [0]);
        let (first, input) = frontend.kept.recv().unwrap();
        let (second, _) = frontend.kept.recv().unwrap();
        assert_eq!(&*input, b"first");
        assert!(!first.ended() && !first.is_cancelled());
        let memory =
            |bytes: &[u8]| Memory::copy_of(&frontend.runtime.session().arenas, bytes).unwrap();
        let content = Content::Memory(memory(b"answer"));
        let shape = vec![6];
        let output = ReplyOutput { output: 0, datatype: DataType::Uint8, shape, content };
        first.respond(Reply { outputs: vec![output], ..Reply::default() }, true).unwrap();
        assert!(first.ended() && first.respond(Reply::default(), true).is_err());
        // The main thread returns the input that was not kept, and this thread answers, in any
        // order.
        let mut frames = [frontend.read(), frontend.read()];
        frames.sort_by_key(|frame| matches!(frame, ToFrontend::Response(_)));
        let [returned, ToFrontend::Response(response)] = frames else { panic!("{frames:?}") };
        assert_eq!(returned, ToFrontend::Returned(vec![2]), "the second input was not kept");
        assert_eq!((response.batch, response.request, response.last), (1, 0, true));
        let block = &response.outputs[0];
        assert_eq!(frontend.output(block.offset, block.len), b"answer");
        drop(input);
        assert_eq!(frontend.read(), ToFrontend::Returned(vec![1]));
        drop(second);
        let response = frontend.response();
        assert_eq!((response.batch, response.last), (2, true));
        assert!(response.error.unwrap().message.contains("released the request"));
    }
}

#[test]
fn an_answer_before_the_end_of_its_batch_is_sent_after_it() {
    let mut frontend = start(What::Keep, false);
    frontend.execute(1, b"x");
    let (responder, input) = frontend.kept.recv().unwrap();
    frontend.executed.recv().unwrap();
    let (responding, is_responding) = mpsc::channel();
    let sender = thread::spawn(move || {
        responding.send(()).unwrap();
        responder.respond(passed_on(&input), true)
    });
    is_responding.recv().unwrap();
    assert_eq!(frontend.done().open, [0]);
    assert_eq!(frontend.response().outputs.len(), 1);
    sender.join().unwrap().unwrap();
}

#[test]
fn an_input_is_passed_on_without_a_copy_unless_it_is_kept() {
    let mut frontend = start(What::PassOn, false);
    frontend.execute(1, b"hello");
    let done = frontend.done();
    let block = &done.outputs[0];
    assert_eq!((block.loan, block.offset, block.len), (Some(1), flags::BYTES + 4096, 5));
    assert_eq!((block.requests.as_slice(), done.held, done.open.len()), (&[0][..], false, 0));
    let mut frontend = start(What::PassOnAndKeep, false);
    frontend.execute(1, b"hello");
    let done = frontend.done();
    let block = done.outputs[0].clone();
    assert_eq!((block.loan, done.held), (None, true));
    assert_eq!(frontend.output(block.offset, block.len), b"hello");
    let input = frontend.inputs_kept.recv().unwrap();
    let address = input.as_ptr().addr();
    assert_eq!(frontend.runtime.locate(address + 1, 3).as_deref(), Some(&b"ell"[..]));
    assert!(
        frontend.runtime.locate(address, 6).is_none()
            && frontend.runtime.locate(address - 1, 2).is_none()
    );
    drop(input);
    assert_eq!(frontend.read(), ToFrontend::Returned(vec![1]));
    assert!(frontend.runtime.locate(address, 1).is_none());
}

#[test]
fn an_output_without_room_fails_its_own_request_only() {
    let mut frontend = start(What::PassOnAndKeep, false);
    let input = vec![7; usize::try_from(BYTES).unwrap() * 2 / 3];
    frontend.execute_requests(1, 2, &input);
    let done = frontend.done();
    let [block] = &done.outputs[..] else { panic!("{} outputs", done.outputs.len()) };
    assert_eq!((block.requests.as_slice(), block.loan), (&[0][..], None));
    assert!(frontend.output(block.offset, block.len) == input);
    let [(1, error)] = &done.failed[..] else { panic!("{:?}", done.failed) };
    assert!(error.message.contains("do not fit in the"), "{error:?}");
    assert!(done.error.is_none() && done.open.is_empty());
}

#[test]
fn a_detached_request_waits_for_its_client_and_can_be_cancelled() {
    let mut frontend = start(What::Keep, true);
    let (responder, input) = frontend.kept_request();
    let sender = thread::spawn(move || {
        let sent =
            (0..).take_while(|_| responder.respond(passed_on(&input), false).is_ok()).count();
        (sent, responder.is_cancelled(), responder.ended())
    });
    for _ in 0..CREDITS {
        assert!(!frontend.response().last);
    }
    let credits = pharos::wire::Credits { batch: 1, request: 0, taken: 2, released: Vec::new() };
    frontend.send(&ToWorker::Credits(credits));
    frontend.response();
    frontend.response();
    frontend.send(&ToWorker::CancelRequest(1, 0));
    assert_eq!(sender.join().unwrap(), (CREDITS as usize + 2, true, false));
}

#[test]
fn the_last_response_of_a_cancelled_request_ends_it() {
    let mut frontend = start(What::Keep, true);
    let (responder, input) = frontend.kept_request();
    for _ in 0..CREDITS {
        responder.respond(passed_on(&input), false).unwrap();
        assert!(!frontend.response().last);
    }
    frontend.send(&ToWorker::CancelRequest(1, 0));
    let refused = responder.respond(passed_on(&input), true).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Cancelled);
    let end = frontend.response();
    assert!(end.last && end.empty && responder.ended());
}

#[test]
fn content_too_long_for_a_message_is_refused_without_other_effects() {
    let mut frontend = start(What::Keep, false);
    let file = || vec![("file:1/model.bin".to_owned(), vec![0; pharos::wire::MAX_FRAME])];
    let refusal = frontend.runtime.load_model("m", file()).unwrap_err();
    assert!(refusal.message.contains("more than the 67108864 that fit"), "{refusal}");
    let request = CallRequest { id: "i".repeat(pharos::wire::MAX_FRAME), ..CallRequest::default() };
    let long = Call { request, ..Call::default() };
    assert_eq!(frontend.runtime.call(long).err().unwrap().code, ErrorCode::InvalidArg);
    let request = CallRequest { id: "i".into(), ..CallRequest::default() };
    let _pending = frontend.runtime.call(Call { request, ..Call::default() }).unwrap();
    assert!(matches!(frontend.read(), ToFrontend::Call(call) if call.request.id == "i"));
}

#[test]
fn calls_are_answered_whichever_thread_reads_and_their_loans_are_returned() {
    let mut frontend = start(What::Keep, false);
    let request = || CallRequest {
        model: "other".into(),
        id: "i".into(),
        decoupled: true,
        ..CallRequest::default()
    };
    let call = || Call { request: request(), ..Call::default() };
    let mut first = frontend.runtime.call(call()).unwrap();
    let mut second = frontend.runtime.call(call()).unwrap();
    let number = |frame| match frame {
        ToFrontend::Call(call) => call.call,
        other => panic!("{other:?}"),
    };
    let numbers = [number(frontend.read()), number(frontend.read())];
    let second = thread::spawn(move || second.next().unwrap().err().unwrap());
    assert!(frontend.inputs.copy_in(8192, b"data"));
    let output = AnswerOutput {
        name: "Y".into(),
        datatype: DataType::Uint8,
        shape: vec![4],
        offset: 8192,
        len: 4,
    };
    let answer = |call, loan| Answer { call, loan, version: "2".into(), ..Answer::default() };
    frontend.send(&ToWorker::Answer(Answer {
        outputs: vec![output],
        ..answer(numbers[0], FIRST_CALL_LOAN)
    }));
    let error = InferError::new(ErrorCode::NotFound, Reason::Backend, "no such model");
    let error = Some(wire_error(error));
    frontend.send(&ToWorker::Answer(Answer { error, last: true, ..answer(numbers[1], 0) }));
    assert_eq!(second.join().unwrap().message, "no such model");
    let called = first.next().unwrap().unwrap();
    assert_eq!(
        (called.version.as_str(), called.id.as_str(), &*called.outputs[0].data),
        ("2", "i", &b"data"[..])
    );
    assert_eq!(frontend.read(), ToFrontend::Taken(numbers[0], 1));
    drop(called);
    assert_eq!(frontend.read(), ToFrontend::Returned(vec![FIRST_CALL_LOAN]));
    drop(first);
    assert_eq!(frontend.read(), ToFrontend::CancelCall(numbers[0]));
    // A late answer is returned.
    frontend.send(&ToWorker::Answer(answer(numbers[0], FIRST_CALL_LOAN + 1)));
    assert_eq!(frontend.read(), ToFrontend::Returned(vec![FIRST_CALL_LOAN + 1]));
}

#[test]
fn a_response_with_a_duplicate_output_is_refused_and_the_request_stays_open() {
    let mut frontend = start(What::Keep, false);
    let (responder, input) = frontend.kept_request();
    let mut twice = passed_on(&input);
    twice.outputs.extend(passed_on(&input).outputs);
    let error = responder.respond(twice, true).unwrap_err();
    assert!(
        error.message.contains("output 0 is in the response twice") && !responder.ended(),
        "{error}"
    );
    responder.respond(passed_on(&input), true).unwrap();
    assert_eq!(frontend.response().outputs.len(), 1);
}

#[test]
fn readiness_is_answered_while_a_batch_is_executed() {
    let mut frontend = start(What::Keep, false);
    let (answers, received) = messages();
    frontend.runtime.answer_readiness(Box::new(move || received.recv().unwrap())).unwrap();
    // The batch waits until its end is permitted, and the readiness function waits for the test.
    frontend.execute(1, b"x");
    frontend.send(&ToWorker::CheckReadiness);
    answers.send(true).unwrap();
    assert_eq!(frontend.read(), ToFrontend::Ready(true));
    assert_eq!(frontend.done().open, [0]);
    answers.send(false).unwrap();
    frontend.send(&ToWorker::CheckReadiness);
    assert_eq!(frontend.read(), ToFrontend::Ready(false));
    // A panic counts as not ready, and the next query is answered.
    drop(answers);
    for _ in 0..2 {
        frontend.send(&ToWorker::CheckReadiness);
        assert_eq!(frontend.read(), ToFrontend::Ready(false));
    }
    frontend.execute(2, b"y");
    assert_eq!(frontend.done().open, [0]);
}
