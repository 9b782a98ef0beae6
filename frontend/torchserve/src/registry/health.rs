//! Worker health for `/ping`. A worker that died still counts as healthy for `maxRetryTimeoutInSec`
//! after the first of several consecutive losses, and again once it is back. A server whose exit
//! has begun is not healthy, as for the health checks of all protocols.

use std::time::Duration;

use pharos::metrics::labels::InstanceState;
use pharos::service::WorkerHealth;
use pharos::timeline::Instant;

use super::{Registry, Version};
use pharos_os::clock;

impl Registry {
    /// Whether the exit has not begun and the default version of each model has its configured
    /// number of workers. The second is TorchServe's rule.
    pub fn is_healthy(&self) -> bool {
        if self.service.leaving() {
            return false;
        }
        let defaults: Vec<_> = {
            let models = self.read();
            models
                .values()
                .filter_map(|model| model.versions.get(&model.default).cloned())
                .collect()
        };
        defaults.iter().all(|version| self.has_workers(version))
    }

    fn has_workers(&self, version: &Version) -> bool {
        let deployment = version.deployment();
        let wanted = deployment.min_workers as usize;
        let workers = self.service.worker_health(&version.engine_name);
        if workers.is_empty() {
            // The model was loaded and has no workers: the v2 protocol has unloaded it without the
            // registry.
            return wanted == 0 || !version.is_load_ended();
        }
        let retry_window = Duration::from_secs(deployment.max_retry_timeout.into());
        // While the number of workers grows, workers that have not started yet do not count as
        // lost.
        let needed = if version.is_load_ended() { wanted } else { wanted.min(workers.len()) };
        healthy_workers(&workers, retry_window, clock::now()) >= needed
    }
}

/// Counts the workers that are healthy or within their retry window.
fn healthy_workers(workers: &[WorkerHealth], retry_window: Duration, now: Instant) -> usize {
    let counted = workers.iter().filter(|(state, lost)| {
        *state != Some(InstanceState::Failed) && lost.is_none_or(|since| now - since < retry_window)
    });
    counted.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_worker_counts_until_its_retry_window_ends() {
        let second = |at: u64| Instant(at * 1_000_000_000);
        let retry_window = Duration::from_secs(10);
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
            assert_eq!(
                healthy_workers(&[ready, worker], retry_window, second(at)),
                expected,
                "{worker:?} at {at}"
            );
        }
    }
}
