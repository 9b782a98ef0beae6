//! Histograms and summaries. prometheus-client encodes histograms without exemplars; histograms with them and all
//! summaries are written here by hand, behind the other families.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write;

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};

use super::{Family, Format, Labels, MetricSpec, View, escape_help, series_labels};
use crate::metrics::builtin::Builtin;
use crate::metrics::catalog::Kind;
use crate::metrics::cell::Reading;
use crate::metrics::durations::{Buckets, Exemplar, Stage};
use crate::metrics::series::ModelSeries;

/// A histogram at one moment: the sum, and each bucket's upper bound and own count.
type Histogram = (f64, Vec<(f64, u64)>);

impl View {
    /// The built-in histograms, which are made of models' cells.
    pub(super) fn encode_histograms(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        spec: &MetricSpec,
        builtin: Builtin,
    ) -> fmt::Result {
        let all: Vec<_> =
            self.models.iter().filter_map(|model| Some((model, histogram(model, builtin, spec)?))).collect();
        if all.is_empty() {
            return Ok(());
        }
        let mut family = self.describe(encoder, spec)?;
        for (model, (sum, buckets)) in all {
            let count = buckets.iter().map(|(_, count)| count).sum();
            let labels = self.model_labels(builtin, model);
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }

    /// Whether prometheus-client cannot encode a family.
    pub(super) fn is_by_hand(&self, family: &Family) -> bool {
        let exemplary = |stage: Stage| {
            let mut histograms = self.models.iter().filter_map(|model| model.durations.histogram(stage));
            self.format == Format::OpenMetrics && histograms.any(Buckets::has_exemplars)
        };
        family.spec.kind == Kind::Summary
            || family.spec.builtin.and_then(|builtin| stage_of(builtin, Stage::histogram)).is_some_and(exemplary)
    }

    /// The families that prometheus-client cannot encode.
    pub(super) fn by_hand(&self) -> String {
        let mut text = String::new();
        for family in self.shown().filter(|family| self.is_by_hand(family)) {
            let before = text.len();
            let (name, kind) = (&family.spec.name, family.spec.kind.as_str());
            let help = escape_help(&family.spec.help, self.format);
            // Writing into a String cannot fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            let described = text.len();
            self.write_by_hand(&mut text, family);
            if text.len() == described {
                text.truncate(before);
            }
        }
        text
    }

    fn write_by_hand(&self, text: &mut String, family: &Family) {
        let builtin = family.spec.builtin.filter(|builtin| !builtin.is_family());
        if let Some((builtin, stage)) =
            builtin.and_then(|builtin| Some((builtin, stage_of(builtin, Stage::histogram)?)))
        {
            for model in &self.models {
                let Some(buckets) = model.durations.histogram(stage) else { continue };
                let histogram = (stage.sum_ns(model) as f64 / 1000.0, buckets.read());
                write_histogram(
                    text,
                    &family.spec.name,
                    &self.model_labels(builtin, model),
                    histogram,
                    &buckets.exemplars(),
                );
            }
        } else if let Some((builtin, stage)) =
            builtin.and_then(|builtin| Some((builtin, stage_of(builtin, Stage::summary)?)))
        {
            // Triton has none of requests where some of them are not executed.
            for model in self.models.iter().filter(|model| stage != Stage::Request || !model.cached()) {
                let Some(summary) = model.durations.summary(stage) else { continue };
                let (sum, count, quantiles) = summary.read();
                write_summary(text, &family.spec.name, &self.model_labels(builtin, model), (sum, count, &quantiles));
            }
        } else if let Some(builtin) = builtin {
            for model in &self.models {
                let Some(summary) = model.durations.cache_summary(builtin) else { continue };
                let (sum, count, quantiles) = summary.read();
                write_summary(text, &family.spec.name, &self.model_labels(builtin, model), (sum, count, &quantiles));
            }
        } else {
            for series in family.all() {
                if let Reading::Summary(sum, count, quantiles) = series.cell.read() {
                    write_summary(text, &family.spec.name, &series_labels(&series), (sum, count, &quantiles));
                }
            }
        }
    }
}

fn stage_of(builtin: Builtin, metric: impl Fn(Stage) -> Builtin) -> Option<Stage> {
    Stage::ALL.into_iter().find(|stage| metric(*stage) == builtin)
}

/// A model's histogram; `None` if the model has none of this kind.
fn histogram(model: &ModelSeries, builtin: Builtin, spec: &MetricSpec) -> Option<Histogram> {
    if builtin == Builtin::BatchSize {
        return Some(batch_sizes(model, &spec.buckets));
    }
    if builtin == Builtin::FirstResponseHistogram {
        let buckets = model.durations.first_response()?;
        return Some((model.responses.first_ns.get() as f64 / 1e6, buckets.read()));
    }
    let stage = stage_of(builtin, Stage::histogram)?;
    let buckets = model.durations.histogram(stage)?;
    Some((stage.sum_ns(model) as f64 / 1000.0, buckets.read()))
}

/// The sizes of executed batches, which the statistics keep one by one.
fn batch_sizes(model: &ModelSeries, bounds: &[f64]) -> Histogram {
    let mut buckets: Vec<(f64, u64)> = bounds.iter().copied().chain([f64::INFINITY]).map(|bound| (bound, 0)).collect();
    let mut sum = 0.0;
    for (size, cell) in model.batches().iter() {
        let size = *size as f64;
        sum += size * cell.count as f64;
        let at = bounds.partition_point(|&bound| bound < size);
        if let Some((_, count)) = buckets.get_mut(at) {
            *count += cell.count;
        }
    }
    (sum, buckets)
}

/// Labels as they stand between braces, each with a comma behind it.
fn pairs(labels: &Labels<'_>) -> String {
    labels.0.iter().map(|(name, value)| format!("{name}=\"{}\",", escape_label(value))).collect()
}

fn braced(pairs: &str) -> String {
    match pairs.strip_suffix(',') {
        Some(pairs) => format!("{{{pairs}}}"),
        None => String::new(),
    }
}

fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn write_summary(text: &mut String, name: &str, labels: &Labels<'_>, values: (f64, u64, &[(f64, f64)])) {
    let (sum, count, quantiles) = values;
    let pairs = pairs(labels);
    for (quantile, value) in quantiles {
        let _ = writeln!(text, "{name}{{{pairs}quantile=\"{quantile}\"}} {value}");
    }
    let set = braced(&pairs);
    let _ = writeln!(text, "{name}_sum{set} {sum}\n{name}_count{set} {count}");
}

fn write_histogram(
    text: &mut String,
    name: &str,
    labels: &Labels<'_>,
    (sum, buckets): Histogram,
    exemplars: &BTreeMap<usize, Exemplar>,
) {
    let pairs = pairs(labels);
    let mut count = 0;
    for (at, (bound, own)) in buckets.into_iter().enumerate() {
        count += own;
        let bound = if bound.is_infinite() { "+Inf".to_owned() } else { format!("{bound:?}") };
        let _ = write!(text, "{name}_bucket{{{pairs}le=\"{bound}\"}} {count}");
        if let Some(Exemplar { trace, value, at_ms }) = exemplars.get(&at) {
            let _ = write!(text, " # {{trace_id=\"{trace}\"}} {value} {}", *at_ms as f64 / 1000.0);
        }
        text.push('\n');
    }
    let set = braced(&pairs);
    let _ = writeln!(text, "{name}_sum{set} {sum}\n{name}_count{set} {count}");
}
