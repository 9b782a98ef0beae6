//! The view for Prometheus scrapes: text format 0.0.4, OpenMetrics 1.0 and Prometheus' protobuf
//! format for scrapers that accept them.
//!
//! Families are in the order of `metrics.yaml`, without those that have no series; further names
//! (`also_as`) follow the family's own. Series are ordered by model, version and label values.
//! Labels are in the order of the definition, then a model's namespace and tags, then `le` or
//! `quantile`; the labels of Triton's metrics and of metrics that models describe are in
//! alphabetical order before `le` or `quantile`, as in Triton.
//!
//! `samples` writes the classic format and all distributions; `prometheus-client` encodes the
//! counters and gauges of OpenMetrics. It appends `_total` to every counter, which Triton's names
//! must not have. OpenMetrics requires counters to end in `_total`, so the others are declared
//! `unknown` there.

use std::fmt;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, GaugeValueEncoder,
    LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::cache::Cache;
use super::catalog::{Kind, MetricSpec, Mode};
use super::reading::{Details, Number, Reading};
use super::readings::{Named, Readings};

/// The text format of a scrape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Prometheus' text format 0.0.4.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Format {
    fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// Appended when the mode shows no metrics in scrapes. A comment, which the text format allows
/// anywhere.
const LOGS_ONLY: &str = "# metrics mode is tslog (log): metrics go to the logs; mode both or \
                         prometheus (metrics_mode in config.properties) shows them here\n";

/// Encodes the families and samples of these names.
pub fn encode(cache: &Arc<Cache>, encoding: Encoding, names: &Names) -> Vec<u8> {
    match encoding {
        Encoding::Text(format) => render_named(cache, format, names).into_bytes(),
        Encoding::Protobuf => protobuf::encode(cache, names),
    }
}

/// Renders every series of the cache.
pub fn render(cache: &Arc<Cache>, format: Format) -> String {
    render_named(cache, format, &Names::default())
}

/// Renders the families and samples of these names.
pub fn render_named(cache: &Arc<Cache>, format: Format, names: &Names) -> String {
    let details = Details { exemplars: format == Format::OpenMetrics, native: false };
    let readings = Readings::new(Arc::clone(cache), details);
    let logs_only = readings.catalog().mode() == Mode::Tslog;
    let view = Arc::new(View { readings, format });
    let mut shown = view.readings.named();
    shown.retain(|named| named.views().prometheus && names.may_contain(&named.spec().name));
    let mut text = String::new();
    for run in shown.chunk_by(|one, other| view.is_by_hand(one) == view.is_by_hand(other)) {
        if run.first().is_some_and(|first| view.is_by_hand(first)) {
            run.iter().for_each(|named| view.write_by_hand(&mut text, named));
            continue;
        }
        let mut registry = Registry::default();
        registry
            .register_collector(Box::new(Run { view: Arc::clone(&view), families: run.to_vec() }));
        // Writing into a String cannot fail, and neither do these encodings.
        let _ = encode_registry(&mut text, &registry);
    }
    let mut text = names.keep(text);
    match format {
        // OpenMetrics does not allow free comments.
        Format::OpenMetrics => drop(encode_eof(&mut text)),
        Format::Text if logs_only => text.push_str(LOGS_ONLY),
        Format::Text => {}
    }
    text
}

mod filter;
pub mod java_client;
mod negotiation;
mod numbers;
mod protobuf;
mod samples;

pub use filter::Names;
pub use negotiation::Encoding;

/// One scrape.
#[derive(Debug)]
struct View {
    readings: Readings<Arc<Cache>>,
    format: Format,
}

/// Consecutive families that prometheus-client can encode.
#[derive(Debug)]
struct Run {
    view: Arc<View>,
    families: Vec<Named>,
}

impl Collector for Run {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.families.iter().try_for_each(|named| self.view.encode_family(&mut encoder, named))
    }
}

impl View {
    /// Writes a family if it has series.
    fn encode_family(&self, encoder: &mut DescriptorEncoder<'_>, named: &Named) -> fmt::Result {
        let spec = named.spec();
        let mut unused = Some(encoder);
        let mut described = None;
        let mut result = Ok(());
        self.readings.each_named(named, &mut |labels, reading| {
            // Distributions are written by hand, see `is_by_hand`.
            let Reading::Number(number) = reading else { return };
            if result.is_err() {
                return;
            }
            if let Some(encoder) = unused.take() {
                match self.describe(encoder, spec) {
                    Ok(encoder) => described = Some(encoder),
                    Err(error) => result = Err(error),
                }
            }
            if let Some(encoder) = &mut described {
                result = self.encode_number(encoder, spec, &Labels::new(spec, labels), number);
            }
        });
        result
    }

    /// Writes `# HELP` and `# TYPE`.
    fn describe<'s>(
        &self,
        encoder: &'s mut DescriptorEncoder<'_>,
        spec: &'s MetricSpec,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        let (name, kind) = match (spec.kind, self.total_stem(spec)) {
            (Kind::Counter, Some(stem)) => (stem, MetricType::Counter),
            (Kind::Gauge, _) => (spec.name.as_str(), MetricType::Gauge),
            // Distributions do not come here.
            (Kind::Counter | Kind::Histogram | Kind::Summary, _) => {
                (spec.name.as_str(), MetricType::Unknown)
            }
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
        // The encoder writes `{}` for a label set that exists but is empty.
        if labels.0.is_empty() { write(family) } else { write(&mut family.encode_family(labels)?) }
    }

    /// Returns the name of an OpenMetrics counter's family: the name of its sample without
    /// `_total`.
    fn total_stem<'s>(&self, spec: &'s MetricSpec) -> Option<&'s str> {
        let counter = self.format == Format::OpenMetrics && spec.kind == Kind::Counter;
        spec.name.strip_suffix("_total").filter(|stem| counter && !stem.is_empty())
    }
}

/// Escapes a help text. A backslash or a line feed would break the line; OpenMetrics also escapes
/// quotes.
fn escape_help(help: &str, format: Format) -> String {
    let escaped = help.replace('\\', "\\\\").replace('\n', "\\n");
    if format == Format::OpenMetrics { escaped.replace('"', "\\\"") } else { escaped }
}

/// Labels of one series: the labels of the definition in its order, then a model's namespace and
/// tags by name. The labels of Triton's metrics, and of a metric that models describe, are in
/// alphabetical order, as in Triton. Values are not escaped yet.
struct Labels<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Labels<'a> {
    fn new(spec: &MetricSpec, labels: &[(&'a str, &'a str)]) -> Self {
        let ordered = if spec.has_sorted_labels() { &[][..] } else { &spec.dimensions };
        let place =
            |label: &str| ordered.iter().position(|name| name == label).unwrap_or(usize::MAX);
        let mut labels = labels.to_vec();
        labels.sort_unstable_by_key(|(name, _)| (place(name), *name));
        Self(labels)
    }
}

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(name, value)| {
            use prometheus_client::encoding::EncodeLabel;
            (*name, *value).encode(encoder.encode_label())
        })
    }
}

impl Number {
    /// Converts a float without a fraction to an integer, which is written without a decimal point,
    /// if the conversion is exact.
    fn whole(self) -> Self {
        match self {
            Self::Float(value) if value.fract() == 0.0 && value.abs() < 9e15 => {
                Self::Signed(value as i64)
            }
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
    fn encode(
        &self,
        encoder: &mut prometheus_client::encoding::CounterValueEncoder<'_>,
    ) -> fmt::Result {
        match self.whole() {
            Self::Whole(value) => EncodeCounterValue::encode(&value, encoder),
            // Counters are never negative, neither the server's nor sums of increments.
            Self::Signed(value) => EncodeCounterValue::encode(&value.unsigned_abs(), encoder),
            Self::Float(value) => EncodeCounterValue::encode(&value, encoder),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
