//! The view for OpenTelemetry collectors: messages with every number that a scrape shows, under the
//! same names and labels.
//!
//! Counters are monotonic sums, histograms have explicit bounds or exponential buckets, and
//! summaries are summaries. A metric is exported if its `modes` in `metrics.yaml` contain
//! prometheus; the `mode` of the file has no effect here.
//!
//! Source: the OpenTelemetry metrics data model
//! (opentelemetry.io/docs/specs/otel/metrics/data-model), "Temporality" and "Resets and Gaps".

use std::collections::HashMap;

use pharos_base::otlp::proto::resource::v1::Resource;
use pharos_base::otlp::resource;

use super::cache::Cache;
use super::catalog::{Kind, MetricSpec};
use super::reading::Details;
use super::reading::Reading;
use super::readings::Readings;

mod messages;
mod points;
mod state;

pub use messages::Export;
use messages::Messages;
use points::{Span, point};
use state::State;

named_enum! {
    /// Whether exports contain values since the start of a series or since the last export.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Temporality {
        /// Since the start of each series.
        #[default]
        Cumulative => "cumulative",
        /// Counters and histograms since the last accepted export.
        Delta => "delta",
        /// Histograms since the last accepted export. Counters since the start of each series: an
        /// export reads them as an asynchronous instrument, and the store keeps only their sums.
        LowMemory => "lowmemory",
    }
    /// The name in OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE.
    pub fn as_str;
}

impl Temporality {
    /// Returns whether values of metrics of this type are those since the last export. Summaries
    /// are always cumulative.
    fn is_delta(self, kind: Kind) -> bool {
        match kind {
            Kind::Counter => self == Self::Delta,
            Kind::Histogram => self != Self::Cumulative,
            Kind::Gauge | Kind::Summary => false,
        }
    }
}

named_enum! {
    /// The buckets of histograms.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Aggregation {
        /// Those with the bounds in `metrics.yaml`.
        #[default]
        Explicit => "explicit_bucket_histogram",
        /// Exponential buckets for histograms with `native` in `metrics.yaml`; the others have
        /// explicit bounds.
        Exponential => "base2_exponential_bucket_histogram",
    }
    /// The name in OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION.
    pub fn as_str;
}

/// What exports must remember of a series.
#[derive(Debug)]
struct Progress {
    /// The start of the values of the next export.
    start_ns: u64,
    /// The state at that time for deltas, else the state at the last export; `None` before the
    /// first.
    base: Option<State>,
    /// The number of the last export that contained it.
    seen: u64,
}

/// Encodes exports. Remembers one state of each series that exists.
///
/// A series that appears between two exports starts at the time of the first of them. A series
/// whose value decreases was created again (by a reload of its model) and starts at 0.
#[derive(Debug)]
pub struct Encoder {
    resource: Resource,
    form: (Temporality, Aggregation),
    series: HashMap<String, Progress>,
    /// The time of the last export, or of the start of the server.
    last_ns: u64,
    exports: u64,
}

impl Encoder {
    /// Creates an encoder for a server with these attributes that started at `started_ns` (since
    /// 1970).
    pub fn new(
        attributes: &[(String, String)],
        form: (Temporality, Aggregation),
        started_ns: u64,
    ) -> Self {
        let resource = resource(attributes);
        Self { resource, form, series: HashMap::new(), last_ns: started_ns, exports: 0 }
    }

    /// Encodes the present values, in messages of limited size. `now_ns` is the time since 1970.
    ///
    /// A delta begins at the last export that was [accepted](Self::accepted), so that a failed
    /// export loses nothing.
    pub fn encode(&mut self, cache: &Cache, now_ns: u64) -> Vec<Export> {
        let native = self.form.1 == Aggregation::Exponential;
        let readings = Readings::new(cache, Details { exemplars: true, native });
        // Wall clocks may go back; times of data points may not.
        let now_ns = now_ns.max(self.last_ns);
        self.exports += 1;
        let mut messages = Messages::new(self.resource.clone(), now_ns);
        for family in readings.families() {
            let spec = family.spec();
            if spec.modes.prometheus {
                readings.each(family, &mut |labels, reading| {
                    self.add(&mut messages, spec, labels, reading)
                });
            }
        }
        let exports = self.exports;
        self.series.retain(|_, progress| progress.seen == exports);
        self.last_ns = now_ns;
        messages.finish()
    }

    /// Adds the point of one series.
    fn add(
        &mut self,
        messages: &mut Messages,
        spec: &MetricSpec,
        labels: &[(&str, &str)],
        reading: Reading,
    ) {
        let now_ns = messages.now_ns();
        let delta = self.form.0.is_delta(spec.kind);
        let Some(state) = State::of(spec.kind, &reading) else {
            return messages.add(
                spec,
                delta,
                point(spec, labels, reading, Span { start_ns: 0, now_ns }),
            );
        };
        let key = key(&spec.name, labels);
        let start_ns = self.last_ns;
        let progress = self.series.entry(key.clone()).or_insert_with(|| Progress {
            start_ns,
            base: None,
            seen: 0,
        });
        progress.seen = self.exports;
        if progress.base.as_ref().is_some_and(|base| !base.precedes(&state)) {
            progress.base = None;
            if !delta {
                progress.start_ns = start_ns;
            }
        }
        let span = Span { start_ns: progress.start_ns, now_ns };
        if delta {
            let grown = match &progress.base {
                Some(base) => base.growth(reading, span),
                None => reading,
            };
            messages.add(spec, delta, point(spec, labels, grown, span));
            messages.remember(key, state);
        } else {
            progress.base = Some(state);
            messages.add(spec, delta, point(spec, labels, reading, span));
        }
    }

    /// Starts the next deltas of these series after an export that the collector accepted.
    pub fn accepted(&mut self, export: Export) {
        for (key, state) in export.states {
            if let Some(progress) = self.series.get_mut(&key) {
                progress.base = Some(state);
                progress.start_ns = export.now_ns;
            }
        }
    }
}

/// Returns a key for a series. Names of labels are fixed by the metric, but models can add tags.
fn key(name: &str, labels: &[(&str, &str)]) -> String {
    let length = labels.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>();
    let mut key = String::with_capacity(name.len() + length);
    key.push_str(name);
    for (name, value) in labels {
        for part in [name, value] {
            key.push('\0');
            key.push_str(part);
        }
    }
    key
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)]
mod tests;
