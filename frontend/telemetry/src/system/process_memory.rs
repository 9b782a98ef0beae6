//! The memory that processes use on GPUs, from one reading of all of them.

use std::collections::BTreeMap;
use std::path::Path;

/// The memory that processes use, by the number of the GPU. GPUs that could not be read are left
/// out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory(BTreeMap<u32, GpuProcesses>);

/// The processes on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuProcesses {
    /// Process ids with their bytes; a process on several MIG devices has several entries. `None`
    /// if the driver does not report them.
    pub(crate) processes: Vec<(u32, Option<u64>)>,
}

impl ProcessMemory {
    pub(crate) fn new(gpus: impl IntoIterator<Item = (u32, GpuProcesses)>) -> Self {
        Self(gpus.into_iter().collect())
    }

    /// Returns the bytes that some processes use on a GPU; `None` if they are not known.
    pub fn of(&self, gpu: u32, pids: &[u32]) -> Option<u64> {
        self.0.get(&gpu)?.of(pids, |pid| Path::new("/proc").join(pid.to_string()).exists())
    }
}

impl GpuProcesses {
    /// Returns the bytes of some processes. In a container with a PID namespace, the driver may
    /// report ids of the host: if none of the ids is known, and some ids are of no process here,
    /// the bytes are not known.
    fn of(&self, pids: &[u32], exists: impl Fn(u32) -> bool) -> Option<u64> {
        let is_known = self.processes.iter().any(|(pid, _)| pids.contains(pid));
        if !is_known && self.processes.iter().any(|(pid, _)| !exists(*pid)) {
            return None;
        }
        self.processes.iter().filter(|(pid, _)| pids.contains(pid)).map(|(_, bytes)| *bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_processes_are_unknown_if_the_driver_has_other_ids() {
        let of = |processes: &[(u32, Option<u64>)], pids: &[u32]| {
            GpuProcesses { processes: processes.to_vec() }.of(pids, |pid| pid < 100)
        };
        assert_eq!(of(&[], &[1]), Some(0));
        assert_eq!(
            of(&[(1, Some(10)), (2, Some(20)), (1, Some(5)), (3, Some(7))], &[1, 2]),
            Some(35)
        );
        assert_eq!(of(&[(3, Some(7))], &[1, 2]), Some(0));
        assert_eq!(of(&[(3, Some(7)), (4321, Some(7))], &[1, 2]), None, "4321 may be one of them");
        assert_eq!(of(&[(1, Some(10)), (4321, Some(7))], &[1, 2]), Some(10));
        assert_eq!(
            of(&[(1, None), (2, Some(20))], &[1, 2]),
            None,
            "the driver does not report the bytes"
        );
        let memory = ProcessMemory::new([(1, GpuProcesses::default())]);
        assert_eq!((memory.of(0, &[1]), memory.of(1, &[1])), (None, Some(0)));
    }
}
