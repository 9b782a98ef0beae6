//! What can be wrong with a sample.

use std::fmt;

use super::catalog::Kind;
use super::channel::Definition;

/// How long a label value may be, in bytes: what a worker sends must not fill the frontend's memory.
pub const MAX_LABEL_BYTES: usize = 256;
/// How many metrics may be detected, or described by models, for the same reason.
pub(super) const MAX_DETECTED: usize = 1_000;

/// Why a sample was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleError {
    /// No metric has this name, and metrics are not detected.
    Undeclared(Box<Definition>),
    /// The definition switches this metric off.
    Disabled(String),
    /// The server records this metric itself.
    Reserved(String),
    /// A name that is kept for something else or looks like another metric's: why.
    Collision(String),
    /// A name that the views cannot show.
    BadName(String),
    /// The metric is of another type.
    WrongKind {
        /// The metric's name.
        metric: String,
        /// Its type.
        expected: Kind,
        /// The type that was given or asked for.
        given: Kind,
    },
    /// The labels are not the metric's dimensions.
    WrongLabels {
        /// The metric's name.
        metric: String,
        /// Its dimensions.
        expected: Vec<String>,
        /// What was given: names, or as many `_` where only values were.
        given: Vec<String>,
    },
    /// A label value has more than [`MAX_LABEL_BYTES`] bytes.
    LabelTooLong {
        /// The metric's name.
        metric: String,
        /// The value's length in bytes.
        length: usize,
    },
    /// So many metrics have been detected that no more are.
    TooManyMetrics(String),
    /// A counter's increment that is negative, or a value that is no number where one is needed.
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
                "`{name}` is no name for a metric or label; allowed are letters, digits (not first) and `_`, \
                 in a metric's name also `:`"
            ),
            Self::WrongKind { metric, expected, given } => {
                write!(f, "metric `{metric}` is a {}, not a {}", expected.as_str(), given.as_str())
            }
            Self::WrongLabels { metric, expected, given } => {
                let (expected, given) = (expected.join(", "), given.join(", "));
                write!(f, "metric `{metric}` has the dimensions [{expected}], [{given}] were given")
            }
            Self::LabelTooLong { metric, length } => {
                write!(f, "a label value of metric `{metric}` has {length} bytes, allowed are {MAX_LABEL_BYTES}")
            }
            Self::TooManyMetrics(metric) => {
                write!(f, "metric `{metric}` is not defined, and {MAX_DETECTED} have been detected, the most allowed")
            }
            Self::BadValue(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for SampleError {}

/// What to write into `metrics.yaml`.
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
