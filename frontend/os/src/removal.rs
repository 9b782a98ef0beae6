//! Removes directories with content that others chose, such as the temporary files of a model: of
//! any depth, with two open descriptors, and without following links, also while the content
//! changes.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, fchmod, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removes a directory and its content.
///
/// The subdirectories of each subdirectory are moved up to the top, so that the depth never
/// matters: recursion would need stack and a descriptor for each level, and long paths cannot be
/// opened.
///
/// # Errors
/// The directory does not exist, is a link, or something in it cannot be removed.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    empty_except(path, &[])?;
    Ok(rustix::fs::rmdir(path)?)
}

/// Removes the content of a directory, except entries of these names at its top.
///
/// # Errors
/// As [`remove_tree`].
pub(crate) fn empty_except(path: &Path, kept: &[&str]) -> io::Result<()> {
    let top = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
    let mut number = 0;
    loop {
        let mut found = false;
        for name in names(top.as_fd())? {
            let name = name?;
            if kept.iter().any(|kept| kept.as_bytes() == name.to_bytes()) {
                continue;
            }
            found = true;
            if !unlinked(top.as_fd(), &name)? {
                let directory = opened(top.as_fd(), &name)?;
                flatten(&directory, top.as_fd(), &mut number)?;
                match unlinkat(&top, name.as_c_str(), AtFlags::REMOVEDIR) {
                    // A process is still writing there: the next round removes it.
                    Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        if !found {
            return Ok(());
        }
    }
}

/// Removes the files of a directory, and moves its subdirectories to the top under new names.
fn flatten(directory: &OwnedFd, top: BorrowedFd<'_>, number: &mut u64) -> io::Result<()> {
    for name in names(directory.as_fd())? {
        let name = name?;
        if unlinked(directory.as_fd(), &name)? {
            continue;
        }
        // Moving a directory writes its entry `..`.
        drop(opened(directory.as_fd(), &name)?);
        loop {
            *number += 1;
            let moved = format!("moved-{number}");
            match renameat(directory, name.as_c_str(), top, moved) {
                Ok(()) | Err(Errno::NOENT) => break,
                // The name is in use.
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

/// Removes a file or a link. Returns `false` for a directory.
fn unlinked(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<bool> {
    // Removing a directory as a file fails with different errors.
    match statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Directory => {
            return Ok(false);
        }
        Ok(_) => {}
        Err(Errno::NOENT) => return Ok(true),
        Err(error) => return Err(error.into()),
    }
    match unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Opens a subdirectory, and makes it writable for its owner.
fn opened(parent: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let directory = match openat(parent, name, DIRECTORY, Mode::empty()) {
        // Its owner cannot read it. Its mode is changed by a descriptor that grants no other
        // access.
        Err(Errno::ACCESS) => {
            let found = openat(
                parent,
                name,
                OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found));
            rustix::fs::chmod(link, Mode::RWXU)?;
            openat(parent, name, DIRECTORY, Mode::empty())?
        }
        directory => directory?,
    };
    // Fails for the directories of other users, which may be writable anyway.
    let _ = fchmod(&directory, Mode::RWXU);
    Ok(directory)
}

/// Returns the names in a directory, read as they are used: there may be any number.
pub(crate) fn names(
    directory: BorrowedFd<'_>,
) -> io::Result<impl Iterator<Item = io::Result<CString>>> {
    let names = Dir::read_from(directory)?.map(|entry| Ok(entry?.file_name().to_owned()));
    Ok(names.filter(|name: &io::Result<CString>| {
        !name.as_ref().is_ok_and(|name| [c".", c".."].contains(&name.as_c_str()))
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::mkdirat;

    use super::*;

    #[test]
    fn removes_directories_of_any_depth() {
        let parent = tempfile::tempdir().unwrap();
        let top = parent.path().join("top");
        fs::create_dir(&top).unwrap();
        let mut deepest = rustix::fs::open(&top, DIRECTORY, Mode::empty()).unwrap();
        for _ in 0..20_000 {
            mkdirat(&deepest, "d", Mode::RWXU).unwrap();
            deepest = openat(&deepest, "d", DIRECTORY, Mode::empty()).unwrap();
        }
        drop(deepest);
        remove_tree(&top).unwrap();
        assert!(!top.exists());
    }

    #[test]
    fn follows_no_links_and_opens_closed_directories() {
        let parent = tempfile::tempdir().unwrap();
        let top = parent.path().join("top");
        let outside = parent.path().join("outside");
        for path in [&top.join("a/b"), &top.join("moved-1/c"), &outside] {
            fs::create_dir_all(path).unwrap();
        }
        fs::write(outside.join("file"), "kept").unwrap();
        fs::write(top.join("a/b/file"), "").unwrap();
        symlink(&outside, top.join("link")).unwrap();
        symlink(&outside, top.join("a/b/link")).unwrap();
        fs::set_permissions(top.join("a/b"), fs::Permissions::from_mode(0o0)).unwrap();
        fs::set_permissions(top.join("a"), fs::Permissions::from_mode(0o500)).unwrap();
        remove_tree(&top).unwrap();
        assert!(!top.exists() && outside.join("file").exists());
        symlink(&outside, &top).unwrap();
        assert!(remove_tree(&top).is_err() && outside.join("file").exists());
        assert_eq!(
            remove_tree(&parent.path().join("none")).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }

    #[test]
    fn names_at_the_top_can_be_kept() {
        let parent = tempfile::tempdir().unwrap();
        fs::create_dir_all(parent.path().join("a/lock")).unwrap();
        fs::write(parent.path().join("lock"), "").unwrap();
        empty_except(parent.path(), &["lock"]).unwrap();
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
    }
}
