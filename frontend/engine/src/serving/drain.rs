//! Shutdown of all models: finishes what has begun, then ends the workers.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use pharos::timeline::Instant;
use pharos_os::clock;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::retire::Retired;
use super::{Executor, ModelTable};

/// The time limit for killed workers to exit.
const KILLED: Duration = Duration::from_secs(1);

/// Work that was not finished in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfinished {
    /// Requests without a response of the model.
    pub requests: usize,
    /// Sequences that had started and not ended.
    pub sequences: usize,
}

impl Unfinished {
    fn is_none(self) -> bool {
        self == Self::default()
    }
}

impl ModelTable {
    /// Refuses new requests except those of running sequences, lets accepted requests and sequences finish for at most `limit`,
    /// and ends all workers. Returns what was left.
    ///
    /// A sequence whose client has gone ends after its model's idle limit. [`ModelTable::abort_drain`] ends the waiting.
    pub(crate) async fn drain(&self, limit: Duration) -> Unfinished {
        let all = self.executors();
        let drivers = || all.iter().filter_map(|executor| executor.driver());
        let give_up = clock::now() + limit;
        // The remaining steps of ensemble requests need the members, so those stop last.
        let needed = |name: &str| all.iter().filter_map(|e| e.ensemble()).any(|e| e.plan().members().contains(name));
        drivers().filter(|driver| !needed(&driver.model.name)).for_each(|driver| driver.stop());
        let ensembles = || Unfinished {
            requests: all.iter().filter(|executor| executor.ensemble().is_some()).map(|e| e.unanswered()).sum(),
            sequences: drivers().filter(|driver| needed(&driver.model.name)).map(|d| d.sequences_to_end()).sum(),
        };
        let mut abort_drain = self.abort_drain.subscribe();
        until_none(ensembles, &abort_drain, give_up).await;
        drivers().for_each(|driver| driver.stop());
        let everything = || Unfinished {
            requests: all.iter().map(|executor| executor.unanswered()).sum(),
            sequences: drivers().map(|driver| driver.sequences_to_end()).sum(),
        };
        let left = until_none(everything, &abort_drain, give_up).await;
        drivers().for_each(|driver| driver.give_up());
        let stopped = all.iter().cloned().map(|executor| async move { executor.stop().await });
        let mut stopped: JoinSet<()> = stopped.collect();
        tokio::select! {
            () = join(&mut stopped) => {}
            () = async { drop(abort_drain.wait_for(|abort_drain| *abort_drain).await) } => {
                all.iter().for_each(|executor| executor.kill());
                let _ = clock::timeout(KILLED, join(&mut stopped)).await;
            }
        }
        left
    }

    /// Ends the waiting of [`ModelTable::drain`]: refuses what is left and kills the workers.
    pub(crate) fn abort_drain(&self) {
        self.abort_drain.send_replace(true);
    }

    /// Returns all executors, including those of retired versions.
    fn executors(&self) -> Vec<Arc<Executor>> {
        let mut all: Vec<Arc<Executor>> = self.all().iter().map(|serving| serving.executor.clone()).collect();
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(retired.iter().filter_map(Retired::executor));
        all
    }
}

/// Waits until nothing is left or the time is over. Returns what is left.
async fn until_none(
    left: impl Fn() -> Unfinished,
    abort_drain: &watch::Receiver<bool>,
    give_up: Instant,
) -> Unfinished {
    while !left().is_none() && !*abort_drain.borrow() && clock::now() < give_up {
        clock::sleep(Duration::from_millis(10)).await;
    }
    left()
}

async fn join(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}
