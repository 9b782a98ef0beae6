//! The fields of a metric, each with its checks.

use serde::de::{self, SeqAccess};

use super::names::{self, Names, is_label_name, shortened};
use super::node::{Node, Seed};
use super::worker_labels;
use super::{Kind, MAX_QUANTILES, Section, Views};

/// A metric's name: unique, and for a built-in metric in the right section and type.
pub(super) struct Name<'a> {
    pub(super) kind: Kind,
    pub(super) section: Section,
    pub(super) taken: &'a mut Names,
}

impl Node<'_> for Name<'_> {
    type Out = String;
    fn expected(&self) -> &'static str {
        "a metric's name"
    }
    fn empty<E: de::Error>(self) -> Result<String, E> {
        Err(E::custom("a metric's name is empty"))
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        if text.is_empty() {
            return self.empty();
        }
        names::check(text, self.kind, self.section).map_err(E::custom)?;
        self.taken.check(text, self.kind).map_err(E::custom)?;
        self.taken.insert(text, self.kind);
        Ok(text.to_owned())
    }
}

/// The longest unit, in bytes: a unit is part of every line of the metric log.
pub(crate) const MAX_UNIT: usize = 64;

pub(super) struct Unit;

impl Node<'_> for Unit {
    type Out = String;
    fn expected(&self) -> &'static str {
        "a metric's unit"
    }
    fn empty<E: de::Error>(self) -> Result<String, E> {
        Err(E::custom("a metric's unit is empty"))
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        if text.is_empty() {
            return self.empty();
        }
        // A log line ends the unit with `:` and its dimensions with `|`.
        if text.len() > MAX_UNIT || text.chars().any(|c| c.is_control() || c == ':' || c == '|') {
            let allowed = format!(
                "allowed are up to {MAX_UNIT} bytes without `:`, `|` and control characters"
            );
            return Err(E::custom(format!("`{}` is not a valid unit; {allowed}", shortened(text))));
        }
        Ok(text.to_owned())
    }
}

pub(super) struct Help;

impl Node<'_> for Help {
    type Out = String;
    fn expected(&self) -> &'static str {
        "a help text"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

/// The labels of a metric. `metric` is its name, or `None` if the file gives the name later.
pub(super) struct Labels<'a> {
    pub(super) metric: Option<&'a str>,
}

impl<'de> Node<'de> for Labels<'_> {
    type Out = Vec<String>;
    fn expected(&self) -> &'static str {
        "a list of label names"
    }
    fn empty<E: de::Error>(self) -> Result<Vec<String>, E> {
        Ok(Vec::new())
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut labels = Vec::new();
        let metric = self.metric;
        while list.next_element_seed(Seed(Label { metric, before: &mut labels }))?.is_some() {}
        Ok(labels)
    }
}

/// One label name, which is appended to `before`.
pub(super) struct Label<'a> {
    pub(super) metric: Option<&'a str>,
    pub(super) before: &'a mut Vec<String>,
}

impl Node<'_> for Label<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a label name"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        if !is_label_name(text) {
            let allowed =
                "allowed are letters, digits (not first) and `_`, but no `__` at the start";
            return Err(E::custom(format!(
                "`{}` is not a valid label name; {allowed}",
                shortened(text)
            )));
        }
        // The server fills in host labels regardless of case, so two spellings of one name would be
        // ambiguous.
        match self.before.iter().find(|label| label.eq_ignore_ascii_case(text)) {
            Some(label) if label == text => {
                return Err(E::custom(format!("label `{text}` is given twice")));
            }
            Some(label) => {
                return Err(E::custom(format!(
                    "labels `{label}` and `{text}` differ only in case"
                )));
            }
            None => {}
        }
        if let Some(metric) = self.metric {
            worker_labels::check(metric, text).map_err(E::custom)?;
        }
        within(self.before.len(), MAX_LABELS, "labels")?;
        self.before.push(text.to_owned());
        Ok(())
    }
}

/// The most labels and buckets of one metric. Without a bound, aliases of a long list could fill
/// the memory.
const MAX_LABELS: usize = 64;
const MAX_BUCKETS: usize = 1000;

/// Checks that one more element is allowed.
pub(super) fn within<E: de::Error>(count: usize, most: usize, what: &str) -> Result<(), E> {
    if count < most {
        Ok(())
    } else {
        Err(E::custom(format!("a metric has at most {most} {what}")))
    }
}

pub(super) struct Buckets;

impl<'de> Node<'de> for Buckets {
    type Out = Vec<f64>;
    fn expected(&self) -> &'static str {
        "a list of upper bounds"
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<f64>, A::Error> {
        let mut bounds = Vec::new();
        while list.next_element_seed(Seed(Bound(&mut bounds)))?.is_some() {}
        Ok(bounds)
    }
}

/// One upper bound, which is appended to the bounds before it.
struct Bound<'a>(&'a mut Vec<f64>);

impl Node<'_> for Bound<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a number"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        let bound = text.parse::<f64>().ok().filter(|bound| bound.is_finite());
        let Some(bound) = bound else {
            return Err(E::custom(format!(
                "a bucket must be a finite number, not `{text}` (+Inf is implied)"
            )));
        };
        if let Some(last) = self.0.last().filter(|&&last| last >= bound) {
            return Err(E::custom(format!(
                "buckets must be in ascending order, but {bound} follows {last}"
            )));
        }
        within(self.0.len(), MAX_BUCKETS, "buckets")?;
        self.0.push(bound);
        Ok(())
    }
}

pub(super) struct Quantiles;

impl<'de> Node<'de> for Quantiles {
    type Out = Vec<f64>;
    fn expected(&self) -> &'static str {
        "a list of quantiles"
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<f64>, A::Error> {
        let mut quantiles = Vec::new();
        while list.next_element_seed(Seed(Quantile(&mut quantiles)))?.is_some() {}
        Ok(quantiles)
    }
}

/// One quantile, which is appended to the quantiles before it.
struct Quantile<'a>(&'a mut Vec<f64>);

impl Node<'_> for Quantile<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a number between 0 and 1"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        let quantile = text.parse::<f64>().ok().filter(|quantile| (0.0..=1.0).contains(quantile));
        let Some(quantile) = quantile else {
            return Err(E::custom(format!(
                "a quantile must be a number between 0 and 1, not `{text}`"
            )));
        };
        if let Some(last) = self.0.last().filter(|&&last| last >= quantile) {
            return Err(E::custom(format!(
                "quantiles must be in ascending order, but {quantile} follows {last}"
            )));
        }
        within(self.0.len(), MAX_QUANTILES, "quantiles")?;
        self.0.push(quantile);
        Ok(())
    }
}

/// The `modes` of one metric: at least one.
pub(super) struct Modes;

impl<'de> Node<'de> for Modes {
    type Out = Views;
    fn expected(&self) -> &'static str {
        "a list of modes"
    }
    fn list<A: SeqAccess<'de>>(self, mut list: A) -> Result<Views, A::Error> {
        let mut views = Views { tslog: false, prometheus: false };
        while list.next_element_seed(Seed(OneMode(&mut views)))?.is_some() {}
        match views {
            Views { tslog: false, prometheus: false } => Err(de::Error::custom(
                "`modes` is empty; switch the metric off with `enabled: false`",
            )),
            views => Ok(views),
        }
    }
}

struct OneMode<'a>(&'a mut Views);

impl Node<'_> for OneMode<'_> {
    type Out = ();
    fn expected(&self) -> &'static str {
        "a mode"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<(), E> {
        match text {
            "tslog" | "log" => self.0.tslog = true,
            "prometheus" => self.0.prometheus = true,
            _ => {
                return Err(E::custom(format!(
                    "unknown mode `{text}`; allowed are `tslog`, `prometheus`"
                )));
            }
        }
        Ok(())
    }
}

/// Whether the metric is switched on.
pub(super) struct Enabled;

impl Node<'_> for Enabled {
    type Out = bool;
    fn expected(&self) -> &'static str {
        "true or false"
    }
    fn text<E: de::Error>(self, text: &str) -> Result<bool, E> {
        match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(E::custom(format!("`enabled` is `{text}`; allowed are `true`, `false`"))),
        }
    }
}
