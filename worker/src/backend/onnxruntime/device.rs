//! ONNX Runtime on a GPU: inputs are uploaded and outputs downloaded in streams of this process
//! (see `on_gpu`), and the runtime receives addresses on the device. Other tensors stay in the
//! process's memory, and the runtime copies them: strings, BOOL inputs, whose bytes must first be
//! made valid, inputs that the graph returns unchanged, and outputs whose shape is not known before
//! the run.
//!
//! The provider computes in the compute stream of [`Queues`], so that the driver orders its kernels
//! after the uploads of the inputs and before the downloads of the outputs, even when a run fails;
//! no thread waits for the inputs in between. Client memory on the device is used in place if it
//! has the alignment that kernels expect; kernels see concurrent changes by the client.
//!
//! Contract for `unsafe`: a [`DeviceMemory`] that backs a tensor is a buffer of the batch, which
//! returns to the pool after the batch's work, or a client's range, which is open until the batch
//! is over. It has the length of the shape (checked, or allocated so) and is aligned. The stream
//! belongs to the [`Queues`] that [`super::Opened`] drops after its session.

use std::sync::Arc;

use half::bf16;
use ort::ep::ExecutionProviderDispatch;
use ort::memory::AllocationDevice;
use ort::session::{Session, SessionInputValue};
use ort::value::DynValueRefMut;
use pharos::error::InferError;
use pharos::tensor::{DataType, byte_size};
use pharos_backend::runtime::AlignedBuffer;
use pharos_backend::{Batch, Context, Input, OutputMemory, Outputs, Source, load_error, run_error};

use super::providers::{self, Provider};
use super::{Output, borrow, run_or_withdraw, to_value, wrong_size};
use crate::backend::on_gpu::{Run, copy_ahead, failed};
use crate::device::{
    Buffer as DeviceBuffer, Cuda, DeviceMemory, Pool, Prefetch, Queues, is_usable,
};

/// The alignment of CUDA allocations, which kernels of its libraries rely on.
const ALIGNMENT: usize = 256;

/// The state of a session on a GPU.
pub(super) struct OnDevice {
    cuda: Arc<Cuda>,
    /// Inputs being copied for the batch with this number, as in `on_gpu`.
    ahead: (u64, Vec<Prefetch>),
    /// Whether inputs are copied ahead: only if all inputs are numbers.
    copies_ahead: bool,
    /// For each input, whether it stays in the process's memory because the graph returns it.
    returned_by_graph: Vec<bool>,
    pool: Pool,
    queues: Queues,
}

impl OnDevice {
    /// Creates the state on the instance's device, which has been opened.
    pub(super) fn new(cuda: Arc<Cuda>, context: &Context<'_>) -> Result<Self, InferError> {
        let queues = Queues::new(&cuda)
            .map_err(|fault| load_error(format!("the GPU cannot be used: {fault}")))?;
        let copies_ahead = context.config.inputs.iter().all(|input| is_number(input.datatype));
        let pool = Pool::new(cuda.clone());
        Ok(Self {
            cuda,
            ahead: (0, Vec::new()),
            copies_ahead,
            returned_by_graph: Vec::new(),
            pool,
            queues,
        })
    }

    /// Returns the providers, computing in the stream of this value, which outlives the session
    /// created with them. Returns none if device memory is the process's memory.
    pub(super) fn dispatches(&self, providers: &[Provider]) -> Vec<ExecutionProviderDispatch> {
        if self.cuda.is_host_memory() {
            return Vec::new();
        }
        // SAFETY: the module's contract.
        unsafe { providers::dispatches(providers, self.queues.compute_stream()) }
    }

    /// Finds the inputs that the graph returns.
    pub(super) fn find_returned_inputs(&mut self, session: &Session, context: &Context<'_>) {
        let names = (0..context.config.backend_inputs())
            .filter_map(|position| context.config.input_name(position));
        self.returned_by_graph = names
            .map(|name| session.outputs().iter().any(|output| output.name() == name))
            .collect();
        self.copies_ahead &= !self.returned_by_graph.contains(&true);
    }

    /// Executes a batch.
    pub(super) fn execute(
        &mut self,
        computing: Computing<'_, '_>,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), InferError> {
        let (batch_ahead, mut before) = std::mem::take(&mut self.ahead);
        if batch_ahead != outputs.batch() {
            before.clear();
        }
        let mut used = Vec::new();
        let result = self.run(computing, batch, outputs, &before, &mut used);
        // All work is done or abandoned. After a failed batch, copies made ahead are waited for and
        // dropped.
        if result.is_ok() {
            used.extend(before.into_iter().filter_map(Prefetch::into_buffer));
        }
        used.into_iter().for_each(|buffer| self.pool.put(buffer));
        result
    }

    fn run(
        &mut self,
        computing: Computing<'_, '_>,
        batch: &Batch<'_>,
        outputs: &mut Outputs<'_>,
        before: &[Prefetch],
        used: &mut Vec<DeviceBuffer>,
    ) -> Result<(), InferError> {
        let Self { cuda, copies_ahead, returned_by_graph, pool, queues, .. } = self;
        let copies = batch.inputs.iter().map(|input| match uses_device(input, returned_by_graph) {
            true => Ok(None),
            false => on_host(cuda, input),
        });
        let host_copies: Vec<Option<AlignedBuffer>> = copies.collect::<Result<_, _>>()?;
        let device =
            if cuda.is_host_memory() { AllocationDevice::CPU } else { AllocationDevice::CUDA };
        let run = Run { work: queues.begin().map_err(failed)?, pool, ahead: before, used };
        let mut step = Step { run, device, returned_by_graph, from: Vec::new() };
        let inputs = step.inputs(&computing, batch, &host_copies, outputs)?;
        step.run.work.inputs_follow_no_more().map_err(failed)?;
        // The run waits for its end, and the frame of the next batch may not have arrived before
        // that.
        let mut ahead = if *copies_ahead {
            copy_ahead(queues, step.run.pool, outputs)
        } else {
            (0, Vec::new())
        };
        let result = step.compute(computing, &inputs, batch, outputs);
        let Run { work, pool, .. } = step.run;
        if *copies_ahead && result.is_ok() && ahead.1.is_empty() {
            ahead = copy_ahead(queues, pool, outputs);
        }
        self.ahead = ahead;
        result?;
        let began = work.began();
        let spans = work.finish().map_err(failed)?;
        outputs.measured(began, spans.inputs, spans.computing);
        Ok(())
    }
}

/// The session and tensors that a batch is computed with.
pub(super) struct Computing<'s, 'o> {
    pub(super) session: &'s mut Session,
    /// The names of the inputs.
    pub(super) names: &'s [std::ffi::CString],
    /// The outputs that are wanted.
    pub(super) wanted: Vec<&'o mut Output>,
}

/// An input value with its name.
type Named<'v> = (&'v std::ffi::CStr, SessionInputValue<'v>);

/// A tensor for an output, its memory, and its destination.
type Bound<'o> = (DynValueRefMut<'static>, (DeviceMemory, OutputMemory<'o>));

/// A batch being computed.
struct Step<'r, 'm> {
    run: Run<'r, 'm>,
    /// The device that the runtime uses.
    device: AllocationDevice<'static>,
    returned_by_graph: &'r [bool],
    /// Device memory that the runtime reads.
    from: Vec<DeviceMemory>,
}

impl<'m> Step<'_, 'm> {
    fn inputs<'v>(
        &mut self,
        computing: &Computing<'v, '_>,
        batch: &'m Batch<'_>,
        host_copies: &'v [Option<AlignedBuffer>],
        outputs: &mut Outputs<'_>,
    ) -> Result<Vec<Named<'v>>, InferError>
    where
        'm: 'v,
    {
        let mut values = Vec::with_capacity(batch.inputs.len());
        for (input, host_copy) in batch.inputs.iter().zip(host_copies) {
            let name = computing
                .names
                .get(input.index)
                .ok_or_else(|| run_error("an input is not configured"))?;
            let value = if uses_device(input, self.returned_by_graph) {
                self.device_value(input)?
            } else {
                let data = host_copy.as_ref().map_or(input.data, AlignedBuffer::as_slice);
                to_value(&Input { data, pieces: &[], ..*input }, batch, outputs)?
            };
            values.push((name.as_c_str(), value));
        }
        Ok(values)
    }

    fn device_value<'v>(&mut self, input: &Input<'m>) -> Result<SessionInputValue<'v>, InferError> {
        let memory = self.run.place(input, ALIGNMENT)?;
        if let Some(expected) = byte_size(input.datatype, input.shape)
            && expected != memory.len() as u64
        {
            return Err(wrong_size(input, memory.len(), expected));
        }
        self.from.push(memory);
        let value = self.value(memory, input.datatype, input.shape);
        Ok(value.map_err(|error| run_error(format!("input '{}': {error}", input.name)))?.into())
    }

    /// Returns a tensor over memory that has the length of its shape.
    fn value<'v>(
        &self,
        memory: DeviceMemory,
        datatype: DataType,
        shape: &[i64],
    ) -> Result<DynValueRefMut<'v>, ort::Error> {
        let address =
            std::ptr::with_exposed_provenance_mut(usize::try_from(memory.address()).unwrap_or(0));
        let device = self.device.clone();
        pharos_backend::for_numbers!(datatype, Number => {
            // SAFETY: the module's contract. Inputs are only read.
            unsafe { borrow::<Number>(device, address, shape) }
        }, also Bf16 = bf16, otherwise {
            // SAFETY: as above; only outputs are BOOL here, with one byte for each element.
            unsafe { borrow::<bool>(device, address, shape) }
        })
    }

    /// Computes, and starts to copy the outputs to their destinations.
    fn compute<'o: 'm>(
        &mut self,
        computing: Computing<'_, '_>,
        inputs: &[Named<'_>],
        batch: &Batch<'_>,
        outputs: &mut Outputs<'o>,
    ) -> Result<(), InferError> {
        let Computing { session, mut wanted, .. } = computing;
        let mut places = Vec::new();
        let mut goals = Vec::new();
        let mut to = Vec::new();
        for output in &wanted {
            let (place, goal) = self.output(output, batch.rows(), outputs)?.unzip();
            to.extend(goal.as_ref().map(|(memory, _)| *memory));
            places.push(place);
            goals.push(goal);
        }
        self.run.work.foreign_compute(&self.from, &to).map_err(failed)?;
        let results = run_or_withdraw(session, inputs, &mut wanted, &mut places, outputs)?;
        self.run.work.computed().map_err(failed)?;
        for (place, goal) in places.iter().zip(goals) {
            if let Some((memory, goal)) = goal.filter(|_| place.is_some()) {
                self.run.deliver(memory, goal)?;
            }
        }
        for (output, value) in wanted.iter().zip(results) {
            output.copy(value.as_ref(), outputs)?;
        }
        Ok(())
    }

    /// Returns the tensor of an output whose shape is known.
    fn output<'o>(
        &mut self,
        output: &Output,
        rows: u64,
        outputs: &mut Outputs<'o>,
    ) -> Result<Option<Bound<'o>>, InferError> {
        let Some(shape) = output.shape_of(rows) else { return Ok(None) };
        let len = byte_size(output.datatype, &shape)
            .and_then(|len| usize::try_from(len).ok())
            .ok_or_else(|| output.failed(&format!("it has no size: {shape:?}")))?;
        let goal = outputs.allocate_anywhere(output.position, output.datatype, &shape, len)?;
        let memory = match &goal {
            OutputMemory::Device(memory) if is_usable(*memory, ALIGNMENT) => *memory,
            _ => self.run.buffer(len)?,
        };
        let place =
            self.value(memory, output.datatype, &shape).map_err(|error| output.failed(&error))?;
        Ok(Some((place, (memory, goal))))
    }
}

fn is_number(datatype: DataType) -> bool {
    !matches!(datatype, DataType::Bool | DataType::Bytes)
}

fn uses_device(input: &Input<'_>, returned_by_graph: &[bool]) -> bool {
    is_number(input.datatype)
        && !returned_by_graph.get(input.index).is_some_and(|returned_by_graph| *returned_by_graph)
}

/// Returns a copy of an input that is at least partly on a device.
fn on_host(cuda: &Cuda, input: &Input<'_>) -> Result<Option<AlignedBuffer>, InferError> {
    if input.pieces.is_empty() {
        return Ok(None);
    }
    let mut buffer = AlignedBuffer::zeroed(input.pieces.iter().map(Source::len).sum());
    let mut rest = buffer.as_mut_slice();
    for piece in input.pieces {
        let (into, after) = rest
            .split_at_mut_checked(piece.len())
            .ok_or_else(|| run_error("a buffer is too small"))?;
        rest = after;
        match piece {
            Source::Host(bytes) => into.copy_from_slice(bytes),
            Source::Device(memory) => {
                cuda.call(|driver| driver.read(memory.device(), memory.address(), into))
                    .map_err(failed)?;
            }
            Source::Zeros(_) => {}
        }
    }
    Ok(Some(buffer))
}
