//! Replies of single requests that are sent with their batch, and the blocks of their outputs.

use std::sync::Arc;

use pharos::error::InferError;
use pharos::infer::{Parameter, Parameters};
use pharos::wire::{OutputBlock, WireError};

use crate::blocks::block;
use crate::error::wire_error;
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

/// The location of an output that is an input passed on.
#[derive(Clone, Copy)]
struct InLoan {
    loan: u64,
    offset: u64,
}

impl PassOn<'_> {
    /// Returns the location of each output that is an input passed on and that no other code holds:
    /// another holder could change the input before it is read. Empty without such an output.
    fn places(&self, outputs: &[(u32, ReplyOutput)]) -> Vec<Option<InLoan>> {
        let received = || outputs.iter().filter_map(|(_, output)| output.content.received());
        if !self.allowed || received().next().is_none() {
            return Vec::new();
        }
        let own_key = self.loan.map(|loan| loan.key);
        let place_of = |output: &ReplyOutput| {
            let bytes = output.content.received()?;
            let loan = bytes.loan()?;
            let here = received()
                .filter(|other| other.loan().is_some_and(|other| Arc::ptr_eq(other, loan)));
            let holders = here.count() + usize::from(own_key == Some(loan.key));
            let offset = loan.offset_of(bytes)?;
            (Arc::strong_count(loan) == holders).then_some(InLoan { loan: loan.key, offset })
        };
        outputs.iter().map(|(_, output)| place_of(output)).collect()
    }
}

/// The blocks of outputs.
#[derive(Default)]
pub(crate) struct DeferredBlocks {
    pub(crate) blocks: Vec<OutputBlock>,
    /// Requests without room for an output, with the error of the first one. The blocks may contain
    /// others of their outputs.
    pub(crate) failed: Vec<(u32, WireError)>,
    /// The values that must live until the blocks are sent.
    pub(crate) kept: Vec<Received>,
}

impl DeferredBlocks {
    /// Creates the blocks of outputs, each of one request. An input that is passed on is copied only
    /// if another holder could change it before it is read.
    pub(crate) fn new(
        outputs: Vec<(u32, ReplyOutput)>,
        arenas: &Arc<Arenas>,
        pass_on: &PassOn<'_>,
    ) -> Self {
        let mut this = Self { blocks: Vec::with_capacity(outputs.len()), ..Self::default() };
        let places = pass_on.places(&outputs);
        for (at, (request, output)) in outputs.into_iter().enumerate() {
            let made = match places.get(at).copied().flatten() {
                Some(place) => this.pass_on(place, output),
                None => in_memory(arenas, output).map(|(block, memory)| {
                    memory.into_iter().for_each(Memory::sent);
                    block
                }),
            };
            match made {
                Ok(block) => this.blocks.push(OutputBlock { requests: vec![request], ..block }),
                Err(_) if this.failed.iter().any(|(failed, _)| *failed == request) => {}
                Err(error) => this.failed.push((request, wire_error(error))),
            }
        }
        this
    }

    /// Returns the block of an output that is an input passed on.
    fn pass_on(&mut self, place: InLoan, output: ReplyOutput) -> Result<OutputBlock, InferError> {
        let ReplyOutput { output, datatype, shape, content } = output;
        let len = content.received().map_or(0, |bytes| bytes.len() as u64);
        if let Content::Received(bytes) = content {
            self.kept.push(bytes);
        }
        let block = block(output, datatype, shape)?;
        Ok(OutputBlock { offset: place.offset, len, loan: Some(place.loan), ..block })
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
