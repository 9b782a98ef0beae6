//! Overlapping requests of one sequence.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::scheduler::tests::random::Random;

fn overlapping(most: u32) -> Settings {
    with(oldest(most), |sequences| {
        sequences.iterative = true;
        sequences.overlapping = true;
        sequences.implicit_start = true;
    })
}

impl Bench {
    /// Ends a batch of which these requests are rescheduled.
    fn again(&mut self, instance: u32, requests: &[u64]) {
        for request in requests {
            assert!(self.scheduler.reschedule(RequestId(*request), false));
        }
        self.done(instance);
    }

    /// Returns the number of sequences with a slot, and of occupied slots.
    fn active(&self) -> (usize, usize) {
        let counts = self.scheduler.sequences().unwrap();
        (counts.active, counts.slots_used)
    }
}

#[test]
fn the_next_request_starts_while_the_previous_one_is_rescheduled() {
    let mut bench = Bench::new(overlapping(4), 2);
    bench.send(&["a"]);
    bench.check(["1: (1"]);
    // It does not start before the first execution is done.
    bench.send(&["a", "a"]);
    bench.check([]);
    bench.again(1, &[1]);
    bench.check(["1: 1 (2"]);
    // They start one at a time, each as a sequence for the backend.
    bench.again(1, &[1]);
    bench.check(["1 ended [3]", "1: 1 (3"]);
    bench.done(1);
    bench.check(["1 ended [2]", "1 ended [4]"]);
    assert_eq!(bench.active(), (1, 1), "the sequence is idle and keeps its instance");
    bench.at(IDLE);
    assert_eq!(bench.active(), (0, 0));
}

#[test]
fn ordinary_sequences_never_overlap() {
    for (settings, iterative) in
        [(oldest(4), false), (direct(), false), (oldest(4), true), (direct(), true)]
    {
        let settings = with(settings, |sequences| sequences.iterative = iterative);
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
        bench.send(&["a"]);
        assert_eq!(bench.scheduler.reschedule(RequestId(1), false), iterative);
        bench.done(1);
        let actions = bench.actions();
        let both = actions.iter().any(|action| action.contains('1') && action.contains("(2"));
        assert_eq!(both, iterative, "{actions:?}: each iterative request is a separate sequence");
    }
    // Without the strategy or without iterative sequences the setting has no effect.
    for (settings, iterative) in [(direct(), true), (oldest(4), false)] {
        let settings = with(settings, |sequences| {
            sequences.iterative = iterative;
            sequences.overlapping = true;
        });
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
        assert_eq!(bench.scheduler.reschedule(RequestId(1), false), iterative);
    }
}

#[test]
fn all_requests_of_a_sequence_go_to_its_instance() {
    let mut bench = Bench::new(overlapping(4), 2);
    bench.send(&["a", "b"]);
    bench.check(["1: (1", "2: (2"]);
    bench.again(1, &[1]);
    bench.check(["1: 1"]);
    bench.again(2, &[2]);
    bench.check(["2: 2"]);
    bench.send(&["a", "b"]);
    bench.again(2, &[2]);
    bench.check(["2: 2 (4"]);
    bench.done(1);
    bench.check(["1 ended [2]", "1: (3"]);
}

#[test]
fn more_than_a_batch_take_turns() {
    let settings = Settings { max_batch_size: 2, ..overlapping(4) };
    let mut bench = Bench::new(settings, 1);
    bench.send(&["a", "b"]);
    assert_eq!(bench.actions().len(), 1);
    let mut runs = vec![1, 2];
    bench.send(&["a", "b"]);
    for _ in 0..6 {
        bench.again(1, &runs);
        let batch = bench.actions().pop().unwrap();
        runs =
            batch[3..].split(' ').filter_map(|step| step.trim_matches('(').parse().ok()).collect();
        assert_eq!(runs.len(), 2, "{batch}");
        assert!(runs.is_sorted(), "in the order of arrival: {batch}");
    }
}

#[test]
fn a_held_request_does_not_block_others_of_its_sequence() {
    let mut bench = Bench::new(overlapping(4), 1);
    bench.send(&["a", "a"]);
    bench.check(["1: (1"]);
    assert!(bench.scheduler.reschedule(RequestId(1), true));
    bench.done(1);
    bench.check(["1: (2"]);
    bench.scheduler.resume(RequestId(1));
    bench.done(1);
    bench.check(["1 ended [3]", "1: 1"]);
}

#[test]
fn cancelling_one_request_does_not_end_others() {
    let mut bench =
        Bench::new(with(overlapping(4), |sequences| sequences.implicit_start = false), 1);
    bench.send(&["(a", "a", "a"]);
    bench.check(["1: (1"]);
    bench.scheduler.cancel(RequestId(2), bench.now);
    bench.check(["2 Cancelled"]);
    bench.again(1, &[1]);
    bench.check(["1: 1 (3"]);
    // Cancel a request that waits to be executed again.
    assert!(bench.scheduler.reschedule(RequestId(1), true));
    bench.scheduler.cancel(RequestId(1), bench.now);
    bench.again(1, &[3]);
    let actions = bench.actions();
    assert!(
        actions.contains(&"1 Cancelled".to_owned()) && actions.contains(&"1: 3".to_owned()),
        "{actions:?}"
    );
    bench.done(1);
    assert_eq!(bench.actions().len(), 1, "the end of its sequence");
    assert_eq!(bench.active(), (1, 1));
}

#[test]
fn a_sequence_is_not_idle_while_a_request_is_rescheduled() {
    let mut bench =
        Bench::new(with(overlapping(1), |sequences| sequences.max_backlog = Some(0)), 1);
    bench.send(&["a"]);
    bench.check(["1: (1"]);
    bench.again(1, &[1]);
    bench.check(["1: 1"]);
    bench.at(5 * IDLE);
    bench.send(&["b", "a"]);
    bench.check(["2 QueueFull"]);
    bench.again(1, &[1]);
    bench.check(["1: 1 (3"]);
    bench.done(1);
    assert_eq!(bench.actions().len(), 2, "the ends of two sequences");
    bench.at(6 * IDLE);
    bench.send(&["b"]);
    bench.check(["1: (4"]);
}

#[test]
fn the_end_flag_does_not_stop_rescheduled_requests() {
    let mut bench = Bench::new(overlapping(1), 1);
    bench.send(&["a)"]);
    bench.check(["1: (1"]);
    bench.again(1, &[1]);
    bench.check(["1: 1"]);
    assert_eq!(bench.active(), (1, 1));
    bench.done(1);
    bench.check(["1 ended [2]"]);
    assert_eq!(bench.active(), (0, 0));
}

#[test]
fn a_sequence_that_the_model_ends_finishes_its_requests() {
    let mut bench =
        Bench::new(with(overlapping(1), |sequences| sequences.max_backlog = Some(0)), 1);
    let end = |bench: &mut Bench| {
        bench.scheduler.end_sequence(&CorrelationId::String("a".to_owned()), bench.now)
    };
    bench.send(&["a", "a"]);
    bench.check(["1: (1"]);
    end(&mut bench);
    bench.again(1, &[1]);
    bench.check(["1: 1 (2"]);
    bench.send(&["a"]);
    bench.check(["3 QueueFull"]);
    bench.again(1, &[1]);
    bench.check(["1 ended [3]", "1: 1"]);
    bench.done(1);
    bench.check(["1 ended [2]"]);
    // An idle sequence ends at once, and an unknown id has no effect.
    for _ in 0..2 {
        bench.send(&["a"]);
        assert!(bench.actions()[0].starts_with("1: ("));
        bench.done(1);
        assert_eq!(bench.actions().len(), 1);
        assert_eq!(bench.active(), (1, 1));
        end(&mut bench);
        end(&mut bench);
        assert_eq!(bench.active(), (0, 0));
    }
}

#[test]
fn losing_an_instance_rejects_all_requests_of_its_sequences() {
    let mut bench = Bench::new(overlapping(4), 1);
    bench.send(&["a", "a", "a"]);
    bench.check(["1: (1"]);
    assert!(bench.scheduler.reschedule(RequestId(1), true));
    bench.done(1);
    bench.check(["1: (2"]);
    bench.scheduler.instance_lost(ONE, bench.now);
    let mut actions = bench.actions();
    actions.sort();
    assert_eq!(
        actions,
        ["1 RequestLost", "3 RequestLost"],
        "2 is in flight and belongs to the driver"
    );
    bench.scheduler.instance_ready(ONE, bench.now);
    bench.send(&["a"]);
    bench.check(["1: (4"]);
    bench.scheduler.stop(bench.now);
    bench.send(&["a", "b"]);
    bench.check(["6 Stopping"]);
    bench.again(1, &[4]);
    bench.check(["1: 4 (5 drain"]);
}

#[test]
fn a_batch_that_was_not_sent_affects_only_its_requests() {
    let mut bench = Bench::new(overlapping(4), 1);
    bench.send(&["a", "a"]);
    bench.check(["1: (1"]);
    bench.scheduler.batch_unsent(ONE, bench.now);
    let actions = bench.actions();
    assert_eq!(actions.last().map(String::as_str), Some("1: (2"), "{actions:?}");
}

/// The state of a random run so far.
#[derive(Default)]
struct Seen {
    /// The number of executions that each request still needs.
    left: BTreeMap<u64, u64>,
    /// The sequence of each request.
    of: BTreeMap<u64, String>,
    /// The requests that each instance executes.
    flying: BTreeMap<InstanceId, Vec<RequestId>>,
    /// The instance of each sequence.
    homes: BTreeMap<String, InstanceId>,
    /// The latest request of each sequence that has started.
    begun: BTreeMap<String, u64>,
    /// The active keys of the backend.
    open: BTreeSet<u64>,
}

impl Seen {
    /// Checks a batch for an instance.
    fn execute(&mut self, instance: InstanceId, steps: &[SlotStep]) {
        assert!(steps.is_sorted_by_key(|step| step.request));
        for step in steps {
            let name = &self.of[&step.request.0];
            assert_eq!(
                *self.homes.entry(name.clone()).or_insert(instance),
                instance,
                "one instance"
            );
            assert_eq!(self.open.insert(step.key), step.start, "a key starts once");
            let first = self.begun.entry(name.clone()).or_default();
            assert!(
                !step.start || step.request.0 > std::mem::replace(first, step.request.0),
                "in order"
            );
        }
        let names: Vec<_> =
            steps.iter().filter(|step| step.start).map(|step| &self.of[&step.request.0]).collect();
        assert_eq!(
            names.iter().collect::<BTreeSet<_>>().len(),
            names.len(),
            "only one request of a sequence starts"
        );
        let before = self.flying.insert(instance, steps.iter().map(|step| step.request).collect());
        assert_eq!(before, None, "one batch at a time");
    }

    /// Ends the batch of an instance: its requests are rescheduled or done.
    fn finish(&mut self, instance: InstanceId, bench: &mut Bench) {
        for request in self.flying.remove(&instance).unwrap() {
            let more = self.left.get_mut(&request.0).unwrap();
            *more = more.saturating_sub(1);
            if *more > 0 {
                assert!(bench.scheduler.reschedule(request, false));
            } else {
                self.left.remove(&request.0);
            }
        }
        bench.done(instance.0);
    }
}

/// Random runs: each request is executed the required number of times by one instance, and starts
/// after the previous one.
#[test]
fn random_runs_keep_the_invariants() {
    for seed in 0..400 {
        let mut random = Random(seed);
        let settings = Settings { max_batch_size: 1 + random.below(4) as u32, ..overlapping(2) };
        let most = settings.max_batch_size as usize;
        let mut bench = Bench::new(settings, 2);
        let mut seen = Seen::default();
        for turn in 0..300 {
            if turn < 100 && random.chance(2) {
                let name = ["a", "b", "c", "d"][random.below(4) as usize];
                bench.send(&[name]);
                seen.left.insert(bench.next, random.below(5));
                seen.of.insert(bench.next, name.to_owned());
            }
            let ready: Vec<InstanceId> = seen.flying.keys().copied().collect();
            if let Some(instance) = ready.get(random.below(3) as usize) {
                seen.finish(*instance, &mut bench);
            }
            while let Some(action) = bench.scheduler.poll_action(bench.now) {
                match action {
                    Action::ExecuteSteps { instance, slots, .. } => {
                        let steps: Vec<SlotStep> = slots.into_iter().flatten().collect();
                        assert!(steps.len() <= most);
                        seen.execute(instance, &steps);
                    }
                    Action::SequencesEnded { keys, .. } => {
                        keys.iter().for_each(|key| assert!(seen.open.remove(key)))
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let Seen { left, open, flying, .. } = seen;
        assert!(
            left.is_empty() && open.is_empty() && flying.is_empty(),
            "all are done: {left:?} {open:?}"
        );
        assert_eq!(bench.scheduler.queued(), 0);
        bench.at(IDLE);
        assert_eq!(bench.active(), (0, 0), "no sequence remains");
    }
}
