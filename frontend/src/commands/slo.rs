//! `pharos slo`: the rules of the service level objectives in a `metrics.yaml`.

use std::process::ExitCode;

use pharos::metrics::catalog::slo_rules;
use pharos_telemetry::metrics::read;

use super::metrics::print;
use crate::cli::SloCommand;

/// Runs a command.
pub(crate) fn run(command: &SloCommand) -> ExitCode {
    let SloCommand::Rules { file } = command;
    print(read(Some(file)).and_then(|catalog| match catalog.slos() {
        [] => Err(format!("{}: it defines no objectives; add them as `slos`", file.display())),
        slos => Ok(slo_rules::rules(slos)),
    }))
}
