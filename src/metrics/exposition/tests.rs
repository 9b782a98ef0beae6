//! Golden texts of scrapes.

use pharos_base::error::Reason;
use pharos_base::id::ModelVersion;
use pharos_base::timeline::{ComputeStamps, Instant, Timeline};

use super::*;
use crate::cache::Settings;
use crate::catalog::Catalog;
use crate::labels::{FinishReason, InstanceState, Outcome, Protocol, Route};
use crate::record;

fn timeline() -> Timeline {
    Timeline {
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
        ..Timeline::default()
    }
}

/// One model with one event of each kind.
fn recorded() -> Arc<Cache> {
    recorded_with(Settings::new("host-1"))
}

fn recorded_with(settings: Settings) -> Arc<Cache> {
    let cache = Arc::new(Cache::new(Catalog::shipped(), settings));
    let tags =
        [("team".to_owned(), "a \"b\"\\\n".to_owned()), ("te-am".to_owned(), "x".to_owned())];
    let series = cache.model_loaded(&ModelVersion::new("simple", 1), &tags);
    record::model_load_duration(&series, 1.25);
    record::instance_state(&series, None, Some(InstanceState::Starting));
    record::instance_state(&series, Some(InstanceState::Starting), Some(InstanceState::Ready));
    record::instance_restarted(&series);
    record::samples_dropped(&series, 2);
    for _ in 0..3 {
        record::inference_requested(&series);
    }
    record::request_pending(&series, 3);
    record::request_pending(&series, -1);
    record::batch_executed(&series, 4, &timeline().compute, 1_700_000_000_000);
    record::inference_done(&series, &timeline(), 4);
    record::inference_failed(&series, Reason::Backend, 5_000);
    record::inference_failed(&series, Reason::QueueFull, 5_000);
    let ok = Outcome { code: 200, reason: None };
    record::request_answered(&cache, Protocol::Http, Route::Infer, ok);
    let refused = Outcome { code: 3, reason: Some(Reason::Malformed) };
    record::request_answered(&cache, Protocol::Grpc, Route::ModelReady, refused);
    cache
}

/// Compares with a file in `testdata`. The environment variable UPDATE_GOLDEN rewrites the file
/// instead.
fn golden(name: &str, text: &str) {
    let path = format!("{}/testdata/{name}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    assert_eq!(text, std::fs::read_to_string(&path).unwrap(), "{path}");
}

#[test]
fn text_of_one_model() {
    golden("one_model.prom", &render(&recorded(), Format::Text));
}

#[test]
fn openmetrics_of_one_model() {
    golden("one_model.openmetrics", &render(&recorded(), Format::OpenMetrics));
}

#[test]
fn statistics_of_one_model() {
    let cache = recorded();
    let series = cache.model(&ModelVersion::new("simple", 1)).unwrap();
    let json = serde_json::to_string(&crate::statistics::of(&series)).unwrap();
    golden("one_model.json", &(json + "\n"));
}

#[test]
fn every_series_exists_from_the_load() {
    let cache = Arc::new(Cache::new(Catalog::shipped(), Settings::new("h")));
    let empty = render(&cache, Format::Text);
    assert!(!empty.contains("nv_inference"), "families without series are omitted: {empty}");
    let series = cache.model_loaded(&ModelVersion::new("m", 3), &[]);
    let text = render(&cache, Format::Text);
    for line in [
        "nv_inference_request_success{model=\"m\",version=\"3\"} 0",
        "nv_inference_request_failure{model=\"m\",reason=\"REJECTED\",version=\"3\"} 0",
        "nv_inference_request_failure{model=\"m\",reason=\"OTHER\",version=\"3\"} 0",
        "nv_inference_pending_request_count{model=\"m\",version=\"3\"} 0",
        "nv_model_load_duration_secs{model=\"m\",version=\"3\"} 0",
        "ts_inference_requests_total{model_name=\"m\",model_version=\"3\",hostname=\"h\"} 0",
        "pharos_requests_total{protocol=\"http\",route=\"infer\",code=\"200\"} 0",
        "pharos_requests_total{protocol=\"grpc\",route=\"infer\",code=\"OK\"} 0",
        "pharos_request_failures_total{protocol=\"grpc\",route=\"infer\",reason=\"QUEUE_FULL\"} 0",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
    }
    cache.model_unloaded(&series);
    assert_eq!(render(&cache, Format::Text), empty);
}

#[test]
fn metrics_of_users_are_rendered() {
    let text = "
model_metrics:
  counter:
    - {name: orders_total, unit: Count, dimensions: [shop, area], help: \"a\\nb\\\\ \\\"c\\\"\"}
  gauge:
    - {name: level, unit: m}
  histogram:
    - {name: size, unit: B, dimensions: [shop], buckets: [1, 2.5]}
  summary:
    - {name: time, unit: s, dimensions: [shop], quantiles: [0.5, 1]}
";
    let cache = Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h")));
    // Values are given in the order of the file's dimensions.
    cache.counter("orders_total", &["b", "a\n"]).unwrap().add_or_update(1.5).unwrap();
    cache.gauge("level", &[]).unwrap().add_or_update(-4.0).unwrap();
    let size = cache.histogram("size", &["b"]).unwrap();
    [2.0, 9.0].into_iter().for_each(|value| size.add_or_update(value).unwrap());
    let time = cache.summary("time", &["b"]).unwrap();
    [1.0, 3.0].into_iter().for_each(|value| time.add_or_update(value).unwrap());
    let expected = r#"# HELP orders_total a\nb\\ "c"
# TYPE orders_total counter
orders_total{shop="b",area="a\n"} 1.5
# HELP level level (m)
# TYPE level gauge
level -4
# HELP size size (B)
# TYPE size histogram
size_bucket{shop="b",le="1"} 0
size_bucket{shop="b",le="2.5"} 1
size_bucket{shop="b",le="+Inf"} 2
size_sum{shop="b"} 11
size_count{shop="b"} 2
# HELP time time (s)
# TYPE time summary
time{shop="b",quantile="0.5"} 1
time{shop="b",quantile="1"} 3
time_sum{shop="b"} 4
time_count{shop="b"} 2
"#;
    assert_eq!(render(&cache, Format::Text), expected);
    let open = render(&cache, Format::OpenMetrics);
    assert!(
        open.starts_with("# HELP orders a\\nb\\\\ \\\"c\\\"\n# TYPE orders counter\norders_total{"),
        "{open}"
    );
    for line in [
        "size_bucket{shop=\"b\",le=\"1.0\"} 0",
        "time{shop=\"b\",quantile=\"1.0\"} 3",
        "size_sum{shop=\"b\"} 11",
    ] {
        assert!(open.lines().any(|other| other == line), "{line} is missing in\n{open}");
    }
    assert!(open.ends_with("\n# EOF\n"));
}

#[test]
fn further_names_show_the_same_series_in_their_unit() {
    let text = "
ts_metrics:
  histogram:
    - name: pharos_queue_duration_seconds
      unit: Seconds
      dimensions: [model, version]
      buckets: [0.00005, 0.00051]
      also_as: [queue_seconds, {name: nv_inference_queue_duration_histogram_us, unit: Microseconds}]
model_metrics:
  counter:
    - {name: waited_total, unit: s, dimensions: [shop], also_as: {name: waited_ms, unit: ms}}
  summary:
    - {name: time, unit: s, quantiles: [0.5], also_as: {name: time_us, unit: us}}
";
    let cache = Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    record::inference_done(&series, &timeline(), 1);
    cache.counter("waited_total", &["b"]).unwrap().add_or_update(0.0125).unwrap();
    cache.summary("time", &[]).unwrap().add_or_update(0.5).unwrap();
    let plain = render(&cache, Format::Text);
    let old = "nv_inference_queue_duration_histogram_us";
    let labels = "{model=\"m\",version=\"1\"";
    for line in [
        format!("pharos_queue_duration_seconds_bucket{labels},le=\"5e-05\"}} 0"),
        format!("pharos_queue_duration_seconds_bucket{labels},le=\"0.00051\"}} 1"),
        format!("pharos_queue_duration_seconds_sum{labels}}} 0.000100999"),
        format!("queue_seconds_sum{labels}}} 0.000100999"),
        format!("# HELP {old} Other name of pharos_queue_duration_seconds, in Microseconds"),
        format!("# TYPE {old} histogram"),
        format!("{old}_bucket{labels},le=\"50\"}} 0"),
        format!("{old}_bucket{labels},le=\"510\"}} 1"),
        format!("{old}_bucket{labels},le=\"+Inf\"}} 1"),
        format!("{old}_sum{labels}}} 100.999"),
        format!("{old}_count{labels}}} 1"),
        "# TYPE waited_ms counter".to_owned(),
        "waited_total{shop=\"b\"} 0.0125".to_owned(),
        "waited_ms{shop=\"b\"} 12.5".to_owned(),
        "time_us{quantile=\"0.5\"} 500000".to_owned(),
        "time_us_sum 500000".to_owned(),
    ] {
        assert!(plain.lines().any(|other| other == line), "{line} is missing in\n{plain}");
    }
    let open = render(&cache, Format::OpenMetrics);
    // OpenMetrics requires counters to end in `_total`.
    for line in ["# TYPE waited counter", "# TYPE waited_ms unknown", "waited_ms{shop=\"b\"} 12.5"]
    {
        assert!(open.lines().any(|other| other == line), "{line} is missing in\n{open}");
    }
    let one = render_named(&cache, Format::Text, &Names::of_query([("name[]", "waited_ms")]));
    assert_eq!(one.lines().count(), 3, "{one}");
    let java = java_client::render(&cache, &Names::default(), |spec| spec.unit.clone());
    let bucket = format!("{old}_bucket{labels},le=\"50.0\",}} 0.0");
    assert!(
        java.contains(&format!("# HELP {old} Microseconds\n")) && java.contains(&bucket),
        "{java}"
    );
}

#[test]
fn further_names_have_other_labels() {
    let text = "
ts_metrics:
  counter:
    - name: pharos_llm_finished_total
      unit: Count
      dimensions: [model, version, reason]
      also_as:
        - name: vllm:request_success_total
          labels: {model_name: model, finished_reason: reason, engine: {value: '0'}}
  gauge:
    - name: nv_inference_pending_request_count
      unit: Count
      dimensions: [model, version]
      also_as: {name: waiting, labels: {model_name: model, engine: {value: 'a \"b\"'}}}
model_metrics:
  histogram:
    - {name: size, unit: B, dimensions: [shop], buckets: [1], also_as: {name: s, labels: {shop: shop, store: shop}}}
";
    let cache = Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h")));
    let tags = [("team".to_owned(), "t".to_owned())];
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &tags);
    cache.model_generates(&series);
    record::generation_failed(&series, FinishReason::Abort);
    cache.histogram("size", &["b"]).unwrap().add_or_update(0.5).unwrap();
    let plain = render(&cache, Format::Text);
    for line in [
        "pharos_llm_finished_total{model=\"m\",version=\"1\",reason=\"abort\",_team=\"t\"} 1",
        "vllm:request_success_total{model_name=\"m\",version=\"1\",finished_reason=\"abort\",engine=\"0\",_team=\"t\"} 1",
        // Labels of Triton's metrics are in alphabetical order.
        "waiting{_team=\"t\",engine=\"a \\\"b\\\"\",model_name=\"m\",version=\"1\"} 0",
        "size_sum{shop=\"b\"} 0.5",
        "s_bucket{shop=\"b\",store=\"b\",le=\"1\"} 1",
    ] {
        assert!(plain.lines().any(|other| other == line), "{line} is missing in\n{plain}");
    }
    let open = render(&cache, Format::OpenMetrics);
    let line = "vllm:request_success_total{model_name=\"m\",version=\"1\",finished_reason=\"abort\",engine=\"0\",_team=\"t\"} 1";
    assert!(open.lines().any(|other| other == line), "{line} is missing in\n{open}");
    let java = java_client::render(&cache, &Names::default(), |spec| spec.unit.clone());
    assert!(java.contains("s_sum{shop=\"b\",store=\"b\",} 0.5\n"), "{java}");
}

#[test]
fn a_metric_that_the_file_omits_is_not_shown() {
    let text = "ts_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c, dimensions: [model, version]}\n";
    let cache = Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h")));
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    record::inference_done(&series, &timeline(), 2);
    let expected = "# HELP nv_inference_count Number of inferences performed (does not include cached requests)\n# TYPE nv_inference_count counter\nnv_inference_count{model=\"m\",version=\"1\"} 2\n";
    assert_eq!(render(&cache, Format::Text), expected);
}

#[test]
fn a_scrape_in_mode_tslog_refers_to_the_logs() {
    let cache = Arc::new(Cache::new(Catalog::shipped().with_mode(Mode::Tslog), Settings::new("h")));
    cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    assert_eq!(render(&cache, Format::Text), LOGS_ONLY);
    assert_eq!(render(&cache, Format::OpenMetrics), "# EOF\n");
    let names = Names::of_query([("name[]", "nv_inference_count")]);
    assert_eq!(render_named(&cache, Format::Text, &names), LOGS_ONLY);
    cache.reload(Catalog::shipped());
    assert!(!render(&cache, Format::Text).contains(LOGS_ONLY));
}

#[test]
fn distributions_are_rendered() {
    let text = "
ts_metrics:
  histogram:
    - {name: pharos_queue_duration_seconds, unit: s, dimensions: [model, version], buckets: [0.00005, 0.0002005]}
    - {name: pharos_batch_size, unit: c, dimensions: [model, version], buckets: [2, 4]}
  summary:
    - {name: nv_inference_queue_summary_us, unit: us, dimensions: [model, version], quantiles: [0.5]}
";
    let cache = Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h")));
    let own = vec![
        ("pharos_queue_duration_seconds".to_owned(), vec![0.0001]),
        ("pharos_batch_size".to_owned(), vec![3.0, 5.0]),
    ];
    let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let special = cache.model_loaded_with(&ModelVersion::new("n", 1), &[], own);
    for series in [&series, &special] {
        record::inference_done(series, &timeline(), 4);
        record::batch_executed(series, 4, &timeline().compute, 0);
    }
    let plain = render(&cache, Format::Text);
    for line in [
        "pharos_queue_duration_seconds_sum{model=\"m\",version=\"1\"} 0.000100999",
        "pharos_queue_duration_seconds_bucket{model=\"m\",version=\"1\",le=\"5e-05\"} 0",
        "pharos_queue_duration_seconds_bucket{model=\"m\",version=\"1\",le=\"0.0002005\"} 1",
        "pharos_queue_duration_seconds_bucket{model=\"n\",version=\"1\",le=\"0.0001\"} 0",
        "pharos_batch_size_sum{model=\"m\",version=\"1\"} 4",
        "pharos_batch_size_bucket{model=\"m\",version=\"1\",le=\"2\"} 0",
        "pharos_batch_size_bucket{model=\"m\",version=\"1\",le=\"4\"} 1",
        "pharos_batch_size_bucket{model=\"n\",version=\"1\",le=\"3\"} 0",
        "pharos_batch_size_bucket{model=\"n\",version=\"1\",le=\"5\"} 1",
        "nv_inference_queue_summary_us{model=\"m\",version=\"1\",quantile=\"0.5\"} 100.9990005493164",
        "nv_inference_queue_summary_us_count{model=\"m\",version=\"1\"} 1",
    ] {
        assert!(plain.lines().any(|other| other == line), "{line} is missing in\n{plain}");
    }
    let trace = pharos_base::id::TraceId::from_traceparent(
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )
    .unwrap();
    record::inference_traced(&series, &timeline(), trace, 1_500);
    let open = render(&cache, Format::OpenMetrics);
    let exemplar = "pharos_queue_duration_seconds_bucket{model=\"m\",version=\"1\",le=\"0.0002005\"} 1 # \
                    {trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"} 0.000100999 1.5";
    assert!(open.lines().any(|line| line == exemplar), "{open}");
    assert_eq!(open.matches("# TYPE pharos_queue_duration_seconds histogram").count(), 1);
    assert_eq!(render(&cache, Format::Text), plain, "the text format has no exemplars");
}

/// OpenMetrics allows no sum that may fall, and no count of a histogram without a sum.
#[test]
fn openmetrics_omits_sums_that_may_fall() {
    let text = "
model_metrics:
  histogram:
    - {name: drift, unit: Celsius, buckets: [-1, 1]}
    - {name: change, unit: Celsius, buckets: [1]}
    - {name: size, unit: B, buckets: [1]}
  summary:
    - {name: low, unit: Celsius, quantiles: [0.5]}
    - {name: high, unit: Celsius, quantiles: [0.5]}
";
    let cache = Arc::new(Cache::new(Catalog::parse(text, "m.yaml").unwrap(), Settings::new("h")));
    for (name, value) in [("drift", 2.0), ("change", -3.0), ("change", 5.0), ("size", 2.0)] {
        cache.histogram(name, &[]).unwrap().add_or_update(value).unwrap();
    }
    cache.summary("low", &[]).unwrap().add_or_update(-2.0).unwrap();
    cache.summary("high", &[]).unwrap().add_or_update(2.0).unwrap();
    let totals = |format: Format| {
        let text = render(&cache, format);
        let samples = text.lines().filter_map(|line| line.split(' ').next());
        let totals =
            samples.filter(|sample| sample.ends_with("_sum") || sample.ends_with("_count"));
        totals.map(str::to_owned).collect::<Vec<_>>()
    };
    let expected = ["size_sum", "size_count", "low_count", "high_sum", "high_count"];
    assert_eq!(totals(Format::OpenMetrics), expected);
    assert_eq!(totals(Format::Text).len(), 10, "the classic format has all of them");
    assert!(render(&cache, Format::OpenMetrics).contains("change_bucket{le=\"+Inf\"} 2\n"));
}

/// Prometheus reserves names of labels that begin with `__`, and `__name__` would replace the
/// metric's name.
#[test]
fn tags_never_become_reserved_labels() {
    let cache = Arc::new(Cache::new(Catalog::shipped(), Settings::new("h")));
    let tags = ["_name__", ".env", "plain", "_plain"].map(|key| (key.to_owned(), "x".to_owned()));
    cache.model_loaded(&ModelVersion::new("m", 1), &tags);
    let line =
        "nv_inference_count{_env=\"x\",_name__=\"x\",_plain=\"x\",model=\"m\",version=\"1\"} 0\n";
    let text = render(&cache, Format::Text);
    assert!(text.contains(line), "{text}");
}

/// Prints the cost of a scrape; run with `--nocapture`.
#[test]
fn cost_of_a_scrape_of_200_models() {
    let cache = Arc::new(Cache::new(Catalog::shipped(), Settings::new("host-1")));
    for at in 0..200 {
        let series = cache.model_loaded(&ModelVersion::new(format!("model_{at}"), 1), &[]);
        record::inference_done(&series, &timeline(), 4);
    }
    let rounds = 20;
    #[allow(clippy::disallowed_methods)]
    let start = std::time::Instant::now();
    let mut bytes = 0;
    for _ in 0..rounds {
        bytes = render(&cache, Format::Text).len();
    }
    let each = start.elapsed() / rounds;
    println!("a scrape of 200 models: {each:?}, {bytes} bytes");
    // The target is 10 ms; the bound leaves room for a busy machine.
    assert!(each.as_millis() < 100, "{each:?}");
}

#[test]
fn idle_series_can_be_left_out() {
    let all = recorded();
    let events = recorded_with(Settings { omit_idle: true, ..Settings::new("host-1") });
    for format in [Format::Text, Format::OpenMetrics] {
        let full = render(&all, format);
        let short = render(&events, format);
        let counters: Vec<&str> = full
            .lines()
            .filter_map(|line| {
                line.strip_prefix("# TYPE ")?
                    .strip_suffix(" counter")
                    .or(line.strip_suffix(" unknown"))
            })
            .collect();
        let is_idle = |line: &&str| {
            let name = line.split(['{', ' ']).next().unwrap();
            let counted = counters.iter().any(|counter| {
                name.strip_suffix("_total").unwrap_or(name) == *counter || name == *counter
            });
            counted && line.ends_with(" 0")
        };
        assert!(full.lines().any(|line| is_idle(&line)), "the test finds idle counters");
        assert_eq!(short.lines().find(is_idle), None);
        // The rest is the same, in the same order.
        let mut rest = full.lines();
        assert!(short.lines().all(|line| rest.any(|other| other == line)), "{short}");
        assert!(
            full.lines()
                .filter(|line| line.contains("} 0") && line.starts_with("pharos_instances"))
                .all(|line| short.contains(line))
        );
    }
}
