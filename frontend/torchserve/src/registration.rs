//! The parameters that a model is registered with.

/// The parameters of a request to register a model, or of a model of the start. `None`: not given.
#[derive(Clone, Debug, Default)]
pub struct RegistrationParameters {
    /// In place of the archive's name.
    pub model_name: Option<String>,
    /// In place of the archive's handler.
    pub handler: Option<String>,
    /// In place of the archive's runtime.
    pub runtime: Option<String>,
    /// Requests in a batch.
    pub batch_size: Option<u32>,
    /// Milliseconds that a batch waits for more requests.
    pub max_batch_delay: Option<u32>,
    /// Workers that are kept running.
    pub initial_workers: Option<u32>,
    /// The most workers, as a snapshot says.
    pub max_workers: Option<u32>,
    /// Seconds for a batch.
    pub response_timeout: Option<u32>,
    /// Seconds for loading the model.
    pub startup_timeout: Option<u32>,
    /// It is registered at the start.
    pub at_start: bool,
}
