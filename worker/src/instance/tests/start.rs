//! The start of a worker process.

use std::io::{self, Write as _};

use pharos::wire::{ToFrontend, ToWorker};

use super::*;

#[test]
fn a_process_without_a_thread_that_watches_the_frontend_tells_why_it_loads_nothing() {
    let Parts { load, descriptors, folder: _folder, .. } = parts(&builtin("identity", IO), &[], &Cuda::new(None));
    let (worker, mut frontend) = connection();
    let mut bytes = Vec::new();
    ToWorker::Load(load).encode(&mut bytes);
    frontend.write_all(&bytes).unwrap();
    let watched = Err(io::Error::from(io::ErrorKind::WouldBlock));
    crate::answer(worker, descriptors, &Registry::default(), |load| crate::cuda_if_watched(watched, load)).unwrap();
    let frames = frontend.frames_to_the_end();
    let [ToFrontend::LoadFailed(reason)] = frames.as_slice() else { panic!("{frames:?}") };
    assert!(reason.contains("the worker cannot watch the frontend: operation would block"), "{reason}");
}

const IO: &str =
    "input { name: 'X' data_type: TYPE_FP32 dims: [1] } output { name: 'Y' data_type: TYPE_FP32 dims: [1] }";
