//! Relocates conda environments.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use pharos_os::children::wait_within;

/// The time limit of `conda-unpack`.
const TIMEOUT: Duration = Duration::from_mins(10);

/// The time limit of reading the output of `conda-unpack` after it has exited.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs `conda-unpack` with the command of the environment's interpreter. The script writes the new
/// location into the files of the environment. Does nothing without the script.
///
/// # Errors
/// The script fails or exceeds its time limit.
pub(super) fn relocate(home: &Path, mut command: Command) -> Result<(), String> {
    let script = home.join("bin/conda-unpack");
    if !script.is_file() {
        return Ok(());
    }
    let failed = |why: String| format!("its bin/conda-unpack failed: {why}");
    let not_started = |error: io::Error| failed(format!("it cannot be started: {error}"));
    let (errors, stderr) = io::pipe().map_err(not_started)?;
    let last_line_of_stderr = last_line(errors).map_err(not_started)?;
    command.arg(&script).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let mut child = command.spawn().map_err(not_started)?;
    // It has the write end of the pipe.
    drop(command);
    let status = wait_within(&mut child, TIMEOUT)
        .ok_or_else(|| failed(format!("it did not end within {} s", TIMEOUT.as_secs())))?;
    if status.success() {
        return Ok(());
    }
    // A child of the script may hold the pipe open.
    let last = last_line_of_stderr.recv_timeout(OUTPUT_TIMEOUT).unwrap_or_default();
    Err(failed(format!("{status}: {last}")))
}

/// Reads a program's output to its end, so that writes never block. Sends the last line of the
/// first 64 KiB.
///
/// # Errors
/// The thread that reads cannot be started.
fn last_line(mut output: impl Read + Send + 'static) -> io::Result<mpsc::Receiver<String>> {
    let (sending, receiver) = mpsc::channel();
    thread::Builder::new().name("conda-unpack".into()).spawn(move || {
        let mut text = Vec::new();
        let _ = (&mut output).take(64 << 10).read_to_end(&mut text);
        let _ = io::copy(&mut output, &mut io::sink());
        let lines = String::from_utf8_lossy(&text);
        let last = lines.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let _ = sending.send(last.to_owned());
    })?;
    Ok(receiver)
}
