//! Lets a model's code complete its configuration: runs `INTERPRETER -m pharos_worker
//! --auto-complete OUT`, which reads the question from standard input and writes its answer to the
//! file OUT.

use std::io;
use std::os::unix::net::UnixStream;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::Duration;

use pharos::wire::descriptors;
use rustix::process::geteuid;
use tokio::io::{AsyncRead, AsyncWriteExt};
use tokio::net::unix::pipe::Sender;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tracing::Level;

use super::WorkerProcess;
use super::fork_server::ForkServers;
use super::output::each_line;
use super::spawn::{self, OwnProcess};
use super::{Inherited, Start, TemporaryFiles, why_not_started};
use crate::launch::Launch;
use pharos_os::{blocking, directories};

/// The maximum length of an answer in bytes.
const LONGEST: u64 = 64 << 20;

/// The time limit of reading the output after the process has ended; a child may hold the pipe
/// open.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

/// A question to a model's code.
pub(crate) struct Question<'a> {
    pub(crate) model: &'a str,
    pub(crate) text: String,
    /// The number of threads of a fork server that is started for it.
    pub(crate) threads: u32,
    /// The time limit of the answer.
    pub(crate) limit: Duration,
}

/// Returns the answer of a model's code. Its output goes to the log.
///
/// # Errors
/// The code gave no answer; the text contains the reason.
pub(crate) async fn complete(
    launch: &Launch,
    fork_servers: &Arc<ForkServers>,
    question: Question<'_>,
) -> Result<String, String> {
    let Question { model, text, threads, limit } = question;
    let failed = |why: String| format!("auto-complete of model '{model}' failed: {why}");
    let files =
        TemporaryFiles::new(launch.user.as_deref()).map_err(|error| failed(error.to_string()))?;
    let out = files.path().join("answer.json");
    let inherited = fork_servers.inherited(launch).unwrap_or(Inherited { threads, gpus: None });
    let start = || {
        // The process ends when this server's end is closed, also if this server is killed.
        let (own, socket) = UnixStream::pair()?;
        let start = Start {
            launch,
            arguments: vec!["--auto-complete".to_owned(), out.to_string_lossy().into_owned()],
            inherited: inherited.clone(),
            processors: &[],
            files: vec![(socket.into(), descriptors::SOCKET)],
            reads: true,
            temporary: Some(files.path()),
            limit,
        };
        Ok((start, own))
    };
    let run = run_to_end(&start, fork_servers, launch.user.is_none(), model, text);
    let how = match timeout(limit, run).await {
        Ok(how) => how.map_err(|error| failed(error.to_string()))?,
        Err(_) => {
            return Err(failed(format!(
                "it did not end within {} s (--worker-start-timeout-secs); \
                 --disable-auto-complete-config turns it off",
                limit.as_secs_f64()
            )));
        }
    };
    // The model's code may have made anything at this path, also a hard link to a file that it
    // cannot read.
    let owner = launch.user.as_ref().map_or_else(|| geteuid().as_raw(), |user| user.uid());
    let answer = blocking::run(move || directories::read_of(&out, owner, LONGEST)).await;
    match answer.map_err(|error| failed(error.to_string()))? {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => {
            let why = why_not_started(launch, model).await;
            Err(why.unwrap_or_else(|| failed(format!("it ended without an answer ({how})"))))
        }
        Err(error) => Err(failed(format!("its answer cannot be read: {error}"))),
    }
}

/// Runs the process to its end, which it describes. Dropping the future kills it.
async fn run_to_end<'a>(
    start: &impl Fn() -> io::Result<(Start<'a>, UnixStream)>,
    fork_servers: &Arc<ForkServers>,
    is_own_user: bool,
    model: &str,
    question: String,
) -> io::Result<String> {
    let mut attempt = 1;
    let (mut started, _connection) = loop {
        let (start, connection) = start()?;
        match spawn::start(start, fork_servers, attempt).await? {
            Some(started) => break (started, connection),
            None => attempt += 1,
        }
    };
    let mut group = Group(started.process.group(is_own_user));
    let printed = [forward(started.output, model, false), forward(started.errors, model, true)];
    let status = write_and_wait(&mut started.process, started.input, question).await?;
    group.0 = None;
    for forwarded in printed {
        let _ = timeout(OUTPUT_TIMEOUT, forwarded).await;
    }
    Ok(started.process.describe(status))
}

/// The process group of a running process, which is killed on drop: an interpreter may be a script
/// that starts another one.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        spawn::end_group(self.0);
    }
}

async fn write_and_wait(
    process: &mut OwnProcess,
    input: Option<Sender>,
    question: String,
) -> io::Result<ExitStatus> {
    let write = async move {
        if let Some(mut stdin) = input {
            // The write fails if the process exits without reading; the exit status tells why.
            let _ = stdin.write_all(question.as_bytes()).await;
        }
        std::future::pending::<ExitStatus>().await
    };
    tokio::select! {
        status = process.wait() => status,
        status = write => Ok(status),
    }
}

/// Forwards output to the log.
fn forward(
    stream: impl AsyncRead + Unpin + Send + 'static,
    model: &str,
    is_error: bool,
) -> JoinHandle<()> {
    let model = model.to_owned();
    each_line(stream, move |level, text| match level {
        Some(Level::ERROR) => tracing::error!(target: "worker", %model, "auto-complete: {text}"),
        Some(Level::DEBUG) => tracing::debug!(target: "worker", %model, "auto-complete: {text}"),
        None | Some(Level::WARN) if is_error => {
            tracing::warn!(target: "worker", %model, "auto-complete: {text}")
        }
        _ => tracing::info!(target: "worker", %model, "auto-complete: {text}"),
    })
}
