//! The frames between the frontend and a worker, as bytes.
//!
//! A frame is a little-endian `u32` length followed by that many bytes of payload; the first byte
//! of the payload is the kind. Frames travel in rings of shared memory ([`ring`]); a socket wakes a
//! side that sleeps, and shows that the other side has ended. Frames never carry tensor data: they
//! carry offsets into the shared-memory arenas, or into client memory that was announced
//! over a dedicated socket ([`regions`]). Both ends are built from one source tree, so the encoding
//! has no compatibility to keep beyond [`VERSION`], which the first frame carries.
//!
//! Decoding trusts no input: every count is bounded by the remaining bytes, and every number is
//! checked.

pub mod access;
mod calls;
mod codec;
pub mod descriptors;
mod error;
pub mod flags;
pub mod fork_server;
pub mod regions;
pub mod ring;
pub mod sandbox;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod to_frontend;
mod to_worker;

pub use calls::{
    Answer, AnswerOutput, Call, CallInput, CallRequest, FIRST_CALL_LOAN, Manage, Verb,
};
pub use codec::DecodeError;
pub use error::{WireError, message_or_default};
pub use to_frontend::{
    BackendActivity, Done, Loaded, MAX_ACTIVITY_NAME, OutputBlock, Response, ToFrontend,
    decode_to_frontend,
};
pub use to_worker::{
    BatchRequest, CREDITS, Credits, Details, Device, Execute, InputBlock, Load, Piece, Placement,
    Resumed, SequenceStep, ToWorker, decode_to_worker,
};

/// The version of the encoding, incremented with every change. A worker of another version refuses
/// to load.
pub const VERSION: u32 = 21;

/// The maximum length of a payload, in bytes. Frames carry no tensor data, so this bounds
/// configurations and lists of requests.
pub const MAX_FRAME: usize = 64 << 20;

/// Bytes of the length that precedes each payload.
pub const PREFIX: usize = 4;

/// Returns the length of the payload that follows these prefix bytes.
///
/// # Errors
/// The length is 0 or exceeds [`MAX_FRAME`].
pub fn payload_length(prefix: [u8; PREFIX]) -> Result<usize, DecodeError> {
    let length = u32::from_le_bytes(prefix) as usize;
    if length == 0 || length > MAX_FRAME {
        return Err(DecodeError::new("frame length", length as u64));
    }
    Ok(length)
}
