//! YAML to checked specs. Everything is checked while the YAML reader stands on it, since only then is the position known.

use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

use super::{CatalogError, DEFAULT_BUCKETS, Kind, MetricSpec, Mode, Section};
use crate::metrics::builtin::Builtin;

/// What a file says, checked.
pub(super) struct Parsed {
    pub(super) mode: Mode,
    pub(super) specs: Vec<MetricSpec>,
}

/// Parses the text of a `metrics.yaml`.
pub(super) fn parse(text: &str, file: &str) -> Result<Parsed, CatalogError> {
    let deserializer = serde_yaml::Deserializer::from_str(text);
    Seed(File).deserialize(deserializer).map_err(|error| {
        let (line, column) = error.location().map_or((1, 1), |at| (at.line(), at.column()));
        let message = error.to_string();
        let suffix = format!(" at line {line} column {column}");
        let message = message.strip_suffix(&suffix).unwrap_or(&message).to_owned();
        CatalogError { file: file.to_owned(), line, column, message }
    })
}

/// One place in the file and what may stand there. What a place does not override is an error there.
trait Node<'de>: Sized {
    type Out;

    /// What the place takes, for messages.
    fn takes(&self) -> &'static str;

    fn text<E: de::Error>(self, text: &str) -> Result<Self::Out, E> {
        Err(E::custom(format!("found `{text}` where {} is expected", self.takes())))
    }

    fn empty<E: de::Error>(self) -> Result<Self::Out, E> {
        Err(E::custom(format!("found nothing where {} is expected", self.takes())))
    }

    fn list<A: SeqAccess<'de>>(self, _: A) -> Result<Self::Out, A::Error> {
        Err(de::Error::custom(format!("found a list where {} is expected", self.takes())))
    }

    fn mapping<A: MapAccess<'de>>(self, _: A) -> Result<Self::Out, A::Error> {
        Err(de::Error::custom(format!("found a mapping where {} is expected", self.takes())))
    }
}

/// Makes a [`Node`] readable by serde.
struct Seed<N>(N);

impl<'de, N: Node<'de>> DeserializeSeed<'de> for Seed<N> {
    type Value = N::Out;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<N::Out, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, N: Node<'de>> Visitor<'de> for Seed<N> {
    type Value = N::Out;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.takes())
    }
    fn visit_str<E: de::Error>(self, value: &str) -> Result<N::Out, E> {
        self.0.text(value)
    }
    fn visit_bool<E: de::Error>(self, value: bool) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_i64<E: de::Error>(self, value: i64) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_u64<E: de::Error>(self, value: u64) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_f64<E: de::Error>(self, value: f64) -> Result<N::Out, E> {
        self.0.text(&value.to_string())
    }
    fn visit_unit<E: de::Error>(self) -> Result<N::Out, E> {
        self.0.empty()
    }
    fn visit_none<E: de::Error>(self) -> Result<N::Out, E> {
        self.0.empty()
    }
    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<N::Out, A::Error> {
        self.0.list(list)
    }
    fn visit_map<A: MapAccess<'de>>(self, mapping: A) -> Result<N::Out, A::Error> {
        self.0.mapping(mapping)
    }
}

/// A key of a mapping: one of a closed list, each at most once.
struct Key<'a> {
    allowed: &'static [&'static str],
    seen: &'a mut Vec<&'static str>,
}

impl Node<'_> for Key<'_> {
    type Out = &'static str;
    fn takes(&self) -> &'static str {
        "a key"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<&'static str, E> {
        let Some(key) = self.allowed.iter().copied().find(|&key| key == text) else {
            return Err(E::custom(format!("unknown key `{text}`; allowed are {}", quoted(self.allowed))));
        };
        if self.seen.contains(&key) {
            return Err(E::custom(format!("key `{key}` is given twice")));
        }
        self.seen.push(key);
        Ok(key)
    }
}

fn quoted(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

struct File;

impl<'de> Node<'de> for File {
    type Out = Parsed;
    fn takes(&self) -> &'static str {
        "a mapping with mode, dimensions, ts_metrics and model_metrics"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut parsed = Parsed { mode: Mode::Prometheus, specs: Vec::new() };
        let (mut seen, mut names) = (Vec::new(), HashSet::new());
        let allowed = &["mode", "dimensions", "ts_metrics", "model_metrics"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "mode" => parsed.mode = map.next_value_seed(Seed(ModeName))?,
                "dimensions" => map.next_value_seed(Seed(Aliases))?,
                _ => {
                    let section = if key == "ts_metrics" { Section::Frontend } else { Section::Model };
                    let target = Target { section, specs: &mut parsed.specs, names: &mut names };
                    map.next_value_seed(Seed(Metrics(target)))?;
                }
            }
        }
        Ok(parsed)
    }
}

struct ModeName;

impl Node<'_> for ModeName {
    type Out = Mode;
    fn takes(&self) -> &'static str {
        "a mode, `tslog` or `prometheus`,"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<Mode, E> {
        match text {
            "tslog" => Ok(Mode::Tslog),
            "prometheus" => Ok(Mode::Prometheus),
            _ => Err(E::custom(format!("unknown mode `{text}`; allowed are `tslog`, `prometheus`"))),
        }
    }
}

/// The `dimensions` mapping: any alias to a label name. Only its anchors matter, which YAML itself resolves.
struct Aliases;

impl<'de> Node<'de> for Aliases {
    type Out = ();
    fn takes(&self) -> &'static str {
        "a mapping of aliases to label names"
    }
    fn empty<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while map.next_key::<de::IgnoredAny>()?.is_some() {
            map.next_value_seed(Seed(Label(&mut Vec::new())))?;
        }
        Ok(())
    }
}

/// Where parsed metrics go.
struct Target<'a> {
    section: Section,
    specs: &'a mut Vec<MetricSpec>,
    names: &'a mut HashSet<String>,
}

impl Target<'_> {
    fn reborrow(&mut self) -> Target<'_> {
        Target { section: self.section, specs: self.specs, names: self.names }
    }
}

/// `ts_metrics` or `model_metrics`.
struct Metrics<'a>(Target<'a>);

impl<'de> Node<'de> for Metrics<'_> {
    type Out = ();
    fn takes(&self) -> &'static str {
        "a mapping with counter, gauge and histogram"
    }
    fn empty<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn mapping<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut seen = Vec::new();
        let allowed = &["counter", "gauge", "histogram"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            let kind = match key {
                "counter" => Kind::Counter,
                "gauge" => Kind::Gauge,
                _ => Kind::Histogram,
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
    fn takes(&self) -> &'static str {
        "a list of metrics"
    }
    fn empty<E: de::Error>(self) -> Result<(), E> {
        Ok(())
    }
    fn list<A: SeqAccess<'de>>(mut self, mut list: A) -> Result<(), A::Error> {
        while list.next_element_seed(Seed(Metric { kind: self.kind, target: self.target.reborrow() }))?.is_some() {}
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
}

impl<'de> Node<'de> for Metric<'_> {
    type Out = ();
    fn takes(&self) -> &'static str {
        "a metric, a mapping with name, unit and dimensions,"
    }
    fn mapping<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let mut fields = Fields::default();
        let mut seen = Vec::new();
        let allowed = &["name", "unit", "dimensions", "help", "buckets"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "name" => {
                    let place = Name { kind: self.kind, target: self.target.reborrow() };
                    fields.name = Some(map.next_value_seed(Seed(place))?);
                }
                "unit" => fields.unit = Some(map.next_value_seed(Seed(Unit))?),
                "dimensions" => fields.dimensions = map.next_value_seed(Seed(Labels))?,
                "help" => fields.help = Some(map.next_value_seed(Seed(Help))?),
                _ => fields.buckets = Some(map.next_value_seed(Seed(Buckets))?),
            }
        }
        let spec = fields.into_spec(self.kind, self.target.section).map_err(de::Error::custom)?;
        self.target.specs.push(spec);
        Ok(())
    }
}

impl Fields {
    fn into_spec(self, kind: Kind, section: Section) -> Result<MetricSpec, String> {
        let name = self.name.ok_or("a metric has no name")?;
        let unit = self.unit.ok_or_else(|| format!("metric `{name}` has no unit"))?;
        if kind != Kind::Histogram && self.buckets.is_some() {
            return Err(format!("metric `{name}` is a {}: only a histogram has buckets", kind.as_str()));
        }
        if kind == Kind::Histogram && self.dimensions.iter().any(|label| label == "le") {
            return Err(format!("label `le` is reserved for the buckets of the histogram `{name}`"));
        }
        let builtin = Builtin::from_name(&name);
        if let Some(builtin) = builtin {
            let mut labels: Vec<&str> = self.dimensions.iter().map(String::as_str).collect();
            let mut wanted = builtin.dimensions().to_vec();
            labels.sort_unstable();
            wanted.sort_unstable();
            if labels != wanted {
                let wanted = builtin.dimensions().join(", ");
                return Err(format!("the dimensions of the built-in metric `{name}` must be [{wanted}]"));
            }
        }
        let help = self.help.unwrap_or_else(|| format!("{name} ({unit})"));
        let buckets = match kind {
            Kind::Histogram => self.buckets.unwrap_or_else(|| DEFAULT_BUCKETS.to_vec()),
            Kind::Counter | Kind::Gauge => Vec::new(),
        };
        Ok(MetricSpec { name, section, kind, unit, dimensions: self.dimensions, help, buckets, builtin })
    }
}

struct Name<'a> {
    kind: Kind,
    target: Target<'a>,
}

impl Node<'_> for Name<'_> {
    type Out = String;
    fn takes(&self) -> &'static str {
        "a metric's name"
    }
    fn empty<E: de::Error>(self) -> Result<String, E> {
        Err(E::custom("a metric's name is empty"))
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        if text.is_empty() {
            return self.empty();
        }
        if !is_name(text, |c| c == '_' || c == ':') {
            let allowed = "allowed are letters, digits (not first), `_` and `:`";
            return Err(E::custom(format!("`{text}` is no metric name; {allowed}")));
        }
        if let Some(builtin) = Builtin::from_name(text)
            && (builtin.kind() != self.kind || self.target.section != Section::Frontend)
        {
            let kind = builtin.kind().as_str();
            return Err(E::custom(format!("the built-in metric `{text}` must be a {kind} in ts_metrics")));
        }
        if !self.target.names.insert(text.to_owned()) {
            return Err(E::custom(format!("metric `{text}` is defined twice")));
        }
        Ok(text.to_owned())
    }
}

fn is_name(text: &str, special: impl Fn(char) -> bool) -> bool {
    !text.starts_with(|c: char| c.is_ascii_digit())
        && !text.is_empty()
        && text.chars().all(|c| c.is_ascii_alphanumeric() || special(c))
}

struct Unit;

impl Node<'_> for Unit {
    type Out = String;
    fn takes(&self) -> &'static str {
        "a metric's unit"
    }
    fn empty<E: de::Error>(self) -> Result<String, E> {
        Err(E::custom("a metric's unit is empty"))
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        if text.is_empty() { self.empty() } else { Ok(text.to_owned()) }
    }
}

struct Help;

impl Node<'_> for Help {
    type Out = String;
    fn takes(&self) -> &'static str {
        "a help text"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

struct Labels;

impl<'de> Node<'de> for Labels {
    type Out = Vec<String>;
    fn takes(&self) -> &'static str {
        "a list of label names"
    }
    fn empty<E: de::Error>(self) -> Result<Vec<String>, E> {
        Ok(Vec::new())
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut labels = Vec::new();
        while list.next_element_seed(Seed(Label(&mut labels)))?.is_some() {}
        Ok(labels)
    }
}

/// One label name; appends itself to those before it.
struct Label<'a>(&'a mut Vec<String>);

impl Node<'_> for Label<'_> {
    type Out = ();
    fn takes(&self) -> &'static str {
        "a label name"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        if !is_name(text, |c| c == '_') || text.starts_with("__") {
            let allowed = "allowed are letters, digits (not first) and `_` (not twice at the start)";
            return Err(E::custom(format!("`{text}` is no label name; {allowed}")));
        }
        if self.0.iter().any(|label| label == text) {
            return Err(E::custom(format!("label `{text}` is given twice")));
        }
        self.0.push(text.to_owned());
        Ok(())
    }
}

struct Buckets;

impl<'de> Node<'de> for Buckets {
    type Out = Vec<f64>;
    fn takes(&self) -> &'static str {
        "a list of upper bounds"
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<f64>, A::Error> {
        let mut bounds = Vec::new();
        while list.next_element_seed(Seed(Bound(&mut bounds)))?.is_some() {}
        Ok(bounds)
    }
}

/// One upper bound; appends itself to those before it.
struct Bound<'a>(&'a mut Vec<f64>);

impl Node<'_> for Bound<'_> {
    type Out = ();
    fn takes(&self) -> &'static str {
        "a number"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        let bound = text.parse::<f64>().ok().filter(|bound| bound.is_finite());
        let Some(bound) = bound else {
            return Err(E::custom(format!("a bucket must be a finite number, `{text}` is not (+Inf is always there)")));
        };
        if let Some(last) = self.0.last().filter(|&&last| last >= bound) {
            return Err(E::custom(format!("buckets must ascend, {bound} follows {last}")));
        }
        self.0.push(bound);
        Ok(())
    }
}
