//! The private directory of a running server, with the unpacked archives and the model repository.
//! It is removed when the server stops; directories of killed servers are removed by the next
//! start.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pharos_os::directories::{Kind, Temporary};

/// The kind of the directory.
pub const DIRECTORY: Kind = Kind::new("torchserve");

/// The directory, which is removed on drop.
#[derive(Debug)]
pub(super) struct WorkDirectory(Temporary);

impl WorkDirectory {
    /// # Errors
    /// The directory cannot be created.
    pub(super) fn new() -> io::Result<Self> {
        let directory = Temporary::new(DIRECTORY)?;
        for inside in ["repository", "models"] {
            DirBuilder::new().mode(0o700).create(directory.path().join(inside))?;
        }
        Ok(Self(directory))
    }

    /// Returns the path of the directory.
    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns the path of the engine's model repository.
    pub(super) fn repository(&self) -> PathBuf {
        self.path().join("repository")
    }
}
