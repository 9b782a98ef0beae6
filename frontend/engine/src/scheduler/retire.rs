//! What goes while the rest goes on: an instance that gets no more batches, a driver whose sequences come to their ends.

use pharos::id::{CorrelationId, InstanceId};

use super::{Driver, Member};
use pharos_os::clock;

impl Driver {
    /// The instance gets no more batches, or no more sequences; those that it has go on to their ends.
    pub(crate) fn retire(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| state.scheduler.instance_closing(instance, now));
    }

    /// Whether nothing of an instance that was retired goes on any more; then the driver has forgotten the instance.
    pub(crate) fn is_retired(&self, instance: InstanceId) -> bool {
        let now = clock::now();
        let mut retired = false;
        self.turn(now, |state| {
            let idle = state.members.get(&instance).is_none_or(Member::is_idle);
            retired = idle && !state.scheduler.has_sequences_on(instance);
            if retired {
                state.scheduler.instance_lost(instance, now);
                state.members.remove(&instance);
            }
        });
        retired
    }

    /// Whether sequences have begun on an instance and not ended.
    pub(crate) fn has_sequences_on(&self, instance: InstanceId) -> bool {
        self.lock().scheduler.has_sequences_on(instance)
    }

    /// Whether an instance has batches that are not answered.
    #[cfg(test)]
    pub(crate) fn is_executing(&self, instance: InstanceId) -> bool {
        self.lock().members.get(&instance).is_some_and(|member| !member.is_idle())
    }

    /// Whether a sequence of this id has begun and not ended.
    pub(crate) fn has_sequence(&self, id: &CorrelationId) -> bool {
        self.lock().scheduler.has_sequence(id)
    }
}
