//! Commands that need no server.

pub(crate) mod chat_template;
mod health;
mod metrics;
mod trace;

use std::process::ExitCode;

use pharos::metrics::catalog::slo_rules;
use pharos::printable::printable;
use pharos_telemetry::metrics::read;

use crate::cli::{SloCommand, Top};
pub(crate) use health::run as health;
pub(crate) use metrics::run as metrics;
pub(crate) use trace::run as trace;

/// `pharos slo`: the rules of the service level objectives in a `metrics.yaml`.
pub(crate) fn slo(command: &SloCommand) -> ExitCode {
    let SloCommand::Rules { file } = command;
    metrics::print(read(Some(file)).and_then(|catalog| match catalog.slos() {
        [] => Err(format!("{}: it defines no objectives; add them as `slos`", file.display())),
        slos => Ok(slo_rules::rules(slos)),
    }))
}

/// `pharos top`: a server's metrics in a terminal.
pub(crate) fn top(command: &Top) -> ExitCode {
    match pharos_top::run(command.options()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{}", printable(&reason));
            ExitCode::FAILURE
        }
    }
}
