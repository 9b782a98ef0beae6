//! Tests of single decisions. `properties` tests invariants of random runs.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::Duration;

use super::sim::{Event, Outcome, Record, Sim};
use super::*;

mod delayed;
mod limited;
mod properties;
pub(super) mod random;
mod rate_limiter;
mod reference;

fn us(time: u64) -> Duration {
    Duration::from_micros(time)
}

fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

fn ticket(number: u64) -> Ticket {
    Ticket { request: RequestId(number), batch_size: 1, ..Ticket::default() }
}

fn sized(number: u64, batch_size: u32) -> Ticket {
    Ticket { batch_size, ..ticket(number) }
}

fn shaped(number: u64, shape_key: u64) -> Ticket {
    Ticket { shape_key, ..ticket(number) }
}

fn batching(max_batch_size: u32, preferred: &[u32], max_queue_delay_us: u64) -> Settings {
    Settings {
        max_batch_size,
        preferred_batch_sizes: preferred.to_vec(),
        max_queue_delay_us,
        ..Settings::default()
    }
}

/// Creates a simulation with one instance with a service time of 100 ms, ready from the start.
fn sim(settings: Settings) -> Sim {
    let mut sim = Sim::new(create(settings), ms(100));
    sim.at(us(0), Event::Join(InstanceId(0)));
    sim
}

/// Returns the batches and when they were sent, in milliseconds.
fn timed(sim: &Sim) -> Vec<(u64, Vec<u64>)> {
    sim.log
        .iter()
        .filter_map(|record| match record {
            Record::Sent { at, requests, .. } => {
                Some((at.0 / 1_000_000, requests.iter().map(|id| id.0).collect()))
            }
            Record::Answered { .. } => None,
        })
        .collect()
}

fn outcome(sim: &Sim, number: u64) -> (u64, Outcome) {
    let (at, _, outcome) = sim.answers().find(|(_, request, _)| request.0 == number).unwrap();
    (at.0 / 1_000_000, outcome)
}

/// Checks the batches and their times when all tickets arrive at once, 1 ms after the instance.
#[track_caller]
fn check(
    settings: Settings,
    tickets: impl IntoIterator<Item = Ticket>,
    expected: &[(u64, &[u64])],
) {
    let mut sim = sim(settings);
    tickets.into_iter().for_each(|ticket| sim.at(ms(1), Event::Arrive(ticket)));
    sim.run();
    let expected: Vec<(u64, Vec<u64>)> =
        expected.iter().map(|&(at, batch)| (at, batch.to_vec())).collect();
    assert_eq!(timed(&sim), expected);
}

#[test]
fn without_preferred_sizes_or_delay_an_idle_instance_gets_all_waiting_requests() {
    check(batching(8, &[], 0), (1..4).map(ticket), &[(1, &[1, 2, 3])]);
    check(batching(2, &[], 0), (1..4).map(ticket), &[(1, &[1, 2]), (101, &[3])]);
}

#[test]
fn the_default_scheduler_executes_each_request_alone() {
    check(
        Settings::default(),
        [sized(1, 1), sized(2, 8), sized(3, 0)],
        &[(1, &[1]), (1, &[2]), (101, &[3])],
    );
    let unbatched = Settings { max_batch_size: 0, ..Settings::default() };
    check(unbatched, [sized(1, 0), sized(2, 0)], &[(1, &[1]), (1, &[2])]);
}

#[test]
fn the_largest_preferred_size_wins_and_is_sent_without_waiting() {
    check(
        batching(8, &[2, 4], 500_000),
        (1..8).map(ticket),
        &[(1, &[1, 2, 3, 4]), (101, &[5, 6]), (501, &[7])],
    );
}

#[test]
fn a_batch_is_sent_when_the_next_request_would_exceed_the_largest_preferred_size() {
    check(batching(8, &[4], 500_000), [sized(1, 3), sized(2, 3)], &[(1, &[1]), (501, &[2])]);
}

#[test]
fn after_the_delay_all_requests_are_sent_up_to_the_maximum() {
    check(batching(8, &[4, 6], 50_000), (1..3).map(ticket), &[(51, &[1, 2])]);
    // The first request keeps the instance busy for longer than the delay: then 4 is no longer
    // preferred.
    let mut sim = sim(batching(8, &[4], 50_000));
    sim.at(ms(1), Event::Arrive(sized(1, 8)));
    sim.at(ms(2), Event::Arrive(ticket(2)));
    sim.at(ms(3), Event::Arrive(ticket(3)));
    sim.run();
    assert_eq!(timed(&sim), [(1, vec![1]), (101, vec![2, 3])]);
}

#[test]
fn a_request_above_the_largest_preferred_size_is_sent_alone_at_once() {
    check(batching(8, &[2], 500_000), [sized(1, 5)], &[(1, &[1])]);
    check(batching(8, &[], 500_000), [sized(1, 20)], &[(1, &[1])]);
}

#[test]
fn preferred_sizes_above_the_maximum_are_ignored() {
    check(batching(4, &[16], 500_000), (1..5).map(ticket), &[(1, &[1, 2, 3, 4])]);
}

#[test]
fn another_shape_ends_the_batch_and_the_last_one_waits_the_delay() {
    let alternating = [shaped(1, 1), shaped(2, 2), shaped(3, 1)];
    check(batching(8, &[], 500_000), alternating, &[(1, &[1]), (1, &[2]), (501, &[3])]);
}

#[test]
fn the_delay_counts_from_the_oldest_request() {
    let mut sim = sim(batching(8, &[], 50_000));
    for number in 1..5 {
        sim.at(ms(10 * number), Event::Arrive(ticket(number)));
    }
    sim.run();
    assert_eq!(timed(&sim), [(60, vec![1, 2, 3, 4])]);
}

#[test]
fn a_busy_instance_gets_a_batch_only_when_waiting_could_not_improve_it() {
    // A full batch is sent behind the running one. A partial one waits, grows, and is sent when the
    // instance is idle.
    let mut full = sim(batching(2, &[], 0));
    full.at(ms(0), Event::Arrive(ticket(1)));
    (2..4).for_each(|number| full.at(ms(5), Event::Arrive(ticket(number))));
    full.at(ms(6), Event::Arrive(ticket(4)));
    full.at(ms(150), Event::Arrive(ticket(5)));
    full.run();
    assert_eq!(timed(&full), [(0, vec![1]), (5, vec![2, 3]), (150, vec![4, 5])]);
    // A batch that is followed by another shape cannot grow.
    let mut cut = sim(batching(8, &[], 0));
    cut.at(ms(0), Event::Arrive(ticket(1)));
    cut.at(ms(5), Event::Arrive(shaped(2, 7)));
    cut.at(ms(6), Event::Arrive(shaped(3, 8)));
    cut.run();
    assert_eq!(timed(&cut), [(0, vec![1]), (6, vec![2]), (200, vec![3])]);
    // An expired delay does not matter.
    let mut delayed = sim(batching(8, &[], 10_000));
    delayed.at(ms(0), Event::Arrive(ticket(1)));
    delayed.at(ms(20), Event::Arrive(ticket(2)));
    delayed.at(ms(60), Event::Arrive(ticket(3)));
    delayed.run();
    assert_eq!(timed(&delayed), [(10, vec![1]), (110, vec![2, 3])]);
}

#[test]
fn prefetch_is_disabled_by_its_setting_a_queue_policy_or_levels() {
    let limited = QueuePolicy { max_queue_size: 10, ..QueuePolicy::default() };
    let timed_out = QueuePolicy { default_timeout_us: 10, ..QueuePolicy::default() };
    let overridable = QueuePolicy { allow_timeout_override: true, ..QueuePolicy::default() };
    let delaying = QueuePolicy { timeout_action: TimeoutAction::Delay, ..QueuePolicy::default() };
    let with = |queue_policy| Settings { queue_policy, ..Settings::default() };
    let at_level =
        Settings { priority_queue_policies: BTreeMap::from([(2, limited)]), ..Settings::default() };
    let levels = Settings { priority_levels: 2, default_priority_level: 2, ..Settings::default() };
    let off = Settings { prefetch: false, ..Settings::default() };
    for (settings, expected) in [
        (Settings::default(), 2),
        (with(delaying), 2),
        (with(limited), 1),
        (with(timed_out), 1),
        (with(overridable), 1),
        (at_level, 1),
        (levels, 1),
        (off, 1),
    ] {
        assert_eq!(settings.max_in_flight(), expected, "{settings:?}");
    }
    check(with(limited), (1..3).map(ticket), &[(1, &[1]), (101, &[2])]);
}

/// Ten requests, a maximum batch size of 4, and 2 s for each execution.
#[test]
fn the_pending_gauge_has_tritons_values() {
    for delay in [0, 500_000] {
        let mut sim = sim(batching(4, &[], delay));
        sim.drain = delay == 0;
        sim.service = vec![ms(2000)];
        (1..11).for_each(|number| sim.at(ms(1), Event::Arrive(ticket(number))));
        let gauge: Vec<usize> = [1000, 3000, 5000, 7000]
            .map(|time| {
                sim.run_until(ms(time));
                sim.pending()
            })
            .to_vec();
        assert_eq!(gauge, [6, 2, 0, 0]);
        let batches: Vec<usize> = sim.batches().map(|batch| batch.len()).collect();
        assert_eq!(batches, [4, 4, 2]);
    }
}

#[test]
fn a_queue_limit_of_four_refuses_two_of_ten() {
    for drain in [true, false] {
        let queue_policy = QueuePolicy { max_queue_size: 4, ..QueuePolicy::default() };
        let mut sim = sim(Settings { queue_policy, ..batching(4, &[], 500_000) });
        sim.drain = drain;
        sim.service = vec![ms(2000)];
        (1..11).for_each(|number| sim.at(ms(1), Event::Arrive(ticket(number))));
        sim.run_until(ms(1000));
        assert_eq!(sim.pending(), 4);
        sim.run();
        let refused = sim
            .answers()
            .filter(|answer| answer.2 == Outcome::Rejected(RejectReason::QueueFull))
            .count();
        assert_eq!((refused, sim.batches().count()), (2, 2), "refused, executions");
    }
}

#[test]
fn an_expired_request_is_rejected_on_time_even_without_an_instance() {
    let queue_policy = QueuePolicy {
        default_timeout_us: 30_000,
        allow_timeout_override: true,
        ..QueuePolicy::default()
    };
    let mut sim = Sim::new(create(Settings { queue_policy, ..batching(4, &[], 0) }), ms(100));
    for (number, timeout_us) in [(1, 0), (2, 10_000), (3, 90_000)] {
        sim.at(ms(5), Event::Arrive(Ticket { timeout_us, ..ticket(number) }));
    }
    sim.run();
    let rejected = Outcome::Rejected(RejectReason::Timeout);
    assert_eq!(
        [1, 2, 3].map(|number| outcome(&sim, number)),
        [(35, rejected), (15, rejected), (35, rejected)]
    );
}

#[test]
fn a_request_can_only_shorten_a_default_timeout_if_allowed() {
    for (default_timeout_us, allow_timeout_override, requested, expected) in [
        (0, false, 0, None),
        (0, true, 50, None),
        (100, false, 50, Some(100)),
        (100, true, 50, Some(50)),
        (100, true, 0, Some(100)),
        (100, true, 200, Some(100)),
    ] {
        let policy =
            QueuePolicy { default_timeout_us, allow_timeout_override, ..QueuePolicy::default() };
        assert_eq!(policy.timeout(requested), expected.map(us), "{policy:?} {requested}");
    }
}

#[test]
fn a_cancelled_request_is_answered_at_once_and_never_sent() {
    let mut sim = sim(batching(2, &[], 0));
    (1..6).for_each(|number| sim.at(ms(0), Event::Arrive(ticket(number))));
    [5, 1, 5].into_iter().for_each(|number| sim.at(ms(10), Event::Cancel(RequestId(number))));
    sim.run();
    assert_eq!(timed(&sim), [(0, vec![1, 2]), (0, vec![3, 4])]);
    assert_eq!(outcome(&sim, 5), (10, Outcome::Rejected(RejectReason::Cancelled)));
    assert_eq!(outcome(&sim, 1), (100, Outcome::Done), "an executing request is not cancelled");
}

#[test]
fn work_goes_to_the_least_loaded_instance_in_turn() {
    let mut sim = sim(Settings::default());
    sim.at(us(0), Event::Join(InstanceId(1)));
    (1..5).for_each(|number| sim.at(ms(1), Event::Arrive(ticket(number))));
    // Single requests, each with idle instances only: the instances still take turns.
    (5..8).for_each(|number| sim.at(ms(1000 * number), Event::Arrive(ticket(number))));
    sim.run();
    assert_eq!(
        sim.log
            .iter()
            .filter_map(|record| match record {
                Record::Sent { instance, in_flight, .. } => Some((instance.0, *in_flight)),
                Record::Answered { .. } => None,
            })
            .collect::<Vec<_>>(),
        [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 0)]
    );
}

#[test]
fn requests_of_a_lost_instance_are_requeued_first_and_once() {
    let mut sim = sim(batching(2, &[], 0));
    (1..6).for_each(|number| sim.at(ms(0), Event::Arrive(ticket(number))));
    sim.at(ms(10), Event::Lose(InstanceId(0)));
    sim.at(ms(20), Event::Join(InstanceId(0)));
    sim.at(ms(30), Event::Lose(InstanceId(0)));
    sim.at(ms(40), Event::Join(InstanceId(0)));
    sim.run();
    assert_eq!(timed(&sim)[2..], [(20, vec![1, 2]), (20, vec![3, 4]), (40, vec![5])]);
    assert_eq!([1, 2, 3, 4].map(|number| outcome(&sim, number)), [(30, Outcome::Lost); 4]);
    assert_eq!(outcome(&sim, 5), (140, Outcome::Done));
}

#[test]
fn an_instance_that_joins_again_holds_nothing() {
    let mut scheduler = create(Settings { prefetch: false, ..Settings::default() });
    let now = Instant(1);
    let sent = Some(Action::Execute {
        instance: InstanceId(0),
        requests: vec![RequestId(1)],
        reason: SendReason::Full,
    });
    scheduler.instance_ready(InstanceId(0), now);
    scheduler.enqueue(ticket(1), now);
    assert_eq!(scheduler.poll_action(now), sent);
    scheduler.instance_ready(InstanceId(0), now);
    scheduler.requeue(ticket(1), now, now);
    assert_eq!(
        (scheduler.poll_action(now), scheduler.poll_action(now)),
        (sent, None),
        "the instance is known once"
    );
}

#[test]
fn a_batch_that_was_decided_but_not_polled_returns_from_a_lost_instance() {
    let queue_policy = QueuePolicy { max_queue_size: 1, ..QueuePolicy::default() };
    let mut scheduler = create(Settings { queue_policy, ..Settings::default() });
    let now = Instant(5);
    scheduler.instance_ready(InstanceId(0), now);
    scheduler.enqueue(ticket(1), now);
    scheduler.enqueue(ticket(2), now);
    scheduler.instance_lost(InstanceId(0), now);
    assert_eq!((scheduler.poll_action(now), scheduler.queued()), (None, 2));
    scheduler.instance_ready(InstanceId(7), now);
    let first = Action::Execute {
        instance: InstanceId(7),
        requests: vec![RequestId(1)],
        reason: SendReason::Full,
    };
    assert_eq!((scheduler.poll_action(now), scheduler.poll_action(now)), (Some(first), None));
}

#[test]
fn stopping_refuses_new_requests_and_finishes_the_queued_ones_without_delay() {
    let mut sim = sim(batching(8, &[], 500_000));
    (1..3).for_each(|number| sim.at(ms(1), Event::Arrive(ticket(number))));
    sim.at(ms(5), Event::Stop);
    sim.at(ms(6), Event::Arrive(ticket(3)));
    sim.run();
    assert_eq!(timed(&sim), [(5, vec![1, 2])]);
    assert_eq!(outcome(&sim, 3), (6, Outcome::Rejected(RejectReason::Stopping)));
}

#[test]
fn all_queued_requests_can_be_rejected() {
    let mut scheduler = create(Settings::default());
    (1..3).for_each(|number| scheduler.enqueue(ticket(number), Instant(1)));
    scheduler.reject_all(RejectReason::NoInstance, Instant(2));
    let rejected =
        |number| Action::Reject { request: RequestId(number), reason: RejectReason::NoInstance };
    let actions: Vec<Action> = std::iter::from_fn(|| scheduler.poll_action(Instant(2))).collect();
    assert_eq!(actions, [rejected(1), rejected(2)]);
    assert_eq!(scheduler.queued(), 0);
}

#[test]
fn the_test_setting_holds_execution_until_enough_requests_are_queued() {
    let mut sim = sim(Settings { delay_scheduler: Some(3), ..batching(8, &[], 0) });
    for (time, number) in [(1, 1), (2, 2), (3, 3), (200, 4)] {
        sim.at(ms(time), Event::Arrive(ticket(number)));
    }
    sim.run();
    assert_eq!(timed(&sim), [(3, vec![1, 2, 3]), (200, vec![4])]);
}

#[test]
fn lower_levels_are_served_first_and_unknown_ones_are_the_default() {
    let settings =
        Settings { priority_levels: 3, default_priority_level: 2, ..Settings::default() };
    let tickets = [(1, 3), (2, 3), (3, 3), (4, 0), (5, 99), (6, 1)]
        .map(|(number, priority)| Ticket { priority, ..ticket(number) });
    let order: [(u64, &[u64]); 6] =
        [(1, &[6]), (101, &[4]), (201, &[5]), (301, &[1]), (401, &[2]), (501, &[3])];
    check(settings, tickets, &order);
}

#[test]
fn a_request_of_a_higher_priority_joins_the_batch_before_others() {
    let levels =
        Settings { priority_levels: 2, default_priority_level: 1, ..batching(8, &[], 500_000) };
    let mut scheduler = create(levels);
    let now = Instant(1);
    scheduler.instance_ready(InstanceId(0), now);
    scheduler.enqueue(ticket(2), now);
    assert_eq!(scheduler.poll_action(now), None, "it waits for further requests");
    // The scan has reached 2; now 3 (level 2, another shape) and 4 (level 1) arrive before it
    // continues.
    scheduler.enqueue(Ticket { priority: 2, ..shaped(3, 9) }, now);
    scheduler.enqueue(ticket(4), now);
    let expected = Action::Execute {
        instance: InstanceId(0),
        requests: vec![RequestId(2), RequestId(4)],
        reason: SendReason::Shape,
    };
    assert_eq!(scheduler.poll_action(now), Some(expected));
}

#[test]
fn requests_that_wait_too_long_for_an_instance_are_rejected() {
    let mut scheduler = create(batching(8, &[], 0));
    (1..4).for_each(|number| scheduler.enqueue(ticket(number), Instant(number)));
    scheduler.reject_queued_before(Instant(3), RejectReason::NotRestarted, Instant(9));
    let rejected = |number| {
        Some(Action::Reject { request: RequestId(number), reason: RejectReason::NotRestarted })
    };
    assert_eq!(
        [(); 3].map(|()| scheduler.poll_action(Instant(9))),
        [rejected(1), rejected(2), None]
    );
    scheduler.instance_ready(InstanceId(0), Instant(9));
    let sent = Action::Execute {
        instance: InstanceId(0),
        requests: vec![RequestId(3)],
        reason: SendReason::Idle,
    };
    assert_eq!(scheduler.poll_action(Instant(9)), Some(sent));
}

#[test]
fn a_closing_instance_finishes_its_batch_and_gets_no_other() {
    let mut scheduler = create(Settings { rate_limited: true, ..batching(1, &[], 0) });
    let now = Instant(1);
    let instance = InstanceId(0);
    scheduler.instance_ready(instance, now);
    scheduler.enqueue(ticket(1), now);
    scheduler.enqueue(ticket(2), now);
    assert_eq!(scheduler.poll_action(now), Some(Action::Acquire { instance }));
    scheduler.resources_granted(instance, now);
    assert!(matches!(scheduler.poll_action(now), Some(Action::Execute { .. })));
    scheduler.instance_closing(instance, now);
    assert_eq!(scheduler.poll_action(now), None, "it keeps its resources");
    scheduler.batch_done(instance, now);
    assert_eq!(scheduler.poll_action(now), Some(Action::Release { instance }));
    assert_eq!((scheduler.poll_action(now), scheduler.queued()), (None, 1));
}

#[test]
fn invalid_calls_are_ignored() {
    let mut scheduler = create(Settings::default());
    let now = Instant(1);
    scheduler.batch_done(InstanceId(4), now);
    scheduler.instance_lost(InstanceId(4), now);
    scheduler.cancel(RequestId(4), now);
    scheduler.handle_timeout(now);
    assert_eq!((scheduler.poll_action(now), scheduler.poll_timeout()), (None, None));
    scheduler.instance_ready(InstanceId(0), now);
    scheduler.batch_done(InstanceId(0), now);
    scheduler.enqueue(ticket(1), now);
    scheduler.enqueue(ticket(1), now);
    scheduler.requeue(ticket(1), now, now);
    assert!(scheduler.poll_action(now).is_some());
    assert_eq!(scheduler.poll_action(now), None, "the request is queued only once");
}

#[test]
fn errors_have_tritons_codes_and_texts() {
    use crate::error::{ErrorCode, Reason};
    for (reason, code, metric, text) in [
        (
            RejectReason::QueueFull,
            ErrorCode::Unavailable,
            Reason::QueueFull,
            "Exceeds maximum queue size",
        ),
        (RejectReason::Timeout, ErrorCode::Unavailable, Reason::Timeout, "Request timeout expired"),
        (RejectReason::Cancelled, ErrorCode::Cancelled, Reason::Cancelled, ""),
        (
            RejectReason::Stopping,
            ErrorCode::Unavailable,
            Reason::NotReady,
            "Server is stopping, scheduler for model has stopped accepting new inference requests",
        ),
    ] {
        assert_eq!(
            reason.error("m", &CorrelationId::default()),
            InferError::new(code, metric, text)
        );
    }
    assert_eq!(
        RejectReason::NoInstance.error("m", &CorrelationId::default()).code,
        ErrorCode::Unavailable
    );
}

/// Returns the reason of the first batch of these requests, polled at `at` microseconds.
fn first_reason(settings: Settings, shapes: &[u64], at: u64, stop: bool) -> SendReason {
    let mut scheduler = create(settings);
    scheduler.instance_ready(InstanceId(0), Instant(0));
    for (number, shape_key) in (1..).zip(shapes) {
        scheduler.enqueue(Ticket { shape_key: *shape_key, ..ticket(number) }, Instant(0));
    }
    if stop {
        scheduler.stop(Instant(0));
    }
    match scheduler.poll_action(Instant(0) + us(at)) {
        Some(Action::Execute { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_batch_has_a_reason() {
    let batching = Settings { max_batch_size: 4, ..Settings::default() };
    let delayed = Settings { max_queue_delay_us: 10, ..batching.clone() };
    let preferring = Settings { preferred_batch_sizes: vec![2, 3], ..delayed.clone() };
    assert_eq!(first_reason(Settings::default(), &[1], 0, false), SendReason::Full);
    assert_eq!(first_reason(batching.clone(), &[1, 1], 0, false), SendReason::Idle);
    assert_eq!(first_reason(batching.clone(), &[1, 1, 1, 1], 0, false), SendReason::Full);
    assert_eq!(first_reason(batching, &[1, 2], 0, false), SendReason::Shape);
    assert_eq!(first_reason(delayed.clone(), &[1, 1], 10, false), SendReason::Delay);
    assert_eq!(first_reason(delayed, &[1, 1], 0, true), SendReason::Drain);
    assert_eq!(first_reason(preferring, &[1, 1], 0, false), SendReason::Preferred);
    let queue_policy = QueuePolicy {
        default_timeout_us: 5,
        timeout_action: TimeoutAction::Delay,
        ..QueuePolicy::default()
    };
    for (max_queue_delay_us, reason) in
        [(0, SendReason::Idle), (3, SendReason::Delay), (5, SendReason::Delay)]
    {
        let late =
            Settings { max_batch_size: 4, max_queue_delay_us, queue_policy, ..Settings::default() };
        assert_eq!(first_reason(late, &[1, 1], 5, false), reason, "delay {max_queue_delay_us}");
    }
}

#[test]
fn waiting_requests_are_counted_by_level() {
    let levels = Settings { priority_levels: 2, default_priority_level: 2, ..Settings::default() };
    let mut scheduler = create(levels);
    assert_eq!(scheduler.waiting(), Waiting::default());
    for (number, priority) in [(1, 2), (2, 1), (3, 2)] {
        scheduler.enqueue(Ticket { priority, ..ticket(number) }, Instant(number));
    }
    assert_eq!(
        scheduler.waiting(),
        Waiting { levels: vec![(1, 1), (2, 2)], oldest: Some(Instant(1)) }
    );
}
