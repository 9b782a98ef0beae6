//! Counters of connections, and rate-limited log lines about refused ones.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pharos::metrics::cache::Cache;
use pharos::metrics::labels::{Listener, Refused};
use pharos::metrics::record;
use pharos::timeline::Instant;
use tokio::net::TcpStream;

use pharos_os::clock;

/// The minimum time between log lines for the same reason, so that a flood of connections does not
/// flood the log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The counters of one listener. Cheap to clone.
#[derive(Clone)]
pub(super) struct ConnectionMetrics(Arc<Inner>);

struct Inner {
    listener: Listener,
    cache: Option<Arc<Cache>>,
    // One for each reason; held to decide on a line.
    logged: Mutex<[Logged; Refused::ALL.len()]>,
}

/// The log lines for one reason: the time of the last, and the number of unlogged events since.
#[derive(Clone, Copy, Default)]
struct Logged {
    last: Option<Instant>,
    unlogged: u64,
}

/// A connection's peer, if its address is known.
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

impl ConnectionMetrics {
    pub(super) fn new(listener: Listener, cache: Option<Arc<Cache>>) -> Self {
        if let Some(cache) = &cache {
            record::listener_opened(cache, listener);
        }
        Self(Arc::new(Inner { listener, cache, logged: Mutex::default() }))
    }

    /// Counts an accepted connection; `open` includes it.
    pub(super) fn accepted(&self, open: usize) {
        if let Some(cache) = &self.0.cache {
            record::connection_accepted(cache, self.0.listener);
        }
        self.open(open);
    }

    /// Sets the number of open connections.
    pub(super) fn open(&self, open: usize) {
        if let Some(cache) = &self.0.cache {
            record::connections_open(cache, self.0.listener, open);
        }
    }

    /// Counts a connection refused for this reason, and logs it with `why` unless a recent line had
    /// the same reason.
    pub(super) fn refused(&self, reason: Refused, peer: &impl Peer, why: impl FnOnce() -> String) {
        if let Some(cache) = &self.0.cache {
            record::connection_refused(cache, self.0.listener, reason);
        }
        let Some(unlogged) = self.line(reason, clock::now()) else { return };
        let listener = self.0.listener.as_str();
        let peer = peer.address().map(|peer| peer.to_string());
        let more = if unlogged > 0 {
            format!(" ({unlogged} similar ones not logged)")
        } else {
            String::new()
        };
        let peer = peer.unwrap_or_else(|| "an unknown address".to_owned());
        tracing::warn!(
            "{listener}: refused a connection from {peer}, {}: {}{more}",
            reason.as_str(),
            why()
        );
    }

    /// Returns the number of events since the last line if a line is due, else `None`.
    fn line(&self, reason: Refused, now: Instant) -> Option<u64> {
        let mut logged = self.0.logged.lock();
        let logged = logged.get_mut(reason as usize)?;
        if logged.last.is_some_and(|last| now - last < LOG_INTERVAL) {
            logged.unlogged += 1;
            return None;
        }
        logged.last = Some(now);
        Some(std::mem::take(&mut logged.unlogged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_one_line_per_interval_and_counts_the_rest() {
        let metrics = ConnectionMetrics::new(Listener::Grpc, None);
        let at = |seconds: u64| Instant(seconds * 1_000_000_000);
        let lines = [1, 2, 3, 10, 11, 12].map(|second| metrics.line(Refused::NotTls, at(second)));
        assert_eq!(lines, [Some(0), None, None, None, Some(3), None]);
        assert_eq!(
            metrics.line(Refused::Limit, at(12)),
            Some(0),
            "each reason has its own interval"
        );
    }
}
