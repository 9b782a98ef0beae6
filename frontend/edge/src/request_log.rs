//! Log lines for individual requests (`--log-access`, `--log-verbose`).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Method, Uri, Version};
use pharos::service::{Protocol, REQUEST_LOG_TARGET as TARGET};
use pharos::timeline::Instant;
use pharos_os::clock;

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
pub fn write_line(line: &str) {
    tracing::info!(target: TARGET, "{line}");
}

/// The format of the log lines of a port.
#[derive(Debug)]
pub struct LogFormat {
    /// Returns the text for a request over HTTP.
    pub request: fn(&Method, &Uri, Version) -> String,
    /// Writes the line of a request that has ended.
    pub write: fn(&LogLine, LogEnd),
    /// Whether a streamed response over HTTP is logged when its body ends, and not when it begins.
    /// Over gRPC it always is.
    pub waits_for_body: bool,
}

/// The format of the server's own ports: a sentence with fields.
pub const FIELDS: LogFormat = LogFormat {
    request: |method, uri, _| format!("{method} {uri}"),
    write: write_fields,
    waits_for_body: false,
};

/// How a request ended.
#[derive(Clone, Copy, Debug)]
pub struct LogEnd {
    /// The HTTP or gRPC status of its answer or, without an answer, the status that it is counted
    /// with.
    pub status: u16,
    /// Whether it ended without an answer, usually because its client disconnected.
    pub is_abandoned: bool,
    /// The time.
    pub at: Instant,
}

/// The log line of a request, which its [`Call`](crate::Call) writes when the request ends.
#[derive(Debug)]
pub struct LogLine {
    /// The format of its port.
    pub format: &'static LogFormat,
    /// The protocol of its port.
    pub protocol: Protocol,
    /// The address of the client, if the listener adds it.
    pub peer: Option<SocketAddr>,
    /// The method and the path, in the format of the port.
    pub request: String,
    /// When the head of the request was received.
    pub received: Instant,
}

impl LogLine {
    /// Returns the line of a request that has just been received; `None` if requests are not
    /// logged.
    pub fn begin(
        format: &'static LogFormat,
        protocol: Protocol,
        peer: Option<SocketAddr>,
        request: impl FnOnce() -> String,
    ) -> Option<Box<Self>> {
        is_enabled().then(|| {
            Box::new(Self { format, protocol, peer, request: request(), received: clock::now() })
        })
    }

    /// Writes the line.
    pub fn write(&self, end: LogEnd) {
        (self.format.write)(self, end);
    }

    /// Writes the line of a request that was answered with this status.
    pub fn answered(&self, status: u16) {
        self.write(LogEnd { status, is_abandoned: false, at: clock::now() });
    }
}

fn write_fields(line: &LogLine, LogEnd { status, is_abandoned, at }: LogEnd) {
    let request = &line.request;
    let what = if is_abandoned { "cancelled" } else { "answered" };
    let ms = Duration::from_nanos(at.ns_since(line.received)).as_secs_f64() * 1e3;
    let protocol = line.protocol.as_str();
    let ms = format_args!("{ms:.3}");
    tracing::info!(target: TARGET, protocol, request, status, ms, "{what}");
}
