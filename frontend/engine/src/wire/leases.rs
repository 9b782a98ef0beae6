//! Input memory that a worker has: that of its batches, until they are done or what it keeps of them is returned, and that of
//! the answers to its calls.

use std::sync::atomic::Ordering;

use bytes::Bytes;
use pharos::arena::Block;
use pharos::error::InferError;
use pharos::infer::InferOutput;
use pharos::tensor::Tensor;
use pharos::wire::{AnswerOutput, Done};

use super::gather::{Gathered, no_room};
use super::{Link, lock};
use crate::memory::{Inputs, Lease};

impl Link {
    /// The worker has these blocks under this number.
    pub(super) fn lend(&self, key: u64, blocks: Vec<Block>) {
        let lease = Lease::new(&self.arenas.inputs, blocks);
        lock(&self.leases).insert(key, lease);
    }

    /// Gives back the inputs of a batch of which nothing more is read.
    pub(super) fn release_inputs(&self, batch: u64) {
        let lease = lock(&self.leases).remove(&batch);
        drop(lease);
    }

    /// A batch is done: its inputs are given back, unless its worker keeps them or has passed some on as outputs.
    pub(crate) fn inputs_read(&self, done: &Done) {
        if !done.held && !passes_on(done) {
            self.release_inputs(done.batch);
        }
    }

    /// The outputs of a batch have been taken: its inputs are given back that it has passed on as outputs, as soon as
    /// those are read.
    pub(crate) fn inputs_lent(&self, done: &Done) {
        if !done.held && passes_on(done) {
            self.release_inputs(done.batch);
        }
    }

    /// The worker does not use these any more.
    pub(crate) fn give_back(&self, keys: &[u64]) {
        for key in keys {
            self.release_inputs(*key);
        }
    }

    /// Bytes that the worker passes on from what it was lent under this number.
    pub(crate) fn passed_on(&self, key: u64, offset: u64, len: u64) -> Option<Bytes> {
        let lease = lock(&self.leases).get(&key).cloned()?;
        Inputs::pass_on(&lease, offset, len)
    }

    /// Copies tensors into memory for the worker. Gives the number under which it has that, 0 for none, and where they are.
    ///
    /// # Errors
    /// There is no room.
    pub(crate) fn lend_tensors(&self, tensors: Vec<InferOutput>) -> Result<(u64, Vec<AnswerOutput>), InferError> {
        let mut gathered = Gathered::default();
        let written: Result<Vec<AnswerOutput>, InferError> = tensors
            .into_iter()
            .map(|InferOutput { name, tensor: Tensor { datatype, shape, data } }| {
                if data.region().is_some() {
                    return Err(no_room(data.len() as u64));
                }
                let block = self.write_pieces(data.pieces().iter().map(|piece| &**piece), &mut gathered)?;
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

/// Whether outputs are inputs.
fn passes_on(done: &Done) -> bool {
    done.outputs.iter().any(|block| block.lent.is_some())
}
