//! The published state of an instance: written by its task, read by metrics, readiness checks and
//! schedulers; and what operators read about instances that do not run after a loss.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pharos::metrics::labels::InstanceState;
use pharos::supervisor::State;
use pharos::timeline::Instant;

use crate::scheduler::placement::Placement;
use crate::wire::SharedLink;

/// The state of an instance that the metrics show; none before its start and after its end.
#[derive(Default)]
pub(super) struct ReportedState(AtomicU8);

impl ReportedState {
    pub(super) fn get(&self) -> Option<InstanceState> {
        Self::decode(self.0.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, state: Option<InstanceState>) {
        self.0.store(Self::encode(state), Ordering::Relaxed);
    }

    /// Ends the state. Returns the last one.
    pub(super) fn take(&self) -> Option<InstanceState> {
        Self::decode(self.0.swap(Self::encode(None), Ordering::Relaxed))
    }

    fn encode(state: Option<InstanceState>) -> u8 {
        state.map_or(0, |state| state as u8 + 1)
    }

    fn decode(number: u8) -> Option<InstanceState> {
        InstanceState::ALL.get(usize::from(number.checked_sub(1)?)).copied()
    }
}

/// The published state of an instance.
#[derive(Default)]
pub(super) struct Health {
    /// The placement that the instance serves now. Locked only to copy or replace it.
    placement: Mutex<Arc<Placement>>,
    pub(super) ready: AtomicBool,
    /// Whether it counts as permanently lost: it is still restarted, but requests do not wait for
    /// it.
    pub(super) broken: AtomicBool,
    /// The state in the metrics: 0 for none, else the state's number plus one.
    pub(super) reported: ReportedState,
    /// The time of the first of several consecutive losses; 0 while it is not lost.
    pub(super) lost: AtomicU64,
    /// The first loss since the last healthy period; 0 before any loss.
    pub(super) first_loss: AtomicU64,
    /// The id of its process; 0 while it has none.
    pub(super) pid: AtomicU32,
    /// Whether it is loaded but kept out of scheduling, so that requests cannot wait for it.
    pub(super) passive: bool,
    /// The connection to its process while it is ready. Locked only to copy or replace it.
    link: Mutex<Option<SharedLink>>,
    /// Why it is not ready, if the cause is not its process. Locked only to copy or replace it.
    failure: Mutex<Option<String>>,
    /// The last loss, until the instance is ready again. Locked only to copy or change it.
    loss: Mutex<Option<Loss>>,
}

impl Health {
    pub(super) fn new(placement: &Placement) -> Self {
        Self {
            placement: Mutex::new(Arc::new(placement.clone())),
            passive: placement.passive,
            ..Self::default()
        }
    }

    pub(super) fn placement(&self) -> Arc<Placement> {
        self.placement.lock().clone()
    }

    /// Changes the placement that the instance serves. Its process gets the new name at its next
    /// start.
    pub(super) fn assign(&self, placement: Placement) {
        *self.placement.lock() = Arc::new(placement);
    }

    /// Returns the state of the instance; `None` after it has ended.
    pub(super) fn state(&self) -> Option<InstanceState> {
        self.reported.get()
    }

    /// Returns the time of the first of several consecutive losses; `None` while it is not lost.
    pub(super) fn lost(&self) -> Option<Instant> {
        Some(Instant(self.lost.load(Ordering::Relaxed))).filter(|since| since.0 != 0)
    }

    /// Returns since when requests have waited for it, if it is not ready after a loss.
    pub(super) fn waited_for(&self) -> Option<Instant> {
        let since =
            Some(Instant(self.first_loss.load(Ordering::Relaxed))).filter(|since| since.0 != 0);
        since.filter(|_| !self.ready.load(Ordering::Relaxed))
    }

    pub(super) fn set_link(&self, link: Option<SharedLink>) {
        *self.link.lock() = link;
    }

    /// Returns the connection to its process while it is ready.
    pub(super) fn link(&self) -> Option<SharedLink> {
        self.link.lock().clone()
    }

    pub(super) fn set_failure(&self, failure: Option<String>) {
        *self.failure.lock() = failure;
    }

    /// Returns why it is not ready, if known.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    pub(super) fn set_loss(&self, loss: Option<Loss>) {
        *self.loss.lock() = loss;
    }

    /// Sets its next start, if it has been lost.
    pub(super) fn set_next(&self, next: Next) {
        if let Some(loss) = &mut *self.loss.lock() {
            loss.next = next;
        }
    }

    /// Returns its last loss, if it has not been ready since.
    pub(super) fn loss(&self) -> Option<Loss> {
        self.loss.lock().clone()
    }

    /// Records that it is ready, with the connection to its process.
    pub(super) fn set_ready(&self, link: SharedLink) {
        self.set_link(Some(link));
        // First, so that requests also wait for it after its next loss.
        self.broken.store(false, Ordering::Relaxed);
        self.ready.store(true, Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
        self.set_failure(None);
        self.set_loss(None);
    }

    /// Returns whether it is ready or may become ready soon.
    pub(super) fn can_serve(&self) -> bool {
        !self.passive
            && (self.ready.load(Ordering::Relaxed) || !self.broken.load(Ordering::Relaxed))
    }
}

/// The last loss of an instance that has not been ready since, and when it is started again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Loss {
    pub(super) reason: String,
    pub(super) at: Instant,
    pub(super) next: Next,
}

/// The next start of an instance after a loss, the soonest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Next {
    /// The start has begun.
    Now,
    /// The instance is started at this time.
    At(Instant),
    /// The instance is started some time after the end of its process.
    AfterItsEnd,
    /// The instance is not started any more.
    Never,
}

impl Next {
    /// Returns the next start in this state after a loss.
    pub(super) fn of(state: State) -> Self {
        match state {
            State::Starting { .. } | State::Ready { .. } => Self::Now,
            State::Backoff { until } => Self::At(until),
            State::Lost => Self::AfterItsEnd,
            State::Failed | State::Stopping | State::Stopped => Self::Never,
        }
    }
}

/// The instances of a model version of which some do not run.
#[derive(Debug)]
pub(super) struct Outage {
    pub(super) running: usize,
    pub(super) total: usize,
    /// Of the instances that do not run, at least one.
    pub(super) losses: Vec<Loss>,
    pub(super) now: Instant,
}

impl fmt::Display for Outage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { running, total, losses, now } = self;
        write!(f, "{running} of {total} instances run")?;
        if let Some(last) = losses.iter().max_by_key(|loss| loss.at) {
            write!(f, "; last failure: {}", last.reason)?;
        }
        match losses.iter().map(|loss| loss.next).min() {
            Some(Next::Now) => f.write_str("; starting now"),
            Some(Next::At(time)) => {
                write!(f, "; next start in {:.1} s", left(time, *now).as_secs_f64())
            }
            Some(Next::AfterItsEnd) => {
                f.write_str("; next start after the end of the lost process")
            }
            Some(Next::Never) => f.write_str("; not started any more"),
            None => Ok(()),
        }
    }
}

/// Returns the time until `time`; zero if it has passed.
fn left(time: Instant, now: Instant) -> Duration {
    Duration::from_nanos(time.0.saturating_sub(now.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Instant {
        Instant(ms * 1_000_000)
    }

    fn loss(reason: &str, ms: u64, next: Next) -> Loss {
        Loss { reason: reason.to_owned(), at: at(ms), next }
    }

    #[test]
    fn names_the_last_failure_and_the_next_start() {
        let early = loss("no GPU", 100, Next::At(at(9_000)));
        let late = loss("signal 9", 200, Next::At(at(3_240)));
        for (running, losses, expected) in [
            (
                0,
                vec![early.clone(), late.clone()],
                "0 of 2 instances run; last failure: signal 9; next start in 2.2 s",
            ),
            (
                1,
                vec![early.clone()],
                "1 of 2 instances run; last failure: no GPU; next start in 8.0 s",
            ),
            (
                0,
                vec![loss("x", 1, Next::At(at(0)))],
                "0 of 2 instances run; last failure: x; next start in 0.0 s",
            ),
            (
                0,
                vec![early, loss("x", 1, Next::Now)],
                "0 of 2 instances run; last failure: no GPU; starting now",
            ),
            (
                0,
                vec![loss("x", 1, Next::Never), loss("y", 2, Next::AfterItsEnd)],
                "0 of 2 instances run; last failure: y; next start after the end of the lost \
                 process",
            ),
            (
                0,
                vec![loss("x", 1, Next::Never)],
                "0 of 2 instances run; last failure: x; not started any more",
            ),
        ] {
            let outage = Outage { running, total: 2, losses, now: at(1_000) };
            assert_eq!(outage.to_string(), expected);
        }
    }
}
