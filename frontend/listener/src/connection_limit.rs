//! Counts and limits the connections of a listener.

use std::sync::Arc;

use parking_lot::Mutex;

use super::connection_metrics::ConnectionMetrics;

/// Counts the connections of a listener.
pub(super) struct ConnectionLimit {
    /// The limit; 0 for none.
    most: usize,
    // Held while the gauge is set, so that updates keep their order.
    open: Mutex<usize>,
    metrics: ConnectionMetrics,
}

/// The permit of a connection; released when dropped.
pub(super) struct Permit(Arc<ConnectionLimit>);

impl ConnectionLimit {
    pub(super) fn new(most: usize, metrics: ConnectionMetrics) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::new(0), metrics })
    }

    /// Returns a permit for one more connection, if the limit is not reached.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Permit> {
        let mut open = self.open.lock();
        if self.most > 0 && *open >= self.most {
            return None;
        }
        *open += 1;
        self.metrics.accepted(*open);
        Some(Permit(self.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.0.open.lock();
        *open -= 1;
        self.0.metrics.open(*open);
    }
}

#[cfg(test)]
mod tests {
    use pharos::metrics::labels::Listener;

    use super::*;

    #[test]
    fn refuses_connections_over_the_limit() {
        let limit = ConnectionLimit::new(2, ConnectionMetrics::new(Listener::Http, None));
        let first = limit.enter();
        let second = limit.enter();
        assert!(first.is_some() && second.is_some() && limit.enter().is_none());
        drop(first);
        let third = limit.enter();
        assert!(third.is_some() && limit.enter().is_none());
        let unlimited = ConnectionLimit::new(0, ConnectionMetrics::new(Listener::Http, None));
        let all: Vec<_> = (0..100).map(|_| unlimited.enter()).collect();
        assert!(all.iter().all(Option::is_some));
    }
}
