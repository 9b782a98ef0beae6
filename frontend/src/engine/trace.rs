//! The verbs of tracing.

use std::time::Duration;

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::request_trace::Traced;
use pharos::trace::settings::Update;

use super::Engine;
pub use crate::trace::Shown;

/// The refusal of a trace setting that a client cannot change: the file, the mode, or one that does not exist.
pub(crate) fn unchangeable_trace_setting(name: &str) -> InferError {
    match name {
        "trace_file" => InferError::unsupported("trace file location can not be updated through network protocol"),
        "trace_mode" => InferError::unsupported("trace mode can not be updated through network protocol"),
        _ => InferError::invalid(format!(
            "unknown trace setting '{name}'; there are trace_level, trace_rate, trace_count, log_frequency"
        )),
    }
}

impl Engine {
    /// A request for a model has come: what collects its course, if it is sampled. `header` gives the request's headers (or
    /// metadata) by name.
    pub fn trace(&self, model: &str, header: impl Fn(&str) -> Option<String>) -> Option<Traced> {
        self.0.traces.sample(model, header)
    }

    /// The trace settings of a model, or (empty) of the server.
    ///
    /// # Errors
    /// The model is not there, or not ready.
    pub fn trace_settings(&self, model: &str) -> Result<Shown, InferError> {
        self.check_traceable(model)?;
        Ok(self.0.traces.settings(model))
    }

    /// Changes the trace settings of a model, or (empty) of the server, and gives those that hold now.
    ///
    /// # Errors
    /// The model is not there, or not ready, or something would be traced and could not be; then nothing has changed.
    pub fn update_trace_settings(&self, model: &str, update: &Update) -> Result<Shown, InferError> {
        self.check_traceable(model)?;
        self.0.traces.update(model, update)
    }

    /// Samples nothing any more, and writes or sends the traces that wait, for so long at most.
    pub async fn stop_tracing(&self, patience: Duration) {
        let engine = self.clone();
        // A panic there would have been told, and nothing depends on what it gives.
        let _ = tokio::task::spawn_blocking(move || engine.0.traces.stop(patience)).await;
    }

    fn check_traceable(&self, model: &str) -> Result<(), InferError> {
        self.open()?;
        let can_answer =
            || self.0.loader.models().serving(model, "").is_ok_and(|serving| self.0.loader.models().is_ready(&serving));
        if model.is_empty() || can_answer() {
            return Ok(());
        }
        // Not spelled as elsewhere: clients look for this.
        let text = format!("Request for unknown model : {model}");
        Err(InferError::new(ErrorCode::InvalidArg, Reason::UnknownModel, text))
    }
}
