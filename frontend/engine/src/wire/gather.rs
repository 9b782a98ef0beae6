//! Gathers requests into a batch, with one contiguous copy into the instance's input arena.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pharos::arena::Block;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::infer::{CorrelationId, InferInput, InferRequest};
use pharos::model::{Checked, ControlValues, ModelConfig, Scheduling, envelope};
use pharos::request_trace::Traced;
use pharos::tensor::{DataType, element_count};
use pharos::wire::{
    BatchRequest, Details, Execute, InputBlock, Piece, Placement, Resumed, SequenceStep, ToWorker,
};

use super::Link;
use crate::memory::CAPACITY;

/// One request of a batch: checked, with its inputs in the order of the configuration.
#[derive(Debug)]
pub(crate) struct BatchedRequest {
    pub(crate) request: InferRequest,
    pub(crate) checked: Checked,
    /// Whether the request only fills a place of a batch.
    pub(crate) padding: bool,
}

/// A batch for an instance.
pub(crate) struct ToSend<'a> {
    /// The number of the batch.
    pub(crate) batch: u64,
    /// The row of its flags.
    pub(crate) flags: u8,
    /// The requests. They have equal shape keys: the same inputs with compatible shapes.
    pub(crate) batched_requests: &'a [Arc<BatchedRequest>],
    /// For a model with sequences, one step for each request, `None` for padding. If empty, each
    /// request is a separate sequence.
    pub(crate) steps: &'a [Option<SequenceStep>],
    /// Control inputs of the whole batch that are not derived from `steps`, as in a warm-up.
    pub(crate) controls: &'a [InferInput],
    /// The requests that were executed before and have had responses.
    pub(crate) resumed: Vec<Resumed>,
}

/// The inputs of a batch gathered so far.
#[derive(Default)]
pub(super) struct Gathered {
    inputs: Vec<InputBlock>,
    pub(super) blocks: Vec<Block>,
}

impl Link {
    /// Gathers a batch and sends it.
    ///
    /// # Errors
    /// The inputs do not fit in the arena; nothing was sent.
    pub(crate) fn execute(
        &self,
        config: &ModelConfig,
        to_send: &ToSend<'_>,
    ) -> Result<(), InferError> {
        let &ToSend { batch, flags, batched_requests, ref resumed, .. } = to_send;
        self.regions.announce(batched_requests)?;
        let steps = steps(config, to_send);
        let mut gathered = Gathered::default();
        let result = self
            .gather_given(config, batched_requests, &mut gathered)
            .and_then(|()| self.gather_made(config, batched_requests, &mut gathered))
            .and_then(|()| self.gather_controls(config, to_send, &steps, &mut gathered));
        if let Err(error) = result {
            self.arenas.inputs.release(&gathered.blocks);
            return Err(error);
        }
        let Gathered { inputs, blocks } = gathered;
        self.lend(batch, blocks);
        let wants_details = self.details.load(Ordering::Relaxed);
        let released = self.arenas.outputs.take_released();
        let mut requests = Vec::with_capacity(batched_requests.len());
        for (position, batched) in batched_requests.iter().enumerate() {
            let given = to_send.steps.get(position).copied().flatten();
            requests.push(BatchRequest {
                id: batched.request.id.clone(),
                rows: rows(batched),
                parameters: batched.request.parameters.clone(),
                sequence: steps.get(position).copied().flatten(),
                details: if wants_details { details_of(config, batched, given) } else { None },
            });
        }
        let (placements, elements) = placements(config, batched_requests);
        let frame = ToWorker::Execute(Execute {
            batch,
            requests,
            inputs,
            outputs: requested_outputs(config, batched_requests),
            released,
            flags,
            placements,
            elements,
            resumed: resumed.clone(),
        });
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

    /// Gathers the inputs of the clients.
    fn gather_given(
        &self,
        config: &ModelConfig,
        batched_requests: &[Arc<BatchedRequest>],
        gathered: &mut Gathered,
    ) -> Result<(), InferError> {
        for (position, spec) in config.inputs.iter().enumerate() {
            let Some(index) =
                batched_requests.first().and_then(|batched| index_of(&batched.request, &spec.name))
            else {
                continue;
            };
            let shape = match config.batches() && spec.allow_ragged_batch {
                true => {
                    vec![
                        shapes(batched_requests, index)
                            .filter_map(element_count)
                            .sum::<u64>()
                            .cast_signed(),
                    ]
                }
                false => {
                    let first = shapes(batched_requests, index).next().unwrap_or_default();
                    batch_shape(
                        config,
                        spec.backend_shape(first, config.batches()),
                        batched_requests,
                    )
                }
            };
            let inputs =
                batched_requests.iter().filter_map(|batched| batched.request.inputs.get(index));
            if inputs.clone().any(|input| input.tensor.data.region().is_some()) {
                self.gather_mixed(
                    InputBlock { shape, ..block_of(position, spec.datatype) },
                    inputs,
                    gathered,
                )?;
                continue;
            }
            let pieces = inputs.flat_map(|input| input.tensor.data.pieces()).map(|piece| &**piece);
            self.gather(
                InputBlock { shape, ..block_of(position, spec.datatype) },
                pieces,
                gathered,
            )?;
        }
        Ok(())
    }

    /// Gathers an input that is partly in client memory; those parts stay there, the rest is copied
    /// into the arena.
    fn gather_mixed<'a>(
        &self,
        block: InputBlock,
        inputs: impl Iterator<Item = &'a InferInput>,
        gathered: &mut Gathered,
    ) -> Result<(), InferError> {
        let mut pieces = Vec::new();
        for (request, InferInput { tensor, .. }) in (0..).zip(inputs) {
            let len = tensor.data.len() as u64;
            let elements = element_count(&tensor.shape).unwrap_or(u64::MAX);
            let (region, offset) = match tensor.data.region() {
                // A region is always resolved at this point; the fallback is an id that no region
                // has.
                Some(slice) => (slice.region().map_or(u64::MAX, |region| region.id), slice.offset),
                None => (
                    0,
                    self.write_pieces(tensor.data.pieces().iter().map(|piece| &**piece), gathered)?
                        .offset,
                ),
            };
            pieces.push(Piece { region, request, offset, len, elements });
        }
        let len = pieces.iter().map(|piece| piece.len).sum();
        gathered.inputs.push(InputBlock { len, pieces, ..block });
        Ok(())
    }

    /// Adds the batch inputs, which are derived from the whole batch.
    fn gather_made(
        &self,
        config: &ModelConfig,
        batched_requests: &[Arc<BatchedRequest>],
        gathered: &mut Gathered,
    ) -> Result<(), InferError> {
        let mut position = config.inputs.len();
        for made in &config.batch_inputs {
            let name = config.inputs.get(made.source).map_or("", |spec| spec.name.as_str());
            let source =
                batched_requests.first().and_then(|batched| index_of(&batched.request, name));
            let shapes: Vec<&[i64]> =
                source.map(|index| shapes(batched_requests, index).collect()).unwrap_or_default();
            let tensor = made.make(&shapes, config.batches());
            let (shape, data) = tensor.ok_or_else(|| no_room(u64::MAX))?;
            for _ in &made.targets {
                let block =
                    InputBlock { shape: shape.clone(), ..block_of(position, made.datatype) };
                self.gather(block, std::iter::once(data.as_slice()), gathered)?;
                position += 1;
            }
        }
        Ok(())
    }

    /// Adds the control inputs of a model with sequences: one element for each place.
    fn gather_controls(
        &self,
        config: &ModelConfig,
        to_send: &ToSend<'_>,
        steps: &[Option<SequenceStep>],
        gathered: &mut Gathered,
    ) -> Result<(), InferError> {
        let batched_requests = to_send.batched_requests;
        let controls = config.controls();
        if controls.is_empty() {
            return Ok(());
        }
        // A sequence that the server has started has no id except its key.
        let keys: Vec<CorrelationId> =
            steps.iter().map(|step| CorrelationId::Uint(step.map_or(0, |s| s.key))).collect();
        let places = batched_requests.iter().zip(steps).zip(&keys).map(|((batched, step), key)| {
            let own = &batched.request.correlation_id;
            step.map(|step| ControlValues {
                start: step.start,
                end: step.end,
                id: if own.is_none() { key } else { own },
            })
        });
        let mut shape = vec![i64::try_from(batched_requests.len()).unwrap_or(i64::MAX)];
        shape.extend(config.batches().then_some(1));
        for (position, control) in (config.first_control()..).zip(controls) {
            let block = InputBlock { shape: shape.clone(), ..block_of(position, control.datatype) };
            let given = to_send.controls.iter().find(|given| given.name == control.name);
            match given {
                Some(given) => self.gather(
                    block,
                    given.tensor.data.pieces().iter().map(|piece| &**piece),
                    gathered,
                )?,
                None => self.gather(
                    block,
                    std::iter::once(control.make(places.clone()).as_slice()),
                    gathered,
                )?,
            }
        }
        Ok(())
    }

    /// Copies the pieces of one input into a block of the arena.
    fn gather<'a>(
        &self,
        input: InputBlock,
        pieces: impl Iterator<Item = &'a [u8]> + Clone,
        gathered: &mut Gathered,
    ) -> Result<(), InferError> {
        let block = self.write_pieces(pieces, gathered)?;
        gathered.inputs.push(InputBlock { offset: block.offset, len: block.len, ..input });
        Ok(())
    }

    /// Copies pieces into a new block of the arena.
    pub(super) fn write_pieces<'a>(
        &self,
        pieces: impl Iterator<Item = &'a [u8]> + Clone,
        gathered: &mut Gathered,
    ) -> Result<Block, InferError> {
        let len = pieces.clone().map(|piece| piece.len() as u64).sum();
        let block = self.arenas.inputs.allocate(len).ok_or_else(|| no_room(len))?;
        gathered.blocks.push(block);
        let mut at = block.offset;
        for piece in pieces {
            if !self.arenas.inputs.write(at, piece) {
                return Err(no_room(len));
            }
            at += piece.len() as u64;
        }
        Ok(block)
    }
}

pub(super) fn no_room(len: u64) -> InferError {
    let text = format!(
        "{len} bytes of input exceed the free part of the instance's {CAPACITY} bytes of input \
         memory"
    );
    InferError::new(ErrorCode::Unavailable, Reason::TooLarge, text)
}

fn index_of(request: &InferRequest, name: &str) -> Option<usize> {
    request.inputs.iter().position(|input| input.name == name)
}

/// Returns the shapes of an input in all parts.
fn shapes(batched_requests: &[Arc<BatchedRequest>], index: usize) -> impl Iterator<Item = &[i64]> {
    batched_requests
        .iter()
        .filter_map(move |batched| batched.request.inputs.get(index))
        .map(|input| input.tensor.shape.as_slice())
}

/// Creates a block without shape and offset.
fn block_of(position: usize, datatype: DataType) -> InputBlock {
    let input = u16::try_from(position).unwrap_or(u16::MAX);
    InputBlock { input, datatype, shape: Vec::new(), offset: 0, len: 0, pieces: Vec::new() }
}

/// Returns the shape of the whole batch: the first dimension is the number of rows of all requests.
fn batch_shape(
    config: &ModelConfig,
    mut shape: Vec<i64>,
    batched_requests: &[Arc<BatchedRequest>],
) -> Vec<i64> {
    if config.max_batch_size > 0
        && let Some(first) = shape.first_mut()
    {
        *first = batched_requests.iter().map(|batched| i64::from(rows(batched))).sum();
    }
    shape
}

fn rows(batched: &BatchedRequest) -> u32 {
    u32::try_from(batched.checked.batch_size).unwrap_or(u32::MAX)
}

/// Returns details that only some backends use; `None` if all of them have their defaults. A
/// sequence that the server has started has no id except its key, and its first step the START flag,
/// as in Triton. With an envelope, the backend sees what the client has sent.
fn details_of(
    config: &ModelConfig,
    batched: &BatchedRequest,
    step: Option<SequenceStep>,
) -> Option<Box<Details>> {
    let request = &batched.request;
    let visible_step = step.filter(|_| config.backend != envelope::BACKEND);
    let outputs = request.outputs.iter().filter_map(|wanted| {
        let position = config.outputs.iter().position(|output| output.name == wanted.name)?;
        u16::try_from(position).ok()
    });
    let details = Details {
        correlation: match visible_step {
            Some(step) if request.correlation_id.is_none() => CorrelationId::Uint(step.key),
            _ => request.correlation_id.clone(),
        },
        start: visible_step.map_or(request.sequence_start, |step| step.start),
        end: request.sequence_end,
        priority: request.priority,
        timeout_us: request.timeout_us,
        outputs: outputs.collect(),
        input_order: request.input_order.clone(),
        traced: request.traced.is_some(),
        trace_context: request.traced.as_ref().and_then(Traced::context_json),
        ragged: ragged(config, request),
    };
    (details != Details::default()).then(|| Box::new(details))
}

/// Returns the shapes of a request's inputs that may be ragged, as the model sees them.
fn ragged(config: &ModelConfig, request: &InferRequest) -> Vec<(u16, Vec<i64>)> {
    let mut shapes = Vec::new();
    for (position, spec) in (0..).zip(&config.inputs) {
        if config.batches()
            && spec.allow_ragged_batch
            && let Some(input) = request.inputs.iter().find(|input| input.name == spec.name)
        {
            shapes.push((position, spec.backend_shape(&input.tensor.shape, true)));
        }
    }
    shapes
}

/// Returns the steps of a batch's requests; empty for a model without sequences.
fn steps<'a>(
    config: &ModelConfig,
    to_send: &ToSend<'a>,
) -> std::borrow::Cow<'a, [Option<SequenceStep>]> {
    match config.scheduling {
        Scheduling::Sequence(_) if to_send.steps.is_empty() => {
            let keys = (0..to_send.batched_requests.len() as u64).map(|number| u64::MAX - number);
            keys.map(|key| Some(SequenceStep { key, start: true, end: true })).collect()
        }
        _ => to_send.steps.into(),
    }
}

/// Returns the outputs that go into client memory and, for outputs not split by rows, the number of
/// elements of each request.
fn placements(
    config: &ModelConfig,
    batched_requests: &[Arc<BatchedRequest>],
) -> (Vec<Placement>, Vec<(u16, Vec<u64>)>) {
    let mut placements = Vec::new();
    let mut elements = Vec::<(u16, Vec<u64>)>::new();
    for (request, batched) in (0..).zip(batched_requests) {
        for wanted in &batched.request.outputs {
            let Some((slice, region)) =
                wanted.region.as_ref().and_then(|slice| Some((slice, slice.region()?)))
            else {
                continue;
            };
            let position = config.outputs.iter().position(|output| output.name == wanted.name);
            let Some(output) = position.and_then(|position| u16::try_from(position).ok()) else {
                continue;
            };
            placements.push(Placement {
                request,
                output,
                region: region.id,
                offset: slice.offset,
                len: slice.len,
            });
            let Some(source) =
                config.scattered_by(&wanted.name).and_then(|source| config.inputs.get(source))
            else {
                continue;
            };
            if elements.iter().all(|(known, _)| *known != output) {
                let counts = batched_requests.iter().map(|batched| {
                    let input =
                        batched.request.inputs.iter().find(|input| input.name == source.name);
                    input.and_then(|input| element_count(&input.tensor.shape)).unwrap_or(0)
                });
                elements.push((output, counts.collect()));
            }
        }
    }
    (placements, elements)
}

/// Returns the outputs that any of the requests asks for; empty if one of them asks for all.
fn requested_outputs(config: &ModelConfig, batched_requests: &[Arc<BatchedRequest>]) -> Vec<u16> {
    if batched_requests.iter().any(|batched| batched.request.outputs.is_empty()) {
        return Vec::new();
    }
    let mut positions = Vec::new();
    for (position, output) in (0..).zip(&config.outputs) {
        if batched_requests
            .iter()
            .any(|batched| batched.request.outputs.iter().any(|wanted| wanted.name == output.name))
        {
            positions.push(position);
        }
    }
    positions
}
