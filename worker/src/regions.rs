//! Client memory: received from the frontend, mapped when a batch first uses it, kept while it is
//! registered.
//!
//! Its content is not trusted. The client may write to it at any moment, so no decision may depend
//! on two reads of the same bytes. The client may also truncate its object. That is detected before
//! a batch, by the fault during its execution, or after it, and is reported to the requests that
//! used the memory.

mod cuda;
#[allow(unsafe_code)]
mod fault;
#[allow(unsafe_code)]
mod mapping;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::collections::HashMap;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::region::CUDA_HANDLE;
use pharos::wire::ToFrontend;
use pharos::wire::regions::{
    MAX_PACKET, MAX_REGIONS_PER_PACKET, RegionDescription, RegionLocation, decode,
};
use pharos_backend::runtime::{Arenas, Devices, RegionRange, Regions};
use pharos_backend::{DeviceMemory, ReceivedOnDevice, ScratchKind, run_error};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use mapping::Mapping;

use crate::device::{Cuda, Fault, Scratch, Stream};

pub(crate) use cuda::probe;
use cuda::{Opened, call};

/// Client memory and device memory, for all threads.
pub(crate) struct ClientRegions {
    // Changed by the main thread only, between batches.
    table: RwLock<RegionTable>,
    cuda: Arc<Cuda>,
    scratch: Scratch,
}

impl ClientRegions {
    /// Receives regions over this socket. The driver is first called when memory on a device is
    /// used.
    pub(crate) fn new(socket: OwnedFd, cuda: Arc<Cuda>) -> Self {
        let scratch = Scratch::new(&cuda);
        Self { table: RwLock::new(RegionTable::new(socket, cuda.clone())), cuda, scratch }
    }

    /// Returns the driver.
    pub(crate) fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Returns the regions.
    pub(crate) fn table(&self) -> RwLockReadGuard<'_, RegionTable> {
        self.table.read()
    }

    /// Unmaps removed regions, and lets the frontend announce others again whose descriptors were
    /// lost meanwhile.
    pub(crate) fn unmap(&self, ids: &[u64], arenas: &Arenas) {
        let mut table = self.table_mut();
        table.unmap(ids);
        table.take_lost().iter().for_each(|frame| arenas.send(frame));
    }

    /// Returns the regions for opening or removing some.
    pub(crate) fn table_mut(&self) -> RwLockWriteGuard<'_, RegionTable> {
        self.table.write()
    }
}

impl Devices for ClientRegions {
    fn write_region(&self, region: u64, offset: u64, bytes: &[u8]) -> Result<(), InferError> {
        self.table().write(region, offset, bytes)
    }

    fn keep_on_device(&self, range: RegionRange) -> Option<ReceivedOnDevice> {
        self.table().kept_on_device(range)
    }

    fn read(&self, from: DeviceMemory, into: &mut [u8]) -> Result<(), InferError> {
        let device = from.device();
        let read = call(&self.cuda, device, |driver| driver.read(device, from.address(), into));
        read.map_err(|why| cannot_be_copied(device, &why))
    }

    fn copy(&self, from: DeviceMemory, to: DeviceMemory) -> Result<(), InferError> {
        let device = from.device();
        let copied = call(&self.cuda, device, |driver| {
            driver.copy(
                device,
                Stream::DEFAULT,
                DeviceMemory::new(device, from.address(), to.len()),
                to,
            )?;
            driver.synchronize(device, Stream::DEFAULT)
        });
        copied.map_err(|why| cannot_be_copied(device, &why))
    }

    fn allocate(&self, kind: ScratchKind, len: usize) -> Result<u64, InferError> {
        self.scratch.allocate(kind, len)
    }

    fn free(&self, kind: ScratchKind, address: u64) -> Result<(), InferError> {
        self.scratch.free(kind, address)
    }
}

fn cannot_be_copied(device: u32, why: &Fault) -> InferError {
    run_error(format!("cannot copy memory of device {device}: {why}"))
}

/// All regions announced to this worker.
pub(crate) struct RegionTable {
    socket: OwnedFd,
    known: HashMap<u64, Known>,
    /// Regions whose descriptors could not be received, until the frontend is informed.
    lost: Vec<u64>,
    cuda: Arc<Cuda>,
}

/// A region.
struct Known {
    region: RegionDescription,
    /// The descriptor of the shared-memory object, for system memory.
    file: Option<OwnedFd>,
    memory: Option<Memory>,
}

/// How this process accesses a region.
enum Memory {
    System(Mapping),
    /// On a device, in this process's numbering.
    Cuda(Arc<Opened>),
}

impl RegionTable {
    /// Creates an empty table that receives regions over this socket. The driver is first called
    /// when memory on a device is used.
    pub(crate) fn new(socket: OwnedFd, cuda: Arc<Cuda>) -> Self {
        Self { socket, known: HashMap::new(), lost: Vec::new(), cuda }
    }

    /// Makes a region ready for use.
    ///
    /// # Errors
    /// The region cannot be accessed, or is smaller than when it was registered.
    pub(crate) fn open(&mut self, id: u64) -> Result<(), InferError> {
        self.receive(&[id])
            .map_err(|error| failed(format!("cannot receive shared memory regions: {error}")))?;
        let known = self
            .known
            .get_mut(&id)
            .ok_or_else(|| failed(format!("there is no shared memory region {id}")))?;
        known.check_size()?;
        if known.memory.as_ref().is_some_and(
            |memory| matches!(memory, Memory::System(mapping) if mapping.is_truncated()),
        ) {
            known.memory = None;
        }
        if known.memory.is_none() {
            known.memory = Some(known.map(&self.cuda)?);
        }
        Ok(())
    }

    /// Unmaps removed regions; memory on a device once no handle on it is left.
    pub(crate) fn unmap(&mut self, ids: &[u64]) {
        // Includes announced regions that have not been received yet.
        let _ = self.receive(ids);
        for id in ids {
            self.known.remove(id);
        }
    }

    /// Returns the frame that lets the frontend announce regions again, if some were received
    /// without their descriptors. It must be sent before the errors of the requests that use them.
    pub(crate) fn take_lost(&mut self) -> Option<ToFrontend> {
        let mut lost = std::mem::take(&mut self.lost);
        lost.retain(|id| self.known.contains_key(id));
        if lost.is_empty() { None } else { Some(ToFrontend::RegionsLost(lost)) }
    }

    /// Like [`Regions::on_device`], but keeps the memory open for any time.
    fn kept_on_device(&self, range: RegionRange) -> Option<ReceivedOnDevice> {
        let memory = self.on_device(range)?;
        let known = self.known.get(&range.region)?;
        match (&known.memory, &known.region.location) {
            (Some(Memory::Cuda(opened)), RegionLocation::Cuda { handle, .. }) => {
                Some(ReceivedOnDevice::new(opened.clone(), memory, **handle))
            }
            _ => None,
        }
    }

    fn mapping(&self, id: u64) -> Option<&Mapping> {
        match self.known.get(&id)?.memory.as_ref()? {
            Memory::System(mapping) => Some(mapping),
            Memory::Cuda(_) => None,
        }
    }

    /// Receives packets until all these regions are complete or no packet is left. The others wait:
    /// during a shortage of descriptors, receiving them early would lose theirs.
    fn receive(&mut self, ids: &[u64]) -> io::Result<()> {
        let is_incomplete = |known: Option<&Known>| known.is_none_or(Known::lacks_descriptor);
        while ids.iter().any(|id| is_incomplete(self.known.get(id))) {
            let Some(regions) = receive_packet(&self.socket)? else { return Ok(()) };
            for (region, file) in regions {
                let known = Known { region, file, memory: None };
                if known.lacks_descriptor() {
                    self.lost.push(known.region.id);
                }
                // A region that is announced again may be in use.
                if is_incomplete(self.known.get(&known.region.id)) {
                    self.known.insert(known.region.id, known);
                }
            }
        }
        Ok(())
    }
}

impl Regions for RegionTable {
    fn in_place(&self, range: RegionRange) -> Option<&[u8]> {
        self.mapping(range.region)?.bytes(range.offset, range.len)
    }

    fn in_place_mut(&self, range: RegionRange) -> Option<&mut [u8]> {
        self.mapping(range.region)?.bytes_mut(range.offset, range.len)
    }

    fn on_device(&self, range: RegionRange) -> Option<DeviceMemory> {
        let known = self.known.get(&range.region)?;
        known.check_range(range.offset, range.len).ok()?;
        let Some(Memory::Cuda(opened)) = &known.memory else { return None };
        opened.memory().part(usize::try_from(range.offset).ok()?, usize::try_from(range.len).ok()?)
    }

    fn read(&self, id: u64, offset: u64, into: &mut [u8]) -> Result<(), InferError> {
        let known = self.known.get(&id).ok_or_else(|| outside(id))?;
        known.check_range(offset, into.len() as u64)?;
        match &known.memory {
            Some(Memory::System(mapping)) if mapping.copy_out(offset, into) => Ok(()),
            Some(Memory::Cuda(opened)) => {
                let device = opened.memory().device();
                let address = opened.memory().address() + offset;
                let read = call(&self.cuda, device, |driver| driver.read(device, address, into));
                read.map_err(|why| known.failed(&why.to_string()))
            }
            _ => Err(outside(id)),
        }
    }

    fn write(&self, id: u64, offset: u64, from: &[u8]) -> Result<(), InferError> {
        let known = self.known.get(&id).ok_or_else(|| outside(id))?;
        known.check_range(offset, from.len() as u64)?;
        match &known.memory {
            Some(Memory::System(mapping)) if mapping.copy_in(offset, from) => Ok(()),
            Some(Memory::Cuda(opened)) => {
                let device = opened.memory().device();
                let address = opened.memory().address() + offset;
                let written =
                    call(&self.cuda, device, |driver| driver.write(device, address, from));
                written.map_err(|why| known.failed(&why.to_string()))
            }
            _ => Err(outside(id)),
        }
    }

    fn check(&self, id: u64) -> Result<(), InferError> {
        let Some(known) = self.known.get(&id) else { return Err(outside(id)) };
        match &known.memory {
            Some(Memory::System(mapping)) if mapping.is_truncated() => Err(known.cut_off("less")),
            _ => known.check_size(),
        }
    }
}

impl Known {
    /// Whether the process could not receive the descriptor of the object.
    fn lacks_descriptor(&self) -> bool {
        self.file.is_none() && matches!(self.region.location, RegionLocation::System { .. })
    }

    /// Checks that the object is at least as large as when it was registered.
    fn check_size(&self) -> Result<(), InferError> {
        let (Some(file), RegionLocation::System { offset }) = (&self.file, &self.region.location)
        else {
            return Ok(());
        };
        let size =
            rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_size).unwrap_or(0));
        if offset.checked_add(self.region.byte_size).is_some_and(|end| end <= size) {
            return Ok(());
        }
        Err(self.cut_off(&size.saturating_sub(*offset).to_string()))
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), InferError> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.region.byte_size);
        if inside { Ok(()) } else { Err(outside(self.region.id)) }
    }

    fn map(&self, cuda: &Arc<Cuda>) -> Result<Memory, InferError> {
        match (&self.region.location, &self.file) {
            (RegionLocation::System { offset }, Some(file)) => {
                let mapping = Mapping::new(file, *offset, self.region.byte_size);
                mapping
                    .map(Memory::System)
                    .map_err(|error| self.failed(&format!("it cannot be mapped: {error}")))
            }
            (RegionLocation::System { .. }, None) => {
                let why = "the worker could not receive its file descriptor, possibly because too \
                           many files are open; a later request tries again";
                let failed = self.failed(why);
                Err(InferError::new(ErrorCode::Unavailable, failed.reason, failed.message))
            }
            (RegionLocation::Cuda { device, handle }, _) => {
                self.open_on_device(cuda, *device, handle)
            }
        }
    }

    fn open_on_device(
        &self,
        cuda: &Arc<Cuda>,
        number: u32,
        handle: &[u8; CUDA_HANDLE],
    ) -> Result<Memory, InferError> {
        let failed = |why: Fault| self.failed(&why.to_string());
        let device = cuda.ordinal(number).map_err(failed)?;
        let opened = Opened::new(cuda, device, handle, self.region.byte_size).map_err(failed)?;
        opened.map(Memory::Cuda).map_err(|size| self.cut_off(&size.to_string()))
    }

    fn cut_off(&self, now: &str) -> InferError {
        let RegionDescription { name, byte_size, .. } = &self.region;
        let text = format!(
            "shared memory region '{name}' was registered with {byte_size} bytes, of which {now} \
             are left"
        );
        InferError::new(ErrorCode::InvalidArg, Reason::SharedMemory, text)
    }

    fn failed(&self, why: &str) -> InferError {
        failed(format!("shared memory region '{}' cannot be used: {why}", self.region.name))
    }
}

/// Returns an error that is not, or not certainly, the client's fault.
fn failed(text: String) -> InferError {
    InferError::new(ErrorCode::Internal, Reason::SharedMemory, text)
}

fn outside(id: u64) -> InferError {
    failed(format!("a range is not in shared memory region {id}"))
}

/// A region, with its descriptor if it has one.
type Received = (RegionDescription, Option<OwnedFd>);

/// Receives the regions of the next packet, each with its descriptor if it has one; `None` when
/// there is no packet.
///
/// # Errors
/// The packet is invalid, descriptors are missing, or the socket fails.
fn receive_packet(socket: impl AsFd) -> io::Result<Option<Vec<Received>>> {
    let mut packet = vec![0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_REGIONS_PER_PACKET))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match recvmsg(socket, &mut [IoSliceMut::new(&mut packet)], &mut control, flags) {
        Ok(received) if received.bytes > 0 => received,
        // Closed: the connection reports that as well.
        Ok(_) | Err(Errno::AGAIN) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    let regions =
        decode(packet.get(..received.bytes).unwrap_or_default()).map_err(io::Error::other)?;
    let wanted = regions
        .iter()
        .filter(|region| matches!(region.location, RegionLocation::System { .. }))
        .count();
    if received.flags.intersects(ReturnFlags::TRUNC)
        || (wanted != files.len() && !received.flags.intersects(ReturnFlags::CTRUNC))
    {
        return Err(io::Error::other(format!(
            "a packet of {wanted} regions has {} descriptors",
            files.len()
        )));
    }
    // The kernel drops descriptors at the end when this process has no room for them.
    let mut files = files.into_iter();
    let with_files = regions.into_iter().map(|region| {
        let file = if matches!(region.location, RegionLocation::System { .. }) {
            files.next()
        } else {
            None
        };
        (region, file)
    });
    Ok(Some(with_files.collect()))
}
