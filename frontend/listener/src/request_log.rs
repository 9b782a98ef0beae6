//! Log lines for individual requests (`--log-access`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, StatusCode};
use pharos::service::REQUEST_LOG_TARGET as TARGET;
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

/// Logs an answered request: protocol, method and path, status, and its duration.
pub fn answered(protocol: &'static str, request: &str, status: u16, ns: u64) {
    let ms = Duration::from_nanos(ns).as_secs_f64() * 1e3;
    tracing::info!(target: TARGET, protocol, request, status, ms = format_args!("{ms:.3}"), "answered");
}

/// Logs a formatted line for an answered request.
pub fn answered_line(line: &str) {
    tracing::info!(target: TARGET, "{line}");
}

/// An HTTP request that is to be logged once it is answered.
pub(crate) struct Logged {
    request: String,
    received: Instant,
}

impl Logged {
    /// Returns `None` if requests are not logged.
    pub(crate) fn new<B>(request: &Request<B>) -> Option<Self> {
        let text = || format!("{} {}", request.method(), request.uri());
        is_enabled().then(|| Self { request: text(), received: clock::now() })
    }

    pub(crate) fn answered(&self, status: StatusCode) {
        answered("http", &self.request, status.as_u16(), clock::now().ns_since(self.received));
    }
}
