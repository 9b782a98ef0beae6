//! The `pharos` executable. `pharos_frontend::start` defines the order of start and exit.

use std::process::ExitCode;

/// All threads allocate and free request bodies of a megabyte; the system's allocator returns their
/// pages each time.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    pharos_frontend::start::main()
}
