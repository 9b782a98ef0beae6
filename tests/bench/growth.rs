//! One measurement of a running server with the models of `tests/bench_growth`: its result as JSON.

use std::net::SocketAddr;
use std::time::Duration;

use crate::client::Protocol;
use crate::load::{Case, Target, measure, seconds};
use crate::workload::{Growth, Workload};

/// What to measure.
#[derive(clap::Args)]
pub(crate) struct Options {
    #[arg(long)]
    address: SocketAddr,
    /// The address is that of gRPC, otherwise of HTTP.
    #[arg(long)]
    grpc: bool,
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    clients: u16,
    /// The bytes of a request and of its response.
    #[arg(long, default_value_t = 64)]
    bytes: usize,
    /// The number of models, which each client sends requests to in turn.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    models: u64,
    #[arg(long, default_value = "2", value_parser = seconds)]
    seconds: Duration,
}

/// Prints requests per second (`rate`) and latencies in microseconds (`p50`, `p99`).
///
/// # Errors
/// As [`measure`].
pub(crate) fn run(options: &Options) -> Result<(), String> {
    let workload = Workload::Growth(Growth { bytes: options.bytes, models: options.models });
    let protocol = if options.grpc { Protocol::Grpc } else { Protocol::Http };
    let case = Case { workload, protocol, clients: options.clients.into() };
    let target = Target { address: options.address, process: None, verify: true };
    let sample = measure(case, target, options.seconds)?;
    println!(
        r#"{{"rate": {:.1}, "p50": {:.1}, "p99": {:.1}}}"#,
        sample.rate, sample.p50, sample.p99
    );
    Ok(())
}
