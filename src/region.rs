//! Memory that a client shares with the server, and places in it: what a tensor has in place of bytes.
//!
//! A client names a region and a range; [`Slice`] is that, first as the client wrote it and then with the [`Region`] that
//! it turned out to be. Whoever holds the slice uses the region: a region that is unregistered meanwhile is removed when
//! the last slice is dropped. The frontend never looks at what is in a region. Workers map it, and trust nothing of it: the client
//! may write to it, shrink it or remove it at any moment.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Whose memory a region is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A POSIX shared memory object of this machine.
    System,
    /// Memory of a CUDA device.
    Cuda,
}

impl Kind {
    /// Both.
    pub const ALL: [Kind; 2] = [Kind::System, Kind::Cuda];

    /// As in paths, and in the labels of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Cuda => "cuda",
        }
    }
}

/// The most bytes of a region's name: it travels to the workers with the region.
pub const MAX_NAME: usize = 1024;

/// Bytes of a CUDA IPC memory handle (`cudaIpcMemHandle_t`).
pub const CUDA_HANDLE: usize = 64;

/// Where a region's memory is.
#[derive(Debug)]
pub enum Memory {
    /// A POSIX shared memory object.
    System {
        /// The name that the client gave.
        key: String,
        /// Where the region begins in the object, bytes.
        offset: u64,
        /// The object, open for reading and writing.
        file: OwnedFd,
    },
    /// Memory of a CUDA device that another process has.
    Cuda {
        /// The device's number.
        device: u32,
        /// The handle by which it is opened.
        handle: Box<[u8; CUDA_HANDLE]>,
    },
}

/// A registered region.
#[derive(Debug)]
pub struct Region {
    /// Unique for the life of the server: a name used again is another region.
    pub id: u64,
    /// Its name.
    pub name: String,
    /// Bytes.
    pub byte_size: u64,
    /// Where it is.
    pub memory: Memory,
    /// Tensors that were lent so far.
    uses: AtomicU64,
}

impl Region {
    /// A region that nobody has used.
    pub fn new(id: u64, name: String, byte_size: u64, memory: Memory) -> Self {
        Self { id, name, byte_size, memory, uses: AtomicU64::new(0) }
    }

    /// Whose memory it is.
    pub fn kind(&self) -> Kind {
        match self.memory {
            Memory::System { .. } => Kind::System,
            Memory::Cuda { .. } => Kind::Cuda,
        }
    }

    /// How many tensors of requests were in it so far.
    pub fn uses(&self) -> u64 {
        self.uses.load(Ordering::Relaxed)
    }
}

/// A range of a region.
#[derive(Clone)]
pub struct Slice {
    /// The region's name.
    pub name: String,
    /// The first byte, from the region's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What the name stands for, once it was looked up and found to hold the range.
    region: Option<Arc<Region>>,
}

impl Slice {
    /// A range as a client asks for it.
    pub fn new(name: String, offset: u64, len: u64) -> Self {
        Self { name, offset, len, region: None }
    }

    /// The first `len` bytes of it.
    #[must_use]
    pub fn first(&self, len: u64) -> Self {
        Self { len: len.min(self.len), ..self.clone() }
    }

    /// The region, once it was looked up.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }

    /// Says what the name stands for: uses `region` from now on. The range must lie within it.
    pub fn lend(&mut self, region: Arc<Region>) {
        region.uses.fetch_add(1, Ordering::Relaxed);
        self.region = Some(region);
    }
}

/// Equal are equal ranges of one region.
impl PartialEq for Slice {
    fn eq(&self, other: &Self) -> bool {
        let id = |slice: &Self| slice.region.as_ref().map(|region| region.id);
        (&self.name, self.offset, self.len, id(self)) == (&other.name, other.offset, other.len, id(other))
    }
}

impl fmt::Debug for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {} of region '{}'", self.len, self.offset, self.name)
    }
}
