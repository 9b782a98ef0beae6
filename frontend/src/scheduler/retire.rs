//! What goes while the rest goes on: an instance that gets no more batches, a driver whose sequences come to their ends.

use pharos::id::{CorrelationId, InstanceId};

use super::{Driver, Member};
use crate::clock;

impl Driver {
    /// The instance gets no more batches; those that it has are executed and answered. Not for a model with sequences, whose
    /// states it has, nor with the rate limiter on, which would give its resources to others at once.
    pub(crate) fn retire(&self, instance: InstanceId) {
        let now = clock::now();
        self.turn(now, |state| {
            state.scheduler.instance_lost(instance, now);
            if state.members.get(&instance).is_some_and(Member::is_idle) {
                state.members.remove(&instance);
            }
        });
    }

    /// Whether an instance has batches that are not answered.
    pub(crate) fn is_executing(&self, instance: InstanceId) -> bool {
        self.lock().members.get(&instance).is_some_and(|member| !member.is_idle())
    }

    /// Whether a sequence of this id has begun and not ended.
    pub(crate) fn has_sequence(&self, id: &CorrelationId) -> bool {
        self.lock().scheduler.has_sequence(id)
    }
}
