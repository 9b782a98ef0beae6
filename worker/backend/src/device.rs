//! Memory of devices: ranges of it, and the trait over which the runtime reaches devices and memory of clients.

use std::any::Any;
use std::sync::Arc;

use pharos::error::InferError;

/// A range of a device's memory: of a buffer of this process, or of a client's region. It stays valid as long as what it was
/// taken from, for a client's region as long as the batch is executed; the client may change its content at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    device: u32,
    address: u64,
    len: usize,
}

impl DeviceMemory {
    /// `len` bytes from an address of a device, in the process's numbering of devices.
    pub const fn new(device: u32, address: u64, len: usize) -> Self {
        Self { device, address, len }
    }

    /// The device, in the process's numbering: 0 is the instance's own.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// Where it begins. Memory of clients has no particular alignment.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` bytes from `offset`; `None` if they pass the end.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { address: self.address + offset as u64, len, ..*self })
    }
}

/// A range of a client's memory on a device that stays open as long as this or a clone of it lives, also when the batch is
/// over and the client has unregistered its region. The client may change its content at any moment.
#[derive(Clone)]
pub struct ReceivedOnDevice {
    memory: DeviceMemory,
    /// Only held.
    _opened: Arc<dyn Any + Send + Sync>,
}

impl ReceivedOnDevice {
    /// A range of memory that `opened` keeps open.
    pub fn new(opened: Arc<dyn Any + Send + Sync>, memory: DeviceMemory) -> Self {
        Self { memory, _opened: opened }
    }

    /// Where it is.
    pub fn memory(&self) -> DeviceMemory {
        self.memory
    }
}

/// A range of a region of a client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRange {
    /// The region's number.
    pub region: u64,
    /// The first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl RegionRange {
    /// Whether two ranges have a byte in common.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |range: &Self| range.offset.saturating_add(range.len);
        self.region == other.region && self.offset < end(other) && other.offset < end(self)
    }
}

/// Devices and memory of clients, as the runtime provides them to code that runs at any time and on any thread. Only requests
/// that use such memory reach it.
pub trait Devices: Send + Sync {
    /// Copies bytes into a region.
    ///
    /// # Errors
    /// The range is not in it, or the memory cannot be written.
    fn write_region(&self, region: u64, offset: u64, bytes: &[u8]) -> Result<(), InferError>;

    /// The range of a region where it is on a device, kept open; `None` if it is not on one.
    fn keep_on_device(&self, range: RegionRange) -> Option<ReceivedOnDevice>;

    /// Copies memory of a device into the process's, behind the work of the device's default stream; complete on return.
    ///
    /// # Errors
    /// The driver's reason.
    fn read(&self, from: DeviceMemory, into: &mut [u8]) -> Result<(), InferError>;

    /// Copies memory of a device to the same or another device, as many bytes as `to` has, behind the work of the default
    /// stream of the first; complete on return.
    ///
    /// # Errors
    /// The driver's reason.
    fn copy(&self, from: DeviceMemory, to: DeviceMemory) -> Result<(), InferError>;
}

/// The regions of clients while a batch is executed: they are forgotten between batches only.
pub trait Regions {
    /// Bytes of system memory where they are; `None` if they have to be copied.
    fn in_place(&self, range: RegionRange) -> Option<&[u8]>;

    /// As [`Regions::in_place`], to be written. Ranges of one region that are in use together must not overlap.
    // Regions are memory that other processes write too; `claim` keeps the ranges of one batch apart.
    #[allow(clippy::mut_from_ref)]
    fn in_place_mut(&self, range: RegionRange) -> Option<&mut [u8]>;

    /// Bytes on a device where they are; `None` if they are not on one.
    fn on_device(&self, range: RegionRange) -> Option<DeviceMemory>;

    /// Copies from a region that is open.
    ///
    /// # Errors
    /// The range is not in it, or the driver cannot copy.
    fn read(&self, region: u64, offset: u64, into: &mut [u8]) -> Result<(), InferError>;

    /// Copies into a region that is open.
    ///
    /// # Errors
    /// As [`Regions::read`].
    fn write(&self, region: u64, offset: u64, from: &[u8]) -> Result<(), InferError>;

    /// Whether a region that was used was there all the time.
    ///
    /// # Errors
    /// It was truncated meanwhile: what was read of it were zeros, and what was written is lost.
    fn check(&self, region: u64) -> Result<(), InferError>;
}

/// Which inputs a backend takes in a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceInputs {
    /// None.
    #[default]
    Never,
    /// Those that are in one piece.
    Whole,
    /// Also those in several pieces, one for each request, which the backend joins itself.
    Pieces,
}
