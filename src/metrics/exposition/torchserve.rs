//! The text that TorchServe's metrics port shows, which is that of Prometheus' Java client: every family that is defined,
//! with samples or without; labels in the order of the definition and each with a comma behind it; all numbers with a
//! decimal point. `name[]` names samples there, not families.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::Arc;

use super::filter::families;
use super::{Format, LOGS_ONLY, Names};
use crate::metrics::cache::Cache;
use crate::metrics::catalog::{MetricSpec, Mode};
use crate::metrics::tslog::push_double;

/// Renders the samples that are asked for.
pub fn render(cache: &Arc<Cache>, names: &Names) -> String {
    let text = super::render(cache, Format::Text);
    let samples: BTreeMap<&str, &str> =
        families(&text).filter_map(|family| Some((family.split(' ').nth(2)?, family))).collect();
    let registry = cache.registry();
    let mut out = String::with_capacity(text.len() * 2);
    for family in registry.families().iter().filter(|family| family.views.prometheus) {
        let before = out.len();
        describe(&mut out, &family.spec);
        let described = out.len();
        let lines = samples.get(family.spec.name.as_str()).map_or("", |text| *text).lines();
        for line in lines.filter(|line| !line.starts_with('#')) {
            sample(&mut out, line, &family.spec, names);
        }
        if !names.is_all() && out.len() == described {
            out.truncate(before);
        }
    }
    if registry.catalog().mode() == Mode::Tslog {
        out.push_str(LOGS_ONLY);
    }
    out
}

fn describe(out: &mut String, spec: &MetricSpec) {
    let (name, kind, unit) = (&spec.name, spec.kind.as_str(), spec.unit.replace('\\', "\\\\").replace('\n', "\\n"));
    // Writing into a String cannot fail.
    let _ = writeln!(out, "# HELP {name} Torchserve prometheus {kind} metric with unit: {unit}\n# TYPE {name} {kind}");
}

/// Writes a sample's line anew.
fn sample(out: &mut String, line: &str, spec: &MetricSpec, names: &Names) {
    let Some((head, value)) = line.rsplit_once(' ') else { return };
    let (name, labels) = head.split_once('{').unwrap_or((head, ""));
    if !names.wants_sample(name) {
        return;
    }
    let mut labels = split_labels(labels.strip_suffix('}').unwrap_or(labels));
    let place = |label: &str| spec.dimensions.iter().position(|name| name == label).unwrap_or(usize::MAX);
    // The sort is stable: what the definition does not name (`le`, a model's tags) stands behind, as it came.
    labels.sort_by_key(|(label, _)| (place(label), *label == "le" || *label == "quantile"));
    out.push_str(name);
    if !labels.is_empty() {
        let pairs: String = labels.iter().map(|(label, value)| format!("{label}={value},")).collect();
        let _ = write!(out, "{{{pairs}}}");
    }
    out.push(' ');
    match value {
        "+Inf" | "-Inf" | "NaN" => out.push_str(value),
        _ => push_double(out, value.parse().unwrap_or(f64::NAN)),
    }
    out.push('\n');
}

/// The pairs between the braces; values with their quotes.
fn split_labels(text: &str) -> Vec<(&str, &str)> {
    let mut pairs = Vec::new();
    let mut rest = text;
    while let Some((label, after)) = rest.split_once('=') {
        let mut escaped = false;
        let end = after.bytes().skip(1).position(|byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        });
        let Some((value, others)) = end.and_then(|end| after.split_at_checked(end + 2)) else { break };
        pairs.push((label, value));
        rest = others.strip_prefix(',').unwrap_or(others);
    }
    pairs
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::id::ModelVersion;
    use crate::metrics::cache::Settings;
    use crate::metrics::catalog::Catalog;
    use crate::metrics::journal::Counters;
    use crate::metrics::labels::{Outcome, Protocol, Route};
    use crate::metrics::record;
    use crate::timeline::{Instant, Timeline};

    const YAML: &str = "mode: prometheus\ndimensions:\n  - &Z Z\nts_metrics:\n  counter:\n    - {name: Requests2XX, unit: Count, dimensions: [Level, \
        Hostname]}\n    - {name: ts_inference_requests_total, unit: Count, dimensions: [model_name, model_version, hostname]}\n\
        model_metrics:\n  counter:\n    - {name: C, unit: a\\b, dimensions: [Z, A, Hostname]}\n  histogram:\n    - {name: H, unit: s, \
        dimensions: [ModelName, Hostname], buckets: [0.5]}\n  gauge:\n    - {name: G, unit: ms, dimensions: []}\n";

    fn shown(names: &[&str]) -> String {
        let cache = Arc::new(Cache::new(Catalog::parse(YAML, "m.yaml").unwrap(), Settings::new("h")));
        cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        record::request_answered(&cache, Protocol::Http, Route::Infer, Outcome { code: 200, reason: None });
        cache.counter("C", &["z\"},\\", "a=b", "h"]).unwrap().add_or_update(1e7).unwrap();
        cache.histogram("H", &["m", "h"]).unwrap().add_or_update(0.25).unwrap();
        render(&cache, &Names::of_query(names.iter().map(|name| ("name[]", *name))))
    }

    #[test]
    fn the_text_is_that_of_the_java_client() {
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
H_sum{ModelName="m",Hostname="h",} 0.25
H_count{ModelName="m",Hostname="h",} 1.0
H_bucket{ModelName="m",Hostname="h",le="0.5",} 1.0
H_bucket{ModelName="m",Hostname="h",le="+Inf",} 1.0
# HELP G Torchserve prometheus gauge metric with unit: ms
# TYPE G gauge
"#;
        let sorted = |text: &str| {
            let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&shown(&[])), sorted(expected));
    }

    #[test]
    fn requests_are_counted_by_the_names_in_urls() {
        let yaml = YAML.replace("mode: prometheus", "mode: both").replace(
            "  counter:\n    - {name: Requests2XX",
            "  counter:\n    - {name: ts_queue_latency_microseconds, unit: Microseconds, dimensions: [model_name, \
             model_version, hostname]}\n    - {name: Requests2XX",
        );
        let cache = Arc::new(Cache::new(Catalog::parse(&yaml, "m.yaml").unwrap(), Settings::new("h")));
        assert!(cache.named("m", "").is_none(), "nobody has asked for it");
        cache.count_by_name(9000);
        let series = cache.model_loaded(&ModelVersion::new("m", 1), &[]);
        record::inference_requested(&series);
        for version in ["", "", "1.0"] {
            let named = cache.named("m", version).unwrap();
            record::named_requested(&cache, &named);
            let mut timeline = Timeline::default();
            timeline.compute.start = Instant(2_000_500);
            timeline.queue_start = Instant(500);
            record::named_done(&cache, &named, &timeline);
        }
        let text = render(&cache, &Names::default());
        for (version, requests, queue) in [("default", "2.0", "4000.0"), ("1.0", "1.0", "2000.0")] {
            let labels = format!("{{model_name=\"m\",model_version=\"{version}\",hostname=\"h\",}}");
            assert!(text.contains(&format!("ts_inference_requests_total{labels} {requests}\n")), "{text}");
            assert!(text.contains(&format!("ts_queue_latency_microseconds{labels} {queue}\n")), "{text}");
        }
        assert!(!text.contains("model_version=\"1\""), "{text}");
        let mut lines = Vec::new();
        Counters::new().collect(&cache, 10, |text, value| {
            lines.push((format!("{text:?}").contains("model_version:default"), value));
            true
        });
        assert_eq!(lines.iter().filter(|line| **line == (true, 1.0)).count(), 2, "{lines:?}");
        assert_eq!(lines.len(), 3, "those of the version by its number are not told: {lines:?}");
    }

    #[test]
    fn samples_are_asked_for_by_their_own_names() {
        assert_eq!(shown(&["H"]), "");
        assert_eq!(shown(&["none", "G"]), "");
        let sum = shown(&["H_sum"]);
        assert!(
            sum.starts_with("# HELP H ") && sum.ends_with("H_sum{ModelName=\"m\",Hostname=\"h\",} 0.25\n"),
            "{sum}"
        );
        assert_eq!(sum.lines().count(), 3);
    }
}
