//! Counters of connections, and rate-limited log lines about refused ones.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pharos::metrics::cache::Cache;
use pharos::metrics::labels::{Listener, Refused};
use pharos::metrics::record;
use pharos::timeline::Instant;
use tokio::net::TcpStream;

use pharos_os::clock;

/// At most one line in this time for each reason: who floods the server must not flood its log.
const QUIET: Duration = Duration::from_secs(10);

/// The counters of one listener. Cheap to clone.
#[derive(Clone)]
pub(super) struct Meter(Arc<Inner>);

struct Inner {
    listener: Listener,
    cache: Option<Arc<Cache>>,
    // For each reason, held while a line is decided on.
    told: Mutex<[Told; Refused::ALL.len()]>,
}

/// What the log has been told of a reason.
#[derive(Clone, Copy, Default)]
struct Told {
    last: Option<Instant>,
    since: u64,
}

/// Whose connection it is.
pub(super) trait Peer {
    fn address(&self) -> Option<SocketAddr>;
}

impl Peer for TcpStream {
    fn address(&self) -> Option<SocketAddr> {
        self.peer_addr().ok()
    }
}

impl Peer for Option<SocketAddr> {
    fn address(&self) -> Option<SocketAddr> {
        *self
    }
}

impl Meter {
    pub(super) fn new(listener: Listener, cache: Option<Arc<Cache>>) -> Self {
        if let Some(cache) = &cache {
            record::listener_opened(cache, listener);
        }
        Self(Arc::new(Inner { listener, cache, told: Mutex::default() }))
    }

    /// A connection was accepted; with it there are `open`.
    pub(super) fn accepted(&self, open: usize) {
        if let Some(cache) = &self.0.cache {
            record::connection_accepted(cache, self.0.listener);
        }
        self.open(open);
    }

    /// There are so many connections.
    pub(super) fn open(&self, open: usize) {
        if let Some(cache) = &self.0.cache {
            record::connections_open(cache, self.0.listener, open);
        }
    }

    /// A connection is closed for this reason; `why` is said of it if there is a line.
    pub(super) fn refused(&self, reason: Refused, peer: &impl Peer, why: impl FnOnce() -> String) {
        if let Some(cache) = &self.0.cache {
            record::connection_refused(cache, self.0.listener, reason);
        }
        let Some(unsaid) = self.line(reason, clock::now()) else { return };
        let (listener, peer) = (self.0.listener.as_str(), peer.address().map(|peer| peer.to_string()));
        let more = if unsaid > 0 { format!(" ({unsaid} more like it before)") } else { String::new() };
        let peer = peer.unwrap_or_else(|| "a client that is gone".to_owned());
        tracing::warn!("{listener}: refused a connection of {peer}, {}: {}{more}", reason.as_str(), why());
    }

    /// Whether there is a line now; how many events before had none.
    fn line(&self, reason: Refused, now: Instant) -> Option<u64> {
        let mut told = self.0.told.lock().unwrap_or_else(PoisonError::into_inner);
        let told = told.get_mut(reason as usize)?;
        if told.last.is_some_and(|last| now - last < QUIET) {
            told.since += 1;
            return None;
        }
        told.last = Some(now);
        Some(std::mem::take(&mut told.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_and_is_counted_in_the_next() {
        let meter = Meter::new(Listener::Grpc, None);
        let at = |seconds: u64| Instant(seconds * 1_000_000_000);
        let lines = [1, 2, 3, 10, 11, 12].map(|second| meter.line(Refused::NotTls, at(second)));
        assert_eq!(lines, [Some(0), None, None, None, Some(3), None]);
        assert_eq!(meter.line(Refused::Limit, at(12)), Some(0), "each reason has its own");
    }
}
