//! Command-line settings that override the file: Triton's `--metrics-config KEY=VALUE`, and the
//! mode.

use super::{Catalog, Kind, Mode, vllm_names};
use crate::builtin::Builtin;

/// One `KEY=VALUE`, with Triton's keys.
#[derive(Clone, Debug, PartialEq)]
pub enum Setting {
    /// `counter_latencies`: whether the server keeps counters of durations. Unlike in Triton, the
    /// counters of requests and inferences stay on without them.
    CounterLatencies(bool),
    /// `histogram_latencies`: whether the server keeps histograms of durations.
    HistogramLatencies(bool),
    /// `summary_latencies`: whether the server keeps quantiles of durations.
    SummaryLatencies(bool),
    /// `summary_quantiles`: the quantiles, ascending, between 0 and 1.
    SummaryQuantiles(Vec<f64>),
    /// `also_as=vllm`: the metrics of language models have vLLM's names and labels as well.
    VllmNames,
}

impl Setting {
    /// The allowed keys.
    pub const KEYS: [&str; 5] = [
        "counter_latencies",
        "histogram_latencies",
        "summary_latencies",
        "summary_quantiles",
        "also_as",
    ];

    /// Parses a setting.
    ///
    /// # Errors
    /// Returns an error for an unknown key or an invalid value, with the allowed ones.
    pub fn parse(key: &str, value: &str) -> Result<Self, String> {
        let switch = || match value.to_ascii_lowercase().as_str() {
            "true" | "on" | "yes" | "1" => Ok(true),
            "false" | "off" | "no" | "0" => Ok(false),
            _ => Err(format!(
                "{key} is '{value}'; allowed are true, false, on, off, yes, no, 1 and 0"
            )),
        };
        match key {
            "counter_latencies" => switch().map(Self::CounterLatencies),
            "histogram_latencies" => switch().map(Self::HistogramLatencies),
            "summary_latencies" => switch().map(Self::SummaryLatencies),
            "summary_quantiles" => quantiles(value).map(Self::SummaryQuantiles),
            "also_as" if value.eq_ignore_ascii_case("vllm") => Ok(Self::VllmNames),
            "also_as" => Err(format!("also_as is '{value}'; allowed is vllm")),
            _ => Err(format!(
                "unknown setting '{key}'; allowed are {}, or a file",
                Self::KEYS.join(", ")
            )),
        }
    }

    fn apply(&self, catalog: Catalog) -> Catalog {
        let latencies = |kind: Kind| {
            Builtin::ALL.iter().copied().filter(move |b| b.is_latency() && b.kind() == kind)
        };
        let switch = |catalog: Catalog, kind: Kind, on: bool| {
            latencies(kind).fold(catalog, |catalog, builtin| switched(catalog, builtin.name(), on))
        };
        match self {
            Self::CounterLatencies(on) => switch(catalog, Kind::Counter, *on),
            Self::HistogramLatencies(on) => switch(catalog, Kind::Histogram, *on),
            Self::SummaryLatencies(on) => switch(catalog, Kind::Summary, *on),
            Self::SummaryQuantiles(quantiles) => latencies(Kind::Summary)
                .fold(catalog, |catalog, summary| {
                    catalog.with_quantiles(summary.name(), quantiles)
                }),
            Self::VllmNames => {
                vllm_names::names().iter().fold(catalog, |catalog, (metric, names)| {
                    vllm_names::added(switched(catalog, metric, true), metric, names)
                })
            }
        }
    }
}

/// Parses Triton's form: quantiles with their allowed errors, `0.5:0.05,0.9:0.01`. The errors are
/// optional and only checked, because this server computes exact quantiles of a window.
fn quantiles(value: &str) -> Result<Vec<f64>, String> {
    let allowed = "allowed are up to 100 numbers between 0 and 1, each with its allowed error if \
                   wanted, for example 0.5:0.05,0.9:0.01";
    let number =
        |text: &str| text.trim().parse::<f64>().ok().filter(|number| (0.0..=1.0).contains(number));
    let parsed: Option<Vec<f64>> = value
        .split(',')
        .map(|text| match text.split_once(':') {
            Some((quantile, error)) => number(error).and_then(|_| number(quantile)),
            None => number(text),
        })
        .collect();
    let mut quantiles = parsed
        .filter(|quantiles| quantiles.len() <= super::MAX_QUANTILES)
        .ok_or_else(|| format!("summary_quantiles is '{value}'; {allowed}"))?;
    quantiles.sort_by(f64::total_cmp);
    quantiles.dedup();
    Ok(quantiles)
}

/// Switches a built-in metric on or off. Takes its definition from the shipped file if this file
/// omits it.
fn switched(catalog: Catalog, name: &str, on: bool) -> Catalog {
    let there = catalog.find(name).is_some() || catalog.is_disabled(name);
    if !on || there {
        return catalog.with_enabled(name, on);
    }
    let shipped = Catalog::shipped();
    let spec = shipped.find(name).map(|(_, spec)| spec);
    match spec.or_else(|| shipped.disabled().iter().find(|spec| spec.name == name)) {
        Some(spec) => catalog.with_metric(spec.clone()),
        None => catalog,
    }
}

/// All command-line settings that override the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overrides {
    /// The settings in the given order; the last one with a key wins.
    pub settings: Vec<Setting>,
    /// The mode, if it is set.
    pub mode: Option<Mode>,
}

impl Overrides {
    /// Applies all settings to the catalog of a file.
    pub fn apply(&self, catalog: Catalog) -> Catalog {
        let catalog = self.settings.iter().fold(catalog, |catalog, setting| setting.apply(catalog));
        // Applied once more at the end, so that the order of quantiles and switches does not
        // matter.
        let quantiles =
            self.settings.iter().filter(|setting| matches!(setting, Setting::SummaryQuantiles(_)));
        let catalog = quantiles.fold(catalog, |catalog, setting| setting.apply(catalog));
        match self.mode {
            Some(mode) => catalog.with_mode(mode),
            None => catalog,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn names(catalog: &Catalog) -> Vec<&str> {
        catalog.iter().map(|(_, spec)| spec.name.as_str()).collect()
    }

    fn applied(catalog: Catalog, settings: &[(&str, &str)]) -> Catalog {
        let settings =
            settings.iter().map(|(key, value)| Setting::parse(key, value).unwrap()).collect();
        Overrides { settings, mode: None }.apply(catalog)
    }

    #[test]
    fn switching_latencies_off_keeps_the_counts() {
        let catalog = applied(
            Catalog::shipped(),
            &[
                ("counter_latencies", "false"),
                ("histogram_latencies", "off"),
                ("summary_latencies", "true"),
            ],
        );
        let names = names(&catalog);
        assert!(
            !names.iter().any(|name| name.starts_with("nv_inference_request_duration")),
            "{names:?}"
        );
        for off in ["nv_inference_queue_duration_us", "pharos_request_duration_seconds"] {
            assert!(!names.contains(&off), "{off}");
        }
        for on in [
            "nv_inference_count",
            "nv_inference_request_success",
            "nv_inference_queue_summary_us",
            "pharos_batch_size",
        ] {
            assert!(names.contains(&on), "{on}");
        }
        assert_eq!(names.len(), Catalog::shipped().len() - 5 - 6 + 5);
    }

    #[test]
    fn switching_counters_off_keeps_the_histograms() {
        let catalog = applied(Catalog::shipped(), &[("counter_latencies", "false")]);
        let names = names(&catalog);
        assert_eq!(
            names.iter().filter(|name| name.contains("_request_duration")).collect::<Vec<_>>(),
            [&"pharos_request_duration_seconds", &"pharos_llm_request_duration_seconds"]
        );
    }

    #[test]
    fn parses_tritons_quantiles_in_any_order() {
        let settings =
            [("summary_quantiles", "0.9:0.01, 0.5:0.05,0.9"), ("summary_latencies", "1")];
        let catalog = applied(Catalog::shipped(), &settings);
        assert_eq!(
            catalog.find("nv_inference_request_summary_us").unwrap().1.quantiles,
            [0.5, 0.9]
        );
    }

    #[test]
    fn switching_on_an_omitted_metric_uses_the_shipped_definition() {
        let empty = || Catalog::parse("mode: both", "m.yaml").unwrap();
        let settings = [
            ("summary_quantiles", "0.5"),
            ("summary_latencies", "true"),
            ("counter_latencies", "false"),
        ];
        let catalog = applied(empty(), &settings);
        assert_eq!(names(&catalog).len(), 7);
        assert!(
            catalog.iter().all(|(_, spec)| spec.kind == Kind::Summary && spec.quantiles == [0.5])
        );
        let mode = Overrides { settings: Vec::new(), mode: Some(Mode::Legacy) };
        assert_eq!(mode.apply(empty()).mode(), Mode::Legacy);
    }

    #[test]
    fn metrics_of_language_models_get_the_names_and_labels_of_vllm() {
        let dimensions = |catalog: &Catalog, metric: &str| {
            let spec = catalog.find(metric).unwrap().1;
            let shown = spec
                .also_as
                .iter()
                .map(|other| format!("{}{:?}", other.name, other.dimensions(&spec.dimensions)));
            shown.collect::<Vec<_>>().join(" ")
        };
        // Twice is as once.
        let catalog = applied(Catalog::shipped(), &[("also_as", "vllm"), ("also_as", "vLLM")]);
        for (metric, expected) in [
            (
                "pharos_llm_running_requests",
                r#"vllm:num_requests_running["model_name", "version", "instance", "engine"]"#,
            ),
            (
                "pharos_llm_cached_prompt_tokens_total",
                r#"vllm:prompt_tokens_cached_total["model_name", "version", "engine"] vllm:prefix_cache_hits_total["model_name", "version", "engine"]"#,
            ),
            (
                "pharos_llm_finished_total",
                r#"vllm:request_success_total["model_name", "version", "finished_reason", "engine"]"#,
            ),
            ("pharos_batch_size", ""),
        ] {
            assert_eq!(dimensions(&catalog, metric), expected);
        }
        // A file that omits the metrics, and one that gives a name to another metric.
        let omitting = applied(Catalog::parse("mode: both", "m").unwrap(), &[("also_as", "vllm")]);
        assert_eq!(names(&omitting).len(), vllm_names::names().len());
        assert!(omitting.iter().all(|(_, spec)| !spec.also_as.is_empty()));
        let own = "ts_metrics:
  gauge:
    - {name: nv_inference_pending_request_count, unit:                    Count, dimensions: [model, version], also_as: vllm:num_requests_waiting}
";
        let own = applied(Catalog::parse(own, "m").unwrap(), &[("also_as", "vllm")]);
        assert_eq!(dimensions(&own, "pharos_llm_queued_requests"), "");
        assert_eq!(
            dimensions(&own, "nv_inference_pending_request_count"),
            r#"vllm:num_requests_waiting["model", "version"]"#
        );
    }

    #[test]
    fn errors_of_bad_settings_list_the_allowed_values() {
        for (key, value, expected) in [
            ("latencies", "true", "unknown setting 'latencies'; allowed are counter_latencies, "),
            (
                "summary_latencies",
                "maybe",
                "summary_latencies is 'maybe'; allowed are true, false,",
            ),
            (
                "summary_quantiles",
                "0.5:0.05,2",
                "'0.5:0.05,2'; allowed are up to 100 numbers between 0 and 1",
            ),
            ("summary_quantiles", "0.5:x", "for example 0.5:0.05,0.9:0.01"),
            ("summary_quantiles", "", "summary_quantiles is ''"),
            ("also_as", "sglang", "also_as is 'sglang'; allowed is vllm"),
        ] {
            let message = Setting::parse(key, value).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }
}
