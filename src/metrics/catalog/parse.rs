//! Parses YAML into checked definitions: the file, its sections and their metrics. Each value is
//! checked while the YAML reader is at it, because the position is only known then.

use std::collections::HashMap;

use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess};

use super::also_as::{self, AlsoAs, OtherName};
use super::fields::{Buckets, Enabled, Help, Label, Labels, Modes, Name, Quantiles, Unit};
use super::names::{self, Names};
use super::native::Native;
use super::node::{Key, Node, Seed};
use super::slos::Slos;
use super::tenants::Tenants;
use super::{
    CatalogError, DEFAULT_QUANTILES, Globals, Kind, MetricSpec, Mode, NativeSpec,
    RECORDED_BY_WORKER, SHIPPED, Section, Views, WorkerLabel,
};
use super::{anchors, worker_labels};
use crate::builtin::Builtin;
use crate::unit::TimeUnit;

/// The content of a file, checked.
#[derive(Default)]
pub(super) struct Parsed {
    pub(super) globals: Globals,
    pub(super) specs: Vec<MetricSpec>,
    pub(super) disabled: Vec<MetricSpec>,
    /// The position in the file of each metric.
    pub(super) places: HashMap<String, usize>,
}

impl Parsed {
    fn all(&mut self) -> impl Iterator<Item = &mut MetricSpec> {
        self.specs.iter_mut().chain(&mut self.disabled)
    }

    /// Adds a host label to every metric of models that has none, as TorchServe does.
    fn append_hostname(&mut self) {
        for spec in self.all().filter(|spec| spec.section == Section::Model) {
            if !spec.dimensions.iter().any(|label| WorkerLabel::is_host(label)) {
                spec.dimensions.push("Hostname".to_owned());
                spec.host_is_added = true;
            }
        }
    }

    /// Adds the metrics of objectives and tenants that the file does not define, as the shipped
    /// file defines them.
    fn add_implied_metrics(&mut self) {
        let slos = !self.globals.slos.is_empty();
        let tenants = self.globals.tenants.is_some();
        if !slos && !tenants {
            return;
        }
        let shipped = read(SHIPPED, "").map_or(Vec::new(), |shipped| shipped.specs);
        for spec in shipped.into_iter().filter(|spec| {
            spec.builtin.is_some_and(|builtin| {
                (slos && builtin.is_of_slos()) || (tenants && builtin.is_of_tenants())
            })
        }) {
            if self.all().all(|other| other.name != spec.name) {
                self.places.insert(spec.name.clone(), self.places.len());
                self.specs.push(spec);
            }
        }
    }

    /// Fills in missing help texts: with the texts of the shipped file, or with the name and the
    /// unit.
    fn fill_help(&mut self) {
        let mut shipped = None;
        for spec in self.all().filter(|spec| spec.help.is_empty()) {
            if spec.builtin.is_some() || RECORDED_BY_WORKER.contains(&&*spec.name) {
                let shipped = shipped.get_or_insert_with(|| read(SHIPPED, "").ok());
                let same =
                    |other: &&mut MetricSpec| other.name == spec.name && other.kind == spec.kind;
                let same = shipped.as_mut().and_then(|shipped| shipped.all().find(same));
                spec.help = same.map_or_else(String::new, |same| same.help.clone());
            }
            if spec.help.is_empty() {
                spec.help = format!("{} ({})", spec.name, spec.unit);
            }
        }
    }
}

/// The longest file, in bytes, and the most metrics in it.
pub const MAX_BYTES: usize = 1 << 20;
const MAX_METRICS: usize = 10_000;

/// The deepest nesting of brackets: the YAML reader's time grows with the product of depth and
/// length. The limit is far above what files need, because brackets within quoted texts count as
/// well.
const MAX_DEPTH: usize = 1000;

/// Parses the text of a `metrics.yaml`.
pub(super) fn parse(text: &str, file: &str) -> Result<Parsed, CatalogError> {
    let mut parsed = read(text, file)?;
    parsed.add_implied_metrics();
    parsed.fill_help();
    Ok(parsed)
}

/// Parses without filling in help texts.
fn read(text: &str, file: &str) -> Result<Parsed, CatalogError> {
    check_size(text).map_err(|(line, column, message)| CatalogError {
        file: file.to_owned(),
        line,
        column,
        message,
    })?;
    let deserializer = serde_yaml::Deserializer::from_str(text);
    Seed(File).deserialize(deserializer).map_err(|error| {
        let (line, column) = error.location().map_or((1, 1), |at| (at.line(), at.column()));
        let message = error.to_string();
        let suffix = format!(" at line {line} column {column}");
        let message =
            anchors::explain(message.strip_suffix(&suffix).unwrap_or(&message), text, line);
        CatalogError { file: file.to_owned(), line, column, message }
    })
}

/// Checks limits on what would make the YAML reader slow. Returns line, column and message.
fn check_size(text: &str) -> Result<(), (usize, usize, String)> {
    if text.len() > MAX_BYTES {
        return Err((1, 1, format!("the file has more than {MAX_BYTES} bytes")));
    }
    let mut line = 1;
    let mut column = 1;
    let mut depth = 0_usize;
    for c in text.chars() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err((
                line,
                column,
                format!("lists and mappings are nested deeper than {MAX_DEPTH}"),
            ));
        }
        (line, column) = if c == '\n' { (line + 1, 1) } else { (line, column + 1) };
    }
    Ok(())
}

struct File;

impl<'de> Node<'de> for File {
    type Out = Parsed;
    fn expected(&self) -> &'static str {
        "a mapping with mode, dimensions, slos, tenants, ts_metrics and model_metrics"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut parsed = Parsed::default();
        let mut seen = Vec::new();
        let mut names = Names::default();
        let mut form = Form::Designed;
        let allowed = &["mode", "dimensions", "slos", "tenants", "ts_metrics", "model_metrics"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "mode" => parsed.globals.mode = Some(map.next_value_seed(Seed(ModeName))?),
                "slos" => parsed.globals.slos = map.next_value_seed(Seed(Slos))?,
                "tenants" => parsed.globals.tenants = Some(map.next_value_seed(Seed(Tenants))?),
                "dimensions" => form = map.next_value_seed(Seed(Aliases))?,
                _ => {
                    let section =
                        if key == "ts_metrics" { Section::Frontend } else { Section::Model };
                    let target = Target { section, parsed: &mut parsed, names: &mut names };
                    map.next_value_seed(Seed(Metrics(target)))?;
                }
            }
        }
        if form == Form::TorchServe {
            parsed.append_hostname();
        }
        Ok(parsed)
    }
}

/// The dialect of a file, recognized by its `dimensions`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// The form of TorchServe's design document and of the shipped file: a mapping, or no
    /// `dimensions`. A metric has exactly the labels that it lists.
    Designed,
    /// The form of TorchServe's files: a list. Metrics of models also get the label `Hostname`.
    TorchServe,
}

struct ModeName;

impl Node<'_> for ModeName {
    type Out = Mode;
    fn expected(&self) -> &'static str {
        "a mode, such as `both`,"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<Mode, E> {
        let allowed = Mode::NAMES.join("`, `");
        Mode::from_name(text)
            .ok_or_else(|| E::custom(format!("unknown mode `{text}`; allowed are `{allowed}`")))
    }
}

/// The `dimensions`: a mapping from aliases to label names, or TorchServe's list of label names.
/// Only the anchors in it matter, and YAML itself resolves them.
struct Aliases;

impl<'de> Node<'de> for Aliases {
    type Out = Form;
    fn expected(&self) -> &'static str {
        "a mapping of aliases to label names, or a list of label names,"
    }
    fn empty<E: de::Error>(self) -> Result<Form, E> {
        Ok(Form::Designed)
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Form, A::Error> {
        while list
            .next_element_seed(Seed(Label { metric: None, before: &mut Vec::new() }))?
            .is_some()
        {}
        Ok(Form::TorchServe)
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Form, A::Error> {
        while map.next_key_seed(Seed(AnyText))?.is_some() {
            map.next_value_seed(Seed(Label { metric: None, before: &mut Vec::new() }))?;
        }
        Ok(Form::Designed)
    }
}

/// A key whose text is ignored.
struct AnyText;

impl Node<'_> for AnyText {
    type Out = ();
    fn expected(&self) -> &'static str {
        "an alias"
    }
    fn text<E: de::Error>(self, _: &str) -> Result<(), E> {
        Ok(())
    }
}

/// The collections that parsed metrics are added to.
struct Target<'a> {
    section: Section,
    parsed: &'a mut Parsed,
    names: &'a mut Names,
}

impl Target<'_> {
    fn reborrow(&mut self) -> Target<'_> {
        Target { section: self.section, parsed: self.parsed, names: self.names }
    }
}

/// `ts_metrics` or `model_metrics`.
struct Metrics<'a>(Target<'a>);

impl<'de> Node<'de> for Metrics<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a mapping with counter, gauge, histogram and summary"
    }
    fn empty<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn mapping<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut seen = Vec::new();
        let allowed = &["counter", "gauge", "histogram", "summary"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            let kind = match key {
                "counter" => Kind::Counter,
                "gauge" => Kind::Gauge,
                "histogram" => Kind::Histogram,
                _ => Kind::Summary,
            };
            map.next_value_seed(Seed(MetricList { kind, target: self.0.reborrow() }))?;
        }
        Ok(())
    }
}

struct MetricList<'a> {
    kind: Kind,
    target: Target<'a>,
}

impl<'de> Node<'de> for MetricList<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a list of metrics"
    }
    fn empty<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn list<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        while list
            .next_element_seed(Seed(Metric { kind: self.kind, target: self.target.reborrow() }))?
            .is_some()
        {}
        Ok(())
    }
}

struct Metric<'a> {
    kind: Kind,
    target: Target<'a>,
}

#[derive(Default)]
struct Fields {
    name: Option<String>,
    unit: Option<String>,
    dimensions: Vec<String>,
    help: Option<String>,
    buckets: Option<Vec<f64>>,
    quantiles: Option<Vec<f64>>,
    native: Option<NativeSpec>,
    modes: Option<Views>,
    also_as: Vec<OtherName>,
    disabled: bool,
}

impl<'de> Node<'de> for Metric<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a metric, a mapping with name, unit and dimensions,"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut fields = Fields::default();
        let mut seen = Vec::new();
        let allowed = &[
            "name",
            "unit",
            "dimensions",
            "help",
            "buckets",
            "quantiles",
            "native",
            "modes",
            "also_as",
            "enabled",
        ];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "name" => {
                    let place = Name {
                        kind: self.kind,
                        section: self.target.section,
                        taken: self.target.names,
                    };
                    fields.name = Some(map.next_value_seed(Seed(place))?);
                }
                "unit" => fields.unit = Some(map.next_value_seed(Seed(Unit))?),
                "dimensions" => {
                    let labels = Labels { metric: fields.name.as_deref() };
                    fields.dimensions = map.next_value_seed(Seed(labels))?;
                }
                "help" => fields.help = Some(map.next_value_seed(Seed(Help))?),
                "buckets" => fields.buckets = Some(map.next_value_seed(Seed(Buckets))?),
                "quantiles" => fields.quantiles = Some(map.next_value_seed(Seed(Quantiles))?),
                "native" => fields.native = map.next_value_seed(Seed(Native))?,
                "modes" => fields.modes = Some(map.next_value_seed(Seed(Modes))?),
                "also_as" => {
                    let names = AlsoAs { kind: self.kind, taken: self.target.names };
                    fields.also_as = map.next_value_seed(Seed(names))?;
                }
                _ => fields.disabled = !map.next_value_seed(Seed(Enabled))?,
            }
        }
        let disabled = fields.disabled;
        let spec = fields.into_spec(self.kind, self.target.section).map_err(de::Error::custom)?;
        let Parsed { specs, disabled: switched_off, places, .. } = self.target.parsed;
        if specs.len() + switched_off.len() >= MAX_METRICS {
            return Err(de::Error::custom(format!("there are more than {MAX_METRICS} metrics")));
        }
        places.insert(spec.name.clone(), places.len());
        if disabled {
            switched_off.push(spec)
        } else {
            specs.push(spec)
        }
        Ok(())
    }
}

/// Checks the unit of a metric whose values the server measures as times. Bounds of buckets are in
/// this unit as well.
fn check_unit(name: &str, unit: &str, builtin: Option<Builtin>) -> Result<(), String> {
    match builtin.and_then(Builtin::time_unit) {
        Some(fixed) if TimeUnit::from_name(unit) != Some(fixed) => {
            let fixed = fixed.name();
            Err(format!(
                "the unit of `{name}` is `{unit}`; allowed is `{fixed}`, the unit of its values \
                 and buckets"
            ))
        }
        _ => Ok(()),
    }
}

impl Fields {
    fn into_spec(self, kind: Kind, section: Section) -> Result<MetricSpec, String> {
        let name = self.name.clone().ok_or("a metric has no name")?;
        let unit = self.unit.clone().ok_or_else(|| format!("metric `{name}` has no unit"))?;
        self.check_type(&name, kind)?;
        let builtin = Builtin::from_name(&name);
        self.check_labels(&name, builtin)?;
        let help = self.help.unwrap_or_default();
        let buckets = self.buckets.unwrap_or_else(|| match (kind, builtin) {
            (Kind::Histogram, Some(builtin)) => builtin.buckets().to_vec(),
            _ => super::default_buckets(kind, &unit),
        });
        let quantiles = self.quantiles.unwrap_or_else(|| match kind {
            Kind::Summary => DEFAULT_QUANTILES.to_vec(),
            _ => Vec::new(),
        });
        let modes = self.modes.unwrap_or(Views::ALL);
        check_unit(&name, &unit, builtin)?;
        let mut spec = MetricSpec {
            name,
            section,
            kind,
            unit,
            dimensions: self.dimensions,
            help,
            buckets,
            quantiles,
            native: self.native,
            modes,
            also_as: Vec::new(),
            builtin,
            detected: false,
            described: false,
            host_is_added: false,
        };
        spec.also_as = also_as::complete(self.also_as, &spec)?;
        Ok(spec)
    }

    /// Checks the labels of a metric that code records.
    fn check_labels(&self, name: &str, builtin: Option<Builtin>) -> Result<(), String> {
        // Labels listed after the name were checked while they were read; this also covers those
        // listed before it.
        self.dimensions.iter().try_for_each(|label| worker_labels::check(name, label))?;
        let Some(builtin) = builtin else { return Ok(()) };
        let mut labels: Vec<&str> = self.dimensions.iter().map(String::as_str).collect();
        let mut wanted = builtin.dimensions().to_vec();
        labels.sort_unstable();
        wanted.sort_unstable();
        if labels == wanted {
            return Ok(());
        }
        let wanted = builtin.dimensions().join(", ");
        Err(format!("the dimensions of the built-in metric `{name}` must be [{wanted}]"))
    }

    /// Checks the fields and labels that only one type of metric may have.
    fn check_type(&self, name: &str, kind: Kind) -> Result<(), String> {
        let named = kind.as_str();
        if kind != Kind::Histogram && self.buckets.is_some() {
            return Err(format!("metric `{name}` is a {named}: only a histogram has buckets"));
        }
        if kind != Kind::Histogram && self.native.is_some() {
            return Err(format!(
                "metric `{name}` is a {named}: only a histogram has native buckets"
            ));
        }
        if kind != Kind::Summary && self.quantiles.is_some() {
            return Err(format!("metric `{name}` is a {named}: only a summary has quantiles"));
        }
        let Some(reserved) = names::reserved_label(kind) else { return Ok(()) };
        match self.dimensions.iter().find(|label| label.eq_ignore_ascii_case(reserved.0)) {
            Some(label) => {
                Err(format!("label `{label}` is reserved for the {} `{name}`", reserved.1))
            }
            None => Ok(()),
        }
    }
}
