//! What a turn leaves to be done once the lock is given back: batches to send, answers to give.

use std::sync::Arc;

use pharos::id::{CorrelationId, InstanceId};
use pharos::timeline::Instant;
use pharos::wire::{Resumed, SequenceStep, ToWorker};

use super::limits::Grant;
use super::stream::Flow;
use super::{Answer, Driver, Request};
use crate::wire::{Part, SharedLink, ToSend};
use pharos_os::clock;

/// Batches of more bytes are not copied on the timer's thread, which other models wait for.
const LONG: usize = 64 << 10;

/// A batch to be gathered and sent.
pub(super) struct Send {
    pub(super) instance: InstanceId,
    pub(super) link: SharedLink,
    pub(super) batch: u64,
    pub(super) flags: u8,
    pub(super) parts: Vec<Arc<Part>>,
    /// One for each part, for a model with sequences.
    pub(super) steps: Vec<Option<SequenceStep>>,
    /// For a decoupled model: the requests that have had responses in an earlier batch, by position.
    pub(super) flows: Vec<(u32, Arc<Flow>)>,
}

/// What is to be done once the lock is given back.
#[derive(Default)]
pub(super) struct Effects {
    /// Sequences of which instances have to be told that they have ended: before the batches.
    pub(super) ended: Vec<(SharedLink, Vec<u64>)>,
    pub(super) sends: Vec<Send>,
    /// Sequences that were begun anew while they were active.
    pub(super) restarted: Vec<CorrelationId>,
    /// Answers that may leave, in order.
    pub(super) answers: Vec<(Request, Answer)>,
    /// The rate limiter was told something: resources may be free for somebody.
    pub(super) asked: bool,
    /// An instance of another driver has got its resources.
    pub(super) grant: Option<Grant>,
}

impl Effects {
    /// Whether it takes long to copy the inputs of the batches.
    fn is_long(&self) -> bool {
        let inputs = self.sends.iter().flat_map(|send| &send.parts).flat_map(|part| &part.request.inputs);
        inputs.map(|input| input.tensor.data.bytes_here()).sum::<usize>() > LONG
    }
}

impl Driver {
    /// Sends and answers. Without the lock: copying takes time.
    pub(super) fn perform(&self, effects: Effects) -> Option<Grant> {
        for (link, keys) in effects.ended {
            link.send(&ToWorker::SequenceEnded(keys));
        }
        for sequence in effects.restarted {
            self.tell_restarted(&sequence);
        }
        for Send { instance, link, batch, flags, parts, steps, flows } in effects.sends {
            let resumed: Vec<Resumed> = flows.iter().map(|(request, flow)| flow.resumed(*request)).collect();
            let resumed_now = resumed.clone();
            let to_send = ToSend { batch, flags, parts: &parts, steps: &steps, controls: &[], resumed: resumed_now };
            if let Err(error) = link.execute(&self.config, &to_send) {
                self.send_failed(instance, batch, &error);
            }
            for ((_, flow), told) in flows.iter().zip(&resumed) {
                flow.tell_since(told);
            }
        }
        for (request, answer) in effects.answers {
            request.reply.send(answer);
        }
        effects.grant
    }

    /// The alarm for `at` rings, on the thread of the timer. One that has been overtaken by an earlier one does nothing.
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
                runtime.spawn_blocking(move || {
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
