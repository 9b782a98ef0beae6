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
pub mod descriptors;
mod error;
pub mod flags;
pub mod regions;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod to_frontend;
mod to_worker;

pub use calls::{Answer, AnswerOutput, Call, CallInput, CallRequest, FIRST_LOAN, Manage, Verb};
pub use codec::DecodeError;
pub use error::{WireError, said};
pub use to_frontend::{Done, Loaded, OutputBlock, Response, ToFrontend, decode_to_frontend};
pub use to_worker::{
    BatchRequest, CREDITS, Credits, Details, Device, Execute, InputBlock, Load, Piece, Placement, Resumed,
    SequenceStep, ToWorker, decode_to_worker,
};

/// Changes with every change of the encoding. A worker of another version refuses to load.
pub const VERSION: u32 = 13;

/// The longest payload that either side accepts, in bytes. Frames carry no tensor data, so this bounds configurations and
/// lists of requests.
pub const MAX_FRAME: usize = 64 << 20;

/// Bytes of the length in front of each payload.
pub const PREFIX: usize = 4;

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
