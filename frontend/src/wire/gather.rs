//! Requests into a batch: one copy, contiguous, into the instance's input arena.

use std::sync::Arc;

use pharos::data::Data;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::InferRequest;
use pharos::model::{Checked, ModelConfig};
use pharos::wire::{BatchRequest, Execute, InputBlock, ToWorker};

use super::{Link, lock};
use crate::memory::CAPACITY;

/// One request of a batch: checked, its inputs in the configuration's order.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) request: InferRequest,
    pub(crate) checked: Checked,
}

impl Link {
    /// Gathers a batch and sends it. The requests have equal shape keys: the same inputs, compatible shapes.
    ///
    /// # Errors
    /// The inputs do not fit in the arena; nothing was sent.
    pub(crate) fn execute(&self, batch: u64, config: &ModelConfig, parts: &[Arc<Part>]) -> Result<(), InferError> {
        let mut inputs = Vec::new();
        let mut blocks = Vec::new();
        for (position, spec) in config.inputs.iter().enumerate() {
            let Some(index) = parts.first().and_then(|part| index_of(&part.request, &spec.name)) else { continue };
            match self.gather(index, parts) {
                Ok((block, offset_len)) => {
                    blocks.push(block);
                    inputs.push(InputBlock {
                        input: u16::try_from(position).unwrap_or(u16::MAX),
                        datatype: spec.datatype,
                        shape: batch_shape(
                            config,
                            spec.backend_shape(first_shape(parts, index), config.batches()),
                            parts,
                        ),
                        offset: offset_len.0,
                        len: offset_len.1,
                    });
                }
                Err(error) => {
                    self.arenas.inputs.release(&blocks);
                    return Err(error);
                }
            }
        }
        lock(&self.blocks).insert(batch, blocks);
        let released = self.arenas.outputs.take_released();
        let requests = parts.iter().map(|part| describe(part)).collect();
        let frame = ToWorker::Execute(Execute { batch, requests, inputs, outputs: wanted(config, parts), released });
        if self.send(&frame) {
            return Ok(());
        }
        if let ToWorker::Execute(Execute { released, .. }) = frame {
            self.send(&ToWorker::Release(released));
        }
        self.release_inputs(batch);
        let text = "the ids and parameters of the requests in a batch are too long for its worker";
        Err(InferError::new(ErrorCode::InvalidArg, Reason::TooLarge, text))
    }

    /// Gives back the inputs of a batch that is done.
    pub(crate) fn release_inputs(&self, batch: u64) {
        let blocks = lock(&self.blocks).remove(&batch);
        if let Some(blocks) = blocks {
            self.arenas.inputs.release(&blocks);
        }
    }

    /// Copies one input of all parts into a block; (block, (offset, length)).
    fn gather(&self, index: usize, parts: &[Arc<Part>]) -> Result<(pharos::arena::Block, (u64, u64)), InferError> {
        let pieces = || parts.iter().filter_map(|part| part.request.inputs.get(index)).map(|input| &input.tensor.data);
        let len = pieces().map(|data| data.len() as u64).sum();
        let block = self.arenas.inputs.allocate(len).ok_or_else(|| no_room(len))?;
        let mut at = block.offset;
        for data in pieces().flat_map(Data::pieces) {
            if !self.arenas.inputs.write(at, data) {
                self.arenas.inputs.release(&[block]);
                return Err(no_room(len));
            }
            at += data.len() as u64;
        }
        Ok((block, (block.offset, len)))
    }
}

fn no_room(len: u64) -> InferError {
    let text =
        format!("{len} bytes of input do not fit in what is free of the instance's {CAPACITY} bytes of input memory");
    InferError::new(ErrorCode::Unavailable, Reason::TooLarge, text)
}

fn index_of(request: &InferRequest, name: &str) -> Option<usize> {
    request.inputs.iter().position(|input| input.name == name)
}

fn first_shape(parts: &[Arc<Part>], index: usize) -> &[i64] {
    let input = parts.first().and_then(|part| part.request.inputs.get(index));
    input.map(|input| input.tensor.shape.as_slice()).unwrap_or_default()
}

/// The shape over the whole batch: the first dimension counts the rows of all requests.
fn batch_shape(config: &ModelConfig, mut shape: Vec<i64>, parts: &[Arc<Part>]) -> Vec<i64> {
    if config.max_batch_size > 0
        && let Some(first) = shape.first_mut()
    {
        *first = parts.iter().map(|part| i64::from(rows(part))).sum();
    }
    shape
}

fn rows(part: &Part) -> u32 {
    u32::try_from(part.checked.batch_size).unwrap_or(u32::MAX)
}

fn describe(part: &Part) -> BatchRequest {
    BatchRequest { id: part.request.id.clone(), rows: rows(part), parameters: part.request.parameters.clone() }
}

/// The outputs that any of the requests wants; empty if one of them wants all.
fn wanted(config: &ModelConfig, parts: &[Arc<Part>]) -> Vec<u16> {
    if parts.iter().any(|part| part.request.outputs.is_empty()) {
        return Vec::new();
    }
    let asked = |name: &str| parts.iter().any(|part| part.request.outputs.iter().any(|output| output.name == name));
    let outputs = config.outputs.iter().enumerate().filter(|(_, output)| asked(&output.name));
    outputs.filter_map(|(position, _)| u16::try_from(position).ok()).collect()
}
