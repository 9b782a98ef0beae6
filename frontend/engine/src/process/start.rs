//! What a process is started with.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use crate::launch::Launch;

/// A process to start.
pub(super) struct Start<'a> {
    pub(super) launch: &'a Launch,
    pub(super) arguments: Vec<String>,
    pub(super) inherited: Inherited,
    /// The processors to which it is bound; empty for all.
    pub(super) processors: &'a [usize],
    /// Its files apart from the standard streams, with their numbers.
    pub(super) files: Vec<(OwnedFd, i32)>,
    /// Whether it reads its standard input.
    pub(super) reads: bool,
    /// The directory for its temporary files, if it is in a sandbox.
    pub(super) temporary: Option<&'a Path>,
    /// The time limit of its start.
    pub(super) limit: Duration,
}

/// The threads and GPUs of a process, which its environment variables name unless this process has them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Inherited {
    /// The number of threads that one execution may use.
    pub(super) threads: u32,
    /// The GPUs that the process sees, as CUDA names them.
    pub(super) gpus: Option<String>,
}

impl Inherited {
    /// Returns the names and values of the variables, except those that `inherits` returns true for: an operator has set them. The
    /// GPUs are always set, because the server has placed the process.
    pub(super) fn variables(&self, inherits: impl Fn(&str) -> bool) -> Vec<(String, String)> {
        let threads = ("OMP_NUM_THREADS", self.threads.to_string());
        // Makes device numbers equal in all processes.
        let order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned());
        let defaults = [threads, order].into_iter().filter(|(name, _)| !inherits(name));
        let gpus = self.gpus.clone().map(|gpus| ("CUDA_VISIBLE_DEVICES", gpus));
        defaults.chain(gpus).map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_operator_remain() {
        let inherited = Inherited { threads: 4, gpus: Some("GPU-a".to_owned()) };
        let names = |inherits: fn(&str) -> bool| -> Vec<String> {
            inherited.variables(inherits).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(|_| false), ["OMP_NUM_THREADS", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"]);
        assert_eq!(names(|name| name == "OMP_NUM_THREADS"), ["CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"]);
        assert_eq!(names(|_| true), ["CUDA_VISIBLE_DEVICES"]);
    }
}
