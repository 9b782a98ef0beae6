//! The local directory of a model's files, and the temporary directories for some of them.

use std::fmt::Debug;
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::model::CodeOrigin;
use pharos_os::clock;
use pharos_os::directories::{Kind, Temporary};
use pharos_os::removal::remove_tree;

/// The time between two looks for files in use.
const LOOK: Duration = Duration::from_millis(5);

/// Owns the storage of a model's files; held while the files are used.
pub(crate) trait FilesOwner: Debug + Send + Sync {}

/// The files of a model in a local directory.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    path: PathBuf,
    /// Removed with its contents on drop.
    removed: Option<PathBuf>,
    /// Dropped after the removal.
    _owner: Option<Arc<dyn FilesOwner>>,
    /// The source of the files.
    origin: CodeOrigin,
}

impl ModelFiles {
    /// Creates files in a directory that is kept on drop.
    pub(crate) fn permanent(path: PathBuf) -> Self {
        Self { path, removed: None, _owner: None, origin: CodeOrigin::Operator }
    }

    /// Creates files in a directory whose parent `above` is removed on drop; `owner` is held until
    /// then.
    pub(crate) fn temporary(path: PathBuf, above: PathBuf, owner: Arc<dyn FilesOwner>) -> Self {
        Self { path, removed: Some(above), _owner: Some(owner), origin: CodeOrigin::Operator }
    }

    /// Returns the same files, which a request has brought or chosen.
    pub(crate) fn by_request(self) -> Self {
        let mut files = self;
        files.origin = CodeOrigin::Request;
        files
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn origin(&self) -> CodeOrigin {
        self.origin
    }
}

impl Drop for ModelFiles {
    fn drop(&mut self) {
        if let Some(path) = &self.removed
            && let Err(error) = remove_tree(path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove '{}': {error}", path.display());
        }
    }
}

/// Temporary directories in one parent directory, which is created for the first of them and
/// removed when the server exits.
#[derive(Debug, Default)]
pub(crate) struct TemporaryDirectories(Mutex<Created>);

#[derive(Debug, Default)]
struct Created {
    directory: Option<Arc<Temporary>>,
    /// The number of the next directory.
    number: u64,
    closed: bool,
}

impl TemporaryDirectories {
    /// Creates a directory. Returns its path and the parent.
    pub(crate) fn next(&self) -> io::Result<(PathBuf, Arc<Temporary>)> {
        let mut created = self.0.lock();
        if created.closed {
            return Err(io::Error::other("the server is exiting"));
        }
        // Old temporary files are often removed by the system.
        if created.directory.as_ref().is_none_or(|directory| !directory.path().is_dir()) {
            created.directory = Some(Arc::new(Temporary::new(Kind::LOAD)?));
        }
        let Some(directory) = created.directory.clone() else {
            return Err(io::ErrorKind::NotFound.into());
        };
        let path = directory.path().join(created.number.to_string());
        created.number += 1;
        DirBuilder::new().mode(0o700).create(&path).map_err(|error| {
            io::Error::new(error.kind(), format!("cannot create '{}': {error}", path.display()))
        })?;
        Ok((path, directory))
    }

    /// Waits until no files are in use.
    pub(crate) async fn unused(&self) {
        while self.in_use() {
            clock::sleep(LOOK).await;
        }
    }

    fn in_use(&self) -> bool {
        let created = self.0.lock();
        created.directory.as_ref().is_some_and(|directory| Arc::strong_count(directory) > 1)
    }

    /// Removes all files, also files in use, because the server exits.
    pub(crate) fn close(&self) {
        let mut created = self.0.lock();
        created.closed = true;
        if let Some(directory) = created.directory.take() {
            directory.remove();
        }
    }
}

impl FilesOwner for Temporary {}
