//! The `pharos` executable. The start-up order is `pharos_frontend::start`, which reads aloud.

use std::process::ExitCode;

fn main() -> ExitCode {
    pharos_frontend::start::main()
}
