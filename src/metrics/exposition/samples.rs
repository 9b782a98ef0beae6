//! Families as lines of text: the whole classic format, and the distributions of OpenMetrics.
//! Buckets come before the sum and the count, as in Go's client; `le` and `quantile` are the last
//! labels.

use std::borrow::Cow;
use std::fmt::Write;

use super::numbers::{push_number, push_value};
use super::{Format, Labels, View, escape_help, numbers};
use crate::catalog::Kind;
use crate::reading::{Exemplar, Histogram, Reading, Summary};
use crate::readings::Named;

impl View {
    /// Returns whether this module writes a family, instead of prometheus-client.
    pub(super) fn is_by_hand(&self, named: &Named) -> bool {
        self.format == Format::Text || matches!(named.spec().kind, Kind::Histogram | Kind::Summary)
    }

    /// Writes a family if it has series.
    pub(super) fn write_by_hand(&self, text: &mut String, named: &Named) {
        let before = text.len();
        let spec = named.spec();
        let name = &spec.name;
        let kind = spec.kind.as_str();
        let help = escape_help(&spec.help, self.format);
        // Writing into a String cannot fail.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        let described = text.len();
        self.readings.each_named(named, &mut |labels, reading| {
            let pairs = pairs(&Labels::new(spec, labels));
            Samples { text: &mut *text, name, pairs, format: self.format }.write(&reading);
        });
        if text.len() == described {
            text.truncate(before);
        }
    }
}

/// Formats labels as they appear between braces, with a comma after each.
fn pairs(labels: &Labels<'_>) -> String {
    let mut pairs = String::new();
    for (name, value) in &labels.0 {
        let _ = write!(pairs, "{name}=\"{}\",", escape_label(value));
    }
    pairs
}

pub(super) fn escape_label(value: &str) -> Cow<'_, str> {
    match value.contains(['\\', '"', '\n']) {
        true => Cow::Owned(value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")),
        false => Cow::Borrowed(value),
    }
}

/// The samples of one series.
struct Samples<'a> {
    text: &'a mut String,
    name: &'a str,
    /// The labels, with a comma after each.
    pairs: String,
    format: Format,
}

impl Samples<'_> {
    fn write(&mut self, reading: &Reading) {
        match reading {
            Reading::Number(number) => {
                self.start("", None);
                push_number(self.text, *number);
                self.text.push('\n');
            }
            Reading::Histogram(histogram) => self.histogram(histogram),
            Reading::Summary(summary) => self.summary(summary),
        }
    }

    /// Writes the name and the labels of a sample; `last` is a label with a number as its value.
    fn start(&mut self, suffix: &str, last: Option<(&str, f64)>) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        match last {
            Some((label, value)) => {
                let _ = write!(self.text, "{{{}{label}=\"", self.pairs);
                numbers::push_label(self.text, value, self.format);
                self.text.push_str("\"}");
            }
            None => {
                if let Some(pairs) = self.pairs.strip_suffix(',') {
                    let _ = write!(self.text, "{{{pairs}}}");
                }
            }
        }
        self.text.push(' ');
    }

    fn histogram(&mut self, histogram: &Histogram) {
        let mut count = 0;
        for (at, (bound, own)) in histogram.buckets.iter().enumerate() {
            count += own;
            self.start("_bucket", Some(("le", *bound)));
            let _ = write!(self.text, "{count}");
            if let Some(Exemplar { trace, value, at_ms }) = histogram.exemplars.get(&at) {
                let _ = write!(self.text, " # {{trace_id=\"{trace}\"}} ");
                push_value(self.text, *value);
                let _ = write!(self.text, " {}", *at_ms as f64 / 1000.0);
            }
            self.text.push('\n');
        }
        // OpenMetrics requires that a sum only grows. Without it, a histogram has no count either:
        // the last bucket has it.
        if self.format == Format::Text || histogram.has_growing_sum() {
            self.sum(histogram.sum);
            self.count(count);
        }
    }

    fn summary(&mut self, summary: &Summary) {
        for (quantile, value) in &summary.quantiles {
            self.start("", Some(("quantile", *quantile)));
            push_value(self.text, *value);
            self.text.push('\n');
        }
        if self.format == Format::Text || summary.sum >= 0.0 {
            self.sum(summary.sum);
        }
        self.count(summary.count);
    }

    fn sum(&mut self, sum: f64) {
        self.start("_sum", None);
        push_value(self.text, sum);
        self.text.push('\n');
    }

    fn count(&mut self, count: u64) {
        self.start("_count", None);
        let _ = writeln!(self.text, "{count}");
    }
}
