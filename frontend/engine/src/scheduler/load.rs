//! The load of a driver: requests that execute and wait, and the time in which its instances are busy.

use std::collections::HashMap;

use pharos::id::InstanceId;
use pharos::timeline::Instant;

use super::{Driver, Member, State};

/// The time in which an instance has a batch or a deferred request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BusyTime {
    /// The nanoseconds of the periods that have ended.
    ended_ns: u64,
    /// When the current period began.
    since: Option<Instant>,
    /// The nanoseconds that the metrics already include.
    recorded_ns: u64,
}

impl BusyTime {
    /// Begins or ends a period, if the instance was not in that state before.
    pub(super) fn set(&mut self, now: Instant, busy: bool) {
        match (self.since, busy) {
            (None, true) => self.since = Some(now),
            (Some(since), false) => {
                self.ended_ns += now.ns_since(since);
                self.since = None;
            }
            _ => {}
        }
    }

    /// Returns the nanoseconds of all periods until now.
    pub(super) fn total_ns(&self, now: Instant) -> u64 {
        self.ended_ns + self.since.map_or(0, |since| now.ns_since(since))
    }

    /// Returns the nanoseconds since the last call.
    fn take_ns(&mut self, now: Instant) -> u64 {
        let total = self.total_ns(now);
        let new = total.saturating_sub(self.recorded_ns);
        self.recorded_ns = self.recorded_ns.max(total);
        new
    }
}

/// The load of a driver at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Load {
    /// Requests that instances execute, deferred requests included.
    pub(crate) executing: usize,
    /// Requests in the queue, and those of batches that wait behind another one at an instance.
    pub(crate) waiting: usize,
    /// Ready instances.
    pub(crate) instances: usize,
    /// Requests that these can execute at once.
    pub(crate) slots: u64,
    /// The nanoseconds in which instances were busy since the load of the model, added over all instances.
    pub(crate) busy_ns: u64,
}

impl Member {
    /// Begins or ends the busy time after batches or deferred requests were added or removed.
    pub(super) fn update_busy_time(&mut self, now: Instant) {
        let busy = !self.is_idle();
        self.busy.set(now, busy);
    }
}

impl State {
    /// Removes an instance, and keeps its busy time.
    pub(super) fn remove_member(&mut self, instance: InstanceId, now: Instant) -> Option<Member> {
        let mut member = self.members.remove(&instance)?;
        self.busy_of_removed_ns += member.busy.total_ns(now);
        *self.unrecorded_busy_ns.entry(instance).or_default() += member.busy.take_ns(now);
        Some(member)
    }

    /// Returns whether an instance is ready and gets new batches.
    pub(super) fn has_open_member(&self) -> bool {
        self.members.keys().any(|instance| !self.retired.contains(instance))
    }
}

impl Driver {
    /// Returns the current load.
    pub(crate) fn load(&self, now: Instant) -> Load {
        let state = self.lock();
        let mut load = Load { waiting: state.queued.len(), busy_ns: state.busy_of_removed_ns, ..Load::default() };
        for member in state.members.values() {
            let mut batches = member.in_flight.iter().map(|batch| batch.count() as usize);
            load.executing += batches.next().unwrap_or_default() + member.deferred.len();
            load.waiting += batches.sum::<usize>();
            load.busy_ns += member.busy.total_ns(now);
        }
        load.instances = state.members.len();
        load.slots = self.batch_slots() * load.instances as u64;
        load
    }

    /// Returns the requests of batch size 1 that one batch can have.
    pub(crate) fn batch_slots(&self) -> u64 {
        u64::from(self.config.max_batch_size).max(1)
    }

    /// Returns the requests of batch size 1 that the next batch can take besides the requests in the queue.
    pub(crate) fn free_batch_slots(&self) -> u64 {
        let most = self.batch_slots();
        let state = self.lock();
        let mut free = most;
        // A long queue is not read to its end.
        for request in state.queued.values().take(usize::try_from(most).unwrap_or(usize::MAX)) {
            free = free.saturating_sub(request.part.checked.batch_size.max(1));
        }
        free
    }

    /// Returns the nanoseconds since the last call in which each instance was busy, also of instances that were lost.
    pub(crate) fn take_busy_ns(&self, now: Instant) -> HashMap<InstanceId, u64> {
        let mut state = self.lock();
        let mut all = std::mem::take(&mut state.unrecorded_busy_ns);
        for (id, member) in &mut state.members {
            *all.entry(*id).or_default() += member.busy.take_ns(now);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_time_is_the_sum_of_periods() {
        let mut busy = BusyTime::default();
        assert_eq!(busy.total_ns(Instant(5)), 0);
        busy.set(Instant(10), true);
        busy.set(Instant(12), true);
        assert_eq!((busy.total_ns(Instant(15)), busy.take_ns(Instant(15))), (5, 5));
        busy.set(Instant(20), false);
        busy.set(Instant(25), false);
        assert_eq!((busy.total_ns(Instant(30)), busy.take_ns(Instant(30))), (10, 5));
        assert_eq!(busy.take_ns(Instant(30)), 0);
        busy.set(Instant(40), true);
        assert_eq!(busy.take_ns(Instant(41)), 1);
    }
}
