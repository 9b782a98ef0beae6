//! What is refused when it comes, or let in although it does not say that it begins.

use super::*;

#[test]
fn limits_refuse_on_arrival() {
    let limits = |sequences: &mut SequenceSettings| (sequences.max_backlog, sequences.max_queue) = (Some(1), 1);
    let mut bench = Bench::new(with(oldest(1), limits), 1);
    bench.send(&["(a"]);
    bench.check(["1: (1"]);
    bench.send(&["a", "a", "(b", "(c", "c"]);
    bench.check(["3 QueueFull", "5 QueueFull", "6 SequenceNotStarted"]);
    bench.done(1);
    bench.check(["1: 2"]);
}

#[test]
fn a_sequence_may_begin_unasked_and_be_refused_a_place() {
    let unasked = |sequences: &mut SequenceSettings| {
        (sequences.implicit_start, sequences.max_backlog) = (true, Some(0));
    };
    let mut bench = Bench::new(with(oldest(1), unasked), 1);
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
fn a_sequence_that_began_unasked_goes_on_without_a_request_that_is_cancelled() {
    for settings in [direct(), oldest(2)] {
        let mut bench = Bench::new(with(settings, |sequences| sequences.implicit_start = true), 1);
        bench.send(&["a", "a", "a", "a)"]);
        bench.check(["1: (1"]);
        bench.scheduler.cancel(RequestId(2), bench.now);
        bench.check(["2 Cancelled"]);
        bench.done(1);
        bench.check(["1: 3"]);
        // Its last one: the instance is told of the end.
        bench.scheduler.cancel(RequestId(4), bench.now);
        bench.check(["4 Cancelled"]);
        bench.done(1);
        assert_eq!(bench.actions().len(), 1, "the sequence is over");
        // Its first one: the next begins it.
        bench.send(&["b", "b"]);
        bench.check(["1: (5"]);
        bench.send(&["c", "c"]);
        bench.scheduler.cancel(RequestId(7), bench.now);
        bench.check(["7 Cancelled"]);
    }
}

#[test]
fn the_limit_of_a_sequence_counts_what_waits_by_either_strategy() {
    for settings in [direct(), oldest(4)] {
        let mut bench = Bench::new(with(settings, |sequences| sequences.max_queue = 1), 1);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
        // While the instance executes another sequence, the first request of this one waits like any other.
        bench.send(&["(b", "b", "b"]);
        bench.check(["3 QueueFull", "4 QueueFull"]);
        bench.done(1);
        assert_eq!(bench.actions().len(), 1, "the first one executes");
        bench.send(&["b", "b"]);
        bench.check(["6 QueueFull"]);
    }
}
