//! The lines of the access log, in TorchServe's format: `/PEER "REQUEST" STATUS MILLISECONDS`.
//!
//! The format has a number as status and no place for a word. A request whose client disconnects before the end of the response
//! therefore has the status that it counts with: 499 over REST; over gRPC 1 (CANCELLED), or 4 (DEADLINE_EXCEEDED) at its deadline.

use std::net::SocketAddr;

use pharos::service::Protocol;
use pharos::timeline::Instant;

use pharos_edge::{deadline, request_log};
use pharos_os::clock;

/// A request that is logged when it is dropped: with its status once it is answered, or with that of a request whose client left.
pub(crate) struct AccessLog {
    peer: Option<SocketAddr>,
    request: String,
    received: Instant,
    protocol: Protocol,
    deadline: Option<Instant>,
    status: Option<u16>,
}

impl AccessLog {
    /// Returns `None` if requests are not logged; `request` returns what the line quotes.
    pub(crate) fn new(
        (protocol, peer, received): (Protocol, Option<SocketAddr>, Instant),
        request: impl FnOnce() -> String,
    ) -> Option<Self> {
        let (deadline, status) = (None, None);
        request_log::is_enabled().then(|| Self { peer, request: request(), received, protocol, deadline, status })
    }

    /// Sets the deadline of the client, as [`deadline::at`] returns it.
    pub(crate) fn with_deadline(mut self, deadline: Option<Instant>) -> Self {
        self.deadline = deadline;
        self
    }

    /// Logs the request with the HTTP or gRPC status of its response.
    pub(crate) fn answered(mut self, status: u16) {
        self.status = Some(status);
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        let Self { peer, request, received, .. } = self;
        let now = clock::now();
        let abandoned = || deadline::abandoned_status(self.protocol, self.deadline, now).0;
        let status = self.status.unwrap_or_else(abandoned);
        let peer = peer.map_or_else(|| "0.0.0.0".to_owned(), |peer| peer.to_string());
        let ms = (now - *received).as_millis();
        request_log::answered_line(&format!("/{peer} \"{request}\" {status} {ms}"));
    }
}
