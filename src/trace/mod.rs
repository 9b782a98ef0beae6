//! The decisions of the trace extension: which requests are sampled, the format of trace files and
//! spans, and the analysis of trace files.
//!
//! This module does no I/O: `frontend/telemetry/src/trace` writes and sends.

pub mod chrome;
pub mod file;
pub mod otlp;
pub mod read;
pub mod settings;
pub mod summary;
