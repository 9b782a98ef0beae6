//! Input memory that a worker may read: of its batches, until they are done or the worker returns
//! what it keeps; and of the answers to its calls.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use pharos::arena::Block;
use pharos::error::InferError;
use pharos::infer::InferOutput;
use pharos::tensor::Tensor;
use pharos::wire::{AnswerOutput, Done};

use super::Link;
use super::gather::{Gathered, no_room};
use crate::memory::{Inputs, Lease};

impl Link {
    /// Lends blocks to the worker under this key.
    pub(super) fn lend(&self, key: u64, blocks: Vec<Block>) {
        let lease = Lease::new(&self.arenas.inputs, blocks);
        self.leases.lock().insert(key, lease);
    }

    /// Frees the inputs of a batch that is no longer read.
    pub(super) fn release_inputs(&self, batch: u64) {
        let lease = self.leases.lock().remove(&batch);
        drop(lease);
    }

    /// Frees the inputs of a finished batch, unless the worker keeps them or passes some on as
    /// outputs.
    pub(crate) fn inputs_read(&self, done: &Done) {
        if !done.held && !passes_on(done) {
            self.release_inputs(done.batch);
        }
    }

    /// Frees inputs that were passed on as outputs, after the outputs have been taken. The memory
    /// stays until the outputs are read.
    pub(crate) fn inputs_lent(&self, done: &Done) {
        if !done.held && passes_on(done) {
            self.release_inputs(done.batch);
        }
    }

    /// Frees memory that the worker no longer uses.
    pub(crate) fn give_back(&self, keys: &[u64]) {
        for key in keys {
            self.release_inputs(*key);
        }
    }

    /// Returns bytes that the worker passes on from memory lent under this key.
    pub(crate) fn passed_on(&self, key: u64, offset: u64, len: u64) -> Option<Bytes> {
        let lease = self.leases.lock().get(&key).cloned()?;
        Inputs::pass_on(&lease, offset, len)
    }

    /// Copies tensors into memory for the worker. Returns the key of the loan (0 for none) and the
    /// places of the tensors.
    ///
    /// # Errors
    /// The arena is full.
    pub(crate) fn lend_tensors(
        &self,
        tensors: Vec<InferOutput>,
    ) -> Result<(u64, Vec<AnswerOutput>), InferError> {
        let mut gathered = Gathered::default();
        let written: Result<Vec<AnswerOutput>, InferError> = tensors
            .into_iter()
            .map(|InferOutput { name, tensor: Tensor { datatype, shape, data } }| {
                if data.region().is_some() {
                    return Err(no_room(data.len() as u64));
                }
                let block =
                    self.write_pieces(data.pieces().iter().map(|piece| &**piece), &mut gathered)?;
                Ok(AnswerOutput { name, datatype, shape, offset: block.offset, len: block.len })
            })
            .collect();
        match written {
            Ok(outputs) if gathered.blocks.is_empty() => Ok((0, outputs)),
            Ok(outputs) => {
                let loan = self.next_loan.fetch_add(1, Ordering::Relaxed);
                self.lend(loan, gathered.blocks);
                Ok((loan, outputs))
            }
            Err(error) => {
                self.arenas.inputs.release(&gathered.blocks);
                Err(error)
            }
        }
    }
}

/// Returns whether some outputs are lent inputs.
fn passes_on(done: &Done) -> bool {
    done.outputs.iter().any(|block| block.loan.is_some())
}
