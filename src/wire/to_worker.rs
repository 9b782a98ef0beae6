//! The frames of the frontend to a worker.

use super::VERSION;
use super::calls::Answer;
use super::codec::{DecodeError, Result, Wire, fields, framed, whole};
use crate::id::CorrelationId;
use crate::infer::Parameters;
use crate::tensor::DataType;

/// What the frontend tells a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum ToWorker {
    /// The first frame: what to run.
    Load(Load),
    /// Execute a batch.
    Execute(Execute),
    /// Blocks of the worker's output arena, by offset, that the frontend has finished reading.
    Release(Vec<u64>),
    /// Finish and exit.
    Shutdown,
    /// Another text of `metrics.yaml` in place of that of [`Load::metrics`].
    Metrics(String),
    /// These sequences have ended without an END step, by [`SequenceStep::key`]: idle, cancelled, or given up.
    SequenceEnded(Vec<u64>),
    /// Responses of a decoupled model have been taken by their client.
    Credits(Credits),
    /// Regions, by number, that are unregistered and no longer in use: the worker unmaps them.
    Forget(Vec<u64>),
    /// An answer to a [`Call`](super::Call) or [`Manage`](super::Manage) of the worker's.
    Answer(Answer),
    /// A request that goes on after its batch ([`Done::open`](super::Done::open)) is abandoned: the batch, and the position
    /// in it.
    GivenUp(u64, u32),
    /// A client asks whether the model is ready: [`ToFrontend::Ready`](super::ToFrontend::Ready) is to follow. Sent only to
    /// workers with [`Loaded::asked`](super::Loaded::asked), and only after the answer to the previous one.
    AskReady,
}

/// The model instance that a worker process runs.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Load {
    /// [`VERSION`] of the sender.
    pub wire_version: u32,
    /// The model's name.
    pub model: String,
    /// The model's version.
    pub version: u64,
    /// The instance's name, for messages.
    pub instance: String,
    /// The directory of the version, with the model's files.
    pub directory: String,
    /// The checked configuration, in protobuf.
    pub config: Vec<u8>,
    /// The directory with the files of the states' first values.
    pub initial_states: String,
    /// Threads that one execution may use.
    pub threads: u32,
    /// The text of `metrics.yaml`, which says what the model may record.
    pub metrics: String,
    /// Whether the model may record metrics that are not defined there.
    pub auto_detect: bool,
    /// The GPU that the instance runs on, if on one.
    pub device: Option<Device>,
}

/// The GPU of an instance. The process sees it as device 0, whatever its number on the machine is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// Its number on the machine, for messages and metrics.
    pub number: u32,
    /// Its UUID, or that of the MIG device on it.
    pub uuid: String,
    /// The numbers on the machine of all devices that the process sees, in its order: device 0 is `number`.
    pub visible: Vec<u32>,
    /// Bytes at the beginning of each arena that the process is to register with the driver, so that copies from and to
    /// them are direct.
    pub pinned: u64,
}

/// One batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Execute {
    /// Number of the batch, unique within the connection.
    pub batch: u64,
    /// The requests, in batch order.
    pub requests: Vec<BatchRequest>,
    /// The inputs that are given, each contiguous over all requests.
    pub inputs: Vec<InputBlock>,
    /// The outputs that any request wants, as positions in the configuration; empty means all.
    pub outputs: Vec<u16>,
    /// As [`ToWorker::Release`], to save a frame.
    pub released: Vec<u64>,
    /// The row of [`flags`](super::flags), in the arena of the inputs, that marks the abandoned requests of this batch.
    pub flags: u8,
    /// Outputs that go into memory of clients.
    pub placements: Vec<Placement>,
    /// For outputs of `placements` that are not cut by rows: the output, and how many elements of it each request has.
    pub elements: Vec<(u16, Vec<u64>)>,
    /// The requests that have had responses of a decoupled model in an earlier batch and were rescheduled.
    pub resumed: Vec<Resumed>,
}

/// An output of one request that goes into the client's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The request's position in the batch.
    pub request: u32,
    /// Position in the configuration's outputs.
    pub output: u16,
    /// The region's number.
    pub region: u64,
    /// First byte in the region.
    pub offset: u64,
    /// Bytes that there is room for.
    pub len: u64,
}

/// How far the responses of a rescheduled request are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The request's position in the batch.
    pub request: u32,
    /// Responses that were sent and need [`Credits`].
    pub sent: u64,
    /// How many of them its client has taken.
    pub taken: u64,
}

/// One request of a batch, as a worker sees it.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct BatchRequest {
    /// The client's id; may be empty.
    pub id: String,
    /// Rows of the batch that belong to this request; 1 for a model that does not batch.
    pub rows: u32,
    /// The request's free parameters.
    pub parameters: Parameters,
    /// The step of a sequence that it is, for a model with sequences.
    pub sequence: Option<SequenceStep>,
    /// What else its client has said, for backends that want to know ([`Loaded::details`](super::Loaded::details)).
    pub details: Option<Box<Details>>,
}

/// What few backends look at.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Details {
    /// `sequence_id`, for models without sequences too.
    pub correlation: CorrelationId,
    /// `sequence_start`.
    pub start: bool,
    /// `sequence_end`.
    pub end: bool,
    /// `priority`; 0 for the model's default.
    pub priority: u64,
    /// `timeout`, microseconds; 0 for none.
    pub timeout_us: u64,
    /// The outputs that are asked for, as positions in the configuration; empty for all.
    pub outputs: Vec<u16>,
    /// It is traced.
    pub traced: bool,
    /// The context of its trace for other tracers, as JSON, if the trace goes to a collector.
    pub trace_context: Option<String>,
    /// The shapes of its inputs that may be ragged, by position in the configuration: their batch has one dimension.
    pub ragged: Vec<(u16, Vec<i64>)>,
}

/// A request as a step of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceStep {
    /// The sequence's number, unique for the life of the frontend: the same correlation id used again is another one.
    pub key: u64,
    /// Nothing of it was executed before: its state is the initial one.
    pub start: bool,
    /// Nothing of it comes after: its state is dropped.
    pub end: bool,
}

/// An input of a batch in the frontend's arena.
#[derive(Clone, Debug, PartialEq)]
pub struct InputBlock {
    /// Position in the configuration's inputs; beyond them, in the targets of its batch inputs, then its control inputs.
    pub input: u16,
    /// What the elements are.
    pub datatype: DataType,
    /// The shape of the whole batch, as the model sees it.
    pub shape: Vec<i64>,
    /// First byte in the arena.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// If any of it is in memory of a client: all of it, in batch order. Else empty, and it is contiguous in the arena.
    pub pieces: Vec<Piece>,
}

/// A part of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of the region that it is in; 0 for the arena.
    pub region: u64,
    /// The position in the batch of the request that it belongs to.
    pub request: u32,
    /// First byte in the region or the arena.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// How many elements they are to be.
    pub elements: u64,
}

/// The most responses of one request that a worker may have sent and that its client has not taken yet, so that a slow
/// reader costs bounded memory. What only ends a request (an empty final response, an error) is not counted.
pub const CREDITS: u32 = 32;

/// How many responses of a request its client has taken: so many more may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credits {
    /// The batch's number. One that is over is meant no more.
    pub batch: u64,
    /// The request's position in it.
    pub request: u32,
    /// How many of its responses its client has taken so far, in earlier batches too: a sum, so that it does not matter
    /// how often it is sent. A sum that is known already only wakes a waiting worker, so that it reads its
    /// [`flags`](super::flags).
    pub taken: u64,
    /// As [`ToWorker::Release`], to save a frame.
    pub released: Vec<u64>,
}

impl ToWorker {
    /// Appends the frame, length included, to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        framed(out, |out| match self {
            Self::Load(load) => {
                out.push(1);
                load.put(out);
            }
            Self::Execute(execute) => {
                out.push(2);
                execute.put(out);
            }
            Self::Release(offsets) => {
                out.push(3);
                offsets.put(out);
            }
            Self::Shutdown => out.push(4),
            Self::Metrics(text) => {
                out.push(5);
                text.put(out);
            }
            Self::SequenceEnded(keys) => {
                out.push(6);
                keys.put(out);
            }
            Self::Credits(credits) => {
                out.push(7);
                credits.put(out);
            }
            Self::Forget(regions) => {
                out.push(8);
                regions.put(out);
            }
            Self::Answer(answer) => {
                out.push(9);
                answer.put(out);
            }
            Self::GivenUp(batch, request) => {
                out.push(10);
                (*batch, *request).put(out);
            }
            Self::AskReady => out.push(11),
        });
    }
}

/// Reads one payload that the frontend sent.
///
/// # Errors
/// Anything that is not exactly one well-formed frame.
pub fn decode_to_worker(payload: &[u8]) -> Result<ToWorker> {
    whole(payload, |input| {
        Ok(match u8::get(input)? {
            1 => ToWorker::Load(load(input)?),
            2 => ToWorker::Execute(Wire::get(input)?),
            3 => ToWorker::Release(Wire::get(input)?),
            4 => ToWorker::Shutdown,
            5 => ToWorker::Metrics(Wire::get(input)?),
            6 => ToWorker::SequenceEnded(Wire::get(input)?),
            7 => ToWorker::Credits(Wire::get(input)?),
            8 => ToWorker::Forget(Wire::get(input)?),
            9 => ToWorker::Answer(Wire::get(input)?),
            10 => {
                let (batch, request) = Wire::get(input)?;
                ToWorker::GivenUp(batch, request)
            }
            11 => ToWorker::AskReady,
            kind => return Err(DecodeError::new("frame kind", kind.into())),
        })
    })
}

/// A frame of another version gives its version only, so that the reader can report it.
fn load(input: &mut &[u8]) -> Result<Load> {
    let wire_version = u32::get(&mut &**input)?;
    if wire_version == VERSION {
        return Wire::get(input);
    }
    *input = &[];
    Ok(Load { wire_version, ..Load::default() })
}

fields!(Load {
    wire_version,
    model,
    version,
    instance,
    directory,
    config,
    initial_states,
    threads,
    metrics,
    auto_detect,
    device
});
fields!(Device { number, uuid, visible, pinned });
fields!(Execute { batch, requests, inputs, outputs, released, flags, placements, elements, resumed });
fields!(Placement { request, output, region, offset, len });
fields!(Resumed { request, sent, taken });
fields!(BatchRequest { id, rows, parameters, sequence, details });
fields!(Details { correlation, start, end, priority, timeout_us, outputs, traced, trace_context, ragged });
fields!(SequenceStep { key, start, end });
fields!(InputBlock { input, datatype, shape, offset, len, pieces });
fields!(Piece { region, request, offset, len, elements });
fields!(Credits { batch, request, taken, released });
