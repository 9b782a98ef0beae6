//! The verbs of the model repository extension.

use bytes::Bytes;
use pharos::error::InferError;
use pharos::repository::{IndexEntry, Override};

use super::Engine;

impl Engine {
    /// Every model and version with its state: those that are known, and those that are only in a repository.
    ///
    /// # Errors
    /// None of the server's; the answer was lost.
    pub async fn repository_index(&self, ready_only: bool) -> Result<Vec<IndexEntry>, InferError> {
        let engine = self.clone();
        let index = tokio::task::spawn_blocking(move || engine.0.loader.index(ready_only)).await;
        index.map_err(|error| InferError::internal(format!("the repositories could not be read: {error}")))
    }

    /// Loads a model, or loads it anew if it has changed; `parameters` by name: the configuration and files in place of the
    /// repository's.
    ///
    /// # Errors
    /// Triton's codes and texts: models are not loaded by request, the name or a parameter is wrong, or why the model
    /// could not be loaded; then what served before still does.
    pub async fn load_model(&self, name: &str, parameters: Vec<(String, Bytes)>) -> Result<(), InferError> {
        self.open()?;
        let given = Override::new(parameters).map_err(|reason| {
            InferError::internal(format!("failed to load '{name}', failed to poll from model repository: {reason}"))
        })?;
        self.0.loader.load_model(name, given).await
    }

    /// Unloads a model, and with `dependents` what only it needs. What it has accepted it finishes.
    ///
    /// # Errors
    /// Models are not unloaded by request. One that is not loaded is no error.
    pub async fn unload_model(&self, name: &str, dependents: bool) -> Result<(), InferError> {
        self.open()?;
        self.0.loader.unload_model(name, dependents).await
    }
}
