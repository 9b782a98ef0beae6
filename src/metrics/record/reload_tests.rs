//! Tests that views count what a replaced load still does, as if there had been no reload.

use std::sync::Arc;

use pharos_base::id::ModelVersion;
use pharos_base::timeline::Instant;

use super::*;
use crate::cache::Settings;
use crate::catalog::{Catalog, Overrides, SHIPPED, Setting};
use crate::counter_lines::Counters;
use crate::exposition::{Format, render};
use crate::statistics;

/// Stages of 100 to 1,000 µs.
const TIMELINE: Timeline = Timeline {
    received: Instant(0),
    request_start: Instant(1_000_000),
    queue_start: Instant(1_100_000),
    compute: ComputeStamps {
        start: Instant(1_600_000),
        input_end: Instant(1_710_000),
        output_start: Instant(2_610_000),
        end: Instant(2_830_000),
    },
    request_end: Instant(3_000_000),
    insertion_ns: 0,
    cache: None,
    batch_size: 0,
};

/// A cache with all series that a model can have, and metric logs.
fn cache() -> Arc<Cache> {
    let more =
        "slos: [{name: fast, latency: {threshold: 1ms, share: 99%}}]\ntenants: {header: tenant}";
    let settings = vec![Setting::parse("summary_latencies", "true").unwrap()];
    let catalog = Catalog::parse(&format!("{SHIPPED}\n{more}"), "m.yaml").unwrap();
    Arc::new(Cache::new(Overrides { settings, mode: None }.apply(catalog), Settings::new("h")))
}

fn load(cache: &Cache) -> Arc<ModelSeries> {
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    cache.model_cached(&series);
    cache.model_decoupled(&series);
    series
}

/// Every event of a model that a load may still have after a reload.
fn events(cache: &Cache, series: &ModelSeries) {
    let tenant = cache.tenant(b"t");
    inference_requested(series);
    inference_done(series, &TIMELINE, 3);
    warmup_done(series, &TIMELINE, 3);
    inference_rescheduled(series, &TIMELINE);
    cache_hit(series, &TIMELINE, 30_000);
    cache_miss(series, MissTimes { lookup_ns: 30_000, insertion_ns: 10_000 });
    inference_traced(series, &TIMELINE, TraceId::new(7).unwrap(), 1);
    response_done(series, 0, ResponseKind::Success, 5, 6);
    first_response(series, 7_000_000);
    batch_sent(series, SendReason::ALL[0]);
    batch_times(series, [TIMELINE].iter(), 40_000);
    batch_executed(series, 4, &TIMELINE.compute, 5);
    inference_failed(series, Reason::Backend, 900_000);
    warmup_failed(series, Reason::Backend, 900_000);
    inference_refused(series, Reason::QueueFull);
    let done = EnsembleDone { batch_size: 1, overhead_ns: 10_000, now_ms: 6 };
    ensemble_done(cache, series, &TIMELINE, done);
    ensemble_failed(series, Reason::Cancelled, 800_000);
    instance_restarted(series);
    output_mismatched(series);
    samples_dropped(series, 2);
    tenant_served(series, tenant, &TIMELINE);
    tenant_rescheduled(series, tenant, &TIMELINE);
    tenant_failed(series, tenant, Reason::Backend);
    let progress = StreamProgress::default();
    stream_response(series, &progress, Instant(0), Instant(2_000_000), 8);
    stream_response(series, &progress, Instant(0), Instant(3_000_000), 8);
    stream_ended(series, &progress);
}

/// Everything that views show of the model.
fn shown(cache: &Arc<Cache>) -> (String, statistics::ModelStatistics) {
    let series = cache.model(&ModelVersion::new("m", 1)).unwrap();
    (render(cache, Format::OpenMetrics), statistics::of(&series))
}

#[test]
fn a_replaced_load_counts_in_the_series_that_are_shown() {
    let expected = cache();
    events(&expected, &load(&expected));
    for reloads in 1..4 {
        let cache = cache();
        let first = load(&cache);
        let mut latest = None;
        for _ in 0..reloads {
            latest = Some(load(&cache));
        }
        events(&cache, &first);
        let (text, statistics) = shown(&cache);
        let (expected_text, expected_statistics) = shown(&expected);
        assert_eq!(text, expected_text, "{reloads} reloads");
        assert_eq!(statistics, expected_statistics, "{reloads} reloads");
        drop((first, latest));
    }
}

#[test]
fn each_load_of_a_chain_counts_once_and_ends_by_itself() {
    let cache = cache();
    cache.journal().attach_writer(|| ());
    let mut lines = Counters::new();
    let mut logged = 0.0;
    let mut collect = |cache: &Cache| {
        lines.collect(cache, 0, |text, grown| {
            logged += if format!("{text:?}").contains("ts_inference_requests_total.") {
                grown
            } else {
                0.0
            };
            true
        });
    };
    let event = |series: &Arc<ModelSeries>| {
        inference_requested(series);
        inference_done(series, &TIMELINE, 1);
    };
    let success = |cache: &Arc<Cache>| {
        cache
            .model(&ModelVersion::new("m", 1))
            .map_or(0, |series| series.cells.counts.success_count.get())
    };
    let first = load(&cache);
    event(&first);
    let second = load(&cache);
    let third = load(&cache);
    [&first, &second, &third].into_iter().for_each(event);
    collect(&cache);
    assert_eq!(success(&cache), 3, "the first event was counted before the reloads");
    // The load in the middle ends before the first one.
    cache.model_unloaded(&second);
    let ended = Arc::downgrade(&second);
    drop(second);
    collect(&cache);
    assert!(ended.upgrade().is_none());
    event(&first);
    assert_eq!(success(&cache), 4);
    // After an unload no view has the model, and a later load begins at 0.
    cache.model_unloaded(&third);
    event(&first);
    let fourth = load(&cache);
    event(&first);
    assert_eq!(success(&cache), 0);
    event(&fourth);
    assert_eq!(success(&cache), 1);
    let ended = Arc::downgrade(&third);
    drop((first, third));
    // The first load is read for the last time before the one that counts for it.
    [(); 2].into_iter().for_each(|()| collect(&cache));
    assert!(ended.upgrade().is_none());
    assert_eq!(logged, 8.0, "metric logs have every event once");
}

#[test]
fn levels_stay_with_their_load() {
    let cache = cache();
    let first = load(&cache);
    request_pending(&first, 1);
    instance_state(&first, None, Some(InstanceState::Ready));
    let second = load(&cache);
    instance_state(&second, None, Some(InstanceState::Ready));
    memory_usage(&second, 5, 0, Vec::new());
    memory_usage(&first, 9, 0, Vec::new());
    assert_eq!(second.waiting(), 1);
    request_pending(&first, -1);
    assert_eq!((second.waiting(), second.cells.memory.get()), (0, 5));
    instance_state(&first, Some(InstanceState::Ready), None);
    let text = render(&cache, Format::Text);
    let ready = "pharos_instances{model=\"m\",version=\"1\",state=\"ready\"} 1\n";
    assert!(text.contains(ready), "{text}");
}

/// A load that is shown again has no successor.
#[test]
fn a_load_that_is_shown_again_counts_itself() {
    let cache = cache();
    let first = load(&cache);
    let second = load(&cache);
    cache.show_model(&first);
    cache.show_model(&first);
    inference_done(&first, &TIMELINE, 1);
    inference_done(&second, &TIMELINE, 1);
    assert_eq!(
        (first.cells.counts.success_count.get(), second.cells.counts.success_count.get()),
        (2, 0)
    );
}

#[test]
fn what_workers_have_written_continues_except_gauges() {
    let cache = cache();
    let first = load(&cache);
    let histogram = cache.histogram(Builtin::EnsembleOverhead.name(), &["m", "1"]).unwrap();
    cache.own(&first, &histogram);
    histogram.add_or_update(1.0).unwrap();
    worker_loaded(&cache, &first, 0, 5);
    let shown = |name: &str| {
        render(&cache, Format::Text).lines().filter(|line| line.starts_with(name)).count()
    };
    let second = load(&cache);
    cache.show_model(&second);
    assert_eq!(
        (shown("pharos_ensemble_overhead_duration_seconds_sum"), shown("WorkerLoadTime{")),
        (1, 1)
    );
    cache.model_unloaded(&first);
    assert_eq!(
        (shown("pharos_ensemble_overhead_duration_seconds_sum"), shown("WorkerLoadTime{")),
        (1, 0)
    );
    cache.model_unloaded(&second);
    assert_eq!(shown("pharos_ensemble_overhead_duration_seconds_sum"), 0);
}

#[test]
fn no_event_is_lost_while_loads_are_replaced() {
    let cache = cache();
    let first = load(&cache);
    let mut all = vec![first.clone()];
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| (0..20_000).for_each(|_| inference_done(&first, &TIMELINE, 1))))
            .collect();
        while threads.iter().any(|thread| !thread.is_finished()) {
            all.push(load(&cache));
        }
    });
    assert_eq!(
        all.iter().map(|series| series.cells.counts.success_count.get()).sum::<u64>(),
        60_000
    );
}
