//! The user as which the programs that run models are started, if it is not the user of the server.
//!
//! Such a program cannot read the files of the server, signal it, or read its memory. The server needs rights of root for this
//! ([`check_rights`]), gives the program what it has made for it ([`WorkerUser::give`]), and lets it read the files of its model
//! ([`WorkerUser::grant_read`]).
//!
//! Contract: what the new process does before it becomes the program is only system calls on values that were made before.

use std::ffi::CString;
use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, lchown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use nix::unistd::{self, Group, User};
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use crate::directories;

/// The rights of root without which processes of another user cannot be started, given files, and ended; see capabilities(7).
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
    /// Finds the user `USER` or `USER:GROUP`, both given by name or number. Without a group, it is the user's own. Blocks.
    ///
    /// # Errors
    /// There is no such user or group, or it is root or the user of this process.
    pub fn find(text: &str) -> Result<Self, String> {
        let (user, group) = text.split_once(':').map_or((text, None), |(user, group)| (user, Some(group)));
        let number = user.parse::<u32>().ok();
        let known = known_user(user, number)?;
        let uid = known.as_ref().map(|known| known.uid.as_raw()).or(number).filter(|uid| *uid != u32::MAX);
        let uid = uid.ok_or_else(|| format!("there is no user '{}'", user.escape_debug()))?;
        if uid == 0 || uid == geteuid().as_raw() {
            let which = if uid == 0 { "root" } else { "the user of this server" };
            return Err(format!("'{}' is {which}; allowed is another user", user.escape_debug()));
        }
        let gid = match (group, &known) {
            (Some(group), _) => number_of_group(group)?,
            (None, Some(known)) => known.gid.as_raw(),
            (None, None) => return Err(format!("no user has the number {uid}; name its group too, as {uid}:GROUP")),
        };
        let groups = known.as_ref().map_or_else(|| Ok(Vec::new()), |known| groups(&known.name, gid))?;
        let all = groups.into_iter().chain([gid]).collect::<std::collections::BTreeSet<_>>();
        let (name, home) = known.map_or_else(|| (uid.to_string(), "/".into()), |known| (known.name, known.dir));
        let groups = all.into_iter().map(Gid::from_raw).collect();
        Ok(Self { name, home, uid: Uid::from_raw(uid), gid: Gid::from_raw(gid), groups })
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

    /// Makes a command start its process as this user, with its groups and home directory, and without rights of root. If that
    /// fails, starting the process fails.
    pub fn run(&self, command: &mut Command) {
        for name in OF_THE_SERVER {
            command.env_remove(name);
        }
        command.env("HOME", &self.home).env("USER", &self.name).env("LOGNAME", &self.name);
        let (uid, gid, groups) = (self.uid, self.gid, self.groups.clone());
        let change = move || {
            // The process has one thread.
            set_thread_groups(&groups)?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
            // The kernel takes them only from root. A service of systemd can have them as another user.
            let none = CapabilitySet::empty();
            set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
            Ok(())
        };
        // SAFETY: the closure only makes system calls (contract above); its errors contain a number and are not allocated.
        unsafe { command.pre_exec(change) };
    }

    /// Lets the user read what this process has made at a path: a file, or a directory with all that is in it. Files elsewhere
    /// keep their modes, as does what [`give`](Self::give) was called with. Blocks.
    ///
    /// # Errors
    /// A mode or group cannot be changed.
    pub fn grant_read(&self, path: &Path) -> io::Result<()> {
        let path = fs::canonicalize(path)?;
        if !self.admit(&path)? || fs::symlink_metadata(&path)?.uid() != geteuid().as_raw() {
            return Ok(());
        }
        each(&path, |path, found| {
            lchown(path, None, Some(self.gid.as_raw()))?;
            match found.is_symlink() {
                true => Ok(()),
                false => add_mode(path, found, (found.mode() & 0o500) >> 3),
            }
        })
    }

    /// Makes the user the owner of what this process has made at a path: a file, or a directory with all that is in it. No program
    /// of the user may have been able to write there. Blocks.
    ///
    /// # Errors
    /// An owner or mode cannot be changed.
    pub fn give(&self, path: &Path) -> io::Result<()> {
        let path = fs::canonicalize(path)?;
        self.admit(&path)?;
        each(&path, |path, _| lchown(path, Some(self.uid.as_raw()), Some(self.gid.as_raw())))
    }

    /// Lets the user pass through the directories that lead to a path, from the one that this process has marked. Returns whether
    /// there is one.
    fn admit(&self, path: &Path) -> io::Result<bool> {
        let Some(top) = path.ancestors().find(|above| directories::is_own(above)) else { return Ok(false) };
        for above in path.ancestors().skip(1).take_while(|above| above.starts_with(top)) {
            let found = fs::symlink_metadata(above)?;
            if found.uid() == geteuid().as_raw() && (found.gid() != self.gid.as_raw() || found.mode() & 0o010 == 0) {
                lchown(above, None, Some(self.gid.as_raw()))?;
                add_mode(above, &found, 0o010)?;
            }
        }
        Ok(true)
    }
}

/// Creates a directory and its missing parents. Every user can pass through what is new, and only this one can list and change it.
/// Blocks.
///
/// # Errors
/// A directory cannot be created.
pub fn make_passable(path: &Path) -> io::Result<()> {
    // The last ancestor of a relative path is empty.
    let is_new = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    let new: Vec<_> = path.ancestors().take_while(is_new).collect();
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    let made = made
        .and_then(|()| new.into_iter().try_for_each(|path| fs::set_permissions(path, Permissions::from_mode(0o711))));
    made.map_err(|error| named(path, &error))
}

/// Returns the rights of root that this process lacks and that some numbers and priorities need.
///
/// # Errors
/// It lacks rights that it needs to start, give files to and end processes of another user; the text names them.
pub fn check_rights() -> Result<Vec<&'static str>, String> {
    let own = capabilities(None).map_err(|error| format!("cannot read the capabilities of this process: {error}"))?;
    let missing = |wanted: &[(&'static str, CapabilitySet)]| {
        let missing = wanted.iter().filter(|(_, capability)| !own.effective.contains(*capability));
        missing.map(|(name, _)| *name).collect::<Vec<_>>()
    };
    match missing(&NEEDED) {
        needed if needed.is_empty() => Ok(missing(&USEFUL)),
        needed => Err(format!("this process has no {}", needed.join(", "))),
    }
}

fn known_user(user: &str, number: Option<u32>) -> Result<Option<User>, String> {
    let failed = |error: nix::Error| format!("cannot look up the user '{}': {error}", user.escape_debug());
    match (User::from_name(user).map_err(failed)?, number) {
        (None, Some(number)) => User::from_uid(number.into()).map_err(failed),
        (found, _) => Ok(found),
    }
}

fn number_of_group(group: &str) -> Result<u32, String> {
    let found = Group::from_name(group)
        .map_err(|error| format!("cannot look up the group '{}': {error}", group.escape_debug()))?;
    let number = found.map(|found| found.gid.as_raw()).or_else(|| group.parse().ok());
    number.filter(|gid| *gid != u32::MAX).ok_or_else(|| format!("there is no group '{}'", group.escape_debug()))
}

/// Returns the groups of a user of this name, among them `gid`.
fn groups(user: &str, gid: u32) -> Result<Vec<u32>, String> {
    let name = CString::new(Path::new(user).as_os_str().as_bytes()).map_err(|error| error.to_string())?;
    let groups = unistd::getgrouplist(&name, gid.into())
        .map_err(|error| format!("cannot look up the groups of the user '{user}': {error}"))?;
    Ok(groups.into_iter().map(unistd::Gid::as_raw).collect())
}

fn add_mode(path: &Path, found: &Metadata, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, Permissions::from_mode((found.mode() | mode) & 0o7777))
}

/// Calls a function with all that is at a path. Does not follow links, and skips what others remove meanwhile.
fn each(top: &Path, act: impl Fn(&Path, &Metadata) -> io::Result<()>) -> io::Result<()> {
    let mut left = vec![top.to_owned()];
    while let Some(path) = left.pop() {
        let visit = |left: &mut Vec<PathBuf>| {
            let found = fs::symlink_metadata(&path)?;
            if found.is_dir() {
                for entry in fs::read_dir(&path)? {
                    left.push(entry?.path());
                }
            }
            act(&path, &found)
        };
        match visit(&mut left) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(named(&path, &error)),
            Ok(()) => {}
        }
    }
    Ok(())
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("'{}': {error}", path.display()))
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
            ("", "there is no user ''"),
        ] {
            assert_eq!(WorkerUser::find(text).unwrap_err(), expected, "{text}");
        }
        let unnamed = WorkerUser::find("54321:54322").unwrap();
        assert_eq!((unnamed.name(), unnamed.home(), unnamed.uid()), ("54321", Path::new("/"), 54321));
        assert_eq!(&*unnamed.groups, [Gid::from_raw(54322)]);
        let own = geteuid().as_raw();
        let named = User::from_name("daemon").unwrap().filter(|user| user.uid.as_raw() != own);
        if let Some(daemon) = named {
            let found = WorkerUser::find("daemon").unwrap();
            assert_eq!((found.uid(), found.gid.as_raw()), (daemon.uid.as_raw(), daemon.gid.as_raw()));
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
    fn a_process_runs_as_the_user_and_reads_what_was_granted() {
        if check_rights().is_err() {
            eprintln!("skipped: this process may not start processes of other users");
            return;
        }
        let user = WorkerUser::find("54321:54322").unwrap();
        let run = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            user.run(&mut command);
            let output = command.args(arguments).output().unwrap();
            (output.status.success(), String::from_utf8(output.stdout).unwrap())
        };
        let (_, status) = run("cat", &["/proc/self/status"]);
        for line in
            ["Uid:\t54321\t54321\t54321", "Gid:\t54322\t54322\t54322", "Groups:\t54322", "CapPrm:\t0000000000000000"]
        {
            assert!(status.contains(line), "{line}: {status}");
        }
        assert!(run("env", &[]).1.contains("HOME=/\n"));

        let parent = tempfile::tempdir().unwrap();
        fs::set_permissions(parent.path(), Permissions::from_mode(0o755)).unwrap();
        make_passable(&parent.path().join("new/cache")).unwrap();
        let own = parent.path().join("new/cache/own");
        directories::make(&own).unwrap();
        let (model, secret) = (own.join("models/m/1"), own.join("models/secret"));
        fs::create_dir_all(&model).unwrap();
        let (file, link) = (model.join("model.onnx"), model.join("link"));
        for (path, mode) in [(&file, 0o400), (&secret, 0o600)] {
            fs::write(path, "x").unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        }
        symlink(&secret, &link).unwrap();
        let reads = |path: &Path| run("cat", &[path.to_str().unwrap()]).0;
        assert!(!reads(&file));
        user.grant_read(&own.join("models/m")).unwrap();
        assert!(reads(&file) && !reads(&secret) && !reads(&link));
        assert!(!run("touch", &[model.join("new").to_str().unwrap()]).0, "the user can write the files of its model");
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o777, 0o710);
        // Elsewhere nothing changes.
        let other = parent.path().join("other");
        fs::write(&other, "x").unwrap();
        fs::set_permissions(&other, Permissions::from_mode(0o600)).unwrap();
        user.grant_read(&other).unwrap();
        assert!(!reads(&other));

        let given = own.join("given");
        fs::create_dir(&given).unwrap();
        user.give(&given).unwrap();
        assert!(run("touch", &[given.join("new").to_str().unwrap()]).0);
        fs::set_permissions(given.join("new"), Permissions::from_mode(0o600)).unwrap();
        user.grant_read(&given).unwrap();
        assert_eq!(fs::metadata(given.join("new")).unwrap().mode() & 0o777, 0o600);
    }
}
