//! A batch as a backend sees it.

use pharos::model::ModelConfig;
use pharos::tensor::DataType;
use pharos::wire::BatchRequest;

use crate::device::{DeviceMemory, ReceivedOnDevice};
use crate::memory::Flags;
use crate::received::{BatchLoan, Received};

/// One request's part of an input.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// In the process's memory.
    Host(&'a [u8]),
    /// In a device's memory.
    Device(DeviceMemory),
    /// This many zeros, because the request has failed.
    Zeros(usize),
}

impl Source<'_> {
    /// The length in bytes.
    pub const fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(memory) => memory.len(),
            Self::Zeros(len) => *len,
        }
    }

    /// Whether the length is zero.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A part of an input that outlives the batch; see [`Batch::received_piece`].
pub enum ReceivedPiece {
    /// In the process's memory.
    Host(Received),
    /// In a device's memory.
    Device(ReceivedOnDevice),
}

impl ReceivedPiece {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(kept) => kept.memory().len(),
        }
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One input of a batch, over all its requests.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Position in the configuration's inputs. Inputs that the server adds follow them:
    /// `batch_input`, sequence controls, states.
    pub index: usize,
    /// Its name.
    pub name: &'a str,
    /// The type of its elements.
    pub datatype: DataType,
    /// The shape of the whole batch; `[elements]` for an input that may be ragged.
    pub shape: &'a [i64],
    /// The elements: little-endian, row-major, aligned to 64 bytes; BYTES elements
    /// length-prefixed.
    pub data: &'a [u8],
    /// The locations of the data if some of it is in a device's memory; `data` is then empty.
    /// Empty for all backends that do not take such inputs; see
    /// [`Backend::takes_device_memory`](crate::Backend::takes_device_memory).
    pub pieces: &'a [Source<'a>],
}

/// A batch as a backend sees it.
pub struct Batch<'a> {
    /// The requests, in batch order.
    pub requests: &'a [BatchRequest],
    /// The inputs that the requests have, in the configuration's order.
    pub inputs: Vec<Input<'a>>,
    config: &'a ModelConfig,
    /// The positions of the requests in the whole batch, if this is a part of it; empty for the
    /// whole batch.
    positions: &'a [u32],
    wanted: &'a [u16],
    /// Outputs that are wanted even if no request asks for them: the states.
    always: &'a [usize],
    flags: Flags<'a>,
    loan: &'a BatchLoan<'a>,
}

impl<'a> Batch<'a> {
    /// Creates the batch of a frame with these inputs. For the worker's runtime.
    pub fn new(config: &'a ModelConfig, loan: &'a BatchLoan<'a>, inputs: Vec<Input<'a>>) -> Self {
        let execute = loan.execute();
        let requests = &execute.requests;
        let wanted = &execute.outputs;
        Self {
            requests,
            inputs,
            config,
            positions: &[],
            wanted,
            always: &[],
            flags: loan.flags(),
            loan,
        }
    }
}

impl Batch<'_> {
    /// Returns a batch of some of the requests, at these positions. For the worker's runtime.
    #[doc(hidden)]
    #[must_use]
    pub fn part<'p>(
        &'p self,
        requests: &'p [BatchRequest],
        positions: &'p [u32],
        inputs: Vec<Input<'p>>,
    ) -> Batch<'p> {
        Batch { requests, inputs, positions, ..*self }
    }

    /// Returns the batch with the inputs of states added; the outputs of states are always wanted.
    /// For the worker's runtime.
    #[doc(hidden)]
    #[must_use]
    pub fn with_states<'p>(&'p self, inputs: Vec<Input<'p>>, outputs: &'p [usize]) -> Batch<'p> {
        Batch { inputs, always: outputs, ..*self }
    }

    /// The model's configuration. For the worker's runtime.
    #[doc(hidden)]
    pub fn config(&self) -> &ModelConfig {
        self.config
    }

    /// Whether the output at this position of the configuration is wanted: by a request, or because
    /// it is a state. [`ModelConfig::backend_outputs`] numbers states that are not outputs of the
    /// configuration.
    pub fn wants(&self, output: usize) -> bool {
        self.is_requested(output) || self.always.contains(&output)
    }

    /// Whether a request asks for the output. For the worker's runtime.
    #[doc(hidden)]
    pub fn is_requested(&self, output: usize) -> bool {
        self.wanted.is_empty() || self.wanted.iter().any(|wanted| usize::from(*wanted) == output)
    }

    /// Returns a handle on the bytes of the input at this position of [`Batch::inputs`]. The handle
    /// keeps the bytes in place as long as it lives, even after the batch is over. `None` if there
    /// is no such input.
    pub fn received(&self, input: usize) -> Option<Received> {
        self.inputs.get(input).map(|input| self.loan.received(input.data))
    }

    /// Like [`Batch::received`], for one of the [`Input::pieces`]. A client's system memory is
    /// copied; memory on a device stays open, and the client may change its content. `None` if
    /// there is no such piece.
    pub fn received_piece(&self, input: usize, piece: usize) -> Option<ReceivedPiece> {
        match *self.inputs.get(input)?.pieces.get(piece)? {
            Source::Host(bytes) => Some(ReceivedPiece::Host(self.loan.received(bytes))),
            Source::Zeros(len) => Some(ReceivedPiece::Host(Received::zeroed(len))),
            Source::Device(_) => {
                self.loan.received_on_device(input, piece).map(ReceivedPiece::Device)
            }
        }
    }

    /// Whether the request at this position is cancelled: its client has disconnected or its
    /// deadline has passed. May become true at any moment. A backend may check between steps and
    /// stop work on the request by failing it with
    /// [`InferError::cancelled`](pharos::error::InferError::cancelled); its outputs are then
    /// discarded.
    pub fn is_cancelled(&self, request: usize) -> bool {
        let whole = self.positions.get(request).map_or(request, |position| *position as usize);
        self.flags.is_set(whole)
    }

    /// Whether all requests of the batch are cancelled.
    pub fn all_cancelled(&self) -> bool {
        !self.requests.is_empty()
            && (0..self.requests.len()).all(|request| self.is_cancelled(request))
    }

    /// Returns the total number of rows of all requests.
    pub fn rows(&self) -> u64 {
        self.requests.iter().map(|request| u64::from(request.rows)).sum()
    }
}
