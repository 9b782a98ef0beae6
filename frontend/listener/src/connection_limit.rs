//! Counts and limits the connections of a listener.

use std::sync::{Arc, Mutex, PoisonError};

use super::connection_metrics::Meter;

/// Counts the connections of a listener.
pub(super) struct Gate {
    /// The limit; 0 for none.
    most: usize,
    // Held while the gauge is set, so that updates keep their order.
    open: Mutex<usize>,
    meter: Meter,
}

/// The permit of a connection; released when dropped.
pub(super) struct Permit(Arc<Gate>);

impl Gate {
    pub(super) fn new(most: usize, meter: Meter) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::new(0), meter })
    }

    /// Returns a permit for one more connection, if the limit is not reached.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Permit> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if self.most > 0 && *open >= self.most {
            return None;
        }
        *open += 1;
        self.meter.accepted(*open);
        Some(Permit(self.clone()))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.0.open.lock().unwrap_or_else(PoisonError::into_inner);
        *open -= 1;
        self.0.meter.open(*open);
    }
}

#[cfg(test)]
mod tests {
    use pharos::metrics::labels::Listener;

    use super::*;

    #[test]
    fn refuses_connections_over_the_limit() {
        let gate = Gate::new(2, Meter::new(Listener::Http, None));
        let (first, second) = (gate.enter(), gate.enter());
        assert!(first.is_some() && second.is_some() && gate.enter().is_none());
        drop(first);
        let third = gate.enter();
        assert!(third.is_some() && gate.enter().is_none());
        let unlimited = Gate::new(0, Meter::new(Listener::Http, None));
        let all: Vec<_> = (0..100).map(|_| unlimited.enter()).collect();
        assert!(all.iter().all(Option::is_some));
    }
}
