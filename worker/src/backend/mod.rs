//! How a worker executes a batch.
//!
//! A [`Backend`] sees contiguous inputs in shared memory and asks for outputs there; it never sees sockets, frames or
//! other requests' bookkeeping. One file per backend; the registry chooses by name.

mod builtin;
mod countdown;
mod elements;
mod emit;
#[allow(unsafe_code)]
mod native;
mod on_gpu;
#[allow(unsafe_code)]
mod onnxruntime;
mod registry;
mod repeat;
mod sequence;
mod stateful;
mod tract;

use std::path::Path;
use std::sync::Arc;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::ModelConfig;
use pharos::tensor::DataType;
use pharos::wire::BatchRequest;

use crate::device::Cuda;
use crate::memory::{Flags, OutputArena};
use crate::runtime::LoanCell;

pub use crate::device::DeviceMemory;
pub use crate::instance::{Outputs, Response};
pub use crate::metrics::{Coalesced, Described, Loose, Metric, MetricError, Metrics, Requests, Series};
pub use crate::regions::ReceivedOnDevice;
pub use crate::runtime::{
    Call, CallInput, Called, CalledOutput, Canceller, Content, Memory, Pending, Received, Reply, ReplyOutput,
    Responder, Runtime,
};
pub use registry::Create;
pub(crate) use registry::Registry;

/// Runs one instance of a model.
pub trait Backend {
    /// What computes, with its version, for logs and the served configuration; for example `tract 0.23.9`.
    fn engine(&self) -> String;

    /// Executes a batch: reads `batch`, allocates and fills the outputs that [`Batch::wants`] asks for. A decoupled model
    /// may answer each request any number of times, with [`Outputs::response`].
    ///
    /// # Errors
    /// Fails every request of the batch. To fail single requests, use [`Outputs::fail`].
    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError>;

    /// Whether inputs, and memory for outputs, may change while a batch is executed: a client that shares its memory can
    /// write there at any moment. Who says so is given the client's own memory, which is aligned to nothing in particular,
    /// and must decide nothing twice from the same bytes and be right, not only safe, with any that it sees. Others are
    /// given copies.
    fn bears_changes(&self) -> bool {
        false
    }

    /// Whether it can be given inputs that are in a device's memory where they are, in [`Input::pieces`], and asks for
    /// its outputs with [`Outputs::allocate_anywhere`]. Who can must bear changes there, as for
    /// [`Backend::bears_changes`]. Others find all inputs in the process's memory.
    fn takes_device_memory(&self) -> DeviceInputs {
        DeviceInputs::Never
    }

    /// A sequence is over without a step that has [`SequenceStep::end`](pharos::wire::SequenceStep::end): it was silent
    /// for too long, or its client has gone. For backends that keep something of their own for each sequence; states of
    /// the configuration are kept, and dropped, by the runtime.
    fn sequence_ended(&mut self, _key: u64) {}

    /// Whether it records TorchServe's `HandlerTime` and `PredictionTime` itself; else the runtime does.
    fn records_its_times(&self) -> bool {
        false
    }

    /// Whether its batches are to say all that clients have said
    /// ([`BatchRequest::details`](pharos::wire::BatchRequest::details)).
    fn wants_details(&self) -> bool {
        false
    }

    /// What says whether the model is ready, for a model that has a word in that: asked when a client asks for the model's
    /// readiness, on a thread of its own and also while a batch is executed. Who says no still gets requests.
    fn readiness(&self) -> Option<Readiness> {
        None
    }
}

/// Says whether a model is ready; see [`Backend::readiness`].
pub type Readiness = Box<dyn FnMut() -> bool + Send>;

/// Which inputs a backend can be given in a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceInputs {
    /// None.
    #[default]
    Never,
    /// Those that are in one piece.
    Whole,
    /// Also those whose pieces, one for each request, have yet to be put together.
    Pieces,
}

/// A part of an input: one request's.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// In the process's memory.
    Host(&'a [u8]),
    /// In a device's.
    Device(DeviceMemory),
    /// So many zeros: the request has failed.
    Zeros(usize),
}

impl Source<'_> {
    /// Bytes.
    pub const fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(memory) => memory.len(),
            Self::Zeros(len) => *len,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A part of an input that is kept; see [`Batch::received_piece`].
pub enum ReceivedPiece {
    /// In the process's memory.
    Host(Received),
    /// In a device's.
    Device(ReceivedOnDevice),
}

/// Where an output goes.
#[derive(Debug)]
pub enum Place<'a> {
    /// Into the process's memory.
    Host(&'a mut [u8]),
    /// Straight to a client's memory on a device.
    Device(DeviceMemory),
    /// The requests of the batch want their rows in different places, which follow each other; none of them is in pieces
    /// itself. Only for who says [`DeviceInputs::Pieces`].
    Pieces(Vec<Place<'a>>),
}

impl Place<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(memory) => memory.len(),
            Self::Pieces(pieces) => pieces.iter().map(Self::len).sum(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a backend is created from.
pub struct Context<'a> {
    /// The model's configuration.
    pub config: &'a ModelConfig,
    /// The directory of the version, with the model's files.
    pub directory: &'a Path,
    /// Threads that one execution may use.
    pub threads: usize,
    /// What the model may record; to be cloned and kept.
    pub metrics: &'a Metrics,
    /// What the backend may use at any time; to be cloned and kept.
    pub runtime: &'a Runtime,
    /// The instance's name, for messages: `model_0_0`.
    pub instance: &'a str,
    /// The model's version.
    pub version: u64,
}

impl Context<'_> {
    /// Whether the instance is to run on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.runtime.0.cuda.device().is_some()
    }

    /// The GPU that the instance is to run on, ready for use; `None` on CPUs.
    ///
    /// # Errors
    /// It cannot be used.
    pub(crate) fn gpu(&self) -> Result<Option<Arc<Cuda>>, InferError> {
        let cuda = &self.runtime.0.cuda;
        if cuda.device().is_none() {
            return Ok(None);
        }
        cuda.open().map_err(|fault| load_error(fault.to_string()))?;
        Ok(Some(cuda.clone()))
    }
}

/// One input of a batch, over all its requests.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Position in the configuration's inputs; those that the server makes follow: `batch_input`, controls of sequences,
    /// states.
    pub index: usize,
    /// Its name.
    pub name: &'a str,
    /// What the elements are.
    pub datatype: DataType,
    /// The shape of the whole batch; `[elements]` for an input that may be ragged.
    pub shape: &'a [i64],
    /// Little-endian, row-major, aligned to 64 bytes; BYTES elements length-prefixed.
    pub data: &'a [u8],
    /// Where the data is, if some of it is in a device's memory: then `data` is empty. Empty for all backends that do not
    /// ask for it; see [`Backend::takes_device_memory`].
    pub pieces: &'a [Source<'a>],
}

/// A batch as a backend sees it.
pub struct Batch<'a> {
    /// The requests, in batch order.
    pub requests: &'a [BatchRequest],
    /// The inputs that are given, in the configuration's order.
    pub inputs: Vec<Input<'a>>,
    pub(crate) config: &'a ModelConfig,
    /// The positions of the requests in the batch that they are a part of; empty for the whole of it.
    pub(crate) positions: &'a [u32],
    pub(crate) wanted: &'a [u16],
    /// Outputs that are wanted whoever asks: the states.
    pub(crate) always: &'a [usize],
    pub(crate) flags: Flags<'a>,
    pub(crate) loan: &'a LoanCell<'a>,
}

impl Batch<'_> {
    /// Whether the output at this position of the configuration is wanted: by a request, or because it is a state.
    /// [`ModelConfig::backend_outputs`] numbers states that are no outputs of the configuration.
    pub fn wants(&self, output: usize) -> bool {
        self.is_asked_for(output) || self.always.contains(&output)
    }

    /// A handle on the bytes of the input at this position of [`Batch::inputs`] that keeps them where they are as long as it
    /// lives, also when the batch is over. `None` if there is no such input.
    pub fn received(&self, input: usize) -> Option<Received> {
        self.inputs.get(input).map(|input| self.loan.received(input.data))
    }

    /// As [`Batch::received`], of one of its [`Input::pieces`]. What is in system memory of a client is copied; what is on a
    /// device stays open there, but its content is the client's to change. `None` if there is no such piece.
    pub fn received_piece(&self, input: usize, piece: usize) -> Option<ReceivedPiece> {
        match *self.inputs.get(input)?.pieces.get(piece)? {
            Source::Host(bytes) => Some(ReceivedPiece::Host(self.loan.received(bytes))),
            Source::Zeros(len) => Some(ReceivedPiece::Host(Received::zeroed(len))),
            Source::Device(_) => self.loan.received_on_device(input, piece),
        }
    }

    /// Whether any request wants the output.
    pub(crate) fn is_asked_for(&self, output: usize) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| usize::from(*wanted) == output)
    }

    /// Whether nobody waits any more for the request at this position: its client has gone away or its time is over. May
    /// become true at any moment. A backend may look between steps and spare itself work, failing the request with
    /// [`InferError::cancelled`]; what it answers is thrown away.
    pub fn is_cancelled(&self, request: usize) -> bool {
        let whole = self.positions.get(request).map_or(request, |position| *position as usize);
        self.flags.is_set(whole)
    }

    /// Whether nobody waits for any request of the batch any more.
    pub fn all_cancelled(&self) -> bool {
        !self.requests.is_empty() && (0..self.requests.len()).all(|request| self.is_cancelled(request))
    }

    /// The rows of all requests together.
    pub fn rows(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.rows)).sum()
    }
}

#[cfg(test)]
pub(crate) use on_gpu::tests::kernel as test_kernel;

/// Whether a library of ONNX Runtime is named.
#[cfg(test)]
pub(crate) fn has_onnxruntime() -> bool {
    onnxruntime::library().is_some()
}

/// An error of loading a model.
pub(crate) fn load_error(message: impl Into<String>) -> InferError {
    InferError::new(ErrorCode::Unavailable, Reason::Backend, message)
}

/// An error of executing a batch that is not the client's fault.
pub(crate) fn run_error(message: impl Into<String>) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Backend, message)
}

/// The model's file in the version directory: what `default_model_filename` says, else `model.onnx`.
pub(crate) fn model_file(context: &Context<'_>) -> Result<std::path::PathBuf, InferError> {
    let name = match context.config.default_model_filename.as_str() {
        "" => "model.onnx",
        name => name,
    };
    let path = context.directory.join(name);
    if path.is_file() {
        Ok(path)
    } else {
        Err(load_error(format!("the model file '{}' does not exist", path.display())))
    }
}

/// Memory for outputs, for [`Outputs`].
pub(crate) type Arena = OutputArena;
