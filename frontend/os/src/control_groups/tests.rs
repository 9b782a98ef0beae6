//! Tests of control groups: with directories that stand for groups, and with the kernel's where
//! this process may make some.

use std::process::Stdio;

use super::*;

/// A directory for `/proc` and one for the tree, in which this process is in the group `/service`.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new(controllers: &str) -> Self {
        let tree = Self(tempfile::tempdir().unwrap());
        tree.write("proc/self/cgroup", "3:cpu:/other\n0::/service\n");
        tree.write("mount/service/cgroup.controllers", controllers);
        tree.write("mount/service/cgroup.subtree_control", "");
        tree
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), text).unwrap();
    }

    fn groups(&self) -> ControlGroups {
        ControlGroups::new(&self.path("proc"), &self.path("mount"))
    }
}

#[test]
fn limits_are_files_of_controllers() {
    let written = |limits: Limits| -> Vec<String> {
        let all = limits.settings();
        all.iter()
            .map(|setting| format!("{} {}={}", setting.controller, setting.file, setting.value))
            .collect()
    };
    assert_eq!(written(Limits::default()), [""; 0]);
    assert!(!Limits::default().any());
    let limits = Limits { memory: Some(1 << 30), tasks: Some(100), processors: Some(1.5) };
    assert_eq!(
        written(limits),
        [
            "memory memory.max=1073741824",
            "memory memory.swap.max=0",
            "memory memory.oom.group=1",
            "pids pids.max=100",
            "cpu cpu.max=150000 100000"
        ]
    );
    assert!(limits.any());
    assert_eq!(limits.controllers(), ["memory", "pids", "cpu"]);
    assert_eq!(
        written(Limits { processors: Some(0.001), ..Limits::default() }),
        ["cpu cpu.max=1000 100000"]
    );
}

#[test]
fn only_the_controllers_that_limits_need_are_enabled() {
    let tree = Tree::new("cpuset cpu io memory pids\n");
    let groups = tree.groups();
    groups.check(&Limits::default()).unwrap();
    let enabled = || fs::read_to_string(tree.path("mount/service/cgroup.subtree_control")).unwrap();
    assert_eq!(enabled(), "");
    groups.check(&Limits { tasks: Some(5), processors: Some(1.0), ..Limits::default() }).unwrap();
    assert_eq!(enabled(), "+pids +cpu");
    // The kernel's file contains the names of all that are enabled.
    tree.write("mount/service/cgroup.subtree_control", "pids\n");
    groups.check(&Limits { tasks: Some(5), memory: Some(1), ..Limits::default() }).unwrap();
    assert_eq!(enabled(), "+memory");
}

#[test]
fn errors_name_the_group_and_what_helps() {
    let tree = Tree::new("memory\n");
    let limits = Limits { tasks: Some(5), ..Limits::default() };
    let error = tree.groups().check(&limits).unwrap_err();
    assert!(error.contains("mount/service' has no controller 'pids' (it has: memory)"), "{error}");
    assert!(error.contains("Delegate="), "{error}");
    fs::remove_file(tree.path("mount/service/cgroup.controllers")).unwrap();
    let error = tree.groups().create(&limits).unwrap_err();
    assert!(error.contains("mount/service' is not a control group of version 2"), "{error}");
    tree.write("proc/self/cgroup", "0::/../../above\n");
    let error = tree.groups().create(&limits).unwrap_err();
    assert!(error.contains("not below"), "{error}");
    let denied = io::Error::from(io::ErrorKind::PermissionDenied);
    assert!(cannot(Path::new("/g"), "be made", &denied).contains("ProtectControlGroups"));
}

#[test]
fn groups_of_servers_that_have_ended_are_removed() {
    let tree = Tree::new("");
    let gone = u32::MAX;
    let left = [format!("pharos-{gone}-server"), format!("pharos-{gone}-worker-7")];
    let own = process::id();
    let kept = [
        format!("pharos-{own}-worker-1"),
        "pharos-1-server".to_owned(),
        "pharos".to_owned(),
        format!("pharos-{gone}-other"),
        format!("pharos-{gone}-worker-x"),
        "other".to_owned(),
    ];
    tree.write("proc/1/status", "");
    for name in left.iter().chain(&kept) {
        fs::create_dir(tree.path("mount/service").join(name)).unwrap();
    }
    tree.groups().check(&Limits::default()).unwrap();
    let exists = |name: &String| tree.path("mount/service").join(name).exists();
    assert!(!left.iter().any(exists) && kept.iter().all(exists));
}

#[test]
fn a_process_starts_in_its_group_and_ends_with_it() {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let made = mounts.iter().find_map(|mount| {
        let group = ControlGroups::new(Path::new("/proc"), mount).create(&Limits::default());
        group.inspect_err(|error| println!("no group below {}: {error}", mount.display())).ok()
    });
    let Some(group) = made else {
        return println!("skipped: this process may not make control groups of version 2");
    };
    let path = group.path.clone();
    // A process that starts another one, and one that enters later.
    let mut shell = Command::new("sh");
    shell.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped());
    start_in(group.entrance().unwrap(), &mut shell);
    let mut child = shell.spawn().unwrap();
    let mut started = [0; 1];
    child.stdout.take().unwrap().read_exact(&mut started).unwrap();
    let members = fs::read_to_string(path.join("cgroup.procs")).unwrap();
    assert!(members.lines().any(|pid| pid == child.id().to_string()), "{members}");
    assert_eq!(members.lines().count(), 2, "{members}");
    assert_eq!(group.exceeded_memory(), None);
    drop(group);
    assert!(!path.exists());
    assert!(!child.wait().unwrap().success());
}

#[test]
fn descendants_are_found_by_their_parents() {
    let tree = Tree::new("");
    for (pid, parent) in [(10, process::id()), (11, 10), (12, 1), (1, 0)] {
        tree.write(&format!("proc/{pid}/status"), &format!("Name:\tx\nPPid:\t{parent}\n"));
    }
    let groups = tree.groups();
    assert_eq!(
        [10, 11, 12, 1, 99].map(|pid| groups.is_descendant(pid)),
        [true, true, false, false, false]
    );
}
