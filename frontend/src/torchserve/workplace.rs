//! A private directory of a running server: archives are unpacked in it, and the repository is in it. It goes with the
//! server; what killed servers have left is removed by the next.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

const PREFIX: &str = "pharos-torchserve-";

/// The directory, as long as this is held.
#[derive(Debug)]
pub(super) struct Workplace {
    path: PathBuf,
    /// Held exclusively: the server lives.
    _lock: File,
}

impl Workplace {
    /// Makes one below `above`.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn new(above: &Path) -> io::Result<Self> {
        remove_left(above);
        let mut number = 0;
        let path = loop {
            let path = above.join(format!("{PREFIX}{}-{number}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => break path,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(error),
            }
        };
        let lock = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path.join("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        for inside in ["repository", "models"] {
            DirBuilder::new().mode(0o700).create(path.join(inside))?;
        }
        Ok(Self { path, _lock: lock })
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The repository of the engine.
    pub(super) fn repository(&self) -> PathBuf {
        self.path.join("repository")
    }
}

impl Drop for Workplace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!("'{}' cannot be removed: {error}", self.path.display());
        }
    }
}

/// Removes directories of this user whose servers are gone.
fn remove_left(above: &Path) {
    for entry in fs::read_dir(above).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(PREFIX));
        // Not through a link that another user has put there.
        let own = fs::symlink_metadata(entry.path())
            .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw());
        if !ours || !own {
            continue;
        }
        let Ok(lock) = File::open(entry.path().join("lock")) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_workplace_goes_with_its_server_and_what_was_left_with_the_next() {
        let above = std::env::temp_dir().join(format!("pharos-workplaces-{}", std::process::id()));
        fs::create_dir_all(&above).unwrap();
        let left = above.join(format!("{PREFIX}1-0"));
        fs::create_dir_all(left.join("models/0")).unwrap();
        fs::write(left.join("lock"), "").unwrap();
        let (one, other) = (Workplace::new(&above).unwrap(), Workplace::new(&above).unwrap());
        assert!(!left.exists() && one.repository().is_dir() && other.path() != one.path());
        let path = one.path().to_owned();
        drop(one);
        assert!(!path.exists() && other.path().is_dir());
        drop(other);
        fs::remove_dir_all(&above).unwrap();
    }
}
