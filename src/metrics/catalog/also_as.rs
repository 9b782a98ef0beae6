//! `also_as`: further names under which scrapes show a metric, for the transition from an old name
//! to a new one, and for tools that read the names of another server.

use serde::de::{self, MapAccess, SeqAccess};

use super::fields::{Label, Unit, within};
use super::names::{self, Names, shortened};
use super::node::{Key, Node, Seed};
use super::worker_labels::WorkerLabel;
use super::{Kind, MetricSpec, Section};
use crate::unit::TimeUnit;

/// A further name of a metric in scrapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherName {
    /// The name. No other metric has it.
    pub name: String,
    /// The unit of time of the values under this name; `None` for the metric's own unit.
    pub unit: Option<String>,
    /// The labels that differ. A label of the metric from which none of them has its value stays.
    pub labels: Vec<OtherLabel>,
    /// The power of ten by which values are multiplied for this unit.
    pub(crate) digits: i32,
}

/// A label that series have under a further name of their metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherLabel {
    /// Its name. The series have no other label of this name.
    pub name: String,
    /// The origin of its value.
    pub value: LabelValue,
}

/// The origin of a label's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelValue {
    /// The label of the metric with this name, which it replaces.
    Of(String),
    /// The same text for all series.
    Text(String),
}

impl OtherLabel {
    /// Returns whether this label has the value of the label `label` of the metric.
    fn replaces(&self, label: &str) -> bool {
        matches!(&self.value, LabelValue::Of(own) if own == label)
    }
}

impl OtherName {
    /// Returns a name with the unit and the labels of its metric.
    pub(super) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), unit: None, labels: Vec::new(), digits: 0 }
    }

    /// Returns the labels of the series under this name. `own` are the labels of the metric.
    pub(super) fn dimensions(&self, own: &[String]) -> Vec<String> {
        let own: Vec<(&str, &str)> = own.iter().map(|label| (label.as_str(), "")).collect();
        relabelled(&self.labels, &own).into_iter().map(|(name, _)| name.to_owned()).collect()
    }

    /// Returns the name as text, with its unit if it has one.
    pub(super) fn shown(&self) -> String {
        match &self.unit {
            Some(unit) => format!("{} ({unit})", self.name),
            None => self.name.clone(),
        }
    }
}

/// Returns the labels of a series that has the labels `own` under the name of its metric.
pub(crate) fn relabelled<'a>(
    labels: &'a [OtherLabel],
    own: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    let mut all = Vec::with_capacity(own.len() + labels.len());
    for &(name, value) in own {
        let before = all.len();
        all.extend(
            labels
                .iter()
                .filter(|label| label.replaces(name))
                .map(|label| (label.name.as_str(), value)),
        );
        if all.len() == before {
            all.push((name, value));
        }
    }
    all.extend(labels.iter().filter_map(|label| match &label.value {
        LabelValue::Text(text) => Some((label.name.as_str(), text.as_str())),
        LabelValue::Of(_) => None,
    }));
    all
}

/// The most further names of one metric.
const MAX_NAMES: usize = 8;

/// The longest text that is the value of a label, in bytes.
const MAX_TEXT: usize = 255;

/// The value of `also_as`: a name, a mapping with a name and a unit, or a list of these.
pub(super) struct AlsoAs<'a> {
    pub(super) kind: Kind,
    pub(super) taken: &'a mut Names,
}

impl<'de> Node<'de> for AlsoAs<'_> {
    type Out = Vec<OtherName>;
    fn expected(&self) -> &'static str {
        "a metric's name, a mapping with name and unit, or a list of these"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<Vec<OtherName>, E> {
        One { kind: self.kind, taken: self.taken }.text(text).map(|one| vec![one])
    }
    fn mapping<A: MapAccess<'de>>(self, map: A) -> Result<Vec<OtherName>, A::Error> {
        One { kind: self.kind, taken: self.taken }.mapping(map).map(|one| vec![one])
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<OtherName>, A::Error> {
        let mut names = Vec::new();
        while let Some(name) =
            list.next_element_seed(Seed(One { kind: self.kind, taken: &mut *self.taken }))?
        {
            within(names.len(), MAX_NAMES, "names in `also_as`")?;
            names.push(name);
        }
        Ok(names)
    }
}

/// One further name, with or without a unit.
struct One<'a> {
    kind: Kind,
    taken: &'a mut Names,
}

impl<'de> Node<'de> for One<'_> {
    type Out = OtherName;
    fn expected(&self) -> &'static str {
        "a metric's name or a mapping with name and unit"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<OtherName, E> {
        let name = NameOnly { kind: self.kind, taken: self.taken }.text(text)?;
        Ok(OtherName::new(&name))
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<OtherName, A::Error> {
        let mut name = None;
        let mut unit = None;
        let mut labels = Vec::new();
        let mut seen = Vec::new();
        let allowed = &["name", "unit", "labels"];
        while let Some(key) = map.next_key_seed(Seed(Key { allowed, seen: &mut seen }))? {
            match key {
                "name" => {
                    name = Some(map.next_value_seed(Seed(NameOnly {
                        kind: self.kind,
                        taken: &mut *self.taken,
                    }))?);
                }
                "unit" => unit = Some(map.next_value_seed(Seed(OtherUnit))?),
                _ => labels = map.next_value_seed(Seed(OtherLabels))?,
            }
        }
        let name = name.ok_or_else(|| de::Error::custom("an entry of `also_as` has no name"))?;
        Ok(OtherName { name, unit, labels, digits: 0 })
    }
}

/// The labels, by their names.
struct OtherLabels;

impl<'de> Node<'de> for OtherLabels {
    type Out = Vec<OtherLabel>;
    fn expected(&self) -> &'static str {
        "a mapping of label names to labels of the metric"
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<OtherLabel>, A::Error> {
        let mut names = Vec::new();
        let mut values = Vec::new();
        while map.next_key_seed(Seed(Label { metric: None, before: &mut names }))?.is_some() {
            values.push(map.next_value_seed(Seed(Value))?);
        }
        let labels = names.into_iter().zip(values);
        Ok(labels.map(|(name, value)| OtherLabel { name, value }).collect())
    }
}

/// The origin of a label's value: a label of the metric, or `{value: TEXT}`.
struct Value;

impl<'de> Node<'de> for Value {
    type Out = LabelValue;
    fn expected(&self) -> &'static str {
        "a label of the metric, or a text as {value: TEXT},"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<LabelValue, E> {
        Ok(LabelValue::Of(text.to_owned()))
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<LabelValue, A::Error> {
        let mut text = None;
        let mut seen = Vec::new();
        while map.next_key_seed(Seed(Key { allowed: &["value"], seen: &mut seen }))?.is_some() {
            text = Some(map.next_value_seed(Seed(Text))?);
        }
        let text = text.ok_or_else(|| de::Error::custom("the text of a label has no `value`"))?;
        Ok(LabelValue::Text(text))
    }
}

/// The text of a label. Prometheus takes an empty one for no label.
struct Text;

impl Node<'_> for Text {
    type Out = String;
    fn expected(&self) -> &'static str {
        "the text of a label"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        if text.is_empty() || text.len() > MAX_TEXT {
            let text = shortened(text);
            return Err(E::custom(format!(
                "`{text}` is not a valid text of a label; allowed are 1 to {MAX_TEXT} bytes"
            )));
        }
        Ok(text.to_owned())
    }
}

/// The name alone.
struct NameOnly<'a> {
    kind: Kind,
    taken: &'a mut Names,
}

impl Node<'_> for NameOnly<'_> {
    type Out = String;
    fn expected(&self) -> &'static str {
        "a metric's name"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        names::check_other(text, self.kind).map_err(E::custom)?;
        self.taken.check_other(text, self.kind).map_err(E::custom)?;
        self.taken.insert_other(text, self.kind);
        Ok(text.to_owned())
    }
}

/// A unit of time.
struct OtherUnit;

impl Node<'_> for OtherUnit {
    type Out = String;
    fn expected(&self) -> &'static str {
        "a unit of time"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        let unit = Unit.text::<E>(text)?;
        if TimeUnit::from_name(&unit).is_some() {
            return Ok(unit);
        }
        let allowed = "allowed are `Nanoseconds`, `Microseconds`, `Milliseconds`, `Seconds`, \
                       `ns`, `us`, `ms`, `s`";
        Err(E::custom(format!("`{unit}` is not a unit of time; {allowed}")))
    }
}

/// Completes the further names of a metric.
///
/// # Errors
/// A name has a unit of time, and the metric has none; or a label has its value from a label that
/// the metric does not have, or a name that series may have already.
pub(super) fn complete(names: Vec<OtherName>, spec: &MetricSpec) -> Result<Vec<OtherName>, String> {
    let metric = &spec.name;
    let unit = &spec.unit;
    let time = spec.time_unit();
    names
        .into_iter()
        .map(|other| {
            check_labels(&other, spec)?;
            let Some(wanted) = other.unit.as_deref().and_then(TimeUnit::from_name) else {
                return Ok(other);
            };
            let time = time.ok_or_else(|| {
                let name = &other.name;
                format!(
                    "`also_as` gives `{name}` a unit of time, but the unit of `{metric}` is \
                     `{unit}`; omit the unit there"
                )
            })?;
            Ok(OtherName { digits: time.digits_to(wanted), ..other })
        })
        .collect()
}

/// Checks the labels of a further name.
fn check_labels(other: &OtherName, spec: &MetricSpec) -> Result<(), String> {
    let metric = &spec.name;
    for label in &other.labels {
        let described = format!("the label `{}` of `{}` in `also_as`", label.name, other.name);
        if let LabelValue::Of(own) = &label.value
            && !spec.dimensions.contains(own)
        {
            let own = shortened(own);
            let allowed = match spec.dimensions.as_slice() {
                [] => "it has none".to_owned(),
                labels => format!("allowed are `{}`", labels.join("`, `")),
            };
            return Err(format!(
                "{described} has its value from `{own}`, which is not a label of `{metric}`: \
                 {allowed}; a fixed text is {{value: TEXT}}"
            ));
        }
        if let Some((_, of)) = names::reserved_label(spec.kind)
            .filter(|(reserved, _)| label.name.eq_ignore_ascii_case(reserved))
        {
            return Err(format!("{described} is reserved for the {of}"));
        }
        // Series of models have their namespace and their `metric_tags` as further labels.
        if spec.builtin.is_some() && (label.name == "namespace" || label.name.starts_with('_')) {
            return Err(format!(
                "{described} is reserved: series of models have `namespace` and labels that begin \
                 with `_`"
            ));
        }
        let stays = |own: &&String| !other.labels.iter().any(|label| label.replaces(own));
        let staying = spec.dimensions.iter().filter(stays);
        if let Some(own) = staying.into_iter().find(|own| own.eq_ignore_ascii_case(&label.name)) {
            return Err(format!(
                "{described} collides with the label `{own}` of `{metric}`; give that label \
                 another name in `labels`"
            ));
        }
        let has_host = spec.dimensions.iter().any(|own| WorkerLabel::is_host(own));
        if spec.section == Section::Model && !has_host && WorkerLabel::is_host(&label.name) {
            return Err(format!(
                "{described} is reserved for the host; add `{}` to the dimensions of `{metric}`",
                label.name
            ));
        }
    }
    Ok(())
}
