//! Load reports for load balancers: Open Request Cost Aggregation (ORCA), as Envoy and gRPC read
//! it.
//!
//! A [`Tracker`] turns periodic samples of counters into [`Reports`]; a request only takes the
//! latest one. Specification: the messages of `proto/xds`; the header as in Envoy's
//! `source/common/orca/orca_parser.cc` and Triton's `src/orca_http.cc`.

mod message;
mod rates;
mod report;
mod values;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

pub use rates::{ModelSample, Sample, Tracker};
pub use report::LoadReport;
pub use values::Values;

/// The request header or metadata key that asks for a load report.
pub const REQUEST_HEADER: &str = "endpoint-load-metrics-format";

/// The response header with a load report.
pub const RESPONSE_HEADER: &str = "endpoint-load-metrics";

/// The gRPC trailer with a load report, in base64.
pub const TRAILER: &str = "endpoint-load-metrics-bin";

/// The time between two samples: Envoy and gRPC update their weights each second.
pub const PERIOD: Duration = Duration::from_secs(1);

named_enum! {
    /// A form of the response header.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Format {
        /// `JSON {...}`, with the names of the protobuf fields.
        Json => "json",
        /// `TEXT name=value,...`, with `named_metrics.` before the names of the model's metrics.
        Text => "text",
        /// `BIN` and the base64 of the protobuf message.
        Binary => "binary",
    }
    /// Returns the value of the request header.
    pub fn name;
}

impl Format {
    /// Returns the format of a request header's value, in upper or lower case; `None` for an
    /// unknown one.
    pub fn from_header(value: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|format| value.trim_ascii().eq_ignore_ascii_case(format.name().as_bytes()))
    }
}

/// The reports of one sample: one for each model, and one for the server.
#[derive(Debug, Default)]
pub struct Reports {
    server: Arc<LoadReport>,
    models: BTreeMap<Arc<str>, Arc<LoadReport>>,
}

impl Reports {
    /// Returns the report with the metrics of a model; `None` for a model without instances.
    pub fn of(&self, model: &str) -> Option<Arc<LoadReport>> {
        self.models.get(model).cloned()
    }

    /// Returns the report with the sums over all models.
    pub fn of_server(&self) -> Arc<LoadReport> {
        self.server.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read_in_any_case() {
        for (value, expected) in [
            ("json", Some(Format::Json)),
            ("JSON", Some(Format::Json)),
            (" Text ", Some(Format::Text)),
            ("binary", Some(Format::Binary)),
            ("bin", None),
            ("", None),
            ("json,text", None),
            ("\u{e9}", None),
        ] {
            assert_eq!(Format::from_header(value.as_bytes()), expected, "{value}");
        }
    }
}
