//! The frontend's end of the metrics: reads the definition, and drains what workers send.

mod definition;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

use pharos::metrics::cache::Cache;
use pharos::metrics::channel;
use pharos::metrics::emitter::{Throttle, shortened};
use pharos::metrics::feed::Feed;
use pharos::metrics::intake::Refusal;
use pharos::metrics::series::ModelSeries;

use crate::clock;

#[cfg(not(test))]
pub(crate) use definition::run;
pub(crate) use definition::{Definition, Source};

/// The size of a worker's ring in bytes: some 4,000 samples with request ids between two drains.
const RING_BYTES: usize = 256 << 10;

/// Says in the log that metric lines are refused, at most once a second and always with one of them.
pub(crate) struct Complaints {
    from: String,
    throttle: Throttle,
}

impl Complaints {
    /// About lines `from` somewhere.
    pub(crate) fn new(from: String) -> Self {
        Self { from, throttle: Throttle::default() }
    }

    /// A line was refused.
    pub(crate) fn tell(&mut self, line: &[u8], refusal: &Refusal) {
        let Some(held) = self.throttle.pass(clock::now()) else { return };
        let (from, line) = (&self.from, shortened(line));
        let more = if held > 0 { format!(" (and {held} others since the last such message)") } else { String::new() };
        tracing::warn!("a metric line from {from} was refused: {refusal}; it is `{line}`{more}");
    }
}

/// One worker's ring of samples.
pub(crate) struct Ring {
    // Held while samples are copied into the cache: the reader of replies, the scrape and the tick all drain.
    state: Mutex<State>,
}

struct State {
    feed: Feed,
    fault: Option<String>,
}

impl Ring {
    /// A ring and the descriptor that the worker inherits.
    ///
    /// # Errors
    /// No memory descriptors are left.
    pub(crate) fn create() -> io::Result<(Self, OwnedFd)> {
        let (descriptor, reader) = channel::create(RING_BYTES)?;
        Ok((Self { state: Mutex::new(State { feed: Feed::new(reader), fault: None }) }, descriptor))
    }

    /// Takes what the worker has committed into the cache.
    pub(crate) fn drain(&self, cache: &Cache, series: &ModelSeries) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.fault.is_some() {
            return;
        }
        match state.feed.drain(cache, series) {
            Ok(drained) => {
                if let Some(refusal) = drained.refusal {
                    tracing::warn!(model = %series.model(), "a metric sample was refused: {refusal}");
                }
            }
            Err(corrupt) => state.fault = Some(format!("the metrics ring is corrupt: {corrupt}")),
        }
    }

    /// What is wrong with the ring, if the worker has broken it.
    pub(crate) fn fault(&self) -> Option<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).fault.clone()
    }
}
