//! The labels that a metric declares, and the only alignment of a sample's labels with them. Every
//! source of samples uses it, so that no value gets the name of another label.

use std::collections::BTreeMap;

use super::catalog::WorkerLabel;
use super::sample_error::SampleError;
use super::text_lines::prometheus_name;

/// The labels of one metric, in the order in which its series have their values.
#[derive(Clone, Copy, Debug)]
pub struct LabelSchema<'a> {
    metric: &'a str,
    labels: &'a [String],
    accepts_appended: bool,
}

impl<'a> LabelSchema<'a> {
    /// Creates the schema of a metric with these labels.
    pub fn new(metric: &'a str, labels: &'a [String]) -> Self {
        Self { metric, labels, accepts_appended: false }
    }

    /// Lets samples have the labels that handlers append to each of them
    /// ([`WorkerLabel::is_appended`]) even if the metric does not declare them.
    #[must_use]
    pub fn accepting_appended(self) -> Self {
        Self { accepts_appended: true, ..self }
    }

    /// Returns the values of the declared labels for a sample with labels by name. The sample's
    /// names are made valid for Prometheus first. `default` returns the value of a label that the
    /// sample does not have.
    ///
    /// # Errors
    /// The sample has a label that is not declared, or one label with two values, or it lacks a
    /// label without a default.
    pub fn align<'v, S: AsRef<str>>(
        &self,
        given: &'v [(S, S)],
        default: impl Fn(&str) -> Option<&'v str>,
    ) -> Result<Vec<&'v str>, SampleError> {
        let mut by_name = BTreeMap::new();
        for (name, value) in given {
            let label = prometheus_name(name.as_ref());
            if !self.labels.iter().any(|declared| *declared == label) {
                if self.accepts_appended && WorkerLabel::is_appended(&label) {
                    continue;
                }
                return Err(SampleError::UnknownLabel {
                    metric: self.metric.to_owned(),
                    label: label.into_owned(),
                    expected: self.labels.to_vec(),
                });
            }
            let value = value.as_ref();
            if by_name.insert(label.clone(), value).is_some_and(|earlier| earlier != value) {
                let metric = self.metric;
                return Err(SampleError::BadValue(format!(
                    "metric `{metric}` got two values for the dimension `{label}`"
                )));
            }
        }
        self.labels
            .iter()
            .map(|label| by_name.get(label.as_str()).copied().or_else(|| default(label)))
            .collect::<Option<_>>()
            .ok_or_else(|| self.wrong_labels(given.iter().map(|(name, _)| name.as_ref())))
    }

    /// Returns the values of the declared labels for a sample with values by position. `defaults`
    /// are the values of the labels that may be omitted, by position; the sample may name only the
    /// first `most` labels.
    ///
    /// If the number of values equals the number of labels without a default, the values belong to
    /// these labels. If it equals the number of labels that handlers do not append, they belong to
    /// those. Otherwise they belong to the first labels.
    ///
    /// # Errors
    /// There are more than `most` values, or a label has neither a value nor a default.
    pub fn align_values<'v>(
        &self,
        values: &[&'v str],
        most: usize,
        defaults: &'v [Option<String>],
    ) -> Result<Vec<&'v str>, SampleError> {
        let is_appended = |label: &str, default: &Option<String>| {
            default.is_some() && WorkerLabel::is_appended(label)
        };
        let labels = || self.labels.iter().zip(defaults);
        let omits_defaults =
            values.len() == labels().filter(|(_, default)| default.is_none()).count();
        let omits_appended = values.len()
            == labels().filter(|(label, default)| !is_appended(label, default)).count();
        let mut values_left = values.iter().copied();
        let aligned: Vec<&str> = labels()
            .filter_map(|(label, default)| {
                let is_omitted = default.is_some() && omits_defaults
                    || omits_appended && is_appended(label, default);
                let given = if is_omitted { None } else { values_left.next() };
                given.or(default.as_deref())
            })
            .collect();
        if aligned.len() == self.labels.len() && values.len() <= most {
            return Ok(aligned);
        }
        Err(self.wrong_labels(values.iter().map(|_| "_")))
    }

    /// Returns the value of each declared label, where `values` belong to `names`; `None` for a
    /// label that has no name there.
    pub(super) fn reorder<'v, N: AsRef<str>, V: AsRef<str>>(
        &self,
        names: &[N],
        values: &'v [V],
    ) -> impl Iterator<Item = Option<&'v str>> {
        self.labels.iter().map(move |label| {
            let at = names.iter().position(|name| name.as_ref() == label)?;
            values.get(at).map(AsRef::as_ref)
        })
    }

    /// Returns the error for a sample with these labels.
    pub(super) fn wrong_labels<'v>(&self, given: impl Iterator<Item = &'v str>) -> SampleError {
        SampleError::WrongLabels {
            metric: self.metric.to_owned(),
            expected: self.labels.to_vec(),
            given: given.map(str::to_owned).collect(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn values_keep_their_names() {
        let check = |given: &[(&str, &str)], declared: &[&str], expected: Result<&[&str], &str>| {
            let declared = names(declared);
            let schema = LabelSchema::new("m", &declared).accepting_appended();
            let aligned =
                schema.align(given, |label| WorkerLabel::is_host(label).then_some("here"));
            match expected {
                Ok(values) => {
                    assert_eq!(aligned.as_deref(), Ok(values), "{given:?} for {declared:?}")
                }
                Err(text) => {
                    let error = aligned.unwrap_err().to_string();
                    assert!(error.contains(text), "{given:?} for {declared:?}: {error}");
                }
            }
        };
        check(&[("b", "2"), ("a", "1")], &["a", "b"], Ok(&["1", "2"]));
        check(&[("a", "1")], &["a", "Hostname"], Ok(&["1", "here"]));
        check(&[("a", "1"), ("Hostname", "there")], &["Hostname", "a"], Ok(&["there", "1"]));
        check(&[("in.step", "1")], &["in_step"], Ok(&["1"]));
        check(&[("a", "1"), ("a", "1")], &["a"], Ok(&["1"]));
        check(
            &[("Level", "Model"), ("a", "1"), ("ModelName", "m"), ("Hostname", "h")],
            &["a"],
            Ok(&["1"]),
        );
        // The same number of labels, and one more or less than the metric has, with and without the
        // host's.
        let unknown = "metric `m` has no dimension `x`, only [a, b]; add it to the metric's \
                       `dimensions` in metrics.yaml";
        check(&[("a", "1"), ("x", "2")], &["a", "b"], Err(unknown));
        check(&[("x", "1"), ("y", "2")], &["a", "b", "Hostname"], Err("no dimension `x`"));
        check(
            &[("a", "1"), ("b", "2"), ("x", "3")],
            &["a", "b", "Hostname"],
            Err("no dimension `x`"),
        );
        check(&[("x", "1")], &[], Err("no dimension `x`, only []"));
        check(&[("a", "1")], &["a", "b"], Err("has the dimensions [a, b], but [a] were given"));
        check(&[("a", "1"), ("a", "2")], &["a"], Err("two values for the dimension `a`"));
    }

    #[test]
    fn values_without_names_belong_to_the_labels_that_have_no_default() {
        let labels = names(&["shop", "model_name", "Hostname"]);
        let schema = LabelSchema::new("m", &labels);
        let defaults = [None, Some("digits".to_owned()), Some("here".to_owned())];
        let check = |values: &[&str], most: usize, expected: Option<[&str; 3]>| {
            let aligned = schema.align_values(values, most, &defaults);
            assert_eq!(
                aligned.as_deref().ok(),
                expected.as_ref().map(<[_; 3]>::as_slice),
                "{values:?}"
            );
        };
        check(&["a"], 3, Some(["a", "digits", "here"]));
        check(&["a", "b"], 3, Some(["a", "b", "here"]));
        check(&["a", "b", "c"], 3, Some(["a", "b", "c"]));
        check(&["a", "b", "c"], 2, None);
        check(&[], 3, None);
        let reordered: Vec<_> = schema.reorder(&["Hostname", "shop"], &["h", "a"]).collect();
        assert_eq!(reordered, [Some("a"), None, Some("h")]);
    }

    proptest! {
        /// Whatever a sample's labels are: each of its values has its own name, or the sample is
        /// refused.
        #[test]
        fn no_value_moves_to_another_name(
            given in prop::collection::vec("[a-e]", 0..6),
            declared in prop::collection::btree_set("[a-e]", 0..6),
        ) {
            let given: Vec<(String, String)> = given.into_iter().map(|name| (name.clone(), format!("value of {name}"))).collect();
            let declared: Vec<String> = declared.into_iter().collect();
            match LabelSchema::new("m", &declared).align(&given, |_| Some("")) {
                Ok(values) => {
                    for (label, value) in declared.iter().zip(values) {
                        let is_given = given.iter().any(|(name, _)| name == label);
                        prop_assert_eq!(value, if is_given { format!("value of {label}") } else { String::new() });
                    }
                    prop_assert!(given.iter().all(|(name, _)| declared.contains(name)));
                }
                Err(_) => prop_assert!(given.iter().any(|(name, _)| !declared.contains(name))),
            }
        }
    }
}
