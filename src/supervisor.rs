//! The life of one instance: when its worker process is started, given up, and started again.
//!
//! ```text
//! Starting --ready--> Ready --exit, disconnect, execution timeout, lost device--> Lost --process gone--> Backoff --time--> Starting
//!    |                                                                ^
//!    |---- exit, load failure, start-up timeout: after it has once been ready -|
//!    `---- the same, before it has ever been ready, or past the retry window --> Failed
//! any --stop--> Stopping --process gone--> Stopped
//! ```
//!
//! An instance that has been ready once is restarted after each loss, with the pauses and for as long as
//! [`RestartPolicy`] allows. An instance that has never been ready has a model that does not load; this is reported and not
//! repeated. A second process is never started while the first lives: both could hold the same device memory.
//!
//! This module decides; the frontend's module of the same name owns the process and the clock. It performs what
//! [`Supervisor::poll_action`] returns until that is `None`, then waits for the next event or for
//! [`Supervisor::poll_timeout`]. Every [`Action::Spawn`] must be followed by exactly one [`Supervisor::exited`], also
//! when the process could not be started, and no other event of that process may be told after it. Events that make no
//! sense in the present state are ignored.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::timeline::Instant;

/// Time limits of one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// From the start of the process until it is ready; zero: no limit.
    pub start_timeout: Duration,
    /// For one batch; zero: no limit.
    pub execution_timeout: Duration,
    /// When a lost process is started again.
    pub restart: RestartPolicy,
}

/// When, and for how long, lost processes are started again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    /// The pauses before restarts.
    pub backoff: Backoff,
    /// After being ready for this long, the next loss counts as the first.
    pub healthy_after: Duration,
    /// No restart once this much time has passed since the first of consecutive losses; `None`: restarts never end.
    pub window: Option<Duration>,
}

/// The pauses after consecutive losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backoff {
    /// Doubles with each loss.
    Exponential {
        /// After the first loss.
        first: Duration,
        /// The longest pause.
        max: Duration,
    },
    /// Seconds after the first, second and further losses; the last entry repeats.
    Schedule(&'static [u64]),
}

impl Backoff {
    /// The pause after this number of consecutive losses (1 or more).
    fn after(self, losses: u32) -> Duration {
        let index = losses.saturating_sub(1);
        match self {
            Self::Exponential { first, max } => {
                first.saturating_mul(1u32.checked_shl(index).unwrap_or(u32::MAX)).min(max)
            }
            Self::Schedule(seconds) => {
                let pause = usize::try_from(index).ok().and_then(|index| seconds.get(index));
                Duration::from_secs(pause.or(seconds.last()).copied().unwrap_or(0))
            }
        }
    }
}

impl Default for Settings {
    /// Two minutes to start, no limit on execution, 0.1 s to 30 s of back-off, healthy after 60 s.
    fn default() -> Self {
        Self {
            start_timeout: Duration::from_secs(120),
            execution_timeout: Duration::ZERO,
            restart: RestartPolicy {
                backoff: Backoff::Exponential { first: Duration::from_millis(100), max: Duration::from_secs(30) },
                healthy_after: Duration::from_secs(60),
                window: None,
            },
        }
    }
}

/// Why a process was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// The worker said that it cannot load the model.
    LoadFailed(String),
    /// The process ended, or could not be started; the text says how.
    Exited(String),
    /// The connection closed or carried nonsense; the text says which.
    Disconnected(String),
    /// It was not ready within this time.
    StartTimeout(Duration),
    /// It did not finish a batch within this time.
    ExecutionTimeout(Duration),
    /// The device that it runs on is gone; the text says which, and how.
    DeviceLost(String),
    /// The instance is not wanted any more.
    Stopped,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LoadFailed(text) | Self::DeviceLost(text) => f.write_str(text),
            Self::Exited(text) => write!(f, "the worker process ended: {text}"),
            Self::Disconnected(text) => write!(f, "the connection to the worker process was lost: {text}"),
            Self::StartTimeout(limit) => {
                write!(f, "the worker process was not ready within {} s", limit.as_secs_f64())
            }
            Self::ExecutionTimeout(limit) => {
                write!(f, "the worker process did not finish a batch within {} s", limit.as_secs_f64())
            }
            Self::Stopped => f.write_str("the instance was stopped"),
        }
    }
}

/// Where an instance is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The process is to be started or loads its model.
    Starting {
        /// When it is given up; `None`: never.
        deadline: Option<Instant>,
    },
    /// It can execute.
    Ready {
        /// Since when.
        since: Instant,
    },
    /// It was given up and its process is not gone yet.
    Lost,
    /// The process is gone and the next one waits.
    Backoff {
        /// When it is started.
        until: Instant,
    },
    /// It could not load its model; nothing more happens.
    Failed,
    /// It is not wanted any more and its process is not gone yet.
    Stopping,
    /// It is not wanted any more and its process is gone; nothing more happens.
    Stopped,
}

/// What the owner of the process must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a process, then tell [`Supervisor::spawned`] (or [`Supervisor::exited`] if that failed).
    Spawn,
    /// End the process. For [`LossReason::Stopped`] it may be asked first; for the others it has shown that it does not
    /// listen.
    Kill {
        /// Why.
        reason: LossReason,
    },
    /// The instance can be given work.
    ReportReady,
    /// The instance, which had been reported ready, is gone with what was in flight there; it will be back. Or the
    /// attempt to bring it back failed, and there will be another.
    ReportLost {
        /// Why.
        reason: LossReason,
    },
    /// The instance could not load its model, or has kept dying, and will not be tried again.
    ReportFailed {
        /// Why.
        reason: LossReason,
    },
}

/// One instance. See the module.
#[derive(Debug)]
pub struct Supervisor {
    settings: Settings,
    state: State,
    actions: VecDeque<Action>,
    /// From the moment [`Action::Spawn`] is polled to [`Supervisor::exited`].
    process_lives: bool,
    was_ready: bool,
    /// Losses in a row, without a healthy time in between.
    losses: u32,
    /// When the first of them was.
    first_loss: Instant,
    restarts: u64,
    /// Batches in flight, and since when the oldest of them executes.
    executions: u32,
    execution_since: Instant,
}

impl Supervisor {
    /// An instance that is to be started now.
    pub fn new(settings: Settings, now: Instant) -> Self {
        let mut supervisor = Self {
            settings,
            state: State::Stopped,
            actions: VecDeque::new(),
            process_lives: false,
            was_ready: false,
            losses: 0,
            first_loss: now,
            restarts: 0,
            executions: 0,
            execution_since: now,
        };
        supervisor.start(now);
        supervisor
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        self.state
    }

    /// How often a process was started in place of a lost one.
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Losses in a row; one after a healthy time counts as the first. More than 1 is a crash loop.
    pub fn losses(&self) -> u32 {
        self.losses
    }

    /// When the first of the losses in a row was.
    pub fn first_loss(&self) -> Instant {
        self.first_loss
    }

    /// The process exists: its time to get ready counts from here.
    pub fn spawned(&mut self, now: Instant) {
        if matches!(self.state, State::Starting { .. }) {
            self.state = State::Starting { deadline: limit(now, self.settings.start_timeout) };
        }
    }

    /// The worker has loaded its model.
    pub fn ready(&mut self, now: Instant) {
        if self.is_loading() {
            self.state = State::Ready { since: now };
            self.was_ready = true;
            self.actions.push_back(Action::ReportReady);
        }
    }

    /// The worker cannot load its model; `reason` is its text.
    pub fn load_failed(&mut self, reason: impl Into<String>, now: Instant) {
        if self.is_loading() {
            self.give_up(LossReason::LoadFailed(reason.into()), now);
        }
    }

    /// The connection closed, or what came over it (or through the shared memory) is not what a worker sends.
    pub fn disconnected(&mut self, reason: impl Into<String>, now: Instant) {
        if self.is_loading() || matches!(self.state, State::Ready { .. }) {
            self.give_up(LossReason::Disconnected(reason.into()), now);
        }
    }

    /// The device that it runs on is gone: what runs there will not answer, or not rightly.
    pub fn device_lost(&mut self, reason: impl Into<String>, now: Instant) {
        if self.is_loading() || matches!(self.state, State::Ready { .. }) {
            self.give_up(LossReason::DeviceLost(reason.into()), now);
        }
    }

    /// The process is gone, or could not be started; `reason` says how, for example `killed by signal 9`.
    pub fn exited(&mut self, reason: impl Into<String>, now: Instant) {
        if !self.process_lives {
            return;
        }
        self.process_lives = false;
        match self.state {
            State::Starting { .. } | State::Ready { .. } => self.give_up(LossReason::Exited(reason.into()), now),
            State::Lost => self.back_off(now),
            State::Stopping => self.state = State::Stopped,
            State::Backoff { .. } | State::Failed | State::Stopped => {}
        }
    }

    /// A batch was sent to the worker. Batches run one after the other: the time of the first in flight counts.
    pub fn execution_started(&mut self, now: Instant) {
        if matches!(self.state, State::Ready { .. }) {
            if self.executions == 0 {
                self.execution_since = now;
            }
            self.executions += 1;
        }
    }

    /// The oldest batch in flight was answered; the next one, if any, executes from now on.
    pub fn execution_finished(&mut self, now: Instant) {
        self.executions = self.executions.saturating_sub(1);
        self.execution_since = now;
    }

    /// The instance is not wanted any more: its process is ended and nothing is reported. The caller drains first.
    pub fn stop(&mut self, _now: Instant) {
        self.actions.retain(|action| *action != Action::Spawn);
        let (next, reason) = match self.state {
            State::Failed | State::Stopping | State::Stopped => return,
            _ if !self.process_lives => (State::Stopped, None),
            // Killed already.
            State::Lost => (State::Stopping, None),
            _ => (State::Stopping, Some(LossReason::Stopped)),
        };
        self.state = next;
        self.actions.extend(reason.map(|reason| Action::Kill { reason }));
    }

    /// The time of [`Supervisor::poll_timeout`] has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|due| now < due) {
            return;
        }
        match self.state {
            State::Starting { .. } => self.give_up(LossReason::StartTimeout(self.settings.start_timeout), now),
            State::Ready { .. } => self.give_up(LossReason::ExecutionTimeout(self.settings.execution_timeout), now),
            State::Backoff { .. } => {
                self.restarts += 1;
                self.start(now);
            }
            State::Lost | State::Failed | State::Stopping | State::Stopped => {}
        }
    }

    /// When to call [`Supervisor::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Starting { deadline } => deadline,
            State::Ready { .. } if self.executions > 0 => limit(self.execution_since, self.settings.execution_timeout),
            State::Backoff { until } => Some(until),
            _ => None,
        }
    }

    /// The next thing to do; `None` when there is nothing until something happens.
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front()?;
        if action == Action::Spawn {
            self.process_lives = true;
        }
        Some(action)
    }

    /// Whether there is a process that is not ready yet.
    fn is_loading(&self) -> bool {
        matches!(self.state, State::Starting { .. }) && self.process_lives
    }

    /// Stopped or Backoff -> Starting.
    fn start(&mut self, now: Instant) {
        self.state = State::Starting { deadline: limit(now, self.settings.start_timeout) };
        self.actions.push_back(Action::Spawn);
    }

    /// Starting or Ready -> Failed, Lost or, if the process is gone, Backoff.
    fn give_up(&mut self, reason: LossReason, now: Instant) {
        let RestartPolicy { healthy_after, window, .. } = self.settings.restart;
        let healthy = matches!(self.state, State::Ready { since } if now - since >= healthy_after);
        self.losses = if healthy { 1 } else { self.losses.saturating_add(1) };
        if self.losses == 1 {
            self.first_loss = now;
        }
        self.executions = 0;
        // A process that was never started is none to wait for.
        self.actions.retain(|action| *action != Action::Spawn);
        if self.process_lives {
            self.actions.push_back(Action::Kill { reason: reason.clone() });
        }
        if !self.was_ready {
            self.state = State::Failed;
            self.actions.push_back(Action::ReportFailed { reason });
            return;
        }
        self.actions.push_back(Action::ReportLost { reason: reason.clone() });
        if window.is_some_and(|window| now - self.first_loss >= window) {
            self.state = State::Failed;
            self.actions.push_back(Action::ReportFailed { reason });
            return;
        }
        if self.process_lives {
            self.state = State::Lost;
        } else {
            self.back_off(now);
        }
    }

    /// Lost -> Backoff.
    fn back_off(&mut self, now: Instant) {
        self.state = State::Backoff { until: now + self.settings.restart.backoff.after(self.losses) };
    }
}

/// The end of a time limit; zero means none.
fn limit(from: Instant, limit: Duration) -> Option<Instant> {
    (!limit.is_zero()).then(|| from + limit)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: f64) -> Instant {
        Instant(0) + Duration::from_secs_f64(seconds)
    }

    fn settings() -> Settings {
        Settings {
            start_timeout: Duration::from_secs(10),
            execution_timeout: Duration::from_secs(5),
            ..Settings::default()
        }
    }

    fn actions(supervisor: &mut Supervisor) -> Vec<Action> {
        std::iter::from_fn(|| supervisor.poll_action()).collect()
    }

    fn exited() -> LossReason {
        LossReason::Exited("signal 9".into())
    }

    /// One that was started at 0 and became ready at 1 s.
    fn running() -> Supervisor {
        let mut supervisor = Supervisor::new(settings(), at(0.0));
        assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        supervisor.spawned(at(0.5));
        assert_eq!(supervisor.poll_timeout(), Some(at(10.5)), "the time to get ready counts from the spawn");
        supervisor.ready(at(1.0));
        assert_eq!(actions(&mut supervisor), [Action::ReportReady]);
        supervisor
    }

    #[test]
    fn a_ready_instance_waits_for_nothing() {
        let supervisor = running();
        assert_eq!(supervisor.state(), State::Ready { since: at(1.0) });
        assert_eq!(supervisor.poll_timeout(), None);
    }

    #[test]
    fn the_first_load_failure_is_final() {
        type Event = fn(&mut Supervisor);
        let cases: [(Event, LossReason, bool); 4] = [
            (|s| s.load_failed("no such file", at(1.0)), LossReason::LoadFailed("no such file".into()), true),
            (|s| s.exited("signal 9", at(1.0)), exited(), false),
            (|s| s.disconnected("closed", at(1.0)), LossReason::Disconnected("closed".into()), true),
            (|s| s.handle_timeout(at(10.0)), LossReason::StartTimeout(Duration::from_secs(10)), true),
        ];
        for (event, reason, kills) in cases {
            let mut supervisor = Supervisor::new(settings(), at(0.0));
            actions(&mut supervisor);
            event(&mut supervisor);
            let mut expected = Vec::new();
            expected.extend(kills.then(|| Action::Kill { reason: reason.clone() }));
            expected.push(Action::ReportFailed { reason });
            assert_eq!(actions(&mut supervisor), expected);
            supervisor.exited("killed", at(11.0));
            supervisor.ready(at(12.0));
            assert_eq!((supervisor.state(), supervisor.poll_timeout()), (State::Failed, None));
            assert_eq!(actions(&mut supervisor), []);
        }
    }

    #[test]
    fn an_exit_leads_through_back_off_to_a_new_process() {
        let mut supervisor = running();
        supervisor.exited("signal 9", at(2.0));
        assert_eq!(actions(&mut supervisor), [Action::ReportLost { reason: exited() }]);
        assert_eq!(supervisor.state(), State::Backoff { until: at(2.1) });
        supervisor.handle_timeout(at(2.09));
        assert_eq!(actions(&mut supervisor), [], "too early");
        supervisor.handle_timeout(at(2.1));
        assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        supervisor.ready(at(3.0));
        assert_eq!(actions(&mut supervisor), [Action::ReportReady]);
        assert_eq!((supervisor.restarts(), supervisor.losses()), (1, 1));
    }

    #[test]
    fn no_second_process_beside_one_that_still_lives() {
        let mut supervisor = running();
        supervisor.disconnected("bad frame", at(2.0));
        let reason = LossReason::Disconnected("bad frame".into());
        let expected = [Action::Kill { reason: reason.clone() }, Action::ReportLost { reason }];
        assert_eq!(actions(&mut supervisor), expected);
        assert_eq!((supervisor.state(), supervisor.poll_timeout()), (State::Lost, None));
        supervisor.handle_timeout(at(100.0));
        assert_eq!(actions(&mut supervisor), []);
        supervisor.exited("signal 9", at(101.0));
        assert_eq!(supervisor.poll_timeout(), Some(at(101.1)));
    }

    #[test]
    fn a_lost_device_costs_the_process_and_it_is_tried_again() {
        let mut supervisor = running();
        supervisor.device_lost("GPU 0 is lost", at(2.0));
        let reason = LossReason::DeviceLost("GPU 0 is lost".into());
        let expected = [Action::Kill { reason: reason.clone() }, Action::ReportLost { reason }];
        assert_eq!(actions(&mut supervisor), expected);
        supervisor.device_lost("GPU 0 is lost", at(2.1));
        assert_eq!(actions(&mut supervisor), []);
        supervisor.exited("killed", at(2.5));
        supervisor.handle_timeout(at(2.6));
        assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        // It is not there yet: nothing was started.
        supervisor.load_failed("GPU 0 cannot be used", at(2.7));
        supervisor.exited("it was not started", at(2.7));
        let reason = LossReason::LoadFailed("GPU 0 cannot be used".into());
        let expected = [Action::Kill { reason: reason.clone() }, Action::ReportLost { reason }];
        assert_eq!(actions(&mut supervisor), expected);
        assert_eq!((supervisor.losses(), supervisor.poll_timeout()), (2, Some(at(2.9))));
    }

    #[test]
    fn each_batch_has_its_own_execution_time() {
        let mut supervisor = running();
        supervisor.execution_started(at(10.0));
        supervisor.execution_started(at(11.0));
        assert_eq!(supervisor.poll_timeout(), Some(at(15.0)));
        supervisor.execution_finished(at(14.0));
        assert_eq!(supervisor.poll_timeout(), Some(at(19.0)), "the second starts when the first ends");
        supervisor.handle_timeout(at(15.0));
        assert_eq!(actions(&mut supervisor), []);
        supervisor.handle_timeout(at(19.0));
        let reason = LossReason::ExecutionTimeout(Duration::from_secs(5));
        let expected = [Action::Kill { reason: reason.clone() }, Action::ReportLost { reason }];
        assert_eq!(actions(&mut supervisor), expected);
        supervisor.exited("killed", at(20.0));
        supervisor.handle_timeout(at(20.1));
        actions(&mut supervisor);
        supervisor.ready(at(21.0));
        assert_eq!(supervisor.poll_timeout(), None, "the batches in flight were lost with the process");
        let mut idle = running();
        idle.execution_started(at(10.0));
        idle.execution_finished(at(11.0));
        assert_eq!(idle.poll_timeout(), None);
    }

    #[test]
    fn a_process_that_was_never_started_has_no_events() {
        let mut supervisor = Supervisor::new(settings(), at(0.0));
        supervisor.ready(at(1.0));
        supervisor.exited("signal 9", at(1.0));
        supervisor.disconnected("closed", at(1.0));
        supervisor.load_failed("bad", at(1.0));
        assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        let mut unpolled = Supervisor::new(settings(), at(0.0));
        unpolled.handle_timeout(at(10.0));
        let reason = LossReason::StartTimeout(Duration::from_secs(10));
        assert_eq!(actions(&mut unpolled), [Action::ReportFailed { reason }], "nothing to start or to kill any more");
    }

    #[test]
    fn zero_means_no_limit() {
        let unlimited =
            Settings { start_timeout: Duration::ZERO, execution_timeout: Duration::ZERO, ..Settings::default() };
        let mut supervisor = Supervisor::new(unlimited, at(0.0));
        actions(&mut supervisor);
        supervisor.spawned(at(0.0));
        assert_eq!(supervisor.poll_timeout(), None);
        supervisor.ready(at(1.0));
        supervisor.execution_started(at(2.0));
        assert_eq!(supervisor.poll_timeout(), None);
    }

    /// Loses the instance `lived` after it became ready and gives the pause before the next start.
    fn lose(supervisor: &mut Supervisor, now: &mut Instant, lived: f64) -> f64 {
        actions(supervisor);
        supervisor.ready(*now);
        *now = *now + Duration::from_secs_f64(lived);
        supervisor.exited("signal 9", *now);
        let until = supervisor.poll_timeout().unwrap();
        let pause = until - *now;
        *now = until;
        supervisor.handle_timeout(until);
        pause.as_secs_f64()
    }

    #[test]
    fn the_pause_doubles_up_to_its_limit_and_starts_again_after_a_healthy_time() {
        let mut supervisor = running();
        let mut now = at(1.0);
        let pauses: Vec<f64> = (0..11).map(|_| lose(&mut supervisor, &mut now, 1.0)).collect();
        assert_eq!(pauses, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]);
        assert_eq!(supervisor.losses(), 11);
        assert_eq!(lose(&mut supervisor, &mut now, 59.0), 30.0);
        assert_eq!(lose(&mut supervisor, &mut now, 60.0), 0.1);
        assert_eq!(lose(&mut supervisor, &mut now, 1.0), 0.2);
        (0..100).for_each(|_| assert!(lose(&mut supervisor, &mut now, 0.0) > 0.0));
        assert_eq!(lose(&mut supervisor, &mut now, 0.0), 30.0);
    }

    #[test]
    fn a_restart_that_does_not_load_is_tried_again() {
        let mut supervisor = running();
        supervisor.exited("signal 9", at(2.0));
        supervisor.handle_timeout(at(2.1));
        actions(&mut supervisor);
        supervisor.load_failed("out of memory", at(3.0));
        let reason = LossReason::LoadFailed("out of memory".into());
        let expected = [Action::Kill { reason: reason.clone() }, Action::ReportLost { reason }];
        assert_eq!(actions(&mut supervisor), expected);
        supervisor.exited("exit status 1", at(3.5));
        assert_eq!(supervisor.state(), State::Backoff { until: at(3.7) });
    }

    #[test]
    fn stopping_ends_the_process_once_and_for_good() {
        let stopped = Action::Kill { reason: LossReason::Stopped };
        let mut ready = running();
        ready.stop(at(2.0));
        ready.stop(at(2.0));
        assert_eq!((actions(&mut ready), ready.state()), (vec![stopped.clone()], State::Stopping));
        ready.exited("exit status 0", at(3.0));
        assert_eq!((actions(&mut ready), ready.state()), (vec![], State::Stopped));

        let mut unborn = Supervisor::new(settings(), at(0.0));
        unborn.stop(at(0.0));
        assert_eq!((actions(&mut unborn), unborn.state()), (vec![], State::Stopped));

        let mut starting = Supervisor::new(settings(), at(0.0));
        actions(&mut starting);
        starting.stop(at(1.0));
        assert_eq!((actions(&mut starting), starting.state()), (vec![stopped], State::Stopping));

        let mut waiting = running();
        waiting.exited("signal 9", at(2.0));
        actions(&mut waiting);
        waiting.stop(at(2.05));
        waiting.handle_timeout(at(3.0));
        assert_eq!((actions(&mut waiting), waiting.state()), (vec![], State::Stopped));

        let mut killed = running();
        killed.disconnected("closed", at(2.0));
        actions(&mut killed);
        killed.stop(at(2.5));
        assert_eq!((actions(&mut killed), killed.state()), (vec![], State::Stopping), "killed already");
    }

    #[test]
    fn reasons_read_as_sentences() {
        for (reason, text) in [
            (LossReason::LoadFailed("no such file".into()), "no such file"),
            (exited(), "the worker process ended: signal 9"),
            (LossReason::StartTimeout(Duration::from_millis(1500)), "the worker process was not ready within 1.5 s"),
        ] {
            assert_eq!(reason.to_string(), text);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever happens in whatever order: one process at a time, reports alternate, a killed process is one that
        /// lives, timeouts make progress, and after a stop all comes to rest.
        #[test]
        fn any_order_of_events_keeps_the_rules(events in prop::collection::vec((0..9u8, 0..40_000u64), 0..80)) {
            let supervisor = Supervisor::new(settings(), at(0.0));
            let mut world = World { supervisor, lives: false, ready: false, failed: false };
            let mut now = at(0.0);
            world.perform();
            for (event, pause_ms) in events {
                now = now + Duration::from_millis(pause_ms);
                world.happen(event, now);
                world.perform();
                world.time_passes(now);
            }
            world.supervisor.stop(now);
            world.ready = false;
            world.perform();
            world.supervisor.exited("killed", now);
            world.lives = false;
            world.perform();
            prop_assert!(matches!(world.supervisor.state(), State::Stopped | State::Failed));
            prop_assert_eq!(world.supervisor.poll_timeout(), None);
        }
    }

    struct World {
        supervisor: Supervisor,
        lives: bool,
        ready: bool,
        failed: bool,
    }

    impl World {
        fn happen(&mut self, event: u8, now: Instant) {
            match event {
                0 => self.supervisor.spawned(now),
                1 | 2 => self.supervisor.ready(now),
                3 => self.supervisor.load_failed("bad", now),
                4 => self.supervisor.disconnected("closed", now),
                5 | 6 => {
                    self.supervisor.exited("signal 9", now);
                    self.lives = false;
                }
                7 => self.supervisor.execution_started(now),
                _ => self.supervisor.execution_finished(now),
            }
        }

        fn time_passes(&mut self, now: Instant) {
            while let Some(due) = self.supervisor.poll_timeout().filter(|due| *due <= now) {
                self.supervisor.handle_timeout(due);
                self.perform();
                assert_ne!(self.supervisor.poll_timeout(), Some(due), "a timeout makes progress");
            }
        }

        fn perform(&mut self) {
            while let Some(action) = self.supervisor.poll_action() {
                assert!(!self.failed, "nothing after the failure: {action:?}");
                match action {
                    Action::Spawn => assert!(!std::mem::replace(&mut self.lives, true), "two processes"),
                    Action::Kill { .. } => assert!(self.lives, "nothing to kill"),
                    Action::ReportReady => assert!(!std::mem::replace(&mut self.ready, true), "ready twice"),
                    Action::ReportLost { .. } => self.ready = false,
                    Action::ReportFailed { .. } => {
                        assert!(!self.ready, "a ready instance is lost, not failed");
                        self.failed = true;
                    }
                }
            }
            assert_eq!(matches!(self.supervisor.state(), State::Ready { .. }), self.ready);
        }
    }

    #[test]
    fn a_schedule_gives_the_pauses_and_the_window_ends_the_restarts() {
        let window = Duration::from_secs(20);
        let backoff = Backoff::Schedule(&[1, 1, 2, 3, 5, 8]);
        let restart = RestartPolicy { backoff, healthy_after: Duration::ZERO, window: Some(window) };
        let settings = Settings { restart, ..settings() };
        let mut supervisor = Supervisor::new(settings, at(0.0));
        actions(&mut supervisor);
        supervisor.ready(at(1.0));
        actions(&mut supervisor);
        let mut now = at(10.0);
        let mut pauses = Vec::new();
        while supervisor.state() != State::Failed {
            supervisor.exited("signal 9", now);
            let told = actions(&mut supervisor);
            assert!(told.contains(&Action::ReportLost { reason: exited() }), "{told:?}");
            let Some(due) = supervisor.poll_timeout() else { break };
            pauses.push((due - now).as_secs());
            now = due;
            supervisor.handle_timeout(now);
            assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        }
        // 1 + 1 + 2 + 3 + 5 = 12 s after the first loss one more is allowed, 20 s after it none.
        assert_eq!((pauses, supervisor.poll_timeout()), (vec![1, 1, 2, 3, 5, 8], None));
        assert_eq!(now - at(10.0), window);
        let mut again = Supervisor::new(settings, at(0.0));
        for second in [1.0, 3.0, 5.0] {
            actions(&mut again);
            again.ready(at(second));
            actions(&mut again);
            again.exited("signal 9", at(second + 0.1));
            assert_eq!(again.poll_timeout(), Some(at(second + 1.1)), "it was ready: the pauses begin again");
            again.handle_timeout(at(second + 1.1));
        }
    }
}
