//! The inputs of a batch: in the input arena, at the locations that a frame gives, or in client
//! memory, used in place or copied.
//!
//! A request whose region cannot be used, or was truncated meanwhile, fails without affecting the
//! others of its batch, which are executed with zeros in its place. A backend reads such memory
//! directly only if it tolerates concurrent writes
//! ([`Backend::tolerates_concurrent_writes`](pharos_backend::Backend::tolerates_concurrent_writes)),
//! if the request is alone in its batch, and for elements of a fixed size: it never receives
//! strings whose framing a client can still change. A backend that takes device memory
//! ([`Backend::takes_device_memory`](pharos_backend::Backend::takes_device_memory)) reads it there,
//! also for the individual requests of a batch.

use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, check_strings};
use pharos::wire::{Execute, InputBlock, Piece};
use pharos_backend::runtime::{
    AlignedBuffer, Arenas, BatchLoan, ClientMemory, InputArena, joined, range_of, used_regions,
};
use pharos_backend::{Batch, DeviceInputs, Input, Outputs, Source, run_error};

use crate::regions::RegionTable;

/// The length in bytes of an empty string: zeros of this length replace a string.
const EMPTY_TEXT: u64 = 4;

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
fn name_of<'a>(config: &'a ModelConfig, block: &InputBlock) -> Result<&'a str, InferError> {
    let index = usize::from(block.input);
    config.input_name(index).ok_or_else(|| run_error(format!("there is no input {index}")))
}

/// Returns the bytes of an input in the arena.
fn bytes_of<'a>(
    memory: &'a InputArena,
    block: &InputBlock,
    name: &str,
) -> Result<&'a [u8], InferError> {
    let data = memory.bytes(block.offset, block.len);
    data.ok_or_else(|| run_error(format!("input '{name}' is not in the arena")))
}

/// Whether a batch uses client memory at all.
pub(super) fn uses_regions(execute: &Execute) -> bool {
    !execute.placements.is_empty() || execute.inputs.iter().any(|input| !input.pieces.is_empty())
}

/// Opens the regions of a batch. Returns the requests with a region that cannot be used.
pub(super) fn open(
    regions: &mut RegionTable,
    execute: &Execute,
    arenas: &Arenas,
) -> Vec<(u32, InferError)> {
    let opened = used_regions(execute)
        .filter_map(|(request, region)| Some((request, regions.open(region).err()?)));
    let unusable = opened.collect();
    // Before the errors, so that the next request finds the regions announced again.
    regions.take_lost().iter().for_each(|frame| arenas.send(frame));
    unusable
}

/// The bytes of an input.
pub(super) enum Gathered<'a> {
    There(&'a [u8]),
    Copied(AlignedBuffer),
    /// Some of the bytes are on a device, and the backend reads them there.
    Pieces(Vec<Source<'a>>),
}

impl Gathered<'_> {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::There(bytes) => bytes,
            Self::Copied(buffer) => buffer.as_slice(),
            Self::Pieces(_) => &[],
        }
    }

    fn pieces(&self) -> &[Source<'_>] {
        match self {
            Self::Pieces(pieces) => pieces,
            Self::There(_) | Self::Copied(_) => &[],
        }
    }
}

/// Gathers the inputs of a batch.
struct Gatherer<'g, 'a> {
    memory: &'g mut ClientMemory<'a>,
    arena: &'a InputArena,
    /// The model's name, for messages.
    model: &'g str,
    /// Requests whose memory cannot be used.
    unusable: &'g [u32],
}

/// An input, and its name for messages.
#[derive(Clone, Copy)]
struct NamedInput<'i> {
    block: &'i InputBlock,
    name: &'i str,
}

/// Requests with errors, by their position in the batch.
type Wrong = Vec<(u32, InferError)>;

impl<'a> Gatherer<'_, 'a> {
    /// Returns the locations of an input's parts if some are on a device and the backend reads them
    /// there; otherwise `None`.
    fn sources(&mut self, input: NamedInput<'_>) -> Result<Option<Vec<Source<'a>>>, InferError> {
        let NamedInput { block, name } = input;
        let regions = self.memory.regions();
        let arena = self.arena;
        let unusable = self.unusable;
        let failed = |piece: &Piece| unusable.contains(&piece.request);
        let on_device = |piece: &Piece| regions.on_device(range_of(piece));
        let wanted = match self.memory.access().on_device {
            DeviceInputs::Never => false,
            DeviceInputs::Whole => matches!(block.pieces.as_slice(), [piece] if !failed(piece)),
            DeviceInputs::Pieces => true,
        };
        if !wanted
            || block.datatype == DataType::Bytes
            || !block.pieces.iter().any(|piece| !failed(piece) && on_device(piece).is_some())
        {
            return Ok(None);
        }
        let mut sources = Vec::with_capacity(block.pieces.len());
        for piece in &block.pieces {
            let source = match piece.region {
                0 => Source::Host(in_arena(arena, piece, name)?),
                _ if failed(piece) => {
                    Source::Zeros(usize::try_from(piece.len).map_err(|_| no_memory(piece.len))?)
                }
                _ => match on_device(piece)
                    .map(Source::Device)
                    .or_else(|| regions.in_place(range_of(piece)).map(Source::Host))
                {
                    Some(source) => source,
                    // Copying will report the error.
                    None => return Ok(None),
                },
            };
            sources.push(source);
        }
        for piece in block.pieces.iter().filter(|piece| piece.region != 0) {
            self.memory.reads(range_of(piece));
        }
        Ok(Some(sources))
    }

    /// Returns the bytes of an input, and the requests with an invalid part, which zeros replace.
    fn gather(&mut self, input: NamedInput<'_>) -> Result<(Gathered<'a>, Wrong), InferError> {
        let block = input.block;
        if let Some(sources) = self.sources(input)? {
            return Ok((Gathered::Pieces(sources), Vec::new()));
        }
        if let [piece] = block.pieces.as_slice()
            && self.memory.access().in_place
            && block.datatype != DataType::Bytes
            && !self.unusable.contains(&piece.request)
            && let Some(bytes) = self.memory.regions().in_place(range_of(piece))
        {
            self.memory.reads(range_of(piece));
            return Ok((Gathered::There(bytes), Vec::new()));
        }
        let mut wrong = Vec::new();
        let buffer = match block.datatype {
            DataType::Bytes => self.gather_texts(input, &mut wrong)?,
            _ => self.gather_fixed(input, &mut wrong)?,
        };
        Ok((Gathered::Copied(buffer), wrong))
    }

    fn gather_fixed(
        &self,
        input: NamedInput<'_>,
        wrong: &mut Wrong,
    ) -> Result<AlignedBuffer, InferError> {
        let NamedInput { block: InputBlock { pieces, .. }, name } = input;
        let len: u64 = pieces.iter().map(|piece| piece.len).sum();
        let mut buffer = AlignedBuffer::zeroed(usize::try_from(len).map_err(|_| no_memory(len))?);
        let mut rest = buffer.as_mut_slice();
        for piece in pieces {
            let len = usize::try_from(piece.len).map_err(|_| no_memory(piece.len))?;
            let (into, after) =
                rest.split_at_mut_checked(len).ok_or_else(|| no_memory(piece.len))?;
            rest = after;
            match piece.region {
                0 => into.copy_from_slice(in_arena(self.arena, piece, name)?),
                _ if self.unusable.contains(&piece.request) => {}
                region => {
                    let read = self.memory.regions().read(region, piece.offset, into);
                    wrong.extend(read.err().map(|error| (piece.request, error)));
                }
            }
        }
        Ok(buffer)
    }

    /// Strings are copied before they are checked, so that their lengths cannot change any more. If
    /// the framing is invalid or the number of elements is wrong, they are replaced by that number
    /// of empty strings; the frontend has checked that there is room.
    fn gather_texts(
        &self,
        input: NamedInput<'_>,
        wrong: &mut Wrong,
    ) -> Result<AlignedBuffer, InferError> {
        let NamedInput { block: InputBlock { pieces, .. }, name } = input;
        let mut all: Vec<Vec<u8>> = Vec::new();
        for piece in pieces {
            if piece.region == 0 {
                all.push(in_arena(self.arena, piece, name)?.to_vec());
                continue;
            }
            let mut own = vec![0; usize::try_from(piece.len).map_err(|_| no_memory(piece.len))?];
            let read = match self.unusable.contains(&piece.request) {
                true => Err(None),
                false => {
                    self.memory.regions().read(piece.region, piece.offset, &mut own).map_err(Some)
                }
            };
            let read = read.and_then(|()| {
                let checked = check_strings(name, self.model, &[&own], piece.elements);
                checked.map_err(|wrong| {
                    Some(self.wrong_texts(piece.request, wrong.message, wrong.prefixed))
                })
            });
            if let Err(error) = read {
                wrong.extend(error.map(|error| (piece.request, error)));
                let len = piece.elements.saturating_mul(EMPTY_TEXT).min(piece.len);
                own = vec![0; usize::try_from(len).unwrap_or(0)];
            }
            all.push(own);
        }
        Ok(joined(all.iter().map(Vec::as_slice)))
    }

    fn wrong_texts(&self, request: u32, message: String, prefixed: bool) -> InferError {
        let error = InferError::new(ErrorCode::InvalidArg, Reason::SharedMemory, message);
        match self.memory.execute().requests.get(request as usize) {
            Some(request) if prefixed => error.with_request_id(&request.id),
            _ => error,
        }
    }
}

fn in_arena<'m>(arena: &'m InputArena, piece: &Piece, name: &str) -> Result<&'m [u8], InferError> {
    let bytes = arena.bytes(piece.offset, piece.len);
    bytes.ok_or_else(|| run_error(format!("input '{name}' is not in the arena")))
}

fn no_memory(len: u64) -> InferError {
    run_error(format!("{len} bytes of input do not fit in memory"))
}

/// Gathers the inputs of a batch with some in client memory. Requests with errors have failed when
/// this returns.
///
/// # Errors
/// The batch contradicts its frame.
pub(super) fn gather<'a>(
    config: &ModelConfig,
    arena: &'a InputArena,
    execute: &Execute,
    outputs: &mut Outputs<'a>,
    unusable: &mut Vec<u32>,
) -> Result<Vec<Gathered<'a>>, InferError> {
    let mut all = Vec::with_capacity(execute.inputs.len());
    for block in &execute.inputs {
        let name = name_of(config, block)?;
        let Some(memory) = outputs.client_memory().filter(|_| !block.pieces.is_empty()) else {
            all.push(Gathered::There(bytes_of(arena, block, name)?));
            continue;
        };
        let mut gatherer = Gatherer { memory, arena, model: &config.name, unusable };
        let (gathered, wrong) = gatherer.gather(NamedInput { block, name })?;
        all.push(gathered);
        for (request, error) in wrong {
            unusable.push(request);
            outputs.fail(request as usize, error);
        }
    }
    Ok(all)
}

/// Returns the inputs as a backend sees them.
pub(super) fn inputs<'b>(
    config: &'b ModelConfig,
    execute: &'b Execute,
    gathered: &'b [Gathered<'_>],
) -> Result<Vec<Input<'b>>, InferError> {
    let inputs = execute.inputs.iter().zip(gathered).map(|(block, gathered)| {
        let name = name_of(config, block)?;
        let data = gathered.as_slice();
        let pieces = gathered.pieces();
        Ok(Input {
            index: usize::from(block.input),
            name,
            datatype: block.datatype,
            shape: &block.shape,
            data,
            pieces,
        })
    });
    inputs.collect()
}

/// Whether executing a batch is pointless because these requests have failed. A sequence must not
/// skip a step.
pub(super) fn all_failed(batch: &Batch<'_>, unusable: &[u32]) -> bool {
    (0u32..)
        .zip(batch.requests)
        .all(|(position, request)| unusable.contains(&position) && request.sequence.is_none())
}
