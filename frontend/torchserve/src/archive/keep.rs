//! Archives of URLs are kept in the model store, under the name of their file, so that a snapshot can name them and the next
//! start needs no network. A file is written completely before it gets its name, and never replaces another.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};

use crate::Refused;

/// How the names of files begin and end that are not complete.
const PART: (&str, &str) = (".pharos-", ".part");

/// A file of the model store that this server has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    path: PathBuf,
    /// Device and inode: what has replaced the file since is not ours.
    identity: (u64, u64),
}

impl Kept {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it, unless something else is there by now. Blocks.
    pub fn remove(&self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|found| identity(&found) == self.identity);
        if !ours {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!("'{}' cannot be removed: {error}", self.path.display());
        }
    }
}

fn identity(metadata: &fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// The name of the file that a URL leads to, without its query.
///
/// # Errors
/// It names none.
pub(super) fn name_of(url: &str) -> Result<String, Refused> {
    let path = url.split(['?', '#']).next().unwrap_or(url);
    let path = path.split_once("://").map_or(path, |(_, rest)| rest);
    let name = path.split_once('/').and_then(|(_, path)| path.rsplit('/').next()).unwrap_or_default();
    let usable = !name.is_empty() && !name.starts_with('.') && name.len() <= 200;
    if usable && !name.contains(|c: char| c.is_control() || c == '\\') {
        return Ok(name.to_owned());
    }
    Err(Refused::download(format!("Failed to download archive from: {url}: its path ends in no file name")))
}

/// A file that gets its name when it is complete; it goes if it never is.
#[derive(Debug)]
pub(super) struct Part {
    path: PathBuf,
    target: PathBuf,
    file: File,
}

impl Part {
    /// Begins a file of the store.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn new(store: &Path, name: &str) -> io::Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        remove_left(store);
        let (begin, end) = PART;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = store.join(format!("{begin}{}-{number}-{name}{end}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
        // Locked as long as it is written: others see that it is not left over. File systems without locks do without.
        let _ = flock(&file, FlockOperation::NonBlockingLockExclusive);
        Ok(Self { path, target: store.join(name), file })
    }

    /// What is to be written.
    pub(super) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// A file of this name is there, or the name cannot be given.
    pub(super) fn finish(self) -> io::Result<Kept> {
        let identity = identity(&self.file.metadata()?);
        match renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE) {
            // File systems that cannot do this have hard links.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => fs::hard_link(&self.path, &self.target)?,
            renamed => renamed?,
        }
        Ok(Kept { path: self.target.clone(), identity })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Removes what killed servers have not completed.
fn remove_left(store: &Path) {
    let unfinished =
        |name: &OsString| name.to_str().is_some_and(|name| name.starts_with(PART.0) && name.ends_with(PART.1));
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
