//! The names that a scrape requests (`?name[]=`): families or samples, as in Prometheus' Java
//! client.

use std::collections::BTreeSet;

/// The requested names; all metrics if empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names(BTreeSet<String>);

/// The suffixes of samples after the name of their family.
const SUFFIXES: [&str; 4] = ["_bucket", "_sum", "_count", "_total"];

impl Names {
    /// Collects the values of `name[]` from the pairs of a query. Ignores other keys.
    pub fn of_query<K: AsRef<str>, V: Into<String>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let names = pairs
            .into_iter()
            .filter(|(key, _)| key.as_ref() == "name[]")
            .map(|(_, name)| name.into());
        Self(names.collect())
    }

    /// Returns whether all metrics are requested.
    pub fn is_all(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a family, or one of its samples, may be requested.
    pub(super) fn may_contain(&self, family: &str) -> bool {
        let stems =
            |name: &String| SUFFIXES.iter().any(|suffix| name.strip_suffix(suffix) == Some(family));
        // In OpenMetrics, a counter's family is its sample without `_total`.
        let stem = family.strip_suffix("_total").is_some_and(|stem| self.0.contains(stem));
        self.is_all() || self.0.contains(family) || stem || self.0.iter().any(stems)
    }

    /// Returns whether a sample of this name is requested.
    pub(super) fn wants_sample(&self, sample: &str) -> bool {
        self.is_all() || self.0.contains(sample)
    }

    /// Removes everything else from a rendered text: keeps whole families by their names, and
    /// single samples by theirs.
    pub(super) fn keep(&self, text: String) -> String {
        if self.is_all() {
            return text;
        }
        let mut kept = String::with_capacity(text.len());
        for family in families(&text) {
            let name = family.split(' ').nth(2).unwrap_or_default();
            let whole = self.0.contains(name) || self.0.contains(&format!("{name}_total"));
            let wants = |line: &str| {
                line.split(['{', ' ']).next().is_some_and(|sample| self.0.contains(sample))
            };
            if !whole && !family.lines().any(wants) {
                continue;
            }
            for line in family.lines().filter(|line| whole || line.starts_with('#') || wants(line))
            {
                kept.push_str(line);
                kept.push('\n');
            }
        }
        kept
    }
}

/// Splits a text at the lines that start with `# HELP`.
pub(super) fn families(text: &str) -> impl Iterator<Item = &str> {
    let starts = text
        .match_indices("# HELP ")
        .map(|(at, _)| at)
        .filter(|&at| at == 0 || text[..at].ends_with('\n'));
    let starts: Vec<usize> = starts.collect();
    let ends = starts.clone().into_iter().skip(1).chain([text.len()]);
    starts.into_iter().zip(ends).map(|(start, end)| text.get(start..end).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# HELP a A\n# TYPE a counter\na{x=\"# HELP \"} 1\n# HELP b B\n# TYPE b \
                        histogram\nb_sum 1\nb_count 2\n# HELP c C\n# TYPE c counter\nc_total 3\n";

    fn keep(names: &[&str]) -> String {
        Names::of_query(names.iter().map(|name| ("name[]", *name))).keep(TEXT.to_owned())
    }

    #[test]
    fn families_and_samples_are_requested_by_name() {
        assert_eq!(keep(&[]), TEXT);
        assert_eq!(keep(&["a"]), "# HELP a A\n# TYPE a counter\na{x=\"# HELP \"} 1\n");
        assert_eq!(keep(&["b_sum"]), "# HELP b B\n# TYPE b histogram\nb_sum 1\n");
        assert_eq!(keep(&["b", "none"]), "# HELP b B\n# TYPE b histogram\nb_sum 1\nb_count 2\n");
        assert_eq!(keep(&["c_total"]), keep(&["c"]));
        assert_eq!(keep(&["none"]), "");
        let names = Names::of_query([("name[]", "b_sum"), ("other", "a")]);
        assert!(names.may_contain("b") && !names.may_contain("a") && !names.is_all());
    }
}
