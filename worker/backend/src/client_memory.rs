//! Outputs of a batch in memory of clients.
//!
//! A backend writes there itself only if it tolerates concurrent writes
//! ([`Backend::tolerates_concurrent_writes`](crate::Backend::tolerates_concurrent_writes)) and the request is alone in its batch,
//! or if the memory is on a device and the backend takes it there
//! ([`Backend::takes_device_memory`](crate::Backend::takes_device_memory)). All other outputs are copied after the execution.

use std::ops::Range;

use pharos::batch_split::{fixed_ends, text_ends};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::tensor::{DataType, element_count};
use pharos::wire::{BatchRequest, Execute, OutputBlock, Piece, Placement};

use crate::device::{DeviceInputs, DeviceMemory, RegionRange, Regions};

/// Memory of clients, as a batch uses it.
pub struct ClientMemory<'a> {
    regions: &'a dyn Regions,
    execute: &'a Execute,
    access: ClientAccess,
    /// Ranges that the backend has.
    ranges: Vec<RegionRange>,
}

/// Which memory of clients a backend accesses itself.
#[derive(Clone, Copy, Default)]
pub struct ClientAccess {
    /// Memory that clients may write to meanwhile.
    pub in_place: bool,
    /// Memory on a device.
    pub on_device: DeviceInputs,
}

/// Where an output goes.
#[derive(Debug)]
pub enum OutputMemory<'a> {
    /// Into the process's memory.
    Host(&'a mut [u8]),
    /// Straight to a client's memory on a device.
    Device(DeviceMemory),
    /// The rows of the batch's requests go to different places, one after the other; none of these is in pieces itself. Only
    /// for backends with [`DeviceInputs::Pieces`].
    Pieces(Vec<OutputMemory<'a>>),
}

impl OutputMemory<'_> {
    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(memory) => memory.len(),
            Self::Pieces(pieces) => pieces.iter().map(Self::len).sum(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where a part of an input is.
pub fn range_of(piece: &Piece) -> RegionRange {
    RegionRange { region: piece.region, offset: piece.offset, len: piece.len }
}

/// The parts of a batch's inputs that are in memory of clients.
pub(crate) fn input_ranges(execute: &Execute) -> impl Iterator<Item = RegionRange> + '_ {
    input_pieces(execute).map(range_of)
}

fn input_pieces(execute: &Execute) -> impl Iterator<Item = &Piece> + '_ {
    execute.inputs.iter().flat_map(|input| &input.pieces).filter(|piece| piece.region != 0)
}

/// A range, unless it overlaps one of `others` or has no end.
pub(crate) fn claim(others: &[RegionRange], range: RegionRange) -> Option<RegionRange> {
    range.offset.checked_add(range.len)?;
    (!others.iter().any(|other| range.overlaps(other))).then_some(range)
}

/// The regions that a batch uses, each with the position of the request that does.
pub fn used_regions(execute: &Execute) -> impl Iterator<Item = (u32, u64)> + '_ {
    let placements = execute.placements.iter().map(|placement| (placement.request, placement.region));
    input_pieces(execute).map(|piece| (piece.request, piece.region)).chain(placements)
}

/// Writes one request's part of an output where its client wants it.
///
/// # Errors
/// There is no room for it, or the memory has gone.
pub(crate) fn write_placed(
    placement: &Placement,
    name: &str,
    bytes: &[u8],
    write: impl FnOnce(&Placement, &[u8]) -> Result<(), InferError>,
) -> Result<(), InferError> {
    let len = bytes.len() as u64;
    if len > placement.len {
        let text = format!(
            "shared memory size specified with the request for output '{name}' ({} bytes) should be at least {len} bytes to \
             hold the results",
            placement.len
        );
        return Err(InferError::new(ErrorCode::Internal, Reason::SharedMemory, text));
    }
    write(placement, bytes)
}

impl<'a> ClientMemory<'a> {
    /// Of a batch whose regions are open.
    pub fn new(regions: &'a dyn Regions, execute: &'a Execute, access: ClientAccess) -> Self {
        let in_place = access.in_place && execute.requests.len() == 1;
        Self { regions, execute, access: ClientAccess { in_place, ..access }, ranges: Vec::new() }
    }

    /// The regions.
    pub fn regions(&self) -> &'a dyn Regions {
        self.regions
    }

    /// The batch.
    pub fn execute(&self) -> &'a Execute {
        self.execute
    }

    /// What the backend accesses itself in this batch.
    pub fn access(&self) -> ClientAccess {
        self.access
    }

    /// The backend reads this range of an input: no output is written there meanwhile.
    pub fn reads(&mut self, range: RegionRange) {
        self.ranges.push(range);
    }

    /// The memory for an output that the backend may write where its client wants it.
    pub(crate) fn take(&mut self, output: usize, len: usize, may_be_on_device: bool) -> Option<OutputMemory<'a>> {
        // The frontend takes outputs from the arena that are not split by rows.
        if self.execute.elements.iter().any(|(other, _)| usize::from(*other) == output) {
            return None;
        }
        let len = len as u64;
        let wanted = |placement: &&Placement| usize::from(placement.output) == output && len <= placement.len;
        let &Placement { region, offset, .. } =
            self.execute.placements.iter().find(wanted).filter(|_| self.access.in_place)?;
        let range = claim(&self.ranges, RegionRange { region, offset, len })?;
        let on_device = || self.regions.on_device(range).filter(|_| may_be_on_device);
        let in_place = self.regions.in_place_mut(range).map(OutputMemory::Host);
        let memory = in_place.or_else(|| on_device().map(OutputMemory::Device))?;
        self.ranges.push(range);
        Some(memory)
    }

    /// As [`ClientMemory::take`], for one request's rows of an output of a batch of several; on a device only.
    pub(crate) fn take_rows(&mut self, request: u32, output: usize, len: u64) -> Option<DeviceMemory> {
        let wanted = |placement: &&Placement| {
            placement.request == request && usize::from(placement.output) == output && len <= placement.len
        };
        let &Placement { region, offset, .. } = self.execute.placements.iter().find(wanted)?;
        let range = claim(&self.ranges, RegionRange { region, offset, len })?;
        let memory = self.regions.on_device(range)?;
        self.ranges.push(range);
        Some(memory)
    }

    /// Whether the rows of a batch of several requests may go to several places.
    pub(crate) fn splits_rows(&self) -> bool {
        self.access.on_device == DeviceInputs::Pieces && self.execute.requests.len() > 1
    }

    /// Writes one request's part of an output where its client wants it.
    pub(crate) fn write(&self, placement: &Placement, name: &str, bytes: &[u8]) -> Result<(), InferError> {
        write_placed(placement, name, bytes, |to, bytes| self.regions.write(to.region, to.offset, bytes))
    }

    /// Where in a block the part of a request is; `None` if the block is not for it, or does not have the rows that it should.
    pub(crate) fn part(&self, block: &OutputBlock, bytes: &[u8], request: u32) -> Option<Range<usize>> {
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
