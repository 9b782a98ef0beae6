//! Reads a model's directory: versions, configuration, and fingerprints of the files.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pharos::repository::{Stamp, parse_version_directory};

/// The default configuration file, and the directory of alternative ones.
const CONFIG: &str = "config.pbtxt";
const CONFIGS: &str = "configs";

/// The deepest directory that is followed, as a guard against loops of symbolic links.
const DEEPEST: usize = 32;

/// The contents of a model's directory.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    /// The path of the configuration file, and its text if it exists.
    pub(crate) config_path: PathBuf,
    pub(crate) config: Option<String>,
    /// Versions with their directories, ascending.
    pub(crate) versions: BTreeMap<u64, PathBuf>,
    /// Names of the files in the version directories.
    pub(crate) files: Vec<String>,
}

/// Reads the directory of a model, with the configuration `NAME.pbtxt` of this name if it exists.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn contents(path: &Path, config_name: Option<&str>) -> io::Result<Contents> {
    let custom = config_name
        .map(|name| path.join(CONFIGS).join(format!("{name}.pbtxt")))
        .filter(|path| path.is_file());
    let config_path = custom.unwrap_or_else(|| path.join(CONFIG));
    let config = match read_text(&config_path) {
        Ok(text) => Some(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(unreadable(&config_path, &error)),
    };
    let mut contents = Contents { config_path, config, ..Contents::default() };
    let mut known = HashSet::new();
    for (name, directory) in directories(path)? {
        let Some(version) = parse_version_directory(&name) else { continue };
        for entry in fs::read_dir(&directory)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if known.insert(name.clone()) {
                contents.files.push(name);
            }
        }
        contents.versions.insert(version, directory);
    }
    Ok(contents)
}

/// The maximum number of bytes of a text file, such as a configuration or class labels.
const LONGEST_TEXT: u64 = 64 << 20;

/// The maximum number of bytes of a tensor file, more than a frame to the worker can hold.
const LONGEST_FILE: u64 = 4 << 30;

/// Reads a text file.
///
/// # Errors
/// The file cannot be read, is not a regular file, is too long, or is not UTF-8.
pub(crate) fn read_text(path: &Path) -> io::Result<String> {
    let bytes = read_at_most(path, LONGEST_TEXT)?;
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// The largest file of a model that an edge reads, such as a tokenizer's configuration.
const LONGEST_MODEL_FILE: u64 = 16 << 20;

/// Reads a file of a model for an edge.
///
/// # Errors
/// The file cannot be read, is not a regular file, or is too long.
pub(crate) fn read_model_file(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(path, LONGEST_MODEL_FILE)
}

/// Like [`read_model_file`], for a text.
///
/// # Errors
/// As there, or it is not UTF-8.
pub(crate) fn read_model_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read_model_file(path)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Reads a file with the elements of a tensor.
///
/// # Errors
/// The file cannot be read, is not a regular file, or is too long.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    read_at_most(path, LONGEST_FILE)
}

/// Refuses devices and pipes, because reading them may never end.
fn read_at_most(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let refuse = |why: String| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if !fs::metadata(path)?.is_file() {
        return refuse("it is not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    // Some regular files of `/proc` are read like pipes.
    let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let file = fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return refuse(format!("it has more than {most} bytes"));
    }
    Ok(bytes)
}

/// The files that determine what a version of a model does, apart from its configuration. A change
/// of one of them requires a new load.
#[derive(Clone, Debug)]
pub(crate) struct VersionFiles {
    /// The model's directory, which has the files that all versions share.
    pub(crate) model: PathBuf,
    /// The version's directory.
    pub(crate) version: PathBuf,
    /// The environment and the backend: files, or the directory of an environment.
    pub(crate) outside: Vec<PathBuf>,
}

impl VersionFiles {
    /// Returns the fingerprint of the files. Not comparable with the fingerprint for another path
    /// of an environment or backend.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub(crate) fn stamp(&self) -> io::Result<Stamp> {
        self.stamp_with(shared_stamp(&self.model)?)
    }

    /// Returns the same with the known fingerprint of the shared files, which other versions have
    /// too.
    ///
    /// # Errors
    /// As [`VersionFiles::stamp`].
    pub(crate) fn stamp_with(&self, shared: Stamp) -> io::Result<Stamp> {
        Ok(Stamp::of(&(shared, stamp_of(&self.outside), stamp(&self.version)?)))
    }
}

/// The files of a version and their fingerprint when its load began. The paths of the directories
/// are the paths that its workers read, also when they start again: without links.
#[derive(Debug)]
pub(crate) struct LoadedFiles {
    pub(crate) files: VersionFiles,
    stamp: Stamp,
}

impl LoadedFiles {
    /// Reads the fingerprint. Blocks.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub(crate) fn new(VersionFiles { model, version, outside }: VersionFiles) -> io::Result<Self> {
        let files = VersionFiles {
            model: model.canonicalize()?,
            version: version.canonicalize()?,
            outside,
        };
        Ok(Self { stamp: files.stamp()?, files })
    }

    /// Returns whether the files have changed since then. Blocks.
    pub(crate) fn have_changed(&self) -> bool {
        self.files.stamp().ok() != Some(self.stamp)
    }
}

/// Returns the fingerprint of the files below a directory, without those that [`is_ignored`]
/// excludes: names, sizes and modification times.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn stamp(directory: &Path) -> io::Result<Stamp> {
    stamp_below(&entries(directory)?)
}

/// Returns the fingerprint of the files that all versions of a model share.
///
/// # Errors
/// The model's directory cannot be read.
pub(crate) fn shared_stamp(model: &Path) -> io::Result<Stamp> {
    stamp_below(&shared(model)?)
}

/// Returns the files and directories that all versions of a model share, such as label files and
/// warm-up data. Excludes configurations, whose parsed contents are compared instead. The caller
/// excludes the files of [`is_ignored`].
///
/// # Errors
/// The model's directory cannot be read.
pub(crate) fn shared(model: &Path) -> io::Result<Vec<PathBuf>> {
    let mut shared = entries(model)?;
    shared.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name != CONFIG && name != CONFIGS && parse_version_directory(&name).is_none()
    });
    Ok(shared)
}

fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
}

/// Returns the fingerprint of single files.
pub(crate) fn stamp_of(files: &[PathBuf]) -> Stamp {
    let known = files.iter().map(|path| {
        let metadata = fs::metadata(path).ok()?;
        Some((path.clone(), metadata.len(), metadata.mtime(), metadata.mtime_nsec()))
    });
    Stamp::of(&known.collect::<Vec<_>>())
}

fn stamp_below(entries: &[PathBuf]) -> io::Result<Stamp> {
    let mut all = Vec::new();
    for path in entries {
        list(path, OsString::new(), 0, &mut all)?;
    }
    all.sort_unstable();
    Ok(Stamp::of(&all))
}

/// A file: its path in the directory, its size, and its modification time in seconds and
/// nanoseconds.
type FileStamp = (OsString, u64, i64, i64);

fn list(path: &Path, above: OsString, depth: usize, all: &mut Vec<FileStamp>) -> io::Result<()> {
    let own = path.file_name().unwrap_or_default();
    if is_ignored(path) {
        return Ok(());
    }
    if depth > DEEPEST {
        return Err(io::Error::other(format!(
            "'{}' is more than {DEEPEST} directories deep",
            path.display()
        )));
    }
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // It was removed meanwhile, or is a dangling link.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(unreadable(path, &error)),
    };
    let mut name = above;
    name.push("/");
    name.push(own);
    if let Some(mark) = environment_mark(path).filter(|_| metadata.is_dir()) {
        all.push((name, mark.len(), mark.mtime(), mark.mtime_nsec()));
        return Ok(());
    }
    if !metadata.is_dir() {
        all.push((name, metadata.len(), metadata.mtime(), metadata.mtime_nsec()));
        return Ok(());
    }
    // Distinguishes an empty directory from a missing one.
    all.push((name.clone(), 0, 0, 0));
    for entry in fs::read_dir(path)? {
        list(&entry?.path(), name.clone(), depth + 1, all)?;
    }
    Ok(())
}

/// Returns the metadata of the file that marks a directory as a Python environment and changes when
/// it is recreated. It replaces the metadata of the thousands of files in the environment.
fn environment_mark(directory: &Path) -> Option<fs::Metadata> {
    ["pyvenv.cfg", "conda-meta/history"]
        .iter()
        .find_map(|name| fs::metadata(directory.join(name)).ok())
}

/// Returns whether a path below a model's directory does not belong to the model: hidden files,
/// except environments, and Python's byte code.
pub(crate) fn is_ignored(path: &Path) -> bool {
    let own = path.file_name().unwrap_or_default();
    own == "__pycache__" || is_hidden(&own.to_string_lossy()) && !is_environment(path)
}

/// Returns whether a directory is a Python environment.
pub(crate) fn is_environment(directory: &Path) -> bool {
    environment_mark(directory).is_some()
}

/// Returns whether files or directories of this name are skipped.
pub(crate) fn is_hidden(name: &str) -> bool {
    name.is_empty() || name.starts_with('.')
}

/// Returns the directories in a directory, by name, without hidden ones.
pub(crate) fn directories(path: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if path.is_dir() && !is_hidden(&name) {
            found.push((name, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Returns the error of reading a path, with the path.
pub(crate) fn unreadable(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{}' cannot be read: {error}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn refuses_long_and_irregular_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "text").unwrap();
        assert_eq!(read_text(&path).unwrap(), "text");
        assert_eq!(read_at_most(&path, 4).unwrap(), b"text");
        assert!(read_at_most(&path, 3).unwrap_err().to_string().contains("more than 3 bytes"));
        fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_text(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        for other in [folder.path(), Path::new("/dev/zero")] {
            assert!(
                read(other).unwrap_err().to_string().contains("not a regular file"),
                "{}",
                other.display()
            );
        }
        assert_eq!(read(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
