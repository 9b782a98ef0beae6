//! The data points of OTLP.

use pharos_base::otlp::proto::common::v1::KeyValue;
use pharos_base::otlp::proto::metrics::v1::exponential_histogram_data_point::Buckets;
use pharos_base::otlp::proto::metrics::v1::summary_data_point::ValueAtQuantile;
use pharos_base::otlp::proto::metrics::v1::{
    Exemplar, ExponentialHistogramDataPoint, HistogramDataPoint, NumberDataPoint, SummaryDataPoint,
    exemplar, number_data_point,
};
use pharos_base::otlp::text;
use prost::Message;

use crate::catalog::{Kind, MetricSpec, NativeSpec};
use crate::reading::{self, Number, Reading};

/// The lowest scale of OpenTelemetry: a bucket spans 1024 powers of two.
const LOWEST_SCALE: i32 = -10;

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
    /// Of a histogram with exponential buckets.
    Exponential(ExponentialHistogramDataPoint),
    /// Of a summary.
    Summary(SummaryDataPoint),
}

impl Point {
    /// Returns the size of the encoded point in bytes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Gauge(point) | Self::Sum(point) => point.encoded_len(),
            Self::Histogram(point) => point.encoded_len(),
            Self::Exponential(point) => point.encoded_len(),
            Self::Summary(point) => point.encoded_len(),
        }
    }
}

/// Creates the data point of one series. A histogram has exponential buckets if the reading
/// contains native ones.
pub(super) fn point(
    spec: &MetricSpec,
    labels: &[(&str, &str)],
    reading: Reading,
    span: Span,
) -> Point {
    let attributes = labels.iter().map(|(name, value)| text(name, value)).collect();
    match reading {
        Reading::Number(value) => {
            let point = number(attributes, value, span);
            if spec.kind == Kind::Gauge { Point::Gauge(point) } else { Point::Sum(point) }
        }
        Reading::Histogram(mut value) => match value.native.take() {
            Some(native) => {
                let max_buckets = spec.native.unwrap_or_default().max_buckets;
                Point::Exponential(exponential(
                    attributes,
                    &value,
                    native.within(max_buckets),
                    span,
                ))
            }
            None => Point::Histogram(histogram(attributes, &value, span)),
        },
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
fn histogram(
    attributes: Vec<KeyValue>,
    value: &reading::Histogram,
    span: Span,
) -> HistogramDataPoint {
    HistogramDataPoint {
        attributes,
        start_time_unix_nano: span.start_ns,
        time_unix_nano: span.now_ns,
        count: value.count(),
        sum: sum(value, value.count()),
        bucket_counts: value.buckets.iter().map(|(_, count)| *count).collect(),
        explicit_bounds: value
            .buckets
            .iter()
            .map(|(bound, _)| *bound)
            .filter(|bound| bound.is_finite())
            .collect(),
        exemplars: value.exemplars.values().map(exemplar_of).collect(),
        ..HistogramDataPoint::default()
    }
}

/// Returns the sum of the observations of a point, which OTLP requires to be monotonic, and 0
/// without observations; `None` if it is neither.
fn sum(value: &reading::Histogram, count: u64) -> Option<f64> {
    match count {
        0 => Some(0.0),
        _ => (value.sum.is_finite() && !value.negative).then_some(value.sum),
    }
}

/// Creates a point with native buckets. The bucket `index` of OTLP begins where Prometheus' bucket
/// with this index ends.
fn exponential(
    attributes: Vec<KeyValue>,
    value: &reading::Histogram,
    native: reading::Native,
    span: Span,
) -> ExponentialHistogramDataPoint {
    ExponentialHistogramDataPoint {
        attributes,
        start_time_unix_nano: span.start_ns,
        time_unix_nano: span.now_ns,
        count: native.count(),
        sum: sum(value, native.count()),
        scale: native.schema,
        zero_count: native.zero_count,
        zero_threshold: native.zero_threshold,
        positive: dense(&native.positive),
        negative: dense(&native.negative),
        exemplars: value.exemplars.values().map(exemplar_of).collect(),
        ..ExponentialHistogramDataPoint::default()
    }
}

/// Returns the buckets from the first to the last one, including empty ones. `None` without
/// buckets.
fn dense(buckets: &[(i32, u64)]) -> Option<Buckets> {
    let (first, _) = buckets.first()?;
    let mut bucket_counts = Vec::with_capacity(width(buckets));
    for (index, count) in buckets {
        bucket_counts.resize(index.abs_diff(*first) as usize, 0);
        bucket_counts.push(*count);
    }
    Some(Buckets { offset: first - 1, bucket_counts })
}

/// Returns the number of buckets from the first to the last one.
fn width(buckets: &[(i32, u64)]) -> usize {
    match (buckets.first(), buckets.last()) {
        (Some((first, _)), Some((last, _))) => last.abs_diff(*first) as usize + 1,
        _ => 0,
    }
}

impl reading::Native {
    /// Lowers the schema until neither sign needs more than `max` buckets without gaps.
    /// Observations above the highest distinguished octave, infinite ones included, move to the
    /// bucket that follows it: OTLP has no other bucket for them.
    fn within(mut self, max: usize) -> Self {
        let top = match u32::try_from(self.schema) {
            Ok(schema) => NativeSpec::HIGHEST_EXPONENT << schema,
            Err(_) => NativeSpec::HIGHEST_EXPONENT >> -self.schema,
        };
        for (index, _) in self.positive.iter_mut().chain(&mut self.negative) {
            *index = (*index).min(top + 1);
        }
        while self.schema > LOWEST_SCALE && width(&self.positive).max(width(&self.negative)) > max {
            self.lower();
        }
        self
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
