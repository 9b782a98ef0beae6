//! Labels that a worker's runtime can fill in without being told: in TorchServe's spelling, in that of TorchServe's
//! design document, and in this server's own.

use super::RECORDED_BY_WORKER;
use super::names::shortened;

/// What a worker knows of itself.
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
    /// The label names that mean one of them; `Hostname` does in any case.
    pub const NAMES: [&str; 9] =
        ["ModelName", "model_name", "model", "ModelVersion", "model_version", "version", "Level", "Hostname", "host"];

    /// What the label of this name means to a worker, if anything.
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

    /// Whether a model need not give it even if it has named it: those that TorchServe's `ts.metrics` appends.
    pub fn is_appended(name: &str) -> bool {
        matches!(name, "ModelName" | "Level" | "Hostname")
    }
}

/// Whether a metric may have this label: of those that every worker records, only what it can fill in. The text says
/// which are allowed.
pub(super) fn check(metric: &str, label: &str) -> Result<(), String> {
    if !RECORDED_BY_WORKER.contains(&metric) || WorkerLabel::of(label).is_some() {
        return Ok(());
    }
    let allowed = WorkerLabel::NAMES.join("`, `");
    let label = shortened(label);
    Err(format!(
        "no worker can fill in the label `{label}` of `{metric}`, which it records itself; allowed are `{allowed}`"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_means_something() {
        assert!(WorkerLabel::NAMES.iter().all(|name| WorkerLabel::of(name).is_some()));
        assert_eq!(WorkerLabel::of("hostname"), Some(WorkerLabel::Host));
        assert_eq!((WorkerLabel::of("level"), WorkerLabel::of("Model")), (None, None));
    }
}
