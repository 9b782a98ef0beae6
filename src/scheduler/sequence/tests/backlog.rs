//! Cancelled requests, mostly of sequences in the backlog.

use super::*;

/// With one slot: implicit starts, and overlapping requests with and without implicit starts.
fn kept_after_cancellation() -> [(Settings, bool); 3] {
    let overlapping = |implicit| {
        with(oldest(1), |sequences| {
            (sequences.iterative, sequences.overlapping, sequences.implicit_start) =
                (true, true, implicit);
        })
    };
    let implicit = with(oldest(1), |sequences| sequences.implicit_start = true);
    [(implicit, true), (overlapping(true), true), (overlapping(false), false)]
}

impl Bench {
    /// Lets `a` have the only slot, and cancels the only request of `b`, which waits for it.
    fn with_empty_backlog(settings: Settings) -> Self {
        let mut bench = Self::new(settings, 1);
        bench.send_with("(a", 0);
        bench.check(["1: (1"]);
        bench.send_with("(b", 10);
        bench.scheduler.cancel(RequestId(2), bench.now);
        bench.check(["2 Cancelled"]);
        bench
    }

    fn backlogged(&self) -> usize {
        self.scheduler.sequences().unwrap().backlogged
    }

    /// Lets time pass until the scheduler has nothing to wait for.
    fn wait(&mut self) {
        while let Some(at) = self.scheduler.poll_timeout() {
            self.now = at;
            self.scheduler.handle_timeout(at);
            self.actions();
        }
    }
}

#[test]
fn a_sequence_without_requests_holds_a_slot_no_longer_than_its_idle_time() {
    for (settings, implicit) in kept_after_cancellation() {
        let mut bench = Bench::with_empty_backlog(settings);
        assert_eq!(bench.backlogged(), usize::from(!implicit));
        bench.scheduler.end_sequence(&CorrelationId::String("a".to_owned()), bench.now);
        bench.done(1);
        bench.actions();
        assert_eq!(
            bench.scheduler.sequences().unwrap().slots_used,
            usize::from(!implicit),
            "START is remembered"
        );
        bench.wait();
        assert_eq!(bench.scheduler.sequences().unwrap().slots_used, 0);
        bench.send(&["(c"]);
        bench.check(["1: (3"]);
    }
}

#[test]
fn a_later_request_without_a_timeout_waits_for_a_slot() {
    for (settings, _) in kept_after_cancellation() {
        let mut bench = Bench::with_empty_backlog(settings);
        bench.at(IDLE / 2);
        bench.send(&["b"]);
        bench.at(3 * IDLE);
        bench.check([]);
        bench.scheduler.end_sequence(&CorrelationId::String("a".to_owned()), bench.now);
        bench.done(1);
        assert_eq!(bench.actions().last().unwrap(), "1: (3");
    }
}

#[test]
fn a_sequence_that_was_only_begun_is_idle_in_the_backlog_too() {
    let [.., (settings, _)] = kept_after_cancellation();
    let mut bench = Bench::with_empty_backlog(settings);
    bench.at(IDLE);
    assert_eq!((bench.backlogged(), bench.scheduler.sequences().unwrap().idle_evicted), (0, 1));
    bench.send(&["b"]);
    bench.check(["3 SequenceNotStarted"]);
}

#[test]
fn the_timeout_of_a_cancelled_request_does_not_hold_for_others() {
    let started = (oldest(1), false);
    for (settings, _) in kept_after_cancellation().into_iter().chain([started]) {
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
        bench.send_with("(b", 30);
        bench.send_with("b", 20);
        bench.scheduler.cancel(RequestId(3), bench.now);
        bench.check(["3 Cancelled"]);
        bench.at(20);
        bench.check([]);
        bench.at(30);
        bench.check(["2 SequenceTimeout"]);
    }
}

#[test]
fn requests_before_a_cancelled_one_are_executed() {
    for settings in [direct(), oldest(1)] {
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a", "a", "a", "a"]);
        bench.check(["1: (1"]);
        bench.scheduler.cancel(RequestId(3), bench.now);
        bench.check(["3 Cancelled", "4 SequenceCancelled"]);
        bench.done(1);
        bench.check(["1: 2"]);
        bench.done(1);
        bench.check(["1 ended [1]"]);
    }
}
