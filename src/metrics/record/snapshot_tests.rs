//! Tests that every view shows whole events while other threads record them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pharos_base::id::{ModelVersion, TenantId};
use pharos_base::otlp::proto::collector::metrics::v1::ExportMetricsServiceRequest;
use pharos_base::otlp::proto::metrics::v1::metric::Data;
use pharos_base::otlp::proto::metrics::v1::number_data_point::Value;
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as proto;

use super::tests::TIMELINE;
use super::*;
use crate::cache::Settings;
use crate::catalog::{Catalog, Overrides, SHIPPED, Setting};
use crate::counter_lines::Counters;
use crate::exposition::{Encoding, Format, Names, encode, java_client, render};
use crate::otlp::{Aggregation, Encoder, Temporality};
use crate::statistics;

/// The sums over all series of each metric; of histograms and summaries under `_count` and `_sum`.
type Sums = BTreeMap<String, f64>;

const THREADS: u64 = 8;
const READINGS: usize = 12;

fn loaded() -> (Arc<Cache>, Arc<ModelSeries>) {
    let more = "slos: [{name: s, availability: 99%}]\ntenants: {header: tenant}";
    let catalog = Catalog::parse(&format!("{SHIPPED}\n{more}"), "m.yaml").unwrap();
    let settings = ["histogram_latencies", "summary_latencies"]
        .map(|key| Setting::parse(key, "true").unwrap());
    let overrides = Overrides { settings: settings.to_vec(), mode: None };
    let cache = Arc::new(Cache::new(overrides.apply(catalog), Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    cache.model_cached(&series);
    cache.model_decoupled(&series);
    (cache, series)
}

/// Records the event with this number. A model's events belong to a tenant, and count for its
/// objective.
fn record(cache: &Cache, series: &ModelSeries, tenant: TenantId, number: u64) {
    match number % 7 {
        0 | 1 => {
            let _transaction = series.begin();
            let sizes = 1..=1 + number % 4;
            batch_executed(series, sizes.clone().sum(), &TIMELINE.compute, number);
            for size in sizes {
                inference_done(series, &TIMELINE, size);
                tenant_served(series, tenant, &TIMELINE);
            }
            batch_times(series, std::iter::once(&TIMELINE), 40_000);
        }
        2 => {
            let _transaction = series.begin();
            inference_failed(series, Reason::Backend, 900_000);
            tenant_failed(series, tenant, Reason::Backend);
        }
        3 => {
            let _transaction = series.begin();
            cache_hit(series, &TIMELINE, 30_000);
            tenant_served(series, tenant, &TIMELINE);
        }
        4 => {
            let outcome = Outcome { code: 200 + 100 * (number % 4) as u16, reason: None };
            request_answered(
                cache,
                Protocol::Http,
                Route::ALL[number as usize % Route::ALL.len()],
                outcome,
            );
        }
        5 => {
            let _transaction = series.begin();
            inference_rescheduled(series, &TIMELINE);
            tenant_rescheduled(series, tenant, &TIMELINE);
        }
        _ => {
            let _transaction = series.begin();
            let done =
                EnsembleDone { batch_size: 1 + number % 3, overhead_ns: 10_000, now_ms: number };
            ensemble_done(cache, series, &TIMELINE, done);
            tenant_served(series, tenant, &TIMELINE);
            let progress = StreamProgress::default();
            stream_response(series, &progress, Instant(0), Instant(2_000_000), 8);
            stream_response(series, &progress, Instant(0), Instant(3_000_000), 8);
            stream_ended(series, &progress);
        }
    }
}

/// Returns the sums of a text exposition.
fn of_text(text: &str) -> Sums {
    let mut sums = Sums::new();
    for line in text.lines().filter(|line| !line.starts_with('#') && !line.contains("le=")) {
        let (series, rest) = line.split_once(['{', ' ']).unwrap();
        let rest = rest.rsplit_once('}').map_or(rest, |(_, rest)| rest);
        let value: f64 = rest.split_whitespace().next().unwrap().parse().unwrap();
        let class = if series == "pharos_requests_total" { http_class(line) } else { None };
        for name in [Some(series.to_owned()), class].into_iter().flatten() {
            *sums.entry(name).or_default() += value;
        }
    }
    sums
}

/// Returns the name under which the answers with a status are added up.
fn http_class(line: &str) -> Option<String> {
    let code = line.split_once("code=\"")?.1;
    let class = code.split('"').next().filter(|_| line.contains("protocol=\"http\""))?;
    Some(format!("http {}", class.get(..1)?))
}

/// Returns the sums of an export.
fn of_otlp(cache: &Cache) -> Sums {
    use prost::Message;
    let mut encoder = Encoder::new(&[], (Temporality::Cumulative, Aggregation::Explicit), 1);
    let mut sums = Sums::new();
    let mut add = |name: String, value: f64| *sums.entry(name).or_default() += value;
    for export in encoder.encode(cache, 2) {
        let request = ExportMetricsServiceRequest::decode(&export.message[..]).unwrap();
        let scopes =
            request.resource_metrics.into_iter().flat_map(|resource| resource.scope_metrics);
        for metric in scopes.flat_map(|scope| scope.metrics) {
            match metric.data {
                Some(Data::Sum(sum)) => {
                    for point in sum.data_points {
                        match point.value {
                            Some(Value::AsInt(value)) => add(metric.name.clone(), value as f64),
                            Some(Value::AsDouble(value)) => add(metric.name.clone(), value),
                            None => {}
                        }
                    }
                }
                Some(Data::Histogram(histogram)) => {
                    for point in histogram.data_points {
                        add(format!("{}_count", metric.name), point.count as f64);
                        add(format!("{}_sum", metric.name), point.sum.unwrap_or_default());
                    }
                }
                _ => {}
            }
        }
    }
    sums
}

/// Returns the sums of a scrape in Prometheus' protobuf format.
fn of_protobuf(cache: &Arc<Cache>) -> Sums {
    use prost::Message;
    let bytes = encode(cache, Encoding::Protobuf, &Names::default());
    let mut rest = &bytes[..];
    let mut sums = Sums::new();
    while !rest.is_empty() {
        let family = proto::MetricFamily::decode_length_delimited(&mut rest).unwrap();
        let mut add = |suffix: &str, value: f64| {
            *sums.entry(format!("{}{suffix}", family.name)).or_default() += value
        };
        for metric in &family.metric {
            if let Some(counter) = &metric.counter {
                add("", counter.value);
            }
            if let Some(histogram) = &metric.histogram {
                add("_count", histogram.sample_count as f64);
                add("_sum", histogram.sample_sum);
            }
            if let Some(summary) = &metric.summary {
                add("_count", summary.sample_count as f64);
                add("_sum", summary.sample_sum);
            }
        }
    }
    sums
}

/// Checks what must be equal in one reading. Views show different metrics; a missing one is not
/// checked, but `all` lists those that must not be missing.
fn check(view: &str, sums: &Sums, all: &[&str]) {
    for name in all {
        assert!(sums.contains_key(*name), "{view} lacks {name}: {:?}", sums.keys());
    }
    let of = |name: &str| sums.get(name).copied();
    let equal = |one: &str, other: f64, tolerance: f64| {
        if let Some(value) = of(one) {
            assert!(
                (value - other).abs() <= tolerance,
                "{view}: {one} is {value}, expected {other}"
            );
        }
    };
    let success = of("nv_inference_request_success").unwrap();
    let failure = of("nv_inference_request_failure").unwrap();
    equal("pharos_request_duration_seconds_count", success, 0.0);
    equal("nv_inference_request_duration_us", success * 2000.0, 0.0);
    equal("ts_inference_latency_microseconds", success * 2000.0, 0.0);
    equal("pharos_request_duration_seconds_sum", success * 0.002, 1e-6);
    equal("pharos_tenant_requests_total", success + failure, 0.0);
    equal("pharos_tenant_failures_total", failure, 0.0);
    equal("pharos_slo_requests_total", success + failure, 0.0);
    equal("pharos_slo_good_requests_total", success, 0.0);
    equal("pharos_batch_size_count", of("nv_inference_exec_count").unwrap(), 0.0);
    equal("pharos_batch_size_sum", of("nv_inference_count").unwrap(), 0.0);
    if let Some(queued) = of("pharos_queue_duration_seconds_count") {
        equal("nv_inference_queue_duration_us", queued * 500.0, 0.0);
        equal("nv_inference_queue_summary_us_count", queued, 0.0);
        equal("nv_inference_queue_summary_us_sum", queued * 500.0, 0.0);
        equal("pharos_tenant_queue_seconds_total", queued * 0.0005, 1e-6);
        equal("pharos_queue_duration_seconds_sum", queued * 0.0005, 1e-6);
    }
    if let Some(ensembles) = of("pharos_ensemble_overhead_duration_seconds_count") {
        equal("pharos_stream_responses_total", 2.0 * ensembles, 0.0);
        equal("pharos_stream_response_bytes_total", 16.0 * ensembles, 0.0);
        equal("pharos_stream_first_response_seconds_count", ensembles, 0.0);
        equal("pharos_stream_response_interval_seconds_count", ensembles, 0.0);
        equal("pharos_stream_responses_per_request_sum", 2.0 * ensembles, 0.0);
        equal("pharos_ensemble_overhead_duration_seconds_sum", ensembles * 1e-5, 1e-6);
    }
    if let Some(succeeded) = of("http 2") {
        equal("Requests2XX", succeeded, 0.0);
        equal("Requests4XX", of("http 4").unwrap_or_default(), 0.0);
    }
}

/// Checks the statistics of the model.
fn check_statistics(of: &statistics::ModelStatistics) {
    let inference = &of.inference_stats;
    assert_eq!(inference.success.ns, inference.success.count * 2_000_000);
    assert_eq!(inference.fail.ns, inference.fail.count * 900_000);
    assert_eq!(inference.cache_hit.ns, inference.cache_hit.count * 30_000);
    let batches = of.batch_stats.iter();
    assert_eq!(
        batches.clone().map(|batch| batch.compute_infer.count).sum::<u64>(),
        of.execution_count
    );
    assert_eq!(
        batches.map(|batch| batch.batch_size * batch.compute_infer.count).sum::<u64>(),
        of.inference_count
    );
}

/// Ends the recording threads, also if a check fails.
struct End<'e>(&'e AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn every_reading_shows_whole_events() {
    const ALWAYS: [&str; 8] = [
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
        "pharos_request_duration_seconds_count",
        "pharos_queue_duration_seconds_count",
        "pharos_batch_size_sum",
    ];
    let (cache, series) = loaded();
    cache.journal().attach_writer(|| ());
    let ends = AtomicBool::new(false);
    let count = |sums: &Sums| sums.get("nv_inference_request_success").copied().unwrap_or_default();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let cache = &cache;
            let series = &series;
            let ends = &ends;
            scope.spawn(move || {
                let tenant = cache.tenant(b"t");
                let mut random = thread + 1;
                while !ends.load(Ordering::Relaxed) {
                    // Xorshift: https://en.wikipedia.org/wiki/Xorshift
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    record(cache, series, tenant, random >> 8);
                }
            });
        }
        let _end = End(&ends);
        let mut lines = Counters::new();
        let mut logged = Sums::new();
        let mut last = 0.0;
        for _ in 0..READINGS {
            let text = of_text(&render(&cache, Format::Text));
            check("text", &text, &ALWAYS);
            let open = of_text(&render(&cache, Format::OpenMetrics));
            check("OpenMetrics", &open, &ALWAYS);
            let java = of_text(&java_client::render(&cache, &Names::default(), |_| String::new()));
            check("TorchServe's scrape", &java, &ALWAYS);
            let otlp = of_otlp(&cache);
            check("OTLP", &otlp, &ALWAYS);
            let protobuf = of_protobuf(&cache);
            check("protobuf", &protobuf, &ALWAYS);
            check_statistics(&statistics::of(&series));
            lines.collect(&cache, 0, |text, grown| {
                let text = format!("{text:?}");
                for name in ["ts_inference_requests_total", "Requests2XX"] {
                    *logged.entry(name.to_owned()).or_default() +=
                        if text.contains(name) { grown } else { 0.0 };
                }
                true
            });
            let successes =
                [last, count(&text), count(&open), count(&java), count(&otlp), count(&protobuf)];
            assert!(successes.is_sorted(), "counters never fall: {successes:?}");
            last = count(&protobuf);
        }
    });
    assert!(of_text(&render(&cache, Format::Text)).values().any(|value| *value > 0.0));
}
