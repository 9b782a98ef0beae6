//! Which instances are ready and how many batches each holds.

use crate::id::InstanceId;

#[derive(Clone, Copy, Debug)]
struct Instance {
    id: InstanceId,
    in_flight: u32,
    /// The number of its latest batch, so that equally loaded instances take turns and the one whose batch was sent
    /// first, which is likely to end first, gets the next.
    last_sent: u64,
    /// It counts as one batch in flight because it waits for its resources, or has them and nothing to execute yet.
    asked: bool,
    /// It gets no new batches, and leaves with the last one that it has.
    closing: bool,
}

/// The ready instances of one model. A handful, so a scan is the fastest search.
#[derive(Debug, Default)]
pub(super) struct Instances {
    ready: Vec<Instance>,
    sent: u64,
}

impl Instances {
    /// The instance joined with nothing in flight.
    pub(super) fn join(&mut self, id: InstanceId) {
        match self.find(id) {
            Some(known) => (known.in_flight, known.closing) = (0, false),
            None => self.ready.push(Instance { id, in_flight: 0, last_sent: 0, asked: false, closing: false }),
        }
    }

    /// The instance is gone.
    pub(super) fn leave(&mut self, id: InstanceId) {
        self.ready.retain(|instance| instance.id != id);
    }

    /// A batch was sent to the instance.
    pub(super) fn sent(&mut self, id: InstanceId) {
        self.sent += 1;
        let number = self.sent;
        if let Some(instance) = self.find(id) {
            instance.in_flight += 1;
            instance.last_sent = number;
        }
    }

    /// The instance answered a batch.
    pub(super) fn done(&mut self, id: InstanceId) {
        if let Some(instance) = self.find(id) {
            instance.in_flight = instance.in_flight.saturating_sub(1);
        }
        self.ready.retain(|instance| !instance.closing || instance.in_flight > 0);
    }

    /// The instance holds batches and gets no more.
    pub(super) fn close(&mut self, id: InstanceId) {
        if let Some(instance) = self.find(id) {
            instance.closing = true;
        }
    }

    /// The least loaded instance and the number of batches it holds.
    pub(super) fn least_loaded(&self) -> Option<(InstanceId, u32)> {
        let open = self.ready.iter().filter(|instance| !instance.closing);
        let least = open.min_by_key(|instance| (instance.in_flight, instance.last_sent))?;
        Some((least.id, least.in_flight))
    }

    /// The least loaded instance waits for its resources from now on, if it is idle.
    pub(super) fn ask(&mut self) -> Option<InstanceId> {
        let (id, _) = self.least_loaded().filter(|(_, in_flight)| *in_flight == 0)?;
        let instance = self.find(id)?;
        (instance.asked, instance.in_flight) = (true, 1);
        Some(id)
    }

    /// An instance that waits for its resources, or the one that is named if it does, is idle again.
    pub(super) fn unask(&mut self, named: Option<InstanceId>) -> Option<InstanceId> {
        let is = |instance: &&mut Instance| instance.asked && named.is_none_or(|id| instance.id == id);
        let instance = self.ready.iter_mut().find(is)?;
        (instance.asked, instance.in_flight) = (false, 0);
        Some(instance.id)
    }

    /// Whether the instance holds batches.
    pub(super) fn is_busy(&self, id: InstanceId) -> bool {
        self.ready.iter().any(|instance| instance.id == id && instance.in_flight > 0 && !instance.asked)
    }

    fn find(&mut self, id: InstanceId) -> Option<&mut Instance> {
        self.ready.iter_mut().find(|instance| instance.id == id)
    }
}
