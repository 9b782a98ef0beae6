//! A driver whose worker is the test, which holds the other end of the connection.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::future::poll_fn;
use std::time::Duration;

use futures_util::FutureExt as _;
use pharos::infer::InferInput;
use pharos::metrics::cache::Cache;
use pharos::metrics::exposition::{Format, render};
use pharos::metrics::statistics::{self, ModelStatistics};
use pharos::tensor::{DataType, Tensor};
use pharos::wire::{OutputBlock, WireError};

use super::*;

use crate::scheduler::test_driver::{self, done};
use crate::wire::worker_end::{self, WorkerEnd};
use pharos_os::clock::virtual_time;

const CONFIG: &str = "backend: 'builtin' model_transaction_policy { decoupled: true }
    input { name: 'IN' data_type: TYPE_UINT8 dims: 1 } output { name: 'OUT' data_type: TYPE_UINT8 \
                      dims: 1 }";
const INSTANCE: InstanceId = InstanceId(0);

struct World {
    cache: Arc<Cache>,
    driver: Arc<Driver>,
    link: SharedLink,
    worker: WorkerEnd,
}

async fn world() -> World {
    world_of(CONFIG).await
}

async fn world_of(config: &str) -> World {
    let (cache, driver) = test_driver::create(config);
    cache.model_decoupled(&driver.series);
    let (link, worker) = worker_end::connect();
    driver.instance_ready(INSTANCE, link.clone());
    World { cache, driver, link, worker }
}

impl World {
    fn ask(&self) -> InstanceResponses {
        let (request, checked) = self.request();
        self.driver.stream(request, checked)
    }

    fn request(&self) -> (InferRequest, Checked) {
        let tensor = Tensor { datatype: DataType::Uint8, shape: vec![1], data: vec![1].into() };
        let inputs = vec![InferInput { name: "IN".into(), tensor }];
        let mut request = InferRequest { id: "q".into(), inputs, ..InferRequest::default() };
        let checked = self.driver.config.check(&mut request).unwrap();
        (request, checked)
    }

    /// Returns the frames that were sent to the worker since the last call.
    fn sent(&mut self) -> Vec<ToWorker> {
        self.worker.received()
    }

    fn say(&self, response: wire::Response) -> io::Result<()> {
        self.driver.response(INSTANCE, &self.link, response)
    }

    fn done(&self, batch: u64, error: Option<WireError>) {
        let done = Done { error, ..done(batch) };
        self.driver.batch_done(INSTANCE, &self.link, done);
    }

    /// Finishes a batch whose first request is deferred.
    fn open(&self, batch: u64) {
        let done = Done { open: vec![0], ..done(batch) };
        self.driver.batch_done(INSTANCE, &self.link, done);
    }

    fn statistics(&self) -> ModelStatistics {
        statistics::of(&self.driver.series)
    }

    /// Returns the number of first responses, intervals, ended requests, responses of these,
    /// responses and bytes.
    fn streams(&self) -> [f64; 6] {
        let text = render(&self.cache, Format::Text);
        let names = [
            "first_response_seconds_count",
            "response_interval_seconds_count",
            "responses_per_request_count",
            "responses_per_request_sum",
            "responses_total",
            "response_bytes_total",
        ];
        names.map(|name| {
            let start = format!("pharos_stream_{name}{{");
            let line = text.lines().find(|line| line.starts_with(&start)).unwrap();
            line.rsplit(' ').next().unwrap().parse().unwrap()
        })
    }
}

/// Returns a response with one byte of output for the first request of batch 0.
fn response() -> wire::Response {
    wire::Response {
        batch: 0,
        request: 0,
        outputs: vec![OutputBlock {
            output: 0,
            requests: Vec::new(),
            datatype: DataType::Uint8,
            shape: vec![1],
            offset: 0,
            len: 1,
            in_client_memory: false,
            loan: None,
        }],
        parameters: Vec::new(),
        error: None,
        last: false,
        empty: false,
        stamps: ComputeStamps {
            start: Instant(10),
            input_end: Instant(11),
            output_start: Instant(15),
            end: Instant(16),
        },
    }
}

fn last() -> wire::Response {
    wire::Response { outputs: Vec::new(), last: true, empty: true, ..response() }
}

async fn next(responses: &mut InstanceResponses) -> Option<Streamed> {
    poll_fn(|cx| responses.poll_next(cx)).await
}

fn credits(frames: &[ToWorker]) -> Vec<u64> {
    let of = |frame: &ToWorker| match frame {
        ToWorker::Credits(Credits { batch: 0, request: 0, taken, .. }) => *taken,
        other => panic!("not credits: {other:?}"),
    };
    frames.iter().map(of).collect()
}

#[tokio::test]
async fn credit_returns_as_the_reader_takes_responses() {
    let mut world = world().await;
    let mut responses = world.ask();
    assert!(matches!(world.sent().as_slice(), [ToWorker::Execute(execute)] if execute.batch == 0));
    for _ in 0..CREDITS {
        world.say(response()).unwrap();
    }
    // The worker has to wait, so it does not count as executing.
    assert_eq!(world.driver.executing_since(INSTANCE), None);
    for _ in 0..CREDITS / 2 {
        assert!(next(&mut responses).await.unwrap().answer.is_ok());
    }
    assert_eq!(
        credits(&world.sent()),
        Vec::<u64>::new(),
        "the last returned response may not have been taken"
    );
    assert!(!next(&mut responses).await.unwrap().last);
    assert_eq!(credits(&world.sent()), [u64::from(CREDITS / 2)]);
    assert!(world.driver.executing_since(INSTANCE).is_some());
    world.say(last()).unwrap();
    world.done(0, None);
    let mut count = 0;
    while let Some(streamed) = next(&mut responses).await {
        assert_eq!(
            (streamed.last, streamed.empty),
            (count == CREDITS / 2 - 1, count == CREDITS / 2 - 1)
        );
        count += 1;
    }
    let statistics = world.statistics();
    assert_eq!((statistics.inference_stats.success.count, statistics.execution_count), (1, 1));
    assert_eq!(statistics.response_stats.len(), CREDITS as usize + 1);
    let first = statistics.response_stats["0"];
    assert_eq!(
        (first.success.count, first.success.ns, first.compute_infer.ns, first.compute_output.ns),
        (1, 6, 5, 1)
    );
    let second = statistics.response_stats["1"];
    assert_eq!(
        (second.success.ns, second.compute_infer.ns),
        (0, 0),
        "measured from the end of the previous response"
    );
    assert_eq!(statistics.response_stats[&CREDITS.to_string()].empty_response.count, 1);
    let sent = f64::from(CREDITS);
    assert_eq!(
        world.streams(),
        [1.0, sent - 1.0, 1.0, sent, sent, sent],
        "the end carries no data"
    );
}

#[tokio::test]
async fn protocol_violations_are_refused() {
    let world = world().await;
    let refused = |response| world.say(response).unwrap_err().to_string();
    let mut responses = world.ask();
    world.say(wire::Response { batch: 5, ..response() }).unwrap();
    assert!(refused(wire::Response { request: 1, ..response() }).contains("not in its batch"));
    for _ in 0..CREDITS {
        world.say(response()).unwrap();
    }
    assert!(refused(response()).contains("more responses than its credit allows"));
    world.say(last()).unwrap();
    assert!(refused(last()).contains("a response after the last one"));
    let wrong = OutputBlock {
        output: 9,
        requests: Vec::new(),
        datatype: DataType::Uint8,
        shape: vec![1],
        offset: 0,
        len: 1,
        in_client_memory: false,
        loan: None,
    };
    world.done(0, None);
    while next(&mut responses).await.is_some() {}
    let mut responses = world.ask();
    world.say(wire::Response { batch: 1, outputs: vec![wrong], ..response() }).unwrap();
    let error = next(&mut responses).await.unwrap().answer.unwrap_err();
    assert!(error.message.contains("output 9 does not exist"), "{error}");
}

#[tokio::test]
async fn dropping_the_responses_cancels_the_request() {
    let mut world = world().await;
    let responses = world.ask();
    world.say(response()).unwrap();
    world.sent();
    drop(responses);
    assert_eq!(credits(&world.sent()), [0], "a waiting worker is woken");
    assert_ne!(world.link.arenas.inputs.flag_words(), 0, "the worker finds the flag");
    world.say(response()).unwrap();
    world.done(0, None);
    assert_eq!(world.statistics().inference_stats.fail.count, 1);
    assert_eq!(world.driver.unanswered(), 0);
    assert_eq!(world.streams(), [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
}

#[tokio::test]
async fn a_retired_instance_that_restarts_gets_no_batches() {
    let mut world = world().await;
    let waiting = world.ask();
    world.driver.retire(INSTANCE);
    world.driver.instance_lost(INSTANCE);
    world.sent();
    world.driver.instance_ready(INSTANCE, world.link.clone());
    assert!(world.sent().is_empty() && world.driver.is_retired(INSTANCE));
    world.driver.dismiss(INSTANCE);
    // Another instance has its number.
    world.driver.instance_ready(INSTANCE, world.link.clone());
    assert!(matches!(world.sent().as_slice(), [ToWorker::Execute(execute)] if execute.batch == 1));
    drop(waiting);
}

/// A time of the tests with virtual time.
const BEGIN: Instant = Instant(1_000_000_000);
const LONGEST: Duration = Duration::from_secs(60);

#[tokio::test]
async fn requests_that_wait_are_rejected_if_no_instance_has_answered_since_they_began_to_wait() {
    virtual_time::set(BEGIN);
    let world = world().await;
    let mut first = world.ask();
    let mut second = world.ask();
    virtual_time::set(BEGIN + LONGEST);
    // It was lost long ago and has answered since.
    world.say(wire::Response { last: true, ..response() }).unwrap();
    world.driver.instance_lost(INSTANCE);
    world.driver.reject_waiting(LONGEST, BEGIN);
    assert!(next(&mut first).await.unwrap().answer.is_ok());
    assert_eq!(world.driver.unanswered(), 1);
    virtual_time::set(BEGIN + 2 * LONGEST);
    world.driver.reject_waiting(LONGEST, BEGIN);
    let end = next(&mut second).await.unwrap();
    assert!(end.answer.unwrap_err().message.contains("was restarted within the time"));
}

#[tokio::test]
async fn an_instance_that_answers_batches_is_not_given_up() {
    virtual_time::set(BEGIN);
    let world = world_of(&CONFIG.replace("decoupled: true", "decoupled: false")).await;
    let ask = || {
        let (request, checked) = world.request();
        Box::pin(world.driver.infer(Box::new(request), checked))
    };
    let mut first = ask();
    let mut second = ask();
    assert!(first.as_mut().now_or_never().is_none() && second.as_mut().now_or_never().is_none());
    virtual_time::set(BEGIN + LONGEST);
    world.done(0, None);
    world.driver.instance_lost(INSTANCE);
    world.driver.reject_waiting(LONGEST, BEGIN);
    assert!(first.now_or_never().is_some() && second.as_mut().now_or_never().is_none());
    virtual_time::set(BEGIN + 2 * LONGEST);
    world.driver.reject_waiting(LONGEST, BEGIN);
    let error = second.now_or_never().unwrap().unwrap_err();
    assert!(error.message.contains("was restarted within the time"), "{error}");
}

#[tokio::test]
async fn the_time_before_the_queue_counts_for_its_timeout() {
    let config = "backend: 'builtin' max_batch_size: 2
        dynamic_batching { default_queue_policy { default_timeout_microseconds: 50000000 } }
        input { name: 'IN' data_type: TYPE_UINT8 dims: 1 } output { name: 'OUT' data_type: \
                  TYPE_UINT8 dims: 1 }";
    virtual_time::set(BEGIN);
    let world = world_of(config).await;
    world.driver.instance_lost(INSTANCE);
    let tensor = Tensor { datatype: DataType::Uint8, shape: vec![1, 1], data: vec![1].into() };
    let inputs = vec![InferInput { name: "IN".into(), tensor }];
    let mut request = InferRequest { inputs, ..InferRequest::default() };
    let checked = world.driver.config.check(&mut request).unwrap();
    request.timeline.request_start = BEGIN;
    virtual_time::set(BEGIN + LONGEST);
    let error = world.driver.infer(Box::new(request), checked).now_or_never().unwrap().unwrap_err();
    assert!(error.message.contains("Request timeout expired"), "{error}");
}

#[tokio::test]
async fn a_lost_instance_fails_started_streams_and_retries_others() {
    let mut world = world().await;
    let mut begun = world.ask();
    let mut waiting = world.ask();
    world.say(response()).unwrap();
    world.driver.instance_lost(INSTANCE);
    assert!(next(&mut begun).await.unwrap().answer.is_ok());
    let end = next(&mut begun).await.unwrap();
    assert!(
        end.last && end.answer.unwrap_err().message.contains("died in the middle of the responses")
    );
    assert!(next(&mut begun).await.is_none());
    world.sent();
    world.driver.instance_ready(INSTANCE, world.link.clone());
    assert!(matches!(world.sent().as_slice(), [ToWorker::Execute(execute)] if execute.batch == 1));
    // Lost again before its first response, it is retried once more; the third time it fails.
    world.driver.instance_lost(INSTANCE);
    world.driver.instance_ready(INSTANCE, world.link.clone());
    assert!(matches!(world.sent().as_slice(), [ToWorker::Execute(execute)] if execute.batch == 2));
    world.driver.instance_lost(INSTANCE);
    let end = next(&mut waiting).await.unwrap();
    assert!(end.last && end.answer.unwrap_err().message.contains("died twice"));
    assert_eq!(world.statistics().inference_stats.fail.count, 2);
    assert_eq!(
        world.streams(),
        [1.0, 0.0, 2.0, 1.0, 1.0, 1.0],
        "requests end once, with and without responses"
    );
}

#[tokio::test]
async fn a_batch_that_fails_ends_its_streams() {
    let world = world().await;
    let mut responses = world.ask();
    world.say(response()).unwrap();
    let error = WireError { code: ErrorCode::Internal, message: "no".into(), of_region: false };
    world.done(0, Some(error));
    assert!(next(&mut responses).await.unwrap().answer.is_ok());
    let end = next(&mut responses).await.unwrap();
    assert_eq!((end.last, end.answer.unwrap_err().message), (true, "no".to_owned()));
}

#[tokio::test]
async fn a_deferred_request_continues_while_the_instance_executes_others() {
    let mut world = world().await;
    let mut first = world.ask();
    world.open(0);
    assert_eq!((world.driver.unanswered(), world.driver.is_executing(INSTANCE)), (1, true));
    assert_eq!(world.driver.executing_since(INSTANCE), None, "the instance is free");
    let second = world.ask();
    let executed = |frame: &ToWorker| matches!(frame, ToWorker::Execute(_));
    assert_eq!(world.sent().iter().filter(|frame| executed(frame)).count(), 2);
    world.open(1);
    world.say(response()).unwrap();
    assert!(next(&mut first).await.unwrap().answer.is_ok());
    drop(second);
    let sent = world.sent();
    assert!(sent.contains(&ToWorker::CancelRequest(1, 0)), "{sent:?}");
    world.say(last()).unwrap();
    assert!(next(&mut first).await.unwrap().last);
    assert!(next(&mut first).await.is_none());
    world.say(wire::Response { batch: 1, ..last() }).unwrap();
    assert_eq!((world.driver.unanswered(), world.driver.is_executing(INSTANCE)), (0, false));
    // The request is no longer known.
    world.say(last()).unwrap();
    let statistics = world.statistics();
    let inferences = &statistics.inference_stats;
    // A request that the model has answered completely is no failure, even if its reader has gone.
    assert_eq!(
        (inferences.success.count, inferences.fail.count, statistics.execution_count),
        (2, 0, 2)
    );
}

#[tokio::test]
async fn a_full_instance_gets_no_batch_until_a_deferred_request_has_ended() {
    let limit = "parameters { key: 'max_open_requests' value: { string_value: '2' } }";
    let mut world = world_of(&format!("{CONFIG} {limit}")).await;
    let mut readers: Vec<InstanceResponses> = (0..4).map(|_| world.ask()).collect();
    let batches = |world: &mut World| {
        let sent = world.sent();
        sent.iter().filter(|frame| matches!(frame, ToWorker::Execute(_))).count()
    };
    assert_eq!(batches(&mut world), 1);
    world.open(0);
    assert_eq!(batches(&mut world), 1);
    world.open(1);
    assert_eq!(batches(&mut world), 0, "two requests are open");
    let load = world.driver.load(clock::now());
    assert_eq!((load.executing, load.waiting), (2, 2));
    world.say(response()).unwrap();
    assert_eq!(batches(&mut world), 0, "its request goes on");
    world.say(last()).unwrap();
    assert_eq!(batches(&mut world), 1);
    // A request that ends within its batch leaves room at once.
    world.say(wire::Response { batch: 2, ..last() }).unwrap();
    world.done(2, None);
    assert_eq!(batches(&mut world), 1);
    assert!(next(&mut readers[0]).await.unwrap().answer.is_ok());
    assert!(next(&mut readers[0]).await.unwrap().last);
}

#[tokio::test]
async fn a_request_does_not_wait_longer_for_its_responses_than_its_model_allows() {
    let timeout = |name: &str, ms: u32| {
        format!("parameters {{ key: '{name}' value: {{ string_value: '{ms}' }} }}")
    };
    let first = timeout("first_response_timeout_ms", 100);
    let interval = timeout("response_interval_timeout_ms", 50);
    let mut world = world_of(&format!("{CONFIG} {first} {interval}")).await;
    let mut responses = world.ask();
    let error = next(&mut responses).await.unwrap().answer.unwrap_err();
    assert_eq!(error.code, ErrorCode::DeadlineExceeded);
    assert_eq!(error.message, "the first response did not come within 100ms");
    assert!(next(&mut responses).await.is_none());
    world.done(0, None);
    let mut responses = world.ask();
    world.open(1);
    for _ in 0..3 {
        world.say(wire::Response { batch: 1, ..response() }).unwrap();
        assert!(next(&mut responses).await.unwrap().answer.is_ok());
    }
    let error = next(&mut responses).await.unwrap().answer.unwrap_err();
    assert_eq!(error.message, "the next response did not come within 50ms");
    let sent = world.sent();
    assert!(sent.contains(&ToWorker::CancelRequest(1, 0)), "{sent:?}");
}

#[tokio::test]
async fn the_only_answer_of_a_request_may_follow_its_batch() {
    let world = world_of(&CONFIG.replace("decoupled: true", "decoupled: false")).await;
    let (request, checked) = world.request();
    let driver = world.driver.clone();
    let answer = tokio::spawn(async move { driver.infer(Box::new(request), checked).await });
    while world.driver.unanswered() == 0 {
        tokio::task::yield_now().await;
    }
    assert!(
        world.say(wire::Response { last: true, ..response() }).is_err(),
        "its batch is executed"
    );
    world.open(0);
    world.say(wire::Response { last: true, ..response() }).unwrap();
    let answer = answer.await.unwrap().unwrap();
    assert_eq!((answer.id.as_str(), answer.outputs.len()), ("q", 1));
    assert_eq!(world.driver.unanswered(), 0);
    let statistics = world.statistics();
    assert_eq!((statistics.inference_stats.success.count, statistics.execution_count), (1, 1));
}

#[tokio::test]
async fn deferred_requests_are_lost_with_their_instance() {
    let world = world().await;
    let mut responses = world.ask();
    world.open(0);
    world.say(response()).unwrap();
    world.driver.instance_lost(INSTANCE);
    assert!(next(&mut responses).await.unwrap().answer.is_ok());
    let end = next(&mut responses).await.unwrap();
    assert!(
        end.last && end.answer.unwrap_err().message.contains("died in the middle of the responses")
    );
    assert_eq!(world.driver.unanswered(), 0);
}

#[tokio::test]
async fn the_busy_time_of_a_lost_instance_is_recorded() {
    virtual_time::set(BEGIN);
    let world = world().await;
    let request = world.ask();
    virtual_time::set(BEGIN + LONGEST);
    world.driver.instance_lost(INSTANCE);
    let now = clock::now();
    let ns = u64::try_from(LONGEST.as_nanos()).unwrap();
    assert_eq!(world.driver.take_busy_ns(now), HashMap::from([(INSTANCE, ns)]));
    // The request is executed again.
    world.driver.instance_ready(INSTANCE, world.link.clone());
    assert_eq!(world.driver.take_busy_ns(Instant(now.0 + 5)), HashMap::from([(INSTANCE, 5)]));
    drop(request);
}

#[tokio::test]
async fn the_load_counts_requests_by_state_and_busy_time() {
    let world = world().await;
    let load = || world.driver.load(clock::now());
    let counts = |load: &super::super::in_flight::Load| {
        (load.executing, load.waiting, load.instances, load.slots)
    };
    assert_eq!((counts(&load()), load().busy_ns), ((0, 0, 1, 1), 0));
    assert_eq!(world.driver.free_batch_slots(), 1);
    let first = world.ask();
    let second = world.ask();
    assert_eq!(counts(&load()), (1, 1, 1, 1));
    assert_eq!(world.driver.free_batch_slots(), 0, "the queue fills the next batch");
    // The first request is deferred, so the instance executes the second one as well.
    world.open(0);
    assert_eq!(counts(&load()), (2, 0, 1, 1));
    world.say(last()).unwrap();
    let now = clock::now();
    let busy = world.driver.load(now).busy_ns;
    assert!(busy > 0 && world.driver.load(Instant(now.0 + 5)).busy_ns == busy + 5);
    assert_eq!(world.driver.take_busy_ns(now), HashMap::from([(INSTANCE, busy)]));
    world.done(1, None);
    let idle = load().busy_ns;
    assert_eq!((counts(&load()), load().busy_ns), ((0, 0, 1, 1), idle));
    assert_eq!(world.driver.take_busy_ns(now), HashMap::from([(INSTANCE, idle - busy)]));
    drop((first, second));
    world.driver.instance_lost(INSTANCE);
    assert_eq!(
        (counts(&load()), load().busy_ns),
        ((0, 0, 0, 0), idle),
        "the busy time of the lost instance stays"
    );
}
