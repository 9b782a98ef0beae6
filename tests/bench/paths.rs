//! Single-threaded costs of the code that every request runs, with criterion; `make bench` runs it
//! before the load.

use std::sync::Arc;

use bytes::Bytes;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use pharos::cache::{Entry, Identifier, Lru};
use pharos::id::{InstanceId, ModelVersion, RequestId};
use pharos::infer::{
    CorrelationId, InferInput, InferOutput, InferRequest, InferResponse, Parameter,
};
use pharos::load_report::{self, ModelSample, REQUEST_HEADER, Tracker};
use pharos::metrics::cache::{self, Cache};
use pharos::metrics::catalog::{Catalog, Kind};
use pharos::metrics::channel::{self, Definition, Sample, Writer};
use pharos::metrics::exposition::{self, Format};
use pharos::metrics::feed::Feed;
use pharos::metrics::intake::{self, Statsd};
use pharos::metrics::journal::Batch;
use pharos::metrics::labels::Route;
use pharos::metrics::record;
use pharos::metrics::tslog::{Layout, Stamp, Text};
use pharos::model::{Completion, Draft};
use pharos::scheduler::{
    self, InSequence, QueuePolicy, SequenceSettings, SequenceStrategy, Settings, Ticket,
};
use pharos::tensor::{DataType, Tensor};
use pharos::timeline::{Instant, Timeline};
use pharos::wire::{BatchRequest, Execute, InputBlock, PREFIX, ToWorker, decode_to_worker};
use pharos_edge::load_report::Requested;
use pharos_http::codec;

const CONFIG: &str = include_str!("../../examples/models/simple/config.pbtxt");
const JSON: &str = r#"{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1,16],"parameters":{"binary_data_size":64}},{"name":"INPUT1","datatype":"INT32","shape":[1,16],"parameters":{"binary_data_size":64}}],"parameters":{"binary_data_output":true}}"#;

fn request() -> InferRequest {
    let tensor = Tensor {
        datatype: DataType::Int32,
        shape: vec![1, 16],
        data: Bytes::from_static(&[0; 64]).into(),
    };
    let input = |name: &str| InferInput { name: name.to_owned(), tensor: tensor.clone() };
    InferRequest {
        model_name: "simple".into(),
        inputs: vec![input("INPUT0"), input("INPUT1")],
        ..InferRequest::default()
    }
}

fn codec_paths(criterion: &mut Criterion) {
    let body = Bytes::from([JSON.as_bytes(), &[0; 128]].concat());
    criterion.bench_function("http: decode simple, binary", |bencher| {
        bencher.iter(|| {
            let header_length = Some(JSON.len().to_string());
            let head = codec::Head {
                model_name: "simple".into(),
                model_version: String::new(),
                header_length,
            };
            codec::decode(head, body.clone(), 1 << 20).expect("a valid request")
        });
    });
    let completion =
        Completion { directory: "simple", auto_complete: true, ..Completion::default() };
    let config =
        Draft::from_text(CONFIG, "config.pbtxt").and_then(|draft| draft.complete(&completion));
    let config = config.expect("a valid example configuration");
    let mut request = request();
    criterion.bench_function("model: check simple", |bencher| {
        bencher.iter(|| config.check(&mut request))
    });
}

/// The response cache: a hit costs a key and a look-up, a miss a key and a copy.
fn cache_paths(criterion: &mut Criterion) {
    let completion =
        Completion { directory: "simple", auto_complete: true, ..Completion::default() };
    let config =
        Draft::from_text(CONFIG, "config.pbtxt").and_then(|draft| draft.complete(&completion));
    let config = config.expect("a valid example configuration");
    let identity = Identifier::new(&ModelVersion::new("simple", 1), &config).finish();
    let small = request();
    criterion.bench_function("response cache: key of simple", |bencher| {
        bencher.iter(|| identity.key(&small))
    });
    let tensor = Tensor {
        datatype: DataType::Uint8,
        shape: vec![1, 1 << 20],
        data: vec![7; 1 << 20].into(),
    };
    let input = InferInput { name: "INPUT0".to_owned(), tensor: tensor.clone() };
    let large = InferRequest { inputs: vec![input], ..InferRequest::default() };
    criterion.bench_function("response cache: key of 1 MiB", |bencher| {
        bencher.iter(|| identity.key(&large))
    });
    let outputs = vec![InferOutput { name: "OUTPUT0".to_owned(), tensor }];
    let response = InferResponse { outputs, ..InferResponse::default() };
    criterion.bench_function("response cache: copy 1 MiB", |bencher| {
        bencher.iter(|| Entry::copy_of(&response))
    });
    let mut lru = Lru::new(1000);
    let keys: Vec<_> = (0..1000)
        .map(|n| {
            identity.key(&InferRequest {
                parameters: vec![("n".into(), Parameter::Int(n))],
                ..InferRequest::default()
            })
        })
        .collect();
    keys.iter().for_each(|key| drop(lru.insert(*key, (), 1)));
    let mut all = keys.iter().cycle();
    criterion.bench_function("response cache: look up one of 1,000", |bencher| {
        bencher.iter(|| all.next().and_then(|key| lru.get(key)).is_some());
    });
}

fn wire_paths(criterion: &mut Criterion) {
    let (shape, pieces) = (vec![8, 16], Vec::new());
    let input =
        InputBlock { input: 0, datatype: DataType::Int32, shape, offset: 0, len: 512, pieces };
    let requests = vec![BatchRequest { rows: 1, ..BatchRequest::default() }; 8];
    let inputs = vec![input.clone(), InputBlock { input: 1, offset: 512, ..input }];
    let (placements, elements, resumed) = (Vec::new(), Vec::new(), Vec::new());
    let released = vec![0, 64];
    let frame = ToWorker::Execute(Execute {
        batch: 1,
        requests,
        inputs,
        outputs: vec![],
        released,
        flags: 0,
        placements,
        elements,
        resumed,
    });
    let mut bytes = Vec::new();
    criterion.bench_function("wire: encode and decode a batch of 8", |bencher| {
        bencher.iter(|| {
            bytes.clear();
            frame.encode(&mut bytes);
            decode_to_worker(&bytes[PREFIX..])
        });
    });
}

fn scheduler_paths(criterion: &mut Criterion) {
    let mut scheduler = scheduler::create(Settings { max_batch_size: 8, ..Settings::default() });
    scheduler.instance_ready(InstanceId(0), Instant(0));
    let mut number = 0;
    criterion.bench_function("scheduler: enqueue, execute, done", |bencher| {
        bencher.iter(|| {
            number += 1;
            let now = Instant(number);
            let request = RequestId(number);
            scheduler.enqueue(Ticket { request, batch_size: 1, ..Ticket::default() }, now);
            while scheduler.poll_action(now).is_some() {}
            scheduler.batch_done(InstanceId(0), now);
        });
    });
    for (name, strategy) in [
        ("direct", SequenceStrategy::Direct { minimum_slot_utilization: 0.0 }),
        ("oldest", SequenceStrategy::Oldest { max_candidate_sequences: 10_000 }),
    ] {
        let open = if name == "direct" { 8 } else { 10_000 };
        sequence_steps(
            criterion,
            &format!("scheduler: a step of one of {open} sequences, {name}"),
            (strategy, open),
        );
    }
    for waiting in [10, 1_000, 100_000] {
        for (name, timeout_us) in [("", 0), (", with timeouts", 3_600_000_000)] {
            let name =
                format!("scheduler: enqueue and execute a batch of 8, {waiting} waiting{name}");
            deep_queue(criterion, &name, (waiting, timeout_us));
        }
    }
}

/// Open sequences with occasional steps, each of which is executed at once.
fn sequence_steps(
    criterion: &mut Criterion,
    name: &str,
    (strategy, open): (SequenceStrategy, u64),
) {
    let sequences = SequenceSettings {
        strategy,
        max_idle_us: 3_600_000_000,
        iterative: false,
        overlapping: false,
        max_backlog: None,
        max_queue: 0,
        implicit_start: false,
        backlog_hold: 0,
    };
    let settings = Settings { max_batch_size: 8, sequence: Some(sequences), ..Settings::default() };
    let mut scheduler = scheduler::create(settings);
    scheduler.instance_ready(InstanceId(0), Instant(0));
    let mut number = 0;
    let mut step = || {
        number += 1;
        let (request, now) = (RequestId(number), Instant(number));
        let id = CorrelationId::Uint(1 + number % open);
        let sequence = Some(InSequence { id, start: number <= open, end: false });
        scheduler.enqueue(Ticket { request, batch_size: 1, sequence, ..Ticket::default() }, now);
        while scheduler.poll_action(now).is_some() {}
        scheduler.batch_done(InstanceId(0), now);
    };
    (0..open).for_each(|_| step());
    criterion.bench_function(name, |bencher| bencher.iter(&mut step));
}

/// A queue of constant depth: eight requests arrive, one in the middle is cancelled and sent again,
/// a batch completes.
fn deep_queue(criterion: &mut Criterion, name: &str, (waiting, timeout_us): (u64, u64)) {
    let queue_policy = QueuePolicy { default_timeout_us: timeout_us, ..QueuePolicy::default() };
    let mut scheduler =
        scheduler::create(Settings { max_batch_size: 8, queue_policy, ..Settings::default() });
    let ticket = |number| Ticket { request: RequestId(number), batch_size: 1, ..Ticket::default() };
    scheduler.instance_ready(InstanceId(0), Instant(0));
    let mut number = 0;
    while number < waiting + 16 {
        number += 1;
        scheduler.enqueue(ticket(number), Instant(number));
        while scheduler.poll_action(Instant(number)).is_some() {}
    }
    criterion.bench_function(name, |bencher| {
        bencher.iter(|| {
            for _ in 0..8 {
                number += 1;
                scheduler.enqueue(ticket(number), Instant(number));
            }
            let (now, middle) = (Instant(number), number - waiting / 2);
            scheduler.cancel(RequestId(middle), now);
            scheduler.enqueue(ticket(middle), now);
            scheduler.batch_done(InstanceId(0), now);
            while scheduler.poll_action(now).is_some() {}
        });
    });
}

fn metrics_paths(criterion: &mut Criterion) {
    let cache = Arc::new(Cache::new(Catalog::shipped(), cache::Settings::new("host")));
    let models: Vec<_> = (0..200)
        .map(|n| cache.model_loaded(&ModelVersion::new(format!("model{n}"), 1), &[]))
        .collect();
    let timeline = Timeline { request_end: Instant(1000), ..Timeline::default() };
    criterion.bench_function("metrics: record an inference", |bencher| {
        bencher.iter(|| record::inference_done(&models[0], &timeline, 1));
    });
    criterion.bench_function("metrics: scrape 200 models", |bencher| {
        bencher.iter(|| exposition::render(&cache, Format::Text));
    });
}

fn emitter_paths(criterion: &mut Criterion) {
    let text = "model_metrics:\n  counter: [{name: Orders, unit: Count, dimensions: [shop, Level, \
                Hostname]}]\n  histogram: [{name: Latency, unit: ms, dimensions: [shop]}]\n";
    let catalog = Catalog::parse(text, "metrics.yaml").expect("a valid definition");
    let cache = Arc::new(Cache::new(catalog, cache::Settings::new("host")));
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let line = b"Orders.Count:1|#shop:a,Level:Model|#type:COUNTER|#hostname:host,1699061430,6d1726a7-172c-4010-b671-01d71bacc451\n";
    criterion.bench_function("metrics: a printed line of a worker", |bencher| {
        bencher.iter(|| intake::stdout_line(&cache, &model, line).expect("a valid line"));
    });
    let mut statsd = Statsd::default();
    for (name, datagram) in [
        ("a counter", "Orders:1|c"),
        ("a counter with tags", "Orders:1|c|@0.5|#shop:a,Level:Model"),
        ("a timer", "Latency:3.5|ms|#shop:a"),
    ] {
        criterion.bench_function(&format!("metrics: StatsD, {name}"), |bencher| {
            bencher.iter(|| {
                statsd.datagram(&cache, datagram.as_bytes(), |_, refusal| unreachable!("{refusal}"))
            });
        });
    }
    let full = ["Orders:1|c|@0.5|#shop:a,Level:Model"; 30].join("\n");
    criterion.bench_function("metrics: StatsD, 30 counters with tags in a datagram", |bencher| {
        bencher.iter(|| {
            statsd.datagram(&cache, full.as_bytes(), |_, refusal| unreachable!("{refusal}"))
        });
    });
}

/// The frontend's cost of a thousand samples of workers, without request ids and logs.
fn ring_paths(criterion: &mut Criterion) {
    let text = "mode: prometheus\nmodel_metrics:\n  counter: [{name: Orders, unit: Count, \
                dimensions: [shop]}]\n";
    let catalog = Catalog::parse(text, "metrics.yaml").expect("a valid definition");
    let cache = Cache::new(catalog, cache::Settings::new("host"));
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let (memory, reader) = channel::create(256 << 10).expect("memory for a ring");
    let mut writer = Writer::open(&memory).expect("a ring");
    let labels = vec![("shop".to_owned(), "a".to_owned())];
    let orders = Definition {
        name: "Orders".into(),
        kind: Some(Kind::Counter),
        unit: "Count".into(),
        labels,
    };
    let series = writer.intern(&orders).expect("room for a series");
    let mut feed = Feed::new(reader);
    criterion.bench_function("metrics: 1000 samples of a ring", |bencher| {
        let fill = || {
            for _ in 0..1000 {
                let sample = Sample { series, value: 1.0, clock: Instant(1), request_id: "" };
                writer.sample(&sample).expect("room for a sample");
            }
        };
        bencher.iter_batched(
            fill,
            |()| feed.drain(&cache, &model).expect("a valid ring"),
            BatchSize::PerIteration,
        );
    });
}

/// The cost of a sample for its recorder and for the writer.
fn tslog_paths(criterion: &mut Criterion) {
    let cache = Cache::new(Catalog::shipped(), cache::Settings::new("host"));
    let labels = ["simple", "Model", "host"];
    let gauge = cache.gauge("PredictionTime", &labels).expect("a defined metric");
    criterion.bench_function("tslog: record a gauge, no writer", |bencher| {
        bencher.iter(|| gauge.add_or_update_for(0.123456, "81549a64-c948-44cc-a206-49cd80756fc2"));
    });
    cache.journal().attach_writer(|| ());
    let (mut batch, mut room) = (Batch::default(), 0);
    criterion.bench_function("tslog: record a gauge", |bencher| {
        bencher.iter(|| {
            if room == 0 {
                cache.journal().take(&mut batch, 1000, 0);
                room = 1000;
            }
            room -= 1;
            gauge.add_or_update_for(0.123456, "81549a64-c948-44cc-a206-49cd80756fc2")
        });
    });
    criterion.bench_function("tslog: record a gauge, no room", |bencher| {
        cache.journal().take(&mut batch, 0, 0);
        bencher.iter(|| gauge.add_or_update_for(0.123456, ""));
    });
    let (spec, _) = cache.find("PredictionTime").expect("a defined metric");
    let text = Text::new(&spec, spec.dimensions.iter().map(String::as_str).zip(labels), "host");
    let (stamp, mut out) = (Stamp::new(1_795_189_837_608, 0), String::new());
    criterion.bench_function("tslog: format a line", |bencher| {
        bencher.iter(|| {
            out.clear();
            text.write(
                &mut out,
                Layout::File,
                &stamp,
                0.123456,
                "81549a64-c948-44cc-a206-49cd80756fc2",
            );
            out.len()
        });
    });
}

/// The cost of the times of a batch on the way to log lines.
fn tslog_batch_paths(criterion: &mut Criterion) {
    let cache = Cache::new(Catalog::shipped(), cache::Settings::new("host"));
    cache.journal().attach_writer(|| ());
    let mut batch = Batch::default();
    let model = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
    let timelines = [Timeline { request_end: Instant(1000), ..Timeline::default() }];
    for (name, kept) in [("each request's own", 0), ("counters held", 1000)] {
        let mut used = 1000;
        criterion.bench_function(&format!("tslog: times of a batch of one, {name}"), |bencher| {
            bencher.iter(|| {
                used += 4;
                if used > 1000 {
                    cache.journal().take(&mut batch, 1000, kept);
                    cache.journal().flush_held(&mut batch, |_, _| true);
                    used = 4;
                }
                record::batch_times(&model, timelines.iter(), 1000);
            });
        });
    }
    criterion.bench_function("tslog: times of a batch of one, no room", |bencher| {
        cache.journal().take(&mut batch, 0, 0);
        bencher.iter(|| record::batch_times(&model, timelines.iter(), 1000));
    });
}

fn load_report_paths(criterion: &mut Criterion) {
    let model = |name: &str| ModelSample {
        id: 1,
        name: Arc::from(name),
        executing: 3,
        waiting: 5,
        slots: 8,
        instances: 1,
        busy_ns: 700_000_000,
        succeeded: 1000,
        queue_ns: 5_000_000,
        engines: Default::default(),
    };
    let mut sample = load_report::Sample {
        cpu: Some(0.25),
        memory: Some(0.5),
        ..load_report::Sample::default()
    };
    sample.models = (0..50).map(|number| model(&format!("model_{number}"))).collect();
    let reports = Tracker::default().add(Instant(1), sample.clone());
    let uri = http::Uri::from_static("/v2/models/model_7/infer");
    let mut headers = http::HeaderMap::new();
    criterion.bench_function("load report: not requested", |bencher| {
        bencher.iter(|| Requested::of(Route::Infer, &headers, &uri));
    });
    headers.insert(REQUEST_HEADER, http::HeaderValue::from_static("json"));
    criterion.bench_function("load report: add to a response", |bencher| {
        bencher.iter(|| {
            let mut added = http::HeaderMap::new();
            let requested = Requested::of(Route::Infer, &headers, &uri).expect("the header is set");
            requested.add_to(&mut added, |model, _| reports.of(model).unwrap_or_default());
            added
        });
    });
    let (mut tracker, mut now) = (Tracker::default(), 0);
    criterion.bench_function("load report: sample 50 models", |bencher| {
        bencher.iter(|| {
            now += 1_000_000_000;
            tracker.add(Instant(now), sample.clone())
        });
    });
}

criterion_group! {
    name = paths;
    config = Criterion::default().sample_size(20).warm_up_time(std::time::Duration::from_millis(200))
        .measurement_time(std::time::Duration::from_secs(1));
    targets = codec_paths, cache_paths, wire_paths, scheduler_paths, metrics_paths, emitter_paths, ring_paths, tslog_paths, tslog_batch_paths, load_report_paths
}
criterion_main!(paths);
