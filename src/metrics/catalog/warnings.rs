//! Warnings about definitions that are valid and probably unintended.

use super::{Catalog, MetricSpec, RECORDED_BY_WORKER, Section};
use crate::metrics::builtin::Builtin;

/// How many letters two names differ by at most when one is taken for a slip of the other.
const SLIP: usize = 2;

/// The names that the server or its workers record.
fn recorded() -> impl Iterator<Item = &'static str> {
    Builtin::ALL.iter().map(|builtin| builtin.name()).chain(RECORDED_BY_WORKER)
}

/// The metric that the server records whose name is nearest to this one, and by how many letters they differ.
fn nearest(name: &str) -> Option<(&'static str, usize)> {
    let name = name.to_ascii_lowercase();
    let distance = |other: &'static str| (other, strsim::osa_distance(&name, &other.to_ascii_lowercase()));
    recorded().map(distance).min_by_key(|(_, distance)| *distance)
}

/// `; the nearest is ...`, for a name that the server does not record.
pub(super) fn nearest_to(name: &str) -> String {
    nearest(name).map_or_else(String::new, |(other, _)| format!("; the nearest is `{other}`"))
}

/// Of a catalog as its file has it.
pub(super) fn of(catalog: &Catalog) -> Vec<String> {
    let mut found = Vec::new();
    if catalog.is_empty() {
        let off = if catalog.disabled().is_empty() { "" } else { " that is switched on" };
        found.push(format!("no metric is defined{off}: /metrics, the metric logs and every other view stay empty"));
    }
    let all = catalog.iter().map(|(_, spec)| spec).chain(catalog.disabled());
    found.extend(all.filter_map(slip));
    found
}

/// A metric that nothing in the server records, called almost like one that it does. Programs may send it (StatsD,
/// printed lines), so it is allowed; models may record whatever they like, but not HandlerTime.
fn slip(spec: &MetricSpec) -> Option<String> {
    if spec.builtin.is_some() || RECORDED_BY_WORKER.contains(&&*spec.name) {
        return None;
    }
    let (other, distance) = nearest(&spec.name)?;
    let candidate = spec.section == Section::Frontend || RECORDED_BY_WORKER.contains(&other);
    let near = distance <= SLIP && distance * 3 < spec.name.len();
    (candidate && near)
        .then(|| format!("nothing in the server records `{}`; the nearest that it records is `{other}`", spec.name))
}
