//! Options of sockets for which no crate has functions.
//!
//! Contract: the kernel reads the value, an integer, during the call.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `SO_PASSRIGHTS` of socket(7), which Linux has since 6.16.
const PASS_RIGHTS: libc::c_int = 83;

/// Makes a Unix socket refuse messages with file descriptors: the peer's call fails. Otherwise this
/// process would have to close the descriptors, and could wait: closing a socket that has
/// `SO_LINGER` and unsent data takes as long as its owner has chosen. Without effect on an older
/// kernel.
pub fn refuse_descriptors(socket: &impl AsFd) {
    if let Err(error) = refuse(socket) {
        tracing::trace!("SO_PASSRIGHTS: {error}");
    }
}

fn refuse(socket: &impl AsFd) -> io::Result<()> {
    let none: libc::c_int = 0;
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    let descriptor = socket.as_fd().as_raw_fd();
    // SAFETY: the value is an integer of this size (contract above).
    let result = unsafe {
        libc::setsockopt(descriptor, libc::SOL_SOCKET, PASS_RIGHTS, (&raw const none).cast(), size)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::unix::net::UnixStream;

    use rustix::io::Errno;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    #[test]
    fn a_message_with_a_descriptor_is_refused() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let outcome = refuse(&ours);
        let is_old = outcome.is_err_and(|error| error.raw_os_error() == Some(libc::ENOPROTOOPT));
        let files = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let sent = sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL);
        assert_eq!(
            sent,
            if is_old { Ok(1) } else { Err(Errno::PERM) },
            "without SO_PASSRIGHTS, nothing is refused"
        );
    }
}
