//! Replies of single requests that are sent with their batch, and the blocks of their outputs.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::wire::{OutputBlock, WireError};

use crate::blocks::block;
use crate::received::{Arenas, Loan, Memory, Received};
use crate::reply::{Content, ReplyOutput};

/// Replies to requests of a non-decoupled model that were given while their batch was executed.
#[derive(Default)]
pub(crate) struct DeferredReplies {
    pub(crate) outputs: Vec<(u32, ReplyOutput)>,
    pub(crate) parameters: Vec<(u32, Parameters)>,
    pub(crate) failed: Vec<(u32, WireError)>,
}

/// Returns the block of an output and its memory; no memory if the output is in client memory.
pub(crate) fn in_memory(
    arenas: &Arc<Arenas>,
    output: ReplyOutput,
) -> Result<(OutputBlock, Option<Memory>), InferError> {
    let ReplyOutput { output, datatype, shape, content } = output;
    let memory = match content {
        Content::Memory(memory) => memory,
        Content::Received(bytes) => Memory::copy_of(arenas, &bytes)?,
        Content::Placed(len) => {
            return Ok((
                OutputBlock {
                    len: len as u64,
                    in_client_memory: true,
                    ..block(output, datatype, shape)?
                },
                None,
            ));
        }
    };
    let (offset, len) = memory.place();
    Ok((OutputBlock { offset, len, ..block(output, datatype, shape)? }, Some(memory)))
}

/// The loan that holds the inputs of a batch, and whether outputs may be passed on from it.
pub(crate) struct PassOn<'l> {
    pub(crate) loan: Option<&'l Arc<Loan>>,
    pub(crate) allowed: bool,
}

impl DeferredReplies {
    /// Returns the outputs as blocks. An input that is passed on is copied only if another holder
    /// could change it before it is read. Also returns the values that must live until the blocks
    /// are sent.
    ///
    /// # Errors
    /// There is no memory for a copy.
    pub(crate) fn into_blocks(
        outputs: Vec<(u32, ReplyOutput)>,
        arenas: &Arc<Arenas>,
        pass_on: &PassOn<'_>,
    ) -> Result<(Vec<OutputBlock>, Vec<Received>), InferError> {
        let contents: Vec<&Received> =
            outputs.iter().filter_map(|(_, output)| output.content.received()).collect();
        let own_key = pass_on.loan.map(|loan| loan.key);
        // The loans of inputs that no other code holds, by output.
        let mut keys: Vec<Option<u64>> = Vec::with_capacity(outputs.len());
        for (_, output) in &outputs {
            let loan =
                output.content.received().filter(|_| pass_on.allowed).and_then(Received::loan);
            keys.push(loan.and_then(|loan| {
                let here = contents
                    .iter()
                    .filter(|other| other.loan().is_some_and(|other| Arc::ptr_eq(other, loan)));
                let holders = here.count() + usize::from(own_key == Some(loan.key));
                (Arc::strong_count(loan) == holders).then_some(loan.key)
            }));
        }
        let mut blocks = Vec::new();
        let mut kept = Vec::new();
        let mut memories = Vec::new();
        for ((request, output), key) in outputs.into_iter().zip(keys) {
            let requests = vec![request];
            if let (Some(key), Content::Received(bytes)) = (key, &output.content)
                && let Some(offset) = bytes.loan().and_then(|loan| loan.offset_of(bytes))
            {
                let loan = Some(key);
                kept.push(bytes.clone());
                let block = block(output.output, output.datatype, output.shape)?;
                blocks.push(OutputBlock {
                    requests,
                    offset,
                    len: bytes.len() as u64,
                    loan,
                    ..block
                });
                continue;
            }
            let (block, memory) = in_memory(arenas, output)?;
            blocks.push(OutputBlock { requests, ..block });
            memories.extend(memory);
        }
        memories.into_iter().for_each(Memory::sent);
        Ok((blocks, kept))
    }
}

/// Adds parameters to the parameters of a request.
pub(crate) fn merge(
    all: &mut Vec<(u32, Parameters)>,
    request: u32,
    more: Vec<(String, Parameter)>,
) {
    match all.iter_mut().find(|(position, _)| *position == request) {
        Some((_, parameters)) => parameters.extend(more),
        None => all.push((request, more)),
    }
}
