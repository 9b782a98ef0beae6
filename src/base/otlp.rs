//! The parts of the OpenTelemetry protocol (OTLP 1.10) that metrics and traces share: the generated
//! messages, attributes, and the answers of collectors.
//!
//! The messages are generated from the published schemas in `proto/opentelemetry`. No I/O:
//! `frontend/telemetry/src/otlp` sends messages.

use std::time::Duration;

use prost::Message;

/// The generated messages, including those that nothing here uses.
#[allow(dead_code, missing_docs, unreachable_pub, unused_qualifications, clippy::all)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/otlp.rs"));
    pub use opentelemetry::proto::{collector, common, metrics, resource, trace};
}

use proto::collector::metrics::v1::ExportMetricsServiceResponse;
use proto::collector::trace::v1::ExportTraceServiceResponse;
use proto::common::v1::{AnyValue, ArrayValue, KeyValue, any_value};
use proto::resource::v1::Resource;

/// The default of the attribute `service.name`: Triton's.
pub const SERVICE_NAME: &str = "triton-inference-server";

named_enum! {
    /// A kind of data with a dedicated service.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Signal {
        /// Metrics.
        Metrics => "metrics",
        /// Traces.
        Traces => "traces",
    }
    /// The signal's name in paths and in the labels of metrics.
    pub fn as_str;
}

/// A collector's message about an export that it accepted at least in part ("partial success").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejected {
    /// The number of data points or spans that it rejected. With 0, the message is a warning.
    pub count: u64,
    /// The collector's reason or warning.
    pub reason: String,
}

impl Signal {
    /// Returns the path of the service over HTTP, below the endpoint of all signals.
    pub fn path(self) -> &'static str {
        match self {
            Self::Metrics => "/v1/metrics",
            Self::Traces => "/v1/traces",
        }
    }

    /// Returns the path of the service's gRPC method.
    pub fn method(self) -> &'static str {
        match self {
            Self::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
            Self::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
        }
    }

    /// Returns the data that a collector rejected, or its warning, from its response to an export.
    /// Returns `None` if it accepted all data without a message, or if the response cannot be
    /// decoded.
    pub fn rejected(self, answer: &[u8]) -> Option<Rejected> {
        let (count, reason) = match self {
            Self::Metrics => {
                let partial = ExportMetricsServiceResponse::decode(answer).ok()?.partial_success?;
                (partial.rejected_data_points, partial.error_message)
            }
            Self::Traces => {
                let partial = ExportTraceServiceResponse::decode(answer).ok()?.partial_success?;
                (partial.rejected_spans, partial.error_message)
            }
        };
        let count = u64::try_from(count).unwrap_or(0);
        (count > 0 || !reason.is_empty()).then_some(Rejected { count, reason })
    }
}

/// Random numbers for ids and pauses, 64 bits each. They need not be cryptographically secure.
pub trait Random {
    /// Returns the next number.
    fn next(&mut self) -> u64;
}

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014): each
/// seed gives another sequence, and no number repeats within its period of 2^64.
#[derive(Clone, Debug)]
pub struct SplitMix(pub u64);

impl Random for SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

/// `google.rpc.Status` (googleapis, google/rpc/status.proto), of which only the details are read
/// here.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Detail>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Detail {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo` (googleapis, `google/rpc/error_details.proto`).
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Delay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// Returns the time after which an export may be retried, from the details of a gRPC status; `None`
/// if they contain none.
pub fn retry_delay(details: &[u8]) -> Option<Duration> {
    let status = Status::decode(details).ok()?;
    let info =
        status.details.iter().find(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let delay = RetryInfo::decode(info.value.as_slice()).ok()?.retry_delay.unwrap_or_default();
    let seconds = u64::try_from(delay.seconds).ok()?;
    let nanos = u32::try_from(delay.nanos).ok()?;
    // `Duration::new` panics if the nanoseconds overflow the seconds.
    Some(Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into())))
}

/// Returns the attributes of this server: those that describe the exporter, then the given ones,
/// which take precedence.
pub fn resource_attributes(given: &[(String, String)]) -> Vec<(String, String)> {
    let own = [
        ("telemetry.sdk.name", "pharos"),
        ("telemetry.sdk.language", "rust"),
        ("telemetry.sdk.version", env!("CARGO_PKG_VERSION")),
    ];
    let own = own
        .iter()
        .filter(|(key, _)| !given.iter().any(|(known, _)| known == key))
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    own.chain(given.iter().cloned()).collect()
}

/// Returns a resource with these attributes.
pub fn resource(attributes: &[(String, String)]) -> Resource {
    let attributes = attributes.iter().map(|(key, value)| text(key, value)).collect();
    Resource { attributes, ..Resource::default() }
}

/// Returns an attribute whose value is a text.
pub fn text(key: &str, value: &str) -> KeyValue {
    attribute(key, any_value::Value::StringValue(value.to_owned()))
}

/// Returns an attribute whose value is a number; `i64::MAX` if it is larger.
pub fn number(key: &str, value: u64) -> KeyValue {
    attribute(key, any_value::Value::IntValue(i64::try_from(value).unwrap_or(i64::MAX)))
}

/// Returns an attribute whose value is a number with decimals.
pub fn decimal(key: &str, value: f64) -> KeyValue {
    attribute(key, any_value::Value::DoubleValue(value))
}

/// Returns an attribute whose value is a list of texts.
pub fn texts<'a>(key: &str, values: impl Iterator<Item = &'a str>) -> KeyValue {
    let value =
        |text: &str| AnyValue { value: Some(any_value::Value::StringValue(text.to_owned())) };
    let values = values.map(value).collect();
    attribute(key, any_value::Value::ArrayValue(ArrayValue { values }))
}

fn attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::proto::collector::metrics::v1::ExportMetricsPartialSuccess;
    use super::proto::collector::trace::v1::ExportTracePartialSuccess;
    use super::*;

    #[test]
    fn rejected_data_and_warnings_are_read() {
        for (given, reason, expected) in [
            (3, "full", Some(3)),
            (3, "", Some(3)),
            (0, "old schema", Some(0)),
            (-1, "odd", Some(0)),
            (0, "", None),
        ] {
            let error_message = reason.to_owned();
            let partial = Some(ExportTracePartialSuccess {
                rejected_spans: given,
                error_message: error_message.clone(),
            });
            let traces = ExportTraceServiceResponse { partial_success: partial }.encode_to_vec();
            let partial =
                Some(ExportMetricsPartialSuccess { rejected_data_points: given, error_message });
            let metrics = ExportMetricsServiceResponse { partial_success: partial }.encode_to_vec();
            let expected = expected.map(|count| Rejected { count, reason: reason.to_owned() });
            for (signal, answer) in [(Signal::Traces, traces), (Signal::Metrics, metrics)] {
                assert_eq!(signal.rejected(&answer), expected);
                assert_eq!((signal.rejected(b""), signal.rejected(b"{}")), (None, None));
            }
        }
    }

    #[test]
    fn the_retry_delay_is_a_detail_of_a_status() {
        let details = |type_url: &str, delay: Option<Delay>| {
            let value = RetryInfo { retry_delay: delay }.encode_to_vec();
            Status { details: vec![Detail { type_url: type_url.to_owned(), value }] }
                .encode_to_vec()
        };
        let info = "type.googleapis.com/google.rpc.RetryInfo";
        let delay = |seconds, nanos| Some(Delay { seconds, nanos });
        for (given, expected) in [
            (details(info, delay(2, 500_000_000)), Some(Duration::from_millis(2500))),
            (details(info, delay(0, i32::MAX)), Some(Duration::from_nanos(2_147_483_647))),
            (details(info, None), Some(Duration::ZERO)),
            (details(info, delay(-1, 0)), None),
            (details("type.googleapis.com/google.rpc.ErrorInfo", delay(2, 0)), None),
            (Vec::new(), None),
            (vec![0xff], None),
        ] {
            assert_eq!(retry_delay(&given), expected, "{given:?}");
        }
    }

    #[test]
    fn given_attributes_take_precedence() {
        let given = [
            ("telemetry.sdk.name".to_owned(), "mine".to_owned()),
            ("zone".to_owned(), "z".to_owned()),
        ];
        let all = resource_attributes(&given);
        assert_eq!(all.len(), 4);
        assert_eq!(all[2..], given);
    }
}
