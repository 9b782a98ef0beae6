//! Archives of models: `.mar` (zip), `.tar.gz`, and directories, from the model store or a URL. Whoever made an archive is
//! not trusted: nothing is written outside its own directory, nothing beyond bounds, and no link is followed.

mod fetch;
mod keep;
mod manifest;
mod pieces;
mod requirements;
mod unpack;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use percent_encoding::percent_decode_str;
use serde_json::Value;

use super::{ModelYaml, Refused, RegistrationParameters, Settings};

pub use keep::Kept;

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
    /// What `requirements.txt` lists, where it is not installed beside the files.
    pub packages: Option<Arc<Unpacked>>,
    /// The name of the file of the model store that a URL led to.
    stored: Option<String>,
    /// The same file, if it was fetched for this archive.
    pub kept: Option<Kept>,
    /// What `model-config.yaml` says.
    pub yaml: ModelYaml,
}

impl Archive {
    /// What a snapshot calls it: the file of the model store, else the URL.
    pub fn mar_name(&self) -> String {
        self.stored.clone().unwrap_or_else(|| self.url.clone())
    }
}

/// Opens the archive that `url` names: a file or a directory of the model store, `file://`, `http://` or `https://`, or the
/// path of a directory. What a URL leads to is kept in the model store. Blocks, for as long as it takes to fetch and unpack
/// it; within a runtime it must be called where blocking is allowed.
///
/// # Errors
/// It is not there, not allowed, or nothing that can be served; then nothing of it is kept.
pub fn open(settings: &Settings, url: &str, asked: &RegistrationParameters) -> Result<Archive, Refused> {
    let found = find(settings, url, asked.at_start)?;
    let opened = opened(settings, url, asked, &found);
    if let (Err(_), Some(kept)) = (&opened, &found.kept) {
        kept.remove();
    }
    opened
}

fn opened(settings: &Settings, url: &str, asked: &RegistrationParameters, found: &Found) -> Result<Archive, Refused> {
    let files = match found.path.is_dir() {
        true => Unpacked { root: within(&found.path), own: None },
        false => unpacked(settings, url, &found.path)?,
    };
    let named = asked.model_name.is_some() || asked.at_start;
    let mut archive = manifest::read(url, files, named)?;
    archive.packages = requirements::install(settings, &archive)?.map(Arc::new);
    (archive.stored, archive.kept) = (found.name.clone(), found.kept.clone());
    tracing::info!(model = archive.model_name, version = archive.version, "archive '{url}' opened");
    Ok(archive)
}

/// Where the archive of a URL is on this machine.
struct Found {
    path: PathBuf,
    /// The name of the file of the model store, where the URL is another.
    name: Option<String>,
    /// It was fetched into the model store.
    kept: Option<Kept>,
    /// It was fetched to this place, which goes once it is unpacked.
    _fetched: Option<Unpacked>,
}

impl Found {
    fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), name: None, kept: None, _fetched: None }
    }
}

/// Finds the archive that a URL names, or fetches it.
fn find(settings: &Settings, url: &str, at_start: bool) -> Result<Found, Refused> {
    if url.is_empty() {
        return Err(Refused::not_found("empty url"));
    }
    if Path::new(url).components().any(|part| part == Component::ParentDir) {
        return Err(Refused::not_found(format!("Relative path is not allowed in url: {url}")));
    }
    if is_remote(url) {
        allow(settings, url, url)?;
        return fetched(settings, url, at_start, |file| fetch::fetch(url, file, |place| allow(settings, url, place)));
    }
    let missing = || Refused::not_found(format!("Model not found at: {url}"));
    if let Some(path) = file_url(url) {
        allow(settings, url, url)?;
        let failed = |why: &str| Refused::download(format!("Failed to download archive from: {url}{why}"));
        let inside = path.parent().and_then(|above| above.canonicalize().ok())
            == settings.model_store.as_ref().and_then(|store| store.canonicalize().ok());
        if path.is_dir() {
            return Ok(Found::at(path));
        }
        if path.is_file() && inside {
            return Ok(Found { name: Some(keep::name_of(url)?), ..Found::at(path) });
        }
        let mut source = File::open(&path).map_err(|_| failed(""))?;
        return fetched(settings, url, at_start, |file| {
            io::copy(&mut source, file).map(drop).map_err(|error| failed(&format!(": {error}")))
        });
    }
    let path = Path::new(url);
    if path.is_absolute() {
        allow(settings, url, &format!("file://{url}"))?;
        return if path.exists() { Ok(Found::at(path)) } else { Err(missing()) };
    }
    let Some(store) = &settings.model_store else {
        return Err(Refused::not_found("Model store has not been configured."));
    };
    let path = store.join(path);
    if path.exists() { Ok(Found::at(path)) } else { Err(missing()) }
}

fn is_remote(url: &str) -> bool {
    let lower = url.to_ascii_lowercase();
    lower.starts_with("http://") || lower.starts_with("https://")
}

/// The path of a `file://` URL.
fn file_url(url: &str) -> Option<PathBuf> {
    let scheme = url.get(.."file://".len()).filter(|scheme| scheme.eq_ignore_ascii_case("file://"))?;
    let path = url.get(scheme.len()..).unwrap_or_default();
    let path = percent_decode_str(path.strip_prefix("localhost").unwrap_or(path)).decode_utf8_lossy();
    Some(PathBuf::from(&*path))
}

/// Where on this machine an archive is to be; `None` of one that is fetched over the network.
pub(super) fn local_path(settings: &Settings, url: &str) -> Option<PathBuf> {
    if is_remote(url) {
        return None;
    }
    file_url(url).or_else(|| settings.model_store.as_ref().map(|store| store.join(url)))
}

/// What `fetch` writes, as a file of the model store; where that cannot be written to, as one that does not stay. A file of
/// this name that is there is an error, as in TorchServe. At the start it is the one that an earlier start has fetched.
fn fetched(
    settings: &Settings,
    url: &str,
    at_start: bool,
    fetch: impl FnOnce(&mut File) -> Result<(), Refused>,
) -> Result<Found, Refused> {
    let name = keep::name_of(url)?;
    let not_saved = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => Refused::internal(format!("Model file already exists {name}")),
        _ => Refused::internal(format!("Failed to save model: {url}: {error}")),
    };
    let Some(store) = &settings.model_store else {
        return Err(Refused::not_found("Model store has not been configured."));
    };
    let known = store.join(&name);
    if known.exists() {
        if !at_start {
            return Err(not_saved(io::ErrorKind::AlreadyExists.into()));
        }
        tracing::info!("'{url}' is not fetched: '{name}' is in the model store");
        return Ok(Found { name: Some(name), ..Found::at(known) });
    }
    match keep::Part::new(store, &name) {
        Ok(mut part) => {
            fetch(part.file())?;
            let kept = part.finish().map_err(not_saved)?;
            Ok(Found { name: Some(name), kept: Some(kept), ..Found::at(known) })
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied) => {
            let shown = store.display();
            tracing::warn!(
                "the model store '{shown}' cannot be written to ({error}): '{url}' is not kept there, and every start \
                 fetches it again"
            );
            let place = new_directory(settings)?;
            let path = place.path().join("fetched");
            let made = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
            fetch(&mut made.map_err(not_saved)?)?;
            Ok(Found { _fetched: Some(place), ..Found::at(path) })
        }
        Err(error) => Err(not_saved(error)),
    }
}

/// Refuses what no pattern of `allowed_urls` matches.
fn allow(settings: &Settings, url: &str, whole: &str) -> Result<(), Refused> {
    if settings.allowed_urls.iter().any(|pattern| pattern.is_match(whole)) {
        return Ok(());
    }
    Err(Refused::invalid_url(format!("Given URL {url} does not match any allowed URL(s)")))
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

/// Makes a new directory below the server's work directory.
fn new_directory(settings: &Settings) -> Result<Unpacked, Refused> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = settings.work_directory.join("models").join(number.to_string());
    fs::create_dir_all(&path)
        .map_err(|error| Refused::internal(format!("The directory '{}' cannot be made: {error}", path.display())))?;
    Ok(Unpacked { root: path.clone(), own: Some(path) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
