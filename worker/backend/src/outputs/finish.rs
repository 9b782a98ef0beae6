//! The end of a batch: collects its outputs into its outcome.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::timeline::ComputeStamps;
use pharos::wire::Done;

use super::Outputs;
use crate::clock;
use crate::deferred::{DeferredReplies, PassOn, merge};
use crate::error::wire_error;
use crate::received::{Loan, Received};
use crate::streams::Collected;

/// The outcome of a batch.
pub struct Finished {
    /// The frame for the frontend.
    pub done: Done,
    /// Inputs that outputs were passed on from, and the batch's loan: drop them after the frame is sent, not before.
    pub kept: (Vec<Received>, Option<Arc<Loan>>),
}

impl Outputs<'_> {
    /// Returns the outcome of the batch; `loan` holds the inputs of the batch. For the worker's runtime.
    #[doc(hidden)]
    pub fn finish_batch(mut self, loan: Option<Arc<Loan>>, error: Option<InferError>) -> Finished {
        let batch = self.execute.batch;
        let Collected { deferred, open } = match self.registered {
            true => self.session.connection.batch_ends(batch, error.is_none(), &self.rescheduled),
            false => Collected::default(),
        };
        let kept = self.add_deferred(deferred, loan.as_ref());
        let error = self.place(error);
        let mut done = self.done(batch, error);
        let own = |bytes: &&Received| bytes.loan().zip(loan.as_ref()).is_some_and(|(one, own)| Arc::ptr_eq(one, own));
        let ours = 1 + kept.iter().filter(own).count();
        if let Some(loan) = loan.as_ref().filter(|loan| Arc::strong_count(loan) > ours) {
            loan.hold();
            done.held = true;
        }
        done.open = open;
        Finished { done, kept: (kept, loan) }
    }

    /// Adds the replies of single requests. Returns the inputs that outputs are passed on from.
    fn add_deferred(&mut self, replies: DeferredReplies, loan: Option<&Arc<Loan>>) -> Vec<Received> {
        let DeferredReplies { outputs, parameters, failed } = replies;
        self.failed.extend(failed);
        for (request, parameters) in parameters {
            merge(&mut self.parameters, request, parameters);
        }
        if outputs.is_empty() {
            return Vec::new();
        }
        let requests: Vec<u32> = outputs.iter().map(|(request, _)| *request).collect();
        let pass_on = PassOn { loan, allowed: self.client_memory.is_none() };
        match DeferredReplies::into_blocks(outputs, &self.session.arenas, &pass_on) {
            Ok((blocks, kept)) => {
                self.blocks.extend(blocks);
                kept
            }
            Err(error) => {
                self.failed.extend(requests.into_iter().map(|request| (request, wire_error(error.clone()))));
                Vec::new()
            }
        }
    }

    fn done(mut self, batch: u64, error: Option<InferError>) -> Done {
        let end = clock::now();
        let input_end = self.input_end.unwrap_or(self.start);
        let stamps = ComputeStamps {
            start: self.start,
            input_end,
            output_start: self.output_start.unwrap_or(end).max(input_end),
            end,
        };
        if error.is_some() {
            let made = self.blocks.iter().filter(|block| !block.in_client_memory && block.loan.is_none());
            self.withdrawn.extend(made.map(|block| block.offset));
        }
        self.arena.release(&self.withdrawn);
        let (open, held) = (Vec::new(), false);
        let Some(error) = error else {
            let Self { failed, parameters, rescheduled, blocks: outputs, .. } = self;
            return Done { batch, stamps, error: None, failed, outputs, parameters, rescheduled, open, held };
        };
        let (failed, outputs, parameters, rescheduled) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let error = Some(wire_error(error));
        Done { batch, stamps, error, failed, outputs, parameters, rescheduled, open, held }
    }
}
