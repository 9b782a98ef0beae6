//! The frames between the frontend and a worker, as bytes.
//!
//! A frame is a little-endian `u32` length followed by that many bytes of payload; the payload's first byte is the kind.
//! Tensor data never travels in frames: frames carry offsets into the shared-memory arenas, or into memory of clients that
//! [`regions`] has made known over a socket of its own. Both ends are built from
//! one source tree, so the encoding has no compatibility to keep beyond [`VERSION`], which the first frame carries.
//!
//! Decoding trusts nothing: every count is bounded by the bytes that are there, every number by its meaning.

mod calls;
mod codec;
pub mod regions;

use crate::error::{ErrorCode, InferError, Reason};
use crate::id::CorrelationId;
use crate::infer::Parameters;
use crate::tensor::DataType;
use crate::timeline::ComputeStamps;

pub use calls::{Answer, AnswerOutput, Call, CallInput, CallRequest, FIRST_LOAN, Manage, Verb};
pub use codec::{DecodeError, decode_to_frontend, decode_to_worker};

/// Changes with every change of the encoding. A worker of another version refuses to load.
pub const VERSION: u32 = 13;

/// The longest payload that either side accepts, in bytes. Frames carry no tensor data, so this bounds configurations and
/// lists of requests.
pub const MAX_FRAME: usize = 64 << 20;

/// Bytes of the length in front of each payload.
pub const PREFIX: usize = 4;

/// What the frontend tells a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum ToWorker {
    /// The first frame: what to run.
    Load(Load),
    /// Execute a batch.
    Execute(Execute),
    /// Blocks of the worker's output arena that nobody reads any more, by offset.
    Release(Vec<u64>),
    /// Finish and exit.
    Shutdown,
    /// Another text of `metrics.yaml` in place of that of [`Load::metrics`].
    Metrics(String),
    /// These sequences have ended without an END step, by [`SequenceStep::key`]: idle, cancelled, or given up.
    SequenceEnded(Vec<u64>),
    /// Responses of a decoupled model have been taken by their client.
    Credits(Credits),
    /// These regions, by number, are unregistered and used by nobody: they are to be unmapped.
    Forget(Vec<u64>),
    /// An answer to a [`Call`] or [`Manage`] of the worker's.
    Answer(Answer),
    /// Nobody waits any more for a request that goes on after its batch ([`Done::open`]): the batch, and the position in it.
    GivenUp(u64, u32),
    /// A client asks whether the model is ready: [`ToFrontend::Ready`] is to follow. Only for who has [`Loaded::asked`], and
    /// only when the answer to the question before has come.
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

/// A GPU, as an instance is told of it. The process sees it as device 0, whatever its number on the machine is.
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
    /// Which of the two rows of [`flags`] in the arena of the inputs tells which of these requests are given up.
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
    /// What else its client has said, for backends that want to know ([`Loaded::details`]).
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
    /// how often it is told. A sum that is known already only wakes a worker that waits, so that it looks at its [`flags`].
    pub taken: u64,
    /// As [`ToWorker::Release`], to save a frame.
    pub released: Vec<u64>,
}

/// What a worker tells the frontend.
#[derive(Clone, Debug, PartialEq)]
pub enum ToFrontend {
    /// The model is loaded; batches may come.
    Loaded(Loaded),
    /// The model cannot be loaded; the worker exits.
    LoadFailed(String),
    /// A batch is done.
    Done(Done),
    /// One response to a request that is answered on its own: of a decoupled model, or one that outlives its batch.
    Response(Response),
    /// The model wants another one to infer.
    Call(Call),
    /// The model wants something of the repository.
    Manage(Manage),
    /// So many of a call's answers have been taken, all in all: as many as [`CREDITS`] more may come.
    Taken(u64, u64),
    /// Nobody waits for the answers of this call any more.
    Abandoned(u64),
    /// Inputs that the worker kept ([`Done::held`], [`Answer::loan`]) are used by nobody any more: the batches or loans.
    Returned(Vec<u64>),
    /// What the model says to [`ToWorker::AskReady`].
    Ready(bool),
}

/// One of any number of responses to a request of a decoupled model, in the order in which they are to be read.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// The batch's number, from [`Execute::batch`].
    pub batch: u64,
    /// The request's position in it.
    pub request: u32,
    /// Its outputs, in the worker's arena.
    pub outputs: Vec<OutputBlock>,
    /// Its parameters.
    pub parameters: Parameters,
    /// It is an error.
    pub error: Option<WireError>,
    /// None of this request follows.
    pub last: bool,
    /// It says nothing but that it is the last.
    pub empty: bool,
    /// When the worker did what: the first two as for the batch, the others for this response.
    pub stamps: ComputeStamps,
}

/// What a worker tells about the instance it has loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// What executes the model, for logs and the served configuration, for example `onnxruntime 1.31.1`.
    pub engine: String,
    /// What loading has added to the resident memory of the process, bytes.
    pub memory: u64,
    /// Its batches are to have [`BatchRequest::details`].
    pub details: bool,
    /// The model is to be asked whether it is ready.
    pub asked: bool,
    /// Bytes of its arenas that it has registered with the driver of its GPU.
    pub pinned: u64,
}

/// The outcome of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// The batch's number, from [`Execute::batch`].
    pub batch: u64,
    /// When the worker did what.
    pub stamps: ComputeStamps,
    /// The whole batch failed.
    pub error: Option<WireError>,
    /// Single requests that failed, by position in the batch.
    pub failed: Vec<(u32, WireError)>,
    /// Outputs over all requests, in the worker's arena.
    pub outputs: Vec<OutputBlock>,
    /// Parameters of the responses that have any, by position in the batch.
    pub parameters: Vec<(u32, Parameters)>,
    /// Requests that are to be executed once more, by position in the batch, ascending: iterative sequences.
    pub rescheduled: Vec<u32>,
    /// Requests that go on, by position in the batch, ascending: each is answered by [`Response`]s to come.
    pub open: Vec<u32>,
    /// The inputs are still in use: their memory is to be left alone until [`ToFrontend::Returned`] names the batch.
    pub held: bool,
}

/// An error as it crosses the wire.
#[derive(Clone, Debug, PartialEq)]
pub struct WireError {
    /// What the client is told.
    pub code: ErrorCode,
    /// The text.
    pub message: String,
    /// It is about memory of the client's.
    pub of_region: bool,
}

impl From<WireError> for InferError {
    fn from(error: WireError) -> Self {
        let reason = match error.code {
            _ if error.of_region => Reason::SharedMemory,
            ErrorCode::Cancelled => Reason::Cancelled,
            _ => Reason::Backend,
        };
        let message = match error.code {
            // A worker that gives up a request that its client has cancelled has nothing to say.
            ErrorCode::Cancelled => error.message,
            _ => said(error.message),
        };
        InferError::new(error.code, reason, message)
    }
}

/// A message of a worker's for clients. An empty one would leave them without any.
pub fn said(message: String) -> String {
    match message.trim().is_empty() {
        true => "the model reported an error without a message".to_owned(),
        false => message,
    }
}

impl From<InferError> for WireError {
    fn from(error: InferError) -> Self {
        let of_region = error.reason == Reason::SharedMemory;
        Self { code: error.code, message: error.message, of_region }
    }
}

/// An output of a batch in the worker's arena, or in the client's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputBlock {
    /// Position in the configuration's outputs.
    pub output: u16,
    /// The requests that it is for, by their positions in the batch, ascending; empty for all. A batch whose states differ
    /// in shape is executed in parts, each of which gives an output of its own.
    pub requests: Vec<u32>,
    /// What the elements are.
    pub datatype: DataType,
    /// The shape of all these requests together, as the model gave it.
    pub shape: Vec<i64>,
    /// First byte in the arena; also the name under which it is released.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// It is nowhere in the arena: it is of one request and is where that one's [`Placement`] says.
    pub placed: bool,
    /// It is an input that is passed on: `offset` is in the arena of the inputs, within what this batch or loan has there.
    /// In a [`Done`] only.
    pub lent: Option<u64>,
}

/// The length of the payload behind these prefix bytes.
///
/// # Errors
/// A length of 0 or over [`MAX_FRAME`].
pub fn payload_length(prefix: [u8; PREFIX]) -> Result<usize, DecodeError> {
    let length = u32::from_le_bytes(prefix) as usize;
    if length == 0 || length > MAX_FRAME {
        return Err(DecodeError::new("frame length", length as u64));
    }
    Ok(length)
}

/// Where the frontend says, while a worker executes a batch, which of its requests nobody waits for any more: a bit for
/// each request, in 64-bit words at the start of the arena of the inputs, which are accessed as atomics only. There is a
/// row for each of the two batches that an instance may hold; a row is zero when a batch is sent.
pub mod flags {
    /// Rows.
    pub const ROWS: u8 = 2;
    /// Words in a row.
    pub const WORDS: usize = 32;
    /// Bytes at the start of the arena.
    pub const BYTES: u64 = ROWS as u64 * WORDS as u64 * 8;

    /// The words of a row, as a range over those at the start of the arena.
    pub fn row(row: u8) -> std::ops::Range<usize> {
        let start = usize::from(row) * WORDS;
        start..start + WORDS
    }

    /// The word and the bit for a request, by its position in the batch. `None` for one beyond the row, which is always
    /// executed to the end.
    pub fn bit(row: u8, position: usize) -> Option<(usize, u64)> {
        let word = self::row(row).nth(position / 64)?;
        (row < ROWS).then_some((word, 1 << (position % 64)))
    }
}

/// The descriptors that a worker process inherits, by number.
pub mod descriptors {
    /// A connected Unix stream socket that carries the frames.
    pub const SOCKET: i32 = 3;
    /// The arena of the inputs, written by the frontend.
    pub const INPUTS: i32 = 4;
    /// The arena of the outputs, written by the worker.
    pub const OUTPUTS: i32 = 5;
    /// The ring of metric samples, written by the worker.
    pub const METRICS: i32 = 6;
    /// A pipe into which the worker writes a byte when the ring should be read soon.
    pub const BELL: i32 = 7;
    /// A connected Unix socket for sequences of packets, over which memory of clients is made known.
    pub const REGIONS: i32 = 8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_a_message() {
        for (sent, told) in
            [("", "the model reported an error without a message"), ("no", "no"), (" \n", "the model reported")]
        {
            let error = WireError { code: ErrorCode::Internal, message: sent.to_owned(), of_region: false };
            assert!(InferError::from(error).message.starts_with(told), "{sent:?}");
        }
        assert_eq!(InferError::from(WireError::from(InferError::cancelled())), InferError::cancelled());
    }
}
