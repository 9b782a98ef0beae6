//! Makes a copy of this process, and makes the copy the process that the frontend has asked for.
//!
//! Contract: this process has one thread, which the fork server has checked before its first copy
//! and which starts none. So the copy has all threads and no lock that another thread holds, and no
//! other thread reads the environment while it changes. The numbers that files of a request get are
//! listed in `pharos::wire::descriptors` or are standard streams, and no other code owns
//! them: the fork server has moved its own descriptors above them.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use pharos::wire::descriptors::CONTROL_GROUP;
use pharos::wire::fork_server::{FORK_SERVER, ForkRequest};
use rustix::process::{Pid, setpgid};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::FREE;
use crate::command_line;

/// The process in which [`fork`] has returned.
pub(super) enum Forked {
    /// The fork server: the process id of the copy.
    Process(Pid),
    /// The copy.
    Copy(Copied),
}

/// Exists only in copies.
pub(super) struct Copied(());

/// Copies this process. The copy has these environment variables in addition.
///
/// # Errors
/// Memory or processes are exhausted.
pub(super) fn fork(variables: &[(String, String)]) -> io::Result<Forked> {
    // SAFETY: there is one thread, so the copy may call any function.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => {
            for (name, value) in variables {
                // SAFETY: there is one thread.
                unsafe { std::env::set_var(name, value) };
            }
            Ok(Forked::Copy(Copied(())))
        }
        pid => Pid::from_raw(pid.max(0)).map(Forked::Process).ok_or_else(io::Error::last_os_error),
    }
}

impl Copied {
    /// Gives this process its own process group, control group, command line, processors and files.
    ///
    /// # Errors
    /// A descriptor is not allowed.
    pub(super) fn becomes(self, request: &ForkRequest, files: Vec<OwnedFd>) -> io::Result<()> {
        setpgid(None, None)?;
        let all = files.into_iter().zip(request.descriptors.iter().copied());
        let (entrance, files): (Vec<_>, Vec<_>) =
            all.partition(|(_, number)| *number == CONTROL_GROUP);
        for (entrance, _) in entrance {
            rustix::io::write(entrance, b"0")?;
        }
        command_line::replace(FORK_SERVER, &request.arguments.join("\0"))?;
        if !request.processors.is_empty() {
            let mut processors = CpuSet::new();
            request
                .processors
                .iter()
                .filter(|number| **number < CpuSet::MAX_CPU)
                .for_each(|number| processors.set(*number));
            // As for programs, processors that do not exist do not prevent the start.
            let _ = sched_setaffinity(None, &processors);
        }
        // First away from the numbers that they get.
        let moved = files
            .into_iter()
            .map(|(file, number)| Ok((rustix::io::fcntl_dupfd_cloexec(&file, FREE)?, number)));
        for (file, number) in moved.collect::<io::Result<Vec<_>>>()? {
            let flags = if number <= libc::STDERR_FILENO { 0 } else { libc::O_CLOEXEC };
            // SAFETY: no other code owns this number (contract above).
            if unsafe { libc::dup3(file.as_raw_fd(), number, flags) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}
