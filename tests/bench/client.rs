//! What the two clients of the load generator have in common.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::grpc_client::GrpcClient;
use crate::http_client::HttpClient;
use crate::workload::{Step, Workload};

/// How long one exchange may take before the server counts as hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The protocol of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    /// HTTP/1.1 with binary tensor data.
    Http,
    /// gRPC with raw contents.
    Grpc,
}

impl Protocol {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Http, Self::Grpc];

    /// The name in the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// One connection that asks the same thing again and again, or a circle of things that differ in numbers.
pub(crate) trait Client: Send {
    /// Sends the request, reads the whole response, and checks its status and that it is as long as the first one.
    fn exchange(&mut self) -> Result<(), String>;

    /// Does the same once, and hands out the tensors of the response.
    fn probe(&mut self) -> Result<Vec<Bytes>, String>;

    /// Whether there are requests that come before those that are measured.
    fn has_first(&self) -> bool;
}

/// Connects one of so many clients.
///
/// # Errors
/// No connection.
pub(crate) fn connect(
    protocol: Protocol,
    workload: Workload,
    (client, clients): (usize, usize),
    address: SocketAddr,
) -> Result<Box<dyn Client>, String> {
    let requests = |of: &dyn Fn(Option<Step>) -> Bytes| {
        let (first, then) = workload.steps(client, clients);
        let made = |steps: Vec<Option<Step>>| steps.into_iter().map(of).collect::<Vec<Bytes>>();
        Turns { first: made(first).into_iter(), then: made(then), at: 0 }
    };
    Ok(match protocol {
        Protocol::Http => {
            let turns = requests(&|step| workload.http_request(step));
            Box::new(HttpClient::connect(workload, turns, address)?)
        }
        Protocol::Grpc => Box::new(GrpcClient::connect(requests(&|step| workload.grpc_request(step)), address)?),
    })
}

/// The requests that a client sends: some once, then the others in turn.
pub(crate) struct Turns {
    first: std::vec::IntoIter<Bytes>,
    then: Vec<Bytes>,
    at: usize,
}

impl Turns {
    /// The next one.
    pub(crate) fn next(&mut self) -> Bytes {
        if let Some(first) = self.first.next() {
            return first;
        }
        self.at = if self.at + 1 < self.then.len() { self.at + 1 } else { 0 };
        self.then.get(self.at).cloned().unwrap_or_default()
    }

    /// Whether those that are sent once are still to be sent.
    pub(crate) fn has_first(&self) -> bool {
        !self.first.as_slice().is_empty()
    }
}
