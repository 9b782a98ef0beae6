//! Cancels requests: removes them from the queue, or signals the executing instance.

use pharos::id::RequestId;

use super::stream::BatchPosition;
use super::{Driver, State};
use pharos_os::clock;

/// Cancels a request if its client's future is dropped before the answer arrives.
pub(super) struct CancelOnDrop<'a> {
    driver: &'a Driver,
    id: Option<RequestId>,
}

impl Drop for CancelOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id.take() {
            self.driver.cancel(id);
        }
    }
}

impl<'a> CancelOnDrop<'a> {
    pub(super) fn new(driver: &'a Driver, id: RequestId) -> Self {
        Self { driver, id: Some(id) }
    }

    /// Disarms the guard after the answer.
    pub(super) fn disarm(mut self) {
        self.id = None;
    }
}

impl Driver {
    pub(super) fn cancel(&self, id: RequestId) {
        let now = clock::now();
        let (mut executing, mut deferred) = (None, None);
        self.turn(now, |state| {
            if state.queued.contains_key(&id) {
                state.scheduler.cancel(id, now);
            } else {
                executing = give_up(state, id);
                deferred = state.cancellation_frame(id);
            }
        });
        if let Some((link, frame)) = deferred {
            link.send(&frame);
        }
        if let Some(position) = executing.filter(|_| self.config.decoupled) {
            // The worker may be waiting for this request's reader.
            position.report(0);
        }
    }
}

/// Signals the instance that executes a request, or soon will, that it was cancelled. Returns the batch and the position in it.
fn give_up(state: &mut State, id: RequestId) -> Option<BatchPosition> {
    for member in state.members.values_mut() {
        for batch in &mut member.in_flight {
            if let Some(position) = batch.requests.iter().position(|(request, _)| *request == id) {
                member.link.arenas.inputs.give_up(batch.flags, position);
                batch.given_up = true;
                let request = u32::try_from(position).unwrap_or(u32::MAX);
                return Some(BatchPosition { link: member.link.clone(), batch: batch.batch, request });
            }
        }
    }
    None
}
