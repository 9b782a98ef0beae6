//! The inputs of a batch, where a frame says that they are.

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::wire::{Execute, InputBlock};

use crate::backend::{Batch, Input, run_error};
use crate::memory::InputArena;
use crate::runtime::{LoanCell, Shared};

/// The batch that a frame describes, its inputs in place.
pub(super) fn batch_of<'a>(
    config: &'a ModelConfig,
    (shared, loan): (&'a Shared, &'a LoanCell<'a>),
    execute: &'a Execute,
) -> Result<Batch<'a>, InferError> {
    let inputs = execute.inputs.iter().map(|block| {
        let name = name_of(config, block)?;
        let data = bytes_of(&shared.inputs, block, name)?;
        Ok(Input {
            index: usize::from(block.input),
            name,
            datatype: block.datatype,
            shape: &block.shape,
            data,
            pieces: &[],
        })
    });
    Ok(batch_with(config, (shared, loan), execute, inputs.collect::<Result<_, InferError>>()?))
}

/// The name of an input.
pub(super) fn name_of<'a>(config: &'a ModelConfig, block: &InputBlock) -> Result<&'a str, InferError> {
    let index = usize::from(block.input);
    config.input_name(index).ok_or_else(|| run_error(format!("there is no input {index}")))
}

/// The bytes of an input that is in the arena.
pub(super) fn bytes_of<'a>(memory: &'a InputArena, block: &InputBlock, name: &str) -> Result<&'a [u8], InferError> {
    let data = memory.bytes(block.offset, block.len);
    data.ok_or_else(|| run_error(format!("input '{name}' is not in the arena")))
}

/// A batch of these inputs.
pub(super) fn batch_with<'a>(
    config: &'a ModelConfig,
    (shared, loan): (&'a Shared, &'a LoanCell<'a>),
    execute: &'a Execute,
    inputs: Vec<Input<'a>>,
) -> Batch<'a> {
    Batch {
        config,
        positions: &[],
        always: &[],
        requests: &execute.requests,
        inputs,
        wanted: &execute.outputs,
        flags: shared.inputs.flags(execute.flags),
        loan,
    }
}
