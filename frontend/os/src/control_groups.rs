//! Control groups that limit processes: version 2, as in the kernel's
//! `Documentation/admin-guide/cgroup-v2.rst`.
//!
//! The groups are made below the group in which this process was started. That group must be
//! delegated to it: by systemd (`Delegate=`), or by a container that may write its tree. A group
//! whose children are limited must not contain processes, unless it is the root of the tree, so
//! this process moves to a group below. The names of all groups that it makes contain its process
//! id; groups of processes that no longer exist are removed.
//!
//! Contract of the unsafe code: between `fork` and `exec`, the new process only calls `write`,
//! which is safe there (signal-safety(7)).

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{self, Command};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::{blocking, clock};

/// The period of processor quotas in microseconds: the kernel's default.
const PERIOD: u64 = 100_000;

/// The shortest quota that the kernel accepts, in microseconds.
const SHORTEST: u64 = 1_000;

/// How often processes are looked for that are not yet in another group.
const MOST_MOVES: u32 = 10;

/// The most generations of processes that are looked at.
const MOST_GENERATIONS: usize = 100;

/// How long the processes of a group may take to end after they are killed.
const LONGEST_END: Duration = Duration::from_secs(10);

/// The limits of a process and all that it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// The bytes of memory, none of which is swapped. The kernel kills all processes if they need
    /// more.
    pub memory: Option<u64>,
    /// The number of processes and threads.
    pub tasks: Option<u32>,
    /// The processor time, as a number of processors.
    pub processors: Option<f64>,
}

/// A file that sets a limit.
struct Setting {
    controller: &'static str,
    file: &'static str,
    value: String,
}

impl Limits {
    /// Returns whether there is a limit.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }

    fn settings(&self) -> Vec<Setting> {
        let mut settings = Vec::new();
        if let Some(bytes) = self.memory {
            for (file, value) in
                [("memory.max", bytes), ("memory.swap.max", 0), ("memory.oom.group", 1)]
            {
                settings.push(Setting { controller: "memory", file, value: value.to_string() });
            }
        }
        if let Some(tasks) = self.tasks {
            settings.push(Setting {
                controller: "pids",
                file: "pids.max",
                value: tasks.to_string(),
            });
        }
        if let Some(processors) = self.processors {
            let quota = ((processors * PERIOD as f64).round() as u64).max(SHORTEST);
            settings.push(Setting {
                controller: "cpu",
                file: "cpu.max",
                value: format!("{quota} {PERIOD}"),
            });
        }
        settings
    }

    fn controllers(&self) -> Vec<&'static str> {
        let mut names: Vec<_> =
            self.settings().into_iter().map(|setting| setting.controller).collect();
        names.dedup();
        names
    }
}

/// The control groups that this process makes.
#[derive(Debug, Default)]
pub struct ControlGroups {
    proc: PathBuf,
    mount: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The group in which groups are made: the one in which this process was started.
    parent: Option<PathBuf>,
    /// The number of groups made.
    made: u64,
}

impl ControlGroups {
    /// Returns the groups of the process that `proc` calls `self`, with the file system of control
    /// groups at `mount`. Changes nothing yet.
    pub fn new(proc: &Path, mount: &Path) -> Self {
        Self { proc: proc.to_owned(), mount: mount.to_owned(), state: Mutex::default() }
    }

    /// Checks that groups with these limits can be made, and prepares for them. Blocks.
    ///
    /// # Errors
    /// They cannot be made. The text contains the group and what helps.
    pub fn check(&self, limits: &Limits) -> Result<(), String> {
        self.prepare(&mut self.lock(), limits).map(drop)
    }

    /// Makes a group with these limits and without processes. Blocks.
    ///
    /// # Errors
    /// It cannot be made. The text contains the group and what helps.
    pub fn create(&self, limits: &Limits) -> Result<ControlGroup, String> {
        let path = {
            let mut state = self.lock();
            let parent = self.prepare(&mut state, limits)?;
            state.made += 1;
            parent.join(name(process::id(), &format!("worker-{}", state.made)))
        };
        fs::create_dir(&path).map_err(|error| cannot(&path, "be made", &error))?;
        let group = ControlGroup { path, limits: *limits };
        for Setting { file, value, .. } in limits.settings() {
            match write(&group.path.join(file), &value) {
                // A kernel without swap space has no such file.
                Err(error)
                    if file == "memory.swap.max" && error.kind() == io::ErrorKind::NotFound => {}
                set => set.map_err(|error| {
                    cannot(&group.path, &format!("get {value} in {file}"), &error)
                })?,
            }
        }
        Ok(group)
    }

    /// Returns the parent of groups, in which the controllers for these limits are enabled.
    fn prepare(&self, state: &mut State, limits: &Limits) -> Result<PathBuf, String> {
        let parent = match &state.parent {
            Some(parent) => parent.clone(),
            None => {
                let own = own_group(&self.proc, &self.mount).ok_or_else(|| {
                    format!(
                        "the control group of this process is not below '{}'",
                        self.mount.display()
                    )
                })?;
                self.remove_left_groups(&own);
                state.parent.insert(own).clone()
            }
        };
        let available = controllers(&parent.join("cgroup.controllers"), &parent)?;
        let needed = limits.controllers();
        if let Some(missing) =
            needed.iter().find(|name| !available.iter().any(|available| available == *name))
        {
            return Err(format!(
                "the control group '{}' has no controller '{missing}' (it has: {}); a service of \
                 systemd needs Delegate=cpu memory pids",
                parent.display(),
                available.join(" ")
            ));
        }
        let enabled = controllers(&parent.join("cgroup.subtree_control"), &parent)?;
        let missing: Vec<_> =
            needed.iter().filter(|name| !enabled.iter().any(|enabled| enabled == *name)).collect();
        if !missing.is_empty() {
            let change: Vec<_> = missing.iter().map(|name| format!("+{name}")).collect();
            self.enable(&parent, &change.join(" "))?;
        }
        Ok(parent)
    }

    /// Enables controllers for the children of the parent. First, this process and its descendants
    /// leave the parent.
    fn enable(&self, parent: &Path, change: &str) -> Result<(), String> {
        let own = parent.join(name(process::id(), "server"));
        // Only the root of the tree has no type; it may have processes and controllers for its
        // children.
        let moves = parent.join("cgroup.type").exists()
            && own_group(&self.proc, &self.mount).as_deref() == Some(parent);
        if moves {
            match fs::create_dir(&own) {
                // An earlier move could not be undone.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.map_err(|error| cannot(&own, "be made", &error))?,
            }
            self.move_processes(parent, &own)
                .map_err(|error| cannot(&own, "be entered", &error))?;
        }
        let enabled = write(&parent.join("cgroup.subtree_control"), change);
        if enabled.is_err() && moves {
            // Nothing is gained by the move. If it cannot be undone, it does no harm either.
            let _ = self.move_processes(&own, parent).and_then(|()| fs::remove_dir(&own));
        }
        enabled.map_err(|error| match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::BUSY) => format!(
                "the control group '{}' contains processes other than this server; start the \
                 server in a group without them, for example as a service of systemd with \
                 Delegate=cpu memory pids",
                parent.display()
            ),
            _ => cannot(parent, &format!("limit its children ({change})"), &error),
        })
    }

    /// Moves this process and its descendants from one group to another.
    fn move_processes(&self, from: &Path, to: &Path) -> io::Result<()> {
        let entrance = to.join("cgroup.procs");
        write(&entrance, &process::id().to_string())?;
        // A process that had not moved may have started another one meanwhile.
        for _ in 0..MOST_MOVES {
            let text = fs::read_to_string(from.join("cgroup.procs"))?;
            let ours: Vec<u32> = text
                .lines()
                .filter_map(|pid| pid.parse().ok())
                .filter(|pid| self.is_descendant(*pid))
                .collect();
            if ours.is_empty() {
                break;
            }
            for pid in ours {
                // The process may have ended.
                let _ = write(&entrance, &pid.to_string());
            }
        }
        Ok(())
    }

    /// Returns whether a process was started by this one, directly or not.
    fn is_descendant(&self, pid: u32) -> bool {
        let parent = |pid: &u32| {
            let text = fs::read_to_string(self.proc.join(pid.to_string()).join("status")).ok()?;
            text.lines().find_map(|line| line.strip_prefix("PPid:")?.trim().parse().ok())
        };
        std::iter::successors(Some(pid), parent)
            .skip(1)
            .take(MOST_GENERATIONS)
            .any(|pid| pid == process::id())
    }

    /// Removes the groups of servers that no longer exist. A group with processes stays.
    fn remove_left_groups(&self, parent: &Path) {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            if let Some(pid) = maker(&entry.file_name())
                && pid != process::id()
                && !self.proc.join(pid.to_string()).exists()
            {
                let _ = fs::remove_dir(entry.path());
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// A control group. When dropped, its processes are killed and the group is removed, in the
/// background.
#[derive(Debug)]
pub struct ControlGroup {
    path: PathBuf,
    limits: Limits,
}

impl ControlGroup {
    /// Returns the file into which a process writes `0` to enter the group.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn entrance(&self) -> io::Result<OwnedFd> {
        Ok(OpenOptions::new().write(true).open(self.path.join("cgroup.procs"))?.into())
    }

    /// Returns the memory limit, if the kernel has killed a process of this group because of it.
    pub fn exceeded_memory(&self) -> Option<u64> {
        let events = fs::read_to_string(self.path.join("memory.events")).ok()?;
        self.limits.memory.filter(|_| entry(&events, "oom_kill").is_some_and(|killed| killed > 0))
    }

    /// Kills the processes of a group and removes the group.
    ///
    /// # Errors
    /// A process does not end in time, or a group was made in this one.
    fn remove(path: &Path) -> io::Result<()> {
        match write(&path.join("cgroup.kill"), "1") {
            // Linux before 5.14. The processes end with the server's connection.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            result => result?,
        }
        let mut events = fs::File::open(path.join("cgroup.events"))?;
        let begun = clock::now();
        loop {
            let mut text = String::new();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            let left = LONGEST_END.saturating_sub(clock::now() - begun);
            if entry(&text, "populated") != Some(1) || left.is_zero() {
                return fs::remove_dir(path);
            }
            let limit = Timespec::try_from(left).map_err(io::Error::other)?;
            match poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&limit)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        let path = std::mem::take(&mut self.path);
        blocking::run_detached(move || {
            if let Err(error) = Self::remove(&path) {
                tracing::debug!("the control group '{}' stays: {error}", path.display());
            }
        });
    }
}

/// Makes a command start its process in the group of an [entrance](ControlGroup::entrance). If the
/// process cannot enter, starting it fails.
pub fn start_in(entrance: OwnedFd, command: &mut Command) {
    // SAFETY: the closure only writes to an open file (contract above); it does not allocate, also
    // if that fails.
    unsafe {
        command
            .pre_exec(move || rustix::io::write(&entrance, b"0").map(drop).map_err(io::Error::from))
    };
}

/// Returns the directory of the group of the process that `proc` calls `self`; `None` if it is
/// outside of the tree mounted at `mount`.
pub fn own_group(proc: &Path, mount: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(proc.join("self/cgroup")).ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let inside = Path::new(path.trim_start_matches('/'));
    // `..` stands for a group above the mounted tree.
    let is_below = inside.components().all(|component| matches!(component, Component::Normal(_)));
    is_below.then(|| mount.components().chain(inside.components()).collect())
}

/// Returns the name of a group that a process makes.
fn name(pid: u32, what: &str) -> String {
    format!("pharos-{pid}-{what}")
}

/// Returns the process that has made the group of this name.
fn maker(name: &OsStr) -> Option<u32> {
    let (pid, what) = name.to_str()?.strip_prefix("pharos-")?.split_once('-')?;
    let is_ours = what == "server"
        || what.strip_prefix("worker-").is_some_and(|number| number.parse::<u64>().is_ok());
    pid.parse().ok().filter(|_| is_ours)
}

/// Returns the number after a key in the text of a file with one key and number in each line.
pub fn entry(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Returns the controllers that a file of a group names.
fn controllers(file: &Path, group: &Path) -> Result<Vec<String>, String> {
    let text = fs::read_to_string(file).map_err(|error| {
        format!(
            "'{}' is not a control group of version 2: '{}': {error}",
            group.display(),
            file.display()
        )
    })?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

/// Writes a file of the kernel, which must exist.
fn write(file: &Path, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(file)?.write_all(text.as_bytes())
}

fn cannot(path: &Path, what: &str, error: &io::Error) -> String {
    let help = match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; the group of the server must be delegated to it: a service of systemd needs \
             Delegate=cpu memory pids, and must not have ProtectControlGroups=yes"
        }
        _ => "",
    };
    format!("the control group '{}' cannot {what}: {error}{help}", path.display())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
