//! Limits that reject requests on arrival, and implicit starts of sequences.

use super::*;

#[test]
fn limits_reject_on_arrival() {
    let mut bench = Bench::new(
        with(oldest(1), |sequences: &mut SequenceSettings| {
            sequences.max_backlog = Some(1);
            sequences.max_queue = 1;
        }),
        1,
    );
    bench.send(&["(a"]);
    bench.check(["1: (1"]);
    bench.send(&["a", "a", "(b", "(c", "c"]);
    bench.check(["3 QueueFull", "5 QueueFull", "6 SequenceNotStarted"]);
    bench.done(1);
    bench.check(["1: 2"]);
}

#[test]
fn a_sequence_with_an_implicit_start_may_be_rejected_for_lack_of_slots() {
    let mut bench = Bench::new(
        with(oldest(1), |sequences: &mut SequenceSettings| {
            sequences.implicit_start = true;
            sequences.max_backlog = Some(0);
        }),
        1,
    );
    bench.send(&["a", "a", "b", "a)"]);
    bench.check(["3 QueueFull", "1: (1"]);
    for batch in ["1: 2", "1: 4)"] {
        bench.done(1);
        bench.check([batch]);
    }
    bench.done(1);
    bench.send(&["b"]);
    bench.check(["1: (5"]);
}

#[test]
fn a_cancelled_request_does_not_end_the_next_sequence_of_its_id() {
    for settings in [direct(), oldest(2)] {
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a", "a", "a", "(a", "a"]);
        bench.check(["4 restarts", "1: (1"]);
        bench.scheduler.cancel(RequestId(2), bench.now);
        bench.check(["2 Cancelled", "3 SequenceCancelled"]);
        bench.done(1);
        bench.check(["1 ended [1]", "1: (4"]);
        bench.send(&["a)"]);
        bench.done(1);
        bench.check(["1: 5"]);
        bench.done(1);
        bench.check(["1: 6)"]);
        // The cancelled request is the next one of its sequence.
        bench.send(&["(c", "c", "(c"]);
        bench.check(["9 restarts"]);
        bench.scheduler.cancel(RequestId(7), bench.now);
        bench.check(["7 Cancelled", "8 SequenceCancelled"]);
        bench.done(1);
        bench.check(["1: (9"]);
    }
}

#[test]
fn a_sequence_with_an_implicit_start_continues_without_a_cancelled_request() {
    for settings in [direct(), oldest(2)] {
        let mut bench = Bench::new(with(settings, |sequences| sequences.implicit_start = true), 1);
        bench.send(&["a", "a", "a", "a)"]);
        bench.check(["1: (1"]);
        bench.scheduler.cancel(RequestId(2), bench.now);
        bench.check(["2 Cancelled"]);
        bench.done(1);
        bench.check(["1: 3"]);
        // The last request: the end is reported to the instance.
        bench.scheduler.cancel(RequestId(4), bench.now);
        bench.check(["4 Cancelled"]);
        bench.done(1);
        assert_eq!(bench.actions().len(), 1, "the sequence has ended");
        // The first request: the next one starts the sequence.
        bench.send(&["b", "b"]);
        bench.check(["1: (5"]);
        bench.send(&["c", "c"]);
        bench.scheduler.cancel(RequestId(7), bench.now);
        bench.check(["7 Cancelled"]);
    }
}

#[test]
fn the_limit_of_a_sequence_counts_waiting_requests_with_both_strategies() {
    for settings in [direct(), oldest(4)] {
        let mut bench = Bench::new(with(settings, |sequences| sequences.max_queue = 1), 1);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
        // While the instance executes another sequence, the first request of this one waits like
        // any other.
        bench.send(&["(b", "b", "b"]);
        bench.check(["3 QueueFull", "4 QueueFull"]);
        bench.done(1);
        assert_eq!(bench.actions().len(), 1, "the first one executes");
        bench.send(&["b", "b"]);
        bench.check(["6 QueueFull"]);
    }
}
