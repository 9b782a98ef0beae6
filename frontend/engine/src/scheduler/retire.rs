//! Retires instances and waits for the sequences of a driver.

use pharos::id::{CorrelationId, InstanceId};

use super::{Driver, Member};
use pharos_os::clock;

impl Driver {
    /// Stops sending new batches or sequences to an instance; its current ones continue to their ends. Until
    /// [`Driver::dismiss`], it is not added again, even if its process restarts.
    pub(crate) fn retire(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| {
            state.retired.insert(instance);
            state.scheduler.instance_closing(instance, now);
        });
    }

    /// Returns whether a retired instance has finished its work; if so, removes it from the driver.
    pub(crate) fn is_retired(&self, instance: InstanceId) -> bool {
        let now = clock::now();
        let mut retired = false;
        self.turn(now, |state| {
            let idle = state.members.get(&instance).is_none_or(Member::is_idle);
            retired = idle && !state.scheduler.has_sequences_on(instance);
            if retired {
                state.scheduler.instance_lost(instance, now);
                state.remove_member(instance, now);
            }
        });
        retired
    }

    /// Returns whether an instance has open sequences.
    pub(crate) fn has_sequences_on(&self, instance: InstanceId) -> bool {
        self.lock().scheduler.has_sequences_on(instance)
    }

    /// Forgets a retired instance whose process has ended, and removes it from the rate limiter. Its number can be used again.
    pub(crate) fn dismiss(&self, instance: InstanceId) {
        self.lock().retired.remove(&instance);
        if let Some(registration) = &self.limits {
            registration.remove(&[instance]);
        }
    }

    /// Returns whether an instance has unanswered batches.
    #[cfg(test)]
    pub(crate) fn is_executing(&self, instance: InstanceId) -> bool {
        self.lock().members.get(&instance).is_some_and(|member| !member.is_idle())
    }

    /// Returns whether a sequence with this id is running.
    pub(crate) fn has_sequence(&self, id: &CorrelationId) -> bool {
        self.lock().scheduler.has_sequence(id)
    }
}
