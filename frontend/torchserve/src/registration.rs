//! The parameters of a model's registration.

use super::ModelParameters;

/// The parameters of a request to register a model, or of a model registered at server start. `None` means not given.
#[derive(Clone, Debug, Default)]
pub struct RegistrationParameters {
    /// Replaces the archive's name.
    pub model_name: Option<String>,
    /// Replaces the archive's handler.
    pub handler: Option<String>,
    /// Replaces the archive's runtime.
    pub runtime: Option<String>,
    /// Replace the parameters of the archive. Only a snapshot sets the most workers.
    pub model: ModelParameters,
    /// The model is registered at server start.
    pub at_start: bool,
}
