//! Warnings about definitions that are valid but probably unintended.

use super::{Catalog, MetricSpec, RECORDED_BY_WORKER, Section};
use crate::builtin::Builtin;

/// The number of letters in which a probable typing error differs from the intended name, at most.
const MAX_TYPO: usize = 2;

/// Returns the names that the server or its workers record.
fn recorded() -> impl Iterator<Item = &'static str> {
    Builtin::ALL.iter().map(|builtin| builtin.name()).chain(RECORDED_BY_WORKER)
}

/// Returns the recorded name that is closest to this one, and the edit distance between them.
fn nearest(name: &str) -> Option<(&'static str, usize)> {
    let name = name.to_ascii_lowercase();
    let distance =
        |other: &'static str| (other, strsim::osa_distance(&name, &other.to_ascii_lowercase()));
    recorded().map(distance).min_by_key(|(_, distance)| *distance)
}

/// Returns `; the closest name is ...` for a name that the server does not record.
pub(super) fn nearest_to(name: &str) -> String {
    nearest(name).map_or_else(String::new, |(other, _)| format!("; the closest name is `{other}`"))
}

/// Returns the warnings about a catalog before overrides are applied.
pub(super) fn of(catalog: &Catalog) -> Vec<String> {
    let mut found = Vec::new();
    if catalog.is_empty() {
        let what = if catalog.disabled().is_empty() {
            "no metric is defined"
        } else {
            "every defined metric is switched off"
        };
        found.push(format!("{what}: /metrics, the metric logs and every other view stay empty"));
    }
    let all = catalog.iter().map(|(_, spec)| spec).chain(catalog.disabled());
    found.extend(all.filter_map(probable_typo));
    found
}

/// Warns about a metric that the server does not record and whose name is almost the name of a
/// recorded one. It is allowed, since programs may send it (StatsD, printed lines). Metrics of
/// models are compared only with the metrics of the worker's runtime.
fn probable_typo(spec: &MetricSpec) -> Option<String> {
    if spec.builtin.is_some() || RECORDED_BY_WORKER.contains(&&*spec.name) {
        return None;
    }
    let (other, distance) = nearest(&spec.name)?;
    let candidate = spec.section == Section::Frontend || RECORDED_BY_WORKER.contains(&other);
    let near = distance <= MAX_TYPO && distance * 3 < spec.name.len();
    (candidate && near)
        .then(|| format!("the server does not record `{}`; did you mean `{other}`?", spec.name))
}
