//! `metrics.yaml` as checked data: which metrics exist, of which type, with which labels.
//!
//! Frontend and workers parse the same file, and a metric is known between them by its place in it ([`MetricId`]);
//! [`Catalog::fingerprint`] tells whether both have read the same. A catalog that exists is valid.

mod fields;
mod node;
mod parse;

use std::collections::HashMap;
use std::fmt;

use super::builtin::Builtin;

/// The shipped `metrics.yaml`.
pub const SHIPPED: &str = include_str!("../../metrics.yaml");

/// Upper bounds of a histogram that names none: Prometheus' customary ones, in seconds.
pub const DEFAULT_BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// How metrics leave the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Log lines in TorchServe's form.
    Tslog,
    /// A scrape of `/metrics`.
    Prometheus,
}

/// Who records a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Section {
    /// `ts_metrics`: the frontend.
    Frontend,
    /// `model_metrics`: models, in the workers.
    Model,
}

/// The type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Only grows; a sample is an increment.
    Counter,
    /// Goes up and down; a sample is the new value.
    Gauge,
    /// A distribution; a sample is an observation.
    Histogram,
}

impl Kind {
    /// The type's name in `metrics.yaml` and in `# TYPE` lines.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric's place in the catalog that defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MetricId(pub u32);

/// One metric's definition.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricSpec {
    /// Its name, unique in the file and valid for Prometheus.
    pub name: String,
    /// Who records it.
    pub section: Section,
    /// Its type.
    pub kind: Kind,
    /// Its unit as written; not empty.
    pub unit: String,
    /// Its labels' names in the order written: distinct and valid for Prometheus.
    pub dimensions: Vec<String>,
    /// What it counts or measures.
    pub help: String,
    /// Upper bounds of a histogram, ascending and finite; empty for the other types.
    pub buckets: Vec<f64>,
    /// The code that records it, if it is the server's own.
    pub builtin: Option<Builtin>,
}

/// A `metrics.yaml` that is not valid. Displayed as `FILE:LINE:COLUMN: message`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CatalogError {
    /// The file's name as given.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1.
    pub column: usize,
    /// What is wrong, with which name, and what is allowed.
    pub message: String,
}

impl fmt::Display for CatalogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: {}", self.file, self.line, self.column, self.message)
    }
}

impl std::error::Error for CatalogError {}

/// All metrics of one `metrics.yaml`, in its order.
#[derive(Clone, Debug)]
pub struct Catalog {
    mode: Mode,
    specs: Vec<MetricSpec>,
    by_name: HashMap<String, MetricId>,
    fingerprint: u64,
}

impl Catalog {
    /// Parses the text of a `metrics.yaml`; `file` is its name in errors.
    ///
    /// A built-in metric that the file leaves out is switched off. One that it defines must have the type and labels with
    /// which the code records it.
    ///
    /// # Errors
    /// The first thing that is wrong, with its position.
    pub fn parse(text: &str, file: &str) -> Result<Self, CatalogError> {
        let parsed = parse::parse(text, file)?;
        let ids = (0..).map(MetricId);
        let by_name = parsed.specs.iter().map(|spec| spec.name.clone()).zip(ids).collect();
        let fingerprint = fingerprint(&parsed.specs);
        Ok(Self { mode: parsed.mode, specs: parsed.specs, by_name, fingerprint })
    }

    /// The catalog of the shipped file.
    pub fn shipped() -> Self {
        Self::parse(SHIPPED, "metrics.yaml").expect("the shipped metrics.yaml is valid (a test parses it)")
    }

    /// How metrics leave the server.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Every metric with its id, in the file's order.
    pub fn iter(&self) -> impl Iterator<Item = (MetricId, &MetricSpec)> {
        (0..).map(MetricId).zip(&self.specs)
    }

    /// The number of metrics.
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Whether no metric is defined.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// The definition of a metric; `None` for an id of another catalog.
    pub fn get(&self, id: MetricId) -> Option<&MetricSpec> {
        self.specs.get(usize::try_from(id.0).ok()?)
    }

    /// The metric of this name.
    pub fn find(&self, name: &str) -> Option<(MetricId, &MetricSpec)> {
        let id = *self.by_name.get(name)?;
        Some((id, self.get(id)?))
    }

    /// A number that differs between catalogs whose ids or labels mean different things (FNV-1a, 64 bits).
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

fn fingerprint(specs: &[MetricSpec]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |text: &str| {
        // 0xff never occurs in UTF-8: it keeps "ab","c" apart from "a","bc".
        for byte in text.bytes().chain([0xff]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    };
    for spec in specs {
        add(&spec.name);
        add(spec.kind.as_str());
        add(if spec.section == Section::Model { "model" } else { "frontend" });
        spec.dimensions.iter().for_each(|label| add(label));
        add("");
    }
    hash
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn error(text: &str) -> String {
        Catalog::parse(text, "m.yaml").unwrap_err().to_string()
    }

    fn check(text: &str, expected: &str) {
        let message = error(text);
        assert!(message.contains(expected), "{text}\ngave: {message}\nwant: {expected}");
    }

    #[test]
    fn the_shipped_file_and_the_enum_hold_together() {
        let catalog = Catalog::shipped();
        let defined: Vec<Builtin> = catalog.iter().filter_map(|(_, spec)| spec.builtin).collect();
        for builtin in Builtin::ALL {
            assert!(defined.contains(&builtin), "{} is missing in metrics.yaml", builtin.name());
        }
        for (id, spec) in catalog.iter() {
            // The worker's own runtime records one metric, by its name: it has no enum of built-ins.
            let recorded = spec.builtin.is_some() || spec.name == "PredictionTime";
            assert!(recorded, "{} is recorded by no code", spec.name);
            assert!(!spec.help.is_empty());
            assert_eq!(catalog.find(&spec.name).unwrap().0, id);
        }
        assert_eq!(catalog.mode(), Mode::Prometheus);
    }

    #[test]
    fn the_designed_form_is_read() {
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
        assert_eq!((size.section, size.buckets.as_slice()), (Section::Model, &[1.0, 2.5, 1000.0][..]));
        assert_eq!(catalog.find("Plain").unwrap().1.buckets, DEFAULT_BUCKETS);
        assert!(catalog.find("other").is_none());
    }

    #[test]
    fn a_file_without_a_builtin_leaves_it_out() {
        let catalog = Catalog::parse("mode: prometheus\n", "m.yaml").unwrap();
        assert!(catalog.is_empty());
    }

    #[test]
    fn errors_have_a_position_a_name_and_what_is_allowed() {
        check(
            "mod: tslog\n",
            "m.yaml:1:1: unknown key `mod`; allowed are `mode`, `dimensions`, `ts_metrics`, `model_metrics`",
        );
        check("mode: both\n", "m.yaml:1:7: ");
        check("mode: both\n", "unknown mode `both`; allowed are `tslog`, `prometheus`");
        check("ts_metrics:\n  counters: []\n", "m.yaml:2:3: ");
        check("ts_metrics:\n  counters: []\n", "unknown key `counters`; allowed are `counter`, `gauge`, `histogram`");
        let one = |entry: &str| format!("ts_metrics:\n  counter:\n    - {entry}\n");
        check(&one("{name: a, unit: ms, colour: red}"), "m.yaml:3:27: ");
        check(
            &one("{name: a, unit: ms, colour: red}"),
            "unknown key `colour`; allowed are `name`, `unit`, `dimensions`, `help`, `buckets`",
        );
        check(&one("{name: , unit: ms}"), "a metric's name is empty");
        check(&one("{name: 2xx, unit: ms}"), "`2xx` is no metric name");
        check(&one("{name: 'a b', unit: ms}"), "m.yaml:3:14: ");
        check(&one("{name: a}"), "metric `a` has no unit");
        check(&one("{unit: ms}"), "a metric has no name");
        check(&one("{name: a, name: b, unit: ms}"), "key `name` is given twice");
        check(&one("{name: a, unit: ''}"), "a metric's unit is empty");
        check(&one("{name: a, unit: ms, dimensions: [b-c]}"), "`b-c` is no label name");
        check(&one("{name: a, unit: ms, dimensions: [__b]}"), "`__b` is no label name");
        check(&one("{name: a, unit: ms, dimensions: [b, b]}"), "label `b` is given twice");
        check(&one("{name: a, unit: ms, buckets: [1]}"), "metric `a` is a counter: only a histogram has buckets");
        check(&one("a"), "m.yaml:3:7: ");
        check("model_metrics:\n  histogram:\n    - {name: a, unit: s, buckets: [2, 1]}\n", "m.yaml:3:39: ");
        check(
            "model_metrics:\n  histogram:\n    - {name: a, unit: s, buckets: [.inf]}\n",
            "a bucket must be a finite number",
        );
        check("model_metrics:\n  histogram:\n    - {name: a, unit: s, dimensions: [le]}\n", "label `le` is reserved");
        check("dimensions:\n  a: 'x y'\n", "m.yaml:2:6: ");
        check("ts_metrics: [1\n", "m.yaml:");
        check("", "m.yaml:1:1: ");
    }

    #[test]
    fn names_are_unique_over_sections_and_types() {
        let text = "ts_metrics:\n  counter:\n    - {name: a, unit: s}\nmodel_metrics:\n  gauge:\n    - name: a\n      unit: s\n";
        assert_eq!(error(text), "m.yaml:6:13: model_metrics.gauge[0].name: metric `a` is defined twice");
    }

    #[test]
    fn a_builtin_keeps_its_section_type_and_labels() {
        check("ts_metrics:\n  gauge:\n    - {name: nv_inference_count, unit: c}\n", "m.yaml:3:14: ");
        check("ts_metrics:\n  gauge:\n    - {name: nv_inference_count, unit: c}\n", "must be a counter in ts_metrics");
        check(
            "model_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c}\n",
            "must be a counter in ts_metrics",
        );
        check(
            "ts_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c, dimensions: [model]}\n",
            "the dimensions of the built-in metric `nv_inference_count` must be [model, version]",
        );
        let other_order =
            "ts_metrics:\n  counter:\n    - {name: nv_inference_count, unit: c, dimensions: [version, model]}\n";
        assert!(Catalog::parse(other_order, "m.yaml").is_ok());
    }

    #[test]
    fn fingerprints_tell_catalogs_apart() {
        let of = |entry: &str| {
            let text = format!("model_metrics:\n  counter:\n    - {entry}\n");
            Catalog::parse(&text, "m.yaml").unwrap().fingerprint()
        };
        let base = of("{name: a, unit: s, dimensions: [b, c]}");
        assert_eq!(base, of("{name: a, unit: ms, dimensions: [b, c], help: x}"));
        assert_ne!(base, of("{name: a, unit: s, dimensions: [c, b]}"));
        assert_ne!(base, of("{name: ab, unit: s, dimensions: [c]}"));
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
