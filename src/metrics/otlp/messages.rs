//! Messages of limited size: gRPC servers accept up to 4 MiB.

use bytes::Bytes;
use pharos_base::otlp::proto::collector::metrics::v1::ExportMetricsServiceRequest;
use pharos_base::otlp::proto::common::v1::InstrumentationScope;
use pharos_base::otlp::proto::metrics::v1::metric::Data;
use pharos_base::otlp::proto::metrics::v1::{
    AggregationTemporality, ExponentialHistogram, Gauge, Histogram, Metric, ResourceMetrics,
    ScopeMetrics, Sum, Summary,
};
use pharos_base::otlp::proto::resource::v1::Resource;
use prost::Message;

use super::points::Point;
use super::state::State;
use crate::catalog::MetricSpec;

/// The size in bytes above which a message is finished.
const MESSAGE_BYTES: usize = 1 << 20;
/// The name of the scope of all metrics.
const SCOPE: &str = "pharos";
/// The maximum number of bytes that tags and lengths add to a part of a message.
const FRAMING: usize = 16;

/// One message for a collector.
#[derive(Debug)]
pub struct Export {
    /// The encoded `ExportMetricsServiceRequest`.
    pub message: Bytes,
    /// The number of its data points.
    pub points: u64,
    pub(super) now_ns: u64,
    /// The states of the series whose deltas it contains.
    pub(super) states: Vec<(String, State)>,
}

/// Collects data points into messages.
pub(super) struct Messages {
    resource: Resource,
    now_ns: u64,
    metrics: Vec<Metric>,
    /// The size of `metrics`, bytes; not less than encoded.
    size: usize,
    points: u64,
    states: Vec<(String, State)>,
    finished: Vec<Export>,
}

impl Messages {
    pub(super) fn new(resource: Resource, now_ns: u64) -> Self {
        Self {
            resource,
            now_ns,
            metrics: Vec::new(),
            size: 0,
            points: 0,
            states: Vec::new(),
            finished: Vec::new(),
        }
    }

    /// Returns the time of all data points.
    pub(super) fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Adds a point of a metric, whose values are deltas or cumulative. All points of a metric are
    /// added in succession.
    pub(super) fn add(&mut self, spec: &MetricSpec, delta: bool, point: Point) {
        let size = point.size() + FRAMING;
        if self.size + size > MESSAGE_BYTES {
            self.flush();
        }
        if self
            .metrics
            .last()
            .is_none_or(|metric| metric.name != spec.name || !holds(metric, &point))
        {
            let metric = metric(spec, delta, &point);
            self.size += metric.encoded_len() + FRAMING;
            self.metrics.push(metric);
        }
        self.size += size;
        self.points += 1;
        match (self.metrics.last_mut().and_then(|metric| metric.data.as_mut()), point) {
            (Some(Data::Gauge(data)), Point::Gauge(point)) => data.data_points.push(point),
            (Some(Data::Sum(data)), Point::Sum(point)) => data.data_points.push(point),
            (Some(Data::Histogram(data)), Point::Histogram(point)) => data.data_points.push(point),
            (Some(Data::ExponentialHistogram(data)), Point::Exponential(point)) => {
                data.data_points.push(point)
            }
            (Some(Data::Summary(data)), Point::Summary(point)) => data.data_points.push(point),
            // The metric was created for points of this type.
            _ => self.points -= 1,
        }
    }

    /// Adds the state of the series of the last point.
    pub(super) fn remember(&mut self, key: String, state: State) {
        self.states.push((key, state));
    }

    /// Returns all messages.
    pub(super) fn finish(mut self) -> Vec<Export> {
        self.flush();
        self.finished
    }

    fn flush(&mut self) {
        if self.metrics.is_empty() {
            return;
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let scope = InstrumentationScope {
            name: SCOPE.to_owned(),
            version,
            ..InstrumentationScope::default()
        };
        let metrics = std::mem::take(&mut self.metrics);
        let scope_metrics =
            vec![ScopeMetrics { scope: Some(scope), metrics, ..ScopeMetrics::default() }];
        let resource = Some(self.resource.clone());
        let resource_metrics =
            vec![ResourceMetrics { resource, scope_metrics, ..ResourceMetrics::default() }];
        let message = ExportMetricsServiceRequest { resource_metrics }.encode_to_vec().into();
        let points = std::mem::take(&mut self.points);
        let states = std::mem::take(&mut self.states);
        self.finished.push(Export { message, points, now_ns: self.now_ns, states });
        self.size = 0;
    }
}

/// Returns whether a metric has data points of this type. Series of one histogram differ while a
/// changed `native` applies only to models that were loaded after the change.
fn holds(metric: &Metric, point: &Point) -> bool {
    matches!(metric.data, Some(Data::ExponentialHistogram(_)))
        == matches!(point, Point::Exponential(_))
}

/// Creates a metric without data points, for points like this one.
fn metric(spec: &MetricSpec, delta: bool, point: &Point) -> Metric {
    let temporality =
        if delta { AggregationTemporality::Delta } else { AggregationTemporality::Cumulative };
    let aggregation_temporality = temporality.into();
    let data = match point {
        Point::Sum(_) => {
            Data::Sum(Sum { aggregation_temporality, is_monotonic: true, ..Sum::default() })
        }
        Point::Gauge(_) => Data::Gauge(Gauge::default()),
        Point::Histogram(_) => {
            Data::Histogram(Histogram { aggregation_temporality, ..Histogram::default() })
        }
        Point::Exponential(_) => Data::ExponentialHistogram(ExponentialHistogram {
            aggregation_temporality,
            ..ExponentialHistogram::default()
        }),
        Point::Summary(_) => Data::Summary(Summary::default()),
    };
    Metric {
        name: spec.name.clone(),
        description: spec.help.clone(),
        unit: ucum(spec).to_owned(),
        data: Some(data),
        ..Metric::default()
    }
}

/// Returns the unit in UCUM (ucum.org), as OTLP requires; other units as written in `metrics.yaml`.
/// Counts have no unit. Megabytes are 2^20 bytes here.
///
/// The values of a built-in distribution of durations are in its own unit, whatever `metrics.yaml`
/// says.
fn ucum(spec: &MetricSpec) -> &str {
    if let Some(unit) = spec.time_unit() {
        return unit.ucum();
    }
    match spec.unit.as_str() {
        "Count" | "Info" | "unit" => "",
        "Ratio" => "1",
        "Percent" => "%",
        "Bytes" => "By",
        "Kilobytes" => "KiBy",
        "Megabytes" => "MiBy",
        "Gigabytes" => "GiBy",
        "Celsius" => "Cel",
        "Joules" => "J",
        "Watts" => "W",
        other => other,
    }
}
