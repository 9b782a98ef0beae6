//! Ends this process when the frontend is gone, even while a batch is being computed and no thread
//! reads the socket.

use std::io;
use std::os::unix::net::UnixStream;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Signal, getpgrp, getpid, kill_process, kill_process_group};

/// The stack size of the watching thread, which only waits.
const STACK: usize = 64 << 10;

/// The events of a closed connection, or of a descriptor that is closed.
const ENDS: PollFlags =
    PollFlags::RDHUP.union(PollFlags::HUP).union(PollFlags::ERR).union(PollFlags::NVAL);

/// Kills this process, and the processes that its model has started if this one leads their group:
/// the engine of a language model would keep its memory and its device.
fn end() {
    let _ = match getpgrp() == getpid() {
        true => kill_process_group(getpid(), Signal::KILL),
        false => kill_process(getpid(), Signal::KILL),
    };
}

/// Starts a thread that kills the process as soon as the other end of `socket` is closed. Killed,
/// not ended: the exit handlers of libraries may wait for threads that are still computing
/// (OpenBLAS joins its threads).
///
/// # Errors
/// The descriptor or the thread could not be created.
pub(crate) fn end_with_the_frontend(socket: &UnixStream) -> io::Result<()> {
    let socket = socket.try_clone()?;
    thread::Builder::new().name("watch".into()).stack_size(STACK).spawn(move || {
        loop {
            let mut polled = [PollFd::new(&socket, PollFlags::RDHUP)];
            match poll(&mut polled, None) {
                Ok(_) if polled[0].revents().intersects(ENDS) => {
                    end();
                    // Only if it may not kill itself.
                    std::process::exit(0)
                }
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    eprintln!("pharos-worker: cannot watch the frontend: {error}");
                    return;
                }
            }
        }
    })?;
    Ok(())
}
