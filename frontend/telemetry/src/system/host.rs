//! The host, or the container's share of it: processors, memory, and the disk of `/`.

use std::path::Path;

use pharos::timeline::Instant;
use rustix::fs::statvfs;
use sysinfo::System;

use super::Roots;
use super::container::{Container, Quota};
use super::memory::Memory;

/// Reads the host.
pub(crate) struct Host {
    system: System,
    container: Container,
    /// Whether the processors were read before: the first reading has no interval.
    read: bool,
}

/// Bytes of a file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    /// Used by all users.
    pub(crate) used: u64,
    /// Free for users other than root.
    pub(crate) available: u64,
}

/// A reading of the host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HostReading {
    /// The share of the processors (of the container's quota) that was busy since the last
    /// reading, 0 to 1.
    pub(crate) cpu: Option<f64>,
    pub(crate) memory: Memory,
    pub(crate) disk: Option<Disk>,
}

impl Host {
    /// # Errors
    /// The system's information cannot be read.
    pub(crate) fn new(roots: &Roots) -> Result<Self, sysinfo::Error> {
        let container = Container::new(&roots.proc, &roots.cgroup);
        Ok(Self { system: System::new()?, container, read: false })
    }

    /// Reads everything; processors over the time since the last call. Within
    /// [`sysinfo::MINIMUM_CPU_UPDATE_INTERVAL`] of the last call, the machine's processors keep
    /// their value.
    pub(crate) fn read(&mut self, now: Instant) -> HostReading {
        self.system.refresh_cpu_usage();
        self.system.refresh_memory();
        let machine =
            Memory { total: self.system.total_memory(), available: self.system.available_memory() };
        let whole = f64::from(self.system.global_cpu_usage()) / 100.0;
        let cpu = match self.container.cpu(now, self.system.cpus().len()) {
            Quota::None => self.read.then_some(whole.clamp(0.0, 1.0)),
            Quota::Unknown => None,
            Quota::Used(share) => Some(share),
        };
        self.read = true;
        HostReading {
            cpu,
            memory: self.container.memory(machine.total).unwrap_or(machine),
            disk: disk(Path::new("/")),
        }
    }
}

/// Returns the file system of a path. sysinfo would walk all mounts and count root's reserve as
/// used.
fn disk(path: &Path) -> Option<Disk> {
    let all = statvfs(path).ok()?;
    let used = all.f_blocks.saturating_sub(all.f_bfree) * all.f_frsize;
    Some(Disk { used, available: all.f_bavail * all.f_frsize })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::tests::{Tree, at_ms};
    use super::*;

    fn roots(tree: &Tree) -> Roots {
        Roots { proc: tree.path("proc"), cgroup: tree.path("cgroup"), bus: tree.path("bus") }
    }

    #[test]
    fn measures_the_processors_over_an_interval() {
        let mut host = Host::new(&roots(&Tree::new())).unwrap();
        let first = host.read(at_ms(0));
        assert_eq!(first.cpu, None, "no interval yet");
        assert!(
            first.memory.total > 1 << 20 && first.memory.available <= first.memory.total,
            "{first:?}"
        );
        let disk = first.disk.unwrap();
        assert!(disk.used > 0 && disk.available < 1 << 60, "{disk:?}");
        // Keeps a processor busy for sysinfo's minimum interval.
        let begin = pharos_os::clock::now();
        while pharos_os::clock::now() - begin <= sysinfo::MINIMUM_CPU_UPDATE_INTERVAL {
            std::hint::spin_loop();
        }
        let busy = host.read(at_ms(250)).cpu.unwrap();
        assert!(busy > 0.5 / host.system.cpus().len() as f64 && busy <= 1.0, "{busy}");
    }

    #[test]
    fn the_limits_of_the_container_replace_the_machine() {
        let tree = Tree::new();
        tree.write("cgroup/memory.max", "1048576\n");
        tree.write("cgroup/memory.current", "262144\n");
        tree.write("cgroup/cpu.max", "50000 100000\n");
        tree.write("cgroup/cpu.stat", "usage_usec 0\n");
        let mut host = Host::new(&roots(&tree)).unwrap();
        let first = host.read(at_ms(0));
        assert_eq!(
            (first.cpu, first.memory),
            (None, Memory { total: 1 << 20, available: 786_432 })
        );
        assert_eq!(first.memory.used(), 262_144);
        tree.write("cgroup/cpu.stat", "usage_usec 125000\n");
        assert_eq!(host.read(at_ms(1_000)).cpu, Some(0.25));
    }
}
