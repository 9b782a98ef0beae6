//! Log lines for individual requests (`--log-access`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pharos::service::{Protocol, REQUEST_LOG_TARGET as TARGET};
use pharos::timeline::Instant;
use pharos_os::clock;

/// Whether individual requests are logged, for the whole process.
static ENABLED: AtomicBool = AtomicBool::new(false);

/// Returns whether individual requests are logged.
pub fn is_enabled() -> bool {
    ENABLED.load(Ordering::Relaxed)
}

/// Enables or disables the lines.
pub fn enable(on: bool) {
    ENABLED.store(on, Ordering::Relaxed);
}

/// Logs a formatted line for an answered request.
pub fn answered_line(line: &str) {
    tracing::info!(target: TARGET, "{line}");
}

/// A request that is logged once it is answered. One that is dropped before, usually
/// because its client disconnected, is logged then.
#[derive(Debug)]
pub struct Logged {
    protocol: Protocol,
    request: String,
    received: Instant,
    is_answered: bool,
}

impl Logged {
    /// Returns `None` if requests are not logged; `request` returns the method and the path.
    pub fn new(protocol: Protocol, request: impl FnOnce() -> String) -> Option<Self> {
        is_enabled().then(|| Self { protocol, request: request(), received: clock::now(), is_answered: false })
    }

    /// Logs the request with the HTTP or gRPC status of its answer, and its duration.
    pub fn answered(mut self, status: u16) {
        self.is_answered = true;
        let Self { request, .. } = &self;
        let (protocol, ms) = (self.protocol.as_str(), self.ms());
        tracing::info!(target: TARGET, protocol, request, status, ms = format_args!("{ms:.3}"), "answered");
    }

    /// Returns the time since the request was received in milliseconds.
    fn ms(&self) -> f64 {
        Duration::from_nanos(clock::now().ns_since(self.received)).as_secs_f64() * 1e3
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        if !self.is_answered {
            let Self { request, .. } = &*self;
            let (protocol, ms) = (self.protocol.as_str(), self.ms());
            tracing::info!(target: TARGET, protocol, request, ms = format_args!("{ms:.3}"), "cancelled");
        }
    }
}
