//! Packets that announce regions, with their descriptors.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use pharos::wire::regions::{MAX_PACKET, MAX_REGIONS_PER_PACKET, RegionDescription, RegionLocation, decode};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

/// A region, with its descriptor if it has one.
pub(super) type Received = (RegionDescription, Option<OwnedFd>);

/// Receives the regions of the next packet, each with its descriptor if it has one; `None` when there is no packet.
///
/// # Errors
/// The packet is invalid, descriptors are missing, or the socket fails.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<Vec<Received>>> {
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
    let regions = decode(packet.get(..received.bytes).unwrap_or_default()).map_err(io::Error::other)?;
    let wanted = regions.iter().filter(|region| matches!(region.location, RegionLocation::System { .. })).count();
    if received.flags.intersects(ReturnFlags::TRUNC)
        || (wanted != files.len() && !received.flags.intersects(ReturnFlags::CTRUNC))
    {
        return Err(io::Error::other(format!("a packet of {wanted} regions has {} descriptors", files.len())));
    }
    // The kernel drops descriptors at the end when this process has no room for them.
    let mut files = files.into_iter();
    let with_files = regions.into_iter().map(|region| {
        let file = if matches!(region.location, RegionLocation::System { .. }) { files.next() } else { None };
        (region, file)
    });
    Ok(Some(with_files.collect()))
}
