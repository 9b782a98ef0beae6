//! The errors of samples.

use std::fmt;

use super::catalog::Kind;
use super::channel::Definition;

/// The longest label value, in bytes. Limits the frontend's memory, since workers choose the values.
pub const MAX_LABEL_BYTES: usize = 256;
/// The number of metrics that may be detected or described by models. Also limits memory.
pub(super) const MAX_DETECTED: usize = 1_000;

/// Why a sample was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleError {
    /// No metric has this name, and automatic detection is off.
    Undeclared(Box<Definition>),
    /// The definition switches this metric off.
    Disabled(String),
    /// The server records this metric itself.
    Reserved(String),
    /// The name is reserved or collides with another metric; the text says why.
    Collision(String),
    /// The name of the metric or a label is not valid for Prometheus.
    BadName(String),
    /// The metric is of another type.
    WrongKind {
        /// The metric's name.
        metric: String,
        /// Its type.
        expected: Kind,
        /// The type of the sample or of the requested handle.
        given: Kind,
    },
    /// The labels differ from the metric's dimensions.
    WrongLabels {
        /// The metric's name.
        metric: String,
        /// Its dimensions.
        expected: Vec<String>,
        /// The given label names, or `_` for each value that came without a name.
        given: Vec<String>,
    },
    /// A label value has more than [`MAX_LABEL_BYTES`] bytes.
    LabelTooLong {
        /// The metric's name.
        metric: String,
        /// The value's length in bytes.
        length: usize,
    },
    /// The limit of detected metrics is reached.
    TooManyMetrics(String),
    /// A counter's increment is negative, or a value is not a number where one is required.
    BadValue(String),
}

impl fmt::Display for SampleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Undeclared(definition) => write_undeclared(f, definition),
            Self::Disabled(metric) => write!(f, "metric `{metric}` is switched off in metrics.yaml (`enabled: false`)"),
            Self::Collision(why) => f.write_str(why),
            Self::Reserved(metric) => write!(f, "metric `{metric}` is recorded by the server itself"),
            Self::BadName(name) => write!(
                f,
                "`{name}` is not a valid name of a metric or label; allowed are letters, digits (not first) and `_`, \
                 in a metric's name also `:`"
            ),
            Self::WrongKind { metric, expected, given } => {
                write!(f, "metric `{metric}` is a {}, not a {}", expected.as_str(), given.as_str())
            }
            Self::WrongLabels { metric, expected, given } => {
                let (expected, given) = (expected.join(", "), given.join(", "));
                write!(f, "metric `{metric}` has the dimensions [{expected}], but [{given}] were given")
            }
            Self::LabelTooLong { metric, length } => {
                write!(f, "a label value of metric `{metric}` has {length} bytes; the limit is {MAX_LABEL_BYTES}")
            }
            Self::TooManyMetrics(metric) => {
                write!(f, "metric `{metric}` exceeds the limit of {MAX_DETECTED} metrics that no file defines")
            }
            Self::BadValue(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for SampleError {}

/// Writes what to add to `metrics.yaml`.
fn write_undeclared(f: &mut fmt::Formatter<'_>, definition: &Definition) -> fmt::Result {
    let Definition { name, kind, unit, labels } = definition;
    let labels: Vec<&str> = labels.iter().map(|(name, _)| name.as_str()).collect();
    write!(
        f,
        "metric `{name}` is not defined in metrics.yaml; add under model_metrics.{}: \
         `- {{name: {name}, unit: {}, dimensions: [{}]}}`, or start with --model-metrics-auto-detect",
        kind.unwrap_or(Kind::Gauge).as_str(),
        if unit.is_empty() { "unit" } else { unit },
        labels.join(", ")
    )
}
