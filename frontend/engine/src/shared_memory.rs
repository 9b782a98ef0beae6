//! Shared memory of clients: opens the regions that they register, and resolves the regions of
//! their requests.
//!
//! Decisions are in `pharos::shared_memory`. An object is opened once, when it is registered.
//! Workers get its descriptor, so that it cannot be replaced by another object. This process never
//! maps or reads it, so that a client cannot crash it.

mod probe;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use pharos::error::{ErrorCode, InferError};
use pharos::infer::InferRequest;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::region::{CUDA_HANDLE, Kind, Memory, Slice};
use pharos::shared_memory::{self as table, Registry, Status, refusal};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::{Resource, getrlimit};

use probe::Probe;

/// The directory of POSIX shared memory objects (`shm_open`).
const OBJECTS: &str = "/dev/shm";

/// The maximum number of regions, whatever the limit of open files: each uses a descriptor here and
/// in each worker that uses it.
const MAX_REGIONS: u64 = 16 << 10;

/// Settings of client shared memory.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--allow-client-shm`.
    pub allowed: bool,
    /// The worker's executable, which probes CUDA memory.
    pub worker: PathBuf,
}

/// The regions of this server.
#[derive(Debug)]
pub struct SharedMemory {
    allowed: bool,
    probe: Probe,
    // Held for a lookup, or while an object is opened.
    registry: Mutex<Registry>,
    /// Tensors and their bytes since the last update of the metrics, by kind, inputs before
    /// outputs.
    attached: [[TensorCounts; 2]; 2],
}

#[derive(Debug, Default)]
struct TensorCounts {
    tensors: AtomicU64,
    bytes: AtomicU64,
}

/// The values of the label `direction`.
const DIRECTIONS: [&str; 2] = ["input", "output"];

impl SharedMemory {
    /// Creates an empty registry.
    pub fn new(settings: Settings) -> Self {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(MAX_REGIONS * 4);
        let most = usize::try_from((files / 4).min(MAX_REGIONS)).unwrap_or(usize::MAX);
        let probe = Probe::new(settings.worker);
        Self {
            allowed: settings.allowed,
            probe,
            registry: Mutex::new(Registry::new(most)),
            attached: Default::default(),
        }
    }

    fn check_allowed(&self) -> Result<(), InferError> {
        if self.allowed { Ok(()) } else { Err(table::disabled()) }
    }

    /// Registers `byte_size` bytes from `offset` of the POSIX shared memory object `key`.
    ///
    /// # Errors
    /// Triton's texts: the key names no object that clients may use, the object is shorter than the
    /// range, the name is taken, or shared memory of clients is disabled.
    pub fn register_system(
        &self,
        name: &str,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<(), InferError> {
        self.check_allowed()?;
        let mut registry = self.lock();
        registry.check_new(name)?;
        let (file, size) = open(table::object_name(name, key)?).map_err(|error| {
            tracing::debug!(region = name, key, %error, "cannot open a shared memory object");
            table::cannot_open(key)
        })?;
        table::check_range(name, offset, byte_size, size)?;
        registry.insert(name, byte_size, Memory::System { key: key.to_owned(), offset, file })
    }

    /// Registers `byte_size` bytes of CUDA memory by the IPC handle of the process that allocated
    /// it.
    ///
    /// # Errors
    /// Triton's texts: there is no GPU, the handle is invalid, its memory is smaller, the name is
    /// taken, or shared memory of clients is disabled.
    pub async fn register_cuda(
        &self,
        name: &str,
        handle: &[u8],
        device: i64,
        byte_size: u64,
    ) -> Result<(), InferError> {
        self.check_allowed()?;
        self.lock().check_new(name)?;
        let invalid = |text: String| Err(refusal(ErrorCode::InvalidArg, text));
        let Ok(handle) = <[u8; CUDA_HANDLE]>::try_from(handle) else {
            return Err(table::not_a_handle());
        };
        let failed = format!("failed to register CUDA shared memory region '{name}'");
        let Ok(device) = u32::try_from(device) else {
            return invalid(format!("{failed}: device {device} does not exist"));
        };
        match self.probe.opened_size(device, &handle).await {
            Ok(size) if byte_size > 0 && byte_size <= size => {}
            Ok(size) => {
                return invalid(format!(
                    "{failed}: {byte_size} bytes requested, the memory has {size}"
                ));
            }
            Err(probe::Failure::NoGpu(why)) => {
                tracing::debug!(region = name, "no GPU: {why}");
                return invalid(format!(
                    "failed to register CUDA shared memory region: '{name}', GPUs not supported"
                ));
            }
            Err(probe::Failure::Refused(why)) => return invalid(format!("{failed}: {why}")),
            Err(probe::Failure::Broken(why)) => {
                return Err(refusal(ErrorCode::Internal, format!("{failed}: {why}")));
            }
        }
        self.lock().insert(name, byte_size, Memory::Cuda { device, handle: Box::new(handle) })
    }

    /// Unregisters the region of a kind and name, or all regions of the kind. A region in use stays
    /// valid until the last request that uses it is done.
    ///
    /// # Errors
    /// Shared memory of clients is disabled.
    pub fn unregister(&self, kind: Kind, name: Option<&str>) -> Result<(), InferError> {
        self.check_allowed()?;
        self.lock().unregister(kind, name);
        Ok(())
    }

    /// Returns the region of a kind and name, or all regions of the kind.
    ///
    /// # Errors
    /// The region does not exist or has the other kind.
    pub fn status(&self, kind: Kind, name: Option<&str>) -> Result<Vec<Status>, InferError> {
        self.lock().status(kind, name)
    }

    /// Resolves the regions that a request names. The request keeps them alive.
    ///
    /// # Errors
    /// A name is not registered, or its region is shorter than the range.
    pub fn attach(&self, request: &mut InferRequest) -> Result<(), InferError> {
        let inputs = request
            .inputs
            .iter_mut()
            .filter_map(|input| input.tensor.data.region_mut())
            .map(|slice| (0, slice));
        let outputs = request
            .outputs
            .iter_mut()
            .filter_map(|output| output.region.as_mut())
            .map(|slice| (1, slice));
        let mut slices = inputs.chain(outputs).peekable();
        if slices.peek().is_none() {
            return Ok(());
        }
        let registry = self.lock();
        slices.try_for_each(|(direction, slice)| self.lend_one(&registry, direction, slice))
    }

    fn lend_one(
        &self,
        registry: &Registry,
        direction: usize,
        slice: &mut Slice,
    ) -> Result<(), InferError> {
        let kind = registry.attach(slice)?;
        if let Some(attached) =
            self.attached.get(kind as usize).and_then(|attached| attached.get(direction))
        {
            attached.tensors.fetch_add(1, Ordering::Relaxed);
            attached.bytes.fetch_add(slice.len, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Updates the metrics.
    pub fn observe(&self, cache: &Cache) {
        let registry = self.lock();
        let totals = Kind::ALL.map(|kind| (kind.as_str(), registry.totals(kind)));
        drop(registry);
        cache.set_gauges(
            Builtin::SharedMemoryRegions,
            &totals.map(|(kind, (count, ..))| (vec![kind], count as f64)),
        );
        cache.set_gauges(
            Builtin::SharedMemoryBytes,
            &totals.map(|(kind, (_, bytes, _))| (vec![kind], bytes as f64)),
        );
        cache.set_gauges(
            Builtin::SharedMemoryInUse,
            &totals.map(|(kind, (.., used))| (vec![kind], used as f64)),
        );
        for (kind, attached) in Kind::ALL.iter().zip(&self.attached) {
            for (direction, TensorCounts { tensors, bytes }) in DIRECTIONS.iter().zip(attached) {
                let labels = [kind.as_str(), direction];
                for (metric, count) in [
                    (Builtin::SharedMemoryTensors, tensors),
                    (Builtin::SharedMemoryTensorBytes, bytes),
                ] {
                    cache.count(metric, &labels, count.swap(0, Ordering::Relaxed) as f64);
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock()
    }
}

/// Opens an object by its name, which is a single path component, and returns its size (0 if it is
/// not a regular file). Links are not followed, and files of other file systems mounted there are
/// refused.
fn open(name: &str) -> io::Result<(OwnedFd, u64)> {
    let folder = rustix::fs::open(
        OBJECTS,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // Non-blocking, because opening a pipe would wait for its other end.
    let flags =
        OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::openat(&folder, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if stat.st_dev != rustix::fs::fstat(&folder)?.st_dev {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the file is on another file system",
        ));
    }
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok((file, if regular { u64::try_from(stat.st_size).unwrap_or(0) } else { 0 }))
}
