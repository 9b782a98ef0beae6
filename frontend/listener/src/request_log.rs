//! Log lines for individual requests (`--log-access`).

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, HeaderMap};
use http_body::{Body, Frame, SizeHint};
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

/// Logs a line for a request in the format of its port.
pub fn answered_line(line: &str) {
    tracing::info!(target: TARGET, "{line}");
}

/// An extension of requests that the port has logged or is going to log in its format: the edge of their protocol does not log
/// them.
#[derive(Clone, Copy, Debug)]
pub struct LoggedByPort;

/// A request that is logged when it is dropped: with its status once it is answered, or as cancelled, usually because its client
/// disconnected.
#[derive(Debug)]
pub struct Logged {
    protocol: Protocol,
    request: String,
    received: Instant,
    status: Option<u16>,
}

impl Logged {
    /// Returns `None` if requests are not logged; `request` returns the method and the path.
    pub fn new(protocol: Protocol, request: impl FnOnce() -> String) -> Option<Self> {
        is_enabled().then(|| Self { protocol, request: request(), received: clock::now(), status: None })
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

    /// Logs the request with the HTTP or gRPC status of its answer, and its duration.
    pub fn answered(mut self, status: u16) {
        self.status = Some(status);
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let (protocol, request) = (self.protocol.as_str(), &self.request);
        let ms = Duration::from_nanos(clock::now().ns_since(self.received)).as_secs_f64() * 1e3;
        let ms = format_args!("{ms:.3}");
        match self.status {
            Some(status) => tracing::info!(target: TARGET, protocol, request, status, ms, "answered"),
            None => tracing::info!(target: TARGET, protocol, request, ms, "cancelled"),
        }
    }
}

/// The body of a gRPC response that is logged when it ends: with the status of its trailers, or as cancelled if it is dropped
/// before.
#[derive(Debug)]
pub struct LoggedStream<B> {
    inner: B,
    logged: Option<Logged>,
}

impl<B> LoggedStream<B> {
    /// Logs the call when `inner` ends.
    pub fn new(inner: B, logged: Logged) -> Self {
        Self { inner, logged: Some(logged) }
    }
}

/// Returns the gRPC status in these trailers; 2 (UNKNOWN), as clients read them, if they have none.
fn status_in(trailers: &HeaderMap) -> u16 {
    const UNKNOWN: u16 = 2;
    let text = trailers.get("grpc-status").and_then(|status| status.to_str().ok());
    text.and_then(|text| text.parse().ok()).unwrap_or(UNKNOWN)
}

impl<B: Body<Data = Bytes> + Unpin> Body for LoggedStream<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(trailers) = frame.trailers_ref()
            && let Some(logged) = self.logged.take()
        {
            logged.answered(status_in(trailers));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
