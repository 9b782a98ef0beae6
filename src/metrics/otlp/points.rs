//! The data points of OTLP.

use prost::Message;

use crate::metrics::catalog::Kind;
use crate::metrics::reading::{self, Number, Reading};
use crate::otlp::proto::common::v1::KeyValue;
use crate::otlp::proto::metrics::v1::summary_data_point::ValueAtQuantile;
use crate::otlp::proto::metrics::v1::{
    Exemplar, HistogramDataPoint, NumberDataPoint, SummaryDataPoint, exemplar, number_data_point,
};
use crate::otlp::text;

/// The time that a data point covers, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) start_ns: u64,
    pub(super) now_ns: u64,
}

/// A data point with the type of its metric.
#[derive(Debug)]
pub(super) enum Point {
    /// Of a gauge.
    Gauge(NumberDataPoint),
    /// Of a counter.
    Sum(NumberDataPoint),
    /// Of a histogram with explicit bounds.
    Histogram(HistogramDataPoint),
    /// Of a summary.
    Summary(SummaryDataPoint),
}

impl Point {
    /// Returns the size of the encoded point in bytes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Gauge(point) | Self::Sum(point) => point.encoded_len(),
            Self::Histogram(point) => point.encoded_len(),
            Self::Summary(point) => point.encoded_len(),
        }
    }
}

/// Creates the data point of one series.
pub(super) fn point(kind: Kind, labels: &[(&str, &str)], reading: Reading, span: Span) -> Point {
    let attributes = labels.iter().map(|(name, value)| text(name, value)).collect();
    match reading {
        Reading::Number(value) => {
            let point = number(attributes, value, span);
            if kind == Kind::Gauge { Point::Gauge(point) } else { Point::Sum(point) }
        }
        Reading::Histogram(value) => Point::Histogram(histogram(attributes, &value, span)),
        Reading::Summary(value) => Point::Summary(summary(attributes, &value, span)),
    }
}

fn number(attributes: Vec<KeyValue>, value: Number, span: Span) -> NumberDataPoint {
    let whole = match value {
        Number::Whole(value) => i64::try_from(value).ok(),
        Number::Signed(value) => Some(value),
        Number::Float(_) => None,
    };
    let value = match whole {
        Some(value) => number_data_point::Value::AsInt(value),
        None => number_data_point::Value::AsDouble(value.as_f64()),
    };
    NumberDataPoint {
        attributes,
        start_time_unix_nano: span.start_ns,
        time_unix_nano: span.now_ns,
        value: Some(value),
        ..NumberDataPoint::default()
    }
}

/// Creates a point with the buckets of the store. Its last bucket has no upper bound in OTLP.
fn histogram(attributes: Vec<KeyValue>, value: &reading::Histogram, span: Span) -> HistogramDataPoint {
    HistogramDataPoint {
        attributes,
        start_time_unix_nano: span.start_ns,
        time_unix_nano: span.now_ns,
        count: value.count(),
        sum: Some(value.sum),
        bucket_counts: value.buckets.iter().map(|(_, count)| *count).collect(),
        explicit_bounds: value.buckets.iter().map(|(bound, _)| *bound).filter(|bound| bound.is_finite()).collect(),
        exemplars: value.exemplars.values().map(exemplar_of).collect(),
        ..HistogramDataPoint::default()
    }
}

fn exemplar_of(exemplar: &reading::Exemplar) -> Exemplar {
    Exemplar {
        time_unix_nano: exemplar.at_ms.saturating_mul(1_000_000),
        trace_id: exemplar.trace.to_bytes().to_vec(),
        value: Some(exemplar::Value::AsDouble(exemplar.value)),
        ..Exemplar::default()
    }
}

/// Creates a point without the quantiles that have no observations.
fn summary(attributes: Vec<KeyValue>, value: &reading::Summary, span: Span) -> SummaryDataPoint {
    let known = value.quantiles.iter().filter(|(_, value)| !value.is_nan());
    SummaryDataPoint {
        attributes,
        start_time_unix_nano: span.start_ns,
        time_unix_nano: span.now_ns,
        count: value.count,
        sum: value.sum,
        quantile_values: known
            .map(|(quantile, value)| ValueAtQuantile { quantile: *quantile, value: *value })
            .collect(),
        ..SummaryDataPoint::default()
    }
}
