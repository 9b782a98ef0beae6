//! Shutdown of all models: finishes what has begun, then ends the workers.

use std::sync::Arc;
use std::time::Duration;

use pharos::timeline::Instant;
use pharos_os::clock;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::retire::Retired;
use super::{Executor, ModelTable};
use crate::ensemble::Ensemble;
use crate::scheduler::Driver;

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
    /// Refuses new requests except requests of running sequences, lets accepted requests and
    /// sequences finish for at most `limit`, and ends all workers. Returns what was left.
    ///
    /// A sequence whose client has gone ends after its model's idle limit.
    /// [`ModelTable::abort_drain`] ends the waiting.
    pub(crate) async fn drain(&self, limit: Duration) -> Unfinished {
        let all = self.executors();
        let drivers: Vec<&Driver> =
            all.iter().filter_map(|executor| executor.driver()).map(|driver| &**driver).collect();
        let ensembles: Vec<&Arc<Executor>> =
            all.iter().filter(|executor| executor.ensemble().is_some()).collect();
        let give_up = clock::now() + limit;
        let mut abort_drain = self.abort_drain.subscribe();

        // The remaining steps of ensemble requests need the members, so the members stop last.
        let (members, others) = drivers.iter().copied().partition::<Vec<&Driver>, _>(|driver| {
            let mut plans =
                ensembles.iter().filter_map(|executor| executor.ensemble()).map(Ensemble::plan);
            plans.any(|plan| plan.members().contains(&*driver.model.name))
        });
        others.iter().for_each(|driver| driver.stop());
        let of_ensembles = || Unfinished {
            requests: ensembles.iter().map(|executor| executor.unanswered()).sum(),
            sequences: members.iter().map(|driver| driver.sequences_to_end()).sum(),
        };
        until_none(of_ensembles, &abort_drain, give_up).await;

        members.iter().for_each(|driver| driver.stop());
        let of_all = || Unfinished {
            requests: all.iter().map(|executor| executor.unanswered()).sum(),
            sequences: drivers.iter().map(|driver| driver.sequences_to_end()).sum(),
        };
        let left = until_none(of_all, &abort_drain, give_up).await;

        drivers.iter().for_each(|driver| driver.reject_all_at_exit());
        let mut stopping = JoinSet::new();
        for executor in &all {
            let executor = Arc::clone(executor);
            stopping.spawn(async move { executor.stop().await });
        }
        tokio::select! {
            () = join(&mut stopping) => {}
            () = async { drop(abort_drain.wait_for(|abort_drain| *abort_drain).await) } => {
                all.iter().for_each(|executor| executor.kill());
                let _ = clock::timeout(KILLED, join(&mut stopping)).await;
            }
        }
        left
    }

    /// Ends the waiting of [`ModelTable::drain`]: refuses what is left and kills the workers.
    pub(crate) fn abort_drain(&self) {
        self.abort_drain.send_replace(true);
    }

    /// Returns all executors, including the executors of retired versions.
    fn executors(&self) -> Vec<Arc<Executor>> {
        let mut all: Vec<Arc<Executor>> =
            self.all().iter().map(|serving| serving.executor.clone()).collect();
        let retired = self.retired.lock();
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
