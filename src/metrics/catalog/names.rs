//! Rules for names of metrics and labels, and the names that a metric occupies in a scrape.

use std::collections::HashMap;

use super::warnings::nearest_to;
use super::{Kind, RECORDED_BY_ENGINES, RECORDED_BY_TEXT_MODELS, STATE_BYTES, Section};
use crate::builtin::Builtin;

/// The longest name of a metric or label, in bytes.
const MAX_NAME: usize = 255;

/// The prefix of this server's own metrics.
const OWN_PREFIX: &str = "pharos_";

/// Prefixes that Triton and TorchServe reserve for metrics of the server. Models may use them, as
/// TorchServe's handlers do (`ts_handler_preprocess`).
const FRONTEND_PREFIXES: [&str; 2] = ["nv_", "ts_"];

/// Returns whether Prometheus accepts this metric name.
pub(crate) fn is_metric_name(text: &str) -> bool {
    is_name(text, |c| c == '_' || c == ':')
}

/// Returns whether Prometheus accepts this label name.
pub(crate) fn is_label_name(text: &str) -> bool {
    is_name(text, |c| c == '_') && !text.starts_with("__")
}

fn is_name(text: &str, special: impl Fn(char) -> bool) -> bool {
    !text.starts_with(|c: char| c.is_ascii_digit())
        && !text.is_empty()
        && text.len() <= MAX_NAME
        && text.chars().all(|c| c.is_ascii_alphanumeric() || special(c))
}

/// Checks a metric's name for its type and section. Returns an error that says why it is not
/// allowed, and what is.
pub(super) fn check(name: &str, kind: Kind, section: Section) -> Result<(), String> {
    check_letters(name)?;
    if let Some(builtin) = Builtin::from_name(name) {
        let wanted = builtin.kind();
        return match wanted == kind && section == Section::Frontend {
            true => Ok(()),
            false => Err(format!(
                "the built-in metric `{name}` must be a {} in ts_metrics",
                wanted.as_str()
            )),
        };
    }
    if let Some(present) = Builtin::formerly(name) {
        let unit = present.time_unit().map_or_else(String::new, |unit| {
            format!(", with unit and buckets in `{}`", unit.name())
        });
        let present = present.name();
        return Err(format!(
            "`{name}` is now named `{present}`{unit}; its `also_as` can give it the old name as \
             well"
        ));
    }
    let prefix = FRONTEND_PREFIXES
        .iter()
        .find(|prefix| section == Section::Frontend && name.starts_with(**prefix));
    if let Some(prefix) = prefix {
        return Err(no_builtin(name, &format!("names in ts_metrics that begin with `{prefix}`")));
    }
    check_reserved(name)
}

/// Checks a further name of a metric. Old names of built-in metrics are allowed, also with reserved
/// prefixes. Names of their samples are not, even if the file omits the metric: a setting can
/// switch it on.
pub(super) fn check_other(name: &str, kind: Kind) -> Result<(), String> {
    check_letters(name)?;
    let samples = taken(name, kind);
    if let Some(builtin) = Builtin::ALL.iter().find(|builtin| {
        let own = taken(builtin.name(), builtin.kind());
        own.iter().any(|own| samples.iter().any(|sample| own.eq_ignore_ascii_case(sample)))
    }) {
        return Err(format!(
            "`{name}` in `also_as` is reserved for the built-in metric `{}`",
            builtin.name()
        ));
    }
    check_prefix(name)
}

fn check_letters(name: &str) -> Result<(), String> {
    if is_metric_name(name) {
        return Ok(());
    }
    let allowed = format!("allowed are up to {MAX_NAME} letters, digits (not first), `_` and `:`");
    Err(format!("`{}` is not a valid metric name; {allowed}", shortened(name)))
}

fn check_prefix(name: &str) -> Result<(), String> {
    match name.starts_with("__") {
        true => Err(format!("`{name}` begins with `__`, which is reserved for Prometheus itself")),
        false => Ok(()),
    }
}

fn no_builtin(name: &str, reserved: &str) -> String {
    let nearest = nearest_to(name);
    format!(
        "no built-in metric is named `{name}`, and {reserved} are reserved for built-in \
         metrics{nearest}"
    )
}

/// Checks that a metric that is not built in does not use a reserved name.
pub(crate) fn check_reserved(name: &str) -> Result<(), String> {
    check_prefix(name)?;
    if let Some(builtin) =
        Builtin::ALL.iter().find(|builtin| builtin.name().eq_ignore_ascii_case(name))
    {
        return Err(format!(
            "`{name}` differs only in case from the built-in metric `{}`",
            builtin.name()
        ));
    }
    let by_backends =
        RECORDED_BY_ENGINES.contains(&name) || RECORDED_BY_TEXT_MODELS.contains(&name);
    if name.starts_with(OWN_PREFIX) && name != STATE_BYTES && !by_backends {
        return Err(no_builtin(name, &format!("names that begin with `{OWN_PREFIX}`")));
    }
    Ok(())
}

/// Returns the label that a scrape adds to the samples of a type, and what it distinguishes.
pub(super) fn reserved_label(kind: Kind) -> Option<(&'static str, &'static str)> {
    match kind {
        Kind::Histogram => Some(("le", "buckets of the histogram")),
        Kind::Summary => Some(("quantile", "quantiles of the summary")),
        Kind::Counter | Kind::Gauge => None,
    }
}

/// Shortens a text from the file for a message.
pub(super) fn shortened(text: &str) -> String {
    let mut chars = text.chars();
    let head: String = chars.by_ref().take(60).collect();
    if chars.next().is_some() { format!("{head}...") } else { head }
}

/// Returns the names that a metric occupies in a scrape, in both formats: its own, the names of its
/// samples, and the name of its family in OpenMetrics. There the family of a counter `x_total` is
/// `x`, and `_created` is reserved for all types that count.
fn taken(name: &str, kind: Kind) -> Vec<String> {
    let (stem, suffixes): (&str, &[&str]) = match kind {
        Kind::Histogram => (name, &["", "_bucket", "_sum", "_count", "_created"]),
        Kind::Summary => (name, &["", "_sum", "_count", "_created"]),
        Kind::Gauge => (name, &[""]),
        Kind::Counter => match name.strip_suffix("_total").filter(|stem| !stem.is_empty()) {
            Some(stem) => (stem, &["_total", "", "_created"]),
            None => (name, &[""]),
        },
    };
    suffixes.iter().map(|suffix| format!("{stem}{suffix}")).collect()
}

/// What occupies a name.
#[derive(Clone, Debug)]
struct Owner {
    name: String,
    kind: Kind,
    /// Whether `name` is from an `also_as`.
    other: bool,
}

impl Owner {
    fn described(&self) -> String {
        let Self { name, kind, other } = self;
        let kind = kind.as_str();
        if *other {
            format!("the name `{name}` in `also_as` of a {kind}")
        } else {
            format!("the {kind} `{name}`")
        }
    }
}

/// The occupied names, each with the metric that occupies it.
#[derive(Clone, Debug, Default)]
pub(super) struct Names(HashMap<String, Owner>);

impl Names {
    /// Returns the sample of a new metric whose name is occupied, and what occupies it.
    fn collision(&self, name: &str, kind: Kind) -> Option<(String, &Owner)> {
        taken(name, kind).into_iter().find_map(|sample| {
            let owner = self.0.get(&sample)?;
            Some((sample, owner))
        })
    }

    /// Checks that the names of a new metric are free. Returns an error that names the colliding
    /// metric.
    pub(super) fn check(&self, name: &str, kind: Kind) -> Result<(), String> {
        match self.collision(name, kind) {
            None => Ok(()),
            Some((_, owner)) if owner.name == name && !owner.other => {
                Err(format!("metric `{name}` is defined twice"))
            }
            Some((sample, owner)) => Err(format!(
                "metric `{name}` collides with {}: both would appear in a scrape as `{sample}`",
                owner.described()
            )),
        }
    }

    /// Checks that a further name of a metric is free, like [`Names::check`].
    pub(super) fn check_other(&self, name: &str, kind: Kind) -> Result<(), String> {
        match self.collision(name, kind) {
            None => Ok(()),
            Some((_, owner)) if owner.name == name && owner.other => {
                Err(format!("the name `{name}` in `also_as` is given twice"))
            }
            Some((sample, owner)) => Err(format!(
                "the name `{name}` in `also_as` collides with {}: both would appear in a scrape \
                 as `{sample}`",
                owner.described()
            )),
        }
    }

    /// Occupies the names of a metric.
    pub(super) fn insert(&mut self, name: &str, kind: Kind) {
        self.occupy(&Owner { name: name.to_owned(), kind, other: false });
    }

    /// Occupies a further name of a metric.
    pub(super) fn insert_other(&mut self, name: &str, kind: Kind) {
        self.occupy(&Owner { name: name.to_owned(), kind, other: true });
    }

    fn occupy(&mut self, owner: &Owner) {
        self.0.extend(
            taken(&owner.name, owner.kind).into_iter().map(|sample| (sample, owner.clone())),
        );
    }
}
