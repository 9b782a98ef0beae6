//! The frames from a worker to the frontend.

use super::calls::{Call, Manage};
use super::codec::{DecodeError, Result, Wire, fields, framed, whole};
use super::error::WireError;
use crate::infer::Parameters;
use crate::tensor::DataType;
use crate::timeline::{ComputeStamps, Instant};

/// A message of a worker to the frontend.
#[derive(Clone, Debug, PartialEq)]
pub enum ToFrontend {
    /// The model is loaded; batches may be sent.
    Loaded(Loaded),
    /// The model cannot be loaded; the worker exits.
    LoadFailed(String),
    /// The outcome of a batch.
    Done(Done),
    /// One response to a request that is answered separately from its batch: a request of a
    /// decoupled model, or a deferred one.
    Response(Response),
    /// A request of the model to another model.
    Call(Call),
    /// A request of the model to the repository.
    Manage(Manage),
    /// A call, and the number of its answers that the model has taken so far:
    /// [`CREDITS`](super::CREDITS) more may follow.
    Taken(u64, u64),
    /// The model no longer needs the answers of this call.
    CancelCall(u64),
    /// Batches or loans whose inputs the worker kept ([`Done::held`],
    /// [`Answer::loan`](super::Answer::loan)) and has released.
    Returned(Vec<u64>),
    /// Regions whose descriptors the worker could not receive: they must be announced again before
    /// they can be used.
    RegionsLost(Vec<u64>),
    /// The answer of the model to [`ToWorker::CheckReadiness`](super::ToWorker::CheckReadiness).
    Ready(bool),
    /// How much of the model is loaded, in percent: 0 to 100. Sent before [`Self::Loaded`], each
    /// percent at most once.
    LoadProgress(u8),
    /// What a backend reports for the trace of a request.
    Activity(BackendActivity),
}

/// A point of the processing of a traced request that its backend reports.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendActivity {
    /// The batch's number, from [`Execute::batch`](super::Execute::batch).
    pub batch: u64,
    /// The request's position in it.
    pub request: u32,
    /// Its name, at most [`MAX_ACTIVITY_NAME`] bytes.
    pub name: String,
    /// Its time.
    pub at: Instant,
}

/// The maximum length of the name of a [`BackendActivity`], bytes.
pub const MAX_ACTIVITY_NAME: usize = 256;

/// One of any number of responses to a request of a decoupled model, in the order for the client.
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
    /// The error, if the response is one.
    pub error: Option<WireError>,
    /// Whether it is the last of the request.
    pub last: bool,
    /// Whether it has no content and only marks the end.
    pub empty: bool,
    /// The worker's stamps: the first two belong to the batch, the others to this response.
    pub stamps: ComputeStamps,
}

/// Facts about the instance that the worker has loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The engine that executes the model, for logs and the served configuration, for example
    /// `onnxruntime 1.31.1`.
    pub engine: String,
    /// The growth of the process's resident memory during the load, bytes.
    pub memory: u64,
    /// Whether its batches need [`details`](super::BatchRequest::details).
    pub details: bool,
    /// Whether the model has a readiness check
    /// ([`ToWorker::CheckReadiness`](super::ToWorker::CheckReadiness)).
    pub has_readiness_check: bool,
    /// Bytes of its arenas that it has registered with the driver of its GPU.
    pub pinned: u64,
}

/// The outcome of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Done {
    /// The batch's number, from [`Execute::batch`](super::Execute::batch).
    pub batch: u64,
    /// The worker's stamps.
    pub stamps: ComputeStamps,
    /// The error, if the whole batch failed.
    pub error: Option<WireError>,
    /// Single requests that failed, by position in the batch.
    pub failed: Vec<(u32, WireError)>,
    /// Outputs over all requests, in the worker's arena.
    pub outputs: Vec<OutputBlock>,
    /// Parameters of the responses that have any, by position in the batch.
    pub parameters: Vec<(u32, Parameters)>,
    /// Requests to execute once more (iterative sequences), by position in the batch, ascending.
    pub rescheduled: Vec<u32>,
    /// Requests that continue after the batch, by position in the batch, ascending: later
    /// [`Response`]s answer them.
    pub open: Vec<u32>,
    /// Whether the worker still uses the inputs: their memory must not be reused until
    /// [`ToFrontend::Returned`] names the batch.
    pub held: bool,
}

/// An output of a batch in the worker's arena, or in the client's memory.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputBlock {
    /// Position in the configuration's outputs.
    pub output: u16,
    /// The positions in the batch of the requests that it belongs to, ascending; empty for all. A
    /// batch whose states differ in shape is executed in parts, and each part gives a separate
    /// output.
    pub requests: Vec<u32>,
    /// The datatype of the elements.
    pub datatype: DataType,
    /// The shape over all these requests, as the model returned it.
    pub shape: Vec<i64>,
    /// First byte in the arena, which also identifies the block for its release.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Whether it is in the memory of the [`Placement`](super::Placement) of its only request, not
    /// in the arena.
    pub in_client_memory: bool,
    /// The batch or loan that contains it, if an input is passed on: `offset` is then in the input
    /// arena. Only in a [`Done`].
    pub loan: Option<u64>,
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
            Self::CancelCall(call) => {
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
            Self::RegionsLost(regions) => {
                out.push(11);
                regions.put(out);
            }
            Self::LoadProgress(percent) => {
                out.push(12);
                percent.put(out);
            }
            Self::Activity(activity) => {
                out.push(13);
                activity.put(out);
            }
        });
    }
}

/// Reads one payload that a worker sent.
///
/// # Errors
/// The payload is not exactly one well-formed frame.
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
            8 => ToFrontend::CancelCall(Wire::get(input)?),
            9 => ToFrontend::Returned(Wire::get(input)?),
            10 => ToFrontend::Ready(Wire::get(input)?),
            11 => ToFrontend::RegionsLost(Wire::get(input)?),
            12 => ToFrontend::LoadProgress(Wire::get(input)?),
            13 => ToFrontend::Activity(Wire::get(input)?),
            kind => return Err(DecodeError::new("frame kind", kind.into())),
        })
    })
}

fields!(BackendActivity { batch, request, name, at });
fields!(Loaded { engine, memory, details, has_readiness_check, pinned });
fields!(Done { batch, stamps, error, failed, outputs, parameters, rescheduled, open, held });
fields!(Response { batch, request, outputs, parameters, error, last, empty, stamps });
fields!(OutputBlock { output, requests, datatype, shape, offset, len, in_client_memory, loan });
