//! What a client has given in place of the repository's files: kept while the model is loaded, files in a directory of
//! their own.

use std::fs::{self, DirBuilder};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pharos::repository::Override;

use super::source::Local;

/// What a client has given.
#[derive(Clone, Debug)]
pub(super) struct Given {
    /// JSON.
    pub(super) config: String,
    /// The model's directory, unless it is the repository's.
    pub(super) local: Option<Arc<Local>>,
}

impl Given {
    /// Writes the files, if there are some. `number` tells the directories of this process apart.
    ///
    /// # Errors
    /// They cannot be written.
    pub(super) fn new(given: Override, number: &AtomicU64) -> io::Result<Self> {
        let Override { config, files } = given;
        if files.is_empty() {
            return Ok(Self { config, local: None });
        }
        let local = Local::temporary(new_directory(number)?);
        for (path, bytes) in files {
            let whole = local.path().join(&path);
            write(local.path(), &whole, &bytes).map_err(|error| {
                io::Error::new(error.kind(), format!("'{}' cannot be written: {error}", path.display()))
            })?;
        }
        Ok(Self { config, local: Some(Arc::new(local)) })
    }
}

/// A directory that did not exist before and that nobody else can enter.
pub(super) fn new_directory(number: &AtomicU64) -> io::Result<PathBuf> {
    loop {
        let number = number.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pharos-{}-{number}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            // Of a process that had the same number and was killed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(io::Error::new(error.kind(), format!("'{}': {error}", path.display()))),
        }
    }
}

/// Writes a file that is not there yet, in a directory that only this process writes to.
fn write(top: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(directory) = path.parent().filter(|directory| *directory != top) {
        fs::create_dir_all(directory)?;
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn given(files: &[(&str, &'static str)], number: &AtomicU64) -> io::Result<Given> {
        let files = files.iter().map(|(path, text)| (PathBuf::from(path), Bytes::from_static(text.as_bytes())));
        Given::new(Override { config: "{}".to_owned(), files: files.collect() }, number)
    }

    #[test]
    fn the_directory_goes_with_the_last_who_holds_it() {
        let number = AtomicU64::new(1 << 40);
        assert!(given(&[], &number).unwrap().local.is_none());
        let first = given(&[("1/model.onnx", "x"), ("labels.txt", "y")], &number).unwrap();
        let path = first.local.as_ref().unwrap().path().to_owned();
        assert_eq!(fs::read_to_string(path.join("1/model.onnx")).unwrap(), "x");
        // A directory that is left over is not taken for its own.
        number.store(1 << 40, Ordering::Relaxed);
        let second = given(&[("1/other", "z")], &number).unwrap();
        assert_ne!(second.local.as_ref().unwrap().path(), path);
        let held = first.clone();
        drop(first);
        assert!(path.is_dir());
        drop(held);
        assert!(!path.exists());
    }

    #[test]
    fn a_file_cannot_be_a_directory_too() {
        let number = AtomicU64::new(1 << 41);
        let error = given(&[("1/model", "x"), ("1/model/x", "y")], &number).unwrap_err();
        assert!(error.to_string().contains("'1/model/x' cannot be written"), "{error}");
        let left = std::env::temp_dir().join(format!("pharos-{}-{}", std::process::id(), 1u64 << 41));
        assert!(!left.exists(), "nothing stays of what failed");
    }
}
