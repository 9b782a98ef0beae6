//! The view that Prometheus scrapes: text format 0.0.4, and OpenMetrics 1.0 for who asks for it.
//!
//! Families come in the order of `metrics.yaml`, those without series are left out; series come by model, version and
//! label values; labels are in alphabetical order (a histogram's `le` first).
//!
//! Encoding is `prometheus-client`'s, with two turns, and by hand what it cannot encode (see `distributions`). It appends `_total` to every counter, which Triton's names must not
//! have: counters are declared as such but written like gauges. And OpenMetrics forbids a counter that does not end in
//! `_total`: such a one is declared `unknown` there.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, GaugeValueEncoder, LabelSetEncoder,
    MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::builtin::Builtin;
use super::cache::{Cache, Series};
use super::catalog::{Kind, MetricSpec, Mode};
use super::cell::Reading;
use super::family::{Family, Registry as Families};
use super::labels::{Failure, InstanceState, Protocol};
use super::named::Named;
use super::series::{Count, ModelSeries};
use crate::timeline::SendReason;

/// Which of the two text formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus' text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    /// The format that an `Accept` header asks for: OpenMetrics if it is named with at least the weight of `text/plain`.
    pub fn negotiate(accept: Option<&str>) -> Self {
        let weight = |media: &str| {
            let ranges = accept.unwrap_or("").split(',').map(|range| range.split(';').map(str::trim));
            let weights = ranges.filter_map(|mut parts| {
                parts.next().filter(|name| name.eq_ignore_ascii_case(media))?;
                let q = parts.find_map(|part| part.strip_prefix("q="));
                Some(q.map_or(1.0, |q| q.trim().parse::<f64>().unwrap_or(0.0)))
            });
            weights.fold(0.0, f64::max)
        };
        let open_metrics = weight("application/openmetrics-text");
        if open_metrics > 0.0 && open_metrics >= weight("text/plain") { Self::OpenMetrics } else { Self::Text }
    }

    /// The `Content-Type` of a rendering.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// What a scrape says when the definition's mode has nothing for it: a comment, which the text format allows anywhere.
const LOGS_ONLY: &str = "# metrics mode is tslog: metrics go to the logs; mode both or prometheus shows them here\n";

/// Renders every series of the cache.
pub fn render(cache: &Arc<Cache>, format: Format) -> String {
    render_named(cache, format, &Names::default())
}

/// Renders what is asked for.
pub fn render_named(cache: &Arc<Cache>, format: Format, names: &Names) -> String {
    let mut registry = Registry::default();
    let families = cache.registry();
    let logs_only = families.catalog().mode() == Mode::Tslog;
    let view = View { cache: Arc::clone(cache), families, models: cache.models(), format, names: names.clone() };
    let by_hand = view.by_hand();
    registry.register_collector(Box::new(view));
    let mut text = String::new();
    // Writing into a String cannot fail, and none of the encodings here does.
    let _ = encode_registry(&mut text, &registry);
    text.push_str(&by_hand);
    let mut text = names.keep(text);
    match format {
        // Which has no comments but its own, so that nothing can be said there.
        Format::OpenMetrics => drop(encode_eof(&mut text)),
        Format::Text if logs_only => text.push_str(LOGS_ONLY),
        Format::Text => {}
    }
    text
}

mod distributions;
mod filter;
pub mod torchserve;

pub use filter::Names;

/// One scrape.
#[derive(Debug)]
struct View {
    cache: Arc<Cache>,
    families: Arc<Families>,
    models: Vec<Arc<ModelSeries>>,
    format: Format,
    names: Names,
}

impl Collector for View {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in self.shown().filter(|family| !self.is_by_hand(family)) {
            match family.spec.builtin.filter(|builtin| !builtin.is_family()) {
                Some(builtin) => self.encode_builtin(&mut encoder, &family.spec, builtin)?,
                None => self.encode_family(&mut encoder, family)?,
            }
        }
        Ok(())
    }
}

/// One series of a family with a single value.
type Row<'a> = (Labels<'a>, Number);

impl View {
    /// The families that a scrape shows.
    fn shown(&self) -> impl Iterator<Item = &Family> {
        self.families
            .families()
            .iter()
            .map(|family| &**family)
            .filter(|family| family.views.prometheus && self.names.may_want(&family.spec.name))
    }

    fn encode_builtin(&self, encoder: &mut DescriptorEncoder<'_>, spec: &MetricSpec, builtin: Builtin) -> fmt::Result {
        if spec.kind == Kind::Histogram {
            return self.encode_histograms(encoder, spec, builtin);
        }
        let named = self.cache.all_named();
        let mut series: Vec<Row<'_>> = Vec::with_capacity(self.models.len());
        match builtin {
            Builtin::Requests => self.cache.requests().for_each_answer(|protocol, route, code, count| {
                let labels = [("protocol", protocol.as_str()), ("route", route.as_str())];
                let labels = Labels::new(labels).with("code", code.to_owned());
                series.push((labels, Number::Whole(count)));
            }),
            Builtin::RequestFailures => self.cache.requests().for_each_failure(|protocol, route, reason, count| {
                let labels = [("protocol", protocol.as_str()), ("reason", reason.as_str()), ("route", route.as_str())];
                series.push((Labels::new(labels), Number::Whole(count)));
            }),
            Builtin::Requests2xx | Builtin::Requests4xx | Builtin::Requests5xx => {
                let [fine, refused, failed] = self.cache.requests().http_classes();
                let count = match builtin {
                    Builtin::Requests2xx => fine,
                    Builtin::Requests4xx => refused,
                    _ => failed,
                };
                let labels = Labels::new([("Hostname", self.cache.hostname()), ("Level", "Host")]);
                series.push((labels, Number::Whole(count)));
            }
            Builtin::OpenStreams => series.extend(Protocol::ALL.into_iter().map(|protocol| {
                let open = self.cache.requests().streams(protocol).get();
                (Labels::new([("protocol", protocol.as_str())]), Number::Signed(open))
            })),
            _ => match named.as_deref().and_then(|named| self.named_series(builtin, named)) {
                Some(rows) => series = rows,
                None => self.models.iter().for_each(|model| self.model_series(builtin, model, &mut series)),
            },
        }
        if series.is_empty() {
            return Ok(());
        }
        let mut family = self.describe(encoder, spec)?;
        for (labels, number) in &series {
            self.encode_number(&mut family, spec, labels, *number)?;
        }
        Ok(())
    }

    /// The series of one model in one built-in family.
    fn model_series<'a>(&'a self, builtin: Builtin, model: &'a ModelSeries, out: &mut Vec<Row<'a>>) {
        let count = |cell: &Count| Number::Whole(cell.get());
        let micros = |cell: &Count| Number::Whole(cell.get() / 1000);
        let labels = || self.model_labels(builtin, model);
        let value = match builtin {
            Builtin::RequestFailure => {
                let each = Failure::ALL.iter().zip(&model.failures);
                return out
                    .extend(each.map(|(failure, cell)| (labels().with("reason", failure.as_str()), count(cell))));
            }
            Builtin::Instances => {
                return out.extend(InstanceState::ALL.iter().map(|state| {
                    let level = model.level(|series| &series.instances[state.index()]);
                    (labels().with("state", state.as_str()), Number::Signed(level))
                }));
            }
            Builtin::Batches => {
                let each = SendReason::ALL.iter().zip(&model.sent);
                return out.extend(each.map(|(reason, cell)| (labels().with("reason", reason.as_str()), count(cell))));
            }
            Builtin::RequestSuccess => count(&model.success_count),
            Builtin::InferenceCount => count(&model.inference_count),
            Builtin::ExecutionCount => count(&model.execution_count),
            Builtin::RequestDuration => micros(&model.success_ns),
            Builtin::QueueDuration => micros(&model.queue_ns),
            // With fractions, as TorchServe shows them.
            Builtin::TsLatency => Number::Float(model.success_ns.get() as f64 / 1000.0),
            Builtin::TsQueueLatency => Number::Float(model.queue_ns.get() as f64 / 1000.0),
            Builtin::ComputeInputDuration => micros(&model.compute_input_ns),
            Builtin::ComputeInferDuration => micros(&model.compute_infer_ns),
            Builtin::ComputeOutputDuration => micros(&model.compute_output_ns),
            Builtin::CacheHits if model.cached() => count(&model.cache.hits),
            Builtin::CacheMisses if model.cached() => count(&model.cache.misses),
            Builtin::CacheHitDuration if model.cached() => micros(&model.cache.hit_ns),
            Builtin::CacheMissDuration if model.cached() => micros(&model.cache.miss_ns),
            Builtin::PendingRequests => Number::Signed(model.level(|series| &series.pending)),
            Builtin::ModelLoadDuration => Number::Float(f64::from_bits(model.load_duration.get())),
            Builtin::TsRequests => count(&model.requests),
            Builtin::InstanceRestarts => count(&model.restarts),
            Builtin::OutputMismatches => count(&model.output_mismatches),
            Builtin::SamplesDropped => count(&model.samples_dropped),
            _ => return,
        };
        out.push((labels(), value));
    }

    /// TorchServe's counters of requests, where those are counted by name.
    fn named_series<'a>(&'a self, builtin: Builtin, all: &'a [Arc<Named>]) -> Option<Vec<Row<'a>>> {
        let number = |named: &Named| {
            Some(match builtin {
                Builtin::TsRequests => Number::Whole(named.requests.get()),
                Builtin::TsLatency => Number::Float(named.latency_ns.get() as f64 / 1000.0),
                Builtin::TsQueueLatency => Number::Float(named.queue_ns.get() as f64 / 1000.0),
                _ => return None,
            })
        };
        let labels = |named: &'a Named| {
            let labels = [("hostname", self.cache.hostname()), ("model_name", &*named.name)];
            Labels::new(labels.into_iter().chain([("model_version", &*named.version)]))
        };
        match builtin {
            Builtin::TsRequests | Builtin::TsLatency | Builtin::TsQueueLatency => {
                Some(all.iter().filter_map(|named| Some((labels(named), number(named)?))).collect())
            }
            _ => None,
        }
    }

    /// Labels of a model's series in a built-in family.
    fn model_labels<'a>(&'a self, builtin: Builtin, model: &'a ModelSeries) -> Labels<'a> {
        Labels::new(model.labels(builtin, self.cache.hostname()))
    }

    /// A family whose series are known by their label values.
    fn encode_family(&self, encoder: &mut DescriptorEncoder<'_>, family: &Family) -> fmt::Result {
        let spec = &*family.spec;
        let series = family.all();
        if series.is_empty() {
            return Ok(());
        }
        let mut family = self.describe(encoder, spec)?;
        for series in &series {
            let labels = series_labels(series);
            match series.cell.read() {
                Reading::Number(number) => self.encode_number(&mut family, spec, &labels, Number::Float(number))?,
                Reading::Histogram(sum, buckets) => {
                    let count = buckets.iter().map(|(_, count)| count).sum();
                    family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
                }
                Reading::Summary(..) => {}
            }
        }
        Ok(())
    }

    /// Writes `# HELP` and `# TYPE`.
    fn describe<'s>(
        &self,
        encoder: &'s mut DescriptorEncoder<'_>,
        spec: &'s MetricSpec,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        let (name, kind) = match (spec.kind, self.total_stem(spec)) {
            (Kind::Counter, Some(stem)) => (stem, MetricType::Counter),
            (Kind::Counter, None) if self.format == Format::OpenMetrics => (spec.name.as_str(), MetricType::Unknown),
            (Kind::Counter, None) => (spec.name.as_str(), MetricType::Counter),
            (Kind::Gauge, _) => (spec.name.as_str(), MetricType::Gauge),
            (Kind::Histogram, _) => (spec.name.as_str(), MetricType::Histogram),
            // Not encoded here, see `by_hand`.
            (Kind::Summary, _) => (spec.name.as_str(), MetricType::Unknown),
        };
        encoder.encode_descriptor(name, &escape_help(&spec.help, self.format), None, kind)
    }

    fn encode_number(
        &self,
        family: &mut MetricEncoder<'_>,
        spec: &MetricSpec,
        labels: &Labels<'_>,
        number: Number,
    ) -> fmt::Result {
        let total = self.total_stem(spec).is_some();
        let write = |sample: &mut MetricEncoder<'_>| {
            if total {
                sample.encode_counter::<NoLabelSet, _, u64>(&number, None)
            } else {
                sample.encode_gauge(&number)
            }
        };
        // The encoder writes `{}` for a label set that is there but empty.
        if labels.0.is_empty() { write(family) } else { write(&mut family.encode_family(labels)?) }
    }

    /// The name of an OpenMetrics counter's family, which its sample extends by `_total`.
    fn total_stem<'s>(&self, spec: &'s MetricSpec) -> Option<&'s str> {
        let counter = self.format == Format::OpenMetrics && spec.kind == Kind::Counter;
        spec.name.strip_suffix("_total").filter(|stem| counter && !stem.is_empty())
    }
}

/// Labels of Triton's families: the model's and its `metric_tags`.
fn series_labels(series: &Series) -> Labels<'_> {
    Labels::new(series.spec().labelled(series.labels()))
}

/// A backslash and a line feed would break the line; OpenMetrics also escapes quotes.
fn escape_help(help: &str, format: Format) -> String {
    let escaped = help.replace('\\', "\\\\").replace('\n', "\\n");
    if format == Format::OpenMetrics { escaped.replace('"', "\\\"") } else { escaped }
}

/// Labels of one series, sorted by name. The encoder escapes their values.
struct Labels<'a>(Vec<(&'a str, Cow<'a, str>)>);

impl<'a> Labels<'a> {
    fn new(labels: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut labels: Vec<_> = labels.into_iter().map(|(name, value)| (name, Cow::Borrowed(value))).collect();
        labels.sort_unstable_by_key(|(name, _)| *name);
        Self(labels)
    }

    fn with(mut self, name: &'a str, value: impl Into<Cow<'a, str>>) -> Self {
        let at = self.0.partition_point(|(other, _)| *other < name);
        self.0.insert(at, (name, value.into()));
        self
    }
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(name, value)| {
            use prometheus_client::encoding::EncodeLabel;
            (*name, &**value).encode(encoder.encode_label())
        })
    }
}

/// A value that is written without a decimal point when it is whole.
#[derive(Clone, Copy, Debug)]
enum Number {
    Whole(u64),
    Signed(i64),
    Float(f64),
}

impl Number {
    /// The same number as a whole one, where a float has no fraction and is exact.
    fn whole(self) -> Self {
        match self {
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 9e15 => Self::Signed(value as i64),
            other => other,
        }
    }
}

impl EncodeGaugeValue for Number {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match self.whole() {
            Self::Whole(value) => EncodeGaugeValue::encode(&value, encoder),
            Self::Signed(value) => EncodeGaugeValue::encode(&value, encoder),
            Self::Float(value) => EncodeGaugeValue::encode(&value, encoder),
        }
    }
}

impl EncodeCounterValue for Number {
    fn encode(&self, encoder: &mut prometheus_client::encoding::CounterValueEncoder<'_>) -> fmt::Result {
        match self.whole() {
            Self::Whole(value) => EncodeCounterValue::encode(&value, encoder),
            // Counters are never negative: neither whole ones nor sums of a user's increments.
            Self::Signed(value) => EncodeCounterValue::encode(&value.unsigned_abs(), encoder),
            Self::Float(value) => EncodeCounterValue::encode(&value, encoder),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
