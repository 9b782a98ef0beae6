//! Starts a process with its files: as a copy of a fork server, or as a new program.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use command_fds::{CommandFdExt, FdMapping};
use pharos::wire::descriptors::CONTROL_GROUP;
use tokio::net::unix::pipe::{self, Receiver, Sender};
use tokio::process::{Child, Command};

use super::fork_server::{ForkServers, Forked, Unanswered};
use super::start::Start;
use super::{WorkerProcess, affinity, cannot_start, describe, killed_by_system};
use crate::launch::limits::Limited;
use pharos_os::control_groups::{self, ControlGroup};
use pharos_os::{background, blocking, out_of_memory};

/// A started process with its standard streams.
pub(super) struct Started {
    pub(super) process: OwnProcess,
    pub(super) input: Option<Sender>,
    pub(super) output: Receiver,
    pub(super) errors: Receiver,
}

/// The attempts to start a process as a copy, each with new files, before it is started as a program.
pub(super) const ATTEMPTS: u32 = 3;

/// Starts a process, as a copy of a fork server or, from the attempt [`ATTEMPTS`] on, as a program. Returns `None` if it must be
/// tried again with other files, because a copy may exist that uses these. That copy ends when the frontend's ends of its files
/// are closed.
///
/// # Errors
/// Descriptors or processes are exhausted, or the executable does not exist.
pub(super) async fn start(
    mut start: Start<'_>,
    (fork_servers, attempt): (&Arc<ForkServers>, u32),
) -> io::Result<Option<Started>> {
    let (output, stdout) = written()?;
    let (errors, stderr) = written()?;
    let (input, stdin) =
        if start.reads { read().map(|(ours, theirs)| (Some(ours), Some(theirs)))? } else { (None, None) };
    let group = control_group(start.launch.limits.clone()).await?;
    let own = start.files.len();
    start.files.extend([(stdout, 1), (stderr, 2)]);
    start.files.extend(stdin.map(|stdin| (stdin, 0)));
    let entrance = group.as_ref().map(ControlGroup::entrance).transpose()?;
    start.files.extend(entrance.map(|entrance| (entrance, CONTROL_GROUP)));
    let forked = if attempt < ATTEMPTS { fork_servers.fork(&start).await } else { Ok(None) };
    let process = match forked {
        Ok(Some(forked)) => Process::Forked(forked),
        Ok(None) => Process::Program(program(start, own)?),
        Err(Unanswered) => return Ok(None),
    };
    let process = OwnProcess { process, group };
    // A copy has inherited this from its fork server.
    if let (Process::Program(_), Some(pid)) = (&process.process, process.id()) {
        out_of_memory::end_first(pid);
    }
    if let Some(pid) = process.id().filter(|_| background::is_entered()) {
        background::put(pid);
    }
    Ok(Some(Started { process, input, output, errors }))
}

/// Makes the control group of a process with limits; `None` without limits.
async fn control_group(limits: Option<Limited>) -> io::Result<Option<ControlGroup>> {
    let Some(limits) = limits else { return Ok(None) };
    let group = blocking::run(move || limits.group()).await.map_err(io::Error::other)?;
    group.map(Some).map_err(io::Error::other)
}

/// Starts the program. The first `own` files are no standard streams, and not that of its control group.
fn program(start: Start<'_>, own: usize) -> io::Result<Child> {
    let mut command = Command::from(start.launch.command(start.temporary));
    // Separate process groups: Ctrl-C in a terminal signals only the frontend, which drains before it ends its workers.
    command
        .args(start.arguments.iter().map(OsString::from))
        .envs(start.inherited.variables(|name| start.launch.inherits(name)))
        .process_group(0)
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let mut files = start.files;
    for (file, number) in files.split_off(own) {
        match number {
            0 => drop(command.stdin(file)),
            1 => drop(command.stdout(file)),
            2 => drop(command.stderr(file)),
            _ => control_groups::start_in(file, command.as_std_mut()),
        }
    }
    let mappings = files.into_iter().map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
    command.fd_mappings(mappings.collect()).map_err(|error| io::Error::other(error.to_string()))?;
    affinity::on(start.processors, || command.spawn()).map_err(|error| cannot_start(start.launch, &error))
}

/// Returns the ends of a pipe: ours to read, and the other process's to write.
fn written() -> io::Result<(Receiver, OwnedFd)> {
    let (theirs, ours) = pipe::pipe()?;
    Ok((ours, theirs.into_blocking_fd()?))
}

/// Returns the ends of a pipe: ours to write, and the other process's to read.
fn read() -> io::Result<(Sender, OwnedFd)> {
    let (ours, theirs) = pipe::pipe()?;
    Ok((ours, theirs.into_blocking_fd()?))
}

/// A process of this machine. When it is dropped, its control group is removed.
pub(super) struct OwnProcess {
    process: Process,
    group: Option<ControlGroup>,
}

enum Process {
    Program(Child),
    Forked(Forked),
}

impl WorkerProcess for OwnProcess {
    fn id(&self) -> Option<u32> {
        match &self.process {
            Process::Program(child) => child.id(),
            Process::Forked(forked) => forked.id(),
        }
    }

    fn wait(&mut self) -> Pin<Box<dyn Future<Output = io::Result<ExitStatus>> + Send + '_>> {
        match &mut self.process {
            Process::Program(child) => Box::pin(child.wait()),
            Process::Forked(forked) => Box::pin(forked.wait()),
        }
    }

    fn start_kill(&mut self) -> io::Result<()> {
        match &mut self.process {
            Process::Program(child) => child.start_kill(),
            Process::Forked(forked) => forked.kill(),
        }
    }

    fn describe(&self, status: ExitStatus) -> String {
        let how = describe(status);
        match self.group.as_ref().and_then(ControlGroup::exceeded_memory).filter(|_| killed_by_system(status)) {
            Some(limit) => format!("{how}: it exceeded its memory limit of {limit} bytes"),
            None => how,
        }
    }
}

impl OwnProcess {
    /// Returns its process group, if it has not ended. `None` for a copy of another user, whose number can belong to a process of a
    /// third user when its fork server does not report its end.
    pub(super) fn group(&self, is_own_user: bool) -> Option<u32> {
        match &self.process {
            Process::Forked(_) if !is_own_user => None,
            _ => self.id(),
        }
    }
}
