//! Backends in files: a shared library with the C interface of `pharos_backend.h`, an executable
//! built with the library `pharos-worker`, a `model.py` that runs models of that backend, or a shared
//! library with Triton's interface, in this order. As in Triton, libraries are searched in the
//! directories of the version, the model and the backend, in this order. The others are searched only
//! in the directories of backends, because a `model.py` in a version's directory belongs to the model.
//! The directory of the operator comes before the directory of the installation.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pharos::model::backend_advice;
use pharos::model::text_files::TEXT_BACKEND;

use super::{ORDINARY, Program};

/// The backend that runs ONNX models without the library of ONNX Runtime.
pub(crate) const TRACT: &str = "tract";

/// A backend that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A shared library with the interface of `pharos_backend.h`, for the ordinary worker.
    Library(PathBuf),
    /// A shared library with Triton's interface, for the ordinary worker.
    Triton(PathBuf),
    /// An executable instead of the ordinary worker.
    Worker(PathBuf),
    /// Python code for the Python worker.
    Python(PathBuf),
}

impl Found {
    pub(super) fn path(&self) -> &Path {
        let (Self::Library(path) | Self::Triton(path) | Self::Worker(path) | Self::Python(path)) =
            self;
        path
    }
}

/// Finds the backend of this name in `places` and then in the backend directory.
///
/// # Errors
/// The backend does not exist; the text lists the available ones.
pub(crate) fn find(
    program: &Program,
    model: &str,
    name: &str,
    places: &[&Path],
) -> Result<Found, String> {
    let own = directories(program, model, name)?;
    let of_backend: Vec<&Path> = own.iter().map(PathBuf::as_path).collect();
    // A model that only names one of these runs no code from its directory.
    let places = if name == TRACT || name == TEXT_BACKEND { &[] } else { places };
    let all: Vec<&Path> = places.iter().chain(&of_backend).copied().collect();
    if let Some(path) = first_file(&all, &format!("libpharos_{name}.so")) {
        return Ok(Found::Library(path));
    }
    if let Some(path) = first_file(&of_backend, &format!("pharos-worker-{name}")) {
        return Ok(Found::Worker(path));
    }
    if let Some(path) = first_file(&of_backend, "model.py") {
        return Ok(Found::Python(path));
    }
    if let Some(path) = first_file(&all, &format!("libtriton_{name}.so")) {
        return Ok(Found::Triton(path));
    }
    Err(missing(program, model, name))
}

/// Finds the library that `runtime` of a configuration names in place of the backend, for example
/// Triton's Python backend instead of this server's.
///
/// # Errors
/// The backend's name or the library's is not a plain name, or the library does not exist.
pub(crate) fn named_library(
    program: &Program,
    model: &str,
    name: &str,
    library: &str,
    places: &[&Path],
) -> Result<Found, String> {
    let own = directories(program, model, name)?;
    let all: Vec<&Path> = places.iter().copied().chain(own.iter().map(PathBuf::as_path)).collect();
    if is_plain(library)
        && let Some(path) = first_file(&all, library)
    {
        return Ok(Found::Triton(path));
    }
    let looked: Vec<String> =
        all.iter().map(|directory| format!("'{}'", directory.display())).collect();
    Err(format!(
        "runtime '{}' of model '{model}' does not exist in {}",
        library.escape_debug(),
        looked.join(", ")
    ))
}

/// Returns the directories of a backend. The directory of the operator comes first.
///
/// # Errors
/// The backend's name is not a plain name.
fn directories(program: &Program, model: &str, name: &str) -> Result<Vec<PathBuf>, String> {
    if !is_plain(name) {
        return Err(format!(
            "backend '{}' of model '{model}' is not a valid backend name: allowed are letters, \
             digits, '_', '-' and '.'",
            name.escape_debug()
        ));
    }
    Ok(program.backends.iter().map(|directory| directory.join(name)).collect())
}

/// Whether a name cannot lead out of a directory.
fn is_plain(name: &str) -> bool {
    !name.is_empty()
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

/// Returns the absolute path of the first file of this name in the directories.
fn first_file(directories: &[&Path], name: &str) -> Option<PathBuf> {
    directories
        .iter()
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
        .map(absolute)
}

/// Returns the error for a backend that does not exist.
fn missing(program: &Program, model: &str, name: &str) -> String {
    let wanted =
        format!("libpharos_{name}.so, pharos-worker-{name}, model.py or libtriton_{name}.so");
    let places = program.backends.iter().map(|directory| directory.join(name));
    let places: Vec<String> = places.map(|place| format!("'{}'", place.display())).collect();
    let looked = match places.as_slice() {
        [] => "no backend directory is set (--backend-directory)".to_owned(),
        [place] => format!("{place} does not hold {wanted}"),
        places => format!("neither {} holds {wanted}", places.join(" nor ")),
    };
    let advice = match backend_advice(name) {
        "" => String::new(),
        advice => format!("; {advice}"),
    };
    format!(
        "backend '{name}' of model '{model}' is not available here; available: {}; \
         {looked}{advice}",
        available(program).join(", ")
    )
}

/// Returns the names of all available backends.
pub(crate) fn available(program: &Program) -> Vec<String> {
    let known = ORDINARY.into_iter().chain(program.python_backends());
    let mut names: Vec<String> = known.map(str::to_owned).collect();
    let entries = program.backends.iter().filter_map(|directory| fs::read_dir(directory).ok());
    let more: BTreeSet<String> =
        entries.flatten().filter_map(|entry| holds_a_backend(&entry.ok()?.path())).collect();
    names.extend(more);
    names
}

/// Returns the name of the backend in a subdirectory of the backend directory, if it contains one.
fn holds_a_backend(directory: &Path) -> Option<String> {
    let name = directory.file_name()?.to_str()?;
    let files = [
        format!("libpharos_{name}.so"),
        format!("pharos-worker-{name}"),
        "model.py".to_owned(),
        format!("libtriton_{name}.so"),
    ];
    files.iter().any(|file| directory.join(file).is_file()).then(|| name.to_owned())
}

/// Returns an absolute path, without resolving links.
pub(super) fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}
