//! The file that names the running server, where TorchServe has it, so that `torchserve --stop` finds it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

use pharos_os::directories;

/// How long a server may take to stop before it is killed: TorchServe's patience.
const PATIENCE: Duration = Duration::from_secs(60);

/// The file, as long as the server runs.
#[derive(Debug)]
pub(super) struct PidFile {
    path: PathBuf,
    pid: u32,
}

impl PidFile {
    /// Names the process `pid`.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn write(pid: u32) -> Result<Self, String> {
        let path = path();
        let is_ours = |text: &str| number(text).is_some();
        directories::replace(&path, &pid.to_string(), is_ours)
            .map_err(|error| format!("the file of the process id cannot be written: {error}"))?;
        Ok(Self { path, pid })
    }

    /// The file stays when this is dropped.
    pub(super) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Another server may have taken its place.
        if named(&self.path).is_some_and(|(pid, _)| pid.as_raw_nonzero().get().cast_unsigned() == self.pid) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The process id that a text is.
fn number(text: &str) -> Option<Pid> {
    Pid::from_raw(text.trim().parse().ok().filter(|pid| *pid > 1)?)
}

/// The process id that the file names, if it is such a file, and the user who wrote it.
fn named(path: &Path) -> Option<(Pid, u32)> {
    let (text, owner) = directories::read(path).ok()??;
    Some((number(&text)?, owner))
}

/// Removes the file if it is one with a process id.
fn remove() {
    if named(&path()).is_some() {
        let _ = fs::remove_file(path());
    }
}

fn path() -> PathBuf {
    std::env::temp_dir().join(".model_server.pid")
}

/// The server that the file names, if it runs and is one.
pub(super) fn running() -> Option<Pid> {
    let (pid, owner) = named(&path())?;
    // A file of another user must not name a server that is not that user's.
    let user = fs::metadata(format!("/proc/{}", pid.as_raw_nonzero())).ok()?.uid();
    let trusted = owner == rustix::process::geteuid().as_raw() || owner == user;
    (trusted && test_kill_process(pid).is_ok() && is_server(pid)).then_some(pid)
}

/// Whether it is this program: the number may have been given to another process since.
fn is_server(pid: Pid) -> bool {
    let executable = fs::read_link(format!("/proc/{}/exe", pid.as_raw_nonzero()));
    let own = std::env::current_exe().ok();
    let name =
        |path: &Path| path.file_name().map(|name| name.to_string_lossy().trim_end_matches(" (deleted)").to_owned());
    executable.is_ok_and(|executable| name(&executable) == own.as_deref().and_then(name))
}

/// Stops the server that the file names, and says so.
///
/// # Errors
/// It runs and cannot be stopped.
pub(super) fn stop() -> Result<&'static str, String> {
    let Some(pid) = running() else {
        remove();
        return Ok("TorchServe is not currently running.");
    };
    let failed = |error| format!("the server {} cannot be stopped: {error}", pid.as_raw_nonzero());
    kill_process(pid, Signal::TERM).map_err(failed)?;
    let step = Duration::from_millis(50);
    let steps = PATIENCE.as_millis() / step.as_millis();
    for _ in 0..steps {
        if test_kill_process(pid).is_err() || ended(pid) {
            remove();
            return Ok("TorchServe has stopped.");
        }
        std::thread::sleep(step);
    }
    kill_process(pid, Signal::KILL).map_err(failed)?;
    remove();
    Ok("TorchServe has stopped.")
}

/// Whether it has ended and only its parent has not noticed.
fn ended(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z') || rest.starts_with('X'))
}
