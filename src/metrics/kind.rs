//! The types of metrics.

use serde::{Deserialize, Serialize};

named_enum! {
    /// The type of a metric.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Kind {
        /// Only grows; a sample is an increment.
        Counter => "counter",
        /// Goes up and down; a sample is the new value.
        Gauge => "gauge",
        /// A distribution by buckets; a sample is an observation.
        Histogram => "histogram",
        /// A distribution by quantiles; a sample is an observation.
        Summary => "summary",
    }
    /// The type's name in `metrics.yaml` and in `# TYPE` lines.
    pub fn as_str;
}
