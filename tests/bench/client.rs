//! What the two clients of the load generator have in common.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;

use crate::grpc_client::GrpcClient;
use crate::http_client::HttpClient;
use crate::workload::Workload;

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

/// One connection that asks the same thing again and again.
pub(crate) trait Client: Send {
    /// Sends the request, reads the whole response, and checks its status and that it is as long as the first one.
    fn exchange(&mut self) -> Result<(), String>;

    /// Does the same once, and hands out the tensors of the response.
    fn probe(&mut self) -> Result<Vec<Bytes>, String>;
}

/// Connects a client.
///
/// # Errors
/// No connection.
pub(crate) fn connect(protocol: Protocol, workload: Workload, address: SocketAddr) -> Result<Box<dyn Client>, String> {
    Ok(match protocol {
        Protocol::Http => Box::new(HttpClient::connect(workload, address)?),
        Protocol::Grpc => Box::new(GrpcClient::connect(workload, address)?),
    })
}
