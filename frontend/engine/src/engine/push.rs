//! Starts the push of metrics, which reads the same values as a scrape.

use pharos_telemetry::metrics::push::{Push, Settings};

use super::Engine;

impl Engine {
    /// Starts to push the metrics to a collector.
    ///
    /// # Errors
    /// The endpoint's certificates or headers are not usable.
    pub fn push_metrics(&self, settings: Settings) -> Result<Push, String> {
        let engine = self.clone();
        Push::start(settings, self.cache(), move || engine.observe())
    }
}
