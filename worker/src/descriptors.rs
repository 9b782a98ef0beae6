//! The descriptors that this process inherits from the frontend.
//!
//! Contract: the numbers of [`pharos::wire::descriptors`] are open in a process that the frontend
//! started, and no other code in this process has used them before [`Inherited::take`], which `run`
//! calls once, before anything else. Each number is checked to be open before its ownership is
//! taken, so that a worker started by hand ends with an error message.

use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use pharos::wire::descriptors;

/// The resources that a worker inherits.
pub(crate) struct Inherited {
    /// The connection to the frontend.
    pub(crate) socket: UnixStream,
    /// The rings of frames.
    pub(crate) frames: OwnedFd,
    /// The shared memory.
    pub(crate) memory: SharedDescriptors,
}

/// Memory shared with the frontend, not mapped yet.
pub(crate) struct SharedDescriptors {
    /// Inputs, written by the frontend.
    pub(crate) inputs: OwnedFd,
    /// Outputs, written by this process.
    pub(crate) outputs: OwnedFd,
    /// The metrics ring, written by this process.
    pub(crate) metrics: OwnedFd,
    /// The pipe that wakes the frontend to read the ring.
    pub(crate) wakeup: OwnedFd,
    /// The socket over which client memory is announced.
    pub(crate) regions: OwnedFd,
}

impl Inherited {
    /// Takes ownership of all inherited descriptors.
    ///
    /// # Errors
    /// One of them is not open.
    pub(crate) fn take() -> io::Result<Self> {
        Ok(Self {
            socket: take(descriptors::SOCKET, "socket")?.into(),
            frames: take(descriptors::FRAMES, "rings of frames")?,
            memory: SharedDescriptors {
                inputs: take(descriptors::INPUTS, "input arena")?,
                outputs: take(descriptors::OUTPUTS, "output arena")?,
                metrics: take(descriptors::METRICS, "metrics ring")?,
                wakeup: take(descriptors::WAKE_UP, "wake-up pipe of the metrics ring")?,
                regions: take(descriptors::REGIONS, "socket of regions")?,
            },
        })
    }
}

/// Takes ownership of an inherited descriptor.
///
/// # Errors
/// It is not open.
pub(crate) fn take(number: RawFd, what: &str) -> io::Result<OwnedFd> {
    // SAFETY: borrowed only for the call below, which reports EBADF if the number is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(borrowed, rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| io::Error::other(format!("descriptor {number} ({what}): {error}")))?;
    // SAFETY: open, and by this module's contract no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}
