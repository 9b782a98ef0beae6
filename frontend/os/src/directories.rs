//! Directories that the server creates for its own use: private to its user, and marked. Recursive
//! removal, and removal by file name, happen only in these directories.
//!
//! Single files with a fixed name in other directories are replaced only if the server wrote them
//! ([`replace`]).
//!
//! A temporary directory is removed when the server ends. A later server removes directories of a
//! killed server, whose locks are free.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::removal::{empty_except, remove_tree};

/// The name and content of the file that marks a directory.
const MARKER: &str = ".pharos-directory";
const MARK: &[u8] = b"This directory was made by Pharos, which removes what is in it.\n";

/// The lock file of a temporary directory, locked while its server lives.
const LOCK: &str = "lock";

/// The prefix of the names of temporary directories.
const PREFIX: &str = "pharos-";

/// The purpose of a temporary directory; part of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(&'static str);

impl Kind {
    /// Files of load requests.
    pub const LOAD: Self = Self("load");
    /// Examples inside the executable.
    pub const EXAMPLE: Self = Self("example");
    /// Copies of objects from an object store.
    pub const STORE: Self = Self("store");
    /// Files of a process that runs a model.
    pub const WORKER: Self = Self("worker");

    const ALL: [Self; 4] = [Self::LOAD, Self::EXAMPLE, Self::STORE, Self::WORKER];

    /// Creates another kind. Lower-case letters only.
    pub const fn new(name: &'static str) -> Self {
        Self(name)
    }
}

/// A directory for temporary files, removed when dropped.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
    removed: AtomicBool,
    _lock: File,
}

impl Temporary {
    /// Creates a new directory in the system's temporary directory.
    ///
    /// # Errors
    /// The directory cannot be created; the text names it.
    pub fn new(kind: Kind) -> io::Result<Self> {
        Self::new_in(&std::env::temp_dir(), kind)
    }

    fn new_in(parent: &Path, kind: Kind) -> io::Result<Self> {
        let mut number = 0u64;
        let path = loop {
            let path = parent.join(format!("{PREFIX}{}-{}-{number}", kind.0, std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => break path,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
                Err(error) => return Err(named(&path, &error)),
            }
        };
        // Marked only after it is locked: an unlocked directory with a mark belongs to a killed
        // server.
        let opened =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(path.join(LOCK));
        let locked = opened.and_then(|lock| {
            lock.try_lock().map_err(io::Error::from)?;
            mark(&path).map(|()| lock)
        });
        match locked {
            Ok(lock) => Ok(Self { path, removed: AtomicBool::new(false), _lock: lock }),
            Err(error) => {
                // Without a mark, no later server would remove the directory.
                let _ = fs::remove_file(path.join(LOCK));
                let _ = fs::remove_dir(&path);
                Err(named(&path, &error))
            }
        }
    }

    /// Returns the path of the directory. The names `lock` and `.pharos-directory` are in use.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the directory with its content, even if it is still in use.
    pub fn remove(&self) {
        if !self.removed.swap(true, Ordering::Relaxed)
            && let Err(error) = removed(&self.path)
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!("cannot remove '{}': {error}", self.path.display());
        }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Removes temporary directories of this user whose servers were killed, also of `other` kinds.
pub fn remove_abandoned(other: &[Kind]) {
    let kinds: Vec<Kind> = Kind::ALL.iter().chain(other).copied().collect();
    remove_abandoned_in(&std::env::temp_dir(), &kinds);
}

fn remove_abandoned_in(parent: &Path, kinds: &[Kind]) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| is_temporary(name, kinds))
            && let Some(lock) = abandoned(&entry.path())
        {
            let path = entry.path();
            match removed(&path) {
                Ok(()) => {
                    tracing::info!("removed '{}', left behind by a killed server", path.display())
                }
                Err(error) => tracing::warn!("cannot remove '{}': {error}", path.display()),
            }
            drop(lock);
        }
    }
}

/// Removes a temporary directory. Its lock and its marker are removed last: if something cannot be
/// removed, a later server tries again.
fn removed(path: &Path) -> io::Result<()> {
    empty_except(path, &[LOCK, MARKER])?;
    remove_tree(path)
}

/// Returns whether [`Temporary`] creates directories of these kinds with this name.
fn is_temporary(name: &str, kinds: &[Kind]) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    kinds.iter().any(|kind| {
        let numbers =
            name.strip_prefix(PREFIX).and_then(|rest| rest.strip_prefix(kind.0)?.strip_prefix('-'));
        numbers
            .and_then(|numbers| numbers.split_once('-'))
            .is_some_and(|(pid, count)| number(pid) && number(count))
    })
}

/// Returns the lock of a marked directory that no server uses.
fn abandoned(path: &Path) -> Option<File> {
    if !is_own(path) {
        return None;
    }
    let lock = opened(&path.join(LOCK)).ok()?;
    lock.try_lock().ok()?;
    // Another server may have removed the directory, and a third created one with the same name.
    let held = lock.metadata().ok()?;
    let there = fs::symlink_metadata(path.join(LOCK)).ok()?;
    ((held.dev(), held.ino()) == (there.dev(), there.ino())).then_some(lock)
}

/// Creates a directory and its parents, and marks it. An existing directory must be marked or
/// empty.
///
/// # Errors
/// The directory cannot be created, other users can write to it, or it has other files; the text
/// names it.
pub fn make(path: &Path) -> io::Result<()> {
    make_marked(path).map_err(|error| named(path, &error))
}

fn make_marked(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    if !is_private(path)? {
        return Err(io::Error::other(
            "it is a link, belongs to another user, or other users can write to it",
        ));
    }
    if is_marked(path) {
        return Ok(());
    }
    // Another server may be marking the directory concurrently.
    let mut entries = fs::read_dir(path)?.flatten();
    if entries.any(|entry| !entry.file_name().to_string_lossy().starts_with(MARKER))
        && !is_marked(path)
    {
        return Err(io::Error::other(format!(
            "it has files that Pharos did not create (there is no '{MARKER}')"
        )));
    }
    mark(path)
}

/// Returns whether a path is a directory that this user's servers have created and marked.
pub(crate) fn is_own(path: &Path) -> bool {
    is_private(path).unwrap_or(false) && is_marked(path)
}

/// Returns whether a path is in a directory that this user's servers have created and marked.
pub fn is_in_own(path: &Path) -> bool {
    path.ancestors().any(is_own)
}

/// Returns whether a path is in a temporary directory of this kind, of any server. The path has no
/// links.
pub fn is_in_temporary(path: &Path, kind: Kind) -> bool {
    let temporary = std::env::temp_dir();
    let parent = fs::canonicalize(&temporary).unwrap_or(temporary);
    let first = path.strip_prefix(&parent).ok().and_then(|inside| inside.components().next());
    first.and_then(|name| name.as_os_str().to_str()).is_some_and(|name| is_temporary(name, &[kind]))
}

/// Locks a directory that [`make`] created.
///
/// # Errors
/// Another process holds the lock, or the file cannot be opened.
pub fn lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600).custom_flags(FLAGS);
    let lock = options.open(path.join(LOCK))?;
    lock.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => io::Error::other("another server uses it"),
        TryLockError::Error(error) => error,
    })?;
    Ok(lock)
}

/// The maximum number of bytes of a file that [`read`] and [`replace`] read.
const MAX_BYTES: u64 = 64 << 10;

/// Returns the content and the owner of a regular file; does not follow links. `None` if the file
/// does not exist.
///
/// # Errors
/// The file cannot be read, or is not a regular file.
pub fn read(path: &Path) -> io::Result<Option<(String, u32)>> {
    let Some((file, owner)) = regular(path)? else { return Ok(None) };
    Ok(Some((text_of(file, MAX_BYTES)?, owner)))
}

/// Returns the first bytes of a regular file as text; does not follow a link at its name. `None` if
/// the file does not exist.
///
/// # Errors
/// As [`read`].
pub fn read_within(path: &Path, limit: u64) -> io::Result<Option<String>> {
    regular(path)?.map(|(file, _)| text_of(file, limit)).transpose()
}

/// Returns the first bytes of a regular file of a user, as [`read_within`].
///
/// # Errors
/// As [`read`], or the file belongs to another user.
pub fn read_of(path: &Path, user: u32, limit: u64) -> io::Result<Option<String>> {
    let Some((file, owner)) = regular(path)? else { return Ok(None) };
    if owner != user {
        return Err(io::Error::other("it belongs to another user"));
    }
    text_of(file, limit).map(Some)
}

fn text_of(file: File, limit: u64) -> io::Result<String> {
    let mut text = String::new();
    file.take(limit).read_to_string(&mut text)?;
    Ok(text)
}

/// Opens a regular file, and returns its owner.
fn regular(path: &Path) -> io::Result<Option<(File, u32)>> {
    let file = match opened(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(Some((file, found.uid())))
}

/// Writes a file under a temporary name, then renames it. Replaces an existing file only if it is a
/// regular file of this user and `is_ours` accepts its text; never writes into it or follows a
/// link.
///
/// # Errors
/// The file cannot be written, or the name is in use by another file; the text names it.
pub fn replace(path: &Path, text: &str, is_ours: impl Fn(&str) -> bool) -> io::Result<()> {
    write_and_rename(path, text, is_ours).map_err(|error| named(path, &error))
}

fn write_and_rename(path: &Path, text: &str, is_ours: impl Fn(&str) -> bool) -> io::Result<()> {
    let user = rustix::process::geteuid().as_raw();
    if read(path)?
        .is_some_and(|(there, owner)| owner != user || !(there.is_empty() || is_ours(&there)))
    {
        return Err(io::Error::other("it exists and was not written by this server; remove it"));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part)?;
    let done = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&part, path));
    done.inspect_err(|_| drop(fs::remove_file(&part)))
}

/// Links are not followed, and opening a FIFO does not block.
const FLAGS: i32 =
    rustix::fs::OFlags::NOFOLLOW.union(rustix::fs::OFlags::NONBLOCK).bits().cast_signed();

fn opened(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(FLAGS).open(path)
}

/// Returns whether the path is a directory of this user that other users cannot write to.
fn is_private(path: &Path) -> io::Result<bool> {
    let found = fs::symlink_metadata(path)?;
    Ok(found.is_dir()
        && found.uid() == rustix::process::geteuid().as_raw()
        && found.mode() & 0o022 == 0)
}

fn is_marked(path: &Path) -> bool {
    let mut text = Vec::new();
    let read = opened(&path.join(MARKER)).and_then(|file| file.take(1024).read_to_end(&mut text));
    read.is_ok() && text == MARK
}

/// Marks a directory as created by the server. Writes the marker under a temporary name and renames
/// it, so that several servers and threads may do so at once without reading a partial marker.
fn mark(path: &Path) -> io::Result<()> {
    let own = format!("{MARKER}.{}-{:?}", std::process::id(), std::thread::current().id());
    let part = path.join(own);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(FLAGS);
    let mut file = options.open(&part)?;
    let marked = file.write_all(MARK).and_then(|()| fs::rename(&part, path.join(MARKER)));
    marked.inspect_err(|_| drop(fs::remove_file(&part)))
}

pub(crate) fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{}': {error}", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_in_temporary_directories_are_recognized() {
        let directory = Temporary::new(Kind::WORKER).unwrap();
        let inside = fs::canonicalize(directory.path()).unwrap().join("files/e");
        assert!(is_in_temporary(&inside, Kind::WORKER) && !is_in_temporary(&inside, Kind::LOAD));
        assert!(is_in_own(&inside) && !is_in_own(&std::env::temp_dir().join("e")));
        assert!(!is_in_temporary(Path::new("/nonexistent/pharos-worker-1-0/e"), Kind::WORKER));
    }

    #[test]
    fn removes_its_own_temporary_directory_and_those_of_killed_servers() {
        let parent = Temporary::new(Kind::LOAD).unwrap();
        let [one, other] = [(); 2].map(|()| Temporary::new_in(parent.path(), Kind::STORE).unwrap());
        assert_ne!(one.path(), other.path());
        fs::create_dir_all(one.path().join("models/0")).unwrap();
        let left = one.path().to_owned();
        // Simulates a killed server: the lock is free, the files exist.
        one.removed.store(true, Ordering::Relaxed);
        drop(one);
        remove_abandoned_in(parent.path(), &Kind::ALL);
        assert!(!left.exists() && other.path().is_dir());
        let path = other.path().to_owned();
        drop(other);
        assert!(!path.exists());
    }

    #[test]
    fn removes_only_marked_unlocked_directories() {
        let parent = Temporary::new(Kind::LOAD).unwrap();
        let made = |name: &str, marked: bool, locked: bool| {
            let path = parent.path().join(name);
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            if locked {
                fs::write(path.join(LOCK), "").unwrap();
            }
            if marked {
                mark(&path).unwrap();
            }
        };
        made("pharos-store-1-0", false, true);
        made("pharos-store-1-1", true, false);
        made("pharos-store-mine", true, true);
        made("pharos-other-1-0", true, true);
        made("target", true, true);
        symlink(parent.path().join("target"), parent.path().join("pharos-load-1-0")).unwrap();
        let names = || fs::read_dir(parent.path()).unwrap().count();
        let before = names();
        remove_abandoned_in(parent.path(), &Kind::ALL);
        assert_eq!(names(), before);
        made("pharos-store-1-2", true, true);
        remove_abandoned_in(parent.path(), &Kind::ALL);
        assert_eq!(names(), before);
    }

    #[test]
    fn replaces_only_files_of_the_server() {
        let parent = Temporary::new(Kind::LOAD).unwrap();
        let path = parent.path().join("file");
        let target = parent.path().join("target");
        let is_ours = |text: &str| text.starts_with("ours");
        for text in ["ours 1", "ours 2"] {
            replace(&path, text, is_ours).unwrap();
            assert_eq!(read(&path).unwrap().unwrap().0, text);
        }
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        fs::write(&path, "mine").unwrap();
        let error = replace(&path, "ours 3", is_ours).unwrap_err().to_string();
        assert!(error.contains("file': it exists and was not written by this server"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        fs::remove_file(&path).unwrap();
        fs::write(&target, "ours").unwrap();
        symlink(&target, &path).unwrap();
        assert!(replace(&path, "ours 4", is_ours).is_err() && read(&path).is_err());
        assert_eq!(fs::read_to_string(&target).unwrap(), "ours");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, "ours 5", is_ours).is_err());
        assert!(
            !fs::read_dir(parent.path())
                .unwrap()
                .flatten()
                .any(|entry| entry.file_name().to_string_lossy().ends_with(".part"))
        );
    }

    #[test]
    fn refuses_a_directory_with_other_files() {
        let parent = Temporary::new(Kind::LOAD).unwrap();
        let fresh = parent.path().join("a/fresh");
        let used = parent.path().join("used");
        std::thread::scope(|scope| {
            let made: Vec<_> = (0..8).map(|_| scope.spawn(|| make(&fresh))).collect();
            made.into_iter().for_each(|made| made.join().unwrap().unwrap());
        });
        fs::write(fresh.join("file"), "").unwrap();
        make(&fresh).unwrap();
        assert_eq!(fs::read_dir(&fresh).unwrap().count(), 2, "the mark and the file");
        fs::create_dir(&used).unwrap();
        fs::write(used.join("mine"), "").unwrap();
        let error = make(&used).unwrap_err().to_string();
        assert!(error.contains("used': it has files that Pharos did not create"), "{error}");
        let link = parent.path().join("link");
        symlink(&fresh, &link).unwrap();
        assert!(make(&link).unwrap_err().to_string().contains("it is a link"));
        let held = lock(&fresh).unwrap();
        assert!(lock(&fresh).unwrap_err().to_string().contains("another server uses it"));
        drop(held);
        assert!(lock(&fresh).is_ok());
    }
}
