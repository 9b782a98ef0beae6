//! The types of metrics.

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Only grows; a sample is an increment.
    Counter,
    /// Goes up and down; a sample is the new value.
    Gauge,
    /// A distribution by buckets; a sample is an observation.
    Histogram,
    /// A distribution by quantiles; a sample is an observation.
    Summary,
}

impl Kind {
    /// The type's name in `metrics.yaml` and in `# TYPE` lines.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Summary => "summary",
        }
    }
}
