//! The parameters of a model's registration.

/// The parameters of a request to register a model, or of a model registered at server start. `None` means not given.
#[derive(Clone, Debug, Default)]
pub struct RegistrationParameters {
    /// Replaces the archive's name.
    pub model_name: Option<String>,
    /// Replaces the archive's handler.
    pub handler: Option<String>,
    /// Replaces the archive's runtime.
    pub runtime: Option<String>,
    /// The most requests in a batch.
    pub batch_size: Option<u32>,
    /// How long a batch waits for more requests, in milliseconds.
    pub max_batch_delay: Option<u32>,
    /// The number of workers that are kept running.
    pub initial_workers: Option<u32>,
    /// The most workers; set by snapshots.
    pub max_workers: Option<u32>,
    /// The timeout of a batch, in seconds.
    pub response_timeout: Option<u32>,
    /// The timeout of loading the model, in seconds.
    pub startup_timeout: Option<u32>,
    /// The model is registered at server start.
    pub at_start: bool,
}
