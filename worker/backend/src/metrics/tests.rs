//! Tests of metrics over a real ring, read as the frontend reads it.

use std::sync::Arc;

use pharos::id::ModelVersion;
use pharos::metrics::cache::{Cache, Settings};
use pharos::metrics::catalog::Catalog;
use pharos::metrics::channel::{self, Event, Reader};
use pharos::metrics::feed::Feed;
use pharos::timeline::ComputeStamps;
use rustix::pipe::{PipeFlags, pipe_with};

use super::*;

const DEFINITION: &str = "
ts_metrics:
  gauge:
    - {name: QueueTime, unit: ms, dimensions: [Level, Hostname]}
model_metrics:
  counter:
    - {name: Orders, unit: Count, dimensions: [shop, ModelName]}
    - {name: Off, unit: Count, enabled: false}
  gauge:
    - {name: HandlerTime, unit: ms, dimensions: [ModelName, Level, Hostname]}
    - {name: Depth, unit: m, dimensions: [ModelName, sea, Level]}
  histogram:
    - {name: Size, unit: B}
";

/// Returns what a worker gets of a text of `metrics.yaml`.
fn encoded(text: &str) -> String {
    WorkerMetrics::of(&Catalog::parse(text, "m.yaml").unwrap()).encode()
}

struct World {
    metrics: Metrics,
    reader: Option<Reader>,
    wakeup: OwnedFd,
}

fn world(auto_detect: bool) -> World {
    let (ring, reader) = channel::create(0).unwrap();
    let (wakeup, theirs) = pipe_with(PipeFlags::NONBLOCK).unwrap();
    let load = Load {
        wire_version: pharos::wire::VERSION,
        model: "m".into(),
        version: 1,
        instance: "m_0".into(),
        directory: String::new(),
        model_directory: String::new(),
        backend_settings: Vec::new(),
        verbose: false,
        config: Vec::new(),
        initial_states: String::new(),
        threads: 1,
        spin_us: 0,
        metrics: encoded(DEFINITION),
        auto_detect,
        device: None,
    };
    let metrics = Metrics::open(&ring, theirs, &load).unwrap();
    World { metrics, reader: Some(reader), wakeup }
}

/// A received sample: metric, labels without the host's, value, request id.
type Came = (String, Vec<String>, f64, String);

impl World {
    /// Returns everything received since the start, and the number of dropped samples. Call it
    /// once.
    fn came(&mut self) -> (Vec<Came>, u64) {
        let mut reader = self.reader.take().unwrap();
        let mut definitions = Vec::new();
        let mut came = Vec::new();
        reader
            .drain(|event| match event {
                Event::Series(definition) => definitions.push(definition),
                Event::Metric(_) => {}
                Event::Sample(sample) => {
                    let of = &definitions[sample.series as usize];
                    let labels = of
                        .labels
                        .iter()
                        .filter(|(name, _)| name != "Hostname")
                        .map(|(name, value)| format!("{name}={value}"))
                        .collect();
                    came.push((
                        of.name.clone(),
                        labels,
                        sample.value,
                        sample.request_id.to_owned(),
                    ));
                }
            })
            .unwrap();
        (came, reader.dropped())
    }
}

fn came(name: &str, labels: &[&str], value: f64, request_id: &str) -> Came {
    (name.into(), labels.iter().map(|label| (*label).into()).collect(), value, request_id.into())
}

fn requests(ids: &[&str]) -> Vec<BatchRequest> {
    ids.iter()
        .map(|id| BatchRequest { id: (*id).into(), rows: 1, ..BatchRequest::default() })
        .collect()
}

/// Returns an executed batch.
fn done(stamps: ComputeStamps, error: Option<pharos::wire::WireError>) -> Done {
    Done {
        batch: 1,
        stamps,
        error,
        failed: Vec::new(),
        outputs: Vec::new(),
        parameters: Vec::new(),
        rescheduled: Vec::new(),
        open: Vec::new(),
        held: false,
    }
}

fn refusal<T>(result: Result<T, MetricError>) -> String {
    result.map(|_| ()).unwrap_err().to_string()
}

#[test]
fn values_belong_to_dimensions_and_defaults_fill_the_others() {
    let mut world = world(false);
    let orders = world.metrics.add_metric("Orders", "ignored", &["shop"], Kind::Counter).unwrap();
    orders.add_or_update(1.0, &["a"]);
    // The model has named one dimension.
    orders.add_or_update(2.0, &["a", "other"]);
    let depth = world.metrics.get_metric("Depth", Kind::Gauge).unwrap();
    depth.add_or_update(3.0, &["north"]);
    depth.add_or_update(4.0, &["mine", "south"]);
    depth.add_or_update(5.0, &["mine", "south", "low"]);
    depth.add_or_update(6.0, &[]);
    depth.add_or_update(6.0, &["a", "b", "c", "d"]);
    let expected = vec![
        came("Orders", &["shop=a", "ModelName=m"], 1.0, ""),
        came("Depth", &["ModelName=m", "sea=north", "Level=Model"], 3.0, ""),
        came("Depth", &["ModelName=mine", "sea=south", "Level=Model"], 4.0, ""),
        came("Depth", &["ModelName=mine", "sea=south", "Level=low"], 5.0, ""),
    ];
    assert_eq!(world.came(), (expected, 3));
}

/// TorchServe's form of a file has no label for the host: models give no value for the one that the
/// server adds.
#[test]
fn a_label_that_the_server_adds_takes_no_value() {
    let mut world = world(false);
    let text = "dimensions: [&shop \"shop\"]\nmodel_metrics:\n  gauge:\n    - {name: Depth, unit: \
                m, dimensions: [*shop]}\n";
    world.metrics.redefine(&encoded(text)).unwrap();
    let depth = world.metrics.get_metric("Depth", Kind::Gauge).unwrap();
    depth.add_or_update(1.0, &["a"]);
    depth.add_or_update(2.0, &["a", "b"]);
    assert_eq!(world.came(), (vec![came("Depth", &["shop=a"], 1.0, "")], 1));
}

/// The frontend converts samples of a series with another unit of time or size than the
/// definition's.
#[test]
fn values_have_the_unit_that_the_model_names() {
    let mut world = world(false);
    let text = "model_metrics:\n  gauge:\n    - {name: Took, unit: ms}\n    - {name: HandlerTime, \
                unit: s}\n";
    world.metrics.redefine(&encoded(text)).unwrap();
    world.metrics.add_metric("Took", "s", &[], Kind::Gauge).unwrap().add_or_update(0.5, &[]);
    let sample =
        UndeclaredSample { name: "Took", unit: "Milliseconds", kind: Kind::Gauge, dimensions: &[] };
    world.metrics.record_undeclared(&sample, 250.0, Requests::None);
    let stamps =
        ComputeStamps { start: Instant(0), end: Instant(2_000_000), ..ComputeStamps::default() };
    world.metrics.batch_executed(&done(stamps, None), Some(Instant(0)));
    let mut reader = world.reader.take().unwrap();
    let mut units = Vec::new();
    let mut values = Vec::new();
    reader
        .drain(|event| match event {
            Event::Series(definition) => units.push(definition.unit),
            Event::Sample(sample) => values.push(sample.value),
            Event::Metric(_) => {}
        })
        .unwrap();
    assert_eq!((units.join(","), values), ("ms,s,s".to_owned(), vec![0.5, 0.25, 0.002]));
}

#[test]
fn times_that_the_definition_leaves_out_are_off() {
    for auto_detect in [true, false] {
        let mut world = world(auto_detect);
        world.metrics.redefine(&encoded("mode: both")).unwrap();
        for name in ["PredictionTime", "HandlerTime"] {
            let sample = UndeclaredSample {
                name,
                unit: "ms",
                kind: Kind::Gauge,
                dimensions: &[("Level", "Model")],
            };
            world.metrics.record_undeclared(&sample, 1.0, Requests::None);
        }
        assert_eq!(world.came(), (Vec::new(), 0));
    }
}

#[test]
fn the_definition_decides_what_may_be_added() {
    let World { metrics, .. } = world(false);
    let add = |name, dimensions: &[&str], kind| metrics.add_metric(name, "ms", dimensions, kind);
    let line = "under model_metrics.gauge: `- {name: New, unit: ms, dimensions: [a, b]}`";
    assert!(refusal(add("New", &["a", "b"], Kind::Gauge)).contains(line));
    assert_eq!(
        refusal(add("Orders", &["shop"], Kind::Gauge)),
        "metric `Orders` is a counter, not a gauge"
    );
    assert!(
        refusal(add("Orders", &["store"], Kind::Counter))
            .contains("[shop, ModelName], but [store] were given")
    );
    assert!(
        refusal(add("Orders", &["shop", "shop"], Kind::Counter))
            .contains("[shop, shop] were given")
    );
    assert!(
        refusal(add("Depth", &["Level"], Kind::Gauge)).contains("[Level] were given"),
        "sea has no default"
    );
    assert_eq!(
        refusal(add("QueueTime", &[], Kind::Gauge)),
        "metric `QueueTime` is recorded by the server itself"
    );
    let unknown = "there is no gauge `New`: neither metrics.yaml nor add_metric has defined it";
    assert_eq!(refusal(metrics.get_metric("New", Kind::Gauge)), unknown);
    assert_eq!(
        refusal(metrics.get_metric("Size", Kind::Gauge)),
        "metric `Size` is a histogram, not a gauge"
    );
    assert!(metrics.get_metric("Size", Kind::Histogram).is_ok());
}

#[test]
fn undefined_metrics_are_detected_if_auto_detection_is_on() {
    let mut world = world(true);
    let new = world.metrics.add_metric("New", "ms", &["a", "ModelName"], Kind::Gauge).unwrap();
    new.add_or_update(1.0, &["x"]);
    world.metrics.get_metric("New", Kind::Gauge).unwrap().add_or_update(2.0, &["y"]);
    assert!(matches!(
        world.metrics.get_metric("Newer", Kind::Gauge),
        Err(MetricError::Unknown { .. })
    ));
    let expected = vec![
        came("New", &["a=x", "ModelName=m"], 1.0, ""),
        came("New", &["a=y", "ModelName=m"], 2.0, ""),
    ];
    assert_eq!(world.came(), (expected, 0));
}

#[test]
fn samples_belong_to_the_batch_of_their_thread_or_to_given_requests() {
    let mut world = world(false);
    let size = world.metrics.get_metric("Size", Kind::Histogram).unwrap();
    let series = size.series(&[]).unwrap();
    series.add_or_update(0.0);
    world.metrics.batch_begins(&requests(&["a", "", "c,d"]));
    series.add_or_update(1.0);
    size.add_or_update_for(2.0, &[], Requests::One(2));
    series.add_or_update_for(3.0, Requests::One(1));
    series.add_or_update_for(3.5, Requests::One(9));
    series.add_or_update_for(4.0, Requests::Id("its,own"));
    series.add_or_update_for(5.0, Requests::None);
    std::thread::scope(|scope| drop(scope.spawn(|| series.add_or_update(6.0))));
    let done = |error| done(ComputeStamps::default(), error);
    world.metrics.batch_executed(&done(None), Some(Instant(0)));
    series.add_or_update(7.0);
    world.metrics.batch_begins(&requests(&["first", &"x".repeat(8000)]));
    let failed = pharos::wire::WireError {
        code: ErrorCode::Internal,
        message: String::new(),
        of_region: false,
    };
    series.add_or_update(8.0);
    series.add_or_update_for(9.0, Requests::One(1));
    world.metrics.batch_executed(&done(Some(failed)), Some(Instant(0)));
    let ids = ["", "a,,c%2Cd", "c%2Cd", "", "", "its%2Cown", "", "", "a,,c%2Cd", "", "first"];
    let (all, dropped) = world.came();
    let found: Vec<&str> = all.iter().map(|(.., id)| id.as_str()).collect();
    assert_eq!((&found[..11], found[11].len(), all.len(), dropped), (&ids[..], 7 << 10, 12, 0));
    assert_eq!(all[8], came("HandlerTime", &["ModelName=m", "Level=Model"], 0.0, "a,,c%2Cd"));
}

#[test]
fn samples_of_torchserves_handlers_are_aligned_to_what_is_defined() {
    let mut world = world(true);
    let metrics = world.metrics.clone();
    let many = format!("{},b", "x".repeat(8000));
    let record = |name, kind, dimensions: &[(&str, &str)], value, ids| {
        metrics.record_undeclared(
            &UndeclaredSample { name, unit: "ms", kind, dimensions },
            value,
            ids,
        );
    };
    let model = [("ModelName", "t"), ("Level", "Model")];
    // Matched by name: dimensions that the worker fills in may be omitted, and those that
    // TorchServe appends need not be defined.
    record("HandlerTime", Kind::Gauge, &model, 1.0, Requests::Ids("a,b"));
    record("Orders", Kind::Gauge, &[("shop", "x"), model[0], model[1]], 2.0, Requests::None);
    record("Depth", Kind::Gauge, &[("sea", "north")], f64::NAN, Requests::Ids(&many));
    // Never matched by position: as many dimensions as the metric has, and one more.
    record("Orders", Kind::Counter, &[("store", "y"), ("of", "z")], 3.0, Requests::Ids("a"));
    record("Orders", Kind::Counter, &[("shop", "b"), model[0], ("tier", "f")], 3.0, Requests::None);
    // The first sample determines the type of an undefined metric; names are made valid for
    // Prometheus.
    record("of-time", Kind::Gauge, &[("in.step", "p:q"), model[0]], 4.0, Requests::None);
    record("of-time", Kind::Counter, &[("other", "r"), ("names", "s")], 5.0, Requests::None);
    record("of-time", Kind::Gauge, &[model[0], ("in.step", "u")], 6.0, Requests::None);
    record("QueueTime", Kind::Gauge, &[], 6.0, Requests::None);
    let (all, dropped) = world.came();
    assert!(all[2].2.is_nan());
    let found: Vec<_> = all
        .into_iter()
        .map(|(name, labels, value, id)| (name, labels, value.to_string(), id))
        .collect();
    let of = |name: &str, labels: &[&str], value: &str, ids: &str| {
        (
            name.to_owned(),
            labels.iter().map(|label| (*label).to_owned()).collect(),
            value.to_owned(),
            ids.to_owned(),
        )
    };
    let expected = vec![
        of("HandlerTime", &["ModelName=t", "Level=Model"], "1", "a,b"),
        of("Orders", &["shop=x", "ModelName=t"], "2", ""),
        of("Depth", &["ModelName=m", "sea=north", "Level=Model"], "NaN", ""),
        of("of_time", &["in_step=p:q", "ModelName=t"], "4", ""),
        of("of_time", &["other=r", "names=s"], "5", ""),
        of("of_time", &["in_step=u", "ModelName=t"], "6", ""),
    ];
    assert_eq!((found, dropped), (expected, 3));
    let names: Vec<String> = metrics.of_models().into_iter().map(|spec| spec.name).collect();
    assert_eq!(names, ["Orders", "HandlerTime", "Depth", "Size"]);
}

#[test]
fn coalesced_values_are_sent_by_the_flush() {
    let mut world = world(false);
    let orders = world.metrics.get_metric("Orders", Kind::Counter).unwrap();
    let depth = world.metrics.get_metric("Depth", Kind::Gauge).unwrap();
    let sum = orders.coalesced(&["a"]).unwrap();
    let last = depth.coalesced(&["s"]).unwrap();
    assert!(world.metrics.get_metric("Size", Kind::Histogram).unwrap().coalesced(&[]).is_err());
    for value in [1.0, 2.0, 4.0] {
        sum.add_or_update(value);
        orders.coalesced(&["a"]).unwrap().add_or_update(value);
        last.add_or_update(value);
    }
    sum.add_or_update(-1.0);
    world.metrics.flush();
    world.metrics.flush();
    last.add_or_update(9.0);
    depth.reset();
    sum.add_or_update(5.0);
    orders.reset();
    world.metrics.flush();
    let orders = ["shop=a", "ModelName=m"];
    let depth = ["ModelName=m", "sea=s", "Level=Model"];
    let expected = vec![
        came("Orders", &orders, 14.0, ""),
        came("Depth", &depth, 4.0, ""),
        came("Depth", &depth, 0.0, ""),
    ];
    assert_eq!(world.came(), (expected, 1));
}

#[test]
fn bad_values_are_dropped_and_disabled_metrics_record_nothing() {
    let mut world = world(false);
    let orders = world.metrics.get_metric("Orders", Kind::Counter).unwrap();
    [-1.0, f64::NAN, f64::INFINITY].iter().for_each(|bad| orders.add_or_update(*bad, &["a"]));
    world.metrics.get_metric("Size", Kind::Histogram).unwrap().add_or_update(f64::NAN, &[]);
    world.metrics.add_metric("Off", "Count", &[], Kind::Counter).unwrap().add_or_update(1.0, &[]);
    assert_eq!(world.came(), (Vec::new(), 4));
}

#[test]
fn a_full_ring_wakes_the_reader_waits_and_then_drops() {
    let mut world = world(false);
    let size = world.metrics.get_metric("Size", Kind::Histogram).unwrap().series(&[]).unwrap();
    let woken = |wakeup: &OwnedFd| rustix::io::read(wakeup, &mut [0; 8]).is_ok();
    (0..300).for_each(|_| size.add_or_update(1.0));
    assert!(!woken(&world.wakeup));
    let start = crate::clock::now();
    (300..800).for_each(|_| size.add_or_update(1.0));
    assert!(woken(&world.wakeup));
    let waited = crate::clock::now().ns_since(start);
    assert!(
        (1_000_000_000..3_000_000_000).contains(&waited),
        "{waited}: only one sample should wait"
    );
    let (all, dropped) = world.came();
    assert_eq!((all.len() as u64 + dropped, all.len() > 600, dropped > 50), (800, true, true));
}

#[test]
fn threads_lose_nothing_while_the_frontend_reads() {
    let World { metrics, reader, .. } = world(false);
    let cache =
        Arc::new(Cache::new(Catalog::parse(DEFINITION, "m.yaml").unwrap(), Settings::new("h")));
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let mut feed = Feed::new(reader.unwrap());
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let metrics = metrics.clone();
            std::thread::spawn(move || {
                let orders = metrics.get_metric("Orders", Kind::Counter).unwrap();
                (0..5000).for_each(|n| orders.add_or_update(1.0, &[["a", "b"][n % 2]]));
            })
        })
        .collect();
    while !threads.iter().all(std::thread::JoinHandle::is_finished) {
        feed.drain(&cache, &model).unwrap();
    }
    feed.drain(&cache, &model).unwrap();
    let total = |shop: &str| cache.counter("Orders", &[shop, "m"]).unwrap().value();
    assert_eq!((total("a"), total("b")), (10_000.0, 10_000.0));
}

#[test]
fn a_new_definition_applies_to_existing_handles() {
    let mut world = world(false);
    let orders = world.metrics.get_metric("Orders", Kind::Counter).unwrap().series(&["a"]).unwrap();
    let off = world.metrics.get_metric("Off", Kind::Counter).unwrap().series(&[]).unwrap();
    let each = |value| [&orders, &off].iter().for_each(|series| series.add_or_update(value));
    each(1.0);
    assert!(world.metrics.redefine("mod: both").is_err());
    world
        .metrics
        .redefine(&encoded("model_metrics:\n  counter:\n    - {name: Off, unit: Count}\n"))
        .unwrap();
    each(2.0);
    assert!(world.metrics.get_metric("Size", Kind::Histogram).is_err());
    world.metrics.redefine(&encoded(DEFINITION)).unwrap();
    each(4.0);
    let of_orders = |value| came("Orders", &["shop=a", "ModelName=m"], value, "");
    assert_eq!(world.came(), (vec![of_orders(1.0), came("Off", &[], 2.0, ""), of_orders(4.0)], 0));
}

/// With the labels of TorchServe, of its design document, and of Triton.
#[test]
fn times_of_the_worker_take_any_labels_that_it_can_fill_in() {
    let mut world = world(false);
    let time = |labels: &str| {
        format!(
            "model_metrics:\n  gauge:\n    - {{name: HandlerTime, unit: ms, dimensions: \
             [{labels}]}}\n"
        )
    };
    let executed = || {
        let stamps = ComputeStamps {
            start: Instant(0),
            end: Instant(2_000_000),
            ..ComputeStamps::default()
        };
        world.metrics.batch_executed(&done(stamps, None), Some(Instant(0)));
    };
    for labels in
        ["model, host", "ModelName, Level", "model_name, model_version, hostname", "version", ""]
    {
        world.metrics.redefine(&encoded(&time(labels))).unwrap();
        executed();
    }
    assert!(Catalog::parse(&time("ModelName, Level, Foo"), "m.yaml").is_err());
    let labels = world.came().0.into_iter().map(|(name, labels, value, _)| {
        assert_eq!((&*name, value), ("HandlerTime", 2.0));
        labels.join(",")
    });
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let designed = format!("model=m,host={host}");
    let named = format!("model_name=m,model_version=1,hostname={host}");
    assert_eq!(
        labels.collect::<Vec<_>>(),
        [&*designed, "ModelName=m,Level=Model", &*named, "version=1", ""]
    );
}

/// A model may give any of the dimensions that the worker could fill in.
#[test]
fn values_find_their_dimensions() {
    let mut world = world(false);
    let text =
        "model_metrics:\n  gauge:\n    - {name: Depth, unit: m, dimensions: [model, Level, sea]}\n";
    world.metrics.redefine(&encoded(text)).unwrap();
    let depth = world.metrics.get_metric("Depth", Kind::Gauge).unwrap();
    for values in [&["red"][..], &["other", "red"], &["other", "Sea", "red"]] {
        depth.add_or_update(1.0, values);
    }
    assert!(depth.series(&[]).is_err());
    let labels: Vec<String> =
        world.came().0.into_iter().map(|(_, labels, ..)| labels.join(",")).collect();
    let expected = [
        "model=m,Level=Model,sea=red",
        "model=other,Level=Model,sea=red",
        "model=other,Level=Sea,sea=red",
    ];
    assert_eq!(labels, expected);
}

/// `cargo test --release -p pharos-worker cost -- --ignored --nocapture` prints the cost of a
/// sample.
#[test]
#[ignore = "a measurement"]
fn cost_of_a_sample() {
    let World { metrics, reader, .. } = world(false);
    let mut reader = reader.unwrap();
    let orders = metrics.get_metric("Orders", Kind::Counter).unwrap();
    let series = orders.series(&["a"]).unwrap();
    let gathered = orders.coalesced(&["a"]).unwrap();
    let mut time = |what: &str, each: &dyn Fn()| {
        let mut best = f64::MAX;
        for _ in 0..2000 {
            reader.drain(|_| ()).unwrap();
            let start = crate::clock::now();
            (0..100).for_each(|_| each());
            best = best.min(crate::clock::now().ns_since(start) as f64 / 100.0);
        }
        println!("{what}: {best:.1} ns");
    };
    time("clock", &|| assert!(std::hint::black_box(crate::clock::now()).0 > 0));
    time("kept series", &|| series.add_or_update(1.0));
    time("kept series, gathered", &|| gathered.add_or_update(1.0));
    time("metric and values", &|| orders.add_or_update(1.0, &["a"]));
    metrics.batch_begins(&requests(&["0123456789abcdef"]));
    time("kept series, with the batch's ids", &|| series.add_or_update(1.0));
    time("kept series, with one's id", &|| series.add_or_update_for(1.0, Requests::One(0)));
}

#[test]
fn a_model_may_describe_its_own_metrics() {
    let mut world = world(false);
    let described = |name: &str, kind, dimensions: &[&str]| Described {
        name: name.to_owned(),
        kind,
        description: "its own".to_owned(),
        buckets: Vec::new(),
        dimensions: dimensions.iter().map(|name| (*name).to_owned()).collect(),
    };
    let own = described("held", Kind::Gauge, &["a"]);
    world.metrics.own_series(&own, &["x"]).unwrap().add_or_update(2.0);
    world.metrics.own_series(&own, &["x"]).unwrap().add_or_update(3.0);
    // A definition in metrics.yaml takes precedence.
    world
        .metrics
        .own_series(&described("Orders", Kind::Counter, &["shop"]), &["n"])
        .unwrap()
        .add_or_update(1.0);
    // A new definition without the metric does not affect it.
    world.metrics.redefine(&encoded(DEFINITION)).unwrap();
    world.metrics.own_series(&own, &["y"]).unwrap().add_or_update(4.0);
    for (wrong, expected) in [
        (described("held", Kind::Counter, &["a"]), "WrongKind"),
        (described("Orders", Kind::Gauge, &["shop"]), "WrongKind"),
        (described("QueueTime", Kind::Gauge, &["Level", "Hostname"]), "BadName"),
        (described("9", Kind::Gauge, &[]), "BadName"),
    ] {
        let refused = format!("{:?}", world.metrics.own_series(&wrong, &["x"]).err().unwrap());
        assert!(refused.contains(expected), "{refused}");
    }
    // Series of one metric may have different labels.
    world
        .metrics
        .own_series(&described("held", Kind::Gauge, &["b"]), &["z"])
        .unwrap()
        .add_or_update(5.0);
    world.metrics.own_series(&own, &["x"]).unwrap().add_or_update(6.0);
    let (came, dropped) = world.came();
    let own: Vec<_> = came
        .iter()
        .filter(|came| came.0 == "held")
        .map(|came| (came.1[0].as_str(), came.2))
        .collect();
    assert_eq!(own, [("a=x", 2.0), ("a=x", 3.0), ("a=y", 4.0), ("b=z", 5.0), ("a=x", 6.0)]);
    assert_eq!((came.len(), dropped), (6, 0));
}
