//! Starts a process with its files, variables, processors and a directory for temporary files: as a
//! copy of a fork server, or as a new program.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;

use command_fds::{CommandFdExt, FdMapping};
use pharos::wire::descriptors::CONTROL_GROUP;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use tokio::net::unix::pipe::{self, Receiver, Sender};
use tokio::process::{Child, Command};

use super::fork_server::{ForkServers, Forked, Unanswered};
use super::{Start, WorkerProcess, cannot_start, describe, killed_by_system};
use crate::launch::limits::Limited;
use pharos_os::control_groups::{self, ControlGroup};
use pharos_os::directories::{Kind, Temporary};
use pharos_os::worker_user::WorkerUser;
use pharos_os::{background, blocking, out_of_memory};

/// A started process with its standard streams.
pub(super) struct Started {
    pub(super) process: OwnProcess,
    pub(super) input: Option<Sender>,
    pub(super) output: Receiver,
    pub(super) errors: Receiver,
}

/// The attempts to start a process as a copy, each with new files, before it is started as a
/// program.
pub(super) const ATTEMPTS: u32 = 3;

/// Starts a process, as a copy of a fork server or, from the attempt [`ATTEMPTS`] on, as a program.
/// Returns `None` if it must be tried again with other files, because a copy may exist that uses
/// these. That copy ends when the frontend's ends of its files are closed.
///
/// # Errors
/// Descriptors or processes are exhausted, or the executable does not exist.
pub(super) async fn start(
    mut start: Start<'_>,
    fork_servers: &Arc<ForkServers>,
    attempt: u32,
) -> io::Result<Option<Started>> {
    let (output, stdout) = written()?;
    let (errors, stderr) = written()?;
    let (input, stdin) = if start.reads {
        read().map(|(ours, theirs)| (Some(ours), Some(theirs)))?
    } else {
        (None, None)
    };
    let group = control_group(start.launch.limits.clone()).await?;
    let own = start.files.len();
    start.files.extend([(stdout, 1), (stderr, 2)]);
    start.files.extend(stdin.map(|stdin| (stdin, 0)));
    let entrance = group.as_ref().map(ControlGroup::entrance).transpose()?;
    start.files.extend(entrance.map(|entrance| (entrance, CONTROL_GROUP)));
    let is_own_user = start.launch.user.is_none();
    let forked = if attempt < ATTEMPTS { fork_servers.fork(&start).await } else { Ok(None) };
    let process = match forked {
        Ok(Some(forked)) => Process::Forked(forked),
        Ok(None) => Process::Program(program(start, own)?),
        Err(Unanswered) => return Ok(None),
    };
    let mut process = OwnProcess { process, group, leader: None };
    process.leader = process.group(is_own_user);
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

/// Starts the program. The first `own` files are neither standard streams nor the file of the
/// control group.
fn program(start: Start<'_>, own: usize) -> io::Result<Child> {
    let mut command = Command::from(start.launch.command(start.temporary));
    // Separate process groups: Ctrl-C in a terminal signals only the frontend, which drains before
    // it ends its workers.
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
    on_processors(start.processors, || command.spawn())
        .map_err(|error| cannot_start(start.launch, &error))
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
    /// The leader of its process group, until it has ended.
    leader: Option<u32>,
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
        let Self { process, leader, .. } = self;
        let wait: Pin<Box<dyn Future<Output = _> + Send + '_>> = match process {
            Process::Program(child) => Box::pin(child.wait()),
            Process::Forked(forked) => Box::pin(forked.wait()),
        };
        Box::pin(async move {
            let status = wait.await;
            // The processes that it has started end with it.
            end_group(leader.take());
            status
        })
    }

    fn start_kill(&mut self) -> io::Result<()> {
        match &mut self.process {
            Process::Program(child) => child.start_kill(),
            Process::Forked(forked) => forked.kill(),
        }
    }

    fn describe(&self, status: ExitStatus) -> String {
        let how = describe(status);
        match self
            .group
            .as_ref()
            .and_then(ControlGroup::exceeded_memory)
            .filter(|_| killed_by_system(status))
        {
            Some(limit) => format!("{how}: it exceeded its memory limit of {limit} bytes"),
            None => how,
        }
    }
}

/// Kills the processes of a group whose leader has this number.
pub(super) fn end_group(leader: Option<u32>) {
    if let Some(leader) = leader.and_then(|pid| Pid::from_raw(pid.cast_signed())) {
        let _ = kill_process_group(leader, Signal::KILL);
    }
}

impl OwnProcess {
    /// Returns its process group, if it has not ended. `None` for a copy of another user, whose
    /// number can belong to a process of a third user when its fork server does not report its end.
    pub(super) fn group(&self, is_own_user: bool) -> Option<u32> {
        match &self.process {
            Process::Forked(_) if !is_own_user => None,
            _ => self.id(),
        }
    }
}

/// Calls `begin` while this thread is bound to these processors; a process that it starts inherits
/// the binding. An empty list means all processors. `begin` is synchronous, so the runtime's thread
/// runs nothing else meanwhile.
fn on_processors<T>(cpus: &[usize], begin: impl FnOnce() -> T) -> T {
    let own = sched_getaffinity(None).ok().filter(|_| !cpus.is_empty());
    let Some(own) = own else { return begin() };
    let mut wanted = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| wanted.set(*cpu));
    if let Err(error) = sched_setaffinity(None, &wanted) {
        tracing::debug!("cannot bind a worker to its processors: {error}");
        return begin();
    }
    let begun = begin();
    if let Err(error) = sched_setaffinity(None, &own) {
        tracing::warn!("cannot restore the processor affinity of a thread: {error}");
    }
    begun
}

/// A directory that is removed with its contents when dropped.
#[derive(Debug)]
pub(crate) struct TemporaryFiles {
    /// The parent, with the marker and the lock of this server, which the process must not write.
    parent: Option<Temporary>,
    path: PathBuf,
}

impl TemporaryFiles {
    /// Creates an empty directory, which belongs to this user if there is one.
    ///
    /// # Errors
    /// The directory cannot be created or given to the user.
    pub(crate) fn new(user: Option<&WorkerUser>) -> io::Result<Self> {
        let refused = |error: io::Error| {
            let text =
                format!("no directory for its temporary files (TMPDIR of the server): {error}");
            io::Error::new(error.kind(), text)
        };
        let parent = Temporary::new(Kind::WORKER).map_err(refused)?;
        let path = parent.path().join("files");
        let created = DirBuilder::new().mode(0o700).create(&path);
        let given = created.and_then(|()| user.map_or(Ok(()), |user| user.give(&path)));
        given.map_err(|error| {
            refused(io::Error::new(error.kind(), format!("'{}': {error}", path.display())))
        })?;
        Ok(Self { parent: Some(parent), path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryFiles {
    fn drop(&mut self) {
        let parent = self.parent.take();
        // A model can leave many files.
        blocking::run_detached(move || drop(parent));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_child_inherits_the_processors_and_the_thread_is_restored() {
        let mask = || {
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect::<Vec<_>>()
        };
        let before = mask();
        let last = before[before.len() - 1];
        let child = on_processors(&[last], || {
            std::process::Command::new("cat").arg("/proc/self/status").output()
        })
        .unwrap();
        let status = String::from_utf8(child.stdout).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(line.trim(), last.to_string());
        assert_eq!(mask(), before);
        assert_eq!(on_processors(&[], mask), before);
        // Processors that do not exist do not prevent the start.
        assert_eq!(on_processors(&[usize::MAX], mask), before);
    }

    #[test]
    fn is_removed_with_its_contents() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let outside = TemporaryFiles::new(None).unwrap();
        let parents = [&outside, &runtime.block_on(async { TemporaryFiles::new(None).unwrap() })]
            .map(|files| files.parent.as_ref().unwrap().path().to_owned());
        runtime.block_on(async {
            let files = TemporaryFiles::new(None).unwrap();
            std::fs::write(files.path().join("left"), "x").unwrap();
        });
        drop(outside);
        // Ends when the blocking threads have ended.
        drop(runtime);
        assert!(parents.iter().all(|path| !path.exists()), "{parents:?}");
    }
}
