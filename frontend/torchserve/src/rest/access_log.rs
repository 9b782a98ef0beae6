//! The lines of the access log, in TorchServe's format: `/PEER "REQUEST" STATUS MILLISECONDS`.
//!
//! The format has a number as status and no place for a word. A request whose client disconnects before the end of the response
//! therefore has the status of a cancelled request: 499 over REST and 1 (CANCELLED) over gRPC.

use std::net::SocketAddr;

use pharos::service::Protocol;
use pharos::timeline::Instant;

use pharos_listener::request_log;
use pharos_os::clock;

/// The status of a cancelled REST request: nginx's "client closed request".
const CANCELLED_REST: u16 = 499;
/// The status of a cancelled gRPC call: `CANCELLED`.
const CANCELLED_GRPC: u16 = 1;

/// A request that is logged when it is dropped: with its status once it is answered, or with that of a cancelled request.
pub(crate) struct AccessLog {
    peer: Option<SocketAddr>,
    request: String,
    received: Instant,
    status: u16,
}

impl AccessLog {
    /// Returns `None` if requests are not logged; `request` returns what the line quotes.
    pub(crate) fn new(
        (protocol, peer, received): (Protocol, Option<SocketAddr>, Instant),
        request: impl FnOnce() -> String,
    ) -> Option<Self> {
        let status = match protocol {
            Protocol::Http => CANCELLED_REST,
            Protocol::Grpc => CANCELLED_GRPC,
        };
        request_log::is_enabled().then(|| Self { peer, request: request(), received, status })
    }

    /// Logs the request with the HTTP or gRPC status of its response.
    pub(crate) fn answered(mut self, status: u16) {
        self.status = status;
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        let Self { peer, request, received, status } = self;
        let peer = peer.map_or_else(|| "0.0.0.0".to_owned(), |peer| peer.to_string());
        let ms = (clock::now() - *received).as_millis();
        request_log::answered_line(&format!("/{peer} \"{request}\" {status} {ms}"));
    }
}
