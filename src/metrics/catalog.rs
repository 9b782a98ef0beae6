//! The metrics that a `metrics.yaml` defines, parsed and checked: names, types, labels.
//!
//! A `Catalog` is always valid. A metric's position in it is its [`MetricId`].

mod also_as;
mod anchors;
mod default_buckets;
mod difference;
mod fields;
pub mod listing;
mod names;
mod native;
mod node;
mod overrides;
mod parse;
pub mod slo_rules;
mod slos;
mod tenants;
mod vllm_names;
mod warnings;
mod worker_labels;

use std::collections::HashMap;

use super::builtin::Builtin;
use super::unit::TimeUnit;
use default_buckets::default_buckets;
use names::Names;

pub use super::kind::Kind;
pub(super) use also_as::relabelled;
pub use also_as::{LabelValue, OtherLabel, OtherName};
#[cfg(test)]
pub(super) use default_buckets::MILLISECOND_BUCKETS;
pub use difference::Difference;
pub(super) use fields::MAX_UNIT;
pub(super) use names::{check_reserved, is_label_name, is_metric_name};
pub use native::NativeSpec;
pub use overrides::{Overrides, Setting};
pub use parse::MAX_BYTES;
pub use slos::{Share, Sli, Slo};
pub use tenants::{BudgetRule, TenantRule, TenantSource};
pub(super) use tenants::{NONE, OTHER};
pub use worker_labels::WorkerLabel;

/// The shipped `metrics.yaml`.
pub const SHIPPED: &str = include_str!("../../metrics.yaml");

/// The default quantiles of a summary: Triton's.
pub const DEFAULT_QUANTILES: [f64; 5] = [0.5, 0.9, 0.95, 0.99, 0.999];

/// The most quantiles of one summary.
const MAX_QUANTILES: usize = 100;

/// The gauge that the worker's runtime records for models with states, by name.
pub const STATE_BYTES: &str = "pharos_sequence_state_bytes";

/// The metrics that the worker's runtime records for every backend. By name, since the worker has
/// no enum of built-in metrics.
pub const RECORDED_BY_WORKER: [&str; 2] = ["HandlerTime", "PredictionTime"];

/// The gauges of engines that run language models, which their backends record.
pub const RECORDED_BY_ENGINES: [&str; 6] = [
    ENGINE_RUNNING,
    ENGINE_WAITING,
    ENGINE_CACHE_USAGE,
    ENGINE_CACHE_TOKENS,
    ENGINE_ADAPTER_REQUESTS,
    ENGINE_ADAPTER_SLOTS,
];

/// The gauge of the choices that an engine generates.
pub const ENGINE_RUNNING: &str = "pharos_llm_running_requests";

/// The gauge of the requests that wait in an engine.
pub const ENGINE_WAITING: &str = "pharos_llm_waiting_requests";

/// The gauge of the used share of an engine's KV cache.
pub const ENGINE_CACHE_USAGE: &str = "pharos_llm_kv_cache_usage_ratio";

/// The gauge of the tokens for which an engine's KV cache has room.
pub const ENGINE_CACHE_TOKENS: &str = "pharos_llm_kv_cache_tokens";

/// The gauge of the requests of an adapter in an engine, with the labels [`ADAPTER_LABEL`] and
/// [`ADAPTER_STATE_LABEL`].
pub const ENGINE_ADAPTER_REQUESTS: &str = "pharos_llm_adapter_requests";

/// The label with the name of an adapter.
pub const ADAPTER_LABEL: &str = "adapter";

/// The label that says whether the requests of an adapter run or wait.
pub const ADAPTER_STATE_LABEL: &str = "state";

/// The gauge of the adapters whose requests an engine computes in one step.
pub const ENGINE_ADAPTER_SLOTS: &str = "pharos_llm_adapter_slots";

/// The metrics of text models, which their backend records.
pub const RECORDED_BY_TEXT_MODELS: [&str; 5] =
    [TEXT_TOKENS, TEXT_PADDING, TEXT_TRUNCATED, TEXT_BATCH_TOKENS, TEXT_TOKENISATION];

/// The counter of the tokens of texts that a graph has computed.
pub const TEXT_TOKENS: &str = "pharos_text_tokens_total";

/// The counter of the tokens that pad texts of different lengths.
pub const TEXT_PADDING: &str = "pharos_text_padding_tokens_total";

/// The counter of the texts that were cut off.
pub const TEXT_TRUNCATED: &str = "pharos_text_truncated_inputs_total";

/// The histogram of the tokens of a run of a graph, with those that pad.
pub const TEXT_BATCH_TOKENS: &str = "pharos_text_batch_tokens";

/// The histogram of the time in which the texts of a batch become tokens.
pub const TEXT_TOKENISATION: &str = "pharos_text_tokenization_seconds";

named_enum! {
    /// How metrics leave the server: the key `mode` of `metrics.yaml`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Mode {
        /// Log lines in TorchServe's form.
        Tslog => "tslog",
        /// A scrape of `/metrics`.
        Prometheus => "prometheus",
        /// Both of them.
        Both => "both",
        /// As TorchServe before version 0.7: the three `ts_*` counters by scrape, everything else
        /// as log lines.
        Legacy => "legacy",
    }
    /// Returns the mode's name.
    pub fn as_str;
}

impl Mode {
    /// The names that a file may use; `log` is an alias of `tslog`.
    pub const NAMES: [&str; 5] = ["tslog", "prometheus", "both", "log", "legacy"];

    /// Parses a mode's name, in any case; `log` is TorchServe's name for `tslog`.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name.trim().to_ascii_lowercase().as_str() {
            "tslog" | "log" => Self::Tslog,
            "prometheus" => Self::Prometheus,
            "both" => Self::Both,
            "legacy" => Self::Legacy,
            _ => return None,
        })
    }
}

/// The outputs that show a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Views {
    /// Metric logs.
    pub tslog: bool,
    /// A scrape of `/metrics`.
    pub prometheus: bool,
}

impl Views {
    /// All outputs.
    pub const ALL: Views = Views { tslog: true, prometheus: true };
}

/// The section of the file that defines a metric: what records the metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Section {
    /// `ts_metrics`: the frontend.
    Frontend,
    /// `model_metrics`: models, in the workers.
    Model,
}

/// A metric's position in its catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MetricId(pub u32);

/// One metric's definition.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSpec {
    /// Its name, unique in the file and valid for Prometheus.
    pub name: String,
    /// The section that defines it.
    pub section: Section,
    /// Its type.
    pub kind: Kind,
    /// Its unit as written in the file; not empty.
    pub unit: String,
    /// The names of its labels in the file's order; distinct and valid for Prometheus.
    pub dimensions: Vec<String>,
    /// What it counts or measures.
    pub help: String,
    /// Upper bounds of a histogram, ascending and finite; empty for the other types.
    pub buckets: Vec<f64>,
    /// The quantiles of a summary, between 0 and 1, ascending; empty for the other types.
    pub quantiles: Vec<f64>,
    /// The native buckets of a histogram, besides `buckets`.
    pub native: Option<NativeSpec>,
    /// The outputs that the metric's `modes` allow; [`Catalog::views`] combines them with the
    /// file's mode.
    pub modes: Views,
    /// Further names under which scrapes show it; metric logs do not.
    pub also_as: Vec<OtherName>,
    /// The built-in metric, if the server itself records it.
    pub builtin: Option<Builtin>,
    /// Whether the metric was created by a sample or a model instead of the file. Its series may
    /// then omit labels (the value is empty), and a series with new labels adds them to
    /// `dimensions`. It ends with its last series.
    pub detected: bool,
    /// Whether a model described the detected metric, as in Triton.
    pub described: bool,
    /// Whether the last of the labels is one for the host that the form of the file added.
    pub host_is_added: bool,
}

impl MetricSpec {
    /// Returns the names and values of a series' labels. Omits the empty labels of a detected
    /// metric: the series does not have them.
    pub(super) fn labelled<'a>(
        &'a self,
        values: &'a [String],
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        let pairs =
            self.dimensions.iter().zip(values).map(|(name, value)| (name.as_str(), value.as_str()));
        pairs.filter(|(_, value)| !self.detected || !value.is_empty())
    }

    /// Returns whether scrapes show its labels in alphabetical order, as in Triton, and not in the
    /// definition's order.
    pub(super) fn has_sorted_labels(&self) -> bool {
        self.described || self.builtin.is_some_and(Builtin::has_labels_of_triton)
    }

    /// Returns whether it is a gauge whose series is created before it is measured, and shown from
    /// then on.
    pub(super) fn begins_without_value(&self) -> bool {
        let of_worker =
            self.section == Section::Model && RECORDED_BY_WORKER.contains(&self.name.as_str());
        of_worker || matches!(self.builtin, Some(Builtin::QueueTime | Builtin::WorkerThreadTime))
    }

    /// Returns the unit of its values if it is a unit of time. Times that the server measures have
    /// a fixed unit.
    pub(super) fn time_unit(&self) -> Option<TimeUnit> {
        self.builtin.and_then(Builtin::time_unit).or_else(|| TimeUnit::from_name(&self.unit))
    }

    /// Returns the definition under a further name, with the unit and the labels of that name.
    pub(super) fn renamed(&self, other: &OtherName) -> Self {
        let name = other.name.clone();
        let unit = other.unit.as_ref().unwrap_or(&self.unit).clone();
        let help = match &other.unit {
            Some(unit) => format!("Other name of {}, in {unit}", self.name),
            None => format!("Other name of {}", self.name),
        };
        let dimensions = other.dimensions(&self.dimensions);
        Self { name, unit, help, dimensions, also_as: Vec::new(), ..self.clone() }
    }

    /// Creates the definition of a metric from its first sample.
    pub(super) fn detected(name: &str, kind: Kind, unit: &str, dimensions: Vec<String>) -> Self {
        let unit = if unit.is_empty() { "unit" } else { unit };
        Self {
            name: name.to_owned(),
            section: Section::Model,
            kind,
            unit: unit.to_owned(),
            dimensions,
            help: format!("{name} ({unit}), not defined in metrics.yaml"),
            buckets: default_buckets(kind, unit),
            quantiles: if kind == Kind::Summary { DEFAULT_QUANTILES.to_vec() } else { Vec::new() },
            native: None,
            modes: Views::ALL,
            also_as: Vec::new(),
            builtin: None,
            detected: true,
            described: false,
            host_is_added: false,
        }
    }
}

/// An error in a `metrics.yaml`. Displayed as `FILE:LINE:COLUMN: message`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}:{column}: {message}")]
pub struct CatalogError {
    /// The file's name as passed to [`Catalog::parse`].
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1.
    pub column: usize,
    /// What is wrong, with which name, and what is allowed.
    pub message: String,
}

/// What a file defines besides metrics.
#[derive(Clone, Debug, Default)]
struct Globals {
    /// `None` if the file does not set it.
    mode: Option<Mode>,
    slos: Vec<Slo>,
    tenants: Option<TenantRule>,
}

/// All metrics of one `metrics.yaml`, in its order.
#[derive(Clone, Debug)]
pub struct Catalog {
    specs: Vec<MetricSpec>,
    disabled: Vec<MetricSpec>,
    globals: Globals,
    by_name: HashMap<String, MetricId>,
    /// The position in the file of every metric that it defines.
    places: HashMap<String, usize>,
    /// The names of all metrics, including those that are switched off.
    names: Names,
}

impl Catalog {
    /// Parses the text of a `metrics.yaml`; `file` is its name in errors.
    ///
    /// A built-in metric that the file omits is switched off. One that it defines must have the
    /// type and labels with which the code records it.
    ///
    /// # Errors
    /// Returns the first error, with its position.
    pub fn parse(text: &str, file: &str) -> Result<Self, CatalogError> {
        let parsed = parse::parse(text, file)?;
        Ok(Self::new(parsed.globals, parsed.specs, parsed.disabled, parsed.places))
    }

    fn new(
        globals: Globals,
        specs: Vec<MetricSpec>,
        disabled: Vec<MetricSpec>,
        places: HashMap<String, usize>,
    ) -> Self {
        let ids = (0..).map(MetricId);
        let by_name = specs.iter().map(|spec| spec.name.clone()).zip(ids).collect();
        let mut names = Names::default();
        for spec in specs.iter().chain(&disabled) {
            names.insert(&spec.name, spec.kind);
            spec.also_as.iter().for_each(|other| names.insert_other(&other.name, spec.kind));
        }
        Self { specs, disabled, globals, by_name, places, names }
    }

    /// Returns the catalog with the metric `name` switched on or off. The metric keeps its position
    /// in the file's order. Unknown names change nothing.
    #[must_use]
    pub fn with_enabled(mut self, name: &str, enabled: bool) -> Self {
        let (from, to) = match enabled {
            true => (&mut self.disabled, &mut self.specs),
            false => (&mut self.specs, &mut self.disabled),
        };
        if let Some(at) = from.iter().position(|spec| spec.name == name) {
            let spec = from.remove(at);
            let place =
                |spec: &MetricSpec| self.places.get(&spec.name).copied().unwrap_or(usize::MAX);
            to.insert(to.partition_point(|other| place(other) <= place(&spec)), spec);
        }
        Self::new(self.globals, self.specs, self.disabled, self.places)
    }

    /// Returns the catalog with another mode.
    #[must_use]
    pub fn with_mode(mut self, mode: Mode) -> Self {
        self.globals.mode = Some(mode);
        self
    }

    /// Returns the catalog with other quantiles (ascending, between 0 and 1) for the summary
    /// `name`. Does nothing for metrics of other types.
    #[must_use]
    pub fn with_quantiles(mut self, name: &str, quantiles: &[f64]) -> Self {
        let mut all = self.specs.iter_mut().chain(&mut self.disabled);
        if let Some(spec) = all.find(|spec| spec.name == name && spec.kind == Kind::Summary) {
            spec.quantiles = quantiles.to_vec();
        }
        self
    }

    /// Returns the catalog with one more metric, which must not be in it yet.
    #[must_use]
    pub fn with_metric(mut self, spec: MetricSpec) -> Self {
        self.specs.push(spec);
        Self::new(self.globals, self.specs, self.disabled, self.places)
    }

    /// Returns the catalog without the active metric of this name.
    pub(super) fn without(mut self, name: &str) -> Self {
        self.specs.retain(|spec| spec.name != name);
        Self::new(self.globals, self.specs, self.disabled, self.places)
    }

    /// Returns the catalog with this definition in place of the one of the same name and type.
    pub(super) fn with_changed(mut self, spec: MetricSpec) -> Self {
        if let Some(changed) =
            self.specs.iter_mut().find(|old| old.name == spec.name && old.kind == spec.kind)
        {
            *changed = spec;
        }
        Self::new(self.globals, self.specs, self.disabled, self.places)
    }

    /// Returns the catalog of the shipped file.
    pub fn shipped() -> Self {
        Self::parse(SHIPPED, "metrics.yaml")
            .expect("the shipped metrics.yaml is valid (a test parses it)")
    }

    /// Returns how metrics leave the server; [`Mode::Both`] if neither the file nor an override
    /// sets it.
    pub fn mode(&self) -> Mode {
        self.globals.mode.unwrap_or(Mode::Both)
    }

    /// Returns whether the file or an override sets the mode.
    pub fn names_mode(&self) -> bool {
        self.globals.mode.is_some()
    }

    /// Returns the service level objectives, in the file's order.
    pub fn slos(&self) -> &[Slo] {
        &self.globals.slos
    }

    /// Returns the rule that assigns requests to tenants; `None` if tenants are not distinguished.
    pub fn tenants(&self) -> Option<&TenantRule> {
        self.globals.tenants.as_ref()
    }

    /// Warns about definitions that are valid but probably unintended: a file without active
    /// metrics, or a metric that no code records and whose name is almost the name of a recorded
    /// one.
    pub fn warnings(&self) -> Vec<String> {
        warnings::of(self)
    }

    /// Returns the outputs that show a metric: those that both the catalog's mode and the metric's
    /// `modes` allow.
    pub fn views(&self, spec: &MetricSpec) -> Views {
        let Views { tslog, prometheus } = spec.modes;
        match self.mode() {
            Mode::Tslog => Views { tslog, prometheus: false },
            Mode::Prometheus => Views { tslog: false, prometheus },
            Mode::Both => Views { tslog, prometheus },
            Mode::Legacy => {
                let scraped = spec.builtin.is_some_and(Builtin::is_by_alias);
                Views { tslog: tslog && !scraped, prometheus: prometheus && scraped }
            }
        }
    }

    /// Returns the metrics that the file switches off (`enabled: false`).
    pub fn disabled(&self) -> &[MetricSpec] {
        &self.disabled
    }

    /// Returns whether the file defines this metric and switches it off.
    pub fn is_disabled(&self, name: &str) -> bool {
        self.disabled.iter().any(|spec| spec.name == name)
    }

    /// Checks that a metric's names in a scrape are free. Returns an error that names the metric it
    /// collides with.
    pub(super) fn check_collisions(&self, name: &str, kind: Kind) -> Result<(), String> {
        self.names.check(name, kind)
    }

    /// Iterates over all metrics with their ids, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (MetricId, &MetricSpec)> {
        (0..).map(MetricId).zip(&self.specs)
    }

    /// Returns the number of metrics.
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Returns whether the catalog has no active metric.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Returns the definition of a metric; `None` for an id of another catalog.
    pub fn get(&self, id: MetricId) -> Option<&MetricSpec> {
        self.specs.get(usize::try_from(id.0).ok()?)
    }

    /// Returns the metric of this name.
    pub fn find(&self, name: &str) -> Option<(MetricId, &MetricSpec)> {
        let id = *self.by_name.get(name)?;
        Some((id, self.get(id)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::default_buckets::SECOND_BUCKETS;
    use super::*;
    use proptest::prelude::*;

    fn error(text: &str) -> String {
        Catalog::parse(text, "m.yaml").unwrap_err().to_string()
    }

    fn check(text: &str, expected: &str) {
        let message = error(text);
        let shown: String = text.chars().take(200).collect();
        assert!(message.contains(expected), "{shown}\ngave: {message}\nwant: {expected}");
    }

    #[test]
    fn the_shipped_file_defines_every_builtin_and_nothing_unrecorded() {
        let catalog = Catalog::shipped();
        let defined: Vec<Builtin> = catalog.iter().filter_map(|(_, spec)| spec.builtin).collect();
        let disabled: Vec<Builtin> =
            catalog.disabled().iter().filter_map(|spec| spec.builtin).collect();
        for builtin in Builtin::ALL {
            let known = defined.contains(builtin) || disabled.contains(builtin);
            assert!(known, "{} is missing in metrics.yaml", builtin.name());
        }
        for spec in catalog.iter().map(|(_, spec)| spec).chain(catalog.disabled()) {
            let Some(builtin) = spec.builtin else { continue };
            assert_eq!(
                (spec.kind, &*spec.buckets),
                (builtin.kind(), builtin.buckets()),
                "{}",
                spec.name
            );
            assert_eq!(spec.dimensions, builtin.dimensions(), "{}", spec.name);
            if let Some(unit) = builtin.unit() {
                assert_eq!(TimeUnit::from_name(&spec.unit), Some(unit), "{}", spec.name);
            }
        }
        for (id, spec) in catalog.iter() {
            let by_worker = spec.name == STATE_BYTES || RECORDED_BY_WORKER.contains(&&*spec.name);
            let by_engine = RECORDED_BY_ENGINES.contains(&&*spec.name)
                || RECORDED_BY_TEXT_MODELS.contains(&&*spec.name);
            let recorded = spec.builtin.is_some() || by_worker || by_engine;
            assert!(recorded, "{} is not recorded by any code", spec.name);
            assert!(!spec.help.is_empty() && spec.also_as.is_empty());
            assert_eq!(catalog.find(&spec.name).unwrap().0, id);
        }
        assert_eq!(catalog.mode(), Mode::Both);
    }

    #[test]
    fn switching_a_metric_on_keeps_its_position() {
        let text = "ts_metrics:\n  gauge:\n    - {name: A, unit: m}\n    - {name: B, unit: m, \
                    enabled: false}\n    - {name: C, unit: m}\n";
        let names = |catalog: &Catalog| {
            catalog.iter().map(|(_, spec)| spec.name.clone()).collect::<String>()
        };
        let catalog = Catalog::parse(text, "m.yaml").unwrap().with_enabled("B", true);
        assert_eq!(names(&catalog), "ABC");
        assert_eq!(names(&catalog.with_enabled("A", false).with_enabled("A", true)), "ABC");
    }

    #[test]
    fn parses_the_form_of_the_shipped_file() {
        let text = r#"
mode: tslog
dimensions:
  model_name: &model_name "model"
  host: &host "host"
ts_metrics:
  counter:
    - name: Orders
      unit: Count
      dimensions: [*model_name, *host]
  gauge:
model_metrics:
  histogram:
    - {name: Size, unit: B, dimensions: [*host], buckets: [1, 2.5, 1e3], help: "how large"}
    - {name: Plain, unit: s}
"#;
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        assert_eq!(catalog.mode(), Mode::Tslog);
        let (id, orders) = catalog.find("Orders").unwrap();
        assert_eq!(orders.dimensions, ["model", "host"]);
        assert_eq!((orders.kind, orders.section), (Kind::Counter, Section::Frontend));
        assert_eq!(catalog.get(id), Some(orders));
        let size = catalog.find("Size").unwrap().1;
        assert_eq!(
            (size.section, size.buckets.as_slice()),
            (Section::Model, &[1.0, 2.5, 1000.0][..])
        );
        assert_eq!(catalog.find("Plain").unwrap().1.buckets, SECOND_BUCKETS);
        assert!(catalog.find("other").is_none());
    }

    #[test]
    fn modes_and_switches_decide_which_views_show_a_metric() {
        let text = "mode: both\nts_metrics:\n  counter:\n    - {name: \
                    ts_inference_requests_total, unit: Count, dimensions: [model_name, \
                    model_version, hostname]}\nmodel_metrics:\n  gauge:\n    - {name: A, unit: \
                    ms, modes: [prometheus]}\n    - {name: B, unit: ms, enabled: false}\n  \
                    summary:\n    - {name: C, unit: ms}\n";
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        let views = |catalog: &Catalog, name: &str| {
            let Views { tslog, prometheus } = catalog.views(catalog.find(name).unwrap().1);
            (tslog, prometheus)
        };
        assert_eq!((views(&catalog, "A"), views(&catalog, "C")), ((false, true), (true, true)));
        assert_eq!(catalog.find("C").unwrap().1.quantiles, DEFAULT_QUANTILES);
        assert!(catalog.find("B").is_none() && catalog.disabled()[0].name == "B");
        let catalog =
            catalog.with_enabled("B", true).with_enabled("C", false).with_mode(Mode::Legacy);
        assert!(catalog.find("C").is_none());
        assert_eq!(views(&catalog, "B"), (true, false));
        assert_eq!(views(&catalog, "ts_inference_requests_total"), (false, true));
        assert_eq!(views(&catalog.with_mode(Mode::Tslog), "A"), (false, false));
    }

    #[test]
    fn parses_torchserves_list_of_dimensions() {
        let text = "dimensions:\n  - &model_name \"ModelName\"\n  - &level \
                    \"Level\"\nmodel_metrics:\n  gauge:\n    - name: T\n      unit: ms\n      \
                    dimensions: [*model_name, *level]\n";
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        assert_eq!(catalog.find("T").unwrap().1.dimensions, ["ModelName", "Level", "Hostname"]);
    }

    /// TorchServe appends the label to metrics of models, but not to metrics of the frontend.
    #[test]
    fn torchserves_list_adds_a_host_label_to_model_metrics() {
        let file = |dimensions: &str, labels: &str| {
            let metric = |name: &str| {
                format!("  gauge:\n    - {{name: {name}, unit: ms, dimensions: [{labels}]}}\n")
            };
            let text = format!(
                "ts_metrics:\n{}model_metrics:\n{}dimensions: {dimensions}\n",
                metric("F"),
                metric("M")
            );
            let catalog = Catalog::parse(&text, "m.yaml").unwrap();
            ["F", "M"].map(|name| catalog.find(name).unwrap().1.dimensions.join(","))
        };
        assert_eq!(file("[a]", "a"), ["a", "a,Hostname"]);
        assert_eq!(file("[a]", ""), ["", "Hostname"]);
        for host in ["Hostname", "hostname", "host"] {
            assert_eq!(file("[a]", host), [host, host]);
        }
        assert_eq!(file("{a: a}", "a"), ["a", "a"]);
        assert_eq!(file("", "a"), ["a", "a"]);
    }

    #[test]
    fn warns_about_probably_unintended_definitions() {
        let warnings = |text: &str| Catalog::parse(text, "m.yaml").unwrap().warnings();
        let one = |section: &str, name: &str| {
            warnings(&format!("{section}:\n  counter: [{{name: {name}, unit: s}}]\n"))
        };
        let [empty] = &warnings("mode: both\n")[..] else { panic!("one") };
        assert!(empty.contains("no metric is defined: /metrics"), "{empty}");
        let off = warnings("model_metrics:\n  gauge: [{name: a, unit: s, enabled: false}]\n");
        assert!(off[0].contains("every defined metric is switched off"), "{off:?}");
        let warning = "the server does not record `Request2XX`; did you mean `Requests2XX`?";
        assert_eq!(one("ts_metrics", "Request2XX"), [warning]);
        assert_eq!(one("model_metrics", "PredictonTime").len(), 1);
        for (section, name) in
            [("ts_metrics", "Orders"), ("ts_metrics", "Queue"), ("model_metrics", "Request2XX")]
        {
            assert_eq!(one(section, name), [""; 0], "{name}");
        }
        assert_eq!(one("model_metrics", "HandlerMethodTime"), [""; 0]);
        assert_eq!(Catalog::shipped().warnings(), [""; 0]);
        assert_eq!(warnings(include_str!("testdata/torchserve.yaml")), [""; 0]);
    }

    #[test]
    fn metrics_of_the_worker_runtime_allow_only_its_labels() {
        let file = |entry: &str| format!("model_metrics:\n  gauge:\n    - {{{entry}}}\n");
        check(
            &file("name: HandlerTime, unit: ms, dimensions: [ModelName, Foo]"),
            "m.yaml:3:61: model_metrics.gauge[0].dimensions[1]: the label `Foo` is not allowed on \
             `HandlerTime`, because workers have no value for it; allowed are `ModelName`, \
             `model_name`, `model`, `ModelVersion`, ",
        );
        let later = "dimensions: [Foo], name: PredictionTime, unit: ms";
        check(
            &file(later),
            "m.yaml:3:7: model_metrics.gauge[0]: the label `Foo` is not allowed on \
             `PredictionTime`",
        );
        let designed = "name: HandlerTime, unit: ms, dimensions: [model, version, host]";
        assert!(Catalog::parse(&file(designed), "m.yaml").is_ok());
        assert!(Catalog::parse(&file("name: Mine, unit: ms, dimensions: [Foo]"), "m.yaml").is_ok());
    }

    #[test]
    fn the_error_of_an_unknown_anchor_lists_the_known_ones() {
        let text = "dimensions:\n  - &level \"Level\"\n  - &host Hostname\nmodel_metrics:\n  \
                    gauge:\n    - name: a\n      unit: s\n      dimensions: [*level, *nope]\n";
        assert_eq!(
            error(text),
            "m.yaml:8:28: unknown anchor `nope`; anchors defined before it: `level`, `host`"
        );
    }

    #[test]
    fn the_default_help_is_that_of_the_shipped_file() {
        let text = "ts_metrics:\n  gauge:\n    - {name: CPUUtilization, unit: Percent, \
                    dimensions: [Level, Hostname]}\n    - {name: MemoryUsed, unit: M, dimensions: \
                    [Level, Hostname], help: mine}\nmodel_metrics:\n  gauge:\n    - {name: \
                    HandlerTime, unit: ms}\n    - {name: own, unit: s}\n  histogram:\n    - \
                    {name: PredictionTime, unit: s}\n";
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        let shipped = Catalog::shipped();
        let help = |catalog: &Catalog, name: &str| catalog.find(name).unwrap().1.help.clone();
        for name in ["CPUUtilization", "HandlerTime"] {
            assert_eq!(help(&catalog, name), help(&shipped, name));
        }
        let others = ["MemoryUsed", "own", "PredictionTime"].map(|name| help(&catalog, name));
        assert_eq!(others, ["mine", "own (s)", "PredictionTime (s)"]);
    }

    #[test]
    fn default_buckets_depend_on_the_unit() {
        let buckets = |unit: &str| {
            let text = format!("model_metrics:\n  histogram: [{{name: a, unit: '{unit}'}}]\n");
            Catalog::parse(&text, "m.yaml").unwrap().find("a").unwrap().1.buckets.clone()
        };
        assert_eq!(buckets("Percent").last(), Some(&100.0));
        assert_eq!(buckets("ms"), MILLISECOND_BUCKETS);
        assert_eq!(buckets("Items"), SECOND_BUCKETS);
    }

    #[test]
    fn a_builtin_that_the_file_omits_is_not_in_the_catalog() {
        let catalog = Catalog::parse("mode: prometheus\n", "m.yaml").unwrap();
        assert!(catalog.is_empty());
    }

    #[test]
    fn errors_give_the_position_the_name_and_the_allowed_values() {
        check(
            "mod: tslog\n",
            "m.yaml:1:1: unknown key `mod`; allowed are `mode`, `dimensions`, `slos`, `tenants`, \
             `ts_metrics`, `model_metrics`",
        );
        check("mode: all\n", "m.yaml:1:7: ");
        check(
            "mode: all\n",
            "unknown mode `all`; allowed are `tslog`, `prometheus`, `both`, `log`, `legacy`",
        );
        check("ts_metrics:\n  counters: []\n", "m.yaml:2:3: ");
        check(
            "ts_metrics:\n  counters: []\n",
            "unknown key `counters`; allowed are `counter`, `gauge`, `histogram`, `summary`",
        );
        let one = |entry: &str| format!("ts_metrics:\n  counter:\n    - {entry}\n");
        check(&one("{name: a, unit: ms, colour: red}"), "m.yaml:3:27: ");
        check(
            &one("{name: a, unit: ms, colour: red}"),
            "unknown key `colour`; allowed are `name`, `unit`, `dimensions`, `help`, `buckets`, \
             `quantiles`, `native`, `modes`, `also_as`, `enabled`",
        );
        check(&one("{name: , unit: ms}"), "a metric's name is empty");
        check(&one("{name: 2xx, unit: ms}"), "`2xx` is not a valid metric name");
        check(&one("{name: 'a b', unit: ms}"), "m.yaml:3:14: ");
        check(&one("{name: a}"), "metric `a` has no unit");
        check(&one("{unit: ms}"), "a metric has no name");
        check(&one("{name: a, name: b, unit: ms}"), "key `name` is given twice");
        check(&one("{name: a, unit: ''}"), "a metric's unit is empty");
        check(&one("{name: a, unit: ms, dimensions: [b-c]}"), "`b-c` is not a valid label name");
        check(&one("{name: a, unit: ms, dimensions: [__b]}"), "`__b` is not a valid label name");
        check(&one("{name: a, unit: ms, dimensions: [b, b]}"), "label `b` is given twice");
        check(
            &one("{name: a, unit: ms, buckets: [1]}"),
            "metric `a` is a counter: only a histogram has buckets",
        );
        check(&one("a"), "m.yaml:3:7: ");
        check(
            "model_metrics:\n  histogram:\n    - {name: a, unit: s, buckets: [2, 1]}\n",
            "m.yaml:3:39: ",
        );
        check(
            "model_metrics:\n  histogram:\n    - {name: a, unit: s, buckets: [.inf]}\n",
            "a bucket must be a finite number",
        );
        check(
            "model_metrics:\n  histogram:\n    - {name: a, unit: s, dimensions: [le]}\n",
            "label `le` is reserved",
        );
        check(
            &one("{name: a, unit: ms, quantiles: [0.5]}"),
            "metric `a` is a counter: only a summary has quantiles",
        );
        check(
            "model_metrics:\n  summary:\n    - {name: a, unit: s, quantiles: [1.5]}\n",
            "between 0 and 1",
        );
        check(&one("{name: a, unit: ms, modes: [graphite]}"), "unknown mode `graphite`");
        check(
            &one("{name: a, unit: ms, modes: []}"),
            "switch the metric off with `enabled: false`",
        );
        check(&one("{name: a, unit: ms, enabled: maybe}"), "allowed are `true`, `false`");
        check("dimensions:\n  - 'x y'\n", "m.yaml:2:5: ");
        check("dimensions:\n  a: 'x y'\n", "m.yaml:2:6: ");
        check("ts_metrics: [1\n", "m.yaml:");
        check("", "m.yaml:1:1: ");
    }

    #[test]
    fn numbers_may_have_more_than_64_bits() {
        let text = "model_metrics:\n  histogram:\n    - {name: a, unit: B, buckets: \
                    [-99999999999999999999, 99999999999999999999]}\n";
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        assert_eq!(catalog.find("a").unwrap().1.buckets, [-1e20, 1e20]);
        let wrong = "mode: 99999999999999999999\n";
        check(wrong, "unknown mode `99999999999999999999`; allowed are `tslog`");
    }

    #[test]
    fn refuses_texts_over_the_limits() {
        check("# only a comment\n", "m.yaml:2:1: found nothing where a mapping with mode");
        check("---\nmode: both\n---\nmode: both\n", "m.yaml:1:1: ");
        check(&format!("# {}\n", "x".repeat(MAX_BYTES)), "the file has more than 1048576 bytes");
        check(
            &format!("mode: both\nx: {}", "[".repeat(400_000)),
            "m.yaml:2:1004: lists and mappings are nested",
        );
        let deep = format!("x: {}1{}\n", "[".repeat(900), "]".repeat(900));
        check(&deep, "unknown key `x`");
        check(&format!("dimensions: {deep}").replace("x: ", ""), "expected");
        check(&format!("{}a", "- ".repeat(300_000)), "m.yaml:");
        let metric =
            |entry: &str| format!("model_metrics:\n  gauge:\n    - {{name: a, unit: {entry}}}\n");
        check(
            &metric(&format!(
                "s, dimensions: [{}]",
                (0..65).map(|n| format!("l{n},")).collect::<String>()
            )),
            "64 labels",
        );
        check(
            &metric("'a|b'"),
            "m.yaml:3:23: model_metrics.gauge[0].unit: `a|b` is not a valid unit; allowed are up \
             to 64",
        );
        check(&metric(&"s".repeat(65)), "is not a valid unit");
        check(
            &metric("s").replace("name: a", &format!("name: {}", "a".repeat(256))),
            "aaa...` is not a valid metric name",
        );
    }

    /// Each level refers to the one before ten times ("billion laughs"). Also: a long list that
    /// many metrics refer to.
    #[test]
    fn aliases_do_not_multiply_memory_or_time() {
        let levels = (1..10)
            .map(|at| format!("  l{at}: &l{at} [{}]\n", format!("*l{}, ", at - 1).repeat(10)));
        let laughs: String = ["  l0: &l0 [lol]\n".to_owned()].into_iter().chain(levels).collect();
        check(
            &format!("dimensions:\n{laughs}"),
            "m.yaml:2:7: dimensions.l0: found a list where a label name is expected",
        );
        let levels = laughs.replace("  l", "- &").replace(": &", "x &");
        check(&format!("dimensions:\n{levels}"), "m.yaml:");
        let key = format!("dimensions:\n  ? [{}]\n  : x\n", "a, ".repeat(9));
        check(&key, "found a list where an alias is expected");
        let labels: Vec<String> = (0..60).map(|at| format!("l{at}")).collect();
        let metrics: String = (0..9_000)
            .map(|at| format!("    - {{name: m{at}, unit: s, dimensions: *d}}\n"))
            .collect();
        let first = format!("    - {{name: a, unit: s, dimensions: &d [{}]}}\n", labels.join(", "));
        let many = format!("model_metrics:\n  gauge:\n{first}{metrics}");
        assert_eq!(Catalog::parse(&many, "m.yaml").unwrap().len(), 9_001);
        let more = metrics.replace("name: m", "name: n").replace("*d", "[]");
        check(&format!("{many}{more}"), "more than 10000 metrics");
    }

    #[test]
    fn refuses_metrics_whose_samples_would_have_equal_names() {
        let two = |first: (&str, &str), second: (&str, &str)| {
            let (kind, name) = first;
            let (other_kind, other) = second;
            format!(
                "ts_metrics:\n  {kind}: [{{name: {name}, unit: s}}]\nmodel_metrics:\n  \
                 {other_kind}: [{{name: {other}, unit: s}}]\n"
            )
        };
        for suffix in ["sum", "count", "bucket", "created"] {
            let name = format!("x_{suffix}");
            let expected = format!(
                "metric `{name}` collides with the histogram `x`: both would appear in a scrape \
                 as `{name}`"
            );
            check(&two(("histogram", "x"), ("counter", &name)), &expected);
            check(&two(("gauge", &name), ("histogram", "x")), "metric `x` collides with the gauge");
        }
        check(&two(("counter", "x_total"), ("gauge", "x")), "would appear in a scrape as `x`");
        check(
            &two(("gauge", "x"), ("counter", "x_total")),
            "m.yaml:4:20: model_metrics.counter[0].name: metric `x_total`",
        );
        check(&two(("summary", "x"), ("summary", "x_count")), "collides with the summary `x`");
        assert!(Catalog::parse(&two(("gauge", "x"), ("gauge", "x_sum")), "m.yaml").is_ok());
        assert!(Catalog::parse(&two(("summary", "x"), ("gauge", "x_bucket")), "m.yaml").is_ok());
    }

    #[test]
    fn parses_further_names() {
        let text = "ts_metrics:\n  histogram:\n    - name: \
                    pharos_ensemble_step_duration_seconds\n      unit: Seconds\n      dimensions: \
                    [model, version, step, member]\n      also_as: [steps, {name: \
                    pharos_ensemble_step_duration_us, unit: us}]\nmodel_metrics:\n  gauge:\n    - \
                    {also_as: b, name: a, unit: m}\n";
        let catalog = Catalog::parse(text, "m.yaml").unwrap();
        let names = |name: &str| {
            let names = &catalog.find(name).unwrap().1.also_as;
            names
                .iter()
                .map(|other| (other.name.clone(), other.unit.clone(), other.digits))
                .collect::<Vec<_>>()
        };
        assert_eq!(names("a"), [("b".to_owned(), None, 0)]);
        let old = ("pharos_ensemble_step_duration_us".to_owned(), Some("us".to_owned()), 6);
        assert_eq!(
            names("pharos_ensemble_step_duration_seconds"),
            [("steps".to_owned(), None, 0), old]
        );
        // The name of a metric that a sample creates must be free as well.
        assert!(catalog.check_collisions("steps_sum", Kind::Gauge).is_err());
    }

    #[test]
    fn errors_of_labels_of_further_names_say_what_is_allowed() {
        let of = |labels: &str, dimensions: &str| {
            format!(
                "model_metrics:\n  histogram:\n    - {{name: a, unit: ms, dimensions: \
                 [{dimensions}], also_as: {{name: b, labels: {labels}}}}}\n"
            )
        };
        let wrong = |labels: &str, expected: &str| check(&of(labels, "shop, till"), expected);
        assert!(Catalog::parse(&of("{till: shop, shop: till}", "shop, till"), "m").is_ok());
        assert!(Catalog::parse(&of("{shop: shop, s: shop, t: {value: x}}", "shop"), "m").is_ok());
        wrong(
            "{store: shpo}",
            "the label `store` of `b` in `also_as` has its value from `shpo`, which is not a label \
             of `a`: allowed are `shop`, `till`; a fixed text is {value: TEXT}",
        );
        wrong(
            "{till: shop}",
            "the label `till` of `b` in `also_as` collides with the label `till` of `a`; give that \
             label another name in `labels`",
        );
        wrong("{Till: {value: x}}", "collides with the label `till` of `a`");
        wrong("{le: shop}", "is reserved for the buckets of the histogram");
        wrong("{Hostname: shop}", "is reserved for the host; add `Hostname` to the dimensions of");
        wrong("{2s: shop}", "`2s` is not a valid label name");
        wrong("{s: shop, S: till}", "labels `s` and `S` differ only in case");
        wrong("{s: {value: ''}}", "`` is not a valid text of a label; allowed are 1 to 255 bytes");
        wrong("{s: {text: x}}", "unknown key `text`; allowed are `value`");
        wrong("{s: {}}", "the text of a label has no `value`");
        wrong("{s: [shop]}", "found a list where a label of the metric, or a text as");
        wrong("[shop]", "found a list where a mapping of label names to labels of the metric is");
        let built_in = |label: &str| {
            format!(
                "ts_metrics:\n  counter:\n    - {{name: nv_inference_count, unit: Count, \
                 dimensions: [model, version], also_as: {{name: b, labels: {{{label}: model}}}}}}\n"
            )
        };
        for label in ["namespace", "_team"] {
            check(&built_in(label), "series of models have `namespace` and labels");
        }
    }

    #[test]
    fn errors_of_further_names_say_what_collides() {
        let metric = |entry: &str| {
            format!("model_metrics:\n  histogram:\n    - {{name: a, unit: ms, also_as: {entry}}}\n")
        };
        let and = |entry: &str, kind: &str, other: &str| {
            format!("{}  {kind}:\n    - {{name: {other}, unit: Count}}\n", metric(entry))
        };
        check(
            &and("b", "gauge", "b"),
            "m.yaml:5:14: model_metrics.gauge[0].name: metric `b` collides with the name `b` in \
             `also_as` of a histogram: both would appear in a scrape as `b`",
        );
        check(
            &and("b", "counter", "b_count"),
            "metric `b_count` collides with the name `b` in `also_as` of a histogram: both would \
             appear in a scrape as `b_count`",
        );
        let after =
            metric("g").replace("  histogram", "  gauge:\n    - {name: g, unit: s}\n  histogram");
        check(
            &after,
            "m.yaml:5:36: model_metrics.histogram[0].also_as: the name `g` in `also_as` collides \
             with the gauge `g`: both would appear in a scrape as `g`",
        );
        check(&metric("a"), "the name `a` in `also_as` collides with the histogram `a`");
        check(&metric("[b, b]"), "the name `b` in `also_as` is given twice");
        check(
            &metric("nv_inference_count"),
            "is reserved for the built-in metric `nv_inference_count`",
        );
        check(&metric("__b"), "`__b` begins with `__`, which is reserved");
        check(&metric("'2 b'"), "`2 b` is not a valid metric name");
        check(&metric("{unit: ms}"), "an entry of `also_as` has no name");
        check(
            &metric("{name: b, help: x}"),
            "unknown key `help`; allowed are `name`, `unit`, `labels`",
        );
        check(
            &metric("{name: b, unit: Pieces}"),
            "`Pieces` is not a unit of time; allowed are `Nanoseconds`, ",
        );
        check(&metric("[a1, a2, a3, a4, a5, a6, a7, a8, a9]"), "at most 8 names in `also_as`");
        check(
            &metric("[[b]]"),
            "found a list where a metric's name or a mapping with name and unit is expected",
        );
        check(
            &metric("{name: b, unit: s}").replace("unit: ms", "unit: Count"),
            "`also_as` gives `b` a unit of time, but the unit of `a` is `Count`; omit the unit \
             there",
        );
        let old = "ts_metrics:\n  histogram:\n    - {name: \
                   nv_inference_queue_duration_histogram_us, unit: us}\n";
        check(
            old,
            "m.yaml:3:14: ts_metrics.histogram[0].name: \
             `nv_inference_queue_duration_histogram_us` is now named \
             `pharos_queue_duration_seconds`, with unit and buckets in `Seconds`; its `also_as` \
             can give it the old name as well",
        );
        // Names of samples that a setting, or objectives, can add to the scrape.
        check(
            &metric("pharos_batch_size_sum"),
            "is reserved for the built-in metric `pharos_batch_size`",
        );
        let requests = metric("pharos_slo_requests").replace("histogram", "gauge");
        check(&requests, "is reserved for the built-in metric `pharos_slo_requests_total`");
        check(
            &metric("{name: {name: b, unit: s}}"),
            "found a mapping where a metric's name is expected",
        );
    }

    /// Values and buckets of these metrics are in the unit of the code, whatever the file says.
    #[test]
    fn the_unit_of_measured_times_is_fixed() {
        let metric = |kind: &str, name: &str, unit: &str| {
            format!(
                "ts_metrics:\n  {kind}:\n    - {{name: {name}, unit: {unit}, dimensions: [model, \
                 version]}}\n"
            )
        };
        for (kind, name, unit, fixed) in [
            ("histogram", "pharos_queue_duration_seconds", "Microseconds", "Seconds"),
            ("histogram", "nv_inference_first_response_histogram_ms", "s", "Milliseconds"),
            ("counter", "nv_inference_request_duration_us", "ms", "Microseconds"),
            ("counter", "nv_inference_queue_duration_us", "Count", "Microseconds"),
        ] {
            let expected = format!("the unit of `{name}` is `{unit}`; allowed is `{fixed}`");
            check(&metric(kind, name, unit), &expected);
            assert!(Catalog::parse(&metric(kind, name, fixed), "m.yaml").is_ok(), "{name}");
        }
        let text = metric("histogram", "pharos_queue_duration_seconds", "s");
        assert!(Catalog::parse(&text, "m.yaml").is_ok(), "abbreviations are allowed");
    }

    #[test]
    fn refuses_reserved_and_confusable_names() {
        let gauge = |entry: &str| format!("model_metrics:\n  gauge:\n    - {{name: {entry}}}\n");
        check(&gauge("__a, unit: s"), "begins with `__`, which is reserved");
        check(
            &gauge("pharos_a, unit: s"),
            "no built-in metric is named `pharos_a`, and names that begin with `pharos_`",
        );
        let counter =
            |name: &str| format!("ts_metrics:\n  counter:\n    - {{name: {name}, unit: Count}}\n");
        check(
            &counter("nv_inference_request_sucess"),
            "m.yaml:3:14: ts_metrics.counter[0].name: no built-in metric is named \
             `nv_inference_request_sucess`, and names in ts_metrics that begin with `nv_` are \
             reserved for built-in metrics; the closest name is `nv_inference_request_success`",
        );
        check(
            &counter("ts_inference_request_total"),
            "the closest name is `ts_inference_requests_total`",
        );
        check(&counter("pharos_batch_total"), "the closest name is `pharos_batches_total`");
        assert!(
            Catalog::parse(&gauge("ts_handler_preprocess, unit: Milliseconds"), "m.yaml").is_ok()
        );
        check(
            &gauge("cpuutilization, unit: s"),
            "differs only in case from the built-in metric `CPUUtilization`",
        );
        check(
            &gauge("a, unit: s, dimensions: [Hostname, hostname]"),
            "labels `Hostname` and `hostname` differ only in case",
        );
        check(
            "model_metrics:\n  summary:\n    - {name: a, unit: s, dimensions: [Quantile]}\n",
            "label `Quantile` is reserved",
        );
    }

    /// The file of TorchServe 0.12: the list form of dimensions, label names in two styles.
    #[test]
    fn parses_torchserves_own_file() {
        let text = include_str!("testdata/torchserve.yaml");
        let catalog = Catalog::parse(text, "metrics.yaml").unwrap();
        assert_eq!((catalog.len(), catalog.mode()), (21, Mode::Both));
        assert_eq!(catalog.iter().filter(|(_, spec)| spec.builtin.is_some()).count(), 19);
        assert_eq!(
            catalog.find("WorkerLoadTime").unwrap().1.dimensions,
            ["WorkerName", "Level", "Hostname"]
        );
        assert_eq!(
            catalog.find("HandlerTime").unwrap().1.dimensions,
            ["ModelName", "Level", "Hostname"]
        );
    }

    #[test]
    fn names_are_unique_over_sections_and_types() {
        let text = "ts_metrics:\n  counter:\n    - {name: a, unit: s}\nmodel_metrics:\n  gauge:\n    - \
             name: a\n      unit: s\n";
        assert_eq!(
            error(text),
            "m.yaml:6:13: model_metrics.gauge[0].name: metric `a` is defined twice"
        );
    }

    #[test]
    fn a_builtin_keeps_its_section_type_and_labels() {
        check(
            "ts_metrics:\n  gauge:\n    - {name: nv_inference_count, unit: c}\n",
            "m.yaml:3:14: ",
        );
        check(
            "ts_metrics:\n  gauge:\n    - {name: nv_inference_count, unit: c}\n",
            "must be a counter in ts_metrics",
        );
        check(
            "model_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c}\n",
            "must be a counter in ts_metrics",
        );
        check(
            "ts_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c, dimensions: \
             [model]}\n",
            "the dimensions of the built-in metric `nv_inference_count` must be [model, version]",
        );
        let other_order = "ts_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c, \
                           dimensions: [version, model]}\n";
        assert!(Catalog::parse(other_order, "m.yaml").is_ok());
    }

    proptest! {
        #[test]
        fn a_damaged_file_never_panics(at in 0..SHIPPED.len(), cut in 0..40usize, put in "[\\[\\]{}:&*!\\-\\n\\t \"'a-z0-9|>%@#,?]{0,12}") {
            let mut bytes = SHIPPED.as_bytes().to_vec();
            let end = (at + cut).min(bytes.len());
            bytes.splice(at..end, put.bytes());
            if let Ok(text) = String::from_utf8(bytes) {
                let _ = Catalog::parse(&text, "m.yaml");
            }
        }
    }
}
