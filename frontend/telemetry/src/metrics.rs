//! The frontend's side of the metrics: reads their definition, and pushes to collectors.

mod definition;
pub mod push;

use pharos::metrics::intake::Refusal;
use pharos::metrics::log_throttle::Throttle;
use pharos::metrics::text_lines::shortened;

use pharos_os::clock;

pub use definition::{Definition, Source, read};

/// Logs refused metric lines, at most once a second, with one of them as an example.
pub struct RefusedLinesLog {
    from: String,
    throttle: Throttle,
}

impl RefusedLinesLog {
    /// Creates a log for lines that come `from` a source.
    pub fn new(from: String) -> Self {
        Self { from, throttle: Throttle::default() }
    }

    /// Reports a refused line.
    pub fn report(&mut self, line: &[u8], refusal: &Refusal) {
        let Some(held) = self.throttle.admit(clock::now()) else { return };
        let from = &self.from;
        let line = shortened(line);
        let more = if held > 0 {
            format!(" (and {held} others since the last message)")
        } else {
            String::new()
        };
        tracing::warn!("a metric line from {from} was refused: {refusal}; line: `{line}`{more}");
    }
}
