//! Memory that a client shares with the server, and ranges of it that hold tensors.
//!
//! A [`Slice`] holds the name of a region and a range as the client wrote them and, after the
//! look-up, the [`Region`]. A slice keeps its region alive: a region that is unregistered meanwhile
//! is removed when the last slice is dropped. The frontend never reads the content of a region.
//! Workers map it and do not trust it: the client may change, shrink or remove it at any time.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

named_enum! {
    /// The kind of memory of a region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Kind {
        /// A POSIX shared memory object of this machine.
        System => "system",
        /// Memory of a CUDA device.
        Cuda => "cuda",
    }
    /// Returns the name in paths and in the labels of metrics.
    pub fn as_str;
}

/// The maximum length in bytes of a region's name, which is sent to the workers.
pub const MAX_NAME: usize = 1024;

/// Bytes of a CUDA IPC memory handle (`cudaIpcMemHandle_t`).
pub const CUDA_HANDLE: usize = 64;

/// The memory of a region.
#[derive(Debug)]
pub enum Memory {
    /// A POSIX shared memory object.
    System {
        /// The key of the object that the client registered.
        key: String,
        /// The offset of the region in the object, bytes.
        offset: u64,
        /// The object, open for reading and writing.
        file: OwnedFd,
    },
    /// Memory of a CUDA device that another process allocated.
    Cuda {
        /// The device's number.
        device: u32,
        /// The IPC handle that opens it.
        handle: Box<[u8; CUDA_HANDLE]>,
    },
}

/// A registered region.
#[derive(Debug)]
pub struct Region {
    /// Unique during the life of the server: a name that is registered again gets another id.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Bytes.
    pub byte_size: u64,
    /// The memory.
    pub memory: Memory,
    /// The number of tensors so far.
    uses: AtomicU64,
}

impl Region {
    /// Creates a region that no tensor has used.
    pub fn new(id: u64, name: String, byte_size: u64, memory: Memory) -> Self {
        Self { id, name, byte_size, memory, uses: AtomicU64::new(0) }
    }

    /// Returns the kind of its memory.
    pub fn kind(&self) -> Kind {
        match self.memory {
            Memory::System { .. } => Kind::System,
            Memory::Cuda { .. } => Kind::Cuda,
        }
    }

    /// Returns the number of tensors of requests that have been in the region so far.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Relaxed)
    }
}

/// A range of a region.
#[derive(Clone)]
pub struct Slice {
    /// The region's name.
    pub name: String,
    /// The first byte, relative to the start of the region.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The region, after the look-up has checked that it contains the range.
    region: Option<Arc<Region>>,
}

impl Slice {
    /// Creates a range as a client requests it.
    pub fn new(name: String, offset: u64, len: u64) -> Self {
        Self { name, offset, len, region: None }
    }

    /// Returns the first `len` bytes of the range.
    #[must_use]
    pub fn first(&self, len: u64) -> Self {
        Self { len: len.min(self.len), ..self.clone() }
    }

    /// Returns the region, after the look-up.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }

    /// Sets the region and counts a use of it. The range must lie within the region.
    pub fn attach(&mut self, region: Arc<Region>) {
        region.uses.fetch_add(1, Ordering::Relaxed);
        self.region = Some(region);
    }
}

/// Compares names, ranges and regions.
impl PartialEq for Slice {
    fn eq(&self, other: &Self) -> bool {
        let id = |slice: &Self| slice.region.as_ref().map(|region| region.id);
        (&self.name, self.offset, self.len, id(self))
            == (&other.name, other.offset, other.len, id(other))
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {} of region '{}'", self.len, self.offset, self.name)
    }
}
