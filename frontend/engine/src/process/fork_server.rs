//! Fork servers: processes that have loaded the runtime of a backend, and start workers as copies
//! of themselves. A copy starts in about a millisecond and shares the memory of what was loaded.
//! The protocol is in `pharos::wire::fork_server`.
//!
//! There is one fork server for each program and environment; for Python also for each number of
//! threads and GPU, because its libraries read these when they are imported. It starts with the
//! first worker that it can make, and ends when it has had no copy for a while. Where it does not
//! start, workers are started without it.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use parking_lot::{Mutex, MutexGuard};
use pharos::timeline::Instant;
use pharos::wire::descriptors;
use pharos::wire::fork_server::{FORK_SERVER, ForkRequest, LARGEST, MOST_FILES, Report, SPACE};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Signal, pidfd_send_signal};
use tokio::io::{AsyncRead, Interest};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant as TokioInstant, sleep_until, timeout, timeout_at};
use tracing::Level;

use super::output::each_line;
use super::{Inherited, Start};
use crate::launch::Launch;
use pharos_os::{background, clock, out_of_memory, scheduling};

/// How long a fork server without copies is kept.
const IDLE: Duration = Duration::from_secs(300);

/// How long workers are started without a fork server after one has not started.
const PAUSE: Duration = Duration::from_secs(60);

/// How long a worker waits for its fork server to start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// How long a fork server that has started may take to start a process, which takes milliseconds.
/// One that is stopped, for example, never answers.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long a process has ended before its exit status counts as unknown, if the fork server does
/// not report it.
const REPORT_LIMIT: Duration = Duration::from_millis(500);

/// The fork servers of this server.
#[derive(Debug, Default)]
pub(crate) struct ForkServers {
    known: Mutex<HashMap<Kind, Known>>,
}

/// What a process inherits from the fork server that starts it, and cannot change afterwards.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Kind {
    executable: PathBuf,
    arguments: Vec<OsString>,
    variables: Vec<(&'static str, Option<OsString>)>,
    modules: Vec<String>,
    /// For Python, whose libraries read it when they are imported.
    inherited: Option<Inherited>,
}

impl Kind {
    /// Returns the kind that starts such processes; `None` if they are programs.
    fn of(launch: &Launch, inherited: &Inherited) -> Option<Self> {
        // A copy with limits gets a file that admits processes to its group with the rights of this
        // process, also when it has another user. Other processes of that user could take the file.
        let is_program =
            launch.sandbox.is_some() || (launch.user.is_some() && launch.limits.is_some());
        let modules = launch.preload.clone().filter(|_| !is_program)?;
        let executable = launch.executable.clone();
        let arguments = launch.arguments.clone();
        let inherited = launch.interpreter.as_ref().map(|_| inherited.clone());
        Some(Self {
            executable,
            arguments,
            variables: launch.variables.clone(),
            modules,
            inherited,
        })
    }
}

#[derive(Debug)]
enum Known {
    Running(mpsc::UnboundedSender<Fork>),
    /// None has started at this time.
    Failed(Instant),
}

/// A request for a process, with its files.
#[derive(Debug)]
struct Fork {
    text: Vec<u8>,
    files: Vec<OwnedFd>,
    answer: oneshot::Sender<ForkOutcome>,
}

#[derive(Debug)]
enum ForkOutcome {
    Forked(Forked),
    Stale,
    Failed,
}

impl Fork {
    /// Returns the request that starts a process, and the receiver of its answer.
    fn of(start: &Start<'_>) -> io::Result<(Self, oneshot::Receiver<ForkOutcome>)> {
        let request = ForkRequest {
            arguments: start.arguments.clone(),
            descriptors: start.files.iter().map(|(_, number)| *number).collect(),
            processors: start.processors.to_vec(),
            variables: start.inherited.variables(|name| start.launch.inherits(name)),
        };
        let text = request.encode()?;
        let files =
            start.files.iter().map(|(file, _)| file.try_clone()).collect::<io::Result<_>>()?;
        let (answer, answered) = oneshot::channel();
        Ok((Self { text, files, answer }, answered))
    }
}

/// A fork server has ended, or has not answered in time, after it got a request: a copy may exist.
#[derive(Debug)]
pub(super) struct Unanswered;

impl ForkServers {
    /// Starts a process as a copy of a fork server; `None` if no fork server can start it.
    ///
    /// # Errors
    /// A copy may exist: nothing else may use the files of `start`.
    pub(super) async fn fork(
        self: &Arc<Self>,
        start: &Start<'_>,
    ) -> Result<Option<Forked>, Unanswered> {
        let Some(kind) = Kind::of(start.launch, &start.inherited) else { return Ok(None) };
        let limit = start.limit.min(START_LIMIT);
        // A second time if the files that it has imported have changed.
        for _ in 0..2 {
            let Some(server) = self.server(&kind, start.launch, limit) else { return Ok(None) };
            let Ok((fork, answered)) = Fork::of(start) else { return Ok(None) };
            if server.send(fork).is_err() {
                continue;
            }
            match timeout(limit, answered).await {
                Ok(Ok(ForkOutcome::Forked(forked))) => return Ok(Some(forked)),
                Ok(Ok(ForkOutcome::Stale)) => {}
                Ok(Ok(ForkOutcome::Failed)) => return Ok(None),
                Ok(Err(_)) => return Err(Unanswered),
                Err(_) => {
                    // The next attempt should not wait for it.
                    let seconds = limit.as_secs_f64();
                    self.ended(
                        &kind,
                        Err(io::Error::other(format!("it did not answer within {seconds} s"))),
                    );
                    return Err(Unanswered);
                }
            }
        }
        Ok(None)
    }

    /// Returns the number of threads of a running fork server for this interpreter; a process that
    /// completes a configuration uses any of them.
    pub(super) fn inherited(&self, launch: &Launch) -> Option<Inherited> {
        let known = self.lock();
        let mut running = known.iter().filter(|(_, known)| matches!(known, Known::Running(_)));
        running.find_map(|(kind, _)| {
            let inherited = kind.inherited.as_ref().filter(|inherited| inherited.gpus.is_none())?;
            (Kind::of(launch, inherited).as_ref() == Some(kind)).then(|| inherited.clone())
        })
    }

    /// Returns the fork server of this kind, and starts it if it does not run; `None` if it does
    /// not start.
    fn server(
        self: &Arc<Self>,
        kind: &Kind,
        launch: &Launch,
        limit: Duration,
    ) -> Option<mpsc::UnboundedSender<Fork>> {
        let mut known = self.lock();
        match known.get(kind) {
            Some(Known::Running(server)) if !server.is_closed() => return Some(server.clone()),
            Some(Known::Failed(at)) if clock::now() - *at < PAUSE => return None,
            _ => {}
        }
        let (server, requests) = mpsc::unbounded_channel();
        known.insert(kind.clone(), Known::Running(server.clone()));
        let servers = self.clone();
        let kind = kind.clone();
        let launch = launch.clone();
        tokio::spawn(async move {
            match ForkServer::start(&kind, &launch, requests) {
                Ok(mut server) => {
                    let ended = server.run(limit).await;
                    // First, so that those whose requests are dropped with it know.
                    servers.ended(&kind, ended);
                }
                Err(error) => servers.ended(&kind, Err(error)),
            }
        });
        Some(server)
    }

    /// Notes that a fork server has ended: by itself, or because it did not start.
    fn ended(&self, kind: &Kind, how: io::Result<()>) {
        let mut known = self.lock();
        match how {
            Ok(()) => {
                // Another one may have started.
                if matches!(known.get(kind), Some(Known::Running(server)) if server.is_closed()) {
                    known.remove(kind);
                }
            }
            Err(error) => {
                let executable = kind.executable.display();
                tracing::info!(
                    "workers of '{executable}' are started without a fork server: {error}"
                );
                known.insert(kind.clone(), Known::Failed(clock::now()));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Kind, Known>> {
        self.known.lock()
    }
}

/// The senders of the exit statuses, by process id.
type Copies = HashMap<u32, oneshot::Sender<ExitStatus>>;

/// A running fork server.
struct ForkServer {
    /// Ended when dropped.
    child: Child,
    connection: UnixStream,
    requests: mpsc::UnboundedReceiver<Fork>,
    /// The request that it has not answered.
    asked: Option<oneshot::Sender<ForkOutcome>>,
    /// When that was sent.
    asked_at: TokioInstant,
    /// Whether no more requests come.
    closed: bool,
    /// When it last started a process, or one ended.
    used: TokioInstant,
}

impl ForkServer {
    fn start(
        kind: &Kind,
        launch: &Launch,
        requests: mpsc::UnboundedReceiver<Fork>,
    ) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let mut command = Command::from(launch.command(None));
        command.arg(FORK_SERVER).arg(kind.modules.join(",")).arg(" ".repeat(SPACE));
        let inherited = kind.inherited.iter();
        command.envs(
            inherited.flat_map(|inherited| inherited.variables(|name| launch.inherits(name))),
        );
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let socket = FdMapping { parent_fd: theirs, child_fd: descriptors::SOCKET };
        command.fd_mappings(vec![socket]).map_err(|error| io::Error::other(error.to_string()))?;
        let mut child = command.spawn()?;
        if let Some(pid) = child.id() {
            out_of_memory::end_first(pid);
            // It reports the ends of workers, for which others wait.
            background::end(pid);
            scheduling::shorten_slices(pid);
        }
        forward(child.stdout.take());
        forward(child.stderr.take());
        let connection = waitable(ours)?;
        let used = TokioInstant::now();
        Ok(Self { child, connection, requests, asked: None, asked_at: used, closed: false, used })
    }

    /// Serves requests until the process ends, or is no longer needed.
    ///
    /// # Errors
    /// The fork server does not start.
    async fn run(&mut self, limit: Duration) -> io::Result<()> {
        let mut copies = Copies::new();
        match timeout(limit, receive(&self.connection)).await {
            Ok(Ok(Some((Report::Ready, _)))) => {}
            Ok(Ok(Some((Report::Failed(reason), _)))) => return Err(io::Error::other(reason)),
            Ok(Ok(Some(_))) => return Err(io::Error::other("it sent an unexpected message")),
            Ok(Ok(None) | Err(_)) => {
                let status = self.child.wait().await?;
                return Err(io::Error::other(format!("it ended ({})", super::describe(status))));
            }
            Err(_) => {
                return Err(io::Error::other(format!(
                    "it did not start within {} s",
                    limit.as_secs_f64()
                )));
            }
        }
        loop {
            let unused = self.asked.is_none() && copies.is_empty();
            if unused && self.closed {
                return Ok(());
            }
            tokio::select! {
                report = receive(&self.connection) => match report {
                    Ok(Some((report, process))) => self.on_report(report, process, &mut copies),
                    // The copies go on; their ends are seen without it.
                    Ok(None) | Err(_) => {
                        let end = match timeout(REPORT_LIMIT, self.child.wait()).await {
                            Ok(Ok(status)) => super::describe(status),
                            Ok(Err(_)) | Err(_) => "its connection was lost".to_owned(),
                        };
                        tracing::warn!("a fork server ended ({end}); the next worker of its kind starts another one");
                        return Ok(());
                    }
                },
                request = self.requests.recv(), if self.asked.is_none() && !self.closed => match request {
                    Some(fork) => if self.send(fork).await.is_err() { return Ok(()) },
                    None => self.closed = true,
                },
                () = sleep_until(self.used + IDLE), if unused => self.requests.close(),
                () = sleep_until(self.asked_at + ANSWER_LIMIT), if self.asked.is_some() => {
                    tracing::warn!("a fork server did not answer within {} s and is ended", ANSWER_LIMIT.as_secs());
                    return Ok(());
                }
            }
        }
    }

    /// Sends a request. One at a time is sent, so that the packets of both sides always have room.
    async fn send(&mut self, fork: Fork) -> io::Result<()> {
        let files: Vec<BorrowedFd<'_>> = fork.files.iter().map(AsFd::as_fd).collect();
        let sending = self.connection.async_io(Interest::WRITABLE, || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            control.push(SendAncillaryMessage::ScmRights(&files));
            Ok(sendmsg(
                &self.connection,
                &[IoSlice::new(&fork.text)],
                &mut control,
                SendFlags::NOSIGNAL,
            )?)
        });
        sending.await?;
        self.asked = Some(fork.answer);
        self.asked_at = TokioInstant::now();
        Ok(())
    }

    fn on_report(&mut self, report: Report, process: Option<OwnedFd>, copies: &mut Copies) {
        self.used = TokioInstant::now();
        match (report, process) {
            (Report::Ended { process, status }, _) => {
                let ended = copies.remove(&process);
                // The receiver is gone if the process was killed at once.
                let _ = ended.map(|ended| ended.send(ExitStatus::from_raw(status)));
            }
            (Report::Forked(pid), Some(process)) if self.has_started(pid, &process) => {
                match waitable(process) {
                    Ok(process) => {
                        let (ended, end) = oneshot::channel();
                        copies.insert(pid, ended);
                        self.report_outcome(ForkOutcome::Forked(Forked {
                            pid,
                            process,
                            end: Some(end),
                            ended_at: None,
                            status: None,
                        }));
                    }
                    Err(_) => drop(self.asked.take()),
                }
            }
            (Report::Stale, _) => {
                self.requests.close();
                self.report_outcome(ForkOutcome::Stale);
            }
            (Report::Failed(reason), _) => {
                tracing::debug!("a fork server could not start a process: {reason}");
                self.report_outcome(ForkOutcome::Failed);
            }
            // Its descriptor was lost, as when this process may open no more, or it is another
            // process. There may be a copy.
            (Report::Forked(_), _) => drop(self.asked.take()),
            (Report::Ready, _) => self.report_outcome(ForkOutcome::Failed),
        }
    }

    /// Returns whether a pidfd refers to the process with this number, and the fork server has
    /// started that process. A model of the same user can send reports in its name, and this
    /// process may signal and change processes that the model may not.
    fn has_started(&self, pid: u32, process: &OwnedFd) -> bool {
        let parent = number_in(format!("/proc/{pid}/status"), "PPid:");
        // Afterwards: as long as the process exists, no other has its number. After its end, the
        // pidfd has none.
        let own = number_in(format!("/proc/self/fdinfo/{}", process.as_raw_fd()), "Pid:");
        parent.is_some() && parent == self.child.id() && own == Some(pid)
    }

    fn report_outcome(&mut self, outcome: ForkOutcome) {
        // If the receiver is gone, dropping the outcome kills the process.
        let _ = self.asked.take().map(|asked| asked.send(outcome));
    }
}

/// Returns the number after a key in a file of the kernel.
fn number_in(file: String, key: &str) -> Option<u32> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u32>().ok())
}

/// Returns the next report and its descriptor; `None` at the end of the connection.
async fn receive(connection: &UnixStream) -> io::Result<Option<(Report, Option<OwnedFd>)>> {
    let mut packet = vec![0; LARGEST];
    let receiving = connection.async_io(Interest::READABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            connection,
            &mut [IoSliceMut::new(&mut packet)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let process = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        Ok((received.bytes, process))
    });
    let (length, process) = receiving.await?;
    match packet.get(..length) {
        None | Some([]) => Ok(None),
        Some(text) => Ok(Some((Report::decode(text)?, process))),
    }
}

/// Returns an object with which a task can wait until a descriptor is readable: a socket with
/// packets, or a pidfd. There is no safe type for them; this one is only used to wait.
fn waitable(descriptor: OwnedFd) -> io::Result<UnixStream> {
    let stream = std::os::unix::net::UnixStream::from(descriptor);
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

/// Forwards the output of a fork server to the log. Only marked lines are for users: if it does not
/// start, the workers that are then started without it report why.
fn forward(stream: Option<impl AsyncRead + Unpin + Send + 'static>) {
    let Some(stream) = stream else { return };
    each_line(stream, |level, text| match level {
        Some(Level::WARN) => tracing::warn!(target: "worker", "fork server: {text}"),
        _ => tracing::debug!(target: "worker", "fork server: {text}"),
    });
}

/// A process that a fork server has started. It is killed when dropped.
#[derive(Debug)]
pub(crate) struct Forked {
    pid: u32,
    /// The pidfd, which is readable when the process has ended.
    process: UnixStream,
    end: Option<oneshot::Receiver<ExitStatus>>,
    /// When its end was seen before it was reported.
    ended_at: Option<TokioInstant>,
    status: Option<ExitStatus>,
}

impl Forked {
    /// Returns its process id, if it has not ended. A fork server that is controlled by a model may
    /// not report its end.
    pub(super) fn id(&self) -> Option<u32> {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if self.status.is_some()
            || poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&now)) != Ok(0)
        {
            return None;
        }
        Some(self.pid)
    }

    pub(super) fn kill(&self) -> io::Result<()> {
        Ok(pidfd_send_signal(&self.process, Signal::KILL)?)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// The process has ended, and its fork server has not reported how.
    pub(super) async fn wait(&mut self) -> io::Result<ExitStatus> {
        if let Some(status) = self.status {
            return Ok(status);
        }
        let mut reported = None;
        if let Some(end) = &mut self.end {
            reported = tokio::select! {
                biased;
                report = &mut *end => report.ok(),
                _ = self.process.readable() => {
                    let ended_at = *self.ended_at.get_or_insert_with(TokioInstant::now);
                    timeout_at(ended_at + REPORT_LIMIT, end).await.ok().and_then(Result::ok)
                }
            };
        }
        // The fork server may have ended, or be stopped: the end of the process is certain without
        // it.
        self.end = None;
        self.status = reported;
        self.process.readable().await?;
        reported.ok_or_else(|| {
            io::Error::other(
                "its exit status is unknown, because its fork server has not reported it",
            )
        })
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if self.status.is_none() {
            // Fails if it has ended.
            let _ = self.kill();
        }
    }
}
