//! What a batch has in memory of clients: inputs, used in place or copied, and outputs that go there.
//!
//! A request whose region cannot be used, or turns out not to have been there all the time, fails alone: others of its
//! batch are executed beside zeros. A backend is lent such memory itself only if it says that it bears its changing
//! ([`Backend::bears_changes`]), if the request is alone in its batch, and for elements of a fixed size; it never sees
//! texts whose framing a client can still change. Memory on a device is lent to who takes it there
//! ([`Backend::takes_device_memory`]), also of each request of a batch.

use std::ops::Range;

use pharos::batch_split::{fixed_ends, text_ends};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::model::ModelConfig;
use pharos::tensor::{DataType, check_strings, element_count};
use pharos::wire::{BatchRequest, Execute, InputBlock, OutputBlock, Piece, Placement};

use super::Outputs;
use crate::backend::{Batch, DeviceInputs, DeviceMemory, Input, Place, Source, run_error};
use crate::memory::InputArena;
use crate::regions::Regions;
use crate::state::{Buffer, joined};

/// Zeros in place of an empty text.
const EMPTY_TEXT: u64 = 4;

/// Memory of clients, as a batch uses it.
pub(super) struct Lent<'a> {
    regions: &'a Regions,
    execute: &'a Execute,
    /// Whether the backend may have it itself.
    in_place: bool,
    /// Which of it the backend may have itself that is on a device.
    on_device: DeviceInputs,
    /// Ranges that it has.
    ranges: Vec<RegionRange>,
}

/// A range of a client's memory: its region, its first byte, its end.
pub(crate) type RegionRange = (u64, u64, u64);

/// Where a part of an input is.
pub(crate) fn range_of(piece: &Piece) -> RegionRange {
    (piece.region, piece.offset, piece.offset.saturating_add(piece.len))
}

/// `len` bytes of a region from `offset`, unless some of them are in one of `others`.
pub(crate) fn apart_from(others: &[RegionRange], (region, offset, len): (u64, u64, u64)) -> Option<RegionRange> {
    let end = offset.checked_add(len)?;
    let overlaps = |&(other, from, to): &RegionRange| other == region && offset < to && from < end;
    (!others.iter().any(overlaps)).then_some((region, offset, end))
}

/// Whether a batch uses memory of clients at all.
pub(super) fn uses_regions(execute: &Execute) -> bool {
    !execute.placements.is_empty() || execute.inputs.iter().any(|input| !input.pieces.is_empty())
}

/// The regions that a batch uses, with the position of the request that does.
fn used(execute: &Execute) -> impl Iterator<Item = (u32, u64)> + '_ {
    let pieces = execute.inputs.iter().flat_map(|input| &input.pieces).filter(|piece| piece.region != 0);
    let placements = execute.placements.iter().map(|placement| (placement.request, placement.region));
    pieces.map(|piece| (piece.request, piece.region)).chain(placements)
}

/// Makes the regions of a batch ready. Gives the requests that have one which cannot be used.
pub(super) fn open(regions: &mut Regions, execute: &Execute) -> Vec<(u32, InferError)> {
    used(execute).filter_map(|(request, region)| Some((request, regions.open(region).err()?))).collect()
}

/// The bytes of an input.
pub(super) enum Gathered<'a> {
    There(&'a [u8]),
    Copied(Buffer),
    /// Some of it on a device, where the backend takes it from.
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

impl<'a> Lent<'a> {
    pub(super) fn new(
        regions: &'a Regions,
        execute: &'a Execute,
        (bears_changes, on_device): (bool, DeviceInputs),
    ) -> Self {
        let in_place = bears_changes && execute.requests.len() == 1;
        Self { regions, execute, in_place, on_device, ranges: Vec::new() }
    }

    /// The memory for an output that the backend may write where it is wanted; such a range is its alone.
    pub(super) fn take(&mut self, output: usize, len: usize, may_be_on_device: bool) -> Option<Place<'a>> {
        // What is not cut by rows, the frontend takes from the arena.
        if self.execute.elements.iter().any(|(other, _)| usize::from(*other) == output) {
            return None;
        }
        let len = len as u64;
        let wanted = |placement: &&Placement| usize::from(placement.output) == output && len <= placement.len;
        let &Placement { region, offset, .. } =
            self.execute.placements.iter().find(wanted).filter(|_| self.in_place)?;
        let range = apart_from(&self.ranges, (region, offset, len))?;
        let on_device = || self.regions.on_device(region, offset, len).filter(|_| may_be_on_device);
        let in_place = self.regions.in_place_mut(region, offset, len).map(Place::Host);
        let place = in_place.or_else(|| on_device().map(Place::Device))?;
        self.ranges.push(range);
        Some(place)
    }

    /// As [`Lent::take`], for one request's rows of an output of a batch of several; on a device only.
    pub(super) fn take_rows(&mut self, (request, output): (u32, usize), len: u64) -> Option<DeviceMemory> {
        let wanted = |placement: &&Placement| {
            placement.request == request && usize::from(placement.output) == output && len <= placement.len
        };
        let &Placement { region, offset, .. } = self.execute.placements.iter().find(wanted)?;
        let range = apart_from(&self.ranges, (region, offset, len))?;
        let memory = self.regions.on_device(region, offset, len)?;
        self.ranges.push(range);
        Some(memory)
    }

    /// Whether the rows of a batch of several requests may go to several places.
    pub(super) fn may_be_apart(&self) -> bool {
        self.on_device == DeviceInputs::Pieces && self.execute.requests.len() > 1
    }

    /// Where the parts of an input are, if some are on a device and the backend takes them from there; `None` if not.
    fn sources(
        &mut self,
        (block, name): (&InputBlock, &str),
        arena: &'a InputArena,
        unusable: &[u32],
    ) -> Result<Option<Vec<Source<'a>>>, InferError> {
        let regions = self.regions;
        let failed = |piece: &Piece| unusable.contains(&piece.request);
        let on_device = |piece: &Piece| regions.on_device(piece.region, piece.offset, piece.len);
        let wanted = match self.on_device {
            DeviceInputs::Never => false,
            DeviceInputs::Whole => matches!(block.pieces.as_slice(), [piece] if !failed(piece)),
            DeviceInputs::Pieces => true,
        };
        let is_there = |piece: &Piece| !failed(piece) && on_device(piece).is_some();
        if !wanted || block.datatype == DataType::Bytes || !block.pieces.iter().any(is_there) {
            return Ok(None);
        }
        let mut sources = Vec::with_capacity(block.pieces.len());
        for piece in &block.pieces {
            let in_place = || regions.in_place(piece.region, piece.offset, piece.len).map(Source::Host);
            let source = match piece.region {
                0 => Source::Host(in_arena(arena, piece, name)?),
                _ if failed(piece) => Source::Zeros(usize::try_from(piece.len).map_err(|_| no_memory(piece.len))?),
                _ => match on_device(piece).map(Source::Device).or_else(in_place) {
                    Some(source) => source,
                    // Copying finds out what is wrong with it.
                    None => return Ok(None),
                },
            };
            sources.push(source);
        }
        let used = block.pieces.iter().filter(|piece| piece.region != 0);
        self.ranges.extend(used.map(range_of));
        Ok(Some(sources))
    }

    /// The bytes of an input, and the requests whose part of it is not what it should be; those are zeros here.
    fn gather(
        &mut self,
        (block, name, model): (&InputBlock, &str, &str),
        arena: &'a InputArena,
        unusable: &[u32],
    ) -> Result<(Gathered<'a>, Vec<(u32, InferError)>), InferError> {
        if let Some(sources) = self.sources((block, name), arena, unusable)? {
            return Ok((Gathered::Pieces(sources), Vec::new()));
        }
        if let [piece] = block.pieces.as_slice()
            && self.in_place
            && block.datatype != DataType::Bytes
            && !unusable.contains(&piece.request)
            && let Some(bytes) = self.regions.in_place(piece.region, piece.offset, piece.len)
        {
            self.ranges.push(range_of(piece));
            return Ok((Gathered::There(bytes), Vec::new()));
        }
        let mut wrong = Vec::new();
        let buffer = match block.datatype {
            DataType::Bytes => self.gather_texts((&block.pieces, name, model), arena, (unusable, &mut wrong))?,
            _ => self.gather_fixed((&block.pieces, name), arena, (unusable, &mut wrong))?,
        };
        Ok((Gathered::Copied(buffer), wrong))
    }

    fn gather_fixed(
        &self,
        (pieces, name): (&[Piece], &str),
        arena: &InputArena,
        (unusable, wrong): (&[u32], &mut Vec<(u32, InferError)>),
    ) -> Result<Buffer, InferError> {
        let len: u64 = pieces.iter().map(|piece| piece.len).sum();
        let mut buffer = Buffer::zeroed(usize::try_from(len).map_err(|_| no_memory(len))?);
        let mut rest = buffer.as_mut_slice();
        for piece in pieces {
            let len = usize::try_from(piece.len).map_err(|_| no_memory(piece.len))?;
            let (into, after) = rest.split_at_mut_checked(len).ok_or_else(|| no_memory(piece.len))?;
            rest = after;
            match piece.region {
                0 => into.copy_from_slice(in_arena(arena, piece, name)?),
                _ if unusable.contains(&piece.request) => {}
                region => {
                    let read = self.regions.read(region, piece.offset, into);
                    wrong.extend(read.err().map(|error| (piece.request, error)));
                }
            }
        }
        Ok(buffer)
    }

    /// Texts are copied first and looked at then: their lengths cannot change any more. What is no text of as many elements
    /// as it should be is so many empty ones; there is room for them, the frontend has seen to that.
    fn gather_texts(
        &self,
        (pieces, name, model): (&[Piece], &str, &str),
        arena: &InputArena,
        (unusable, wrong): (&[u32], &mut Vec<(u32, InferError)>),
    ) -> Result<Buffer, InferError> {
        let mut all: Vec<Vec<u8>> = Vec::new();
        for piece in pieces {
            if piece.region == 0 {
                all.push(in_arena(arena, piece, name)?.to_vec());
                continue;
            }
            let mut own = vec![0; usize::try_from(piece.len).map_err(|_| no_memory(piece.len))?];
            let read = match unusable.contains(&piece.request) {
                true => Err(None),
                false => self.regions.read(piece.region, piece.offset, &mut own).map_err(Some),
            };
            let read = read.and_then(|()| {
                let checked = check_strings((name, model), &own, piece.elements);
                checked.map_err(|wrong| Some(self.wrong_texts(piece.request, wrong.message, wrong.prefixed)))
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
        match self.execute.requests.get(request as usize) {
            Some(request) if prefixed => error.with_request_id(&request.id),
            _ => error,
        }
    }

    /// Where in a block the part of a request is; `None` if the block is not for it, or not cut as it should be.
    fn part(&self, block: &OutputBlock, bytes: &[u8], request: u32) -> Option<Range<usize>> {
        let all: Vec<u32> = match block.requests.as_slice() {
            [] => (0..self.execute.requests.len()).filter_map(|position| u32::try_from(position).ok()).collect(),
            some => some.to_vec(),
        };
        let index = all.iter().position(|position| *position == request)?;
        let elements = self.execute.elements.iter().find(|(output, _)| *output == block.output);
        let rows = |request: &BatchRequest| u64::from(request.rows);
        let weight = |position: &u32| match elements {
            Some((_, elements)) => elements.get(*position as usize).copied(),
            None => self.execute.requests.get(*position as usize).map(rows),
        };
        let weights: Vec<u64> = all.iter().map(weight).collect::<Option<_>>()?;
        let ends = match block.datatype {
            _ if all.len() == 1 => vec![bytes.len()],
            DataType::Bytes => text_ends(bytes, element_count(&block.shape)?, &weights)?,
            _ => fixed_ends(bytes.len(), &weights),
        };
        let start = index.checked_sub(1).map_or(0, |before| ends.get(before).copied().unwrap_or(0));
        Some(start..*ends.get(index)?)
    }
}

/// Writes one request's part of an output where its client wants it.
///
/// # Errors
/// There is no room for it, or the memory has gone.
pub(crate) fn write(regions: &Regions, placement: &Placement, (name, bytes): (&str, &[u8])) -> Result<(), InferError> {
    let len = bytes.len() as u64;
    if len > placement.len {
        let text = format!(
            "shared memory size specified with the request for output '{name}' ({} bytes) should be at least {len} bytes to \
             hold the results",
            placement.len
        );
        return Err(InferError::new(ErrorCode::Internal, Reason::SharedMemory, text));
    }
    regions.write(placement.region, placement.offset, bytes)
}

fn in_arena<'m>(arena: &'m InputArena, piece: &Piece, name: &str) -> Result<&'m [u8], InferError> {
    let bytes = arena.bytes(piece.offset, piece.len);
    bytes.ok_or_else(|| run_error(format!("input '{name}' is not in the arena")))
}

fn no_memory(len: u64) -> InferError {
    run_error(format!("{len} bytes of input do not fit in memory"))
}

/// The inputs of a batch that has some in memory of clients, gathered. Requests that turn out to be wrong have failed then.
///
/// # Errors
/// The batch is not what a frame may say.
pub(super) fn gather<'a>(
    (config, arena): (&ModelConfig, &'a InputArena),
    execute: &Execute,
    outputs: &mut Outputs<'a>,
    unusable: &mut Vec<u32>,
) -> Result<Vec<Gathered<'a>>, InferError> {
    let mut all = Vec::with_capacity(execute.inputs.len());
    for block in &execute.inputs {
        let name = super::inputs::name_of(config, block)?;
        let Some(lent) = outputs.lent.as_mut().filter(|_| !block.pieces.is_empty()) else {
            all.push(Gathered::There(super::inputs::bytes_of(arena, block, name)?));
            continue;
        };
        let (gathered, wrong) = lent.gather((block, name, &config.name), arena, unusable)?;
        all.push(gathered);
        for (request, error) in wrong {
            unusable.push(request);
            outputs.fail(request as usize, error);
        }
    }
    Ok(all)
}

/// The inputs as a backend sees them.
pub(super) fn inputs<'b>(
    config: &'b ModelConfig,
    execute: &'b Execute,
    gathered: &'b [Gathered<'_>],
) -> Result<Vec<Input<'b>>, InferError> {
    let inputs = execute.inputs.iter().zip(gathered).map(|(block, gathered)| {
        let (name, data) = (super::inputs::name_of(config, block)?, gathered.as_slice());
        let (index, pieces) = (usize::from(block.input), gathered.pieces());
        Ok(Input { index, name, datatype: block.datatype, shape: &block.shape, data, pieces })
    });
    inputs.collect()
}

/// Whether it is worth executing a batch of which these requests have failed: a sequence must not miss a step.
pub(super) fn is_hopeless(batch: &Batch<'_>, unusable: &[u32]) -> bool {
    let failed = |position: usize| unusable.iter().any(|request| *request as usize == position);
    let mut requests = batch.requests.iter().enumerate();
    requests.all(|(position, request)| failed(position) && request.sequence.is_none())
}

impl Outputs<'_> {
    /// Fails the requests whose memory was not there all the time.
    pub(super) fn check_lent(&mut self) {
        let Some(lent) = &self.lent else { return };
        let wrong = used(lent.execute).filter(|(request, _)| !self.has_failed(*request));
        let wrong: Vec<_> =
            wrong.filter_map(|(request, region)| Some((request, lent.regions.check(region).err()?))).collect();
        for (request, error) in wrong {
            self.fail_whole(request, error);
        }
    }

    /// Writes the outputs where clients want them that are not there yet. After an error of the whole batch, its requests
    /// have failed one by one.
    pub(super) fn place(&mut self, config: &ModelConfig, error: Option<InferError>) -> Option<InferError> {
        let Some(lent) = &self.lent else { return error };
        let execute = lent.execute;
        if let Some(error) = error {
            self.check_lent();
            for request in (0u32..).zip(&execute.requests).map(|(position, _)| position) {
                self.fail_whole(request, error.clone());
            }
            let made = std::mem::take(&mut self.blocks);
            self.withdrawn.extend(made.iter().filter(|block| !block.placed).map(|block| block.offset));
            return None;
        }
        for placement in &execute.placements {
            // One that is executed once more has no outputs yet.
            if self.has_failed(placement.request) || self.rescheduled.contains(&placement.request) {
                continue;
            }
            if let Err(error) = self.place_one(config, placement) {
                self.fail_whole(placement.request, error);
            }
        }
        self.check_lent();
        None
    }

    fn place_one(&self, config: &ModelConfig, placement: &Placement) -> Result<(), InferError> {
        let Some(lent) = &self.lent else { return Ok(()) };
        let name = config.outputs.get(usize::from(placement.output)).map_or("", |output| &output.name);
        for block in self.blocks.iter().filter(|block| block.output == placement.output && !block.placed) {
            let bytes = self.arena.bytes(block.offset, block.len);
            let bytes = bytes.ok_or_else(|| run_error(format!("output '{name}' is not in the arena")))?;
            if !block.requests.is_empty() && !block.requests.contains(&placement.request) {
                continue;
            }
            let part = lent.part(block, bytes, placement.request).and_then(|part| bytes.get(part));
            let part = part.ok_or_else(|| run_error(format!("output '{name}' cannot be cut for its requests")))?;
            write(lent.regions, placement, (name, part))?;
        }
        Ok(())
    }

    /// Writes a response of a decoupled model where its client wants it.
    pub(super) fn place_response(&self, request: u32, blocks: &[OutputBlock]) -> Result<(), InferError> {
        let Some(lent) = &self.lent else { return Ok(()) };
        for placement in lent.execute.placements.iter().filter(|placement| placement.request == request) {
            for block in blocks.iter().filter(|block| block.output == placement.output) {
                let name = self.config.outputs.get(usize::from(block.output)).map_or("", |output| &output.name);
                let bytes = self.arena.bytes(block.offset, block.len);
                let bytes = bytes.ok_or_else(|| run_error(format!("output '{name}' is not in the arena")))?;
                write(lent.regions, placement, (name, bytes))?;
            }
        }
        let mut regions = used(lent.execute).filter(|(user, _)| *user == request);
        regions.try_for_each(|(_, region)| lent.regions.check(region))
    }

    /// Whether a request has failed, by its position in the whole batch.
    pub(super) fn has_failed(&self, request: u32) -> bool {
        self.failed.iter().any(|(failed, _)| *failed == request)
    }

    /// Fails a request by its position in the whole batch, unless it has failed.
    fn fail_whole(&mut self, request: u32, error: InferError) {
        self.rescheduled.retain(|other| *other != request);
        if !self.has_failed(request) {
            let part = std::mem::take(&mut self.part);
            self.fail(request as usize, error);
            self.part = part;
        }
    }
}
