//! Invariants of random runs: random settings, arrivals, cancellations, lost instances and service
//! times.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::reference::Reference;
use super::{ms, us};
use crate::id::{InstanceId, RequestId};
use crate::scheduler::sim::{Event, Outcome, Record, Sim};
use crate::scheduler::{
    QueuePolicy, RejectReason, Reorder, Scheduler, Settings, Ticket, TimeoutAction, create,
};
use crate::timeline::Instant;

#[derive(Clone, Debug)]
struct Scenario {
    settings: Settings,
    instances: u32,
    /// Microseconds since the previous request, and the request.
    arrivals: Vec<(u64, Ticket)>,
    /// The time after the arrival in microseconds, and the number of the request.
    cancels: Vec<(u64, u64)>,
    /// The time, the instance, and the duration of its absence.
    losses: Vec<(u64, u32, u64)>,
    service: Vec<u64>,
    stop: Option<u64>,
    drain: bool,
}

fn policy() -> impl Strategy<Value = QueuePolicy> {
    let action = prop_oneof![Just(TimeoutAction::Reject), Just(TimeoutAction::Delay)];
    (
        prop_oneof![3 => Just(0u32), 1 => 1..6u32],
        prop_oneof![2 => Just(0u64), 1 => 1..900u64],
        any::<bool>(),
        action,
    )
        .prop_map(
            |(max_queue_size, default_timeout_us, allow_timeout_override, timeout_action)| {
                QueuePolicy {
                    max_queue_size,
                    default_timeout_us,
                    allow_timeout_override,
                    timeout_action,
                }
            },
        )
}

fn settings() -> impl Strategy<Value = Settings> {
    let delay = prop_oneof![Just(0u64), 1..800u64];
    let policies =
        (prop_oneof![2 => Just(QueuePolicy::default()), 1 => policy()], policy(), any::<bool>());
    let preferred = prop::collection::vec(1..10u32, 0..3);
    (0..9u32, preferred, delay, any::<bool>(), 0..4u64, policies).prop_map(
        |(
            max_batch_size,
            preferred_batch_sizes,
            max_queue_delay_us,
            preserve_ordering,
            levels,
            policies,
        )| Settings {
            max_batch_size,
            preferred_batch_sizes,
            max_queue_delay_us,
            preserve_ordering,
            priority_levels: levels,
            default_priority_level: levels.min(2),
            queue_policy: policies.0,
            priority_queue_policies: if policies.2 {
                BTreeMap::from([(1, policies.1)])
            } else {
                BTreeMap::new()
            },
            ..Settings::default()
        },
    )
}

fn arrivals() -> impl Strategy<Value = Vec<(u64, Ticket)>> {
    let gap = prop_oneof![2 => Just(0u64), 3 => 0..300u64];
    let shape_key = prop_oneof![4 => Just(7u64), 1 => Just(8u64)];
    let waited = prop_oneof![4 => Just(0u64), 1 => 1..400u64];
    let one = (gap, 0..6u32, shape_key, 0..5u64, prop_oneof![Just(0u64), 1..600u64], waited);
    prop::collection::vec(one, 0..60).prop_map(|drawn| {
        (1u64..)
            .zip(drawn)
            .map(|(index, (gap, batch_size, shape_key, priority, timeout_us, waited))| {
                let waited = us(waited);
                (
                    gap,
                    Ticket {
                        request: RequestId(index),
                        batch_size,
                        shape_key,
                        priority,
                        timeout_us,
                        waited,
                        sequence: None,
                    },
                )
            })
            .collect()
    })
}

prop_compose! {
    fn scenario()(
        settings in settings(),
        instances in 1..4u32,
        arrivals in arrivals(),
        cancels in prop::collection::vec((0..600u64, 1..60u64), 0..16),
        losses in prop::collection::vec((0..8000u64, 0..3u32, 1..3000u64), 0..4),
        service in prop::collection::vec(1..1500u64, 1..6),
        stop in prop_oneof![4 => Just(None), 1 => (0..8000u64).prop_map(Some)],
        drain in any::<bool>(),
    ) -> Scenario {
        Scenario { settings, instances, arrivals, cancels, losses, service, stop, drain }
    }
}

impl Scenario {
    fn sim(&self, scheduler: Box<dyn Scheduler>) -> Sim {
        let mut sim = Sim::new(scheduler, ms(1));
        sim.service = self.service.iter().map(|&time| us(time)).collect();
        sim.drain = self.drain;
        sim.reorder = self.settings.preserve_ordering.then(Reorder::new);
        (0..self.instances).for_each(|number| sim.at(us(0), Event::Join(InstanceId(number))));
        let mut time = 0;
        for (gap, ticket) in &self.arrivals {
            time += gap;
            sim.at(us(time), Event::Arrive(ticket.clone()));
            for (after, _) in
                self.cancels.iter().filter(|(_, request)| *request == ticket.request.0)
            {
                sim.at(us(time + after), Event::Cancel(ticket.request));
            }
        }
        let mut away_until: BTreeMap<u32, u64> = BTreeMap::new();
        for &(time, number, away) in &self.losses {
            let number = number % self.instances;
            // An instance that is absent cannot be lost again.
            if away_until.get(&number).is_none_or(|&until| until < time)
                && !away_until.contains_key(&number)
            {
                sim.at(us(time), Event::Lose(InstanceId(number)));
                sim.at(us(time + away), Event::Join(InstanceId(number)));
                away_until.insert(number, time + away);
            }
        }
        if let Some(time) = self.stop {
            sim.at(us(time), Event::Stop);
        }
        sim
    }

    fn deadline(&self, sim: &Sim, request: RequestId) -> Option<Instant> {
        let known = &sim.requests[&request];
        let policy = self.settings.policy(self.settings.level(known.ticket.priority));
        let left = |timeout: Duration| timeout.checked_sub(known.ticket.waited).unwrap_or_default();
        policy.timeout(known.ticket.timeout_us).map(|timeout| known.queued + left(timeout))
    }

    fn level(&self, sim: &Sim, request: RequestId) -> u64 {
        self.settings.level(sim.requests[&request].ticket.priority)
    }
}

fn sent(sim: &Sim) -> impl Iterator<Item = (Instant, usize, &[RequestId])> {
    sim.log.iter().filter_map(|record| match record {
        Record::Sent { at, in_flight, requests, .. } => {
            Some((*at, *in_flight, requests.as_slice()))
        }
        Record::Answered { .. } => None,
    })
}

/// Checks that between two events no request waits that could run, and that the scheduler has the
/// right timeout.
fn check_at_rest(scenario: &Scenario, sim: &Sim, stopped: bool) {
    let settings = &scenario.settings;
    let delay = us(settings.max_queue_delay_us);
    let oldest = sim.waiting().map(|known| known.queued).min();
    let idle = sim.in_flight().any(|batches| batches == 0);
    if let (Some(oldest), true) = (oldest, idle) {
        assert!(
            sim.now - oldest < delay,
            "at {:?} waiting since {oldest:?}, an instance is idle",
            sim.now
        );
        assert!(
            sim.scheduler().poll_timeout().is_some_and(|due| due <= oldest + delay),
            "there is no timeout for it"
        );
        assert!(!stopped, "no request waits for a batch to fill while stopping");
    }
    assert!(sim.scheduler().poll_timeout().is_none_or(|due| due > sim.now), "a busy loop");
    assert!(sim.in_flight().all(|batches| batches <= settings.max_in_flight() as usize));
    assert_eq!(sim.scheduler().queued(), sim.waiting().count());
}

fn check_batches(scenario: &Scenario, sim: &Sim) {
    let max = u64::from(scenario.settings.max_batch_size.max(1));
    for (at, _, batch) in sent(sim) {
        let tickets: Vec<&Ticket> =
            batch.iter().map(|request| &sim.requests[request].ticket).collect();
        let items: u64 = tickets.iter().map(|ticket| u64::from(ticket.batch_size.max(1))).sum();
        assert!(items <= max || batch.len() == 1, "{items} items in {batch:?} do not fit {max}");
        assert!(
            tickets.iter().all(|ticket| ticket.shape_key == tickets[0].shape_key),
            "shapes in {batch:?} differ"
        );
        for request in batch {
            let reject = scenario.settings.policy(scenario.level(sim, *request)).timeout_action
                == TimeoutAction::Reject;
            let deadline = scenario.deadline(sim, *request).filter(|_| reject);
            assert!(
                deadline.is_none_or(|deadline| at < deadline),
                "{request:?} was sent after its timeout"
            );
        }
    }
}

/// Checks that each level is served in order of arrival, and no level while a higher priority
/// waits.
fn check_order(scenario: &Scenario, sim: &Sim) {
    let undisturbed = |request: &RequestId| {
        let delayed =
            |at: Instant| scenario.deadline(sim, *request).is_some_and(|deadline| deadline <= at);
        !sim.requests[request].retried
            && !sent(sim).any(|(at, _, batch)| batch.contains(request) && delayed(at))
    };
    let mut latest: BTreeMap<u64, RequestId> = BTreeMap::new();
    let order: Vec<(Instant, RequestId)> = sent(sim)
        .flat_map(|(at, _, batch)| batch.iter().map(move |request| (at, *request)))
        .collect();
    for (index, (at, request)) in
        order.iter().enumerate().filter(|(_, (_, request))| undisturbed(request))
    {
        let level = scenario.level(sim, *request);
        let before = latest.insert(level, *request);
        assert!(
            before.is_none_or(|before| before < *request),
            "{request:?} after {before:?} at level {level}"
        );
        for (_, later) in &order[index + 1..] {
            let waited = !sim.requests[later].retried && sim.requests[later].queued < *at;
            assert!(
                !waited || scenario.level(sim, *later) >= level,
                "{request:?} went before {later:?}"
            );
        }
    }
}

fn check_answers(scenario: &Scenario, sim: &Sim) {
    let answered: BTreeSet<RequestId> = sim.answers().map(|(_, request, _)| request).collect();
    assert_eq!(answered.len(), scenario.arrivals.len(), "every request is answered");
    assert_eq!(sim.answers().count(), answered.len(), "each request is answered once");
    for (at, request, outcome) in sim.answers() {
        let known = &sim.requests[&request];
        match outcome {
            Outcome::Rejected(RejectReason::Cancelled) => {
                assert!(
                    scenario.cancels.iter().any(|&(time, number)| (known.queued + us(time), number) == (at, request.0)),
                    "{request:?} was not cancelled at {at:?}"
                );
            }
            Outcome::Rejected(RejectReason::Timeout) if !known.retried => {
                assert_eq!(
                    Some(at),
                    scenario.deadline(sim, request),
                    "{request:?} is rejected at its deadline"
                );
            }
            Outcome::Rejected(reason) if reason.refused_on_arrival() => {
                assert_eq!(at, known.queued)
            }
            Outcome::Lost => assert!(known.retried, "a lost request is retried"),
            _ => {}
        }
    }
    if scenario.settings.preserve_ordering {
        let in_order = |outcome: &Outcome| !matches!(outcome, Outcome::Rejected(_));
        let order: Vec<RequestId> = sim
            .answers()
            .filter(|(_, _, outcome)| in_order(outcome))
            .map(|(_, request, _)| request)
            .collect();
        assert!(order.is_sorted(), "answers are sent in order of arrival: {order:?}");
    }
}

fn check_invariants(scenario: &Scenario) {
    let mut sim = scenario.sim(create(scenario.settings.clone()));
    while sim.step() {
        let stopped = scenario.stop.is_some_and(|time| Instant(0) + us(time) <= sim.now);
        check_at_rest(scenario, &sim, stopped);
    }
    check_batches(scenario, &sim);
    check_order(scenario, &sim);
    check_answers(scenario, &sim);
}

/// Checks the same invariants over more than a million requests, with a fixed seed.
#[test]
fn a_million_requests_keep_the_invariants() {
    let config =
        ProptestConfig { cases: 40_000, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner =
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let requests = Cell::new(0);
    let result = runner.run(&scenario(), |scenario| {
        requests.set(requests.get() + scenario.arrivals.len());
        check_invariants(&scenario);
        Ok(())
    });
    assert!(result.is_ok(), "{result:?}");
    assert!(requests.get() > 1_000_000, "only {} requests", requests.get());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_runs_keep_the_invariants(scenario in scenario()) {
        check_invariants(&scenario);
    }

    #[test]
    fn decisions_equal_those_of_the_reference(scenario in scenario()) {
        let mut real = scenario.sim(create(scenario.settings.clone()));
        let mut plain = scenario.sim(Box::new(Reference::new(scenario.settings.clone())));
        real.run();
        plain.run();
        prop_assert_eq!(real.log, plain.log);
    }
}

/// Checks that long queues are cheap: a linear search would take a second here, the queue takes
/// milliseconds.
#[test]
fn a_hundred_thousand_waiting_requests_are_cheap() {
    let settings = Settings { max_batch_size: 8, ..Settings::default() };
    let mut scheduler = create(settings);
    let count = 100_000;
    for number in 0..count {
        let ticket = Ticket { request: RequestId(number), batch_size: 1, ..Ticket::default() };
        scheduler.enqueue(ticket, Instant(number));
        assert!(scheduler.poll_action(Instant(number)).is_none(), "no instance");
    }
    let now = Instant(count);
    for number in (0..count).rev().filter(|number| number % 2 == 0) {
        scheduler.cancel(RequestId(number), now);
        assert!(scheduler.poll_action(now).is_some());
    }
    assert_eq!(scheduler.queued(), 50_000);
    scheduler.instance_ready(InstanceId(0), now);
    let mut batches = 0;
    while scheduler.poll_action(now).is_some() {
        batches += 1;
        scheduler.batch_done(InstanceId(0), now + Duration::from_nanos(1));
    }
    assert_eq!(batches, 50_000 / 8);
}
