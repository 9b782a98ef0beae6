//! Errors in frames.

use super::codec::{Result, Wire, fields};
use crate::error::{ErrorCode, InferError, Reason};

/// An error in a frame.
#[derive(Clone, Debug, PartialEq)]
pub struct WireError {
    /// The code of the client's error.
    pub code: ErrorCode,
    /// Its text.
    pub message: String,
    /// Whether the error concerns shared memory of the client.
    pub of_region: bool,
}

impl From<WireError> for InferError {
    fn from(error: WireError) -> Self {
        let reason = match error.code {
            _ if error.of_region => Reason::SharedMemory,
            ErrorCode::Cancelled => Reason::Cancelled,
            _ => Reason::Backend,
        };
        let message = match error.code {
            // A worker has no message for a request that the client cancelled.
            ErrorCode::Cancelled => error.message,
            _ => message_or_default(error.message),
        };
        InferError::new(error.code, reason, message)
    }
}

/// Returns a worker's message for clients, or a generic text if it is blank.
pub fn message_or_default(message: String) -> String {
    match message.trim().is_empty() {
        true => "the model reported an error without a message".to_owned(),
        false => message,
    }
}

impl From<InferError> for WireError {
    fn from(error: InferError) -> Self {
        let of_region = error.reason == Reason::SharedMemory;
        Self { code: error.code, message: error.message, of_region }
    }
}

fields!(WireError { code, message, of_region });

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_a_message() {
        for (sent, expected) in [
            ("", "the model reported an error without a message"),
            ("no", "no"),
            (" \n", "the model reported"),
        ] {
            let error =
                WireError { code: ErrorCode::Internal, message: sent.to_owned(), of_region: false };
            assert!(InferError::from(error).message.starts_with(expected), "{sent:?}");
        }
        assert_eq!(
            InferError::from(WireError::from(InferError::cancelled())),
            InferError::cancelled()
        );
    }
}
