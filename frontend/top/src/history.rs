//! The latest scrapes and the events between them.

use std::collections::VecDeque;
use std::time::Duration;

use pharos::timeline::Instant;

use crate::events::{Event, between};
use crate::scrape::{Interval, Scrape};

/// Rates and percentiles cover the scrapes of this time.
const STEADY: Duration = Duration::from_secs(10);

/// The number of series from which on only two scrapes are kept, to save memory.
const LARGE: usize = 50_000;

/// The number of events that are kept.
const MAX_EVENTS: usize = 200;

/// The latest scrapes and the events between them.
#[derive(Debug, Default)]
pub(crate) struct History {
    scrapes: VecDeque<Scrape>,
    events: VecDeque<Event>,
}

impl History {
    /// Adds a scrape.
    pub(crate) fn add(&mut self, text: &str, at: Instant) {
        let scrape = Scrape::new(text, at, self.scrapes.back());
        let is_large = scrape.len() > LARGE;
        self.scrapes.push_back(scrape);
        while self.scrapes.len() > 2
            && (is_large || self.scrapes.get(1).is_some_and(|second| at - second.at >= STEADY))
        {
            self.scrapes.pop_front();
        }
        let mut latest = self.scrapes.iter().rev();
        if let (Some(now), Some(before)) = (latest.next(), latest.next()) {
            between(Interval { before, now }, &mut self.events);
            let extra = self.events.len().saturating_sub(MAX_EVENTS);
            self.events.drain(..extra);
        }
    }

    pub(crate) fn latest(&self) -> Option<&Scrape> {
        self.scrapes.back()
    }

    /// Returns the time that rates cover: about ten seconds. `None` before the second scrape.
    pub(crate) fn recent(&self) -> Option<Interval<'_>> {
        match (self.scrapes.front(), self.scrapes.back()) {
            (Some(before), Some(now)) if self.scrapes.len() > 1 => Some(Interval { before, now }),
            _ => None,
        }
    }

    /// Returns the events, latest first.
    pub(crate) fn events(&self) -> impl Iterator<Item = &Event> {
        self.events.iter().rev()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use pharos::metrics::builtin::Builtin;

    use super::*;

    #[test]
    fn rates_cover_about_ten_seconds() {
        let mut history = History::default();
        assert!(history.latest().is_none() && history.recent().is_none());
        for second in 0..30 {
            history.add(&format!("nv_inference_count {second}\n"), Instant(second * 1_000_000_000));
        }
        let recent = history.recent().unwrap();
        assert_eq!(
            (
                recent.seconds(),
                recent.gain(Builtin::InferenceCount),
                recent.now.one(Builtin::InferenceCount)
            ),
            (10.0, Some(10.0), Some(29.0))
        );
    }
}
