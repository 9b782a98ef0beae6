//! The worker executable. All its code is in the library, so that other crates can register their
//! backends.

use std::process::ExitCode;

fn main() -> ExitCode {
    pharos_worker::run()
}
