//! Opens files beneath a directory whose content belongs to a model: no link leads out of it
//! (`openat2(2)`, `RESOLVE_BENEATH`).

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};
use rustix::io::Errno;

/// Opens what a path names beneath a directory, without a right to read it. The path of the
/// directory is absolute and has no link.
///
/// # Errors
/// It does not exist, or a link leads out of the directory.
pub(super) fn open(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    let without_links = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    let opened = openat2(CWD, root, FLAGS | OFlags::DIRECTORY, Mode::empty(), without_links)
        .and_then(|root| openat2(root, path, FLAGS, Mode::empty(), beneath));
    match opened {
        // Linux before 5.6, or a filter of system calls that does not know the call.
        Err(Errno::NOSYS | Errno::PERM) => walk(root, path),
        opened => Ok(opened?),
    }
}

const FLAGS: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// Opens one part of the path after the other, and refuses every link.
fn walk(root: &Path, path: &Path) -> io::Result<OwnedFd> {
    let mut opened = openat(CWD, "/", FLAGS, Mode::empty())?;
    let parts = root
        .components()
        .map(|part| (part, true))
        .chain(path.components().map(|part| (part, false)));
    for (part, is_of_root) in parts {
        let name = match part {
            Component::Normal(name) => name,
            Component::CurDir => continue,
            Component::RootDir if is_of_root => continue,
            _ => return Err(io::Error::other("the path leads out of its directory")),
        };
        opened = openat(&opened, name, FLAGS | OFlags::NOFOLLOW, Mode::empty())?;
        if FileType::from_raw_mode(fstat(&opened)?.st_mode) == FileType::Symlink {
            return Err(Errno::LOOP.into());
        }
    }
    Ok(opened)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::path::PathBuf;

    use super::*;

    /// A directory `root` beside the directory `outside`, each with the directory `lib`.
    fn folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path().canonicalize().unwrap();
        fs::create_dir_all(top.join("root/lib")).unwrap();
        fs::create_dir_all(top.join("outside/lib")).unwrap();
        (folder, top)
    }

    fn inode(opened: &OwnedFd) -> u64 {
        fstat(opened).unwrap().st_ino
    }

    #[test]
    fn no_link_leads_out_of_the_directory() {
        let (_folder, top) = folder();
        let root = top.join("root");
        symlink("/", root.join("all")).unwrap();
        symlink("../outside", root.join("up")).unwrap();
        symlink(top.join("outside"), root.join("there")).unwrap();
        symlink("/proc/self/cwd", root.join("magic")).unwrap();
        for path in [
            "all",
            "all/etc",
            "up",
            "up/lib",
            "there/lib",
            "magic",
            "..",
            "../outside",
            "/etc",
            "missing",
        ] {
            assert!(open(&root, Path::new(path)).is_err(), "{path}");
            assert!(walk(&root, Path::new(path)).is_err(), "{path}");
        }
        let expected = fs::metadata(root.join("lib")).unwrap().ino();
        for opened in [open(&root, Path::new("lib")), walk(&root, Path::new("./lib"))] {
            assert_eq!(inode(&opened.unwrap()), expected);
        }
    }

    #[test]
    fn a_link_within_the_directory_is_followed_and_one_in_its_place_is_not() {
        let (_folder, top) = folder();
        symlink("lib", top.join("root/lib64")).unwrap();
        let expected = fs::metadata(top.join("root/lib")).unwrap().ino();
        assert_eq!(inode(&open(&top.join("root"), Path::new("lib64")).unwrap()), expected);
        fs::rename(top.join("root"), top.join("moved")).unwrap();
        symlink("outside", top.join("root")).unwrap();
        assert!(
            open(&top.join("root"), Path::new("lib")).is_err()
                && walk(&top.join("root"), Path::new("lib")).is_err()
        );
        assert!(open(&top.join("root/lib"), Path::new(".")).is_err());
    }
}
