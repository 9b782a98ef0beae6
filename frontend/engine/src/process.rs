//! Starts a worker process with the descriptors that it inherits, and forwards its output: metric lines into the metrics, other
//! lines into the log. Runs Python workers to complete configurations, and diagnoses why one does not start.

mod affinity;
mod complete;
mod diagnosis;
mod fork_server;
mod spawn;
mod temporary;

use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use pharos::metrics::cache::Cache;
use pharos::metrics::series::ModelSeries;
use pharos::metrics::{intake, worker_lines};
use pharos::wire::{descriptors, ring};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tracing::Level;

use crate::launch::Launch;
use crate::memory;
use crate::wire::{Link, LinkParts};
pub(crate) use complete::complete;
pub(crate) use diagnosis::{why_not_loaded, why_not_started};
pub(crate) use fork_server::ForkServers;
use fork_server::Inherited;
use pharos_os::event_loops::EventLoop;
use pharos_telemetry::metrics::{RefusedLinesLog, Ring};
use pharos_telemetry::system::ChosenDevice;
use spawn::Start;
pub(crate) use spawn::WorkerProcess;
pub(crate) use temporary::TemporaryFiles;

/// The longest log line of a worker; a longer line is split.
const MAX_LINE: u64 = 8 << 10;

/// A started worker: its process and the connection to it.
pub(crate) struct Worker {
    pub(crate) process: WorkerProcess,
    pub(crate) link: Link,
    /// The directory for temporary files of a process in a sandbox.
    pub(crate) temporary: Option<TemporaryFiles>,
}

/// The destination of a worker's output.
pub(crate) struct Printed {
    /// The name of the worker in the log.
    pub(crate) name: String,
    /// The metrics cache and the model's series, for metric lines.
    pub(crate) cache: Arc<Cache>,
    pub(crate) series: Arc<ModelSeries>,
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

/// Starts a worker whose connection is served by `event_loop`, and forwards its output to the log and, for metric lines, to the
/// metrics.
///
/// # Errors
/// Memory, descriptors or processes are exhausted, or the executable does not exist.
pub(crate) async fn start(
    (launch, fork_servers): (&Launch, &Arc<ForkServers>),
    placement: &ProcessPlacement<'_>,
    (printed, event_loop): (Printed, EventLoop),
) -> io::Result<Worker> {
    let ProcessPlacement { instance, threads, gpu, processors, start_timeout } = *placement;
    let (ours, theirs) = {
        let _loop = event_loop.enter();
        UnixStream::pair()?
    };
    let (arenas, inputs, outputs) = memory::create()?;
    let frames = ring::create()?;
    let rings = ring::of_frontend(&frames)?;
    let (ring, metrics, wake) = Ring::create(instance)?;
    let (regions, worker_regions) = regions_socket()?;
    let theirs = OwnedFd::from(theirs.into_std()?);
    rustix::io::ioctl_fionbio(&theirs, false)?;
    let temporary = launch.sandbox.is_some().then(TemporaryFiles::new).transpose()?;
    let files = vec![
        (theirs, descriptors::SOCKET),
        (inputs, descriptors::INPUTS),
        (outputs, descriptors::OUTPUTS),
        (metrics, descriptors::METRICS),
        (wake, descriptors::WAKE_UP),
        (worker_regions, descriptors::REGIONS),
        (frames, descriptors::FRAMES),
    ];
    let start = Start {
        launch,
        arguments: vec![instance.to_owned()],
        inherited: Inherited { threads, gpus: gpu.map(|gpu| gpu.uuids.clone()) },
        processors,
        files,
        reads: false,
        temporary: temporary.as_ref().map(TemporaryFiles::path),
        limit: start_timeout,
    };
    let started = start.run(fork_servers).await?;
    forward_errors(started.errors, &printed.name);
    forward_output(started.output, printed);
    let parts = LinkParts { socket: ours, event_loop, frames: rings, regions, arenas, ring };
    Ok(Worker { process: started.process, link: Link::new(parts), temporary })
}

/// Returns whether a process was killed by SIGKILL, as by the kernel when memory runs out.
pub(crate) fn killed_by_system(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    /// The number of SIGKILL.
    const KILL: i32 = 9;
    status.signal() == Some(KILL)
}

/// Describes how a process ended.
pub(crate) fn describe(status: ExitStatus) -> String {
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
    io::Error::new(error.kind(), format!("{what} cannot be started: {error}"))
}

/// Forwards standard output until it ends: metric lines into the metrics as soon as they are read, other lines to the log.
fn forward_output(stream: impl AsyncRead + Unpin + Send + 'static, printed: Printed) {
    tokio::spawn(async move {
        let instance = &printed.name;
        let mut refused = RefusedLinesLog::new(format!("the output of {instance}"));
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while let Ok(true) = next_line(&mut reader, &mut line).await {
            match worker_lines::strip(&line) {
                Some(body) => {
                    if let Err(refusal) = intake::stdout_line(&printed.cache, &printed.series, body) {
                        refused.report(line.trim_ascii_end(), &refusal);
                    }
                }
                None => {
                    let text = String::from_utf8_lossy(&line);
                    tracing::info!(target: "worker", %instance, "{}", text.trim_end());
                }
            }
        }
    });
}

/// Forwards standard error to the log until it ends.
fn forward_errors(stream: impl AsyncRead + Unpin + Send + 'static, instance: &str) {
    let (instance, lines) = (instance.to_owned(), stream);
    let stream = "stderr";
    tokio::spawn(async move {
        let mut reader = BufReader::new(lines);
        let mut line = Vec::new();
        while let Ok(true) = read_line(&mut reader, &mut line).await {
            let text = String::from_utf8_lossy(&line);
            match leveled(text.trim_end()) {
                (Level::ERROR, text) => tracing::error!(target: "worker", %instance, stream, "{text}"),
                (Level::INFO, text) => tracing::info!(target: "worker", %instance, stream, "{text}"),
                (Level::DEBUG, text) => tracing::debug!(target: "worker", %instance, stream, "{text}"),
                (_, text) => tracing::warn!(target: "worker", %instance, stream, "{text}"),
            }
        }
    });
}

/// Returns the level of a line of a worker's standard error, and the line without its level mark. The mark is the character RS
/// and a letter, which `pb_utils.Logger` writes. Unmarked lines are warnings.
fn leveled(line: &str) -> (Level, &str) {
    let marked = line.strip_prefix('\u{1e}').unwrap_or_default();
    let levels = [('I', Level::INFO), ('W', Level::WARN), ('E', Level::ERROR), ('V', Level::DEBUG)];
    let known = levels.into_iter().find_map(|(letter, level)| Some((level, marked.strip_prefix(letter)?)));
    known.unwrap_or((Level::WARN, line))
}

/// Reads a line of at most [`MAX_LINE`] bytes; returns `false` at the end of the stream.
async fn read_line(reader: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    Ok(reader.take(MAX_LINE).read_until(b'\n', line).await? > 0)
}

/// Like [`read_line`], but allows metric lines of up to [`intake::MAX_LINE`] bytes; drops the rest of a longer line.
async fn next_line(reader: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    if !read_line(reader, line).await? {
        return Ok(false);
    }
    if !line.ends_with(b"\n") && worker_lines::strip(line).is_some() {
        let more = intake::MAX_LINE.saturating_sub(line.len()) as u64;
        reader.take(more).read_until(b'\n', line).await?;
        let mut rest = Vec::new();
        while line.len() >= intake::MAX_LINE && !line.ends_with(b"\n") && !rest.ends_with(b"\n") {
            if !read_line(reader, &mut rest).await? {
                break;
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_line_may_contain_its_level() {
        let marked = |text: &str| leveled(text).0.as_str().to_owned() + " " + leveled(text).1;
        for (line, expected) in [
            ("plain", "WARN plain"),
            ("\u{1e}Im.py:3] a", "INFO m.py:3] a"),
            ("\u{1e}Wa", "WARN a"),
            ("\u{1e}E", "ERROR "),
            ("\u{1e}Vx", "DEBUG x"),
            ("\u{1e}Qx", "WARN \u{1e}Qx"),
            ("\u{1e}", "WARN \u{1e}"),
        ] {
            assert_eq!(marked(line), expected);
        }
    }

    #[tokio::test]
    async fn metric_lines_may_be_longer_than_others() {
        let ids = |bytes: usize| format!("[METRICS]a.ms:1|#|#hostname:h,1,{}\n", "i".repeat(bytes));
        let (fits, long) = (ids(60 << 10), ids(70 << 10));
        let plain = "x".repeat(10 << 10) + "\n";
        let text = [plain.as_str(), &fits, &long, "after\n", "[METRICS]cut"].concat();
        let mut reader = BufReader::new(text.as_bytes());
        let (mut line, mut lines) = (Vec::new(), Vec::new());
        while next_line(&mut reader, &mut line).await.unwrap() {
            lines.push(String::from_utf8(line.clone()).unwrap());
        }
        let lengths: Vec<usize> = lines.iter().map(String::len).collect();
        assert_eq!(lengths, [8 << 10, (2 << 10) + 1, fits.len(), intake::MAX_LINE, 6, 12]);
        let cut: Vec<bool> = lines.iter().map(|line| line.ends_with('\n')).collect();
        assert_eq!(cut, [false, true, true, false, true, false]);
    }
}
