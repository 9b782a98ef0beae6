//! The processors near a device that this process may use.

use std::fs;
use std::path::Path;

use rustix::thread::CpuSet;

use super::Usable;
use crate::system::host_policies::{allowed, range};

/// Returns the processors near a device that this process may use, from the driver or otherwise
/// from the system. Empty if they are unknown or not allowed; a process is then not bound.
pub(super) fn near(device: &Usable, bus: &Path) -> Vec<usize> {
    let mut cpus = device.cpus.clone();
    if cpus.is_empty() {
        cpus = device
            .bus
            .as_ref()
            .map(|place| listed(&bus.join(place).join("local_cpulist")))
            .unwrap_or_default();
    }
    allowed(cpus)
}

/// Reads the numbers in a file such as `0-3,8-11`.
fn listed(path: &Path) -> Vec<usize> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let ranges = text.trim().split(',').filter_map(range);
    ranges.filter(|range| *range.end() < CpuSet::MAX_CPU).flatten().collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use rustix::thread::sched_getaffinity;

    use super::*;
    use crate::system::tests::Tree;

    #[test]
    fn uses_the_list_of_the_system_without_one_of_the_driver() {
        let tree = Tree::new();
        let device = |cpus: &[usize]| Usable {
            uuid: "GPU-0".to_owned(),
            bus: Some("0000:3b:00.0".to_owned()),
            memory: None,
            mig: None,
            cpus: cpus.to_vec(),
        };
        let allowed = sched_getaffinity(None).unwrap();
        let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
        let first = allowed[0];
        let last = allowed[allowed.len() - 1];
        assert_eq!(near(&device(&[]), &tree.path("bus")), Vec::<usize>::new());
        tree.write(
            "bus/0000:3b:00.0/local_cpulist",
            &format!("{first}-{last},1000-1001,x,9-99999\n"),
        );
        let known = near(&device(&[]), &tree.path("bus"));
        let range = first..=last;
        assert_eq!(
            known,
            allowed.iter().copied().filter(|cpu| range.contains(cpu)).collect::<Vec<_>>()
        );
        assert_eq!(near(&device(&[last, 1001]), &tree.path("bus")), [last]);
    }
}
