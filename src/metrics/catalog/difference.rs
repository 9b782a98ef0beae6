//! What a new definition changes, as a text for the log.

use std::fmt;

use super::{Catalog, MetricSpec, Mode, Slo};

/// The difference between two catalogs, by name: metrics, and objectives as `slo NAME`. Switching a
/// metric on or off counts as adding or removing it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// What only the new catalog has, in its order.
    pub added: Vec<String>,
    /// What only the old catalog has, in its order.
    pub removed: Vec<String>,
    /// What both have with different definitions, in the new catalog's order.
    pub changed: Vec<String>,
    /// The old and the new mode, if they differ.
    pub mode: Option<(Mode, Mode)>,
}

impl Difference {
    /// Compares `old` with `new`.
    pub fn between(old: &Catalog, new: &Catalog) -> Self {
        let names = |catalog: &Catalog,
                     wanted: &dyn Fn(&MetricSpec) -> bool,
                     slo: &dyn Fn(&Slo) -> bool| {
            let specs = catalog.iter().map(|(_, spec)| spec).filter(|spec| wanted(spec));
            let slos =
                catalog.slos().iter().filter(|of| slo(of)).map(|of| format!("slo {}", of.name));
            specs.map(|spec| spec.name.clone()).chain(slos).collect()
        };
        let of_name = |catalog: &Catalog, slo: &Slo| {
            catalog.slos().iter().find(|other| other.name == slo.name).cloned()
        };
        let missing = |catalog: &Catalog, slo: &Slo| of_name(catalog, slo).is_none();
        let differs =
            |spec: &MetricSpec| old.find(&spec.name).is_some_and(|(_, before)| before != spec);
        Self {
            added: names(new, &|spec| old.find(&spec.name).is_none(), &|slo| missing(old, slo)),
            removed: names(old, &|spec| new.find(&spec.name).is_none(), &|slo| missing(new, slo)),
            changed: names(new, &differs, &|slo| {
                of_name(old, slo).is_some_and(|before| before != *slo)
            }),
            mode: (old.mode() != new.mode()).then_some((old.mode(), new.mode())),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        for (what, names) in
            [("added", &self.added), ("removed", &self.removed), ("changed", &self.changed)]
        {
            if !names.is_empty() {
                parts.push(format!("{what} {}", names.join(", ")));
            }
        }
        if let Some((before, now)) = self.mode {
            parts.push(format!("mode changed from {} to {}", before.as_str(), now.as_str()));
        }
        if parts.is_empty() {
            parts.push("nothing has changed".to_owned());
        }
        f.write_str(&parts.join("; "))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn between(old: &str, new: &str) -> String {
        let catalog = |metrics: &str| {
            let text = format!("mode: both\nmodel_metrics:\n  gauge:{metrics}");
            Catalog::parse(&text, "m.yaml").unwrap()
        };
        Difference::between(&catalog(old), &catalog(new)).to_string()
    }

    #[test]
    fn lists_objectives() {
        let catalog = |slos: &str| Catalog::parse(&format!("slos: [{slos}]"), "m.yaml").unwrap();
        let before = catalog(
            "{name: a, availability: 9%}, {name: b, availability: 9%}, {name: c, availability: 9%}",
        );
        let after = catalog(
            "{name: a, availability: 9%}, {name: c, availability: 8%}, {name: d, availability: 9%}",
        );
        let difference = Difference::between(&before, &after);
        assert_eq!(difference.to_string(), "added slo d; removed slo b; changed slo c");
    }

    #[test]
    fn lists_added_removed_and_changed_metrics() {
        let old =
            "\n    - {name: a, unit: ms}\n    - {name: b, unit: ms}\n    - {name: c, unit: ms}\n";
        let new = "\n    - {name: d, unit: ms}\n    - {name: b, unit: s}\n    - {name: c, unit: \
                   ms, enabled: false}\n";
        assert_eq!(between(old, new), "added d; removed a, c; changed b");
        assert_eq!(between(old, old), "nothing has changed");
        let shipped = Catalog::shipped();
        let difference = Difference::between(&shipped, &shipped.clone().with_mode(Mode::Tslog));
        assert_eq!(difference.to_string(), "mode changed from both to tslog");
    }
}
