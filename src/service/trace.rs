//! Trace settings as clients see them.

use crate::error::InferError;

/// Names of trace settings with their values, in the order in which clients see them.
pub type TraceSettings = Vec<(&'static str, Vec<String>)>;

/// Returns the error for a trace setting that clients cannot change: the file, the mode, or an
/// unknown one.
pub fn unchangeable_trace_setting(name: &str) -> InferError {
    match name {
        "trace_file" => InferError::unsupported(
            "trace file location can not be updated through network protocol",
        ),
        "trace_mode" => {
            InferError::unsupported("trace mode can not be updated through network protocol")
        }
        _ => InferError::invalid(format!(
            "unknown trace setting '{name}'; allowed: trace_level, trace_rate, trace_count, \
             log_frequency"
        )),
    }
}
