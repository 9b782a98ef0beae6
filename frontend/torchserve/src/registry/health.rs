//! Whether workers are there as far as `/ping` goes: one that died counts for as long as its model says that it is started
//! again, `maxRetryTimeoutInSec` from the first of a row of losses on, and once it is back.

use std::time::Duration;

use pharos::metrics::labels::InstanceState;
use pharos::service::{Management, WorkerHealth};
use pharos::timeline::Instant;

use super::{Registry, Version};
use pharos_os::clock;

impl<S: Management> Registry<S> {
    /// TorchServe's rule: the default version of each model has as many workers as it should.
    pub fn is_healthy(&self) -> bool {
        let defaults: Vec<_> = {
            let models = self.read();
            models.values().filter_map(|model| model.versions.get(&model.default).cloned()).collect()
        };
        defaults.iter().all(|version| self.has_workers(version))
    }

    fn has_workers(&self, version: &Version) -> bool {
        let deployment = version.deployment();
        let wanted = deployment.min_workers as usize;
        let workers = self.service.worker_health(&version.called);
        if workers.is_empty() {
            // A model that was loaded and has no workers was unloaded behind the registry's back, by the v2 protocol.
            return wanted == 0 || !version.is_load_ended();
        }
        let patience = Duration::from_secs(deployment.max_retry_timeout.into());
        // While their number grows, those to come are no loss.
        counting(&workers, patience, clock::now()) >= wanted.min(workers.len())
    }
}

/// Workers that count.
fn counting(workers: &[WorkerHealth], patience: Duration, now: Instant) -> usize {
    let counts = |(state, lost): &&WorkerHealth| {
        *state != Some(InstanceState::Failed) && lost.is_none_or(|since| now - since < patience)
    };
    workers.iter().filter(counts).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_counts_until_its_time_is_over() {
        let second = |at: u64| Instant(at * 1_000_000_000);
        let patience = Duration::from_secs(10);
        let ready = (Some(InstanceState::Ready), None);
        let lost = |state| (Some(state), Some(second(1)));
        for (worker, at, expected) in [
            (ready, 100, 2),
            ((Some(InstanceState::Starting), None), 100, 2),
            (lost(InstanceState::Backoff), 10, 2),
            (lost(InstanceState::Starting), 10, 2),
            (lost(InstanceState::Starting), 11, 1),
            (lost(InstanceState::Failed), 2, 1),
        ] {
            assert_eq!(counting(&[ready, worker], patience, second(at)), expected, "{worker:?} at {at}");
        }
    }
}
