//! Runs a program in a sandbox of the kernel: Landlock restricts files, sockets and signals,
//! seccomp restricts system calls, and the capabilities of root are dropped.
//!
//! See `landlock(7)` and `seccomp(2)`. The restrictions hold for the program and for all processes
//! that it starts, and none of them can remove them.

mod beneath;

use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::OsString;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use landlock::{
    ABI, Access, AccessFs, AccessNet, LandlockStatus, PathBeneath, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};
use pharos::wire::sandbox::{ESSENTIAL, Permissions};
use rustix::fs::{FileType, Mode, OFlags, fstat};
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// The exit status of a sandbox that cannot be made, as of `env` and `timeout`.
const FAILED: u8 = 125;

/// The newest version of Landlock whose rights are used.
const LANDLOCK: ABI = ABI::V6;

/// System calls that no model needs: calls of debuggers, of the machine's administration, and calls
/// that reach other processes, such as System V memory. Calls of `io_uring` are among them, because
/// its operations bypass the filter.
const REFUSED: [i64; 60] = [
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_fanotify_init,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_inotify_add_watch,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_kcmp,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    libc::SYS_msgctl,
    libc::SYS_msgget,
    libc::SYS_msgrcv,
    libc::SYS_msgsnd,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_madvise,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_request_key,
    libc::SYS_semctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_setdomainname,
    libc::SYS_sethostname,
    libc::SYS_setns,
    libc::SYS_settimeofday,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_shmget,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// System calls that change modes, owners, times and attributes of files. Landlock does not
/// restrict them, so that they would work on all files of the user. They do nothing and report
/// success, because functions that copy files call them.
const WITHOUT_EFFECT: [i64; 14] = [
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    FCHMODAT2,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fremovexattr,
    libc::SYS_fsetxattr,
    libc::SYS_lremovexattr,
    libc::SYS_lsetxattr,
    libc::SYS_removexattr,
    libc::SYS_setxattr,
    SETXATTRAT,
    REMOVEXATTRAT,
    libc::SYS_utimensat,
];

/// Older forms of these calls, which other architectures than x86-64 do not have.
#[cfg(target_arch = "x86_64")]
const OLD_WITHOUT_EFFECT: [i64; 6] = [
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_futimesat,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD_WITHOUT_EFFECT: [i64; 0] = [];

/// System calls whose numbers are the same on all architectures, and not all in the crate `libc`.
const FCHMODAT2: i64 = 452;
const SETXATTRAT: i64 = 463;
const REMOVEXATTRAT: i64 = 466;
const FILE_SETATTR: i64 = 469;

/// Calls that can change the limits or the scheduling of other processes: each with the position of
/// an argument and the only value that it may have. A process has the number 0 for itself; two
/// calls can also name a process group or a user.
const OF_OTHERS: [(i64, u8, i32); 8] = [
    (libc::SYS_ioprio_set, 0, IOPRIO_WHO_PROCESS),
    (libc::SYS_ioprio_set, 1, 0),
    (libc::SYS_prlimit64, 0, 0),
    (libc::SYS_sched_setattr, 0, 0),
    (libc::SYS_sched_setparam, 0, 0),
    (libc::SYS_sched_setscheduler, 0, 0),
    (libc::SYS_setpriority, 0, PRIO_PROCESS),
    (libc::SYS_setpriority, 1, 0),
];

/// The threads of this process. Their names are written there (`pthread_setname_np(3)`), without
/// which CUDA does not start.
const THREADS: &str = "/proc/self/task";

/// The kinds of `setpriority(2)` and `ioprio_set(2)` that name a process.
const PRIO_PROCESS: i32 = 0;
const IOPRIO_WHO_PROCESS: i32 = 1;

/// Operations of `ioctl` that type into a terminal.
const TYPING: [u64; 2] = [0x5412, 0x541c];

/// The flags of `clone` that create namespaces.
const NAMESPACES: [i32; 7] = [
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWUTS,
];

/// Runs a program in a sandbox, in place of this one.
pub(crate) fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let failed = |error: &dyn std::fmt::Display| {
        eprintln!("pharos-worker: cannot start a program in a sandbox: {error}");
        ExitCode::from(FAILED)
    };
    let (permissions, program, arguments) = match Permissions::parse(arguments) {
        Ok(parsed) => parsed,
        Err(error) => return failed(&error),
    };
    if let Err(error) = restrict(&permissions) {
        return failed(&error);
    }
    let mut command = Command::new(&program);
    for (name, value) in &permissions.variables {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let error = command.args(arguments).exec();
    failed(&format!("'{}': {error}", program.display()))
}

/// Restricts this process, and prints each protection that the kernel does not have.
pub(crate) fn check() -> ExitCode {
    let missing =
        match (restrict_files(&Permissions::default()), restrict_calls(&Permissions::default())) {
            (Ok(status), Ok(())) => missing(status.landlock),
            (Err(error), _) | (_, Err(error)) => vec![format!("{ESSENTIAL}{error}")],
        };
    missing.iter().for_each(|text| println!("{text}"));
    ExitCode::SUCCESS
}

/// Returns the protections that this version of Landlock does not have.
fn missing(landlock: LandlockStatus) -> Vec<String> {
    let LandlockStatus::Available { effective_abi, .. } = landlock else {
        return vec![format!("{ESSENTIAL}{}", without_landlock(landlock))];
    };
    let mut missing = vec![
        (ABI::V3, "files that it may only read can be truncated (Linux 6.2 prevents it)"),
        (ABI::V5, "control operations of devices are not restricted (Linux 6.10 restricts them)"),
        (ABI::V6, "other processes of the same user can be signalled (Linux 6.12 prevents it)"),
    ];
    missing.retain(|(since, _)| effective_abi < *since);
    missing.into_iter().map(|(_, text)| text.to_owned()).collect()
}

fn without_landlock(landlock: LandlockStatus) -> &'static str {
    match landlock {
        LandlockStatus::NotEnabled => "Landlock is not enabled in the kernel",
        _ => "the kernel has no Landlock, which Linux has since 5.13",
    }
}

/// Restricts this process, each kind of restriction independently of the others.
///
/// # Errors
/// The kernel cannot restrict files or system calls, and that is required.
fn restrict(permissions: &Permissions) -> Result<(), Box<dyn Error>> {
    let files = restrict_files(permissions).and_then(|status| match status.landlock {
        LandlockStatus::Available { .. } => Ok(()),
        landlock => Err(without_landlock(landlock).into()),
    });
    let results = [files, drop_capabilities(), restrict_calls(permissions)];
    if permissions.required { results.into_iter().collect() } else { Ok(()) }
}

/// Drops the capabilities of root, which could read other processes; the program cannot regain
/// them.
fn drop_capabilities() -> Result<(), Box<dyn Error>> {
    for capability in CapabilitySet::all().iter() {
        match remove_capability_from_bounding_set(capability) {
            // The kernel does not know it, or this process does not have the right to drop any, and
            // so hardly any to lose.
            Ok(()) | Err(Errno::INVAL | Errno::PERM) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let none = CapabilitySet::empty();
    Ok(set_capabilities(
        None,
        CapabilitySets { effective: none, permitted: none, inheritable: none },
    )?)
}

fn restrict_files(permissions: &Permissions) -> Result<RestrictionStatus, Box<dyn Error>> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .scope(Scope::Signal | Scope::AbstractUnixSocket)?;
    if !permissions.network {
        rules = rules.handle_access(AccessNet::from_all(LANDLOCK))?;
    }
    let threads = rustix::fs::open(THREADS, OFlags::PATH, Mode::empty())?;
    let beneath = permissions
        .beneath
        .iter()
        .filter_map(|(root, path)| beneath::open(root, path).ok())
        .map(readable)
        .collect::<Result<Vec<_>, Errno>>()?;
    let rules = rules
        .create()?
        .add_rules(beneath.into_iter().map(Ok::<_, RulesetError>))?
        .add_rules(path_beneath_rules(&permissions.read, AccessFs::from_read(LANDLOCK)))?
        .add_rules(path_beneath_rules(&permissions.write, AccessFs::from_all(LANDLOCK)))?
        .add_rule(PathBeneath::new(&threads, AccessFs::WriteFile | AccessFs::Truncate))?;
    let status = rules.restrict_self()?;
    // The rule holds for this inode. The program keeps the directory open: otherwise the kernel
    // could remove it from its cache, and create another inode for it later.
    let _ = threads.into_raw_fd();
    Ok(status)
}

/// Returns the rule with which a file, or a directory with all that is in it, may be read.
fn readable(opened: OwnedFd) -> Result<PathBeneath<OwnedFd>, Errno> {
    let is_directory = FileType::from_raw_mode(fstat(&opened)?.st_mode) == FileType::Directory;
    let all = AccessFs::from_read(LANDLOCK);
    Ok(PathBeneath::new(
        opened,
        if is_directory { all } else { all & AccessFs::from_file(LANDLOCK) },
    ))
}

fn restrict_calls(permissions: &Permissions) -> Result<(), Box<dyn Error>> {
    let without_effect: Vec<i64> =
        WITHOUT_EFFECT.iter().chain(&OLD_WITHOUT_EFFECT).chain([&FILE_SETATTR]).copied().collect();
    let filters = [
        filter(libc::EPERM, &REFUSED)?,
        filter(0, &without_effect)?,
        // Its flags are in memory, where a filter cannot check them. Libraries then call `clone`.
        filter(libc::ENOSYS, &[libc::SYS_clone3])?,
        compiled(libc::EPERM, &conditional()?)?,
        compiled(libc::EACCES, &sockets(permissions)?)?,
    ];
    filters.iter().try_for_each(|filter| Ok(seccompiler::apply_filter(filter)?))
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Returns a rule for calls with an argument, of which only the bits of `mask` count, that has a
/// value.
fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let is_equal = SeccompCmpOp::MaskedEq(mask);
    SeccompRule::new(vec![SeccompCondition::new(
        argument,
        SeccompCmpArgLen::Qword,
        is_equal,
        value,
    )?])
}

/// Returns a rule for calls with an argument that has none of these values; the argument is 32 bits
/// wide.
fn none_of(argument: u8, values: &[i32]) -> Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(
        values
            .iter()
            .map(|value| compared(argument, SeccompCmpOp::Ne, *value))
            .collect::<Result<_, _>>()?,
    )
}

/// Returns a condition on an argument that is 32 bits wide.
fn compared(
    argument: u8,
    how: SeccompCmpOp,
    value: i32,
) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, u64::from(value.unsigned_abs()))
}

/// Returns the rules for calls that depend on their arguments: `clone` for new namespaces, typing
/// into a terminal, and settings of other processes.
fn conditional() -> Result<Rules, seccompiler::BackendError> {
    let flags = NAMESPACES.iter().map(|flag| u64::from(flag.unsigned_abs()));
    let namespaces = flags.map(|flag| masked(0, flag, flag)).collect::<Result<_, _>>()?;
    let typing = TYPING
        .iter()
        .map(|operation| masked(1, u64::from(u32::MAX), *operation))
        .collect::<Result<_, _>>()?;
    let mut rules = Rules::from([(libc::SYS_clone, namespaces), (libc::SYS_ioctl, typing)]);
    for (call, argument, own) in OF_OTHERS {
        rules.entry(call).or_default().push(none_of(argument, &[own])?);
    }
    Ok(rules)
}

/// Returns the rules for sockets. Internet sockets exist only with a network. Pairs have no
/// datagrams, because a datagram socket can send to any other one of the machine.
///
/// CUDA listens on a Unix socket of the type `SOCK_SEQPACKET`, to exchange descriptors with other
/// processes that use the device. Without a network it can connect to nothing.
fn sockets(permissions: &Permissions) -> Result<Rules, seccompiler::BackendError> {
    let pairs = with_type(&[], &[libc::SOCK_DGRAM, libc::SOCK_RAW])?;
    // Netlink: the resolver of names sorts addresses by their routes.
    let mut families = if permissions.network {
        vec![libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK]
    } else {
        Vec::new()
    };
    let mut others = Vec::new();
    if permissions.cuda {
        families.push(libc::AF_UNIX);
        let unix = compared(0, SeccompCmpOp::Eq, libc::AF_UNIX)?;
        others = with_type(&[unix], &[libc::SOCK_STREAM, libc::SOCK_DGRAM, libc::SOCK_RAW])?;
    }
    if !families.is_empty() {
        others.push(none_of(0, &families)?);
    }
    let mut rules = Rules::from([(libc::SYS_socket, others), (libc::SYS_socketpair, pairs)]);
    if !permissions.network {
        rules.insert(libc::SYS_connect, Vec::new());
    }
    Ok(rules)
}

/// Returns rules for calls whose second argument is one of these types of sockets and for which the
/// conditions hold.
fn with_type(
    conditions: &[SeccompCondition],
    types: &[i32],
) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    /// The bits of a socket's type; the others are flags.
    const TYPE: u64 = 0xf;
    types
        .iter()
        .map(|kind: &i32| {
            let is_type = SeccompCmpOp::MaskedEq(TYPE);
            let kind = SeccompCondition::new(
                1,
                SeccompCmpArgLen::Qword,
                is_type,
                u64::from(kind.unsigned_abs()),
            )?;
            SeccompRule::new([conditions, &[kind]].concat())
        })
        .collect()
}

/// Returns a filter that fails these system calls with an error number, or skips them with success
/// if the number is 0.
fn filter(error: i32, calls: &[i64]) -> Result<BpfProgram, Box<dyn Error>> {
    compiled(error, &calls.iter().map(|call| (*call, Vec::new())).collect())
}

fn compiled(error: i32, rules: &Rules) -> Result<BpfProgram, Box<dyn Error>> {
    /// The bit in the numbers of the calls of x32, an additional ABI on x86-64.
    const X32: i64 = 0x4000_0000;
    let mut all = rules.clone();
    if cfg!(target_arch = "x86_64") {
        all.extend(rules.iter().map(|(call, rules)| (call | X32, rules.clone())));
    }
    let action = SeccompAction::Errno(error.unsigned_abs());
    // Calls of other architectures end the process.
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    Ok(SeccompFilter::new(all, SeccompAction::Allow, action, arch)?.try_into()?)
}
