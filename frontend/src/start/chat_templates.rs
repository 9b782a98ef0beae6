//! Starts the processes that render chat templates: this executable, with another command.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};

use pharos_openai::renderer::{End, Launch, Process};
use rustix::process::Signal;
use tokio::process::Command;

use crate::commands::chat_template::NAME;

/// This executable, even if its file was replaced since the start.
const EXECUTABLE: &str = "/proc/self/exe";

/// The limit of memory concerns what the allocator has used, not what it has reserved.
const VARIABLES: [(&str, &str); 1] = [("MIMALLOC_ARENA_EAGER_COMMIT", "0")];

/// The signals that end a process beyond its limits: processor time, failed allocations, and a stack
/// that overflows.
const LIMITS: [Signal; 4] = [Signal::XCPU, Signal::ABORT, Signal::SEGV, Signal::BUS];

/// Starts this executable.
#[derive(Debug)]
pub(super) struct OwnExecutable;

impl Launch for OwnExecutable {
    fn launch(&self) -> io::Result<Process> {
        // The process ends with its standard input, and so with this process.
        let mut child = Command::new(EXECUTABLE)
            .arg0("pharos")
            .arg(NAME)
            .env_clear()
            .envs(VARIABLES)
            .current_dir("/")
            // Ctrl-C in a terminal signals only the frontend, which may still render.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the process has no standard streams"));
        };
        let end = Box::pin(async move {
            match child.wait().await {
                Ok(status) => end(status),
                Err(error) => End::Other(error.to_string()),
            }
        });
        Ok(Process { input: Box::pin(input), output: Box::pin(output), end })
    }
}

fn end(status: ExitStatus) -> End {
    let is_limit = |number| LIMITS.iter().any(|signal| signal.as_raw() == number);
    if status.signal().is_some_and(is_limit) {
        return End::LimitExceeded;
    }
    End::Other(status.to_string())
}
