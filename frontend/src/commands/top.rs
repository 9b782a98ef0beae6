//! `pharos top`: a server's metrics in a terminal.

use std::process::ExitCode;

use pharos::printable::printable;

use crate::cli::Top;

/// Runs the command.
pub(crate) fn run(command: &Top) -> ExitCode {
    match pharos_top::run(command.options()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{}", printable(&reason));
            ExitCode::FAILURE
        }
    }
}
