//! The `pharos` executable. The start-up order is `pharos_frontend::start`, which reads aloud.

use std::process::ExitCode;

/// Request bodies of a megabyte come and go on all threads; the system's allocator gives their pages back each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    pharos_frontend::start::main()
}
