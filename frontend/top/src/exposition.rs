//! Reads the Prometheus text format 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats).

use std::collections::HashMap;
use std::sync::Arc;

use pharos::printable::printable;

/// The name and the labels of a series: one text, because a server may have a million series. The
/// parts are separated by a character that no part contains, since control characters are escaped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(Box<str>);

const SEPARATOR: char = '\0';

impl Key {
    fn new(name: &str, labels: &[(String, String)]) -> Self {
        let mut text = printable(name).into_owned();
        for part in labels.iter().flat_map(|(label, value)| [label, value]) {
            text.push(SEPARATOR);
            text.push_str(&printable(part));
        }
        Self(text.into())
    }

    /// Returns the name of the sample.
    pub(crate) fn name(&self) -> &str {
        self.0.split(SEPARATOR).next().unwrap_or_default()
    }

    /// Returns the value of a label, fit for a terminal; empty without the label.
    pub(crate) fn label(&self, name: &str) -> &str {
        let mut parts = self.0.split(SEPARATOR).skip(1);
        while let (Some(label), Some(value)) = (parts.next(), parts.next()) {
            if label == name {
                return value;
            }
        }
        ""
    }
}

/// Full name and version of a model.
pub(crate) type ModelKey = (String, String);

/// Returns the model of a series. With `--model-namespacing`, Triton's metrics have the namespace
/// in a label, those of this server in the name of the model.
pub(crate) fn model_key(key: &Key) -> ModelKey {
    let model = match (key.label("namespace"), key.label("model")) {
        (namespace, model) if !namespace.is_empty() && key.name().starts_with("nv_") => {
            format!("{namespace}/{model}")
        }
        (_, model) => model.to_owned(),
    };
    (model, key.label("version").to_owned())
}

/// The series of one sample name.
pub(crate) type Family = Vec<(Arc<Key>, f64)>;

/// Reads a scrape: sample name to its series, in the order of the text. Lines that are not valid
/// are omitted. `known` returns the key of an earlier scrape, which is shared.
pub(crate) fn parse(
    text: &str,
    known: impl Fn(&Key) -> Option<Arc<Key>>,
) -> HashMap<String, Family> {
    let mut families: HashMap<String, Family> = HashMap::new();
    for (key, value) in text.lines().filter_map(sample) {
        let key = known(&key).unwrap_or_else(|| Arc::new(key));
        match families.get_mut(key.name()) {
            Some(family) => family.push((key, value)),
            None => drop(families.insert(key.name().to_owned(), vec![(key, value)])),
        }
    }
    families.values_mut().for_each(Vec::shrink_to_fit);
    families
}

fn sample(text: &str) -> Option<(Key, f64)> {
    let line = text.trim();
    if line.starts_with('#') {
        return None;
    }
    let end = line.find(['{', ' ', '\t'])?;
    let (name, rest) = line.split_at_checked(end)?;
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inner) => labels(inner)?,
        None => (Vec::new(), rest),
    };
    let value = rest.split_ascii_whitespace().next()?;
    Some((Key::new(name, &labels), number(value)?))
}

fn number(text: &str) -> Option<f64> {
    match text {
        "+Inf" => Some(f64::INFINITY),
        "-Inf" => Some(f64::NEG_INFINITY),
        _ => text.parse().ok(),
    }
}

/// The labels of a line, and the rest of it.
type Labels<'a> = (Vec<(String, String)>, &'a str);

/// Reads labels up to the closing brace.
fn labels(mut rest: &str) -> Option<Labels<'_>> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, after) = rest.split_once('=')?;
        let (value, after) = quoted(after.trim_start().strip_prefix('"')?)?;
        labels.push((name.trim().to_owned(), value));
        rest = after;
    }
}

/// Reads a value up to the closing quotation mark.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, text.get(at + 1..)?)),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            _ => value.push(c),
        }
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn one(text: &str) -> (Key, f64) {
        sample(text).unwrap()
    }

    #[test]
    fn reads_names_labels_and_values() {
        let (key, value) = one(r#"a_total{model="m",version="1"} 2.5 1700000000"#);
        assert_eq!(
            (key.name(), key.label("model"), key.label("version"), value),
            ("a_total", "m", "1", 2.5)
        );
        assert_eq!(key.label("other"), "");
        assert_eq!(one("up 1").1, 1.0);
        assert_eq!(one("a{} -Inf").1, f64::NEG_INFINITY);
        assert_eq!(one(r#"a_bucket{le="+Inf",} +Inf"#).1, f64::INFINITY);
    }

    #[test]
    fn labels_may_contain_anything() {
        let (key, value) = one(r#"a{b="x\"} 1,\\\n",c = "}{"} 7"#);
        assert_eq!((key.label("b"), key.label("c"), value), ("x\"} 1,\\\\n", "}{", 7.0));
        let (key, _) = one("a{b=\"\u{202e}\u{1b}[31m\0\u{200b}\"} 1");
        assert_eq!(key.label("b"), "\\u{202e}\\u{1b}[31m\\0\\u{200b}", "a terminal would obey");
    }

    #[test]
    fn invalid_lines_are_omitted() {
        for text in
            ["", "# HELP a b", "a", "a{", "a{b} 1", "a{b=\"c} 1", "a{b=\"c\\", "a x", "a{b=c} 1"]
        {
            assert_eq!(sample(text), None, "{text}");
        }
        let families =
            parse("# TYPE a counter\na{b=\"1\"} 1\nwrong\na{b=\"2\"} 2\nc 3\n", |_| None);
        let values: Vec<f64> = families["a"].iter().map(|(_, value)| *value).collect();
        assert_eq!((values, families.len()), (vec![1.0, 2.0], 2));
    }
}
