//! Stops tracing, and decides which models can be traced.

use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos_os::blocking;

use super::Engine;

impl Engine {
    /// Stops sampling, and writes or sends the queued traces within `limit`.
    pub async fn stop_tracing(&self, limit: Duration) {
        let engine = self.clone();
        // A panic is already logged, and nothing depends on the result.
        let _ = blocking::run(move || engine.inner.traces.stop(limit)).await;
    }

    /// Returns an error for a model (empty: the server) whose requests cannot be traced.
    pub(super) fn check_traceable(&self, model: &str) -> Result<(), InferError> {
        self.check_open()?;
        let can_answer = || {
            self.inner
                .loader
                .models()
                .serving(model, "")
                .is_ok_and(|serving| self.inner.loader.models().is_ready(&serving))
        };
        if model.is_empty() || can_answer() {
            return Ok(());
        }
        // Triton's spelling, which clients match; other texts differ.
        let text = format!("Request for unknown model : {model}");
        Err(InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, text))
    }
}
