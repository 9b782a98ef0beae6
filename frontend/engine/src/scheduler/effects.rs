//! The effects of a turn that are performed after the lock is released: batches to send, answers to give.

use std::sync::Arc;

use pharos::id::{CorrelationId, InstanceId};
use pharos::timeline::Instant;
use pharos::wire::{Resumed, SequenceStep, ToWorker};

use super::failure::Unsent;
use super::limits::Grant;
use super::stream::Flow;
use super::{Answer, Driver, Request};
use crate::wire::{Part, SharedLink, ToSend};
use pharos_os::{blocking, clock};

/// Batches with more bytes are not copied on the timer's thread, which other models need.
const LONG: usize = 64 << 10;

/// A batch to gather and send.
pub(super) struct Send {
    pub(super) instance: InstanceId,
    pub(super) link: SharedLink,
    pub(super) batch: u64,
    pub(super) flags: u8,
    pub(super) parts: Vec<Arc<Part>>,
    /// One step for each part of a model with sequences.
    pub(super) steps: Vec<Option<SequenceStep>>,
    /// For a decoupled model, the requests that had responses in an earlier batch, by position.
    pub(super) flows: Vec<(u32, Arc<Flow>)>,
}

/// The effects of a turn that are performed after the lock is released.
#[derive(Default)]
pub(super) struct Effects {
    /// Sequences whose ends are announced to instances, before the batches.
    pub(super) ended: Vec<(SharedLink, Vec<u64>)>,
    pub(super) sends: Vec<Send>,
    /// Sequences that were restarted while they were active.
    pub(super) restarted: Vec<CorrelationId>,
    /// Answers to send, in order.
    pub(super) answers: Vec<(Request, Answer)>,
    /// Whether the rate limiter was called, so that resources may be free.
    pub(super) limiter_called: bool,
    /// A grant of resources to an instance of another driver.
    pub(super) grant: Option<Grant>,
}

impl Effects {
    /// Returns whether copying the inputs of the batches takes long.
    fn is_long(&self) -> bool {
        let inputs = self.sends.iter().flat_map(|send| &send.parts).flat_map(|part| &part.request.inputs);
        inputs.map(|input| input.tensor.data.bytes_here()).sum::<usize>() > LONG
    }
}

impl Driver {
    /// Sends batches and answers. Runs without the lock, because copying takes time.
    pub(super) fn perform(&self, effects: Effects) -> Option<Grant> {
        let (mut grant, mut unsent) = self.perform_once(effects);
        // A loop: any number of requests may fail one after the other.
        while !unsent.is_empty() {
            self.deliver(grant);
            let now = clock::now();
            let effects = self.effects(now, |state, _| self.unsent(state, unsent, now));
            (grant, unsent) = self.perform_once(effects);
        }
        grant
    }

    /// Sends batches and answers. Returns the batches that could not be sent.
    fn perform_once(&self, effects: Effects) -> (Option<Grant>, Vec<Unsent>) {
        let mut unsent = Vec::new();
        for (link, keys) in effects.ended {
            link.send(&ToWorker::SequenceEnded(keys));
        }
        for sequence in effects.restarted {
            self.notify_restarted(&sequence);
        }
        for Send { instance, link, batch, flags, parts, steps, flows } in effects.sends {
            let resumed: Vec<Resumed> = flows.iter().map(|(request, flow)| flow.resumed(*request)).collect();
            let resumed_now = resumed.clone();
            let to_send = ToSend { batch, flags, parts: &parts, steps: &steps, controls: &[], resumed: resumed_now };
            if let Err(error) = link.execute(&self.config, &to_send) {
                unsent.push(Unsent { instance, batch, error });
            }
            for ((_, flow), sent) in flows.iter().zip(&resumed) {
                flow.tell_since(sent);
            }
        }
        for (request, answer) in effects.answers {
            request.reply.send(answer);
        }
        (effects.grant, unsent)
    }

    /// Handles the alarm for `at` on the timer's thread. An alarm that was replaced by an earlier one does nothing.
    pub(super) fn handle_timeout(&self, at: Instant) {
        let now = clock::now();
        let effects = self.effects(now, |state, _| {
            if state.armed == Some(at) {
                state.armed = None;
                state.scheduler.handle_timeout(now);
            }
        });
        match (effects.is_long(), self.this.upgrade(), self.timer.runtime()) {
            (true, Some(driver), Some(runtime)) => {
                blocking::run_on(runtime, move || {
                    let grant = driver.perform(effects);
                    driver.deliver(grant);
                });
            }
            _ => {
                let grant = self.perform(effects);
                self.deliver(grant);
            }
        }
    }
}
