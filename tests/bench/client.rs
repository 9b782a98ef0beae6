//! The interface of the two clients of the load generator.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::grpc_client::GrpcClient;
use crate::http_client::HttpClient;
use crate::workload::{Step, Workload};

/// The time limit of one exchange.
pub(crate) const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(20);

/// The protocol of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    /// HTTP/1.1 with binary tensor data.
    Http,
    /// gRPC with raw contents.
    Grpc,
}

impl Protocol {
    /// Both protocols.
    pub(crate) const ALL: [Self; 2] = [Self::Http, Self::Grpc];

    /// Returns the name in the report.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// One connection that repeats one request, or cycles through requests that differ in numbers.
pub(crate) trait Client: Send {
    /// Sends the next request, reads the whole response, and checks its status and that its length
    /// is that of the first one.
    fn exchange(&mut self) -> Result<(), String>;

    /// Sends the next request and returns the tensors of the response.
    fn probe(&mut self) -> Result<Vec<Bytes>, String>;

    /// Returns whether requests remain that precede the measured ones.
    fn has_first(&self) -> bool;
}

/// Connects client number `client` of `clients`.
///
/// # Errors
/// The connection fails.
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
        Protocol::Grpc => {
            Box::new(GrpcClient::connect(requests(&|step| workload.grpc_request(step)), address)?)
        }
    })
}

/// The requests of a client: the first ones once, then the others in turn.
pub(crate) struct Turns {
    first: std::vec::IntoIter<Bytes>,
    then: Vec<Bytes>,
    at: usize,
}

impl Turns {
    /// Returns the next request.
    pub(crate) fn next(&mut self) -> Bytes {
        if let Some(first) = self.first.next() {
            return first;
        }
        self.at = if self.at + 1 < self.then.len() { self.at + 1 } else { 0 };
        self.then.get(self.at).cloned().unwrap_or_default()
    }

    /// Returns whether some of the first requests are not sent yet.
    pub(crate) fn has_first(&self) -> bool {
        !self.first.as_slice().is_empty()
    }
}
