//! The parameters of a model version that a registration, `model-config.yaml`, `models` and a
//! snapshot may all set, and the parameters of a registration.

use serde::{Deserialize, Serialize};

/// The parameters under TorchServe's keys; `None` means not set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ModelParameters {
    /// The number of workers that are kept running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_workers: Option<u32>,
    /// The most workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_workers: Option<u32>,
    /// The most requests in a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_size: Option<u32>,
    /// The time for which a batch waits for more requests, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_batch_delay: Option<u32>,
    /// The timeout of a batch, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response_timeout: Option<u32>,
    /// The timeout of loading the model, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub startup_timeout: Option<u32>,
}

impl ModelParameters {
    /// The keys of all parameters.
    pub const KEYS: [&str; 6] = [
        "minWorkers",
        "maxWorkers",
        "batchSize",
        "maxBatchDelay",
        "responseTimeout",
        "startupTimeout",
    ];

    /// Returns these parameters, with the parameters of `fallback` in place of missing ones.
    pub fn or(&self, fallback: &Self) -> Self {
        Self {
            min_workers: self.min_workers.or(fallback.min_workers),
            max_workers: self.max_workers.or(fallback.max_workers),
            batch_size: self.batch_size.or(fallback.batch_size),
            max_batch_delay: self.max_batch_delay.or(fallback.max_batch_delay),
            response_timeout: self.response_timeout.or(fallback.response_timeout),
            startup_timeout: self.startup_timeout.or(fallback.startup_timeout),
        }
    }
}

/// The parameters of a request to register a model, or of a model registered at server start.
/// `None` means not given.
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
