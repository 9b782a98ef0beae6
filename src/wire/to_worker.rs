//! The frames from the frontend to a worker.

use super::VERSION;
use super::calls::Answer;
use super::codec::{DecodeError, Result, Wire, fields, framed, whole};
use crate::id::CorrelationId;
use crate::infer::Parameters;
use crate::tensor::DataType;

/// A message of the frontend to a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum ToWorker {
    /// The first frame: the instance to run.
    Load(Load),
    /// Execute a batch.
    Execute(Execute),
    /// Blocks of the output arena, by offset, that the frontend no longer reads.
    Release(Vec<u64>),
    /// Complete the current work and exit.
    Shutdown,
    /// New definitions of metrics that replace [`Load::metrics`].
    Metrics(String),
    /// Sequences that ended without an END step (idle, cancelled or abandoned), by
    /// [`SequenceStep::key`].
    SequenceEnded(Vec<u64>),
    /// The client of a decoupled model has taken responses.
    Credits(Credits),
    /// Regions, by number, that are unregistered and no longer in use: the worker unmaps them.
    Unmap(Vec<u64>),
    /// An answer to a [`Call`](super::Call) or [`Manage`](super::Manage) of the worker.
    Answer(Answer),
    /// The batch and the position in it of a deferred request ([`Done::open`](super::Done::open))
    /// that was abandoned.
    CancelRequest(u64, u32),
    /// Requests [`ToFrontend::Ready`](super::ToFrontend::Ready). Sent only to workers with
    /// [`Loaded::has_readiness_check`](super::Loaded::has_readiness_check), and only after the
    /// answer to the previous one.
    CheckReadiness,
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
    /// The directory of the model, with its versions.
    pub model_directory: String,
    /// The settings of `--backend-config` for this backend and for all backends.
    pub backend_settings: Vec<(String, String)>,
    /// Whether the log shows verbose lines.
    pub verbose: bool,
    /// The checked configuration, in protobuf.
    pub config: Vec<u8>,
    /// The directory with the initial values of the states.
    pub initial_states: String,
    /// The maximum number of threads of one execution.
    pub threads: u32,
    /// The longest time in microseconds that the worker looks for its next frame before it sleeps;
    /// 0 to sleep at once.
    pub spin_us: u32,
    /// The metrics that `metrics.yaml` defines, as
    /// [`WorkerMetrics::encode`](crate::metrics::worker_metrics::WorkerMetrics::encode)
    /// returns them.
    pub metrics: String,
    /// Whether the model may record metrics that are not defined there.
    pub auto_detect: bool,
    /// The GPU of the instance, if it uses one.
    pub device: Option<Device>,
}

/// The GPU of an instance. The process sees it as device 0, independent of its number on the
/// machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Device {
    /// The number on the machine, for messages and metrics.
    pub number: u32,
    /// The UUID of the GPU or of the MIG device on it.
    pub uuid: String,
    /// The numbers on the machine of all devices that the process sees, in its order; the first is
    /// `number`.
    pub visible: Vec<u32>,
    /// Bytes at the start of each arena that the process registers with the driver, so that copies
    /// from and to them are direct.
    pub pinned: u64,
}

/// One batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Execute {
    /// Number of the batch, unique within the connection.
    pub batch: u64,
    /// The requests, in batch order.
    pub requests: Vec<BatchRequest>,
    /// The given inputs, each contiguous over all requests.
    pub inputs: Vec<InputBlock>,
    /// The outputs that any request needs, as positions in the configuration; empty means all.
    pub outputs: Vec<u16>,
    /// The same as [`ToWorker::Release`], without a separate frame.
    pub released: Vec<u64>,
    /// The row of [`flags`](super::flags) that marks the abandoned requests of this batch.
    pub flags: u8,
    /// Outputs that the worker writes into client memory.
    pub placements: Vec<Placement>,
    /// For outputs of `placements` that are not split by rows: the output, and the number of its
    /// elements for each request.
    pub elements: Vec<(u16, Vec<u64>)>,
    /// Rescheduled requests of a decoupled model that already have responses from an earlier
    /// batch.
    pub resumed: Vec<Resumed>,
}

/// An output of one request that the worker writes into client memory.
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
    /// The capacity in bytes.
    pub len: u64,
}

/// The progress of the responses of a rescheduled request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resumed {
    /// The request's position in the batch.
    pub request: u32,
    /// The number of responses sent that need [`Credits`].
    pub sent: u64,
    /// The number of them that the client has taken.
    pub taken: u64,
}

/// One request of a batch.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct BatchRequest {
    /// The client's id; may be empty.
    pub id: String,
    /// Rows of the batch that belong to this request; 1 for a model that does not batch.
    pub rows: u32,
    /// The request's free parameters.
    pub parameters: Parameters,
    /// The step of a sequence, for a model with sequences.
    pub sequence: Option<SequenceStep>,
    /// Further parameters of the client, for backends that need them
    /// ([`Loaded::details`](super::Loaded::details)). `None` also if all have their defaults.
    pub details: Option<Box<Details>>,
}

/// Parameters of a request that few backends need.
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
    /// The requested outputs, as positions in the configuration; empty for all.
    pub outputs: Vec<u16>,
    /// The client's order of the inputs, as positions in the configuration; empty if that is the
    /// order of the configuration.
    pub input_order: Vec<u16>,
    /// Whether the request is traced.
    pub traced: bool,
    /// The trace context for other tracers, as JSON, if a collector receives the trace.
    pub trace_context: Option<String>,
    /// The shapes of its ragged inputs, by position in the configuration: the batch has one
    /// dimension.
    pub ragged: Vec<(u16, Vec<i64>)>,
}

/// The step of a sequence that a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceStep {
    /// The number of the sequence, unique during the life of the frontend: a correlation id that
    /// is used again gets another.
    pub key: u64,
    /// Whether it is the first step: its state is the initial one.
    pub start: bool,
    /// Whether it is the last step: its state is dropped.
    pub end: bool,
}

/// An input of a batch in the frontend's arena.
#[derive(Clone, Debug, PartialEq)]
pub struct InputBlock {
    /// Position in the configuration's inputs; higher numbers are the targets of its batch inputs,
    /// then its control inputs.
    pub input: u16,
    /// The datatype of the elements.
    pub datatype: DataType,
    /// The shape of the whole batch, as the model sees it.
    pub shape: Vec<i64>,
    /// First byte in the arena.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// All parts of the input in batch order, if any is in client memory; empty if the input is
    /// contiguous in the arena.
    pub pieces: Vec<Piece>,
}

/// A part of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of the region; 0 for the arena.
    pub region: u64,
    /// The position of its request in the batch.
    pub request: u32,
    /// First byte in the region or the arena.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The number of elements.
    pub elements: u64,
}

/// The maximum number of responses of one request that a worker may have sent and the client has
/// not taken, so that a slow reader uses bounded memory. An empty final response or an error that
/// ends the request does not count.
pub const CREDITS: u32 = 32;

/// The number of responses of a request that the client has taken: the worker may send that many
/// more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credits {
    /// The batch's number. Credits for a batch that is over have no effect.
    pub batch: u64,
    /// The request's position in it.
    pub request: u32,
    /// The total number of responses that the client has taken, earlier batches included, so that
    /// repeated frames do no harm. An unchanged total only wakes a waiting worker, which then
    /// reads its [`flags`](super::flags).
    pub taken: u64,
    /// The same as [`ToWorker::Release`], without a separate frame.
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
            Self::Unmap(regions) => {
                out.push(8);
                regions.put(out);
            }
            Self::Answer(answer) => {
                out.push(9);
                answer.put(out);
            }
            Self::CancelRequest(batch, request) => {
                out.push(10);
                (*batch, *request).put(out);
            }
            Self::CheckReadiness => out.push(11),
        });
    }
}

/// Reads one payload that the frontend sent.
///
/// # Errors
/// The payload is not exactly one well-formed frame.
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
            8 => ToWorker::Unmap(Wire::get(input)?),
            9 => ToWorker::Answer(Wire::get(input)?),
            10 => {
                let (batch, request) = Wire::get(input)?;
                ToWorker::CancelRequest(batch, request)
            }
            11 => ToWorker::CheckReadiness,
            kind => return Err(DecodeError::new("frame kind", kind.into())),
        })
    })
}

/// Decodes only the version of a frame of another version, so that the reader can report it.
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
    model_directory,
    backend_settings,
    verbose,
    config,
    initial_states,
    threads,
    spin_us,
    metrics,
    auto_detect,
    device
});
fields!(Device { number, uuid, visible, pinned });
fields!(Execute {
    batch,
    requests,
    inputs,
    outputs,
    released,
    flags,
    placements,
    elements,
    resumed
});
fields!(Placement { request, output, region, offset, len });
fields!(Resumed { request, sent, taken });
fields!(BatchRequest { id, rows, parameters, sequence, details });
fields!(Details {
    correlation,
    start,
    end,
    priority,
    timeout_us,
    outputs,
    input_order,
    traced,
    trace_context,
    ragged
});
fields!(SequenceStep { key, start, end });
fields!(InputBlock { input, datatype, shape, offset, len, pieces });
fields!(Piece { region, request, offset, len, elements });
fields!(Credits { batch, request, taken, released });
