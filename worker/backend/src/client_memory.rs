//! Outputs of a batch in client memory.
//!
//! A backend writes there directly only if it tolerates concurrent writes
//! ([`Backend::tolerates_concurrent_writes`](crate::Backend::tolerates_concurrent_writes)) and the
//! request is alone in its batch, or if the memory is on a device and the backend accesses it there
//! ([`Backend::takes_device_memory`](crate::Backend::takes_device_memory)). All other outputs are
//! copied after the execution.

use std::ops::Range;

use pharos::batch_split::{fixed_ends, text_ends};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::tensor::{DataType, element_count};
use pharos::wire::{Execute, OutputBlock, Piece, Placement};

use crate::device::{DeviceInputs, DeviceMemory, RegionRange, Regions};

/// Client memory as a batch uses it.
pub struct ClientMemory<'a> {
    regions: &'a dyn Regions,
    execute: &'a Execute,
    access: ClientAccess,
    /// Ranges that the backend accesses directly.
    ranges: Vec<RegionRange>,
}

/// The kinds of client memory that a backend accesses directly.
#[derive(Clone, Copy, Default)]
pub struct ClientAccess {
    /// Memory that clients may write to concurrently.
    pub in_place: bool,
    /// Memory on a device.
    pub on_device: DeviceInputs,
}

/// The destination of an output.
#[derive(Debug)]
pub enum OutputMemory<'a> {
    /// The process's memory.
    Host(&'a mut [u8]),
    /// A client's memory on a device, written directly.
    Device(DeviceMemory),
    /// The rows of the batch's requests have separate destinations, in request order; none of them
    /// is `Pieces` itself. Only for backends with [`DeviceInputs::Pieces`].
    Pieces(Vec<OutputMemory<'a>>),
}

impl OutputMemory<'_> {
    /// The length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Host(bytes) => bytes.len(),
            Self::Device(memory) => memory.len(),
            Self::Pieces(pieces) => pieces.iter().map(Self::len).sum(),
        }
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Returns the range of a part of an input.
pub fn range_of(piece: &Piece) -> RegionRange {
    RegionRange { region: piece.region, offset: piece.offset, len: piece.len }
}

/// Returns the ranges of client memory that a batch's inputs use.
pub(crate) fn input_ranges(execute: &Execute) -> impl Iterator<Item = RegionRange> + '_ {
    input_pieces(execute).map(range_of)
}

fn input_pieces(execute: &Execute) -> impl Iterator<Item = &Piece> + '_ {
    execute.inputs.iter().flat_map(|input| &input.pieces).filter(|piece| piece.region != 0)
}

/// Returns the range, unless it overlaps one of `others` or its end overflows.
pub(crate) fn claim(others: &[RegionRange], range: RegionRange) -> Option<RegionRange> {
    range.offset.checked_add(range.len)?;
    (!others.iter().any(|other| range.overlaps(other))).then_some(range)
}

/// Returns the regions that a batch uses, each with the position of the request that uses it.
pub fn used_regions(execute: &Execute) -> impl Iterator<Item = (u32, u64)> + '_ {
    let placements =
        execute.placements.iter().map(|placement| (placement.request, placement.region));
    input_pieces(execute).map(|piece| (piece.request, piece.region)).chain(placements)
}

/// Writes one request's part of an output to the location that its client wants.
///
/// # Errors
/// The location is too small, or the memory no longer exists.
pub(crate) fn write_placed(
    placement: &Placement,
    name: &str,
    bytes: &[u8],
    write: impl FnOnce(&Placement, &[u8]) -> Result<(), InferError>,
) -> Result<(), InferError> {
    let len = bytes.len() as u64;
    if len > placement.len {
        let text = format!(
            "shared memory size specified with the request for output '{name}' ({} bytes) should \
             be at least {len} bytes to hold the results",
            placement.len
        );
        return Err(InferError::new(ErrorCode::Internal, Reason::SharedMemory, text));
    }
    write(placement, bytes)
}

impl<'a> ClientMemory<'a> {
    /// Creates the client memory of a batch whose regions are open.
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

    /// Returns the kinds of memory that the backend accesses directly in this batch.
    pub fn access(&self) -> ClientAccess {
        self.access
    }

    /// Records that the backend reads this range of an input, so that no output is written there
    /// meanwhile.
    pub fn reads(&mut self, range: RegionRange) {
        self.ranges.push(range);
    }

    /// Returns the client's memory for an output if the backend may write there directly.
    pub(crate) fn take(
        &mut self,
        output: usize,
        len: usize,
        may_be_on_device: bool,
    ) -> Option<OutputMemory<'a>> {
        // The frontend reads outputs that are not split by rows from the arena.
        if self.execute.elements.iter().any(|(other, _)| usize::from(*other) == output) {
            return None;
        }
        let len = len as u64;
        let &Placement { region, offset, .. } = self
            .execute
            .placements
            .iter()
            .find(|placement| usize::from(placement.output) == output && len <= placement.len)
            .filter(|_| self.access.in_place)?;
        let range = claim(&self.ranges, RegionRange { region, offset, len })?;
        let memory = match self.regions.in_place_mut(range) {
            Some(bytes) => OutputMemory::Host(bytes),
            None if may_be_on_device => OutputMemory::Device(self.regions.on_device(range)?),
            None => return None,
        };
        self.ranges.push(range);
        Some(memory)
    }

    /// Like [`ClientMemory::take`], for one request's rows of an output of a batch of several
    /// requests; only on a device.
    pub(crate) fn take_rows(
        &mut self,
        request: u32,
        output: usize,
        len: u64,
    ) -> Option<DeviceMemory> {
        let &Placement { region, offset, .. } =
            self.execute.placements.iter().find(|placement| {
                placement.request == request
                    && usize::from(placement.output) == output
                    && len <= placement.len
            })?;
        let range = claim(&self.ranges, RegionRange { region, offset, len })?;
        let memory = self.regions.on_device(range)?;
        self.ranges.push(range);
        Some(memory)
    }

    /// Whether the rows of a batch of several requests may have separate destinations.
    pub(crate) fn splits_rows(&self) -> bool {
        self.access.on_device == DeviceInputs::Pieces && self.execute.requests.len() > 1
    }

    /// Writes one request's part of an output to the location that its client wants.
    pub(crate) fn write(
        &self,
        placement: &Placement,
        name: &str,
        bytes: &[u8],
    ) -> Result<(), InferError> {
        write_placed(placement, name, bytes, |to, bytes| {
            self.regions.write(to.region, to.offset, bytes)
        })
    }

    /// Returns the range of a request's part in a block; `None` if the block is not for the request
    /// or has the wrong number of rows.
    pub(crate) fn part(
        &self,
        block: &OutputBlock,
        bytes: &[u8],
        request: u32,
    ) -> Option<Range<usize>> {
        let all: Vec<u32> = match block.requests.as_slice() {
            [] => (0..self.execute.requests.len())
                .filter_map(|position| u32::try_from(position).ok())
                .collect(),
            some => some.to_vec(),
        };
        let index = all.iter().position(|position| *position == request)?;
        let elements = self.execute.elements.iter().find(|(output, _)| *output == block.output);
        let weights: Vec<u64> = all
            .iter()
            .map(|position: &u32| match elements {
                Some((_, elements)) => elements.get(*position as usize).copied(),
                None => self
                    .execute
                    .requests
                    .get(*position as usize)
                    .map(|request| u64::from(request.rows)),
            })
            .collect::<Option<_>>()?;
        let ends = match block.datatype {
            _ if all.len() == 1 => vec![bytes.len()],
            DataType::Bytes => text_ends(bytes, element_count(&block.shape)?, &weights)?,
            _ => fixed_ends(bytes.len(), &weights),
        };
        let start = index.checked_sub(1).map_or(0, |before| ends.get(before).copied().unwrap_or(0));
        Some(start..*ends.get(index)?)
    }
}
