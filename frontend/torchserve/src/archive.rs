//! Model archives: `.mar` (zip), `.tar.gz` and directories, from the model store or a URL. Archives
//! are untrusted input: unpacking never writes outside the archive's directory, never exceeds the
//! limits, and never follows links.

mod fetch;
mod keep;
mod manifest;
mod requirements;
pub(crate) mod unpack;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use percent_encoding::percent_decode_str;
use pharos::model::CodeOrigin;
use serde_json::Value;
use tokio::sync::watch;

use super::{ErrorResponse, ModelYaml, RegistrationParameters, Settings};
use pharos_os::blocking;
use pharos_os::removal::remove_tree;

pub use keep::StoredFile;

/// The files of an archive. Dropping the last owner removes unpacked files; a directory of the user
/// is never removed.
#[derive(Debug)]
pub struct Unpacked {
    root: PathBuf,
    /// The unpacked directory, which is removed on drop; `None` for a directory of the user.
    own: Option<PathBuf>,
}

impl Unpacked {
    /// Whether the files were unpacked by this server.
    pub(super) fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The directory with the model's files.
    pub fn path(&self) -> &Path {
        &self.root
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        let Some(own) = self.own.take() else { return };
        // A handler can leave many files.
        blocking::run_detached(move || {
            if let Err(error) = remove_tree(&own)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!("cannot remove '{}': {error}", own.display());
            }
        });
    }
}

/// An opened archive.
#[derive(Clone, Debug)]
pub struct Archive {
    /// The name in the manifest, else the name of the archive file.
    pub model_name: String,
    /// The version in the manifest, else `1.0`.
    pub version: String,
    /// The URL as requested.
    pub url: String,
    /// The handler in the manifest.
    pub handler: Option<String>,
    /// `python` or `python3`.
    pub runtime: String,
    /// The whole manifest. For an archive without a manifest: an object with the runtime, name and
    /// version.
    pub manifest: Value,
    /// The files.
    pub directory: Arc<Unpacked>,
    /// The packages of `requirements.txt`, if they are not installed beside the files.
    pub packages: Option<Arc<Unpacked>>,
    /// The name of the file in the model store that the URL was resolved to.
    stored: Option<String>,
    /// The file in the model store, if it was downloaded for this archive.
    pub kept: Option<StoredFile>,
    /// The contents of `model-config.yaml`.
    pub yaml: ModelYaml,
    /// The source of its code.
    pub origin: CodeOrigin,
}

impl Archive {
    /// Returns the archive's name in snapshots: the file in the model store, else the URL.
    pub fn mar_name(&self) -> String {
        self.stored.clone().unwrap_or_else(|| self.url.clone())
    }
}

/// Opens the archive at `url`: a file or a directory in the model store, a `file://`, `http://` or
/// `https://` URL, or a path. As in TorchServe, a file of the model store with the name of the
/// path's last part comes first.
///
/// Keeps downloaded archives in the model store. Blocks during download and unpacking; inside a
/// runtime, call it where blocking is allowed. Downloads and installations end when `exiting`
/// becomes true.
///
/// # Errors
/// The archive is missing, not allowed or invalid, or the server exits. In these cases a downloaded
/// file is removed again.
pub fn open(
    settings: &Settings,
    url: &str,
    asked: &RegistrationParameters,
    exiting: &watch::Receiver<bool>,
) -> Result<Archive, ErrorResponse> {
    let found = find(settings, url, asked.at_start, exiting)?;
    let opened = open_found(settings, url, asked, &found, exiting);
    if let (Err(_), Some(kept)) = (&opened, &found.kept) {
        kept.remove();
    }
    opened
}

fn open_found(
    settings: &Settings,
    url: &str,
    asked: &RegistrationParameters,
    found: &Found,
    exiting: &watch::Receiver<bool>,
) -> Result<Archive, ErrorResponse> {
    let origin = origin(settings, found, asked.at_start);
    let files = match found.path.is_dir() {
        true => Unpacked { root: within(&found.path), own: None },
        false => unpacked(settings, url, found, origin)?,
    };
    let named = asked.model_name.is_some() || asked.at_start;
    let mut archive = manifest::read(url, files, named)?;
    archive.stored = found.name.clone();
    archive.kept = found.kept.clone();
    archive.origin = origin;
    archive.packages = requirements::install(settings, &archive, exiting)?.map(Arc::new);
    tracing::info!(model = archive.model_name, version = archive.version, "opened archive '{url}'");
    Ok(archive)
}

/// Returns the source of an archive's code. Files of the model store are the operator's, except
/// downloads for a request. Archives that the configuration of the server names are the operator's
/// too, but not archives of a snapshot: requests may have registered them.
fn origin(settings: &Settings, found: &Found, at_start: bool) -> CodeOrigin {
    let store = settings.model_store.as_ref().and_then(|store| store.canonicalize().ok());
    let path = found.path.canonicalize().ok();
    let is_inside = path.zip(store).is_some_and(|(path, store)| path.starts_with(store));
    if keep::came_by_request(&found.path) {
        CodeOrigin::Request
    } else if is_inside {
        CodeOrigin::Operator
    } else {
        of_registration(settings, at_start)
    }
}

/// Returns the source of code outside of the model store.
fn of_registration(settings: &Settings, at_start: bool) -> CodeOrigin {
    if at_start && settings.snapshot.is_none() { CodeOrigin::Operator } else { CodeOrigin::Request }
}

/// The location of an archive on this machine.
struct Found {
    path: PathBuf,
    /// The name of the file in the model store, if it differs from the URL.
    name: Option<String>,
    /// The file in the model store, if this call downloaded it.
    kept: Option<StoredFile>,
    /// A temporary directory with the download, which is removed after unpacking.
    fetched: Option<Unpacked>,
}

impl Found {
    fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), name: None, kept: None, fetched: None }
    }

    /// Returns whether this server has written the file.
    fn is_downloaded(&self) -> bool {
        self.fetched.is_some() || keep::came_by_request(&self.path)
    }
}

/// Finds the archive of a URL on this machine, or downloads it.
fn find(
    settings: &Settings,
    url: &str,
    at_start: bool,
    exiting: &watch::Receiver<bool>,
) -> Result<Found, ErrorResponse> {
    if url.is_empty() {
        return Err(ErrorResponse::not_found("empty url"));
    }
    if names_parent(url) {
        return Err(relative(url));
    }
    if is_remote(url) {
        allow(settings, url, url)?;
        return fetched(settings, url, at_start, |file| {
            fetch::fetch(url, file, exiting, |place| allow(settings, url, place))
        });
    }
    if let Some(path) = file_url(url) {
        allow(settings, url, url)?;
        // The patterns were compared with the path as written: an encoded slash would add a
        // directory that no pattern sees.
        if url.to_ascii_lowercase().contains("%2f") {
            return Err(relative(url));
        }
        let failed = |why: &str| {
            ErrorResponse::download(format!("Failed to download archive from: {url}{why}"))
        };
        let inside = path.parent().and_then(|above| above.canonicalize().ok())
            == settings.model_store.as_ref().and_then(|store| store.canonicalize().ok());
        if path.is_dir() {
            return Ok(Found::at(path));
        }
        if path.is_file() && inside {
            return Ok(Found { name: Some(keep::name_of(url)?), ..Found::at(path) });
        }
        // The end of a device or a pipe may never come.
        if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(failed(": it is not a regular file"));
        }
        let mut source = open_source(settings, &path, of_registration(settings, at_start))
            .map_err(|_| failed(""))?;
        return fetched(settings, url, at_start, |file| {
            io::copy(&mut source, file).map(drop).map_err(|error| failed(&format!(": {error}")))
        });
    }
    let path = Path::new(url);
    let stored = in_store(settings, url);
    if let Some((name, stored)) = stored.as_ref().filter(|(_, stored)| stored.is_file()) {
        let name = (name != url).then(|| name.clone());
        return Ok(Found { name, ..Found::at(stored) });
    }
    if path.is_absolute() {
        // Checked first: an error must not tell whether a path that is not allowed exists.
        allow(settings, url, &format!("file://{url}"))?;
        if path.exists() {
            return Ok(Found::at(path));
        }
    }
    let Some(store) = &settings.model_store else {
        return Err(ErrorResponse::not_found("Model store has not been configured."));
    };
    match stored {
        _ if path.is_relative() && store.join(path).exists() => Ok(Found::at(store.join(path))),
        Some((name, stored)) if stored.exists() => {
            Ok(Found { name: Some(name), ..Found::at(stored) })
        }
        _ => Err(ErrorResponse::not_found(format!("Model not found at: {url}"))),
    }
}

/// Returns the last part of a path, which is TorchServe's name of the file, and its place in the
/// model store; `None` for a URL.
fn in_store(settings: &Settings, url: &str) -> Option<(String, PathBuf)> {
    let path = Some(url).filter(|url| !url.contains("://"))?;
    let name = path.rsplit(['/', '\\']).next().filter(|name| !name.is_empty() && *name != ".")?;
    Some((name.to_owned(), settings.model_store.as_ref()?.join(name)))
}

/// Returns whether the archive is the operator's: a file or a directory in the model store, or
/// below it. Blocks.
pub(super) fn is_in_store(settings: &Settings, url: &str) -> bool {
    let (Some(store), false) = (&settings.model_store, is_remote(url)) else { return false };
    let path = file_url(url).unwrap_or_else(|| store.join(url));
    // The entry itself may be a link of the operator.
    let above = path.parent().and_then(|above| above.canonicalize().ok());
    let store = store.canonicalize().ok();
    !names_parent(url) && above.zip(store).is_some_and(|(above, store)| above.starts_with(store))
}

/// Returns whether a part of the URL is `..`, as written or percent-encoded: both are equivalent
/// (RFC 3986, 6.2.2.2). Such a URL leads out of a directory that a pattern of `allowed_urls` names.
fn names_parent(url: &str) -> bool {
    let has_parent = |text: &str| text.split(['/', '\\']).any(|part| part == "..");
    has_parent(url) || has_parent(&percent_decode_str(url).decode_utf8_lossy())
}

fn relative(url: &str) -> ErrorResponse {
    ErrorResponse::not_found(format!("Relative path is not allowed in url: {url}"))
}

fn is_remote(url: &str) -> bool {
    let lower = url.to_ascii_lowercase();
    lower.starts_with("http://") || lower.starts_with("https://")
}

fn file_url(url: &str) -> Option<PathBuf> {
    let scheme =
        url.get(.."file://".len()).filter(|scheme| scheme.eq_ignore_ascii_case("file://"))?;
    let rest = url.get(scheme.len()..).unwrap_or_default();
    let path =
        percent_decode_str(rest.strip_prefix("localhost").unwrap_or(rest)).decode_utf8_lossy();
    Some(PathBuf::from(&*path))
}

/// Returns the path of an archive on this machine, whether or not it exists; `None` for an archive
/// that is downloaded.
pub(super) fn local_path(settings: &Settings, url: &str) -> Option<PathBuf> {
    if is_remote(url) {
        return None;
    }
    file_url(url).or_else(|| settings.model_store.as_ref().map(|store| store.join(url)))
}

/// Writes the output of `fetch` to a file of the model store, or to a temporary file if the store
/// is read-only. As in TorchServe, an existing file of the same name is an error; at server start,
/// the existing file is used instead.
fn fetched(
    settings: &Settings,
    url: &str,
    at_start: bool,
    fetch: impl FnOnce(&mut File) -> Result<(), ErrorResponse>,
) -> Result<Found, ErrorResponse> {
    let name = keep::name_of(url)?;
    let not_saved = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            ErrorResponse::internal(format!("Model file already exists {name}"))
        }
        _ => ErrorResponse::internal(format!("Failed to save model: {url}: {error}")),
    };
    let Some(store) = &settings.model_store else {
        return Err(ErrorResponse::not_found("Model store has not been configured."));
    };
    let known = store.join(&name);
    if known.exists() {
        if !at_start {
            return Err(not_saved(io::ErrorKind::AlreadyExists.into()));
        }
        tracing::info!("skipped download of '{url}': the model store has '{name}'");
        return Ok(Found { name: Some(name), ..Found::at(known) });
    }
    match keep::UnfinishedFile::new(store, &name, of_registration(settings, at_start)) {
        Ok(mut part) => {
            fetch(part.file())?;
            let kept = part.finish().map_err(not_saved)?;
            Ok(Found { name: Some(name), kept: Some(kept), ..Found::at(known) })
        }
        // The last kind means a file system without extended attributes.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::ReadOnlyFilesystem
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::Unsupported
            ) =>
        {
            let shown = store.display();
            tracing::warn!(
                "cannot write to the model store '{shown}': {error}; '{url}' is not kept there \
                 and is downloaded again at every start"
            );
            let place = new_directory(settings)?;
            let path = place.path().join("fetched");
            let made = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
            fetch(&mut made.map_err(not_saved)?)?;
            Ok(Found { fetched: Some(place), ..Found::at(path) })
        }
        Err(error) => Err(not_saved(error)),
    }
}

/// Checks a place that `url` names or redirects to.
///
/// # Errors
/// The place has a parent directory in its path, or matches no pattern of `allowed_urls`.
fn allow(settings: &Settings, url: &str, place: &str) -> Result<(), ErrorResponse> {
    if names_parent(place) {
        return Err(relative(url));
    }
    if settings.allowed_urls.iter().any(|pattern| pattern.is_match(place)) {
        return Ok(());
    }
    Err(ErrorResponse::invalid_url(format!("Given URL {url} does not match any allowed URL(s)")))
}

/// Opens a file that a registration names. A file that a request has chosen is opened with the
/// rights of the user whose processes will get its content.
fn open_source(settings: &Settings, path: &Path, origin: CodeOrigin) -> io::Result<File> {
    match settings.pip.user.as_ref().filter(|_| origin == CodeOrigin::Request) {
        Some(user) => user.open(path),
        None => File::open(path),
    }
}

fn unpacked(
    settings: &Settings,
    url: &str,
    found: &Found,
    origin: CodeOrigin,
) -> Result<Unpacked, ErrorResponse> {
    let refused = |why: String| {
        ErrorResponse::invalid_model(format!("The archive '{url}' cannot be used: {why}"))
    };
    // A download is the server's own file.
    let chosen = if found.is_downloaded() { CodeOrigin::Operator } else { origin };
    let path = &found.path;
    if !fs::metadata(path).is_ok_and(|file| file.is_file()) {
        return Err(refused(format!(
            "'{}' is neither a regular file nor a directory",
            path.display()
        )));
    }
    let file = open_source(settings, path, chosen)
        .map_err(|error| refused(format!("cannot read the archive: {error}")))?;
    let mut directory = new_directory(settings)?;
    unpack::unpack(&file, path, directory.path(), &unpack::Limits::of(&file)).map_err(refused)?;
    directory.root = within(&directory.root);
    Ok(directory)
}

/// Returns the directory itself, or its only entry if that is a directory other than the
/// manifest's.
fn within(directory: &Path) -> PathBuf {
    let mut entries = fs::read_dir(directory).into_iter().flatten().flatten();
    match (entries.next(), entries.next()) {
        (Some(only), None) if only.file_name() != manifest::DIRECTORY && only.path().is_dir() => {
            only.path()
        }
        _ => directory.to_owned(),
    }
}

/// Creates a new directory below the server's work directory.
fn new_directory(settings: &Settings) -> Result<Unpacked, ErrorResponse> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = settings.work_directory.join("models").join(number.to_string());
    fs::create_dir_all(&path).map_err(|error| {
        ErrorResponse::internal(format!(
            "Cannot create the directory '{}': {error}",
            path.display()
        ))
    })?;
    Ok(Unpacked { root: path.clone(), own: Some(path) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
