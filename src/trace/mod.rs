//! The trace extension decides here: which requests are sampled, what a trace looks like in a file and as spans, and what
//! trace files say.
//!
//! Nothing here writes or sends: `frontend/telemetry/src/trace` does.

pub mod chrome;
pub mod file;
pub mod otlp;
pub mod read;
pub mod settings;
pub mod summary;
