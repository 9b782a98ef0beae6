//! The text format of Prometheus' Java client (`simpleclient`), for scrapers that expect it. It
//! contains every defined family, even without samples. Labels are in the order of the definition,
//! each followed by a comma; all numbers have a decimal point. `name[]` selects samples, not
//! families. The caller supplies the help texts.

use std::fmt::Write;

use super::samples::escape_label;
use super::{LOGS_ONLY, Labels, Names};
use crate::cache::Cache;
use crate::catalog::{MetricSpec, Mode};
use crate::reading::{Details, Reading};
use crate::readings::Readings;
use crate::tslog::push_double;

/// Renders the requested samples; `help` returns the text after `# HELP`.
pub fn render(cache: &Cache, names: &Names, help: impl Fn(&MetricSpec) -> String) -> String {
    let readings = Readings::new(cache, Details::default());
    let mut out = String::new();
    for named in readings.named().iter().filter(|named| named.views().prometheus) {
        let spec = named.spec();
        let before = out.len();
        let name = &spec.name;
        let kind = spec.kind.as_str();
        let help = help(spec).replace('\\', "\\\\").replace('\n', "\\n");
        // Writing into a String cannot fail.
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
        let described = out.len();
        readings.each_named(named, &mut |labels, reading| {
            Samples { out: &mut out, names, name, labels: Labels::new(spec, labels) }
                .write(&reading);
        });
        if !names.is_all() && out.len() == described {
            out.truncate(before);
        }
    }
    if readings.catalog().mode() == Mode::Tslog {
        out.push_str(LOGS_ONLY);
    }
    out
}

/// The samples of one series.
struct Samples<'a> {
    out: &'a mut String,
    names: &'a Names,
    name: &'a str,
    labels: Labels<'a>,
}

impl Samples<'_> {
    fn write(&mut self, reading: &Reading) {
        match reading {
            Reading::Number(number) => self.sample("", None, number.as_f64()),
            Reading::Histogram(histogram) => {
                let mut count = 0;
                for (bound, own) in &histogram.buckets {
                    count += own;
                    self.sample("_bucket", Some(("le", &number(*bound))), count as f64);
                }
                self.sample("_count", None, histogram.count() as f64);
                self.sample("_sum", None, histogram.sum);
            }
            Reading::Summary(summary) => {
                for (quantile, value) in &summary.quantiles {
                    self.sample("", Some(("quantile", &quantile.to_string())), *value);
                }
                self.sample("_count", None, summary.count as f64);
                self.sample("_sum", None, summary.sum);
            }
        }
    }

    fn sample(&mut self, suffix: &str, last: Option<(&str, &str)>, value: f64) {
        let start = self.out.len();
        self.out.push_str(self.name);
        self.out.push_str(suffix);
        if !self.names.wants_sample(&self.out[start..]) {
            return self.out.truncate(start);
        }
        let mut labels = self.labels.0.iter().copied().chain(last).peekable();
        if labels.peek().is_some() {
            self.out.push('{');
            for (name, value) in labels {
                let _ = write!(self.out, "{name}=\"{}\",", escape_label(value));
            }
            self.out.push('}');
        }
        self.out.push(' ');
        self.out.push_str(&number(value));
        self.out.push('\n');
    }
}

/// Formats a number as the Java client does.
fn number(value: f64) -> String {
    let mut text = String::new();
    match value {
        f64::INFINITY => text.push_str("+Inf"),
        f64::NEG_INFINITY => text.push_str("-Inf"),
        value if value.is_nan() => text.push_str("NaN"),
        value => push_double(&mut text, value),
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Arc;

    use pharos_base::id::ModelVersion;
    use pharos_base::timeline::{Instant, Timeline};

    use super::*;
    use crate::alias::Naming;
    use crate::cache::Settings;
    use crate::catalog::Catalog;
    use crate::counter_lines::Counters;
    use crate::labels::{Outcome, Protocol, Route};
    use crate::record;

    const YAML: &str = "mode: prometheus\ndimensions:\n  - &Z Z\nts_metrics:\n  counter:\n    - \
                        {name: Requests2XX, unit: Count, dimensions: [Level, Hostname]}\n    - \
                        {name: ts_inference_requests_total, unit: Count, dimensions: [model_name, \
                        model_version, hostname]}\nmodel_metrics:\n  counter:\n    - {name: C, \
                        unit: a\\b, dimensions: [Z, A, Hostname]}\n  histogram:\n    - {name: H, \
                        unit: s, dimensions: [ModelName, Hostname], buckets: [0.00005, 0.5]}\n  \
                        gauge:\n    - {name: G, unit: ms, dimensions: []}\n";

    fn help(spec: &MetricSpec) -> String {
        format!("Torchserve prometheus {} metric with unit: {}", spec.kind.as_str(), spec.unit)
    }

    fn shown(names: &[&str]) -> String {
        let cache =
            Arc::new(Cache::new(Catalog::parse(YAML, "m.yaml").unwrap(), Settings::new("h")));
        cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        record::request_answered(
            &cache,
            Protocol::Http,
            Route::Infer,
            Outcome { code: 200, reason: None },
        );
        cache.counter("C", &["z\"},\\", "a=b", "h"]).unwrap().add_or_update(1e7).unwrap();
        cache.histogram("H", &["m", "h"]).unwrap().add_or_update(0.25).unwrap();
        render(&cache, &Names::of_query(names.iter().map(|name| ("name[]", *name))), help)
    }

    #[test]
    fn renders_the_text_of_the_java_client() {
        let expected = r#"# HELP Requests2XX Torchserve prometheus counter metric with unit: Count
# TYPE Requests2XX counter
Requests2XX{Level="Host",Hostname="h",} 1.0
# HELP ts_inference_requests_total Torchserve prometheus counter metric with unit: Count
# TYPE ts_inference_requests_total counter
ts_inference_requests_total{model_name="m",model_version="1",hostname="h",} 0.0
# HELP C Torchserve prometheus counter metric with unit: a\\b
# TYPE C counter
C{Z="z\"},\\",A="a=b",Hostname="h",} 1.0E7
# HELP H Torchserve prometheus histogram metric with unit: s
# TYPE H histogram
H_bucket{ModelName="m",Hostname="h",le="5.0E-5",} 0.0
H_bucket{ModelName="m",Hostname="h",le="0.5",} 1.0
H_bucket{ModelName="m",Hostname="h",le="+Inf",} 1.0
H_count{ModelName="m",Hostname="h",} 1.0
H_sum{ModelName="m",Hostname="h",} 0.25
# HELP G Torchserve prometheus gauge metric with unit: ms
# TYPE G gauge
"#;
        let sorted = |text: &str| {
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&shown(&[])), sorted(expected));
        // The order within a family; the client lists families in any order.
        let of_histogram = |text: &str| {
            text.lines().filter(|line| line.starts_with("H_")).map(str::to_owned).collect()
        };
        let ours: Vec<String> = of_histogram(&shown(&[]));
        assert_eq!(ours, of_histogram(expected));
    }

    #[test]
    fn requests_are_counted_by_the_names_in_urls() {
        let yaml = YAML.replace("mode: prometheus", "mode: both").replace(
            "  counter:\n    - {name: Requests2XX",
            "  counter:\n    - {name: ts_queue_latency_microseconds, unit: Microseconds, \
             dimensions: [model_name, model_version, hostname]}\n    - {name: Requests2XX",
        );
        let cache =
            Arc::new(Cache::new(Catalog::parse(&yaml, "m.yaml").unwrap(), Settings::new("h")));
        assert!(cache.alias("m", "").is_none(), "requests are not counted by alias");
        cache.count_by_alias(Naming {
            default_version: "default",
            worker: Box::new(|_, _, _| String::new()),
        });
        let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        record::inference_requested(&series);
        for version in ["", "", "1.0"] {
            let alias = cache.alias("m", version).unwrap();
            record::alias_requested(&cache, &alias);
            let mut timeline = Timeline::default();
            timeline.compute.start = Instant(2_000_500);
            timeline.queue_start = Instant(500);
            record::alias_done(&cache, &alias, &timeline);
        }
        let text = render(&cache, &Names::default(), help);
        for (version, requests, queue) in [("default", "2.0", "4000.0"), ("1.0", "1.0", "2000.0")] {
            let labels =
                format!("{{model_name=\"m\",model_version=\"{version}\",hostname=\"h\",}}");
            assert!(
                text.contains(&format!("ts_inference_requests_total{labels} {requests}\n")),
                "{text}"
            );
            assert!(
                text.contains(&format!("ts_queue_latency_microseconds{labels} {queue}\n")),
                "{text}"
            );
        }
        assert!(!text.contains("model_version=\"1\""), "{text}");
        let mut lines = Vec::new();
        Counters::new().collect(&cache, 10, |text, value| {
            lines.push((format!("{text:?}").contains("model_version:default"), value));
            true
        });
        assert_eq!(lines.iter().filter(|line| **line == (true, 1.0)).count(), 2, "{lines:?}");
        assert_eq!(lines.len(), 3, "no series for the version number: {lines:?}");
    }

    #[test]
    fn samples_are_requested_by_their_own_names() {
        assert_eq!(shown(&["H"]), "");
        assert_eq!(shown(&["none", "G"]), "");
        let sum = shown(&["H_sum"]);
        assert!(
            sum.starts_with("# HELP H ")
                && sum.ends_with("H_sum{ModelName=\"m\",Hostname=\"h\",} 0.25\n"),
            "{sum}"
        );
        assert_eq!(sum.lines().count(), 3);
    }
}
