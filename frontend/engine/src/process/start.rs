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

/// The threads and GPUs of a process, which its environment variables name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Inherited {
    /// The number of threads that one execution may use.
    pub(super) threads: u32,
    /// The GPUs that the process sees, as CUDA names them.
    pub(super) gpus: Option<String>,
}

impl Inherited {
    /// Returns the names and values of the variables.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        let threads = ("OMP_NUM_THREADS".to_owned(), self.threads.to_string());
        // Makes device numbers equal in all processes.
        let order = ("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned());
        let gpus = self.gpus.clone().map(|gpus| ("CUDA_VISIBLE_DEVICES".to_owned(), gpus));
        [threads, order].into_iter().chain(gpus).collect()
    }
}
