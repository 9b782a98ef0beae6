//! The fork server: a worker program that has loaded what its backends need, and starts workers as
//! copies of itself. A copy starts in about a millisecond, because nothing is loaded again, and
//! shares the memory of what was loaded.
//!
//! `pharos::wire::fork_server` describes the protocol. There is one thread, so that copies have no
//! locks of threads that they do not have.

#[allow(unsafe_code)]
mod copy;

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::SystemTime;

use pharos::wire::descriptors;
use pharos::wire::fork_server::{ForkRequest, LARGEST, MOST_FILES, ONNX_RUNTIME, Report};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

use crate::backend;
use crate::descriptors::take;

/// Descriptors from this number on have no fixed use.
const FREE: i32 = 64;

/// In which process [`serve`] has returned.
pub(crate) enum Served {
    /// In the fork server: the frontend has closed the connection.
    ToTheEnd,
    /// In a copy, which has become the process that the frontend has asked for.
    Copy,
}

/// Loads the modules, and serves until the frontend closes the connection. Returns also in each
/// copy.
///
/// # Errors
/// The connection to the frontend is lost, or its messages violate the protocol.
pub(crate) fn serve(modules: &str) -> io::Result<Served> {
    let connection = fcntl_dupfd_cloexec(take(descriptors::SOCKET, "socket")?, FREE)?;
    let mut server = ForkServer { connection, copies: HashMap::new(), loaded: Vec::new() };
    if let Some(reason) = server.prepare(modules) {
        server.report(&Report::Failed(reason), None)?;
        return Ok(Served::ToTheEnd);
    }
    server.serve()
}

struct ForkServer {
    connection: OwnedFd,
    /// The descriptors of the copies that run.
    copies: HashMap<i32, OwnedFd>,
    /// The loaded files, and when they were last changed.
    loaded: Vec<(PathBuf, Option<SystemTime>)>,
}

impl ForkServer {
    /// Loads the modules. Returns why copies cannot be made, if they cannot.
    fn prepare(&mut self, modules: &str) -> Option<String> {
        let mut loaded: Vec<PathBuf> = std::env::current_exe().into_iter().collect();
        if modules.split(',').any(|module| module == ONNX_RUNTIME) {
            // A model that needs it reports why it cannot be loaded.
            loaded.extend(backend::load_onnxruntime());
        }
        self.loaded = loaded.into_iter().map(|path| (path.clone(), modified(&path))).collect();
        let threads = std::fs::read_dir("/proc/self/task").map(Iterator::count);
        match (threads, pidfd_open(rustix::process::getpid(), PidfdFlags::empty())) {
            (Ok(1), Ok(_)) => None,
            (Ok(threads), Ok(_)) => {
                let others = threads.saturating_sub(1);
                Some(format!(
                    "{others} threads were started by libraries, and would be missing in copies"
                ))
            }
            (Err(error), _) => Some(format!("it cannot count its threads: {error}")),
            (_, Err(error)) => Some(format!("it cannot watch processes: {error}")),
        }
    }

    fn serve(mut self) -> io::Result<Served> {
        self.report(&Report::Ready, None)?;
        loop {
            let (asked, ended) = self.wait()?;
            for pid in ended {
                self.on_end(pid)?;
            }
            if asked {
                let Some((request, files)) = self.receive()? else { return Ok(Served::ToTheEnd) };
                if let Some(copy) = self.fork(&request)? {
                    drop(self);
                    copy.becomes(&request, files)?;
                    return Ok(Served::Copy);
                }
                // The frontend sees the end of a worker only when all copies of its files are
                // closed.
                drop(files);
            }
        }
    }

    /// Waits until there is a request, or copies have ended.
    fn wait(&self) -> io::Result<(bool, Vec<i32>)> {
        let mut waited = vec![PollFd::new(&self.connection, PollFlags::IN)];
        let copies: Vec<_> = self.copies.iter().collect();
        waited.extend(copies.iter().map(|(_, process)| PollFd::new(*process, PollFlags::IN)));
        match poll(&mut waited, None) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok((false, Vec::new())),
            Err(error) => return Err(error.into()),
        }
        let mut ready = waited.iter().map(|waited| !waited.revents().is_empty());
        let asked = ready.next().unwrap_or(false);
        let ended = copies.iter().zip(ready).filter(|(_, ready)| *ready).map(|((pid, _), _)| **pid);
        Ok((asked, ended.collect()))
    }

    /// Returns the next request and its files; `None` at the end of the connection.
    fn receive(&self) -> io::Result<Option<(ForkRequest, Vec<OwnedFd>)>> {
        let mut packet = vec![0; LARGEST];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut packet)];
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&self.connection, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        })?;
        let files = control
            .drain()
            .flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(files) => files.collect(),
                _ => Vec::new(),
            })
            .collect();
        match packet.get(..received.bytes) {
            None | Some([]) => Ok(None),
            Some(text) => Ok(Some((ForkRequest::decode(text)?, files))),
        }
    }

    /// Makes a copy. Returns `Some` in the copy.
    fn fork(&mut self, request: &ForkRequest) -> io::Result<Option<copy::Copied>> {
        if self.loaded.iter().any(|(path, known)| modified(path) != *known) {
            self.report(&Report::Stale, None)?;
            return Ok(None);
        }
        let forked = copy::fork(&request.variables).and_then(|forked| match forked {
            copy::Forked::Copy(copy) => Ok(Some(copy)),
            copy::Forked::Process(pid) => self.watch(pid).map(|()| None),
        });
        match forked {
            Ok(forked) => Ok(forked),
            Err(error) => self.report(&Report::Failed(error.to_string()), None).map(|()| None),
        }
    }

    /// Reports a copy and watches it. Ends it if that fails, because the frontend then starts a
    /// program.
    fn watch(&mut self, pid: Pid) -> io::Result<()> {
        let number = pid.as_raw_nonzero().get();
        let reported =
            pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from).and_then(|process| {
                self.report(&Report::Forked(number.cast_unsigned()), Some(&process))?;
                Ok(process)
            });
        match reported {
            Ok(process) => {
                self.copies.insert(number, process);
                Ok(())
            }
            Err(error) => {
                kill_process(pid, Signal::KILL)?;
                waitpid(Some(pid), WaitOptions::empty())?;
                Err(error)
            }
        }
    }

    fn on_end(&mut self, pid: i32) -> io::Result<()> {
        self.copies.remove(&pid);
        match waitpid(Pid::from_raw(pid), WaitOptions::empty())? {
            Some((_, status)) => self.report(
                &Report::Ended { process: pid.cast_unsigned(), status: status.as_raw() },
                None,
            ),
            None => Ok(()),
        }
    }

    fn report(&self, report: &Report, process: Option<&OwnedFd>) -> io::Result<()> {
        let files: Vec<_> = process.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let text = report.encode()?;
        rustix::io::retry_on_intr(|| {
            sendmsg(&self.connection, &[IoSlice::new(&text)], &mut control, SendFlags::NOSIGNAL)
        })?;
        Ok(())
    }
}

/// Returns when a file was last changed; `None` if it does not exist.
fn modified(path: &PathBuf) -> Option<SystemTime> {
    std::fs::metadata(path).and_then(|file| file.modified()).ok()
}
