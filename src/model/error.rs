//! The error of every refused model configuration.

/// Why a model configuration is refused: one line for the operator, with the place where the source is text.
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

/// A refusal with this message.
pub(super) fn error<T>(message: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError::new(message))
}
