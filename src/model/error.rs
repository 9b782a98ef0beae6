//! The error for refused model configurations.

/// Why a model configuration is refused: one line for the operator. It includes the position if the
/// source is text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    message: String,
}

impl ConfigError {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

/// Returns an error with this message.
pub(super) fn error<T>(message: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError::new(message))
}
