//! Installs what an archive's `requirements.txt` lists, beside its files, where its handler finds it first
//! (`install_py_dep_per_model=true`).

use std::fs::{self, File};
use std::path::{Component, Path};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::Archive;
use crate::clock;
use crate::torchserve::{Refused, Settings};

/// How long pip may take.
const PATIENCE: Duration = Duration::from_mins(10);

/// What pip says, in the directory of the archive.
const SAID: &str = ".pip.log";

/// Installs requirements, if the settings say so and the archive has some.
///
/// # Errors
/// pip fails; the text has its last line.
pub(super) fn install(settings: &Settings, archive: &Archive) -> Result<(), Refused> {
    let named = archive.manifest.pointer("/model/requirementsFile").and_then(|file| file.as_str());
    let Some(file) = named.filter(|_| settings.install_requirements) else { return Ok(()) };
    let failed = |why: &str| {
        Refused::invalid_model(format!(
            "Custom pip package installation failed for model {}: {why}",
            archive.model_name
        ))
    };
    if !Path::new(file).components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err(failed(&format!("its requirementsFile '{file}' is outside the archive")));
    }
    let directory = archive.directory.path();
    if !archive.directory.is_own() {
        let place = directory.display();
        tracing::warn!(
            model = archive.model_name,
            "'{file}' is not installed: '{place}' is not this server's to write to"
        );
        return Ok(());
    }
    tracing::info!(model = archive.model_name, "installing what '{file}' lists");
    pip(&settings.python, directory, file).map_err(|why| failed(&why))
}

fn pip(python: &Path, directory: &Path, file: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("'{}' cannot be started: {error}", python.display());
    let path = directory.join(SAID);
    let said = File::create(&path).map_err(|error| format!("'{}' cannot be written: {error}", path.display()))?;
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--target", ".", "-r", file]);
    command.current_dir(directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
    let mut child = command.spawn().map_err(failed)?;
    let begun = clock::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if clock::now() - begun < PATIENCE => std::thread::sleep(Duration::from_millis(50)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("pip did not end within {} s", PATIENCE.as_secs()));
            }
        }
    };
    let said = fs::read_to_string(&path).unwrap_or_default();
    let _ = fs::remove_file(&path);
    if status.success() {
        return Ok(());
    }
    let error = said.lines().rfind(|line| line.starts_with("ERROR")).or_else(|| said.lines().last());
    Err(format!("{status}: {}", error.unwrap_or_default()))
}
