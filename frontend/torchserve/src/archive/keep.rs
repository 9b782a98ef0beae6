//! Keeps downloaded archives in the model store under their file name, so that a snapshot can name
//! them and the next start needs no network. A file gets its name only when it is complete, and
//! never replaces another file.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use pharos::model::CodeOrigin;
use rustix::fs::{
    CWD, FlockOperation, RenameFlags, XattrFlags, flock, fsetxattr, getxattr, renameat_with,
};
use rustix::io::Errno;

use crate::ErrorResponse;

/// The prefix and suffix of the names of incomplete files.
const PART: (&str, &str) = (".pharos-", ".part");

/// A file in the model store that this server has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredFile {
    path: PathBuf,
    /// Device and inode, to detect that the file was replaced.
    identity: (u64, u64),
}

impl StoredFile {
    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file unless it has been replaced. Blocks.
    pub fn remove(&self) {
        let ours =
            fs::symlink_metadata(&self.path).is_ok_and(|found| identity(&found) == self.identity);
        if !ours {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("cannot remove '{}': {error}", self.path.display());
        }
    }
}

fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Returns the file name in the path of a URL, without the query.
///
/// # Errors
/// The path does not end in a usable file name.
pub(super) fn name_of(url: &str) -> Result<String, ErrorResponse> {
    let whole = url.split(['?', '#']).next().unwrap_or(url);
    let without_scheme = whole.split_once("://").map_or(whole, |(_, rest)| rest);
    let name = without_scheme
        .split_once('/')
        .and_then(|(_, path)| path.rsplit('/').next())
        .unwrap_or_default();
    let usable = !name.is_empty() && !name.starts_with('.') && name.len() <= 200;
    if usable && !name.contains(|c: char| c.is_control() || c == '\\') {
        return Ok(name.to_owned());
    }
    Err(ErrorResponse::download(format!(
        "Failed to download archive from: {url}: the path of the URL does not end in a file name"
    )))
}

/// An incomplete file, which gets its name with [`UnfinishedFile::finish`] and is removed if
/// dropped before.
#[derive(Debug)]
pub(super) struct UnfinishedFile {
    path: PathBuf,
    target: PathBuf,
    file: File,
    origin: CodeOrigin,
}

impl UnfinishedFile {
    /// Creates an incomplete file in the store.
    ///
    /// # Errors
    /// The file cannot be created, or the mark of a file that came by request cannot be set.
    pub(super) fn new(store: &Path, name: &str, origin: CodeOrigin) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        remove_incomplete(store);
        let (begin, end) = PART;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = store.join(format!("{begin}{}-{number}-{name}{end}", std::process::id()));
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
            // The lock shows other registrations, also of other servers, that the file is still in
            // use. Errors are ignored: some file systems have no locks.
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
            // Before the lock, another registration may have removed the file as one of a killed
            // server.
            if locked != Err(Errno::WOULDBLOCK) && fs::symlink_metadata(&path).is_ok() {
                let part = Self { path, target: store.join(name), file, origin };
                // Before the download.
                part.mark()?;
                return Ok(part);
            }
            let _ = fs::remove_file(&path);
        }
    }

    /// Returns the file to write to.
    pub(super) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Renames the file to its final name.
    ///
    /// # Errors
    /// A file of this name exists, or writing to the disk or renaming fails.
    pub(super) fn finish(self) -> io::Result<StoredFile> {
        self.mark()?;
        // A file with its final name is used after a power failure too.
        self.file.sync_all()?;
        let identity = identity(&self.file.metadata()?);
        match renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE) {
            // Some file systems lack RENAME_NOREPLACE; use a hard link there.
            Err(Errno::INVAL | Errno::NOSYS) => fs::hard_link(&self.path, &self.target)?,
            renamed => renamed?,
        }
        Ok(StoredFile { path: self.target.clone(), identity })
    }

    /// Marks a file that came by request, with its current content.
    fn mark(&self) -> io::Result<()> {
        if self.origin == CodeOrigin::Request {
            fsetxattr(
                &self.file,
                MARK,
                content(&self.file.metadata()?).as_bytes(),
                XattrFlags::empty(),
            )?;
        }
        Ok(())
    }
}

/// The extended attribute of a file in the model store that came by request.
const MARK: &str = "user.pharos.by_request";

/// Returns the size and the time of the last change, which identify the content.
fn content(found: &fs::Metadata) -> String {
    format!("{} {} {}", found.size(), found.mtime(), found.mtime_nsec())
}

/// Returns whether a file of the model store came by request, and not from the operator: also after
/// a restart, and if the file is registered by its name. A file that was written since is the
/// operator's.
pub(super) fn came_by_request(path: &Path) -> bool {
    let mut value = [0; 128];
    let Ok(length) = getxattr(path, MARK, &mut value) else { return false };
    let marked = value.get(..length).unwrap_or_default();
    fs::metadata(path).is_ok_and(|found| content(&found).as_bytes() == marked)
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes incomplete files of servers that were killed.
fn remove_incomplete(store: &Path) {
    let unfinished = |name: &OsString| {
        name.to_str().is_some_and(|name| name.starts_with(PART.0) && name.ends_with(PART.1))
    };
    for entry in fs::read_dir(store).into_iter().flatten().flatten() {
        if !unfinished(&entry.file_name()) || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let Ok(file) = File::open(entry.path()) else { continue };
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::*;

    #[test]
    fn files_that_came_by_request_are_recognized_until_they_are_written_again() {
        let folder = tempfile::tempdir().unwrap();
        let kept = |name: &str, origin| {
            let mut part = UnfinishedFile::new(folder.path(), name, origin).unwrap();
            part.file().write_all(b"content").unwrap();
            part.finish().unwrap().path().to_owned()
        };
        let sent = kept("sent.mar", CodeOrigin::Request);
        assert!(came_by_request(&sent) && !came_by_request(&kept("own.mar", CodeOrigin::Operator)));
        fs::write(&sent, "other content").unwrap();
        assert!(!came_by_request(&sent));
    }

    #[test]
    fn concurrent_downloads_do_not_remove_the_files_of_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let killed = folder.path().join(".pharos-1-0-old.mar.part");
        fs::write(&killed, "half").unwrap();
        let keep = |thread: usize| {
            for number in 0..200 {
                let part = UnfinishedFile::new(
                    folder.path(),
                    &format!("{thread}-{number}.mar"),
                    CodeOrigin::Operator,
                )
                .unwrap();
                let kept = part.finish().unwrap();
                assert!(kept.path().is_file());
                kept.remove();
            }
        };
        thread::scope(|scope| (0..8).for_each(|thread| drop(scope.spawn(move || keep(thread)))));
        assert!(!killed.exists(), "files of killed servers are removed");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
