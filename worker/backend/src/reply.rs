//! A response that the backend builds for a request it answers individually.

use pharos::error::InferError;
use pharos::infer::Parameters;
use pharos::tensor::DataType;

use crate::received::{Memory, Received};

/// A response to be sent.
#[derive(Default)]
pub struct Reply {
    /// Its outputs.
    pub outputs: Vec<ReplyOutput>,
    /// Its parameters.
    pub parameters: Parameters,
    /// The response is this error; its outputs are not sent.
    pub error: Option<InferError>,
}

/// An output of a [`Reply`].
pub struct ReplyOutput {
    /// Position in the configuration's outputs.
    pub output: usize,
    /// The type of its elements.
    pub datatype: DataType,
    /// Its shape, with the request's rows first if the model batches.
    pub shape: Vec<i64>,
    /// Its bytes: little-endian, row-major; BYTES elements length-prefixed.
    pub content: Content,
}

/// The location of an output's bytes.
pub enum Content {
    /// In memory for answers, from [`Runtime::memory`](crate::Runtime::memory).
    Memory(Memory),
    /// In an input that is passed on: without a copy, if the input is no longer in use when the
    /// batch is over.
    Received(Received),
    /// In client memory: this many bytes at
    /// [`Responder::place_on_device`](crate::Responder::place_on_device).
    Placed(usize),
}

impl Content {
    /// Returns the input that is passed on.
    pub(crate) fn received(&self) -> Option<&Received> {
        match self {
            Self::Received(bytes) => Some(bytes),
            Self::Memory(_) | Self::Placed(_) => None,
        }
    }
}
