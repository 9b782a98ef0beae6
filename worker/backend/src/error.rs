//! Errors of backends, in the form that frames carry.

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::wire::WireError;

/// The longest message that is sent to the frontend, in bytes: an error may quote what a client
/// sent.
const MAX_MESSAGE: usize = 4 << 10;

/// Returns an error of loading a model.
pub fn load_error(message: impl Into<String>) -> InferError {
    InferError::new(ErrorCode::Unavailable, Reason::Backend, message)
}

/// Returns an error of executing a batch that was not caused by the client.
pub fn run_error(message: impl Into<String>) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::Backend, message)
}

/// Converts an error to its wire form; truncates a message that is too long.
pub fn wire_error(mut error: InferError) -> WireError {
    if error.message.len() > MAX_MESSAGE {
        error.message.truncate(error.message.floor_char_boundary(MAX_MESSAGE));
        error.message.push_str("...");
    }
    error.into()
}

/// Returns the error of an output that does not fit in the arena.
pub(crate) fn arena_full(len: usize, capacity: u64) -> InferError {
    run_error(format!(
        "{len} bytes of output do not fit in the {capacity} bytes of the output arena"
    ))
}
