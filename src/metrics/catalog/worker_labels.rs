//! Labels whose values the worker's runtime supplies. They may have the names that TorchServe uses,
//! the names of TorchServe's design document, or this server's own.

use super::RECORDED_BY_WORKER;
use super::names::shortened;

/// A label value that a worker's runtime has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerLabel {
    /// The name of its model.
    Model,
    /// The version of its model.
    Version,
    /// TorchServe's `Level`, which is `Model` for everything that comes from a worker.
    Level,
    /// The name of the machine.
    Host,
}

impl WorkerLabel {
    /// The names of these labels; `Hostname` also counts in any other case.
    pub const NAMES: [&str; 9] = [
        "ModelName",
        "model_name",
        "model",
        "ModelVersion",
        "model_version",
        "version",
        "Level",
        "Hostname",
        "host",
    ];

    /// Returns the meaning of a label name to a worker, if it has one.
    pub fn of(name: &str) -> Option<Self> {
        Some(match name {
            "ModelName" | "model_name" | "model" => Self::Model,
            "ModelVersion" | "model_version" | "version" => Self::Version,
            "Level" => Self::Level,
            "host" => Self::Host,
            _ if name.eq_ignore_ascii_case("hostname") => Self::Host,
            _ => return None,
        })
    }

    /// Returns whether a label of this name gets the host's name if a sample does not give it.
    pub fn is_host(name: &str) -> bool {
        Self::of(name) == Some(Self::Host)
    }

    /// Returns whether a model may omit a value for this label although it declared it, and whether
    /// a sample may have the label although its metric does not: `ts.metrics` of TorchServe appends
    /// these to every sample.
    pub fn is_appended(name: &str) -> bool {
        matches!(name, "ModelName" | "Level" | "Hostname")
    }
}

/// Checks that a metric may have this label: one that every worker records may only have labels
/// with values known to the worker. Returns an error that lists them.
pub(super) fn check(metric: &str, label: &str) -> Result<(), String> {
    if !RECORDED_BY_WORKER.contains(&metric) || WorkerLabel::of(label).is_some() {
        return Ok(());
    }
    let allowed = WorkerLabel::NAMES.join("`, `");
    let label = shortened(label);
    Err(format!(
        "the label `{label}` is not allowed on `{metric}`, because workers have no value for it; \
         allowed are `{allowed}`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_is_recognized() {
        assert!(WorkerLabel::NAMES.iter().all(|name| WorkerLabel::of(name).is_some()));
        assert_eq!(WorkerLabel::of("hostname"), Some(WorkerLabel::Host));
        assert_eq!((WorkerLabel::of("level"), WorkerLabel::of("Model")), (None, None));
    }
}
