//! Log lines of the server's own counters: their growth since the last line. Counters of requests
//! grow by 1 for each, so each request can have a line.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::builtin::Builtin;
use super::cache::Cache;
use super::catalog::{Kind, MetricSpec};
use super::reading::{Number, Reading};
use super::readings::Readings;
use super::series::ModelSeries;
use super::tslog::Text;

/// The last written value of one series.
#[derive(Debug)]
struct Row {
    written: u64,
    /// Created on first use under each definition.
    text: Option<Text>,
}

/// Rows of one owner, by metric and by label values.
type Rows = HashMap<Builtin, HashMap<String, Row>>;

/// The last written values of all counters.
#[derive(Debug, Default)]
pub struct Counters {
    generation: Option<u64>,
    /// The counters that the definition shows in the logs.
    wanted: Vec<(Builtin, Arc<MetricSpec>)>,
    server: Rows,
    /// By the address of the series, which are kept alive here.
    models: HashMap<usize, (Arc<ModelSeries>, Rows)>,
}

impl Counters {
    /// Starts with all counters at 0: nothing is written yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Calls `write` with the growth of each counter that has grown. If it returns false, the
    /// growth is written at the next call. Counters of requests get one line for each request, for
    /// up to `singles` lines.
    ///
    /// Omits counters whose values have fractions: `metrics::record` pushes each of their samples
    /// to the journal.
    pub fn collect(
        &mut self,
        cache: &Cache,
        singles: u64,
        mut write: impl FnMut(&Text, f64) -> bool,
    ) {
        let skip_past = self.renew(cache);
        for series in cache.models().into_iter().chain(cache.take_unloaded()) {
            self.models.entry(Arc::as_ptr(&series).addr()).or_insert_with(|| (series, Rows::new()));
        }
        // A series without other owners cannot grow any more, so this is its last reading.
        let alone = self.models.iter().filter(|(_, (series, _))| Arc::strong_count(series) == 1);
        let last: Vec<usize> = alone.map(|(at, _)| *at).collect();
        // Everything that its former owners wrote is visible from here on.
        fence(Ordering::Acquire);
        let mut lines = Lines { write: &mut write, singles, all: true, hostname: cache.hostname() };
        let readings = Readings::of_counters(cache, self.models.values().map(|(series, _)| series));
        for (builtin, spec) in &self.wanted {
            let source = builtin.source();
            let from_now = skip_past.contains(builtin);
            let counter = Counter { builtin: *builtin, spec, from_now };
            let rows = self.server.entry(*builtin).or_default();
            readings.of_server(source, &mut |labels, reading| {
                grow(rows, counter, labels, reading, &mut lines)
            });
            for model in readings.models() {
                let Some((_, rows)) = self.models.get_mut(&Arc::as_ptr(&model.series).addr())
                else {
                    continue;
                };
                let rows = rows.entry(*builtin).or_default();
                let mut visit = |labels: &[(&str, &str)], reading| {
                    grow(rows, counter, labels, reading, &mut lines)
                };
                readings.of_model(model, spec, source, &mut visit);
            }
        }
        let all_written = lines.all;
        self.models.retain(|at, _| !all_written || !last.contains(at));
    }

    /// Follows a new definition. Returns the counters that it adds to the logs: they are written
    /// from their present values, not from 0.
    fn renew(&mut self, cache: &Cache) -> Vec<Builtin> {
        let generation = cache.generation();
        if self.generation == Some(generation) {
            return Vec::new();
        }
        let first = self.generation.replace(generation).is_none();
        let families = cache.registry();
        let wanted = families
            .families()
            .iter()
            .filter(|family| family.views.tslog && family.spec.kind == Kind::Counter);
        let wanted =
            wanted.filter_map(|family| Some((family.spec.builtin?, Arc::clone(&family.spec))));
        let wanted: Vec<_> = wanted
            .filter(|(builtin, _)| !builtin.is_family() && !builtin.logs_each_sample())
            .collect();
        let old = std::mem::replace(&mut self.wanted, wanted);
        let kept = |builtin: Builtin| old.iter().any(|(other, _)| *other == builtin);
        for rows in self.models.values_mut().map(|(_, rows)| rows).chain([&mut self.server]) {
            rows.retain(|builtin, _| kept(*builtin));
            rows.values_mut().flat_map(HashMap::values_mut).for_each(|row| row.text = None);
        }
        self.wanted
            .iter()
            .map(|(builtin, _)| *builtin)
            .filter(|builtin| !first && !kept(*builtin))
            .collect()
    }
}

/// The output of growth.
struct Lines<'a> {
    write: &'a mut dyn FnMut(&Text, f64) -> bool,
    /// How many more lines may be of single requests.
    singles: u64,
    /// Whether every line was written.
    all: bool,
    hostname: &'a str,
}

impl Lines<'_> {
    /// Writes the growth of a counter, in one line or in single lines. Returns how much was
    /// written.
    fn write(&mut self, text: &Text, grown: u64, one_by_one: bool) -> u64 {
        let written = if one_by_one && grown <= self.singles {
            self.singles -= grown;
            (0..grown).take_while(|_| (self.write)(text, 1.0)).count() as u64
        } else if (self.write)(text, grown as f64) {
            grown
        } else {
            0
        };
        self.all &= written == grown;
        written
    }
}

/// A counter whose growth is written.
#[derive(Clone, Copy)]
struct Counter<'a> {
    builtin: Builtin,
    spec: &'a MetricSpec,
    /// Whether a new series starts at its present value.
    from_now: bool,
}

/// Writes the growth of a series, if there is any.
fn grow(
    rows: &mut HashMap<String, Row>,
    counter: Counter<'_>,
    labels: &[(&str, &str)],
    reading: Reading,
    lines: &mut Lines<'_>,
) {
    let Counter { builtin, spec, from_now } = counter;
    let Reading::Number(Number::Whole(sum)) = reading else { return };
    let mut key = String::with_capacity(64);
    for (_, value) in labels {
        key.push_str(value);
        key.push('\0');
    }
    let written = if from_now { sum } else { 0 };
    let row = rows.entry(key).or_insert(Row { written, text: None });
    let grown = sum.saturating_sub(row.written);
    if grown == 0 {
        return;
    }
    let text = row.text.get_or_insert_with(|| Text::of_server(spec, labels, lines.hostname));
    row.written += lines.write(text, grown, builtin.logs_each_request());
}
