//! Histograms with exemplars, and summaries. prometheus-client cannot encode them: it writes no timestamps of exemplars
//! and does not support summaries.

use std::fmt::Write;

use super::{Family, Labels, View, escape_help};
use crate::metrics::catalog::Kind;
use crate::metrics::reading::{Exemplar, Histogram, Reading, Summary};

impl View {
    /// Returns whether prometheus-client cannot encode a family.
    pub(super) fn is_by_hand(&self, family: &Family) -> bool {
        family.spec.kind == Kind::Summary || self.readings.has_exemplars(&family.spec)
    }

    /// Writes a family that prometheus-client cannot encode, if it has series.
    pub(super) fn write_by_hand(&self, text: &mut String, family: &Family) {
        let before = text.len();
        let (name, kind) = (&family.spec.name, family.spec.kind.as_str());
        let help = escape_help(&family.spec.help, self.format);
        // Writing into a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        let described = text.len();
        self.readings.each(family, &mut |labels, reading| match reading {
            Reading::Number(_) => {}
            Reading::Histogram(histogram) => write_histogram(text, name, &Labels::new(labels), &histogram),
            Reading::Summary(summary) => write_summary(text, name, &Labels::new(labels), &summary),
        });
        if text.len() == described {
            text.truncate(before);
        }
    }
}

/// Formats labels as they appear between braces, with a comma after each.
fn pairs(labels: &Labels<'_>) -> String {
    labels.0.iter().map(|(name, value)| format!("{name}=\"{}\",", escape_label(value))).collect()
}

fn braced(pairs: &str) -> String {
    match pairs.strip_suffix(',') {
        Some(pairs) => format!("{{{pairs}}}"),
        None => String::new(),
    }
}

pub(super) fn escape_label(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn write_summary(text: &mut String, name: &str, labels: &Labels<'_>, summary: &Summary) {
    let pairs = pairs(labels);
    for (quantile, value) in &summary.quantiles {
        let _ = writeln!(text, "{name}{{{pairs}quantile=\"{quantile}\"}} {value}");
    }
    let (set, Summary { sum, count, .. }) = (braced(&pairs), summary);
    let _ = writeln!(text, "{name}_sum{set} {sum}\n{name}_count{set} {count}");
}

fn write_histogram(text: &mut String, name: &str, labels: &Labels<'_>, histogram: &Histogram) {
    let pairs = pairs(labels);
    let mut count = 0;
    for (at, (bound, own)) in histogram.buckets.iter().enumerate() {
        count += own;
        let bound = if bound.is_infinite() { "+Inf".to_owned() } else { format!("{bound:?}") };
        let _ = write!(text, "{name}_bucket{{{pairs}le=\"{bound}\"}} {count}");
        if let Some(Exemplar { trace, value, at_ms }) = histogram.exemplars.get(&at) {
            let _ = write!(text, " # {{trace_id=\"{trace}\"}} {value} {}", *at_ms as f64 / 1000.0);
        }
        text.push('\n');
    }
    let (set, sum) = (braced(&pairs), histogram.sum);
    let _ = writeln!(text, "{name}_sum{set} {sum}\n{name}_count{set} {count}");
}
