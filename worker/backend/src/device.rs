//! Ranges of device memory, and the traits through which the runtime accesses devices and client
//! memory.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use pharos::error::InferError;
use pharos::region::CUDA_HANDLE;

/// A range of a device's memory, in a buffer of this process or in a client's region. It stays
/// valid as long as its source: a client's region until the batch is executed. The client may
/// change its content at any moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    device: u32,
    address: u64,
    len: usize,
}

impl DeviceMemory {
    /// Describes `len` bytes at an address of a device, in the process's numbering of devices.
    pub const fn new(device: u32, address: u64, len: usize) -> Self {
        Self { device, address, len }
    }

    /// The device, in the process's numbering: 0 is the instance's device.
    pub const fn device(&self) -> u32 {
        self.device
    }

    /// The address of the first byte. Client memory has no particular alignment.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `len` bytes from `offset`; `None` if they exceed the range.
    #[must_use]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        let end = offset.checked_add(len)?;
        (end <= self.len).then(|| Self { address: self.address + offset as u64, len, ..*self })
    }
}

/// A range of a client's memory on a device that stays open as long as this or a clone of it lives,
/// even after the batch is over and the client has unregistered its region. The client may change
/// its content at any moment.
#[derive(Clone)]
pub struct ReceivedOnDevice {
    memory: DeviceMemory,
    handle: [u8; CUDA_HANDLE],
    /// Only held.
    _opened: Arc<dyn Any + Send + Sync>,
}

impl ReceivedOnDevice {
    /// Describes a range of memory that `opened` keeps open; `handle` is what opened it.
    pub fn new(
        opened: Arc<dyn Any + Send + Sync>,
        memory: DeviceMemory,
        handle: [u8; CUDA_HANDLE],
    ) -> Self {
        Self { memory, handle, _opened: opened }
    }

    /// Returns the CUDA IPC handle (`cudaIpcMemHandle_t`) of the client's allocation, in which this
    /// range is: another process can open it too.
    pub fn handle(&self) -> &[u8; CUDA_HANDLE] {
        &self.handle
    }

    /// Whether code of a model may use the memory where it is. Client memory with a smaller alignment
    /// is copied: a misaligned load would break the process's CUDA context.
    pub fn is_aligned(&self) -> bool {
        /// The alignment that kernels may assume, in bytes: the widest load.
        const WIDEST_LOAD: u64 = 16;
        self.memory.address.is_multiple_of(WIDEST_LOAD)
    }

    /// Returns the location of the memory.
    pub fn memory(&self) -> DeviceMemory {
        self.memory
    }
}

/// A range of a client's region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionRange {
    /// The region's number.
    pub region: u64,
    /// The first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl RegionRange {
    /// Whether two ranges share a byte.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let end = |range: &Self| range.offset.saturating_add(range.len);
        self.region == other.region && self.offset < end(other) && other.offset < end(self)
    }
}

/// The kinds of memory that a backend allocates for its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScratchKind {
    /// Memory of the process that the driver copies from and to directly.
    Pinned,
    /// Memory of the instance's device.
    Device,
}

impl fmt::Display for ScratchKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned memory",
            Self::Device => "memory of the GPU",
        })
    }
}

/// Devices and client memory, as the runtime provides them to code that runs at any time and on any
/// thread. Used only for requests with such memory.
pub trait Devices: Send + Sync {
    /// Copies bytes into a region.
    ///
    /// # Errors
    /// The range is not in the region, or the memory cannot be written.
    fn write_region(&self, region: u64, offset: u64, bytes: &[u8]) -> Result<(), InferError>;

    /// Returns the range of a region on its device and keeps it open; `None` if the region is not
    /// on a device.
    fn keep_on_device(&self, range: RegionRange) -> Option<ReceivedOnDevice>;

    /// Copies device memory to the process, ordered after earlier work in the device's default
    /// stream; complete on return.
    ///
    /// # Errors
    /// The driver's reason.
    fn read(&self, from: DeviceMemory, into: &mut [u8]) -> Result<(), InferError>;

    /// Copies memory of a device to the same or another device, as many bytes as `to` has, ordered
    /// after earlier work in the default stream of the source device; complete on return.
    ///
    /// # Errors
    /// The driver's reason.
    fn copy(&self, from: DeviceMemory, to: DeviceMemory) -> Result<(), InferError>;

    /// Allocates memory of at least `len` bytes with undefined content; returns its address.
    ///
    /// # Errors
    /// `Unsupported`: the instance runs on processors, or has no pinned memory. `Unavailable`: there
    /// is no memory left.
    fn allocate(&self, kind: ScratchKind, len: usize) -> Result<u64, InferError>;

    /// Frees memory that [`Devices::allocate`] has returned. All work that uses it must be done.
    ///
    /// # Errors
    /// `InvalidArg`: there is no memory of this kind at the address.
    fn free(&self, kind: ScratchKind, address: u64) -> Result<(), InferError>;
}

/// The regions of clients while a batch is executed. Regions are removed only between batches.
pub trait Regions {
    /// Returns bytes of system memory without a copy; `None` if they have to be copied.
    fn in_place(&self, range: RegionRange) -> Option<&[u8]>;

    /// Like [`Regions::in_place`], for writing. Ranges of one region that are in use at the same
    /// time must not overlap.
    // Regions are memory that other processes write too; `claim` keeps the ranges of one batch
    // apart.
    #[allow(clippy::mut_from_ref)]
    fn in_place_mut(&self, range: RegionRange) -> Option<&mut [u8]>;

    /// Returns the location of bytes on a device; `None` if they are not on one.
    fn on_device(&self, range: RegionRange) -> Option<DeviceMemory>;

    /// Copies from an open region.
    ///
    /// # Errors
    /// The range is not in the region, or the driver cannot copy.
    fn read(&self, region: u64, offset: u64, into: &mut [u8]) -> Result<(), InferError>;

    /// Copies into an open region.
    ///
    /// # Errors
    /// As [`Regions::read`].
    fn write(&self, region: u64, offset: u64, from: &[u8]) -> Result<(), InferError>;

    /// Checks that a region remained intact while it was used.
    ///
    /// # Errors
    /// The region was truncated meanwhile: reads returned zeros, and writes are lost.
    fn check(&self, region: u64) -> Result<(), InferError>;
}

/// Which inputs a backend takes in a device's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceInputs {
    /// None.
    #[default]
    Never,
    /// Those in one contiguous piece.
    Whole,
    /// Also inputs in several pieces, one for each request, which the backend joins.
    Pieces,
}
