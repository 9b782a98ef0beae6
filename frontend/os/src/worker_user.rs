//! The user as which the programs that run models are started, if it is not the user of the server.
//!
//! Such a program cannot read the files of the server, signal it, or read its memory. The server
//! needs rights of root for this ([`check_rights`]), gives the program what it has made for it
//! ([`WorkerUser::give`]), and lets it read the files of its model ([`WorkerUser::grant_read`]).
//!
//! Contract: what the new process does before it becomes the program is only system calls on values
//! that were made before.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use nix::unistd::{self, Group, User};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, chownat, fchmod, fchown, fstat, openat};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, getegid, geteuid, setsid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};

use crate::directories::{self, named};
use crate::removal;

/// The rights of root without which processes of another user cannot be started, given files, and
/// ended; see capabilities(7).
const NEEDED: [(&str, CapabilitySet); 6] = [
    ("CAP_CHOWN", CapabilitySet::CHOWN),
    ("CAP_DAC_OVERRIDE", CapabilitySet::DAC_OVERRIDE),
    ("CAP_FOWNER", CapabilitySet::FOWNER),
    ("CAP_KILL", CapabilitySet::KILL),
    ("CAP_SETGID", CapabilitySet::SETGID),
    ("CAP_SETUID", CapabilitySet::SETUID),
];

/// The rights of root that make processes of other users measurable, and change their priorities.
const USEFUL: [(&str, CapabilitySet); 2] =
    [("CAP_SYS_NICE", CapabilitySet::SYS_NICE), ("CAP_SYS_PTRACE", CapabilitySet::SYS_PTRACE)];

/// Variables with directories of the server's user.
const OF_THE_SERVER: [&str; 5] =
    ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"];

/// A user, and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerUser {
    name: String,
    home: PathBuf,
    uid: Uid,
    gid: Gid,
    /// All of its groups.
    groups: Arc<[Gid]>,
}

impl WorkerUser {
    /// Finds the user `USER` or `USER:GROUP`, both given by name or number. Without a group, it is
    /// the user's own. Blocks.
    ///
    /// # Errors
    /// There is no such user or group, or it is root or the user of this process, or has one of
    /// their groups.
    pub fn find(text: &str) -> Result<Self, String> {
        let (user, group) =
            text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        let number = number(user);
        let known = known_user(user, number)?;
        let uid = known
            .as_ref()
            .map(|known| known.uid.as_raw())
            .or(number)
            .ok_or_else(|| format!("there is no user '{}'", user.escape_debug()))?;
        if uid == 0 || uid == geteuid().as_raw() {
            let which = if uid == 0 { "root" } else { "the user of this server" };
            return Err(format!("'{}' is {which}; allowed is another user", user.escape_debug()));
        }
        let gid = match (group, &known) {
            (Some(group), _) => number_of_group(group)?,
            (None, Some(known)) => known.gid.as_raw(),
            (None, None) => {
                return Err(format!(
                    "no user has the number {uid}; name its group too, as {uid}:GROUP"
                ));
            }
        };
        let groups =
            known.as_ref().map_or_else(|| Ok(Vec::new()), |known| groups(&known.name, gid))?;
        let all = groups.into_iter().chain([gid]).collect::<BTreeSet<_>>();
        for (group, whose) in [(0, "root"), (getegid().as_raw(), "this server")] {
            if all.contains(&group) {
                return Err(format!(
                    "'{}' is in the group of {whose}; allowed is a user without it",
                    text.escape_debug()
                ));
            }
        }
        let (name, home) =
            known.map_or_else(|| (uid.to_string(), "/".into()), |known| (known.name, known.dir));
        Ok(Self {
            name,
            home,
            uid: Uid::from_raw(uid),
            gid: Gid::from_raw(gid),
            groups: all.into_iter().map(Gid::from_raw).collect(),
        })
    }

    /// Returns the name, or the number of a user without a name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the home directory.
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Returns the number.
    pub fn uid(&self) -> u32 {
        self.uid.as_raw()
    }

    /// Makes a command start its process as this user, with its groups and home directory, and
    /// without rights of root. If that fails, starting the process fails.
    pub fn run(&self, command: &mut Command) {
        for name in OF_THE_SERVER {
            command.env_remove(name);
        }
        command.env("HOME", &self.home).env("USER", &self.name).env("LOGNAME", &self.name);
        let uid = self.uid;
        let gid = self.gid;
        let groups = self.groups.clone();
        let change = move || {
            leave_terminal();
            // The process has one thread.
            set_thread_groups(&groups)?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
            // The kernel takes capabilities only from root. A service of systemd can have some as
            // another user.
            let none = CapabilitySet::empty();
            set_capabilities(
                None,
                CapabilitySets { effective: none, permitted: none, inheritable: none },
            )?;
            Ok(())
        };
        // SAFETY: the closure only makes system calls (contract above); its errors contain a number
        // and are not allocated.
        unsafe { command.pre_exec(change) };
    }

    /// Opens a file for reading with the rights of the user, as a process of the user could.
    /// Opening a pipe does not block.
    ///
    /// # Errors
    /// The user may not read the file, or it cannot be opened; or no thread can be started.
    pub fn open(&self, path: &Path) -> io::Result<File> {
        let user = self.clone();
        let path = path.to_owned();
        // Only the thread has the rights of the user, and ends afterwards.
        let opening = thread::Builder::new().name("open-as-user".into()).spawn(move || {
            user.take_file_rights()?;
            let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
            Ok(File::from(rustix::fs::open(&path, flags, Mode::empty())?))
        })?;
        opening
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that opens it panicked")))
    }

    /// Gives this thread the rights of the user for files, and takes the rights of root. Its other
    /// identities remain, so that processes of the user cannot signal the thread.
    fn take_file_rights(&self) -> io::Result<()> {
        set_thread_groups(&self.groups)?;
        let uid = unistd::Uid::from_raw(self.uid.as_raw());
        let gid = unistd::Gid::from_raw(self.gid.as_raw());
        unistd::setfsgid(gid);
        unistd::setfsuid(uid);
        let none = CapabilitySet::empty();
        let own = capabilities(None)?;
        set_capabilities(None, CapabilitySets { effective: none, ..own })?;
        // The calls return the previous identity and no error.
        if unistd::setfsgid(gid) != gid || unistd::setfsuid(uid) != uid {
            return Err(io::Error::other(format!(
                "this process cannot take the rights of the user '{}'",
                self.name
            )));
        }
        Ok(())
    }

    /// Lets the user read, but not change, a file or a directory tree that this process has made.
    /// Files elsewhere, and paths that [`give`](Self::give) has given to the user, keep their
    /// modes. Blocks.
    ///
    /// # Errors
    /// A mode or group cannot be changed.
    pub fn grant_read(&self, path: &Path) -> io::Result<()> {
        let path = fs::canonicalize(path)?;
        if !self.admit(&path)? || fs::symlink_metadata(&path)?.uid() != geteuid().as_raw() {
            return Ok(());
        }
        let (parent, name) = opened_parent(&path)?;
        let change = Change { owner: None, group: self.gid, added: |mode| (mode & 0o500) >> 3 };
        change.apply(parent.as_fd(), &name).map_err(|error| named(&path, &error))
    }

    /// Makes the user the owner of a directory tree that this process has made. No other user can
    /// enter it. Blocks.
    ///
    /// # Errors
    /// An owner or mode cannot be changed.
    pub fn give(&self, path: &Path) -> io::Result<()> {
        let path = fs::canonicalize(path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o700))?;
        self.admit(&path)?;
        let (parent, name) = opened_parent(&path)?;
        let change = Change { owner: Some(self.uid), group: self.gid, added: |_| 0 };
        change.apply(parent.as_fd(), &name).map_err(|error| named(&path, &error))
    }

    /// Lets the user pass through the directories that lead to a path, from the directory that this
    /// process has marked. Returns whether a marked directory exists.
    fn admit(&self, path: &Path) -> io::Result<bool> {
        let Some(top) = path.ancestors().find(|above| directories::is_own(above)) else {
            return Ok(false);
        };
        for above in path.ancestors().skip(1).take_while(|above| above.starts_with(top)) {
            let found = fs::symlink_metadata(above)?;
            let group = self.gid.as_raw();
            let mode = without_writing(found.mode()) | 0o010;
            if found.uid() == geteuid().as_raw()
                && (found.gid(), found.mode() & 0o7777) != (group, mode)
            {
                fs::set_permissions(above, Permissions::from_mode(mode))?;
                lchown(above, None, Some(group))?;
            }
        }
        Ok(true)
    }
}

/// A change of a tree of files.
struct Change {
    owner: Option<Uid>,
    group: Gid,
    /// Returns the rights to add, from the mode.
    added: fn(u32) -> u32,
}

impl Change {
    /// Changes a file, or a directory after its content: until then, no other user can replace the
    /// content. Follows no link, and skips entries that were removed meanwhile.
    fn apply(&self, parent: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        let opened = match openat(parent, name, FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            Err(Errno::LOOP) => {
                chownat(parent, name, self.owner, Some(self.group), AtFlags::SYMLINK_NOFOLLOW)?;
                return Ok(());
            }
            opened => opened?,
        };
        let found = fstat(&opened)?;
        match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => {
                for name in removal::names(opened.as_fd())? {
                    self.apply(opened.as_fd(), &name?)?;
                }
            }
            FileType::RegularFile => {}
            _ => return Ok(()),
        }
        // First, because the new group and owner must not get the other rights.
        let mode = without_writing(found.st_mode) | (self.added)(found.st_mode);
        fchmod(&opened, Mode::from_raw_mode(mode))?;
        Ok(fchown(&opened, self.owner, Some(self.group))?)
    }
}

const FLAGS: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Returns a mode without the rights of others to write, and without the bits that change the user
/// or group of a process.
fn without_writing(mode: u32) -> u32 {
    mode & 0o7777 & !0o6022
}

/// Opens the directory that contains a path.
fn opened_parent(path: &Path) -> io::Result<(OwnedFd, CString)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let parent = rustix::fs::open(parent, FLAGS.union(OFlags::DIRECTORY), Mode::empty())?;
    Ok((parent, CString::new(name.as_bytes())?))
}

/// Checks that only root and the user of this process can replace a directory or one of its
/// ancestors. The directory need not exist.
///
/// # Errors
/// Another user can; the text names the directory and the reason.
pub fn check_directory(path: &Path) -> Result<(), String> {
    let path = std::path::absolute(path).map_err(|error| named(path, &error).to_string())?;
    let existing = path.ancestors().find(|path| path.exists()).unwrap_or(&path);
    let existing =
        fs::canonicalize(existing).map_err(|error| named(existing, &error).to_string())?;
    for above in existing.ancestors() {
        let found =
            fs::symlink_metadata(above).map_err(|error| named(above, &error).to_string())?;
        let why = match found.mode() {
            _ if ![0, geteuid().as_raw()].contains(&found.uid()) => "belongs to another user",
            mode if mode & 0o022 != 0 && mode & 0o1000 == 0 => {
                "can be changed by other users and has no sticky bit"
            }
            _ => continue,
        };
        return Err(format!("'{}' {why}", above.display()));
    }
    Ok(())
}

/// Creates a directory and its missing parents. Every user can pass through the new directories;
/// only this user can list and change them. Blocks.
///
/// # Errors
/// A directory cannot be created.
pub fn make_passable(path: &Path) -> io::Result<()> {
    // The last ancestor of a relative path is empty.
    let ancestors = path.ancestors();
    let new: Vec<_> =
        ancestors.take_while(|path| !path.as_os_str().is_empty() && !path.exists()).collect();
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .and_then(|()| {
            new.into_iter()
                .try_for_each(|path| fs::set_permissions(path, Permissions::from_mode(0o711)))
        })
        .map_err(|error| named(path, &error))
}

/// Returns which rights of root this process lacks to measure processes of other users and to
/// change their priorities.
///
/// # Errors
/// This process lacks rights to start processes of another user, to give them files or to end them;
/// the text names the rights.
pub fn check_rights() -> Result<Vec<&'static str>, String> {
    let own = capabilities(None)
        .map_err(|error| format!("cannot read the capabilities of this process: {error}"))?;
    let missing = |wanted: &[(&'static str, CapabilitySet)]| {
        let lacks = wanted.iter().filter(|(_, capability)| !own.effective.contains(*capability));
        lacks.map(|(name, _)| *name).collect::<Vec<_>>()
    };
    match missing(&NEEDED) {
        needed if needed.is_empty() => Ok(missing(&USEFUL)),
        needed => Err(format!("this process has no {}", needed.join(", "))),
    }
}

/// Detaches this process from its terminal, into which the process could type. The leader of a
/// process group cannot start a new session.
fn leave_terminal() {
    if setsid().is_err()
        && let Ok(terminal) = rustix::fs::open(
            c"/dev/tty",
            OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY,
            Mode::empty(),
        )
    {
        // SAFETY: the request has no argument.
        unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCNOTTY) };
    }
}

fn known_user(user: &str, number: Option<u32>) -> Result<Option<User>, String> {
    let failed =
        |error: nix::Error| format!("cannot look up the user '{}': {error}", user.escape_debug());
    match (User::from_name(user).map_err(failed)?, number) {
        (None, Some(number)) => User::from_uid(number.into()).map_err(failed),
        (found, _) => Ok(found),
    }
}

fn number_of_group(group: &str) -> Result<u32, String> {
    let found = Group::from_name(group)
        .map_err(|error| format!("cannot look up the group '{}': {error}", group.escape_debug()))?;
    let number = found.map(|found| found.gid.as_raw()).or_else(|| number(group));
    number.ok_or_else(|| format!("there is no group '{}'", group.escape_debug()))
}

/// Returns the number of a user or group in a text of digits. The highest number stands for none.
fn number(text: &str) -> Option<u32> {
    let is_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| is_digits && *number != u32::MAX)
}

/// Returns the groups of a user of this name, among them `gid`.
fn groups(user: &str, gid: u32) -> Result<Vec<u32>, String> {
    let name =
        CString::new(Path::new(user).as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    let groups = unistd::getgrouplist(&name, gid.into())
        .map_err(|error| format!("cannot look up the groups of the user '{user}': {error}"))?;
    Ok(groups.into_iter().map(unistd::Gid::as_raw).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn users_are_found_by_name_and_number() {
        let is_root = geteuid().is_root();
        for (text, expected) in [
            ("root", "'root' is root; allowed is another user"),
            ("0:0", "'0' is root; allowed is another user"),
            ("no such user", "there is no user 'no such user'"),
            ("4294967295:1", "there is no user '4294967295'"),
            ("54321", "no user has the number 54321; name its group too, as 54321:GROUP"),
            ("54321:no such group", "there is no group 'no such group'"),
            ("+54321:54322", "there is no user '+54321'"),
            ("54321:0", "'54321:0' is in the group of root; allowed is a user without it"),
            ("", "there is no user ''"),
        ] {
            assert_eq!(WorkerUser::find(text).unwrap_err(), expected, "{text}");
        }
        let unnamed = WorkerUser::find("54321:54322").unwrap();
        assert_eq!(
            (unnamed.name(), unnamed.home(), unnamed.uid()),
            ("54321", Path::new("/"), 54321)
        );
        assert_eq!(&*unnamed.groups, [Gid::from_raw(54322)]);
        let own = geteuid().as_raw();
        let named = User::from_name("daemon").unwrap().filter(|user| user.uid.as_raw() != own);
        if let Some(daemon) = named {
            let found = WorkerUser::find("daemon").unwrap();
            assert_eq!(
                (found.uid(), found.gid.as_raw()),
                (daemon.uid.as_raw(), daemon.gid.as_raw())
            );
            assert_eq!(WorkerUser::find(&daemon.uid.to_string()).unwrap(), found);
            let other = WorkerUser::find("daemon:54322").unwrap();
            assert!(other.gid.as_raw() == 54322 && other.groups.contains(&other.gid));
        }
        if !is_root {
            assert!(
                WorkerUser::find(&own.to_string())
                    .unwrap_err()
                    .ends_with("is the user of this server; allowed is another user")
            );
        }
    }

    #[test]
    fn directories_that_others_can_exchange_are_found() {
        let parent = tempfile::tempdir().unwrap();
        let open = parent.path().join("open");
        let sticky = parent.path().join("sticky");
        for (path, mode) in [(&open, 0o777), (&sticky, 0o1777)] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(check_directory(&sticky.join("new/directory")), Ok(()));
        assert_eq!(check_directory(Path::new("new/relative")), check_directory(Path::new(".")));
        let error = check_directory(&open.join("new")).unwrap_err();
        assert_eq!(
            error,
            format!("'{}' can be changed by other users and has no sticky bit", open.display())
        );
    }

    /// Returns a user without a name; `None` if this process may not start processes of other
    /// users.
    fn user() -> Option<WorkerUser> {
        match check_rights() {
            Ok(_) => Some(WorkerUser::find("54321:54322").unwrap()),
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        }
    }

    /// Runs a program as the user; returns whether it succeeded, and its output.
    fn run(user: &WorkerUser, program: &str, argument: &Path) -> (bool, String) {
        let mut command = Command::new(program);
        user.run(&mut command);
        let output = command.arg(argument).output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    }

    /// Returns a new directory through which every user can pass, and one in it that is marked.
    fn directory() -> (tempfile::TempDir, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        fs::set_permissions(parent.path(), Permissions::from_mode(0o755)).unwrap();
        make_passable(&parent.path().join("new/cache")).unwrap();
        let own = parent.path().join("new/cache/own");
        directories::make(&own).unwrap();
        (parent, own)
    }

    #[test]
    fn files_are_opened_with_the_rights_of_the_user() {
        let Some(user) = user() else { return };
        let (parent, own) = directory();
        let open = parent.path().join("open");
        let closed = own.join("closed");
        let link = parent.path().join("link");
        let pipe = parent.path().join("pipe");
        write(&open, 0o644);
        write(&closed, 0o644);
        let secret = parent.path().join("secret");
        write(&secret, 0o600);
        symlink(&secret, &link).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o644), 0)
            .unwrap();
        assert!(user.open(&open).is_ok() && user.open(&pipe).is_ok());
        for path in [&closed, &secret, &link] {
            assert_eq!(
                user.open(path).unwrap_err().kind(),
                io::ErrorKind::PermissionDenied,
                "{}",
                path.display()
            );
        }
        assert!(File::open(&secret).is_ok(), "this thread has lost its rights");
    }

    fn write(path: &Path, mode: u32) {
        fs::write(path, "x").unwrap();
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_process_runs_as_the_user() {
        let Some(user) = user() else { return };
        let (_, status) = run(&user, "cat", Path::new("/proc/self/status"));
        for line in [
            "Uid:\t54321\t54321\t54321",
            "Gid:\t54322\t54322\t54322",
            "Groups:\t54322",
            "CapPrm:\t0000000000000000",
        ] {
            assert!(status.contains(line), "{line}: {status}");
        }
        assert!(run(&user, "env", Path::new("A=1")).1.contains("HOME=/\n"));
    }

    #[test]
    fn the_user_reads_what_was_granted_and_changes_nothing() {
        let Some(user) = user() else { return };
        let (parent, own) = directory();
        let model = own.join("models/m/1");
        let secret = own.join("models/secret");
        let other = parent.path().join("other");
        fs::create_dir_all(&model).unwrap();
        fs::set_permissions(&model, Permissions::from_mode(0o6775)).unwrap();
        let file = model.join("model.onnx");
        let link = model.join("link");
        for (path, mode) in [(&file, 0o400), (&secret, 0o600), (&other, 0o600)] {
            write(path, mode);
        }
        symlink(&secret, &link).unwrap();
        let reads = |path: &Path| run(&user, "cat", path).0;
        assert!(!reads(&file));
        user.grant_read(&own.join("models/m")).unwrap();
        assert!(reads(&file) && !reads(&secret) && !reads(&link));
        assert!(!run(&user, "touch", &model.join("new")).0);
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(&own), mode(&model)), (0o710, 0o755));
        // Elsewhere nothing changes.
        user.grant_read(&other).unwrap();
        assert!(!reads(&other));
    }

    #[test]
    fn what_was_given_belongs_to_the_user() {
        let Some(user) = user() else { return };
        let (_parent, own) = directory();
        let given = own.join("given");
        let secret = own.join("secret");
        fs::create_dir_all(given.join("inside")).unwrap();
        write(&secret, 0o600);
        write(&given.join("inside/file"), 0o600);
        symlink(&secret, given.join("link")).unwrap();
        user.give(&given).unwrap();
        assert_eq!(fs::metadata(&secret).unwrap().uid(), geteuid().as_raw());
        for path in ["", "inside", "inside/file", "link"] {
            assert_eq!(fs::symlink_metadata(given.join(path)).unwrap().uid(), 54321, "{path}");
        }
        let new = given.join("new");
        assert!(run(&user, "touch", &new).0);
        fs::set_permissions(&new, Permissions::from_mode(0o600)).unwrap();
        user.grant_read(&given).unwrap();
        assert_eq!(fs::metadata(&new).unwrap().mode() & 0o777, 0o600);
    }

    /// A user that exchanges directories while they are given gets nothing else: those that lead to
    /// a file are given after it.
    #[test]
    fn what_the_user_exchanges_meanwhile_is_not_given() {
        let Some(user) = user() else { return };
        let (_parent, own) = directory();
        let given = own.join("given");
        let secrets = own.join("secrets");
        for folder in [&given.join("d"), &secrets] {
            fs::create_dir_all(folder).unwrap();
            (0..2000).for_each(|number| write(&folder.join(number.to_string()), 0o600));
        }
        fs::set_permissions(given.join("d"), Permissions::from_mode(0o777)).unwrap();
        let script = "until mv \"$0/d\" \"$0/e\" 2>/dev/null; do :; done; ln -s \"$1\" \"$0/d\"";
        let mut command = Command::new("sh");
        user.run(&mut command);
        let mut child = command.args(["-c", script]).arg(&given).arg(&secrets).spawn().unwrap();
        user.give(&given).unwrap();
        child.wait().unwrap();
        assert!(given.join("d").is_symlink());
        let owners =
            fs::read_dir(&secrets).unwrap().map(|entry| entry.unwrap().metadata().unwrap().uid());
        assert_eq!(owners.filter(|uid| *uid == 54321).count(), 0);
    }
}
