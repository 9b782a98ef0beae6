//! The worker executable. All its code is in libraries, so that other crates can register their
//! backends.

use std::process::ExitCode;

use pharos_worker::Worker;

fn main() -> ExitCode {
    Worker::new()
        .libraries(pharos_triton::PREFIX, pharos_triton::create, pharos_triton::complete)
        .run()
}
