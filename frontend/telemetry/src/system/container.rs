//! The limits of this process's container: control groups of version 2, as in the kernel's
//! `Documentation/admin-guide/cgroup-v2.rst`.
//!
//! A limit applies to a group and everything below it, so the smallest limit of this process's
//! group and its ancestors counts. Of equal limits, the outermost counts, because it has the most
//! users. Without limits, or with only version 1, the numbers of the machine apply.

use std::fs;
use std::path::{Path, PathBuf};

use pharos::timeline::Instant;
use pharos_os::control_groups::{entry, own_group};

use super::memory::Memory;

/// Finds and reads the limits.
pub(crate) struct Container {
    proc: PathBuf,
    root: PathBuf,
    last: Option<CpuTime>,
}

/// The processor time that a group had used at some time.
struct CpuTime {
    group: PathBuf,
    at: Instant,
    microseconds: u64,
}

impl Container {
    /// Creates a reader for the process that `proc` calls `self`, with the control groups' file
    /// system at `root`.
    pub(crate) fn new(proc: &Path, root: &Path) -> Self {
        Self { proc: proc.to_owned(), root: root.to_owned(), last: None }
    }

    /// Returns the group of this process and its ancestors, innermost first, root last. Not cached:
    /// a process may be moved.
    fn groups(&self) -> Vec<PathBuf> {
        let own = own_group(&self.proc, &self.root).unwrap_or_else(|| self.root.clone());
        own.ancestors()
            .take_while(|group| group.starts_with(&self.root))
            .map(Path::to_owned)
            .collect()
    }

    /// Returns the memory under the smallest limit; `None` if no limit is below `machine` bytes.
    ///
    /// Memory that the kernel can reclaim at once, pages of files that have not been used lately
    /// (`inactive_file`), counts as available, as in `docker stats` and the kubelet.
    pub(crate) fn memory(&self, machine: u64) -> Option<Memory> {
        let mut tightest = None;
        for group in self.groups() {
            let limit = number(&group.join("memory.max")).filter(|limit| *limit < machine);
            if let Some(limit) = limit
                && tightest.as_ref().is_none_or(|(smallest, _)| limit <= *smallest)
            {
                tightest = Some((limit, group));
            }
        }
        let (limit, group) = tightest?;
        let current = number(&group.join("memory.current"))?;
        let idle = entry_of(&group.join("memory.stat"), "inactive_file").unwrap_or(0);
        let used = current.saturating_sub(idle).min(limit);
        Some(Memory { total: limit, available: limit - used })
    }

    /// Returns the file with the pressure on the memory of the innermost group that has one.
    pub(crate) fn memory_pressure(&self) -> Option<PathBuf> {
        self.groups()
            .into_iter()
            .map(|group| group.join("memory.pressure"))
            .find(|file| file.is_file())
    }

    /// Returns whether any quota of processor time is set.
    pub(crate) fn has_cpu_quota(&self) -> bool {
        self.groups().iter().any(|group| quota(&group.join("cpu.max")).is_some())
    }

    /// Returns the used share of the smallest quota below `processors` since the last call, from 0
    /// to 1.
    pub(crate) fn cpu(&mut self, now: Instant, processors: usize) -> Quota {
        let mut tightest: Option<(f64, PathBuf)> = None;
        for group in self.groups() {
            let quota = quota(&group.join("cpu.max")).filter(|quota| *quota < processors as f64);
            if let Some(quota) = quota
                && tightest.as_ref().is_none_or(|(smallest, _)| quota <= *smallest)
            {
                tightest = Some((quota, group));
            }
        }
        let Some((quota, group)) = tightest else { return Quota::None };
        let Some(microseconds) = entry_of(&group.join("cpu.stat"), "usage_usec") else {
            return Quota::None;
        };
        let time = CpuTime { group, at: now, microseconds };
        let last = self
            .last
            .replace(time)
            .filter(|last| self.last.as_ref().is_some_and(|t| t.group == last.group));
        let Some(last) = last.filter(|last| now > last.at) else { return Quota::Unknown };
        let used = microseconds.saturating_sub(last.microseconds) as f64 / 1e6;
        // The share can exceed 1 briefly: `cpu.max.burst` allows it, and the two files are not read
        // atomically.
        Quota::Used((used / ((now - last.at).as_secs_f64() * quota)).clamp(0.0, 1.0))
    }
}

/// The use of the processors that a container may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Quota {
    /// No quota is below the machine's number of processors.
    None,
    /// A quota exists, and its use needs a second reading.
    Unknown,
    /// The used share of the quota, from 0 to 1.
    Used(f64),
}

/// Reads a file with one number; `None` for `max` and for a missing file.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Returns the number after `key` in a file with one key and number per line.
fn entry_of(file: &Path, key: &str) -> Option<u64> {
    entry(&fs::read_to_string(file).ok()?, key)
}

/// Reads a number of processors from `QUOTA PERIOD` in microseconds; `None` for `max PERIOD`.
fn quota(file: &Path) -> Option<f64> {
    let text = fs::read_to_string(file).ok()?;
    let mut numbers = text.split_whitespace().map(str::parse::<f64>);
    let quota = numbers.next()?.ok()?;
    let period = numbers.next()?.ok()?;
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{Tree, at_ms};
    use super::*;

    const MIB: u64 = 1 << 20;

    fn container(tree: &Tree) -> Container {
        Container::new(&tree.path("proc"), &tree.path("cgroup"))
    }

    #[test]
    fn reports_no_limit_without_limits_below_the_machine() {
        let tree = Tree::new();
        assert_eq!(container(&tree).memory(1 << 30), None);
        assert_eq!(container(&tree).cpu(at_ms(0), 4), Quota::None);
        tree.write("proc/self/cgroup", "1:cpu:/\n0::/a/b\n");
        tree.write("cgroup/a/b/memory.max", "max\n");
        tree.write("cgroup/a/b/cpu.max", "max 100000\n");
        tree.write("cgroup/a/memory.max", "9999999999999\n");
        assert!(!container(&tree).has_cpu_quota());
        tree.write("cgroup/a/cpu.max", "800000 100000\n");
        assert!(container(&tree).has_cpu_quota());
        assert_eq!(container(&tree).memory(1 << 30), None, "more than the machine has");
        assert_eq!(container(&tree).cpu(at_ms(0), 4), Quota::None);
    }

    #[test]
    fn uses_the_smallest_memory_limit_of_all_ancestors() {
        let tree = Tree::new();
        tree.write("proc/self/cgroup", "0::/pod/container\n");
        for (group, limit, current) in
            [("pod/container", 512, 100), ("pod", 256, 200), ("", 600, 10)]
        {
            tree.write(&format!("cgroup/{group}/memory.max"), &format!("{}\n", limit * MIB));
            tree.write(&format!("cgroup/{group}/memory.current"), &format!("{}\n", current * MIB));
        }
        tree.write(
            "cgroup/pod/memory.stat",
            &format!("anon 5\ninactive_file {}\nactive_file 7\n", 50 * MIB),
        );
        let expected = Memory { total: 256 * MIB, available: 106 * MIB };
        assert_eq!(container(&tree).memory(1 << 40), Some(expected));
    }

    #[test]
    fn uses_the_outermost_of_equal_limits() {
        let tree = Tree::new();
        tree.write("proc/self/cgroup", "0::/pod/container\n");
        for (group, current) in [("pod/container", 100), ("pod", 200)] {
            tree.write(&format!("cgroup/{group}/memory.max"), &format!("{}\n", 256 * MIB));
            tree.write(&format!("cgroup/{group}/memory.current"), &format!("{}\n", current * MIB));
        }
        assert_eq!(container(&tree).memory(1 << 40).unwrap().available, 56 * MIB);
    }

    #[test]
    fn uses_the_root_for_a_path_outside_the_mount() {
        for path in ["/", "/not/mounted", "/../../elsewhere", ""] {
            let tree = Tree::new();
            tree.write("proc/self/cgroup", &format!("0::{path}\n"));
            tree.write("cgroup/memory.max", &format!("{}\n", 64 * MIB));
            tree.write("cgroup/memory.current", &format!("{}\n", 65 * MIB));
            let expected = Memory { total: 64 * MIB, available: 0 };
            assert_eq!(container(&tree).memory(1 << 40), Some(expected), "{path:?}");
        }
    }

    #[test]
    fn utilisation_is_relative_to_the_quota() {
        let tree = Tree::new();
        tree.write("cgroup/cpu.max", "150000 100000\n");
        let mut container = container(&tree);
        let mut read = |ms, usage_usec: u64| {
            tree.write("cgroup/cpu.stat", &format!("usage_usec {usage_usec}\nuser_usec 1\n"));
            container.cpu(at_ms(ms), 8)
        };
        assert_eq!(read(0, 5_000_000), Quota::Unknown);
        assert_eq!(read(2_000, 6_500_000), Quota::Used(0.5), "1.5 s of 2 s times 1.5 processors");
        assert_eq!(read(2_000, 6_500_000), Quota::Unknown, "no time has passed");
        assert_eq!(read(3_000, 9_500_000), Quota::Used(1.0), "a burst counts as 1");
        assert_eq!(read(4_000, 9_500_000), Quota::Used(0.0));
    }

    #[test]
    fn starts_over_after_a_move_to_another_group() {
        let tree = Tree::new();
        tree.write("cgroup/cpu.max", "100000 100000\n");
        tree.write("cgroup/cpu.stat", "usage_usec 1000000\n");
        let mut container = container(&tree);
        assert_eq!(container.cpu(at_ms(0), 8), Quota::Unknown);
        tree.write("proc/self/cgroup", "0::/inner\n");
        tree.write("cgroup/inner/cpu.max", "50000 100000\n");
        tree.write("cgroup/inner/cpu.stat", "usage_usec 0\n");
        assert_eq!(container.cpu(at_ms(1_000), 8), Quota::Unknown);
        tree.write("cgroup/inner/cpu.stat", "usage_usec 250000\n");
        assert_eq!(container.cpu(at_ms(2_000), 8), Quota::Used(0.5));
    }
}
