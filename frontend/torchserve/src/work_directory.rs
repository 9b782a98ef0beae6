//! The private directory of a running server, for unpacked archives and the model repository. It is removed with the server;
//! directories of killed servers are removed by the next start.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pharos_os::directories::{Kind, Temporary};

/// The use of the directory.
pub const DIRECTORY: Kind = Kind::new("torchserve");

/// The directory, as long as this is held.
#[derive(Debug)]
pub(super) struct WorkDirectory(Temporary);

impl WorkDirectory {
    /// # Errors
    /// It cannot be made.
    pub(super) fn new() -> io::Result<Self> {
        let directory = Temporary::new(DIRECTORY)?;
        for inside in ["repository", "models"] {
            DirBuilder::new().mode(0o700).create(directory.path().join(inside))?;
        }
        Ok(Self(directory))
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The repository of the engine.
    pub(super) fn repository(&self) -> PathBuf {
        self.path().join("repository")
    }
}
