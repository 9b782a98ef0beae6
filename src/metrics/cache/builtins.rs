//! Writes built-in counters and gauges by their label values.

use std::collections::HashSet;
use std::sync::Arc;

use super::super::builtin::Builtin;
use super::super::sample_error::SampleError;
use super::{Cache, Series};

/// Returns the series of a metric's name and label values.
type Find = fn(&Cache, &str, &[&str]) -> Result<Arc<Series>, SampleError>;

impl Cache {
    /// Adds to a built-in counter, with label values in the order of [`Builtin::dimensions`]. `by` is not negative; 0 creates
    /// the series. Does nothing if the counter is not defined.
    pub fn count(&self, builtin: Builtin, labels: &[&str], by: f64) {
        if let Ok(series) = self.counter(builtin.name(), labels) {
            let _ = series.add_or_update(by);
        }
    }

    /// Sets a series of a built-in gauge, with label values in the order of [`Builtin::dimensions`]. Does nothing if the
    /// gauge is not defined.
    pub fn set_gauge(&self, builtin: Builtin, labels: &[&str], value: f64) {
        if let Ok(series) = self.gauge(builtin.name(), labels) {
            let _ = series.add_or_update(value);
        }
    }

    /// Sets all series of a built-in gauge, with label values in the order of [`Builtin::dimensions`], and removes all
    /// others. Does nothing if the gauge is not defined.
    pub fn set_gauges(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)]) {
        self.update_all(builtin, rows, Self::gauge);
    }

    /// Adds to all series of a built-in counter, with label values in the order of [`Builtin::dimensions`], and removes all
    /// others. Rows of equal labels add up. Does nothing if the counter is not defined.
    pub fn count_all(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)]) {
        self.update_all(builtin, rows, Self::counter);
    }

    fn update_all(&self, builtin: Builtin, rows: &[(Vec<&str>, f64)], find: Find) {
        let mut now = HashSet::with_capacity(rows.len());
        for (labels, value) in rows {
            let Ok(series) = find(self, builtin.name(), labels) else { return };
            // A gauge accepts every value, and a counter every value that is not negative.
            let _ = series.add_or_update(*value);
            now.insert(Arc::as_ptr(&series.cell));
        }
        self.remove_series(builtin.name(), |series| !now.contains(&Arc::as_ptr(&series.cell)));
    }
}
