//! The benchmark: compares this server with the limit of its libraries and with a real Triton in
//! one run.
//!
//! Rounds alternate between the servers, and every ratio is of one round: on shared machines
//! absolute numbers vary more than the differences of interest. Informational only; the exit status
//! says whether the measurement succeeded.

mod client;
mod compiled;
mod counter;
mod echo;
mod echo_loops;
mod growth;
mod grpc_client;
mod http_client;
mod load;
mod memory;
mod messages;
mod models;
mod observed;
mod processor_time;
mod report;
mod server;
mod stats;
mod torchserve;
mod workload;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;

use crate::load::{Case, measure};
use crate::memory::{Memory, memory};
use crate::models::Scratch;
use crate::report::{Row, check, render, render_increments};
use crate::server::{Kind, Programs, Server};
use crate::workload::Workload;

/// Compares the server with a bare axum and tonic echo and with Triton.
#[derive(Parser)]
#[command(name = "bench")]
struct Options {
    /// Number of rounds; each round measures the servers in turn.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds per measurement, after a short warm-up.
    #[arg(long, default_value = "2", value_parser = load::seconds)]
    seconds: Duration,
    /// Comma-separated names of servers (echo, pharos, triton, torchserve) and parts of case names
    /// (simple/grpc/8).
    #[arg(long, default_value = "", hide_default_value = true)]
    only: String,
    /// Comma-separated numbers of clients, instead of those of each case.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=10_000))]
    clients: Vec<u16>,
    /// Skip Triton even where it is installed.
    #[arg(long)]
    skip_triton: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Serve the echo; started by the benchmark itself.
    #[command(hide = true)]
    Echo { http: u16, grpc: u16 },
    /// Serve the echo with an event loop for each processor; started by the benchmark itself.
    #[command(hide = true)]
    EchoLoops { http: u16, grpc: u16 },
    /// Measure a running server with identity models; started by `tests/bench_growth`.
    #[command(hide = true)]
    Growth(growth::Options),
}

/// The servers and cases that `--only` selects.
struct Selection {
    kinds: Vec<Kind>,
    cases: Vec<Case>,
}

impl Selection {
    fn parse(only: &str, clients: &[u16]) -> Result<Self, String> {
        let all =
            Case::all(&clients.iter().map(|clients| usize::from(*clients)).collect::<Vec<_>>());
        let terms: Vec<_> =
            only.split(',').map(str::trim).filter(|term| !term.is_empty()).collect();
        let is_server = |term: &str| Kind::ALL.iter().any(|kind| kind.name() == term);
        let (servers, parts): (Vec<_>, Vec<_>) =
            terms.into_iter().partition(|term| is_server(term));
        let kinds = Kind::ALL
            .into_iter()
            .filter(|kind| servers.is_empty() || servers.contains(&kind.name()))
            .collect();
        let wanted =
            |case: &Case| parts.is_empty() || parts.iter().any(|part| case.name().contains(part));
        let cases: Vec<_> = all.iter().copied().filter(wanted).collect();
        if cases.is_empty() {
            let names: Vec<_> = all.iter().map(Case::name).collect();
            return Err(format!(
                "--only {only} matches no case; the cases are {}",
                names.join(", ")
            ));
        }
        Ok(Self { kinds, cases })
    }

    fn has_python(&self) -> bool {
        self.cases.iter().any(|case| matches!(case.workload, Workload::Python(_)))
    }

    /// Removes the cases with Python models, and prints the reason, if this server cannot run them.
    fn leave_out_python(&mut self, programs: &Programs) {
        let in_python =
            |case: &Case| matches!(case.workload, Workload::Python(_) | Workload::Handler);
        let here =
            [Kind::Pharos, Kind::PharosTorchserve].iter().any(|kind| self.kinds.contains(kind));
        let reason = programs.no_python().filter(|_| here && self.cases.iter().any(in_python));
        if let Some(reason) = reason {
            println!("models in Python: skipped: {reason}");
            self.cases.retain(|case| !in_python(case));
        }
    }

    /// Returns whether a server serves any selected case.
    fn needs(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind) && self.cases.iter().any(|case| kind.serves(case.workload))
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let result = match options.command {
        Some(Command::Echo { http, grpc }) => echo::serve(http, grpc),
        Some(Command::EchoLoops { http, grpc }) => echo_loops::serve(http, grpc),
        Some(Command::Growth(options)) => growth::run(&options),
        None => run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), String> {
    let mut selection = Selection::parse(&options.only, &options.clients)?;
    selection.leave_out_python(&Programs::find());
    let stop = stop_on_signal()?;
    let scratch =
        Scratch::new().map_err(|error| format!("cannot create a temporary folder: {error}"))?;
    let servers = start(&selection, options.skip_triton, &scratch)?;
    let pharos = servers.iter().find(|server| server.kind == Kind::Pharos);
    let before = pharos.map(memory);
    let rows = measure_all(options, &selection.cases, &servers, &stop)?;
    let memories: Option<(Memory, Memory)> = before.zip(pharos.map(memory));
    println!("{}", render(&rows, memories.as_ref()));
    if selection.has_python() {
        println!("{}", render_increments(&counter::increments(&servers, options.rounds)?));
    }
    check(&rows)
}

/// Handles SIGINT and SIGTERM: the run ends between two measurements, so that servers are stopped
/// and files removed.
fn stop_on_signal() -> Result<Arc<AtomicBool>, String> {
    use tokio::signal::unix::{SignalKind, signal};
    let failed = |error: std::io::Error| format!("signals: {error}");
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let (mut interrupt, mut terminate) = {
        let _guard = runtime.enter();
        (
            signal(SignalKind::interrupt()).map_err(failed)?,
            signal(SignalKind::terminate()).map_err(failed)?,
        )
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        });
        flag.store(true, Ordering::Relaxed);
    });
    Ok(stop)
}

/// Starts the selected servers. Peers are optional; the others are required.
fn start(
    selection: &Selection,
    skip_triton: bool,
    scratch: &Scratch,
) -> Result<Vec<Server>, String> {
    let programs = Programs::find();
    let mut servers = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| selection.needs(*kind)) {
        let reason = match kind {
            Kind::Triton if skip_triton => Some("--skip-triton".to_owned()),
            _ => programs.missing(kind),
        };
        let started = reason.map_or_else(|| Server::start(kind, &programs, scratch), Err);
        match started {
            Ok(server) => servers.push(server),
            Err(reason) if kind.is_peer() => println!("{}: skipped: {reason}", kind.name()),
            Err(reason) => return Err(reason),
        }
    }
    if servers.is_empty() { Err("no servers to measure".to_owned()) } else { Ok(servers) }
}

fn measure_all(
    options: &Options,
    cases: &[Case],
    servers: &[Server],
    stop: &AtomicBool,
) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for case in cases {
        rows.push(
            servers
                .iter()
                .map(|server| Row { case: *case, kind: server.kind, rounds: Vec::new() })
                .collect::<Vec<_>>(),
        );
    }
    for round in 0..options.rounds {
        for (rows, case) in rows.iter_mut().zip(cases) {
            let mut turns: Vec<_> =
                rows.iter_mut().zip(servers).filter(|(row, _)| is_measured(row)).collect();
            // Odd rounds run in reverse order, so that no server always runs second.
            if round % 2 == 1 {
                turns.reverse();
            }
            for (row, server) in turns {
                if stop.load(Ordering::Relaxed) {
                    return Err("interrupted".to_owned());
                }
                let sample = measure(*case, server.target(case.protocol), options.seconds);
                let shown = match &sample {
                    Ok(sample) => {
                        format!("{:.0} requests/s, p99 {:.0} µs", sample.rate, sample.p99)
                    }
                    Err(error) => format!("{error}\n{}", server.log_tail()),
                };
                eprintln!("round {}: {} {}: {shown}", round + 1, case.name(), server.kind.name());
                row.rounds.push(sample);
            }
        }
    }
    Ok(rows.into_iter().flatten().filter(is_measured).collect())
}

fn is_measured(row: &Row) -> bool {
    row.kind.serves(row.case.workload)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_selection(only: &str, kinds: usize, cases: usize) {
        let selection = Selection::parse(only, &[]).unwrap();
        assert_eq!((selection.kinds.len(), selection.cases.len()), (kinds, cases), "--only {only}");
    }

    #[test]
    fn starts_only_servers_that_serve_a_selected_case() {
        let selection = Selection::parse("handler", &[]).unwrap();
        let needed: Vec<_> = Kind::ALL.into_iter().filter(|kind| selection.needs(*kind)).collect();
        assert_eq!(needed, [Kind::PharosTorchserve, Kind::Torchserve]);
        assert!(!Selection::parse("simple", &[]).unwrap().needs(Kind::Torchserve));
    }

    #[test]
    fn parses_selections() {
        check_selection("", 9, 45);
        check_selection("echo", 1, 45);
        check_selection("simple/http", 9, 2);
        check_selection("echo, pharos, grpc/8", 2, 5);
        check_selection("python", 9, 24);
        check_selection("python_16mib_batch_8", 9, 4);
        check_selection("torchserve, handler", 1, 3);
        assert!(Selection::parse("rest", &[]).is_err_and(|error| error.contains("simple/http/1")));
    }
}
