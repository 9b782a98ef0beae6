//! The worker executable. All of it is in the library, so that a crate of a user's own can register its backends.

use std::process::ExitCode;

fn main() -> ExitCode {
    pharos_worker::run()
}
