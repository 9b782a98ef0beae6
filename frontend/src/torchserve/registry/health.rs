//! Whether workers are there as far as `/ping` goes: one that died counts for as long as its model says that it is started
//! again, `maxRetryTimeoutInSec`. After that it goes on being started, and counts once it is back.

use std::collections::BTreeMap;
use std::sync::Weak;
use std::time::Duration;

use pharos::metrics::labels::InstanceState;
use pharos::timeline::Instant;

use super::{Registry, Version};
use crate::clock;

/// How often workers are looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What is known of the workers of a version.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Loading the model is not tried any more.
    given_up: bool,
    /// Since when workers have not been ready, by their numbers.
    absent: BTreeMap<u32, Instant>,
}

impl Health {
    /// It is tried again.
    pub(super) fn begin(&mut self) {
        self.given_up = false;
    }

    pub(super) fn give_up(&mut self) {
        self.given_up = true;
    }

    fn see(&mut self, states: &[(u32, Option<InstanceState>)], now: Instant) {
        self.absent.retain(|number, _| states.iter().any(|(known, _)| known == number));
        for (number, state) in states {
            match state {
                Some(InstanceState::Ready) => drop(self.absent.remove(number)),
                _ => drop(self.absent.entry(*number).or_insert(now)),
            }
        }
    }

    /// Workers that count, of a model that should have `wanted`.
    fn counting(&self, states: &[(u32, Option<InstanceState>)], patience: Duration, now: Instant) -> usize {
        let recent = |number: &u32| self.absent.get(number).is_none_or(|since| now - *since < patience);
        states.iter().filter(|(number, _)| recent(number)).count()
    }
}

impl Registry {
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
        let states = self.engine.worker_states(&version.called);
        let now = clock::now();
        let mut health = version.health();
        if states.is_empty() {
            return deployment.min_workers == 0 || !health.given_up;
        }
        health.see(&states, now);
        let patience = Duration::from_secs(deployment.max_retry_timeout.into());
        health.counting(&states, patience, now) >= deployment.min_workers as usize || !enough(&states, &deployment)
    }
}

/// Whether all workers have begun: while their number grows, those to come are no loss.
fn enough(states: &[(u32, Option<InstanceState>)], deployment: &super::Deployment) -> bool {
    states.len() >= deployment.min_workers as usize
}

/// Looks at all workers every now and then, so that it is known since when one is gone.
pub(super) async fn watch(registry: Weak<Registry>) {
    loop {
        tokio::time::sleep(LOOK).await;
        let Some(registry) = registry.upgrade() else { return };
        let all: Vec<_> = {
            let models = registry.read();
            models.values().flat_map(|model| model.versions.values().cloned()).collect()
        };
        for version in all {
            let states = registry.engine.worker_states(&version.called);
            version.health().see(&states, clock::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_counts_until_its_time_is_over() {
        let second = |at: u64| Instant(at * 1_000_000_000);
        let patience = Duration::from_secs(10);
        let mut health = Health::default();
        let (ready, lost) = ((0, Some(InstanceState::Ready)), (1, Some(InstanceState::Backoff)));
        health.see(&[ready, lost], second(1));
        assert_eq!(health.counting(&[ready, lost], patience, second(10)), 2);
        health.see(&[ready, lost], second(10));
        assert_eq!(health.counting(&[ready, lost], patience, second(11)), 1);
        let back = (1, Some(InstanceState::Ready));
        health.see(&[ready, back], second(12));
        assert_eq!(health.counting(&[ready, back], patience, second(100)), 2);
        health.see(&[ready], second(13));
        assert_eq!(health.absent.len(), 0);
    }
}
