//! The errors of samples.

use super::catalog::{Kind, MAX_UNIT};
use super::channel::Definition;

/// The longest label value, in bytes. Limits the frontend's memory, since workers choose the
/// values.
pub const MAX_LABEL_BYTES: usize = 256;
/// The number of metrics that may be detected or described by models. Also limits memory.
pub(super) const MAX_DETECTED: usize = 1_000;

/// Why a sample was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleError {
    /// No metric has this name, and automatic detection is off.
    #[error("{}", undeclared(.0))]
    Undeclared(Box<Definition>),
    /// The definition switches this metric off, or leaves out one that workers record themselves.
    #[error("metric `{0}` is off: metrics.yaml leaves it out or has `enabled: false`")]
    Disabled(String),
    /// The server records this metric itself.
    #[error("metric `{0}` is recorded by the server itself")]
    Reserved(String),
    /// The model whose worker sent the sample was unloaded, and the series does not exist.
    #[error(
        "metric `{0}` has no such series, and the model was unloaded before the sample arrived"
    )]
    Unloaded(String),
    /// The name is reserved or collides with another metric; the text says why.
    #[error("{0}")]
    Collision(String),
    /// The name of the metric or a label is not valid for Prometheus.
    #[error(
        "`{0}` is not a valid name of a metric or label; allowed are letters, digits (not first) \
         and `_`, in a metric's name also `:`"
    )]
    BadName(String),
    /// The metric is of another type.
    #[error("metric `{metric}` is a {}, not a {}", .expected.as_str(), .given.as_str())]
    WrongKind {
        /// The metric's name.
        metric: String,
        /// Its type.
        expected: Kind,
        /// The type of the sample or of the requested handle.
        given: Kind,
    },
    /// The sample lacks labels of the metric, or gives another number of values.
    #[error("metric `{metric}` has the dimensions [{}], but [{}] were given", .expected.join(", "), .given.join(", "))]
    WrongLabels {
        /// The metric's name.
        metric: String,
        /// Its dimensions.
        expected: Vec<String>,
        /// The given label names, or `_` for each value that came without a name.
        given: Vec<String>,
    },
    /// The sample has a label that the metric does not have.
    #[error(
        "metric `{metric}` has no dimension `{label}`, only [{}]; add it to the metric's `dimensions` in metrics.yaml",
        .expected.join(", ")
    )]
    UnknownLabel {
        /// The metric's name.
        metric: String,
        /// The label's name.
        label: String,
        /// The metric's dimensions.
        expected: Vec<String>,
    },
    /// A label value has more than [`MAX_LABEL_BYTES`] bytes.
    #[error(
        "a label value of metric `{metric}` has {length} bytes; the limit is {MAX_LABEL_BYTES}"
    )]
    LabelTooLong {
        /// The metric's name.
        metric: String,
        /// The value's length in bytes.
        length: usize,
    },
    /// The unit of a metric that no file defines has more bytes than a unit in a file may have.
    #[error("the unit of metric `{metric}` has {length} bytes; the limit is {MAX_UNIT}")]
    UnitTooLong {
        /// The metric's name.
        metric: String,
        /// The unit's length in bytes.
        length: usize,
    },
    /// The limit of detected metrics is reached.
    #[error("metric `{0}` exceeds the limit of {MAX_DETECTED} metrics that no file defines")]
    TooManyMetrics(String),
    /// A counter's increment is negative, or a value is not a number where one is required.
    #[error("{0}")]
    BadValue(String),
}

/// Returns what to add to `metrics.yaml`.
fn undeclared(definition: &Definition) -> String {
    let Definition { name, kind, unit, labels } = definition;
    let labels: Vec<&str> = labels.iter().map(|(name, _)| name.as_str()).collect();
    format!(
        "metric `{name}` is not defined in metrics.yaml; add under model_metrics.{}: `- {{name: \
         {name}, unit: {}, dimensions: [{}]}}`, or detect metrics: --model-metrics-auto-detect, \
         or model_metrics_auto_detect=true in config.properties",
        kind.unwrap_or(Kind::Gauge).as_str(),
        if unit.is_empty() { "unit" } else { unit },
        labels.join(", ")
    )
}
