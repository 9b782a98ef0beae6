//! Series that exist from the start: those whose label values are known before anything is counted. A rate, and an alert on
//! it, then sees the first event too, and zero differs from absent.
//!
//! Gauges are left out, because 0 would be a value. The series of models begin with their load.

use std::sync::atomic::Ordering;

use super::super::builtin::Builtin;
use super::super::catalog::{Kind, MetricSpec, Mode};
use super::super::labels::{ModelChange, RELOAD_RESULTS, Source};
use super::super::tslog::{File, STDOUT};
use super::{Cache, is_host_label};

impl Cache {
    /// Creates them at 0, as far as they are not there and the definition has them.
    pub(super) fn create_initial_series(&self) {
        for (builtin, value) in self.closed_lists() {
            // One that is not defined stays so.
            let _ = self.counter(builtin.name(), &[value]);
        }
        for change in ModelChange::ALL {
            for result in RELOAD_RESULTS {
                let _ = self.counter(Builtin::ModelChanges.name(), &[change.as_str(), result]);
            }
        }
        let registry = self.registry();
        let known = |spec: &MetricSpec| {
            let of_host = spec.dimensions.iter().all(|label| is_host_label(label));
            spec.builtin.is_none() && spec.kind != Kind::Gauge && of_host
        };
        for family in registry.families().iter().filter(|family| known(&family.spec)) {
            let labels: Vec<String> = family.spec.dimensions.iter().map(|_| self.hostname().to_owned()).collect();
            if let Ok(series) = self.bounded(family, &labels) {
                // It belongs to the server too: it stays when the last model that writes it goes.
                series.cell.owners.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Counters with one label whose values are a closed list, as far as what they count is in use.
    fn closed_lists(&self) -> Vec<(Builtin, &'static str)> {
        let mut known: Vec<_> = RELOAD_RESULTS.into_iter().map(|result| (Builtin::Reloads, result)).collect();
        for source in Source::ALL.into_iter().filter(|source| *source != Source::Statsd || self.settings.statsd) {
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
            known.extend([Builtin::TslogLines, Builtin::TslogSkipped].map(|counter| (counter, STDOUT)));
        }
        known
    }
}
