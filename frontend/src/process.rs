//! Starts a worker process with the descriptors it inherits, and forwards what it prints into the log.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use command_fds::{CommandFdExt, FdMapping};
use pharos::wire::descriptors;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};

use crate::memory;
use crate::metrics::Ring;
use crate::wire::Link;

/// The longest line of a worker that goes into the log as one; the rest of a longer line becomes lines of its own.
const MAX_LINE: u64 = 8 << 10;

/// How workers are started.
#[derive(Clone, Debug)]
pub struct Program {
    /// The `pharos-worker` executable.
    pub worker: PathBuf,
    /// ONNX Runtime's library, if there is one.
    pub onnxruntime: Option<PathBuf>,
}

/// A started worker: its process and the connection to it.
pub(crate) struct Worker {
    pub(crate) child: Child,
    pub(crate) link: Link,
}

/// Starts a worker whose output goes to the log under `instance`.
///
/// # Errors
/// No memory, descriptors or processes are left, or the executable does not exist.
pub(crate) fn start(program: &Program, instance: &str, threads: u32) -> io::Result<Worker> {
    let (ours, theirs) = UnixStream::pair()?;
    let (arenas, inputs, outputs) = memory::create()?;
    let (ring, metrics) = Ring::create()?;
    let theirs = OwnedFd::from(theirs.into_std()?);
    rustix::io::ioctl_fionbio(&theirs, false)?;
    let mut command = Command::new(&program.worker);
    // A group of their own: Ctrl-C in a terminal goes to the frontend alone, which drains before it ends its workers.
    command
        .arg(instance)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command.env("OMP_NUM_THREADS", threads.to_string());
    match &program.onnxruntime {
        Some(library) => command.env("ORT_DYLIB_PATH", library),
        None => command.env_remove("ORT_DYLIB_PATH"),
    };
    let mappings = [
        (theirs, descriptors::SOCKET),
        (inputs, descriptors::INPUTS),
        (outputs, descriptors::OUTPUTS),
        (metrics, descriptors::METRICS),
    ];
    let mappings = mappings.map(|(parent_fd, child_fd)| FdMapping { parent_fd, child_fd });
    command.fd_mappings(mappings.into()).map_err(|error| io::Error::other(error.to_string()))?;
    let mut child = command.spawn().map_err(|error| cannot_start(&program.worker, &error))?;
    forward(child.stdout.take(), instance, false);
    forward(child.stderr.take(), instance, true);
    Ok(Worker { child, link: Link::new(ours, arenas, ring) })
}

fn cannot_start(worker: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("the worker '{}' cannot be started: {error}", worker.display()))
}

/// Forwards lines to the log until the stream ends.
fn forward(stream: Option<impl AsyncRead + Unpin + Send + 'static>, instance: &str, error: bool) {
    let Some(stream) = stream else { return };
    let instance = instance.to_owned();
    tokio::spawn(async move {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while let Ok(true) = next_line(&mut reader, &mut line).await {
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end();
            if error {
                tracing::warn!(target: "worker", %instance, "{text}");
            } else {
                tracing::info!(target: "worker", %instance, "{text}");
            }
        }
    });
}

/// Reads a line of at most [`MAX_LINE`] bytes; `false` at the end.
async fn next_line(reader: &mut (impl AsyncBufRead + Unpin), line: &mut Vec<u8>) -> io::Result<bool> {
    line.clear();
    Ok(reader.take(MAX_LINE).read_until(b'\n', line).await? > 0)
}
