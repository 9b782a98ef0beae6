//! Finds the inputs of a batch at the locations that a frame gives.

use pharos::error::InferError;
use pharos::model::ModelConfig;
use pharos::wire::{Execute, InputBlock};
use pharos_backend::runtime::{BatchLoan, InputArena};
use pharos_backend::{Batch, Input, run_error};

/// Returns the batch that a frame describes, with its inputs in place.
pub(super) fn batch_of<'a>(
    config: &'a ModelConfig,
    arena: &'a InputArena,
    loan: &'a BatchLoan<'a>,
    execute: &'a Execute,
) -> Result<Batch<'a>, InferError> {
    let inputs = execute.inputs.iter().map(|block| {
        let name = name_of(config, block)?;
        let data = bytes_of(arena, block, name)?;
        Ok(Input {
            index: usize::from(block.input),
            name,
            datatype: block.datatype,
            shape: &block.shape,
            data,
            pieces: &[],
        })
    });
    Ok(Batch::new(config, loan, inputs.collect::<Result<_, InferError>>()?))
}

/// Returns the name of an input.
pub(super) fn name_of<'a>(config: &'a ModelConfig, block: &InputBlock) -> Result<&'a str, InferError> {
    let index = usize::from(block.input);
    config.input_name(index).ok_or_else(|| run_error(format!("there is no input {index}")))
}

/// Returns the bytes of an input in the arena.
pub(super) fn bytes_of<'a>(memory: &'a InputArena, block: &InputBlock, name: &str) -> Result<&'a [u8], InferError> {
    let data = memory.bytes(block.offset, block.len);
    data.ok_or_else(|| run_error(format!("input '{name}' is not in the arena")))
}
