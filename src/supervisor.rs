//! The lifecycle of one instance: decides when its worker process is started, killed and restarted.
//!
//! ```text
//! Starting --ready--> Ready --exit, disconnect, execution timeout, lost device--> Lost --process gone--> Backoff --time--> Starting
//!    |                                                                ^
//!    |---- exit, load failure, start-up timeout: after it has once been ready -|
//!    `---- the same, before it has ever been ready, or past the retry window --> Failed
//! any --stop--> Stopping --process gone--> Stopped
//! ```
//!
//! An instance that has been ready once is restarted after each loss, as [`RestartPolicy`] defines.
//! An instance that has never been ready has a model that does not load; this is reported and not
//! retried. No process is started while the previous one lives: both could hold the same device
//! memory.
//!
//! This module decides; the frontend's module of the same name owns the process and the clock. It
//! performs the actions that [`Supervisor::poll_action`] returns until that returns `None`, then
//! waits for the next event or for [`Supervisor::poll_timeout`]. It must follow every
//! [`Action::Spawn`] with exactly one [`Supervisor::exited`], or [`Supervisor::not_started`] if the
//! process could not be started, and report no other event of that process afterwards. Unexpected
//! events are ignored.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use crate::timeline::Instant;

/// Time limits of one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The time from the start of the process until it is ready; zero: no limit.
    pub start_timeout: Duration,
    /// The time for one batch; zero: no limit.
    pub execution_timeout: Duration,
    /// The restarts of lost processes.
    pub restart: RestartPolicy,
}

/// When, and for how long, lost processes are restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    /// The pauses before restarts.
    pub backoff: Backoff,
    /// After an instance has been ready for this long, its next loss counts as the first.
    pub healthy_after: Duration,
    /// No restart after this much time has passed since the first of consecutive losses; `None`:
    /// no limit.
    pub window: Option<Duration>,
}

/// The pauses after consecutive losses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backoff {
    /// Doubles with each loss.
    Exponential {
        /// The pause after the first loss.
        first: Duration,
        /// The longest pause.
        max: Duration,
    },
    /// Pauses in seconds after the first, second and further losses; the last entry repeats.
    Schedule(&'static [u64]),
}

impl Backoff {
    /// Returns the pause after this number of consecutive losses (1 or more).
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
    /// Two minutes to start, no limit on execution, a backoff of 0.1 s to 30 s, healthy after 60 s.
    fn default() -> Self {
        Self {
            start_timeout: Duration::from_secs(120),
            execution_timeout: Duration::ZERO,
            restart: RestartPolicy {
                backoff: Backoff::Exponential {
                    first: Duration::from_millis(100),
                    max: Duration::from_secs(30),
                },
                healthy_after: Duration::from_secs(60),
                window: None,
            },
        }
    }
}

/// Why a process was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// The worker reported that it cannot load the model.
    LoadFailed(String),
    /// No process could be started; the text says why.
    NotStarted(String),
    /// The process ended; the text says how.
    Exited(String),
    /// The connection closed or carried invalid data; the text says which.
    Disconnected(String),
    /// The worker was not ready within this time.
    StartTimeout(Duration),
    /// The worker did not complete a batch within this time.
    ExecutionTimeout(Duration),
    /// The device of the instance is lost; the text says which and how.
    DeviceLost(String),
    /// The instance was stopped.
    Stopped,
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LoadFailed(text) | Self::DeviceLost(text) => f.write_str(text),
            Self::NotStarted(text) => write!(f, "the worker process could not be started: {text}"),
            Self::Exited(text) => write!(f, "the worker process ended: {text}"),
            Self::Disconnected(text) => {
                write!(f, "the connection to the worker process was lost: {text}")
            }
            Self::StartTimeout(limit) => {
                write!(f, "the worker process was not ready within {} s", limit.as_secs_f64())
            }
            Self::ExecutionTimeout(limit) => {
                write!(
                    f,
                    "the worker process did not complete a batch within {} s",
                    limit.as_secs_f64()
                )
            }
            Self::Stopped => f.write_str("the instance was stopped"),
        }
    }
}

/// The state of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The process is being started or loads its model.
    Starting {
        /// When to give it up; `None`: never.
        deadline: Option<Instant>,
    },
    /// The instance can execute batches.
    Ready {
        /// Since when.
        since: Instant,
    },
    /// The process was given up and has not exited yet.
    Lost,
    /// The process has exited and the next one is due later.
    Backoff {
        /// When the next process starts.
        until: Instant,
    },
    /// The instance could not load its model, or its restarts were exhausted. Final.
    Failed,
    /// The instance was stopped and its process has not exited yet.
    Stopping,
    /// The instance was stopped and its process has exited. Final.
    Stopped,
}

/// An action that the owner of the process must perform.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a process, then call [`Supervisor::spawned`], or [`Supervisor::not_started`] if the
    /// start failed.
    Spawn,
    /// End the process. With [`LossReason::Stopped`] it may first be asked to exit; with other
    /// reasons it no longer responds.
    Kill {
        /// The reason.
        reason: LossReason,
    },
    /// The instance accepts batches.
    ReportReady,
    /// An instance that was ready is lost with its batches in flight, or its restart failed. It
    /// will be restarted.
    ReportLost {
        /// The reason.
        reason: LossReason,
    },
    /// The instance could not load its model, or its restarts are exhausted. It will not be
    /// retried.
    ReportFailed {
        /// The reason.
        reason: LossReason,
    },
}

/// The state machine of one instance; the module documentation describes it.
#[derive(Debug)]
pub struct Supervisor {
    settings: Settings,
    state: State,
    actions: VecDeque<Action>,
    /// True from the moment [`Action::Spawn`] is polled to [`Supervisor::exited`].
    process_lives: bool,
    was_ready: bool,
    /// Consecutive losses, without a healthy time in between.
    losses: u32,
    /// The time of the first of them.
    first_loss: Instant,
    restarts: u64,
    /// Batches in flight, and the time since which the oldest of them executes.
    executions: u32,
    execution_since: Instant,
}

impl Supervisor {
    /// Creates an instance that starts now.
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

    /// Returns the current state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Returns the number of restarts after a loss.
    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    /// Returns the number of consecutive losses; a loss after a healthy time counts as the first.
    /// More than 1 is a crash loop.
    pub fn losses(&self) -> u32 {
        self.losses
    }

    /// Returns the time of the first consecutive loss.
    pub fn first_loss(&self) -> Instant {
        self.first_loss
    }

    /// Records that the process exists: the start-up time limit counts from here.
    pub fn spawned(&mut self, now: Instant) {
        if matches!(self.state, State::Starting { .. }) {
            self.state = State::Starting { deadline: limit(now, self.settings.start_timeout) };
        }
    }

    /// Records that the worker has loaded its model.
    pub fn ready(&mut self, now: Instant) {
        if self.is_loading() {
            self.state = State::Ready { since: now };
            self.was_ready = true;
            self.actions.push_back(Action::ReportReady);
        }
    }

    /// Records that the worker cannot load its model; `reason` is its text.
    pub fn load_failed(&mut self, reason: impl Into<String>, now: Instant) {
        if self.is_loading() {
            self.give_up(LossReason::LoadFailed(reason.into()), now);
        }
    }

    /// Records that the connection closed, or that the worker sent invalid data over it or through
    /// the shared memory.
    pub fn disconnected(&mut self, reason: impl Into<String>, now: Instant) {
        if self.is_loading() || matches!(self.state, State::Ready { .. }) {
            self.give_up(LossReason::Disconnected(reason.into()), now);
        }
    }

    /// Records that the device is lost: batches there will not complete, or not correctly.
    pub fn device_lost(&mut self, reason: impl Into<String>, now: Instant) {
        if self.is_loading() || matches!(self.state, State::Ready { .. }) {
            self.give_up(LossReason::DeviceLost(reason.into()), now);
        }
    }

    /// Records that the process exited; `reason` says how, for example `killed by signal 9`.
    pub fn exited(&mut self, reason: impl Into<String>, now: Instant) {
        self.ended(LossReason::Exited(reason.into()), now);
    }

    /// Records that the process could not be started.
    pub fn not_started(&mut self, reason: impl Into<String>, now: Instant) {
        self.ended(LossReason::NotStarted(reason.into()), now);
    }

    fn ended(&mut self, reason: LossReason, now: Instant) {
        if !self.process_lives {
            return;
        }
        self.process_lives = false;
        match self.state {
            State::Starting { .. } | State::Ready { .. } => self.give_up(reason, now),
            State::Lost => self.back_off(now),
            State::Stopping => self.state = State::Stopped,
            State::Backoff { .. } | State::Failed | State::Stopped => {}
        }
    }

    /// Records that a batch was sent to the worker. Batches execute one after the other: the oldest
    /// in flight is timed.
    pub fn execution_started(&mut self, now: Instant) {
        if matches!(self.state, State::Ready { .. }) {
            if self.executions == 0 {
                self.execution_since = now;
            }
            self.executions += 1;
        }
    }

    /// Records that the oldest batch in flight was answered; the next one, if any, executes from
    /// now on.
    pub fn execution_finished(&mut self, now: Instant) {
        self.executions = self.executions.saturating_sub(1);
        self.execution_since = now;
    }

    /// Stops the instance: its process is ended and nothing is reported. The caller drains first.
    pub fn stop(&mut self, _now: Instant) {
        self.actions.retain(|action| *action != Action::Spawn);
        let (next, reason) = match self.state {
            State::Failed | State::Stopping | State::Stopped => return,
            _ if !self.process_lives => (State::Stopped, None),
            // The kill was already requested.
            State::Lost => (State::Stopping, None),
            _ => (State::Stopping, Some(LossReason::Stopped)),
        };
        self.state = next;
        self.actions.extend(reason.map(|reason| Action::Kill { reason }));
    }

    /// Handles the timeout that [`Supervisor::poll_timeout`] announced.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.poll_timeout().is_none_or(|due| now < due) {
            return;
        }
        match self.state {
            State::Starting { .. } => {
                self.give_up(LossReason::StartTimeout(self.settings.start_timeout), now)
            }
            State::Ready { .. } => {
                self.give_up(LossReason::ExecutionTimeout(self.settings.execution_timeout), now)
            }
            State::Backoff { .. } => {
                self.restarts += 1;
                self.start(now);
            }
            State::Lost | State::Failed | State::Stopping | State::Stopped => {}
        }
    }

    /// Returns when to call [`Supervisor::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            State::Starting { deadline } => deadline,
            State::Ready { .. } if self.executions > 0 => {
                limit(self.execution_since, self.settings.execution_timeout)
            }
            State::Backoff { until } => Some(until),
            _ => None,
        }
    }

    /// Returns the next action; `None` until the next event if no action is pending.
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front()?;
        if action == Action::Spawn {
            self.process_lives = true;
        }
        Some(action)
    }

    /// Returns whether a process runs that is not ready yet.
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
        // A process that was never started has no exit to wait for.
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
        self.state =
            State::Backoff { until: now + self.settings.restart.backoff.after(self.losses) };
    }
}

/// Returns the end of a time limit; `None` if the limit is zero.
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

    /// Returns an instance that was started at 0 and became ready at 1 s.
    fn running() -> Supervisor {
        let mut supervisor = Supervisor::new(settings(), at(0.0));
        assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        supervisor.spawned(at(0.5));
        assert_eq!(
            supervisor.poll_timeout(),
            Some(at(10.5)),
            "the start-up limit counts from the spawn"
        );
        supervisor.ready(at(1.0));
        assert_eq!(actions(&mut supervisor), [Action::ReportReady]);
        supervisor
    }

    #[test]
    fn a_ready_instance_has_no_timeout() {
        let supervisor = running();
        assert_eq!(supervisor.state(), State::Ready { since: at(1.0) });
        assert_eq!(supervisor.poll_timeout(), None);
    }

    #[test]
    fn the_first_load_failure_is_final() {
        type Event = fn(&mut Supervisor);
        let cases: [(Event, LossReason, bool); 4] = [
            (
                |s| s.load_failed("no such file", at(1.0)),
                LossReason::LoadFailed("no such file".into()),
                true,
            ),
            (|s| s.exited("signal 9", at(1.0)), exited(), false),
            (
                |s| s.disconnected("closed", at(1.0)),
                LossReason::Disconnected("closed".into()),
                true,
            ),
            (
                |s| s.handle_timeout(at(10.0)),
                LossReason::StartTimeout(Duration::from_secs(10)),
                true,
            ),
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
    fn restarts_after_an_exit_and_a_backoff() {
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
    fn starts_no_process_while_the_previous_one_lives() {
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
    fn a_lost_device_kills_the_process_and_restarts_it() {
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
        // The device is not back yet, so no process was started.
        supervisor.load_failed("GPU 0 cannot be used", at(2.7));
        supervisor.exited("it was not started", at(2.7));
        let reason = LossReason::LoadFailed("GPU 0 cannot be used".into());
        let expected = [Action::Kill { reason: reason.clone() }, Action::ReportLost { reason }];
        assert_eq!(actions(&mut supervisor), expected);
        assert_eq!((supervisor.losses(), supervisor.poll_timeout()), (2, Some(at(2.9))));
    }

    #[test]
    fn the_execution_timeout_applies_to_each_batch() {
        let mut supervisor = running();
        supervisor.execution_started(at(10.0));
        supervisor.execution_started(at(11.0));
        assert_eq!(supervisor.poll_timeout(), Some(at(15.0)));
        supervisor.execution_finished(at(14.0));
        assert_eq!(
            supervisor.poll_timeout(),
            Some(at(19.0)),
            "the second batch starts when the first ends"
        );
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
        assert_eq!(
            supervisor.poll_timeout(),
            None,
            "the batches in flight were lost with the process"
        );
        let mut idle = running();
        idle.execution_started(at(10.0));
        idle.execution_finished(at(11.0));
        assert_eq!(idle.poll_timeout(), None);
    }

    #[test]
    fn ignores_events_before_the_process_is_started() {
        let mut supervisor = Supervisor::new(settings(), at(0.0));
        supervisor.ready(at(1.0));
        supervisor.exited("signal 9", at(1.0));
        supervisor.disconnected("closed", at(1.0));
        supervisor.load_failed("bad", at(1.0));
        assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        let mut unpolled = Supervisor::new(settings(), at(0.0));
        unpolled.handle_timeout(at(10.0));
        let reason = LossReason::StartTimeout(Duration::from_secs(10));
        assert_eq!(
            actions(&mut unpolled),
            [Action::ReportFailed { reason }],
            "no process to start or to kill"
        );
    }

    #[test]
    fn zero_means_no_limit() {
        let unlimited = Settings {
            start_timeout: Duration::ZERO,
            execution_timeout: Duration::ZERO,
            ..Settings::default()
        };
        let mut supervisor = Supervisor::new(unlimited, at(0.0));
        actions(&mut supervisor);
        supervisor.spawned(at(0.0));
        assert_eq!(supervisor.poll_timeout(), None);
        supervisor.ready(at(1.0));
        supervisor.execution_started(at(2.0));
        assert_eq!(supervisor.poll_timeout(), None);
    }

    /// Loses the instance `lived` seconds after it became ready and returns the pause before the
    /// next start.
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
    fn the_backoff_doubles_up_to_its_limit_and_resets_after_a_healthy_time() {
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
    fn retries_a_restart_that_failed_to_load() {
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
    fn stop_ends_the_process_once_without_a_restart() {
        let stopped = Action::Kill { reason: LossReason::Stopped };
        let mut ready = running();
        ready.stop(at(2.0));
        ready.stop(at(2.0));
        assert_eq!((actions(&mut ready), ready.state()), (vec![stopped.clone()], State::Stopping));
        ready.exited("exit status 0", at(3.0));
        assert_eq!((actions(&mut ready), ready.state()), (vec![], State::Stopped));

        let mut unpolled = Supervisor::new(settings(), at(0.0));
        unpolled.stop(at(0.0));
        assert_eq!((actions(&mut unpolled), unpolled.state()), (vec![], State::Stopped));

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
        assert_eq!(
            (actions(&mut killed), killed.state()),
            (vec![], State::Stopping),
            "killed already"
        );
    }

    #[test]
    fn loss_reasons_have_texts() {
        for (reason, text) in [
            (LossReason::LoadFailed("no such file".into()), "no such file"),
            (exited(), "the worker process ended: signal 9"),
            (
                LossReason::NotStarted("no memory".into()),
                "the worker process could not be started: no memory",
            ),
            (
                LossReason::StartTimeout(Duration::from_millis(1500)),
                "the worker process was not ready within 1.5 s",
            ),
        ] {
            assert_eq!(reason.to_string(), text);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        /// For any order of events: at most one process lives, reports alternate, only live
        /// processes are killed, timeouts make progress, and after a stop nothing is pending.
        #[test]
        fn invariants_hold_for_any_order_of_events(events in prop::collection::vec((0..9u8, 0..40_000u64), 0..80)) {
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
                assert!(!self.failed, "action after the failure: {action:?}");
                match action {
                    Action::Spawn => {
                        assert!(!std::mem::replace(&mut self.lives, true), "two processes")
                    }
                    Action::Kill { .. } => assert!(self.lives, "nothing to kill"),
                    Action::ReportReady => {
                        assert!(!std::mem::replace(&mut self.ready, true), "ready twice")
                    }
                    Action::ReportLost { .. } => self.ready = false,
                    Action::ReportFailed { .. } => {
                        assert!(!self.ready, "failed without being reported lost");
                        self.failed = true;
                    }
                }
            }
            assert_eq!(matches!(self.supervisor.state(), State::Ready { .. }), self.ready);
        }
    }

    #[test]
    fn restarts_follow_the_schedule_until_the_window_ends() {
        let window = Duration::from_secs(20);
        let backoff = Backoff::Schedule(&[1, 1, 2, 3, 5, 8]);
        let restart =
            RestartPolicy { backoff, healthy_after: Duration::ZERO, window: Some(window) };
        let settings = Settings { restart, ..settings() };
        let mut supervisor = Supervisor::new(settings, at(0.0));
        actions(&mut supervisor);
        supervisor.ready(at(1.0));
        actions(&mut supervisor);
        let mut now = at(10.0);
        let mut pauses = Vec::new();
        while supervisor.state() != State::Failed {
            supervisor.exited("signal 9", now);
            let performed = actions(&mut supervisor);
            assert!(performed.contains(&Action::ReportLost { reason: exited() }), "{performed:?}");
            let Some(due) = supervisor.poll_timeout() else { break };
            pauses.push((due - now).as_secs());
            now = due;
            supervisor.handle_timeout(now);
            assert_eq!(actions(&mut supervisor), [Action::Spawn]);
        }
        // 1 + 1 + 2 + 3 + 5 = 12 s after the first loss, one more restart is allowed; 20 s after
        // it, no more.
        assert_eq!((pauses, supervisor.poll_timeout()), (vec![1, 1, 2, 3, 5, 8], None));
        assert_eq!(now - at(10.0), window);
        let mut again = Supervisor::new(settings, at(0.0));
        for second in [1.0, 3.0, 5.0] {
            actions(&mut again);
            again.ready(at(second));
            actions(&mut again);
            again.exited("signal 9", at(second + 0.1));
            assert_eq!(
                again.poll_timeout(),
                Some(at(second + 1.1)),
                "the instance was ready, so the backoff starts over"
            );
            again.handle_timeout(at(second + 1.1));
        }
    }
}
