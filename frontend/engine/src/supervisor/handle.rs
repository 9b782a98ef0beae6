//! What the version of a model holds of one of its instances: its numbers, and the signal that ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pharos::id::InstanceId;
use pharos::metrics::labels::InstanceState;
use pharos::metrics::record;
use pharos::metrics::series::ModelSeries;
use tokio::sync::watch;

use super::Health;
use crate::scheduler::placement::Placement;

/// The state of an instance that is no longer restarted.
pub(super) const GIVEN_UP: Option<InstanceState> = Some(InstanceState::Failed);

/// How an instance is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stop {
    No,
    /// It finishes its work. If it is lost, or not ready, it is stopped instead of restarted.
    Close,
    /// Its worker may finish its work for a limited time.
    Drain,
    /// Its worker is killed.
    Now,
}

pub(super) struct Handle {
    pub(super) id: InstanceId,
    /// Whether it is retired and only finishes its work.
    closing: AtomicBool,
    pub(super) health: Arc<Health>,
    /// Bytes by which loading has grown its process.
    pub(super) memory: AtomicU64,
    /// Bytes of its arenas that are registered with its GPU driver.
    pub(super) pinned: AtomicU64,
    /// The stop signal; dropping it stops the instance too. Closed at the end of the instance's task.
    stop: watch::Sender<Stop>,
    series: Arc<ModelSeries>,
}

impl Handle {
    pub(super) fn new(
        id: InstanceId,
        health: Arc<Health>,
        series: Arc<ModelSeries>,
        stop: watch::Sender<Stop>,
    ) -> Self {
        let (closing, memory, pinned) = Default::default();
        Self { id, closing, health, memory, pinned, stop, series }
    }

    pub(super) fn placement(&self) -> Arc<Placement> {
        self.health.placement()
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Returns the id of its process, if it has one.
    pub(super) fn pid(&self) -> Option<u32> {
        let pid = self.health.pid.load(Ordering::Relaxed);
        (pid != 0).then_some(pid)
    }

    /// Lets the instance only finish its work. [`Handle::stop`] follows.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.raise(Stop::Close);
    }

    pub(super) fn ask_to_stop(&self) {
        self.raise(Stop::Drain);
    }

    /// Kills the worker.
    pub(super) fn kill(&self) {
        self.raise(Stop::Now);
    }

    /// Ends the worker and waits until its process is gone. Any number of callers may wait.
    pub(super) async fn stop(&self) {
        self.ask_to_stop();
        self.stop.closed().await;
        if self.health.state() == GIVEN_UP && self.health.reported.take().is_some() {
            // Until now it counted as failed.
            record::instance_state(&self.series, GIVEN_UP, None);
        }
    }

    fn raise(&self, to: Stop) {
        self.stop.send_if_modified(|stop| {
            let raised = *stop < to;
            *stop = to.max(*stop);
            raised
        });
    }
}
