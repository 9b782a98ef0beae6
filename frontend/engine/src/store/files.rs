//! The files of a model as a directory of this machine, and the temporary directories that some of them are in.

use std::fmt::Debug;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pharos_os::directories::{Kind, Temporary};

/// Owns the storage of a model's files; held as long as the files are used.
pub(crate) trait FilesOwner: Debug + Send + Sync {}

/// A model's files: a directory of this machine.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    path: PathBuf,
    /// Removed with its contents on drop.
    removed: Option<PathBuf>,
    /// Dropped after the removal.
    _owner: Option<Arc<dyn FilesOwner>>,
}

impl ModelFiles {
    /// A directory that is kept on drop.
    pub(crate) fn permanent(path: PathBuf) -> Self {
        Self { path, removed: None, _owner: None }
    }

    /// A directory that is removed on drop with `above`, its parent; `owner` is held until then.
    pub(crate) fn temporary(path: PathBuf, above: PathBuf, owner: Arc<dyn FilesOwner>) -> Self {
        Self { path, removed: Some(above), _owner: Some(owner) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ModelFiles {
    fn drop(&mut self) {
        if let Some(path) = &self.removed
            && let Err(error) = fs::remove_dir_all(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("'{}' cannot be removed: {error}", path.display());
        }
    }
}

/// Temporary directories in one directory of this server, created for the first of them and removed when the server exits.
#[derive(Debug, Default)]
pub(crate) struct TemporaryDirectories(Mutex<Created>);

#[derive(Debug, Default)]
struct Created {
    directory: Option<Arc<Temporary>>,
    /// Of the next directory in it.
    number: u64,
    closed: bool,
}

impl TemporaryDirectories {
    /// A new directory, and the one that it is in.
    pub(crate) fn next(&self) -> io::Result<(PathBuf, Arc<Temporary>)> {
        let mut created = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if created.closed {
            return Err(io::Error::other("the server is exiting"));
        }
        // Something may have removed it: old temporary files are often removed.
        if created.directory.as_ref().is_none_or(|directory| !directory.path().is_dir()) {
            created.directory = Some(Arc::new(Temporary::new(Kind::LOAD)?));
        }
        let Some(directory) = created.directory.clone() else { return Err(io::ErrorKind::NotFound.into()) };
        let path = directory.path().join(created.number.to_string());
        created.number += 1;
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok((path, directory))
    }

    /// Removes all files, also those in use: the server ends.
    pub(crate) fn close(&self) {
        let mut created = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        created.closed = true;
        if let Some(directory) = created.directory.take() {
            directory.remove();
        }
    }
}

impl FilesOwner for Temporary {}
