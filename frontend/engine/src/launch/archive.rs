//! Packed Python environments. Each archive is unpacked once into a cache folder, under the hash of
//! its contents, so that a changed archive is a different environment.
//!
//! Environments are in a marked subdirectory of the folder, which may contain other files. Each has
//! a directory and a lock file there. Servers that use the environment hold a shared lock; the
//! server that unpacks or removes it holds an exclusive lock. The lock file contains `ready` when
//! the directory is complete.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

use super::conda::relocate;
use super::reading::Reading;
use super::unpack::{Limits, unpack};
use pharos_os::client::deepest;
use pharos_os::clock;
use pharos_os::directories;
use pharos_os::removal::remove_tree;
use pharos_os::worker_user::{self, WorkerUser};

/// The subdirectory for environments.
const SUBDIR: &str = "pharos-environments";

/// The number of characters of a key: the first hexadecimal digits of a hash.
const KEY_DIGITS: usize = 32;

/// Environments unused for this long are removed when another one is unpacked.
const KEPT: Duration = Duration::from_hours(24 * 14);

/// The pause before retrying after another server has failed to unpack.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The contents of the lock file of a complete environment.
const READY: &[u8] = b"ready\n";

/// Where environments are unpacked.
pub(super) struct Cache<'a> {
    /// The folder, which is created if it does not exist.
    pub(super) folder: &'a Path,
    /// The user to whom they belong; `None` for the user of this process.
    pub(super) user: Option<&'a WorkerUser>,
}

/// An unpacked environment. It is not removed while this value exists.
#[derive(Debug)]
pub(crate) struct Environment {
    path: PathBuf,
    _lock: File,
}

impl Environment {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// An archive that was opened.
pub(super) struct Source<'a> {
    /// The path for messages.
    pub(super) path: &'a Path,
    file: File,
    reading: &'a Reading,
}

impl<'a> Source<'a> {
    /// Opens an archive, with the rights of the user to whom its environment will belong: another
    /// one must not get files that it may not read.
    ///
    /// # Errors
    /// The file cannot be read, or is not a regular file with content. The kernel's files in
    /// `/proc` are empty, and reading them can block.
    pub(super) fn open(
        path: &'a Path,
        user: Option<&WorkerUser>,
        reading: &'a Reading,
    ) -> Result<Self, String> {
        let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
        let opened = reading.watch(|| match user {
            Some(user) => user.open(path),
            None => {
                OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)
            }
        });
        let file = opened.map_err(|error| match user {
            Some(user) => format!("the user '{}' cannot read it: {error}", user.name()),
            None => unreadable(error),
        })?;
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() {
            return Err("it is not a regular file".to_owned());
        }
        if found.size() == 0 {
            return Err("it is empty".to_owned());
        }
        Ok(Self { path, file, reading })
    }

    /// Returns the path of the opened file, without links.
    ///
    /// # Errors
    /// The file has no path.
    pub(super) fn real_path(&self) -> io::Result<PathBuf> {
        fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }
}

/// Returns the environment of an archive, unpacking it if necessary. `interpreter` returns the
/// command of its Python.
///
/// # Errors
/// The archive or the folder cannot be used.
pub(super) fn unpacked(
    cache: &Cache<'_>,
    archive: &Source<'_>,
    interpreter: impl FnOnce(&Path) -> Result<Command, String>,
) -> Result<Environment, String> {
    let in_folder = |error: io::Error| {
        format!("the folder '{}' of environments: {error}", cache.folder.display())
    };
    let own = prepare(cache).map_err(in_folder)?;
    let folder = own.as_path();
    let state = state(&archive.file)?;
    let key = key(archive.reading.of(&archive.file), cache.user).map_err(unreadable)?;
    let path = folder.join(&key);
    let mut lock = locked(folder, &key).map_err(in_folder)?;
    let ready = is_ready(&mut lock).map_err(in_folder)?;
    if ready && !path.is_dir() {
        flock(&lock, FlockOperation::NonBlockingLockExclusive)
            .map_err(|_| format!("'{}' was removed while other servers use it", path.display()))?;
    }
    if !ready || !path.is_dir() {
        remove_unused(folder, &key);
        lock.set_len(0).and_then(|()| remove(&path)).map_err(in_folder)?;
        tracing::info!(
            "unpacking the environment '{}' into '{}'",
            archive.path.display(),
            path.display()
        );
        if let Err(error) = make(cache, archive, state, &path, interpreter) {
            let _ = remove(&path);
            return Err(error);
        }
        // Otherwise the mark could outlive a power failure that the files do not.
        rustix::fs::syncfs(&lock).map_err(|error| in_folder(error.into()))?;
        lock.seek(SeekFrom::Start(0)).and_then(|_| lock.write_all(READY)).map_err(in_folder)?;
    }
    // The modification time of the lock file is the time of the last use.
    let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
    let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
    rustix::fs::futimens(&lock, &times).map_err(|error| in_folder(error.into()))?;
    flock(&lock, FlockOperation::LockShared).map_err(|error| in_folder(error.into()))?;
    Ok(Environment { path, _lock: lock })
}

/// Makes an environment from its archive, which had this state before its key was computed. Part of
/// it may be left on an error.
fn make(
    cache: &Cache<'_>,
    archive: &Source<'_>,
    before: State,
    path: &Path,
    interpreter: impl FnOnce(&Path) -> Result<Command, String>,
) -> Result<(), String> {
    let folder = cache.folder.join(SUBDIR);
    (&archive.file).rewind().map_err(unreadable)?;
    unpack(archive.reading.of(&archive.file), path, &Limits::default()).map_err(|error| {
        // The errors of `tar` name only the file.
        format!("it cannot be unpacked into '{}': {}", folder.display(), deepest(&error))
    })?;
    cache.user.map_or(Ok(()), |user| user.give(path)).map_err(|error| {
        format!("the folder '{}' of environments: {error}", cache.folder.display())
    })?;
    relocate(path, interpreter(path)?)?;
    // Otherwise the environment could have other contents than its key says.
    if state(&archive.file)? == before {
        Ok(())
    } else {
        Err("it was changed while it was unpacked; load the model again when the file is complete"
            .to_owned())
    }
}

/// What changes when a file is written: its size and its modification time in seconds and
/// nanoseconds.
type State = (u64, i64, i64);

fn state(file: &File) -> Result<State, String> {
    let found = file.metadata().map_err(unreadable)?;
    Ok((found.size(), found.mtime(), found.mtime_nsec()))
}

fn unreadable(error: io::Error) -> String {
    format!("it cannot be read: {error}")
}

/// Creates the folder and the subdirectory. Its contents are executed, so the folder must be
/// writable only by this user.
fn prepare(cache: &Cache<'_>) -> io::Result<PathBuf> {
    let folder = cache.folder;
    match cache.user {
        Some(_) => {
            worker_user::make_passable(folder)?;
            worker_user::check_directory(folder).map_err(io::Error::other)?;
        }
        None => DirBuilder::new().recursive(true).mode(0o700).create(folder)?,
    }
    let metadata = fs::metadata(folder)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err(io::Error::other(
            "other users can write to it; change --environment-cache-directory",
        ));
    }
    let own = folder.join(SUBDIR);
    directories::make(&own).map(|()| own)
}

/// Returns the name of an environment: a hash of the bytes of its archive, and of the user to whom
/// it belongs if that is not the server's.
fn key(mut file: impl Read, user: Option<&WorkerUser>) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    if let Some(user) = user {
        hasher.update(format!("user {}\n", user.uid()).as_bytes());
    }
    let mut piece = vec![0; 1 << 20];
    loop {
        let read = file.read(&mut piece)?;
        if read == 0 {
            return Ok(hasher.finalize().to_hex().as_str().chars().take(KEY_DIGITS).collect());
        }
        hasher.update(piece.get(..read).unwrap_or_default());
    }
}

fn lock_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.lock"))
}

/// Opens the lock file of an environment with an exclusive lock, or with a shared lock if the
/// environment is ready. Waits while another server unpacks it.
///
/// Does not wait for an exclusive lock, because servers that use the environment hold shared locks
/// until they exit.
fn locked(folder: &Path, key: &str) -> io::Result<File> {
    let path = lock_path(folder, key);
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)?;
        let alone = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK) => {
                flock(&file, FlockOperation::LockShared)?;
                false
            }
            Err(error) => return Err(error.into()),
        };
        if !is_the_file(&file, &path) {
            continue;
        }
        let mut reader = &file;
        if alone || is_ready(&mut reader)? {
            return Ok(file);
        }
        // The server that unpacked it has failed; try to unpack it here.
        drop(file);
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// Returns whether the path still refers to the file, which may have been removed before it was
/// locked.
fn is_the_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(opened), Ok(found)) => opened.dev() == found.dev() && opened.ino() == found.ino(),
        _ => false,
    }
}

fn is_ready(lock: &mut (impl Read + Seek)) -> io::Result<bool> {
    let mut text = Vec::new();
    lock.seek(SeekFrom::Start(0))?;
    lock.take(64).read_to_end(&mut text)?;
    Ok(text == READY)
}

fn remove(path: &Path) -> io::Result<()> {
    match remove_tree(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether a name has the form that [`key`] returns.
fn is_key(name: &str) -> bool {
    name.len() == KEY_DIGITS && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Removes environments that have been unused for [`KEPT`]; ignores errors.
fn remove_unused(folder: &Path, except: &str) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(key) = name.to_str().and_then(|name| name.strip_suffix(".lock")) else { continue };
        if key == except || !is_key(key) {
            continue;
        }
        let used = entry.metadata().map_or(i64::MAX, |metadata| metadata.mtime());
        let now = i64::try_from(clock::wall_ms() / 1000).unwrap_or(0);
        if now.saturating_sub(used) < KEPT.as_secs().cast_signed() {
            continue;
        }
        let Ok(lock) = OpenOptions::new().write(true).open(entry.path()) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok()
            && is_the_file(&lock, &entry.path())
        {
            tracing::info!("removing the unused environment '{}'", folder.join(key).display());
            // No longer ready from here on: the removal may fail, or this process may be killed.
            let removed = lock.set_len(0).and_then(|()| remove(&folder.join(key)));
            let _ = removed.and_then(|()| fs::remove_file(entry.path()));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use tar::{Builder, EntryType, Header};

    use super::*;

    type Piece<'a> = (EntryType, &'a str, &'a str);

    /// Writes an archive with exactly these names, valid or not.
    fn archive(path: &Path, pieces: &[Piece<'_>]) {
        let mut builder =
            Builder::new(GzEncoder::new(File::create(path).unwrap(), Compression::fast()));
        for (kind, name, content) in pieces {
            let mut header = Header::new_gnu();
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_entry_type(*kind);
            header.set_mode(0o755);
            let data = if *kind == EntryType::Regular { content.as_bytes() } else { &[] };
            header.set_size(data.len() as u64);
            if data.is_empty() && !content.is_empty() {
                header.set_link_name_literal(content).unwrap();
            }
            header.set_cksum();
            builder.append(&header, data).unwrap();
        }
        builder.into_inner().unwrap().finish().unwrap();
    }

    fn unpacked(
        cache: &Cache<'_>,
        archive: &Path,
        interpreter: impl FnOnce(&Path) -> Result<Command, String>,
    ) -> Result<Environment, String> {
        let reading = Reading::default();
        super::unpacked(cache, &Source::open(archive, None, &reading)?, interpreter)
    }

    fn at(folder: &Path) -> Cache<'_> {
        Cache { folder, user: None }
    }

    fn python(home: &Path) -> Result<Command, String> {
        let mut command = Command::new(home.join("bin/python3"));
        command.env("VIRTUAL_ENV", home);
        Ok(command)
    }

    #[test]
    fn concurrent_users_share_an_environment() {
        let folder = tempfile::tempdir().unwrap();
        let one = folder.path().join("one.tar.gz");
        archive(&one, &[(EntryType::Regular, "bin/python3", "#!/bin/sh\n")]);
        for round in 0..50 {
            let (sender, done) = mpsc::channel();
            for _ in 0..4 {
                let sender = sender.clone();
                let one = one.clone();
                let cache = folder.path().join(round.to_string());
                thread::spawn(move || sender.send(unpacked(&at(&cache), &one, python)));
            }
            let used: Vec<_> = (0..4)
                .map(|_| done.recv_timeout(Duration::from_secs(20)).unwrap().unwrap())
                .collect();
            assert_eq!(used.len(), 4);
        }
    }

    #[test]
    fn an_archive_is_unpacked_once_and_again_after_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("a/cache");
        let one = folder.path().join("one.tar.gz");
        let copy = folder.path().join("copy.tar.gz");
        archive(
            &one,
            &[
                (EntryType::Regular, "bin/python3", "#!/bin/sh\n"),
                (EntryType::Symlink, "bin/python", "python3"),
            ],
        );
        fs::copy(&one, &copy).unwrap();
        let same: Vec<PathBuf> = thread::scope(|scope| {
            let get = |path: PathBuf, cache: PathBuf| {
                move || unpacked(&at(&cache), &path, python).unwrap().path().to_owned()
            };
            let threads: Vec<_> = [&one, &copy, &one]
                .map(|path| scope.spawn(get(path.clone(), cache.clone())))
                .into_iter()
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let home = same.first().unwrap();
        assert!(same.iter().all(|path| path == home), "{same:?}");
        assert_eq!(fs::read_link(home.join("bin/python")).unwrap(), Path::new("python3"));
        assert_eq!(fs::metadata(home.join("bin/python3")).unwrap().mode() & 0o777, 0o755);
        fs::write(home.join("mark"), "").unwrap();
        assert!(
            unpacked(&at(&cache), &one, python).unwrap().path().join("mark").exists(),
            "the archive was unpacked again"
        );
        archive(&one, &[(EntryType::Regular, "bin/python3", "#!/bin/bash\n")]);
        let other = unpacked(&at(&cache), &one, python).unwrap();
        assert_ne!(other.path(), home);
        // An interrupted unpacking is repeated.
        fs::write(
            cache
                .join(SUBDIR)
                .join(format!("{}.lock", home.file_name().unwrap().to_str().unwrap())),
            "",
        )
        .unwrap();
        assert!(!unpacked(&at(&cache), &copy, python).unwrap().path().join("mark").exists());
    }

    #[test]
    fn an_archive_that_is_changed_while_it_is_unpacked_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let path = folder.path().join("one.tar.gz");
        archive(&path, &[(EntryType::Regular, "bin/python3", "old")]);
        let changing = |home: &Path| {
            archive(&path, &[(EntryType::Regular, "bin/python3", "new")]);
            File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(std::time::UNIX_EPOCH)
                .unwrap();
            python(home)
        };
        let error = unpacked(&at(&cache), &path, changing).unwrap_err();
        assert!(error.starts_with("it was changed while it was unpacked"), "{error}");
        let home = unpacked(&at(&cache), &path, python).unwrap();
        assert_eq!(fs::read_to_string(home.path().join("bin/python3")).unwrap(), "new");
    }

    #[test]
    fn an_environment_whose_removal_ends_early_is_not_ready() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let path = folder.path().join("one.tar.gz");
        archive(&path, &[(EntryType::Regular, "bin/python3", "")]);
        let home = unpacked(&at(&cache), &path, python).unwrap().path().to_owned();
        let lock = home.with_extension("lock");
        File::options()
            .write(true)
            .open(&lock)
            .unwrap()
            .set_modified(std::time::UNIX_EPOCH)
            .unwrap();
        // What cannot be removed.
        fs::remove_dir_all(&home).unwrap();
        fs::write(&home, "").unwrap();
        remove_unused(home.parent().unwrap(), "");
        assert!(home.exists() && fs::read(&lock).unwrap().is_empty());
    }

    #[test]
    fn removes_long_unused_environments_but_not_used_ones() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let environment = |name: &str| {
            let path = folder.path().join(name);
            archive(&path, &[(EntryType::Regular, "bin/python3", name)]);
            unpacked(&at(&cache), &path, python).unwrap()
        };
        // Foreign files with old lock files, beside the environments and in their subdirectory.
        let of_others = [cache.join("poetry"), cache.join(SUBDIR).join("Cargo")];
        let old = |lock: PathBuf| {
            let lock = File::options().write(true).create(true).truncate(false).open(lock).unwrap();
            lock.set_modified(std::time::UNIX_EPOCH).unwrap();
        };
        drop(environment("first"));
        for path in &of_others {
            fs::create_dir(path).unwrap();
            old(path.with_extension("lock"));
        }
        let used = environment("used");
        let unused = environment("unused");
        let young = environment("young");
        let gone = unused.path().to_owned();
        let [held, kept] = [&used, &young].map(|environment| environment.path().to_owned());
        drop((unused, young));
        for path in [&held, &gone] {
            old(path.with_extension("lock"));
        }
        drop(environment("new"));
        assert!(of_others.iter().all(|path| path.is_dir() && path.with_extension("lock").exists()));
        assert!(
            held.is_dir()
                && kept.is_dir()
                && !gone.exists()
                && !gone.with_extension("lock").exists()
        );
        drop(used);
    }

    #[test]
    fn no_entry_is_unpacked_outside_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let path = folder.path().join("bad.tar.gz");
        let outside = folder.path().join("outside");
        fs::create_dir(&outside).unwrap();
        let target = outside.to_str().unwrap();
        let file = EntryType::Regular;
        let link = EntryType::Symlink;
        let hard = EntryType::Link;
        let cases: [(&[Piece<'_>], &str); 7] = [
            (&[(file, "../evil", "x")], "'../evil' is outside the environment"),
            (&[(file, "a/../../evil", "x")], "'a/../../evil' is outside the environment"),
            (&[(file, "/tmp/evil", "x")], "'/tmp/evil' is outside the environment"),
            (&[(link, "out", target), (file, "out/evil", "x")], "it cannot be unpacked"),
            (&[(hard, "evil", "../../../etc/passwd")], "it cannot be unpacked"),
            (
                &[(EntryType::Fifo, "pipe", "")],
                "'pipe' has the type Fifo; allowed are files, directories and links",
            ),
            (&[], "the archive is empty"),
        ];
        for (pieces, expected) in cases {
            archive(&path, pieces);
            let error = unpacked(&at(&cache), &path, python).unwrap_err();
            assert!(error.contains(expected), "{error}");
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
            let left = fs::read_dir(cache.join(SUBDIR))
                .unwrap()
                .flatten()
                .filter(|entry| entry.path().is_dir())
                .count();
            assert_eq!(left, 0, "files of a failed unpacking are left: {error}");
        }
        fs::write(&path, [0x1f, 0x8b, 8, 0, 1, 2, 3]).unwrap();
        assert!(
            unpacked(&at(&cache), &path, python)
                .unwrap_err()
                .starts_with("it cannot be unpacked into ")
        );
    }

    #[test]
    fn errors_do_not_show_what_a_file_contains_that_is_no_archive() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let path = folder.path().join("secrets");
        let secret = "root:secret\n".repeat(100).into_bytes();
        let compressed = |content: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(content).unwrap();
            encoder.finish().unwrap()
        };
        // The magic, but no other field of a header.
        let mut header = secret.clone();
        header[257..262].copy_from_slice(b"ustar");
        archive(&path, &[(EntryType::Regular, "one", "1")]);
        let mut after = Vec::new();
        flate2::read::GzDecoder::new(File::open(&path).unwrap()).read_to_end(&mut after).unwrap();
        after.truncate(1024);
        after.extend(&header);
        for content in
            [&secret[..5], &secret, &compressed(&secret), &header, &compressed(&header), &after]
        {
            fs::write(&path, content).unwrap();
            let error = unpacked(&at(&cache), &path, python).unwrap_err();
            assert!(
                error.starts_with("it cannot be unpacked into ") && !error.contains("root"),
                "{error}"
            );
        }
    }

    #[test]
    fn only_regular_files_with_content_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let empty = folder.path().join("empty");
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        fs::write(&empty, "").unwrap();
        let cache = folder.path().join("cache");
        for (path, expected) in [
            (pipe.as_path(), "it is not a regular file"),
            (Path::new("/dev/zero"), "it is not a regular file"),
            (&empty, "it is empty"),
            // As `/proc/kmsg`, which would block.
            (Path::new("/proc/self/environ"), "it is empty"),
        ] {
            assert_eq!(
                unpacked(&at(&cache), path, python).unwrap_err(),
                expected,
                "{}",
                path.display()
            );
        }
    }

    #[test]
    fn files_in_a_directory_that_its_owner_cannot_write_are_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("e.tar");
        let target = folder.path().join("target");
        let mut builder = Builder::new(File::create(&path).unwrap());
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Directory);
        header.set_mode(0o055);
        header.set_size(0);
        builder.append_data(&mut header, "closed", &[][..]).unwrap();
        header.set_entry_type(EntryType::Regular);
        header.set_mode(0o444);
        builder.append_data(&mut header, "closed/file", &[][..]).unwrap();
        builder.finish().unwrap();
        unpack(&File::open(&path).unwrap(), &target, &Limits::default()).unwrap();
        let mode = |name: &str| fs::metadata(target.join(name)).unwrap().mode() & 0o777;
        assert_eq!((mode("closed"), mode("closed/file")), (0o755, 0o444));
    }

    #[test]
    fn names_and_attributes_of_entries_are_limited_in_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("e.tar");
        for kind in [EntryType::GNULongName, EntryType::GNULongLink, EntryType::XHeader] {
            let mut builder = Builder::new(File::create(&path).unwrap());
            let mut header = Header::new_gnu();
            header.set_size(1 << 22);
            header.set_entry_type(kind);
            header.set_cksum();
            builder.append(&header, io::repeat(b'a').take(1 << 22)).unwrap();
            builder.append_data(&mut Header::new_gnu(), "name", &[][..]).unwrap();
            builder.finish().unwrap();
            let target = folder.path().join("target");
            let error =
                unpack(&File::open(&path).unwrap(), &target, &Limits::default()).unwrap_err();
            let expected = "the name and the attributes of an entry have more than 1048576 bytes";
            assert_eq!(error.to_string(), expected, "{kind:?}");
            fs::remove_dir_all(&target).unwrap();
        }
    }

    #[test]
    fn environments_are_limited_in_size_and_relocated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("e.tar.gz");
        archive(
            &path,
            &[(EntryType::Regular, "one", "12345"), (EntryType::Regular, "two", "12345")],
        );
        for (limits, expected) in [
            (Limits { bytes: 9, files: 9 }, "'two' exceeds the total limit of 9 bytes"),
            (Limits { bytes: 10, files: 1 }, "'two' exceeds the total limit of 1 files"),
        ] {
            let target = folder.path().join("target");
            let error = unpack(&File::open(&path).unwrap(), &target, &limits).unwrap_err();
            assert_eq!(error.to_string(), expected);
            fs::remove_dir_all(&target).unwrap();
        }
        let script = |text: &'static str| (EntryType::Regular, "bin/conda-unpack", text);
        let python3 = (EntryType::Regular, "bin/python3", "#!/bin/sh\nexec /bin/sh \"$@\"\n");
        archive(
            &path,
            &[python3, script("echo \"$CONDA_PREFIX$VIRTUAL_ENV\" > $(dirname $0)/../where\n")],
        );
        let home = unpacked(&at(&folder.path().join("cache")), &path, python).unwrap();
        let location = fs::read_to_string(home.path().join("where")).unwrap();
        assert_eq!(Path::new(location.trim()), home.path());
        archive(&path, &[python3, script("echo no room >&2; exit 3\n")]);
        let error = unpacked(&at(&folder.path().join("cache")), &path, python).unwrap_err();
        assert!(error.contains("conda-unpack failed: exit status: 3: no room"), "{error}");
    }
}
