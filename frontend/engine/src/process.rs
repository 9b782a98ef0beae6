//! Starts a worker process with the descriptors that it inherits, and forwards its output: metric
//! lines into the metrics, other lines into the log. Runs Python workers to complete
//! configurations, and diagnoses why one does not start.

mod complete;
mod diagnosis;
mod fork_server;
mod output;
mod spawn;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use pharos::wire::descriptors;
use pharos::wire::ring::{self, Consumer, Producer};
use tokio::net::UnixStream;

use crate::launch::Launch;
use crate::memory::{self, Arenas};
use crate::sample_ring::SampleRing;
use crate::wire::{Link, LinkParts};
pub(crate) use complete::{Question, complete};
pub(crate) use diagnosis::{why_not_loaded, why_not_started};
pub(crate) use fork_server::ForkServers;
pub(crate) use output::Printed;
use pharos_os::event_loops::EventLoop;
use pharos_os::sockets;
use pharos_telemetry::system::ChosenDevice;
pub(crate) use spawn::TemporaryFiles;

/// Starts the processes of workers.
pub(crate) trait StartWorkers: Send + Sync {
    /// Starts a worker whose connection is served by `event_loop`, and forwards its output to the
    /// log and, for metric lines, to the metrics.
    ///
    /// # Errors
    /// Memory, descriptors or processes are exhausted, or the executable does not exist.
    fn start<'a>(
        &'a self,
        launch: &'a Launch,
        placement: &'a ProcessPlacement<'a>,
        printed: Printed,
        event_loop: EventLoop,
    ) -> Pin<Box<dyn Future<Output = io::Result<Worker>> + Send + 'a>>;
}

/// The process of a worker. It is killed when dropped.
pub(crate) trait WorkerProcess: Send + Sync {
    /// Returns its process id, if it has not ended.
    fn id(&self) -> Option<u32>;

    /// Waits for its end.
    ///
    /// # Errors
    /// The exit status is unknown.
    fn wait(&mut self) -> Pin<Box<dyn Future<Output = io::Result<ExitStatus>> + Send + '_>>;

    /// Kills it, and does not wait for its end.
    ///
    /// # Errors
    /// The process has ended.
    fn start_kill(&mut self) -> io::Result<()>;

    /// Describes how it ended with this status.
    fn describe(&self, status: ExitStatus) -> String;
}

/// A started worker: its process and the connection to it.
pub(crate) struct Worker {
    pub(crate) process: Box<dyn WorkerProcess>,
    pub(crate) link: Link,
    /// The directory for temporary files of a process in a sandbox.
    pub(crate) temporary: Option<TemporaryFiles>,
}

/// The name, threads, processors and GPU of an instance's process.
pub(crate) struct ProcessPlacement<'a> {
    pub(crate) instance: &'a str,
    /// The number of threads that one execution may use.
    pub(crate) threads: u32,
    /// The GPU, if it runs on one; the process sees it as its first device.
    pub(crate) gpu: Option<&'a ChosenDevice>,
    /// The processors to which the process is bound; empty for all.
    pub(crate) processors: &'a [usize],
    /// The time limit of its start.
    pub(crate) start_timeout: Duration,
}

impl StartWorkers for Arc<ForkServers> {
    fn start<'a>(
        &'a self,
        launch: &'a Launch,
        placement: &'a ProcessPlacement<'a>,
        printed: Printed,
        event_loop: EventLoop,
    ) -> Pin<Box<dyn Future<Output = io::Result<Worker>> + Send + 'a>> {
        Box::pin(start(launch, self, placement, printed, event_loop))
    }
}

async fn start(
    launch: &Launch,
    fork_servers: &Arc<ForkServers>,
    placement: &ProcessPlacement<'_>,
    printed: Printed,
    event_loop: EventLoop,
) -> io::Result<Worker> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let (connection, files) = Connection::create(placement.instance, launch, &event_loop)?;
        let start = Start {
            launch,
            arguments: vec![placement.instance.to_owned()],
            inherited: Inherited {
                threads: placement.threads,
                gpus: placement.gpu.map(|gpu| gpu.uuids.clone()),
            },
            processors: placement.processors,
            files,
            reads: false,
            temporary: connection.temporary.as_ref().map(TemporaryFiles::path),
            limit: placement.start_timeout,
        };
        let Some(started) = spawn::start(start, fork_servers, attempt).await? else { continue };
        output::forward_errors(started.errors, &printed.name);
        output::forward_output(started.output, printed);
        let Connection { socket, frames, regions, arenas, ring, temporary } = connection;
        let link = Link::new(LinkParts { socket, event_loop, frames, regions, arenas, ring });
        return Ok(Worker { process: Box::new(started.process), link, temporary });
    }
}

/// A process to start.
struct Start<'a> {
    launch: &'a Launch,
    arguments: Vec<String>,
    inherited: Inherited,
    /// The processors to which it is bound; empty for all.
    processors: &'a [usize],
    /// The files of the process apart from the standard streams, with their numbers.
    files: Vec<(OwnedFd, i32)>,
    /// Whether it reads its standard input.
    reads: bool,
    /// The directory for its temporary files, if it is in a sandbox.
    temporary: Option<&'a Path>,
    /// The time limit of its start.
    limit: Duration,
}

/// The threads and GPUs of a process, which its environment variables name unless this process has
/// them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Inherited {
    /// The number of threads that one execution may use.
    threads: u32,
    /// The GPUs that the process sees, as CUDA names them.
    gpus: Option<String>,
}

impl Inherited {
    /// Returns the names and values of the variables, except variables that `inherits` returns true
    /// for: an operator has set them. The GPUs are always set, because the server has placed the
    /// process.
    fn variables(&self, inherits: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        let threads = ("OMP_NUM_THREADS", self.threads.to_string());
        // Makes device numbers equal in all processes.
        let order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned());
        let defaults = [threads, order].into_iter().filter(|(name, _)| !inherits(name));
        let gpus = self.gpus.clone().map(|gpus| ("CUDA_VISIBLE_DEVICES", gpus));
        defaults.chain(gpus).map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

/// The frontend's ends of what it shares with one process, and only with that one.
struct Connection {
    socket: UnixStream,
    frames: (Producer, Consumer),
    regions: OwnedFd,
    arenas: Arenas,
    ring: SampleRing,
    temporary: Option<TemporaryFiles>,
}

impl Connection {
    /// Returns the frontend's ends, and the worker's with their numbers.
    fn create(
        instance: &str,
        launch: &Launch,
        event_loop: &EventLoop,
    ) -> io::Result<(Self, Vec<(OwnedFd, i32)>)> {
        let (socket, theirs) = {
            let _loop = event_loop.enter();
            UnixStream::pair()?
        };
        let (arenas, inputs, outputs) = memory::create()?;
        let memory_of_frames = ring::create()?;
        let frames = ring::of_frontend(&memory_of_frames)?;
        let (ring, metrics, wake) = SampleRing::create(instance)?;
        let (regions, worker_regions) = regions_socket()?;
        sockets::refuse_descriptors(&socket);
        sockets::refuse_descriptors(&regions);
        let theirs = OwnedFd::from(theirs.into_std()?);
        rustix::io::ioctl_fionbio(&theirs, false)?;
        let temporary = launch
            .sandbox
            .is_some()
            .then(|| TemporaryFiles::new(launch.user.as_deref()))
            .transpose()?;
        let files = vec![
            (theirs, descriptors::SOCKET),
            (inputs, descriptors::INPUTS),
            (outputs, descriptors::OUTPUTS),
            (metrics, descriptors::METRICS),
            (wake, descriptors::WAKE_UP),
            (worker_regions, descriptors::REGIONS),
            (memory_of_frames, descriptors::FRAMES),
        ];
        Ok((Self { socket, frames, regions, arenas, ring, temporary }, files))
    }
}

/// Returns whether a process was killed by SIGKILL, as by the kernel when memory runs out.
pub(crate) fn killed_by_system(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    /// The number of SIGKILL.
    const KILL: i32 = 9;
    status.signal() == Some(KILL)
}

/// Describes how a process ended.
fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, Some(code)) => format!("exit status {code}"),
        (None, None) => status.to_string(),
    }
}

/// Returns the two ends of the non-blocking socket that announces clients' memory to a worker.
fn regions_socket() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn cannot_start(launch: &Launch, error: &io::Error) -> io::Error {
    let what = match &launch.interpreter {
        Some(interpreter) => format!("the Python interpreter {interpreter}"),
        None => format!("the worker '{}'", launch.executable.display()),
    };
    let user = launch
        .user
        .as_ref()
        .map(|user| format!(" as the user '{}'", user.name()))
        .unwrap_or_default();
    io::Error::new(error.kind(), format!("{what} cannot be started{user}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_operator_remain() {
        let inherited = Inherited { threads: 4, gpus: Some("GPU-a".to_owned()) };
        let names = |inherits: fn(&str) -> bool| -> Vec<String> {
            inherited.variables(inherits).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(
            names(|_| false),
            ["OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"]
        );
        assert_eq!(
            names(|name| name == "OMP_NUM_THREADS"),
            ["CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"]
        );
        assert_eq!(names(|_| true), ["CUDA_VISIBLE_DEVICES"]);
    }
}
