//! Output blocks, as frames describe them.

use pharos::error::InferError;
use pharos::tensor::{DataType, byte_size};
use pharos::wire::OutputBlock;

use crate::error::{arena_full, run_error};
use crate::memory::OutputArena;

/// An output as a backend allocates it.
#[derive(Clone, Copy)]
pub(crate) struct OutputTensor<'s> {
    /// Position in the configuration's outputs.
    pub(crate) output: usize,
    pub(crate) datatype: DataType,
    pub(crate) shape: &'s [i64],
    /// Length in bytes.
    pub(crate) len: usize,
}

impl OutputTensor<'_> {
    /// Allocates a new block of the arena for the output; returns the block and its memory.
    ///
    /// # Errors
    /// The arena is full.
    pub(crate) fn allocate<'m>(
        &self,
        arena: &'m OutputArena,
    ) -> Result<(OutputBlock, &'m mut [u8]), InferError> {
        let block = block(self.output, self.datatype, self.shape.to_vec())?;
        let allocated = arena.allocate(self.len as u64);
        let (memory, bytes) = allocated.ok_or_else(|| arena_full(self.len, arena.capacity()))?;
        Ok((OutputBlock { offset: memory.offset, len: memory.len, ..block }, bytes))
    }

    /// Returns a block for the output of these requests, placed in client memory.
    pub(crate) fn placed(&self, requests: Vec<u32>) -> Result<OutputBlock, InferError> {
        let block = block(self.output, self.datatype, self.shape.to_vec())?;
        Ok(OutputBlock { requests, len: self.len as u64, in_client_memory: true, ..block })
    }
}

/// Returns a block without memory for an output of the whole batch.
///
/// # Errors
/// The number of the output is too large for a frame.
pub(crate) fn block(
    output: usize,
    datatype: DataType,
    shape: Vec<i64>,
) -> Result<OutputBlock, InferError> {
    let output = u16::try_from(output).map_err(|_| run_error("too many outputs"))?;
    Ok(OutputBlock {
        output,
        requests: Vec::new(),
        datatype,
        shape,
        offset: 0,
        len: 0,
        in_client_memory: false,
        loan: None,
    })
}

/// Returns the size in bytes of an output of a fixed-size datatype.
///
/// # Errors
/// The shape has a negative dimension, or the datatype is BYTES.
pub(crate) fn fixed_size(
    output: usize,
    datatype: DataType,
    shape: &[i64],
) -> Result<usize, InferError> {
    let len = byte_size(datatype, shape).and_then(|len| usize::try_from(len).ok());
    len.ok_or_else(|| run_error(format!("output {output} has no size: {datatype} {shape:?}")))
}
