//! The end of all models: what has begun is finished, then the workers are ended.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;

use super::retire::Retired;
use super::{Executor, ModelTable};

/// How long killed workers may take to be gone.
const KILLED: Duration = Duration::from_secs(1);

/// What was not finished in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unfinished {
    /// Requests that were not answered by a model.
    pub requests: usize,
    /// Sequences that had begun and not ended.
    pub sequences: usize,
}

impl Unfinished {
    fn is_none(self) -> bool {
        self == Self::default()
    }
}

impl ModelTable {
    /// Refuses new requests, apart from those of running sequences; finishes the accepted ones and the sequences for at
    /// most `patience`, and ends all workers. Returns what was left.
    ///
    /// A sequence whose client has gone ends when it has been idle for as long as its model allows. [`ModelTable::hurry`] ends
    /// the waiting.
    pub(crate) async fn drain(&self, patience: Duration) -> Unfinished {
        let all = self.executors();
        let drivers = || all.iter().filter_map(|executor| executor.driver());
        let give_up = tokio::time::Instant::now() + patience;
        // What an ensemble has begun needs its members for the steps to come.
        let needed = |name: &str| all.iter().filter_map(|e| e.ensemble()).any(|e| e.plan().members().contains(name));
        drivers().filter(|driver| !needed(&driver.model.name)).for_each(|driver| driver.stop());
        let ensembles = || Unfinished {
            requests: all.iter().filter(|executor| executor.ensemble().is_some()).map(|e| e.unanswered()).sum(),
            sequences: drivers().filter(|driver| needed(&driver.model.name)).map(|d| d.running_sequences()).sum(),
        };
        let mut hurry = self.hurry.subscribe();
        until_none(ensembles, &hurry, give_up).await;
        drivers().for_each(|driver| driver.stop());
        let everything = || Unfinished {
            requests: all.iter().map(|executor| executor.unanswered()).sum(),
            sequences: drivers().map(|driver| driver.running_sequences()).sum(),
        };
        let left = until_none(everything, &hurry, give_up).await;
        drivers().for_each(|driver| driver.give_up());
        let stopped = all.iter().cloned().map(|executor| async move { executor.stop().await });
        let mut stopped: JoinSet<()> = stopped.collect();
        tokio::select! {
            () = join(&mut stopped) => {}
            () = async { drop(hurry.wait_for(|hurry| *hurry).await) } => {
                all.iter().for_each(|executor| executor.kill());
                let _ = tokio::time::timeout(KILLED, join(&mut stopped)).await;
            }
        }
        left
    }

    /// Ends the waiting of [`ModelTable::drain`]: what is left is refused, and workers are killed.
    pub(crate) fn hurry(&self) {
        self.hurry.send_replace(true);
    }

    /// All that executes, what is on its way out included.
    fn executors(&self) -> Vec<Arc<Executor>> {
        let mut all: Vec<Arc<Executor>> = self.all().iter().map(|serving| serving.executor.clone()).collect();
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(retired.iter().filter_map(Retired::executor));
        all
    }
}

/// Waits until nothing is left, or the time is over; gives what is left.
async fn until_none(
    left: impl Fn() -> Unfinished,
    hurry: &watch::Receiver<bool>,
    give_up: tokio::time::Instant,
) -> Unfinished {
    while !left().is_none() && !*hurry.borrow() && tokio::time::Instant::now() < give_up {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    left()
}

async fn join(tasks: &mut JoinSet<()>) {
    while tasks.join_next().await.is_some() {}
}
