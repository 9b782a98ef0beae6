//! Errors of backends, in the form that the frontend takes.

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::wire::WireError;

/// The longest message that travels to the frontend, in bytes: an error may quote what a client sent.
const MAX_MESSAGE: usize = 4 << 10;

/// An error of loading a model.
pub fn load_error(message: impl Into<String>) -> InferError {
    InferError::new(ErrorCode::Unavailable, Reason::Backend, message)
}

/// An error of executing a batch that the client has not caused.
pub fn run_error(message: impl Into<String>) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Backend, message)
}

/// An error as a frame carries it: a message that is too long is cut off.
pub fn wire_error(mut error: InferError) -> WireError {
    if error.message.len() > MAX_MESSAGE {
        error.message.truncate(error.message.floor_char_boundary(MAX_MESSAGE));
        error.message.push_str("...");
    }
    error.into()
}

/// The error of an output arena without room.
pub(crate) fn arena_full(len: usize, capacity: u64) -> InferError {
    run_error(format!("{len} bytes of output do not fit in the {capacity} bytes of the output arena"))
}
