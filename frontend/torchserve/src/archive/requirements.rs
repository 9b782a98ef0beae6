//! Installs the packages of an archive's `requirements.txt` (`install_py_dep_per_model=true`):
//! beside the unpacked files, where the handler finds them first, or in a separate directory if the
//! archive is a directory of the user, which is never written to.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Component, Path};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::sync::watch;

use super::{Archive, Unpacked, new_directory};
use crate::settings::{Pip, PipSandbox};
use crate::{ErrorResponse, Settings};
use pharos::model::CodeOrigin;
use pharos_os::children::wait_while;
use pharos_os::removal::remove_tree;
use pharos_os::variables::is_inherited;

/// The longest run of pip.
const PIP_TIMEOUT: Duration = Duration::from_mins(10);

/// The directory of temporary files of pip in a sandbox, in the directory that pip installs into.
const PIP_TEMPORARY: &str = ".pip-temporary";

/// The file with pip's output, in the directory that pip installs into.
const PIP_LOG: &str = ".pip.log";

/// Installs requirements if the settings enable it and the archive has any. Returns the directory
/// of the packages if it differs from the archive's. Ends pip when `exiting` becomes true.
///
/// # Errors
/// pip failed; the text has the last error line of its output. Or the server exits.
pub(super) fn install(
    settings: &Settings,
    archive: &Archive,
    exiting: &watch::Receiver<bool>,
) -> Result<Option<Unpacked>, ErrorResponse> {
    let named = archive.manifest.pointer("/model/requirementsFile").and_then(|file| file.as_str());
    let Some(file) = named.filter(|_| settings.install_requirements) else { return Ok(None) };
    let failed = |why: &str| {
        ErrorResponse::invalid_model(format!(
            "Custom pip package installation failed for model {}: {why}",
            archive.model_name
        ))
    };
    if !Path::new(file)
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
    {
        return Err(failed(&format!("its requirementsFile '{file}' is outside the archive")));
    }
    tracing::info!(model = archive.model_name, "installing the packages of '{file}'");
    let directory = archive.directory.path();
    let separate = if archive.directory.is_own() { None } else { Some(new_directory(settings)?) };
    let target = separate.as_ref().map_or(directory, Unpacked::path);
    let sandbox = settings.pip.sandbox.as_ref().filter(|_| archive.origin == CodeOrigin::Request);
    match settings.pip.install(directory, file, target, sandbox, || !*exiting.borrow()) {
        Ok(()) => Ok(separate),
        Err(_) if *exiting.borrow() => Err(ErrorResponse::exiting()),
        Err(why) => Err(failed(&why)),
    }
}

fn is_for_pip(name: &str) -> bool {
    is_inherited(name) || name.starts_with("PIP_") || name.to_ascii_lowercase().ends_with("_proxy")
}

/// The longest end of pip's output that is read.
const PIP_OUTPUT: u64 = 64 << 10;

/// Returns the reader of the end of a file.
fn end_of(file: &mut File) -> impl Read {
    let length = file.metadata().map_or(0, |found| found.len());
    let _ = file.seek(SeekFrom::Start(length.saturating_sub(PIP_OUTPUT)));
    file.take(PIP_OUTPUT)
}

impl Pip {
    /// Installs the packages listed in a file of a directory into `target`, which then belongs to
    /// the user, while `wanted` is true. Paths in the file are relative to the directory.
    fn install(
        &self,
        directory: &Path,
        file: &str,
        target: &Path,
        sandbox: Option<&PipSandbox>,
        wanted: impl Fn() -> bool,
    ) -> Result<(), String> {
        let path = target.join(PIP_LOG);
        let cannot_write = |error: io::Error| format!("cannot write '{}': {error}", path.display());
        let mut output = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .map_err(cannot_write)?;
        let temporary = target.join(PIP_TEMPORARY);
        let mut command = match sandbox {
            Some(sandbox) => {
                fs::create_dir(&temporary)
                    .map_err(|error| format!("cannot create '{}': {error}", temporary.display()))?;
                let mut permissions = sandbox.permissions.clone();
                permissions.read.push(directory.to_owned());
                permissions.write.push(target.to_owned());
                let mut command = Command::new(&sandbox.worker);
                command.args(permissions.arguments(self.python.as_os_str()));
                command
            }
            None => Command::new(&self.python),
        };
        complete(&mut command, file, target);
        if sandbox.is_some() {
            command.env("TMPDIR", &temporary);
        }
        if let Some(user) = &self.user {
            // The target needs no other rights.
            let granted = if directory == target { Ok(()) } else { user.grant_read(directory) };
            let given = granted.and_then(|()| user.give(target));
            given.map_err(|error| {
                format!("the user '{}' cannot be given its files: {error}", user.name())
            })?;
            user.run(&mut command);
        }
        let errors = output.try_clone().map_err(cannot_write)?;
        command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let mut child = command
            .spawn()
            .map_err(|error| format!("cannot start '{}': {error}", self.python.display()))?;
        let status = wait_while(&mut child, PIP_TIMEOUT, wanted)
            .ok_or_else(|| format!("pip did not end within {} s", PIP_TIMEOUT.as_secs()))?;
        let mut end = Vec::new();
        // Read through the descriptor: code of a package may have put another file at the path.
        let _ = end_of(&mut output).read_to_end(&mut end);
        // The end may begin within a character.
        let text = String::from_utf8_lossy(&end);
        let _ = fs::remove_file(&path);
        if sandbox.is_some() {
            // The program has ended, and what it left there is not used.
            let _ = remove_tree(&temporary);
        }
        if status.success() {
            return Ok(());
        }
        // A failure of pip itself ends with the error of Python.
        let is_error = |line: &&str| line.starts_with("ERROR") && *line != "ERROR: Exception:";
        let error = text.lines().rfind(is_error).or_else(|| text.lines().last());
        Err(format!("{status}: {}", error.unwrap_or_default()))
    }
}

/// Adds pip's arguments to a command that starts Python, and removes variables that neither a model
/// nor pip gets: packages run code while they are installed.
fn complete(command: &mut Command, file: &str, target: &Path) {
    command
        .args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--target"])
        .arg(target);
    command.args(["-r", file]);
    for (name, _) in std::env::vars_os() {
        if !name.to_str().is_some_and(is_for_pip) {
            command.env_remove(name);
        }
    }
}
