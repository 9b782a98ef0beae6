//! Options of sockets for which no crate has functions.
//!
//! Contract: the kernel reads the value, an integer, during the call.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `SO_PASSRIGHTS` of socket(7), which Linux has since 6.16.
const PASS_RIGHTS: libc::c_int = 83;

/// Makes a Unix socket refuse messages with file descriptors: the peer's call fails. Otherwise, this process would close them, and
/// could wait: closing a socket that has `SO_LINGER` and unsent data takes as long as its owner has chosen. Without effect on an older
/// kernel.
pub fn refuse_descriptors(socket: &impl AsFd) {
    let none: libc::c_int = 0;
    let size = size_of::<libc::c_int>() as libc::socklen_t;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the value is an integer of this size (contract above).
    let result = unsafe { libc::setsockopt(socket, libc::SOL_SOCKET, PASS_RIGHTS, (&raw const none).cast(), size) };
    if result < 0 {
        tracing::trace!("SO_PASSRIGHTS: {}", io::Error::last_os_error());
    }
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
        refuse_descriptors(&ours);
        let files = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let sent = sendmsg(&theirs, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL);
        match sent {
            Err(Errno::PERM) => {}
            Ok(1) => eprintln!("skipped: this kernel has no SO_PASSRIGHTS"),
            other => assert_eq!(other, Err(Errno::PERM)),
        }
    }
}
