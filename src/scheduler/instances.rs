//! The ready instances and the number of batches in flight on each.

use crate::id::InstanceId;

#[derive(Clone, Copy, Debug)]
struct Instance {
    id: InstanceId,
    in_flight: u32,
    /// The number of its latest batch. Of equally loaded instances, the one whose batch was sent
    /// first, which will probably end first, gets the next.
    last_sent: u64,
    /// Whether the instance counts as busy because it waits for its resources, or has them but no
    /// batch yet.
    reserved: bool,
    /// Whether the instance receives no new batches, and is removed when its last batch has ended.
    closing: bool,
}

/// The ready instances of one model. There are few, so a linear search is fastest.
#[derive(Debug, Default)]
pub(super) struct Instances {
    ready: Vec<Instance>,
    sent: u64,
}

impl Instances {
    /// Adds an instance with nothing in flight.
    pub(super) fn add(&mut self, id: InstanceId) {
        match self.find(id) {
            Some(known) => (known.in_flight, known.closing) = (0, false),
            None => self.ready.push(Instance {
                id,
                in_flight: 0,
                last_sent: 0,
                reserved: false,
                closing: false,
            }),
        }
    }

    /// Removes an instance.
    pub(super) fn remove(&mut self, id: InstanceId) {
        self.ready.retain(|instance| instance.id != id);
    }

    /// Counts a batch that was sent to the instance.
    pub(super) fn sent(&mut self, id: InstanceId) {
        self.sent += 1;
        let number = self.sent;
        if let Some(instance) = self.find(id) {
            instance.in_flight += 1;
            instance.last_sent = number;
        }
    }

    /// Counts a batch that the instance has answered.
    pub(super) fn done(&mut self, id: InstanceId) {
        if let Some(instance) = self.find(id) {
            instance.in_flight = instance.in_flight.saturating_sub(1);
        }
        self.ready.retain(|instance| !instance.closing || instance.in_flight > 0);
    }

    /// Closes an instance that still holds batches.
    pub(super) fn close(&mut self, id: InstanceId) {
        if let Some(instance) = self.find(id) {
            instance.closing = true;
        }
    }

    /// Returns the least loaded instance and its number of batches in flight.
    pub(super) fn least_loaded(&self) -> Option<(InstanceId, u32)> {
        let open = self.ready.iter().filter(|instance| !instance.closing);
        let least = open.min_by_key(|instance| (instance.in_flight, instance.last_sent))?;
        Some((least.id, least.in_flight))
    }

    /// Marks the least loaded instance as waiting for its resources, if it is idle, and returns it.
    pub(super) fn reserve(&mut self) -> Option<InstanceId> {
        let (id, _) = self.least_loaded().filter(|(_, in_flight)| *in_flight == 0)?;
        let instance = self.find(id)?;
        instance.reserved = true;
        instance.in_flight = 1;
        Some(id)
    }

    /// Marks an instance that waits for its resources (`named`, or any) as idle again, and returns
    /// it.
    pub(super) fn unreserve(&mut self, named: Option<InstanceId>) -> Option<InstanceId> {
        let instance = self
            .ready
            .iter_mut()
            .find(|instance| instance.reserved && named.is_none_or(|id| instance.id == id))?;
        instance.reserved = false;
        instance.in_flight = 0;
        Some(instance.id)
    }

    /// Returns whether the instance holds batches.
    pub(super) fn is_busy(&self, id: InstanceId) -> bool {
        self.ready
            .iter()
            .any(|instance| instance.id == id && instance.in_flight > 0 && !instance.reserved)
    }

    fn find(&mut self, id: InstanceId) -> Option<&mut Instance> {
        self.ready.iter_mut().find(|instance| instance.id == id)
    }
}
