//! The closed loop: N connections on N threads, each sending the next request as soon as the
//! response arrives.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use crate::client::{Client, Protocol, connect};
use crate::processor_time::processor_time;
use crate::stats::percentile;
use crate::workload::Workload;

/// The time before recording starts, in which caches fill and lazy initialization completes.
const WARM_UP: Duration = Duration::from_millis(250);

/// One row of the report: workload, protocol and number of clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Case {
    pub(crate) workload: Workload,
    pub(crate) protocol: Protocol,
    pub(crate) clients: usize,
}

impl Case {
    /// Returns every case, in the order of the report. `chosen` replaces the numbers of clients, if
    /// it has any.
    pub(crate) fn all(chosen: &[usize]) -> Vec<Self> {
        let mut cases = Vec::new();
        for workload in Workload::ALL {
            for protocol in Protocol::ALL {
                let usual: &[usize] = match (workload, protocol) {
                    (Workload::Sequences, _) => &[8],
                    (Workload::Python(_), Protocol::Http) => &[1, 4, 16],
                    (Workload::Python(_), Protocol::Grpc) => &[16],
                    (Workload::Handler, Protocol::Http) => &[1, 8, 32],
                    (Workload::Handler, Protocol::Grpc) | (Workload::Growth(_), _) => &[],
                    _ => &[1, 8],
                };
                let clients = if chosen.is_empty() || usual.is_empty() { usual } else { chosen };
                cases.extend(clients.iter().map(|clients| Self {
                    workload,
                    protocol,
                    clients: *clients,
                }));
            }
        }
        cases
    }

    /// Returns the name, for example `simple/http/8`.
    pub(crate) fn name(&self) -> String {
        format!("{}/{}/{}", self.workload.name(), self.protocol.name(), self.clients)
    }
}

/// The server that a measurement uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    /// The id of the process whose processor time is measured.
    pub(crate) process: Option<u32>,
    /// Whether the tensors of the answers are checked.
    pub(crate) verify: bool,
}

/// The result of one server in one round of one case.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Sample {
    /// Requests per second.
    pub(crate) rate: f64,
    /// Tensor bytes per second in one direction, in MB (10^6 bytes).
    pub(crate) megabytes: f64,
    /// Median latency in microseconds.
    pub(crate) p50: f64,
    /// 99th percentile of the latency in microseconds.
    pub(crate) p99: f64,
    /// Processor time of the server process for a request in microseconds, without its workers.
    pub(crate) processor: f64,
}

/// Parses the duration of a measurement.
///
/// # Errors
/// The text is not a number of seconds from 0.1 to 600.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected 0.1 to 600".to_owned())
}

/// Runs one case against one server for the given time.
///
/// # Errors
/// The connection fails, a response has an error status or another length than the first, or the
/// tensors are wrong.
pub(crate) fn measure(case: Case, target: Target, time: Duration) -> Result<Sample, String> {
    let Target { address, process, verify } = target;
    let mut clients = Vec::new();
    for number in 0..case.clients {
        let mut client = connect(case.protocol, case.workload, (number, case.clients), address)?;
        let tensors = client.probe()?;
        if verify && tensors != case.workload.answer() {
            return Err(format!(
                "wrong response: the {} tensors differ from the expected ones",
                tensors.len()
            ));
        }
        while client.has_first() {
            client.exchange()?;
        }
        clients.push(client);
    }
    let used = process.and_then(processor_time);
    let begin = Instant::now() + WARM_UP;
    let end = begin + time;
    let results: Vec<_> = thread::scope(|scope| {
        let start =
            |mut client: Box<dyn Client>| scope.spawn(move || drive(client.as_mut(), begin, end));
        let threads: Vec<_> = clients.into_iter().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err("a client panicked".to_owned())))
            .collect()
    });
    let used = process
        .and_then(processor_time)
        .zip(used)
        .map(|(after, before)| after.saturating_sub(before));
    let (mut latencies, mut requests) = (Vec::new(), 0);
    for result in results {
        let (measured, count) = result?;
        latencies.extend(measured);
        requests += count;
    }
    let processor = used.map_or(f64::NAN, |used| used.as_secs_f64() * 1e6 / requests as f64);
    Ok(Sample { processor, ..sample(latencies, time, case.workload.payload())? })
}

/// Returns the latencies, in nanoseconds, of the responses between `begin` and `end`, and the
/// number of all responses.
fn drive(client: &mut dyn Client, begin: Instant, end: Instant) -> Result<(Vec<u64>, u64), String> {
    let (mut latencies, mut requests) = (Vec::new(), 0);
    loop {
        let sent = Instant::now();
        if sent >= end {
            return Ok((latencies, requests));
        }
        client.exchange()?;
        requests += 1;
        let answered = Instant::now();
        if answered >= begin && answered < end {
            latencies.push((answered - sent).as_nanos() as u64);
        }
    }
}

fn sample(mut latencies: Vec<u64>, time: Duration, payload: usize) -> Result<Sample, String> {
    if latencies.is_empty() {
        return Err(format!("no response in {:.1} s", time.as_secs_f64()));
    }
    latencies.sort_unstable();
    let rate = latencies.len() as f64 / time.as_secs_f64();
    let micros = |share: f64| percentile(&latencies, share) as f64 / 1e3;
    let megabytes = rate * payload as f64 / 1e6;
    Ok(Sample { rate, megabytes, p50: micros(0.5), p99: micros(0.99), processor: 0.0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_summarizes_the_window() {
        let sample =
            sample(vec![3_000, 1_000, 2_000, 9_000], Duration::from_secs(2), 500_000).unwrap();
        assert_eq!(
            sample,
            Sample { rate: 2.0, megabytes: 1.0, p50: 2.0, p99: 9.0, processor: 0.0 }
        );
    }

    #[test]
    fn case_names_are_unique() {
        let names: std::collections::BTreeSet<_> = Case::all(&[]).iter().map(Case::name).collect();
        assert!(names.contains("identity_1mib/grpc/8"));
        assert!(names.contains("python_64kib_batch_8/http/16"));
        assert!(names.contains("handler/http/32"));
        assert_eq!(names.len(), 45);
        let names: Vec<_> = Case::all(&[3, 64]).iter().map(Case::name).collect();
        assert_eq!(names.iter().filter(|name| name.ends_with("/64")).count(), 23);
        assert!(!names.contains(&"simple/http/8".to_owned()));
    }
}
