//! A directory for the temporary files of a process in a sandbox, which may write no other.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pharos_os::blocking;
use pharos_os::directories::{Kind, Temporary};
use pharos_os::worker_user::WorkerUser;

/// A directory that is removed with its contents when dropped.
#[derive(Debug)]
pub(crate) struct TemporaryFiles {
    /// The parent, with the marker and the lock of this server, which the process must not write.
    parent: Option<Temporary>,
    path: PathBuf,
}

impl TemporaryFiles {
    /// Creates an empty directory, which belongs to this user if there is one.
    ///
    /// # Errors
    /// The directory cannot be created or given to the user.
    pub(crate) fn new(user: Option<&WorkerUser>) -> io::Result<Self> {
        let refused = |error: io::Error| {
            let text = format!("no directory for its temporary files (TMPDIR of the server): {error}");
            io::Error::new(error.kind(), text)
        };
        let parent = Temporary::new(Kind::WORKER).map_err(refused)?;
        let path = parent.path().join("files");
        let made = DirBuilder::new().mode(0o700).create(&path);
        let given = made.and_then(|()| user.map_or(Ok(()), |user| user.give(&path)));
        given.map_err(|error| refused(io::Error::new(error.kind(), format!("'{}': {error}", path.display()))))?;
        Ok(Self { parent: Some(parent), path })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for TemporaryFiles {
    fn drop(&mut self) {
        let parent = self.parent.take();
        // A model can leave many files.
        blocking::run_detached(move || drop(parent));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn is_removed_with_its_contents() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let outside = TemporaryFiles::new(None).unwrap();
        let parents = [&outside, &runtime.block_on(async { TemporaryFiles::new(None).unwrap() })]
            .map(|files| files.parent.as_ref().unwrap().path().to_owned());
        runtime.block_on(async {
            let files = TemporaryFiles::new(None).unwrap();
            std::fs::write(files.path().join("left"), "x").unwrap();
        });
        drop(outside);
        // Ends when the blocking threads have ended.
        drop(runtime);
        assert!(parents.iter().all(|path| !path.exists()), "{parents:?}");
    }
}
