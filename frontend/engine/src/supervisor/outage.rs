//! What operators read about instances that do not run after a loss.

use std::fmt;
use std::time::Duration;

use pharos::supervisor::State;
use pharos::timeline::Instant;

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
    /// It is being started.
    Now,
    /// It is started at this time.
    At(Instant),
    /// It is started some time after the end of its process.
    AfterItsEnd,
    /// It is not started any more.
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
            Some(Next::At(time)) => write!(f, "; next start in {:.1} s", left(time, *now).as_secs_f64()),
            Some(Next::AfterItsEnd) => f.write_str("; next start after the end of the lost process"),
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
        let (early, late) = (loss("no GPU", 100, Next::At(at(9_000))), loss("signal 9", 200, Next::At(at(3_240))));
        for (running, losses, expected) in [
            (0, vec![early.clone(), late.clone()], "0 of 2 instances run; last failure: signal 9; next start in 2.2 s"),
            (1, vec![early.clone()], "1 of 2 instances run; last failure: no GPU; next start in 8.0 s"),
            (0, vec![loss("x", 1, Next::At(at(0)))], "0 of 2 instances run; last failure: x; next start in 0.0 s"),
            (0, vec![early, loss("x", 1, Next::Now)], "0 of 2 instances run; last failure: no GPU; starting now"),
            (
                0,
                vec![loss("x", 1, Next::Never), loss("y", 2, Next::AfterItsEnd)],
                "0 of 2 instances run; last failure: y; next start after the end of the lost process",
            ),
            (0, vec![loss("x", 1, Next::Never)], "0 of 2 instances run; last failure: x; not started any more"),
        ] {
            let outage = Outage { running, total: 2, losses, now: at(1_000) };
            assert_eq!(outage.to_string(), expected);
        }
    }
}
