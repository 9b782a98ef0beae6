//! Which names may be used, and which a metric takes up: its own, and those that a scrape makes of it.

use std::collections::HashMap;

use super::warnings::nearest_to;
use super::{Kind, STATE_BYTES, Section};
use crate::metrics::builtin::Builtin;

/// The longest name of a metric or label, in bytes.
const MAX_NAME: usize = 255;

/// The beginning of the server's own names.
const OWN_PREFIX: &str = "pharos_";

/// The beginnings of names that Triton and TorchServe keep for the server itself. Models may use them, as TorchServe's
/// handlers do (`ts_handler_preprocess`).
const FRONTEND_PREFIXES: [&str; 2] = ["nv_", "ts_"];

/// Whether Prometheus takes it as a metric's name.
pub(in crate::metrics) fn is_metric_name(text: &str) -> bool {
    is_name(text, |c| c == '_' || c == ':')
}

/// Whether Prometheus takes it as a label's name.
pub(in crate::metrics) fn is_label_name(text: &str) -> bool {
    is_name(text, |c| c == '_') && !text.starts_with("__")
}

fn is_name(text: &str, special: impl Fn(char) -> bool) -> bool {
    !text.starts_with(|c: char| c.is_ascii_digit())
        && !text.is_empty()
        && text.len() <= MAX_NAME
        && text.chars().all(|c| c.is_ascii_alphanumeric() || special(c))
}

/// Whether a metric may be called so in this place; the text says why not, and what is allowed.
pub(super) fn check(name: &str, kind: Kind, section: Section) -> Result<(), String> {
    if !is_metric_name(name) {
        let allowed = format!("allowed are letters, digits (not first), `_` and `:`, {MAX_NAME} at most");
        return Err(format!("`{}` is no metric name; {allowed}", shortened(name)));
    }
    if let Some(builtin) = Builtin::from_name(name) {
        let wanted = builtin.kind();
        return match wanted == kind && section == Section::Frontend {
            true => Ok(()),
            false => Err(format!("the built-in metric `{name}` must be a {} in ts_metrics", wanted.as_str())),
        };
    }
    let prefix = FRONTEND_PREFIXES.iter().find(|prefix| section == Section::Frontend && name.starts_with(**prefix));
    if let Some(prefix) = prefix {
        return Err(no_builtin(name, &format!("names in ts_metrics that begin with `{prefix}`")));
    }
    check_reserved(name)
}

fn no_builtin(name: &str, reserved: &str) -> String {
    let nearest = nearest_to(name);
    format!("there is no built-in metric `{name}`, and {reserved} are reserved for those of the server{nearest}")
}

/// What a metric that is not built in must not be called.
pub(in crate::metrics) fn check_reserved(name: &str) -> Result<(), String> {
    if name.starts_with("__") {
        return Err(format!("`{name}` begins with `__`, which is reserved for Prometheus itself"));
    }
    if let Some(builtin) = Builtin::ALL.iter().find(|builtin| builtin.name().eq_ignore_ascii_case(name)) {
        return Err(format!("`{name}` differs only in case from the built-in metric `{}`", builtin.name()));
    }
    if name.starts_with(OWN_PREFIX) && name != STATE_BYTES {
        return Err(no_builtin(name, &format!("names that begin with `{OWN_PREFIX}`")));
    }
    Ok(())
}

/// A text that somebody wrote, short enough for a message.
pub(super) fn shortened(text: &str) -> String {
    let mut chars = text.chars();
    let head: String = chars.by_ref().take(60).collect();
    if chars.next().is_some() { format!("{head}...") } else { head }
}

/// The names that a metric takes up in a scrape in either format: its own, those of its samples, and its family's in
/// OpenMetrics, which calls a counter `x_total` the family `x` and reserves `_created` for what is counted.
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

/// The names that are taken up, and by which metric.
#[derive(Clone, Debug, Default)]
pub(super) struct Names(HashMap<String, (String, Kind)>);

impl Names {
    /// Whether a metric has room beside the others; the text says what it collides with.
    pub(super) fn check(&self, name: &str, kind: Kind) -> Result<(), String> {
        let collision = taken(name, kind).into_iter().find_map(|sample| Some((self.0.get(&sample)?, sample)));
        match collision {
            None => Ok(()),
            Some(((other, _), _)) if other == name => Err(format!("metric `{name}` is defined twice")),
            Some(((other, of), sample)) => Err(format!(
                "metric `{name}` collides with the {} `{other}`: a scrape would show both as `{sample}`",
                of.as_str()
            )),
        }
    }

    /// Takes up the names of a metric.
    pub(super) fn insert(&mut self, name: &str, kind: Kind) {
        let names = taken(name, kind).into_iter();
        self.0.extend(names.map(|sample| (sample, (name.to_owned(), kind))));
    }
}
