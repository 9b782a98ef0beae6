//! Memory that clients share with the server: opens what they register, and lends it to their requests.
//!
//! Performs what `pharos::shared_memory` decides. An object is opened once, when it is registered; workers are given the
//! descriptor, so that nobody can put another object in its place. It is never mapped or read here: what a client does to
//! it cannot hurt this process.

mod probe;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pharos::error::{ErrorCode, InferError};
use pharos::infer::InferRequest;
use pharos::metrics::builtin::Builtin;
use pharos::metrics::cache::Cache;
use pharos::region::{CUDA_HANDLE, Kind, Memory, Slice};
use pharos::shared_memory::{self as table, Registry, Status, refusal};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::{Resource, getrlimit};

use probe::Probe;

/// Where the system keeps POSIX shared memory objects (`shm_open`).
const OBJECTS: &str = "/dev/shm";

/// The most regions, whatever the limit of open files: each costs a descriptor here and in every worker that uses it.
const MOST: u64 = 16 << 10;

/// What the server is told at start.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// `--allow-client-shm`.
    pub allowed: bool,
    /// The worker's executable, which looks at CUDA memory.
    pub worker: PathBuf,
}

/// The regions of this server.
#[derive(Debug)]
pub struct SharedMemory {
    allowed: bool,
    probe: Probe,
    // Held for a look-up, or while an object is opened.
    registry: Mutex<Registry>,
    /// Tensors and their bytes since the metrics were told: by kind, inputs then outputs.
    lent: [[Lent; 2]; 2],
}

#[derive(Debug, Default)]
struct Lent {
    tensors: AtomicU64,
    bytes: AtomicU64,
}

/// The values of the label `direction`.
const DIRECTIONS: [&str; 2] = ["input", "output"];

impl SharedMemory {
    /// No regions.
    pub fn new(settings: Settings) -> Self {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(MOST * 4);
        let most = usize::try_from((files / 4).min(MOST)).unwrap_or(usize::MAX);
        let probe = Probe::new(settings.worker);
        Self { allowed: settings.allowed, probe, registry: Mutex::new(Registry::new(most)), lent: Default::default() }
    }

    fn check_allowed(&self) -> Result<(), InferError> {
        if self.allowed { Ok(()) } else { Err(table::disabled()) }
    }

    /// Registers `byte_size` bytes from `offset` of the POSIX shared memory object `key`.
    ///
    /// # Errors
    /// With Triton's texts: the key names no object that clients may use, the object does not hold the range, the name is
    /// taken, or shared memory of clients is off.
    pub fn register_system(&self, name: &str, key: &str, (offset, byte_size): (u64, u64)) -> Result<(), InferError> {
        self.check_allowed()?;
        let mut registry = self.lock();
        registry.check_new(name)?;
        let file = open(table::object_name(name, key)?).map_err(|error| {
            tracing::debug!(region = name, key, %error, "a shared memory object cannot be opened");
            table::cannot_open(key)
        })?;
        let (file, size) = file;
        table::check_range(name, (offset, byte_size), size)?;
        registry.insert(name, byte_size, Memory::System { key: key.to_owned(), offset, file })
    }

    /// Registers `byte_size` bytes of CUDA memory by the IPC handle of the process that has it.
    ///
    /// # Errors
    /// With Triton's texts: there is no GPU, the handle opens nothing, what it opens is smaller, the name is taken, or
    /// shared memory of clients is off.
    pub async fn register_cuda(
        &self,
        name: &str,
        handle: &[u8],
        (device, byte_size): (i64, u64),
    ) -> Result<(), InferError> {
        self.check_allowed()?;
        self.lock().check_new(name)?;
        let invalid = |text: String| Err(refusal(ErrorCode::InvalidArg, text));
        let Ok(handle) = <[u8; CUDA_HANDLE]>::try_from(handle) else { return Err(table::not_a_handle()) };
        let failed = format!("failed to register CUDA shared memory region '{name}'");
        let Ok(device) = u32::try_from(device) else {
            return invalid(format!("{failed}: there is no device {device}"));
        };
        match self.probe.look(device, &handle).await {
            Ok(size) if byte_size > 0 && byte_size <= size => {}
            Ok(size) => return invalid(format!("{failed}: {byte_size} bytes are asked for, the memory has {size}")),
            Err(probe::Failure::NoGpu(why)) => {
                tracing::debug!(region = name, "no GPU: {why}");
                return invalid(format!("failed to register CUDA shared memory region: '{name}', GPUs not supported"));
            }
            Err(probe::Failure::Refused(why)) => return invalid(format!("{failed}: {why}")),
            Err(probe::Failure::Broken(why)) => return Err(refusal(ErrorCode::Internal, format!("{failed}: {why}"))),
        }
        self.lock().insert(name, byte_size, Memory::Cuda { device, handle: Box::new(handle) })
    }

    /// Unregisters the region of a kind and name, or all of the kind. A region in use stays usable until the last request
    /// that uses it is done.
    ///
    /// # Errors
    /// Shared memory of clients is off.
    pub fn unregister(&self, kind: Kind, name: Option<&str>) -> Result<(), InferError> {
        self.check_allowed()?;
        self.lock().unregister(kind, name);
        Ok(())
    }

    /// The region of a kind and name, or all of the kind.
    ///
    /// # Errors
    /// There is none, or it is of the other kind.
    pub fn status(&self, kind: Kind, name: Option<&str>) -> Result<Vec<Status>, InferError> {
        self.lock().status(kind, name)
    }

    /// Finds the regions that a request names, which are its own until it is dropped.
    ///
    /// # Errors
    /// A name is not registered, or its region does not hold the range.
    pub fn lend(&self, request: &mut InferRequest) -> Result<(), InferError> {
        let inputs =
            request.inputs.iter_mut().filter_map(|input| input.tensor.data.region_mut()).map(|slice| (0, slice));
        let outputs = request.outputs.iter_mut().filter_map(|output| output.region.as_mut()).map(|slice| (1, slice));
        let mut slices = inputs.chain(outputs).peekable();
        if slices.peek().is_none() {
            return Ok(());
        }
        let registry = self.lock();
        slices.try_for_each(|(direction, slice)| self.lend_one(&registry, direction, slice))
    }

    fn lend_one(&self, registry: &Registry, direction: usize, slice: &mut Slice) -> Result<(), InferError> {
        let kind = registry.lend(slice)?;
        if let Some(lent) = self.lent.get(kind as usize).and_then(|lent| lent.get(direction)) {
            lent.tensors.fetch_add(1, Ordering::Relaxed);
            lent.bytes.fetch_add(slice.len, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Brings the metrics up to date.
    pub fn observe(&self, cache: &Cache) {
        let registry = self.lock();
        let totals = Kind::ALL.map(|kind| (kind.as_str(), registry.totals(kind)));
        drop(registry);
        let rows = |value: fn((u64, u64, u64)) -> u64| totals.map(|(kind, total)| (vec![kind], value(total) as f64));
        cache.set_gauges(Builtin::SharedMemoryRegions, &rows(|(count, _, _)| count));
        cache.set_gauges(Builtin::SharedMemoryBytes, &rows(|(_, bytes, _)| bytes));
        cache.set_gauges(Builtin::SharedMemoryInUse, &rows(|(_, _, used)| used));
        for (kind, lent) in Kind::ALL.iter().zip(&self.lent) {
            for (direction, Lent { tensors, bytes }) in DIRECTIONS.iter().zip(lent) {
                let labels = [kind.as_str(), direction];
                for (metric, count) in
                    [(Builtin::SharedMemoryTensors, tensors), (Builtin::SharedMemoryTensorBytes, bytes)]
                {
                    if let Ok(counter) = cache.counter(metric.name(), &labels) {
                        // A counter takes every whole number.
                        let _ = counter.add_or_update(count.swap(0, Ordering::Relaxed) as f64);
                    }
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens an object of this name, which is one component, and gives its size. A pipe or the like has none; a link is not
/// followed, and what another file system shows there is no object.
fn open(name: &str) -> io::Result<(OwnedFd, u64)> {
    let folder = rustix::fs::open(OBJECTS, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    // Not blocking: opening a pipe would wait for its other end.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::openat(&folder, name, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if stat.st_dev != rustix::fs::fstat(&folder)?.st_dev {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is a file of another file system"));
    }
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok((file, if regular { u64::try_from(stat.st_size).unwrap_or(0) } else { 0 }))
}
