//! Matches the labels of a sample with those of its metric's definition, always by name. Every source of samples uses it, so
//! that no value gets the name of another label.

use std::collections::BTreeMap;

use super::catalog::WorkerLabel;
use super::emitter::prometheus_name;
use super::sample_error::SampleError;

/// Returns whether a label of this name gets the host's name if a sample does not give it.
pub fn is_host(label: &str) -> bool {
    WorkerLabel::of(label) == Some(WorkerLabel::Host)
}

/// Returns the values of a metric's declared labels for a sample, in the declared order. The sample's names are made valid for
/// Prometheus first. `is_ignored` names labels that the sample may have in addition, and `default` returns the value of a label
/// that the sample does not have.
///
/// # Errors
/// The sample has a label that is neither declared nor ignored, or one label with two values, or it lacks a label without
/// a default.
pub fn align<'a, S: AsRef<str>>(
    metric: &str,
    given: &'a [(S, S)],
    declared: &[String],
    is_ignored: impl Fn(&str) -> bool,
    default: impl Fn(&str) -> Option<&'a str>,
) -> Result<Vec<&'a str>, SampleError> {
    let mut by_name = BTreeMap::new();
    for (name, value) in given {
        let label = prometheus_name(name.as_ref());
        let is_declared = declared.iter().any(|other| *other == label);
        if !is_declared && is_ignored(&label) {
            continue;
        }
        if !is_declared {
            let label = label.into_owned();
            return Err(SampleError::UnknownLabel { metric: metric.to_owned(), label, expected: declared.to_vec() });
        }
        let value = value.as_ref();
        if by_name.insert(label.clone(), value).is_some_and(|earlier| earlier != value) {
            return Err(SampleError::BadValue(format!("metric `{metric}` got two values for the dimension `{label}`")));
        }
    }
    declared
        .iter()
        .map(|label| by_name.get(label.as_str()).copied().or_else(|| default(label)))
        .collect::<Option<_>>()
        .ok_or_else(|| SampleError::WrongLabels {
            metric: metric.to_owned(),
            expected: declared.to_vec(),
            given: given.iter().map(|(name, _)| name.as_ref().to_owned()).collect(),
        })
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
            let aligned = align("m", given, &names(declared), WorkerLabel::is_appended, |label: &str| {
                is_host(label).then_some("here")
            });
            match expected {
                Ok(values) => assert_eq!(aligned.as_deref(), Ok(values), "{given:?} for {declared:?}"),
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
        check(&[("Level", "Model"), ("a", "1"), ("ModelName", "m"), ("Hostname", "h")], &["a"], Ok(&["1"]));
        // The same number of labels, and one more or less than the metric has, with and without the host's.
        let unknown =
            "metric `m` has no dimension `x`, only [a, b]; add it to the metric's `dimensions` in metrics.yaml";
        check(&[("a", "1"), ("x", "2")], &["a", "b"], Err(unknown));
        check(&[("x", "1"), ("y", "2")], &["a", "b", "Hostname"], Err("no dimension `x`"));
        check(&[("a", "1"), ("b", "2"), ("x", "3")], &["a", "b", "Hostname"], Err("no dimension `x`"));
        check(&[("x", "1")], &[], Err("no dimension `x`, only []"));
        check(&[("a", "1")], &["a", "b"], Err("has the dimensions [a, b], but [a] were given"));
        check(&[("a", "1"), ("a", "2")], &["a"], Err("two values for the dimension `a`"));
    }

    proptest! {
        /// Whatever a sample's labels are: each of its values has its own name, or the sample is refused.
        #[test]
        fn no_value_moves_to_another_name(
            given in prop::collection::vec("[a-e]", 0..6),
            declared in prop::collection::btree_set("[a-e]", 0..6),
        ) {
            let given: Vec<(String, String)> = given.into_iter().map(|name| (name.clone(), format!("value of {name}"))).collect();
            let declared: Vec<String> = declared.into_iter().collect();
            match align("m", &given, &declared, |_| false, |_| Some("")) {
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
