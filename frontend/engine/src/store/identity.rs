//! The identity of a model version for the response cache: its configuration and the files that
//! determine what it does. Contains no paths outside the model's directory and no modification
//! times, so that it is equal on all servers with equal files.

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pharos::cache::{Identifier, Identity};
use pharos::id::ModelVersion;
use pharos::model::ModelConfig;

use super::scan::{self, LoadedFiles, VersionFiles};

/// The deepest directory that is followed, as a guard against loops of symbolic links.
const DEEPEST: usize = 32;

/// The configuration and files of a model version.
pub(crate) struct Files {
    pub(crate) model: ModelVersion,
    config: ModelConfig,
    files: VersionFiles,
}

impl Files {
    pub(crate) fn new(model: &ModelVersion, config: &ModelConfig, loaded: &LoadedFiles) -> Self {
        Self { model: model.clone(), config: config.clone(), files: loaded.files.clone() }
    }
}

/// Reads all files of the versions, except those of Python environments in directories, and follows
/// symbolic links. The first version is the model itself, the others are versions that its
/// responses depend on. Blocks until all files are read.
///
/// # Errors
/// A file or directory cannot be read.
pub(crate) fn identity(all: &[Files]) -> io::Result<Identity> {
    let mut identities = all.iter().map(one);
    let first =
        identities.next().unwrap_or_else(|| Err(io::Error::other("a model version is needed")))?;
    identities.try_fold(first, |identity, next| Ok(identity.and(&next?)))
}

fn one(Files { model, config, files }: &Files) -> io::Result<Identity> {
    let mut identifier = Identifier::new(model, config);
    let mut buffer = vec![0; 1 << 20];
    for (name, part) in parts(files)? {
        match part {
            IdentityPart::Content(path) => {
                read(&path, &name, &mut identifier, &mut buffer)
                    .map_err(|error| scan::unreadable(&path, &error))?;
            }
            IdentityPart::Size(size) => {
                let bytes = size.to_le_bytes();
                identifier.file(&name, bytes.len() as u64);
                identifier.bytes(&bytes);
            }
        }
    }
    Ok(identifier.finish())
}

fn read(
    path: &Path,
    name: &[u8],
    identifier: &mut Identifier,
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut file = File::open(path)?;
    identifier.file(name, file.metadata()?.len());
    loop {
        match file.read(buffer) {
            Ok(0) => return Ok(()),
            Ok(read) => identifier.bytes(buffer.get(..read).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// What the identity contains of a file.
enum IdentityPart {
    Content(PathBuf),
    /// The size only: the file belongs to an environment, which may have gigabytes in tens of
    /// thousands of files.
    Size(u64),
}

/// Returns all parts by names that do not depend on where the files are.
fn parts(files: &VersionFiles) -> io::Result<BTreeMap<Vec<u8>, IdentityPart>> {
    let mut listing = Listing { parts: BTreeMap::new(), hidden: false };
    for path in scan::shared(&files.model)? {
        listing.add(&path, child(b"model", &path), 1)?;
    }
    listing.hidden = true;
    listing.add(&files.version, b"version".to_vec(), 0)?;
    for (number, path) in files.outside.iter().enumerate() {
        // It may be in the model's directory.
        if listing.has(path) {
            continue;
        }
        let name = format!("outside/{number}").into_bytes();
        if path.is_dir() {
            listing.add_sizes(path, &name, 0)?
        } else {
            listing.add(path, name, 0)?
        }
    }
    Ok(listing.parts)
}

struct Listing {
    parts: BTreeMap<Vec<u8>, IdentityPart>,
    /// Whether hidden files are added.
    hidden: bool,
}

impl Listing {
    /// Adds a file, or the files below a directory, with their contents.
    fn add(&mut self, path: &Path, name: Vec<u8>, depth: usize) -> io::Result<()> {
        let Some(kind) = metadata(path)?.filter(|_| self.hidden || !scan::is_ignored(path)) else {
            return Ok(());
        };
        if kind.is_file() {
            self.parts.insert(name, IdentityPart::Content(path.to_owned()));
        } else if kind.is_dir() && scan::is_environment(path) {
            self.add_sizes(path, &name, depth)?;
        } else if kind.is_dir() {
            for path in entries(path, depth)? {
                self.add(&path, child(&name, &path), depth + 1)?;
            }
        }
        Ok(())
    }

    /// Adds the files of an environment with their sizes. Does not follow symbolic links, most of
    /// which lead to other files of the environment.
    fn add_sizes(&mut self, directory: &Path, name: &[u8], depth: usize) -> io::Result<()> {
        for path in entries(directory, depth)? {
            let name = child(name, &path);
            let kind = path.symlink_metadata()?;
            if kind.is_dir() {
                self.add_sizes(&path, &name, depth + 1)?;
            } else {
                self.parts.insert(
                    [b"size of ", name.as_slice()].concat(),
                    IdentityPart::Size(kind.len()),
                );
            }
        }
        Ok(())
    }

    /// Returns whether the content of a file was added.
    fn has(&self, path: &Path) -> bool {
        let Ok(path) = path.canonicalize() else { return false };
        self.parts
            .values()
            .any(|part| matches!(part, IdentityPart::Content(added) if *added == path))
    }
}

/// Returns the metadata; `None` if the file was removed meanwhile or is a dangling link.
fn metadata(path: &Path) -> io::Result<Option<Metadata>> {
    match path.metadata() {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(scan::unreadable(path, &error)),
    }
}

/// Returns the paths in a directory. Python's byte code files vary between runs and do not change
/// the model's responses.
fn entries(directory: &Path, depth: usize) -> io::Result<Vec<PathBuf>> {
    if depth > DEEPEST {
        return Err(io::Error::other(format!(
            "'{}' is more than {DEEPEST} directories deep",
            directory.display()
        )));
    }
    let mut paths =
        directory.read_dir()?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    paths.retain(|path| path.file_name().is_none_or(|name| name != "__pycache__"));
    Ok(paths)
}

/// Returns the name of a path in the directory of this name.
fn child(directory: &[u8], path: &Path) -> Vec<u8> {
    [directory, b"/", path.file_name().unwrap_or_default().as_bytes()].concat()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use pharos::model::{Completion, Draft};

    use super::*;

    /// Writes files into a new directory. The content `-> TARGET` makes a symbolic link.
    fn written(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            match content.strip_prefix("-> ") {
                Some(target) => symlink(target, path).unwrap(),
                None => fs::write(path, content).unwrap(),
            }
        }
        folder
    }

    /// Returns the identity of version 1 of a model with these and other files, and an environment
    /// outside of its directory.
    fn identity_with(changed: &[(&str, &str)]) -> Identity {
        let usual = [
            ("model/1/model.py", "code"),
            ("model/value.txt", "1"),
            ("model/data/table", "2"),
            ("model/venv/pyvenv.cfg", "home"),
            ("model/venv/lib/package.py", "package"),
            ("environment/bin/python3", "-> /usr/bin/python3"),
        ];
        let usual = usual.iter().filter(|(path, _)| changed.iter().all(|(other, _)| other != path));
        let folder = written(&usual.chain(changed).copied().collect::<Vec<_>>());
        let model = folder.path().join("model");
        let outside = vec![
            folder.path().join("environment"),
            model.join("data/table"),
            folder.path().join("missing"),
        ];
        let files = VersionFiles { version: model.join("1"), model, outside };
        let text = "backend: 'builtin' input { name: 'A' data_type: TYPE_FP32 dims: 1 } output { \
                    name: 'B' data_type: TYPE_FP32 dims: 1 }";
        let config = Draft::from_text(text, "config.pbtxt")
            .unwrap()
            .complete(&Completion::default())
            .unwrap();
        identity(&[Files { model: ModelVersion::new("model", 1), config, files }]).unwrap()
    }

    #[test]
    fn the_identity_has_what_determines_the_responses() {
        let usual = identity_with(&[]);
        assert_eq!(
            identity_with(&[]),
            usual,
            "equal files in another directory and of another time"
        );
        for (path, content) in [
            ("model/value.txt", "3"),
            ("model/data/table", "3"),
            ("model/new", ""),
            ("model/1/model.py", "other"),
            ("model/1/value.txt", "1"),
            ("model/1/.hidden", "1"),
            ("model/venv/lib/package.py", "longer package"),
            ("model/venv/lib/new.py", ""),
            ("model/.venv/pyvenv.cfg", "home"),
            ("environment/bin/python3", "-> /usr/local/bin/python3"),
            ("environment/lib/new.py", ""),
        ] {
            assert_ne!(identity_with(&[(path, content)]), usual, "{path}");
        }
        for (path, content) in [
            ("model/config.pbtxt", "read as a configuration"),
            ("model/configs/other.pbtxt", ""),
            ("model/2/model.py", "another version"),
            ("model/.git/index", ""),
            ("model/data/.hidden", ""),
            ("model/data/__pycache__/module.pyc", ""),
            ("model/dangling", "-> nowhere"),
            ("environment/lib/__pycache__/module.pyc", ""),
            // Environments are too large to read their files.
            ("model/venv/lib/package.py", "edited!"),
        ] {
            assert_eq!(identity_with(&[(path, content)]), usual, "{path}");
        }
    }

    #[test]
    fn a_loop_of_links_is_an_error() {
        let folder = written(&[("1/model.py", ""), ("data/loop", "-> ../data")]);
        let model = folder.path().to_owned();
        let error = parts(&VersionFiles { version: model.join("1"), model, outside: Vec::new() })
            .err()
            .unwrap();
        assert!(error.to_string().contains("more than 32 directories deep"), "{error}");
    }
}
