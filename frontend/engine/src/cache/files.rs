//! The identity of a model version for the response cache: its configuration and every byte of its files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pharos::cache::{Identifier, Identity};
use pharos::id::ModelVersion;
use pharos::model::ModelConfig;

/// The deepest directory that is followed, as a guard against loops of symbolic links.
const DEEPEST: usize = 32;

/// The configuration and files of a model version.
pub(crate) struct Files {
    pub(crate) model: ModelVersion,
    pub(crate) config: ModelConfig,
    /// The version's directory.
    pub(crate) directory: PathBuf,
}

/// Reads all files of the versions' directories and follows symbolic links. The first version is the model itself, the others are
/// those that its responses depend on. Blocks until all files are read.
///
/// # Errors
/// A file or directory cannot be read.
pub(super) fn identity(all: &[Files]) -> io::Result<Identity> {
    let mut identities = all.iter().map(one);
    let first = identities.next().unwrap_or_else(|| Err(io::Error::other("a model version is needed")))?;
    identities.try_fold(first, |identity, next| Ok(identity.and(&next?)))
}

fn one(Files { model, config, directory }: &Files) -> io::Result<Identity> {
    let mut files = BTreeMap::new();
    list(directory, Vec::new(), 0, &mut files)?;
    let mut identifier = Identifier::new(model, config);
    let mut buffer = vec![0; 1 << 20];
    for (name, path) in files {
        let mut file = File::open(&path)?;
        identifier.file(&name, file.metadata()?.len());
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => identifier.bytes(buffer.get(..read).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(identifier.finish())
}

/// Collects the files below `directory` by their paths relative to the version's directory; `name` is the path of `directory`.
fn list(directory: &Path, name: Vec<u8>, depth: usize, files: &mut BTreeMap<Vec<u8>, PathBuf>) -> io::Result<()> {
    if depth > DEEPEST {
        return Err(io::Error::other(format!("'{}' is more than {DEEPEST} directories deep", directory.display())));
    }
    for entry in directory.read_dir()? {
        let path = entry?.path();
        let own = path.file_name().map(OsStrExt::as_bytes).unwrap_or_default();
        let name = [&name, b"/".as_slice(), own].concat();
        let kind = path.metadata()?;
        if kind.is_dir() {
            // Python's byte code files vary between runs and do not change the model's responses.
            if own != b"__pycache__" {
                list(&path, name, depth + 1, files)?;
            }
        } else if kind.is_file() {
            files.insert(name, path);
        }
    }
    Ok(())
}
