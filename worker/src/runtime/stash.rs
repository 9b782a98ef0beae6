//! Answers of single requests that leave with their batch, and where the bytes of outputs go.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::wire::{OutputBlock, WireError};

use super::responder::{Content, ReplyOutput};
use super::{Loan, Memory, Received, Shared, full};
use crate::backend::run_error;
use crate::instance::placed_block;

/// What was answered on its own while the batch was executed, of a model that answers once.
#[derive(Default)]
pub(crate) struct Stash {
    pub(crate) outputs: Vec<(u32, ReplyOutput)>,
    pub(crate) parameters: Vec<(u32, Parameters)>,
    pub(crate) failed: Vec<(u32, WireError)>,
}

/// An output in memory of its own, and its block; none if it is where its client wants it.
pub(super) fn in_memory(
    shared: &Arc<Shared>,
    output: ReplyOutput,
) -> Result<(OutputBlock, Option<Memory>), InferError> {
    let ReplyOutput { output, datatype, shape, content } = output;
    let memory = match content {
        Content::Memory(memory) => memory,
        Content::Received(bytes) => copied(shared, &bytes)?,
        Content::Placed(len) => return Ok((placed_block((output, Vec::new()), datatype, shape, len)?, None)),
    };
    let output = u16::try_from(output).map_err(|_| run_error("too many outputs"))?;
    let (offset, len) = memory.place();
    let block = OutputBlock { output, requests: Vec::new(), datatype, shape, offset, len, placed: false, lent: None };
    Ok((block, Some(memory)))
}

pub(super) fn copied(shared: &Arc<Shared>, bytes: &[u8]) -> Result<Memory, InferError> {
    Memory::copy_of(shared, bytes).ok_or_else(|| full(bytes.len(), shared.outputs.capacity()))
}

impl Stash {
    /// The outputs as blocks, those that are inputs passed on if that can be: nobody else may have a hold of them, who could
    /// change them before they are read. `own` is the loan of the batch. Gives what has to live until the blocks are sent.
    ///
    /// # Errors
    /// There is no memory for a copy.
    pub(crate) fn into_blocks(
        outputs: Vec<(u32, ReplyOutput)>,
        shared: &Arc<Shared>,
        (own, may_lend): (Option<&Arc<Loan>>, bool),
    ) -> Result<(Vec<OutputBlock>, Vec<Received>), InferError> {
        let contents: Vec<&Received> = outputs.iter().filter_map(|(_, output)| output.content.received()).collect();
        let own_key = own.map(|loan| loan.key);
        let free = |bytes: &Received| {
            let loan = bytes.loan()?;
            let here = contents.iter().filter(|other| other.loan().is_some_and(|other| Arc::ptr_eq(other, loan)));
            let holders = here.count() + usize::from(own_key == Some(loan.key));
            (Arc::strong_count(loan) == holders).then_some(loan.key)
        };
        let lent: Vec<Option<u64>> =
            outputs.iter().map(|(_, output)| output.content.received().filter(|_| may_lend).and_then(free)).collect();
        let (mut blocks, mut kept, mut memories) = (Vec::new(), Vec::new(), Vec::new());
        for ((request, output), lent) in outputs.into_iter().zip(lent) {
            let requests = vec![request];
            if let (Some(key), Content::Received(bytes)) = (lent, &output.content)
                && let Some(offset) = bytes.loan().and_then(|loan| loan.offset_of(bytes))
            {
                let ReplyOutput { output: number, datatype, ref shape, .. } = output;
                let number = u16::try_from(number).map_err(|_| run_error("too many outputs"))?;
                let (shape, len) = (shape.clone(), bytes.len() as u64);
                let (placed, lent) = (false, Some(key));
                blocks.push(OutputBlock { output: number, requests, datatype, shape, offset, len, placed, lent });
                kept.push(bytes.clone());
                continue;
            }
            let (block, memory) = in_memory(shared, output)?;
            blocks.push(OutputBlock { requests, ..block });
            memories.extend(memory);
        }
        memories.into_iter().for_each(Memory::sent);
        Ok((blocks, kept))
    }
}

impl Content {
    fn received(&self) -> Option<&Received> {
        match self {
            Self::Received(bytes) => Some(bytes),
            Self::Memory(_) | Self::Placed(_) => None,
        }
    }
}

/// Adds parameters to those of a request.
pub(crate) fn merge(all: &mut Vec<(u32, Parameters)>, request: u32, more: Vec<(String, Parameter)>) {
    match all.iter_mut().find(|(position, _)| *position == request) {
        Some((_, parameters)) => parameters.extend(more),
        None => all.push((request, more)),
    }
}
