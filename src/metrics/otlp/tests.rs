//! Decodes exports and compares them with the store: types, deltas, restarts, sizes.

use pharos_base::id::{ModelVersion, TraceId};
use pharos_base::otlp::proto::collector::metrics::v1::ExportMetricsServiceRequest;
use pharos_base::otlp::proto::common::v1::{KeyValue, any_value};
use pharos_base::otlp::proto::metrics::v1::metric::Data;
use pharos_base::otlp::proto::metrics::v1::number_data_point::Value;
use pharos_base::otlp::proto::metrics::v1::{
    ExponentialHistogramDataPoint, HistogramDataPoint, Metric, NumberDataPoint,
};
use pharos_base::timeline::{ComputeStamps, Instant, Timeline};
use prost::Message;

use super::*;
use crate::cache::Settings;
use crate::catalog::{Catalog, Overrides, Setting};
use crate::record;

const TIMELINE: Timeline = Timeline {
    received: Instant(0),
    request_start: Instant(1_000_000),
    queue_start: Instant(1_001_000),
    compute: ComputeStamps {
        start: Instant(1_101_999),
        input_end: Instant(1_105_000),
        output_start: Instant(2_105_000),
        end: Instant(2_107_500),
    },
    request_end: Instant(2_200_000),
    insertion_ns: 0,
    cache: None,
    batch_size: 0,
};
const SUCCESS: &str = "nv_inference_request_success";
const LATENCY: &str = "ts_inference_latency_microseconds";
const HISTOGRAM: &str = "pharos_request_duration_seconds";
const START: u64 = 1_000_000_000_000_000_000;
const SECOND: u64 = 1_000_000_000;

fn shipped() -> Cache {
    let settings = ["histogram_latencies", "summary_latencies"]
        .map(|key| Setting::parse(key, "true").unwrap())
        .to_vec();
    let catalog = Overrides { settings, ..Overrides::default() }.apply(Catalog::shipped());
    Cache::new(catalog, Settings::new("h"))
}

fn encoder(temporality: Temporality) -> Encoder {
    encoder_of(temporality, Aggregation::Explicit)
}

fn encoder_of(temporality: Temporality, aggregation: Aggregation) -> Encoder {
    Encoder::new(&[("service.name".to_owned(), "s".to_owned())], (temporality, aggregation), START)
}

/// The metrics of all messages, by name.
fn decoded(exports: &[Export]) -> HashMap<String, Metric> {
    let mut all: HashMap<String, Metric> = HashMap::new();
    for export in exports {
        let request = ExportMetricsServiceRequest::decode(&export.message[..]).unwrap();
        let [resource] = &request.resource_metrics[..] else { panic!("one resource is expected") };
        assert_eq!(string(&resource.resource.as_ref().unwrap().attributes, "service.name"), "s");
        let [scope] = &resource.scope_metrics[..] else { panic!("one scope is expected") };
        assert_eq!(scope.scope.as_ref().unwrap().name, "pharos");
        for metric in scope.metrics.clone() {
            match (all.get_mut(&metric.name).and_then(|known| known.data.as_mut()), &metric.data) {
                (Some(Data::Sum(known)), Some(Data::Sum(more))) => {
                    known.data_points.extend(more.data_points.clone())
                }
                (Some(known), more) => panic!("{} is split: {known:?} {more:?}", metric.name),
                (None, _) => drop(all.insert(metric.name.clone(), metric)),
            }
        }
    }
    all
}

fn string(attributes: &[KeyValue], key: &str) -> String {
    let value = attributes
        .iter()
        .find(|attribute| attribute.key == key)
        .and_then(|attribute| attribute.value.clone());
    match value.and_then(|value| value.value) {
        Some(any_value::Value::StringValue(value)) => value,
        other => panic!("{key}: {other:?}"),
    }
}

fn number(metrics: &HashMap<String, Metric>, name: &str) -> NumberDataPoint {
    match metrics.get(name).and_then(|metric| metric.data.clone()) {
        Some(Data::Sum(sum)) => sum.data_points[0].clone(),
        Some(Data::Gauge(gauge)) => gauge.data_points[0].clone(),
        other => panic!("{name}: {other:?}"),
    }
}

fn histogram(metrics: &HashMap<String, Metric>, name: &str) -> HistogramDataPoint {
    match metrics.get(name).and_then(|metric| metric.data.clone()) {
        Some(Data::Histogram(histogram)) => histogram.data_points[0].clone(),
        other => panic!("{name}: {other:?}"),
    }
}

/// The start and the value of a counter of whole numbers.
fn count(exports: &[Export], name: &str) -> (u64, i64) {
    let point = number(&decoded(exports), name);
    match point.value {
        Some(Value::AsInt(value)) => ((point.start_time_unix_nano - START) / SECOND, value),
        other => panic!("{name}: {other:?}"),
    }
}

fn double(point: &NumberDataPoint) -> f64 {
    match point.value {
        Some(Value::AsDouble(value)) => value,
        other => panic!("{other:?}"),
    }
}

/// The time of an export, in seconds after the start.
fn at(second: u64) -> u64 {
    START + second * SECOND
}

#[test]
fn metrics_have_the_types_units_and_labels_of_a_scrape() {
    let cache = shipped();
    let series =
        cache.model_loaded(&ModelVersion::new("m", 1), &[("team".to_owned(), "t".to_owned())]);
    record::inference_done(&series, &TIMELINE, 4);
    record::request_pending(&series, 2);
    let trace = TraceId::new(7).unwrap();
    record::inference_traced(&series, &TIMELINE, trace, at(3) / 1_000_000);
    let metrics = decoded(&encoder(Temporality::Cumulative).encode(&cache, at(5)));
    let success = number(&metrics, SUCCESS);
    let labels = ["model", "version", "_team"].map(|key| string(&success.attributes, key));
    assert_eq!((labels, success.attributes.len()), (["m", "1", "t"].map(str::to_owned), 3));
    assert_eq!((success.value, success.start_time_unix_nano), (Some(Value::AsInt(1)), START));
    assert_eq!(success.time_unix_nano, at(5));
    let pending = number(&metrics, "nv_inference_pending_request_count");
    assert_eq!((pending.value, pending.start_time_unix_nano), (Some(Value::AsInt(2)), 0));
    assert!((double(&number(&metrics, LATENCY)) - 1200.0).abs() < 1e-9);
    let metric = &metrics[HISTOGRAM];
    assert_eq!((metric.unit.as_str(), metric.description.is_empty()), ("s", false));
    let point = histogram(&metrics, HISTOGRAM);
    assert_eq!((point.count, point.sum), (1, Some(0.0012)));
    assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
    let filled = point.bucket_counts.iter().position(|count| *count == 1).unwrap();
    assert!(point.explicit_bounds[filled - 1] < 0.0012 && point.explicit_bounds[filled] >= 0.0012);
    assert_eq!(point.exemplars.len(), 1);
    assert_eq!(point.exemplars[0].trace_id, trace.to_bytes());
    assert_eq!(point.exemplars[0].time_unix_nano, at(3));
    assert_eq!(metrics["nv_inference_queue_summary_us"].unit, "us");
    let Some(Data::Summary(summary)) = &metrics["nv_inference_queue_summary_us"].data else {
        panic!("no summary")
    };
    assert_eq!(summary.data_points[0].count, 1);
    assert!(!summary.data_points[0].quantile_values.is_empty());
}

#[test]
fn every_family_of_a_scrape_is_exported_once() {
    let cache = shipped();
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    record::inference_requested(&series);
    let metrics = decoded(&encoder(Temporality::Delta).encode(&cache, at(1)));
    let readings = Readings::new(&cache, Details::default());
    let mut expected: Vec<&str> = Vec::new();
    for family in readings.families().iter().filter(|family| family.views().prometheus) {
        let mut exists = false;
        readings.each(family, &mut |_, _| exists = true);
        expected.extend(exists.then_some(family.spec().name.as_str()));
    }
    let mut found: Vec<&str> = metrics.keys().map(String::as_str).collect();
    expected.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, expected);
}

/// Other names (`also_as`) are for scrapes. The unit belongs to the values.
#[test]
fn a_metric_has_its_own_name_and_unit_only() {
    let yaml = format!(
        "ts_metrics:\n  histogram:\n    - {{name: {HISTOGRAM}, unit: s, dimensions: [model, \
         version], also_as: {{name: old_us, unit: us}}}}\nmodel_metrics:\n  gauge:\n    - {{name: \
         Age, unit: milliseconds}}\n"
    );
    let cache = Cache::new(Catalog::parse(&yaml, "m.yaml").unwrap(), Settings::new("h"));
    record::inference_done(&cache.model_loaded(&ModelVersion::new("m", 1), &[]), &TIMELINE, 1);
    cache.gauge("Age", &[]).unwrap().add_or_update(3.0).unwrap();
    let metrics = decoded(&encoder(Temporality::Cumulative).encode(&cache, at(1)));
    assert!(!metrics.contains_key("old_us"));
    assert_eq!(
        (metrics[HISTOGRAM].unit.as_str(), histogram(&metrics, HISTOGRAM).sum),
        ("s", Some(0.0012))
    );
    assert_eq!(metrics["Age"].unit, "ms");
}

#[test]
fn deltas_add_up_to_the_cumulative_values() {
    let cache = shipped();
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let mut deltas = encoder(Temporality::Delta);
    let mut cumulative = encoder(Temporality::Cumulative);
    let mut requests = 0;
    let mut latency = 0.0;
    let mut observed = Vec::new();
    let mut sum = 0.0;
    let mut start = START;
    for round in 1..=4u64 {
        for _ in 0..round {
            record::inference_done(&series, &TIMELINE, 1);
        }
        let exports = deltas.encode(&cache, at(round));
        let metrics = decoded(&exports);
        let point = histogram(&metrics, HISTOGRAM);
        let times = number(&metrics, LATENCY);
        assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (start, at(round)));
        // The third export fails, so the fourth contains its values.
        if round != 3 {
            start = at(round);
            requests += count(&exports, SUCCESS).1;
            latency += double(&times);
            observed.resize(point.bucket_counts.len(), 0);
            observed.iter_mut().zip(&point.bucket_counts).for_each(|(sum, count)| *sum += count);
            sum += point.sum.unwrap();
            exports.into_iter().for_each(|export| deltas.accepted(export));
        }
    }
    let exports = cumulative.encode(&cache, at(9));
    let metrics = decoded(&exports);
    let total = histogram(&metrics, HISTOGRAM);
    assert_eq!((requests, count(&exports, SUCCESS)), (10, (0, 10)));
    assert_eq!(observed, total.bucket_counts);
    assert!((sum - total.sum.unwrap()).abs() < 1e-12);
    assert!((latency - double(&number(&metrics, LATENCY))).abs() < 1e-6);
    let Some(Data::Sum(kind)) = &metrics[SUCCESS].data else { panic!("not a sum") };
    assert!(kind.is_monotonic);
}

#[test]
fn only_histograms_are_deltas_with_low_memory() {
    let cache = shipped();
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let mut encoder = encoder(Temporality::LowMemory);
    for round in 1..=2u64 {
        record::inference_done(&series, &TIMELINE, 1);
        let exports = encoder.encode(&cache, at(round));
        assert_eq!(count(&exports, SUCCESS), (0, i64::try_from(round).unwrap()));
        let metrics = decoded(&exports);
        let delta = i32::from(pharos_base::otlp::proto::metrics::v1::AggregationTemporality::Delta);
        let Some(Data::Histogram(kind)) = &metrics[HISTOGRAM].data else {
            panic!("not a histogram")
        };
        assert_eq!(
            (kind.aggregation_temporality, histogram(&metrics, HISTOGRAM).count),
            (delta, 1)
        );
        exports.into_iter().for_each(|export| encoder.accepted(export));
    }
}

#[test]
fn a_series_that_restarts_or_appears_has_a_new_start() {
    let model = ModelVersion::new("m", 1);
    for (temporality, restarted) in
        [(Temporality::Cumulative, (2, 1)), (Temporality::Delta, (2, 1))]
    {
        let cache = shipped();
        let mut encoder = encoder(temporality);
        let mut export = |second| {
            let exports = encoder.encode(&cache, at(second));
            let known = decoded(&exports).contains_key(SUCCESS).then(|| count(&exports, SUCCESS));
            exports.into_iter().for_each(|export| encoder.accepted(export));
            known
        };
        assert_eq!(export(1), None);
        // The model appears after the first export.
        let series = cache.model_loaded(&model, &[]);
        (0..3).for_each(|_| record::inference_done(&series, &TIMELINE, 1));
        assert_eq!(export(2), Some((1, 3)), "{temporality:?}");
        // A reload replaces its series.
        let series = cache.model_loaded(&model, &[]);
        record::inference_done(&series, &TIMELINE, 1);
        assert_eq!(export(3), Some(restarted), "{temporality:?}");
        cache.model_unloaded(&series);
        assert_eq!(export(4), None);
    }
}

#[test]
fn a_clock_that_goes_back_does_not_reverse_times() {
    let cache = shipped();
    cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let mut encoder = encoder(Temporality::Cumulative);
    drop(encoder.encode(&cache, at(5)));
    let point = number(&decoded(&encoder.encode(&cache, at(3))), SUCCESS);
    assert_eq!((point.start_time_unix_nano, point.time_unix_nano), (START, at(5)));
}

#[test]
fn messages_have_a_limited_size() {
    let yaml =
        "model_metrics:\n  counter:\n    - {name: Orders, unit: Count, dimensions: [shop]}\n";
    let cache = Cache::new(Catalog::parse(yaml, "m.yaml").unwrap(), Settings::new("h"));
    for shop in 0..5000 {
        let label = format!("{shop:0>200}");
        cache.counter("Orders", &[&label]).unwrap().add_or_update(1.0).unwrap();
    }
    let exports = encoder(Temporality::Delta).encode(&cache, at(1));
    assert!(exports.len() > 1 && exports.iter().all(|export| export.message.len() <= 1 << 20));
    assert_eq!(exports.iter().map(|export| export.points).sum::<u64>(), 5000);
    assert_eq!(exports.iter().map(|export| export.states.len()).sum::<usize>(), 5000);
    let Some(Data::Sum(orders)) = &decoded(&exports)["Orders"].data else { panic!("not a sum") };
    let shops: std::collections::HashSet<String> =
        orders.data_points.iter().map(|point| string(&point.attributes, "shop")).collect();
    assert_eq!(shops.len(), 5000);
}

const VALUES: &str = "Values";

/// A cache with the histogram `Values`, and what records an observation.
fn values(native: &str) -> Cache {
    let yaml = format!(
        "model_metrics:\n  histogram:\n    - {{name: {VALUES}, unit: Count, native: {native}}}\n"
    );
    Cache::new(Catalog::parse(&yaml, "m.yaml").unwrap(), Settings::new("h"))
}

fn observe(cache: &Cache, values: impl IntoIterator<Item = f64>) {
    let histogram = cache.histogram(VALUES, &[]).unwrap();
    values.into_iter().for_each(|value| histogram.add_or_update(value).unwrap());
}

fn exponential(exports: &[Export]) -> ExponentialHistogramDataPoint {
    match decoded(exports).get(VALUES).and_then(|metric| metric.data.clone()) {
        Some(Data::ExponentialHistogram(histogram)) => histogram.data_points[0].clone(),
        other => panic!("{other:?}"),
    }
}

/// Returns the lower bound and the count of each bucket that is not empty, by the definition of
/// OpenTelemetry: the bucket at `offset + position` holds the values above 2^(index / 2^scale).
fn bounds(point: &ExponentialHistogramDataPoint, negative: bool) -> Vec<(f64, u64)> {
    let side = if negative { &point.negative } else { &point.positive };
    let Some(side) = side else { return Vec::new() };
    let bound = |index: i32| (f64::from(index) * f64::from(-point.scale).exp2()).exp2();
    let counts = (side.offset..).zip(side.bucket_counts.iter().copied());
    counts.filter(|(_, count)| *count > 0).map(|(index, count)| (bound(index), count)).collect()
}

#[test]
fn native_buckets_are_exponential_histograms_if_chosen() {
    let cache = values("{schema: 1, zero_threshold: 0.001}");
    observe(&cache, [0.0, 0.0005, 1.0, 1.1, 4.0, -3.0]);
    let mut encoder = encoder_of(Temporality::Cumulative, Aggregation::Exponential);
    let point = exponential(&encoder.encode(&cache, at(1)));
    assert_eq!((point.count, point.sum, point.scale), (6, None, 1));
    assert_eq!((point.zero_count, point.zero_threshold), (2, 0.001));
    let root = 2f64.sqrt();
    assert_eq!(bounds(&point, false), [(0.5 * root, 1), (1.0, 1), (2.0 * root, 1)]);
    assert_eq!(bounds(&point, true), [(2.0 * root, 1)]);
    // 1.0 is in the bucket with the index -1, and 4.0 in the one with the index 3.
    let positive = point.positive.unwrap();
    assert_eq!((positive.offset, positive.bucket_counts), (-1, vec![1, 1, 0, 0, 1]));
    let explicit = decoded(&self::encoder(Temporality::Cumulative).encode(&cache, at(1)));
    assert_eq!(histogram(&explicit, VALUES).count, 6);
}

#[test]
fn histograms_without_native_buckets_stay_explicit() {
    let cache = values("false");
    observe(&cache, [1.0]);
    let mut encoder = encoder_of(Temporality::Cumulative, Aggregation::Exponential);
    assert_eq!(histogram(&decoded(&encoder.encode(&cache, at(1))), VALUES).count, 1);
}

/// Values far apart have few native buckets, but OTLP lists all between the first and the last one.
#[test]
fn buckets_without_gaps_are_as_few_as_configured() {
    let cache = values("{schema: 8, max_buckets: 20}");
    observe(&cache, [1e-15, 1e15, f64::INFINITY]);
    let mut encoder = encoder_of(Temporality::Cumulative, Aggregation::Exponential);
    let point = exponential(&encoder.encode(&cache, at(1)));
    let positive = point.positive.as_ref().unwrap();
    assert!(positive.bucket_counts.len() <= 20 && point.scale >= -10, "{point:?}");
    assert_eq!(positive.bucket_counts.iter().sum::<u64>(), 3);
    assert!(bounds(&point, false)[0].0 < 1e-15);
}

/// The scale falls while values spread; each delta continues at the new one.
#[test]
fn exponential_deltas_add_up_at_falling_scales() {
    let cache = values("{schema: 8, max_buckets: 30}");
    let form = |temporality| encoder_of(temporality, Aggregation::Exponential);
    let mut deltas = form(Temporality::Delta);
    let mut cumulative = form(Temporality::Cumulative);
    let mut sums: HashMap<i64, u64> = HashMap::new();
    let mut scales: Vec<i32> = Vec::new();
    for round in 1..=8 {
        observe(&cache, (0..10).map(|step| f64::from(step * 7 + 1) * f64::from(round).exp2()));
        let exports = deltas.encode(&cache, at(round as u64));
        let point = exponential(&exports);
        assert_eq!(point.count, 10);
        scales.push(point.scale);
        for (bound, count) in bounds(&point, false) {
            // All scales at the end are at most 0: sum up by powers of two.
            *sums.entry(bound.log2().floor() as i64).or_default() += count;
        }
        exports.into_iter().for_each(|export| deltas.accepted(export));
    }
    assert!(scales.is_sorted_by(|a, b| a >= b) && scales[0] > scales[7], "{scales:?}");
    let mut total: HashMap<i64, u64> = HashMap::new();
    let point = exponential(&cumulative.encode(&cache, at(9)));
    for (bound, count) in bounds(&point, false) {
        *total.entry(bound.log2().floor() as i64).or_default() += count;
    }
    assert_eq!((sums, point.count), (total, 80));
}
