//! Announces clients' memory to a worker: each region once, before the first batch that uses it,
//! with its descriptor; and again if the worker could not receive the descriptor.

use std::collections::HashMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use pharos::error::{ErrorCode, InferError, Reason};
use pharos::region::{Memory, Region};
use pharos::wire::regions::{MAX_REGIONS_PER_PACKET, RegionDescription, RegionLocation, encode};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::BatchedRequest;

/// The regions that were announced to one worker.
pub(super) struct Regions {
    socket: OwnedFd,
    // Held while packets are sent, so that a batch cannot use a region before its announcement is
    // sent.
    known: Mutex<HashMap<u64, Announced>>,
}

/// A region that was announced.
struct Announced {
    region: Weak<Region>,
    /// Whether the worker could not receive its descriptor.
    lost: bool,
}

impl Regions {
    /// Creates a set without announced regions.
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket, known: Mutex::default() }
    }

    /// Announces the regions that requests use, if they are new or the worker has lost them.
    ///
    /// # Errors
    /// The socket's buffer or another resource is exhausted.
    pub(super) fn announce(
        &self,
        batched_requests: &[Arc<BatchedRequest>],
    ) -> Result<(), InferError> {
        let mut used = batched_requests.iter().flat_map(|batched| used(batched)).peekable();
        if used.peek().is_none() {
            return Ok(());
        }
        let mut known = self.known.lock();
        let mut new: Vec<&Arc<Region>> = used
            .filter(|region| known.get(&region.id).is_none_or(|announced| announced.lost))
            .collect();
        new.sort_unstable_by_key(|region| region.id);
        new.dedup_by_key(|region| region.id);
        for packet in new.chunks(MAX_REGIONS_PER_PACKET) {
            match self.send(packet) {
                Ok(()) => known.extend(packet.iter().map(|region| {
                    let announced = Announced { region: Arc::downgrade(region), lost: false };
                    (region.id, announced)
                })),
                Err(error @ (Errno::AGAIN | Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM)) => {
                    let text = format!(
                        "cannot announce more shared memory regions to the worker now: {error}"
                    );
                    return Err(InferError::new(
                        ErrorCode::Unavailable,
                        Reason::SharedMemory,
                        text,
                    ));
                }
                // The worker is gone, which the reader of its connection handles.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    fn send(&self, regions: &[&Arc<Region>]) -> rustix::io::Result<()> {
        let descriptions: Vec<RegionDescription> =
            regions.iter().map(|region| description(region)).collect();
        let packet = encode(&descriptions);
        let files: Vec<BorrowedFd<'_>> = regions.iter().filter_map(|region| file(region)).collect();
        let mut space =
            [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_REGIONS_PER_PACKET))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut control, flags).map(drop)
    }

    /// Marks regions to be announced again before the next batch that uses them.
    pub(super) fn announce_again(&self, ids: &[u64]) {
        let mut known = self.known.lock();
        for id in ids {
            if let Some(announced) = known.get_mut(id) {
                announced.lost = true;
            }
        }
    }

    /// Removes and returns the announced regions that are no longer in use.
    pub(super) fn take_unused(&self) -> Vec<u64> {
        let mut known = self.known.lock();
        known
            .extract_if(|_, announced| announced.region.strong_count() == 0)
            .map(|(id, _)| id)
            .collect()
    }
}

fn used(batched: &BatchedRequest) -> impl Iterator<Item = &Arc<Region>> {
    let inputs = batched.request.inputs.iter().filter_map(|input| input.tensor.data.region());
    let outputs = batched.request.outputs.iter().filter_map(|output| output.region.as_ref());
    inputs.chain(outputs).filter_map(|slice| slice.region())
}

fn description(region: &Region) -> RegionDescription {
    let location = match &region.memory {
        Memory::System { offset, .. } => RegionLocation::System { offset: *offset },
        Memory::Cuda { device, handle } => {
            RegionLocation::Cuda { device: *device, handle: handle.clone() }
        }
    };
    RegionDescription {
        id: region.id,
        name: region.name.clone(),
        byte_size: region.byte_size,
        location,
    }
}

fn file(region: &Region) -> Option<BorrowedFd<'_>> {
    match &region.memory {
        Memory::System { file, .. } => Some(file.as_fd()),
        Memory::Cuda { .. } => None,
    }
}
