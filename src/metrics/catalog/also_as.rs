//! `also_as`: further names under which scrapes show a metric, for the transition from an old name
//! to a new one.

use serde::de::{self, MapAccess, SeqAccess};

use super::fields::{Unit, within};
use super::names::{self, Names};
use super::node::{Key, Node, Seed};
use super::{Kind, MetricSpec};
use crate::unit::TimeUnit;

/// A further name of a metric in scrapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherName {
    /// The name. No other metric has it.
    pub name: String,
    /// The unit of time of the values under this name; `None` for the metric's own unit.
    pub unit: Option<String>,
    /// The power of ten by which values are multiplied for this unit.
    pub(crate) digits: i32,
}

impl OtherName {
    /// Returns the name as text, with its unit if it has one.
    pub(super) fn shown(&self) -> String {
        match &self.unit {
            Some(unit) => format!("{} ({unit})", self.name),
            None => self.name.clone(),
        }
    }
}

/// The most further names of one metric.
const MAX_NAMES: usize = 8;

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
        Ok(OtherName { name, unit: None, digits: 0 })
    }
    fn mapping<A: MapAccess<'de>>(self, mut map: A) -> Result<OtherName, A::Error> {
        let mut name = None;
        let mut unit = None;
        let mut seen = Vec::new();
        while let Some(key) =
            map.next_key_seed(Seed(Key { allowed: &["name", "unit"], seen: &mut seen }))?
        {
            match key {
                "name" => {
                    name = Some(map.next_value_seed(Seed(NameOnly {
                        kind: self.kind,
                        taken: &mut *self.taken,
                    }))?);
                }
                _ => unit = Some(map.next_value_seed(Seed(OtherUnit))?),
            }
        }
        let name = name.ok_or_else(|| de::Error::custom("an entry of `also_as` has no name"))?;
        Ok(OtherName { name, unit, digits: 0 })
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
/// A name has a unit of time, and the metric has none.
pub(super) fn complete(names: Vec<OtherName>, spec: &MetricSpec) -> Result<Vec<OtherName>, String> {
    let metric = &spec.name;
    let unit = &spec.unit;
    let time = spec.time_unit();
    names
        .into_iter()
        .map(|other| {
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
