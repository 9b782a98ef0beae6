//! Tests of single decisions. `world` tests invariants of random runs.
#![allow(clippy::unwrap_used, clippy::panic)]

mod backlog;
mod limits;
mod overlap;
mod unsent;
mod world;

use super::*;
use crate::scheduler::create;
use crate::timeline::SendReason;

const ONE: InstanceId = InstanceId(1);
const IDLE: u64 = 1000;

fn direct() -> Settings {
    settings(4, SequenceStrategy::Direct { minimum_slot_utilization: 0.0 })
}

fn oldest(max_candidate_sequences: u32) -> Settings {
    settings(4, SequenceStrategy::Oldest { max_candidate_sequences })
}

fn settings(max_batch_size: u32, strategy: SequenceStrategy) -> Settings {
    let sequences = SequenceSettings {
        strategy,
        max_idle_us: IDLE,
        iterative: false,
        overlapping: false,
        max_backlog: None,
        max_queue: 0,
        implicit_start: false,
        backlog_hold: 0,
    };
    Settings { max_batch_size, sequence: Some(sequences), ..Settings::default() }
}

fn with(mut settings: Settings, change: impl FnOnce(&mut SequenceSettings)) -> Settings {
    change(settings.sequence.as_mut().unwrap());
    settings
}

/// A scheduler and the current time.
struct Bench {
    scheduler: Box<dyn Scheduler>,
    now: Instant,
    next: u64,
}

impl Bench {
    fn new(settings: Settings, instances: u32) -> Self {
        let mut scheduler = create(settings);
        (1..=instances).for_each(|id| scheduler.instance_ready(InstanceId(id), Instant(0)));
        Self { scheduler, now: Instant(0), next: 0 }
    }

    /// Enqueues requests: each is the letter of its sequence with `(` for START, `)` for END, and
    /// `'` for another shape.
    fn send(&mut self, requests: &[&str]) {
        requests.iter().for_each(|text| self.send_with(text, 0));
    }

    fn send_with(&mut self, text: &str, timeout_us: u64) {
        self.next += 1;
        let name = text.trim_matches(['(', ')', '\'']);
        let start = text.starts_with('(');
        let end = text.contains(')');
        let shape_key = u64::from(text.contains('\''));
        let sequence = Some(InSequence { id: CorrelationId::String(name.to_owned()), start, end });
        let request = RequestId(self.next);
        let ticket =
            Ticket { request, batch_size: 1, shape_key, timeout_us, sequence, ..Ticket::default() };
        self.scheduler.enqueue(ticket, self.now);
    }

    /// Returns the actions that are due now, as text.
    fn actions(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.scheduler.poll_action(self.now))
            .map(|action| match action {
                Action::ExecuteSteps { instance, slots, reason } => {
                    let slots: Vec<String> = slots
                        .into_iter()
                        .map(|slot| match slot {
                            None => "-".to_owned(),
                            Some(SlotStep { request, start, end, .. }) => {
                                format!(
                                    "{}{}{}",
                                    if start { "(" } else { "" },
                                    request.0,
                                    if end { ")" } else { "" }
                                )
                            }
                        })
                        .collect();
                    let reason = if reason == SendReason::Idle {
                        String::new()
                    } else {
                        format!(" {}", reason.as_str())
                    };
                    format!("{}: {}{reason}", instance.0, slots.join(" "))
                }
                Action::Reject { request, reason } => format!("{} {reason:?}", request.0),
                Action::SequenceRestarted { request } => format!("{} restarts", request.0),
                Action::SequencesEnded { instance, keys } => {
                    format!("{} ended {keys:?}", instance.0)
                }
                other => format!("{other:?}"),
            })
            .collect()
    }

    fn check<const N: usize>(&mut self, expected: [&str; N]) {
        assert_eq!(self.actions(), expected);
    }

    fn done(&mut self, instance: u32) {
        self.scheduler.batch_done(InstanceId(instance), self.now);
    }

    fn at(&mut self, us: u64) {
        self.now = Instant(us * 1000);
        self.scheduler.handle_timeout(self.now);
    }
}

#[test]
fn a_batch_extends_to_the_last_slot_with_a_waiting_request() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "(b", "(c"]);
    bench.check(["1: (1 (2 (3"]);
    bench.send(&["c", "c)", "a"]);
    bench.check([]);
    bench.done(1);
    bench.check(["1: 6 - 4"]);
    bench.done(1);
    bench.check(["1: - - 5)"]);
}

#[test]
fn another_shape_is_padding_until_it_is_first() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "(b'", "(c"]);
    bench.check(["1: (1 - (3 shape"]);
    bench.done(1);
    bench.check(["1: - (2"]);
}

#[test]
fn a_busy_sequence_does_not_stop_those_of_other_shapes() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a"]);
    bench.check(["1: (1"]);
    bench.at(1);
    bench.send(&["a", "a", "(b'", "b'", "(c"]);
    for (ended, next) in
        [(2, "1: - (4 - shape"), (3, "1: 2 - (6 shape"), (4, "1: - 5 shape"), (5, "1: 3")]
    {
        bench.at(ended);
        bench.done(1);
        bench.check([next]);
    }
}

#[test]
fn a_free_slot_goes_to_the_backlog_in_order() {
    let mut bench =
        Bench::new(settings(1, SequenceStrategy::Direct { minimum_slot_utilization: 0.0 }), 1);
    bench.send(&["(a", "(b", "b)", "(c)", "a)"]);
    bench.check(["1: (1 full"]);
    bench.done(1);
    bench.check(["1: 5) full"]);
    bench.done(1);
    bench.check(["1: (2 full"]);
    bench.done(1);
    bench.check(["1: 3) full"]);
    bench.done(1);
    bench.check(["1: (4) full"]);
}

#[test]
fn instances_fill_evenly_and_keep_their_sequences() {
    let mut bench = Bench::new(direct(), 2);
    bench.send(&["(a", "(b", "(c"]);
    bench.check(["1: (1 (3", "2: (2"]);
    bench.send(&["a", "b"]);
    bench.done(2);
    bench.check(["2: 5"]);
    bench.done(1);
    bench.check(["1: 4"]);
}

#[test]
fn a_closing_instance_keeps_its_sequences_and_gets_no_others() {
    for settings in [direct(), oldest(4)] {
        let mut bench = Bench::new(settings, 1);
        bench.send(&["(a"]);
        bench.actions();
        bench.done(1);
        bench.scheduler.instance_closing(ONE, bench.now);
        bench.send(&["(b", "a"]);
        bench.check(["1: 3"]);
        bench.done(1);
        bench.send(&["a)"]);
        bench.actions();
        bench.done(1);
        assert!(!bench.scheduler.has_sequences_on(ONE));
        assert_eq!((bench.actions().len(), bench.scheduler.queued()), (0, 1));
        bench.scheduler.instance_lost(ONE, bench.now);
        bench.scheduler.instance_ready(InstanceId(2), bench.now);
        bench.check(["2: (2"]);
    }
}

#[test]
fn requests_that_wait_too_long_for_an_instance_are_rejected_with_their_sequence() {
    let mut bench = Bench::new(direct(), 0);
    bench.send(&["(a"]);
    bench.at(5);
    bench.send(&["a", "(b"]);
    bench.scheduler.reject_queued_before(Instant(3000), RejectReason::NotRestarted, bench.now);
    bench.check(["1 NotRestarted", "2 NotRestarted"]);
    bench.scheduler.instance_ready(ONE, bench.now);
    bench.check(["1: (3"]);
}

#[test]
fn an_id_may_begin_again_when_its_end_is_queued() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "a)", "a", "(a"]);
    bench.check(["3 SequenceNotStarted", "1: (1 (4"]);
    bench.done(1);
    bench.check(["1: 2)"]);
}

#[test]
fn start_of_an_active_id_continues_in_its_slot_as_another_sequence() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "a", "(a", "a)"]);
    bench.check(["3 restarts", "1: (1"]);
    assert_eq!(bench.scheduler.sequences().unwrap().restarts, 1);
    bench.done(1);
    bench.check(["1: 2"]);
    bench.done(1);
    bench.check(["1 ended [1]", "1: (3"]);
    bench.done(1);
    bench.check(["1: 4)"]);
    bench.done(1);
    bench.check([]);
    assert_eq!(bench.scheduler.sequences().unwrap().slots_used, 0);
}

#[test]
fn a_cancelled_request_ends_its_sequence() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "a", "a", "(b"]);
    bench.check(["1: (1 (4"]);
    bench.scheduler.cancel(RequestId(2), bench.now);
    bench.check(["2 Cancelled", "3 SequenceCancelled"]);
    bench.send(&["a"]);
    bench.check(["5 SequenceNotStarted"]);
    assert_eq!(
        bench.scheduler.sequences().unwrap().slots_used,
        2,
        "its first request still executes"
    );
    bench.done(1);
    bench.check(["1 ended [1]"]);
    assert_eq!(bench.scheduler.sequences().unwrap().slots_used, 1);
    bench.scheduler.cancel(RequestId(3), bench.now);
    bench.check([]);
}

#[test]
fn an_idle_sequence_loses_its_slot() {
    let mut bench =
        Bench::new(settings(1, SequenceStrategy::Direct { minimum_slot_utilization: 0.0 }), 1);
    bench.send(&["(a", "(b"]);
    bench.check(["1: (1 full"]);
    bench.at(IDLE * 3);
    bench.check([]);
    bench.done(1);
    bench.check([]);
    assert_eq!(
        bench.scheduler.poll_timeout(),
        Some(Instant(IDLE * 4000)),
        "the idle time starts with the last answer"
    );
    bench.at(IDLE * 4);
    bench.check(["1 ended [1]", "1: (2 full"]);
    bench.send(&["a"]);
    bench.check(["3 SequenceNotStarted"]);
    let counts = bench.scheduler.sequences().unwrap();
    assert_eq!((counts.idle_evicted, counts.start_errors), (1, 1));
}

#[test]
fn a_timeout_holds_in_the_backlog_only() {
    let mut bench = Bench::new(oldest(1), 1);
    bench.send_with("(a", 10);
    bench.check(["1: (1"]);
    bench.send_with("(b", 30);
    bench.send_with("b", 20);
    bench.send_with("a", 10);
    bench.check([]);
    assert_eq!(bench.scheduler.poll_timeout(), Some(Instant(20_000)));
    bench.at(20);
    bench.check(["2 SequenceTimeout", "3 SequenceTimeout"]);
    bench.send(&["b"]);
    bench.check(["5 SequenceNotStarted"]);
    bench.done(1);
    bench.check(["1: 4"]);
}

#[test]
fn sequences_of_a_lost_instance_are_never_continued() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a", "a", "(b", "b)"]);
    bench.check(["1: (1 (3"]);
    bench.scheduler.instance_lost(ONE, bench.now);
    bench.check(["2 SequenceLost", "4 SequenceLost"]);
    bench.send(&["a", "b"]);
    bench.check(["5 SequenceLost", "6 SequenceNotStarted"]);
    bench.scheduler.instance_ready(ONE, bench.now);
    bench.send(&["a", "(a", "a"]);
    bench.check(["7 SequenceLost", "1: (8"]);
    bench.scheduler.instance_lost(ONE, bench.now);
    bench.check(["9 SequenceLost"]);
    bench.at(IDLE);
    bench.send(&["a"]);
    bench.check(["10 SequenceNotStarted"]);
}

#[test]
fn direct_waits_only_with_both_settings() {
    let waiting = |delay, utilization| {
        let strategy = SequenceStrategy::Direct { minimum_slot_utilization: utilization };
        Bench::new(Settings { max_queue_delay_us: delay, ..settings(4, strategy) }, 1)
    };
    for (delay, utilization) in [(0, 0.5), (50, 0.0)] {
        let mut bench = waiting(delay, utilization);
        bench.send(&["(a"]);
        bench.check(["1: (1"]);
    }
    let mut bench = waiting(50, 0.5);
    bench.send(&["(a"]);
    bench.check([]);
    assert_eq!(bench.scheduler.poll_timeout(), Some(Instant(50_000)));
    bench.send(&["(b"]);
    bench.check(["1: (1 (2 preferred"]);
    bench.done(1);
    bench.send(&["a"]);
    bench.check([]);
    bench.at(50);
    bench.check(["1: 3 delay"]);
    bench.done(1);
    bench.send(&["a"]);
    bench.scheduler.stop(bench.now);
    bench.check(["1: 4 drain"]);
}

#[test]
fn oldest_has_one_request_of_a_sequence_in_a_batch() {
    let mut bench = Bench::new(oldest(4), 1);
    bench.send(&["(a"]);
    bench.check(["1: (1"]);
    bench.send(&["a", "(b", "b", "a)", "(c)"]);
    bench.done(1);
    bench.check(["1: (3 (6) 2"]);
    bench.done(1);
    bench.check(["1: 4 5)"]);
}

#[test]
fn oldest_frees_the_slot_when_the_end_is_done() {
    let mut bench = Bench::new(oldest(1), 1);
    bench.send(&["(a", "a)", "(b)", "(c"]);
    for batch in ["1: (1", "1: 2)", "1: (3)", "1: (4"] {
        bench.check([batch]);
        bench.done(1);
    }
}

#[test]
fn restarts_are_not_reported_after_end_or_for_iterative_requests() {
    for settings in [direct(), oldest(4)] {
        let mut bench = Bench::new(settings.clone(), 1);
        bench.send(&["(a)", "(a", "a)", "(a)"]);
        let restarts = |actions: Vec<String>| {
            actions.iter().filter(|action| action.contains("restarts")).count()
        };
        assert_eq!(restarts(bench.actions()), 0, "after END the id belongs to another sequence");
        let mut bench = Bench::new(with(settings, |sequences| sequences.iterative = true), 1);
        bench.send(&["(a", "(a", "(a)"]);
        assert_eq!(restarts(bench.actions()), 0, "each iterative request is a separate sequence");
    }
}

#[test]
fn a_lost_iterative_request_has_a_separate_error() {
    for settings in [direct(), oldest(4)] {
        let mut bench = Bench::new(with(settings, |sequences| sequences.iterative = true), 1);
        bench.send(&["(a)"]);
        bench.check(["1: (1"]);
        bench.send(&["(b)"]);
        bench.scheduler.instance_lost(ONE, bench.now);
        bench.check(["2 RequestLost"]);
    }
    let error = RejectReason::RequestLost.error("m", &CorrelationId::default());
    assert_eq!(
        (error.code, error.reason),
        (crate::error::ErrorCode::Unavailable, crate::error::Reason::InstanceLost)
    );
    assert!(
        error.message.contains("'m'") && error.message.ends_with("can be sent again"),
        "{}",
        error.message
    );
}

#[test]
fn a_running_sequence_may_finish_while_stopping() {
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a"]);
    bench.check(["1: (1"]);
    bench.scheduler.stop(bench.now);
    bench.send(&["(b", "a)"]);
    bench.done(1);
    bench.check(["2 Stopping", "1: 3) drain"]);
}

#[test]
fn holds_count_waiting_requests() {
    for strategy in [
        SequenceStrategy::Direct { minimum_slot_utilization: 0.0 },
        SequenceStrategy::Oldest { max_candidate_sequences: 2 },
    ] {
        let held = Settings { delay_scheduler: Some(2), ..settings(2, strategy) };
        let mut bench = Bench::new(with(held, |sequences| sequences.backlog_hold = 1), 1);
        bench.send(&["(a", "(b"]);
        bench.check([]);
        bench.send(&["(c"]);
        bench.check(["1: (1 (2 full"]);
    }
}

#[test]
fn an_iterative_request_runs_until_it_is_not_rescheduled() {
    for settings in [direct(), oldest(2)] {
        let mut bench = Bench::new(with(settings, |sequences| sequences.iterative = true), 1);
        bench.send(&["(a)"]);
        bench.check(["1: (1"]);
        assert!(bench.scheduler.reschedule(RequestId(1), false));
        bench.done(1);
        bench.check(["1: 1"]);
        bench.done(1);
        bench.check(["1 ended [1]"]);
        assert!(!bench.scheduler.reschedule(RequestId(1), false));
        assert_eq!(bench.scheduler.sequences().unwrap().active, 0);
    }
    let mut bench = Bench::new(direct(), 1);
    bench.send(&["(a"]);
    bench.check(["1: (1"]);
    assert!(
        !bench.scheduler.reschedule(RequestId(1), false),
        "only iterative sequences can be rescheduled"
    );
}

#[test]
fn a_held_request_waits_while_others_continue() {
    let mut waits = settings(4, SequenceStrategy::Direct { minimum_slot_utilization: 0.25 });
    waits.max_queue_delay_us = 1000;
    for (settings, other, reason) in
        [(direct(), "- 2", ""), (waits, "- 2", " preferred"), (oldest(2), "2", "")]
    {
        let mut bench = Bench::new(with(settings, |sequences| sequences.iterative = true), 1);
        let check = |bench: &mut Bench, slots: &str| {
            assert_eq!(bench.actions(), [format!("1: {slots}{reason}")])
        };
        bench.send(&["(a)", "(b)"]);
        check(&mut bench, "(1 (2");
        assert!(bench.scheduler.reschedule(RequestId(1), true));
        assert!(bench.scheduler.reschedule(RequestId(2), false));
        bench.done(1);
        check(&mut bench, other);
        bench.done(1);
        bench.check(["1 ended [2]"]);
        assert_eq!(bench.scheduler.poll_timeout(), None, "no batch is sent without an event");
        bench.at(5 * IDLE);
        bench.check([]);
        bench.scheduler.resume(RequestId(1));
        bench.scheduler.resume(RequestId(2));
        check(&mut bench, "1");
        assert!(bench.scheduler.reschedule(RequestId(1), true));
        bench.done(1);
        bench.check([]);
        bench.scheduler.cancel(RequestId(1), bench.now);
        bench.check(["1 Cancelled", "1 ended [1]"]);
        assert_eq!(bench.scheduler.sequences().unwrap().active, 0);
    }
}

#[test]
fn with_the_rate_limiter_a_batch_waits_for_its_resources() {
    for limited in [direct(), oldest(2)] {
        let mut bench = Bench::new(Settings { rate_limited: true, ..limited }, 1);
        bench.send(&["(a"]);
        bench.check(["Acquire { instance: InstanceId(1) }"]);
        bench.send(&["(b"]);
        bench.scheduler.resources_granted(ONE, bench.now);
        bench.check(["1: (1 (2"]);
        bench.done(1);
        bench.check(["Release { instance: InstanceId(1) }"]);
        bench.send(&["a"]);
        bench.check(["Acquire { instance: InstanceId(1) }"]);
        bench.scheduler.cancel(RequestId(3), bench.now);
        bench.check(["3 Cancelled", "1 ended [1]", "Withdraw { instance: InstanceId(1) }"]);
        bench.send(&["b"]);
        bench.check(["Acquire { instance: InstanceId(1) }"]);
        bench.scheduler.instance_lost(ONE, bench.now);
        bench.check(["Withdraw { instance: InstanceId(1) }", "4 SequenceLost"]);
    }
}

#[test]
fn without_instances_all_requests_are_answered() {
    let mut bench = Bench::new(oldest(1), 1);
    bench.send(&["(a", "a", "(b", "b"]);
    bench.check(["1: (1"]);
    bench.scheduler.instance_lost(ONE, bench.now);
    bench.scheduler.reject_all(RejectReason::NoInstance, bench.now);
    bench.check(["2 SequenceLost", "3 NoInstance", "4 NoInstance"]);
    assert_eq!(bench.scheduler.queued(), 0);
}
