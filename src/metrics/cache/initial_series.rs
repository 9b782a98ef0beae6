//! Series that exist from the start: those whose label values are known before the first event. A
//! rate and an alert then include the first event, and 0 differs from absent.
//!
//! Gauges are omitted, because 0 would be a value. Series of models start with the load.

use std::sync::atomic::Ordering;

use super::super::builtin::Builtin;
use super::super::catalog::{Kind, Mode, WorkerLabel};
use super::super::labels::{ModelChange, RELOAD_RESULTS, Source};
use super::super::tslog::{File, STDOUT};
use super::Cache;

impl Cache {
    /// Creates the missing series at 0, if the definition contains their metrics.
    pub(super) fn create_initial_series(&self) {
        for (builtin, value) in self.closed_lists() {
            // Fails for metrics that are not defined, which is fine.
            let _ = self.counter(builtin.name(), &[value]);
        }
        for change in ModelChange::ALL {
            for result in RELOAD_RESULTS {
                let _ = self.counter(Builtin::ModelChanges.name(), &[change.as_str(), result]);
            }
        }
        let registry = self.registry();
        for family in registry.families() {
            let spec = &family.spec;
            let is_of_host = spec.dimensions.iter().all(|label| WorkerLabel::is_host(label));
            if spec.builtin.is_some() || spec.detected || spec.kind == Kind::Gauge || !is_of_host {
                continue;
            }
            let labels: Vec<String> =
                spec.dimensions.iter().map(|_| self.hostname().to_owned()).collect();
            if let Ok(Some(series)) = self.bounded(family, &labels) {
                // The server owns it too, so it remains when the last model that writes it is
                // unloaded.
                series.cell.owners.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Returns counters whose single label has a closed list of values, for the features that are
    /// in use.
    fn closed_lists(&self) -> Vec<(Builtin, &'static str)> {
        let mut known: Vec<_> =
            RELOAD_RESULTS.into_iter().map(|result| (Builtin::Reloads, result)).collect();
        for source in Source::ALL
            .into_iter()
            .filter(|source| *source != Source::Statsd || self.settings.statsd)
        {
            known.push((Builtin::Samples, source.as_str()));
            if source.has_lines() {
                known.push((Builtin::LinesMalformed, source.as_str()));
            }
        }
        if self.registry().catalog().mode() == Mode::Prometheus {
            return known;
        }
        for file in File::ALL {
            let counters = [Builtin::TslogLines, Builtin::TslogSkipped, Builtin::TslogErrors];
            known.extend(counters.map(|counter| (counter, file.as_str())));
        }
        if self.settings.tslog_stdout {
            known.extend(
                [Builtin::TslogLines, Builtin::TslogSkipped].map(|counter| (counter, STDOUT)),
            );
        }
        known
    }
}
