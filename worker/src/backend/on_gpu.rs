//! `builtin` on a GPU: identity and add_sub, through the driver only, so that the transfer to a
//! device and back can be tested without a framework.
//!
//! Inputs are uploaded in one stream, computed in a second, and outputs are downloaded in a third;
//! the first output is downloaded while the second is computed. Before it waits for all that, the
//! backend starts to upload the inputs of the next batch if its frame has arrived. Client memory on
//! the device is used in place if it is aligned.

mod kernels;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests;

use std::sync::Arc;

use pharos::error::InferError;
use pharos::tensor::DataType;
use pharos_backend::{
    Backend, Batch, Context, DeviceInputs, Input, OutputMemory, Outputs, Source, load_error,
    run_error,
};

use crate::device::{
    Buffer, Cuda, DeviceMemory, Fault, Function, OWN, Pool, Prefetch, Queues, Work, is_usable,
};

/// The operation on a batch.
enum Operation {
    Identity,
    AddSub {
        /// For the sum and the difference.
        kernels: [Function; 2],
        datatype: DataType,
        /// The size of an element in bytes.
        size: usize,
    },
}

struct OnGpu {
    engine: String,
    operation: Operation,
    /// Inputs being copied for the batch with this number. That batch may never be executed here:
    /// if it is cancelled, another batch's data can be at the same location.
    ahead: (u64, Vec<Prefetch>),
    pool: Pool,
    queues: Queues,
}

/// Creates the function `identity` on the instance's device.
///
/// # Errors
/// The device cannot be used.
pub(super) fn identity(cuda: &Arc<Cuda>) -> Result<Box<dyn Backend>, InferError> {
    create(cuda, Operation::Identity)
}

/// Creates the function `add_sub` on the instance's device.
///
/// # Errors
/// The function does not support the model's datatypes, or the device cannot be used.
pub(super) fn add_sub(
    context: &Context<'_>,
    cuda: &Arc<Cuda>,
) -> Result<Box<dyn Backend>, InferError> {
    create(cuda, add_sub_of(context, cuda)?)
}

fn create(cuda: &Arc<Cuda>, operation: Operation) -> Result<Box<dyn Backend>, InferError> {
    let failed = |fault: Fault| load_error(format!("the GPU cannot be used: {fault}"));
    let name = cuda.call(|driver| driver.name(OWN)).map_err(failed)?;
    let engine = format!("builtin {} on {name}", env!("CARGO_PKG_VERSION"));
    let queues = Queues::new(cuda).map_err(failed)?;
    let pool = Pool::new(cuda.clone());
    Ok(Box::new(OnGpu { engine, operation, ahead: (0, Vec::new()), pool, queues }))
}

/// Compiles the kernels for the model's datatype.
fn add_sub_of(context: &Context<'_>, cuda: &Cuda) -> Result<Operation, InferError> {
    let inputs = &context.config.inputs;
    let outputs = &context.config.outputs;
    let mut datatypes = inputs.iter().chain(outputs).map(|tensor| tensor.datatype);
    let datatype = datatypes.next().unwrap_or(DataType::Bytes);
    if datatypes.any(|other| other != datatype) {
        return Err(load_error("add_sub needs one datatype for its inputs and outputs"));
    }
    let (Some((source, names)), Some(size)) = (kernels::add_sub(datatype), datatype.size()) else {
        return Err(load_error(format!(
            "add_sub on a GPU has no arithmetic for {datatype}: it supports only numbers"
        )));
    };
    let kernels = cuda.call(|driver| {
        let module = driver.module(OWN, &source)?;
        let [add, sub] = names.each_ref().map(|name| driver.function(OWN, module, name));
        Ok([add?, sub?])
    });
    let kernels = kernels
        .map_err(|fault| load_error(format!("cannot load the kernels on the GPU: {fault}")))?;
    Ok(Operation::AddSub { kernels, datatype, size })
}

impl Backend for OnGpu {
    fn engine(&self) -> String {
        self.engine.clone()
    }

    /// Each input is copied once, and strings are not parsed.
    fn tolerates_concurrent_writes(&self) -> bool {
        true
    }

    fn takes_device_memory(&self) -> DeviceInputs {
        DeviceInputs::Pieces
    }

    fn execute(&mut self, batch: &Batch<'_>, outputs: &mut Outputs<'_>) -> Result<(), InferError> {
        let (batch_ahead, mut before) = std::mem::take(&mut self.ahead);
        if batch_ahead != outputs.batch() {
            before.clear();
        }
        let mut used = Vec::new();
        let result = self.run(batch, outputs, &before, &mut used);
        // All work is done or abandoned; its buffers can be reused. After a failed batch, copies
        // made ahead are waited for and dropped.
        if result.is_ok() {
            used.extend(before.into_iter().filter_map(Prefetch::into_buffer));
        }
        used.into_iter().for_each(|buffer| self.pool.put(buffer));
        result
    }
}

/// A batch being prepared: its work, and the pool for its buffers.
pub(super) struct Run<'r, 'm> {
    pub(super) work: Work<'m>,
    pub(super) pool: &'r mut Pool,
    pub(super) ahead: &'r [Prefetch],
    pub(super) used: &'r mut Vec<Buffer>,
}

/// Starts to copy the inputs of the next batch, if its frame has arrived; returns the batch's
/// number and the copies.
pub(super) fn copy_ahead(
    queues: &Queues,
    pool: &mut Pool,
    outputs: &Outputs<'_>,
) -> (u64, Vec<Prefetch>) {
    let Some((batch, inputs)) = outputs.next_inputs() else { return (0, Vec::new()) };
    let mut ahead = Vec::with_capacity(inputs.len());
    for bytes in inputs {
        // Without room for them, this batch is computed all the same.
        let Ok(buffer) = pool.take(bytes.len()) else { break };
        ahead.extend(queues.ahead(Box::new(bytes), buffer).ok());
    }
    (batch, ahead)
}

impl OnGpu {
    fn run(
        &mut self,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        ahead: &[Prefetch],
        used: &mut Vec<Buffer>,
    ) -> Result<(), InferError> {
        let Self { operation, queues, pool, .. } = self;
        let mut run = Run { work: queues.begin().map_err(failed)?, pool, ahead, used };
        match operation {
            Operation::Identity => run.identity(batch, outputs)?,
            Operation::AddSub { kernels, datatype, size } => {
                run.add_sub(batch, outputs, kernels, *datatype, *size)?;
            }
        }
        let Run { work, pool, .. } = run;
        self.ahead = copy_ahead(queues, pool, outputs);
        let began = work.began();
        let spans = work.finish().map_err(failed)?;
        outputs.measured(began, spans.inputs, spans.computing);
        Ok(())
    }
}

impl<'m> Run<'_, 'm> {
    fn identity<'o: 'm>(
        &mut self,
        batch: &'m Batch<'_>,
        outputs: &mut Outputs<'o>,
    ) -> Result<(), InferError> {
        let wanted = batch.inputs.iter().filter(|input| batch.wants(input.index));
        let inputs: Vec<_> = wanted
            .map(|input| Ok((input, self.place(input, 1)?)))
            .collect::<Result<_, InferError>>()?;
        self.work.inputs_follow_no_more().map_err(failed)?;
        self.work.computed().map_err(failed)?;
        for (input, memory) in inputs {
            let place = outputs.allocate_anywhere(
                input.index,
                input.datatype,
                input.shape,
                memory.len(),
            )?;
            self.deliver(memory, place)?;
        }
        Ok(())
    }

    fn add_sub<'o: 'm>(
        &mut self,
        batch: &'m Batch<'_>,
        outputs: &mut Outputs<'o>,
        kernels: &[Function; 2],
        datatype: DataType,
        size: usize,
    ) -> Result<(), InferError> {
        let [left, right] = batch.inputs.as_slice() else {
            return Err(run_error(format!("add_sub needs 2 inputs, got {}", batch.inputs.len())));
        };
        if left.shape != right.shape {
            let text = format!(
                "add_sub needs inputs of one shape, got {:?} and {:?}",
                left.shape, right.shape
            );
            return Err(InferError::invalid(text));
        }
        let left_memory = self.place(left, size)?;
        let right_memory = self.place(right, size)?;
        if left_memory.len() != right_memory.len()
            || [left, right].iter().any(|input| input.datatype != datatype)
        {
            return Err(run_error("add_sub needs one datatype for its inputs and outputs"));
        }
        self.work.inputs_follow_no_more().map_err(failed)?;
        let len = left_memory.len();
        for (output, kernel) in
            kernels.iter().enumerate().filter(|(output, _)| batch.wants(*output))
        {
            let place = outputs.allocate_anywhere(output, datatype, left.shape, len)?;
            let target = match &place {
                OutputMemory::Device(memory) if is_usable(*memory, size) => *memory,
                _ => self.buffer(len)?,
            };
            let count = (len / size) as u64;
            let arguments =
                [left_memory.address(), right_memory.address(), target.address(), count];
            self.work.launch(*kernel, &arguments, count).map_err(failed)?;
            self.work.computed().map_err(failed)?;
            self.deliver(target, place)?;
        }
        // Also if no output was wanted.
        self.work.computed().map_err(failed)
    }

    /// Returns the location of an input on the device, for elements of `size` bytes: the copy made
    /// ahead, the client's memory, or a buffer to which it is copied.
    pub(super) fn place(
        &mut self,
        input: &Input<'m>,
        size: usize,
    ) -> Result<DeviceMemory, InferError> {
        if let [Source::Device(memory)] = input.pieces
            && is_usable(*memory, size)
        {
            return Ok(*memory);
        }
        if let Some(ahead) =
            self.ahead.iter().find(|ahead| input.pieces.is_empty() && ahead.is_of(input.data))
        {
            return Ok(ahead.memory());
        }
        let whole = [Source::Host(input.data)];
        let pieces = if input.pieces.is_empty() { whole.as_slice() } else { input.pieces };
        let memory = self.buffer(pieces.iter().map(Source::len).sum())?;
        let mut offset = 0;
        for piece in pieces {
            let to = memory
                .part(offset, piece.len())
                .ok_or_else(|| run_error("a buffer is too small"))?;
            offset += piece.len();
            match *piece {
                Source::Host(bytes) => self.work.upload(bytes, to),
                Source::Device(from) => self.work.bring(from, to),
                Source::Zeros(_) => self.work.zero(to),
            }
            .map_err(failed)?;
        }
        Ok(memory)
    }

    /// Starts to copy an output to its destination, unless it was computed there.
    pub(super) fn deliver(
        &mut self,
        from: DeviceMemory,
        place: OutputMemory<'m>,
    ) -> Result<(), InferError> {
        match place {
            OutputMemory::Host(into) => self.work.download(from, into).map_err(failed),
            OutputMemory::Device(to) if to == from => Ok(()),
            OutputMemory::Device(to) => self.work.send(from, to).map_err(failed),
            OutputMemory::Pieces(pieces) => {
                let mut offset = 0;
                for piece in pieces {
                    let part = from
                        .part(offset, piece.len())
                        .ok_or_else(|| run_error("an output is too small"))?;
                    offset += piece.len();
                    self.deliver(part, piece)?;
                }
                Ok(())
            }
        }
    }

    /// Returns memory of the device for this batch.
    pub(super) fn buffer(&mut self, len: usize) -> Result<DeviceMemory, InferError> {
        let buffer = self.pool.take(len).map_err(failed)?;
        let memory = buffer.first(len);
        self.used.push(buffer);
        Ok(memory)
    }
}

pub(super) fn failed(fault: Fault) -> InferError {
    run_error(format!("the GPU has failed: {fault}"))
}
