//! Tests which numbers each event changes, after the table of the specification.

use std::sync::Arc;

use pharos_base::error::InferError;
use pharos_base::id::ModelVersion;
use pharos_base::timeline::Instant;

use super::*;
use crate::cache::Settings;
use crate::catalog::{Catalog, Overrides, Setting};
use crate::exposition::{Format, render};
use crate::statistics::{self, InferBatchStatistics, ModelStatistics, StatisticDuration};

/// Request 2,000 µs, queue 500 µs, compute 10, 1,000 and 20 µs.
pub(super) const TIMELINE: Timeline = Timeline {
    received: Instant(0),
    request_start: Instant(1_000_000),
    queue_start: Instant(1_100_000),
    compute: ComputeStamps {
        start: Instant(1_600_000),
        input_end: Instant(1_610_000),
        output_start: Instant(2_610_000),
        end: Instant(2_630_000),
    },
    request_end: Instant(3_000_000),
    insertion_ns: 0,
    cache: None,
    batch_size: 0,
};

fn loaded() -> (Arc<Cache>, Arc<ModelSeries>) {
    let cache = Arc::new(Cache::new(Catalog::shipped(), Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    (cache, series)
}

/// The sum over a family's series.
pub(super) fn metric(cache: &Arc<Cache>, family: &str) -> f64 {
    let text = render(cache, Format::Text);
    let samples = text.lines().filter(|line| line.starts_with(&format!("{family}{{")));
    samples.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

fn duration(count: u64, ns: u64) -> StatisticDuration {
    StatisticDuration { count, ns }
}

/// Runs events on a fresh model, and compares statistics and the metrics that are not 0.
fn check(events: impl FnOnce(&ModelSeries), expected: &ModelStatistics, metrics: &[(&str, f64)]) {
    let (cache, series) = loaded();
    events(&series);
    let expected =
        ModelStatistics { name: "m".to_owned(), version: "1".to_owned(), ..expected.clone() };
    assert_eq!(statistics::of(&series), expected);
    for family in [
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_output_duration_us",
        "nv_inference_pending_request_count",
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    ] {
        let value =
            metrics.iter().find(|(name, _)| *name == family).map_or(0.0, |(_, value)| *value);
        assert_eq!(metric(&cache, family), value, "{family}");
    }
}

#[test]
fn a_success_counts_the_request_and_all_its_durations() {
    let mut expected = ModelStatistics { inference_count: 3, ..ModelStatistics::default() };
    expected.inference_stats.success = duration(1, 2_000_000);
    expected.inference_stats.queue = duration(1, 500_000);
    expected.inference_stats.compute_input = duration(1, 10_000);
    expected.inference_stats.compute_infer = duration(1, 1_000_000);
    expected.inference_stats.compute_output = duration(1, 20_000);
    let metrics = [
        ("nv_inference_request_success", 1.0),
        ("nv_inference_count", 3.0),
        ("nv_inference_request_duration_us", 2000.0),
        ("nv_inference_queue_duration_us", 500.0),
        ("nv_inference_compute_input_duration_us", 10.0),
        ("nv_inference_compute_infer_duration_us", 1000.0),
        ("nv_inference_compute_output_duration_us", 20.0),
        ("ts_inference_latency_microseconds", 2000.0),
        ("ts_queue_latency_microseconds", 500.0),
    ];
    check(|series| inference_done(series, &TIMELINE, 3), &expected, &metrics);
}

/// A hit's stamps: looked up 0.1 ms after it was queued.
fn hit() -> Timeline {
    let start = Instant(1_200_000);
    let compute = ComputeStamps { start, input_end: start, output_start: start, end: start };
    Timeline { compute, ..TIMELINE }
}

#[test]
fn a_cache_hit_is_a_success_but_not_an_inference() {
    let mut expected = ModelStatistics::default();
    expected.inference_stats.success = duration(1, 2_000_000);
    expected.inference_stats.queue = duration(1, 100_000);
    expected.inference_stats.cache_hit = duration(1, 30_000);
    let metrics = [
        ("nv_inference_request_success", 1.0),
        ("nv_inference_request_duration_us", 2000.0),
        ("nv_inference_queue_duration_us", 100.0),
        ("ts_inference_latency_microseconds", 2000.0),
        ("ts_queue_latency_microseconds", 100.0),
    ];
    check(|series| cache_hit(series, &hit(), 30_000), &expected, &metrics);
}

#[test]
fn a_cache_miss_adds_its_insertion_to_the_request() {
    let (_, series) = loaded();
    inference_done(&series, &TIMELINE, 2);
    cache_miss(&series, MissTimes { lookup_ns: 30_000, insertion_ns: 10_000 });
    let statistics = statistics::of(&series);
    assert_eq!(statistics.inference_stats.success, duration(1, 2_010_000));
    assert_eq!(statistics.inference_stats.compute_infer, duration(1, 1_000_000));
    assert_eq!(statistics.inference_stats.cache_miss, duration(1, 40_000));
    assert_eq!(statistics.inference_count, 2);
}

#[test]
fn only_a_model_with_the_cache_has_its_families() {
    let summaries = Overrides { settings: vec![Setting::SummaryLatencies(true)], mode: None }
        .apply(Catalog::shipped());
    let cache = Arc::new(Cache::new(summaries, Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let families = |text: &str| text.matches("# HELP nv_cache").count();
    let text = render(&cache, Format::Text);
    assert_eq!((families(&text), text.contains("nv_inference_request_summary_us{")), (0, true));
    cache.model_cached(&series);
    inference_done(&series, &TIMELINE, 1);
    cache_miss(&series, MissTimes { lookup_ns: 30_000, insertion_ns: 10_000 });
    cache_hit(&series, &hit(), 30_000);
    let text = render(&cache, Format::Text);
    assert_eq!((families(&text), text.contains("nv_inference_request_summary_us{")), (6, false));
    for (family, value) in [
        ("nv_cache_num_hits_per_model", 1.0),
        ("nv_cache_num_misses_per_model", 1.0),
        ("nv_cache_hit_duration_per_model", 30.0),
        ("nv_cache_miss_duration_per_model", 40.0),
        ("nv_cache_hit_summary_per_model_sum", 30.0),
        ("nv_cache_miss_summary_per_model_sum", 40.0),
        ("nv_inference_queue_summary_us_count", 2.0),
        ("nv_inference_compute_infer_summary_us_count", 1.0),
        ("pharos_request_duration_seconds_count", 2.0),
        ("pharos_compute_infer_duration_seconds_count", 1.0),
    ] {
        assert_eq!(metric(&cache, family), value, "{family}");
    }
}

#[test]
fn distributions_of_durations_are_in_seconds() {
    let (cache, series) = loaded();
    ensemble_loaded(&cache, &series, ["a"].into_iter());
    ensemble_step(&cache, &series, 0, "a", 50_000);
    ensemble_step(&cache, &series, 0, "a", 50_001);
    let done = EnsembleDone { batch_size: 1, overhead_ns: 5_000, now_ms: 0 };
    ensemble_done(&cache, &series, &TIMELINE, done);
    let text = render(&cache, Format::Text);
    let step = "{model=\"m\",version=\"1\",step=\"0\",member=\"a\",le=";
    // A duration that is equal to a bound is within it.
    for line in [
        format!("pharos_ensemble_step_duration_seconds_bucket{step}\"5e-05\"}} 1"),
        format!("pharos_ensemble_step_duration_seconds_bucket{step}\"0.0001\"}} 2"),
        "pharos_ensemble_overhead_duration_seconds_bucket{model=\"m\",version=\"1\",le=\"5e-06\"} \
         1"
        .to_owned(),
        "pharos_ensemble_overhead_duration_seconds_sum{model=\"m\",version=\"1\"} 5e-06".to_owned(),
        "pharos_request_duration_seconds_bucket{model=\"m\",version=\"1\",le=\"0.001\"} 0"
            .to_owned(),
        "pharos_request_duration_seconds_bucket{model=\"m\",version=\"1\",le=\"0.002\"} 1"
            .to_owned(),
        "pharos_request_duration_seconds_sum{model=\"m\",version=\"1\"} 0.002".to_owned(),
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
    }
}

#[test]
fn a_request_without_a_batch_is_one_inference() {
    let (_, series) = loaded();
    inference_done(&series, &TIMELINE, 0);
    assert_eq!(statistics::of(&series).inference_count, 1);
}

#[test]
fn an_execution_counts_its_batch_once() {
    let batch = |batch_size, count| InferBatchStatistics {
        batch_size,
        compute_input: duration(count, count * 10_000),
        compute_infer: duration(count, count * 1_000_000),
        compute_output: duration(count, count * 20_000),
    };
    let expected = ModelStatistics {
        execution_count: 4,
        // A clock that was set back shows the latest execution all the same. An event that is
        // recorded late does not.
        last_inference: 60_000,
        batch_stats: vec![batch(1, 1), batch(4, 1), batch(8, 2)],
        ..ModelStatistics::default()
    };
    check(
        |series: &ModelSeries| {
            for (size, now_ms) in [(8, 70_000), (4, 90_000), (0, 60_000), (8, 59_999)] {
                batch_executed(series, size, &TIMELINE.compute, now_ms);
            }
        },
        &expected,
        &[("nv_inference_exec_count", 4.0)],
    );
}

#[test]
fn failures_are_counted_by_reason() {
    let counted = [
        (Reason::Backend, "BACKEND"),
        (Reason::InstanceLost, "BACKEND"),
        (Reason::Timeout, "REJECTED"),
        (Reason::NotReady, "REJECTED"),
        (Reason::Cancelled, "CANCELED"),
        (Reason::Internal, "OTHER"),
        (Reason::SharedMemory, "OTHER"),
    ];
    for reason in Reason::ALL {
        let label = counted.iter().find(|(other, _)| *other == reason).map(|(_, label)| label);
        let mut expected = ModelStatistics::default();
        if label.is_some() {
            expected.inference_stats.fail = duration(1, 700);
        }
        let metrics = [("nv_inference_request_failure", f64::from(u8::from(label.is_some())))];
        check(|series| inference_failed(series, reason, 700), &expected, &metrics);
        if let Some(label) = label {
            let (cache, series) = loaded();
            inference_failed(&series, reason, 700);
            let line = format!(
                "nv_inference_request_failure{{model=\"m\",reason=\"{label}\",version=\"1\"}} 1"
            );
            assert!(render(&cache, Format::Text).contains(&line), "{reason:?}");
        }
    }
}

#[test]
fn streams_are_measured_from_response_to_response() {
    let (cache, series) = loaded();
    assert!(!render(&cache, Format::Text).contains("pharos_stream_"), "the model is not decoupled");
    cache.model_decoupled(&series);
    let started = Instant(7_000_000_000);
    let short = StreamProgress::default();
    let long = StreamProgress::default();
    // Bounds are inclusive: 1 ms is in the first bucket, 1 ns more in the second.
    for at_ns in [1_000_000, 2_000_000, 3_000_001, 1_503_000_001] {
        stream_response(&series, &long, started, Instant(started.0 + at_ns), 24);
    }
    stream_response(&series, &short, started, Instant(started.0 + 1_000_001), 1);
    for progress in [&short, &long, &StreamProgress::default()] {
        stream_ended(&series, progress);
    }
    let text = render(&cache, Format::Text);
    // The value of the bucket with this bound, or of the series itself. Texts differ in how they
    // write a bound.
    let sample = |name: &str, le: Option<f64>| {
        let start = if le.is_some() { format!("{name}_bucket{{") } else { format!("{name}{{") };
        let bound = |line: &str| line.split("le=\"").nth(1)?.split('"').next()?.parse::<f64>().ok();
        text.lines()
            .find(|line| line.starts_with(&start) && bound(line) == le)
            .unwrap()
            .rsplit(' ')
            .next()
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    for (name, le, expected) in [
        ("pharos_stream_first_response_seconds", Some(0.001), 1.0),
        ("pharos_stream_first_response_seconds", Some(0.002), 2.0),
        ("pharos_stream_first_response_seconds_sum", None, 0.002_000_001),
        ("pharos_stream_response_interval_seconds", Some(0.001), 1.0),
        ("pharos_stream_response_interval_seconds", Some(0.002), 2.0),
        ("pharos_stream_response_interval_seconds", Some(1.0), 2.0),
        ("pharos_stream_response_interval_seconds", Some(2.0), 3.0),
        ("pharos_stream_response_interval_seconds_sum", None, 1.502_000_001),
        ("pharos_stream_responses_per_request", Some(0.0), 1.0),
        ("pharos_stream_responses_per_request", Some(1.0), 2.0),
        ("pharos_stream_responses_per_request", Some(2.0), 2.0),
        ("pharos_stream_responses_per_request", Some(4.0), 3.0),
        ("pharos_stream_responses_per_request_sum", None, 5.0),
        ("pharos_stream_responses_total", None, 5.0),
        ("pharos_stream_response_bytes_total", None, 97.0),
    ] {
        assert_eq!(sample(name, le).to_bits(), f64::to_bits(expected), "{name} {le:?}");
    }
}

#[test]
fn pending_and_requested_are_counted_separately() {
    let none = ModelStatistics::default();
    check(
        |series: &ModelSeries| {
            request_pending(series, 1);
            request_pending(series, 1);
            request_pending(series, -1);
        },
        &none,
        &[("nv_inference_pending_request_count", 1.0)],
    );
    check(inference_requested, &none, &[("ts_inference_requests_total", 1.0)]);
}

#[test]
fn every_answer_has_a_separate_series() {
    let (cache, _) = loaded();
    let mut expected = 0.0;
    for protocol in Protocol::ALL {
        for route in Route::ALL {
            let codes: &[u16] =
                if protocol == Protocol::Http { &[100, 200, 599] } else { &[0, 16] };
            for (&code, reason) in codes.iter().cycle().zip(Reason::ALL) {
                request_answered(&cache, protocol, route, Outcome { code, reason: Some(reason) });
                expected += 1.0;
            }
        }
    }
    assert_eq!(metric(&cache, "pharos_requests_total"), expected);
    let text = render(&cache, Format::Text);
    let failures: Vec<&str> =
        text.lines().filter(|line| line.starts_with("pharos_request_failures_total{")).collect();
    assert_eq!(failures.len(), Protocol::ALL.len() * Route::ALL.len() * Reason::ALL.len());
    assert!(failures.iter().all(|line| line.ends_with(" 1")));
}

#[test]
fn an_invalid_status_is_counted() {
    let (cache, _) = loaded();
    for (protocol, code) in [
        (Protocol::Http, 0),
        (Protocol::Http, 600),
        (Protocol::Grpc, 17),
        (Protocol::Grpc, u16::MAX),
    ] {
        request_answered(&cache, protocol, Route::Unknown, Outcome { code, reason: None });
    }
    assert_eq!(metric(&cache, "pharos_requests_total"), 4.0);
    assert_eq!(metric(&cache, "pharos_request_failures_total"), 0.0);
}

#[test]
fn concurrent_events_are_all_counted() {
    const THREADS: u64 = 4;
    const EACH: u64 = 20_000;
    // The threads record each other's past: all of it within `LATE_MS`.
    const EACH_MS: u64 = EACH / LATE_MS;
    let (_, series) = loaded();
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for at in 0..EACH {
                    request_pending(&series, 1);
                    request_pending(&series, -1);
                    batch_executed(&series, 1 + at % 3, &TIMELINE.compute, at / EACH_MS);
                    inference_done(&series, &TIMELINE, 1 + at % 3);
                    inference_failed(&series, Reason::Backend, 2);
                }
            });
        }
        // Views may be taken at any time.
        for _ in 0..20 {
            let now = statistics::of(&series);
            assert_eq!(
                now.inference_stats.compute_infer.count,
                now.inference_stats.compute_output.count
            );
        }
    });
    let all = THREADS * EACH;
    let end = statistics::of(&series);
    assert_eq!(end.inference_stats.success, duration(all, all * 2_000_000));
    assert_eq!(end.inference_stats.fail, duration(all, all * 2));
    assert_eq!(end.execution_count, all);
    assert_eq!(end.batch_stats.iter().map(|batch| batch.compute_infer.count).sum::<u64>(), all);
    assert_eq!(
        end.batch_stats
            .iter()
            .map(|batch| batch.batch_size * batch.compute_infer.count)
            .sum::<u64>(),
        end.inference_count
    );
    assert_eq!((end.last_inference, series.cells.pending.get()), ((EACH - 1) / EACH_MS, 0));
}

/// Prints the cost of recording; run with `--nocapture`.
#[test]
fn cost_of_recording() {
    let (_, series) = loaded();
    const ROUNDS: u32 = 1_000_000;
    let time = |what: &str, event: &dyn Fn()| {
        #[allow(clippy::disallowed_methods)]
        let start = std::time::Instant::now();
        for _ in 0..ROUNDS {
            event();
        }
        let each = start.elapsed() / ROUNDS;
        println!("{what}: {each:?}");
        // The target is 100 ns; the bound leaves room for a busy machine.
        assert!(each.as_nanos() < 2000, "{what}: {each:?}");
    };
    let timeline = std::hint::black_box(TIMELINE);
    time("inference_done", &|| inference_done(&series, &timeline, 1));
    time("batch_executed", &|| batch_executed(&series, 1, &timeline.compute, 1));
    time("request_pending", &|| request_pending(&series, 0));
}

/// A histogram that a reload switches on has observed nothing, whatever the model's counters say.
#[test]
fn the_sum_of_a_histogram_is_that_of_its_observations() {
    let yaml = "ts_metrics:\n  histogram:\n    - {name: pharos_queue_duration_seconds, unit: s, \
                dimensions: [model, version]}\n";
    let cache = Arc::new(Cache::new(
        Catalog::parse("mode: prometheus\n", "m.yaml").unwrap(),
        Settings::new("h"),
    ));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    inference_done(&series, &TIMELINE, 1);
    cache.reload(Catalog::parse(yaml, "m.yaml").unwrap());
    let read = || {
        ["pharos_queue_duration_seconds_count", "pharos_queue_duration_seconds_sum"]
            .map(|name| metric(&cache, name))
    };
    assert_eq!(read(), [0.0, 0.0]);
    inference_done(&series, &TIMELINE, 1);
    assert_eq!(read(), [1.0, TIMELINE.queue_ns() as f64 / 1e9]);
}

#[test]
fn each_request_is_taken_once_for_the_hits_of_models_on_demand() {
    let (cache, series) = loaded();
    (0..3).for_each(|_| inference_requested(&series));
    assert_eq!([series.take_requested(), series.take_requested(), series.requested()], [3, 0, 3]);
    [("m", 0), ("m", 3), ("n", 1)]
        .into_iter()
        .for_each(|(model, hits)| on_demand_hits(&cache, model, hits));
    assert_eq!(metric(&cache, "pharos_on_demand_hits_total"), 4.0);
}

#[test]
fn objectives_count_requests_and_follow_a_reload() {
    let catalog = |slos: &str| Catalog::parse(&format!("slos: [{slos}]"), "m.yaml").unwrap();
    let up = "{name: up, model: m, availability: 99%}";
    let cache = Arc::new(Cache::new(
        catalog(&format!("{up}, {{name: fast, latency: {{threshold: 1ms, share: 50%}}}}")),
        Settings::new("h"),
    ));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let value = |metric: &str, slo: &str| {
        let text = render(&cache, Format::Text);
        text.lines()
            .find(|line| {
                line.starts_with(&format!("pharos_slo_{metric}{{"))
                    && line.contains(&format!("slo=\"{slo}\""))
            })
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    };
    assert_eq!(value("requests_total", "up"), Some(0.0));
    inference_done(&series, &TIMELINE, 1);
    cache_hit(&series, &Timeline { request_end: Instant(2_000_000), ..TIMELINE }, 5);
    inference_failed(&series, Reason::Backend, 1);
    inference_failed(&series, Reason::Cancelled, 1_000_001);
    inference_failed(&series, &InferError::invalid("shape"), 1);
    ensemble_failed(&series, &InferError::invalid("shape"), 1);
    inference_refused(&series, Reason::QueueFull);
    inference_refused(&series, Reason::Invalid);
    let of = |slo: &str| {
        ["good_requests_total", "requests_total", "objective_ratio", "latency_threshold_seconds"]
            .map(|metric| value(metric, slo))
    };
    assert_eq!(of("fast"), [Some(1.0), Some(5.0), Some(0.5), Some(0.001)]);
    assert_eq!(of("up"), [Some(2.0), Some(4.0), Some(0.99), None]);
    let budget = value("error_budget_remaining_ratio", "fast").unwrap();
    assert!((budget - (1.0 - 0.8 / 0.5)).abs() < 1e-9, "{budget}");

    let difference = cache.reload(catalog(&up.replace("99%", "98%")));
    assert_eq!(difference.to_string(), "removed slo fast; changed slo up");
    assert_eq!((of("up"), of("fast")), ([Some(2.0), Some(4.0), Some(0.98), None], [None; 4]));
    cache.reload(Catalog::shipped());
    inference_done(&series, &TIMELINE, 1);
    assert!(!render(&cache, Format::Text).contains("pharos_slo"));
    // A model that is loaded later has the objectives from its start.
    cache.reload(catalog(up));
    let other = cache.model_loaded(&ModelVersion::new("n", 1), &[]);
    inference_done(&other, &TIMELINE, 1);
    assert_eq!(
        value("requests_total", "up"),
        Some(0.0),
        "model n is not covered, and the counts of model m begin at 0"
    );
}

#[test]
fn tenants_are_charged_as_their_model() {
    let catalog = |limit: usize| {
        Catalog::parse(&format!("tenants: {{header: x, limit: {limit}}}"), "m.yaml").unwrap()
    };
    let cache = Arc::new(Cache::new(catalog(1), Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let tenant = |name: &str| cache.tenant(name.as_bytes());
    tenant_served(&series, tenant("a"), &TIMELINE);
    tenant_rescheduled(&series, tenant("a"), &TIMELINE);
    tenant_failed(&series, tenant("b"), Reason::Backend);
    // Not a failure of the model.
    tenant_failed(&series, tenant("b"), Reason::Invalid);
    tenant_served(&series, tenant(""), &TIMELINE);
    let text = render(&cache, Format::Text);
    for expected in [
        "pharos_tenant_requests_total{model=\"m\",version=\"1\",tenant=\"a\"} 1",
        "pharos_tenant_requests_total{model=\"m\",version=\"1\",tenant=\"none\"} 1",
        "pharos_tenant_failures_total{model=\"m\",version=\"1\",tenant=\"other\"} 1",
        "pharos_tenant_queue_seconds_total{model=\"m\",version=\"1\",tenant=\"a\"} 0.001",
        "pharos_tenant_compute_seconds_total{model=\"m\",version=\"1\",tenant=\"a\"} 0.00206",
    ] {
        assert!(text.lines().any(|line| line == expected), "{expected}\n{text}");
    }
    assert_eq!(cache.check_reload(&catalog(1)), Ok(()));
    for other in [catalog(2), Catalog::shipped()] {
        assert!(cache.check_reload(&other).unwrap_err().contains("`tenants` has changed"));
    }
    // A server that does not distinguish tenants counts nothing.
    let (cache, series) = loaded();
    assert!(cache.tenant_source().is_none());
    tenant_served(&series, cache.tenant(b"a"), &TIMELINE);
    assert!(!render(&cache, Format::Text).contains("pharos_tenant"));
}
