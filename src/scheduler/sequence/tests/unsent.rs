//! Batches that cannot be sent.

use super::*;

#[test]
fn a_batch_that_was_not_sent_ends_its_sequences() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "a", "(b)"]);
    bench.check(["1: (1 (3)"]);
    bench.scheduler.batch_unsent(ONE, bench.now);
    bench.check(["2 SequenceLost", "1 ended [1]", "1 ended [2]"]);
    bench.send(&["a", "(a"]);
    bench.check(["4 SequenceLost", "1: (5"]);
}

#[test]
fn the_state_of_a_sequence_ends_if_its_end_was_not_sent() {
    for settings in [direct(), oldest(4)] {
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
        bench.done(1);
        bench.send(&["a)"]);
        bench.check(["1: 2)"]);
        bench.scheduler.batch_unsent(ONE, bench.now);
        bench.check(["1 ended [1]"]);
        bench.send(&["(a", "a)"]);
        bench.check(["1: (3"]);
        bench.done(1);
        bench.check(["1: 4)"]);
        bench.done(1);
        bench.check([]);
    }
}
