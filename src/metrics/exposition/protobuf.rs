//! Prometheus' protobuf format, the only one with native histograms. The messages come from
//! prometheus-client, which compiles Prometheus' `metrics.proto`. Its encoder is not used, because
//! it appends `_total` to every counter and has neither summaries nor exemplars with native
//! histograms.
//!
//! Names, labels and values are as in the text format. A requested name selects the whole family.

use std::sync::Arc;

use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as proto;
use prost::Message;

use super::{Labels, Names};
use crate::cache::Cache;
use crate::catalog::{Kind, MetricSpec};
use crate::reading::{Details, Exemplar, Histogram, Native, Reading, Summary};
use crate::readings::Readings;

/// The longest run of empty buckets that is written as counts. A new span needs more bytes.
const MAX_EMPTY: i32 = 2;

/// Encodes the requested families that have series.
pub(super) fn encode(cache: &Arc<Cache>, names: &Names) -> Vec<u8> {
    let readings = Readings::new(Arc::clone(cache), Details { exemplars: true, native: true });
    let mut encoded = Vec::new();
    let shown = readings.named();
    for named in shown
        .iter()
        .filter(|named| named.views().prometheus && names.may_contain(&named.spec().name))
    {
        let spec = named.spec();
        let mut message = proto::MetricFamily {
            name: spec.name.clone(),
            help: spec.help.clone(),
            r#type: kind(spec.kind) as i32,
            ..Default::default()
        };
        readings.each_named(named, &mut |labels, reading| {
            message.metric.push(metric(spec, labels, &reading))
        });
        if !message.metric.is_empty() {
            // Encoding into a Vec cannot fail.
            let _ = message.encode_length_delimited(&mut encoded);
        }
    }
    encoded
}

fn kind(kind: Kind) -> proto::MetricType {
    match kind {
        Kind::Counter => proto::MetricType::Counter,
        Kind::Gauge => proto::MetricType::Gauge,
        Kind::Histogram => proto::MetricType::Histogram,
        Kind::Summary => proto::MetricType::Summary,
    }
}

fn metric(spec: &MetricSpec, labels: &[(&str, &str)], reading: &Reading) -> proto::Metric {
    let label = Labels::new(spec, labels)
        .0
        .into_iter()
        .map(|(name, value)| proto::LabelPair { name: name.to_owned(), value: value.to_owned() })
        .collect();
    let mut metric = proto::Metric { label, ..Default::default() };
    match reading {
        Reading::Number(number) if spec.kind == Kind::Counter => {
            metric.counter = Some(proto::Counter { value: number.as_f64(), ..Default::default() });
        }
        Reading::Number(number) => metric.gauge = Some(proto::Gauge { value: number.as_f64() }),
        Reading::Histogram(reading) => metric.histogram = Some(histogram(reading)),
        Reading::Summary(reading) => metric.summary = Some(summary(reading)),
    }
    metric
}

fn summary(summary: &Summary) -> proto::Summary {
    proto::Summary {
        sample_count: summary.count,
        sample_sum: summary.sum,
        quantile: summary
            .quantiles
            .iter()
            .map(|&(quantile, value)| proto::Quantile { quantile, value })
            .collect(),
        ..Default::default()
    }
}

/// Prometheus refuses native buckets whose counts do not add up to the histogram's count, and
/// requests are recorded meanwhile; so the count is the sum of the native buckets, and no classic
/// bucket exceeds it.
fn histogram(histogram: &Histogram) -> proto::Histogram {
    let count = histogram.native.as_ref().map_or_else(|| histogram.count(), Native::count);
    let mut cumulative = 0;
    let mut message = proto::Histogram {
        sample_count: count,
        sample_sum: histogram.sum,
        bucket: histogram
            .buckets
            .iter()
            .enumerate()
            .map(|(at, (upper_bound, own))| {
                cumulative += own;
                proto::Bucket {
                    cumulative_count: if upper_bound.is_infinite() {
                        count
                    } else {
                        count.min(cumulative)
                    },
                    upper_bound: *upper_bound,
                    exemplar: histogram.exemplars.get(&at).map(exemplar),
                    ..Default::default()
                }
            })
            .collect(),
        ..Default::default()
    };
    if let Some(native) = &histogram.native {
        message.schema = native.schema;
        message.zero_threshold = native.zero_threshold;
        message.zero_count = native.zero_count;
        (message.positive_span, message.positive_delta) = spans(&native.positive);
        (message.negative_span, message.negative_delta) = spans(&native.negative);
        message.exemplars = histogram.exemplars.values().map(exemplar).collect();
    }
    message
}

/// Converts buckets to runs of consecutive buckets, and the difference of each count to the one
/// before it.
fn spans(buckets: &[(i32, u64)]) -> (Vec<proto::BucketSpan>, Vec<i64>) {
    let mut spans: Vec<proto::BucketSpan> = Vec::new();
    let mut deltas: Vec<i64> = Vec::new();
    let mut next = 0;
    let mut before = 0;
    for &(index, count) in buckets {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        let empty = index - next;
        match spans.last_mut().filter(|_| empty <= MAX_EMPTY) {
            Some(span) => {
                for _ in 0..empty {
                    deltas.push(-before);
                    before = 0;
                }
                span.length += empty.unsigned_abs() + 1;
            }
            None => spans.push(proto::BucketSpan { offset: empty, length: 1 }),
        }
        deltas.push(count - before);
        next = index + 1;
        before = count;
    }
    (spans, deltas)
}

fn exemplar(exemplar: &Exemplar) -> proto::Exemplar {
    let label = proto::LabelPair { name: "trace_id".to_owned(), value: exemplar.trace.to_string() };
    let mut message =
        proto::Exemplar { label: vec![label], value: exemplar.value, timestamp: None };
    let timestamp = message.timestamp.get_or_insert_default();
    timestamp.seconds = (exemplar.at_ms / 1000) as i64;
    timestamp.nanos = (exemplar.at_ms % 1000) as i32 * 1_000_000;
    message
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos_base::id::{ModelVersion, TraceId};
    use pharos_base::timeline::{ComputeStamps, Instant, Timeline};

    use super::*;
    use crate::cache::Settings;
    use crate::catalog::Catalog;
    use crate::record;

    const YAML: &str = "
ts_metrics:
  counter:
    - {name: nv_inference_count, unit: c, dimensions: [model, version]}
  histogram:
    - {name: pharos_queue_duration_seconds, unit: s, dimensions: [model, version], buckets: \
                        [0.00005, 0.0002], native: true}
    - {name: pharos_batch_size, unit: c, dimensions: [model, version], buckets: [2, 4], native: \
                        {schema: 0}}
model_metrics:
  gauge:
    - {name: level, unit: m}
  histogram:
    - {name: size, unit: B, dimensions: [shop], buckets: [1, 2.5], native: {schema: 1, \
                        zero_threshold: 0.5}}
    - {name: classic, unit: B, buckets: [1]}
  summary:
    - {name: time, unit: s, quantiles: [0.5, 1], help: \"a\\nb\"}
";

    fn cache() -> Arc<Cache> {
        Arc::new(Cache::new(Catalog::parse(YAML, "m.yaml").unwrap(), Settings::new("h")))
    }

    fn decoded(cache: &Arc<Cache>, names: &Names) -> Vec<proto::MetricFamily> {
        let bytes = encode(cache, names);
        let mut rest = &bytes[..];
        let mut families = Vec::new();
        while !rest.is_empty() {
            families.push(proto::MetricFamily::decode_length_delimited(&mut rest).unwrap());
        }
        families
    }

    fn family(cache: &Arc<Cache>, name: &str) -> proto::MetricFamily {
        decoded(cache, &Names::default()).into_iter().find(|family| family.name == name).unwrap()
    }

    /// Reverses `spans`.
    fn buckets(spans: &[proto::BucketSpan], deltas: &[i64]) -> Vec<(i32, u64)> {
        let mut index = 0;
        let mut count = 0;
        let mut deltas = deltas.iter();
        let mut found = Vec::new();
        for span in spans {
            index += span.offset;
            for _ in 0..span.length {
                count += deltas.next().unwrap();
                found.push((index, u64::try_from(count).unwrap()));
                index += 1;
            }
        }
        assert_eq!(deltas.next(), None);
        found
    }

    #[test]
    fn spans_and_deltas_are_decoded_to_the_same_buckets() {
        for (given, lengths) in [
            (vec![], vec![]),
            (vec![(5, 3)], vec![(5, 1)]),
            (vec![(-3, 1), (-2, 9), (-1, 2)], vec![(-3, 3)]),
            (vec![(0, 1), (3, 4)], vec![(0, 4)]),
            (vec![(0, 1), (4, 4), (5, 2), (8, 1), (100, 7)], vec![(0, 1), (3, 5), (91, 1)]),
        ] {
            let (spans, deltas) = spans(&given);
            assert_eq!(
                spans.iter().map(|span| (span.offset, span.length)).collect::<Vec<_>>(),
                lengths
            );
            let mut found = buckets(&spans, &deltas);
            found.retain(|(_, count)| *count > 0);
            assert_eq!(found, given);
        }
    }

    #[test]
    fn every_type_has_its_message() {
        let cache = cache();
        cache.gauge("level", &[]).unwrap().add_or_update(-4.5).unwrap();
        let size = cache.histogram("size", &["b"]).unwrap();
        [0.1, 2.0, 2.1, 9.0, -2.0].into_iter().for_each(|value| size.add_or_update(value).unwrap());
        cache.histogram("classic", &[]).unwrap().add_or_update(0.5).unwrap();
        let time = cache.summary("time", &[]).unwrap();
        [1.0, 3.0].into_iter().for_each(|value| time.add_or_update(value).unwrap());
        cache.model_loaded(&ModelVersion::new("m", 1), &[("team".to_owned(), "t".to_owned())]);

        let counter = family(&cache, "nv_inference_count");
        assert_eq!(
            (counter.r#type(), counter.metric[0].counter.as_ref().unwrap().value),
            (proto::MetricType::Counter, 0.0)
        );
        let labels = counter.metric[0]
            .label
            .iter()
            .map(|pair| (&*pair.name, &*pair.value))
            .collect::<Vec<_>>();
        assert_eq!(labels, [("_team", "t"), ("model", "m"), ("version", "1")]);
        let gauge = family(&cache, "level");
        assert_eq!(
            (gauge.r#type(), gauge.metric[0].gauge.as_ref().unwrap().value),
            (proto::MetricType::Gauge, -4.5)
        );
        let summary = family(&cache, "time");
        assert_eq!((summary.r#type(), summary.help.as_str()), (proto::MetricType::Summary, "a\nb"));
        let summary = summary.metric[0].summary.clone().unwrap();
        assert_eq!((summary.sample_count, summary.sample_sum), (2, 4.0));
        assert_eq!(
            summary.quantile.iter().map(|q| (q.quantile, q.value)).collect::<Vec<_>>(),
            [(0.5, 1.0), (1.0, 3.0)]
        );

        let classic = family(&cache, "classic").metric[0].histogram.clone().unwrap();
        assert_eq!((classic.sample_count, classic.bucket.len()), (1, 2));
        assert_eq!(
            (classic.schema, classic.zero_threshold, classic.positive_span.len()),
            (0, 0.0, 0)
        );
        let native = family(&cache, "size").metric[0].histogram.clone().unwrap();
        assert_eq!((native.sample_count, native.sample_sum), (5, 11.2));
        let classic =
            native.bucket.iter().map(|bucket| (bucket.upper_bound, bucket.cumulative_count));
        assert_eq!(classic.collect::<Vec<_>>(), [(1.0, 2), (2.5, 4), (f64::INFINITY, 5)]);
        assert_eq!((native.schema, native.zero_threshold, native.zero_count), (1, 0.5, 1));
        let positive = buckets(&native.positive_span, &native.positive_delta);
        assert_eq!(positive, [(2, 1), (3, 1), (7, 1)]);
        assert_eq!(buckets(&native.negative_span, &native.negative_delta), [(2, 1)]);
    }

    #[test]
    fn durations_and_batch_sizes_have_native_buckets_and_exemplars() {
        let cache = cache();
        let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        let compute = ComputeStamps {
            start: Instant(100_000),
            input_end: Instant(100_000),
            output_start: Instant(100_000),
            end: Instant(200_000),
        };
        let timeline = Timeline { compute, request_end: Instant(200_000), ..Timeline::default() };
        assert_eq!(timeline.queue_ns(), 100_000);
        record::inference_done(&series, &timeline, 6);
        record::batch_executed(&series, 6, &timeline.compute, 0);
        let trace =
            TraceId::from_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
                .unwrap();
        record::inference_traced(&series, &timeline, trace, 1_500);
        let queue =
            family(&cache, "pharos_queue_duration_seconds").metric[0].histogram.clone().unwrap();
        // 2^(-107/8) = 0.0000941 < 0.0001 <= 2^(-106/8) = 0.0001027
        assert_eq!(
            (queue.schema, buckets(&queue.positive_span, &queue.positive_delta)),
            (3, vec![(-106, 1)])
        );
        let exemplar = queue.exemplars[0].clone();
        assert_eq!(
            (exemplar.value, exemplar.label[0].value.as_str()),
            (0.0001, "4bf92f3577b34da6a3ce929d0e0e4736")
        );
        let timestamp = exemplar.timestamp.unwrap();
        assert_eq!((timestamp.seconds, timestamp.nanos), (1, 500_000_000));
        assert_eq!(queue.bucket[1].exemplar, Some(exemplar));
        let sizes = family(&cache, "pharos_batch_size").metric[0].histogram.clone().unwrap();
        assert_eq!(buckets(&sizes.positive_span, &sizes.positive_delta), [(3, 1)]);
    }

    /// While a request is recorded, one kind of bucket may count it before the other does.
    #[test]
    fn counts_that_differ_are_made_consistent() {
        for (count, expected) in [(2, [2, 2]), (3, [3, 3]), (4, [3, 4])] {
            let message = histogram(&Histogram {
                buckets: vec![(1.0, 3), (f64::INFINITY, 0)],
                native: Some(Native {
                    schema: 0,
                    zero_threshold: 1.0,
                    zero_count: count,
                    positive: vec![],
                    negative: vec![],
                }),
                ..Histogram::default()
            });
            assert_eq!(message.sample_count, count);
            assert_eq!(
                message.bucket.iter().map(|bucket| bucket.cumulative_count).collect::<Vec<_>>(),
                expected
            );
        }
    }

    #[test]
    fn a_requested_sample_selects_its_family() {
        let cache = cache();
        cache.histogram("size", &["b"]).unwrap().add_or_update(1.0).unwrap();
        cache.gauge("level", &[]).unwrap().add_or_update(1.0).unwrap();
        let names = |name| {
            decoded(&cache, &Names::of_query([("name[]", name)]))
                .into_iter()
                .map(|family| family.name)
        };
        assert_eq!(names("size_sum").collect::<Vec<_>>(), ["size"]);
        assert_eq!(names("level").collect::<Vec<_>>(), ["level"]);
        assert_eq!(names("none").count(), 0);
    }
}
