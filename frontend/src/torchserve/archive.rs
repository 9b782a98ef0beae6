//! Archives of models: `.mar` (zip), `.tar.gz`, and directories, from the model store or a URL. Whoever made an archive is
//! not trusted: nothing is written outside its own directory, nothing beyond bounds, and no link is followed.

mod fetch;
mod manifest;
mod pieces;
mod requirements;
mod unpack;

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use percent_encoding::percent_decode_str;
use serde_json::Value;

use super::{ModelYaml, Refused, Settings};

/// The files of an archive. What was unpacked goes with the last owner; a directory of the user stays.
#[derive(Debug)]
pub struct Unpacked {
    root: PathBuf,
    /// What is removed at the end.
    own: Option<PathBuf>,
}

impl Unpacked {
    /// Whether it was made for the archive.
    fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The directory that has the model's files.
    pub fn path(&self) -> &Path {
        &self.root
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        if let Some(own) = &self.own
            && let Err(error) = fs::remove_dir_all(own)
        {
            tracing::warn!("'{}' cannot be removed: {error}", own.display());
        }
    }
}

/// An archive that can be served.
#[derive(Clone, Debug)]
pub struct Archive {
    /// As the manifest says, else the file's name.
    pub model_name: String,
    /// As the manifest says, else `1.0`.
    pub version: String,
    /// As it was asked for.
    pub url: String,
    /// As the manifest says.
    pub handler: Option<String>,
    /// `python`, `python3`.
    pub runtime: String,
    /// The whole manifest; that of an archive without one has what is known.
    pub manifest: Value,
    /// The files.
    pub directory: Arc<Unpacked>,
    /// What `model-config.yaml` says.
    pub yaml: ModelYaml,
}

/// Opens the archive that `url` names: a file or a directory of the model store, `file://`, `http://` or `https://`, or the
/// path of a directory. Blocks, for as long as it takes to fetch and unpack it; within a runtime it must be called where
/// blocking is allowed.
///
/// # Errors
/// It is not there, not allowed, or nothing that can be served.
pub fn open(settings: &Settings, url: &str) -> Result<Archive, Refused> {
    let files = files(settings, url)?;
    let archive = manifest::read(url, files)?;
    requirements::install(settings, &archive)?;
    tracing::info!(model = archive.model_name, version = archive.version, "archive '{url}' opened");
    Ok(archive)
}

/// The files that a URL names.
fn files(settings: &Settings, url: &str) -> Result<Unpacked, Refused> {
    if url.is_empty() {
        return Err(Refused::bad_request("Parameter url is required."));
    }
    if Path::new(url).components().any(|part| part == Component::ParentDir) {
        return Err(Refused::not_found(format!("Relative path is not allowed in url: {url}")));
    }
    let lower = url.to_ascii_lowercase();
    if lower.starts_with("http://") || lower.starts_with("https://") {
        allow(settings, url, url)?;
        let fetched = new_directory(settings)?;
        let file = fetched.path().join("fetched");
        fetch::fetch(url, &file, |place| allow(settings, url, place))?;
        return unpacked(settings, url, &file);
    }
    if lower.starts_with("file://") {
        allow(settings, url, url)?;
        let path = url.get("file://".len()..).unwrap_or_default();
        let path = percent_decode_str(path.strip_prefix("localhost").unwrap_or(path)).decode_utf8_lossy();
        let missing = Refused::download(format!("Failed to download archive from: {url}"));
        return at(settings, url, Path::new(&*path), missing);
    }
    let path = Path::new(url);
    if path.is_absolute() {
        allow(settings, url, &format!("file://{url}"))?;
        return at(settings, url, path, Refused::not_found(format!("Model not found at: {url}")));
    }
    let Some(store) = &settings.model_store else {
        return Err(Refused::not_found("Model store has not been configured."));
    };
    at(settings, url, &store.join(path), Refused::not_found(format!("Model not found at: {url}")))
}

/// Refuses what no pattern of `allowed_urls` matches.
fn allow(settings: &Settings, url: &str, whole: &str) -> Result<(), Refused> {
    if settings.allowed_urls.iter().any(|pattern| pattern.is_match(whole)) {
        return Ok(());
    }
    Err(Refused::invalid_url(format!("Given URL {url} does not match any allowed URL(s)")))
}

/// A directory or a file of this machine.
fn at(settings: &Settings, url: &str, path: &Path, missing: Refused) -> Result<Unpacked, Refused> {
    if path.is_dir() {
        return Ok(Unpacked { root: within(path), own: None });
    }
    if !path.is_file() {
        return Err(missing);
    }
    unpacked(settings, url, path)
}

fn unpacked(settings: &Settings, url: &str, file: &Path) -> Result<Unpacked, Refused> {
    let mut directory = new_directory(settings)?;
    unpack::unpack(file, directory.path(), &unpack::Limits::of(file))
        .map_err(|why| Refused::invalid_model(format!("The archive '{url}' cannot be used: {why}")))?;
    directory.root = within(&directory.root);
    Ok(directory)
}

/// The directory, or what is in it if that is one directory and no manifest.
fn within(directory: &Path) -> PathBuf {
    let mut entries = fs::read_dir(directory).into_iter().flatten().flatten();
    match (entries.next(), entries.next()) {
        (Some(only), None) if only.file_name() != manifest::DIRECTORY && only.path().is_dir() => only.path(),
        _ => directory.to_owned(),
    }
}

/// A directory of its own in the server's workplace.
fn new_directory(settings: &Settings) -> Result<Unpacked, Refused> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = settings.workplace.join("models").join(number.to_string());
    fs::create_dir_all(&path)
        .map_err(|error| Refused::internal(format!("The directory '{}' cannot be made: {error}", path.display())))?;
    Ok(Unpacked { root: path.clone(), own: Some(path) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
