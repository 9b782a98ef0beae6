//! The queue's limits, and exact sums when increments are held back.

use std::sync::atomic::AtomicUsize;

use pharos_base::error::Reason;
use pharos_base::id::ModelVersion;
use pharos_base::timeline::{Instant, Timeline};

use super::*;
use crate::cache::{Cache, Settings};
use crate::catalog::Catalog;
use crate::counter_lines::Counters;
use crate::labels::{Outcome, Protocol, Route};
use crate::record;
use crate::series::ModelSeries;
use crate::tslog::{Layout, Stamp};

const CUSTOM: &str = "mode: both
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop]}
  gauge:
    - {name: Level, unit: m}
";

/// A cache whose journal the test reads, and the number of wake-ups.
fn cache(text: &str) -> (Cache, Arc<AtomicUsize>) {
    let cache = Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h"));
    let woken = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&woken);
    cache.journal().attach_writer(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    (cache, woken)
}

/// Visits as the writer. Returns the lines without their times, including the lines of held
/// increments.
fn visit(cache: &Cache, room: usize) -> Vec<String> {
    visit_keeping(cache, room, 0)
}

fn visit_keeping(cache: &Cache, room: usize, kept: usize) -> Vec<String> {
    let journal = cache.journal();
    let mut batch = Batch::default();
    let mut out = Vec::new();
    let line = |text: &Text, value: f64, ids: &str| {
        let mut line = String::new();
        text.write(&mut line, Layout::File, &Stamp::new(0, 0), value, ids);
        line.replace("1970-01-01T00:00:00,000 - ", "").replace(",timestamp:0\n", "")
    };
    journal.take(&mut batch, room, kept);
    batch.for_each(|logged, value, ids| out.push(line(logged.text(), logged.shown(value), ids)));
    journal.flush_held(&mut batch, |logged, value| {
        out.push(line(logged.text(), logged.shown(value), ""));
        true
    });
    out
}

#[test]
fn samples_come_out_unchanged() {
    let (cache, _) = cache(CUSTOM);
    visit(&cache, 10);
    cache.gauge("Level", &[]).unwrap().add_or_update_for(-1.5, "a,b").unwrap();
    cache.counter("Orders", &["x"]).unwrap().add_or_update(2.0).unwrap();
    cache.gauge("Level", &[]).unwrap().add_or_update_for(f64::NAN, "c").unwrap();
    let expected = [
        "Level.m:-1.5|#|#hostname:h,requestID:a,b",
        "Orders.Count:2.0|#shop:x|#hostname:h,requestID:null",
        "Level.m:NaN|#|#hostname:h,requestID:c",
    ];
    assert_eq!(visit(&cache, 10), expected);
    assert!(visit(&cache, 10).is_empty());
}

#[test]
fn beyond_the_limit_counters_are_summed_and_others_skipped() {
    let (cache, _) = cache(CUSTOM);
    let orders = cache.counter("Orders", &["x"]).unwrap();
    let level = cache.gauge("Level", &[]).unwrap();
    visit(&cache, 2);
    for value in 1..=5 {
        orders.add_or_update(f64::from(value)).unwrap();
        level.add_or_update(f64::from(value)).unwrap();
    }
    let orders_line =
        |value: &str| format!("Orders.Count:{value}|#shop:x|#hostname:h,requestID:null");
    let first = "Level.m:1.0|#|#hostname:h,requestID:null".to_owned();
    assert_eq!(visit(&cache, 0), [orders_line("1.0"), first, orders_line("14.0")]);
    assert_eq!(
        (cache.journal().take_skipped(File::Model), cache.journal().take_skipped(File::Ts)),
        (4, 0)
    );
    orders.add_or_update(7.0).unwrap();
    let mut batch = Batch::default();
    cache.journal().take(&mut batch, 0, 0);
    cache.journal().flush_held(&mut batch, |_, _| false);
    assert_eq!(visit(&cache, 0), [orders_line("7.0")]);
    assert!(visit(&cache, 0).is_empty());
}

#[test]
fn sums_are_exact_under_contention() {
    let (cache, _) = cache(CUSTOM);
    let orders = cache.counter("Orders", &["x"]).unwrap();
    let running = AtomicUsize::new(4);
    let mut sum = 0.0;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..20_000).for_each(|_| orders.add_or_update(1.0).unwrap());
                running.fetch_sub(1, Ordering::Release);
            });
        }
        let mut batch = Batch::default();
        let mut last = false;
        while !last {
            last = running.load(Ordering::Acquire) == 0;
            cache.journal().take(&mut batch, 100, 0);
            batch.for_each(|_, value, _| sum += value);
            cache.journal().flush_held(&mut batch, |_, value| {
                sum += value;
                true
            });
        }
    });
    assert_eq!(sum, 80_000.0);
}

#[test]
fn the_writer_is_woken_once_and_only_when_it_rests() {
    let (cache, woken) = cache(CUSTOM);
    let journal = cache.journal();
    let level = cache.gauge("Level", &[]).unwrap();
    let wakings = || woken.swap(0, Ordering::Relaxed);
    wakings();
    level.add_or_update(1.0).unwrap();
    assert_eq!(wakings(), 0);
    journal.sleep();
    assert!(journal.is_asleep());
    (0..3).for_each(|_| level.add_or_update(1.0).unwrap());
    assert_eq!(wakings(), 1);
    assert!(!journal.is_asleep());
    cache.reload(Catalog::parse(&CUSTOM.replace("both", "prometheus"), "m.yaml").unwrap());
    assert_eq!((wakings(), journal.is_enabled()), (1, false));
    visit(&cache, 10);
    cache.gauge("Level", &[]).unwrap().add_or_update(1.0).unwrap();
    assert!(visit(&cache, 10).is_empty());
}

/// The lines of counters in one visit, with the growth of each.
fn grown(counters: &mut Counters, cache: &Cache) -> Vec<String> {
    grown_singly(counters, cache, 0)
}

/// The same, where up to `singles` lines may be of single requests.
fn grown_singly(counters: &mut Counters, cache: &Cache, singles: u64) -> Vec<String> {
    let mut lines = Vec::new();
    counters.collect(cache, singles, |text, value| {
        let mut line = String::new();
        text.write(&mut line, Layout::File, &Stamp::new(0, 0), value, "");
        let body = line.split(" - ").nth(1).unwrap();
        lines.push(body.split("|#hostname").next().unwrap().to_owned());
        true
    });
    lines.sort();
    lines
}

fn timeline(queue_ns: u64) -> Timeline {
    let mut timeline = Timeline {
        queue_start: Instant(1000),
        request_start: Instant(1000),
        ..Timeline::default()
    };
    timeline.compute.start = Instant(1000 + queue_ns);
    timeline.request_end = Instant(1000 + 2 * queue_ns);
    timeline
}

#[test]
fn counters_are_logged_by_their_growth() {
    let (cache, _) = cache(crate::catalog::SHIPPED);
    let mut counters = Counters::new();
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    assert!(grown(&mut counters, &cache).is_empty());
    record::inference_requested(&model);
    record::inference_requested(&model);
    record::inference_done(&model, &timeline(132_249), 1);
    [200, 200, 404, 302, 503].into_iter().for_each(|code| {
        record::request_answered(
            &cache,
            Protocol::Http,
            Route::Infer,
            Outcome { code, reason: None },
        )
    });
    record::request_answered(
        &cache,
        Protocol::Grpc,
        Route::Infer,
        Outcome { code: 0, reason: Some(Reason::Internal) },
    );
    let of_model = "|#model_name:m,model_version:1";
    let expected = [
        "Requests2XX.Count:2.0|#Level:Host".to_owned(),
        "Requests4XX.Count:1.0|#Level:Host".to_owned(),
        "Requests5XX.Count:2.0|#Level:Host".to_owned(),
        format!("ts_inference_requests_total.Count:2.0{of_model}"),
    ];
    assert_eq!(grown(&mut counters, &cache), expected);
    assert!(grown(&mut counters, &cache).is_empty());

    // Growth that cannot be written is written at the next visit.
    let line = |value: &str| format!("ts_inference_requests_total.Count:{value}{of_model}");
    record::inference_requested(&model);
    counters.collect(&cache, 0, |_, _| false);
    record::inference_requested(&model);
    assert_eq!(grown(&mut counters, &cache), [line("2.0")]);

    // One line for each request where there is room; growth that cannot be written is again written
    // at the next visit.
    record::request_answered(
        &cache,
        Protocol::Http,
        Route::Infer,
        Outcome { code: 200, reason: None },
    );
    for requests in [2, 1, 4] {
        (0..requests).for_each(|_| record::inference_requested(&model));
        let ones = ["Requests2XX.Count:1.0|#Level:Host".to_owned(), line("1.0"), line("1.0")];
        match requests {
            2 => assert_eq!(grown_singly(&mut counters, &cache, 3), ones),
            1 => counters.collect(&cache, 9, |_, _| false),
            _ => assert_eq!(grown_singly(&mut counters, &cache, 4), [line("5.0")]),
        }
    }
    (0..3).for_each(|_| record::inference_requested(&model));
    let mut places = 0..2;
    counters.collect(&cache, 9, |_, _| places.next().is_some());
    assert_eq!(grown_singly(&mut counters, &cache, 9).len(), 1);
}

/// Records a batch of requests that waited these nanoseconds and took twice as long.
fn batch(model: &ModelSeries, queue_ns: &[u64]) {
    let timelines: Vec<Timeline> = queue_ns.iter().copied().map(timeline).collect();
    timelines.iter().for_each(|timeline| record::inference_done(model, timeline, 1));
    record::batch_times(model, timelines.iter(), 0);
}

#[test]
fn latencies_are_logged_for_each_request_while_there_is_room() {
    let (cache, _) = cache(crate::catalog::SHIPPED);
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    visit(&cache, 100);
    let line = |name: &str, value: &str| {
        format!(
            "ts_{name}_latency_microseconds.Microseconds:{value}|#model_name:m,model_version:1|#\
             hostname:h"
        )
    };
    let latencies = |lines: Vec<String>| {
        lines.into_iter().filter(|line| line.starts_with("ts_")).collect::<Vec<_>>()
    };
    batch(&model, &[1_001, 132_249]);
    let each = [
        ("inference", "2.002"),
        ("queue", "1.001"),
        ("inference", "264.498"),
        ("queue", "132.249"),
    ];
    // Of the ten places until the next visit, nine are not for counters.
    assert_eq!(
        latencies(visit_keeping(&cache, 10, 9)),
        each.map(|(name, value)| line(name, value))
    );
    batch(&model, &[1_001, 132_249]);
    let sums = [line("inference", "266.5"), line("queue", "133.25")];
    let lines = visit_keeping(&cache, 0, 0);
    assert_eq!(
        lines.iter().filter(|line| line.starts_with("QueueTime")).count(),
        2,
        "other series: {lines:?}"
    );
    assert_eq!(latencies(lines), sums);
    batch(&model, &[1_001, 132_249]);
    assert_eq!(visit(&cache, 9), sums);
    // A new definition switches them off. Held increments are still written.
    visit(&cache, 0);
    batch(&model, &[1_001]);
    cache.reload(Catalog::parse("mode: both\n", "m.yaml").unwrap());
    batch(&model, &[5_000]);
    assert_eq!(latencies(visit(&cache, 9)), [line("inference", "2.002"), line("queue", "1.001")]);
}

#[test]
fn sums_of_latencies_are_exact_under_contention() {
    let (cache, _) = cache(crate::catalog::SHIPPED);
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let running = AtomicUsize::new(4);
    let mut logged = [0; 2];
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let model = &model;
            let running = &running;
            scope.spawn(move || {
                (0..5_000).for_each(|at| batch(model, &[at * 7 + thread, 1_000_000_007 + at]));
                running.fetch_sub(1, Ordering::Release);
            });
        }
        let mut taken = Batch::default();
        let mut last = false;
        while !last {
            last = running.load(Ordering::Acquire) == 0;
            cache.journal().take(&mut taken, 100, 50);
            let mut add = |line: &Arc<Line>, value: f64| {
                let text = format!("{:?}", line.text());
                let sum = if text.contains("ts_inference") { 0 } else { 1 };
                if text.contains("ts_") {
                    logged[sum] += (line.shown(value) * 1000.0).round() as u64;
                }
                true
            };
            taken.for_each(|line, value, _| {
                add(line, value);
            });
            cache.journal().flush_held(&mut taken, add);
        }
    });
    assert_eq!(logged, [model.cells.counts.success_ns.get(), model.cells.counts.queue_ns.get()]);
}

#[test]
fn an_unloaded_model_is_logged_to_its_end() {
    let (cache, _) = cache(crate::catalog::SHIPPED);
    let mut counters = Counters::new();
    grown(&mut counters, &cache);
    // Loaded and unloaded between two visits; one of its requests ends even later.
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    record::inference_requested(&model);
    cache.model_unloaded(&model);
    let line = ["ts_inference_requests_total.Count:1.0|#model_name:m,model_version:1"];
    assert_eq!(grown(&mut counters, &cache), line);
    record::inference_requested(&model);
    assert_eq!(grown(&mut counters, &cache), line);
    // The next load starts at 0, and the earlier one is released.
    let next = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    record::inference_requested(&next);
    record::inference_requested(&model);
    let released = Arc::downgrade(&model);
    drop(model);
    assert_eq!(grown(&mut counters, &cache), [line, line].concat());
    assert!(released.upgrade().is_none());
}

#[test]
fn a_counter_added_to_the_logs_is_logged_from_then_on() {
    let only = |modes: &str| {
        let entry = format!(
            "{{name: nv_inference_count, unit: Count, dimensions: [version, model], modes: \
             [{modes}]}}"
        );
        format!("mode: both\nts_metrics:\n  counter:\n    - {entry}\n")
    };
    let (cache, _) = cache(&only("prometheus"));
    let mut counters = Counters::new();
    let model =
        cache.model_loaded(&ModelVersion::new("m", 1), &[("tag".to_owned(), "t".to_owned())]);
    record::inference_done(&model, &timeline(0), 3);
    assert!(grown(&mut counters, &cache).is_empty());
    cache.reload(Catalog::parse(&only("tslog"), "m.yaml").unwrap());
    assert!(grown(&mut counters, &cache).is_empty());
    record::inference_done(&model, &timeline(0), 4);
    assert_eq!(
        grown(&mut counters, &cache),
        ["nv_inference_count.Count:4.0|#version:1,model:m,_tag:t"]
    );
}

#[test]
fn batches_set_the_gauges_of_the_host() {
    let (cache, _) = cache(crate::catalog::SHIPPED);
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    visit(&cache, 10);
    record::batch_times(&model, [timeline(2_999_999), timeline(0)].iter(), 1_234_567);
    record::worker_loaded(&cache, &model, 3, 6986);
    let expected = [
        "QueueTime.Milliseconds:2.0|#Level:Host|#hostname:h",
        "QueueTime.Milliseconds:0.0|#Level:Host|#hostname:h",
        "WorkerThreadTime.Milliseconds:1.234|#Level:Host|#hostname:h",
        "WorkerLoadTime.Milliseconds:6986.0|#WorkerName:W-3-m_1,Level:Host|#hostname:h",
    ];
    let lines = visit(&cache, 10);
    assert_eq!(
        lines.iter().filter(|line| !line.starts_with("ts_")).collect::<Vec<_>>(),
        expected.iter().collect::<Vec<_>>()
    );
    let load_time = || cache.registry().family("WorkerLoadTime").unwrap().all().len();
    assert_eq!((cache.gauge("QueueTime", &["Host", "h"]).unwrap().value(), load_time()), (0.0, 1));
    // A worker that ends takes its series along, also if it had none.
    record::worker_loaded(&cache, &model, 4, 20);
    [4, 5].into_iter().for_each(|gone| record::worker_removed(&cache, &model, gone));
    assert_eq!((load_time(), visit(&cache, 10).len()), (1, 1));
    cache.model_unloaded(&model);
    assert_eq!(load_time(), 0);
    record::worker_removed(&cache, &model, 3);
    assert_eq!(load_time(), 0);
    // A new definition switches them off.
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    cache.reload(Catalog::parse("mode: both\n", "m.yaml").unwrap());
    record::batch_times(&model, [timeline(0)].iter(), 0);
    record::worker_loaded(&cache, &model, 3, 1);
    assert!(visit(&cache, 10).is_empty());
}
