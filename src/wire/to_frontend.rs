//! The frames of a worker to the frontend.

use super::calls::{Call, Manage};
use super::codec::{DecodeError, Result, Wire, fields, framed, whole};
use super::error::WireError;
use crate::infer::Parameters;
use crate::tensor::DataType;
use crate::timeline::ComputeStamps;

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
    /// So many of a call's answers have been taken, all in all: as many as [`CREDITS`](super::CREDITS) more may come.
    Taken(u64, u64),
    /// The answers of this call are no longer wanted.
    Abandoned(u64),
    /// Inputs that the worker kept ([`Done::held`], [`Answer::loan`](super::Answer::loan)) are free again: the batches or
    /// loans.
    Returned(Vec<u64>),
    /// What the model says to [`ToWorker::AskReady`](super::ToWorker::AskReady).
    Ready(bool),
}

/// One of any number of responses to a request of a decoupled model, in the order in which they are to be read.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// The batch's number, from [`Execute::batch`](super::Execute::batch).
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
    /// Its batches are to have [`details`](super::BatchRequest::details).
    pub details: bool,
    /// The model is to be asked whether it is ready.
    pub asked: bool,
    /// Bytes of its arenas that it has registered with the driver of its GPU.
    pub pinned: u64,
}

/// The outcome of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// The batch's number, from [`Execute::batch`](super::Execute::batch).
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

/// An output of a batch in the worker's arena, or in the client's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputBlock {
    /// Position in the configuration's outputs.
    pub output: u16,
    /// The requests that it is for, by their positions in the batch, ascending; empty for all. A batch whose states differ
    /// in shape is executed in parts, each of which gives a separate output.
    pub requests: Vec<u32>,
    /// What the elements are.
    pub datatype: DataType,
    /// The shape of all these requests together, as the model gave it.
    pub shape: Vec<i64>,
    /// First byte in the arena; also the name under which it is released.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// It is nowhere in the arena: it is of one request and is where that one's [`Placement`](super::Placement) says.
    pub placed: bool,
    /// It is an input that is passed on: `offset` is in the arena of the inputs, within what this batch or loan has there.
    /// In a [`Done`] only.
    pub lent: Option<u64>,
}

impl ToFrontend {
    /// Appends the frame, length included, to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        framed(out, |out| match self {
            Self::Loaded(loaded) => {
                out.push(1);
                loaded.put(out);
            }
            Self::LoadFailed(message) => {
                out.push(2);
                message.put(out);
            }
            Self::Done(done) => {
                out.push(3);
                done.put(out);
            }
            Self::Response(response) => {
                out.push(4);
                response.put(out);
            }
            Self::Call(call) => {
                out.push(5);
                call.put(out);
            }
            Self::Manage(manage) => {
                out.push(6);
                manage.put(out);
            }
            Self::Taken(call, taken) => {
                out.push(7);
                (*call, *taken).put(out);
            }
            Self::Abandoned(call) => {
                out.push(8);
                call.put(out);
            }
            Self::Returned(loans) => {
                out.push(9);
                loans.put(out);
            }
            Self::Ready(ready) => {
                out.push(10);
                ready.put(out);
            }
        });
    }
}

/// Reads one payload that a worker sent.
///
/// # Errors
/// Anything that is not exactly one well-formed frame.
pub fn decode_to_frontend(payload: &[u8]) -> Result<ToFrontend> {
    whole(payload, |input| {
        Ok(match u8::get(input)? {
            1 => ToFrontend::Loaded(Wire::get(input)?),
            2 => ToFrontend::LoadFailed(Wire::get(input)?),
            3 => ToFrontend::Done(Wire::get(input)?),
            4 => ToFrontend::Response(Wire::get(input)?),
            5 => ToFrontend::Call(Wire::get(input)?),
            6 => ToFrontend::Manage(Wire::get(input)?),
            7 => {
                let (call, taken) = Wire::get(input)?;
                ToFrontend::Taken(call, taken)
            }
            8 => ToFrontend::Abandoned(Wire::get(input)?),
            9 => ToFrontend::Returned(Wire::get(input)?),
            10 => ToFrontend::Ready(Wire::get(input)?),
            kind => return Err(DecodeError::new("frame kind", kind.into())),
        })
    })
}

fields!(Loaded { engine, memory, details, asked, pinned });
fields!(Done { batch, stamps, error, failed, outputs, parameters, rescheduled, open, held });
fields!(Response { batch, request, outputs, parameters, error, last, empty, stamps });
fields!(OutputBlock { output, requests, datatype, shape, offset, len, placed, lent });
