//! The process id file of the running server, at TorchServe's path, for `torchserve --stop`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use pharos_os::directories;

/// The time limit for a server to stop before it is killed, as in TorchServe.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);

/// The argument of a server that serves as TorchServe does.
pub(super) const COMMAND: &str = "torchserve";

/// The process id file, which is removed on drop.
#[derive(Debug)]
pub(super) struct PidFile {
    path: PathBuf,
    pid: u32,
}

impl PidFile {
    /// Writes `pid` to the file.
    ///
    /// # Errors
    /// Writing failed.
    pub(super) fn write(pid: u32) -> Result<Self, String> {
        let path = path();
        directories::replace(&path, &pid.to_string(), |text| number(text).is_some())
            .map_err(|error| format!("cannot write the process id file: {error}"))?;
        Ok(Self { path, pid })
    }

    /// Keeps the file when the value is dropped.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another server may have replaced the file.
        if named(&self.path)
            .is_some_and(|(pid, _)| pid.as_raw_nonzero().get().cast_unsigned() == self.pid)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Parses a process id.
fn number(text: &str) -> Option<Pid> {
    Pid::from_raw(text.trim().parse().ok().filter(|pid| *pid > 1)?)
}

/// Returns the process id in the file and the owner of the file; `None` if the file does not
/// contain a process id.
fn named(path: &Path) -> Option<(Pid, u32)> {
    let (text, owner) = directories::read(path).ok()??;
    Some((number(&text)?, owner))
}

/// Removes the file if it contains a process id.
fn remove() {
    if named(&path()).is_some() {
        let _ = fs::remove_file(path());
    }
}

fn path() -> PathBuf {
    std::env::temp_dir().join(".model_server.pid")
}

/// Returns the process id in the file if that process is a running server.
///
/// # Errors
/// No server was found; the text says where and why.
pub(super) fn running() -> Result<Pid, String> {
    let path = path();
    let file = path.display();
    let Some((pid, owner)) = named(&path) else {
        return Err(match path.exists() {
            true => format!("the process id file '{file}' has no process id"),
            false => format!(
                "there is no process id file '{file}', which a server writes to the directory in \
                 TMPDIR, or /tmp"
            ),
        });
    };
    let number = pid.as_raw_nonzero();
    let ended = || format!("the process {number} in '{file}' does not run any more");
    // In a container, the process after a restart has the same id as the process before, and the
    // file may have stayed.
    if pid == rustix::process::getpid() {
        return Err(ended());
    }
    // Do not trust a file of another user that names a process of a third user.
    let user = fs::metadata(format!("/proc/{number}")).map_err(|_| ended())?.uid();
    if owner != rustix::process::geteuid().as_raw() && owner != user {
        return Err(format!(
            "the process id file '{file}' is of another user than the process {number} that it \
             names"
        ));
    }
    test_kill_process(pid)
        .map_err(|error| format!("the process {number} in '{file}' cannot be stopped: {error}"))?;
    if !is_server(pid) {
        return Err(format!(
            "the process {number} in '{file}' is not a server that `pharos torchserve` has started"
        ));
    }
    Ok(pid)
}

/// Returns whether the process runs this command. The id may have been reused by another process,
/// also by a server that was started without this command.
fn is_server(pid: Pid) -> bool {
    let executable = fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero()));
    let own = std::env::current_exe().ok();
    let name = |path: &Path| {
        path.file_name()
            .map(|name| name.to_string_lossy().trim_end_matches(" (deleted)").to_owned())
    };
    let arguments = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let is_command =
        arguments.split(|byte| *byte == 0).skip(1).any(|argument| argument == COMMAND.as_bytes());
    is_command
        && executable.is_ok_and(|executable| name(&executable) == own.as_deref().and_then(name))
}

/// The result of a stop.
#[derive(Debug)]
pub(super) enum Stop {
    /// The server has ended.
    Ended,
    /// No server was found; the text says where and why.
    NoServer(String),
}

/// Stops the server of the process id file.
///
/// # Errors
/// The server is running and cannot be stopped.
pub(super) fn stop() -> Result<Stop, String> {
    let pid = match running() {
        Ok(pid) => pid,
        Err(why) => {
            remove();
            return Ok(Stop::NoServer(why));
        }
    };
    let failed =
        |error| format!("cannot stop the server with process id {}: {error}", pid.as_raw_nonzero());
    kill_process(pid, Signal::TERM).map_err(failed)?;
    let step = Duration::from_millis(50);
    let steps = STOP_TIMEOUT.as_millis() / step.as_millis();
    for _ in 0..steps {
        if test_kill_process(pid).is_err() || ended(pid) {
            remove();
            return Ok(Stop::Ended);
        }
        std::thread::sleep(step);
    }
    kill_process(pid, Signal::KILL).map_err(failed)?;
    remove();
    Ok(Stop::Ended)
}

/// Returns whether the process has exited and is a zombie.
fn ended(pid: Pid) -> bool {
    let stat =
        fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z') || rest.starts_with('X'))
}
