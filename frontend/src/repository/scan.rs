//! What lies in the repositories' directories: names, versions, configurations. Reads files, decides nothing.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pharos::repository::parse_version_directory;

/// A model's directory.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// Another repository has a model of this name.
    pub(super) duplicate: bool,
}

/// What is in a model's directory.
#[derive(Debug, Default)]
pub(super) struct Contents {
    /// The text of `config.pbtxt`, if there is one.
    pub(super) config: Option<String>,
    /// Versions with their directories, ascending.
    pub(super) versions: BTreeMap<u64, PathBuf>,
    /// Names of the files in the version directories.
    pub(super) files: Vec<String>,
}

/// The models of all repositories, by name.
///
/// # Errors
/// A repository cannot be read; the text names it.
pub(super) fn models(repositories: &[PathBuf]) -> io::Result<Vec<Found>> {
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    for repository in repositories {
        for (name, path) in directories(repository).map_err(|error| unreadable(repository, &error))? {
            let model = Found { name: name.clone(), path, duplicate: false };
            found.entry(name).and_modify(|first| first.duplicate = true).or_insert(model);
        }
    }
    Ok(found.into_values().collect())
}

/// What is in the directory of a model.
///
/// # Errors
/// It cannot be read.
pub(super) fn contents(path: &Path) -> io::Result<Contents> {
    let config_path = path.join("config.pbtxt");
    let config = match fs::read_to_string(&config_path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(unreadable(&config_path, &error)),
    };
    let mut contents = Contents { config, ..Contents::default() };
    for (name, directory) in directories(path)? {
        let Some(version) = parse_version_directory(&name) else { continue };
        for entry in fs::read_dir(&directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if !contents.files.contains(&name) {
                contents.files.push(name);
            }
        }
        contents.versions.insert(version, directory);
    }
    Ok(contents)
}

/// The directories in a directory, by name; hidden ones are passed over.
fn directories(path: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if path.is_dir() && !name.is_empty() && !name.starts_with('.') {
            found.push((name, path));
        }
    }
    found.sort();
    Ok(found)
}

fn unreadable(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{}' cannot be read: {error}", path.display()))
}
