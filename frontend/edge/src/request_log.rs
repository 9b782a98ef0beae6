//! Log lines for individual requests (`--log-access`, `--log-verbose`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::Extensions;
use pharos::service::{Protocol, REQUEST_LOG_TARGET as TARGET};
use pharos::timeline::Instant;
use pharos_os::clock;

use crate::deadline;

/// Whether individual requests are logged whatever `--log-verbose` is, for the whole process.
static ENABLED: AtomicBool = AtomicBool::new(false);

/// Returns whether individual requests are logged.
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed) || tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// Enables the lines whatever `--log-verbose` is, or not.
pub fn enable(on: bool) {
    ENABLED.store(on, Ordering::Relaxed);
}

/// Logs a line for a request in the format of its port.
pub fn answered_line(line: &str) {
    tracing::info!(target: TARGET, "{line}");
}

/// An extension of requests that the port has logged or is going to log in its format: the edge of their protocol does not log
/// them.
#[derive(Clone, Copy, Debug)]
pub struct LoggedByPort;

/// A request that is logged when it is dropped: as answered with its status, or as cancelled, usually because its client
/// disconnected.
#[derive(Debug)]
pub struct Logged {
    protocol: Protocol,
    request: String,
    received: Instant,
    /// The client's deadline, as [`deadline::at`] returns it.
    deadline: Option<Instant>,
    status: Option<u16>,
}

impl Logged {
    /// Returns `None` if requests are not logged; `request` returns the method and the path.
    pub fn new(protocol: Protocol, request: impl FnOnce() -> String) -> Option<Self> {
        let (deadline, status) = (None, None);
        is_enabled().then(|| Self { protocol, request: request(), received: clock::now(), deadline, status })
    }

    /// Like [`Logged::new`]; also returns `None` if the request has the extension [`LoggedByPort`].
    pub fn unless_by_port(
        extensions: &Extensions,
        protocol: Protocol,
        request: impl FnOnce() -> String,
    ) -> Option<Self> {
        let is_logged_here = is_enabled() && extensions.get::<LoggedByPort>().is_none();
        is_logged_here.then(|| Self::new(protocol, request)).flatten()
    }

    /// Sets the client's deadline, as [`deadline::at`] returns it.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Option<Instant>) -> Self {
        self.deadline = deadline;
        self
    }

    /// Logs the request with the HTTP or gRPC status of its answer, and its duration.
    pub fn answered(mut self, status: u16) {
        self.status = Some(status);
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let (now, request) = (clock::now(), &self.request);
        let (what, status) = match self.status {
            Some(status) => ("answered", status),
            None => ("cancelled", deadline::abandoned_status(self.protocol, self.deadline, now).0),
        };
        let ms = Duration::from_nanos(now.ns_since(self.received)).as_secs_f64() * 1e3;
        let (protocol, ms) = (self.protocol.as_str(), format_args!("{ms:.3}"));
        tracing::info!(target: TARGET, protocol, request, status, ms, "{what}");
    }
}
