//! The worker executable. All its code is in libraries, so that other crates can register their
//! backends.

use std::process::ExitCode;

use pharos::model::TRITON_LIBRARY;
use pharos_worker::Worker;

fn main() -> ExitCode {
    Worker::new().libraries(TRITON_LIBRARY, pharos_triton::create, pharos_triton::complete).run()
}
